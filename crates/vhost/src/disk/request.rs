//! A driver's request to a disk: read from its chain once, and checked before anything is executed.

use crate::VhostError;
use crate::chain::{BufferPiece, ChainBuffers};
use virtio_bindings::virtio_blk;
use vm_memory::{Address, Bytes, GuestAddress, GuestMemoryMmap};

/// Bytes of a sector, in which virtio counts.
pub const SECTOR: u64 = 512;
/// Bytes of the header of a request.
pub const HEADER: usize = 16;
/// Bytes of a range to discard or to fill with zeroes.
pub const RANGE: usize = 16;
/// Sectors that one request discards or fills with zeroes at most.
pub const MOST_RANGE: u32 = 1 << 22;
/// Bytes that one request reads or writes at most.
pub const MOST_BYTES: u64 = 1 << 30;

/// The operation of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DiskOperation {
    /// Reads sectors.
    Read,
    /// Writes sectors.
    Write,
    /// Makes all writes that are complete durable.
    Flush,
    /// Gives sectors up.
    Discard,
    /// Fills sectors with zeroes, and may give them up.
    WriteZeroes {
        /// The sectors need no room any longer.
        unmap: bool,
    },
    /// Reads the serial number.
    Identify,
}

/// The status that a driver gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DiskStatus {
    /// It is done.
    Done,
    /// It failed, or it cannot be.
    Failed,
    /// This disk does not do it.
    Unsupported,
}

impl DiskStatus {
    /// As virtio has it.
    pub fn byte(self) -> u8 {
        match self {
            Self::Done => virtio_blk::VIRTIO_BLK_S_OK as u8,
            Self::Failed => virtio_blk::VIRTIO_BLK_S_IOERR as u8,
            Self::Unsupported => virtio_blk::VIRTIO_BLK_S_UNSUPP as u8,
        }
    }
}

/// The limits that requests are checked against.
#[derive(Debug, Clone, Copy)]
pub struct DiskGeometry {
    /// Bytes of the disk.
    pub capacity: u64,
    /// The disk cannot be written.
    pub read_only: bool,
    /// The disk gives sectors up.
    pub discards: bool,
}

/// A request that may be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiskRequest {
    /// The operation.
    pub operation: DiskOperation,
    /// Where it begins, in bytes.
    pub offset: u64,
    /// How much it is about, in bytes.
    pub length: u64,
}

impl DiskRequest {
    /// The whole blocks inside its range. `None` if there are none.
    pub fn whole_blocks(self, block: u32) -> Option<Self> {
        let block = u64::from(block);
        let offset = self.offset.checked_next_multiple_of(block)?;
        let end = self.offset.checked_add(self.length)? / block * block;
        let length = end.checked_sub(offset).filter(|length| *length > 0)?;
        Some(Self { offset, length, ..self })
    }
}

/// A chain that is a request, and its place for the answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ParsedRequest {
    /// Where the status goes.
    pub status: GuestAddress,
    /// The request, or what it is answered without being done.
    pub request: Result<DiskRequest, DiskStatus>,
}

/// Reads a request from the buffers of a chain. The rest of `buffers` is the request's data.
///
/// A chain without room for a status is an error: the driver cannot be answered.
pub fn parse(
    memory: &GuestMemoryMmap,
    buffers: &mut ChainBuffers,
    geometry: &DiskGeometry,
) -> Result<ParsedRequest, VhostError> {
    let status = take_last_byte(&mut buffers.writable)?;
    let mut header = [0; HEADER];
    if take_front(memory, &mut buffers.readable, &mut header)? < HEADER {
        return Ok(ParsedRequest { status, request: Err(DiskStatus::Failed) });
    }
    let [t0, t1, t2, t3, _, _, _, _, s0, s1, s2, s3, s4, s5, s6, s7] = header;
    let kind = u32::from_le_bytes([t0, t1, t2, t3]);
    let sector = u64::from_le_bytes([s0, s1, s2, s3, s4, s5, s6, s7]);
    let request = judge(memory, buffers, geometry, kind, sector)?;
    Ok(ParsedRequest { status, request })
}

