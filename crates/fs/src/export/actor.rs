//! The user that a request is executed as (protocol N6).

use partywall::User;
use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::process::{Gid, geteuid, umask};
use std::cell::RefCell;
use std::ffi::CString;
use std::sync::Arc;

/// The user and the group for clients without an identity.
const NOBODY: u32 = 65534;

/// The users that a server which runs as root lets its clients act as.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Squash {
    /// Every client acts as the anonymous user (`nobody`).
    All,
    /// Root is squashed. A client on this host that does not run as root acts as its own user; one that does names the user of each
    /// request. Clients without a verified identity, over TCP and in virtual machines, act as the anonymous user.
    #[default]
    Root,
    /// Each request names its user, of any client, and root is root.
    None,
}

/// The user that a thread acts as when it executes a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Actor {
    /// The server's own user: the only one if the server does not run as root.
    Server,
    /// Another user, with this group and these further groups.
    Other { uid: u32, gid: u32, groups: Arc<[u32]> },
}

/// The identity behind the requests of a session.
#[derive(Debug, Clone)]
pub(crate) enum ClientActor {
    /// Every request is executed as the same user.
    Fixed(Actor),
    /// Each request names its user. If `squash_root` is set, root becomes the anonymous user.
    Names { squash_root: bool },
}

fn nobody() -> Actor {
    Actor::Other { uid: NOBODY, gid: NOBODY, groups: Arc::from([]) }
}

impl ClientActor {
    /// The rule for a client: `user` is the identity that the broker reports, `None` for an unverified client.
    pub(crate) fn judge(user: Option<User>, squash: Squash) -> Self {
        if !geteuid().is_root() {
            return Self::Fixed(Actor::Server);
        }
        match (squash, user.and_then(User::uid)) {
            (Squash::All, _) => Self::Fixed(nobody()),
            (Squash::None, _) => Self::Names { squash_root: false },
            (Squash::Root, Some(0)) => Self::Names { squash_root: true },
            (Squash::Root, Some(uid)) => Self::Fixed(with_groups(uid)),
            (Squash::Root, None) => Self::Fixed(nobody()),
        }
    }

    /// The actor of a request that names this user and group.
    pub(crate) fn actor(&self, uid: u32, gid: u32) -> Actor {
        match self {
            Self::Fixed(actor) => actor.clone(),
            Self::Names { squash_root: true } if uid == 0 => nobody(),
            Self::Names { squash_root: true } if gid == 0 => Actor::Other { uid, gid: NOBODY, groups: Arc::from([]) },
            Self::Names { .. } if uid == 0 && gid == 0 => Actor::Server,
            Self::Names { .. } => Actor::Other { uid, gid, groups: Arc::from([]) },
        }
    }

    /// The bits of a mode that a request of this client may set. Set-user-ID and set-group-ID would lend a user or a group that is not
    /// the client's own (the server's, or the anonymous one) to all who execute the file.
    pub(crate) fn permitted_mode(&self, actor: &Actor, mode: u32) -> u32 {
        let own = match (self, actor) {
            (Self::Fixed(Actor::Server), _) => 0,
            (Self::Fixed(_) | Self::Names { .. }, Actor::Server) => SET_USER_ID | SET_GROUP_ID,
            (_, Actor::Other { uid: NOBODY, .. }) => 0,
            (_, Actor::Other { gid: NOBODY, .. }) => SET_USER_ID,
            (_, Actor::Other { .. }) => SET_USER_ID | SET_GROUP_ID,
        };
        mode & (WITHOUT_SET_ID | own)
    }
}

/// The permission bits without set-user-ID and set-group-ID.
const WITHOUT_SET_ID: u32 = 0o1777;
const SET_USER_ID: u32 = 0o4000;
const SET_GROUP_ID: u32 = 0o2000;

