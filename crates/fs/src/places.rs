//! Places for connections and threads, of which each user may have a share.

use crate::mutex::lock;
use partywall::User;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

/// The user that places are counted for; `None` for all unverified clients.
pub(crate) type CountedUser = Option<(Option<User>, bool)>;

/// Places that are taken, by their users.
#[derive(Debug)]
pub(crate) struct UserPlaces {
    most: usize,
    most_unverified: usize,
    taken: Mutex<HashMap<CountedUser, usize>>,
}

/// A place that is taken until this is dropped.
#[derive(Debug)]
pub(crate) struct UserPlace(Arc<UserPlaces>, CountedUser);

impl UserPlaces {
    /// This many places. A user whom the broker reports may have a quarter of them. All unverified clients together may have `most_unverified`.
    pub(crate) fn new(most: usize, most_unverified: usize) -> Arc<Self> {
        Arc::new(Self { most, most_unverified, taken: Mutex::default() })
    }

    /// Takes a place. Returns `None` if all are taken, or all that this user may have.
    pub(crate) fn take(self: &Arc<Self>, user: CountedUser) -> Option<UserPlace> {
        let mut taken = lock(&self.taken);
        let all: usize = taken.values().sum();
        let most = if user.is_some() { share_of_user(self.most) } else { self.most_unverified };
        if all >= self.most || taken.get(&user).is_some_and(|count| *count >= most) {
            return None;
        }
        *taken.entry(user).or_default() += 1;
        Some(UserPlace(Arc::clone(self), user))
    }

    /// How many places are taken.
    #[cfg(test)]
    pub(crate) fn taken(&self) -> usize {
        lock(&self.taken).values().sum()
    }
}

impl Drop for UserPlace {
    fn drop(&mut self) {
        let mut taken = lock(&self.0.taken);
        if let Some(count) = taken.get_mut(&self.1) {
            *count -= 1;
            if *count == 0 {
                taken.remove(&self.1);
            }
        }
    }
}

/// The share of a limit that all peers of one user may use.
pub(crate) fn share_of_user(most: usize) -> usize {
    most.div_ceil(4)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn user_gets_a_quarter_of_the_places_and_returns_them() {
        let places = UserPlaces::new(8, 8);
        let user = Some((Some(User::Host(1)), true));
        let first = places.take(user);
        let _second = places.take(user).expect("two of eight");
        assert!(places.take(user).is_none(), "a third of eight");
        drop(first);
        let _third = places.take(user).expect("the first was returned");
        let others: Vec<_> = std::iter::from_fn(|| places.take(None)).collect();
        assert_eq!(others.len(), 6, "unverified clients get all others");
    }

    #[test]
    fn unverified_clients_leave_places_to_users() {
        let places = UserPlaces::new(8, 4);
        let unverified: Vec<_> = std::iter::from_fn(|| places.take(None)).collect();
        assert_eq!(unverified.len(), 4);
        assert!(places.take(Some((Some(User::Host(1)), true))).is_some());
    }
}
