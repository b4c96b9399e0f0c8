//! The players of the ring's models: the memory of both sides, a writer and a reader who drive the engine with loom's doorbells.
#![expect(unsafe_code, reason = "loom's cells hand out raw pointers")]

use std::sync::Arc;

use loom::cell::UnsafeCell;
use loom::sync::Notify;
use loom::sync::atomic::AtomicBool;
use partywall_shm::half::{self, Effect, Ending, Idle, Need};
use partywall_shm::layout::{RxHalf, TxHalf};
use partywall_shm::oracle::{byte, expect_bytes};
use partywall_shm::sync::{Ordering, fence};
use partywall_shm::wake::{AWAKE, must_ring};

use super::FENCING;

/// One ring's bytes, in memory that loom watches.
pub(crate) struct Ring(Vec<UnsafeCell<u8>>);

// SAFETY: that no two threads touch one cell at a time is what the models check; loom reports it if they do.
unsafe impl Send for Ring {}
// SAFETY: as above.
unsafe impl Sync for Ring {}

impl Ring {
    pub(crate) fn new(capacity: usize) -> Self {
        Self((0..capacity).map(|_| UnsafeCell::new(0)).collect())
    }

    pub(crate) fn capacity(&self) -> u64 {
        self.0.len() as u64
    }

    pub(crate) fn write(&self, at: u64, value: u8) {
        self.0[(at % self.capacity()) as usize].with_mut(|cell| {
            // SAFETY: the pointer is valid within this call, and loom has just checked that no other access is under way.
            unsafe { *cell = value }
        });
    }

    pub(crate) fn read(&self, at: u64) -> u8 {
        self.0[(at % self.capacity()) as usize].with(|cell| {
            // SAFETY: as above; loom has checked that no write is under way.
            unsafe { *cell }
        })
    }
}

/// The memory that both sides share. `rings` has every ring of the run, in the order of their generations.
pub(crate) struct Channel {
    pub(crate) tx: TxHalf,
    pub(crate) rx: RxHalf,
    pub(crate) rings: Vec<Ring>,
    pub(crate) to_reader: Notify,
    pub(crate) to_writer: Notify,
    /// The packet by which the writer gets its peer's half.
    pub(crate) attach: AtomicBool,
}

impl Channel {
    pub(crate) fn new(capacities: &[usize]) -> Arc<Self> {
        Arc::new(Self {
            tx: TxHalf::new(),
            rx: RxHalf::new(),
            rings: capacities.iter().map(|&c| Ring::new(c)).collect(),
            to_reader: Notify::new(),
            to_writer: Notify::new(),
            attach: AtomicBool::new(false),
        })
    }
}

/// Drives the engine, as `partywall` does, with loom's `Notify` for a doorbell.
pub(crate) struct Writer {
    pub(crate) channel: Arc<Channel>,
    pub(crate) producer: half::WritingHalf,
    pub(crate) attached: bool,
}

impl Writer {
    pub(crate) fn new(channel: &Arc<Channel>) -> Self {
        let producer = half::WritingHalf::new(channel.rings[0].capacity());
        Self { channel: channel.clone(), producer, attached: true }
    }

    /// Looks at its link, if it needs to, and at its peer's cursor, if it can.
    pub(crate) fn refresh(&mut self) -> u64 {
        // A flag in place of a packet: what is sent before it is there when it is.
        self.attached = self.attached || self.channel.attach.load(Ordering::Acquire);
        if self.attached {
            self.producer.refresh(&self.channel.rx).expect("the peer is honest");
        }
        self.producer.free()
    }

    /// Commits the next `n` bytes of the stream, for which there is room, in one piece.
    pub(crate) fn commit(&mut self, n: u64) {
        let ring = &self.channel.rings[self.producer.generation() as usize];
        for at in self.producer.tail()..self.producer.tail() + n {
            ring.write(at, byte(at));
        }
        let peer = self.attached.then_some(&self.channel.rx);
        if self.producer.commit(&self.channel.tx, peer, n, FENCING) {
            self.channel.to_reader.notify();
        }
    }

