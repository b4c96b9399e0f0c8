//! The input is a driver's descriptors and the header of a disk request. The chain and the request are what a model makes of the same
//! bytes: the model walks descriptors byte by byte in a copy of the memory, and knows nothing of pieces.

use super::bytes::Input;
use partywall_vhost::chain::BufferPiece;
use partywall_vhost::chain::ChainBuffers;
use partywall_vhost::disk::request::{self, DiskGeometry, DiskOperation, DiskStatus, MOST_BYTES, MOST_RANGE, SECTOR};
use std::collections::BTreeSet;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

/// The memory's regions: the second begins where the first ends, and the third behind a hole.
const REGIONS: [(u64, usize); 3] = [(0, 0x3000), (0x3000, 0x2000), (0x10_0000, 0x1000)];
const TABLE: u64 = 0x1000;
const SIZE: u16 = 16;
/// An indirect table may be here.
const INDIRECT_TABLE: u64 = 0x2ff0;
const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

/// The parts that an input has reached.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Reached {
    pub(crate) refused: u32,
    pub(crate) failed: u32,
    pub(crate) unsupported: u32,
    pub(crate) done: u32,
}

/// Bytes of the guest, by their addresses.
type Addresses = Vec<u64>;

fn is_inside(address: u64) -> bool {
    REGIONS.iter().any(|(start, length)| address.checked_sub(*start).is_some_and(|offset| offset < *length as u64))
}

fn load<const N: usize>(memory: &GuestMemoryMmap, addresses: impl Iterator<Item = u64>) -> Option<[u8; N]> {
    let mut bytes = [0; N];
    let mut count = 0;
    for (byte, address) in bytes.iter_mut().zip(addresses) {
        *byte = memory.read_obj(GuestAddress(address)).ok()?;
        count += 1;
    }
    (count == N).then_some(bytes)
}

/// The bytes of a chain that the device reads, and those that it writes; `None` for a chain that breaks the rules.
fn walk(memory: &GuestMemoryMmap, head: u16) -> Option<(Addresses, Addresses)> {
    let (mut readable, mut writable) = (Vec::new(), Vec::new());
    let (mut table, mut size, mut index, mut indirect) = (TABLE, u32::from(SIZE), u32::from(head), false);
    let mut visited = BTreeSet::new();
    for _ in 0..=1024 {
        // A descriptor that comes twice comes without end.
        if index >= size || !visited.insert((table, index)) {
            return None;
        }
        let start = table.checked_add(16 * u64::from(index))?;
        let row: [u8; 16] = load(memory, (0..16).map(|n| start.wrapping_add(n)))?;
        let address = u64::from_le_bytes(row[..8].try_into().expect("eight bytes"));
        let length = u32::from_le_bytes(row[8..12].try_into().expect("four bytes"));
        let (flags, next) = (u16::from_le_bytes([row[12], row[13]]), u16::from_le_bytes([row[14], row[15]]));
        if flags & INDIRECT != 0 {
            if indirect || flags & NEXT != 0 || length == 0 || !length.is_multiple_of(16) {
                return None;
            }
            (indirect, table, size, index) = (true, address, length / 16, 0);
            continue;
        }
        let bytes = address..address.checked_add(u64::from(length))?;
        // More than there is memory cannot be inside.
        if length == 0 || length > 0x8000 || !bytes.clone().all(is_inside) {
            return None;
        }
        match flags & WRITE != 0 {
            true => writable.extend(bytes),
            false if !writable.is_empty() => return None,
            false => readable.extend(bytes),
        }
        if flags & NEXT == 0 {
            return Some((readable, writable));
        }
        index = u32::from(next);
    }
    None
}

fn addresses(pieces: &[BufferPiece]) -> Addresses {
    pieces.iter().flat_map(|piece| piece.address.0..piece.address.0 + piece.length as u64).collect()
}

