//! The real ring against the model, and against an adversary, with operations chosen by chance.
//!
//! Proptest shrinks what fails and prints it; the printed bytes are an input of the fuzz target of the same driver, too.
#![cfg(not(loom))]

mod random;

use partywall_shm::oracle::{Findings, Op, Setup, Tally, hunt_bytes, run, run_bytes};
use partywall_shm::state::End;
use partywall_shm::wake::Fencing;
use proptest::collection::vec;
use proptest::prelude::*;
use random::inputs;

/// Interpreters are some hundred times slower.
const CASES: u32 = if cfg!(miri) { 8 } else { 4000 };

fn config() -> ProptestConfig {
    ProptestConfig { cases: CASES, failure_persistence: None, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn operations_in_any_order_match_the_model(input in vec(any::<u8>(), 0..300)) {
        run_bytes(&input);
    }

    #[test]
    fn adversary_gets_no_more_than_the_protocol_allows(input in vec(any::<u8>(), 0..300)) {
        hunt_bytes(&input);
    }
}

/// Tests that reach nothing cannot fail.
#[test]
fn random_inputs_reach_every_feature() {
    let count = if cfg!(miri) { 200 } else { 20_000 };
    let (mut sum, mut found) = (Tally::default(), Findings::default());
    let (mut orderly, mut dead, mut neither) = (0, 0, 0);
    for input in inputs(0, count, 200..=200) {
        let tally = run_bytes(&input);
        sum.bytes += tally.bytes;
        sum.switches += tally.switches;
        sum.sleeps += tally.sleeps;
        sum.bells += tally.bells;
        sum.resets += tally.resets;
        match tally.end {
            Some(End::Orderly) => orderly += 1,
            Some(_) => dead += 1,
            None => neither += 1,
        }
        let findings = hunt_bytes(&input);
        found.bytes += findings.bytes;
        found.switches += findings.switches;
        found.corrupt += findings.corrupt;
        found.bells += findings.bells;
        found.sleeps += findings.sleeps;
        found.ends += findings.ends;
        found.jumps += findings.jumps;
    }
    assert!(sum.bytes > count * 10 && sum.switches > count / 10, "{sum:?}");
    assert!(sum.sleeps > count / 10 && sum.bells > count / 10, "{sum:?}");
    assert!(sum.resets > count / 100, "{sum:?}");
    assert!(orderly > count / 20 && dead > count / 30 && neither > count / 20, "{orderly} {dead} {neither}");
    assert!(found.bytes > count && found.switches > count / 1000, "{found:?}");
    assert!(found.corrupt > count / 2 && found.bells > count / 100, "{found:?}");
    assert!(found.sleeps > count / 100 && found.ends > count / 10, "{found:?}");
    assert!(found.jumps > count / 100, "{found:?}");
}

fn honest(messages: bool) -> Setup {
    Setup { size: 0, messages, attached: true, fencing: Fencing::Symmetric }
}

/// A ring of eight bytes, many times around, each read in the pieces that the writer did not write.
#[test]
fn bytes_survive_many_revolutions() {
    let ops = (0..=u8::MAX).flat_map(|i| [Op::Write(1 + i % 8), Op::Read(1 + (i / 3) % 8)]);
    let tally = run(honest(false), ops);
    assert!(tally.bytes > 500 && tally.end == Some(End::Orderly), "{tally:?}");
}

/// A second switch may not overtake the first: the reader has one word to learn of it, and would miss the bytes between.
#[test]
fn ring_without_reader_progress_is_not_replaced() {
    let ops = [Op::Switch(1), Op::Write(3), Op::RefreshWriter, Op::Switch(2), Op::Write(4), Op::Read(9), Op::Read(9)];
    let tally = run(honest(false), ops);
    assert_eq!((tally.bytes, tally.switches), (7, 1));
}

/// But one that is unused may be: a writer that wants a larger one need not write into the smaller to get it.
#[test]
fn unused_ring_is_replaced() {
    let ops =
        [Op::Write(2), Op::Switch(1), Op::Switch(2), Op::Read(9), Op::RefreshReader, Op::Switch(3), Op::Write(40)];
    let tally = run(honest(false), ops);
    assert_eq!((tally.bytes, tally.switches), (42, 3));
}

/// After a switch the reader's wish may lie beyond what its ring will ever hold: it must not sleep on that.
#[test]
fn reader_does_not_sleep_across_switch() {
    let ops = [Op::Write(2), Op::ArmReader(6), Op::Switch(1), Op::Write(9), Op::SleepReader, Op::Read(9), Op::Read(9)];
    let tally = run(honest(false), ops);
    assert_eq!((tally.bytes, tally.switches), (11, 1));
}

/// Bytes that were committed before a death are read first, and then the reader sees the death.
#[test]
fn dead_peers_bytes_are_read_to_the_end() {
    let tally = run(honest(true), [Op::Write(0), Op::KillWriter, Op::Write(0)]);
    assert_eq!((tally.bytes, tally.end), (8, Some(End::Dead)));
}
