//! A server whose disk is slow: requests that wait for it delay no others of the same client.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::expect_used,
    reason = "a test fails by panicking, in its helpers too"
)]

mod common;

use common::held_disk::{HeldDisk, LENGTH};
use common::{eventually, mount_tcp};
use partywall::Domain;
use partywall_daemon::Broker;
use partywall_fs::export::{Export, ExportOptions, Squash};
use partywall_fs::frame::{ReplyHeader, RequestHeader};
use partywall_fs::remote::{Remote, RemoteOptions, ServerAddress};
use partywall_fs::serve::{ExportServer, serve_tcp};
use partywall_fs::wire::{EntryName, FileEntry, FileField, FileLock, FileRequest, ROOT, VERSION};
use rustix::fs::OFlags;
use rustix::io::Errno;
use std::fs::{self, File};
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

/// Whose requests the tests make.
const USER: (u32, u32) = (0, 0);
/// The longest that a request may take that is not held. Only a guard against hanging.
const GUARD: Duration = Duration::from_secs(20);

/// What a client without a mount needs.
struct SlowExport {
    disk: HeldDisk,
    export: Arc<Export>,
    address: ServerAddress,
    _server: Option<(ExportServer, Broker)>,
}

impl SlowExport {
    fn export() -> Option<(HeldDisk, Arc<Export>)> {
        let disk = HeldDisk::mount()?;
        let mut options = ExportOptions::default();
        options.squash = Squash::None;
        options.has_calls = true;
        let export = Export::open(disk.path(), options).unwrap();
        Some((disk, export))
    }

    fn by_tcp() -> Option<Self> {
        let (disk, export) = Self::export()?;
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = ServerAddress::Tcp(listener.local_addr().unwrap());
        let served = Arc::clone(&export);
        std::thread::spawn(move || serve_tcp(&served, &listener));
        Some(Self { disk, export, address, _server: None })
    }

    fn by_library(calls: bool) -> Option<Self> {
        let (disk, export) = Self::export()?;
        let broker = Broker::embedded().unwrap();
        let join = |name: &str| Domain::builder().name(name).broker(broker.path()).join().unwrap();
        let server = ExportServer::bind(&export, &join("files"), "data").unwrap();
        let address = ServerAddress::Service { domain: join("client"), target: "files:data".into(), calls };
        Some(Self { disk, export, address, _server: Some((server, broker)) })
    }

    fn connect(&self) -> Remote {
        let mut options = RemoteOptions::default();
        options.timeout = GUARD;
        Remote::connect(self.address.clone(), options).unwrap()
    }
}

fn open(remote: &Remote, name: &str) -> u64 {
    let name = EntryName::new(name.as_bytes()).unwrap();
    let (node, _) = remote.entry(USER, ROOT, name, |parent| FileRequest::Lookup { parent, name }).unwrap();
    remote.open(USER, 1, node, OFlags::RDWR.bits(), || ()).unwrap().0
}

fn sync(remote: &Remote, handle: u64) -> Result<(), Errno> {
    remote.on_file(USER, handle, |handle| FileRequest::Sync { handle, data_only: 0 }).map(drop)
}

fn read(remote: &Remote, handle: u64) -> Result<Vec<u8>, Errno> {
    let make = |handle| FileRequest::Read { handle, offset: 0, len: 4 };
    remote.on_file(USER, handle, make).and_then(|data| data.into_vec())
}

const LOCK: FileLock = FileLock { start: 0, end: 9, kind: 1 };

/// Everything that does not need the disk of `held` is answered.
fn assert_others_are_answered(remote: &Remote, held: u64, free: u64) {
    assert_eq!(read(remote, free), Ok(b"aaaa".to_vec()));
    assert_eq!(remote.write(USER, 0, free, 0, b"text"), Ok(4));
    assert_eq!(sync(remote, free), Ok(()));
    assert_eq!(remote.set_lock(free, 1, LOCK), Ok(()));
    remote.flush(free, 1);
    // The same file, where nothing of the disk is needed.
    let attributes = |node, handle| FileRequest::GetAttributes { node, handle };
    assert!(remote.attributes(USER, ROOT, held, attributes).is_ok());
    let another = open(remote, "free");
    remote.release(another, 0);
}

fn waiting_requests_delay_no_others(served: Option<SlowExport>, ask: fn(&Remote, u64) -> bool) {
    const WAITING: usize = 3;
    let Some(served) = served else { return };
    let remote = served.connect();
    let free = open(&remote, "free");
    // The kernel lets only one program at a time sync a file of FUSE.
    let held: Vec<u64> = (0..WAITING).map(|file| open(&remote, &format!("held-{file}"))).collect();
    let done = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let (remote, done) = (&remote, &done);
        for (waiting, handle) in held.into_iter().enumerate() {
            scope.spawn(move || {
                assert!(ask(remote, handle));
                done.fetch_add(1, Ordering::AcqRel);
            });
            served.disk.wait_for(waiting + 1);
            assert_others_are_answered(remote, handle, free);
        }
        assert_eq!(done.load(Ordering::Acquire), 0, "the disk was to hold the requests");
        served.disk.release();
    });
    assert_eq!(done.load(Ordering::Acquire), WAITING);
    drop(remote);
    eventually("the session stays", || served.export.sessions() == 0);
}

fn sync_is_done(remote: &Remote, handle: u64) -> bool {
    sync(remote, handle).is_ok()
}

fn read_is_done(remote: &Remote, handle: u64) -> bool {
    read(remote, handle) == Ok(b"aaaa".to_vec())
}