fn judge(
    memory: &GuestMemoryMmap,
    buffers: &mut ChainBuffers,
    geometry: &DiskGeometry,
    kind: u32,
    sector: u64,
) -> Result<Result<DiskRequest, DiskStatus>, VhostError> {
    let (sent, wanted) = (total(&buffers.readable), total(&buffers.writable));
    let operation = match kind {
        virtio_blk::VIRTIO_BLK_T_IN => DiskOperation::Read,
        virtio_blk::VIRTIO_BLK_T_OUT => DiskOperation::Write,
        virtio_blk::VIRTIO_BLK_T_FLUSH => DiskOperation::Flush,
        virtio_blk::VIRTIO_BLK_T_GET_ID => DiskOperation::Identify,
        virtio_blk::VIRTIO_BLK_T_DISCARD => DiskOperation::Discard,
        virtio_blk::VIRTIO_BLK_T_WRITE_ZEROES => DiskOperation::WriteZeroes { unmap: false },
        _ => return Ok(Err(DiskStatus::Unsupported)),
    };
    let failed = Ok(Err(DiskStatus::Failed));
    match operation {
        DiskOperation::Read | DiskOperation::Write => {
            let (length, other) = if operation == DiskOperation::Read { (wanted, sent) } else { (sent, wanted) };
            // Buffers of the wrong direction are as if they were read-only.
            let whole = other == 0 && length > 0 && length.is_multiple_of(SECTOR) && length <= MOST_BYTES;
            if !whole || (operation == DiskOperation::Write && geometry.read_only) {
                return failed;
            }
            Ok(inside(geometry, operation, sector, length))
        }
        DiskOperation::Flush => Ok(Ok(DiskRequest { operation, offset: 0, length: 0 })),
        DiskOperation::Identify if wanted < u64::from(virtio_blk::VIRTIO_BLK_ID_BYTES) => failed,
        DiskOperation::Identify => Ok(Ok(DiskRequest { operation, offset: 0, length: wanted })),
        DiskOperation::Discard | DiskOperation::WriteZeroes { .. } => {
            let discard = operation == DiskOperation::Discard;
            if discard && !geometry.discards {
                return Ok(Err(DiskStatus::Unsupported));
            }
            if geometry.read_only || sent != RANGE as u64 || wanted != 0 {
                return failed;
            }
            let mut range = [0; RANGE];
            take_front(memory, &mut buffers.readable, &mut range)?;
            let [s0, s1, s2, s3, s4, s5, s6, s7, n0, n1, n2, n3, f0, f1, f2, f3] = range;
            let sector = u64::from_le_bytes([s0, s1, s2, s3, s4, s5, s6, s7]);
            let (count, flags) = (u32::from_le_bytes([n0, n1, n2, n3]), u32::from_le_bytes([f0, f1, f2, f3]));
            let known = if discard { 0 } else { virtio_blk::VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP };
            if flags & !known != 0 {
                return Ok(Err(DiskStatus::Unsupported));
            }
            if count == 0 || count > MOST_RANGE {
                return failed;
            }
            let operation = if discard { operation } else { DiskOperation::WriteZeroes { unmap: flags != 0 } };
            Ok(inside(geometry, operation, sector, u64::from(count) * SECTOR))
        }
    }
}

fn inside(
    geometry: &DiskGeometry,
    operation: DiskOperation,
    sector: u64,
    length: u64,
) -> Result<DiskRequest, DiskStatus> {
    let offset = sector.checked_mul(SECTOR).ok_or(DiskStatus::Failed)?;
    match offset.checked_add(length) {
        Some(end) if end <= geometry.capacity => Ok(DiskRequest { operation, offset, length }),
        _ => Err(DiskStatus::Failed),
    }
}

fn total(pieces: &[BufferPiece]) -> u64 {
    pieces.iter().map(|piece| piece.length as u64).sum()
}

/// Takes the last byte of the last piece.
fn take_last_byte(pieces: &mut Vec<BufferPiece>) -> Result<GuestAddress, VhostError> {
    let none = VhostError::Queue("a request has no room for its status");
    let Some(last) = pieces.last_mut() else { return Err(none) };
    let Some(length) = last.length.checked_sub(1) else { return Err(none) };
    let status = last.address.checked_add(length as u64);
    last.length = length;
    if length == 0 {
        pieces.pop();
    }
    status.ok_or(none)
}

/// Takes bytes from the front of the pieces, and returns how many there were.
fn take_front(memory: &GuestMemoryMmap, pieces: &mut Vec<BufferPiece>, into: &mut [u8]) -> Result<usize, VhostError> {
    let gone = || VhostError::Queue("a buffer is outside of the memory table");
    let (mut done, mut empty) = (0, 0);
    for piece in pieces.iter_mut() {
        if done == into.len() {
            break;
        }
        let part = piece.length.min(into.len() - done);
        memory.read_slice(&mut into[done..done + part], piece.address).map_err(|_| gone())?;
        piece.address = piece.address.checked_add(part as u64).ok_or_else(gone)?;
        piece.length -= part;
        done += part;
        empty += usize::from(piece.length == 0);
    }
    pieces.drain(..empty);
    Ok(done)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn range_has_the_whole_blocks_inside_it() {
        let blocks = |offset, length, block| {
            let request = DiskRequest { operation: DiskOperation::Discard, offset, length };
            request.whole_blocks(block).map(|request| (request.offset, request.length))
        };
        assert_eq!(blocks(512, 1536, 512), Some((512, 1536)));
        assert_eq!(blocks(4096, 8192, 4096), Some((4096, 8192)));
        assert_eq!(blocks(512, 12288, 4096), Some((4096, 8192)));
        assert_eq!(blocks(4096, 8191, 4096), Some((4096, 4096)));
        assert_eq!(blocks(512, 4096, 4096), None, "two halves");
        assert_eq!(blocks(0, 512, 4096), None);
        assert_eq!(blocks(u64::MAX - 511, 511, 4096), None, "an overflow");
    }
}
