//! Sealed memfds (protocol M1, M2): memory of fixed size that only its maker can write.

use crate::RegionError;
use partywall_shm::corrupt::Corrupt;
use partywall_shm::layout::{Geometry, HUGE_PAGE, SocketPage};
use partywall_shm::sync::Own;
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use rustix::fs::{FallocateFlags, MemfdFlags, Mode, OFlags, SealFlags, SeekFrom, Stat};
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};
use std::ffi::CStr;
use std::io::Write as _;
use std::mem::offset_of;

/// The seals of every region, set before it is sent.
pub const SEALS: SealFlags =
    SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::FUTURE_WRITE).union(SealFlags::SEAL);

/// Makes an unsealed memfd of the geometry's size, all of it allocated, so that no later access can fail.
pub(crate) fn create(geometry: Geometry) -> Result<OwnedFd, RegionError> {
    let huge = if geometry.ring_offset() == HUGE_PAGE {
        MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB
    } else {
        MemfdFlags::empty()
    };
    create_of(geometry.region_size(), huge)
}

/// Makes a memfd of any size that is a multiple of a page, likewise.
pub(crate) fn create_of(size: u64, huge: MemfdFlags) -> Result<OwnedFd, RegionError> {
    let fd = create_empty(size, huge)?;
    allocate(fd.as_fd(), size)?;
    Ok(fd)
}

/// Makes an unsealed memfd of this size that has no memory yet.
pub(crate) fn create_empty(size: u64, huge: MemfdFlags) -> Result<OwnedFd, RegionError> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | huge;
    let fd = rustix::fs::memfd_create("partywall", flags)
        .map_err(|e| RegionError::system("create shared memory", size, e))?;
    check_limit(size)
        .and_then(|()| rustix::fs::ftruncate(&fd, size))
        .map_err(|e| RegionError::system("size shared memory", size, e))?;
    Ok(fd)
}

/// Allocates its first `size` bytes, so that no access to them can fail. It may be sealed.
pub(crate) fn allocate(fd: BorrowedFd<'_>, size: u64) -> Result<(), RegionError> {
    // The kernel begins again after each signal, so a program with many signals might never get further.
    let mut tries = 8;
    loop {
        match rustix::fs::fallocate(fd, FallocateFlags::empty(), 0, size) {
            Err(Errno::INTR) if tries > 1 => tries -= 1,
            done => return done.map_err(|e| RegionError::system("allocate shared memory", size, e)),
        }
    }
}

/// Whether this process may make a file of that size. The kernel would not only refuse: it would end the process (`SIGXFSZ`).
pub fn check_limit(size: u64) -> rustix::io::Result<()> {
    match getrlimit(Resource::Fsize).current {
        Some(most) if most < size => Err(Errno::FBIG),
        _ => Ok(()),
    }
}

/// Seals it. To be called after the maker has mapped it for writing, and before anyone else has it.
pub(crate) fn seal(fd: BorrowedFd<'_>, size: u64) -> Result<(), RegionError> {
    rustix::fs::fcntl_add_seals(fd, SEALS).map_err(|e| RegionError::system("seal shared memory", size, e))
}

/// Checks a descriptor that a peer made against what was told of it (protocol M2). Nothing is mapped.
///
/// It may wait for the lock of the file (`i_rwsem`), which a thread of the maker can hold.
pub fn verify(fd: BorrowedFd<'_>, geometry: Geometry) -> Result<(), RegionError> {
    let (size, huge) = (geometry.region_size(), geometry.ring_offset() == HUGE_PAGE);
    verify_blocks_of(fd, size, huge)?;
    if huge || has_no_hole(fd, size) { Ok(()) } else { Err(Corrupt::BadRegion.into()) }
}

/// As [`verify`], for a broker that passes the region on: it never waits. It does not find holes that blocks beyond the end hide, which the
/// receiver does (protocol M2.6).
pub fn verify_blocks(fd: BorrowedFd<'_>, geometry: Geometry) -> Result<(), RegionError> {
    verify_blocks_of(fd, geometry.region_size(), geometry.ring_offset() == HUGE_PAGE)
}

/// Checks memory that a peer made for its seat in a group (protocol J3): as [`verify`] does a region of ordinary pages.
pub fn verify_seat(fd: BorrowedFd<'_>, size: u64) -> Result<(), RegionError> {
    verify_seat_blocks(fd, size)?;
    if has_no_hole(fd, size) { Ok(()) } else { Err(Corrupt::BadRegion.into()) }
}

