//! `select` and its kin.
#![expect(unsafe_code, reason = "C functions")]

use crate::patience::{self, TimeLimit};
use crate::ready;
use crate::{real, sys};
use libc::{c_int, c_long, fd_set, sigset_t, timespec, timeval};
use rustix::io::Errno;
use std::ptr;
use std::time::Duration;

/// The kernel's events for each of the three sets.
const WANTED: [i16; 3] = [
    libc::POLLIN | libc::POLLRDNORM | libc::POLLRDBAND,
    libc::POLLOUT | libc::POLLWRNORM | libc::POLLWRBAND,
    libc::POLLPRI,
];
/// And what else puts a descriptor into them.
const ALSO: [i16; 3] = [libc::POLLHUP | libc::POLLERR, libc::POLLERR, 0];

/// The caller's three sets.
struct Sets {
    sets: [*mut u64; 3],
    count: usize,
}

impl Sets {
    /// `None` if there is nothing in them that is not the kernel's alone, in a call that waits for this long.
    ///
    /// # Safety
    /// Each is null or has room for `count` bits, in whole words, as the C library demands of its callers.
    unsafe fn new(count: c_int, sets: [*mut fd_set; 3], patience: &TimeLimit) -> Option<Self> {
        let count = usize::try_from(count).ok().filter(|n| *n <= 1 << 20)?;
        let sets = Self { sets: sets.map(|s| s.cast()), count };
        let mut any = false;
        for word in 0..count.div_ceil(64) {
            let mut bits = sets.union(word);
            while bits != 0 {
                any |= ready::concerns((word * 64) as c_int + bits.trailing_zeros() as c_int, patience);
                bits &= bits - 1;
            }
        }
        any.then_some(sets)
    }

    fn word(&self, which: usize, word: usize) -> u64 {
        let set = self.sets[which];
        if set.is_null() {
            return 0;
        }
        let inside = self.count - word * 64;
        let valid = if inside >= 64 { u64::MAX } else { (1 << inside) - 1 };
        // SAFETY: `word * 64 < count`, for which the caller's set has room.
        unsafe { *set.add(word) & valid }
    }

    fn union(&self, word: usize) -> u64 {
        self.word(0, word) | self.word(1, word) | self.word(2, word)
    }

    /// Empties the caller's sets, and puts in what `poll` found. Returns how many bits are set.
    fn put(&self, fds: &[libc::pollfd]) -> c_int {
        for set in self.sets.iter().filter(|s| !s.is_null()) {
            for word in 0..self.count.div_ceil(64) {
                // SAFETY: as in `word`.
                unsafe { *set.add(word) = 0 };
            }
        }
        let mut bits = 0;
        for one in fds {
            let (fd, found) = (one.fd.unsigned_abs() as usize, hits(one));
            for (which, set) in self.sets.iter().enumerate() {
                if found & 1 << which != 0 {
                    // SAFETY: a bit that was set by the caller, so there is room for it.
                    unsafe { *set.add(fd / 64) |= 1 << (fd % 64) };
                    bits += 1;
                }
            }
        }
        bits
    }

    /// # Safety
    /// `mask` is null, or valid for reads until the call ends.
    unsafe fn select(&self, mut patience: TimeLimit, mask: *const sigset_t) -> Result<c_int, Errno> {
        // The time runs on from one turn of the loop to the next.
        let _ = patience.left();
        let all = (0..self.count.div_ceil(64)).map(|w| self.union(w).count_ones() as usize).sum();
        crate::scratch::with_memory(all, libc::pollfd { fd: -1, events: 0, revents: 0 }, |fds| {
            let mut slots = fds.iter_mut();
            for word in 0..self.count.div_ceil(64) {
                let mut bits = self.union(word);
                while bits != 0 {
                    let bit = bits.trailing_zeros();
                    let events = (0..3).filter(|&s| self.word(s, word) >> bit & 1 != 0).map(|s| WANTED[s]);
                    if let Some(slot) = slots.next() {
                        slot.fd = (word * 64) as c_int + bit as c_int;
                        slot.events = events.fold(0, |all, one| all | one);
                    }
                    bits &= bits - 1;
                }
            }
            loop {
                // SAFETY: the mask by this function's contract.
                let found = unsafe { ready::poll(fds, patience, mask) }?;
                if fds.iter().any(|one| one.revents & libc::POLLNVAL != 0) {
                    return Err(Errno::BADF);
                }
                if found == 0 || fds.iter().any(|one| hits(one) != 0) {
                    return Ok(self.put(fds));
                }
                // `poll` tells of ends that `select` has no set for.
                for one in fds.iter_mut().filter(|one| one.revents != 0) {
                    one.fd = -1;
                }
            }
        })
    }
}

/// The sets that a descriptor is in after the call, as bits.
fn hits(one: &libc::pollfd) -> u32 {
    let hit = |which: usize| one.events & WANTED[which] != 0 && one.revents & (WANTED[which] | ALSO[which]) != 0;
    (0..3).filter(|&which| hit(which)).fold(0, |all, which| all | 1 << which)
}

