//! One connection: the kernel's socket, and a ring each way while both ends are attached.
//!
//! A block of the [`crate::arena`] stands for one open socket, whatever number of descriptors and processes share it.
//! What is only this process' own, mappings and descriptors, is in [`crate::local`] under the same index.
#![expect(unsafe_code, reason = "reaches the pages of regions that stay mapped")]

mod abandoned;
mod again;
pub(crate) mod bell;
mod bring_up;
pub(crate) mod candidate;
mod cursor;
mod death;
mod direction;
mod drain;
pub(crate) mod ends;
pub(crate) mod fork;
mod held;
mod holders;
pub(crate) mod leave;
mod options;
mod parting;
mod reclaim;
mod rx;
mod shown;
#[cfg(test)]
mod tests;
mod tx;
mod waiters;

pub(crate) use abandoned::end_abandoned;
pub(crate) use candidate::CandidateStep;
pub(crate) use cursor::Cursor;
pub(crate) use options::{changes_stream, needs_tcp};
#[cfg(test)]
pub(crate) use tests::Pair;
pub(crate) use waiters::{ConnWaiters, Deadline, Interest, WaitOutcome, install};

use crate::local::{self, LocalState};
use crate::table::{self, DescriptorKind, Entry};
use crate::{arena, process, sys};
use direction::DirectionLock;
pub(crate) use holders::{Holders, UNBORN};
use partywall_shm::half::{Awaited, ReaderView, WriterView};
use partywall_shm::layout::SocketPage;
use partywall_shm::path::Way;
use partywall_shm::status::{LineState, Reason, Role};
use partywall_shm::sync::{Own, Peer, load_acquire_u32};
use partywall_shm::wake::{AWAKE, Fencing};
use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use std::ffi::c_int;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// What a look without the kernel says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RingReadiness {
    /// Not ready, as far as the ring goes; the kernel's socket tells by an event if that changes.
    No,
    /// Ready.
    Yes,
    /// The way is TCP, or the end may have come over it: what `poll` says of the descriptor decides.
    AskKernel,
}

/// What is known of a connection's socket. Shared by all who hold it.
pub(crate) mod flags {
    /// `O_NONBLOCK` is set.
    pub(crate) const NONBLOCK: u32 = 1;
    /// `shutdown` for reading.
    pub(crate) const READ_SHUT: u32 = 2;
    /// `shutdown` for writing.
    pub(crate) const WRITE_SHUT: u32 = 4;
    /// We want TCP: no switch up, and down where it is up.
    pub(crate) const WANT_TCP: u32 = 8;
    /// The peer broke the protocol, or its end cannot be trusted any more: nothing but errors.
    pub(crate) const BROKEN: u32 = 16;
    /// The peer's end of the link is gone: every process that held it has closed it, or has died.
    pub(crate) const PEER_GONE: u32 = 32;
    /// We have left the ring that we read, permanently: what comes, comes by the kernel.
    pub(crate) const LEFT: u32 = 64;
    /// The peer has left ours, and has all of what it left there.
    pub(crate) const SENT_AGAIN: u32 = 128;
    /// The peer has ended with bytes of ours unread, and the kernel does not know ([`super::death`]).
    pub(crate) const RESET: u32 = 256;
    /// The error of that has not been reported yet.
    pub(crate) const RESET_UNTOLD: u32 = 512;
    /// It is `EPIPE`, and `ECONNRESET` otherwise.
    pub(crate) const RESET_IS_PIPE: u32 = 1024;
    /// The kernel has reported an error that ends the connection.
    pub(crate) const ERROR_SEEN: u32 = 2048;
    /// Somebody hears of room by edges: once it has been told, only after a call was refused ([`Conn::refuse`](super::Conn::refuse)).
    pub(crate) const HEARS_EDGES: u32 = 4096;
    /// It was made while there was no broker that could say whether the peer is one of us ([`Conn::adopt_unknown`](super::Conn::adopt_unknown)).
    pub(crate) const UNKNOWN_PEER: u32 = 8192;
    /// The other end is on another machine: the regions are in windows, and relays carry the bell.
    pub(crate) const FAR: u32 = 16384;
    /// The bell of such a connection has hung up though neither side has ended: a relay, an agent or the broker is gone.
    pub(crate) const LINK_LOST: u32 = 32768;
    /// After that, both sides send by TCP alone, and this one has unmapped the rings ([`super::parting`]).
    pub(crate) const PARTED: u32 = 65536;
}

