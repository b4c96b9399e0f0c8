//! A directory that the broker writes: the host's, or a machine's.

use partywall_protocol::directory::{DirectoryChange, DirectoryKeeper};
use partywall_region::directory::OwnDirectory;

/// The directory's memory and its writer's private state. Dropping it marks the directory as closed for all that have mapped it.
#[derive(Debug)]
pub(super) struct Published {
    memory: OwnDirectory,
    keeper: DirectoryKeeper,
}

impl Published {
    pub(super) fn begin(memory: OwnDirectory, instance: u64) -> Self {
        let keeper = DirectoryKeeper::begin(&memory, instance);
        Self { memory, keeper }
    }

    pub(super) fn apply(&mut self, change: &DirectoryChange) {
        self.keeper.apply(&self.memory, change);
    }
}

impl Drop for Published {
    fn drop(&mut self) {
        self.keeper.close(&self.memory);
    }
}
