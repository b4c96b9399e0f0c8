//! The sending direction.

use super::cursor::Cursor;
use super::direction::{DirectionState, WORDS, optional};
use super::kernel_facts::SEND_ENDS;
use super::shown;
use super::waiters::{deadline as deadline_of, waiters};
use super::{Conn, Deadline, Interest, Pages, REPLACED, WaitOutcome, flags};
use crate::local::LocalState;
use crate::lock::Lock;
use crate::{real, sys};
use libc::{c_int, iovec};
use partywall_shm::counters::add;
use partywall_shm::half::{ROUNDS, WritingHalf};
use partywall_shm::held::HeldBack;
use partywall_shm::path::{Sender, Way};
use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// A large write is committed in pieces, so that the reader starts early.
pub(super) const PIECE: u64 = 64 << 10;
/// The most entries of a list that are handed to the kernel at once.
const ENTRIES: usize = 16;

/// A sender holds back no more than this: by TCP, a segment that is full is sent.
const SEGMENT: u64 = 64 << 10;

/// The most that a sender holds back in a ring of this size.
#[inline]
const fn most_held(capacity: u64) -> u64 {
    if SEGMENT < capacity / 2 { SEGMENT } else { capacity / 2 }
}

/// The state that the lock of the sending direction guards.
#[derive(Debug)]
pub(super) struct ConnTx {
    pub(super) half: WritingHalf,
    pub(super) path: Sender,
    /// The part of the ring that is held back.
    pub(super) holder: HeldBack,
    /// The byte of the ring that is sent next to a peer that has left it.
    pub(super) again: Option<u64>,
}

impl ConnTx {
    pub(super) const fn new(capacity: u64, sent: u64) -> Self {
        Self { half: WritingHalf::new(capacity), path: Sender::new(sent), holder: HeldBack::new(), again: None }
    }
}

impl DirectionState for ConnTx {
    #[inline]
    fn capacity(local: &LocalState) -> u64 {
        local.own.ring_size()
    }

    #[inline]
    fn private(local: &LocalState) -> &Lock {
        &local.sending
    }

    #[inline]
    fn words(&self) -> [u64; WORDS] {
        let path = u64::from(self.path.seen()) << 32 | u64::from(self.path.switches());
        let (held, again) = (optional(self.holder.from()), optional(self.again));
        [self.half.tail(), self.half.head(), self.path.total(), path, held, again]
    }

    #[inline]
    fn resume(capacity: u64, [tail, head, total, path, held, again]: [u64; WORDS]) -> Option<Self> {
        let again = again.checked_sub(1);
        if again.is_some_and(|from| from > tail || tail - from > capacity) {
            return None;
        }
        let half = WritingHalf::resume(capacity, tail, head)?;
        let path = Sender::resume(total, path as u32, (path >> 32) as u32)?;
        Some(Self { half, path, holder: HeldBack::resume(held.checked_sub(1), tail)?, again })
    }

    fn empty(capacity: u64) -> Self {
        Self::new(capacity, 0)
    }
}

impl Conn {
    /// Sends the rest of the cursor. Blocks as the socket would, unless `MSG_DONTWAIT` is among the flags.
    pub(crate) fn send(&'static self, fd: c_int, cursor: &mut Cursor<'_>, message: c_int) -> Result<usize, Errno> {
        let result = send_all(self, fd, cursor, message);
        if result == Err(Errno::PIPE) && message & libc::MSG_NOSIGNAL == 0 {
            raise_sigpipe();
        }
        result
    }