/// How far the way to a ring has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum ConnStage {
    /// Counting bytes.
    Candidate = 1,
    /// Offered to the peer, or its offer taken: the two show their sockets to the broker in turn.
    Offered = 2,
    /// A ring each way is attached, whichever way the bytes go.
    Attached = 3,
    /// TCP permanently.
    Tcp = 4,
    /// A thread takes a step towards a ring, and holds the sending direction until it has stored the stage that follows. A thread that
    /// wants to enter the kernel waits for it ([`Conn::settle`]).
    Attaching = 5,
}

/// The block. All zeros when new.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct Conn {
    pub(super) holders: Holders,
    stage: AtomicU32,
    reason: AtomicU32,
    role: AtomicU32,
    flags: AtomicU32,
    low_water: AtomicU32,
    /// What the kernel knows of `TCP_CORK`, and is to be told before the next byte goes by it ([`options`]).
    cork: AtomicU32,
    /// What events on the kernel's socket said, and what has not been looked into yet.
    kernel_said: AtomicU32,
    /// Nanoseconds; 0 for ever.
    receive_timeout: AtomicU64,
    send_timeout: AtomicU64,
    /// Threads that sleep, or may sleep, in the kernel on this socket.
    in_kernel: AtomicU32,
    /// An error that the kernel has told once and that is to be told when the ring is empty; 0 if none.
    kernel_error: AtomicU32,
    /// Sending calls that were refused, wholly or in part, for want of room.
    refusals: AtomicU32,
    /// Calls that carried bytes.
    calls: AtomicU32,
    /// The segment of the peer's in which it was asked to go back to TCP last.
    asked: AtomicU32,
    /// Looks for the peer's answer since the last step towards a ring ([`bring_up`]).
    looks_for_answer: AtomicU32,
    /// The number of calls, or of bytes, at which it goes to a ring.
    due_calls: AtomicU64,
    due_bytes: AtomicU64,
    /// How far the two ends have come in showing their sockets ([`bring_up`]).
    shown: AtomicU32,
    /// The policy that it was judged by last.
    policy_seen: AtomicU32,
    /// The last change of offers that was looked at.
    offers_seen: AtomicU64,
    /// When the kernel was asked last whether the peer is alive, in [`sys::ticks`].
    looked_at: AtomicU64,
    /// When it was asked last, by a reader whose ring was empty, whether the end has come.
    asked_at: AtomicU64,
    addresses: candidate::AddressWords,
    tx: DirectionLock<tx::ConnTx>,
    rx: DirectionLock<rx::ConnRx>,
}

/// A connection that carries rings, seen from this process.
#[derive(Debug, Clone, Copy)]
struct Pages {
    local: &'static LocalState,
    own: &'static SocketPage<Own>,
    peer: &'static SocketPage<Peer>,
}

