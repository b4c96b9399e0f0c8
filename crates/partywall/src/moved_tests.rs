//! Channels between machines whose relays report a move before they hang up (protocol G7.8). The test is the relay of both ends.

use crate::channel::{self, EndpointParts, Halves};
use crate::endpoint::Carrier;
use crate::rpc::CallError;
use crate::rpc::slots::ConnectionEnd;
use crate::{Error, Options, PeerInfo, Result, Stream};
use partywall_protocol::link::LinkSignal;
use partywall_protocol::wire::{Directions, MachineId, Side, User};
use partywall_region::pmem::{WindowFile, WindowSpec};
use partywall_region::{Link, RegionOptions};
use partywall_shm::layout::{PAGE, RegionKind};
use partywall_shm::producer::Producer;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, OwnedFd};
use rustix::net::SendFlags;
use std::io::Read as _;
use std::thread;
use std::time::Duration;

const RING: u64 = PAGE * 4;

/// The relay's ends of one side's links.
struct RelayEnds([OwnedFd; 2]);

impl RelayEnds {
    /// Rings each half of its side, so that a packet lies before the next.
    fn ring(&self) {
        self.send(LinkSignal::Bell);
    }

    fn send(&self, signal: LinkSignal) {
        for end in &self.0 {
            rustix::net::send(end, &signal.packet(), SendFlags::NOSIGNAL).unwrap();
        }
    }

    fn ends_as_moved(self) {
        self.send(LinkSignal::Moved);
    }
}

/// A connection between a program that has connected to `a:echo` and the one that has accepted it, on two machines.
struct Between {
    client: Halves,
    server: Halves,
    of_client: RelayEnds,
    of_server: RelayEnds,
}

fn between() -> Between {
    let spec = WindowSpec { room: 1 << 20, owner: "a".into(), peer: "b".into() };
    let file = WindowFile::create(&spec).unwrap();
    let window = file.window().unwrap();
    let mut regions = [PAGE, PAGE * 64].map(|base| {
        let own = window.create(base, &RegionOptions::endpoint(RING)).unwrap();
        let peer = window.attach(base, RegionKind::Endpoint, own.geometry()).unwrap();
        (Some((base, own)), Some(peer))
    });
    let mut end = |mine: usize, side, user| {
        let (near, far): (Vec<OwnedFd>, Vec<OwnedFd>) = (0..2).map(|_| Link::pair().unwrap()).unzip();
        let links = near.into_iter().map(|end| channel::crossing(end).unwrap()).collect();
        let (base, region) = regions[mine].0.take().unwrap();
        let peer = regions[1 - mine].1.take();
        let (name, service) = ("a".to_owned(), "echo".to_owned());
        let info = PeerInfo { name, domain_id: 1, epoch: 1, user, pid: None, at_home: false, service };
        let (directions, ring, carrier) = (Directions::BOTH, (RING, RING), Carrier::None);
        let parts = EndpointParts { side, directions, region, peer, links, info, id: 1, carrier, ring, base };
        let halves = channel::assemble(parts, &Options::default().spin(Duration::ZERO)).unwrap();
        (halves, RelayEnds(far.try_into().unwrap()))
    };
    let (client, of_client) = end(0, Side::Connecting, None);
    let (server, of_server) = end(1, Side::Accepting, Some(User::Machine(MachineId::MIN)));
    Between { client, server, of_client, of_server }
}

fn moved<T>(result: Result<T>, to: Option<&str>) {
    match result {
        Err(Error::Moved { target }) => assert_eq!(target.as_deref(), to),
        Err(e) => panic!("{e}"),
        Ok(_) => panic!("it has not ended"),
    }
}

#[test]
fn move_ends_idle_halves_of_both_sides_and_stays_their_end() {
    let Between { client, server, of_client, of_server } = between();
    for relay in [of_client, of_server] {
        relay.ring();
        relay.ends_as_moved();
    }
    let mut sides = [(client, Some("a:echo")), (server, None)].map(|((tx, rx), to)| (tx.unwrap(), rx.unwrap(), to));
    for (_, rx, target) in &mut sides {
        for _ in 0..2 {
            moved(rx.read(&mut [0; 8]), *target);
        }
    }
    // After the readers, which would find what a writer with room writes: it learns of the move by the keeper, at some time.
    for (tx, _, target) in &mut sides {
        while tx.write(b"x").is_ok() {}
        for _ in 0..2 {
            moved(tx.write(b"x"), *target);
        }
    }
}

#[test]
fn bytes_before_move_are_read_and_then_moved() {
    let Between { mut client, mut server, of_client: _of_client, of_server } = between();
    client.0.as_mut().unwrap().write(b"last").unwrap();
    of_server.ends_as_moved();
    let rx = server.1.as_mut().unwrap();
    let mut bytes = [0; 8];
    assert_eq!(rx.read(&mut bytes).unwrap(), 4);
    assert_eq!(&bytes[..4], b"last");
    moved(rx.read(&mut bytes), None);
}

