//! The event data of this library's registrations in the kernel's sets, in place of the program's own.
//!
//! ```text
//!    63                       24 23     2 1  0
//!   +---------------------------+--------+----+
//!   |   this program's own tag  | number |kind|
//!   +---------------------------+--------+----+
//! ```
//!
//! Programs keep a pointer or a small number there. The tag is neither: its upper 16 bits are those of no address, and the
//! rest is random. A program that uses the same value is detected when it registers (see [`Tag::is_ours`]).
#![expect(unsafe_code, reason = "the C library's random numbers come through a pointer")]

use std::sync::atomic::{AtomicU64, Ordering};

/// Bits of a number and a kind.
const NUMBER: u32 = 22;
const KIND: u32 = 2;
/// Registrations have numbers below this.
pub(super) const NUMBERS: usize = 1 << NUMBER;

/// The subject of an event of ours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Tag {
    /// The socket of a registration.
    Socket(u32),
    /// The link of a registration.
    Link(u32),
    /// The set's own bell.
    Bell,
    /// A UDP socket with `EPOLLONESHOT`, by the number of this time that it is armed.
    Datagrams(u32),
}

static OWN: AtomicU64 = AtomicU64::new(0);

#[inline]
fn own() -> u64 {
    match OWN.load(Ordering::Relaxed) {
        0 => make(),
        tag => tag,
    }
}

#[cold]
fn make() -> u64 {
    let mut random = 0u64;
    // SAFETY: writes at most these eight bytes.
    let got = unsafe { libc::getrandom(std::ptr::from_mut(&mut random).cast(), 8, libc::GRND_NONBLOCK) };
    if got != 8 {
        // Before the kernel's pool is ready there is the clock; all that is asked is to be unlike the program's numbers.
        random = (crate::sys::now().as_nanos() as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
    // Neither the lower half of the addresses nor the upper one.
    let tag = (0x5057 << 48 | random >> 16) & !(NUMBERS as u64 * 4 - 1);
    match OWN.compare_exchange(0, tag, Ordering::Relaxed, Ordering::Relaxed) {
        Ok(_) => tag,
        Err(first) => first,
    }
}

impl Tag {
    /// The event data to register.
    pub(super) fn data(self) -> u64 {
        let (number, kind) = match self {
            Self::Socket(n) => (n, 0),
            Self::Link(n) => (n, 1),
            Self::Bell => (0, 2),
            Self::Datagrams(n) => (n, 3),
        };
        own() | u64::from(number) << KIND | kind
    }

    /// Whether a number that the kernel gave back, or that the program wants to register, is one of these.
    #[inline]
    pub(super) fn is_ours(data: u64) -> bool {
        (data ^ own()) >> (NUMBER + KIND) == 0
    }

    /// The subject of an event, or `None` if it is the program's own.
    #[inline]
    pub(super) fn of(data: u64) -> Option<Self> {
        if !Self::is_ours(data) {
            return None;
        }
        let number = (data as u32 >> KIND) & (NUMBERS as u32 - 1);
        Some(match data & 3 {
            0 => Self::Socket(number),
            1 => Self::Link(number),
            2 => Self::Bell,
            _ => Self::Datagrams(number),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tag_survives_round_trip() {
        for tag in [Tag::Socket(0), Tag::Socket(NUMBERS as u32 - 1), Tag::Link(77), Tag::Bell, Tag::Datagrams(9)] {
            assert_eq!(Tag::of(tag.data()), Some(tag));
        }
    }

    #[test]
    fn event_data_of_program_is_not_decoded_as_tag() {
        let local = 0u8;
        let numbers = [0, 1, 7, u64::from(u32::MAX), u64::MAX, std::ptr::from_ref(&local).addr() as u64, 1 << 63];
        for n in numbers {
            assert_eq!(Tag::of(n), None, "{n:#x}");
        }
    }
}
