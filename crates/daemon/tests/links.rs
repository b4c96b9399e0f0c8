//! The link ends that a broker gives away: each has one owner, and carries bells and nothing else.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod common;

use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use common::*;
use partywall_daemon::Broker;
use partywall_protocol::wire::{Message, RegionReference, Side};
use partywall_region::{Link, LinkEvent, packet};
use rustix::io::Errno;

/// Descriptors of this process, the embedded broker's among them, that are open on the same socket as `fd`.
fn copies(fd: &OwnedFd) -> usize {
    let name = |n: &std::ffi::OsStr| std::fs::read_link(std::path::Path::new("/proc/self/fd").join(n)).ok();
    let mine = name(fd.as_raw_fd().to_string().as_ref()).unwrap();
    std::fs::read_dir("/proc/self/fd")
        .unwrap()
        .filter(|e| name(&e.as_ref().unwrap().file_name()) == Some(mine.clone()))
        .count()
}

/// The link ends of a new connection: the connecting side's, and the accepting side's.
fn connected(web: &mut Client, db: &mut Client) -> (u64, Vec<OwnedFd>, Vec<OwnedFd>) {
    let (channel, near) = web.open("db", "sql");
    let incoming = db.receive().unwrap();
    assert!(matches!(incoming.message, Message::Incoming { .. }));
    (channel, near, incoming.fds.into_iter().skip(1).collect())
}

/// Whether the kernel refuses descriptors on a socket (from Linux 6.16 on).
fn kernel_refuses_descriptors(end: &OwnedFd, spare: &OwnedFd) -> bool {
    match packet::try_send(end.as_fd(), b"B", &[spare.as_fd()]) {
        Ok(()) => false,
        Err(e) => {
            assert_eq!(e.raw_os_error(), Some(Errno::PERM.raw_os_error()), "{e}");
            true
        }
    }
}

#[test]
fn each_link_end_has_one_owner_and_refuses_descriptors() {
    let _alone = alone();
    let broker = Broker::embedded().unwrap();
    let (mut web, mut db) = (Client::join(broker.path(), "web"), Client::join(broker.path(), "db"));
    db.bind("sql", 4);
    let (_, near, far) = connected(&mut web, &mut db);
    assert_eq!((near.len(), far.len()), (2, 2));
    for end in near.iter().chain(&far) {
        // No other process can read from it, or change the effect of its calls.
        eventually("the broker has kept no copy", || copies(end) == 1);
    }
    for (near, far) in near.iter().zip(&far) {
        let flags = rustix::fs::fcntl_getfl(far).unwrap();
        rustix::io::ioctl_fionbio(near, true).unwrap();
        assert_eq!(rustix::fs::fcntl_getfl(far).unwrap(), flags, "each end has its own flags");
        for (from, to) in [(near, far), (far, near)] {
            if kernel_refuses_descriptors(from, far) {
                assert!(packet::try_recv(to.as_fd(), &mut [0; 8]).is_err(), "nothing has come");
            }
        }
    }
}

/// Has each packet that comes to this end bring a descriptor of its sender. Kernels before 6.5 have no such option.
fn pass_pidfds(end: &OwnedFd) {
    const SO_PASSPIDFD: libc::c_int = 76;
    let on: libc::c_int = 1;
    let size = size_of_val(&on) as libc::socklen_t;
    #[expect(unsafe_code, reason = "an option that neither rustix nor nix has")]
    // SAFETY: the kernel reads `size` bytes of `on`, which lives until after the call.
    let result =
        unsafe { libc::setsockopt(end.as_raw_fd(), libc::SOL_SOCKET, SO_PASSPIDFD, (&raw const on).cast(), size) };
    if result != 0 {
        eprintln!("SKIPPED: bells with descriptors: {}", std::io::Error::last_os_error());
    }
}