#[test]
fn move_wakes_sleeping_reader_and_writer() {
    let Between { client, server: _server, of_client, of_server: _of_server } = between();
    let (mut tx, mut rx) = (client.0.unwrap(), client.1.unwrap());
    let reader = thread::spawn(move || rx.read(&mut [0; 8]));
    // More than the ring holds, and nobody reads.
    let writer = thread::spawn(move || {
        let first = tx.write(&[1; RING as usize * 2]);
        assert!(first.is_ok_and(|n| n == RING as usize), "what has room is written");
        tx.write(b"x")
    });
    thread::sleep(Duration::from_millis(50));
    of_client.ends_as_moved();
    moved(reader.join().unwrap(), Some("a:echo"));
    moved(writer.join().unwrap(), Some("a:echo"));
}

#[test]
fn nonblocking_halves_are_readable_and_find_the_move() {
    let Between { client, server: _server, of_client, of_server: _of_server } = between();
    let (mut tx, mut rx) = (client.0.unwrap(), client.1.unwrap());
    tx.core.waiter.nonblocking = true;
    rx.waiter.nonblocking = true;
    while tx.write(&[1; PAGE as usize]).is_ok() {}
    assert!(matches!(rx.read(&mut [0; 8]), Err(Error::WouldBlock)));
    of_client.ends_as_moved();
    for link in [&tx.core.waiter.link, &rx.waiter.link] {
        let mut fds = [PollFd::from_borrowed_fd(link.as_fd(), PollFlags::IN)];
        let limit = Timespec { tv_sec: 60, tv_nsec: 0 };
        assert_eq!(poll(&mut fds, Some(&limit)).unwrap(), 1);
    }
    moved(rx.read(&mut [0; 8]), Some("a:echo"));
    moved(tx.write(b"x"), Some("a:echo"));
}

#[test]
fn hang_up_without_report_is_death_and_closing_state_is_orderly() {
    let Between { client, server, of_client, of_server } = between();
    drop(of_client);
    let mut rx = client.1.unwrap();
    assert!(matches!(rx.read(&mut [0; 8]), Err(Error::Dead { attached: true })));
    drop(client.0);
    // The client's writing half has finished before the move, so the server has everything.
    of_server.ends_as_moved();
    assert_eq!(server.1.unwrap().read(&mut [0; 8]).unwrap(), 0);
}

#[test]
fn move_with_ring_in_transit_is_no_corruption() {
    let Between { client, mut server, of_client: _of_client, of_server } = between();
    let mut tx = client.0.unwrap();
    tx.write(b"old").unwrap();
    // The client announces its next ring, whose place is lost with the link.
    let page = client.1.as_ref().unwrap().endpoint().own().page();
    Producer::resume(RING, 3, 0).unwrap().switch(&page.tx, RING * 2);
    of_server.ends_as_moved();
    let rx = server.1.as_mut().unwrap();
    let mut bytes = [0; 8];
    assert_eq!(rx.read(&mut bytes).unwrap(), 3);
    moved(rx.read(&mut bytes), None);
}

#[test]
fn io_error_of_moved_stream_names_the_remedy() {
    let Between { client, server, of_client, of_server } = between();
    of_client.ends_as_moved();
    of_server.ends_as_moved();
    let (mut client, mut server) = (Stream::of(client), Stream::of(server));
    let error = client.read(&mut [0; 8]).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionAborted);
    assert!(error.to_string().contains("connect again to `a:echo`"), "{error}");
    let error = server.read(&mut [0; 8]).unwrap_err();
    assert!(error.to_string().contains("accept the next"), "{error}");
}

#[test]
fn call_of_moved_connection_says_where_to_connect() {
    let end = ConnectionEnd::from_error(&Error::Moved { target: Some("a:bank".into()) });
    for seen in [true, false] {
        let error = end.error().with_seen(seen);
        assert!(error.to_string().contains("connect again to `a:bank`"), "{error}");
        let CallError::Moved { seen: is_seen, target } = error else { panic!("{error}") };
        assert_eq!((is_seen, target.as_deref()), (seen, Some("a:bank")));
    }
}

#[cfg(feature = "tokio")]
#[tokio::test]
async fn move_wakes_task_that_reads() {
    use tokio::io::AsyncReadExt as _;
    let Between { client, server: _server, of_client, of_server: _of_server } = between();
    let mut stream = crate::asynchronous::AsyncStream::new(Stream::of(client)).unwrap();
    let reader = tokio::spawn(async move { stream.read(&mut [0; 8]).await });
    tokio::time::sleep(Duration::from_millis(20)).await;
    of_client.ends_as_moved();
    let error = reader.await.unwrap().unwrap_err();
    assert!(error.to_string().starts_with("moved:"), "{error}");
}
