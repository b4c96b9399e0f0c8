//! The windows between machines, and between them and the host: their files, and how these get their memory.
//!
//! To allocate memory takes longer than all else that a new machine needs. So a window begins with some, which is enough to begin to
//! talk, and gets the rest from a thread while guests take notice of it. The core gives out only places that have memory.

use std::collections::BTreeMap;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;

use partywall_protocol::window::{BLOCK, DATA_OFFSET};
use partywall_protocol::wire::{MachineId, Origin};
use partywall_region::RegionError;
use partywall_region::pmem::{WindowFile, WindowSpec, WindowTrace, memory};
use partywall_vm::WindowDevice;

use super::store;
use crate::core::MachineNews;

/// Bytes of the smallest file. Places for regions begin behind its first 4 MiB.
const SMALLEST: u64 = 8 << 20;

/// The writer and the reader of a window.
pub(super) type Key = (Origin, Origin);

/// The files of the windows, which exist while this broker or a QEMU has them open.
#[derive(Debug, Default)]
pub(super) struct Windows {
    files: BTreeMap<Key, Arc<WindowFile>>,
    /// Threads that allocate. Each ends when there is nothing left to do, or no window to do it for.
    allocating: Vec<JoinHandle<()>>,
}

impl Windows {
    /// Makes one with some of its memory, and what the core is to know of it. [`Windows::allocate`] makes the rest.
    pub(super) fn open(
        &mut self,
        (owner, owner_name): (Origin, &str),
        (peer, peer_name): (Origin, &str),
        size: u64,
    ) -> Result<MachineNews<OwnedFd>, RegionError> {
        self.insert((owner, peer), WindowFile::begin(&spec(owner_name, peer_name, size))?)
    }

    /// Takes in a window, and says what the core is to know of it.
    pub(super) fn insert(&mut self, (owner, peer): Key, file: WindowFile) -> Result<MachineNews<OwnedFd>, RegionError> {
        let (memory, reader, size) = (file.writer()?, file.reader()?, file.window()?.size());
        let allocated = places_to(&file);
        let news = MachineNews::Window { owner, peer, memory, reader, size, allocated };
        // Under this name there may be another open file of the same window, from a broker before.
        store::give_up(file.id());
        store::keep(file.id(), file.as_fd());
        self.files.insert((owner, peer), Arc::new(file));
        Ok(news)
    }

    /// Whether this host has memory for the unallocated parts of all windows, including those of a machine. It may be gone when it is
    /// allocated.
    pub(super) fn afford(&self, machine: MachineId) -> Result<(), String> {
        let lacks = |file: &Arc<WindowFile>| file.size() - file.allocated();
        let own: u64 = self.lacking(machine).iter().filter_map(|(_, file)| file.upgrade()).map(|f| lacks(&f)).sum();
        let all: u64 = self.files.values().map(lacks).sum();
        match memory::available() {
            Some(has) if all > 0 && has < all.saturating_add(memory::SPARE) => Err(format!(
                "its windows take {} MiB, and this host has {} MiB of memory to spare{}; attach it with a smaller --window",
                own >> 20,
                has.saturating_sub(memory::SPARE) >> 20,
                if all > own { " (others are still being given theirs)" } else { "" },
            )),
            _ => Ok(()),
        }
    }

    /// Begins to make the memory that windows of a machine lack, and tells the core of each part, and of what cannot be had.
    pub(super) fn allocate(
        &mut self,
        machine: MachineId,
        tell: impl Fn(MachineNews<OwnedFd>) + Send + Clone + 'static,
    ) {
        self.allocating.retain(|thread| !thread.is_finished());
        let left = self.lacking(machine);
        let work = {
            let (left, tell) = (left.clone(), tell.clone());
            move || drop(allocate(left, WindowFile::allocate_more, tell))
        };
        match std::thread::Builder::new().name("windows".to_owned()).spawn(work) {
            Ok(thread) => self.allocating.push(thread),
            // No more threads are to be had.
            Err(_) => drop(allocate(left, WindowFile::allocate_more, tell)),
        }
    }

    /// Makes what windows of a machine lack, at once, and says why if that cannot be.
    pub(super) fn complete(&self, machine: MachineId, tell: impl Fn(MachineNews<OwnedFd>)) -> Result<(), String> {
        match allocate(self.lacking(machine), WindowFile::allocate_more, tell).pop() {
            Some((key, why)) => {
                let file = self.files.get(&key).map(|file| (file.allocated(), file.size()));
                let (has, of) = file.unwrap_or_default();
                Err(format!("a window has only {has} of its {of} bytes, which can be used: {why}"))
            }
            None => Ok(()),
        }
    }

    fn lacking(&self, machine: MachineId) -> Vec<(Key, Weak<WindowFile>)> {
        let ours = self.files.iter().filter(|((owner, peer), _)| [*owner, *peer].contains(&machine.into()));
        ours.filter(|(_, file)| file.allocated() < file.size())
            .map(|(key, file)| (*key, Arc::downgrade(file)))
            .collect()
    }

    /// The windows that a machine owns or reads, in the form for QEMU.
    pub(super) fn of(&self, machine: MachineId) -> Vec<(Key, WindowDevice)> {
        let ours = self.files.iter().filter(|((owner, peer), _)| [*owner, *peer].contains(&machine.into()));
        ours.map(|(key, file)| (*key, WindowDevice::of(file))).collect()
    }

