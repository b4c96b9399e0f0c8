//! One connection: the kernel's socket, and a ring each way while both ends are attached.
//!
//! A block of the [`crate::arena`] stands for one open socket, whatever number of descriptors and processes share it.
//! The state of this process alone, mappings and descriptors, is in [`crate::local`] under the same index.
#![expect(unsafe_code, reason = "reaches the pages of regions that stay mapped")]

mod abandoned;
pub(crate) mod accounts;
mod again;
mod arming;
pub(crate) mod bell;
mod bring_up;
pub(crate) mod candidate;
mod cursor;
mod death;
mod descent;
mod direction;
pub(crate) mod ends;
mod errors;
pub(crate) mod fork;
mod held;
mod holders;
mod identity;
mod kernel_facts;
pub(crate) mod leave;
mod moves;
mod options;
mod pace;
mod pages;
mod parting;
mod passing;
mod peek;
mod readiness;
mod received;
mod reclaim;
mod relay;
mod renewal;
mod ring_path;
mod rx;
mod shown;
mod succession;
#[cfg(test)]
mod tests;
mod tx;
mod waiters;

pub(crate) use abandoned::end_abandoned;
pub(crate) use arming::Armed;
pub(crate) use candidate::{CandidateStep, KernelCall};
pub(crate) use cursor::Cursor;
pub(crate) use descent::{Descent, await_lone_hold};
pub(crate) use options::{changes_stream, needs_tcp};
pub(crate) use passing::PassedStatement;
pub(crate) use readiness::{RingLook, RingReadiness};
pub(crate) use relay::{ByteSource, SendFault};
pub(crate) use renewal::{may_be_inherited, rings_after_exec};
pub(crate) use ring_path::{ConnStage, flags};
#[cfg(test)]
pub(crate) use tests::Pair;
pub(crate) use tx::kernel_send;
pub(crate) use waiters::{ConnWaiters, Deadline, Interest, WaitOutcome, install};

use crate::local::{self, LocalState, OwnBell};
use crate::table::{self, DescriptorKind, Entry};
use crate::{arena, process};
use direction::DirectionLock;
pub(crate) use holders::{Holders, UNBORN};
use identity::SocketIdentity;
use kernel_facts::KernelFacts;
use moves::MoveCounters;
use pages::Pages;
use partywall_shm::status::Role;
use partywall_shm::wake::Fencing;
use passing::PassingState;
use ring_path::RingPath;
use rustix::io::Errno;
use std::ffi::c_int;
use std::sync::atomic::Ordering;

/// The block. All zeros when new.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct Conn {
    identity: SocketIdentity,
    ring_path: RingPath,
    /// The options of the socket, its news, and the threads in calls on it.
    pub(crate) kernel: KernelFacts,
    moves: MoveCounters,
    passing: PassingState,
    tx: DirectionLock<tx::ConnTx>,
    rx: DirectionLock<rx::ConnRx>,
}

