//! The messages between the exporter of a disk and its user (protocol E). Nothing here makes a system call.

use partywall::{BufferPart, Options, RingSize};
use rustix::io::Errno;

/// The version of this protocol.
pub(super) const VERSION: u32 = 1;
/// Bytes that one request reads or writes at most.
pub(super) const LARGEST_DATA: u64 = 1 << 20;
/// Bytes that one request gives up at most, or fills with zeroes where the kernel does that by itself.
pub(super) const LARGEST_RANGE: u64 = 1 << 31;
/// Bytes that one request writes zeroes over at most, so that each is answered in time.
pub(super) const LARGEST_ZEROES: u64 = 64 << 20;
/// Bytes of a hello.
pub(super) const HELLO: usize = 8;
/// Bytes of a welcome.
pub(super) const WELCOME: usize = 48;
/// Bytes of the fields of a request.
pub(super) const FIELDS: usize = 32;

/// The operations, which are the numbers of their methods.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum ExportOperation {
    Read = 1,
    Write = 2,
    Sync = 3,
    Zero = 4,
    Allocate = 5,
    Measure = 6,
    /// Writes bytes that lie in a group, and are named in place of the data (protocol E4).
    WriteFrom = 7,
}

/// The service of an export's calls.
pub(super) fn calls_service(service: &str) -> String {
    format!("{service}.calls")
}

/// The rings of a session's stream, which carries a hello and a welcome. Between machines they take memory that heaps need.
pub(super) fn session_options() -> Options {
    Options::default().ring(RingSize::Fixed(4096))
}

/// The first message of a session, on its stream.
pub(super) fn hello() -> [u8; HELLO] {
    let mut bytes = [0; HELLO];
    bytes[..4].copy_from_slice(&VERSION.to_le_bytes());
    bytes
}

/// The version that a hello names, or `None` if it is none.
pub(super) fn read_hello(bytes: [u8; HELLO]) -> Option<u32> {
    let [v0, v1, v2, v3, rest @ ..] = bytes;
    (rest == [0; 4]).then(|| u32::from_le_bytes([v0, v1, v2, v3]))
}

/// The answer to a hello (protocol E1).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Welcome {
    /// The reason why there is no session, or 0.
    pub(super) errno: i32,
    /// The disk cannot be written.
    pub(super) read_only: bool,
    /// The disk gives sectors up.
    pub(super) discards: bool,
    /// The number that requests name.
    pub(super) session: u64,
    /// Bytes of the disk.
    pub(super) capacity: u64,
    /// Bytes of a block.
    pub(super) block: u32,
    /// The kernel's number of its boot. With another one, writes that were not made durable are lost.
    pub(super) boot: [u8; 16],
}

impl Welcome {
    /// A refusal.
    pub(super) fn refusal(errno: Errno) -> Self {
        Self { errno: errno.raw_os_error(), ..Self::default() }
    }

    /// Why there is no session.
    pub(super) fn refused(&self) -> Option<Errno> {
        errno_of(self.errno.cast_unsigned())
    }

    pub(super) fn bytes(&self) -> [u8; WELCOME] {
        let mut bytes = [0; WELCOME];
        let flags = u32::from(self.read_only) | u32::from(self.discards) << 1;
        bytes[..4].copy_from_slice(&self.errno.to_le_bytes());
        bytes[4..8].copy_from_slice(&flags.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.session.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.capacity.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.block.to_le_bytes());
        bytes[32..].copy_from_slice(&self.boot);
        bytes
    }

