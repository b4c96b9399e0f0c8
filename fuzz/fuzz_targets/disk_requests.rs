//! The input is a driver's descriptors and the header of a disk request: `crates/vhost/tests/inputs/disk_requests.rs`.
#![no_main]

#[path = "../../crates/vhost/tests/inputs/bytes.rs"]
mod bytes;
#[allow(dead_code, reason = "tests use the rest")]
#[path = "../../crates/vhost/tests/inputs/disk_requests.rs"]
mod disk_requests;

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    disk_requests::run(input);
});
