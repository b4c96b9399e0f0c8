//! The input is a packet from a stranger (protocol C): decoding never fails but with an error, and what it accepts is the
//! one encoding of what it says.
#![no_main]

use partywall_shm::wire::{self, Message};

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let Ok((request, message)) = wire::decode(input) else {
        // Whom to refuse can be asked of any packet.
        let _ = wire::request_of(input);
        return;
    };
    assert!(input.len() <= wire::MAX_PACKET);
    assert_eq!(wire::request_of(input), Some(request), "two readings of one header");
    let mut again = Vec::new();
    wire::encode(request, &message, &mut again);
    // The encoder cuts texts for people that are longer than it would ever write; everything else comes back as it was.
    if again != input {
        assert!(input.len() > wire::MAX_STRING, "{message:?} encodes to {again:?}");
        let once: (u32, Message) = wire::decode(&again).expect("what was encoded can be decoded");
        let mut twice = Vec::new();
        wire::encode(once.0, &once.1, &mut twice);
        assert_eq!(twice, again, "encoding settles");
    }
});
