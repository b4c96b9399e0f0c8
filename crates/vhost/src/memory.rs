//! A guest's memory, as its front end offers it.
//!
//! Memory is mapped only if its file cannot become shorter: an access behind the end of a file would end the switch with `SIGBUS`, and
//! all its ports with it. So the file must be sealed (`F_SEAL_SHRINK`), as QEMU's `memory-backend-memfd` is. Files of file systems that
//! another process serves (FUSE) have no seals, so no access to mapped memory can block.

use crate::VhostError;
use crate::closing::ReceivedFd;
use rustix::fs::{OFlags, SealFlags, fstat, fstatfs};
use std::fs::File;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::AtomicU16;
use vhost::vhost_user::message::VhostUserMemoryRegion;
use vm_memory::{
    Address, ByteValued, FileOffset, GuestAddress, GuestMemoryMmap, GuestMemoryRegion, GuestRegionMmap, MmapRegion,
    VolatileArrayRef, VolatileMemory,
};

/// Of `linux/magic.h`.
const HUGETLBFS: u64 = 0x9584_58f6;
/// Regions that a table holds at most.
pub const MOST: usize = 64;
/// Bytes that a table's regions have together at most.
const LARGEST: u64 = 1 << 42;

#[derive(Debug, Clone)]
struct TableRegion {
    guest: u64,
    user: u64,
    size: u64,
    region: Arc<GuestRegionMmap>,
}

impl TableRegion {
    /// Whether it has these addresses and this size.
    fn is_at(&self, other: &VhostUserMemoryRegion) -> bool {
        (self.guest, self.user, self.size) == (other.guest_phys_addr, other.user_addr, other.memory_size)
    }

    /// Whether it is this part of this file.
    fn is_of(&self, file: &SealedFile, offset: u64) -> bool {
        let identity = |file: &File| fstat(file).ok().map(|status| (status.st_dev, status.st_ino));
        let mapped = self.region.file_offset();
        mapped.is_some_and(|own| own.start() == offset && identity(own.file()) == identity(&file.file))
    }
}

/// The regions that a front end has offered.
#[derive(Debug, Default)]
pub struct MemoryTable {
    regions: Vec<TableRegion>,
    map: Arc<GuestMemoryMmap>,
}

impl MemoryTable {
    /// All of it, by the guest's addresses.
    pub fn map(&self) -> &Arc<GuestMemoryMmap> {
        &self.map
    }

    /// Takes these regions in place of all before.
    pub(crate) fn replace(&mut self, regions: Vec<(VhostUserMemoryRegion, ReceivedFd)>) -> Result<(), VhostError> {
        let mut new = Self::default();
        for (region, file) in regions {
            new.push(region, file)?;
        }
        new.rebuild()?;
        *self = new;
        Ok(())
    }

    /// Adds a region. One that is there already changes nothing: before version 8.0, QEMU sends each change of a card's memory once for each
    /// of its pairs of queues.
    pub(crate) fn add(&mut self, region: VhostUserMemoryRegion, file: ReceivedFd) -> Result<(), VhostError> {
        self.push(region, file)?;
        self.rebuild().inspect_err(|_| drop(self.regions.pop()))
    }

    /// Removes the region with these addresses and this size. One that is not there changes nothing, for the reason that `add` states.
    pub fn remove(&mut self, region: VhostUserMemoryRegion) -> Result<(), VhostError> {
        self.regions.retain(|r| !r.is_at(&region));
        self.rebuild()
    }

    /// The guest's address for one of the front end's.
    pub fn guest_address(&self, user: u64) -> Option<GuestAddress> {
        let region = self.regions.iter().find(|r| user.checked_sub(r.user).is_some_and(|offset| offset < r.size))?;
        region.guest.checked_add(user - region.user).map(GuestAddress)
    }

    /// The place of a guest's address, if its region reaches `length` bytes behind it.
    pub(crate) fn locate(&self, address: GuestAddress, length: u64) -> Option<LocatedPlace> {
        let end = address.checked_add(length)?;
        let found = self.regions.iter().find(|r| r.guest <= address.0 && end.0 <= r.guest.saturating_add(r.size))?;
        let offset = usize::try_from(address.0 - found.region.start_addr().0).ok()?;
        Some(LocatedPlace { region: Arc::clone(&found.region), offset })
    }