    /// Sleeps until `want` bytes are free (protocol W); false if the reader closed.
    pub(crate) fn wait(&mut self, want: u64) -> bool {
        loop {
            self.attached = self.attached || self.channel.attach.load(Ordering::Acquire);
            let peer = self.attached.then_some(&self.channel.rx);
            match self.producer.next(&self.channel.tx, peer, false, Need::Room(want), Idle::Sleep) {
                Effect::Ready => return true,
                Effect::Fence => fence(Ordering::SeqCst), // heavy
                Effect::Sleep { .. } => self.channel.to_writer.wait(),
                Effect::Ended(Ending::Orderly) => return false,
                other => panic!("an honest peer gave {other:?}"),
            }
        }
    }

    /// Writes `n` bytes in pieces of at most `piece`; false if the reader closed.
    pub(crate) fn write_all(&mut self, mut n: u64, piece: u64) -> bool {
        while n > 0 {
            let now = n.min(piece);
            if self.producer.free() < now && self.refresh() < now && !self.wait(now) {
                return false;
            }
            self.commit(now);
            n -= now;
        }
        true
    }

    /// Goes on in the next ring.
    pub(crate) fn switch(&mut self) {
        let next = self.producer.generation() as usize + 1;
        self.producer.switch(&self.channel.tx, self.channel.rings[next].capacity());
    }

    pub(crate) fn finish(mut self) {
        self.producer.finish(&self.channel.tx);
        FENCING.light();
        if !self.attached || must_ring(&self.channel.rx.control.data_wanted, 0, AWAKE) {
            self.channel.to_reader.notify();
        }
    }
}

pub(crate) struct Reader {
    pub(crate) channel: Arc<Channel>,
    pub(crate) consumer: half::ReadingHalf,
}

impl Reader {
    pub(crate) fn new(channel: &Arc<Channel>) -> Self {
        Self { channel: channel.clone(), consumer: half::ReadingHalf::new(channel.rings[0].capacity(), 0) }
    }

    pub(crate) fn refresh(&mut self) -> u64 {
        let available = self.consumer.refresh(&self.channel.tx).expect("the peer is honest");
        if available == 0 && self.consumer.must_switch() {
            let next = self.consumer.generation() as usize + 1;
            self.consumer.switch(&self.channel.rx, self.channel.rings[next].capacity());
            return self.refresh();
        }
        available
    }

    /// Reads, checks and releases the next `n` bytes, which are there.
    pub(crate) fn take(&mut self, n: u64) {
        let ring = &self.channel.rings[self.consumer.generation() as usize];
        let head = self.consumer.head();
        let got: Vec<u8> = (head..head + n).map(|at| ring.read(at)).collect();
        expect_bytes(head, &got);
        if self.consumer.release(&self.channel.rx, &self.channel.tx, n, FENCING) {
            self.channel.to_writer.notify();
        }
    }

    /// Sleeps until there is something to read (protocol W); false at the end of the stream.
    pub(crate) fn wait(&mut self, want: u64) -> bool {
        loop {
            match self.consumer.next(&self.channel.rx, Some(&self.channel.tx), false, want, Idle::Sleep) {
                Effect::Ready if self.consumer.available() > 0 => return true,
                // The next ring has to be taken.
                Effect::Ready => {
                    self.refresh();
                }
                Effect::Fence => fence(Ordering::SeqCst), // heavy
                Effect::Sleep { .. } => self.channel.to_reader.wait(),
                Effect::Ended(Ending::Orderly) => return false,
                other => panic!("an honest peer gave {other:?}"),
            }
        }
    }

    /// Reads to the end of the stream, at most `piece` bytes at a time; returns how much that was.
    pub(crate) fn read_to_end(mut self, piece: u64) -> u64 {
        while self.wait(1) {
            self.take(self.consumer.available().min(piece));
        }
        self.consumer.head()
    }

    pub(crate) fn close(mut self) {
        self.consumer.close(&self.channel.rx);
        FENCING.light();
        if must_ring(&self.channel.tx.control.space_wanted, 0, AWAKE) {
            self.channel.to_writer.notify();
        }
    }
}
