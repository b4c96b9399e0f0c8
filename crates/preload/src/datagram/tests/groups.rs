//! Sockets with `SO_REUSEPORT` are published before anything comes to them.

use super::*;
use crate::calls::testing::{poll, recv, recvmmsg};
use rustix::io::Errno;

/// A socket of a group, made as by a program.
struct Member(UdpSocket);

impl Member {
    fn new() -> Self {
        let socket = UdpSocket::bind(("127.0.0.1", 0)).unwrap();
        let fd = socket.as_raw_fd();
        made(fd, libc::AF_INET, libc::SOCK_DGRAM, 0);
        number_option(fd, libc::SOL_SOCKET, libc::SO_REUSEPORT, 1);
        assert!(DatagramSocket::of(fd).unwrap().has(flags::GROUPED));
        Self(socket)
    }

    fn fd(&self) -> c_int {
        self.0.as_raw_fd()
    }

    fn is(&self, what: u32) -> bool {
        DatagramSocket::of(self.fd()).unwrap().has(what)
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        dropped(self.fd());
    }
}

#[test]
fn member_without_broker_is_published_by_later_call() {
    let Some(_alone) = alone!() else { return };
    let member = Member::new();
    let look = || assert_eq!(recv(member.fd(), 8, libc::MSG_DONTWAIT), Err(Errno::AGAIN));
    look();
    assert!(!member.is(flags::PUBLISHED | flags::JOINED), "there is no broker");
    let _broker = start_broker();
    let start = Instant::now();
    while !member.is(flags::PUBLISHED) {
        assert!(start.elapsed() < Duration::from_secs(100), "it stays unpublished");
        look();
    }
    assert!(member.is(flags::JOINED));
}

#[test]
fn calls_that_wait_for_several_publish_member() {
    let Some(_alone) = alone!() else { return };
    let _broker = start_broker();
    open_session();
    let calls: [fn(c_int); 2] = [
        |fd| assert_eq!(poll(fd, libc::POLLIN, 0), Ok(0)),
        |fd| assert_eq!(recvmmsg::<1>(fd, libc::MSG_DONTWAIT), Err(Errno::AGAIN)),
    ];
    for (at, call) in calls.into_iter().enumerate() {
        let member = Member::new();
        call(member.fd());
        assert!(member.is(flags::PUBLISHED), "{at}");
    }
}
