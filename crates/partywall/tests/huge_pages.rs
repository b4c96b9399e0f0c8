//! Rings on huge pages. They need pages that the operator has reserved; where there are none these tests say so and pass.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod common;

use common::*;
use partywall::{Error, Options, RingSize};
use std::io::{Read, Write};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;

const FREE: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages";
/// Two regions of two pages each, a larger ring on either side, and some to spare.
const NEEDED: u64 = 32;

fn free() -> u64 {
    std::fs::read_to_string(FREE).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0)
}

/// The machine's huge pages, for one test at a time; `None` if there are too few.
fn pages(test: &str) -> Option<MutexGuard<'static, ()>> {
    static PAGES: Mutex<()> = Mutex::new(());
    let turn = PAGES.lock().unwrap_or_else(PoisonError::into_inner);
    if free() >= NEEDED {
        return Some(turn);
    }
    // Past the harness, which keeps what tests print to itself.
    let _ = writeln!(
        std::io::stderr(),
        "NOT TESTED: {test}: fewer than {NEEDED} huge pages are free; `sysctl -w vm.nr_hugepages=64` reserves them"
    );
    None
}

#[test]
fn streams_flow_through_huge_pages_and_grow_there() {
    let _guard = hang_guard();
    let Some(_pages) = pages("streams_flow_through_huge_pages_and_grow_there") else { return };
    let before = free();
    let world = World::new();
    let options = adaptive(4096, 4 << 20).huge_pages(true);
    let mut listener = world.web.bind_with("echo", &options).unwrap();
    let mut there = world.shop.connect_with("web:echo", &options).unwrap();
    let mut here = listener.accept().unwrap().0;
    assert_eq!(there.writer().unwrap().ring_size(), 2 << 20, "the smallest ring of huge pages");
    assert!(free() <= before - 4, "two regions of two pages");
    let channel = there.channel_id().unwrap();
    let sizes = || world.shop.inspect(channel).unwrap().iter().map(|page| page.ring_size()).collect::<Vec<_>>();
    eventually("both sides are shown", || sizes() == [2 << 20, 2 << 20]);
    thread::scope(|s| {
        s.spawn(|| {
            // Twice around the first ring, in steps that do not divide it, and then through a larger one.
            let mut at = 0;
            while at < 5 << 20 {
                there.write_all(&Pattern.bytes(at, 99_999)).unwrap();
                at += 99_999;
            }
            let mut span = there.writer().unwrap().reserve(3 << 20).unwrap();
            Pattern.fill(at, &mut span);
            span.commit(3 << 20);
            assert_eq!(there.writer().unwrap().ring_size(), 4 << 20);
            there.writer().unwrap().finish();
        });
        let mut dice = Dice::new(3);
        Pattern.receive(&mut here, || dice.size(18));
    });
    here.write_all(b"and back").unwrap();
    there.read_exact(&mut [0; 8]).unwrap();
    drop((there, here));
    eventually("every page is given back", || free() == before);
}

#[test]
fn more_than_is_reserved_is_an_error_and_not_a_crash() {
    let Some(_pages) = pages("more_than_is_reserved_is_an_error_and_not_a_crash") else { return };
    let before = free();
    // The largest ring on either side: a machine with more pages than that has none to lack.
    let too_much = (before * (2 << 20)).next_power_of_two().min(1 << 30);
    if before * (2 << 20) > 2 * too_much {
        return;
    }
    let options = Options::default().ring(RingSize::Fixed(too_much)).huge_pages(true);
    assert_fails!(partywall::Stream::pair(&options), Error::Memory { .. });
    assert_eq!(free(), before, "nothing is kept of what was begun");
}