    /// Makes a sending call of the kernel past the cursor, for what only TCP can carry, of a connection that stays there. Its
    /// bytes are counted.
    pub(crate) fn send_past(&'static self, fd: c_int, dont_wait: bool, call: impl FnOnce() -> isize) -> isize {
        // The peer lets us leave the ring as soon as it has followed us there: at once, except for the first byte.
        let until = sys::now() + Duration::from_secs(1);
        loop {
            self.follow();
            let Some(pages) = self.pages() else { return sys::fail(self.without_ring(fd)) };
            let mut tx = match self.tx.hold() {
                Ok(tx) => tx,
                Err(error) => return sys::fail(error),
            };
            match (SendTurn { conn: self, pages, tx: &mut tx }).may_send(fd) {
                Ok(()) => {}
                // What has replaced it stays on TCP as well, and has no ring whose bytes come first.
                Err(REPLACED) => return call(),
                Err(error) => return sys::fail(error),
            }
            if tx.path.way() == Way::Tcp && !pages.owes() {
                let sent = call();
                tx.path.sent(u64::try_from(sent).unwrap_or(0));
                return sent;
            }
            drop(tx);
            if dont_wait || self.may_not_wait(fd) || sys::now() >= until {
                return sys::fail(Errno::AGAIN);
            }
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    /// Sleeps until this connection may be ready. The deadline is found out at the first sleep of a call, and looked at before each other one:
    /// where a peer changes its words all the time, no sleep begins, and none would find that the time is over. `has_moved`: the call has moved
    /// bytes already.
    pub(super) fn sleep(
        &'static self,
        interest: Interest,
        timeout: &std::sync::atomic::AtomicU64,
        deadline: &mut Option<Deadline>,
        has_moved: bool,
    ) -> Result<(), Errno> {
        if deadline.flatten().is_some_and(|deadline| sys::now() >= deadline) {
            return Err(Errno::AGAIN);
        }
        let deadline = *deadline.get_or_insert_with(|| deadline_of(timeout));
        // A timeout of the socket makes its calls fail even where handlers ask for a restart (see signal(7)). After any handler, a call that has
        // moved bytes returns their number.
        let may_restart = deadline.is_none() && !has_moved;
        match waiters().wait(self, interest, deadline, may_restart) {
            WaitOutcome::Ready => Ok(()),
            WaitOutcome::TimedOut => Err(Errno::AGAIN),
            WaitOutcome::Interrupted => {
                crate::signals::end_if_cancelled();
                if may_restart && crate::signals::all_restart() { Ok(()) } else { Err(Errno::INTR) }
            }
        }
    }

    /// Switches down, or lets the peer know that we would, if it is time; without anything to send.
    pub(super) fn follow(&'static self) {
        let Some(pages) = self.pages() else { return };
        let wants = pages.peer.rx_path.flags.load(Ordering::Relaxed) & partywall_shm::layout::path_flags::WANT_TCP != 0;
        if (wants || self.has(flags::WANT_TCP))
            && (Way::after(pages.own.tx_path.switches.load(Ordering::Relaxed)) == Way::Ring || pages.owes())
            && let Some(mut tx) = self.tx.try_hold()
            && self.is_up()
            && (SendTurn { conn: self, pages, tx: &mut tx }).choose_way() == Ok(Way::Tcp)
            && tx.path.way() == Way::Tcp
        {
            // The peer may sleep until this.
            self.bell().ring();
        }
        self.part_if_lost();
    }
}

fn send_all(conn: &'static Conn, fd: c_int, cursor: &mut Cursor<'_>, message: c_int) -> Result<usize, Errno> {
    conn.part_if_lost();
    let (dont_wait, more) = (message & libc::MSG_DONTWAIT != 0, message & libc::MSG_MORE);
    let (mut done, mut refused) = (0, 0);
    let mut deadline = None;
    loop {
        match try_send(conn, fd, cursor, more) {
            Ok(n) => {
                done += n;
                refused = if n > 0 { 0 } else { refused };
            }
            Err(Errno::AGAIN) => {}
            Err(REPLACED) if done > 0 => return Ok(done + conn.now().send_rest(fd, cursor, message)),
            Err(error) if done > 0 => {
                conn.errors().put_back(error);
                return Ok(done);
            }
            Err(error) => return Err(error),
        }
        if cursor.left() == 0 {
            return Ok(done);
        }
        if dont_wait || conn.may_not_wait(fd) || conn.tx.is_held_by_this_thread() {
            // As long as the room that has come is of use.
            refused += 1;
            if conn.refuse() && refused < ROUNDS {
                continue;
            }
            return if done > 0 { Ok(done) } else { Err(Errno::AGAIN) };
        }
        match conn.sleep(Interest::OUT, &conn.kernel.send_timeout, &mut deadline, done > 0) {
            Ok(()) => {}
            Err(_) if done > 0 => return Ok(done),
            Err(error) => return Err(error),
        }
    }
}

/// Sends what can be sent now; 0 or `EAGAIN` if nothing can. `more` is `MSG_MORE` or nothing.
fn try_send(conn: &'static Conn, fd: c_int, cursor: &mut Cursor<'_>, more: c_int) -> Result<usize, Errno> {
    let Some(pages) = conn.pages() else { return Err(conn.without_ring(fd)) };
    let mut tx = conn.tx.hold()?;
    let mut turn = SendTurn { conn, pages, tx: &mut tx };
    turn.may_send(fd)?;
    if cursor.left() == 0 {
        // An empty send fails where any send would, and is no reason to switch.
        if turn.tx.path.way() == Way::Ring && !is_over(conn, pages) {
            return Ok(0);
        }
        return conn.errors().noted(kernel_send(fd, &mut [], 0));
    }
    match turn.choose_way() {
        Ok(Way::Ring) => turn.send_on_ring(cursor, more != 0 || conn.kernel.is_corked()),
        Ok(Way::Tcp) => turn.send_on_tcp(fd, cursor, more),
        Err(error) => Err(error),
    }
}

/// What a thread does in the sending direction while it holds it.
#[derive(Debug)]
pub(super) struct SendTurn<'a> {
    pub(super) conn: &'static Conn,
    pub(super) pages: Pages<'a>,
    pub(super) tx: &'a mut ConnTx,
}

impl SendTurn<'_> {
    /// The errors that forbid sending on either route.
    #[inline]
    pub(super) fn may_send(&self, fd: c_int) -> Result<(), Errno> {
        let conn = self.conn;
        if conn.death().look_rarely() || conn.has(flags::PEER_GONE) {
            conn.death().look_for_reset();
        }
        if conn.has(flags::WRITE_SHUT | flags::BROKEN | flags::RESET) {
            if conn.has(flags::BROKEN) {
                return Err(Errno::CONNRESET);
            }
            // A reset that was not reported yet comes first.
            let mut error = conn.errors().take();
            if error.is_none() && !conn.has(flags::RESET) {
                error = conn.errors().noted(kernel_send(fd, &mut [], 0)).err();
            }
            return Err(error.unwrap_or(Errno::PIPE));
        }
        if conn.tx.is_broken() {
            return Err(conn.fail_permanently("a process died while it was sending"));
        }
        if conn.is_of(fd) && conn.is_up() { Ok(()) } else { Err(conn.without_ring(fd)) }
    }

