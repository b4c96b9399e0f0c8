//! A mounted export beside a local directory: the same operations have the same results.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::expect_used,
    reason = "a test fails by panicking, in its helpers too"
)]

mod common;

use common::random::Random;
use common::{Way, eventually, world};
use partywall_fs::remote::{Remote, RemoteOptions, ServerAddress};
use rustix::fs::{AtFlags, CWD, FallocateFlags, FlockOperation, Mode, OFlags, RenameFlags, SeekFrom};
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// The errno of an outcome, or 0.
fn code<T>(outcome: std::io::Result<T>) -> i32 {
    outcome.err().map_or(0, |e| e.raw_os_error().unwrap_or(-1))
}

/// One random operation. Returns all that can be seen of its outcome.
fn operate(root: &Path, random: &mut Random) -> Vec<u8> {
    let name = |random: &mut Random| root.join(["a", "b", "c", "d/a", "d/b", "e"][random.below(6) as usize]);
    let path = name(random);
    let offset = random.below(300_000);
    let len = random.below(70_000) as usize;
    let open = || File::options().read(true).write(true).open(&path);
    let mut seen = Vec::new();
    let mut note = |what: i32| seen.extend(what.to_le_bytes());
    match random.below(16) {
        0 | 1 => note(code(File::options().write(true).create(true).truncate(false).open(&path))),
        2..=4 => {
            let data = random.bytes(len);
            note(code(open().and_then(|file| file.write_all_at(&data, offset))));
        }
        5..=7 => match open() {
            Ok(file) => {
                let mut data = vec![0; len];
                let n = file.read_at(&mut data, offset).unwrap();
                data.truncate(n);
                seen = data;
            }
            Err(e) => note(code::<()>(Err(e))),
        },
        8 => note(code(open().and_then(|file| file.set_len(offset)))),
        9 => {
            let data = random.bytes(len / 10);
            note(code(File::options().append(true).open(&path).and_then(|mut file| file.write_all(&data))));
        }
        10 => {
            let to = name(random);
            let flags = [RenameFlags::empty(), RenameFlags::NOREPLACE, RenameFlags::EXCHANGE][random.below(3) as usize];
            note(code(rustix::fs::renameat_with(CWD, &path, CWD, &to, flags).map_err(Into::into)));
        }
        11 => note(code(fs::remove_file(&path))),
        12 => {
            let to = name(random);
            note(code(fs::hard_link(&path, to)));
        }
        13 => {
            let mode = [FallocateFlags::empty(), FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE]
                [random.below(2) as usize];
            let outcome = open().and_then(|file| Ok(rustix::fs::fallocate(&file, mode, offset, len as u64 + 1)?));
            note(code(outcome));
        }
        14 => note(code(fs::set_permissions(&path, fs::Permissions::from_mode(0o600 + random.below(0o70) as u32)))),
        _ => match fs::symlink_metadata(&path) {
            Ok(found) => {
                note(found.mode().cast_signed());
                note(found.nlink() as i32);
                note(found.len() as i32);
            }
            Err(e) => note(code::<()>(Err(e))),
        },
    }
    seen
}

/// Everything in a directory, by name.
fn contents(root: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut all = BTreeMap::new();
    for folder in [root.to_owned(), root.join("d")] {
        for entry in fs::read_dir(&folder).unwrap() {
            let entry = entry.unwrap();
            if entry.file_type().unwrap().is_file() {
                let path = entry.path();
                let name = path.strip_prefix(root).unwrap().display().to_string();
                all.insert(name, fs::read(path).unwrap());
            }
        }
    }
    all
}

fn random_operations(way: Way, options: &[&str], steps: usize) {
    let Some(world) = world(way, &[]) else { return };
    let mounted = world.mount(options);
    let oracle = tempfile::tempdir().unwrap();
    for root in [mounted.path(), oracle.path()] {
        fs::create_dir(root.join("d")).unwrap();
    }
    for seed in [0x9e37_79b9, 77] {
        let (mut here, mut there) = (Random(seed), Random(seed));
        for step in 0..steps {
            let (a, b) = (operate(mounted.path(), &mut here), operate(oracle.path(), &mut there));
            assert!(a == b, "seed {seed}, step {step}: {} bytes beside {}", a.len(), b.len());
        }
        assert!(contents(mounted.path()) == contents(oracle.path()), "seed {seed}: other contents at the client");
        assert!(contents(world.export()) == contents(oracle.path()), "seed {seed}: other contents at the server");
    }
    assert!(mounted.end(), "the mount ends in order");
}

