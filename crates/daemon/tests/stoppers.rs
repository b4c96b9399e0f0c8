//! Hostile users that try to stop the broker: with unread messages, and with descriptors that hang a thread that closes or queries them.
//!
//! Each attack would last for minutes; an honest user is to be served while it goes on.
//!
//! The attacker is in the broker's own process, so the broker, whose processes are forked when it is made, comes first, and one test
//! runs after the other.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod common;
#[path = "../../bench/src/flood.rs"]
mod flood;

use std::io::Write as _;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::path::Path;
use std::thread::JoinHandle;
use std::time::Duration;

use common::fuse::{Flush, FuseFile};
use common::{BROKER_THREAD, Client, LongestAnswer, alone, bind, connect, eventually, region};
use flood::Flood;
use partywall_daemon::{Config, Server};
use partywall_protocol::wire::{self, AddressList, Message, Refusal};
use partywall_region::packet;
use rustix::io::IoSlice;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sockopt};

/// The user that attacks.
const STRANGER: u32 = 65_534;

/// A broker that begins to serve at a signal of the test, so that there is something unread before.
struct Late {
    server: Option<Server>,
    control: partywall_daemon::ServerControl,
    thread: Option<JoinHandle<()>>,
    dir: tempfile::TempDir,
}

impl Late {
    fn open(policy: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        std::fs::set_permissions(dir.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        let file = dir.path().join("policy.toml");
        std::fs::write(&file, policy).unwrap();
        let server =
            Server::open(&Config::new(dir.path().join("b.sock")).socket_mode(0o666).policy_file(file)).unwrap();
        Self { control: server.control(), server: Some(server), thread: None, dir }
    }

    fn path(&self) -> std::path::PathBuf {
        self.dir.path().join("b.sock")
    }

    fn serve(&mut self) {
        let mut server = self.server.take().unwrap();
        let serving = std::thread::Builder::new().name(BROKER_THREAD.to_owned());
        self.thread = Some(serving.spawn(move || server.run(|_| ()).unwrap()).unwrap());
    }
}

impl Drop for Late {
    fn drop(&mut self) {
        self.control.stop();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// All users may join.
const LETS_IN: &str = "[[join]]\ndomain = \"*\"\nusers = [\"*\"]\n";
/// And connect.
const LETS_IN_AND_CONNECT: &str = "[[join]]\ndomain = \"*\"\nusers = [\"*\"]\n[[connect]]\nfrom = \"*\"\nto = \"*\"\n";
/// Only root may join.
const KEEPS_OUT: &str = "[[join]]\ndomain = \"*\"\nusers = [0]\n";

/// Connects as another user; `None` without the right to become one.
fn stranger(path: &Path) -> Option<Client> {
    std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            let uid = rustix::process::Uid::from_raw(STRANGER);
            // This thread's alone, which ends at once.
            rustix::thread::set_thread_res_uid(uid, uid, uid).ok()?;
            Some(Client::connect(path))
        });
        other.join().unwrap()
    })
}

/// `None`, said aloud, where this process may not become another user.
fn stranger_or_skip(path: &Path) -> Option<Client> {
    let client = stranger(path);
    if client.is_none() {
        eprintln!("SKIPPED: only root can attack as another user");
    }
    client
}

/// A connection that takes five minutes to close, with what keeps it so.
struct Lingering {
    _peers: (TcpListener, TcpStream),
    socket: OwnedFd,
}

impl Lingering {
    fn new() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (server, _) = listener.accept().unwrap();
        client.set_nonblocking(true).unwrap();
        while (&client).write(&[0; 65536]).is_ok() {}
        client.set_nonblocking(false).unwrap();
        sockopt::set_socket_linger(&client, Some(Duration::from_secs(300))).unwrap();
        Self { _peers: (listener, server), socket: client.into() }
    }

    /// Leaves the sender without a copy.
    fn into_peers(self) -> (TcpListener, TcpStream) {
        drop(std::thread::spawn(move || drop(self.socket)));
        self._peers
    }
}

/// Sends one packet with too many descriptors.
fn send_many(client: &Client, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(200))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
    rustix::net::sendmsg(&client.socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL).unwrap();
}

fn packet_of(message: &Message) -> Vec<u8> {
    let mut bytes = Vec::new();
    wire::encode(1, message, &mut bytes);
    bytes
}

/// Another user joins, is served, and leaves, several times.
fn honest_user_is_served(path: &Path) {
    let mut longest = LongestAnswer::default();
    for _ in 0..5 {
        let mut honest = longest.of(|| Client::join(path, "honest"));
        assert!(longest.of(|| honest.is_served()));
    }
    longest.judge();
}

fn join() -> Message {
    Message::Join { version: wire::VERSION, name: "x".to_owned() }
}

fn publish() -> Message {
    Message::Publish { addresses: AddressList::default() }
}

