//! The layout of a window (protocol V2, V3): the structures by which a stock guest kernel gives it to programs, and those that identify it.
//!
//! ```text
//!         0 +--------------------+
//!           | unused             |
//!      4096 +--------------------+  read by the guest's kernel when the device
//!           | device-dax info    |  appears: "one character device, in steps of
//!      8192 +--------------------+  4096 bytes, from 2 MiB on"
//!           | trial              |  only where the window is a PCI device: to see whether
//!     12288 +--------------------+  stores are dropped
//!           | book of places     |  the broker's: which pages of the data are in use
//!     2 MiB +--------------------+  what `/dev/dax*` shows begins here
//!           | window header      |  whose this is, and an id that cannot be guessed
//!     +4096 +--------------------+
//!           | regions            |  control pages and rings, at multiples of 4096
//!           |                    |
//!           +--------------------+  the file's end, a multiple of 2 MiB
//! ```
//!
//! A guest that owns a window can write all of it, so all values here are untrusted: a header is valid only if its id came over a trusted
//! path, and no other value of it decides anything.

use crate::wire::WireError;
use crate::wire::codec::{PacketReader, PacketWriter, Put, Take};
use alloc::string::String;

/// Bytes before what `/dev/dax*` shows.
pub const DATA_OFFSET: u64 = 2 << 20;
/// Sizes of windows are multiples of this.
pub const STEP: u64 = 2 << 20;
/// Where the info block is.
pub const INFO_OFFSET: u64 = 4096;
/// Where a machine that sees the whole file, as memory of a PCI device, tries whether it may write it.
pub const TRIAL_OFFSET: u64 = 8192;
/// Where the broker's book of places begins: a page with a magic, and then a byte for each page of data.
pub const BOOK_OFFSET: u64 = 12288;
/// Pages of data that a book has a byte for.
pub const BOOK_PAGES: u64 = DATA_OFFSET - BOOK_OFFSET - 4096;
/// Bytes of info block, and of window header.
pub const BLOCK: usize = 4096;
/// The longest name of a domain.
const NAME: usize = 64;
/// `PWWINDOW`, little-endian.
const MAGIC: u64 = u64::from_le_bytes(*b"PWWINDOW");
const VERSION: u32 = 1;

/// The identity of a window: a random number, told only to those who may use the window.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WindowId(pub [u8; 16]);

impl core::fmt::Display for WindowId {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl core::fmt::Debug for WindowId {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        core::fmt::Display::fmt(self, f)
    }
}

impl Put for WindowId {
    fn put(&self, out: &mut PacketWriter<'_>) {
        out.bytes(&self.0);
    }
}

impl<'a> Take<'a> for WindowId {
    const MIN: usize = 16;
    fn take(reader: &mut PacketReader<'a>) -> Result<Self, WireError> {
        u128::take(reader).map(|id| Self(id.to_le_bytes()))
    }
}

/// Text that is no [`WindowId`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BadWindowId;

impl core::fmt::Display for BadWindowId {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("the id of a window is 32 hexadecimal digits")
    }
}

impl core::error::Error for BadWindowId {}

impl core::str::FromStr for WindowId {
    type Err = BadWindowId;

    fn from_str(text: &str) -> Result<Self, BadWindowId> {
        let digits = text.as_bytes();
        let mut id = [0; 16];
        if digits.len() != 2 * id.len() {
            return Err(BadWindowId);
        }
        for (byte, pair) in id.iter_mut().zip(digits.chunks_exact(2)) {
            let digit = |c: u8| char::from(c).to_digit(16).and_then(|d| u8::try_from(d).ok());
            *byte = digit(pair[0]).zip(digit(pair[1])).map(|(high, low)| high << 4 | low).ok_or(BadWindowId)?;
        }
        Ok(Self(id))
    }
}

/// The window header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WindowHeader {
    /// The identity of the window.
    pub id: WindowId,
    /// Bytes from the header's first to the window's last.
    pub size: u64,
    /// The domain that writes it, for people to read.
    pub owner: String,
    /// The domain that reads it, for people to read.
    pub peer: String,
}

impl WindowHeader {
    /// As it lies in memory.
    pub fn encode(&self) -> [u8; BLOCK] {
        let mut block = [0; BLOCK];
        put(&mut block, 0, &MAGIC.to_le_bytes());
        put(&mut block, 8, &VERSION.to_le_bytes());
        put(&mut block, 16, &self.id.0);
        put(&mut block, 32, &self.size.to_le_bytes());
        put(&mut block, 64, &self.owner.as_bytes()[..self.owner.len().min(NAME)]);
        put(&mut block, 128, &self.peer.as_bytes()[..self.peer.len().min(NAME)]);
        block
    }

    /// Reads a private copy of the first bytes of a window's data; `None` if they are no header of this version.
    pub fn decode(block: &[u8; BLOCK]) -> Option<Self> {
        if u64_at(block, 0) != MAGIC || u32_at(block, 8) != VERSION {
            return None;
        }
        let mut id = [0; 16];
        id.copy_from_slice(&block[16..32]);
        let name = |at: usize| {
            let bytes = &block[at..at + NAME];
            let end = bytes.iter().position(|b| *b == 0).unwrap_or(NAME);
            crate::wire::Name::new(core::str::from_utf8(&bytes[..end]).ok()?)
                .ok()
                .map(|name| String::from(name.as_str()))
        };
        Some(Self { id: WindowId(id), size: u64_at(block, 32), owner: name(64)?, peer: name(128)? })
    }
}

