//! A place for something that a module above this one provides: set once, before it is first needed.
//!
//! A module declares what it needs of the modules above it as a trait or a function, and keeps one of these. So it names none of
//! them. A lock would not do, because `connect` may set it in a signal handler that has interrupted the same call.
#![expect(unsafe_code, reason = "turns a stored address back into the reference that it was")]

use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

/// A reference to a static, or nothing yet.
#[derive(Debug)]
pub(crate) struct Installed<T: 'static>(AtomicPtr<T>);

impl<T: Sync> Installed<T> {
    /// Nothing is installed.
    pub(crate) const fn new() -> Self {
        Self(AtomicPtr::new(ptr::null_mut()))
    }

    /// Installs it. May be called again with the same value.
    pub(crate) fn set(&self, it: &'static T) {
        let address = ptr::from_ref(it).cast_mut();
        if self.0.load(Ordering::Relaxed) != address {
            self.0.store(address, Ordering::Relaxed);
        }
    }

    /// The installed value.
    #[inline]
    pub(crate) fn get(&self) -> Option<&'static T> {
        // SAFETY: null, or the address of a `&'static T` that `set` was given. It is only read through, `T` is `Sync`, and the
        // library whose static it is was initialised as a whole when it was loaded, so that no ordering is needed to see its value.
        unsafe { self.0.load(Ordering::Relaxed).as_ref() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn installed_value_is_found_and_replaced() {
        static PLACE: Installed<&str> = Installed::new();
        assert_eq!(PLACE.get(), None);
        PLACE.set(&"one");
        PLACE.set(&"two");
        assert_eq!(PLACE.get(), Some(&"two"));
    }
}
