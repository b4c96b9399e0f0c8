//! Windows as a process of the host has them: the same regions as in a guest, in the same file.
#![cfg(feature = "conformance")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

use partywall_protocol::window::{DATA_OFFSET, INFO_OFFSET, STEP, TRIAL_OFFSET};
use partywall_region::conformance::{self, Backend, ConformanceRegion};
use partywall_region::pmem::{self, Space, WindowFile, WindowHeader, WindowSpec};
use partywall_region::{Link, RegionError, RegionOptions};
use partywall_shm::layout::{Geometry, PAGE, RegionKind};
use rustix::fd::AsFd;
use rustix::fs::{MemfdFlags, SealFlags};
use std::os::unix::fs::PermissionsExt;

fn spec(room: u64) -> WindowSpec {
    WindowSpec { room, owner: "a".into(), peer: "b".into() }
}

fn space(file: &WindowFile) -> Space {
    Space::new(file.window().unwrap())
}

#[test]
fn regions_in_a_window_conform() {
    let file = WindowFile::create(&spec(4 << 20)).unwrap();
    let space = space(&file);
    let theirs = file.window().unwrap();
    let link = || {
        let (here, there) = Link::pair().unwrap();
        (Link::Socket(here), Link::Socket(there))
    };
    let region = |options: &RegionOptions| ConformanceRegion::in_window(&space, &theirs, options);
    conformance::all(&Backend { region: &region, link: &link, at_once: true });
}

#[test]
fn region_in_window_lies_page_aligned_behind_header() {
    let file = WindowFile::create(&spec(64 << 10)).unwrap();
    let (window, space) = (file.window().unwrap(), space(&file));
    let (own, base) = space.create(&RegionOptions::endpoint(4096)).unwrap();
    let attach = |base, ring| window.attach(base, RegionKind::Endpoint, Geometry::new(PAGE, ring).unwrap());
    assert!(attach(base, 4096).is_ok());
    // Not what is there; not on a page; the window's header; past the end, also by overflow.
    for (base, ring) in [
        (base, 8192),
        (base + PAGE, 4096),
        (base + 8, 4096),
        (0, 4096),
        (window.size() - PAGE, 4096),
        (window.size(), 0),
        (u64::MAX - PAGE + 1, 4096),
    ] {
        assert!(matches!(attach(base, ring), Err(RegionError::Corrupt(_))), "{ring} at {base}");
    }
    // Not in the header's place either, whatever the owner has written there.
    let mut page = [0; PAGE as usize];
    rustix::io::pread(&file, &mut page, DATA_OFFSET + base).unwrap();
    rustix::io::pwrite(&file, &page, DATA_OFFSET).unwrap();
    assert!(matches!(attach(0, 4096), Err(RegionError::Corrupt(_))));
    assert!(window.attach(base, RegionKind::Extension, own.geometry()).is_err());
    let huge = Geometry::new(2 << 20, 2 << 20).unwrap();
    assert!(window.attach(base, RegionKind::Endpoint, huge).is_err());
}

#[test]
fn room_is_refused_when_there_is_none_and_comes_back_clean() {
    let file = WindowFile::create(&spec(64 << 10)).unwrap();
    let space = space(&file);
    let free = space.free();
    let (mut own, base) = space.create(&RegionOptions::endpoint(1 << 20)).unwrap();
    own.span(0, 1 << 20).copy_from(0, &vec![7; 1 << 20]);
    own.page().tx.cursor.tail.store(9, std::sync::atomic::Ordering::Relaxed);
    let e = space.create(&RegionOptions::endpoint(1 << 20)).unwrap_err().to_string();
    assert!(e.contains("room in the window"), "{e}");
    drop(own);
    assert!(space.create(&RegionOptions::endpoint(1 << 20)).is_err(), "the peer may still read it");
    assert!(space.give_back(base));
    assert_eq!(space.free(), free);
    let (own, base) = space.create(&RegionOptions::endpoint(1 << 20)).unwrap();
    let mut bytes = vec![1; 1 << 20];
    file.window()
        .unwrap()
        .attach(base, RegionKind::Endpoint, own.geometry())
        .unwrap()
        .span(0, 1 << 20)
        .copy_to(&mut bytes);
    assert!(bytes.iter().all(|b| *b == 0), "what one peer was told is not for the next");
    assert_eq!(own.page().tx.cursor.tail.load(std::sync::atomic::Ordering::Relaxed), 0);
}

