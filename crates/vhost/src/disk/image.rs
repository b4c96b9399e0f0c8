//! The file or block device behind a disk.

use super::discard::DiscardSupport;
use super::request::{DiskGeometry, SECTOR};
use crate::VhostError;
use rustix::fs::{FileType, FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tracing::info;

/// How long a start waits for an earlier back end of the same disk to end.
const HANDOVER: Duration = Duration::from_secs(30);
/// Bytes of a serial number.
pub(super) const SERIAL: usize = virtio_bindings::virtio_blk::VIRTIO_BLK_ID_BYTES as usize;
/// Alignment that every device is content with, and blocks that are tried for unbuffered access.
pub(super) const ALIGN: usize = 4096;
const BLOCKS: [u32; 4] = [512, 1024, 2048, 4096];

/// How a disk is served.
#[derive(Debug, Clone)]
pub struct DiskOptions {
    /// The file or block device.
    pub path: PathBuf,
    /// The disk cannot be written.
    pub read_only: bool,
    /// Data passes the host's page cache.
    pub direct: bool,
    /// Each write is durable when it completes.
    pub writethrough: bool,
    /// Sectors that a guest gives up are given back to the file system or device.
    pub discard: bool,
    /// Queues that a guest may use.
    pub queues: u16,
    /// The serial number that the guest sees.
    pub serial: String,
    /// How long the loop looks at queues without finding anything before it sleeps, at most.
    pub spin: Duration,
    /// Faults for tests.
    pub faults: super::FaultPlan,
}

impl DiskOptions {
    /// The usual ones.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        let path = path.into();
        let serial = path.file_name().map(|name| name.to_string_lossy().chars().take(SERIAL).collect());
        Self {
            path,
            read_only: false,
            direct: false,
            writethrough: false,
            discard: true,
            queues: 4,
            serial: serial.unwrap_or_default(),
            spin: Duration::from_micros(50),
            faults: super::FaultPlan::default(),
        }
    }

    pub(super) fn check(&self) -> Result<(), VhostError> {
        let serial =
            self.serial.len() <= SERIAL && self.serial.bytes().all(|byte| byte.is_ascii_graphic() || byte == b' ');
        if !serial {
            return Err(VhostError::Refused(format!(
                "a serial number has at most {SERIAL} printable ASCII characters"
            )));
        }
        if self.queues == 0 || usize::from(self.queues) > super::MOST_QUEUES {
            return Err(VhostError::Refused(format!("a disk has 1 to {} queues", super::MOST_QUEUES)));
        }
        Ok(())
    }
}

/// An open disk.
#[derive(Debug)]
pub(crate) struct DiskImage {
    file: OwnedFd,
    path: PathBuf,
    capacity: u64,
    /// Bytes of a block: the device's own, or what unbuffered access needs.
    block: u32,
    direct: bool,
    read_only: bool,
    device: bool,
    support: DiscardSupport,
}

