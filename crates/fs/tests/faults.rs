//! Either side is killed in the middle of work, and the other goes on.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::expect_used,
    reason = "a test fails by panicking, in its helpers too"
)]

mod common;

use common::random::Random;
use common::{Way, World, eventually, world};
use partywall_fs::remote::{Remote, RemoteOptions, ServerAddress};
use partywall_fs::wire::{EntryName, FileLock, FileRequest, ROOT};
use rustix::fs::OFlags;
use rustix::io::Errno;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Writes numbered blocks until each was acknowledged once, while the server dies and returns.
fn server_dies_under_a_writer(way: Way) {
    const BLOCKS: u64 = 200;
    const BLOCK: usize = 48 << 10;
    let Some(mut world) = world(way, &[]) else { return };
    let mounted = world.mount(&["--grace", "20"]);
    let path = mounted.join("blocks");
    let file = File::create_new(&path).unwrap();
    let (written, is_done) = (AtomicU64::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for block in 0..BLOCKS {
                let data = Random(block + 1).bytes(BLOCK);
                // A request that was under way may fail; one that is asked again must not be lost.
                eventually("the server came back and the file could not be written", || {
                    file.write_all_at(&data, block * BLOCK as u64).is_ok()
                });
                written.store(block + 1, Ordering::Release);
            }
            is_done.store(true, Ordering::Release);
        });
        for round in 1..=3 {
            eventually("the writer is stuck", || written.load(Ordering::Acquire) >= round * BLOCKS / 5);
            world.kill_server();
            world.start();
        }
        eventually("the writer is stuck", || is_done.load(Ordering::Acquire));
    });
    for from in [&path, &world.export().join("blocks")] {
        let all = fs::read(from).unwrap();
        assert_eq!(all.len(), BLOCKS as usize * BLOCK);
        for (block, data) in all.chunks(BLOCK).enumerate() {
            assert!(data == Random(block as u64 + 1).bytes(BLOCK), "block {block} of {}", from.display());
        }
    }
}

#[test]
fn acknowledged_writes_survive_kills_of_the_server_by_calls() {
    server_dies_under_a_writer(Way::Calls);
}

#[test]
fn acknowledged_writes_survive_kills_of_the_server_by_a_stream() {
    server_dies_under_a_writer(Way::Stream);
}

#[test]
fn acknowledged_writes_survive_kills_of_the_server_by_tcp() {
    server_dies_under_a_writer(Way::Tcp);
}

#[test]
fn requests_without_server_fail_with_eio_or_estale() {
    let Some(mut world) = world(Way::Calls, &[]) else { return };
    let mounted = world.mount(&["--grace", "1"]);
    fs::write(mounted.join("kept"), "kept").unwrap();
    fs::write(mounted.join("gone"), "gone").unwrap();
    let (kept, gone) = (File::open(mounted.join("kept")).unwrap(), File::open(mounted.join("gone")).unwrap());
    fs::remove_file(mounted.join("gone")).unwrap();
    world.kill_server();
    let begin = Instant::now();
    assert_eq!(fs::read_dir(mounted.path()).unwrap_err().raw_os_error(), Some(Errno::IO.raw_os_error()));
    assert!(begin.elapsed() < Duration::from_secs(30), "the failure took too long");
    // A file of the same name is another file.
    fs::remove_file(world.export().join("kept")).unwrap();
    fs::write(world.export().join("kept"), "other").unwrap();
    world.start();
    eventually("the server came back", || fs::read_dir(mounted.path()).is_ok());
    for open in [&kept, &gone] {
        let error = open.read_at(&mut [0; 4], 0).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(Errno::STALE.raw_os_error()));
    }
    drop((kept, gone));
    assert_eq!(fs::read_to_string(mounted.join("kept")).unwrap(), "other");
    assert!(mounted.end(), "the mount ends in order");
}

#[test]
fn killed_client_leaves_nothing_open_at_the_server() {
    let Some(world) = world(Way::Calls, &[]) else { return };
    let descriptors = || fs::read_dir(format!("/proc/{}/fd", world.server_pid())).unwrap().count();
    let before = {
        // The first client makes what the server keeps for all.
        let mut mounted = world.mount(&[]);
        fs::write(mounted.join("first"), "x").unwrap();
        mounted.kill();
        eventually("the first client's session did not end", || {
            fs::read_dir(format!("/proc/{}/task", world.server_pid())).unwrap().count() <= 6
        });
        descriptors()
    };
    let mut mounted = world.mount(&[]);
    let open: Vec<File> = (0..50).map(|n| File::create(mounted.join(&format!("file-{n}"))).unwrap()).collect();
    assert!(descriptors() >= before + 50);
    mounted.kill();
    drop(open);
    eventually("files of a dead client stayed open", || descriptors() <= before);
    let again = world.mount(&[]);
    assert_eq!(fs::read_dir(again.path()).unwrap().count(), 51);
}

/// A client without a mount of a server that can be killed, which has a directory for all.
fn client_by_tcp() -> Option<(World, Remote)> {
    let world = world(Way::Tcp, &[])?;
    let all = std::os::unix::fs::PermissionsExt::from_mode(0o1777);
    fs::set_permissions(world.export(), all).unwrap();
    let remote = connect(&world);
    Some((world, remote))
}