    fn push(&mut self, region: VhostUserMemoryRegion, file: ReceivedFd) -> Result<(), VhostError> {
        let (guest, user, size, offset) =
            (region.guest_phys_addr, region.user_addr, region.memory_size, region.mmap_offset);
        let ends = [guest, user, offset].map(|start| start.checked_add(size));
        if size == 0 || ends.contains(&None) {
            return Err(VhostError::Memory("a region is empty or too large".into()));
        }
        let file = check_file(file, offset, size)?;
        if self.regions.iter().any(|r| r.is_at(&region) && r.is_of(&file, offset)) {
            return Ok(());
        }
        if self.regions.len() >= MOST {
            return Err(VhostError::Memory("there are too many regions".into()));
        }
        if self.regions.iter().fold(size, |sum, region| sum.saturating_add(region.size)) > LARGEST {
            return Err(VhostError::Memory("its regions are more than 4 TiB together".into()));
        }
        if !file.writable {
            // A window that the machine only reads. No queue and no buffer of a card lies in it; an address in it is unknown.
            return Ok(());
        }
        let size_here = usize::try_from(size).map_err(|_| VhostError::Memory("a region is too large".into()))?;
        let mapped = file.map(offset, size_here)?;
        let region = GuestRegionMmap::new(mapped, GuestAddress(guest))
            .ok_or_else(|| VhostError::Memory("a region passes the end of all addresses".into()))?;
        self.regions.push(TableRegion { guest, user, size, region: Arc::new(region) });
        Ok(())
    }

    fn rebuild(&mut self) -> Result<(), VhostError> {
        let mut all: Vec<_> = self.regions.iter().map(|r| (r.guest, Arc::clone(&r.region))).collect();
        all.sort_by_key(|(guest, _)| *guest);
        self.map = Arc::new(if all.is_empty() {
            GuestMemoryMmap::new()
        } else {
            GuestMemoryMmap::from_arc_regions(all.into_iter().map(|(_, region)| region).collect())
                .map_err(|e| VhostError::Memory(e.to_string()))?
        });
        Ok(())
    }
}

/// A place in one region, which stays mapped. It is found once, and not at each access.
#[derive(Debug, Clone)]
pub(crate) struct LocatedPlace {
    region: Arc<GuestRegionMmap>,
    offset: usize,
}

impl LocatedPlace {
    /// As many values as are asked for, `at` bytes behind the place. `None` behind the region's end.
    pub(crate) fn array<T: ByteValued>(&self, at: usize, count: usize) -> Option<VolatileArrayRef<'_, T>> {
        let mapped: &MmapRegion = &self.region;
        mapped.get_array_ref(self.offset.checked_add(at)?, count).ok()
    }

    /// An index, `at` bytes behind the place. `None` behind the region's end, or if it is not aligned.
    pub(crate) fn index(&self, at: usize) -> Option<&AtomicU16> {
        let mapped: &MmapRegion = &self.region;
        mapped.get_atomic_ref(self.offset.checked_add(at)?).ok()
    }
}

/// A file whose pages can be mapped: no access to them ends or blocks this process.
#[derive(Debug)]
pub(crate) struct SealedFile {
    file: File,
    pub(crate) writable: bool,
}

/// Checks that a file is sealed and reaches to the end of a part of it. Only seals are asked for before it is known that no other
/// process serves the file.
pub(crate) fn check_file(file: ReceivedFd, offset: u64, size: u64) -> Result<SealedFile, VhostError> {
    let fd = file.get().ok_or(VhostError::Closed)?;
    let seals = rustix::fs::fcntl_get_seals(fd).unwrap_or(SealFlags::empty());
    if !seals.contains(SealFlags::SHRINK) {
        let remedy = "start the machine with -object memory-backend-memfd,share=on";
        return Err(VhostError::Memory(format!("its file can become shorter; {remedy}")));
    }
    let Some(fd) = file.harmless() else { return Err(VhostError::Closed) };
    // A hole in huge pages may have no page to fill it, which would end this process as well.
    if fstatfs(fd.as_fd()).is_ok_and(|system| system.f_type as u64 & 0xffff_ffff == HUGETLBFS) {
        return Err(VhostError::Memory("it is made of huge pages of hugetlbfs; leave out hugetlb=on".into()));
    }
    let length = fstat(fd.as_fd()).map_err(VhostError::system("look at the memory's file"))?.st_size;
    let inside = offset.checked_add(size).is_some_and(|end| u64::try_from(length).is_ok_and(|length| end <= length));
    if !inside {
        return Err(VhostError::Memory("a region passes the end of its file".into()));
    }
    let mode = rustix::fs::fcntl_getfl(fd.as_fd()).map_err(VhostError::system("look at the memory's file"))?;
    let writable = mode.contains(OFlags::RDWR) && !seals.intersects(SealFlags::WRITE | SealFlags::FUTURE_WRITE);
    Ok(SealedFile { file: File::from(fd), writable })
}

impl SealedFile {
    /// Maps a part of it.
    pub(crate) fn map(self, offset: u64, size: usize) -> Result<MmapRegion, VhostError> {
        MmapRegion::from_file(FileOffset::new(self.file, offset), size).map_err(|e| VhostError::Memory(e.to_string()))
    }
}
