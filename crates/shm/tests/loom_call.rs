//! The hand-over of records of calls under every interleaving (`call.rs`, protocol K2).
//!
//! `RUSTFLAGS="--cfg loom" cargo test --profile loom -p partywall-shm --test loom_call`
//!
//! A reader takes each record by its stamp or by the tail, whichever it sees first. It must get every record once, whole and in order, also
//! where a line is used again, and the tail that it loads later must never be older than a stamp that it has seen.
#![cfg(loom)]

use loom::thread;
use partywall_shm::call::{CallBytes, CallLine, CallRecord, RECORD, RecordKind};
use partywall_shm::consumer::Consumer;
use partywall_shm::layout::{RxHalf, TxHalf};
use partywall_shm::producer::Producer;
use partywall_shm::wake::Fencing;
use std::sync::Arc;

const LINES: usize = 2;
const CAPACITY: u64 = LINES as u64 * RECORD;
/// One more than there are lines, so that one line is used twice.
const RECORDS: u32 = 3;

struct Shared {
    lines: [CallLine; LINES],
    tx: TxHalf,
    rx: RxHalf,
}

fn record(id: u32) -> CallRecord {
    let bytes = CallBytes::Reference { address: u64::from(id), len: u64::from(id) << 32 };
    CallRecord { kind: RecordKind::Call, id, method: id, status: 0, bytes }
}

fn line(shared: &Shared, position: u64) -> &CallLine {
    &shared.lines[(position % CAPACITY / RECORD) as usize]
}

fn write(shared: &Shared) {
    let mut producer = Producer::new(CAPACITY);
    for id in 0..RECORDS {
        while producer.free() < RECORD && producer.refresh(&shared.rx).expect("the reader is honest") < RECORD {
            thread::yield_now();
        }
        let position = producer.tail();
        let line = line(shared, position);
        line.write(&record(id));
        // Without a peer to look for there is no fence, which would order the stamp by itself.
        producer.commit(&shared.tx, None::<&RxHalf>, RECORD, Fencing::Symmetric);
        line.stamp(position);
    }
}

fn read(shared: &Shared, by_tail: bool) {
    let mut consumer = Consumer::new(CAPACITY, 0);
    for id in 0..RECORDS {
        let line = line(shared, consumer.head());
        loop {
            if line.is_stamped(consumer.head()) {
                assert!(consumer.admit(RECORD));
            }
            // The writer stores the tail before the stamp: what this loads is never older, or `refresh` reports corruption.
            if by_tail {
                consumer.refresh(&shared.tx).expect("the writer is honest");
            }
            if consumer.available() >= RECORD {
                break;
            }
            thread::yield_now();
        }
        assert_eq!(line.snapshot().record(), Ok(record(id)));
        consumer.release(&shared.rx, &shared.tx, RECORD, Fencing::Symmetric);
    }
}

fn check(by_tail: bool) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(move || {
        let shared =
            Arc::new(Shared { lines: [CallLine::new(), CallLine::new()], tx: TxHalf::new(), rx: RxHalf::new() });
        let writer = thread::spawn({
            let shared = shared.clone();
            move || write(&shared)
        });
        read(&shared, by_tail);
        writer.join().expect("the writer ends");
    });
}

#[test]
fn loom_records_by_stamp_come_once_and_whole() {
    check(false);
}

#[test]
fn loom_records_by_stamp_or_tail_come_once_and_whole() {
    check(true);
}
