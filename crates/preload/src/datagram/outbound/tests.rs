//! Flows from the offer to their end, with a broker.

use super::super::flow::FlowPlaces;
use super::super::tests::open_session;
use super::super::{dropped, made};
use super::*;
use crate::broker;
use crate::broker::tests::alone::alone;
use crate::broker::tests::{broker as start_broker, busy_session};
use crate::calls::testing::{EpollSet, poll, pwritev2, recv, send, sendfile, splice};
use rustix::fd::AsRawFd;
use rustix::io::Errno;
use std::net::UdpSocket;
use std::time::{Duration, Instant};

/// Two sockets of ours, of which the first receives. A flow from the second to it was offered and taken, and is proved.
fn taken_flow() -> [UdpSocket; 2] {
    let sockets = [(); 2].map(|()| UdpSocket::bind(("127.0.0.1", 0)).unwrap());
    let [to, from] = sockets.each_ref().map(|socket| socket.local_addr().unwrap());
    sockets.iter().for_each(|socket| made(socket.as_raw_fd(), libc::AF_INET, libc::SOCK_DGRAM, 0));
    open_session();
    let [receiver, sender] = sockets.each_ref().map(|socket| DatagramSocket::of(socket.as_raw_fd()).unwrap());
    receiver.publish(sockets[0].as_raw_fd());
    let mut tx = sender.tx.hold().unwrap();
    let at = tx.find(to).unwrap();
    sender.offer(sockets[1].as_raw_fd(), &mut tx.to[at]);
    assert_eq!(receiver.take_offer(sockets[0].as_raw_fd(), from, receiver.closings()), Ok(()));
    assert_eq!(receiver.inbound.load(Ordering::Relaxed), 1);
    assert_eq!(proof_for_sender(tx.to[at].channel), Proof::Good);
    sockets
}

#[test]
fn taken_flow_survives_a_busy_session() {
    let Some(_alone) = alone!() else { return };
    let _broker = start_broker();
    let sockets = taken_flow();
    let sender = DatagramSocket::of(sockets[1].as_raw_fd()).unwrap();
    // A look for the answer, as a sending call makes it.
    let look = || {
        let mut tx = sender.tx.hold().unwrap();
        let at = tx.find(sockets[0].local_addr().unwrap()).unwrap();
        sender.look_for_answer(&mut tx.to[at]);
        tx.to[at].stage
    };
    let busy = busy_session();
    assert_eq!(look(), FlowStage::Offered, "the broker could not be asked");
    drop(busy);
    let start = Instant::now();
    while look() != FlowStage::Attached {
        assert!(start.elapsed() < Duration::from_secs(100), "it has no ring");
        std::thread::sleep(Duration::from_millis(1));
    }
    sockets.iter().for_each(|socket| dropped(socket.as_raw_fd()));
}

#[test]
fn flow_whose_receiver_cannot_be_fetched_is_offered_again() {
    let Some(_alone) = alone!() else { return };
    let _broker = start_broker();
    let sockets = taken_flow();
    let sender = DatagramSocket::of(sockets[1].as_raw_fd()).unwrap();
    let mut tx = sender.tx.hold().unwrap();
    let at = tx.find(sockets[0].local_addr().unwrap()).unwrap();
    let one = &mut tx.to[at];
    // As an answer of the broker that was lost with the session: it is given once.
    drop(broker::fetch_receiver(one.channel).unwrap());
    let before = one.retry;
    sender.look_for_answer(one);
    assert_eq!(one.stage, FlowStage::Counting);
    assert!(!before.is_due(u64::MAX) && one.retry.is_due(u64::MAX), "a later call offers another");
    drop(tx);
    sockets.iter().for_each(|socket| dropped(socket.as_raw_fd()));
}

/// The same, and the sender has attached its ring. The receiver has seen that the kernel's queue is empty.
fn attached_flow() -> [UdpSocket; 2] {
    let sockets = taken_flow();
    attach(&sockets);
    assert_eq!(recv(sockets[0].as_raw_fd(), 8, libc::MSG_DONTWAIT), Err(Errno::AGAIN));
    sockets
}

/// The sender of a flow that was taken attaches its ring.
fn attach([receiver, sender]: &[UdpSocket; 2]) {
    let socket = DatagramSocket::of(sender.as_raw_fd()).unwrap();
    let mut tx = socket.tx.hold().unwrap();
    let at = tx.find(receiver.local_addr().unwrap()).unwrap();
    socket.look_for_answer(&mut tx.to[at]);
    assert_eq!(tx.to[at].stage, FlowStage::Attached);
}

/// Connects the sender, without what the library does then: its rings stay.
fn connect([receiver, sender]: &[UdpSocket; 2]) {
    let to = receiver.local_addr().unwrap();
    rustix::net::connect(sender, &to).unwrap();
    let socket = DatagramSocket::of(sender.as_raw_fd()).unwrap();
    *socket.remote.hold().unwrap() = (wide(to.ip()), to.port());
}

