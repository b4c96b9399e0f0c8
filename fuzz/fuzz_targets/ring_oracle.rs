//! Both halves honest, in any order of operations: bytes, bells, switches and endings are what the model says.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    partywall_shm::oracle::run_bytes(input);
});
