//! A client whose caller keeps names and attributes, as the kernel does, but without a mount.

use crate::common::{Way, world};
use partywall_fs::remote::{Remote, RemoteOptions, ServerAddress};
use rustix::fs::OFlags;
use rustix::io::Errno;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

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
