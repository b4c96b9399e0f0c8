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
use partywall_fs::wire::{EntryName, FileRequest, ROOT, VERSION};
use rustix::fs::OFlags;
use rustix::io::Errno;
use std::fs;
use std::io::Write;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

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
                FileRequest::Hello { .. } => session.welcome(VERSION),
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
    options.timeout = Duration::from_secs(2);
    let remote = Remote::connect(ServerAddress::Tcp(address), options).unwrap();
    let name = EntryName::new(b"file").unwrap();
    let (_, _, handle) = remote.create((0, 0), ROOT, name, 0o600, OFlags::RDWR.bits()).unwrap();
    let outcomes = std::thread::scope(|scope| {
        let writers = [1, 2].map(|count| {
            let writer = scope.spawn(|| remote.write((0, 0), handle, 0, b"text"));
            eventually("the server was not asked", || server.writes.load(Ordering::Acquire) >= count);
            writer
        });
        writers.map(|writer| writer.join().unwrap())
    });
    assert_eq!(outcomes, [Err(Errno::IO); 2]);
    assert_eq!(server.writes.load(Ordering::Acquire), 2, "a write was repeated");
    server.hang_up();
}

#[test]
fn one_request_connects_to_a_server_that_does_not_answer_and_the_others_fail_after_the_grace() {
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
