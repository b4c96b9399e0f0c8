//! The input is what a hostile guest sends over its serial port (protocol P), cut where the input says: decoding never fails but
//! with an error, keeps little, and hears the same however the stream was cut. The same bytes are read as a window's header.
#![no_main]

use partywall_protocol::port::{PortError, Decoder, Item, greeting};
use partywall_protocol::window::{BLOCK, WindowHeader};

libfuzzer_sys::fuzz_target!(|input: (u8, bool, Vec<u8>)| {
    let (step, greet, bytes) = input;
    let mut stream = if greet { greeting(7).to_vec() } else { Vec::new() };
    stream.extend_from_slice(&bytes);
    let whole = hear(&stream, stream.len().max(1));
    let cut = hear(&stream, usize::from(step).max(1));
    // A decoder that has not yet taken the bytes before a greeting discards them. Without a second greeting, both decoders produce the
    // same items.
    if whole.0.iter().chain(&cut.0).filter(|item| matches!(item, Item::Greeting(_))).count() <= 2 {
        assert_eq!(whole, cut);
    }
    for item in whole.0 {
        if let Item::Frame(frame) = item {
            let mut again = Vec::new();
            frame.encode(&mut again);
            let mut decoder = Decoder::default();
            decoder.push(&greeting(0));
            decoder.push(&again);
            assert_eq!(decoder.take(), Ok(Some(Item::Greeting(0))));
            assert_eq!(decoder.take(), Ok(Some(Item::Frame(frame))));
        }
    }
    let mut block = [0; BLOCK];
    let n = bytes.len().min(BLOCK);
    block[..n].copy_from_slice(&bytes[..n]);
    if let Some(header) = WindowHeader::decode(&block) {
        assert_eq!(WindowHeader::decode(&header.encode()), Some(header));
    }
});

fn hear(stream: &[u8], step: usize) -> (Vec<Item>, Option<PortError>) {
    let (mut decoder, mut heard) = (Decoder::default(), Vec::new());
    for piece in stream.chunks(step) {
        decoder.push(piece);
        loop {
            match decoder.take() {
                Ok(Some(item)) => heard.push(item),
                Ok(None) => break,
                Err(e) => return (heard, Some(e)),
            }
        }
    }
    (heard, None)
}
