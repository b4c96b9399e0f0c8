//! The processes that hold a connection: those that have a descriptor of it open.

use crate::sys;
use std::sync::atomic::{AtomicU32, Ordering};

/// Processes by number; 0 is an empty place. More than there are places are counted as one that is always alive.
#[derive(Debug)]
pub(crate) struct Holders {
    places: [AtomicU32; 7],
    /// Set permanently when the places did not suffice.
    crowded: AtomicU32,
}

impl Holders {
    /// Resets the block to the holder `me` alone. No other thread knows the block yet.
    pub(crate) fn own(&self, me: u32) {
        for place in &self.places[1..] {
            place.store(0, Ordering::Relaxed);
        }
        self.crowded.store(0, Ordering::Relaxed);
        // EDGE holder: releases the places, which were cleared; acquired by each search of them.
        self.places[0].store(me, Ordering::Release);
    }

    /// One more process, which need not exist yet. A process that has ended leaves its place to others.
    pub(crate) fn add(&self, process: u32) {
        let take = |place: &AtomicU32, from| {
            // EDGE holder: acquires the place from the one that left it, and releases it as taken.
            place.compare_exchange(from, process, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        };
        if self.places.iter().any(|place| take(place, 0)) {
            return;
        }
        for place in &self.places {
            // EDGE holder: acquires from the process that entered itself.
            let holder = place.load(Ordering::Acquire);
            if !lives(holder) && take(place, holder) {
                return;
            }
        }
        self.crowded.store(1, Ordering::Relaxed);
    }

    /// Replaces the mark of a child that was not born yet by its number.
    pub(crate) fn rename(&self, from: u32, to: u32) {
        for place in &self.places {
            // EDGE holder: acquires the parent's mark, and releases the child's number.
            if place.compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                return;
            }
        }
    }

    /// More hold it than are known, permanently.
    pub(crate) fn crowd(&self) {
        // A flag alone: a thread that reads it needs nothing else of what this process did before.
        self.crowded.store(1, Ordering::Relaxed);
    }

    /// One process less. Returns whether any living one is left.
    pub(crate) fn leave(&self, process: u32) -> bool {
        // This process's own place is freed last, so that no process takes the block before this is decided.
        let others = self.has_others(process);
        for place in &self.places {
            // EDGE holder: releases what this process did with the connection; acquired in `Holders::has_others`.
            if place.compare_exchange(process, 0, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                break;
            }
        }
        others
    }

    /// Whether a living process other than this one holds it.
    pub(crate) fn has_others(&self, process: u32) -> bool {
        self.crowded.load(Ordering::Relaxed) != 0
            // EDGE holder: acquires from processes that have left: what they did with the connection is over.
            || self.places.iter().map(|p| p.load(Ordering::Acquire)).any(|p| p != process && lives(p))
    }
}

/// Numbers with this bit stand for a child that is about to be born.
pub(crate) const UNBORN: u32 = 1 << 31;

fn lives(process: u32) -> bool {
    process != 0 && (process & UNBORN != 0 || sys::is_alive(process))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn none() -> Holders {
        Holders { places: [const { AtomicU32::new(0) }; 7], crowded: AtomicU32::new(0) }
    }

    #[test]
    fn last_living_holder_has_no_others() {
        let me = crate::process::kernel_pid();
        let h = none();
        h.own(me);
        assert!(!h.has_others(me));
        h.add(me | UNBORN);
        assert!(h.has_others(me), "a child that is being born counts");
        // Numbers of processes stay below 2^22.
        h.rename(me | UNBORN, 0x3f_ffff);
        assert!(!h.has_others(me), "that one is dead");
        assert!(!h.leave(me));
    }

    #[test]
    fn dead_processes_leave_their_places_to_others() {
        let me = crate::process::kernel_pid();
        let h = none();
        h.own(me);
        for n in 0..20 {
            // No process has such a number.
            h.add(0x3f_fff0 + n);
        }
        assert!(!h.has_others(me), "twenty children have come and gone");
        h.add(me | UNBORN);
        assert!(h.has_others(me));
        assert!(h.leave(me), "its own place was not taken");
    }

    #[test]
    fn crowd_of_unknown_holders_always_has_others() {
        let h = none();
        for n in 0..8 {
            h.add((0x3f_fff0 + n) | UNBORN);
        }
        assert!(h.has_others(1));
        let me = crate::process::kernel_pid();
        h.own(me);
        assert!(!h.has_others(me));
        h.crowd();
        assert!(h.has_others(me) && h.leave(me), "somebody unknown has it");
    }
}