#[test]
fn lingering_sockets_in_refused_session_delay_no_other_user() {
    let _alone = alone();
    let mut broker = Late::open(KEEPS_OUT);
    let Some(attacker) = stranger_or_skip(&broker.path()) else { return };
    let lingering = Lingering::new();
    send_many(&attacker, &packet_of(&publish()), &[lingering.socket.as_fd()]);
    let _peers = lingering.into_peers();
    broker.serve();
    assert_eq!(attacker.refused(), Refusal::Denied);
    honest_user_is_served(&broker.path());
}

#[test]
fn lingering_sockets_in_ending_session_delay_no_other_user() {
    let _alone = alone();
    let mut broker = Late::open(LETS_IN);
    let Some(attacker) = stranger_or_skip(&broker.path()) else { return };
    let lingering = Lingering::new();
    // The first packet ends the session.
    attacker.send_bytes(b"nonsense", &[]).unwrap();
    for _ in 0..3 {
        send_many(&attacker, &packet_of(&publish()), &[lingering.socket.as_fd()]);
    }
    let _peers = lingering.into_peers();
    broker.serve();
    attacker.refused();
    honest_user_is_served(&broker.path());
}

#[test]
fn excess_lingering_descriptors_delay_no_other_user() {
    let _alone = alone();
    let mut broker = Late::open(LETS_IN);
    let Some(attacker) = stranger_or_skip(&broker.path()) else { return };
    attacker.send_bytes(&packet_of(&join()), &[]).unwrap();
    let lingering = Lingering::new();
    let harmless = std::fs::File::open("/dev/null").unwrap();
    let mut fds = vec![harmless.as_fd(); 100];
    fds.push(lingering.socket.as_fd());
    send_many(&attacker, &packet_of(&publish()), &fds);
    let _peers = lingering.into_peers();
    broker.serve();
    assert!(matches!(attacker.receive().unwrap().message, Message::Joined { .. }));
    honest_user_is_served(&broker.path());
}

#[test]
fn lingering_socket_within_unix_socket_delays_no_other_user() {
    let _alone = alone();
    let mut broker = Late::open(LETS_IN);
    let Some(attacker) = stranger_or_skip(&broker.path()) else { return };
    attacker.send_bytes(&packet_of(&join()), &[]).unwrap();
    let lingering = Lingering::new();
    // A message that brings one descriptor, and a UNIX socket beside it in which the lingering one lies unread.
    let (end, other) = packet::pair().unwrap();
    packet::try_send(other.as_fd(), b"x", &[lingering.socket.as_fd()]).unwrap();
    send_many(&attacker, &packet_of(&publish()), &[end.as_fd(), end.as_fd()]);
    let _peers = lingering.into_peers();
    drop(std::thread::spawn(move || drop((end, other))));
    broker.serve();
    assert!(matches!(attacker.receive().unwrap().message, Message::Joined { .. }));
    attacker.refused();
    honest_user_is_served(&broker.path());
}

/// One file per test: those of a mount are closed when it ends.
fn unanswered_or_skip() -> Option<FuseFile> {
    let file = FuseFile::mount(Flush::Never);
    if file.is_none() {
        eprintln!("SKIPPED: needs /dev/fuse and the right to mount");
    }
    file
}

#[test]
fn file_with_hanging_flush_blocks_only_its_user() {
    let _alone = alone();
    let mut broker = Late::open(LETS_IN);
    broker.serve();
    let Some(attacker) = stranger_or_skip(&broker.path()) else { return };
    let Some(fuse) = unanswered_or_skip() else { return };
    attacker.send_bytes(&packet_of(&join()), &[]).unwrap();
    send_many(&attacker, &packet_of(&publish()), &[fuse.file().as_fd()]);
    honest_user_is_served(&broker.path());
    // The session ends though its reader hangs, and so do new ones.
    attacker.is_hung_up_on();
    assert_eq!(stranger(&broker.path()).unwrap().refused(), Refusal::OutOfResources);
    honest_user_is_served(&broker.path());
    // When the hang is over, the user is welcome again.
    drop(fuse);
    eventually("the user may come again", || {
        let again = stranger(&broker.path()).unwrap();
        // It may have been refused and hung up on already.
        let _ = again.send_bytes(&packet_of(&join()), &[]);
        matches!(again.receive().unwrap().message, Message::Joined { .. })
    });
}

#[test]
fn socket_with_held_lock_delays_no_other_user() {
    let _alone = alone();
    let mut broker = Late::open(LETS_IN);
    broker.serve();
    let Some(attacker) = stranger_or_skip(&broker.path()) else { return };
    let Some(fuse) = unanswered_or_skip() else { return };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    // A thread sends from memory that the file never fills, and holds the socket's lock until then.
    let held = client.try_clone().unwrap();
    let pages = Pages::map(fuse.file());
    let address = pages.address;
    let sender = std::thread::spawn(move || {
        #[expect(unsafe_code, reason = "the kernel is to read memory that faults")]
        // SAFETY: the kernel only reads the mapping, which outlives this thread; a fault in it is an error.
        let _ = unsafe { libc_send(&held, address) };
    });
    eventually("the kernel asks for the memory, with the lock held", || fuse.is_read());
    assert!(!sender.is_finished(), "no attack: the kernel did not wait for the file");
    attacker.send_bytes(&packet_of(&join()), &[]).unwrap();
    send_many(&attacker, &packet_of(&publish()), &[client.as_fd()]);
    honest_user_is_served(&broker.path());
    attacker.is_hung_up_on();
    honest_user_is_served(&broker.path());
    drop(fuse);
    sender.join().unwrap();
    drop(pages);
}

