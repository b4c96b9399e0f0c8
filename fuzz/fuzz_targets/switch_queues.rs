//! The input is what a guest writes into the queues of its card on a switch: `crates/vhost/tests/inputs/switch_queues.rs`.
#![no_main]

#[path = "../../crates/vhost/tests/inputs/bytes.rs"]
mod bytes;
#[allow(dead_code, reason = "tests use the rest")]
#[path = "../../crates/vhost/tests/common/mod.rs"]
mod common;
#[allow(dead_code, reason = "tests use the rest")]
#[path = "../../crates/vhost/tests/inputs/switch_queues.rs"]
mod switch_queues;

use std::sync::{LazyLock, Mutex, PoisonError};

/// One switch for all inputs.
static SCENE: LazyLock<Mutex<switch_queues::Scene>> = LazyLock::new(|| Mutex::new(switch_queues::Scene::new()));

libfuzzer_sys::fuzz_target!(|input: &[u8]| SCENE.lock().unwrap_or_else(PoisonError::into_inner).run(input));