fn write_is_done(remote: &Remote, handle: u64) -> bool {
    remote.write(USER, 0, handle, 0, b"text") == Ok(4)
}

#[test]
fn waiting_syncs_delay_no_others_by_calls() {
    waiting_requests_delay_no_others(SlowExport::by_library(true), sync_is_done);
}

#[test]
fn waiting_syncs_delay_no_others_by_a_stream() {
    waiting_requests_delay_no_others(SlowExport::by_library(false), sync_is_done);
}

#[test]
fn waiting_syncs_delay_no_others_by_tcp() {
    waiting_requests_delay_no_others(SlowExport::by_tcp(), sync_is_done);
}

#[test]
fn waiting_reads_delay_no_others_by_calls() {
    waiting_requests_delay_no_others(SlowExport::by_library(true), read_is_done);
}

#[test]
fn waiting_reads_delay_no_others_by_a_stream() {
    waiting_requests_delay_no_others(SlowExport::by_library(false), read_is_done);
}

#[test]
fn waiting_reads_delay_no_others_by_tcp() {
    waiting_requests_delay_no_others(SlowExport::by_tcp(), read_is_done);
}

#[test]
fn waiting_write_delays_no_others_by_tcp() {
    let Some(served) = SlowExport::by_tcp() else { return };
    let remote = served.connect();
    let (held, free) = (open(&remote, "held-0"), open(&remote, "free"));
    std::thread::scope(|scope| {
        let writing = scope.spawn(|| write_is_done(&remote, held));
        served.disk.wait_for(1);
        assert_others_are_answered(&remote, held, free);
        served.disk.release();
        assert!(writing.join().unwrap());
    });
}

/// Sends a request as a client of frames, and reads its reply.
fn ask(stream: &mut TcpStream, request: &FileRequest<'_>) -> Vec<u8> {
    send(stream, request);
    let mut body = Vec::new();
    assert_eq!(ReplyHeader::read(stream, &mut body).unwrap().unwrap().errno, 0);
    body
}

fn send(stream: &mut TcpStream, request: &FileRequest<'_>) {
    let mut body = Vec::new();
    request.put(&mut body);
    let header = RequestHeader { len: body.len() as u32, id: 1, number: request.number(), uid: 0, gid: 0 };
    stream.write_all(&[&header.bytes()[..], &body].concat()).unwrap();
}

#[test]
fn session_keeps_its_locks_until_its_waiting_request_ends() {
    let Some(served) = SlowExport::by_tcp() else { return };
    let ServerAddress::Tcp(address) = served.address else { panic!("another address") };
    let mut first = TcpStream::connect(address).unwrap();
    ask(&mut first, &FileRequest::Hello { version: VERSION, previous: 0 });
    let mut open_first = |name: &str| {
        let name = EntryName::new(name.as_bytes()).unwrap();
        let entry = ask(&mut first, &FileRequest::Lookup { parent: ROOT, name });
        let node = FileEntry::take(&mut &entry[..]).unwrap().node;
        u64::take(&mut &ask(&mut first, &FileRequest::Open { node, flags: OFlags::RDWR.bits() })[..]).unwrap()
    };
    let (held, free) = (open_first("held-0"), open_first("free"));
    let FileLock { start, end, kind } = LOCK;
    ask(&mut first, &FileRequest::SetLock { handle: free, owner: 1, start, end, kind });
    send(&mut first, &FileRequest::Sync { handle: held, data_only: 0 });
    served.disk.wait_for(1);
    drop(first);
    let other = served.connect();
    let other_free = open(&other, "free");
    // The server soon sees the end of the stream, but a test cannot see when.
    for _ in 0..10 {
        assert_eq!((other.set_lock(other_free, 1, LOCK), served.export.sessions()), (Err(Errno::AGAIN), 2));
        std::thread::sleep(Duration::from_millis(20));
    }
    served.disk.release();
    eventually("the session stays", || served.export.sessions() == 1);
    // It does not count any more before its locks are free.
    eventually("its lock stays", || other.set_lock(other_free, 1, LOCK) == Ok(()));
}

#[test]
fn waiting_sync_of_a_mount_occupies_none_of_its_threads() {
    let Some(served) = SlowExport::by_tcp() else { return };
    let ServerAddress::Tcp(address) = served.address else { panic!("another address") };
    let mounted = mount_tcp(address, &["--threads", "1"]);
    let held = File::options().write(true).open(mounted.join("held-0")).unwrap();
    let free = mounted.join("free");
    std::thread::scope(|scope| {
        let syncing = scope.spawn(|| held.sync_all());
        served.disk.wait_for(1);
        let (sends, read) = mpsc::channel();
        scope.spawn(move || sends.send(fs::read(free).map(|data| data.len())));
        let outcome = read.recv_timeout(GUARD);
        served.disk.release();
        assert_eq!(outcome.expect("the mount waits for the sync").unwrap(), LENGTH as usize);
        syncing.join().unwrap().unwrap();
    });
}

#[test]
fn call_given_up_holds_its_connection_until_it_has_ended() {
    let Some(served) = SlowExport::by_library(true) else { return };
    let remote = served.connect();
    let (held, free) = (open(&remote, "held-0"), open(&remote, "free"));
    assert_eq!(read(&remote, held), Err(Errno::IO));
    // The only connection of calls so far still executes the read.
    assert_eq!(read(&remote, free), Ok(b"aaaa".to_vec()));
    served.disk.release();
    assert_eq!(read(&remote, held), Ok(b"aaaa".to_vec()));
}