fn answer(result: Result<c_int, Errno>) -> c_int {
    result.unwrap_or_else(|error| {
        sys::set_errno(error);
        -1
    })
}

export! {
    /// `select`
    fn select(count: c_int, r: *mut fd_set, w: *mut fd_set, e: *mut fd_set, timeout: *mut timeval) -> c_int {
        // SAFETY: the caller's time.
        let time = unsafe { timeout.as_mut() };
        let limit = match &time {
            None => Some(None),
            // More microseconds than a second has are taken, unlike elsewhere.
            Some(t) => u64::try_from(t.tv_sec).ok().zip(u64::try_from(t.tv_usec).ok()).map(|(seconds, micros)| {
                Some(Duration::from_secs(seconds).saturating_add(Duration::from_micros(micros)))
            }),
        };
        let patience = limit.map(|limit| limit.map_or(TimeLimit::ENDLESS, TimeLimit::of));
        // SAFETY: the caller's sets.
        let sets = patience.as_ref().and_then(|patience| unsafe { Sets::new(count, [r, w, e], patience) });
        let (Some(sets), Some(mut patience)) = (sets, patience) else {
            // SAFETY: the caller's arguments, passed on.
            return unsafe { real::select(count, r, w, e, timeout) };
        };
        let _ = patience.left();
        // SAFETY: no mask.
        let found = unsafe { sets.select(patience, ptr::null()) };
        if let (Some(time), Some(left)) = (time, patience.left()) {
            time.tv_sec = left.as_secs().cast_signed();
            time.tv_usec = i64::from(left.subsec_micros());
        }
        answer(found)
    }

    /// `pselect`
    fn pselect(
        count: c_int,
        r: *mut fd_set,
        w: *mut fd_set,
        e: *mut fd_set,
        timeout: *const timespec,
        mask: *const sigset_t,
    ) -> c_int {
        // SAFETY: the caller's time.
        let patience = TimeLimit::from_timespec(unsafe { timeout.as_ref() });
        // SAFETY: the caller's sets.
        let sets = patience.as_ref().and_then(|patience| unsafe { Sets::new(count, [r, w, e], patience) });
        match (sets, patience) {
            // SAFETY: the caller's mask, as the C library demands.
            (Some(sets), Some(patience)) => answer(unsafe { sets.select(patience, mask) }),
            // SAFETY: the caller's arguments, passed on.
            _ => unsafe { real::pselect(count, r, w, e, timeout, mask) },
        }
    }
}

/// The last argument of the system call `pselect6`.
#[repr(C)]
pub(super) struct MaskArgument {
    mask: *const u64,
    size: usize,
}

impl MaskArgument {
    /// The C library's form of the mask; the outer `None` if the kernel would not take it.
    fn to_set(&self) -> Option<Option<sigset_t>> {
        if self.mask.is_null() {
            return Some(None);
        }
        if self.size != size_of::<u64>() || !sys::is_readable(self.mask, 1) {
            return None;
        }
        // SAFETY: all zeros is a valid value.
        let mut set: sigset_t = unsafe { std::mem::zeroed() };
        // SAFETY: 8 readable bytes; the C library's set begins with the kernel's, and is larger.
        unsafe { (&raw mut set).cast::<u64>().write(self.mask.read_unaligned()) };
        Some(Some(set))
    }
}

/// The system call `pselect6`. In contrast to `pselect`, it stores the time that is left.
///
/// # Safety
/// As the system call; `kernel` makes it.
pub(super) unsafe fn pselect6(
    count: c_int,
    sets: [*mut fd_set; 3],
    timeout: *mut timespec,
    mask: *const MaskArgument,
    kernel: impl FnOnce() -> c_long,
) -> c_long {
    let mask = match sys::is_readable(mask, 1) {
        // SAFETY: readable, and the caller's.
        true => unsafe { mask.read_unaligned() }.to_set(),
        false if mask.is_null() => Some(None),
        false => None,
    };
    // SAFETY: the caller's time.
    let patience = TimeLimit::from_timespec(unsafe { timeout.as_ref() });
    // SAFETY: the caller's sets.
    let sets = patience.as_ref().and_then(|patience| unsafe { Sets::new(count, sets, patience) });
    let (Some(mask), Some(sets), Some(mut patience)) = (mask, sets, patience) else { return kernel() };
    let _ = patience.left();
    // SAFETY: no mask, or one that outlives the call.
    let found = unsafe { sets.select(patience, mask.as_ref().map_or(ptr::null(), ptr::from_ref)) };
    // SAFETY: the caller's time.
    if let (Some(time), Some(left)) = (unsafe { timeout.as_mut() }, patience.left()) {
        *time = patience::timespec(left);
    }
    answer(found).into()
}

#[cfg(test)]
mod tests;