#[test]
fn random_operations_by_calls_match_a_local_directory() {
    random_operations(Way::Calls, &[], 400);
}

#[test]
fn random_operations_without_cache_match_a_local_directory() {
    random_operations(Way::Calls, &["--cache", "0"], 200);
}

#[test]
fn random_operations_with_long_cache_match_a_local_directory() {
    random_operations(Way::Calls, &LONG_CACHE, 400);
}

#[test]
fn random_operations_by_a_stream_match_a_local_directory() {
    random_operations(Way::Stream, &[], 200);
}

#[test]
fn random_operations_by_tcp_match_a_local_directory() {
    random_operations(Way::Tcp, &[], 200);
}

/// Errors of operations that must fail, in the order of the table below.
fn errors(root: &Path) -> Vec<(&'static str, i32)> {
    fs::create_dir(root.join("dir")).unwrap();
    fs::create_dir(root.join("full")).unwrap();
    fs::write(root.join("full/x"), "x").unwrap();
    fs::write(root.join("file"), "content").unwrap();
    std::os::unix::fs::symlink("loop", root.join("loop")).unwrap();
    let at = |name: &str| root.join(name);
    let long = "n".repeat(256);
    let rename = |a: &str, b: &str, flags| {
        code(rustix::fs::renameat_with(CWD, at(a), CWD, at(b), flags).map_err(std::io::Error::from))
    };
    let none = RenameFlags::empty();
    let file = File::options().read(true).write(true).open(at("file")).unwrap();
    let mut value = [0; 8];
    let c = |outcome: Result<(), Errno>| code(outcome.map_err(std::io::Error::from));
    vec![
        ("open missing", code(File::open(at("missing")))),
        ("open through a file", code(File::open(at("file/x")))),
        ("open a directory for writing", code(File::options().write(true).open(at("dir")))),
        ("create what exists", code(File::create_new(at("file")))),
        ("long name", code(File::create(at(&long)))),
        ("name of the greatest length", code(File::create(at(&long[1..])))),
        ("mkdir exists", code(fs::create_dir(at("dir")))),
        ("mkdir without parent", code(fs::create_dir(at("no/dir")))),
        ("rmdir full", code(fs::remove_dir(at("full")))),
        ("rmdir file", code(fs::remove_dir(at("file")))),
        ("unlink directory", code(fs::remove_file(at("dir")))),
        ("symlink loop", code(File::open(at("loop")))),
        ("readlink of a file", code(fs::read_link(at("file")))),
        ("link directory", code(fs::hard_link(at("dir"), at("dir2")))),
        ("link exists", code(fs::hard_link(at("file"), at("full/x")))),
        ("rename over full", rename("dir", "full", none)),
        ("rename into itself", rename("dir", "dir/sub", none)),
        ("rename directory over file", rename("dir", "file", none)),
        ("rename file over directory", rename("file", "dir", none)),
        ("rename missing", rename("missing", "other", none)),
        ("rename noreplace", rename("file", "full/x", RenameFlags::NOREPLACE)),
        ("exchange missing", rename("file", "missing", RenameFlags::EXCHANGE)),
        ("write at the end of all offsets", code(file.write_at(b"x", i64::MAX as u64))),
        ("truncate directory", c(rustix::fs::open(at("dir"), OFlags::WRONLY, Mode::empty()).map(drop))),
        ("xattr missing", c(rustix::fs::getxattr(at("file"), "user.none", &mut value[..]).map(drop))),
        ("data behind the end", c(rustix::fs::seek(&file, SeekFrom::Data(1 << 30)).map(drop))),
        ("hole of data", c(rustix::fs::seek(&file, SeekFrom::Hole(0)).map(drop))),
        ("empty name", c(rustix::fs::mkdirat(CWD, root.join("dir/."), Mode::empty()))),
        ("fallocate nothing", c(rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, 0))),
        ("link count", fs::metadata(at("full")).unwrap().nlink() as i32),
    ]
}

#[test]
fn errors_are_those_of_a_local_directory() {
    let Some(world) = world(Way::Calls, &[]) else { return };
    let mounted = world.mount(&[]);
    let oracle = tempfile::tempdir().unwrap();
    assert_eq!(errors(mounted.path()), errors(oracle.path()));
}

