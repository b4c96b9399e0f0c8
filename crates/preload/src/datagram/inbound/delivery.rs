//! Taking the next datagram, from a ring or from the kernel's queue (protocol U7).

use super::ring::{Inbound, join, ring_head};
use super::{DatagramRx, DatagramSource};
use crate::buffers::CallerBuffers;
use crate::conn::{Cursor, FENCING};
use crate::datagram::address::Wanted;
use crate::datagram::flow::FlowPlaces;
use crate::datagram::guarded::SharedMutexGuard;
use crate::datagram::{DatagramSocket, flags, kernel_queue};
use crate::log::log;
use crate::sys;
use libc::c_int;
use partywall_shm::corrupt::Corrupt;
use partywall_shm::counters::add;
use partywall_shm::half::Ending;
use partywall_shm::record;
use rustix::io::Errno;
use std::net::SocketAddr;
use std::sync::atomic::Ordering;

/// Calls in a row that rings may serve before the kernel's queue has its turn.
const TURNS: u32 = 16;

/// The result of a look for a datagram.
pub(in crate::datagram) enum DatagramFound {
    /// The result of the call.
    Datagram(usize),
    /// There is none now.
    Nothing,
}

impl DatagramSocket {
    /// Takes the next datagram, from a ring or from the kernel, without waiting.
    pub(in crate::datagram) fn try_receive(
        &self,
        fd: c_int,
        buffers: CallerBuffers<'_>,
        message: c_int,
        wanted: Wanted,
    ) -> Result<DatagramFound, Errno> {
        let Some(mut rx) = self.rx.hold() else { return Err(Errno::AGAIN) };
        let is_peek = message & libc::MSG_PEEK != 0;
        rx.turns += u32::from(!is_peek);
        // Each further round has given up a ring.
        while let Some(at) = self.next_ring(&mut rx, fd)? {
            rx.next = at + usize::from(!is_peek);
            rx.shown = is_peek.then_some(DatagramSource::Flow(rx.rings[at].channel));
            if let Some(n) = self.deliver(&mut rx, at, buffers, message, wanted)? {
                return Ok(DatagramFound::Datagram(n));
            }
        }
        rx.turns = 0;
        self.receive_from_kernel(rx, fd, buffers, message, wanted)
    }

    /// The ring in which the next datagram lies. `None`: the kernel's queue has the next one, or there is none.
    fn next_ring(&self, rx: &mut DatagramRx, fd: c_int) -> Result<Option<usize>, Errno> {
        match rx.shown {
            Some(DatagramSource::Kernel) if kernel_queue::has_something(fd) => return Ok(None),
            Some(DatagramSource::Flow(channel)) => {
                let is_shown = |ring: &mut Inbound| ring.channel == channel && ring.waiting() > 0;
                if let Some(at) = rx.in_use().iter_mut().position(is_shown) {
                    return Ok(Some(at));
                }
            }
            None if rx.turns >= TURNS && self.may_have_rings() => {
                rx.turns = 0;
                rx.sweep();
                // EDGE inbound: as in `DatagramSocket::longest_sleep`.
                self.inbound.store(rx.count(), Ordering::Release);
                // The kernel's queue first; but what its first sender has sent before by a ring comes before that.
                if let Some(from) = kernel_queue::peek_source(fd)? {
                    let of = |ring: &mut Inbound| ring.is_from(from) && ring.waiting() > 0;
                    return Ok(rx.in_use().iter_mut().position(of));
                }
            }
            _ => {}
        }
        let (next, count) = (rx.next, rx.count);
        Ok((0..count).map(|i| (next + i) % count).find(|&at| rx.rings[at].waiting() > 0))
    }

    /// Bytes of the next datagram, for `FIONREAD`. `None`: the kernel's answer holds.
    pub(in crate::datagram) fn next_len(&self, fd: c_int) -> Option<u32> {
        let mut rx = self.rx.hold()?;
        let next = self.next_ring(&mut rx, fd).unwrap_or_else(|error| {
            self.keep_error(error);
            None
        });
        if let Some(at) = next
            && let Some(len) = ring_head(&mut rx.rings[at])
        {
            rx.shown = Some(DatagramSource::Flow(rx.rings[at].channel));
            return Some(len);
        }
        // Its first answer may be older than the look at the rings.
        let is_in_kernel = kernel_queue::has_something(fd);
        rx.shown = is_in_kernel.then_some(DatagramSource::Kernel);
        if is_in_kernel { rustix::io::ioctl_fionread(sys::borrow(fd)).ok().map(|len| len as u32) } else { Some(0) }
    }

    /// The program was shown a datagram of the kernel's queue by a call that did not look at the rings.
    pub(in crate::datagram) fn note_peek_at_kernel(&self) {
        if let Some(mut rx) = self.rx.hold() {
            rx.shown = Some(DatagramSource::Kernel);
        }
    }

