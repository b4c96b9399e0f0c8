//! The switch between TCP and the ring under every interleaving (`path.rs`, protocol T).
//!
//! `RUSTFLAGS="--cfg loom" cargo test --profile loom -p partywall-shm --test loom_path`
//!
//! TCP is a queue under a lock, as the kernel's is; the ring's bytes are loom cells, so that a byte read before it is known to be
//! there is a race that loom reports. A sender goes up and down as soon as its receiver lets it; the receiver follows, and must
//! get every byte once and in order, whichever way each has come.
#![cfg(loom)]
#![expect(unsafe_code, reason = "loom's cells hand out raw pointers")]

use std::collections::VecDeque;
use std::sync::Arc;

use loom::cell::UnsafeCell;
use loom::sync::Mutex;
use loom::thread;
use partywall_shm::consumer::Consumer;
use partywall_shm::layout::{RxHalf, RxPath, TxHalf, TxPath, path_flags};
use partywall_shm::path::{Receiver, Sender, Way};
use partywall_shm::producer::Producer;
use partywall_shm::sync::Ordering;
use partywall_shm::wake::Fencing;

/// Bytes of the stream, each other than the last.
const BYTES: u8 = 4;
const CAPACITY: usize = 4;

struct Shared {
    tcp: Mutex<VecDeque<u8>>,
    ring: Vec<UnsafeCell<u8>>,
    tx: TxHalf,
    rx: RxHalf,
    tx_path: TxPath,
    rx_path: RxPath,
}

// SAFETY: that no two threads touch one cell at a time is what the model checks; loom reports it if they do.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Shared {
    fn new() -> Self {
        let rx_path = RxPath::new();
        rx_path.flags.store(path_flags::WATCHING, Ordering::Relaxed);
        Self {
            tcp: Mutex::new(VecDeque::new()),
            ring: (0..CAPACITY).map(|_| UnsafeCell::new(0)).collect(),
            tx: TxHalf::new(),
            rx: RxHalf::new(),
            tx_path: TxPath::new(),
            rx_path,
        }
    }

    fn send(&self) {
        let (mut path, mut producer) = (Sender::new(0), Producer::new(CAPACITY as u64));
        for byte in 0..BYTES {
            let leave = path.ask(&self.rx_path).expect("the receiver is honest");
            match path.way() {
                Way::Tcp if leave.may_go_up() => path.switch(&self.tx_path),
                Way::Ring if leave.may_switch => path.switch(&self.tx_path),
                _ => {}
            }
            match path.way() {
                Way::Tcp => self.tcp.lock().expect("no thread panics").push_back(byte),
                Way::Ring => {
                    let at = producer.tail() as usize % CAPACITY;
                    // SAFETY: not committed yet, so no other thread looks at it; loom checks that.
                    self.ring[at].with_mut(|cell| unsafe { *cell = byte });
                    producer.commit(&self.tx, Some(&self.rx), 1, Fencing::Symmetric);
                }
            }
            path.sent(1);
        }
    }

    /// As the receiving direction of a connection does it: one byte, or none yet.
    fn receive(&self, path: &mut Receiver, consumer: &mut Consumer) -> Option<u8> {
        loop {
            match path.way() {
                Way::Ring => {
                    if consumer.refresh(&self.tx).expect("the sender is honest") > 0 {
                        let at = consumer.head() as usize % CAPACITY;
                        // SAFETY: committed and not released; loom checks that.
                        let byte = self.ring[at].with(|cell| unsafe { *cell });
                        path.received(1).expect("the sender is honest");
                        consumer.release(&self.rx, &self.tx, 1, Fencing::Symmetric);
                        return Some(byte);
                    }
                    path.refresh(&self.tx_path).expect("the sender is honest");
                    path.limit()?;
                    if consumer.refresh(&self.tx).expect("the sender is honest") == 0 {
                        assert!(path.pass(&self.rx_path), "the ring is empty before the end of its segment");
                    }
                }
                Way::Tcp => {
                    path.refresh(&self.tx_path).expect("the sender is honest");
                    if path.pass(&self.rx_path) {
                        continue;
                    }
                    let byte = self.tcp.lock().expect("no thread panics").pop_front();
                    if let Some(byte) = byte {
                        path.received(1).expect("TCP holds nothing of a later segment");
                        return Some(byte);
                    }
                    path.refresh(&self.tx_path).expect("the sender is honest");
                    if path.limit() != Some(0) {
                        return None;
                    }
                }
            }
        }
    }
}

#[test]
fn loom_every_byte_comes_once_and_in_order_by_either_way() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let shared = Arc::new(Shared::new());
        let sender = thread::spawn({
            let shared = shared.clone();
            move || shared.send()
        });
        let (mut path, mut consumer) = (Receiver::new(0), Consumer::new(CAPACITY as u64, 0));
        for expected in 0..BYTES {
            loop {
                match shared.receive(&mut path, &mut consumer) {
                    Some(byte) => {
                        assert_eq!(byte, expected);
                        break;
                    }
                    None => thread::yield_now(),
                }
            }
        }
        sender.join().expect("the sender ends");
    });
}
