//! Data of writes that lies in a group (protocol E4): the exporter reads it there. What a back end has written into its own buffer, and what
//! its machine sends down from another back end's buffer, is named and not copied.
//!
//! ```text
//!   machine a      back end for a            machine b            back end for b          machine c
//!   write  ------- one copy ===> buffer      exporter, O_DIRECT   names the buffer  --->  exporter
//!                                  ^-- read in place --'   '-- b's address of it             '-- reads it in place
//! ```

use crate::chain::BufferPiece;
use crate::disk::image::ALIGN;
use partywall::{BorrowedPart, Buffer, BufferPart, Group, MachineWindow};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Between two questions to the broker about windows, at least.
const PAUSE: Duration = Duration::from_secs(1);

/// Data of one write.
#[derive(Debug)]
pub(super) enum GroupData {
    /// This process has copied it into an own buffer.
    Own(Buffer),
    /// It lies in buffers of other back ends, which keep it until it is durable (protocol E4.2).
    Others(Vec<BorrowedPart>),
}

impl GroupData {
    /// Its bytes as the members of the group name them.
    pub(super) fn parts(&self) -> Vec<BufferPart> {
        match self {
            Self::Own(buffer) => vec![buffer.part()],
            Self::Others(parts) => parts.iter().map(BorrowedPart::part).collect(),
        }
    }

    /// Copies it, if it has as many bytes.
    pub(super) fn copy_to(&self, room: &mut [u8]) -> bool {
        match self {
            Self::Own(buffer) => {
                let fits = room.len() == buffer.len();
                if fits {
                    room.copy_from_slice(buffer);
                }
                fits
            }
            Self::Others(parts) => {
                let mut at = 0;
                for part in parts {
                    at += part.copy_to(0, room.get_mut(at..).unwrap_or_default());
                }
                at == room.len()
            }
        }
    }
}

/// The windows of a group in the machine that a back end serves.
#[derive(Debug)]
pub(super) struct PassedWindows {
    group: Group,
    machine: Option<String>,
    known: WindowCache,
}

impl PassedWindows {
    /// Of the machine, if there is one that is a member.
    pub(super) fn new(group: Group, machine: Option<String>) -> Self {
        Self { group, machine, known: WindowCache::default() }
    }

    pub(super) fn group(&self) -> &Group {
        &self.group
    }

    /// The machine may have the windows elsewhere from now on: another front end has come, or the machine's memory changes.
    pub(super) fn forget(&self) {
        self.known.forget();
    }

    /// How often the windows were forgotten.
    #[cfg(test)]
    pub(super) fn forgotten(&self) -> u64 {
        self.known.known().forgotten
    }

    /// As [`WindowCache::look`]. Nothing is found without a machine.
    fn look<T>(
        &self,
        piece: &BufferPiece,
        is_for_passing: bool,
        take: impl FnMut(&MachineWindow, u64) -> Option<T>,
    ) -> Option<T> {
        let machine = self.machine.as_deref()?;
        let ask = || {
            self.group
                .windows_in(machine)
                .inspect_err(|error| tracing::warn!(machine, %error, "the windows of the machine are not known"))
        };
        self.known.look(piece, is_for_passing, ask, take)
    }

    /// Whether bytes that have not been found since then are in no window. Before there is an answer of the broker to a question that began later,
    /// they may be in one. There is none without a machine.
    pub(super) fn is_answered(&self, since: Option<Instant>) -> bool {
        self.machine.is_none() || since.is_some_and(|since| self.known.is_answered(since))
    }

    /// Copies bytes that the machine has in the window of any member.
    pub(super) fn copy(&self, piece: &BufferPiece, to: &mut [u8]) -> bool {
        self.look(piece, false, |window, address| self.group.copy_at(window, address, to).then_some(())).is_some()
    }

    /// The buffers of other back ends that a piece of the machine's memory is in, mapped here.
    fn borrow(&self, piece: &BufferPiece) -> Option<BorrowedPart> {
        let length = piece.length as u64;
        let part = self.look(piece, true, |window, address| self.group.part_at(window, address, length))?;
        self.group.borrow(&part).ok()
    }

