//! Drivers that stop their queues under load, and start them with another size or other features, as the rules allow.
#![cfg(not(miri))]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

#[allow(dead_code, reason = "other tests use the rest")]
mod common;

use common::datagram::{cut_header, datagram, udp_at};
use common::{HANG, World, frame, introduce, mac, next};
use partywall_vhost::driver::plain_features;

/// The bytes of a datagram, and of each of its pieces.
const PAYLOAD: usize = 2500;
const PIECE: u16 = 1000;

/// The datagram of this number: three pieces, whose identifications follow one another.
fn numbered_datagram(number: u32) -> Vec<u8> {
    let id = 4 * number as u16;
    datagram(false, 0, id, &[&number.to_le_bytes()[..], &[number as u8; PAYLOAD - 4]].concat())
}

/// Datagrams that one driver gets of another that also restarts, each whole or cut.
#[derive(Default)]
struct Arrivals {
    /// The next number to be expected at the earliest.
    next: u32,
    /// Whole datagrams.
    count: u64,
    /// Pieces of the last datagram that are missing.
    missing: u32,
}

impl Arrivals {
    /// Takes a frame. It is cut if its receiver `cuts`, and comes behind all that have come.
    fn take(&mut self, frame: &[u8], cuts: bool) {
        let id = u32::from(u16::from_be_bytes([frame[12 + 18], frame[12 + 19]]));
        let (number, piece) = (id / 4, id % 4);
        let payload = usize::from(udp_payload());
        if !cuts {
            assert!(frame[12..] == numbered_datagram(number), "the datagram {number} has changed");
            assert_eq!(frame[..10], cut_header(false, 0, PIECE)[..10]);
            assert!(number >= self.next && self.missing == 0, "{number} has come after {}", self.next);
        } else {
            let at = usize::from(PIECE) * piece as usize;
            let body = &numbered_datagram(number)[payload..];
            let body = &body[at..(at + usize::from(PIECE)).min(body.len())];
            assert!(frame[12..] == datagram(false, 0, id as u16, body), "the piece {piece} of {number} has changed");
            assert_eq!(frame[..10], [0; 10], "an offload that was not negotiated");
            let behind = number == self.next - u32::from(self.missing > 0) && piece == 3 - self.missing;
            assert!(if piece == 0 { number >= self.next && self.missing == 0 } else { behind }, "{number} {piece}");
        }
        self.missing = if cuts { 2 - piece } else { 0 };
        self.count += u64::from(self.missing == 0);
        self.next = number + 1;
    }
}

/// Where a datagram's bytes begin in its frame.
fn udp_payload() -> u16 {
    (udp_at(false, 0) + 8) as u16
}

/// Two drivers send to each other. One of them stops its queues again and again, and starts them with another size and other features.
///
/// All frames of this driver arrive once and in order. Those to this driver arrive once and in order, unless they were sent while its queue was stopped.
fn restart_under_load(sizes: &[u16], features: &[u64]) {
    let world = World::new();
    let (mut a, mut b) = (world.driver("a"), world.driver("b"));
    // The datagrams go from station 1 to station 2.
    introduce(&mut b, 1);
    next(&mut a);
    introduce(&mut a, 2);
    next(&mut b);
    let whole = cut_header(false, 0, PIECE);
    let (mut there, mut back) = (0_u32, 0_u32);
    let (mut at_b, mut at_a) = (0_u32, Arrivals::default());
    let mut unsent = std::collections::VecDeque::new();
    let mut cuts = false;
    let numbered = |n: u32| [&frame(mac(1), mac(2), 1900)[..], &n.to_le_bytes()].concat();
    for round in 0..300 {
        // Fewer than the other has buffers for.
        while !unsent.is_empty() || there - at_b < 100 {
            let again: Option<&Vec<u8>> = unsent.front();
            let sent = again.map_or_else(|| numbered(there), |frame| frame[12..].to_vec());
            if !a.send(&sent).unwrap() {
                break;
            }
            there += u32::from(unsent.pop_front().is_none());
        }
        for _ in 0..5 {
            back += u32::from(b.send_with(&whole, &numbered_datagram(back)).unwrap());
        }
        let (size, features) = (sizes[round % sizes.len()], features[round % features.len()]);
        let stopped = a.restart(size, features).unwrap();
        stopped.received.iter().for_each(|frame| at_a.take(frame, cuts));
        stopped.unsent.into_iter().rev().for_each(|frame| unsent.push_front(frame));
        cuts = features != u64::MAX;
        while let Some(frame) = b.take().unwrap() {
            assert!(frame[12..] == numbered(at_b), "the frame {at_b} is lost or has come twice");
            at_b += 1;
        }
        b.ring_receive().unwrap();
    }
    for frame in unsent {
        while !a.send(&frame[12..]).unwrap() {}
    }
    while at_b < there {
        assert!(next(&mut b) == numbered(at_b), "the frame {at_b} is lost or has come twice");
        at_b += 1;
    }
    assert!(b.drain(HANG).unwrap());
    let counters = world.counters("a");
    while let Some(frame) = a.take().unwrap() {
        at_a.take(&frame, cuts);
    }
    let missed = counters.unplugged + counters.no_buffers;
    assert_eq!(at_a.count + missed, u64::from(back), "{counters:?}");
    assert!(at_a.count > 100 && there > 1000 && counters.broken == 0, "{} {there} {counters:?}", at_a.count);
}

#[test]
fn queue_resized_under_load_loses_no_frame() {
    restart_under_load(&[64, 256, 128, 32], &[u64::MAX]);
}

#[test]
fn features_renegotiated_under_load_lose_no_frame() {
    let event_idx = 1 << virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;
    restart_under_load(&[256], &[plain_features(), u64::MAX, plain_features() | event_idx]);
}