#[test]
fn region_with_held_locks_delays_no_other_user() {
    let _alone = alone();
    let mut broker = Late::open(LETS_IN_AND_CONNECT);
    broker.serve();
    let Some(attacker) = stranger_or_skip(&broker.path()) else { return };
    let Some(fuse) = unanswered_or_skip() else { return };
    attacker.send_bytes(&packet_of(&join()), &[]).unwrap();
    assert!(matches!(attacker.receive().unwrap().message, Message::Joined { .. }));
    let region = region(8192);
    // Opened by its path, its position has a lock.
    let again = std::fs::File::open(format!("/proc/self/fd/{}", region.as_raw_fd())).unwrap();
    let (reads, writes) = (again.try_clone().unwrap(), region.try_clone().unwrap());
    let (pages, more) = (Pages::map(fuse.file()), Pages::map(fuse.file()));
    let (into, from) = (pages.address, more.address);
    // A thread reads the region into memory that never arrives, and holds the lock of its position. Another writes such memory to it, and holds
    // the lock of its inode: some kernels look at the seals only afterwards.
    #[expect(unsafe_code, reason = "the kernel is to access memory that faults")]
    let threads = [
        // SAFETY: the mapping outlives this thread, and nothing else uses it; a fault in it is an error.
        std::thread::spawn(move || unsafe { libc::read(reads.as_raw_fd(), into as *mut _, 4096) }),
        // SAFETY: as above.
        std::thread::spawn(move || unsafe { libc::pwrite(writes.as_raw_fd(), from as *const _, 4096, 0) }),
    ];
    std::thread::sleep(Duration::from_millis(200));
    assert!(!threads[0].is_finished(), "no attack: the kernel did not wait for the file");
    attacker.send_bytes(&packet_of(&bind("s", 4)), &[]).unwrap();
    assert_eq!(attacker.receive().unwrap().message, Message::Done {});
    attacker.send_bytes(&packet_of(&connect("x", "s", 8192)), &[again.as_fd()]).unwrap();
    honest_user_is_served(&broker.path());
    assert!(matches!(attacker.receive().unwrap().message, Message::Incoming { .. }), "the region is passed on");
    drop(fuse);
    for thread in threads {
        thread.join().unwrap();
    }
    drop((pages, more));
}

/// A mapping of a file.
struct Pages {
    address: usize,
}

const MAPPED: usize = 65536;

impl Pages {
    fn map(file: &std::fs::File) -> Self {
        use rustix::mm::{MapFlags, ProtFlags, mmap};
        #[expect(unsafe_code, reason = "maps a file that nobody fills")]
        // SAFETY: a new mapping at an address of the kernel's choice, that this process itself never touches.
        let at = unsafe {
            let access = ProtFlags::READ | ProtFlags::WRITE;
            mmap(std::ptr::null_mut(), MAPPED, access, MapFlags::PRIVATE, file, 0)
        };
        Self { address: at.unwrap() as usize }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        #[expect(unsafe_code, reason = "unmaps what was mapped")]
        // SAFETY: mapped by `map`, and not used any more: the sender has ended.
        let _ = unsafe { rustix::mm::munmap(self.address as *mut _, MAPPED) };
    }
}

#[expect(unsafe_code, reason = "the kernel is to read memory that faults")]
/// Sends from an address.
///
/// # Safety
/// `MAPPED` bytes are mapped there.
unsafe fn libc_send(socket: &TcpStream, address: usize) -> isize {
    use std::os::fd::AsRawFd as _;
    // SAFETY: the caller's promise; the kernel reports what cannot be read.
    unsafe { libc::send(socket.as_raw_fd(), address as *const _, MAPPED, 0) }
}

/// How long the answers take is measured by `partywall bench broker`, with the same flood.
#[test]
fn flood_from_forty_sessions_leaves_other_user_served() {
    const SESSIONS: u64 = 40;
    let _alone = alone();
    let mut broker = Late::open(LETS_IN);
    broker.serve();
    let Some(_first) = stranger_or_skip(&broker.path()) else { return };
    let (path, flood) = (broker.path(), Flood::default());
    std::thread::scope(|scope| {
        let end = flood.end();
        let flooding = scope.spawn(|| flood.run(&path, SESSIONS as usize, Some(STRANGER)));
        eventually("all sessions are open", || flood.opened() >= SESSIONS || flooding.is_finished());
        let mut honest = Client::join(&path, "honest");
        let before = flood.sent();
        for _ in 0..1000 {
            assert!(honest.is_served());
        }
        assert!(flood.sent() > before, "nothing was sent meanwhile");
        drop(end);
        flooding.join().unwrap().unwrap();
    });
}