#[test]
fn received_window_must_be_sealed_with_valid_header() {
    let file = WindowFile::create(&spec(4096)).unwrap();
    assert_eq!(pmem::received(file.as_fd()).unwrap().size(), file.size() - DATA_OFFSET);
    assert_eq!(pmem::received(file.as_fd()).unwrap().header().unwrap().unwrap().id, file.id());

    // A region in a memfd, an unsealed copy, a file that is no window, something else altogether.
    let (own, memory) = partywall_region::OwnRegion::create(&RegionOptions::endpoint(4096)).unwrap();
    assert!(pmem::received(memory.as_fd()).is_err());
    assert!(pmem::attach(memory.as_fd(), PAGE, RegionKind::Endpoint, own.geometry()).is_err());
    let copy = |seals| {
        let fd = rustix::fs::memfd_create("copy", MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&fd, file.size()).unwrap();
        let mut bytes = vec![0; file.size() as usize];
        rustix::io::pread(&file, &mut bytes, 0).unwrap();
        rustix::io::pwrite(&fd, &bytes, 0).unwrap();
        rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
        fd
    };
    assert!(pmem::received(copy(SealFlags::GROW).as_fd()).is_err());
    let sealed = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    assert!(pmem::received(copy(sealed).as_fd()).is_ok());
    // Made of a window, but not one as it is now.
    let forged = copy(SealFlags::empty());
    let header = WindowHeader { size: 1 << 40, ..file.header().clone() };
    rustix::io::pwrite(&forged, &header.encode(), DATA_OFFSET).unwrap();
    rustix::fs::fcntl_add_seals(&forged, sealed).unwrap();
    assert!(pmem::received(forged.as_fd()).is_err());
    assert!(pmem::received(std::io::stdin().as_fd()).is_err());
    let (a, _b) = Link::pair().unwrap();
    assert!(pmem::received(a.as_fd()).is_err());
}

#[test]
fn named_windows_are_private_whole_and_never_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a-b");
    let made = WindowFile::create_at(&path, &spec(3 << 20)).unwrap();
    assert_eq!(made.size(), 6 << 20, "info block, header, and room in steps of 2 MiB");
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    let opened = WindowFile::open(&path).unwrap();
    assert_eq!((opened.id(), opened.size(), &opened.path()), (made.id(), made.size(), &path));
    assert!(WindowFile::create_at(&path, &spec(4096)).is_err(), "it is there");

    let (own, base) = space(&made).create(&RegionOptions::endpoint(4096)).unwrap();
    assert!(opened.window().unwrap().attach(base, RegionKind::Endpoint, own.geometry()).is_ok());

    // A file that is no window is refused, and so is a truncated window.
    std::fs::write(dir.path().join("text"), "hello").unwrap();
    assert!(WindowFile::open(&dir.path().join("text")).is_err());
    assert!(WindowFile::open(&dir.path().join("absent")).is_err());
    std::os::unix::fs::symlink(&path, dir.path().join("link")).unwrap();
    assert!(WindowFile::open(&dir.path().join("link")).is_err());
    let cut = dir.path().join("cut");
    let mut bytes = std::fs::read(&path).unwrap();
    bytes.truncate(4 << 20);
    std::fs::write(&cut, bytes).unwrap();
    assert!(WindowFile::open(&cut).is_err());
    assert!(spec(u64::MAX).file_size().is_err());
}

#[test]
fn begun_window_is_allocated_in_parts() {
    use std::os::unix::fs::MetadataExt as _;
    let memory = |window: &WindowFile| std::fs::metadata(window.path()).unwrap().blocks() * 512;
    // Where there is memory, a write takes none.
    let has = |window: &WindowFile, at: u64| {
        let before = memory(window);
        let mut byte = [0];
        rustix::io::pread(window, &mut byte, at).unwrap();
        rustix::io::pwrite(window, &byte, at).unwrap();
        memory(window) == before
    };
    let window = WindowFile::begin(&spec(50 << 20)).unwrap();
    assert!(memory(&window) < STEP + (64 << 10), "little more than the first places");
    assert_eq!(window.allocated(), 3 * STEP);
    for at in [0, INFO_OFFSET, TRIAL_OFFSET, DATA_OFFSET, 2 * STEP, 2 * STEP + STEP / 2, 3 * STEP - 1] {
        assert!(has(&window, at), "byte {at:#x}");
    }
    let (mut parts, mut before) = (0, window.allocated());
    loop {
        let whole = window.allocate_more().unwrap();
        let now = window.allocated();
        assert!(now > before && memory(&window) == now, "all before it, and no more");
        assert!(has(&window, now - 1));
        assert_eq!(whole, now == window.size());
        (parts, before) = (parts + 1, now);
        if whole {
            break;
        }
    }
    assert!(parts > 1);
    assert!(window.allocate_more().unwrap(), "nothing is left to do");
    for room in [1 << 10, 3 << 20, 20 << 20] {
        let window = WindowFile::begin(&spec(room)).unwrap();
        assert!(window.allocated() <= window.size());
        window.allocate().unwrap();
        assert_eq!((window.allocated(), memory(&window)), (window.size(), window.size()));
        assert_eq!(memory(&WindowFile::create(&spec(room)).unwrap()), window.size());
    }
}

#[test]
fn unnamed_window_lives_while_it_is_open_anywhere() {
    let file = WindowFile::create(&spec(4096)).unwrap();
    let id = file.id();
    // As QEMU opens it, by its path.
    let opened = std::fs::File::options().read(true).write(true).open(file.path()).unwrap();
    drop(file);
    let again = pmem::received(opened.as_fd()).unwrap();
    assert_eq!(again.header().unwrap().unwrap().id, id);
}
