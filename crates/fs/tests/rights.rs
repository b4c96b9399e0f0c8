//! The users that a server's clients act as, and their rights.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::expect_used,
    reason = "a test fails by panicking, in its helpers too"
)]

use partywall::Domain;
use partywall_daemon::{Broker, Config};
use partywall_fs::export::{Export, ExportOptions};
use partywall_fs::remote::{CreatedFile, Remote, RemoteOptions, ServerAddress};
use partywall_fs::serve::ExportServer;
use partywall_fs::wire::{EntryName, FileLock, FileRequest, ROOT, change};
use rustix::fs::OFlags;
use rustix::io::Errno;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::PathBuf;

/// The kinds of lock, as `fcntl` has them.
const SHARED: i32 = 0;
const EXCLUSIVE: i32 = 1;

/// A broker with a socket for containers, and an export that is served in this process.
struct World {
    broker: Broker,
    folder: tempfile::TempDir,
    _domain: Domain,
    _server: ExportServer,
}

impl World {
    fn new(options: ExportOptions) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let data = folder.path().join("data");
        fs::create_dir(&data).unwrap();
        fs::set_permissions(&data, fs::Permissions::from_mode(0o1777)).unwrap();
        fs::create_dir(folder.path().join("containers")).unwrap();
        let uid = rustix::process::geteuid().as_raw();
        let policy = format!(
            "administrators = [{uid}]\nadministrators_in_containers = [{uid}]\n[[join]]\ndomain = '*'\nusers = [{uid}]\n[[connect]]\nfrom = '*'\nto = '*'\n"
        );
        let file = folder.path().join("policy.toml");
        fs::write(&file, policy).unwrap();
        let config = Config::new(folder.path().join("broker.sock")).policy_file(file);
        let broker = Broker::start(&config).unwrap();
        let domain = Domain::builder().name("files").broker(broker.path()).join().unwrap();
        let export = Export::open(&data, options).unwrap();
        let server = ExportServer::bind(&export, &domain, "data").unwrap();
        Self { broker, folder, _domain: domain, _server: server }
    }

    fn data(&self) -> PathBuf {
        self.folder.path().join("data")
    }

    /// A client, which comes by the socket for containers or by the other one.
    fn client(&self, name: &str, in_container: bool) -> Result<Remote, partywall_fs::FsError> {
        let containers = self.folder.path().join("containers/broker.sock");
        let socket = if in_container { &containers } else { self.broker.path() };
        let domain = Domain::builder().name(name).broker(socket).join()?;
        let address = ServerAddress::Service { domain, target: "files:data".into(), calls: true };
        Remote::connect(address, RemoteOptions::default())
    }
}

fn name(name: &str) -> EntryName<'_> {
    EntryName::new(name.as_bytes()).unwrap()
}

fn is_root() -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        eprintln!("SKIPPED: only a server of root acts as other users");
    }
    is_root
}

#[test]
fn container_root_cannot_act_as_other_users() {
    if !is_root() {
        return;
    }
    let world = World::new(ExportOptions::default());
    let secret = world.data().join("secret");
    fs::write(&secret, "of a user").unwrap();
    fs::set_permissions(&secret, fs::Permissions::from_mode(0o600)).unwrap();
    std::os::unix::fs::chown(&secret, Some(1234), Some(4321)).unwrap();
    let owner_after = |client: &Remote, file: &str| {
        let found = client.create((1234, 4321), 0, ROOT, name(file), 0o600, OFlags::RDWR.bits()).unwrap().attributes;
        let find = |parent| FileRequest::Lookup { parent, name: name("secret") };
        let (node, _) = client.entry((1234, 4321), ROOT, name("secret"), find).unwrap();
        (found.uid, client.open((1234, 4321), 1, node, 0, || ()).map(|_| ()))
    };
    // Root of the host may name the user that it asks for.
    assert_eq!(owner_after(&world.client("host", false).unwrap(), "a"), (1234, Ok(())));
    assert_eq!(owner_after(&world.client("container", true).unwrap(), "b"), (65534, Err(Errno::ACCESS)));
}

#[test]
fn one_user_has_a_quarter_of_the_sessions() {
    let mut options = ExportOptions::default();
    options.sessions = 8;
    let world = World::new(options);
    let kept = ["a", "b"].map(|name| world.client(name, false).unwrap());
    let refused = world.client("c", false).unwrap_err();
    assert!(format!("{refused:?}").contains(&Errno::USERS.raw_os_error().to_string()), "{refused:?}");
    world.client("container", true).expect("others have their own share");
    drop(kept);
}