#[test]
fn unread_datagram_of_polling_sender_goes_by_kernel() {
    let Some(_alone) = alone!() else { return };
    let _broker = start_broker();
    let looks: [fn(&EpollSet, c_int); 3] = [
        |_, fd| assert_eq!(recv(fd, 8, libc::MSG_DONTWAIT), Err(Errno::AGAIN)),
        |_, fd| assert_eq!(poll(fd, libc::POLLIN, 0), Ok(0)),
        |set, _| assert_eq!(set.now(), []),
    ];
    for (number, look) in looks.into_iter().enumerate() {
        let [receiver, sender] = attached_flow();
        let (to, fd) = (receiver.local_addr().unwrap(), sender.as_raw_fd());
        let set = EpollSet::new();
        set.add(fd, libc::EPOLLIN as u32, 7);
        let socket = DatagramSocket::of(fd).unwrap();
        let bytes = [7u8; 5];
        let list = [libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() }];
        #[expect(unsafe_code, reason = "stands for the C library's caller")]
        // SAFETY: a vector that lives to the end of the block.
        let buffers = unsafe { CallerBuffers::new(&list) };
        let sent = socket.send_to(fd, to, DatagramCarrier::Any(0), buffers, || panic!("by the kernel"));
        assert_eq!(sent, 5);
        // The kernel says that the socket is gone. The library, which has both ends here, says nothing: the broker would not know of which.
        let closed = receiver.as_raw_fd();
        drop(receiver);
        let next = UdpSocket::bind(to).unwrap();
        next.set_nonblocking(true).unwrap();
        let start = Instant::now();
        while next.recv(&mut [0; 8]).is_err() {
            assert!(start.elapsed() < Duration::from_secs(100), "{number}: it stays in the ring");
            look(&set, fd);
        }
        dropped(closed);
        dropped(fd);
    }
}

#[test]
fn call_counts_as_the_datagrams_that_it_is_split_into() {
    for (len, segment, count) in [(0, 0, 1), (3000, 0, 1), (0, 1000, 1), (1000, 1000, 1), (1001, 1000, 2)] {
        assert_eq!(datagrams_of(len, segment), count, "{len} {segment}");
    }
}

#[test]
fn datagram_of_another_thread_is_looked_after_by_sleeper() {
    let Some(_alone) = alone!() else { return };
    let _broker = start_broker();
    for attaches in [false, true] {
        let sockets = if attaches { attached_flow() } else { taken_flow() };
        let socket = DatagramSocket::of(sockets[1].as_raw_fd()).unwrap();
        // No datagram lies in the ring when the sleep begins.
        assert_eq!(socket.longest_sleep(), Some(Duration::from_secs(1)), "{attaches}");
        sockets.iter().for_each(|socket| dropped(socket.as_raw_fd()));
    }
}

#[test]
fn datagrams_sent_while_ring_is_attached_are_counted() {
    let Some(_alone) = alone!() else { return };
    let _broker = start_broker();
    for many in [false, true] {
        let sockets = taken_flow();
        let (fd, to) = (sockets[1].as_raw_fd(), sockets[0].local_addr().unwrap());
        let socket = DatagramSocket::of(fd).unwrap();
        if many {
            attach(&sockets);
            socket.sent_many(fd, to, 3);
        } else {
            let kernel = || {
                attach(&sockets);
                0
            };
            socket.send_to(fd, to, DatagramCarrier::Kernel, CallerBuffers::NONE, kernel);
        }
        let tx = socket.tx.hold().unwrap();
        let (own, _) = tx.to[tx.last].flow.and_then(FlowPlaces::pages).unwrap();
        let before_ring = 1;
        assert_eq!(own.tx_path.switches.load(Ordering::Relaxed), before_ring + if many { 3 } else { 1 });
        drop(tx);
        sockets.iter().for_each(|socket| dropped(socket.as_raw_fd()));
    }
}

#[test]
fn datagrams_of_other_calls_are_not_overtaken() {
    let Some(_alone) = alone!() else { return };
    let _broker = start_broker();
    let mut file = tempfile::tempfile().unwrap();
    let (out, into) = std::io::pipe().unwrap();
    std::io::Write::write_all(&mut &into, b"1").unwrap();
    std::io::Write::write_all(&mut file, b"1").unwrap();
    type Call<'a> = Box<dyn Fn(c_int) -> Result<usize, Errno> + 'a>;
    let calls: [Call<'_>; 3] = [
        Box::new(|fd| pwritev2(fd, b"1")),
        Box::new(|fd| sendfile(fd, file.as_raw_fd(), &mut 0, 1)),
        Box::new(|fd| splice(out.as_raw_fd(), fd, 1)),
    ];
    for (number, call) in calls.iter().enumerate() {
        let sockets = attached_flow();
        connect(&sockets);
        let [receiver, sender] = sockets.each_ref().map(AsRawFd::as_raw_fd);
        assert_eq!(call(sender), Ok(1), "{number}");
        assert_eq!(send(sender, b"2", 0), Ok(1));
        let got = [(); 2].map(|()| recv(receiver, 8, libc::MSG_DONTWAIT).unwrap());
        assert_eq!(got, [b"1", b"2"], "{number}");
        sockets.iter().for_each(|socket| dropped(socket.as_raw_fd()));
    }
}

#[test]
fn null_buffer_is_efault_beside_attached_ring() {
    let Some(_alone) = alone!() else { return };
    let _broker = start_broker();
    let sockets = attached_flow();
    connect(&sockets);
    let fd = sockets[1].as_raw_fd();
    #[expect(unsafe_code, reason = "names memory that is not there, which the call has to find")]
    // SAFETY: no memory is at this address, and the call must not use it.
    let buffers = unsafe { CallerBuffers::new(&[libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 8 }]) };
    let to = sockets[0].local_addr().unwrap();
    let socket = DatagramSocket::of(fd).unwrap();
    assert_eq!(socket.send_to(fd, to, DatagramCarrier::Any(0), buffers, || -7), -7, "the kernel judges it");
    sockets.iter().for_each(|socket| dropped(socket.as_raw_fd()));
}