impl Conn {
    /// The connection that a descriptor belongs to, if it is one that we look after.
    #[inline]
    pub(crate) fn of(fd: c_int) -> Option<&'static Self> {
        let entry = table::get(fd);
        if entry == Entry::NONE || entry.kind() != DescriptorKind::Connection {
            return None;
        }
        Self::at(entry.index())
    }

    /// The connection in a block of the arena, or what the last one there has left; `None` while there is no arena.
    #[inline]
    pub(crate) fn at(index: u16) -> Option<&'static Self> {
        const { assert!(size_of::<Self>() <= arena::BLOCK && align_of::<Self>() <= arena::ALIGNMENT) };
        // SAFETY: a block has room for a connection and its alignment, and stays mapped. A connection is valid in whatever state its
        // bytes are, zeros included: its words are atomics, and what is not is reached under its locks.
        arena::get(index).map(|block| unsafe { block.cast::<Self>().as_ref() })
    }

    /// The table entry for descriptors of this connection.
    pub(crate) fn entry(&self) -> Entry {
        Entry::new(DescriptorKind::Connection, self.generation(), self.index())
    }

    /// Whether the descriptor still belongs to it.
    #[inline]
    fn is_of(&self, fd: c_int) -> bool {
        table::get(fd) == self.entry()
    }

    /// How many connections have had this place before.
    pub(crate) fn generation(&self) -> u32 {
        self.local().generation.load(Ordering::Relaxed)
    }

    #[inline]
    pub(crate) fn index(&self) -> u16 {
        arena::index_of(std::ptr::from_ref(self).cast())
    }

    #[inline]
    fn local(&self) -> &'static LocalState {
        local::get(self.index())
    }

    fn set_stage(&self, stage: ConnStage) {
        self.ring_path.set_stage(stage);
        shown::state(self, self.ring_path.state_of(stage));
    }

    /// Number of its channel or offer; 0 if it has none.
    pub(crate) fn channel(&self) -> u64 {
        self.local().channel.load(Ordering::Relaxed)
    }

    /// Whether a ring is attached each way. Its bytes may go over TCP all the same.
    #[inline]
    pub(crate) fn is_up(&self) -> bool {
        self.ring_path.is_up()
    }

    /// Whether other processes have it, too.
    pub(crate) fn is_shared(&self) -> bool {
        self.identity.holders.has_others(process::kernel_pid())
    }

    /// The side of this end.
    pub(crate) fn role(&self) -> Role {
        self.ring_path.role()
    }

    #[inline]
    pub(crate) fn has(&self, flag: u32) -> bool {
        self.ring_path.has(flag)
    }

    /// A descriptor of its socket, for questions to the kernel; -1 if this process has none.
    #[inline]
    pub(crate) fn fd(&self) -> c_int {
        let fd = self.local().fd();
        if fd < 0 { self.successor().map_or(-1, Self::fd) } else { fd }
    }

    /// Our end of the link.
    #[inline]
    pub(crate) fn bell(&self) -> &'static OwnBell {
        &self.local().bell
    }

    #[inline]
    fn pages(&self) -> Option<Pages<'_>> {
        let local = self.local();
        // SAFETY: our region's berth only ever has regions of ours, whole or reserved. The first page of each is allocated and writable, and
        // stays writable when the berth is vacated, so that
        // a store by a thread that does not know of that yet is harmless.
        let own = unsafe { local.own.own_page() }?;
        Some(Pages { local, path: &self.ring_path, own, peer: local.peer.peer_page()? })
    }

    /// A look without the kernel.
    #[inline]
    pub(crate) fn look(&self) -> RingLook<'_> {
        RingLook(self)
    }

    /// Whether the other end is on another machine.
    pub(crate) fn is_far(&self) -> bool {
        self.has(flags::FAR)
    }

    /// Publishes the core of this thread (as [`partywall_region::wait::this_core`] numbers them). Returns whether the peer last published
    /// the same one: then it cannot run while this side spins.
    pub(crate) fn shares_core(&self, core: u32) -> bool {
        if !self.is_up() {
            return true;
        }
        let Some(Pages { own, peer, .. }) = self.pages() else { return true };
        for word in [&own.control.rx.control.cpu, &own.control.tx.control.cpu] {
            // The peer reads these lines often.
            if word.load(Ordering::Relaxed) != core {
                word.store(core, Ordering::Relaxed);
            }
        }
        let theirs = peer.control.tx.control.cpu.load(Ordering::Relaxed);
        // Cores of another machine are others, whatever their numbers.
        core != 0 && theirs == core && !self.has(flags::FAR)
    }

    /// Handles the peer's requests for a connection that no thread is reading or writing. The caller calls it after each ring of the
    /// link.
    pub(crate) fn attend(&'static self) {
        if self.is_up() {
            self.follow();
        }
    }

    /// A thread is about to sleep in the kernel on this connection, which has no ring yet.
    pub(crate) fn kernel_block_enter(&self) -> KernelSleep {
        loop {
            self.kernel.enter();
            let stage = self.ring_path.stage();
            if stage == ConnStage::Tcp
                && let Some(by) = self.successor()
            {
                self.kernel.leave();
                return KernelSleep::Replaced(by);
            }
            if matches!(stage, ConnStage::Candidate | ConnStage::Offered | ConnStage::Tcp) {
                abandoned::note(self.index());
                return KernelSleep::Entered;
            }
            self.kernel.leave();
            if stage == ConnStage::Attached {
                return KernelSleep::HasRing;
            }
            if self.settle() == ConnStage::Attaching {
                return KernelSleep::OwnStep;
            }
        }
    }

    /// It is awake again.
    pub(crate) fn kernel_block_leave(&self) {
        abandoned::take_back(self.index());
        self.kernel.leave();
    }

    /// Why a call that was to go by the ring fails where there is none.
    #[cold]
    fn without_ring(&self, fd: c_int) -> Errno {
        if self.successor().is_some() {
            return REPLACED;
        }
        if self.is_of(fd) && self.ring_path.stage() == ConnStage::Attaching {
            // This very thread takes a step towards a ring, below a signal handler: the handler can neither wait for that nor use the socket,
            // which the broker may have at this moment.
            return Errno::AGAIN;
        }
        // Closed by another thread, and perhaps another connection's by now.
        Errno::BADF
    }
}

/// The result of a call on a connection that another one has replaced before the call moved a byte: the call begins again with that one
/// ([`Conn::now`]). No program gets this number, which the kernel gives to none either.
pub(crate) const REPLACED: Errno = Errno::RESTART;

/// Whether a thread may sleep in the kernel on a connection.
#[derive(Debug, Clone, Copy)]
pub(crate) enum KernelSleep {
    /// It may, and counts as one that does until [`Conn::kernel_block_leave`].
    Entered,
    /// The connection has a ring by now, and the thread must sleep as those do.
    HasRing,
    /// This thread itself takes a step towards a ring, below a signal handler. The step continues when the handler has returned.
    OwnStep,
    /// Another connection has taken its place, and counts the bytes of the socket.
    Replaced(&'static Conn),
}

/// How a mover fences (protocol W4): in full. A program that serves many connections sleeps often. If movers did not fence, each of its sleeps
/// would interrupt all other processors.
pub(crate) const FENCING: Fencing = Fencing::Symmetric;

/// The fence between a request that was stored for the peer, or for another thread, and the look at what that one has stored. A sleeper's fence is
/// [`partywall_shm::half::Fenced`].
#[inline]
pub(crate) fn heavy_fence() {
    std::sync::atomic::fence(Ordering::SeqCst);
}