#[test]
fn links_attributes_holes_and_space_are_carried() {
    let Some(world) = world(Way::Calls, &[]) else { return };
    let mounted = world.mount(&[]);
    let path = mounted.join("file");
    fs::write(&path, "text").unwrap();
    std::os::unix::fs::symlink("../outside/of/it", mounted.join("link")).unwrap();
    assert_eq!(fs::read_link(mounted.join("link")).unwrap(), Path::new("../outside/of/it"));
    fs::hard_link(&path, mounted.join("second")).unwrap();
    let found = fs::metadata(&path).unwrap();
    assert_eq!((found.nlink(), found.ino()), (2, fs::metadata(mounted.join("second")).unwrap().ino()));
    // Extended attributes: set, listed, read at the server, removed.
    rustix::fs::setxattr(&path, "user.colour", b"blue", rustix::fs::XattrFlags::empty()).unwrap();
    let mut value = [0; 16];
    let n = rustix::fs::getxattr(world.export().join("file"), "user.colour", &mut value[..]).unwrap();
    assert_eq!(&value[..n], b"blue");
    let n = rustix::fs::listxattr(&path, &mut value[..]).unwrap();
    assert_eq!(&value[..n], b"user.colour\0");
    rustix::fs::removexattr(&path, "user.colour").unwrap();
    let other = rustix::fs::setxattr(&path, "trusted.x", b"y", rustix::fs::XattrFlags::empty());
    assert_eq!(other, Err(Errno::OPNOTSUPP));
    // A sparse file stays sparse, and its data and holes are found.
    let sparse = File::create(mounted.join("sparse")).unwrap();
    sparse.write_all_at(b"end", 8 << 30).unwrap();
    assert!(fs::metadata(mounted.join("sparse")).unwrap().blocks() < 1 << 10);
    assert_eq!(rustix::fs::seek(&sparse, SeekFrom::Data(0)), Ok(8 << 30));
    assert_eq!(rustix::fs::seek(&sparse, SeekFrom::Hole(0)), Ok(0));
    // Times, also before 1970.
    let times = rustix::fs::Timestamps {
        last_access: rustix::fs::Timespec { tv_sec: -5, tv_nsec: 7 },
        last_modification: rustix::fs::Timespec { tv_sec: 1_000_000_000, tv_nsec: 9 },
    };
    rustix::fs::utimensat(CWD, &path, &times, AtFlags::empty()).unwrap();
    let found = fs::metadata(world.export().join("file")).unwrap();
    assert_eq!((found.atime(), found.atime_nsec(), found.mtime(), found.mtime_nsec()), (-5, 7, 1_000_000_000, 9));
    // An open file that has no name any more.
    let open = File::options().read(true).write(true).open(&path).unwrap();
    fs::remove_file(&path).unwrap();
    fs::remove_file(mounted.join("second")).unwrap();
    open.write_all_at(b"still", 0).unwrap();
    assert_eq!(open.metadata().unwrap().nlink(), 0);
    let mut text = String::new();
    (&open).read_to_string(&mut text).unwrap();
    assert_eq!(text, "still");
    // Owners, permissions, kinds.
    File::create(mounted.join("owned")).unwrap();
    std::os::unix::fs::chown(mounted.join("owned"), Some(1234), Some(4321)).unwrap();
    fs::set_permissions(mounted.join("owned"), fs::Permissions::from_mode(0o4751)).unwrap();
    let found = fs::metadata(world.export().join("owned")).unwrap();
    assert_eq!((found.uid(), found.gid(), found.mode() & 0o7777), (1234, 4321, 0o4751));
    rustix::fs::mknodat(CWD, mounted.join("fifo"), rustix::fs::FileType::Fifo, Mode::RWXU, 0).unwrap();
    let device =
        rustix::fs::mknodat(CWD, mounted.join("null"), rustix::fs::FileType::CharacterDevice, Mode::RWXU, 0x103);
    assert_eq!(device, Err(Errno::PERM));
    let space = rustix::fs::statvfs(mounted.path()).unwrap();
    assert_eq!(space.f_blocks, rustix::fs::statvfs(world.export()).unwrap().f_blocks);
    // A large directory is listed once and completely.
    fs::create_dir(mounted.join("many")).unwrap();
    let names: std::collections::BTreeSet<String> = (0..1500).map(|n| format!("entry-{n:05}")).collect();
    for name in &names {
        File::create(world.export().join("many").join(name)).unwrap();
    }
    let listed: Vec<String> = fs::read_dir(mounted.join("many"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    assert_eq!(listed.len(), names.len());
    assert_eq!(listed.into_iter().collect::<std::collections::BTreeSet<_>>(), names);
}

#[test]
fn second_client_sees_writes_closed_by_first() {
    let Some(world) = world(Way::Calls, &[]) else { return };
    let (first, second) = (world.mount(&[]), world.mount(&[]));
    for round in 0..100u32 {
        let text = format!("round {round}").repeat(1 + (round as usize * 37) % 900);
        fs::write(first.join("shared"), &text).unwrap();
        assert!(fs::read_to_string(second.join("shared")).unwrap() == text, "round {round}");
        // The second client has cached the content; a change in place, of the same length, must show as well.
        let other = text.replace('r', "R");
        File::options().write(true).open(first.join("shared")).unwrap().write_all_at(other.as_bytes(), 0).unwrap();
        assert!(fs::read_to_string(second.join("shared")).unwrap() == other, "round {round}, in place");
    }
}

#[test]
fn second_client_without_cache_sees_new_names_at_once() {
    let Some(world) = world(Way::Calls, &[]) else { return };
    let (first, second) = (world.mount(&["--cache", "0"]), world.mount(&["--cache", "0"]));
    fs::write(first.join("shared"), "text").unwrap();
    assert_eq!(fs::metadata(second.join("shared")).unwrap().len(), 4);
    fs::write(first.join("shared"), "longer text").unwrap();
    assert_eq!(fs::metadata(second.join("shared")).unwrap().len(), 11);
    fs::rename(first.join("shared"), first.join("moved")).unwrap();
    assert!(!second.join("shared").exists());
    assert!(second.join("moved").exists());
    fs::remove_file(second.join("moved")).unwrap();
    assert_eq!(code(fs::metadata(first.join("moved"))), Errno::NOENT.raw_os_error());
}

/// The option of a mount whose kernel caches names and attributes for longer than a test takes.
const LONG_CACHE: [&str; 2] = ["--cache", "3600"];

#[test]
fn open_of_cached_name_finds_file_that_has_it_now() {
    let Some(world) = world(Way::Calls, &[]) else { return };
    let (first, second) = (world.mount(&LONG_CACHE), world.mount(&LONG_CACHE));
    let read = |name: &str| fs::read_to_string(second.join(name));
    let write = |name: &str, text: &str| fs::write(first.join(name), text).unwrap();
    fs::create_dir(first.join("dir")).unwrap();
    for round in 0..10 {
        let text = |name: &str| format!("{name} {round}");
        // A log is rotated.
        write("log", &text("old"));
        assert_eq!(read("log").unwrap(), text("old"));
        fs::rename(first.join("log"), first.join("log.1")).unwrap();
        write("log", &text("new"));
        assert_eq!((read("log").unwrap(), read("log.1").unwrap()), (text("new"), text("old")));
        // A file is replaced.
        write("dir/next", &text("replacement"));
        fs::rename(first.join("dir/next"), first.join("log")).unwrap();
        assert_eq!(read("log").unwrap(), text("replacement"));
        // Two files change places.
        rustix::fs::renameat_with(CWD, first.join("log"), CWD, first.join("log.1"), RenameFlags::EXCHANGE).unwrap();
        assert_eq!((read("log").unwrap(), read("log.1").unwrap()), (text("old"), text("replacement")));
        // One of two names of a file is given to another file.
        fs::hard_link(first.join("log"), first.join("second-name")).unwrap();
        assert_eq!((read("second-name").unwrap(), read("log").unwrap()), (text("old"), text("old")));
        fs::rename(first.join("log.1"), first.join("log")).unwrap();
        assert_eq!((read("log").unwrap(), read("second-name").unwrap()), (text("replacement"), text("old")));
        // A file is removed, and a directory replaced.
        fs::remove_file(first.join("second-name")).unwrap();
        assert_eq!(code(read("second-name")), Errno::NOENT.raw_os_error());
        fs::create_dir(first.join("other")).unwrap();
        write("other/inside", "");
        let count = |name: &str| fs::read_dir(second.join(name)).unwrap().count();
        assert_eq!(count("dir"), 0);
        rustix::fs::renameat_with(CWD, first.join("other"), CWD, first.join("dir"), RenameFlags::EXCHANGE).unwrap();
        assert_eq!((count("dir"), count("other")), (1, 0));
        fs::remove_file(first.join("dir/inside")).unwrap();
        fs::remove_dir(first.join("other")).unwrap();
    }
}

#[test]
fn open_of_cached_file_has_size_that_another_client_gave_it() {
    let Some(world) = world(Way::Calls, &[]) else { return };
    let (first, second) = (world.mount(&LONG_CACHE), world.mount(&LONG_CACHE));
    let path = second.join("file");
    for round in 0..20usize {
        let (long, short) = (vec![round as u8; 10_000 + 997 * round], vec![1 + round as u8; 100 + round]);
        fs::write(first.join("file"), &long).unwrap();
        assert!(fs::read(&path).unwrap() == long, "round {round}");
        fs::write(first.join("file"), &short).unwrap();
        // Without a request for the attributes in between, the kernel goes by the size that it has.
        let mut buffer = [0; 200];
        let n = File::open(&path).unwrap().read_at(&mut buffer, 0).unwrap();
        assert!(buffer[..n] == short, "round {round}: {n} bytes");
        // Both append in turn, and read by the same open file. The kernel takes an appended page for what is at the end that it knows.
        let mut expected = short;
        for (part, mounted) in [&first, &second, &first, &second].into_iter().enumerate() {
            let mut file = File::options().read(true).append(true).open(mounted.join("file")).unwrap();
            let appended = vec![part as u8; 20_000 * (1 + part)];
            file.write_all(&appended).unwrap();
            expected.extend(appended);
            let mut found = vec![0; expected.len() + 1];
            let n = file.read_at(&mut found, 0).unwrap();
            assert!(found[..n] == expected, "round {round}, part {part}: {n} bytes of {}", expected.len());
        }
        for (name, mounted) in [("first", &first), ("second", &second)] {
            assert!(fs::read(mounted.join("file")).unwrap() == expected, "round {round}: {name} client");
            assert_eq!(fs::metadata(mounted.join("file")).unwrap().len(), expected.len() as u64);
        }
    }
}

#[test]
fn times_of_opened_file_are_current() {
    let Some(world) = world(Way::Calls, &[]) else { return };
    let (first, second) = (world.mount(&LONG_CACHE), world.mount(&LONG_CACHE));
    fs::write(first.join("file"), "text").unwrap();
    for round in 1..20 {
        fs::metadata(second.join("file")).unwrap();
        let file = File::options().write(true).open(first.join("file")).unwrap();
        file.write_all_at(b"TEXT", 0).unwrap();
        let time = std::time::UNIX_EPOCH + std::time::Duration::from_secs(round);
        file.set_modified(time).unwrap();
        drop(file);
        let open = File::open(second.join("file")).unwrap();
        assert_eq!(open.metadata().unwrap().modified().unwrap(), time);
    }
}

#[test]
fn file_without_name_can_be_opened_by_its_descriptor() {
    let Some(world) = world(Way::Calls, &[]) else { return };
    let (first, second) = (world.mount(&LONG_CACHE), world.mount(&LONG_CACHE));
    for (name, remover) in [("here", &second), ("there", &first)] {
        fs::write(first.join(name), "text").unwrap();
        let open = File::open(second.join(name)).unwrap();
        fs::remove_file(remover.join(name)).unwrap();
        let path = format!("/proc/self/fd/{}", rustix::fd::AsRawFd::as_raw_fd(&open));
        for _ in 0..3 {
            assert_eq!(fs::read_to_string(&path).unwrap(), "text", "{name}");
        }
    }
}

/// A client takes a lock after another one has held it and made the file longer.
fn size_is_current_after_lock(is_waited_for: bool) {
    let Some(world) = world(Way::Calls, &[]) else { return };
    let (first, second) = (world.mount(&LONG_CACHE), world.mount(&LONG_CACHE));
    fs::write(first.join("file"), "text").unwrap();
    let open = File::options().read(true).write(true).open(second.join("file")).unwrap();
    assert_eq!(open.metadata().unwrap().len(), 4);
    let other = File::options().append(true).open(first.join("file")).unwrap();
    rustix::fs::flock(&other, FlockOperation::LockExclusive).unwrap();
    std::thread::scope(|scope| {
        let take = || rustix::fs::flock(&open, FlockOperation::LockExclusive).unwrap();
        let waiter = is_waited_for.then(|| scope.spawn(take));
        if waiter.is_some() {
            std::thread::sleep(Duration::from_millis(300));
        }
        (&other).write_all(b" of the first client").unwrap();
        rustix::fs::flock(&other, FlockOperation::Unlock).unwrap();
        match waiter {
            Some(waiter) => waiter.join().unwrap(),
            None => take(),
        }
    });
    assert_eq!(open.metadata().unwrap().len(), 24);
}

#[test]
fn size_is_current_after_lock_is_taken() {
    size_is_current_after_lock(false);
}

#[test]
fn size_is_current_after_wait_for_lock() {
    size_is_current_after_lock(true);
}

#[test]
fn kernel_reads_ahead_as_much_as_one_request_carries() {
    let Some(world) = world(Way::Calls, &[]) else { return };
    let mounted = world.mount(&[]);
    let device = fs::metadata(mounted.path()).unwrap().dev();
    let path = format!("/sys/class/bdi/{}:{}/read_ahead_kb", rustix::fs::major(device), rustix::fs::minor(device));
    if rustix::fs::access(&path, rustix::fs::Access::WRITE_OK).is_err() {
        eprintln!("SKIPPED: {path} cannot be written here");
        return;
    }
    let expected = (partywall_fs::wire::LARGEST_DATA >> 10).to_string();
    assert_eq!(fs::read_to_string(&path).unwrap().trim(), expected);
}

#[test]
fn locks_hold_between_clients_and_waiter_can_be_killed() {
    let Some(mut world) = world(Way::Calls, &[]) else { return };
    let (mut first, second) = (world.mount(&[]), world.mount(&[]));
    let held = File::create(first.join("lock")).unwrap();
    rustix::fs::flock(&held, FlockOperation::LockExclusive).unwrap();
    let other = File::open(second.join("lock")).unwrap();
    assert_eq!(rustix::fs::flock(&other, FlockOperation::NonBlockingLockShared), Err(Errno::AGAIN));
    // A process that waits for the lock ends when it is killed.
    let mut waiter = Command::new("flock").arg(second.join("lock")).arg("true").spawn().unwrap();
    std::thread::sleep(std::time::Duration::from_millis(300));
    assert!(waiter.try_wait().unwrap().is_none(), "the lock is not held");
    waiter.kill().unwrap();
    eventually("a process that waits for a lock could not be killed", || waiter.try_wait().unwrap().is_some());
    // A waiting process gets the lock when its holder's client dies.
    let mut waiter = Command::new("flock").arg(second.join("lock")).arg("true").spawn().unwrap();
    first.kill();
    eventually("the lock of a dead client was not given up", || waiter.try_wait().unwrap().is_some());
    assert!(waiter.wait().unwrap().success());
    // A lock that a restarted server does not have is not taken for held.
    rustix::fs::flock(&other, FlockOperation::LockShared).unwrap();
    world.kill_server();
    world.start();
    assert_eq!(code((&other).read(&mut [0; 8])), Errno::IO.raw_os_error());
    eventually("other open files go on", || fs::read(second.join("lock")).is_ok());
}

#[test]
fn read_only_export_refuses_every_change() {
    let Some(world) = world(Way::Calls, &["--read-only"]) else { return };
    fs::write(world.export().join("file"), "text").unwrap();
    let mounted = world.mount(&[]);
    assert_eq!(fs::read_to_string(mounted.join("file")).unwrap(), "text");
    let read_only = Errno::ROFS.raw_os_error();
    assert_eq!(code(fs::write(mounted.join("file"), "other")), read_only);
    assert_eq!(code(fs::remove_file(mounted.join("file"))), read_only);
}

#[test]
fn request_keeps_its_user_and_root_is_squashed() {
    let Some(world) = world(Way::Calls, &["--squash", "root"]) else { return };
    fs::set_permissions(world.export(), fs::Permissions::from_mode(0o1777)).unwrap();
    fs::write(world.export().join("secret"), "of root").unwrap();
    fs::set_permissions(world.export().join("secret"), fs::Permissions::from_mode(0o600)).unwrap();
    let mounted = world.mount(&["--allow-other"]);
    fs::set_permissions(mounted.path().parent().unwrap(), fs::metadata("/tmp").unwrap().permissions()).unwrap();
    assert_eq!(code(fs::read(mounted.join("secret"))), Errno::ACCESS.raw_os_error());
    fs::write(mounted.join("of-nobody"), "text").unwrap();
    assert_eq!(fs::metadata(world.export().join("of-nobody")).unwrap().uid(), 65534);
    let touch = |name: &str| {
        use std::os::unix::process::CommandExt;
        Command::new("touch").arg(mounted.join(name)).uid(1234).gid(4321).status().unwrap().success()
    };
    assert!(touch("of-a-user"));
    let found = fs::metadata(world.export().join("of-a-user")).unwrap();
    assert_eq!((found.uid(), found.gid()), (1234, 4321));
}

#[test]
fn mount_of_ordinary_user_ends_at_first_signal() {
    // A user that exists: `fusermount3` looks for the name.
    const NOBODY: u32 = 65534;
    let Some(world) = world(Way::Tcp, &[]) else { return };
    let mounted = world.mount_as(NOBODY);
    let path = mounted.path().to_owned();
    assert!(mounted.end());
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
    assert!(!mounts.contains(path.to_str().unwrap()), "{mounts}");
}

/// Unmounts a file system, also when the test fails.
struct Unmount<'a>(&'a Path);
impl Drop for Unmount<'_> {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(self.0, rustix::mount::UnmountFlags::DETACH);
    }
}

