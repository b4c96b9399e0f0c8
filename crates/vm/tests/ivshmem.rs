//! The server as its clients see it.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

use partywall_region::packet;
use partywall_vm::ivshmem::{IvshmemError, IvshmemOptions, IvshmemServer};
use rustix::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Longer is a hang.
const HANG: Duration = Duration::from_secs(120);

struct Client {
    socket: UnixStream,
    id: i64,
    memory: OwnedFd,
    /// Everything told after the memory.
    told: Vec<(i64, Option<OwnedFd>)>,
}

fn receive(socket: &UnixStream) -> Option<(i64, Option<OwnedFd>)> {
    let mut number = [0; 8];
    let mut received = packet::recv(socket.as_fd(), &mut number).unwrap();
    assert!(received.fds.len() <= 1 && !received.truncated);
    (received.len > 0).then(|| {
        assert_eq!(received.len, 8);
        (i64::from_le_bytes(number), received.fds.pop())
    })
}

impl Client {
    /// Connects, and reads up to its own events, of which there are `vectors`.
    fn connect(path: &Path, vectors: usize) -> Self {
        let socket = UnixStream::connect(path).unwrap();
        socket.set_read_timeout(Some(HANG)).unwrap();
        assert!(matches!(receive(&socket), Some((0, None))), "version");
        let Some((id, None)) = receive(&socket) else { panic!("no id") };
        let Some((-1, Some(memory))) = receive(&socket) else { panic!("no memory") };
        let mut this = Self { socket, id, memory, told: Vec::new() };
        while this.told.iter().filter(|(peer, _)| *peer == id).count() < vectors {
            this.hear();
        }
        this
    }

    fn hear(&mut self) {
        self.told.push(receive(&self.socket).expect("the server has hung up"));
    }

    fn events(&self, peer: i64) -> Vec<&OwnedFd> {
        self.told.iter().filter(|(id, _)| *id == peer).filter_map(|(_, fd)| fd.as_ref()).collect()
    }
}

fn server(options: IvshmemOptions) -> (tempfile::TempDir, PathBuf, IvshmemServer) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ivshmem");
    let server = IvshmemServer::start(&path, options).unwrap();
    (dir, path, server)
}

#[test]
fn ivshmem_clients_share_memory_ring_and_see_departures() {
    let (_dir, path, server) = server(IvshmemOptions { size: 1 << 20, vectors: 2, max_clients: 8 });
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    let mut a = Client::connect(&path, 2);
    let b = Client::connect(&path, 2);
    a.hear();
    a.hear();
    assert_eq!((a.id, b.id), (0, 1));
    assert_eq!((a.events(1).len(), b.events(0).len()), (2, 2));

    rustix::io::pwrite(&a.memory, b"hello", 4096).unwrap();
    for memory in [&b.memory, server.memory()] {
        let mut bytes = [0; 5];
        rustix::io::pread(memory, &mut bytes, 4096).unwrap();
        assert_eq!(&bytes, b"hello");
    }
    assert!(rustix::fs::ftruncate(&a.memory, 0).is_err(), "nobody can take it from the others");

    // a rings b's second vector.
    rustix::io::write(a.events(1)[1], &1u64.to_ne_bytes()).unwrap();
    let mut count = [0; 8];
    assert!(rustix::io::read(b.events(1)[0], &mut count).is_err(), "not the first");
    rustix::io::read(b.events(1)[1], &mut count).unwrap();
    assert_eq!(u64::from_ne_bytes(count), 1);

    // A client that connects after one has gone gets a new id.
    drop(b);
    a.hear();
    assert!(matches!(a.told.last(), Some((1, None))), "{:?}", a.told.last());
    assert_eq!(Client::connect(&path, 2).id, 2);

    // With the server gone, those who have each other keep each other.
    drop(server);
    assert!(!path.exists());
    rustix::io::write(a.events(0)[0], &1u64.to_ne_bytes()).unwrap();
}

#[test]
fn misbehaving_or_surplus_ivshmem_client_is_disconnected() {
    let (_dir, path, _server) = server(IvshmemOptions { vectors: 64, max_clients: 3, ..IvshmemOptions::default() });
    let quiet = Client::connect(&path, 64);
    // It says something, which clients never do.
    let talker = Client::connect(&path, 64);
    std::io::Write::write_all(&mut &talker.socket, &[1]).unwrap();
    while receive(&talker.socket).is_some() {}
    // Two clients that do not read: their sockets fill, which blocks no other client.
    let deaf = UnixStream::connect(&path).unwrap();
    for _ in 0..50 {
        drop(Client::connect(&path, 64));
    }
    for mut socket in [quiet.socket, deaf] {
        socket.set_read_timeout(Some(HANG)).unwrap();
        assert!(std::io::Read::read_to_end(&mut socket, &mut Vec::new()).is_ok(), "hung up on");
    }
    let _three = [(); 3].map(|()| Client::connect(&path, 64));
    let surplus = UnixStream::connect(&path).unwrap();
    surplus.set_read_timeout(Some(HANG)).unwrap();
    assert!(receive(&surplus).is_none(), "one too many");
}

#[test]
fn socket_path_in_use_is_refused_and_stale_one_reused() {
    let (dir, path, server) = server(IvshmemOptions::default());
    assert!(matches!(IvshmemServer::start(&path, IvshmemOptions::default()), Err(IvshmemError::InUse(_))));
    drop(server);
    let left = dir.path().join("left");
    drop(std::os::unix::net::UnixListener::bind(&left).unwrap());
    assert!(IvshmemServer::start(&left, IvshmemOptions::default()).is_ok());
    // A file that is no socket is not touched.
    let file = dir.path().join("file");
    std::fs::write(&file, "mine").unwrap();
    assert!(matches!(IvshmemServer::start(&file, IvshmemOptions::default()), Err(IvshmemError::InUse(_))));
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "mine");
    let odd = IvshmemOptions { size: 5000, ..IvshmemOptions::default() };
    assert!(matches!(IvshmemServer::start(&path, odd), Err(IvshmemError::Size(5000))));
    let none = IvshmemOptions { vectors: 0, ..IvshmemOptions::default() };
    assert!(matches!(IvshmemServer::start(&path, none), Err(IvshmemError::Vectors(0))));
}
