//! Strangers in whole sessions with a broker (protocol C). The driver says what an input means: `crates/daemon/tests/common/strangers.rs`.
#![no_main]

#[path = "../../crates/daemon/tests/common/fuse.rs"]
mod fuse;
#[path = "../../crates/daemon/tests/common/strangers.rs"]
mod strangers;

use std::sync::OnceLock;

libfuzzer_sys::fuzz_target!(|input: &[u8]| world().run(input));

fn world() -> &'static strangers::World {
    static WORLD: OnceLock<strangers::World> = OnceLock::new();
    WORLD.get_or_init(strangers::World::new)
}
