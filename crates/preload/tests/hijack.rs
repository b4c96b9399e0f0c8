//! A stranger who offers a connection, gives its port back, and waits for the port's next owner. The server is a program with the library; the
//! next owner has none.
#![expect(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod support;

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    os::fd::{AsFd, OwnedFd},
    process::{Command, Stdio},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use partywall_protocol::{
    environment,
    wire::{Message, RegionReference},
};
use partywall_region::{OwnRegion, RegionOptions};
use partywall_shm::layout::RegionKind;
use rustix::{
    io::Errno,
    net::{AddressFamily, SocketFlags, SocketType, sockopt},
};
use support::{client::Client, eventually, free_port, guard::Guard, skipped, stage::python, world::World};

const RING: u64 = 8192;

/// An echo server with the library, whose connections go by rings as soon as a client offers them.
fn server(world: &World, port: u16) -> Guard {
    let mut server = Command::new(python());
    server.arg(support::stage::script("echo_server.py")).args(["127.0.0.1", &port.to_string()]);
    server.env(environment::MOVES, "now").stdin(Stdio::null()).stderr(Stdio::null());
    world.preload(&mut server);
    let mut server = Guard::spawn(&mut server);
    server.await_listener(port, &String::new);
    server
}

/// A socket of TCP, which the programs that another test starts at this moment do not keep.
fn socket() -> OwnedFd {
    rustix::net::socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap()
}

/// A connection from this port, which may have been another's just now.
fn connect_from(from: u16, to: u16) -> OwnedFd {
    let socket = socket();
    sockopt::set_socket_reuseaddr(&socket, true).unwrap();
    let [from, to] = [from, to].map(|port| SocketAddr::from(([127, 0, 0, 1], port)));
    eventually("the port can be had", || match rustix::net::bind(&socket, &from) {
        Ok(()) => true,
        Err(error) => {
            assert_eq!(error, Errno::ADDRINUSE);
            false
        }
    });
    // A program that is just being started has a copy of the earlier connection until its `exec`.
    eventually("the earlier connection has ended", || match rustix::net::connect(&socket, &to) {
        Ok(()) => true,
        Err(error) => {
            assert_eq!(error, Errno::ADDRNOTAVAIL);
            false
        }
    });
    socket
}

/// Questions of the port's next owner, and their answers.
fn ask(victim: OwnedFd) {
    let mut victim = TcpStream::from(victim);
    victim.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    for number in 0..500 {
        let secret = format!("token {number} of the next owner");
        victim.write_all(secret.as_bytes()).unwrap();
        let mut answer = vec![0; secret.len()];
        victim.read_exact(&mut answer).unwrap_or_else(|e| panic!("answer {number} went elsewhere: {e}"));
        assert_eq!(answer, secret.as_bytes(), "answer {number} is somebody else's");
    }
}

/// The attack. `keeps` is whether the attacker keeps its socket, disconnected, to show it again.
fn attack(world: &World, keeps: bool) {
    let (port, attacked) = (free_port(), free_port());
    let _server = server(world, port);
    let mut evil = Client::join(&world.socket(), "evil").unwrap();
    let socket = connect_from(attacked, port);
    // It has carried nothing: what the two connections have carried does not tell them apart.
    let options = RegionOptions { kind: RegionKind::Socket, ..RegionOptions::endpoint(RING) };
    let (_own, region) = OwnRegion::create(&options).unwrap();
    let offer = Message::Offer { region: RegionReference::with_ring(RING) };
    let (answer, _bells) = evil.ask_with(&offer, &[socket.as_fd(), region.as_fd()]).unwrap();
    let Message::Bell { offer, .. } = answer else { panic!("{answer:?}") };
    // Both end the connection by a reset.
    let kept = if keeps {
        rustix::net::connect_unspec(&socket).unwrap();
        socket
    } else {
        sockopt::set_socket_linger(&socket, Some(Duration::ZERO)).unwrap();
        drop(socket);
        self::socket()
    };
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                let answer = evil.ask_with(&Message::Confirm { offer }, &[kept.as_fd()]);
                let Some((Message::Refused { .. }, _)) = answer else {
                    panic!("the attacker has the ring: {answer:?}")
                };
                thread::sleep(Duration::from_millis(1));
            }
        });
        let asked = thread::Builder::new().spawn_scoped(scope, || ask(connect_from(attacked, port))).unwrap().join();
        over.store(true, Ordering::Relaxed);
        asked.unwrap();
    });
    let channels = Client::join(&world.socket(), "watcher").unwrap().channels();
    assert!(channels.is_empty(), "{channels:?}");
}

#[test]
fn next_owner_of_an_offered_port_gets_its_answers() {
    let world = World::new();
    for keeps in [false, true] {
        attack(&world, keeps);
    }
}

#[test]
fn reused_port_is_not_hijacked_without_sequence_numbers() {
    if !rustix::process::geteuid().is_root() {
        return skipped(
            "only root has the capability that the broker is to lack; the broker of the other test lacks it already",
        );
    }
    let world = World::without_sequence_numbers();
    for keeps in [false, true] {
        attack(&world, keeps);
    }
}