#[test]
fn full_file_system_is_reported_to_the_writer() {
    let Some(world) = world(Way::Calls, &[]) else { return };
    let small = world.export().join("small");
    fs::create_dir(&small).unwrap();
    // The export ends where another file system is mounted, so a file system is exported here that is full after 1 MiB.
    rustix::mount::mount("none", &small, "tmpfs", rustix::mount::MountFlags::empty(), Some(c"size=1M")).unwrap();
    let _unmount = Unmount(&small);
    let outer = world.mount(&[]);
    assert_eq!(code(fs::read_dir(outer.join("small"))), Errno::XDEV.raw_os_error());
    let export = partywall_fs::export::Export::open(&small, Default::default()).unwrap();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let options = partywall_fs::remote::RemoteOptions::default();
    std::thread::spawn(move || partywall_fs::serve::serve_tcp(&export, &listener));
    fs::set_permissions(&small, fs::Permissions::from_mode(0o777)).unwrap();
    let remote =
        partywall_fs::remote::Remote::connect(partywall_fs::remote::ServerAddress::Tcp(address), options).unwrap();
    let name = partywall_fs::wire::EntryName::new(b"file").unwrap();
    let flags = OFlags::RDWR.bits();
    let handle = remote.create((0, 0), 0, 1, name, 0o600, flags).unwrap().handle;
    let data = vec![7; 700 << 10];
    assert_eq!(remote.write((0, 0), 0, handle, 0, &data), Ok(700 << 10));
    let rest = remote.write((0, 0), 0, handle, 700 << 10, &data).unwrap();
    assert!(rest < 700 << 10, "all of it was written");
    assert_eq!(remote.write((0, 0), 0, handle, 2 << 20, &data), Err(Errno::NOSPC));
}

