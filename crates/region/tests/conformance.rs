//! The conformance suite on the back ends that there are: sealed memfds passed over sockets, and the in-process double.
#![cfg(feature = "conformance")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

use partywall_region::conformance::{self, Backend, ConformancePair, ConformanceRegion, HANG, footprint};
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

/// Passes descriptors over a socket, as between two processes.
fn passed_on(fd: OwnedFd) -> OwnedFd {
    let (out, into) = packet::pair().unwrap();
    packet::send(out.as_fd(), b"take", &[fd.as_fd()]).unwrap();
    packet::recv(into.as_fd(), &mut [0; 8]).unwrap().fds.pop().unwrap()
}

fn region_passed_on(options: &RegionOptions) -> ConformanceRegion {
    let (own, memory) = OwnRegion::create(options).unwrap();
    let peer =
        PeerRegion::attach(passed_on(memory.try_clone().unwrap()).as_fd(), options.kind, own.geometry()).unwrap();
    ConformanceRegion { own, peer, memory, base: 0 }
}

fn link_passed_on((here, far_end): (OwnedFd, OwnedFd)) -> (Link, Link) {
    (Link::bells(here).unwrap(), Link::bells(passed_on(far_end)).unwrap())
}

/// Memory and link go over a socket before they are used, as between two processes.
const BY_SOCKET: Backend<'_> =
    Backend { region: &region_passed_on, link: &|| link_passed_on(link::pair().unwrap()), at_once: true };

/// The same links where the kernel does not keep descriptors off them, as before Linux 6.16.
const BY_UNGUARDED_SOCKET: Backend<'_> =
    Backend { region: &region_passed_on, link: &|| link_passed_on(packet::pair().unwrap()), at_once: true };

fn conforms_in_process(faults: Faults) {
    conformance::all(&Backend {
        region: &|options| {
            let (own, memory) = OwnRegion::create(options).unwrap();
            ConformanceRegion { peer: double::peer_of(&own), own, memory, base: 0 }
        },
        link: &|| {
            let (here, there) = double::link_pair(faults).unwrap();
            (Link::Double(here), Link::Double(there))
        },
        at_once: true,
    });
}

#[test]
fn sealed_memfds_over_sockets_conform() {
    conformance::all(&BY_SOCKET);
    conformance::all(&BY_UNGUARDED_SOCKET);
}

/// The end of a link to another machine, which delivers memory.
#[test]
fn links_that_carry_memory_conform() {
    let link = || {
        let (here, there) = Link::pair().unwrap();
        (Link::Socket(here), Link::Socket(there))
    };
    conformance::all(&Backend { region: &ConformanceRegion::separate, link: &link, at_once: true });
}

#[test]
fn in_process_double_conforms_with_each_fault() {
    for (spurious, merge) in [(false, false), (true, false), (false, true), (true, true)] {
        conforms_in_process(Faults { spurious, merge });
    }
}

/// A process of this very program that does what `role` says, its standard input one end of a socket.
fn child(role: &str, socket: OwnedFd) -> std::process::Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "helper_process_of_tests", "--nocapture"])
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
fn helper_process_of_tests() {
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
                let pairs: Vec<ConformancePair> = (0..20).map(|_| BY_SOCKET.pair(size)).collect();
                assert!(footprint().0 > before.0 && footprint().1 > before.1);
                drop(pairs);
            }
            conformance::all(&BY_SOCKET);
            conforms_in_process(Faults { spurious: true, merge: true });
            assert_eq!(footprint(), before, "descriptors and mappings, before and after");
        }
        _ => {}
    }
}

#[test]
fn dropped_pairs_leak_no_descriptors_or_mappings() {
    // This runs in a separate process, where no other test opens and closes descriptors at the same time.
    let (socket, theirs) = packet::pair().unwrap();
    let status = child("leaks", theirs).wait().unwrap();
    drop(socket);
    assert!(status.success());
}