    /// All pieces, each aligned as unbuffered access needs it.
    pub(super) fn borrow_all(&self, pieces: &[BufferPiece]) -> Option<Vec<BorrowedPart>> {
        let is_aligned = |piece: &BufferPiece| (piece.address.0 | piece.length as u64).is_multiple_of(ALIGN as u64);
        let joined = join(pieces);
        joined.iter().map(|piece| is_aligned(piece).then(|| self.borrow(piece))?).collect()
    }
}

/// Where the machine has the windows, as the broker answered last.
#[derive(Debug, Default)]
struct WindowCache(Mutex<KnownWindows>);

#[derive(Debug, Default)]
struct KnownWindows {
    windows: Vec<MachineWindow>,
    asked: Option<Instant>,
    /// When the last question began that was answered with windows.
    answered: Option<Instant>,
    /// How often all of it was forgotten.
    forgotten: u64,
}

impl WindowCache {
    fn known(&self) -> MutexGuard<'_, KnownWindows> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn forget(&self) {
        let mut known = self.known();
        *known = KnownWindows { forgotten: known.forgotten + 1, ..KnownWindows::default() };
    }

    fn is_answered(&self, since: Instant) -> bool {
        self.known().answered.is_some_and(|answered| answered >= since)
    }

    /// Looks for bytes that the machine has at this address in the windows, and passes what it finds with their address in the group. If that is
    /// of an earlier life of its member, the windows are unknown as well. May ask the broker.
    fn look<T>(
        &self,
        piece: &BufferPiece,
        is_for_passing: bool,
        ask: impl FnOnce() -> partywall::Result<Vec<MachineWindow>>,
        mut take: impl FnMut(&MachineWindow, u64) -> Option<T>,
    ) -> Option<T> {
        let found = find(&self.known().windows, piece, is_for_passing);
        if let Some(taken) = found.and_then(|(window, address)| take(&window, address)) {
            return Some(taken);
        }
        let began = Instant::now();
        let mut known = self.known();
        if known.asked.is_some_and(|asked| asked.elapsed() < PAUSE) {
            return None;
        }
        known.asked = Some(began);
        let forgotten = known.forgotten;
        drop(known);
        // What was known stays if there is no answer.
        let windows = ask().ok()?;
        let mut known = self.known();
        if known.forgotten != forgotten {
            return None;
        }
        if !windows.is_empty() {
            known.answered = Some(began);
        }
        let found = find(&windows, piece, is_for_passing);
        known.windows = windows;
        drop(known);
        found.and_then(|(window, address)| take(&window, address))
    }
}

/// Bytes in windows of machines are copied: their programs may reuse a buffer once it is written, and not only once it is durable (protocol
/// E4.4).
fn find(windows: &[MachineWindow], piece: &BufferPiece, is_for_passing: bool) -> Option<(MachineWindow, u64)> {
    let inside = |window: &&MachineWindow| {
        let offset = piece.address.0.checked_sub(window.place);
        (window.of_host || !is_for_passing)
            && offset.and_then(|at| at.checked_add(piece.length as u64)).is_some_and(|end| end <= window.size)
    };
    let window = windows.iter().find(inside)?;
    Some((*window, window.address.checked_add(piece.address.0 - window.place)?))
}

