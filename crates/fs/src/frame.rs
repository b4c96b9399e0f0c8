//! Frames: requests and replies on a stream of bytes (protocol N3). Lengths are checked before memory is taken for them.

use crate::wire::LARGEST_BODY;
use rustix::io::Errno;
use std::io::{self, IoSlice, Read, Write};

/// Bytes of a request's header.
pub const REQUEST_HEADER: usize = 24;
/// Bytes of a reply's header.
pub const REPLY_HEADER: usize = 16;

/// The header of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestHeader {
    /// Bytes of the body.
    pub len: u32,
    /// The number that the reply repeats.
    pub id: u32,
    /// The operation.
    pub number: u32,
    /// The user that the request names.
    pub uid: u32,
    /// The group that the request names.
    pub gid: u32,
}

/// The header of a reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReplyHeader {
    /// Bytes of the body.
    pub len: u32,
    /// The number of the request.
    pub id: u32,
    /// 0, or why the request failed.
    pub errno: i32,
}

fn words<const N: usize>(bytes: &[u8]) -> [u32; N] {
    let mut words = [0; N];
    for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(4)) {
        *word = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    }
    words
}

fn malformed(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("the peer broke the protocol of files: {what}"))
}

impl RequestHeader {
    /// The bytes of the header.
    pub fn bytes(self) -> [u8; REQUEST_HEADER] {
        let mut bytes = [0; REQUEST_HEADER];
        let words = [self.len, self.id, self.number, self.uid, self.gid, 0];
        for (to, word) in bytes.chunks_exact_mut(4).zip(words) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Reads a request: its header, and its body into `body`. `None` at the end of the stream.
    ///
    /// # Errors
    /// The stream's, and `InvalidData` for a body that is too long.
    pub fn read(from: &mut impl Read, body: &mut Vec<u8>) -> io::Result<Option<Self>> {
        let mut bytes = [0; REQUEST_HEADER];
        if !fill(from, &mut bytes)? {
            return Ok(None);
        }
        let [len, id, number, uid, gid, _] = words(&bytes);
        read_body(from, len, body)?;
        Ok(Some(Self { len, id, number, uid, gid }))
    }
}

impl ReplyHeader {
    /// A reply that failed.
    pub fn failed(id: u32, errno: Errno) -> Self {
        Self { len: 0, id, errno: errno.raw_os_error() }
    }

    /// The bytes of the header.
    pub fn bytes(self) -> [u8; REPLY_HEADER] {
        let mut bytes = [0; REPLY_HEADER];
        for (to, word) in bytes.chunks_exact_mut(4).zip([self.len, self.id, self.errno.cast_unsigned(), 0]) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Reads a reply, as [`RequestHeader::read`].
    ///
    /// # Errors
    /// As [`RequestHeader::read`].
    pub fn read(from: &mut impl Read, body: &mut Vec<u8>) -> io::Result<Option<Self>> {
        let mut bytes = [0; REPLY_HEADER];
        if !fill(from, &mut bytes)? {
            return Ok(None);
        }
        let [len, id, errno, _] = words(&bytes);
        read_body(from, len, body)?;
        Ok(Some(Self { len, id, errno: errno.cast_signed() }))
    }
}

/// Fills `to`. `false` if the stream ended before its first byte.
fn fill(from: &mut impl Read, to: &mut [u8]) -> io::Result<bool> {
    let mut filled = 0;
    while filled < to.len() {
        match from.read(&mut to[filled..]) {
            Ok(0) if filled == 0 => return Ok(false),
            Ok(0) => return Err(malformed("the stream ends within a header")),
            Ok(n) => filled += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(true)
}

fn read_body(from: &mut impl Read, len: u32, body: &mut Vec<u8>) -> io::Result<()> {
    let len = len as usize;
    if len > LARGEST_BODY {
        return Err(malformed("a body is longer than allowed"));
    }
    body.resize(len, 0);
    from.read_exact(body)
}

/// Writes all of these parts, by one call where the stream takes several at a time.
///
/// # Errors
/// The stream's.
pub fn write_parts(to: &mut (impl Write + ?Sized), parts: &[&[u8]]) -> io::Result<()> {
    let mut slices: Vec<IoSlice<'_>> = parts.iter().map(|part| IoSlice::new(part)).collect();
    let mut left = &mut slices[..];
    IoSlice::advance_slices(&mut left, 0);
    while !left.is_empty() {
        match to.write_vectored(left) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(n) => IoSlice::advance_slices(&mut left, n),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    to.flush()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_round_trip_and_a_cut_frame_is_an_error() {
        let header = RequestHeader { len: 3, id: 7, number: 2, uid: 1000, gid: 1001 };
        let mut stream = Vec::new();
        write_parts(&mut stream, &[&header.bytes(), b"a", b"", b"bc"]).unwrap();
        let mut body = Vec::new();
        assert_eq!(RequestHeader::read(&mut &stream[..], &mut body).unwrap(), Some(header));
        assert_eq!(body, b"abc");
        assert!(RequestHeader::read(&mut &[][..], &mut body).unwrap().is_none());
        for cut in 1..stream.len() {
            assert!(RequestHeader::read(&mut &stream[..cut], &mut body).is_err(), "cut at {cut}");
        }
        let reply = ReplyHeader::failed(9, Errno::NOENT);
        assert_eq!(ReplyHeader::read(&mut &reply.bytes()[..], &mut body).unwrap(), Some(reply));
    }

    #[test]
    fn length_beyond_the_limit_is_rejected_before_memory_is_taken() {
        let header = RequestHeader { len: u32::MAX, id: 0, number: 2, uid: 0, gid: 0 };
        let mut body = Vec::new();
        let error = RequestHeader::read(&mut &header.bytes()[..], &mut body).unwrap_err();
        assert_eq!((error.kind(), body.capacity()), (io::ErrorKind::InvalidData, 0));
    }
}