impl Pages {
    /// The direction that is read here, seen without holding it.
    #[inline]
    fn reading(&self) -> ReaderView<'static, Peer> {
        ReaderView { own: &self.own.control.rx, peer: &self.peer.control.tx }
    }

    /// The direction that is written here, seen without holding it.
    #[inline]
    fn writing(&self) -> WriterView<'static, Peer> {
        WriterView { own: &self.own.control.tx, peer: &self.peer.control.rx }
    }

    /// Whether the peer has said of either direction that it ends.
    #[inline]
    fn has_said_end(&self) -> bool {
        !self.reading().is_written() || !self.writing().is_read()
    }
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

    /// What the table says for descriptors of this connection.
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

    #[inline]
    pub(crate) fn stage(&self) -> ConnStage {
        match self.stage.load(Ordering::SeqCst) {
            1 => ConnStage::Candidate,
            2 => ConnStage::Offered,
            3 => ConnStage::Attached,
            5 => ConnStage::Attaching,
            _ => ConnStage::Tcp,
        }
    }

    fn set_stage(&self, stage: ConnStage) {
        self.stage.store(stage as u32, Ordering::SeqCst);
        self.show(self.state_of(stage));
    }

    /// In a child: shows it among its own.
    fn show_again(&self) {
        self.begin_line(self.fd());
        self.show(self.state_of(self.stage()));
    }

    /// The stage as people see it.
    fn state_of(&self, stage: ConnStage) -> LineState {
        match stage {
            // Not shown: what it is next is known in a moment.
            ConnStage::Candidate | ConnStage::Attaching => LineState::Counting,
            ConnStage::Offered => LineState::Offered,
            ConnStage::Attached if self.has(flags::WANT_TCP) => LineState::Down,
            ConnStage::Attached => LineState::Up,
            ConnStage::Tcp => LineState::Tcp,
        }
    }

    /// Number of its channel or offer; 0 if it has none.
    pub(crate) fn channel(&self) -> u64 {
        self.local().channel.load(Ordering::Relaxed)
    }

    /// Whether a ring is attached each way. Its bytes may go over TCP all the same.
    #[inline]
    pub(crate) fn is_up(&self) -> bool {
        self.stage.load(Ordering::Acquire) == ConnStage::Attached as u32
    }

    /// Whether other processes have it, too.
    pub(crate) fn is_shared(&self) -> bool {
        self.holders.has_others(process::kernel_pid())
    }

    /// Whether it may come to a ring yet.
    #[inline]
    pub(crate) fn is_candidate(&self) -> bool {
        matches!(self.stage(), ConnStage::Candidate | ConnStage::Offered | ConnStage::Attaching)
    }

    /// Why it is not on a ring.
    pub(crate) fn reason(&self) -> Reason {
        u8::try_from(self.reason.load(Ordering::Relaxed)).ok().and_then(Reason::from_number).unwrap_or_default()
    }

    /// Which side connected.
    pub(crate) fn role(&self) -> Role {
        u8::try_from(self.role.load(Ordering::Relaxed)).ok().and_then(Role::from_number).unwrap_or_default()
    }

    #[inline]
    pub(crate) fn has(&self, flag: u32) -> bool {
        self.flags.load(Ordering::Relaxed) & flag != 0
    }

    pub(crate) fn set_flag(&self, flag: u32, on: bool) {
        if on {
            self.flags.fetch_or(flag, Ordering::AcqRel);
        } else {
            self.flags.fetch_and(!flag, Ordering::AcqRel);
        }
    }

    /// A descriptor of it, for questions to the kernel.
    #[inline]
    pub(crate) fn fd(&self) -> c_int {
        self.local().fd()
    }

    /// The bell that we listen to; -1 if there is none.
    #[inline]
    pub(crate) fn link(&self) -> c_int {
        self.local().link()
    }

    #[inline]
    fn pages(&self) -> Option<Pages> {
        let local = self.local();
        // SAFETY: our region's berth is only ever filled by `Berth::create`. Its first page stays writable when it is vacated, so that
        // a store by a thread that does not know of that yet is harmless.
        let own = unsafe { local.own.own_page() }?;
        Some(Pages { local, own, peer: local.peer.peer_page()? })
    }

    /// Whether something can be read, or the end has come; a look without the kernel, and without any lock.
    pub(crate) fn readable(&self) -> RingReadiness {
        if !self.is_up() {
            return RingReadiness::AskKernel;
        }
        let Some(pages) = self.pages() else { return RingReadiness::AskKernel };
        let Pages { own, peer, .. } = pages;
        let always = flags::READ_SHUT | flags::BROKEN | flags::RESET;
        if self.has(always | flags::LEFT) {
            return if self.has(always) { RingReadiness::Yes } else { RingReadiness::AskKernel };
        }
        let seen = own.rx_path.seen.load(Ordering::Relaxed);
        let switches = load_acquire_u32(&peer.tx_path.switches);
        let waiting = self.takeable(pages);
        let low_water = u64::from(self.low_water.load(Ordering::Relaxed));
        match Way::after(seen) {
            Way::Ring => {
                if waiting > 0 && (waiting >= low_water || switches != seen && self.are_enough(waiting, low_water)) {
                    return RingReadiness::Yes;
                }
                let ended = pages.has_said_end() || self.has(flags::PEER_GONE);
                let asked = self.kernel_said.load(Ordering::Relaxed) != 0;
                if switches != seen || ended || asked { RingReadiness::AskKernel } else { RingReadiness::No }
            }
            // The switch up has been announced: what waits in the ring is next once TCP is read up to there. Bytes before it may
            // be under way still.
            Way::Tcp
                if switches != seen
                    && waiting > 0
                    && if low_water > 1 {
                        self.are_enough(waiting, low_water)
                    } else {
                        self.rx.counted.load(Ordering::Relaxed) == peer.tx_path.switched_at.load(Ordering::Relaxed)
                    } =>
            {
                RingReadiness::Yes
            }
            Way::Tcp => RingReadiness::AskKernel,
        }
    }

    /// Whether the bytes that wait in the ring and those in the kernel's queue are together what `SO_RCVLOWAT` asks for. At a switch,
    /// neither has to be enough alone.
    #[cold]
    fn are_enough(&self, waiting: u64, low_water: u64) -> bool {
        low_water > 1 && waiting + candidate::queued(sys::borrow(self.fd()), libc::FIONREAD).unwrap_or(0) >= low_water
    }

    /// Whether something can be written, or will fail at once; a look without the kernel, and without any lock.
    pub(crate) fn writable(&self) -> RingReadiness {
        if !self.is_up() {
            return RingReadiness::AskKernel;
        }
        let Some(pages) = self.pages() else { return RingReadiness::AskKernel };
        let Pages { own, local, .. } = pages;
        if self.has(flags::WRITE_SHUT | flags::BROKEN | flags::RESET) {
            return RingReadiness::Yes;
        }
        match Way::after(own.tx_path.switches.load(Ordering::Relaxed)) {
            Way::Tcp => RingReadiness::AskKernel,
            Way::Ring => {
                if !pages.writing().is_read() || self.has(flags::PEER_GONE) {
                    return RingReadiness::AskKernel;
                }
                let size = local.own.ring_size();
                if pages.writing().unread(size) <= size - tx::enough(size) {
                    RingReadiness::Yes
                } else if self.kernel_said.load(Ordering::Relaxed) & tx::ENDS != 0 {
                    RingReadiness::AskKernel
                } else {
                    RingReadiness::No
                }
            }
        }
    }

    /// Bytes that wait in the ring to be read.
    pub(crate) fn unread(&self) -> u64 {
        if !self.is_up() || self.has(flags::LEFT) {
            return 0;
        }
        self.pages().map_or(0, |pages| self.takeable(pages))
    }

    /// Bytes of ours that wait in the ring for the peer.
    pub(crate) fn unsent(&self) -> u64 {
        if !self.is_up() {
            return 0;
        }
        self.pages().map_or(0, |pages| pages.writing().unread(pages.local.own.ring_size()))
    }

    /// What the kernel's socket has been heard to say of its end: of `EPOLLRDHUP | EPOLLHUP | EPOLLERR`.
    pub(crate) fn has_hung_up(&self) -> u32 {
        self.kernel_said.load(Ordering::Relaxed) & (EventFlags::RDHUP | EventFlags::HUP | EventFlags::ERR).bits()
    }

    /// Whether either side has said that it sends or reads no more, or the peer has gone: then the kernel has news, now or soon.
    #[inline]
    pub(crate) fn is_ending(&self) -> bool {
        self.is_up()
            && (self.has(flags::PEER_GONE | flags::READ_SHUT | flags::WRITE_SHUT)
                || self.pages().is_some_and(|pages| pages.has_said_end()))
    }

    /// Whether the kernel may have an error to tell: it always may where bytes come from it.
    pub(crate) fn may_have_failed(&self) -> bool {
        !self.is_up() || self.is_ending() || self.readable() == RingReadiness::AskKernel
    }

    /// Moves when something new has come to be read.
    pub(crate) fn rx_mark(&self) -> u64 {
        self.pages().map_or(0, |pages| self.visible_tail(pages))
    }

    /// Changes when the peer's process had ended a connection before it sent what is in the ring (protocol T17).
    #[inline]
    pub(crate) fn ends(&self) -> u32 {
        self.pages().filter(|_| self.is_up()).map_or(0, |pages| pages.peer.tx_path.ends.load(Ordering::Relaxed))
    }

    /// Moves when a sending call was refused for want of room: that there is room again is news then.
    pub(crate) fn tx_mark(&self) -> u64 {
        u64::from(self.refusals.load(Ordering::Relaxed))
    }

    /// An event on the kernel's socket said this.
    pub(crate) fn note_kernel(&self, events: u32) {
        let end = EventFlags::IN | EventFlags::RDHUP | EventFlags::HUP | EventFlags::ERR;
        let events = events & end.bits();
        if events & !self.kernel_said.load(Ordering::Relaxed) != 0 {
            self.kernel_said.fetch_or(events, Ordering::Relaxed);
        }
    }

    /// An event on the link said this.
    pub(crate) fn note_link(&'static self, events: u32) {
        if events & (EventFlags::HUP | EventFlags::ERR).bits() != 0 {
            self.link_has_hung_up();
        }
    }

    /// Says in our region what we wait for, so that the peer rings. It is not taken back: the wish may be another thread's too,
    /// and one that has come true or is given up costs the peer one ring at most.
    ///
    /// To be followed by [`heavy_fence`], once for any number of connections, and another look; and if that finds nothing, by
    /// [`Conn::is_armed`].
    pub(crate) fn arm(&self, want: Interest) -> Armed {
        self.arm_for(want, 0)
    }

    /// The same for a sleep that ends by one bell of any of those that are armed for it, if it has a number ([`bell::sleep_number`]):
    /// the thread that is woken looks at all of them, and nobody else sleeps on any.
    pub(crate) fn arm_for(&self, want: Interest, sleep: u64) -> Armed {
        let mut armed = Armed::NOTHING;
        if !self.is_up() {
            // In an epoll set already, where it waits for its ring: what lies at the place of its region is another connection's past.
            return armed;
        }
        let Some(pages) = self.pages() else { return armed };
        let Pages { own, local, .. } = pages;
        if want.has(Interest::IN) {
            // A peer that does not see this yet has stored its bytes before our fence, and they are found by the look that follows.
            if own.rx_path.sleep.load(Ordering::Relaxed) != sleep {
                own.rx_path.sleep.store(sleep, Ordering::Relaxed);
            }
            // Rung for any byte beyond what is there: some may lie there unread, too few for `SO_RCVLOWAT` or told already to
            // who wants to hear of new ones only.
            armed.data = pages.reading().arm_from(self.visible_tail(pages));
        }
        if want.has(Interest::OUT) {
            let size = local.own.ring_size();
            // Rung when enough is free to be worth a wake-up.
            armed.room = Some(pages.writing().arm(size, tx::enough(size)));
        }
        armed
    }

    /// Somebody hears of room by edges. To be followed by the fence, and a look.
    pub(crate) fn hear_edges(&self) {
        if !self.has(flags::HEARS_EDGES) {
            self.set_flag(flags::HEARS_EDGES, true);
        }
    }

    /// Whether what was armed will be heard of. To be asked after the fence and a look that has found nothing: if not, something came
    /// between, and did not do or was taken by another thread. Then the sleeper arms and looks once more, at most [`ROUNDS`] times.
    pub(crate) fn is_armed(&self, armed: Armed) -> bool {
        let Some(pages) = self.pages().filter(|_| self.is_up()) else { return true };
        if self.has(flags::LINK_LOST) && !self.has(flags::PARTED) {
            // Nobody can ring: as long as bytes may come by the ring or leave it, and until it is unmapped, the sleeper looks.
            self.part_if_lost();
            if !self.is_on_tcp() || self.may_part_soon() {
                return false;
            }
        }
        (armed.data == AWAKE || pages.reading().is_armed(armed.data))
            && armed.room.is_none_or(|awaited| pages.writing().is_armed(awaited))
    }

    /// Whether the other end is on another machine.
    pub(crate) fn is_far(&self) -> bool {
        self.has(flags::FAR)
    }

    /// Says which core this thread is on (as [`partywall_region::wait::this_core`] numbers them), and whether the peer was on
    /// the same one when it last said: then it cannot get ahead while we spin.
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

    /// Does what the peer asks of a connection that nobody reads or writes just now. To be called after each ring of its link.
    pub(crate) fn attend(&'static self) {
        if self.is_up() {
            self.follow();
        }
    }

    /// A thread is about to sleep in the kernel on this connection, which has no ring yet.
    pub(crate) fn kernel_block_enter(&self) -> KernelSleep {
        loop {
            self.in_kernel.fetch_add(1, Ordering::SeqCst);
            let stage = self.stage();
            if matches!(stage, ConnStage::Candidate | ConnStage::Offered | ConnStage::Tcp) {
                abandoned::note(self.index());
                return KernelSleep::Entered;
            }
            self.in_kernel.fetch_sub(1, Ordering::SeqCst);
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
        // Not below 0: what looked abandoned may come back after all, on another stack of the same thread.
        let _ = self.in_kernel.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |count| count.checked_sub(1));
    }

    /// Why a call that was to go by the ring fails where there is none.
    #[cold]
    fn without_ring(&self, fd: c_int) -> Errno {
        if self.is_of(fd) && self.stage() == ConnStage::Attaching {
            // This very thread takes a step towards a ring, below a signal handler: the handler can neither wait for that nor use the socket,
            // which the broker may have at this moment.
            return Errno::AGAIN;
        }
        // Closed by another thread, and perhaps another connection's by now.
        Errno::BADF
    }

    /// When a call that waits now is to give up.
    fn deadline(timeout: &AtomicU64) -> Option<Duration> {
        match timeout.load(Ordering::Relaxed) {
            0 => None,
            nanoseconds => Some(sys::now() + Duration::from_nanos(nanoseconds)),
        }
    }
}

