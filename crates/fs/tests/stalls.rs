//! Servers that are slow, and those that go without coming back.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::expect_used,
    reason = "a test fails by panicking, in its helpers too"
)]

mod common;

use common::{Way, eventually, world};
use partywall_fs::export::{Export, ExportOptions, Squash};
use partywall_fs::frame::{ReplyHeader, RequestHeader};
use partywall_fs::remote::{Remote, RemoteOptions, ServerAddress};
use partywall_fs::serve::serve_tcp;
use partywall_fs::wire::{EntryName, FileLock, FileRequest, LARGEST_DATA, ROOT};
use rustix::fs::OFlags;
use rustix::io::Errno;
use std::fs;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

/// The limit of a client whose next request, after one that times out, must succeed in the same session. A loaded machine may stop the server
/// for seconds.
const TIMEOUT: Duration = Duration::from_secs(10);

/// A server that answers all but writes, and nothing at all after its first connections.
struct SlowServer {
    export: Arc<Export>,
    /// Connections that are served.
    answered: usize,
    writes: AtomicUsize,
    streams: Mutex<Vec<TcpStream>>,
}

impl SlowServer {
    fn start(export: Arc<Export>, answered: usize) -> (Arc<Self>, SocketAddr) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let server = Arc::new(Self { export, answered, writes: AtomicUsize::new(0), streams: Mutex::default() });
        let accepting = Arc::clone(&server);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let stream = stream.unwrap();
                let mut streams = accepting.streams.lock().unwrap();
                if streams.len() < accepting.answered {
                    let (server, stream) = (Arc::clone(&accepting), stream.try_clone().unwrap());
                    std::thread::spawn(move || server.serve(&stream));
                }
                streams.push(stream);
            }
        });
        (server, address)
    }

    fn serve(&self, mut stream: &TcpStream) {
        let session = self.export.begin(None).unwrap();
        let mut body = Vec::new();
        while let Ok(Some(header)) = RequestHeader::read(&mut stream, &mut body) {
            if header.number == FileRequest::WRITE {
                self.writes.fetch_add(1, Ordering::AcqRel);
                continue;
            }
            let outcome = match FileRequest::read(header.number, &body).unwrap() {
                FileRequest::Hello { .. } => session.welcome(),
                request => session.execute(header.uid, header.gid, request),
            };
            let (errno, reply) = outcome.map_or_else(|e| (e.raw_os_error(), Vec::new()), |reply| (0, reply));
            let header = ReplyHeader { len: reply.len() as u32, id: header.id, errno };
            stream.write_all(&[&header.bytes()[..], &reply].concat()).unwrap();
        }
    }

    fn connections(&self) -> usize {
        self.streams.lock().unwrap().len()
    }

    fn hang_up(&self) {
        for stream in self.streams.lock().unwrap().iter() {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

fn export(folder: &tempfile::TempDir) -> Arc<Export> {
    let mut options = ExportOptions::default();
    options.squash = Squash::None;
    Export::open(folder.path(), options).unwrap()
}

#[test]
fn write_that_a_slow_server_may_still_execute_is_not_repeated() {
    let folder = tempfile::tempdir().unwrap();
    let (server, address) = SlowServer::start(export(&folder), usize::MAX);
    let mut options = RemoteOptions::default();
    options.timeout = Duration::from_secs(5);
    let remote = Remote::connect(ServerAddress::Tcp(address), options).unwrap();
    let name = EntryName::new(b"file").unwrap();
    let handle = remote.create((0, 0), 0, ROOT, name, 0o600, OFlags::RDWR.bits()).unwrap().handle;
    assert_eq!(remote.write((0, 0), 0, handle, 0, b"text"), Err(Errno::IO));
    assert_eq!(server.writes.load(Ordering::Acquire), 1, "a write was repeated");
    server.hang_up();
}

/// Between a client and a server: holds back the first write, and resets the client's connection then. Later connections pass.
struct HoldingProxy {
    address: SocketAddr,
    /// The write, and the connection to the server that it belongs to.
    held: mpsc::Receiver<(Vec<u8>, TcpStream)>,
}

impl HoldingProxy {
    fn start(server: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (holds, held) = mpsc::channel();
        std::thread::spawn(move || {
            let mut holds = Some(holds);
            for client in listener.incoming() {
                let (client, server) = (client.unwrap(), TcpStream::connect(server).unwrap());
                let (mut from, mut to) = (server.try_clone().unwrap(), client.try_clone().unwrap());
                std::thread::spawn(move || std::io::copy(&mut from, &mut to));
                let holds = holds.take();
                std::thread::spawn(move || Self::pass(client, server, holds));
            }
        });
        Self { address, held }
    }

    fn pass(mut client: TcpStream, mut server: TcpStream, holds: Option<mpsc::Sender<(Vec<u8>, TcpStream)>>) {
        let mut body = Vec::new();
        while let Ok(Some(header)) = RequestHeader::read(&mut client, &mut body) {
            let frame = [&header.bytes()[..], &body].concat();
            match &holds {
                Some(holds) if header.number == FileRequest::WRITE => {
                    holds.send((frame, server)).unwrap();
                    client.shutdown(Shutdown::Both).unwrap();
                    return;
                }
                _ => server.write_all(&frame).unwrap(),
            }
        }
    }
}

#[test]
fn late_write_of_reset_connection_is_not_executed() {
    let folder = tempfile::tempdir().unwrap();
    let export = export(&folder);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let proxy = HoldingProxy::start(listener.local_addr().unwrap());
    std::thread::spawn(move || serve_tcp(&export, &listener));
    let remote = Remote::connect(ServerAddress::Tcp(proxy.address), RemoteOptions::default()).unwrap();
    let name = EntryName::new(b"file").unwrap();
    let handle = remote.create((0, 0), 0, ROOT, name, 0o600, OFlags::RDWR.bits()).unwrap().handle;
    assert_eq!(remote.write((0, 0), 0, handle, 0, b"first"), Ok(5));
    let (write, mut server) = proxy.held.try_recv().expect("the first write was to be held back");
    assert_eq!(remote.write((0, 0), 0, handle, 0, b"later"), Ok(5));
    // The server has ended the old session. Its side of the connection may be closed already, so the write may fail.
    let _ = server.write_all(&write);
    let _ = server.shutdown(Shutdown::Write);
    let _ = server.read_to_end(&mut Vec::new());
    assert_eq!(fs::read(folder.path().join("file")).unwrap(), b"later");
}

#[test]
fn append_of_reset_connection_is_not_repeated() {
    let folder = tempfile::tempdir().unwrap();
    let export = export(&folder);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let proxy = HoldingProxy::start(listener.local_addr().unwrap());
    std::thread::spawn(move || serve_tcp(&export, &listener));
    let remote = Remote::connect(ServerAddress::Tcp(proxy.address), RemoteOptions::default()).unwrap();
    let name = EntryName::new(b"file").unwrap();
    let handle = remote.create((0, 0), 0, ROOT, name, 0o600, OFlags::RDWR.bits()).unwrap().handle;
    assert_eq!(remote.append((0, 0), 0, handle, 0, b"first"), Err(Errno::IO));
    assert_eq!(remote.append((0, 0), 0, handle, 0, b"later"), Ok(5));
    assert_eq!(fs::read(folder.path().join("file")).unwrap(), b"later");
}

/// The server stands still for longer than a request may take.
fn sync_alone_times_out(way: Way) {
    let Some(world) = world(way, &[]) else { return };
    let mut options = RemoteOptions::default();
    options.timeout = TIMEOUT;
    let remote = Remote::connect(world.server_address(), options).unwrap();
    let name = EntryName::new(b"file").unwrap();
    let handle = remote.create((0, 0), 0, ROOT, name, 0o600, OFlags::RDWR.bits()).unwrap().handle;
    // Another session would not have this lock, so that the file would fail.
    remote.set_lock(handle, 1, FileLock { start: 0, end: 9, kind: 1 }).unwrap();
    world.stop_server();
    let sync = remote.on_file((0, 0), handle, |handle| FileRequest::Sync { handle, data_only: 0 });
    world.continue_server();
    assert_eq!(sync.map(drop), Err(Errno::IO));
    // The late reply comes before these.
    for text in [b"text", b"TEXT"] {
        assert_eq!(remote.write((0, 0), 0, handle, 0, text), Ok(4));
        let read = remote.on_file((0, 0), handle, |handle| FileRequest::Read { handle, offset: 0, len: 9 });
        assert_eq!(read.and_then(|data| data.into_vec()), Ok(text.to_vec()));
    }
}

#[test]
fn sync_that_times_out_fails_alone_by_calls() {
    sync_alone_times_out(Way::Calls);
}

#[test]
fn sync_that_times_out_fails_alone_by_a_stream() {
    sync_alone_times_out(Way::Stream);
}

#[test]
fn sync_that_times_out_fails_alone_by_tcp() {
    sync_alone_times_out(Way::Tcp);
}

fn read(remote: &Remote, handle: u64, len: u32) -> Result<Vec<u8>, Errno> {
    let read = |handle| FileRequest::Read { handle, offset: 0, len };
    remote.on_file((0, 0), handle, read).and_then(|data| data.into_vec())
}

/// A server that holds back its first reply of file data until it is released, and meanwhile executes nothing. The reply does not fit in the
/// buffers of the connection.
struct HeldRead {
    remote: Remote,
    handle: u64,
    release: mpsc::Sender<()>,
    /// The outcome of writing the held reply to the stream.
    written: mpsc::Receiver<std::io::Result<()>>,
    /// The server's side of the connection.
    stream: TcpStream,
}

impl HeldRead {
    fn start(folder: &tempfile::TempDir) -> Self {
        let export = export(folder);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let ((release, released), (writes, written)) = (mpsc::channel(), mpsc::channel());
        let (accepts, accepted) = mpsc::channel();
        std::thread::spawn(move || {
            let mut stream = listener.accept().unwrap().0;
            // No second connection is accepted: a client that loses this one fails.
            drop(listener);
            rustix::net::sockopt::set_socket_send_buffer_size(&stream, 64 << 10).unwrap();
            accepts.send(stream.try_clone().unwrap()).unwrap();
            let (session, mut body, mut is_first) = (export.begin(None).unwrap(), Vec::new(), true);
            while let Ok(Some(header)) = RequestHeader::read(&mut stream, &mut body) {
                let request = FileRequest::read(header.number, &body).unwrap();
                let is_held = matches!(request, FileRequest::Read { .. }) && std::mem::take(&mut is_first);
                let reply = match request {
                    FileRequest::Hello { .. } => session.welcome(),
                    request => session.execute(header.uid, header.gid, request),
                };
                let reply = reply.unwrap();
                let header = ReplyHeader { len: reply.len() as u32, id: header.id, errno: 0 };
                let frame = [&header.bytes()[..], &reply].concat();
                if is_held {
                    released.recv().unwrap();
                    writes.send(stream.write_all(&frame)).unwrap();
                } else {
                    stream.write_all(&frame).unwrap();
                }
            }
        });
        let mut options = RemoteOptions::default();
        options.timeout = TIMEOUT;
        let remote = Remote::connect(ServerAddress::Tcp(address), options).unwrap();
        let name = EntryName::new(b"file").unwrap();
        let handle = remote.create((0, 0), 0, ROOT, name, 0o600, OFlags::RDWR.bits()).unwrap().handle;
        fs::write(folder.path().join("file"), vec![b'a'; LARGEST_DATA as usize]).unwrap();
        let stream = accepted.recv().unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        Self { remote, handle, release, written, stream }
    }

    fn read(&self, len: u32) -> Result<Vec<u8>, Errno> {
        read(&self.remote, self.handle, len)
    }

    fn assert_held_reply_is_taken(&self) {
        let outcome = self.written.recv_timeout(Duration::from_secs(60)).expect("nobody reads the late reply");
        assert!(outcome.is_ok(), "{outcome:?}");
    }
}

#[test]
fn late_reply_is_read_though_no_request_follows() {
    let folder = tempfile::tempdir().unwrap();
    let held = HeldRead::start(&folder);
    assert_eq!(held.read(LARGEST_DATA), Err(Errno::IO));
    held.release.send(()).unwrap();
    held.assert_held_reply_is_taken();
    assert_eq!(held.read(4).as_deref(), Ok(&b"aaaa"[..]));
}

#[test]
fn request_sent_before_a_late_reply_gets_its_own_reply() {
    let folder = tempfile::tempdir().unwrap();
    let held = HeldRead::start(&folder);
    assert_eq!(held.read(LARGEST_DATA), Err(Errno::IO));
    let (remote, handle) = (&held.remote, held.handle);
    std::thread::scope(|scope| {
        let ask = |len| scope.spawn(move || read(remote, handle, len));
        let readers: Vec<_> = (1..=8).map(|len| (len, ask(len))).collect();
        held.release.send(()).unwrap();
        held.assert_held_reply_is_taken();
        for (len, reader) in readers {
            assert_eq!(reader.join().unwrap(), Ok(vec![b'a'; len as usize]));
        }
    });
}

#[test]
fn dropped_client_does_not_wait_for_a_late_reply() {
    let folder = tempfile::tempdir().unwrap();
    let held = HeldRead::start(&folder);
    assert_eq!(held.read(LARGEST_DATA), Err(Errno::IO));
    drop(held.remote);
    // The server still holds the reply back, and reads nothing.
    let read = (&held.stream).read(&mut [0]);
    assert!(matches!(read, Ok(0)), "the connection stays open: {read:?}");
}

#[test]
fn requests_beside_stalled_reconnect_fail_after_grace() {
    let folder = tempfile::tempdir().unwrap();
    let (server, address) = SlowServer::start(export(&folder), 1);
    let mut options = RemoteOptions::default();
    options.timeout = Duration::from_secs(120);
    options.grace = Duration::from_millis(300);
    let remote = Arc::new(Remote::connect(ServerAddress::Tcp(address), options).unwrap());
    server.hang_up();
    let (ended, outcomes) = mpsc::channel();
    let ask = || {
        let (remote, ended) = (Arc::clone(&remote), ended.clone());
        std::thread::spawn(move || {
            let make = |node, handle| FileRequest::GetAttributes { node, handle };
            ended.send(remote.attributes((0, 0), ROOT, 0, make).map(|_| ())).unwrap();
        })
    };
    let first = ask();
    eventually("nobody connects again", || server.connections() == 2);
    let second = ask();
    let outcome = outcomes.recv_timeout(Duration::from_secs(60)).expect("a request waits for another one's connection");
    assert_eq!(outcome, Err(Errno::IO));
    assert!(!first.is_finished(), "the first request was to wait");
    remote.forget(ROOT, 0);
    // The first one's attempt fails, too.
    server.hang_up();
    assert_eq!(outcomes.recv_timeout(Duration::from_secs(60)).unwrap(), Err(Errno::IO));
    first.join().unwrap();
    second.join().unwrap();
}

#[test]
fn server_without_a_broker_uses_no_processor_time() {
    let Some(mut world) = world(Way::Calls, &[]) else { return };
    let used = |pid: u32| -> u64 {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
        fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
    };
    world.end_broker();
    std::thread::sleep(Duration::from_millis(300));
    let before = used(world.server_pid());
    std::thread::sleep(Duration::from_millis(1500));
    let ticks = used(world.server_pid()) - before;
    assert!(ticks < 30, "{ticks} ticks of 10 ms in 1.5 s");
}

#[test]
fn client_that_vanishes_without_closing_loses_its_session() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: only root can end a connection without telling the peer");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let export = export(&folder);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let served = Arc::clone(&export);
    std::thread::spawn(move || serve_tcp(&served, &listener));
    let hello = FileRequest::Hello { version: partywall_fs::wire::VERSION, previous: 0 };
    let mut body = Vec::new();
    hello.put(&mut body);
    let header = RequestHeader { len: body.len() as u32, id: 1, number: hello.number(), uid: 0, gid: 0 };
    stream.write_all(&[&header.bytes()[..], &body].concat()).unwrap();
    let header = ReplyHeader::read(&mut stream, &mut body).unwrap().unwrap();
    assert_eq!((header.errno, export.sessions()), (0, 1));
    nix::sys::socket::setsockopt(&stream, nix::sys::socket::sockopt::TcpRepair, &1).unwrap();
    drop(stream);
    eventually("the session of a client that has gone stays", || export.sessions() == 0);
}
