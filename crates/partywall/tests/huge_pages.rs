//! Rings on huge pages. These tests reserve the pages themselves where they may. Elsewhere, and where the operator has reserved none, they report
//! that and pass.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod common;

use common::huge_page_pool::{HugePages, free};
use common::process::alone;
use common::*;
use partywall::{Error, Options, RingSize};
use std::io::{Read, Write};
use std::thread;

/// Two regions of two pages each, a larger ring on either side, and some to spare.
const NEEDED: u64 = 32;

/// Runs a test in a separate process, while huge pages are there for it.
fn with_pages(test: &str, body: impl FnOnce()) {
    let Some(_pages) = HugePages::get(test, NEEDED) else { return };
    alone(test, || {
        let _guard = hang_guard();
        body();
    });
}

#[test]
fn streams_flow_through_huge_pages_and_grow_there() {
    with_pages("streams_flow_through_huge_pages_and_grow_there", stream_through_huge_pages);
}

#[test]
fn more_than_is_reserved_is_an_error_and_not_a_crash() {
    with_pages("more_than_is_reserved_is_an_error_and_not_a_crash", ask_for_more_than_is_reserved);
}

fn stream_through_huge_pages() {
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

fn ask_for_more_than_is_reserved() {
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
