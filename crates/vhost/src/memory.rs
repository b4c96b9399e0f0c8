//! A guest's memory, as its front end offers it.
//!
//! Memory is mapped only if its file cannot become shorter: an access behind the end of a file would end the switch with `SIGBUS`, and
//! all its ports with it. So the file must be sealed (`F_SEAL_SHRINK`), as QEMU's `memory-backend-memfd` is. Files of file systems that
//! another process serves (FUSE) have no seals, so no access to mapped memory can block.

use crate::VhostError;
use crate::closing::ReceivedFd;
use rustix::fs::{OFlags, SealFlags, fstat, fstatfs};
use std::fs::File;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
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
    fn is_of(&self, file: BorrowedFd<'_>, offset: u64) -> bool {
        let identity = |file: BorrowedFd<'_>| fstat(file).ok().map(|status| (status.st_dev, status.st_ino));
        let mapped = self.region.file_offset();
        mapped.is_some_and(|own| own.start() == offset && identity(own.file().as_fd()) == identity(file))
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

    /// Takes these regions in place of all before. One that is there already keeps its mapping.
    pub(crate) fn replace(&mut self, regions: Vec<(VhostUserMemoryRegion, ReceivedFd)>) -> Result<(), VhostError> {
        let mut new = Self::default();
        for (region, file) in regions {
            new.push(region, file, &self.regions)?;
        }
        new.rebuild()?;
        *self = new;
        Ok(())
    }

    /// The addresses of the guest where [`Self::replace`] by these regions changes nothing.
    pub(crate) fn kept_by(&self, regions: &[(VhostUserMemoryRegion, BorrowedFd<'_>)]) -> Vec<Range<u64>> {
        let is_same = |own: &TableRegion, (region, file): &(VhostUserMemoryRegion, BorrowedFd<'_>)| {
            // Only seals are asked for before it is known that no other process serves the file.
            let is_usable = || is_sealed(*file) && matches!(is_writable(*file), Ok(true));
            own.is_at(region) && is_usable() && own.is_of(*file, region.mmap_offset)
        };
        let kept = self.regions.iter().filter(|own| regions.iter().any(|region| is_same(own, region)));
        kept.map(|own| own.guest..own.guest.saturating_add(own.size)).collect()
    }

    /// Adds a region. One that is there already changes nothing: before version 8.0, QEMU sends each change of a card's memory once for each
    /// of its pairs of queues.
    pub(crate) fn add(&mut self, region: VhostUserMemoryRegion, file: ReceivedFd) -> Result<(), VhostError> {
        self.push(region, file, &[])?;
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

    /// Adds a region, with the mapping that it has among the `earlier` ones if it is one of them.
    fn push(
        &mut self,
        region: VhostUserMemoryRegion,
        file: ReceivedFd,
        earlier: &[TableRegion],
    ) -> Result<(), VhostError> {
        let (guest, user, size, offset) =
            (region.guest_phys_addr, region.user_addr, region.memory_size, region.mmap_offset);
        let ends = [guest, user, offset].map(|start| start.checked_add(size));
        if size == 0 || ends.contains(&None) {
            return Err(VhostError::Memory("a region is empty or too large".into()));
        }
        let file = check_file(file, offset, size)?;
        let is_same = |r: &&TableRegion| r.is_at(&region) && r.is_of(file.file.as_fd(), offset);
        if self.regions.iter().any(|r| is_same(&r)) {
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
        if let Some(same) = earlier.iter().find(is_same) {
            self.regions.push(same.clone());
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
    if !is_sealed(fd) {
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
    let writable = is_writable(fd.as_fd())?;
    Ok(SealedFile { file: File::from(fd), writable })
}

fn seals(fd: BorrowedFd<'_>) -> SealFlags {
    rustix::fs::fcntl_get_seals(fd).unwrap_or(SealFlags::empty())
}

/// Whether a file cannot become shorter.
fn is_sealed(fd: BorrowedFd<'_>) -> bool {
    seals(fd).contains(SealFlags::SHRINK)
}

fn is_writable(fd: BorrowedFd<'_>) -> Result<bool, VhostError> {
    let mode = rustix::fs::fcntl_getfl(fd).map_err(VhostError::system("look at the memory's file"))?;
    Ok(mode.contains(OFlags::RDWR) && !seals(fd).intersects(SealFlags::WRITE | SealFlags::FUTURE_WRITE))
}

impl SealedFile {
    /// Maps a part of it.
    pub(crate) fn map(self, offset: u64, size: usize) -> Result<MmapRegion, VhostError> {
        MmapRegion::from_file(FileOffset::new(self.file, offset), size).map_err(|e| VhostError::Memory(e.to_string()))
    }
}

#[cfg(test)]
#[cfg(not(miri))]
mod tests {
    use super::*;
    use crate::closing::Reaper;
    use rustix::fs::MemfdFlags;
    use std::os::fd::OwnedFd;
    use vm_memory::GuestMemoryBackend;

    const SIZE: u64 = 0x1000;

    fn sealed() -> OwnedFd {
        let file = rustix::fs::memfd_create("guest", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&file, 4 * SIZE).unwrap();
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
        file
    }

    /// The region with this number, which is at its number's place in the file too.
    fn region(number: u64) -> VhostUserMemoryRegion {
        VhostUserMemoryRegion::new(number * SIZE, SIZE, (8 + number) * SIZE, number * SIZE)
    }

    fn table(file: &OwnedFd, regions: &[VhostUserMemoryRegion]) -> Vec<(VhostUserMemoryRegion, ReceivedFd)> {
        let received = || ReceivedFd::new(file.try_clone().unwrap(), &Reaper::default());
        regions.iter().map(|region| (*region, received())).collect()
    }

    fn place(memory: &MemoryTable, address: u64) -> *mut u8 {
        memory.map().get_host_address(GuestAddress(address)).unwrap()
    }

    #[test]
    fn region_of_the_next_table_keeps_its_mapping() {
        let (file, mut memory) = (sealed(), MemoryTable::default());
        memory.replace(table(&file, &[region(0), region(2)])).unwrap();
        let places = [0, 2 * SIZE].map(|address| place(&memory, address));
        memory.replace(table(&file, &[region(2), region(1), region(0)])).unwrap();
        assert_eq!([0, 2 * SIZE].map(|address| place(&memory, address)), places);
        let other = sealed();
        memory.replace(table(&other, &[region(0)]).into_iter().chain(table(&file, &[region(2)])).collect()).unwrap();
        assert_ne!(place(&memory, 0), places[0], "the memory of another file is not seen");
        assert_eq!(place(&memory, 2 * SIZE), places[1]);
        assert!(memory.map().get_host_address(GuestAddress(SIZE)).is_err(), "a region that has gone is there");
    }

    #[test]
    fn table_keeps_exactly_the_regions_that_are_the_same() {
        let (file, other, mut memory) = (sealed(), sealed(), MemoryTable::default());
        memory.replace(table(&file, &[region(0), region(2)])).unwrap();
        let kept = |file: &OwnedFd, region: VhostUserMemoryRegion| memory.kept_by(&[(region, file.as_fd())]);
        assert_eq!(kept(&file, region(2)), vec![2 * SIZE..3 * SIZE]);
        assert_eq!(kept(&other, region(2)), [], "another file");
        assert_eq!(kept(&file, region(1)), [], "a new region");
        let of = VhostUserMemoryRegion::new;
        let (guest, user, offset) = (2 * SIZE, 10 * SIZE, 2 * SIZE);
        assert_eq!(kept(&file, of(guest, SIZE, user, offset)), vec![guest..guest + SIZE]);
        assert_eq!(kept(&file, of(guest, SIZE / 2, user, offset)), [], "another size");
        assert_eq!(kept(&file, of(3 * SIZE, SIZE, user, offset)), [], "another address of the guest");
        assert_eq!(kept(&file, of(guest, SIZE, 11 * SIZE, offset)), [], "another address of the front end");
        assert_eq!(kept(&file, of(guest, SIZE, user, SIZE)), [], "another part of the file");
        rustix::fs::fcntl_add_seals(&file, SealFlags::FUTURE_WRITE).unwrap();
        assert_eq!(kept(&file, region(2)), [], "the machine only reads it now");
    }
}