/// A client without a mount, whose caller keeps names and attributes, and the exported directory.
fn caching_client() -> Option<(Remote, tempfile::TempDir)> {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: this test exports to nobody, which takes root");
        return None;
    }
    let folder = tempfile::tempdir().unwrap();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let export = partywall_fs::export::Export::open(folder.path(), Default::default()).unwrap();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || partywall_fs::serve::serve_tcp(&export, &listener));
    Some((connect_caching(address), folder))
}

fn connect_caching(address: std::net::SocketAddr) -> Remote {
    let mut options = RemoteOptions::default();
    options.cache = Duration::from_secs(3600);
    Remote::connect(ServerAddress::Tcp(address), options).unwrap()
}

/// Looks a name up as the kernel's thread 1 does.
fn look_up(remote: &Remote, name: &str) -> u64 {
    use partywall_fs::wire::{EntryName, FileRequest, ROOT};
    let request = remote.begin(1);
    let name = EntryName::new(name.as_bytes()).unwrap();
    let (node, found) = remote.entry((0, 0), ROOT, name, |parent| FileRequest::Lookup { parent, name }).unwrap();
    remote.send_attributes(node, Some((ROOT, name.bytes())), &found, request, drop);
    node
}

#[test]
fn open_of_file_that_is_replaced_twice_finds_a_file() {
    let Some((remote, folder)) = caching_client() else { return };
    let replace = |text: &str| {
        fs::write(folder.path().join("next"), text).unwrap();
        fs::rename(folder.path().join("next"), folder.path().join("file")).unwrap();
    };
    let open = |node| remote.open((0, 0), 1, node, OFlags::RDONLY.bits(), || ());
    let open_directory = |node| remote.open_directory((0, 0), 1, node);
    replace("one");
    let node = look_up(&remote, "file");
    replace("two");
    assert_eq!(open(node), Err(Errno::STALE), "the kernel looks the name up again");
    let node = look_up(&remote, "file");
    replace("three");
    // The kernel does not try a third time.
    let (handle, _) = open(node).unwrap();
    remote.release(handle, 0);
    let directory = |name: &str| folder.path().join(name);
    let replace_directory = || {
        fs::create_dir(directory("next")).unwrap();
        let _ = fs::remove_dir(directory("directory"));
        fs::rename(directory("next"), directory("directory")).unwrap();
    };
    replace_directory();
    let node = look_up(&remote, "directory");
    replace_directory();
    assert_eq!(open_directory(node), Err(Errno::STALE));
    let node = look_up(&remote, "directory");
    fs::rename(directory("directory"), directory("moved")).unwrap();
    remote.release(open_directory(node).unwrap(), 0);
}

