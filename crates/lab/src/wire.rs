//! The frames between a lab and its helper in the guest, over a serial port that is a plain stream of bytes.
//!
//! ```text
//!   | magic u32 | len u32 | id u32 | kind u8 | len bytes |
//! ```
//!
//! Both sides are ours and trust each other. But a guest can be reset in the middle of a frame. So the helper begins with [`greeting`],
//! which occurs nowhere else, and the lab discards everything before it.

use std::io::{self, Read, Write};

const MAGIC: u32 = u32::from_le_bytes(*b"PWLB");
const HEADER: usize = 13;
/// The longest payload.
pub const MAX: usize = 256 << 10;
/// The name of the serial port.
pub const PORT: &str = "partywall.lab";

/// The kind of a frame. The payload is in brackets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum FrameKind {
    /// To the guest: start a program [arguments, each ended by NUL].
    Run = 1,
    /// To the guest: input of that program, or content of that file [bytes; an empty frame is the end].
    Input = 2,
    /// To the guest: send it a signal (number i32).
    Signal = 3,
    /// To the guest: a file comes (mode u32, path).
    Put = 4,
    /// To the guest: send a file (path).
    Get = 5,
    /// From the guest: it wrote to its standard output (bytes).
    Stdout = 16,
    /// From the guest: to its standard error (bytes).
    Stderr = 17,
    /// From the guest: it has ended (exit status, or minus the signal, i32).
    Exited = 18,
    /// From the guest: content of the file (bytes).
    Data = 19,
    /// From the guest: the file is complete.
    Done = 20,
    /// From the guest: it cannot be done (why).
    Failed = 21,
}

impl FrameKind {
    fn from_byte(byte: u8) -> Option<Self> {
        use FrameKind::*;
        [Run, Input, Signal, Put, Get, Stdout, Stderr, Exited, Data, Done, Failed]
            .into_iter()
            .find(|kind| *kind as u8 == byte)
    }
}

/// One message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommandFrame {
    /// The number of the command that it belongs to.
    pub id: u32,
    /// The kind of the frame.
    pub kind: FrameKind,
    /// The payload.
    pub payload: Vec<u8>,
}

/// Writes one frame.
pub fn write(out: &mut impl Write, id: u32, kind: FrameKind, payload: &[u8]) -> io::Result<()> {
    debug_assert!(payload.len() <= MAX);
    let mut frame = Vec::with_capacity(HEADER + payload.len());
    frame.extend_from_slice(&MAGIC.to_le_bytes());
    frame.extend_from_slice(&u32::try_from(payload.len()).map_err(io::Error::other)?.to_le_bytes());
    frame.extend_from_slice(&id.to_le_bytes());
    frame.push(kind as u8);
    frame.extend_from_slice(payload);
    out.write_all(&frame)
}

/// The helper's first bytes. They are computed at run time, so that not even the helper's own program contains them.
pub fn greeting() -> [u8; 32] {
    let mut bytes = [0; 32];
    for (i, byte) in (0u8..).zip(&mut bytes) {
        *byte = i.wrapping_mul(151) ^ 0xa5;
    }
    bytes
}

/// Takes frames out of a stream.
#[derive(Debug, Default)]
pub struct FrameReader {
    buf: Vec<u8>,
    /// No greeting begins before here. A guest would take seconds to search a long frame again for each piece of it.
    searched: usize,
}

/// An item of the decoded stream.
#[derive(Debug, PartialEq, Eq)]
pub enum WireItem {
    /// The guest has (re)started; frames of commands from before will not come.
    Greeting,
    /// A frame.
    Frame(CommandFrame),
}

impl FrameReader {
    /// The next item; `None` at the end of the stream.
    pub fn next(&mut self, stream: &mut impl Read) -> io::Result<Option<WireItem>> {
        let mut piece = vec![0; 64 << 10];
        loop {
            if let Some(item) = self.take()? {
                return Ok(Some(item));
            }
            match stream.read(&mut piece)? {
                0 => return Ok(None),
                n => self.buf.extend_from_slice(&piece[..n]),
            }
        }
    }

    fn take(&mut self) -> io::Result<Option<WireItem>> {
        let greeting = greeting();
        if let Some(at) = memchr::memmem::rfind(&self.buf[self.searched..], &greeting) {
            self.discard(self.searched + at + greeting.len());
            return Ok(Some(WireItem::Greeting));
        }
        self.searched = self.buf.len().saturating_sub(greeting.len() - 1);
        let word = |at: usize| self.buf.get(at..at + 4).and_then(|b| b.try_into().ok()).map(u32::from_le_bytes);
        let (Some(magic), Some(len), Some(id), Some(&kind)) = (word(0), word(4), word(8), self.buf.get(12)) else {
            return Ok(None);
        };
        let len = len as usize;
        if magic != MAGIC || len > MAX {
            // The rest of something that a reset has cut. A greeting follows, or something is wrong that a timeout tells.
            let keep = self.buf.len().min(greeting.len() - 1);
            self.discard(self.buf.len() - keep);
            return Ok(None);
        }
        if self.buf.len() < HEADER + len {
            return Ok(None);
        }
        let payload = self.buf[HEADER..HEADER + len].to_vec();
        self.discard(HEADER + len);
        let kind = FrameKind::from_byte(kind)
            .ok_or_else(|| io::Error::other("lab and guest helper are of different builds"))?;
        Ok(Some(WireItem::Frame(CommandFrame { id, kind, payload })))
    }

    /// Removes bytes from the front.
    fn discard(&mut self, count: usize) {
        self.buf.drain(..count);
        self.searched = self.searched.saturating_sub(count);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Brings few bytes at a time.
    struct Drip<'a>(&'a [u8]);
    impl Read for Drip<'_> {
        fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
            let n = self.0.len().min(3);
            buf[..n].copy_from_slice(&self.0[..n]);
            self.0 = &self.0[n..];
            Ok(n)
        }
    }

    #[test]
    fn frames_survive_any_fragmentation() {
        let mut bytes = Vec::new();
        write(&mut bytes, 1, FrameKind::Run, b"a\0b\0").unwrap();
        write(&mut bytes, 2, FrameKind::Input, &[]).unwrap();
        let (mut drip, mut reader) = (Drip(&bytes), FrameReader::default());
        let mut next = || reader.next(&mut drip).unwrap();
        assert_eq!(
            next(),
            Some(WireItem::Frame(CommandFrame { id: 1, kind: FrameKind::Run, payload: b"a\0b\0".to_vec() }))
        );
        assert_eq!(next(), Some(WireItem::Frame(CommandFrame { id: 2, kind: FrameKind::Input, payload: vec![] })));
        assert_eq!(next(), None);
    }

    #[test]
    fn reset_in_mid_frame_resynchronises() {
        for cut in [3, 13, 100] {
            let mut bytes = Vec::new();
            write(&mut bytes, 1, FrameKind::Stdout, &[7; 1000]).unwrap();
            bytes.truncate(cut);
            bytes.extend_from_slice(&greeting());
            write(&mut bytes, 2, FrameKind::Done, &[]).unwrap();
            let (mut stream, mut reader) = (Drip(&bytes), FrameReader::default());
            assert_eq!(reader.next(&mut stream).unwrap(), Some(WireItem::Greeting), "cut at {cut}");
            let frame = reader.next(&mut stream).unwrap();
            assert_eq!(frame, Some(WireItem::Frame(CommandFrame { id: 2, kind: FrameKind::Done, payload: vec![] })));
        }
    }
}