/// The effect of `SO_PASSPIDFD` on a copy of the victim's end. A peer has the other end only, and a link receives no descriptor in any
/// case.
#[test]
fn bells_leave_no_descriptor_whatever_peer_does_to_its_end() {
    let _alone = alone();
    let broker = Broker::embedded().unwrap();
    let (mut web, mut db) = (Client::join(broker.path(), "web"), Client::join(broker.path(), "db"));
    db.bind("sql", 4);
    let (_, near, far) = connected(&mut web, &mut db);
    for (hostile, victim) in near.iter().zip(far) {
        nix::sys::socket::setsockopt(hostile, nix::sys::socket::sockopt::PassCred, &true).unwrap();
        // On its own end, and as if it had kept a copy of the victim's.
        pass_pidfds(hostile);
        pass_pidfds(&victim);
        let link = Link::bells(victim).unwrap();
        let before = open_descriptors();
        for _ in 0..300 {
            packet::try_send(hostile.as_fd(), b"B", &[]).unwrap();
            assert!(matches!(link.wait(None).unwrap(), LinkEvent::Bell));
            link.ring();
            // Without room for descriptors, which the peer may have as many of as it likes.
            rustix::net::recv(hostile, &mut [0; 8], rustix::net::RecvFlags::DONTWAIT).unwrap();
        }
        // Fewer is right: the broker may still have been closing its copies when they were counted.
        let after = open_descriptors();
        assert!(after <= before, "{after} descriptors are open after 300 bells, {before} before");
    }
}

#[test]
fn ring_is_passed_on_before_its_owner_is_answered() {
    let _alone = alone();
    let broker = Broker::embedded().unwrap();
    let (mut web, mut db) = (Client::join(broker.path(), "web"), Client::join(broker.path(), "db"));
    db.bind("sql", 4);
    let (channel, _near, _far) = connected(&mut web, &mut db);
    let (ring, side, generation) = (region(65536), Side::Connecting, 1);
    let grow = |ring_size| Message::Grow { channel, side, generation, region: RegionReference::with_ring(ring_size) };
    let early = web.ask_with(&grow(65536), &[ring.as_fd()]);
    assert!(matches!(early.message, Message::Refused { .. }), "not accepted yet: {:?}", early.message);
    let accepted = Message::Accepted { channel, start: 0, region: RegionReference::with_ring(8192) };
    assert_eq!(db.ask_with(&accepted, &[region(8192).as_fd()]).message, Message::Done {});
    assert!(matches!(web.receive().unwrap().message, Message::Attached { .. }));
    assert_eq!(web.ask_with(&grow(65536), &[ring.as_fd()]).message, Message::Done {});
    let passed = db.receive().unwrap();
    assert_eq!(passed.message, Message::Ring { channel, side, generation, region: RegionReference::with_ring(65536) });
    assert_eq!(rustix::fs::fstat(&passed.fds[0]).unwrap().st_ino, rustix::fs::fstat(&ring).unwrap().st_ino);
    // It must be what it is said to be, and of the one who says it.
    let lie = web.ask_with(&grow(32768), &[ring.as_fd()]);
    assert!(matches!(lie.message, Message::Refused { .. }), "{:?}", lie.message);
    let mut thief = Client::join(broker.path(), "thief");
    let theft = thief.ask_with(&grow(65536), &[ring.as_fd()]);
    assert!(matches!(theft.message, Message::Refused { .. }), "{:?}", theft.message);
}

/// A peer that sends rings without end must not cost the other side its session.
#[test]
fn rings_without_end_leave_room_for_answers() {
    let _alone = alone();
    let broker = Broker::embedded().unwrap();
    let (mut web, mut db) = (Client::join(broker.path(), "web"), Client::join(broker.path(), "db"));
    db.bind("sql", 4);
    let (channel, _near, _far) = connected(&mut web, &mut db);
    let accepted = Message::Accepted { channel, start: 0, region: RegionReference::with_ring(8192) };
    assert_eq!(db.ask_with(&accepted, &[region(8192).as_fd()]).message, Message::Done {});
    assert!(matches!(web.receive().unwrap().message, Message::Attached { .. }));
    let ring = region(4096);
    let mut passed = 0;
    loop {
        let (side, generation) = (Side::Connecting, passed + 1);
        let grow = Message::Grow { channel, side, generation, region: RegionReference::with_ring(4096) };
        match web.ask_with(&grow, &[ring.as_fd()]).message {
            Message::Done {} => passed += 1,
            Message::Refused { .. } => break,
            other => panic!("{other:?}"),
        }
        assert!(passed < 5000, "the other side reads nothing of it");
    }
    // Its own requests are answered, behind what came before.
    db.tell(&Message::Ping {}, &[]);
    for _ in 0..passed {
        assert!(matches!(db.receive().unwrap().message, Message::Ring { .. }));
    }
    assert_eq!(db.receive().unwrap().message, Message::Done {});
}
