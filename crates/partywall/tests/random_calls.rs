//! Peers of calls whose records and heap are made by chance. The fuzz target `call_records` runs the same with inputs that a fuzzer chooses.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod common;
#[path = "common/record_liar.rs"]
mod record_liar;

use common::hang_guard;
use common::world::World;
use record_liar::{LiedToServer, LyingServer};

/// Inputs by chance, the same each time.
fn inputs(seed: u64, count: usize) -> impl Iterator<Item = Vec<u8>> {
    let mut state = seed;
    let mut random = move || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as usize
    };
    (0..count).map(move |_| {
        let len = random() % 1500;
        std::iter::repeat_with(|| random() as u8).take(len).collect()
    })
}

#[test]
fn server_serves_others_whatever_a_client_sends() {
    let _guard = hang_guard();
    let world = World::new();
    let server = LiedToServer::new(world.web.clone());
    inputs(1, 150).for_each(|input| server.run(&input));
}

#[test]
fn client_survives_whatever_a_server_sends() {
    let _guard = hang_guard();
    let world = World::new();
    let mut server = LyingServer::new(world.web.clone());
    inputs(2, 60).for_each(|input| server.run(&input));
}