/// The fate of a request at a disk, by the header and the number of bytes that follow it in each direction.
fn judge(
    memory: &GuestMemoryMmap,
    geometry: &DiskGeometry,
    readable: &[u64],
    wanted: u64,
) -> Result<(DiskOperation, u64, u64), DiskStatus> {
    let failed = DiskStatus::Failed;
    let header: [u8; 16] = load(memory, readable.iter().copied()).ok_or(failed)?;
    let sector = u64::from_le_bytes(header[8..].try_into().expect("eight bytes"));
    let sent = readable.len() as u64 - 16;
    let inside = |operation, sector: u64, length: u64| match u128::from(sector) * 512 + u128::from(length) {
        end if end <= u128::from(geometry.capacity) => Ok((operation, sector * 512, length)),
        _ => Err(failed),
    };
    match (u32::from_le_bytes(header[..4].try_into().expect("four bytes")), sent, wanted) {
        (0, 0, n) if n > 0 && n.is_multiple_of(SECTOR) && n <= MOST_BYTES => inside(DiskOperation::Read, sector, n),
        (1, n, 0) if n > 0 && n.is_multiple_of(SECTOR) && n <= MOST_BYTES && !geometry.read_only => {
            inside(DiskOperation::Write, sector, n)
        }
        (4, ..) => Ok((DiskOperation::Flush, 0, 0)),
        (8, _, n) if n >= 20 => Ok((DiskOperation::Identify, 0, n)),
        (11, ..) if !geometry.discards => Err(DiskStatus::Unsupported),
        (kind @ (11 | 13), 16, 0) if !geometry.read_only => {
            let range: [u8; 16] = load(memory, readable[16..].iter().copied()).ok_or(failed)?;
            let sector = u64::from_le_bytes(range[..8].try_into().expect("eight bytes"));
            let count = u32::from_le_bytes(range[8..12].try_into().expect("four bytes"));
            let operation = match (kind, u32::from_le_bytes(range[12..].try_into().expect("four bytes"))) {
                (11, 0) => DiskOperation::Discard,
                (13, flags @ (0 | 1)) => DiskOperation::WriteZeroes { unmap: flags == 1 },
                _ => return Err(DiskStatus::Unsupported),
            };
            match count {
                1..=MOST_RANGE => inside(operation, sector, u64::from(count) * SECTOR),
                _ => Err(failed),
            }
        }
        (0 | 1 | 8 | 11 | 13, ..) => Err(failed),
        _ => Err(DiskStatus::Unsupported),
    }
}

/// An address that is often near an edge.
fn address(input: &mut Input<'_>) -> u64 {
    let (class, offset) = (input.byte(), u64::from(input.byte()));
    match class % 8 {
        0 => offset,
        1 => 0x200 * (offset % 0x20),
        2 => 0x3000 - offset,
        3 => 0x5000 - offset,
        4 => 0x10_0000 + offset,
        5 => 0x10_1000 - offset,
        6 => [TABLE, INDIRECT_TABLE][usize::from(offset % 2 == 1)],
        _ => u64::MAX - offset,
    }
}

fn length(input: &mut Input<'_>) -> u32 {
    let (class, n) = (input.byte(), u32::from(input.byte()));
    match class % 8 {
        0 => n,
        1 => 16,
        2 => 512 * (n % 16),
        3 => 512 * (n % 16) + 1,
        4 => 16 * (n % 8),
        5 => 0x1000,
        6 => 17,
        _ => u32::MAX - n,
    }
}

fn row(input: &mut Input<'_>) -> [u8; 16] {
    let mut row = [0; 16];
    row[..8].copy_from_slice(&address(input).to_le_bytes());
    row[8..12].copy_from_slice(&length(input).to_le_bytes());
    let last = input.byte();
    row[12..14].copy_from_slice(&u16::from(last % 8).to_le_bytes());
    row[14..].copy_from_slice(&u16::from(last / 8).to_le_bytes());
    row
}

