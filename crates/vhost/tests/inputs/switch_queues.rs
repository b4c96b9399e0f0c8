//! The input is what a guest writes into the queues of its card on a real switch: descriptors, chains, frames with their headers, and
//! single bytes anywhere in the rings. After each input an honest frame still passes between two other ports, and what these ports have
//! received from the guest are frames.

use super::bytes::Input;
use super::common::datagram::{cut_header, datagram};
use super::common::{EVERYBODY, HANG, World, frame, mac};
use partywall_vhost::PortCounters;
use partywall_vhost::control::PortSpec;
use partywall_vhost::driver::{DriverOptions, GuestDriver};
use partywall_vhost::offload::{LONG, LONGEST};
use partywall_vhost::switch::MacAddress;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use vm_memory::{Bytes, GuestAddress};

/// Descriptors that an input uses.
const SOME: u16 = 16;

/// How long an honest frame may take before it is sent again.
const AGAIN: Duration = Duration::from_millis(500);

/// A switch with two honest ports, and one for the guests of the inputs.
pub(crate) struct Scene {
    world: World,
    a: GuestDriver,
    b: GuestDriver,
    path: PathBuf,
    sent: u64,
    /// The counters of the inputs' port after the last input.
    bad: PortCounters,
    /// Frames of guests of inputs that have arrived.
    pub(crate) arrived: u64,
}

impl Scene {
    pub(crate) fn new() -> Self {
        let world = World::with(|options| options.switch.floods = 0);
        let honest = |n| PortSpec { mac: vec![MacAddress(mac(n))], ..PortSpec::new(&n.to_string()) };
        let driver = |n| {
            let options =
                DriverOptions { features: partywall_vhost::driver::plain_features(), ..DriverOptions::default() };
            GuestDriver::connect(&world.add(honest(n)), options).expect("a port")
        };
        let (a, b) = (driver(1), driver(2));
        let path = world.add(PortSpec::new("bad"));
        Self { world, a, b, path, sent: 0, bad: PortCounters::default(), arrived: 0 }
    }

    /// Frames of guests of inputs that were none, or whose header contradicted them.
    pub(crate) fn malformed(&self) -> u64 {
        self.world.counters("bad").malformed
    }

    /// Queues that the switch has stopped because their drivers broke the rules.
    pub(crate) fn broken(&self) -> u64 {
        self.world.counters("bad").broken
    }

    pub(crate) fn run(&mut self, input: &[u8]) {
        let mut guest = GuestDriver::connect(&self.path, DriverOptions::default()).expect("a port");
        let mut input = Input(input);
        while !input.is_empty() {
            self.step(&mut guest, &mut input);
        }
        guest.transmit.ring_always().expect("a doorbell");
        guest.ring_receive().expect("a doorbell");
        self.honest_frame_passes();
        let counters = self.world.counters("bad");
        let (sent, bytes) = (counters.sent - self.bad.sent, counters.sent_bytes - self.bad.sent_bytes);
        // The switch does not pass on a frame without an Ethernet header either, so only the counters show what let it through.
        assert!(bytes >= 14 * sent, "{sent} frames of {bytes} bytes have counted as sent");
        self.bad = counters;
    }