impl DiskImage {
    /// Opens it, and waits until no other back end has it.
    pub(crate) fn open(options: &DiskOptions) -> Result<Self, VhostError> {
        options.check()?;
        let path = &options.path;
        let mut flags = OFlags::CLOEXEC | if options.read_only { OFlags::RDONLY } else { OFlags::RDWR };
        if options.direct {
            flags |= OFlags::DIRECT;
        }
        // A FIFO would wait for its other end.
        let status = rustix::fs::stat(path).map_err(failed("look at", path))?;
        let kind = FileType::from_raw_mode(status.st_mode);
        let device = kind == FileType::BlockDevice;
        if !device && kind != FileType::RegularFile {
            return Err(VhostError::Refused(format!("{}: neither a regular file nor a block device", path.display())));
        }
        let file = rustix::fs::open(path, flags, Mode::empty()).map_err(|e| match e {
            Errno::INVAL if options.direct => VhostError::Refused(format!(
                "{}: its file system has no unbuffered access; leave out --direct",
                path.display()
            )),
            e => failed("open", path)(e),
        })?;
        lock(&file, options, HANDOVER)?;
        let block = match (device, options.direct) {
            (true, _) => rustix::fs::ioctl_blksszget(&file).map_err(failed("ask the block size of", path))?,
            (false, true) => probe(&file, path)?,
            (false, false) => SECTOR as u32,
        };
        let (direct, read_only) = (options.direct, options.read_only);
        let support = DiscardSupport::NONE;
        let mut image = Self { file, path: path.clone(), capacity: 0, block, direct, read_only, device, support };
        image.refresh()?;
        image.support = match (read_only, device) {
            (true, _) => DiscardSupport::NONE,
            (false, true) => DiscardSupport::for_device(status.st_rdev),
            (false, false) => DiscardSupport::for_file(&image.file, image.capacity),
        };
        if options.discard && !read_only && !image.support.discards {
            info!("{}: no discards are offered, because its file system or device has none", path.display());
        }
        Ok(image)
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn block(&self) -> u32 {
        self.block
    }

    pub(crate) fn geometry(&self, discards: bool) -> DiskGeometry {
        let discards = discards && self.support.discards;
        DiskGeometry { capacity: self.capacity, read_only: self.read_only, discards }
    }

    /// Whether it makes holes, which is how an exporter gives sectors up.
    pub(crate) fn makes_holes(&self) -> bool {
        self.support.holes
    }

    /// Whether data passes the page cache.
    pub(crate) fn is_direct(&self) -> bool {
        self.direct
    }

    /// Whether it is a block device.
    pub(crate) fn is_device(&self) -> bool {
        self.device
    }

    /// Its bytes now, also those of a last block that is not whole.
    fn end(&self) -> Result<u64, VhostError> {
        rustix::fs::seek(&self.file, rustix::fs::SeekFrom::End(0)).map_err(failed("measure", &self.path))
    }

    /// The bytes of its whole blocks now.
    pub(crate) fn measure(&self) -> Result<u64, VhostError> {
        let end = self.end()?;
        Ok(end - end % self.unit())
    }

    /// The size of a disk is a multiple of this.
    fn unit(&self) -> u64 {
        u64::from(self.block).max(SECTOR)
    }

    /// Looks at its size again. Returns whether it is larger. A disk keeps its size if the file or device has become smaller.
    pub(crate) fn refresh(&mut self) -> Result<bool, VhostError> {
        let measured = self.measure()?;
        let (path, known) = (self.path.display(), self.capacity);
        if measured < known {
            return Err(VhostError::Refused(format!(
                "{path} has {measured} bytes now, and the machine's disk has {known}; a disk does not become smaller, and requests beyond the end of the file or device fail"
            )));
        }
        if measured == 0 {
            return Err(VhostError::Refused(format!("{path}: smaller than one block")));
        }
        self.capacity = measured;
        Ok(measured != known)
    }

    /// Makes a file larger.
    pub(crate) fn grow(&mut self, size: u64) -> Result<(), VhostError> {
        if self.device || self.read_only {
            return Err(VhostError::Refused("only a file that is not read-only can be made larger here".into()));
        }
        // Others may have made the file larger since it was last looked at. It must not lose what they wrote.
        let (end, known, unit) = (self.end()?, self.capacity, self.unit());
        if size < end.max(known) || !size.is_multiple_of(unit) {
            let path = self.path.display();
            return Err(VhostError::Refused(format!(
                "a disk only becomes larger, in blocks of {unit} bytes; {path} has {end} bytes, and the machine's disk has {known}"
            )));
        }
        rustix::fs::ftruncate(&self.file, size).map_err(failed("make larger", &self.path))
    }

    /// Whether a buffer and a place can be used without the page cache.
    pub(crate) fn is_aligned(&self, address: usize, length: usize, offset: u64) -> bool {
        let block = u64::from(self.block);
        !self.direct || (address as u64 | length as u64 | offset).is_multiple_of(block)
    }

    /// Reads at any place, by a buffer that is aligned.
    pub(crate) fn read_at(&self, mut offset: u64, mut into: &mut [u8]) -> Result<(), Errno> {
        let mut room = Vec::new();
        while !into.is_empty() {
            let (bytes, skip) = self.block_at(offset, into.len(), false, &mut room)?;
            let part = into.len().min(bytes.len() - skip);
            into[..part].copy_from_slice(&bytes[skip..skip + part]);
            (into, offset) = (&mut into[part..], offset + part as u64);
        }
        Ok(())
    }

    /// Writes at any place, by a buffer that is aligned. Nothing else may be under way: neighbours in a block are read and written.
    pub(crate) fn write_at(&self, mut offset: u64, mut from: &[u8]) -> Result<(), Errno> {
        let mut room = Vec::new();
        while !from.is_empty() {
            let (bytes, skip) = self.block_at(offset, from.len(), true, &mut room)?;
            let part = from.len().min(bytes.len() - skip);
            bytes[skip..skip + part].copy_from_slice(&from[..part]);
            let start = offset - skip as u64;
            let mut done = 0;
            while done < bytes.len() {
                done += match rustix::io::pwrite(&self.file, &bytes[done..], start + done as u64) {
                    Ok(0) => return Err(Errno::IO),
                    Ok(written) => written,
                    Err(Errno::INTR) => 0,
                    Err(e) => return Err(e),
                };
            }
            (from, offset) = (&from[part..], offset + part as u64);
        }
        Ok(())
    }

    /// Writes zeroes at any place, as [`Self::write_at`].
    pub(crate) fn write_zeroes(&self, mut offset: u64, mut length: u64) -> Result<(), Errno> {
        let zeroes = vec![0; 1 << 20];
        while length > 0 {
            let part = length.min(zeroes.len() as u64);
            self.write_at(offset, &zeroes[..usize::try_from(part).unwrap_or(zeroes.len())])?;
            (offset, length) = (offset + part, length - part);
        }
        Ok(())
    }

    /// The aligned blocks around a place, and where in them it is. They are not read if all of their bytes are to be overwritten.
    fn block_at<'r>(
        &self,
        offset: u64,
        wanted: usize,
        overwrites: bool,
        room: &'r mut Vec<u8>,
    ) -> Result<(&'r mut [u8], usize), Errno> {
        const STEP: usize = 1 << 20;
        let block = self.block as usize;
        let skip = usize::try_from(offset % u64::from(self.block)).map_err(|_| Errno::INVAL)?;
        let length = (skip + wanted).next_multiple_of(block).min(STEP);
        room.resize(STEP + ALIGN, 0);
        let start = room.as_ptr().align_offset(ALIGN);
        let bytes = &mut room[start..start + length];
        let is_whole = skip == 0 && wanted >= length;
        let mut done = if overwrites && is_whole { length } else { 0 };
        while done < length {
            done += match rustix::io::pread(&self.file, &mut bytes[done..], offset - skip as u64 + done as u64) {
                Ok(0) => return Err(Errno::IO),
                Ok(read) => read,
                Err(Errno::INTR) => 0,
                Err(e) => return Err(e),
            };
        }
        Ok((bytes, skip))
    }

