//! Single operations have the results that they have in a local directory: errors, links, attributes, holes, and a full file system.

use super::code;
use crate::common::{Way, copy_program, world};
use rustix::fs::{AtFlags, CWD, FallocateFlags, Mode, OFlags, RenameFlags, SeekFrom};
use rustix::io::Errno;
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::Command;

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

#[test]
fn running_program_is_not_truncated_by_open_for_reading() {
    let Some(world) = world(Way::Calls, &[]) else { return };
    let mounted = world.mount(&[]);
    let program = mounted.join("sleep");
    copy_program("/bin/sleep".as_ref(), &program);
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
