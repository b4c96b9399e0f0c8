//! Ports for the servers of tests.

use std::net::{Ipv4Addr, TcpListener, UdpSocket};
use std::sync::atomic::{AtomicU32, Ordering};

/// A port that is free for TCP and UDP, and that this process gets once. It lies below the ports that the kernel gives to connections, so none of
/// them takes it while a server is restarted. Processes begin at different places.
pub(crate) fn free_port() -> u16 {
    const FIRST: u16 = 10_000;
    const ROOM: u16 = 20_000;
    static LOOKED: AtomicU32 = AtomicU32::new(0);
    let free = |port: &u16| {
        let address = (Ipv4Addr::UNSPECIFIED, *port);
        TcpListener::bind(address).is_ok() && UdpSocket::bind(address).is_ok()
    };
    let next = || {
        let nth = std::process::id().wrapping_mul(547).wrapping_add(LOOKED.fetch_add(1, Ordering::Relaxed));
        FIRST + u16::try_from(nth % u32::from(ROOM)).unwrap()
    };
    std::iter::repeat_with(next).take(ROOM.into()).find(free).expect("one of 20,000 ports is free")
}
