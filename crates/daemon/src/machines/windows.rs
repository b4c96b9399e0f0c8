//! The windows between machines, and between them and the host: their files.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;

use partywall_region::RegionError;
use partywall_region::pmem::{WindowFile, WindowSpec};
use partywall_shm::window::{BLOCK, DATA_OFFSET};
use partywall_vm::Window;

use crate::core::{MachineId, MachineNews};

/// Bytes of the smallest file. Places for regions begin behind its first 4 MiB.
const SMALLEST: u64 = 8 << 20;

/// Who writes it, who reads it.
pub(super) type Key = (MachineId, MachineId);

/// The files, which live as long as somebody has them open: this broker, or a QEMU.
#[derive(Debug, Default)]
pub(super) struct Windows {
    files: BTreeMap<Key, WindowFile>,
}

impl Windows {
    /// Makes one without its memory, and what the core is to know of it.
    pub(super) fn open(
        &mut self,
        (owner, owner_name): (MachineId, &str),
        (peer, peer_name): (MachineId, &str),
        size: u64,
    ) -> Result<MachineNews<OwnedFd>, RegionError> {
        let file = WindowFile::begin(&spec(owner_name, peer_name, size))?;
        let (memory, reader, size) = (file.writer()?, file.reader()?, file.window()?.size());
        let news = MachineNews::Window { owner, peer, memory, reader, size };
        self.files.insert((owner, peer), file);
        Ok(news)
    }

    /// Makes the memory of all that a machine has a part in, before anyone is told of them.
    pub(super) fn allocate(&self, machine: MachineId) -> Result<(), RegionError> {
        let ours = self.files.iter().filter(|((owner, peer), _)| *owner == machine || *peer == machine);
        WindowFile::allocate_all(&ours.map(|(_, file)| file).collect::<Vec<_>>())
    }

    /// Those that a machine has a part in, as QEMU is told of them.
    pub(super) fn of(&self, machine: MachineId) -> Vec<(Key, Window)> {
        let ours = self.files.iter().filter(|((owner, peer), _)| *owner == machine || *peer == machine);
        ours.map(|(key, file)| (*key, Window::of(file))).collect()
    }

    /// A descriptor of it that cannot be written through.
    pub(super) fn reader(&self, key: Key) -> Option<OwnedFd> {
        self.files.get(&key)?.reader().ok()
    }

    /// Lets go of all that a machine has a part in.
    pub(super) fn close(&mut self, machine: MachineId) {
        self.files.retain(|(owner, peer), _| *owner != machine && *peer != machine);
    }
}

/// The size of a window's file.
pub(super) fn file_size(size: u64) -> Result<u64, RegionError> {
    spec("", "", size).file_size()
}

fn spec(owner: &str, peer: &str, size: u64) -> WindowSpec {
    // Of whatever kind a machine is, its peers may be of the other, and a PCI device's memory is a power of two.
    let size = size.max(SMALLEST).checked_next_power_of_two().unwrap_or(u64::MAX);
    let room = size.saturating_sub(DATA_OFFSET + BLOCK as u64);
    WindowSpec { room, owner: owner.to_owned(), peer: peer.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_of_sizes_that_a_device_can_have() {
        for (asked, size) in [(0, SMALLEST), (64 << 20, 64 << 20), ((64 << 20) + 1, 128 << 20), (40 << 30, 64 << 30)] {
            assert_eq!(file_size(asked).ok(), Some(size), "{asked}");
        }
        assert!(file_size(u64::MAX).is_err());
    }
}
