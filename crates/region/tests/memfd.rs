//! Protection against hostile memory: the seals of regions that are sent, and the checks of regions that are received.
#![expect(unsafe_code, reason = "tries to map memory as a hostile peer would")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

use partywall_region::{OwnRegion, PeerRegion, RegionOptions, memfd, packet};
use partywall_shm::layout::{Geometry, MAGIC, PAGE, RegionKind, VERSION};
use rustix::fd::{AsFd, AsRawFd, OwnedFd};
use rustix::fs::{FallocateFlags, MemfdFlags, Mode, OFlags, SealFlags, SeekFrom};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

const RING: u64 = 8192;

fn geometry(ring_size: u64) -> Geometry {
    Geometry::new(PAGE, ring_size).unwrap()
}

/// An honest region, and its descriptor as a peer receives it.
fn received() -> (OwnRegion, OwnedFd) {
    let (own, memory) = OwnRegion::create(&RegionOptions::endpoint(RING)).unwrap();
    let (out, into) = packet::pair().unwrap();
    packet::send(out.as_fd(), b"m", &[memory.as_fd()]).unwrap();
    (own, packet::recv(into.as_fd(), &mut [0; 1]).unwrap().fds.remove(0))
}

fn map(fd: &OwnedFd, prot: ProtFlags) -> Result<(), Errno> {
    // SAFETY: a new mapping wherever the kernel likes; nothing is reached through it.
    unsafe {
        let start = rustix::mm::mmap(std::ptr::null_mut(), PAGE as usize, prot, MapFlags::SHARED, fd, 0)?;
        rustix::mm::munmap(start, PAGE as usize)
    }
}

#[test]
fn received_region_is_read_only() {
    let (own, fd) = received();
    assert_eq!(map(&fd, ProtFlags::READ), Ok(()));
    assert_eq!(map(&fd, ProtFlags::READ | ProtFlags::WRITE), Err(Errno::PERM));
    assert_eq!(rustix::io::write(&fd, b"x"), Err(Errno::PERM));
    assert_eq!(rustix::io::pwrite(&fd, b"x", 0), Err(Errno::PERM));
    assert_eq!(rustix::fs::ftruncate(&fd, 4096), Err(Errno::PERM), "shrink");
    assert_eq!(rustix::fs::ftruncate(&fd, 1 << 20), Err(Errno::PERM), "grow");
    let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    assert_eq!(rustix::fs::fallocate(&fd, hole, 4096, 4096), Err(Errno::PERM), "make a hole");
    assert_eq!(rustix::fs::fcntl_add_seals(&fd, SealFlags::WRITE), Err(Errno::PERM), "seal against the owner");

    // Opening it again does not help either, nor does making a read-only mapping writable.
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    let again = rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).unwrap();
    assert_eq!(map(&again, ProtFlags::READ | ProtFlags::WRITE), Err(Errno::PERM));
    // SAFETY: a new mapping wherever the kernel likes, changed and given back; nothing is reached through it.
    unsafe {
        let start = rustix::mm::mmap(std::ptr::null_mut(), 4096, ProtFlags::READ, MapFlags::SHARED, &fd, 0).unwrap();
        let writable = rustix::mm::MprotectFlags::READ | rustix::mm::MprotectFlags::WRITE;
        assert_eq!(rustix::mm::mprotect(start, 4096, writable), Err(Errno::ACCESS));
        rustix::mm::munmap(start, 4096).unwrap();
    }
    assert_eq!(own.page().header.magic.load(std::sync::atomic::Ordering::Relaxed), MAGIC);
}

