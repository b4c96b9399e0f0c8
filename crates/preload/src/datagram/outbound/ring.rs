//! Writing datagrams into a ring (protocol U5).

use super::Sent;
use super::destination::Outbound;
use crate::buffers::CallerBuffers;
use crate::conn::{Cursor, FENCING};
use crate::datagram::flow::{FlowPlaces, proof_for_sender};
use crate::datagram::{DatagramSocket, address};
use crate::log::log;
use libc::c_int;
use partywall_protocol::directory::Proof;
use partywall_region::wait::this_core;
use partywall_shm::counters::add;
use partywall_shm::half::{Ending, WritingHalf};
use partywall_shm::layout::path_flags;
use partywall_shm::record;
use partywall_shm::sync::load_acquire_u32;
use std::sync::atomic::Ordering;

/// Looks at a full ring before a datagram is dropped: about as long as the kernel would take to carry it.
const LOOKS: u32 = 100;
/// Datagrams that one call may be split into. Later kernels take twice as many.
const SEGMENTS: usize = 64;
/// Sends to a receiver that has not read the last, before its cursor is looked at though there is room.
const DOUBT: u32 = 32;

impl DatagramSocket {
    pub(super) fn send_by_ring(
        &self,
        fd: c_int,
        one: &mut Outbound,
        buffers: CallerBuffers<'_>,
        (len, segment): (usize, u16),
    ) -> Sent {
        let Some((own, peer)) = one.flow.and_then(FlowPlaces::pages) else { return Sent::Kernel };
        // Each datagram goes by a ring only while both sockets are those that the ring is for (protocol U11).
        match proof_for_sender(one.channel) {
            Proof::Good => {}
            Proof::Stale => return Sent::Kernel,
            Proof::Ended { limit } => {
                self.take_back(fd, one, limit);
                return Sent::Kernel;
            }
            Proof::Unknown => {
                one.give_up();
                return Sent::Kernel;
            }
        }
        let core = this_core();
        if own.control.tx.control.cpu.load(Ordering::Relaxed) != core {
            own.control.tx.control.cpu.store(core, Ordering::Relaxed);
        }
        // EDGE ring-open, received: acquires what the receiver took from the kernel's queue before it opened the ring.
        if load_acquire_u32(&peer.rx_path.flags) & path_flags::WATCHING == 0
            || load_acquire_u32(&peer.rx_path.seen) != one.by_kernel
        {
            if !WritingHalf::is_read(Some(&peer.control.rx)) {
                one.give_up();
            }
            return Sent::Kernel;
        }
        let longest = if segment == 0 { usize::MAX } else { usize::from(segment) * SEGMENTS };
        if len > address::longest(one.to().ip()).min(longest)
            || !one.segments.have(segment, len)
            || record::footprint(len as u64) > one.half.capacity()
            // The kernel returns the error.
            || !buffers.are_plausible()
        {
            return Sent::Kernel;
        }
        // From here on the receiver waits for us before it sleeps (protocol U6).
        own.tx_path.switched_at.store(1, Ordering::Relaxed);
        FENCING.light();
        let sent = self.write_all(one, buffers, len, segment);
        // EDGE sender-idle: releases what was written to the ring; acquired in `wait_until_idle`.
        own.tx_path.switched_at.store(0, Ordering::Release);
        // Without room, the receiver's buffer is full: what it has no room for is dropped.
        sent.unwrap_or(Sent::Done(len))
    }

    /// Writes the datagrams of one call. `None`: for one of them there is no room, and those behind it are dropped with it.
    pub(super) fn write_all(
        &self,
        one: &mut Outbound,
        buffers: CallerBuffers<'_>,
        len: usize,
        segment: u16,
    ) -> Option<Sent> {
        let (_, peer) = one.flow?.pages()?;
        // Once for all: the receiver waits for us if it closes the ring meanwhile.
        if peer.rx_path.flags.load(Ordering::Relaxed) & path_flags::WATCHING == 0 {
            return Some(Sent::Kernel);
        }
        #[expect(unsafe_code, reason = "takes the caller's buffers")]
        // SAFETY: the buffers are valid by the contract of `CallerBuffers::new`.
        let mut cursor = unsafe { Cursor::new(buffers.list()) }?;
        let mut left = len;
        loop {
            let part = if segment == 0 { left } else { left.min(segment.into()) };
            match self.write(one, &mut cursor, part)? {
                Sent::Done(_) => left -= part,
                // The first ones have gone, and are not sent twice.
                _ if left < len => return None,
                other => return Some(other),
            }
            if left == 0 {
                return Some(Sent::Done(len));
            }
        }
    }

    /// Writes one datagram. `None`: no room.
    pub(super) fn write(&self, one: &mut Outbound, cursor: &mut Cursor<'_>, len: usize) -> Option<Sent> {
        let flow = one.flow?;
        let (own, peer) = flow.pages()?;
        let footprint = record::footprint(len as u64);
        one.unread += 1;
        let mut free = one.half.free();
        if free < footprint || one.unread >= DOUBT {
            let mut gave_way = false;
            let mut look = 0;
            loop {
                look += 1;
                free = match one.half.refresh(&peer.control.rx) {
                    Ok(free) => free,
                    Err(error) => {
                        log!("a receiver of datagrams broke the protocol: {error}");
                        one.half.end(&own.control.tx, Ending::Corrupt(error));
                        one.give_up();
                        return Some(Sent::Kernel);
                    }
                };
                if free >= footprint {
                    break;
                }
                if look < LOOKS {
                    std::hint::spin_loop();
                    continue;
                }
                // A receiver that is awake on this very core cannot make room while we have it.
                let core = partywall_region::wait::this_core();
                if gave_way
                    || core == 0
                    || flow.is_between_machines()
                    || peer.control.rx.control.cpu.load(Ordering::Relaxed) != core
                {
                    add(&own.control.tx.counters.stalls, 1);
                    return None;
                }
                std::thread::yield_now();
                (gave_way, look) = (true, 0);
            }
        }
        if one.half.is_drained() {
            one.unread = 0;
        }
        #[expect(unsafe_code, reason = "writes our ring")]
        // SAFETY: the ring is ours, and free from its tail on for this many bytes. It is used under this lock alone.
        let mut span = unsafe { flow.own.own_span(one.half.tail(), footprint) };
        // At most the ring's size.
        span.copy_from(0, &record::header(len as u32));
        #[expect(unsafe_code, reason = "the rest of a span")]
        // SAFETY: `footprint` is at least the header and `len`; the span is not used any more.
        let rest = unsafe { partywall_shm::bytes::OwnBytes::new(span.as_mut_ptr().add(record::HEADER as usize), len) };
        cursor.copy_into(rest);
        one.half.commit(&own.control.tx, Some(&peer.control.rx), footprint, FENCING);
        add(&own.control.tx.counters.messages, 1);
        Some(Sent::Done(len))
    }
}
