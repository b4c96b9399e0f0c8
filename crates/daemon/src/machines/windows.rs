//! The windows between machines, and between them and the host: their files.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;

use partywall_region::RegionError;
use partywall_region::pmem::{WindowFile, WindowSpec};
use partywall_shm::layout::HUGE_PAGE;
use partywall_vm::Window;

use crate::core::{MachineId, MachineNews};

/// Who writes it, who reads it.
pub(super) type Key = (MachineId, MachineId);

/// The files, which live as long as somebody has them open: this broker, or a QEMU.
#[derive(Debug, Default)]
pub(super) struct Windows {
    files: BTreeMap<Key, WindowFile>,
}

impl Windows {
    /// Makes one, and what the core is to know of it.
    pub(super) fn open(
        &mut self,
        (owner, owner_name): (MachineId, &str),
        (peer, peer_name): (MachineId, &str),
        room: u64,
    ) -> Result<MachineNews<OwnedFd>, RegionError> {
        let file = WindowFile::create(&spec(owner_name, peer_name, room))?;
        let (memory, reader, size) = (file.writer()?, file.reader()?, file.window()?.size());
        let news = MachineNews::Window { owner, peer, memory, reader, size };
        self.files.insert((owner, peer), file);
        Ok(news)
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
pub(super) fn file_size(room: u64) -> Result<u64, RegionError> {
    spec("", "", room).file_size()
}

fn spec(owner: &str, peer: &str, room: u64) -> WindowSpec {
    // Places begin behind the first 2 MiB.
    WindowSpec { room: room.saturating_add(HUGE_PAGE), owner: owner.to_owned(), peer: peer.to_owned() }
}