    /// The route of the next byte. Switches if it is time to.
    #[inline]
    pub(super) fn choose_way(&mut self) -> Result<Way, Errno> {
        let Pages { own, peer, .. } = self.pages;
        let leave = self.tx.path.ask(&peer.rx_path).map_err(|e| self.conn.corrupt(e))?;
        if leave.has_left {
            return self.send_again().map(|()| Way::Tcp);
        }
        // Without a bell the way stays TCP, whatever else is wanted: `TCP_ONLY` may have been said (protocol T15.7).
        let ours = self.conn.has(flags::WANT_TCP | flags::LINK_LOST);
        if is_over(self.conn, self.pages) {
            if self.conn.death().look_for_reset() {
                // An unknown state is no end in order (protocol S4).
                let ended = if self.conn.has(flags::BROKEN) { Errno::CONNRESET } else { Errno::PIPE };
                return Err(self.conn.errors().take().unwrap_or(ended));
            }
            // The kernel knows what to say of it, now and from now on.
            self.conn.kernel.give_cork(self.conn.fd());
            return Ok(Way::Tcp);
        }
        match self.tx.path.way() {
            Way::Tcp if leave.may_go_up() && !ours => {
                self.tx.path.switch(&own.tx_path);
                self.conn.kernel.push_tcp(self.conn.fd());
            }
            Way::Ring if (leave.wants_tcp || ours) && leave.may_switch => {
                self.release_held();
                self.tx.path.switch(&own.tx_path);
                self.conn.kernel.give_cork(self.conn.fd());
            }
            way => return Ok(way),
        }
        add(&own.control.tx.counters.switches, 1);
        shown::sending(self.conn, self.tx.path.way());
        // The peer may have rung for it.
        self.conn.bell().drain();
        Ok(self.tx.path.way())
    }

    #[inline]
    fn send_on_ring(&mut self, cursor: &mut Cursor<'_>, more: bool) -> Result<usize, Errno> {
        let Pages { own, peer, local, .. } = self.pages;
        let mut done = 0;
        let piece = PIECE.min(self.tx.half.capacity() / 4);
        let wanted = cursor.left() as u64;
        let mut free = self.tx.half.free();
        if free < wanted {
            free = self.tx.half.refresh(&peer.control.rx).map_err(|e| self.conn.corrupt(e))?;
        }
        while cursor.left() > 0 {
            if free == 0 {
                free = self.tx.half.refresh(&peer.control.rx).map_err(|e| self.conn.corrupt(e))?;
                if free == 0 {
                    add(&own.control.tx.counters.stalls, 1);
                    // There is no room for what follows.
                    self.release_held();
                    break;
                }
            }
            let n = free.min(cursor.left() as u64).min(piece);
            // SAFETY: made by `Berth::create` at attaching, kept until both directions are held; this one's lock makes the
            // span ours alone.
            #[expect(unsafe_code, reason = "writes into our own ring")]
            let span = unsafe { local.own.own_span(self.tx.half.tail(), n) };
            let n = cursor.copy_into(span) as u64;
            if n == 0 {
                // The ring has gone though the direction is held: another process has changed what the connection keeps in shared memory.
                return Err(self.conn.fail_permanently("its ring was given up during a call"));
            }
            self.commit(n, more || cursor.left() > 0 && self.tx.holder.is_holding());
            free -= n;
            done += n as usize;
        }
        if done > 0 {
            add(&own.control.tx.counters.messages, 1);
        }
        Ok(done)
    }