    /// Whether there is one.
    pub(super) fn has(&self, key: Key) -> bool {
        self.files.contains_key(&key)
    }

    /// All of them, by what another process finds their files by.
    pub(super) fn traces(&self) -> Vec<(Key, WindowTrace)> {
        self.files.iter().filter_map(|(key, file)| Some((*key, file.trace().ok()?))).collect()
    }

    /// A descriptor of it that cannot be written through.
    pub(super) fn reader(&self, key: Key) -> Option<OwnedFd> {
        self.files.get(&key)?.reader().ok()
    }

    /// Releases all that a machine has a part in.
    pub(super) fn close(&mut self, machine: MachineId) {
        self.files.retain(|(owner, peer), file| {
            let stays = ![*owner, *peer].contains(&machine.into());
            if !stays {
                store::give_up(file.id());
            }
            stays
        });
    }
}

impl Drop for Windows {
    fn drop(&mut self) {
        // A request that allocates in them finds them gone.
        self.files.clear();
        for thread in self.allocating.drain(..) {
            let _ = thread.join();
        }
    }
}

/// Makes memory for windows, a part of each in turn, and says of each part that it is there. Returns those that cannot have more.
fn allocate(
    mut left: Vec<(Key, Weak<WindowFile>)>,
    more: impl Fn(&WindowFile) -> Result<bool, RegionError>,
    tell: impl Fn(MachineNews<OwnedFd>),
) -> Vec<(Key, String)> {
    let mut short = Vec::new();
    while !left.is_empty() {
        left.retain(|((owner, peer), file)| {
            let (owner, peer) = (*owner, *peer);
            // The machine may have been detached meanwhile.
            let Some(file) = file.upgrade() else { return false };
            match more(&file) {
                Ok(whole) => {
                    tell(MachineNews::Allocated { owner, peer, to: places_to(&file) });
                    !whole
                }
                Err(e) => {
                    let why = e.to_string();
                    let (has, of) = (file.allocated(), file.size());
                    tracing::warn!(id = %file.id(), has, of, why, "a window has only some of its memory; attach again to try again");
                    tell(MachineNews::Shortage { owner, peer, why: why.clone() });
                    short.push(((owner, peer), why));
                    false
                }
            }
        });
    }
    short
}

/// Where places with memory end, from the header on.
fn places_to(file: &WindowFile) -> u64 {
    file.allocated().saturating_sub(DATA_OFFSET)
}

/// The size of a window's file.
pub(super) fn file_size(size: u64) -> Result<u64, RegionError> {
    spec("", "", size).file_size()
}

fn spec(owner: &str, peer: &str, size: u64) -> WindowSpec {
    // A machine of either kind may have peers of the other, and a PCI device's memory is a power of two.
    let size = size.max(SMALLEST).checked_next_power_of_two().unwrap_or(u64::MAX);
    let room = size.saturating_sub(DATA_OFFSET + BLOCK as u64);
    WindowSpec { room, owner: owner.to_owned(), peer: peer.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::{Cell, RefCell};

    #[test]
    fn windows_are_allocated_in_turn_and_shortage_delays_no_other() {
        let mut windows = Windows::default();
        let [host, first, second] = [0, 1, 2].map(|n| MachineId::new(n).map_or(Origin::Host, Origin::Machine));
        for (owner, peer) in [(first, host), (host, first), (second, first)] {
            windows.open((owner, "a"), (peer, "b"), 40 << 20).unwrap();
        }
        let left = windows.lacking(MachineId::MIN);
        assert_eq!(left.len(), 3);
        windows.close(MachineId::new(2).unwrap());
        let (calls, told) = (Cell::new(0), RefCell::new(Vec::new()));
        // The third part that is asked for cannot be had: the second one of the first window.
        let more = |file: &WindowFile| {
            calls.set(calls.get() + 1);
            if calls.get() == 3 {
                return WindowSpec { room: u64::MAX, owner: String::new(), peer: String::new() }
                    .file_size()
                    .map(|_| true);
            }
            file.allocate_more()
        };
        let tell = |news| {
            told.borrow_mut().push(match news {
                MachineNews::Allocated { owner, to, .. } => (owner, Some((to + DATA_OFFSET) >> 20)),
                MachineNews::Shortage { owner, .. } => (owner, None),
                other => panic!("{other:?}"),
            });
        };
        let short = allocate(left, more, tell);
        assert_eq!(
            *told.borrow(),
            [
                (host, Some(16)),
                (first, Some(16)),
                (host, None),
                (first, Some(32)),
                (first, Some(48)),
                (first, Some(64))
            ]
        );
        assert_eq!(short.iter().map(|(key, _)| *key).collect::<Vec<_>>(), [(host, first)]);
        // Only the windows that lack memory are tried again.
        assert_eq!(windows.lacking(MachineId::MIN).len(), 1);
        let why = windows.complete(MachineId::MIN, drop);
        assert_eq!((why, windows.lacking(MachineId::MIN).len()), (Ok(()), 0));
    }

    #[test]
    fn files_are_of_sizes_that_a_device_can_have() {
        for (asked, size) in [(0, SMALLEST), (64 << 20, 64 << 20), ((64 << 20) + 1, 128 << 20), (40 << 30, 64 << 30)] {
            assert_eq!(file_size(asked).ok(), Some(size), "{asked}");
        }
        assert!(file_size(u64::MAX).is_err());
    }
}