    pub(crate) fn sync(&self) -> Result<(), Errno> {
        rustix::fs::fdatasync(&self.file)
    }
}

fn failed(call: &'static str, path: &Path) -> impl FnOnce(Errno) -> VhostError {
    let path = path.to_owned();
    move |e| VhostError::file(call, path)(e.into())
}

/// Locks the open file through which all requests go. The kernel keeps the lock until the last of them has ended, also those of a
/// process that was killed. So no old write can land on a newer one.
fn lock(file: &OwnedFd, options: &DiskOptions, limit: Duration) -> Result<(), VhostError> {
    let kind = if options.read_only {
        FlockOperation::NonBlockingLockShared
    } else {
        FlockOperation::NonBlockingLockExclusive
    };
    let deadline = Instant::now() + limit;
    let mut waits = false;
    loop {
        match rustix::fs::flock(file, kind) {
            Ok(()) => return Ok(()),
            Err(Errno::WOULDBLOCK | Errno::INTR) if Instant::now() < deadline => {
                if !std::mem::replace(&mut waits, true) {
                    let path = options.path.display();
                    tracing::info!("waiting until another process has unlocked {path} (up to {} s)", limit.as_secs());
                }
                std::thread::sleep(Duration::from_millis(2));
            }
            Err(Errno::WOULDBLOCK | Errno::INTR) => {
                let why = "another process has locked it; a disk has one back end";
                return Err(VhostError::Refused(format!("{}: {why}", options.path.display())));
            }
            Err(e) => return Err(failed("lock", &options.path)(e)),
        }
    }
}

