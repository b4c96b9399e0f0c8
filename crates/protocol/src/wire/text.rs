//! Fields that are longer than a name: the clauses of a policy, the addresses of a host.

use alloc::string::String;
use alloc::vec::Vec;
use core::net::IpAddr;
use core::str;

use partywall_shm::address::{narrow, wide};

use super::WireError;
use super::codec::{Field, Reader};

/// Text of up to [`MAX`](Self::MAX) bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Text(pub String);

impl Text {
    /// The most bytes that decoding takes. Encoding cuts what is longer to one more than that, so that it is refused and
    /// never mistaken for another text.
    pub const MAX: usize = 3072;
}

impl Field for Text {
    const MIN: usize = 2;

    fn put(&self, out: &mut Vec<u8>) {
        let mut end = self.0.len().min(Self::MAX + 4);
        while !self.0.is_char_boundary(end) {
            end -= 1;
        }
        // `end` is far below 2^16.
        (end as u16).put(out);
        out.extend_from_slice(&self.0.as_bytes()[..end]);
    }

    fn take(reader: &mut Reader<'_>) -> Result<Self, WireError> {
        let length = u16::take(reader)?;
        if usize::from(length) > Self::MAX {
            return Err(WireError::Value { field: "the length of a text", value: length.into() });
        }
        let bytes = reader.bytes(length.into(), "a text")?;
        match str::from_utf8(bytes) {
            Ok(text) if !bytes.contains(&0) => Ok(Self(text.into())),
            _ => Err(WireError::Text),
        }
    }
}

/// Some addresses: `count u16`, and 16 bytes each, most significant first, as IPv6 writes them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Addresses(pub Vec<IpAddr>);

impl Addresses {
    /// The most addresses; encoding leaves out what is beyond them.
    pub const MAX: usize = 64;
}

impl Field for Addresses {
    const MIN: usize = 2;

    fn put(&self, out: &mut Vec<u8>) {
        let count = self.0.len().min(Self::MAX);
        // It is at most 64.
        (count as u16).put(out);
        for ip in &self.0[..count] {
            out.extend_from_slice(&wide(*ip).to_be_bytes());
        }
    }

    fn take(reader: &mut Reader<'_>) -> Result<Self, WireError> {
        let count = u16::take(reader)?;
        if usize::from(count) > Self::MAX {
            return Err(WireError::Value { field: "the number of addresses", value: count.into() });
        }
        let bytes = reader.bytes(usize::from(count) * 16, "a list of addresses")?;
        // Chunks of exactly 16 bytes.
        let ip = |chunk: &[u8]| narrow(u128::from_be_bytes(chunk.try_into().unwrap_or_default()));
        Ok(Self(bytes.chunks_exact(16).map(ip).collect()))
    }
}
