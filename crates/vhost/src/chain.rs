//! A chain of descriptors, from its head on. Each descriptor is loaded once and checked at the load.

use crate::VhostError;
use vm_memory::{Address, Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

/// Entries of a queue at most.
pub const LARGEST: u16 = 1024;
/// Bytes of a descriptor.
const DESCRIPTOR: u64 = 16;
const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

/// A piece of the guest's memory that a descriptor names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BufferPiece {
    /// Where it begins.
    pub address: GuestAddress,
    /// Its length.
    pub length: usize,
}

/// The buffers of one chain: first those that the device reads, then those that it writes.
#[derive(Debug, Default)]
pub struct ChainBuffers {
    /// Buffers that the device reads.
    pub readable: Vec<BufferPiece>,
    /// Buffers that the device writes.
    pub writable: Vec<BufferPiece>,
}

impl ChainBuffers {
    /// Reads the chain that begins with `head` in a table of `size` descriptors.
    ///
    /// Every buffer lies in the memory and has at least one byte, and there are at most [`LARGEST`] descriptors. A buffer that crosses from one
    /// region of the memory into the next becomes several pieces.
    pub fn load(
        &mut self,
        memory: &GuestMemoryMmap,
        table: GuestAddress,
        size: u16,
        head: u16,
    ) -> Result<(), VhostError> {
        self.readable.clear();
        self.writable.clear();
        let (mut table, mut size, mut index) = (table, u32::from(size), u32::from(head));
        let mut indirect = false;
        for _ in 0..=LARGEST {
            if index >= size {
                return Err(VhostError::Queue("a chain leaves its table"));
            }
            let place = table.checked_add(u64::from(index) * DESCRIPTOR).ok_or_else(outside)?;
            let mut bytes = [0; DESCRIPTOR as usize];
            memory.read_slice(&mut bytes, place).map_err(|_| outside())?;
            let [a0, a1, a2, a3, a4, a5, a6, a7, l0, l1, l2, l3, f0, f1, n0, n1] = bytes;
            let address = GuestAddress(u64::from_le_bytes([a0, a1, a2, a3, a4, a5, a6, a7]));
            let length = u32::from_le_bytes([l0, l1, l2, l3]);
            let flags = u16::from_le_bytes([f0, f1]);
            if flags & INDIRECT != 0 {
                let whole = length > 0 && u64::from(length).is_multiple_of(DESCRIPTOR);
                if indirect || flags & NEXT != 0 || !whole {
                    return Err(VhostError::Queue("an indirect table is nested, is continued, or has a wrong length"));
                }
                (indirect, table, size, index) = (true, address, length / DESCRIPTOR as u32, 0);
                continue;
            }
            self.add(memory, address, length, flags & WRITE != 0)?;
            if flags & NEXT == 0 {
                return Ok(());
            }
            index = u32::from(u16::from_le_bytes([n0, n1]));
        }
        Err(VhostError::Queue("a chain loops, or has more than 1024 buffers"))
    }

    fn add(
        &mut self,
        memory: &GuestMemoryMmap,
        mut address: GuestAddress,
        length: u32,
        writable: bool,
    ) -> Result<(), VhostError> {
        if !writable && !self.writable.is_empty() {
            return Err(VhostError::Queue("a buffer to be read follows one to be written"));
        }
        let length = usize::try_from(length).map_err(|_| VhostError::Queue("a buffer is too large"))?;
        if length == 0 {
            return Err(VhostError::Queue("a buffer is empty"));
        }
        let pieces = if writable { &mut self.writable } else { &mut self.readable };
        for slice in memory.get_slices(address, length) {
            let length = slice.map_err(|_| outside())?.len();
            pieces.push(BufferPiece { address, length });
            address = GuestAddress(address.0.wrapping_add(length as u64));
        }
        Ok(())
    }
}

fn outside() -> VhostError {
    VhostError::Queue("a descriptor or its buffer is outside of the memory table")
}
