//! A window on the host: the file that QEMU shows to its guests.

use super::memory;
use crate::RegionError;
use crate::window::Window;
use partywall_protocol::window::{
    BLOCK, DATA_OFFSET, INFO_OFFSET, STEP, TRIAL_OFFSET, WindowHeader, WindowId, info_block, is_info_block,
};
use partywall_shm::corrupt::Corrupt;
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use rustix::fs::{FallocateFlags, MemfdFlags, Mode, OFlags, SealFlags};
use rustix::io::Errno;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// QEMU of the owner maps the file writable, so unlike a region's (protocol M1) its seals do not forbid that.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);
/// The largest window.
const MAX: u64 = 64 << 30;
/// The first memory that a window has is before this: a step of places behind the two that hold what says what it is.
const FIRST: u64 = 3 * STEP;
/// Bytes of memory that are made at a time: some milliseconds.
const PART: u64 = 16 << 20;

/// The properties of a new window.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WindowSpec {
    /// Bytes that regions can have in it.
    pub room: u64,
    /// The domain that will write it.
    pub owner: String,
    /// The domain that will read it.
    pub peer: String,
}

impl WindowSpec {
    /// The file's size: room, header and info block, rounded up to what guests can map.
    pub fn file_size(&self) -> Result<u64, RegionError> {
        (DATA_OFFSET + BLOCK as u64)
            .checked_add(self.room)
            .and_then(|size| size.checked_next_multiple_of(STEP))
            .filter(|size| *size <= MAX)
            .ok_or_else(|| {
                RegionError::system("make a window", self.room, io::Error::other("windows have 64 GiB at most"))
            })
    }
}

/// A window's file, held open.
#[derive(Debug)]
pub struct WindowFile {
    fd: OwnedFd,
    size: u64,
    header: WindowHeader,
    /// Where it can be opened; `None` for one without a name.
    path: Option<PathBuf>,
    /// All before this has memory.
    allocated: AtomicU64,
}

impl WindowFile {
    /// Makes a window without a name, sealed so that its size cannot change. It lives while any process has it open.
    pub fn create(spec: &WindowSpec) -> Result<Self, RegionError> {
        let window = Self::begin(spec)?;
        window.allocate()?;
        Ok(window)
    }

    /// Makes a window with only a part of its memory, since allocating all of it takes longer than everything else: the blocks that
    /// identify it, and some places. [`WindowFile::allocate_more`] allocates the rest. The window may be plugged in before that, if no
    /// place without memory is given out: a guest that touches an unallocated page is killed if the host has no memory for it.
    pub fn begin(spec: &WindowSpec) -> Result<Self, RegionError> {
        let size = spec.file_size()?;
        let error = |e| RegionError::system("create a window", size, e);
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create("partywall-window", flags).map_err(error)?;
        let header = describe(fd.as_fd(), size, spec)?;
        super::book::begin(fd.as_fd()).map_err(error)?;
        rustix::fs::fcntl_add_seals(&fd, SEALS).map_err(|e| RegionError::system("seal a window", size, e))?;
        // Only this user, and users who are admitted (`let_in`), can open the file again through /proc and write memory that is not
        // theirs.
        rustix::fs::fchmod(&fd, Mode::RUSR | Mode::WUSR).map_err(error)?;
        allocate(fd.as_fd(), 0..TRIAL_OFFSET + BLOCK as u64)?;
        allocate(fd.as_fd(), 2 * STEP..FIRST.min(size))?;
        Ok(Self { fd, size, header, path: None, allocated: AtomicU64::new(0) })
    }

    /// Makes the next part of its memory, a few MiB; `true` once there is all. It is made in order, from the first byte on.
    pub fn allocate_more(&self) -> Result<bool, RegionError> {
        let from = self.allocated.load(Ordering::Relaxed);
        if from == self.size {
            return Ok(true);
        }
        let to = from.saturating_add(PART).min(self.size);
        if memory::available().is_some_and(|has| has < memory::SPARE.saturating_add(to - from)) {
            return Err(RegionError::system("allocate memory for a window", to, Errno::NOMEM));
        }
        allocate(self.fd.as_fd(), from..to)?;
        // Another thread may have come further.
        Ok(self.allocated.fetch_max(to, Ordering::Relaxed).max(to) == self.size)
    }

