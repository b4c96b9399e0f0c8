//! Inputs of the fuzz target `broker_sessions`, chosen by chance and the same each time.
//!
//! One test alone in this executable: it counts the descriptors of its process.
#![cfg(feature = "invariants")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking, in its helpers too"
)]

#[path = "common/fuse.rs"]
mod fuse;
#[path = "../../shm/tests/random/mod.rs"]
mod random;
#[path = "common/strangers.rs"]
mod strangers;

#[test]
fn sessions_of_strangers_leave_accounts_right_and_others_served() {
    let world = strangers::World::new();
    random::inputs(0, 150, 0..=300).for_each(|input| world.run(&input));
    // Two sessions share further regions, in all ways that the driver has: with all numbers, and given up by either side.
    for gives_up in 0..8 {
        for number in 1..5 {
            let [owner, other] = [0x0f, 0x1f];
            world.run(&[
                owner,
                1,
                number,
                gives_up,
                other,
                1,
                number + 1,
                gives_up,
                owner,
                1,
                number + 2,
                7 - gives_up,
            ]);
        }
    }
}