    /// `None` if no exporter says this (protocol E1.4).
    pub(super) fn read(bytes: &[u8; WELCOME]) -> Option<Self> {
        let flags = word(bytes, 4)?;
        let welcome = Self {
            errno: word(bytes, 0)?.cast_signed(),
            read_only: flags & 1 != 0,
            discards: flags & 2 != 0,
            session: long(bytes, 8)?,
            capacity: long(bytes, 16)?,
            block: word(bytes, 24)?,
            boot: *bytes[32..].first_chunk()?,
        };
        let is_refusal = welcome.refused().map(Self::refusal) == Some(welcome);
        let is_disk = welcome.errno == 0
            && flags <= 3
            && word(bytes, 28)? == 0
            && (512..=1 << 16).contains(&welcome.block)
            && welcome.block.is_power_of_two()
            && welcome.capacity > 0
            && welcome.capacity.is_multiple_of(welcome.block.into())
            && i64::try_from(welcome.capacity).is_ok();
        (is_refusal || is_disk).then_some(welcome)
    }
}

/// The fields of a request (protocol E2). In a write they follow the data, so that the data begins on a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RequestFields {
    pub(super) session: u64,
    pub(super) offset: u64,
    pub(super) length: u64,
    /// The change is durable before the answer.
    pub(super) durable: bool,
    /// The mode of an *allocate*.
    pub(super) mode: i32,
}

impl RequestFields {
    pub(super) fn bytes(&self) -> [u8; FIELDS] {
        let mut bytes = [0; FIELDS];
        bytes[..8].copy_from_slice(&self.session.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.offset.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.length.to_le_bytes());
        bytes[24..28].copy_from_slice(&u32::from(self.durable).to_le_bytes());
        bytes[28..].copy_from_slice(&self.mode.to_le_bytes());
        bytes
    }

    /// `None` for an unknown flag.
    pub(super) fn read(bytes: &[u8; FIELDS]) -> Option<Self> {
        let durable = match word(bytes, 24)? {
            0 => false,
            1 => true,
            _ => return None,
        };
        let mode = word(bytes, 28)?.cast_signed();
        Some(Self { session: long(bytes, 0)?, offset: long(bytes, 8)?, length: long(bytes, 16)?, durable, mode })
    }
}

/// Bytes of a named part of a buffer.
pub(super) const PART: usize = 24;
/// Parts that one request names at most: those of the largest write, in pages.
pub(super) const MOST_PARTS: usize = (LARGEST_DATA / 4096) as usize;

/// The parts that a request names, in front of its fields (protocol E4.1).
pub(super) fn parts_bytes(parts: &[BufferPart]) -> Vec<u8> {
    parts.iter().flat_map(|part| [part.owner, part.address, part.len]).flat_map(u64::to_le_bytes).collect()
}

/// `None` if these are no parts, or too many, or if they have other than `length` bytes together.
pub(super) fn read_parts(bytes: &[u8], length: u64) -> Option<Vec<BufferPart>> {
    if bytes.is_empty() || !bytes.len().is_multiple_of(PART) || bytes.len() / PART > MOST_PARTS {
        return None;
    }
    let read =
        |bytes: &[u8]| Some(BufferPart { owner: long(bytes, 0)?, address: long(bytes, 8)?, len: long(bytes, 16)? });
    let parts: Vec<BufferPart> = bytes.chunks(PART).map(read).collect::<Option<_>>()?;
    let sum = parts.iter().try_fold(0_u64, |sum, part| sum.checked_add(part.len));
    (sum == Some(length) && parts.iter().all(|part| part.len > 0)).then_some(parts)
}