    /// Publishes `n` bytes that were written at the tail. `more`: the program has said that others follow.
    #[inline]
    pub(super) fn commit(&mut self, n: u64, more: bool) {
        let Pages { own, peer, .. } = self.pages;
        if more {
            self.tx.holder.hold(&own.tx_path, self.tx.half.tail());
        }
        super::ends::show(&own.tx_path);
        let ring = self.tx.half.commit(&own.control.tx, Some(&peer.control.rx), n, super::FENCING);
        self.tx.path.sent(n);
        if self.tx.holder.is_holding()
            && (!more || self.tx.holder.held(self.tx.half.tail()) >= most_held(self.tx.half.capacity()))
        {
            self.release_held();
        }
        if ring && self.pages.wake_reader() {
            add(&own.control.tx.counters.bells_rung, 1);
        } else {
            add(&own.control.tx.counters.bells_saved, 1);
        }
    }

    /// The rest has gone by rings, which count themselves.
    fn show_sent(&self) {
        if let Some(line) = shown::line(self.conn) {
            line.tx.tcp.store(self.tx.path.total().wrapping_sub(self.tx.half.tail()), Ordering::Relaxed);
        }
    }

    /// Hands it to the kernel, without waiting there. The direction is held, so that bytes keep their order.
    fn send_on_tcp(&mut self, fd: c_int, cursor: &mut Cursor<'_>, more: c_int) -> Result<usize, Errno> {
        let mut space = [iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; ENTRIES];
        let mut done = 0;
        if let Some(error) = self.conn.errors().take() {
            return Err(error);
        }
        while cursor.left() > 0 {
            let list = cursor.rest(&mut space, u64::MAX);
            match self.send_to_kernel(fd, list, more) {
                Ok(n) => {
                    cursor.skip(n);
                    done += n;
                }
                Err(error) if done > 0 => {
                    self.conn.errors().put_back(error);
                    break;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(done)
    }

    /// Makes one call of the kernel, and counts its bytes. An error is recorded: the call has taken it out of the socket, and without the
    /// record [`PeerDeath::look_for_reset`](super::death::PeerDeath::look_for_reset) would take the rest for an end that was not reported.
    pub(super) fn send_to_kernel(&mut self, fd: c_int, list: &mut [iovec], more: c_int) -> Result<usize, Errno> {
        let answer = kernel_send(fd, list, more);
        match answer {
            Ok(n) => self.count_sent_by_kernel(n),
            Err(error) => self.note_failure_of_kernel(error),
        }
        answer
    }

    /// Counts bytes that the kernel's socket has accepted.
    pub(super) fn count_sent_by_kernel(&mut self, n: usize) {
        self.tx.path.sent(n as u64);
        self.show_sent();
    }

    /// Records an error of a sending call of the kernel.
    pub(super) fn note_failure_of_kernel(&self, error: Errno) {
        self.conn.errors().note(error);
        if error != Errno::AGAIN {
            self.conn.kernel.note(EventFlags::HUP.bits());
        }
    }
}

/// Whether the ring has no reader any more.
#[inline]
fn is_over(conn: &Conn, pages: Pages) -> bool {
    conn.kernel.said() & SEND_ENDS != 0 || !pages.writing().is_read() || conn.has(flags::PEER_GONE)
}

/// One sending call of the kernel, that neither waits nor raises a signal.
pub(crate) fn kernel_send(fd: c_int, list: &mut [iovec], more: c_int) -> Result<usize, Errno> {
    send_message(fd, list, libc::MSG_DONTWAIT | more)
}

/// One sending call of the kernel, that raises no signal.
pub(super) fn send_message(fd: c_int, list: &mut [iovec], flags: c_int) -> Result<usize, Errno> {
    let flags = libc::MSG_NOSIGNAL | flags;
    #[expect(unsafe_code, reason = "hands the caller's buffers to the kernel")]
    // SAFETY: a message of zeros except the list, whose entries are the caller's buffers.
    let sent = unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        message.msg_iov = list.as_mut_ptr();
        message.msg_iovlen = list.len();
        real::sendmsg(fd, &raw const message, flags)
    };
    sys::take(sent)
}

/// Raises the signal that the kernel sends to a thread that writes to a closed peer.
pub(super) fn raise_sigpipe() {
    #[expect(unsafe_code, reason = "raises a signal in this thread")]
    // SAFETY: a signal to this very thread, as the kernel would send it.
    unsafe {
        libc::pthread_kill(libc::pthread_self(), libc::SIGPIPE);
    }
}
