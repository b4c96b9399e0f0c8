//! Calls of a thread that are in the kernel with a connection, and will never come back.
//!
//! A signal handler that leaves by `longjmp` abandons the call that it has interrupted. That call would count as one in the kernel
//! permanently: its connection would never be shown to the broker ([`super::bring_up::is_quiet`]), and its block would never be reused. So each
//! thread records the connections that it enters. If it begins another call and no frame of its stack was interrupted by a signal, its
//! earlier records are of abandoned calls.
//!
//! A handler that changes to another stack of its thread (`swapcontext`) looks the same, though the call goes on later. Programs that switch
//! stacks in handlers are not supported on connections that are in such a call.
//!
//! Some abandoned calls cannot be recorded or detected and still count permanently: more than [`MOST`] connections in one `poll`, a jump
//! between two instructions of this module, and a thread that ends without another call.

use super::Conn;
use std::sync::atomic::{AtomicU32, Ordering, compiler_fence};

/// Connections that one thread is in the kernel with, of which this is noted.
const MOST: usize = 64;

/// The connections that one thread has entered. Handlers of this thread change it between any two instructions, and restore it unless
/// they jump.
struct EnteredConns {
    count: AtomicU32,
    /// Places of connections in the arena, plus 1; 0 for none.
    places: [AtomicU32; MOST],
}

thread_local! {
    static ENTERED: EnteredConns =
        const { EnteredConns { count: AtomicU32::new(0), places: [const { AtomicU32::new(0) }; MOST] } };
}

impl EnteredConns {
    fn noted(&self) -> &[AtomicU32] {
        let count = self.count.load(Ordering::Relaxed) as usize;
        self.places.get(..count).unwrap_or(&self.places)
    }

    fn note(&self, index: u16) {
        let count = self.count.load(Ordering::Relaxed);
        let Some(place) = self.places.get(count as usize) else { return };
        // First, so that a handler in between takes another place.
        self.count.store(count + 1, Ordering::Relaxed);
        compiler_fence(Ordering::SeqCst);
        place.store(u32::from(index) + 1, Ordering::Relaxed);
    }

    fn take_back(&self, index: u16) {
        let number = u32::from(index) + 1;
        if let Some(place) = self.noted().iter().rev().find(|place| place.load(Ordering::Relaxed) == number) {
            place.store(0, Ordering::Relaxed);
        }
        compiler_fence(Ordering::SeqCst);
        let left = self.noted().iter().rposition(|place| place.load(Ordering::Relaxed) != 0).map_or(0, |last| last + 1);
        self.count.store(left as u32, Ordering::Relaxed);
    }

    #[cold]
    fn end_abandoned(&self) {
        if crate::frames::may_be_in_handler() {
            return;
        }
        for place in self.noted() {
            if let Some(index) = place.swap(0, Ordering::Relaxed).checked_sub(1)
                && let Some(conn) = Conn::at(index as u16)
            {
                conn.kernel.leave();
            }
        }
        self.count.store(0, Ordering::Relaxed);
    }
}

/// This thread is about to call the kernel with the connection at `index`, and counts as there.
pub(super) fn note(index: u16) {
    let _ = ENTERED.try_with(|entered| entered.note(index));
}

/// It has come back, and counts still.
pub(super) fn take_back(index: u16) {
    let _ = ENTERED.try_with(|entered| entered.take_back(index));
}

/// A call begins. Unless it is made by a signal handler, all that this thread was in the kernel with was abandoned.
#[inline]
pub(crate) fn end_abandoned() {
    let _ = ENTERED.try_with(|entered| {
        if entered.count.load(Ordering::Relaxed) != 0 {
            entered.end_abandoned();
        }
    });
}