/// The error that a peer has sent; `None` for 0, and for a number that is no error of a kernel.
pub(super) fn errno_of(code: u32) -> Option<Errno> {
    i32::try_from(code).ok().filter(|code| (1..4096).contains(code)).map(Errno::from_raw_os_error)
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn long(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    const DISK: Welcome = Welcome {
        errno: 0,
        read_only: true,
        discards: false,
        session: 7,
        capacity: 1 << 30,
        block: 4096,
        boot: [3; 16],
    };

    #[test]
    fn messages_round_trip() {
        assert_eq!(read_hello(hello()), Some(VERSION));
        assert_eq!(Welcome::read(&DISK.bytes()), Some(DISK));
        let refusal = Welcome::refusal(Errno::BUSY);
        assert_eq!(Welcome::read(&refusal.bytes()), Some(refusal));
        let fields = RequestFields { session: 1, offset: 2, length: 3, durable: true, mode: 5 };
        assert_eq!(RequestFields::read(&fields.bytes()), Some(fields));
    }

    #[test]
    fn welcome_of_an_impossible_disk_is_no_welcome() {
        for lie in [
            Welcome { capacity: 0, ..DISK },
            Welcome { capacity: (1 << 30) + 512, ..DISK },
            Welcome { capacity: 1 << 63, ..DISK },
            Welcome { block: 0, ..DISK },
            Welcome { block: 1, ..DISK },
            Welcome { block: 768, ..DISK },
            Welcome { block: 1 << 17, ..DISK },
            Welcome { errno: -5, ..DISK },
            Welcome { errno: 5, ..DISK },
            Welcome { errno: 4096, ..Welcome::default() },
        ] {
            assert_eq!(Welcome::read(&lie.bytes()), None, "{lie:?}");
        }
        let mut bytes = DISK.bytes();
        bytes[28] = 1;
        assert_eq!(Welcome::read(&bytes), None, "a reserved word");
        let mut bytes = RequestFields { session: 1, offset: 2, length: 3, durable: true, mode: 5 }.bytes();
        bytes[24] = 2;
        assert_eq!(RequestFields::read(&bytes), None, "an unknown flag");
        assert_eq!(read_hello([1; HELLO]), None);
    }

    #[test]
    fn any_bytes_are_no_message_or_a_canonical_one() {
        let mut random = Random(11);
        let fields = RequestFields { session: 1, offset: 2, length: 3, durable: true, mode: 5 };
        let parts = [1, 512, 4096].map(|len| BufferPart { owner: 1, address: len << 12, len });
        let (mut accepted, mut refused) = (0, 0);
        for _ in 0..20_000 {
            // A few bytes of a valid message are any.
            let mut mutated = |bytes: &mut [u8]| {
                for _ in 0..random.below(4) {
                    let at = random.below(bytes.len() as u64) as usize;
                    bytes[at] = random.below(256) as u8;
                }
            };
            let (mut welcome, mut request, mut list) = (DISK.bytes(), fields.bytes(), parts_bytes(&parts));
            mutated(&mut welcome);
            mutated(&mut request);
            mutated(&mut list);
            let again = [
                Welcome::read(&welcome).map(|read| read.bytes() == welcome),
                RequestFields::read(&request).map(|read| read.bytes() == request),
                read_parts(&list, 4609).map(|read| parts_bytes(&read) == list),
            ];
            for is_same in again {
                assert_ne!(is_same, Some(false), "{welcome:?} {request:?} {list:?}");
                accepted += u32::from(is_same.is_some());
                refused += u32::from(is_same.is_none());
            }
        }
        assert!(accepted > 0 && refused > 0, "{accepted} {refused}");
    }

    #[test]
    fn parts_have_exactly_the_bytes_of_their_request() {
        let parts = [(3, 1 << 45, 4096), (4, 1 << 46, 8192)];
        let parts = parts.map(|(owner, address, len)| BufferPart { owner, address, len });
        let bytes = parts_bytes(&parts);
        assert_eq!(read_parts(&bytes, 12288).as_deref(), Some(&parts[..]));
        for length in [0, 12287, 12289] {
            assert_eq!(read_parts(&bytes, length), None, "{length}");
        }
        for cut in [0, 1, PART + 1, 2 * PART - 1] {
            assert_eq!(read_parts(&bytes[..cut], 4096), None, "{cut}");
        }
        let part = |len| BufferPart { owner: 1, address: 1 << 45, len };
        assert_eq!(read_parts(&parts_bytes(&[part(0), part(512)]), 512), None, "an empty part");
        assert_eq!(read_parts(&parts_bytes(&[part(u64::MAX), part(513)]), 512), None, "a sum that wraps");
        assert_eq!(read_parts(&parts_bytes(&vec![part(1); MOST_PARTS + 1]), MOST_PARTS as u64 + 1), None);
    }
}
