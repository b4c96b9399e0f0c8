//! The input owns the peer's words and bytes: the honest half calls corrupt exactly what the protocol forbids, and never
//! claims more than its ring.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    partywall_shm::oracle::hunt_bytes(input);
});