    fn step(&mut self, guest: &mut GuestDriver, input: &mut Input<'_>) {
        let memory = guest.memory().clone();
        match input.byte() % 9 {
            what @ (0 | 1) => {
                let ring = if what == 0 { &guest.transmit } else { &guest.receive };
                let id = input.word() % SOME;
                let address = address(input, ring.place(id).0);
                let length = length(input);
                let (flags, next) = (u32::from(input.byte() % 8), u16::from(input.byte()) % (SOME + 1));
                ring.describe(&memory, id, address, length, flags, next).expect("a descriptor inside");
            }
            2 => guest.transmit.offer(&memory, input.word() % (SOME + 1)).expect("a ring inside"),
            3 => guest.transmit.ring_always().expect("a doorbell"),
            4 => {
                // The header, the addresses, and the first bytes of a packet.
                let place = guest.transmit.place(input.word() % SOME);
                let head: Vec<u8> = (0..input.byte() % 96).map(|_| input.byte()).collect();
                memory.write_slice(&head, place).expect("a buffer inside");
            }
            5 => {
                let part = [0, 0x5000, 0x6000][usize::from(input.byte() % 3)] + u64::from(input.byte() % 2) * 0x1_0000;
                let place = GuestAddress(part + u64::from(input.word() % 0x800));
                memory.write_obj(input.byte(), place).expect("an address inside");
            }
            6 => drop(self.a.send(&frame(EVERYBODY, mac(1), usize::from(input.word()))).expect("a frame")),
            7 => {
                // A frame as a driver sends it, with any header. The guest's own rings are not examined.
                let has_offloads = input.byte().is_multiple_of(4);
                let header: [u8; LONG] = std::array::from_fn(|_| if has_offloads { input.byte() } else { 0 });
                let to = [EVERYBODY, mac(2), mac(9)][usize::from(input.byte() % 3)];
                let body = input.word() >> (input.byte() % 16);
                let mut sent = [&header[..], &frame(to, mac(9), usize::from(body))].concat();
                let first = LONG + 12;
                for at in first..first + usize::from(input.byte() % 64) {
                    if let Some(byte) = sent.get_mut(at) {
                        *byte = input.byte();
                    }
                }
                // Some end within the Ethernet header, or in front of it.
                if input.byte().is_multiple_of(8) {
                    sent.truncate(LONG - 1 + usize::from(input.byte() % 16));
                }
                post(guest, input.word() % SOME, &sent);
            }
            _ => {
                // Datagrams in one frame, most of whose header is as it should be.
                let (v6, tags) = (input.byte() % 2 == 1, usize::from(input.byte() % 3));
                let payload = vec![7; usize::from(input.word() >> (input.byte() % 16)).min(60_000)];
                let mut sent = cut_header(v6, tags, input.word() >> (input.byte() % 16)).to_vec();
                sent.extend(datagram(v6, tags, 1, &payload));
                // The honest port has the source of the frame.
                sent[LONG + 6..LONG + 12].copy_from_slice(&mac(9));
                for _ in 0..input.byte() % 4 {
                    let at = usize::from(input.byte() % 96);
                    if let Some(byte) = sent.get_mut(at) {
                        *byte = input.byte();
                    }
                }
                if input.byte().is_multiple_of(8) {
                    sent.truncate(usize::from(input.byte()).max(1));
                }
                post(guest, input.word() % SOME, &sent);
            }
        }
        while let Some(got) = self.b.take().expect("a frame") {
            self.judge(&got);
        }
    }

    /// Checks that the received bytes are a frame.
    fn judge(&mut self, got: &[u8]) {
        let bytes = &got[LONG..];
        assert!((14..=LONGEST).contains(&bytes.len()), "{} bytes are no frame", bytes.len());
        // The honest port's address is its own.
        self.arrived += u64::from(bytes[6..12] != mac(1));
    }

    /// A frame for which the receiver had no buffers is sent again.
    fn honest_frame_passes(&mut self) {
        self.sent += 1;
        let sent = [&frame(mac(2), mac(1), 200)[..], &self.sent.to_le_bytes()].concat();
        let deadline = Instant::now() + HANG;
        loop {
            while self.a.take().expect("a frame").is_some() {}
            self.a.send(&sent).expect("a frame");
            while let Some(got) = self.b.wait(AGAIN).expect("a frame") {
                self.judge(&got);
                if got[LONG..] == sent {
                    return;
                }
            }
            assert!(Instant::now() < deadline, "the honest frame does not arrive");
        }
    }
}

/// Offers a header and its frame in one buffer, over others behind it.
fn post(guest: &mut GuestDriver, id: u16, sent: &[u8]) {
    let (memory, place) = (guest.memory().clone(), guest.transmit.place(id));
    memory.write_slice(sent, place).expect("a buffer inside");
    guest.transmit.describe(&memory, id, place.0, sent.len() as u32, 0, 0).expect("a descriptor inside");
    guest.transmit.offer(&memory, id).expect("a ring inside");
    guest.transmit.ring_always().expect("a doorbell");
}

/// An address that is often that of a buffer, or near an edge.
fn address(input: &mut Input<'_>, own: u64) -> u64 {
    let (class, n) = (input.byte(), u64::from(input.byte()));
    match class % 8 {
        0..=2 => own,
        3 => own + n,
        4 => 16 * n,
        5 => 0x5000 + 0x100 * n,
        6 => 0x1000_0000 - n,
        _ => u64::MAX - n,
    }
}

fn length(input: &mut Input<'_>) -> u32 {
    let (class, n) = (input.byte(), u32::from(input.byte()));
    match class % 8 {
        0 => n,
        1 => 12,
        2 => 12 + 14 + n,
        3 => 2048,
        4 => 256 * n,
        5 => 16 * n,
        6 => 0x8000 + n,
        _ => u32::MAX - n,
    }
}
