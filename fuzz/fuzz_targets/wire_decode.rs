//! The input is a packet from a stranger (protocol C): decoding never fails but with an error, and what it accepts is the
//! one encoding of what it says. The codec that does not allocate agrees.
#![no_main]

use partywall_protocol::wire;

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    check(input);
    // Chance seldom finds a whole header: the same bytes as the fields of a kind that they choose.
    if let Some((&kind, fields)) = input.split_first() {
        let mut packet = wire::MAGIC.to_le_bytes().to_vec();
        packet.extend_from_slice(&u16::from(kind).to_le_bytes());
        packet.extend_from_slice(&7u32.to_le_bytes());
        packet.extend_from_slice(fields);
        assert_eq!(wire::request_of(&packet), Some(7));
        check(&packet);
    }
});

fn check(packet: &[u8]) {
    let borrowed = wire::decode_borrowed(packet);
    let (request, message) = match (wire::decode(packet), &borrowed) {
        (Ok(read), Ok((request, borrowed))) => {
            assert_eq!((*request, wire::Message::own(borrowed.clone())), read);
            read
        }
        (Err(ours), Err(theirs)) => return assert_eq!(&ours, theirs),
        (owned, borrowed) => panic!("{owned:?}, but borrowed {borrowed:?}"),
    };
    assert!(packet.len() <= wire::MAX_PACKET);
    assert_eq!(wire::request_of(packet), Some(request), "two readings of one header");
    let again = encode(request, &message);
    if let Ok((request, borrowed)) = &borrowed {
        let mut memory = [0; wire::MAX_PACKET];
        assert_eq!(wire::encode_into(*request, borrowed, &mut memory), Some(&again[..]));
    }
    if again != packet {
        // The encoder cuts strings that are longer than it would ever write; everything else comes back as it was.
        assert!(packet.len() > wire::MAX_STRING, "{message:?} encodes to {again:?}");
        let (request, message) = wire::decode(&again).expect("what was encoded can be decoded");
        assert_eq!(encode(request, &message), again, "encoding settles");
    }
}

fn encode(request: u32, message: &wire::Message) -> Vec<u8> {
    let mut packet = Vec::new();
    wire::encode(request, message, &mut packet);
    packet
}