#[test]
fn entry_without_room_in_a_listing_is_not_recorded() {
    let Some((remote, folder)) = caching_client() else { return };
    let path = folder.path().join("file");
    fs::write(&path, vec![1; 100]).unwrap();
    let node = look_up(&remote, "file");
    fs::write(&path, vec![1; 200]).unwrap();
    let root = partywall_fs::wire::ROOT;
    let handle = remote.open_directory((0, 0), 1, root).unwrap();
    let directory = partywall_fs::remote::ListedDirectory { node: root, handle, attributes_for: Some(remote.begin(1)) };
    let list = |has_room: bool| {
        let mut names = Vec::new();
        let end = |(), outcome: Result<(), Errno>| outcome.unwrap();
        let take = |(): &mut (), entry: &partywall_fs::wire::DirectoryEntry<'_>, _, _| {
            names.push(entry.name.to_vec());
            has_room
        };
        remote.read_directory((0, 0), directory, (0, 4096), (), take, end);
        names.len()
    };
    assert_eq!(list(false), 1, "there is no room for the first");
    let open =
        || remote.open((0, 0), 1, node, OFlags::RDONLY.bits(), || ()).map(|(handle, _)| remote.release(handle, 0));
    assert_eq!(open(), Err(Errno::STALE), "the kernel has the old size");
    let _ = open();
    assert_eq!(list(true), 3);
    assert_eq!(open(), Ok(()), "the kernel has the new size");
}