/// Runs an input.
pub(crate) fn run(input: &[u8]) -> Reached {
    let regions = REGIONS.map(|(start, length)| (GuestAddress(start), length));
    let memory = GuestMemoryMmap::<()>::from_ranges(&regions).expect("a memory of these regions");
    let mut input = Input(input);
    let shape = input.byte();
    let capacity = [0, 1, 512, 8192, 1 << 40, u64::MAX][usize::from(shape % 6)];
    let geometry = DiskGeometry { capacity, read_only: shape & 0x40 != 0, discards: shape & 0x80 == 0 };
    let store = |bytes: &[u8], at: u64| memory.write_slice(bytes, GuestAddress(at)).expect("an address inside");
    for n in 0..6 {
        store(&row(&mut input), TABLE + 16 * n);
        if n < 3 {
            store(&row(&mut input), INDIRECT_TABLE + 16 * n);
        }
    }
    let as_usual = input.byte();
    let mut head = u16::from(input.byte() % (SIZE as u8 + 1));
    // Header, data and status as a driver writes them, which chance alone seldom hits.
    if as_usual % 4 != 0 {
        head = 0;
        let place = |input: &mut Input<'_>| 16 * u64::from(input.byte() % 16);
        let sectors = 512 * u32::from(1 + input.byte() % 8);
        let data = match as_usual / 4 % 4 {
            0 => (0x2000, sectors, NEXT),
            1 => (0x2f00, sectors, NEXT | WRITE),
            2 => (0x3000, sectors + 20, NEXT | WRITE),
            _ => (place(&mut input), 16, NEXT),
        };
        let rows = [(place(&mut input), 16, NEXT), data, (0x4000, 1, WRITE)];
        for (n, (address, length, flags)) in (0_u16..).zip(rows) {
            let mut row = [0; 16];
            row[..8].copy_from_slice(&address.to_le_bytes());
            row[8..12].copy_from_slice(&length.to_le_bytes());
            row[12..14].copy_from_slice(&flags.to_le_bytes());
            row[14..].copy_from_slice(&(n + 1).to_le_bytes());
            store(&row, TABLE + 16 * u64::from(n));
        }
    }
    // Headers and ranges, where the first kind of address points.
    for at in (0..0x100).step_by(16) {
        let (kind, low, high, count, flags) = (input.byte(), input.byte(), input.byte(), input.word(), input.byte());
        // Sectors whose bytes need more than 64 bits, now and then.
        let high = high / 192 * high;
        let mut bytes = [0; 16];
        // Few kinds are none, and sectors are often near the end of a small disk.
        bytes[0] = if kind < 160 { [0, 1, 4, 8, 11, 13, 0, 1][usize::from(kind % 8)] } else { kind };
        bytes[3] = kind / 250;
        bytes[8] = if low < 192 { low % 24 } else { low };
        bytes[15] = high;
        // The same bytes as the range of a request.
        if flags & 0x80 != 0 {
            bytes = [0; 16];
            (bytes[0], bytes[7]) = (low, high);
            bytes[8..10].copy_from_slice(&count.to_le_bytes());
            (bytes[11], bytes[12]) = (kind / 240 * kind, flags % 4);
        }
        store(&bytes, at);
    }
    while !input.is_empty() {
        let at = u64::from(input.word() % 0x5000);
        store(&[input.byte()], at);
    }

    let mut reached = Reached::default();
    let mut buffers = ChainBuffers::default();
    let loaded = buffers.load(&memory, GuestAddress(TABLE), SIZE, head);
    let Some((readable, mut writable)) = walk(&memory, head) else {
        assert!(loaded.is_err(), "a chain that breaks the rules is accepted");
        reached.refused = 1;
        return reached;
    };
    loaded.expect("a sound chain");
    assert!(addresses(&buffers.readable) == readable && addresses(&buffers.writable) == writable);
    assert!(buffers.readable.iter().chain(&buffers.writable).all(|piece| piece.length > 0));
    let parsed = request::parse(&memory, &mut buffers, &geometry);
    let Some(status) = writable.pop() else {
        assert!(parsed.is_err(), "a request without room for its status is accepted");
        reached.refused = 1;
        return reached;
    };
    let parsed = parsed.expect("a request that can be answered");
    assert_eq!(parsed.status, GuestAddress(status));
    let request = parsed.request.map(|r| (r.operation, r.offset, r.length));
    assert_eq!(request, judge(&memory, &geometry, &readable, writable.len() as u64));
    match request {
        Err(DiskStatus::Unsupported) => reached.unsupported = 1,
        Err(_) => reached.failed = 1,
        Ok((operation, ..)) => {
            reached.done = 1;
            if matches!(operation, DiskOperation::Read | DiskOperation::Write) {
                assert!(addresses(&buffers.readable) == readable[16..] && addresses(&buffers.writable) == writable);
            }
        }
    }
    reached
}