    /// Makes all of its memory that it has not.
    pub fn allocate(&self) -> Result<(), RegionError> {
        while !self.allocate_more()? {}
        Ok(())
    }

    /// Up to which byte of the file regions find memory.
    pub fn allocated(&self) -> u64 {
        self.allocated.load(Ordering::Relaxed).max(FIRST.min(self.size))
    }

    /// Makes a window with a name, for a machine that is started later or by someone else; only this user may open it.
    /// Files with names cannot be sealed. It lives until it is removed and the last process has closed it.
    ///
    /// It is complete when it appears, and if there is a file of that name it is not touched.
    pub fn create_at(path: &Path, spec: &WindowSpec) -> Result<Self, RegionError> {
        let size = spec.file_size()?;
        let error = |e| RegionError::system("create a window", size, e);
        let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let fd = rustix::fs::open(folder, OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC, Mode::RUSR | Mode::WUSR)
            .map_err(error)?;
        let header = describe(fd.as_fd(), size, spec)?;
        allocate(fd.as_fd(), 0..size)?;
        let unnamed = format!("/proc/self/fd/{}", fd.as_raw_fd());
        rustix::fs::linkat(rustix::fs::CWD, unnamed, rustix::fs::CWD, path, rustix::fs::AtFlags::SYMLINK_FOLLOW)
            .map_err(error)?;
        Ok(Self { fd, size, header, path: Some(path.to_owned()), allocated: AtomicU64::new(size) })
    }

    /// Opens a window that [`WindowFile::create_at`] has made, and verifies it.
    pub fn open(path: &Path) -> Result<Self, RegionError> {
        let fd = rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW, Mode::empty())
            .map_err(|e| RegionError::system("open the window", 0, e))?;
        let (size, header) = verify(fd.as_fd())?;
        Ok(Self { fd, size, header, path: Some(path.to_owned()), allocated: AtomicU64::new(size) })
    }

    /// A file that [`WindowFile::create`] of another process has made, if it is sealed and has all of its memory.
    pub(super) fn adopt(fd: OwnedFd) -> Result<Self, RegionError> {
        let (size, header) = verify(fd.as_fd())?;
        let stat = rustix::fs::fstat(&fd).map_err(|_| Corrupt::BadRegion)?;
        // Blocks are of 512 bytes.
        let is_whole = u64::try_from(stat.st_blocks).is_ok_and(|blocks| blocks.saturating_mul(512) >= size);
        if !is_sealed(fd.as_fd()) || !is_whole {
            return Err(Corrupt::BadRegion.into());
        }
        Ok(Self { fd, size, header, path: None, allocated: AtomicU64::new(size) })
    }

    /// The size of the file.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// The identity of the window.
    pub fn id(&self) -> WindowId {
        self.header.id
    }

    /// The header, as it was when the window was made or opened.
    pub fn header(&self) -> &WindowHeader {
        &self.header
    }

    /// Where another process of this user can open it, as long as this one holds it.
    pub fn path(&self) -> PathBuf {
        self.path
            .clone()
            .unwrap_or_else(|| PathBuf::from(format!("/proc/{}/fd/{}", std::process::id(), self.fd.as_raw_fd())))
    }

    /// A descriptor of it that nothing can be written through, for a process of the host that is the window's peer.
    pub fn reader(&self) -> Result<OwnedFd, RegionError> {
        let path = format!("/proc/self/fd/{}", self.fd.as_raw_fd());
        rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
            .map_err(|e| RegionError::system("open a window to read", self.size, e))
    }

    /// A descriptor of it for its owner, if that is a process of the host.
    pub fn writer(&self) -> Result<OwnedFd, RegionError> {
        rustix::io::fcntl_dupfd_cloexec(&self.fd, 0)
            .map_err(|e| RegionError::system("open a window to write", self.size, e))
    }

    /// The window, for a process of the host that is party to it.
    pub fn window(&self) -> Result<Window, RegionError> {
        Ok(Window::new(self.writer()?, DATA_OFFSET, self.size - DATA_OFFSET))
    }
}