#[test]
fn file_replaced_while_server_was_gone_is_found_at_second_open() {
    let Some(mut world) = world(Way::Tcp, &[]) else { return };
    let remote = connect_caching(world.address());
    let path = world.export().to_owned();
    let replace = |text: &str| {
        fs::write(path.join("next"), text).unwrap();
        fs::rename(path.join("next"), path.join("file")).unwrap();
    };
    let open = |node| remote.open((0, 0), 1, node, OFlags::RDONLY.bits(), || ()).map(drop);
    replace("one");
    let node = look_up(&remote, "file");
    world.kill_server();
    replace("two");
    world.start();
    // The new server does not know the node, and the name is that of another file.
    assert_eq!(open(node), Err(Errno::STALE));
    let node = look_up(&remote, "file");
    replace("three");
    assert_eq!(open(node), Ok(()), "the kernel does not try a third time");
}

#[test]
fn failed_write_leaves_the_recorded_size() {
    let Some((remote, folder)) = caching_client() else { return };
    let path = folder.path().join("file");
    fs::write(&path, vec![1; 100]).unwrap();
    let node = look_up(&remote, "file");
    let open = || remote.open((0, 0), 1, node, OFlags::RDONLY.bits(), || ());
    let (handle, _) = open().unwrap();
    assert_eq!(remote.write((0, 0), 1, handle, 100, &[2; 100]), Err(Errno::BADF));
    // Another client makes the file as long as the write would have.
    fs::write(&path, vec![3; 200]).unwrap();
    assert_eq!(open(), Err(Errno::STALE), "the kernel has the old size");
}

#[test]
fn running_program_is_not_truncated_by_open_for_reading() {
    let Some(world) = world(Way::Calls, &[]) else { return };
    let mounted = world.mount(&[]);
    let program = mounted.join("sleep");
    fs::copy("/bin/sleep", &program).unwrap();
    let truncate = || rustix::fs::open(&program, OFlags::RDONLY | OFlags::TRUNC, Mode::empty()).map(drop);
    let len = || fs::metadata(&program).unwrap().len();
    let mut running = Command::new(&program).arg("1000").spawn().unwrap();
    let refused = truncate();
    let left = len();
    running.kill().unwrap();
    running.wait().unwrap();
    assert_eq!(refused, Err(Errno::TXTBSY));
    assert_ne!(left, 0, "refused, and truncated all the same");
    assert_eq!((truncate(), len()), (Ok(()), 0), "it runs no more");
    assert!(mounted.end());
}
