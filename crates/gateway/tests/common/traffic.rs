//! Bytes whose position is known by their value: what arrives can be checked to be the beginning of what was sent.

use std::io::{self, Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};

use partywall::{Domain, Listener, ReadHalf, Stream, WriteHalf};

use super::eventually;

const CHUNK: usize = 16 << 10;

/// The bytes at a position, which is a multiple of 8.
fn bytes_at(position: u64) -> Vec<u8> {
    let word = |n: u64| (position / 8 + n).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes();
    (0..CHUNK as u64 / 8).flat_map(word).collect()
}

/// How a direction of a stream has ended for one of its ends.
#[derive(Debug)]
pub(crate) struct DirectionEnd {
    pub(crate) bytes: u64,
    /// `None` after an orderly end.
    pub(crate) error: Option<io::Error>,
}

/// What one end of a stream sends and receives, until that fails or is to end.
#[derive(Debug)]
pub(crate) struct Traffic {
    received: Arc<AtomicU64>,
    sender: JoinHandle<DirectionEnd>,
    receiver: JoinHandle<DirectionEnd>,
}

impl Traffic {
    /// Sends until `stop`, and checks what comes.
    pub(crate) fn start(stream: Stream, stop: &Arc<AtomicBool>) -> Self {
        let (Some(reader), Some(writer)) = stream.into_halves() else { panic!("one way") };
        let (received, stop) = (Arc::new(AtomicU64::new(0)), Arc::clone(stop));
        let count = Arc::clone(&received);
        Self {
            received,
            sender: thread::spawn(move || send(writer, &stop)),
            receiver: thread::spawn(move || receive(reader, &count)),
        }
    }

    /// Waits until this number of further bytes has come.
    pub(crate) fn wait_for(&self, more: u64) {
        let until = self.received.load(Ordering::Relaxed) + more;
        eventually("bytes come", || self.received.load(Ordering::Relaxed) >= until || self.receiver.is_finished());
        assert!(self.received.load(Ordering::Relaxed) >= until, "the stream has ended early");
    }

    /// Waits until both directions have ended. Returns what was sent, and what has come.
    pub(crate) fn end(self) -> (DirectionEnd, DirectionEnd) {
        eventually("both directions end", || self.sender.is_finished() && self.receiver.is_finished());
        (self.sender.join().unwrap(), self.receiver.join().unwrap())
    }
}

fn send(mut writer: WriteHalf, stop: &AtomicBool) -> DirectionEnd {
    let mut bytes = 0;
    while !stop.load(Ordering::Relaxed) {
        if let Err(error) = writer.write_all(&bytes_at(bytes)) {
            return DirectionEnd { bytes, error: Some(error) };
        }
        bytes += CHUNK as u64;
    }
    writer.finish();
    DirectionEnd { bytes, error: None }
}

fn receive(mut reader: ReadHalf, count: &AtomicU64) -> DirectionEnd {
    let (mut buffer, mut expected, mut bytes) = (vec![0; CHUNK], Vec::new(), 0);
    loop {
        let came = match reader.read(&mut buffer) {
            Ok(0) => return DirectionEnd { bytes, error: None },
            Ok(came) => came,
            Err(error) => return DirectionEnd { bytes, error: Some(error) },
        };
        while expected.len() < came {
            expected.extend(bytes_at(bytes + expected.len() as u64));
        }
        assert!(buffer[..came] == expected[..came], "another byte than was sent, within {came} at {bytes}");
        expected.drain(..came);
        bytes += came as u64;
        count.store(bytes, Ordering::Relaxed);
    }
}

/// A stream that is busy in both directions: the ends of the client and of the server.
pub(crate) fn busy_stream(
    client: &Domain,
    target: &str,
    listener: &mut Listener,
    stop: &Arc<AtomicBool>,
) -> [Traffic; 2] {
    let stream = super::connect(client, target);
    let (served, _) = listener.accept().unwrap();
    let both = [stream, served].map(|stream| Traffic::start(stream, stop));
    both.iter().for_each(|end| end.wait_for(2_000_000));
    both
}

/// Both directions have ended in order, with all bytes.
pub(crate) fn assert_in_order([client, server]: [Traffic; 2]) {
    let ((sent_there, came_back), (sent_back, came_there)) = (client.end(), server.end());
    for (sent, came) in [(sent_there, came_there), (sent_back, came_back)] {
        assert!(sent.error.is_none() && came.error.is_none() && sent.bytes == came.bytes, "{sent:?} {came:?}");
    }
}