#[test]
fn modes_from_squashed_client_set_no_id_bits() {
    let folder = tempfile::tempdir().unwrap();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o1777)).unwrap();
    let export = Export::open(folder.path(), ExportOptions::default()).unwrap();
    let session = export.begin(None).unwrap();
    // Requests change the ids of the thread that executes them.
    std::thread::scope(|scope| {
        let requests = scope.spawn(|| {
            let run = |request| session.execute(0, 0, request).unwrap();
            run(FileRequest::Create { parent: ROOT, name: name("made"), mode: 0o6755, flags: OFlags::RDWR.bits() });
            run(FileRequest::MakeNode { parent: ROOT, name: name("node"), mode: 0o106_755 });
            run(FileRequest::MakeDirectory { parent: ROOT, name: name("directory"), mode: 0o6755 });
            let plain = FileRequest::Create { parent: ROOT, name: name("changed"), mode: 0o600, flags: 2 };
            let entry: partywall_fs::wire::FileEntry =
                partywall_fs::wire::FileField::take(&mut &run(plain)[..]).unwrap();
            run(FileRequest::SetAttributes {
                node: entry.node,
                handle: 0,
                mask: change::MODE,
                mode: 0o6755,
                uid: 0,
                gid: 0,
                size: 0,
                accessed: 0,
                accessed_nanos: 0,
                modified: 0,
                modified_nanos: 0,
            });
        });
        requests.join().unwrap();
    });
    for name in ["made", "node", "directory", "changed"] {
        let mode = fs::metadata(folder.path().join(name)).unwrap().mode();
        assert_eq!(mode & 0o7777, 0o755, "{name}");
    }
}

#[test]
fn lock_requires_access_mode_of_its_open_file() {
    let world = World::new(ExportOptions::default());
    let client = world.client("client", false).unwrap();
    let who = (1234, 1234);
    let CreatedFile { node, handle, .. } =
        client.create(who, 0, ROOT, name("file"), 0o600, OFlags::RDWR.bits()).unwrap();
    let range = |kind| FileLock { start: 0, end: 10, kind };
    // The kernel does not say whose request a lock is.
    assert_eq!(client.set_lock(handle, 1, range(EXCLUSIVE)), Ok(()));
    let (reader, _) = client.open(who, 1, node, OFlags::RDONLY.bits(), || ()).unwrap();
    assert_eq!(client.set_lock(reader, 2, range(SHARED)), Err(Errno::AGAIN), "the first lock is held");
    assert_eq!(client.set_lock(reader, 2, range(EXCLUSIVE)), Err(Errno::BADF));
    // One owner, by two open files.
    let far = |kind| FileLock { start: 100, end: 110, kind };
    assert_eq!(client.set_lock(reader, 3, far(SHARED)), Ok(()));
    assert_eq!(client.set_lock(handle, 3, far(EXCLUSIVE)), Ok(()));
}

#[test]
fn read_only_export_gives_no_exclusive_lock() {
    let mut options = ExportOptions::default();
    options.read_only = true;
    let world = World::new(options);
    fs::write(world.data().join("file"), "text").unwrap();
    fs::set_permissions(world.data().join("file"), fs::Permissions::from_mode(0o666)).unwrap();
    let client = world.client("client", false).unwrap();
    let find = |parent| FileRequest::Lookup { parent, name: name("file") };
    let (node, _) = client.entry((1234, 1234), ROOT, name("file"), find).unwrap();
    let (handle, _) = client.open((1234, 1234), 1, node, 0, || ()).unwrap();
    let range = |kind| FileLock { start: 0, end: 10, kind };
    assert_eq!(client.set_lock(handle, 1, range(SHARED)), Ok(()));
    assert_eq!(client.set_lock(handle, 1, range(EXCLUSIVE)), Err(Errno::BADF));
}

#[test]
fn locks_survive_the_drop_of_their_node() {
    let folder = tempfile::tempdir().unwrap();
    let mut options = ExportOptions::default();
    options.squash = partywall_fs::export::Squash::None;
    options.limits.nodes = 4;
    let export = Export::open(folder.path(), options).unwrap();
    let session = export.begin(None).unwrap();
    let find = |file| {
        let request = FileRequest::Lookup { parent: ROOT, name: name(file) };
        let found = session.execute(0, 0, request).unwrap();
        partywall_fs::wire::value_of::<partywall_fs::wire::FileEntry>(&found).unwrap().node
    };
    let open = |node| {
        let request = FileRequest::Open { node, flags: OFlags::RDWR.bits() };
        let opened = session.execute(0, 0, request).unwrap();
        partywall_fs::wire::value_of::<partywall_fs::wire::OpenedFile>(&opened).unwrap().handle
    };
    let take = |handle, owner| {
        let request = FileRequest::SetLock { handle, owner, start: 0, end: 9, kind: EXCLUSIVE };
        session.execute(0, 0, request).map(drop)
    };
    for file in ["locked", "a", "b", "c", "d", "e", "f"] {
        fs::write(folder.path().join(file), "text").unwrap();
    }
    let node = find("locked");
    let (first, second) = (open(node), open(node));
    assert_eq!(take(first, 1), Ok(()));
    for file in ["a", "b", "c", "d", "e", "f"] {
        find(file);
    }
    let again = find("locked");
    assert_ne!(again, node, "the node was to be dropped");
    // The owner is known by each open file, and its locks are released by each.
    let third = open(again);
    assert_eq!((take(third, 1), take(third, 2)), (Ok(()), Err(Errno::AGAIN)));
    session.execute(0, 0, FileRequest::Flush { handle: third, owner: 1 }).unwrap();
    assert_eq!(take(third, 2), Ok(()));
    // They stay until the last open file is closed.
    session.execute(0, 0, FileRequest::Release { handle: third, owner: 0 }).unwrap();
    session.execute(0, 0, FileRequest::Release { handle: first, owner: 0 }).unwrap();
    assert_eq!((take(second, 1), session.counts().2), (Err(Errno::AGAIN), 2));
    session.execute(0, 0, FileRequest::Release { handle: second, owner: 0 }).unwrap();
    assert_eq!(session.counts().2, 0);
}