/// The smallest block that unbuffered access takes.
fn probe(file: &OwnedFd, path: &Path) -> Result<u32, VhostError> {
    for block in BLOCKS {
        let mut room = vec![0_u8; 2 * ALIGN];
        // Aligned to this block, and to no larger one.
        let start = room.as_ptr().align_offset(ALIGN) + block as usize % ALIGN;
        match rustix::io::pread(file, &mut room[start..start + block as usize], 0) {
            Ok(_) => return Ok(block),
            Err(Errno::INVAL) => {}
            Err(e) => return Err(failed("read", path)(e)),
        }
    }
    Err(VhostError::Refused(format!("{}: no block up to 4096 bytes can be read unbuffered", path.display())))
}

#[cfg(test)]
#[cfg(not(miri))]
mod tests {
    use super::*;

    /// A disk of 1 MiB, whose file then gets this length from others.
    fn image_with_length(length: u64) -> (DiskImage, std::fs::File, tempfile::TempDir) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk.raw");
        let file = std::fs::File::create(&path).unwrap();
        file.set_len(1 << 20).unwrap();
        let image = DiskImage::open(&DiskOptions::new(&path)).unwrap();
        file.set_len(length).unwrap();
        (image, file, folder)
    }

    #[test]
    fn growth_below_the_length_of_the_file_is_refused() {
        let length = (2 << 20) + 100;
        let (mut image, file, _folder) = image_with_length(length);
        for size in [2 << 20, (1 << 20) + 512, 1 << 19, (2 << 20) + 513] {
            let error = image.grow(size).unwrap_err().to_string();
            assert!(error.contains(&format!("{length} bytes")), "{size}: {error}");
            assert_eq!(file.metadata().unwrap().len(), length, "{size}");
        }
        image.grow((2 << 20) + 512).unwrap();
        assert_eq!(file.metadata().unwrap().len(), (2 << 20) + 512);
        assert!(image.refresh().unwrap());
        assert_eq!(image.geometry(false).capacity, (2 << 20) + 512);
    }

    #[test]
    fn whole_blocks_are_overwritten_without_being_read() {
        let (image, file, _folder) = image_with_length(1 << 20);
        image.write_at(0, &[7; 4096]).unwrap();
        image.write_at(100, &[9; 1000]).unwrap();
        image.write_zeroes(2048, 1024).unwrap();
        let (mut expected, mut found) = (vec![7; 4096], vec![0; 4096]);
        expected[100..1100].fill(9);
        expected[2048..3072].fill(0);
        image.read_at(0, &mut found).unwrap();
        assert!(found == expected, "neighbours keep their bytes");
        // A file that has become shorter has nothing to be read there.
        file.set_len(512).unwrap();
        assert_eq!(image.write_at(4096, &[7; 100]), Err(Errno::IO));
        image.write_at(4096, &[7; 1024]).unwrap();
        assert_eq!(file.metadata().unwrap().len(), 5120);
    }

    #[test]
    fn shorter_file_leaves_the_disk_its_size() {
        for (length, blocks) in [(1000, 512), (0, 0)] {
            let (mut image, file, _folder) = image_with_length(length);
            let error = image.refresh().unwrap_err().to_string();
            let names_both = error.contains(&format!("{blocks} bytes now")) && error.contains("has 1048576;");
            assert!(names_both, "{error}");
            assert_eq!(image.geometry(false).capacity, 1 << 20);
            assert!(image.grow(1 << 19).is_err(), "smaller than the machine knows");
            image.grow(1 << 20).unwrap();
            assert_eq!((file.metadata().unwrap().len(), image.refresh().unwrap()), (1 << 20, false));
        }
    }
}
