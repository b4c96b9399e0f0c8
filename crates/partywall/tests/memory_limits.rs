//! A reader with a memory limit, and a writer that takes pages out of the memory that the reader has mapped. A reader of a page that is
//! missing allocates it, which counts against the reader's limit, and the kernel kills a reader that exceeds it.
//!
//! The limit is a control group, so these tests need root and say so where it is missing.
#![cfg(not(miri))]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]
#![expect(unsafe_code, reason = "punches holes into memory, and maps memory with holes")]

mod common;

use common::huge_page_pool::HugePages;
use common::memory_limit::{MemoryLimit, come_under};
use common::pool::PoolBroker;
use common::process::{Process, alone, child, role};
use common::*;
use partywall::{Domain, Group, Handle, Lent, Listener, Stream};
use partywall_daemon::Broker;
use partywall_region::{PeerRegion, RegionError};
use partywall_shm::layout::{Geometry, HUGE_PAGE, RegionKind};
use rustix::fs::{FallocateFlags, MemfdFlags, fallocate};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::os::fd::{AsFd, AsRawFd as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The size of a writer's shared memory.
const SHARED: usize = 64 << 20;
/// The memory limit of a reader.
const LIMIT: u64 = 16 << 20;
const PUNCH: FallocateFlags = FallocateFlags::PUNCH_HOLE.union(FallocateFlags::KEEP_SIZE);

/// Runs a test in a separate process, with a limit that this one makes and removes.
fn with_limit(test: &str, body: impl FnOnce(&MemoryLimit)) {
    let Some(limit) = MemoryLimit::of(test, LIMIT) else { return };
    alone(test, || {
        let _guard = hang_guard();
        body(&limit);
    });
}

/// The actions of this program as a reader.
#[test]
#[ignore = "for processes that the tests start"]
fn child_main() {
    let Some((role, broker)) = role() else { return };
    match role.split(' ').collect::<Vec<_>>()[..] {
        ["member", limit] => read_as_member(&broker, Path::new(limit)),
        ["region", path, limit] => attach_huge_region(Path::new(path), Path::new(limit)),
        ["file", path, limit] => read_file(Path::new(path), Path::new(limit)),
        _ => panic!("{role}"),
    }
}

/// Reads what handles name, and answers each with how many bytes were not as they should be.
fn read_as_member(broker: &Path, limit: &Path) {
    let domain = join("reader", broker);
    let group = Group::builder("pool").room(0).join(&domain).unwrap();
    let mut lines = BufReader::new(domain.connect("writer:control").unwrap());
    come_under(limit);
    loop {
        let mut line = String::new();
        if !lines.read_line(&mut line).is_ok_and(|n| n > 0) {
            return;
        }
        let shared = group.open(&line.trim_end().parse::<Handle>().unwrap()).unwrap();
        let (mut piece, mut wrong) = ([0; 4096], 0);
        for at in (0..shared.len()).step_by(piece.len()) {
            let len = shared.copy_to(at, &mut piece);
            wrong += piece[..len].iter().filter(|byte| **byte != 7).count();
        }
        writeln!(lines.get_mut(), "{wrong} of {} bytes are wrong", shared.len()).unwrap();
    }
}

/// Reads each page of a file that is mapped.
fn read_file(path: &Path, limit: &Path) {
    let file = File::open(path).unwrap();
    come_under(limit);
    // SAFETY: a new mapping, at an address that the kernel chooses.
    let first = unsafe { mmap(std::ptr::null_mut(), SHARED, ProtFlags::READ, MapFlags::SHARED, &file, 0) }.unwrap();
    for at in (0..SHARED).step_by(4096) {
        // SAFETY: in the mapping, which lasts until this process ends. The file has that size.
        let _ = unsafe { first.cast::<u8>().add(at).read_volatile() };
    }
}

/// Attaches a region of huge pages that it may not have: the error is the system's, and no signal.
fn attach_huge_region(path: &Path, limit: &Path) {
    let file = File::open(path).unwrap();
    come_under(limit);
    let geometry = Geometry::new(HUGE_PAGE, HUGE_PAGE).unwrap();
    let attached = PeerRegion::attach(file.as_fd(), RegionKind::Endpoint, geometry);
    assert!(matches!(attached, Err(RegionError::System { .. })), "{attached:?}");
}

fn join(name: &str, broker: &Path) -> Domain {
    Domain::builder().name(name).broker(broker).join().unwrap()
}

/// A broker with a group whose writer is this process.
struct Writer {
    _world: PoolBroker,
    _domain: Domain,
    group: Group,
    listener: Listener,
    path: PathBuf,
}

impl Writer {
    fn new() -> Self {
        let world = PoolBroker::start(&[("pool", &["writer", "reader"], 2 * SHARED)]);
        let path = world.broker.path().to_owned();
        let domain = join("writer", &path);
        let group = Group::builder("pool").room(SHARED as u64).join(&domain).unwrap();
        let listener = domain.bind("control").unwrap();
        Self { _world: world, _domain: domain, group, listener, path }
    }

    /// A member under the limit.
    fn reader(&mut self, limit: &MemoryLimit) -> (Process, BufReader<Stream>) {
        let process = child(&format!("member {}", limit.path().display()), &self.path);
        (process, BufReader::new(self.listener.accept().unwrap().0))
    }
}

/// Tries in every way that a writer has. How many of them succeeded.
fn take_all_pages_out(lent: &Lent) -> usize {
    let (first, len) = (lent.as_ptr(), lent.len());
    // SAFETY: whole pages of a buffer that nobody writes. If it succeeds, they read as zeros.
    let removed = unsafe { madvise(first.cast_mut().cast(), len, Advice::LinuxRemove) };
    // The file itself, opened again: the descriptor that the seat was made with is closed.
    let mut punched = 0;
    for entry in std::fs::read_dir("/proc/self/map_files").unwrap().flatten() {
        let range = entry.file_name().into_string().unwrap();
        let (from, to) = range.split_once('-').unwrap();
        let [from, to] = [from, to].map(|hex| usize::from_str_radix(hex, 16).unwrap());
        if (from..to).contains(&first.addr()) {
            let file = OpenOptions::new().read(true).write(true).open(entry.path()).unwrap();
            punched += usize::from(fallocate(&file, PUNCH, (first.addr() - from) as u64, len as u64).is_ok());
        }
    }
    punched + usize::from(removed.is_ok())
}

#[test]
fn reader_of_seat_survives_attempts_to_take_pages_out() {
    with_limit("reader_of_seat_survives_attempts_to_take_pages_out", |limit| {
        let mut writer = Writer::new();
        let mut buffer = writer.group.alloc(SHARED).unwrap();
        buffer.fill(7);
        let lent = buffer.lend();
        let (mut process, mut lines) = writer.reader(limit);
        let mut answer = String::new();
        for order in ["before", "after"] {
            if order == "after" {
                // The reader is to survive even if this succeeds, so that is asserted last.
                take_all_pages_out(&lent);
            }
            writeln!(lines.get_mut(), "{}", lent.handle().unwrap()).unwrap();
            answer.clear();
            let read = lines.read_line(&mut answer);
            assert!(read.is_ok_and(|n| n > 0), "the reader has ended; killed by its limit: {}", limit.killed());
            assert_eq!(answer.trim_end(), format!("0 of {SHARED} bytes are wrong"), "{order}");
        }
        assert_eq!((limit.killed(), process.is_running()), (0, true));
        assert_eq!(take_all_pages_out(&lent), 0);
    });
}

/// The kernel does not report holes of huge pages, so a region may have some when it is attached.
#[test]
fn attach_of_huge_pages_that_a_limit_forbids_is_an_error() {
    let test = "attach_of_huge_pages_that_a_limit_forbids_is_an_error";
    let Some(limit) = MemoryLimit::without_huge_pages(test) else { return };
    let Some(_pages) = HugePages::get(test, 3) else { return };
    alone(test, || {
        let huge = MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB | MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let memory = rustix::fs::memfd_create("region", huge).unwrap();
        rustix::fs::ftruncate(&memory, 2 * HUGE_PAGE).unwrap();
        // The page beyond the end hides the hole in the number of blocks.
        fallocate(&memory, FallocateFlags::KEEP_SIZE, 0, 3 * HUGE_PAGE).unwrap();
        fallocate(&memory, PUNCH, HUGE_PAGE, HUGE_PAGE).unwrap();
        rustix::fs::fcntl_add_seals(&memory, partywall_region::memfd::SEALS).unwrap();
        let path = format!("/proc/{}/fd/{}", std::process::id(), memory.as_raw_fd());
        assert!(child(&format!("region {path} {}", limit.path().display()), Path::new("")).wait());
    });
}

#[test]
fn limit_left_by_a_killed_test_is_removed() {
    // A process that has ended, and whose number the kernel does not use again before others.
    let mut ended = std::process::Command::new("true").spawn().unwrap();
    ended.wait().unwrap();
    let Some(left) = MemoryLimit::abandoned("killed", ended.id()) else { return };
    let limit = MemoryLimit::of("limit_left_by_a_killed_test_is_removed", LIMIT).unwrap();
    assert!(!left.exists() && limit.path().exists());
}

/// Proves that the limit works, and that missing pages are what exceeds it.
#[test]
fn reader_of_unsealed_memory_dies_only_if_pages_are_missing() {
    with_limit("reader_of_unsealed_memory_dies_only_if_pages_are_missing", |limit| {
        let memory = rustix::fs::memfd_create("unsealed", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&memory, SHARED as u64).unwrap();
        fallocate(&memory, FallocateFlags::empty(), 0, SHARED as u64).unwrap();
        let path = format!("/proc/{}/fd/{}", std::process::id(), memory.as_fd().as_raw_fd());
        let survives = || child(&format!("file {path} {}", limit.path().display()), Path::new("")).wait();
        assert!(survives(), "all pages are there");
        assert_eq!(limit.killed(), 0);
        fallocate(&memory, PUNCH, 0, SHARED as u64).unwrap();
        assert!(!survives(), "all pages are missing");
        assert_eq!(limit.killed(), 1);
    });
}

/// The broker rings once, when it has passed the region on.
#[test]
fn region_that_finds_no_memory_is_attached_by_a_later_call() {
    alone("region_that_finds_no_memory_is_attached_by_a_later_call", || {
        let _guard = hang_guard();
        let broker = Broker::embedded().unwrap();
        let (web, db) = (join("web", broker.path()), join("db", broker.path()));
        let mut listener = db.bind("sql").unwrap();
        let mut client = web.connect("db:sql").unwrap();
        let (mut server, _) = listener.accept().unwrap();
        server.write_all(b"hello").unwrap();
        client.set_read_timeout(Some(Duration::from_secs(60)));

        let before = getrlimit(Resource::As);
        let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
        let bytes = pages.split_once(' ').unwrap().0.parse::<u64>().unwrap() * rustix::param::page_size() as u64;
        setrlimit(Resource::As, Rlimit { current: Some(bytes), maximum: before.maximum }).unwrap();
        let mut word = [0; 5];
        let failures: [_; 2] = std::array::from_fn(|_| client.read(&mut word).unwrap_err());
        setrlimit(Resource::As, before).unwrap();
        assert!(failures.iter().all(|error| error.kind() == ErrorKind::OutOfMemory), "{failures:?}");

        client.read_exact(&mut word).unwrap();
        assert_eq!(&word, b"hello");
    });
}