    /// Takes a datagram from a ring; returns the result of the call. `None`: its sender has broken the protocol, and the ring is given up.
    fn deliver(
        &self,
        rx: &mut DatagramRx,
        at: usize,
        buffers: CallerBuffers<'_>,
        message: c_int,
        wanted: Wanted,
    ) -> Result<Option<usize>, Errno> {
        let ring = &mut rx.rings[at];
        let (Some(len), Some(flow)) = (ring_head(ring), ring.flow) else {
            log!("a sender of datagrams broke the protocol");
            if let Some((own, _)) = ring.flow.and_then(FlowPlaces::pages) {
                ring.half.end(&own.control.rx, Ending::Corrupt(Corrupt::BadRecord));
            }
            rx.remove(at);
            // EDGE inbound: as in `DatagramSocket::longest_sleep`.
            self.inbound.store(rx.count(), Ordering::Release);
            return Ok(None);
        };
        #[expect(unsafe_code, reason = "takes the caller's buffers, and reads from the peer's ring")]
        // SAFETY: the buffers are valid by the contract of `CallerBuffers::new`; the flow is in use as in `ring_head`.
        let (cursor, span) = unsafe {
            let whole = record::footprint(len.into());
            (Cursor::new(buffers.list()), flow.peer.peer_span(ring.half.head(), whole))
        };
        let Some(mut cursor) = cursor else { return Err(Errno::INVAL) };
        let len = len as usize;
        let joins = self.has(flags::JOINS) && message & libc::MSG_PEEK == 0 && wanted.can_join();
        let is_faulty = !are_plausible_for(buffers, if joins { usize::MAX } else { len });
        let mut got = if is_faulty { 0 } else { cursor.copy_from(span.slice(record::HEADER as usize, len)) };
        let from = ring.from();
        if message & libc::MSG_PEEK == 0
            && let Some((own, peer)) = flow.pages()
        {
            let footprint = record::footprint(len as u64);
            ring.half.release(&own.control.rx, &peer.control.tx, footprint, FENCING);
            add(&own.control.rx.counters.messages, 1);
        }
        if is_faulty {
            // The kernel, too, takes the datagram out of its queue.
            return Err(Errno::FAULT);
        }
        let mut all = len;
        let space = wanted.control();
        if joins && got == len {
            got += join(ring, flow, len, &mut cursor);
            all = got;
        }
        let cut = if got < all { libc::MSG_TRUNC } else { 0 };
        wanted.give(from, self.has(flags::SIX), cut | message & libc::MSG_CMSG_CLOEXEC);
        if let (Some((space, room)), true) = (space, all > len) {
            // A datagram has less than 2^16 bytes.
            wanted.put_joined(space, room, len as c_int);
        }
        Ok(Some(if message & libc::MSG_TRUNC != 0 { all } else { got }))
    }

    /// A datagram has come by the kernel, from a sender that may be on another machine.
    pub(in crate::datagram) fn note_arrival(&self, from: SocketAddr) {
        let Some(mut rx) = self.rx.hold() else { return };
        rx.in_use().iter_mut().filter(|ring| ring.is_from(from)).for_each(|ring| ring.arrivals.count());
    }

    /// Asks the kernel, and tells the senders, if its queue is empty, that it was (protocol U7).
    fn receive_from_kernel(
        &self,
        mut rx: SharedMutexGuard<'_, DatagramRx>,
        fd: c_int,
        buffers: CallerBuffers<'_>,
        message: c_int,
        wanted: Wanted,
    ) -> Result<DatagramFound, Errno> {
        let sent = rx.sent();
        match kernel_queue::take(fd, buffers, message, wanted) {
            Err(Errno::AGAIN) => {
                rx.has_seen(&sent);
                Ok(DatagramFound::Nothing)
            }
            Err(error) => Err(error),
            Ok(taken) => {
                let is_peek = message & libc::MSG_PEEK != 0;
                rx.shown = is_peek.then_some(DatagramSource::Kernel);
                drop(rx);
                if !is_peek {
                    self.came_by_kernel(fd, taken.len, || taken.from);
                }
                Ok(DatagramFound::Datagram(taken.len))
            }
        }
    }

    /// Lets senders know that the kernel's queue is empty, if it is, and one of them waits for that.
    pub(in crate::datagram) fn settle(&self, fd: c_int) {
        let Some(mut rx) = self.rx.hold() else { return };
        let sent = rx.sent();
        let waits = |ring: &Inbound, sent: u32| {
            ring.flow
                .and_then(FlowPlaces::pages)
                .is_some_and(|(own, _)| own.rx_path.seen.load(Ordering::Relaxed) != sent)
        };
        if rx.in_use().iter().zip(sent).any(|(ring, sent)| waits(ring, sent)) && !kernel_queue::has_something(fd) {
            rx.has_seen(&sent);
        }
    }
}

/// Whether the first `len` bytes of the buffers may be memory of the program ([`CallerBuffers::are_plausible`]). The kernel does not look at the
/// buffers behind them.
fn are_plausible_for(buffers: CallerBuffers<'_>, len: usize) -> bool {
    let mut left = len;
    let used = buffers.list().iter().take_while(|one| {
        let is_used = left > 0;
        left = left.saturating_sub(one.iov_len);
        is_used
    });
    let used = used.count();
    #[expect(unsafe_code, reason = "takes a part of the caller's buffers")]
    // SAFETY: the first buffers of a list, each of which is valid by the contract of `CallerBuffers::new`.
    let used = unsafe { CallerBuffers::new(&buffers.list()[..used]) };
    used.are_plausible()
}