/// The device-dax info block of a window whose file has `size` bytes (`struct nd_pfn_sb` of Linux, version 1.4).
///
/// A guest's kernel that finds it makes a character device of the memory instead of a block device.
pub fn info_block(size: u64, id: WindowId) -> [u8; BLOCK] {
    /// `PFN_MODE_RAM`: the kernel keeps its notes about the pages in the guest's own memory.
    const MODE_RAM: u32 = 1;
    let mut block = [0; BLOCK];
    put(&mut block, 0, b"NVDIMM_DAX_INFO\0");
    put(&mut block, 16, &id.0);
    // 32: the parent's uuid, zeros: there is none. 48: flags.
    put(&mut block, 52, &1u16.to_le_bytes());
    put(&mut block, 54, &4u16.to_le_bytes());
    put(&mut block, 56, &DATA_OFFSET.to_le_bytes());
    put(&mut block, 64, &(size.saturating_sub(DATA_OFFSET) / 4096).to_le_bytes());
    put(&mut block, 72, &MODE_RAM.to_le_bytes());
    // 76, 80: no padding at either end. Then alignment, page size, and size of a `struct page`.
    put(&mut block, 84, &4096u32.to_le_bytes());
    put(&mut block, 88, &4096u32.to_le_bytes());
    put(&mut block, 92, &64u16.to_le_bytes());
    let sum = fletcher64(&block);
    put(&mut block, BLOCK - 8, &sum.to_le_bytes());
    block
}

/// Whether a block is an info block that a guest's kernel would take for a window of `size` bytes.
pub fn is_info_block(block: &[u8; BLOCK], size: u64) -> bool {
    let mut id = [0; 16];
    id.copy_from_slice(&block[16..32]);
    *block == info_block(size, WindowId(id))
}

/// The sum that Linux keeps in its nvdimm blocks, over 32-bit words, its own place counted as zeros.
fn fletcher64(block: &[u8; BLOCK]) -> u64 {
    let (mut low, mut high) = (0u32, 0u64);
    for (n, word) in block.chunks_exact(4).enumerate() {
        let value = if n * 4 < BLOCK - 8 { u32_at(word, 0) } else { 0 };
        low = low.wrapping_add(value);
        high = high.wrapping_add(u64::from(low));
    }
    high << 32 | u64::from(low)
}

fn put(block: &mut [u8], at: usize, bytes: &[u8]) {
    block[at..at + bytes.len()].copy_from_slice(bytes);
}

fn u32_at(block: &[u8], at: usize) -> u32 {
    block.get(at..at + 4).and_then(|b| b.try_into().ok()).map_or(0, u32::from_le_bytes)
}

fn u64_at(block: &[u8], at: usize) -> u64 {
    block.get(at..at + 8).and_then(|b| b.try_into().ok()).map_or(0, u64::from_le_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;

    fn header() -> WindowHeader {
        WindowHeader { id: WindowId([0xab; 16]), size: 4 << 20, owner: "a".repeat(64), peer: "b".into() }
    }

    #[test]
    fn window_headers_round_trip_and_others_are_none() {
        let block = header().encode();
        assert_eq!(WindowHeader::decode(&block), Some(header()));
        for at in [0, 8, 64, 70, 128] {
            let mut bad = block;
            bad[at] = 0xff;
            assert_eq!(WindowHeader::decode(&bad), None, "byte {at}");
        }
        assert_eq!(WindowHeader::decode(&[0; BLOCK]), None);
    }

    #[test]
    fn ids_are_read_as_they_are_written() {
        let id = WindowId(core::array::from_fn(|i| i as u8 * 17));
        assert_eq!(id.to_string().parse(), Ok(id));
        for bad in ["", "00", "0g112233445566778899aabbccddeeff", "+0112233445566778899aabbccddeeff"] {
            assert_eq!(bad.parse::<WindowId>(), Err(BadWindowId), "{bad}");
        }
    }

    #[test]
    fn info_block_passes_checks_of_kernel() {
        let block = info_block(64 << 20, WindowId([7; 16]));
        assert_eq!(u32_at(&block, 84), 4096, "align");
        assert_eq!(u64_at(&block, 56), DATA_OFFSET);
        assert_eq!(u64_at(&block, 64), 62 << 8, "pages");
        assert!(is_info_block(&block, 64 << 20));
        assert!(!is_info_block(&block, 32 << 20));
        // The sum, as the kernel forms it: from the whole block with the sum's place zeroed.
        let (mut low, mut high) = (0u64, 0u64);
        for word in block[..BLOCK - 8].chunks_exact(4).chain([&[0; 4][..]; 2]) {
            low = (low + u64::from(u32_at(word, 0))) % (1 << 32);
            high += low;
        }
        assert_eq!(u64_at(&block, BLOCK - 8), (high % (1 << 32)) * (1 << 32) + low);
        let mut bad = block;
        bad[90] = 1;
        assert!(!is_info_block(&bad, 64 << 20));
    }
}
