//! Messages in a byte ring: a length, the bytes, padding to eight (protocol D1).
//!
//! ```text
//!   | length u32 | 0 u32 | length bytes ... | padding |   next record
//!   0            4       8                  8+length   multiple of 8
//! ```

use crate::corrupt::Corrupt;

/// Bytes of a record's header.
pub const HEADER: u64 = 8;

/// Bytes that a message of `len` bytes takes in the ring.
pub const fn footprint(len: u64) -> u64 {
    HEADER + len.next_multiple_of(8)
}

/// The longest message that a ring of `ring_size` bytes can carry.
pub const fn longest(ring_size: u64) -> u64 {
    ring_size.saturating_sub(HEADER)
}

/// The header of a message of `len` bytes.
pub fn header(len: u32) -> [u8; HEADER as usize] {
    u64::from(len).to_le_bytes()
}

/// Reads a header that was copied to private memory, and checks it against what is committed (protocol D2).
pub fn parse(header: [u8; HEADER as usize], available: u64, longest: u64) -> Result<u32, Corrupt> {
    let word = u64::from_le_bytes(header);
    match u32::try_from(word) {
        Ok(len) if u64::from(len) <= longest && footprint(u64::from(len)) <= available => Ok(len),
        _ => Err(Corrupt::BadRecord),
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn headers_round_trip_and_lies_are_corrupt() {
        for len in [0u32, 1, 7, 8, 9, 4088] {
            let room = footprint(u64::from(len));
            assert_eq!(room % 8, 0);
            assert_eq!(parse(header(len), room, 4088), Ok(len));
            assert_eq!(parse(header(len), room - 1, 4088), Err(Corrupt::BadRecord), "{len} not all committed");
        }
        assert_eq!(parse(header(4089), u64::MAX, 4088), Err(Corrupt::BadRecord));
        assert_eq!(parse([0, 0, 0, 0, 1, 0, 0, 0], u64::MAX, u64::MAX), Err(Corrupt::BadRecord), "reserved word");
        assert_eq!(parse([0xFF; 8], u64::MAX, u64::MAX), Err(Corrupt::BadRecord));
        assert_eq!(longest(4096), 4088);
        assert_eq!(longest(0), 0);
    }
}
