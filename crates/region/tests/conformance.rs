//! The conformance suite on the back ends that there are: sealed memfds passed over sockets, and the in-process double.
#![cfg(feature = "conformance")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

use partywall_region::conformance::{self, ConformancePair, HANG, footprint};
use partywall_region::double::{self, Faults};
use partywall_region::{Link, LinkEvent, OwnRegion, PeerRegion, RegionOptions, link, packet};
use partywall_shm::layout::RegionKind;
use rustix::fd::{AsFd, OwnedFd};
use std::process::{Command, Stdio};
use std::time::Instant;

/// Set in a process that a test has started, to say what it is to do.
const ROLE: &str = "PARTYWALL_TEST_ROLE";

fn region(ring_size: u64) -> (OwnRegion, OwnedFd) {
    OwnRegion::create(&RegionOptions::endpoint(ring_size)).unwrap()
}

/// Memory and link go over a socket before they are used, as between two processes.
fn by_socket(ring_size: u64) -> ConformancePair {
    passed_on(ring_size, link::pair().unwrap())
}

/// The same where the kernel does not keep descriptors off the link, as before Linux 6.16.
fn by_unguarded_socket(ring_size: u64) -> ConformancePair {
    passed_on(ring_size, packet::pair().unwrap())
}

fn passed_on(ring_size: u64, (here, far_end): (OwnedFd, OwnedFd)) -> ConformancePair {
    let (own, memory) = region(ring_size);
    let (out, into) = packet::pair().unwrap();
    packet::send(out.as_fd(), b"pair", &[memory.as_fd(), far_end.as_fd()]).unwrap();
    drop(far_end);
    let mut received = packet::recv(into.as_fd(), &mut [0; 8]).unwrap();
    let there = Link::bells(received.fds.pop().unwrap()).unwrap();
    let far_memory = received.fds.pop().unwrap();
    let peer = PeerRegion::attach(far_memory.as_fd(), RegionKind::Endpoint, own.geometry()).unwrap();
    ConformancePair { own, peer, memory, base: 0, at_once: true, here: Link::bells(here).unwrap(), there }
}

fn in_process(ring_size: u64, faults: Faults) -> ConformancePair {
    let (own, memory) = region(ring_size);
    let (here, there) = double::link_pair(faults).unwrap();
    let peer = double::peer_of(&own);
    ConformancePair { own, peer, memory, base: 0, at_once: true, here: Link::Double(here), there: Link::Double(there) }
}

#[test]
fn sealed_memfds_over_sockets_conform() {
    conformance::all(&by_socket);
    conformance::all(&by_unguarded_socket);
}

/// The end of a link to another machine, which delivers memory.
#[test]
fn links_that_carry_memory_conform() {
    conformance::all(&|ring_size| {
        let (own, memory) = region(ring_size);
        let peer = PeerRegion::attach(memory.as_fd(), RegionKind::Endpoint, own.geometry()).unwrap();
        let (here, there) = Link::pair().unwrap();
        ConformancePair {
            own,
            peer,
            memory,
            base: 0,
            at_once: true,
            here: Link::Socket(here),
            there: Link::Socket(there),
        }
    });
}

#[test]
fn the_double_conforms_with_each_fault() {
    for (spurious, merge) in [(false, false), (true, false), (false, true), (true, true)] {
        conformance::all(&|size| in_process(size, Faults { spurious, merge }));
    }
}

/// A process of this very program that does what `role` says, its standard input one end of a socket.
fn child(role: &str, socket: OwnedFd) -> std::process::Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "a_process_started_by_a_test", "--nocapture"])
        .env(ROLE, role)
        .stdin(Stdio::from(socket))
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}

#[test]
fn memory_and_doorbells_work_between_processes() {
    let (socket, theirs) = packet::pair().unwrap();
    let mut child = child("peer", theirs);
    let (mut own, memory) = region(8192);
    let (link, far_end) = link::pair().unwrap();
    let link = Link::bells(link).unwrap();
    own.span(8190, 5).copy_from(0, b"hello");
    packet::send(socket.as_fd(), b"take", &[memory.as_fd(), far_end.as_fd()]).unwrap();
    drop(far_end);

    // It sends its own region when it has found ours to be right.
    let memory = packet::recv(socket.as_fd(), &mut [0; 8]).unwrap().fds.pop().unwrap();
    let geometry = region(4096).0.geometry();
    let peer = PeerRegion::attach(memory.as_fd(), RegionKind::Endpoint, geometry).unwrap();
    // Kill -9 takes neither the memory nor what was sent before.
    assert!(matches!(link.wait(Some(Instant::now() + HANG)).unwrap(), LinkEvent::Bell));
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(matches!(link.wait(Some(Instant::now() + HANG)).unwrap(), LinkEvent::HungUp));
    let mut answer = [0; 6];
    peer.span(4090, 6).copy_to(&mut answer);
    assert_eq!(&answer, b"world!");
}

/// Not a separate test: what [`child`] runs.
#[test]
fn a_process_started_by_a_test() {
    match std::env::var(ROLE).as_deref() {
        Ok("peer") => {
            let mut received = packet::recv(std::io::stdin().as_fd(), &mut [0; 8]).unwrap();
            let link = Link::bells(received.fds.pop().unwrap()).unwrap();
            let theirs = received.fds.pop().unwrap();
            let geometry = region(8192).0.geometry();
            let peer = PeerRegion::attach(theirs.as_fd(), RegionKind::Endpoint, geometry).unwrap();
            let mut hello = [0; 5];
            peer.span(8190, 5).copy_to(&mut hello);
            assert_eq!(&hello, b"hello");
            let (mut own, memory) = region(4096);
            own.span(4090, 6).copy_from(0, b"world!");
            packet::send(std::io::stdin().as_fd(), b"mine", &[memory.as_fd()]).unwrap();
            link.ring();
            // Until it is killed.
            let _ = link.wait(Some(Instant::now() + HANG));
        }
        Ok("leaks") => {
            let before = footprint();
            for size in [0, 4096, 1 << 20] {
                let pairs: Vec<ConformancePair> = (0..20).map(|_| by_socket(size)).collect();
                assert!(footprint().0 > before.0 && footprint().1 > before.1);
                drop(pairs);
            }
            conformance::all(&by_socket);
            conformance::all(&|size| in_process(size, Faults { spurious: true, merge: true }));
            assert_eq!(footprint(), before, "descriptors and mappings, before and after");
        }
        _ => {}
    }
}

#[test]
fn nothing_is_left_of_dropped_pairs() {
    // In a separate process, where no other test opens and closes descriptors meanwhile.
    let (socket, theirs) = packet::pair().unwrap();
    let status = child("leaks", theirs).wait().unwrap();
    drop(socket);
    assert!(status.success());
}