fn connect(world: &World) -> Remote {
    let mut options = RemoteOptions::default();
    options.grace = Duration::from_secs(30);
    Remote::connect(ServerAddress::Tcp(world.address()), options).unwrap()
}

fn restart(world: &mut World) {
    world.kill_server();
    world.start();
}

const USER: (u32, u32) = (1234, 1234);
const OTHER: (u32, u32) = (4321, 4321);

fn name(name: &str) -> EntryName<'_> {
    EntryName::new(name.as_bytes()).unwrap()
}

fn read(remote: &Remote, handle: u64) -> Result<Vec<u8>, Errno> {
    let make = |handle| FileRequest::Read { handle, offset: 0, len: 64 };
    remote.on_file(OTHER, handle, make).and_then(|data| data.into_vec())
}

const EXCLUSIVE: FileLock = FileLock { start: 0, end: 9, kind: 1 };
const NONE: FileLock = FileLock { kind: 2, ..EXCLUSIVE };

#[test]
fn first_lock_after_restart_of_the_server_is_taken() {
    let Some((mut world, remote)) = client_by_tcp() else { return };
    let handle = remote.create(USER, 0, ROOT, name("file"), 0o600, OFlags::RDWR.bits()).unwrap().handle;
    restart(&mut world);
    assert_eq!(remote.set_lock(handle, 1, EXCLUSIVE), Ok(()));
    assert_eq!(read(&remote, handle), Ok(Vec::new()));
    restart(&mut world);
    assert_eq!(read(&remote, handle), Err(Errno::IO), "another client may have had the lock");
}

#[test]
fn refused_lock_leaves_open_file_usable_after_restart() {
    let Some((mut world, remote)) = client_by_tcp() else { return };
    let handle = remote.create(USER, 0, ROOT, name("file"), 0o600, OFlags::RDWR.bits()).unwrap().handle;
    let holder = connect(&world);
    let find = |parent| FileRequest::Lookup { parent, name: name("file") };
    let (node, _) = holder.entry(USER, ROOT, name("file"), find).unwrap();
    let (held, _) = holder.open(USER, 1, node, OFlags::RDWR.bits(), || ()).unwrap();
    assert_eq!(holder.set_lock(held, 1, EXCLUSIVE), Ok(()));
    assert_eq!(remote.set_lock(handle, 1, EXCLUSIVE), Err(Errno::AGAIN));
    restart(&mut world);
    assert_eq!(read(&remote, handle), Ok(Vec::new()));
}

#[test]
fn bare_unlock_leaves_open_file_usable_after_restart() {
    let Some((mut world, remote)) = client_by_tcp() else { return };
    let handle = remote.create(USER, 0, ROOT, name("file"), 0o600, OFlags::RDWR.bits()).unwrap().handle;
    assert_eq!(remote.set_lock(handle, 1, NONE), Ok(()));
    restart(&mut world);
    assert_eq!(read(&remote, handle), Ok(Vec::new()));
}

#[test]
fn sync_reports_changes_that_the_server_machine_has_lost() {
    let Some((mut world, remote)) = client_by_tcp() else { return };
    let handle = remote.create(USER, 0, ROOT, name("file"), 0o600, OFlags::RDWR.bits()).unwrap().handle;
    let write = || assert_eq!(remote.write(USER, 0, handle, 0, b"text"), Ok(4));
    let sync = || remote.on_file(USER, handle, |handle| FileRequest::Sync { handle, data_only: 0 }).map(drop);
    write();
    restart(&mut world);
    assert_eq!(sync(), Ok(()), "the kernel of the server has the change still");
    write();
    world.boot("11111111-2222-3333-4444-555555555555\n");
    restart(&mut world);
    assert_eq!(sync(), Err(Errno::IO));
    assert_eq!(sync(), Ok(()), "reported once");
    write();
    assert_eq!(sync(), Ok(()));
    world.boot("99999999-2222-3333-4444-555555555555\n");
    restart(&mut world);
    assert_eq!(sync(), Ok(()), "it was durable");
}

#[test]
fn open_file_is_opened_again_as_its_opener() {
    let Some((mut world, remote)) = client_by_tcp() else { return };
    // Only the opener can reach the file and read it.
    let make = |parent| FileRequest::MakeDirectory { parent, name: name("private"), mode: 0o700 };
    let (directory, _) = remote.entry(USER, ROOT, name("private"), make).unwrap();
    let handle = remote.create(USER, 0, directory, name("file"), 0o600, OFlags::RDWR.bits()).unwrap().handle;
    let listed = remote.open_directory(USER, 0, directory).unwrap();
    assert_eq!(remote.write(USER, 0, handle, 0, b"text"), Ok(4));
    restart(&mut world);
    assert_eq!(read(&remote, handle), Ok(b"text".to_vec()));
    restart(&mut world);
    assert_eq!(remote.write(OTHER, 0, handle, 0, b"TEXT"), Ok(4));
    restart(&mut world);
    let make = |handle| FileRequest::ReadDirectory { handle, offset: 0, len: 4096 };
    assert!(remote.on_file(OTHER, listed, make).is_ok());
}