impl AsFd for WindowFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Whether the size of a file is sealed.
pub(super) fn is_sealed(fd: BorrowedFd<'_>) -> bool {
    rustix::fs::fcntl_get_seals(fd).is_ok_and(|seals| seals.contains(SEALS))
}

/// The window behind a descriptor of the host's that was passed to us: sealed, and of a window's shape.
pub(super) fn received(fd: OwnedFd) -> Result<Window, RegionError> {
    if !is_sealed(fd.as_fd()) {
        return Err(Corrupt::BadRegion.into());
    }
    let (size, _) = verify(fd.as_fd())?;
    Ok(Window::new(fd, DATA_OFFSET, size - DATA_OFFSET))
}

fn allocate(fd: BorrowedFd<'_>, part: Range<u64>) -> Result<(), RegionError> {
    let len = part.end.saturating_sub(part.start);
    if len == 0 {
        return Ok(());
    }
    crate::memfd::check_limit(part.end)
        .and_then(|()| {
            rustix::io::retry_on_intr(|| rustix::fs::fallocate(fd, FallocateFlags::empty(), part.start, len))
        })
        .map_err(|e| RegionError::system("allocate memory for a window", part.end, e))
}

/// Gives a file its size, and writes in it what it is.
fn describe(fd: BorrowedFd<'_>, size: u64, spec: &WindowSpec) -> Result<WindowHeader, RegionError> {
    let error = |e| RegionError::system("create a window", size, e);
    crate::memfd::check_limit(size).and_then(|()| rustix::fs::ftruncate(fd, size)).map_err(error)?;
    let header =
        WindowHeader { id: random_id()?, size: size - DATA_OFFSET, owner: spec.owner.clone(), peer: spec.peer.clone() };
    write_at(fd, INFO_OFFSET, &info_block(size, header.id)).map_err(error)?;
    write_at(fd, DATA_OFFSET, &header.encode()).map_err(error)?;
    Ok(header)
}

fn verify(fd: BorrowedFd<'_>) -> Result<(u64, WindowHeader), RegionError> {
    let stat = rustix::fs::fstat(fd).map_err(|_| Corrupt::BadRegion)?;
    let size = u64::try_from(stat.st_size).map_err(|_| Corrupt::BadRegion)?;
    let (mut info, mut block) = ([0; BLOCK], [0; BLOCK]);
    read_at(fd, INFO_OFFSET, &mut info).map_err(|_| Corrupt::BadRegion)?;
    read_at(fd, DATA_OFFSET, &mut block).map_err(|_| Corrupt::BadRegion)?;
    match WindowHeader::decode(&block) {
        Some(header)
            if size > DATA_OFFSET
                && size.is_multiple_of(STEP)
                && is_info_block(&info, size)
                && header.size == size - DATA_OFFSET =>
        {
            Ok((size, header))
        }
        _ => Err(Corrupt::BadRegion.into()),
    }
}

fn random_id() -> Result<WindowId, RegionError> {
    let mut id = [0; 16];
    // Never short for so few bytes.
    rustix::rand::getrandom(&mut id, rustix::rand::GetRandomFlags::empty())
        .map_err(|e| RegionError::system("make an id", 16, e))?;
    Ok(WindowId(id))
}

fn write_at(fd: BorrowedFd<'_>, at: u64, bytes: &[u8]) -> rustix::io::Result<()> {
    match rustix::io::pwrite(fd, bytes, at)? {
        n if n == bytes.len() => Ok(()),
        _ => Err(Errno::NOSPC),
    }
}

fn read_at(fd: BorrowedFd<'_>, at: u64, bytes: &mut [u8]) -> io::Result<()> {
    match rustix::io::pread(fd, &mut *bytes, at)? {
        n if n == bytes.len() => Ok(()),
        _ => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}