/// Times in a row that a sleeper arms again because something has come between ([`Conn::is_armed`]). After that it sleeps for a moment: a peer
/// that lies, and other threads that are busy, must not keep it awake.
pub(crate) const ROUNDS: u32 = 4;

/// Whether a thread may sleep in the kernel on a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum KernelSleep {
    /// It may, and counts as one that does until [`Conn::kernel_block_leave`].
    Entered,
    /// The connection has a ring by now, and the thread must sleep as those do.
    HasRing,
    /// This very thread takes a step towards a ring, below a signal handler. That step goes on when the handler has returned.
    OwnStep,
}

/// What stood when a sleeper had armed a connection.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Armed {
    /// The wish for data; [`AWAKE`] if it waits for none.
    data: u64,
    /// What of room; `None` if it waits for none.
    room: Option<Awaited>,
}

impl Armed {
    /// The same of somebody who hears of room by edges: who uses up what is there, and is refused more, arms for it ([`Conn::refuse`]).
    pub(crate) fn by_edges(self) -> Self {
        Self { room: self.room.filter(|awaited| !matches!(awaited, Awaited::There { .. })), ..self }
    }

    /// It waits for neither.
    pub(crate) const NOTHING: Self = Self { data: AWAKE, room: None };
    /// Beside the tail at which the room was there: no cursor comes as far.
    const THERE: u64 = 1 << 63;

    /// As two words.
    pub(crate) fn to_words(self) -> [u64; 2] {
        let room = match self.room {
            None => AWAKE,
            Some(Awaited::There { tail }) => Self::THERE | tail,
            Some(Awaited::Wish(wish)) => wish,
        };
        [self.data, room]
    }

    /// Of what [`Armed::to_words`] made.
    pub(crate) fn from_words([data, room]: [u64; 2]) -> Self {
        let room = match room {
            AWAKE => None,
            there if there & Self::THERE != 0 => Some(Awaited::There { tail: there & !Self::THERE }),
            wish => Some(Awaited::Wish(wish)),
        };
        Self { data, room }
    }
}

/// How a mover fences (protocol W4): in full. Who serves many connections sleeps often, and would interrupt all other processors each
/// time if movers did not.
pub(crate) const FENCING: Fencing = Fencing::Symmetric;

/// The sleeper's fence, for any number of connections that were armed before it.
#[inline]
pub(crate) fn heavy_fence() {
    std::sync::atomic::fence(Ordering::SeqCst);
}