/// The same bytes, without borders between pieces that follow each other.
fn join(pieces: &[BufferPiece]) -> Vec<BufferPiece> {
    let mut joined: Vec<BufferPiece> = Vec::new();
    for piece in pieces {
        match joined.last_mut() {
            Some(last) if last.address.0.checked_add(last.length as u64) == Some(piece.address.0) => {
                last.length += piece.length;
            }
            _ => joined.push(*piece),
        }
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::*;
    use vm_memory::GuestAddress;

    fn piece(address: u64, length: usize) -> BufferPiece {
        BufferPiece { address: GuestAddress(address), length }
    }

    const HOST: MachineWindow =
        MachineWindow { member: 0, life: 1, place: 0x10_0000, address: 0x2000_0000_0000, size: 0x8000, of_host: true };
    const INSIDE: u64 = HOST.place + 0x1000;
    const OUTSIDE: u64 = HOST.place + HOST.size;

    /// Looks for a byte, and returns the life of the window that has it. An answer is taken at any time after the last one.
    fn look(
        cache: &WindowCache,
        address: u64,
        ask: impl FnOnce() -> partywall::Result<Vec<MachineWindow>>,
    ) -> Option<u32> {
        cache.known().asked = None;
        cache.look(&piece(address, 1), false, ask, |window, _| Some(window.life))
    }

    #[test]
    fn question_that_fails_keeps_known_windows() {
        let cache = WindowCache::default();
        assert_eq!(look(&cache, INSIDE, || Ok(vec![HOST])), Some(1));
        assert_eq!(look(&cache, OUTSIDE, || Err(partywall::Error::Gone("a broker"))), None);
        assert_eq!(look(&cache, INSIDE, || panic!("it is known")), Some(1));
    }

    #[test]
    fn window_of_an_earlier_life_is_asked_for_again() {
        let cache = WindowCache::default();
        look(&cache, INSIDE, || Ok(vec![HOST]));
        let later = MachineWindow { life: 2, ..HOST };
        let is_later = |window: &MachineWindow, _| (window.life == 2).then_some(());
        cache.known().asked = None;
        assert_eq!(cache.look(&piece(INSIDE, 1), false, || Ok(vec![later]), is_later), Some(()));
        assert_eq!(look(&cache, INSIDE, || panic!("it is known")), Some(2));
    }

    #[test]
    fn window_in_place_of_a_forgotten_one_is_found() {
        let cache = WindowCache::default();
        assert_eq!(look(&cache, INSIDE, || Ok(vec![HOST])), Some(1));
        let moved = MachineWindow { place: OUTSIDE, ..HOST };
        let other = MachineWindow { member: 1, life: 5, ..HOST };
        cache.forget();
        assert_eq!(look(&cache, INSIDE, || Ok(vec![moved, other])), Some(5));
        assert_eq!(look(&cache, OUTSIDE, || panic!("it is known")), Some(1));
    }

    #[test]
    fn answer_to_a_question_before_forget_is_not_used() {
        let cache = WindowCache::default();
        let ask = || {
            cache.forget();
            Ok(vec![HOST])
        };
        assert_eq!(look(&cache, INSIDE, ask), None);
        assert_eq!(cache.known().windows, []);
    }

    #[test]
    fn answer_with_windows_ends_the_wait_for_one() {
        let cache = WindowCache::default();
        let since = Instant::now();
        look(&cache, OUTSIDE, || Ok(Vec::new()));
        assert!(!cache.is_answered(since), "the broker may learn of the windows later");
        look(&cache, OUTSIDE, || Ok(vec![HOST]));
        assert!(cache.is_answered(since));
        let later = Instant::now() + PAUSE;
        assert!(!cache.is_answered(later), "this question began before");
        cache.known().asked = Some(later);
        assert_eq!(cache.look(&piece(OUTSIDE, 1), false, || panic!("it was just asked"), |_, _| Some(())), None);
    }

    #[test]
    fn bytes_in_windows_of_the_host_alone_are_passed_on() {
        let machine = MachineWindow { place: 0x20_0000, address: 0x2010_0000_0000, of_host: false, ..HOST };
        let find = |windows: &[_], piece: &_, is_for_passing| find(windows, piece, is_for_passing).map(|found| found.1);
        let windows = [HOST, machine];
        for is_for_passing in [false, true] {
            assert_eq!(find(&windows, &piece(0x10_1000, 0x7000), is_for_passing), Some(0x2000_0000_1000));
        }
        assert_eq!(find(&windows, &piece(0x20_1000, 1), false), Some(0x2010_0000_1000), "a copy is made of it");
        for (address, length) in [(0x10_1000, 0x7001), (0xf_ffff, 1), (0x10_8000, 1), (0x20_1000, 1), (u64::MAX, 2)] {
            assert_eq!(find(&windows, &piece(address, length), true), None, "{address:x} {length}");
        }
    }

    #[test]
    fn pieces_that_follow_each_other_are_joined() {
        let pieces = [piece(0, 10), piece(10, 5), piece(20, 5), piece(25, 5), piece(u64::MAX, 1)];
        assert_eq!(join(&pieces), [piece(0, 15), piece(20, 10), piece(u64::MAX, 1)]);
    }
}
