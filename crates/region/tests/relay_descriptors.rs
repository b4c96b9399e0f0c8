//! Descriptors that a process sends to a relay, and whose close takes as long as the process likes.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

#[path = "../../shm/tests/program_time/mod.rs"]
mod program_time;

use partywall_region::relay::{Notice, Notices, PortSide, Relay};
use partywall_region::{Link, LinkEvent, packet};
use program_time::ProgramTime;
use rustix::fd::{AsFd, OwnedFd};
use rustix::net::sockopt;
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// A test that takes so long hangs. Sockets linger for longer.
const HANG: Duration = Duration::from_secs(60);
const LINGERS: Duration = Duration::from_secs(600);

/// The longest that a doorbell of another link takes, without the time for which the threads that pass it on wait for a processor.
const PROMPT: Duration = Duration::from_secs(2);

/// Both ends of a port.
fn joined() -> ((Relay, Notices), (Relay, Notices)) {
    let (a, b) = UnixStream::pair().unwrap();
    let guest = Relay::start(a.into(), PortSide::Guest).unwrap();
    let host = Relay::start(b.into(), PortSide::Host).unwrap();
    for (_, notices) in [&guest, &host] {
        while notices.recv_timeout(HANG).unwrap() != Notice::Up {}
    }
    (guest, host)
}

/// A link of a process in the guest with one on the host: the ends of both. The first end has been used by `before` when the relays get theirs.
fn link(guest: &Relay, host: &Relay, id: u32, before: impl FnOnce(&OwnedFd)) -> (OwnedFd, OwnedFd) {
    let ((here, near), (there, far)) = (Link::pair().unwrap(), Link::pair().unwrap());
    before(&here);
    host.link(id, far, None);
    guest.link(id, near, None);
    (here, there)
}

/// A socket that has sent more than its peer takes: who closes its last descriptor waits. It ends when the peer does.
fn lingering() -> (OwnedFd, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (peer, _) = listener.accept().unwrap();
    sockopt::set_socket_linger(&socket, Some(LINGERS)).unwrap();
    socket.set_nonblocking(true).unwrap();
    while socket.write(&[0; 1 << 16]).is_ok() {}
    // A socket that does not block does not linger.
    socket.set_nonblocking(false).unwrap();
    (socket.into(), peer)
}

fn next(link: &Link) -> LinkEvent {
    link.wait(Some(Instant::now() + HANG)).unwrap()
}

/// This thread, and those of the relays.
fn threads_of_links() -> Vec<PathBuf> {
    let mut threads = program_time::threads_named("partywall-relay");
    threads.push(program_time::this_thread());
    threads
}

/// Packets as a process may send them: memory, an event, and nonsense.
fn packets() -> [Vec<u8>; 3] {
    let mut memory = vec![0; 32];
    memory[0] = 1;
    [memory, b"R".to_vec(), b"nonsense".to_vec()]
}

#[test]
fn descriptor_whose_close_blocks_delays_no_other_link() {
    let longest = std::cell::Cell::new(Duration::ZERO);
    for packet in packets() {
        let ((guest, _n), (host, _m)) = joined();
        let mut peers = Vec::new();
        // The last descriptor is in transit: the relay's process closes it.
        let mut leave = |here: &OwnedFd| {
            for _ in 0..2 {
                let (socket, peer) = lingering();
                packet::send(here.as_fd(), &packet, &[socket.as_fd()]).unwrap();
                peers.push(peer);
            }
        };
        let _judged = link(&guest, &host, 1, &mut leave);
        let (here, there) = link(&guest, &host, 2, |_| {});
        let (here, there) = (Link::Socket(here), Link::Socket(there));
        let passes = || {
            let time = ProgramTime::start(threads_of_links);
            here.ring();
            assert!(matches!(next(&there), LinkEvent::Bell));
            there.ring();
            assert!(matches!(next(&here), LinkEvent::Bell));
            longest.set(longest.get().max(time.elapsed()));
        };
        passes();
        // The end of a link with unread descriptors does not wait either, nor does the end of a resting link.
        let _unread = link(&guest, &host, 3, &mut leave);
        guest.hang_up(3);
        guest.hang_up(1);
        passes();
        // The end of the relay does not wait either.
        let _left = link(&guest, &host, 4, &mut leave);
        drop(guest);
        assert!(matches!(next(&there), LinkEvent::HungUp));
    }
    let longest = longest.get();
    let _ = writeln!(std::io::stderr(), "longest round trip on another link {:.1} ms", longest.as_secs_f64() * 1e3);
    assert!(longest < PROMPT, "{longest:?}");
}

#[test]
fn descriptors_that_mean_nothing_are_closed() {
    for packet in packets() {
        let ((guest, _n), (host, _m)) = joined();
        let (hostile, _their) = link(&guest, &host, 1, |_| {});
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        packet::send(hostile.as_fd(), &packet, &[writer.as_fd()]).unwrap();
        drop(writer);
        // The end of the pipe comes when its last descriptor has been closed.
        let mut fds = [rustix::event::PollFd::new(&reader, rustix::event::PollFlags::IN)];
        let limit = rustix::event::Timespec { tv_sec: 60, tv_nsec: 0 };
        assert_eq!(rustix::event::poll(&mut fds, Some(&limit)).unwrap(), 1, "{packet:?} is still open");
    }
}