/// A user of this host with the groups that the host's user database has for it.
fn with_groups(uid: u32) -> Actor {
    let known = nix::unistd::User::from_uid(nix::unistd::Uid::from_raw(uid)).ok().flatten();
    let Some(user) = known else { return Actor::Other { uid, gid: NOBODY, groups: Arc::from([]) } };
    let groups = CString::new(user.name).ok().and_then(|name| nix::unistd::getgrouplist(&name, user.gid).ok());
    let groups = groups.unwrap_or_default().iter().map(|gid| gid.as_raw()).collect();
    Actor::Other { uid, gid: user.gid.as_raw(), groups }
}

/// The known ids of a thread.
#[derive(Debug, PartialEq, Eq)]
enum ThreadActor {
    /// It has had no request yet. It has the ids of the thread that started it, which may act as another user.
    Fresh,
    /// It acts as this user.
    Known(Actor),
    /// A change of its ids has failed midway.
    Unknown,
}

thread_local! {
    static CURRENT: RefCell<ThreadActor> = const { RefCell::new(ThreadActor::Fresh) };
}

/// Makes this thread act as `actor` until it is called again: with its file system ids, its groups, and no mask for new files.
///
/// The kernel takes the capabilities that override permissions from a thread whose file system id is not root's, and gives them back with it.
pub(crate) fn act_as(actor: &Actor) -> Result<(), Errno> {
    CURRENT.with_borrow_mut(|current| {
        if matches!(&*current, ThreadActor::Known(known) if known == actor) {
            return Ok(());
        }
        if *current == ThreadActor::Fresh {
            // The mask belongs to the process unless the thread takes its own.
            nix::sched::unshare(nix::sched::CloneFlags::CLONE_FS).map_err(|e| Errno::from_raw_os_error(e as i32))?;
            umask(Mode::empty());
        }
        // A server that does not run as root has no thread with other ids. The effective id stays root's while a thread acts as another user.
        if *actor == Actor::Server && *current == ThreadActor::Fresh && !geteuid().is_root() {
            *current = ThreadActor::Known(Actor::Server);
            return Ok(());
        }
        let is_fresh = *current == ThreadActor::Fresh;
        // From here on until all ids are changed.
        *current = ThreadActor::Unknown;
        let own = [];
        let (uid, gid, groups) = match actor {
            Actor::Server => (0, 0, &own[..]),
            Actor::Other { uid, gid, groups } => (*uid, *gid, &groups[..]),
        };
        // As the server first, which may change its groups.
        nix::unistd::setfsuid(nix::unistd::Uid::from_raw(0));
        let groups: Vec<Gid> = groups.iter().map(|gid| Gid::from_raw(*gid)).collect();
        match rustix::thread::set_thread_groups(&groups) {
            // A server without that right, as in some containers, has no thread with other ids or groups.
            Err(Errno::PERM) if is_fresh && *actor == Actor::Server => {
                *current = ThreadActor::Known(Actor::Server);
                return Ok(());
            }
            changed => changed?,
        }
        nix::unistd::setfsgid(nix::unistd::Gid::from_raw(gid));
        nix::unistd::setfsuid(nix::unistd::Uid::from_raw(uid));
        // Neither call reports a failure; a second one returns the id that is in force.
        let now = nix::unistd::setfsuid(nix::unistd::Uid::from_raw(uid)).as_raw();
        let group_now = nix::unistd::setfsgid(nix::unistd::Gid::from_raw(gid)).as_raw();
        if (now, group_now) != (uid, gid) {
            return Err(Errno::PERM);
        }
        *current = ThreadActor::Known(actor.clone());
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(actor: &Actor) -> (u32, u32) {
        match actor {
            Actor::Server => (0, 0),
            Actor::Other { uid, gid, .. } => (*uid, *gid),
        }
    }

    #[test]
    fn mode_lends_only_ids_that_are_the_clients_own() {
        let other = |uid, gid| Actor::Other { uid, gid, groups: Arc::from([]) };
        let names = ClientActor::Names { squash_root: true };
        let permitted = |client: &ClientActor, actor: Actor| client.permitted_mode(&actor, 0o107_777);
        assert_eq!(permitted(&ClientActor::Fixed(Actor::Server), Actor::Server), 0o1777);
        assert_eq!(permitted(&ClientActor::Fixed(nobody()), nobody()), 0o1777);
        assert_eq!(permitted(&names, nobody()), 0o1777);
        assert_eq!(permitted(&names, other(1000, NOBODY)), 0o5777);
        assert_eq!(permitted(&names, other(1000, 1000)), 0o7777);
        assert_eq!(permitted(&ClientActor::Names { squash_root: false }, Actor::Server), 0o7777);
    }

    #[test]
    fn failed_id_change_blocks_thread_for_every_actor() {
        use rustix::thread::{CapabilitySet, capabilities, set_capabilities};
        if !geteuid().is_root() {
            return;
        }
        let outcome = std::thread::spawn(|| {
            let other = |uid| Actor::Other { uid, gid: uid, groups: Arc::from([]) };
            act_as(&other(1234)).unwrap();
            act_as(&Actor::Server).unwrap();
            act_as(&other(1234)).unwrap();
            // Capabilities are the thread's own.
            let mut sets = capabilities(None).unwrap();
            sets.effective.remove(CapabilitySet::SETGID);
            set_capabilities(None, sets).unwrap();
            [other(1235), other(1234), Actor::Server].map(|actor| act_as(&actor))
        });
        assert_eq!(outcome.join().unwrap(), [Err(Errno::PERM); 3]);
    }

    #[test]
    fn new_thread_acts_as_server_beneath_thread_of_other_user() {
        if !geteuid().is_root() {
            return;
        }
        let ids = || {
            // An id that the kernel does not have changes nothing.
            let uid = nix::unistd::setfsuid(nix::unistd::Uid::from_raw(u32::MAX)).as_raw();
            let gid = nix::unistd::setfsgid(nix::unistd::Gid::from_raw(u32::MAX)).as_raw();
            (uid, gid, nix::unistd::getgroups().unwrap())
        };
        let outcome = std::thread::spawn(move || {
            act_as(&Actor::Other { uid: 1234, gid: 1235, groups: Arc::from([1236]) }).unwrap();
            let beneath = std::thread::spawn(move || {
                let inherited = ids();
                act_as(&Actor::Server).unwrap();
                (inherited, ids())
            });
            beneath.join().unwrap()
        });
        let (inherited, own) = outcome.join().unwrap();
        assert_eq!(inherited, (1234, 1235, vec![nix::unistd::Gid::from_raw(1236)]));
        assert_eq!(own, (0, 0, Vec::new()));
    }

    #[test]
    fn client_root_maps_to_anonymous_uid_unless_squash_is_off() {
        if !geteuid().is_root() {
            assert!(matches!(ClientActor::judge(Some(User::Host(0)), Squash::None), ClientActor::Fixed(Actor::Server)));
            return;
        }
        let ask = |user, squash, uid, gid| ids(&ClientActor::judge(user, squash).actor(uid, gid));
        let root = Some(User::Host(0));
        assert_eq!(ask(root, Squash::Root, 0, 0), (NOBODY, NOBODY));
        assert_eq!(ask(root, Squash::Root, 1000, 1001), (1000, 1001));
        assert_eq!(ask(root, Squash::Root, 1000, 0), (1000, NOBODY));
        assert_eq!(ask(root, Squash::None, 0, 0), (0, 0));
        assert_eq!(ask(root, Squash::All, 1000, 1000), (NOBODY, NOBODY));
        // A user cannot name another one, and unverified clients cannot name any.
        assert_eq!(ask(Some(User::Host(54_321)), Squash::Root, 0, 0).0, 54_321);
        assert_eq!(ask(None, Squash::Root, 1000, 1000), (NOBODY, NOBODY));
        let machine = partywall::MachineId::new(3).map(User::Machine);
        assert_eq!(ask(machine, Squash::Root, 1000, 1000), (NOBODY, NOBODY));
    }
}