#[test]
fn honest_region_is_accepted_and_close_on_exec() {
    for ring_size in [0, 4096, RING, 1 << 20] {
        let (own, fd) = OwnRegion::create(&RegionOptions::endpoint(ring_size)).unwrap();
        assert!(rustix::io::fcntl_getfd(&fd).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
        assert!(memfd::verify(fd.as_fd(), own.geometry()).is_ok());
        let peer = PeerRegion::attach(fd.as_fd(), RegionKind::Endpoint, own.geometry()).unwrap();
        assert_eq!(peer.geometry(), own.geometry());
    }
}

/// How a forged region differs from an honest one.
struct Forged {
    size: u64,
    seals: SealFlags,
    /// Bytes allocated from the beginning.
    allocated: u64,
    /// Bytes allocated behind the end, where no mapping shows them.
    beyond: u64,
    header: [u64; 4],
}

/// Header words as an honest endpoint with a ring of `RING` bytes has them.
const HONEST: [u64; 4] = [MAGIC, VERSION as u64, PAGE, RING];

impl Default for Forged {
    fn default() -> Self {
        Self { size: PAGE + RING, seals: memfd::SEALS, allocated: PAGE + RING, beyond: 0, header: HONEST }
    }
}

impl Forged {
    fn make(&self) -> OwnedFd {
        let fd = rustix::fs::memfd_create("forged", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&fd, self.size).unwrap();
        // Written, not only reserved, as the pages of a region that its owner has mapped and populated.
        let mut at = 0;
        while at < self.allocated {
            rustix::io::pwrite(&fd, &[0; 4096], at).unwrap();
            at += 4096;
        }
        if self.beyond > 0 {
            rustix::fs::fallocate(&fd, FallocateFlags::KEEP_SIZE, self.size, self.beyond).unwrap();
        }
        let bytes: Vec<u8> = self.header.iter().flat_map(|word| word.to_le_bytes()).collect();
        rustix::io::pwrite(&fd, &bytes, 0).unwrap();
        rustix::fs::fcntl_add_seals(&fd, self.seals).unwrap();
        fd
    }

    fn is_taken(&self) -> bool {
        let fd = self.make();
        let attached = PeerRegion::attach(fd.as_fd(), RegionKind::Endpoint, geometry(RING));
        if let Err(e) = &attached {
            assert!(e.to_string().contains("the peer broke the protocol"), "{e}");
        }
        attached.is_ok()
    }
}

#[test]
fn region_is_accepted_only_with_all_seals() {
    assert!(Forged::default().is_taken(), "what the others differ from");
    assert!(!Forged { seals: SealFlags::empty(), ..Forged::default() }.is_taken(), "unsealed");
    for missing in [SealFlags::SHRINK, SealFlags::GROW, SealFlags::FUTURE_WRITE, SealFlags::SEAL] {
        let seals = memfd::SEALS.difference(missing);
        assert!(!Forged { seals, ..Forged::default() }.is_taken(), "without {missing:?}");
    }
}

#[test]
fn region_is_accepted_only_with_expected_size() {
    for size in [0, 4096, PAGE + RING - 1, PAGE + RING + 1, PAGE + 2 * RING, 1 << 24] {
        assert!(
            !Forged { size, allocated: size.min(PAGE + RING) / 4096 * 4096, ..Forged::default() }.is_taken(),
            "{size}"
        );
    }
}

#[test]
fn region_with_holes_is_refused() {
    assert!(!Forged { allocated: 0, ..Forged::default() }.is_taken());
    assert!(!Forged { allocated: PAGE + RING - 4096, ..Forged::default() }.is_taken());
}

#[test]
fn pages_beyond_the_end_do_not_fill_holes() {
    assert!(!Forged { allocated: PAGE, beyond: RING, ..Forged::default() }.is_taken());
}

#[test]
fn search_for_holes_leaves_the_makers_file_position() {
    // A thread of the maker can hold the lock of that position for as long as it likes.
    let (own, fd) = received();
    rustix::fs::seek(&fd, SeekFrom::Start(5)).unwrap();
    memfd::verify(fd.as_fd(), own.geometry()).unwrap();
    assert_eq!(rustix::fs::seek(&fd, SeekFrom::Current(0)), Ok(5));
}

#[test]
fn region_with_wrong_header_is_refused() {
    let kind = |kind: u64| u64::from(VERSION) | kind << 32;
    for (what, at, word) in [
        ("magic", 0, 0),
        ("version 0: not ready", 1, 0),
        ("another version", 1, u64::from(VERSION) + 1),
        ("a ring extension", 1, kind(1)),
        ("no known kind", 1, kind(7)),
        ("offset", 2, 0),
        ("offset", 2, u64::MAX),
        ("size", 3, 4096),
        ("size", 3, RING + 1),
    ] {
        let mut header = HONEST;
        header[at] = word;
        assert!(!Forged { header, ..Forged::default() }.is_taken(), "{what} {word:#x}");
    }
}

#[test]
fn descriptor_other_than_memfd_is_refused() {
    let file = tempfile::tempfile().unwrap();
    file.set_len(PAGE + RING).unwrap();
    rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, PAGE + RING).unwrap();
    let (reader, _writer) = rustix::pipe::pipe().unwrap();
    let (socket, _other) = packet::pair().unwrap();
    for fd in [file.as_fd(), reader.as_fd(), socket.as_fd(), std::fs::File::open("/dev/zero").unwrap().as_fd()] {
        assert!(memfd::verify(fd, geometry(RING)).is_err());
        assert!(PeerRegion::attach(fd, RegionKind::Endpoint, geometry(RING)).is_err());
    }
}

#[test]
fn sizes_that_no_region_has_are_refused_before_anything_is_made() {
    for ring_size in [1, 4095, 12288, 1 << 31, u64::MAX] {
        assert!(OwnRegion::create(&RegionOptions::endpoint(ring_size)).is_err(), "{ring_size}");
    }
}

/// Where the kernel gathers ordinary shared pages into huge ones, files show the block size of huge pages without being of hugetlb. A region
/// with that block size was once refused on such machines.
#[test]
fn transparent_huge_page_block_size_is_not_hugetlb() {
    let Some(folder) = tmpfs_of_huge_pages() else {
        eprintln!("SKIPPED: needs the right to mount, and transparent huge pages for tmpfs");
        return;
    };
    let flags = OFlags::CREATE | OFlags::RDWR | OFlags::CLOEXEC;
    let file = rustix::fs::openat(&folder, "region", flags, Mode::RUSR | Mode::WUSR).unwrap();
    rustix::fs::ftruncate(&file, 4 << 20).unwrap();
    assert!(rustix::fs::fstat(&file).unwrap().st_blksize > 1 << 20, "this file shows no such block size");
    assert!(!memfd::is_hugetlb(&file));
    // Memory of hugetlb is recognised even without an allocated page.
    let huge = MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
    match rustix::fs::memfd_create("huge", huge) {
        Ok(memory) => assert!(memfd::is_hugetlb(&memory)),
        Err(error) => eprintln!("SKIPPED: memory of hugetlb: {error}"),
    }
}

/// A file system that is attached nowhere, so that it ends with this descriptor.
fn tmpfs_of_huge_pages() -> Option<OwnedFd> {
    use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags};
    let context = rustix::mount::fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC).ok()?;
    rustix::mount::fsconfig_set_string(context.as_fd(), "huge", "always").ok()?;
    rustix::mount::fsconfig_create(context.as_fd()).ok()?;
    rustix::mount::fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty()).ok()
}
