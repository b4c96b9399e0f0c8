//! Sockets that are disconnected and connected again.
#![expect(unsafe_code, reason = "calls the exported functions as a program does")]

use super::*;
use crate::calls::testing::{EpollSet, connect as connect_to, dup, recv, send};
use crate::conn::Pair;
use rustix::io::Errno;
use std::io::{Read, Write};
use std::net::{SocketAddrV4, TcpListener};

const IN: u32 = libc::EPOLLIN as u32;

fn disconnect(fd: c_int) -> c_int {
    let none = sockaddr { sa_family: libc::AF_UNSPEC as libc::sa_family_t, sa_data: [0; 14] };
    // SAFETY: an address of that size.
    unsafe { connect(fd, &raw const none, size_of::<sockaddr>() as socklen_t) }
}

fn linger_of(fd: c_int) -> (c_int, c_int) {
    let mut linger = libc::linger { l_onoff: -1, l_linger: -1 };
    assert!(sys::read_option(fd, libc::SOL_SOCKET, libc::SO_LINGER, &mut linger));
    (linger.l_onoff, linger.l_linger)
}

#[test]
fn socket_connected_again_does_not_use_ring_of_its_old_peer() {
    let (p, set, listener) = (Pair::up(4096), EpollSet::new(), TcpListener::bind("127.0.0.1:0").unwrap());
    let to: SocketAddrV4 = listener.local_addr().unwrap().to_string().parse().unwrap();
    unconnected::made(p.a, true);
    let copy = dup(p.a);
    set.add(p.a, IN, 7);
    send(p.b, b"unread", 0).unwrap();
    assert_eq!(disconnect(p.a), 0);
    assert!(Conn::of(p.a).is_none() && Conn::of(copy).is_none());
    assert_eq!(recv(p.b, 1, 0), Err(Errno::CONNRESET));
    assert_eq!(linger_of(p.a), (0, 0));
    assert_eq!(connect_to(p.a, to), Ok(0));
    assert!(Conn::of(p.a).is_none(), "it stays on TCP");
    let (mut other, _) = listener.accept().unwrap();
    assert_eq!(send(p.a, b"1", 0), Ok(1));
    let mut byte = [0];
    other.read_exact(&mut byte).unwrap();
    assert_eq!(&byte, b"1");
    other.write_all(b"2").unwrap();
    assert_eq!(set.wait(), [(IN, 7)]);
    assert_eq!(recv(copy, 9, 0).unwrap(), b"2");
    crate::calls::testing::close(copy);
}
