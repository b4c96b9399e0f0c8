//! Peers of calls whose records and heap are made by chance. The fuzz target `call_records` runs the same with inputs that a fuzzer chooses.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod common;
#[path = "../../shm/tests/random/mod.rs"]
mod random;
#[path = "common/record_liar.rs"]
mod record_liar;

use common::hang_guard;
use common::world::World;
use random::inputs;
use record_liar::{LiedToServer, LyingServer};

#[test]
fn server_serves_others_whatever_a_client_sends() {
    let _guard = hang_guard();
    let world = World::new();
    let server = LiedToServer::new(world.web.clone());
    inputs(1, 150, 0..=1499).for_each(|input| server.run(&input));
}

#[test]
fn client_survives_whatever_a_server_sends() {
    let _guard = hang_guard();
    let world = World::new();
    let mut server = LyingServer::new(world.web.clone());
    inputs(2, 60, 0..=1499).for_each(|input| server.run(&input));
}