/// As [`verify_seat`], for a broker that passes the memory on, like [`verify_blocks`].
pub fn verify_seat_blocks(fd: BorrowedFd<'_>, size: u64) -> Result<(), RegionError> {
    verify_blocks_of(fd, size, false)
}

/// Checks memory of which its maker is to make a region of this shape: all of [`verify`], except that it need not be allocated.
pub fn verify_reserved(fd: BorrowedFd<'_>, geometry: Geometry) -> Result<(), RegionError> {
    sealed_stat(fd, geometry.region_size(), geometry.ring_offset() == HUGE_PAGE).map(drop)
}

fn verify_blocks_of(fd: BorrowedFd<'_>, size: u64, huge: bool) -> Result<(), RegionError> {
    let stat = sealed_stat(fd, size, huge)?;
    let has_blocks = u64::try_from(stat.st_blocks).is_ok_and(|blocks| blocks.saturating_mul(512) >= size);
    if has_blocks { Ok(()) } else { Err(Corrupt::BadRegion.into()) }
}

/// The facts of a file that is sealed memory of this size and kind.
fn sealed_stat(fd: BorrowedFd<'_>, size: u64, huge: bool) -> Result<Stat, RegionError> {
    // Only memfds (and files of a hugetlbfs or tmpfs of the kernel's own) answer this at all.
    let seals = rustix::fs::fcntl_get_seals(fd.as_fd()).map_err(|_| Corrupt::BadRegion)?;
    let stat = rustix::fs::fstat(fd).map_err(|_| Corrupt::BadRegion)?;
    let right_size = u64::try_from(stat.st_size) == Ok(size);
    if seals.contains(SEALS) && right_size && huge == is_hugetlb(fd) {
        Ok(stat)
    } else {
        Err(Corrupt::BadRegion.into())
    }
}

/// The byte up to which the owner of a region has written its ring, by the owner's own word. The region begins at byte `first` of the memory.
/// `None` if the memory has no such word.
pub fn written(memory: BorrowedFd<'_>, first: u64) -> Option<u64> {
    let mut tail = [0; 8];
    // The word lies in the first page of a region.
    let word = offset_of!(SocketPage<Own>, control.tx.cursor) as u64;
    let read = rustix::io::pread(memory, &mut tail, first.checked_add(word)?).ok()?;
    (read == tail.len()).then(|| u64::from_le_bytes(tail))
}

/// Whether a file's memory is huge pages that were set aside (hugetlb). A memfd of ordinary pages may show a large block size too, where
/// the kernel is configured to gather such pages into huge ones (`transparent_hugepage/shmem_enabled`).
pub fn is_hugetlb(fd: impl AsFd) -> bool {
    /// `HUGETLBFS_MAGIC` of Linux.
    const MAGIC: u64 = 0x9584_58f6;
    // The type of the field differs between architectures; the magic fills 32 bits.
    rustix::fs::fstatfs(fd).is_ok_and(|fs| fs.f_type as u64 & 0xffff_ffff == MAGIC)
}

/// Blocks can also lie beyond the end, where they hide holes in the count. (They cannot move once it is sealed.)
///
/// For huge pages the kernel does not report holes, but it reserves all missing pages when it makes a mapping.
///
/// A seek waits for two locks. That of the open file's position is held by a thread of the maker that reads by the same open file, for example
/// into memory that never arrives. So the seek is made by an open file of this thread alone. The inode's lock remains.
fn has_no_hole(fd: BorrowedFd<'_>, size: u64) -> bool {
    let ends_at = |file: BorrowedFd<'_>| rustix::fs::seek(file, SeekFrom::Hole(0)) == Ok(size);
    match reopen(fd) {
        Ok(file) => ends_at(file.as_fd()),
        // No /proc is mounted here, or this process can open no more files.
        Err(Errno::NOENT | Errno::MFILE | Errno::NFILE) => ends_at(fd),
        // Its maker keeps it from being read, by its mode or by a lease.
        Err(_) => false,
    }
}

/// The same file by an open file of this process alone, for reading. Never waits for the end of a lease.
fn reopen(fd: BorrowedFd<'_>) -> rustix::io::Result<OwnedFd> {
    // Without the program's allocator, which may be in use in this thread.
    let mut path = [0; 48];
    // It fits, with a zero behind it.
    let _ = write!(&mut path[..47], "/proc/thread-self/fd/{}", fd.as_raw_fd());
    let path = CStr::from_bytes_until_nul(&path).map_err(|_| Errno::NAMETOOLONG)?;
    rustix::fs::open(path, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty())
}
