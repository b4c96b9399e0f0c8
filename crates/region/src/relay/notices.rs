//! The reports of a relay to its owner, in order, with a bound (protocol P5) and a descriptor to wait for.

use super::Notice;
use super::command::RelayCommand;
use super::core::MOST_NOTICES;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::Duration;

/// The relay's end. Each report makes `bell` readable, and each that is taken may wake the relay.
pub(super) fn channel(
    bell: Arc<OwnedFd>,
    wake: Arc<OwnedFd>,
    commands: Sender<RelayCommand>,
) -> (NoticeSender, Notices) {
    let (sender, told) = mpsc::channel();
    let backlog = Arc::new(AtomicUsize::new(0));
    let notices = Notices { told, bell: Arc::clone(&bell), backlog: Arc::clone(&backlog), wake, commands };
    (NoticeSender { sender, bell, backlog }, notices)
}

/// The sender of a relay's reports. The owner may be asleep.
#[derive(Debug)]
pub(super) struct NoticeSender {
    sender: Sender<Notice>,
    bell: Arc<OwnedFd>,
    backlog: Arc<AtomicUsize>,
}

impl NoticeSender {
    pub(super) fn report(&self, notice: Notice) {
        // Counted first, so that the count never goes below zero.
        self.backlog.fetch_add(1, Ordering::AcqRel);
        // The relay's owner need not listen.
        let _ = self.sender.send(notice);
        let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
    }

    /// Notices that the owner has not taken.
    pub(super) fn backlog(&self) -> usize {
        self.backlog.load(Ordering::Acquire)
    }
}

/// The receiver of a relay's reports, in order. Its descriptor is readable while a report is pending.
#[derive(Debug)]
pub struct Notices {
    told: Receiver<Notice>,
    bell: Arc<OwnedFd>,
    /// How many were told and not taken, and what wakes a relay that waits for fewer.
    backlog: Arc<AtomicUsize>,
    wake: Arc<OwnedFd>,
    /// Tells the relay when its owner hears that all links have ended.
    commands: Sender<RelayCommand>,
}

impl Notices {
    /// The next notice, if there is one.
    pub fn try_recv(&self) -> Option<Notice> {
        let notice = self.told.try_recv().ok().or_else(|| {
            // Silenced before the last look: what is reported later rings again.
            let _ = rustix::io::read(&self.bell, &mut [0; 8]);
            self.told.try_recv().ok()
        });
        notice.inspect(|notice| self.taken(notice))
    }

    fn taken(&self, notice: &Notice) {
        if notice.ends_links() {
            // The commands before this one were given without knowing of it. A relay that has ended takes none.
            let _ = self.commands.send(RelayCommand::OwnerHeard);
        }
        if self.backlog.fetch_sub(1, Ordering::AcqRel) == MOST_NOTICES {
            let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
        }
    }

    /// Waits for the next notice.
    pub fn recv_timeout(&self, limit: Duration) -> Result<Notice, RecvTimeoutError> {
        self.told.recv_timeout(limit).inspect(|notice| self.taken(notice))
    }
}

impl AsFd for Notices {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }
}
