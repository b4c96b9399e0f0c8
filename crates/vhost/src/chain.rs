//! A chain of descriptors, from its head on. Each descriptor is loaded once and checked at the load.

use crate::VhostError;
use vm_memory::{
    Address, Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, MmapRegion, VolatileArrayRef,
    VolatileMemory, VolatileSlice,
};

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
    /// Buffers that the device reads may lie outside of the memory.
    elsewhere: bool,
}

impl ChainBuffers {
    /// Buffers of a disk's requests. One that the device reads may lie outside of the memory table: a hypervisor leaves out what the machine
    /// only reads, such as a window of another machine. It is then in `readable` as it is, and the request fails or its store knows it.
    pub(crate) fn of_disk() -> Self {
        Self { elsewhere: true, ..Self::default() }
    }

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
        self.clear();
        self.append(memory, table, locate(memory, table, size.into()), size, head)
    }

    /// Removes all buffers.
    pub fn clear(&mut self) {
        self.readable.clear();
        self.writable.clear();
    }

    /// As [`Self::load`], and keeps the buffers of earlier chains. The table may be `located` already.
    pub(crate) fn append<'m>(
        &mut self,
        memory: &'m GuestMemoryMmap,
        table: GuestAddress,
        mut located: Option<VolatileArrayRef<'m, [u64; 2]>>,
        size: u16,
        head: u16,
    ) -> Result<(), VhostError> {
        let written = self.writable.len();
        let (mut table, mut size, mut index) = (table, u32::from(size), u32::from(head));
        let mut indirect = false;
        for _ in 0..=LARGEST {
            if index >= size {
                return Err(VhostError::Queue("a chain leaves its table"));
            }
            let [address, rest] = match &located {
                Some(descriptors) => descriptors.load(index as usize),
                None => {
                    let place = table.checked_add(u64::from(index) * DESCRIPTOR).ok_or_else(outside)?;
                    memory.read_obj(place).map_err(|_| outside())?
                }
            };
            let (address, rest) = (GuestAddress(u64::from_le(address)), u64::from_le(rest));
            let [l0, l1, l2, l3, f0, f1, n0, n1] = rest.to_le_bytes();
            let length = u32::from_le_bytes([l0, l1, l2, l3]);
            let flags = u16::from_le_bytes([f0, f1]);
            if flags & INDIRECT != 0 {
                let whole = length > 0 && u64::from(length).is_multiple_of(DESCRIPTOR);
                if indirect || flags & NEXT != 0 || !whole {
                    return Err(VhostError::Queue("an indirect table is nested, is continued, or has a wrong length"));
                }
                (indirect, table, size, index) = (true, address, length / DESCRIPTOR as u32, 0);
                located = locate(memory, table, size);
                continue;
            }
            self.add(memory, address, length, flags & WRITE != 0, written)?;
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
        written: usize,
    ) -> Result<(), VhostError> {
        if !writable && self.writable.len() > written {
            return Err(VhostError::Queue("a buffer to be read follows one to be written"));
        }
        let length = usize::try_from(length).map_err(|_| VhostError::Queue("a buffer is too large"))?;
        if length == 0 {
            return Err(VhostError::Queue("a buffer is empty"));
        }
        let pieces = if writable { &mut self.writable } else { &mut self.readable };
        if slice_at(memory, address, length).is_some() {
            pieces.push(BufferPiece { address, length });
            return Ok(());
        }
        if self.elsewhere && !writable && !memory.address_in_range(address) {
            pieces.push(BufferPiece { address, length });
            return Ok(());
        }
        for slice in memory.get_slices(address, length) {
            let length = slice.map_err(|_| outside())?.len();
            pieces.push(BufferPiece { address, length });
            address = GuestAddress(address.0.wrapping_add(length as u64));
        }
        Ok(())
    }
}

/// A table of descriptors, if it lies in one region of the memory. It is searched for once, and not for each descriptor.
pub(crate) fn locate(
    memory: &GuestMemoryMmap,
    table: GuestAddress,
    size: u32,
) -> Option<VolatileArrayRef<'_, [u64; 2]>> {
    let (region, place) = memory.to_region_addr(table)?;
    let mapped: &MmapRegion = region;
    mapped.get_array_ref(usize::try_from(place.raw_value()).ok()?, size as usize).ok()
}

/// Regions that are tried one after the other. In more of them, a region is searched for.
const FEW: usize = 4;

/// A part of a guest's memory, if one region has all of it. Most guests have a few regions, where this takes less time than a search.
#[inline]
pub(crate) fn slice_at(memory: &GuestMemoryMmap, address: GuestAddress, length: usize) -> Option<VolatileSlice<'_>> {
    if memory.num_regions() > FEW {
        return memory.get_slice(address, length).ok();
    }
    for region in memory.iter() {
        let offset = address.0.wrapping_sub(region.start_addr().0);
        if offset < region.len() {
            let mapped: &MmapRegion = region;
            return mapped.get_slice(usize::try_from(offset).ok()?, length).ok();
        }
    }
    None
}

fn outside() -> VhostError {
    VhostError::Queue("a descriptor or its buffer is outside of the memory table")
}
