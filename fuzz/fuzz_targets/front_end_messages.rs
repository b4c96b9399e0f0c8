//! The input is what a front end sends to a disk: `crates/vhost/tests/inputs/front_end_messages.rs`.
#![no_main]

#[path = "../../crates/vhost/tests/inputs/bytes.rs"]
mod bytes;
#[allow(dead_code, reason = "tests use the rest")]
#[path = "../../crates/vhost/tests/inputs/front_end_messages.rs"]
mod front_end_messages;

use std::sync::{LazyLock, Mutex, PoisonError};

/// One disk for all inputs.
static SCENE: LazyLock<Mutex<front_end_messages::Scene>> = LazyLock::new(|| Mutex::new(front_end_messages::Scene::new()));

libfuzzer_sys::fuzz_target!(|input: &[u8]| SCENE.lock().unwrap_or_else(PoisonError::into_inner).run(input));
