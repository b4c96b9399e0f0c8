//! A receiver against a sender that owns its region and writes into it what it likes.

mod groups;
mod offers;
mod sets;
mod shown;
mod sleepers;

use super::address::Wanted;
use super::flow::{FlowPlaces, IS_BROKER_LATE, proof_for_receiver};
use super::*;
use crate::broker::tests::alone::alone;
use crate::broker::tests::broker as start_broker;
use crate::calls::testing::number_option;
use libc::iovec;
use partywall_protocol::directory::Proof;
use partywall_shm::record;
use rustix::fd::{AsFd, AsRawFd};
use std::net::UdpSocket;
use std::time::{Duration, Instant};

const RING: u64 = 256 << 10;

/// A receiver of ours, and a sender whose region is written by hand.
struct Lying {
    receiver: UdpSocket,
    sender: UdpSocket,
    flow: &'static FlowPlaces,
    tail: u64,
    number: u64,
}

impl Lying {
    /// An offer of a flow from the one to the other.
    fn offered() -> Self {
        let [receiver, sender] = [(); 2].map(|()| UdpSocket::bind(("127.0.0.1", 0)).unwrap());
        let fd = receiver.as_raw_fd();
        made(fd, libc::AF_INET, libc::SOCK_DGRAM, 0);
        open_session();
        let socket = DatagramSocket::of(fd).unwrap();
        socket.publish(fd);
        assert!(socket.has(flags::PUBLISHED));
        let (flow, number) = offer(&sender, &receiver);
        Self { receiver, sender, flow, tail: 0, number }
    }

    /// A flow from the one to the other, after one datagram by the kernel.
    fn new() -> Self {
        let mut this = Self::offered();
        let (socket, number) = (this.socket(), this.number);
        this.sender.send_to(b"by the kernel", this.receiver.local_addr().unwrap()).unwrap();
        let mut got = None;
        this.until(|this| {
            got = this.receive();
            got.is_some()
        });
        assert_eq!(got, Some(13));
        assert_eq!(socket.inbound.load(Ordering::Relaxed), 1, "it has taken the flow");
        assert_eq!(proof_for_receiver(number), Proof::Good);
        this
    }

    fn fd(&self) -> c_int {
        self.receiver.as_raw_fd()
    }

    /// The receiver.
    fn socket(&self) -> &'static DatagramSocket {
        DatagramSocket::of(self.fd()).unwrap()
    }

    fn send_by_kernel(&self) {
        self.sender.send_to(b"kernel", self.receiver.local_addr().unwrap()).unwrap();
    }

    fn until(&mut self, mut is: impl FnMut(&mut Self) -> bool) {
        let start = Instant::now();
        while !is(self) {
            assert!(start.elapsed() < Duration::from_secs(100), "it takes too long");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Writes a datagram into the ring, even if it may not be used.
    fn write(&mut self, len: u32) {
        self.tail = commit(self.flow, self.tail, len);
    }

    /// A call that does not wait: the length of a datagram, or `None` if there is none.
    fn receive(&self) -> Option<usize> {
        self.receive_with(libc::MSG_DONTWAIT)
    }

    fn receive_with(&self, message: c_int) -> Option<usize> {
        let mut room = vec![0u8; 128 << 10];
        let list = [iovec { iov_base: room.as_mut_ptr().cast(), iov_len: room.len() }];
        let mut name = [0u8; 32];
        let mut name_len = 32;
        let (address, address_len) = (name.as_mut_ptr().cast(), &raw mut name_len);
        #[expect(unsafe_code, reason = "stands for the C library's caller")]
        // SAFETY: both live to the end of the function, and `name` has room for `name_len` bytes.
        let wanted = unsafe { Wanted::new(address, address_len) };
        let fd = self.fd();
        #[expect(unsafe_code, reason = "stands for the C library's caller")]
        // SAFETY: a vector that lives to the end of the function.
        let buffers = unsafe { CallerBuffers::new(&list) };
        let got = receiving(fd, buffers, message, wanted, || {
            let (room, len) = (list[0].iov_base, list[0].iov_len);
            #[expect(unsafe_code, reason = "the C library's call")]
            // SAFETY: the buffers of this test.
            unsafe {
                crate::real::recvfrom(fd, room, len, message, address, address_len)
            }
        });
        usize::try_from(got).ok()
    }
}

impl Drop for Lying {
    fn drop(&mut self) {
        dropped(self.fd());
        self.flow.free();
    }
}

/// Sockets are published only when a session is open, for which a busy broker takes several calls.
pub(super) fn open_session() {
    let start = Instant::now();
    while broker::directory().is_none() {
        assert!(start.elapsed() < Duration::from_secs(100), "no session opens");
        broker::datagram::be_open();
    }
}

/// Offers a flow from the one to the other. Returns our end of it, and its number.
fn offer(sender: &UdpSocket, receiver: &UdpSocket) -> (&'static FlowPlaces, u64) {
    let flow = FlowPlaces::allocate().unwrap();
    let (region, geometry) = flow.make_region(RING).unwrap();
    let (fd, to) = (sender.as_raw_fd(), receiver.local_addr().unwrap());
    let number = broker::offer_datagrams(fd, to, (geometry, region.as_fd()), |_, _| panic!("no window")).unwrap();
    (flow, number)
}

/// Writes a datagram behind the tail of a ring; returns the new tail.
fn commit(flow: &FlowPlaces, tail: u64, len: u32) -> u64 {
    let footprint = record::footprint(len.into());
    #[expect(unsafe_code, reason = "writes its own region")]
    // SAFETY: the region of this test, of which nothing beyond the tail is in use.
    let mut span = unsafe { flow.own.own_span(tail, footprint) };
    span.copy_from(0, &record::header(len));
    own_page(flow).control.tx.cursor.tail.store(tail + footprint, Ordering::Release);
    tail + footprint
}

fn own_page(flow: &FlowPlaces) -> &'static partywall_shm::layout::SocketPage {
    #[expect(unsafe_code, reason = "reaches the page of a region that stays mapped")]
    // SAFETY: the berth was filled by `make_region`, and is vacated when the test ends.
    unsafe { flow.own.own_page() }.unwrap()
}

#[test]
fn flow_that_its_taker_cannot_use_is_closed() {
    let Some(_alone) = alone!() else { return };
    let _broker = start_broker();
    let mut lying = Lying::offered();
    let (fd, socket, from) = (lying.fd(), lying.socket(), lying.sender.local_addr().unwrap());
    // As if another thread did something with the socket meanwhile that only the kernel can follow.
    socket.set(flags::KERNEL, true);
    assert!(socket.take_offer(fd, from, socket.closings()).is_err());
    assert_eq!(socket.inbound.load(Ordering::Relaxed), 0);
    lying.until(|lying| matches!(proof_for_receiver(lying.number), Proof::Ended { .. }));
}

#[test]
fn receiver_from_another_machine_sleeps_for_a_second() {
    let Some(_alone) = alone!() else { return };
    let _broker = start_broker();
    let lying = Lying::new();
    let socket = lying.socket();
    assert_eq!(socket.longest_sleep(), None);
    socket.rx.hold().unwrap().pretend_between_machines();
    assert_eq!(socket.longest_sleep(), Some(Duration::from_secs(1)));
}

#[test]
fn socket_that_joins_datagrams_has_no_ring_from_far() {
    let Some(_alone) = alone!() else { return };
    let _broker = start_broker();
    for far in [false, true] {
        let lying = Lying::new();
        let socket = lying.socket();
        socket.set(flags::ARRIVALS, far);
        number_option(lying.fd(), libc::SOL_UDP, libc::UDP_GRO, 1);
        assert_eq!(socket.rx.hold().unwrap().is_open(), !far);
    }
}

#[test]
fn ring_of_another_machine_waits_for_datagrams_in_transit() {
    let Some(_alone) = alone!() else { return };
    let _broker = start_broker();
    let mut lying = Lying::new();
    let socket = lying.socket();
    socket.set(flags::ARRIVALS, true);
    socket.rx.hold().unwrap().pretend_between_machines();
    let sent = |lying: &Lying, count: u32| own_page(lying.flow).tx_path.switches.store(count, Ordering::Release);
    let seen = || socket.rx.hold().unwrap().seen();
    sent(&lying, 1);
    assert_eq!((lying.receive(), seen()), (None, vec![0]), "what was sent before the ring may be in transit");
    lying.until(|lying| {
        assert_eq!(lying.receive(), None);
        seen() == [1]
    });
    // One datagram is in transit by the sender's count, and comes.
    sent(&lying, 2);
    assert_eq!((lying.receive(), seen()), (None, vec![1]));
    lying.send_by_kernel();
    lying.until(|lying| lying.receive() == Some(6));
    assert_eq!((lying.receive(), seen()), (None, vec![2]));
    // Two are lost.
    sent(&lying, 4);
    assert_eq!((lying.receive(), seen()), (None, vec![2]));
    lying.until(|lying| {
        assert_eq!(lying.receive(), None);
        seen() == [4]
    });
}

#[test]
fn datagram_longer_than_the_kernel_carries_is_refused() {
    let Some(_alone) = alone!() else { return };
    let _broker = start_broker();
    let mut lying = Lying::new();
    lying.write(65_507);
    assert_eq!(lying.receive(), Some(65_507));
    lying.write(100_000);
    assert_eq!(lying.receive(), None);
    lying.until(|lying| lying.receive().is_none() && next_len(lying.fd()).is_none());
    lying.write(8);
    assert_eq!(lying.receive(), None, "its ring is given up");
}

#[test]
fn nothing_is_received_from_a_socket_that_is_gone() {
    let Some(_alone) = alone!() else { return };
    let _broker = start_broker();
    let mut lying = Lying::new();
    for _ in 0..2 {
        lying.write(8);
    }
    assert_eq!(lying.receive(), Some(8));
    // The socket is gone; the program that had it still owns the region.
    let port = lying.sender.local_addr().unwrap().port();
    lying.sender = UdpSocket::bind(("127.0.0.1", 0)).unwrap();
    let _next_owner = UdpSocket::bind(("127.0.0.1", port)).unwrap();
    let written = lying.tail;
    lying.until(|lying| proof_for_receiver(lying.number) == Proof::Ended { limit: written });
    lying.write(8);
    assert_eq!(lying.receive(), Some(8), "what was written while the socket was there is its own");
    assert_eq!(lying.receive(), None, "what comes after is nobody's");
}

#[test]
fn limit_beyond_the_ring_lets_nothing_be_received() {
    let Some(_alone) = alone!() else { return };
    let _broker = start_broker();
    // The last value is in order: a ring that is full.
    for (written, is_lie) in [(u64::MAX, true), (8 + RING, true), (RING, false)] {
        let mut lying = Lying::new();
        lying.write(0);
        assert_eq!(lying.receive(), Some(0));
        // The sender says that it has written this, until the flow has ended with its socket.
        let tail = |lying: &Lying, to| own_page(lying.flow).control.tx.cursor.tail.store(to, Ordering::Release);
        let written = written.saturating_add(lying.tail);
        tail(&lying, written);
        lying.sender = UdpSocket::bind(("127.0.0.1", 0)).unwrap();
        lying.until(|lying| proof_for_receiver(lying.number) == Proof::Ended { limit: written });
        tail(&lying, lying.tail);
        lying.write(8);
        assert_eq!(lying.receive(), (!is_lie).then_some(8), "{written}");
    }
}

#[test]
fn nothing_is_received_by_a_ring_that_no_broker_proves() {
    let Some(_alone) = alone!() else { return };
    let broker = start_broker();
    let mut lying = Lying::new();
    drop(broker);
    lying.until(|lying| proof_for_receiver(lying.number) != Proof::Good);
    lying.write(8);
    assert_eq!(lying.receive(), None);
}

#[test]
fn datagram_finished_while_receiver_sleeps_is_received() {
    let Some(_alone) = alone!() else { return };
    let _broker = start_broker();
    let lying = Lying::new();
    let own = own_page(lying.flow);
    // As a sender that is not let run between its look at `WATCHING` and its commit.
    own.tx_path.switched_at.store(1, Ordering::Release);
    lying.receiver.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    std::thread::scope(|scope| {
        let (flow, tail) = (lying.flow, lying.tail);
        let receiver = &lying;
        let socket = receiver.socket();
        let received = scope.spawn(move || receiver.receive_with(0));
        while !socket.sleepers.are_any() {
            std::thread::yield_now();
        }
        // It has waited for the sender, and sleeps.
        std::thread::sleep(Duration::from_millis(30));
        commit(flow, tail, 8);
        own.tx_path.switched_at.store(0, Ordering::Release);
        assert_eq!(received.join().unwrap(), Some(8));
    });
}

#[test]
fn closed_ring_is_read_when_its_proof_is_renewed() {
    let Some(_alone) = alone!() else { return };
    let _broker = start_broker();
    // The socket has rings again later, or stays on the kernel.
    for stays_on_kernel in [false, true] {
        let mut lying = Lying::new();
        lying.write(8);
        let socket = lying.socket();
        IS_BROKER_LATE.store(true, Ordering::Relaxed);
        if stays_on_kernel {
            socket.stay_on_kernel();
        } else {
            socket.close_rings();
        }
        assert!((0..100).all(|_| lying.receive().is_none()));
        lying.receiver.set_read_timeout(Some(Duration::from_millis(10))).unwrap();
        assert_eq!(lying.receive_with(0), None);
        IS_BROKER_LATE.store(false, Ordering::Relaxed);
        assert_eq!(lying.receive(), Some(8), "{stays_on_kernel}");
        assert_eq!(lying.receive(), None);
        let is_given_up = socket.inbound.load(Ordering::Relaxed) == 0;
        assert!(is_given_up || !stays_on_kernel, "it is given up when it was read");
    }
}

#[test]
fn datagram_that_is_written_while_ring_closes_is_received() {
    let Some(_alone) = alone!() else { return };
    let _broker = start_broker();
    let mut lying = Lying::new();
    let own = own_page(lying.flow);
    // As a sender that is not let run between its look at `WATCHING` and its commit.
    own.tx_path.switched_at.store(1, Ordering::Release);
    lying.socket().stay_on_kernel();
    assert!((0..3).all(|_| lying.receive().is_none()));
    lying.write(8);
    own.tx_path.switched_at.store(0, Ordering::Release);
    assert_eq!(lying.receive(), Some(8));
}

#[test]
fn socket_that_is_shut_down_beside_unproved_ring_ends() {
    let Some(_alone) = alone!() else { return };
    let _broker = start_broker();
    let mut lying = Lying::new();
    lying.write(8);
    IS_BROKER_LATE.store(true, Ordering::Relaxed);
    rustix::net::connect(&lying.receiver, &lying.sender.local_addr().unwrap()).unwrap();
    lying.socket().stay_on_kernel();
    rustix::net::shutdown(&lying.receiver, rustix::net::Shutdown::Read).unwrap();
    assert_eq!(lying.receive_with(0), Some(0));
    assert_eq!(lying.socket().inbound.load(Ordering::Relaxed), 1, "the ring is not given up yet");
    IS_BROKER_LATE.store(false, Ordering::Relaxed);
}

#[test]
fn closed_ring_is_read_to_its_end_only() {
    let Some(_alone) = alone!() else { return };
    let _broker = start_broker();
    let mut lying = Lying::new();
    lying.write(8);
    lying.socket().stay_on_kernel();
    assert_eq!(lying.receive(), Some(8));
    // As a sender that does not heed `WATCHING`.
    lying.write(8);
    assert_eq!(lying.receive(), None);
    assert_eq!(lying.socket().inbound.load(Ordering::Relaxed), 0, "it is given up");
}

#[test]
fn closed_ring_of_sender_that_never_finishes_is_given_up() {
    let Some(_alone) = alone!() else { return };
    let _broker = start_broker();
    let mut lying = Lying::new();
    own_page(lying.flow).tx_path.switched_at.store(1, Ordering::Release);
    lying.socket().stay_on_kernel();
    lying.until(|lying| lying.receive().is_none() && lying.socket().inbound.load(Ordering::Relaxed) == 0);
}

#[test]
fn datagram_finished_between_look_and_sleep_is_found_by_nap() {
    let Some(_alone) = alone!() else { return };
    let _broker = start_broker();
    let lying = Lying::new();
    let (own, socket) = (own_page(lying.flow), lying.socket());
    own.tx_path.switched_at.store(1, Ordering::Release);
    assert!(socket.fall_asleep(socket.generation()));
    commit(lying.flow, lying.tail, 8);
    own.tx_path.switched_at.store(0, Ordering::Release);
    assert_eq!(socket.longest_sleep(), Some(Duration::from_millis(50)));
    let start = Instant::now();
    while socket.fall_asleep(socket.generation()) {
        socket.wake_up(socket.generation(), false);
        assert!(start.elapsed() < Duration::from_secs(100), "it is not found");
    }
    socket.wake_up(socket.generation(), true);
    assert_eq!(socket.longest_sleep(), None, "nothing else can come");
}

#[test]
fn sender_that_never_finishes_loses_its_ring() {
    let Some(_alone) = alone!() else { return };
    let _broker = start_broker();
    let lying = Lying::new();
    own_page(lying.flow).tx_path.switched_at.store(1, Ordering::Release);
    let socket = lying.socket();
    lying.receiver.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    let start = Instant::now();
    while socket.inbound.load(Ordering::Relaxed) != 0 {
        assert_eq!(lying.receive_with(0), None);
        assert!(start.elapsed() < Duration::from_secs(100), "it keeps its ring");
    }
}

/// The length of a message, its flags, and the length of the datagrams that were joined, if the control data have it.
type Received = (usize, c_int, Option<c_int>);

/// What a message of `room` bytes of control data, and of a buffer of `len` bytes, brings.
fn receive_message(socket: &UdpSocket, len: usize, room: usize, message: c_int) -> Option<Received> {
    let mut buffer = vec![0u8; len];
    let mut control = [0u64; 8];
    let mut list = [iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: len }];
    #[expect(unsafe_code, reason = "stands for the C library's caller")]
    // SAFETY: zeros are an empty message; all that it points to lives to the end of the function.
    unsafe {
        let mut header: libc::msghdr = std::mem::zeroed();
        (header.msg_iov, header.msg_iovlen) = (list.as_mut_ptr(), 1);
        (header.msg_control, header.msg_controllen) = (control.as_mut_ptr().cast(), room);
        let got = crate::calls::testing::recvmsg(socket.as_raw_fd(), &raw mut header, message | libc::MSG_DONTWAIT);
        let got = usize::try_from(got).ok()?;
        let joined = libc::CMSG_FIRSTHDR(&raw const header).as_ref().map(|one| {
            assert_eq!((one.cmsg_level, one.cmsg_type), (libc::SOL_UDP, libc::UDP_GRO));
            assert_eq!(one.cmsg_len, libc::CMSG_LEN(4) as usize);
            libc::CMSG_DATA(one).cast::<c_int>().read_unaligned()
        });
        Some((got, header.msg_flags, joined))
    }
}

#[test]
fn datagrams_in_ring_are_joined_as_the_option_has_it() {
    let Some(_alone) = alone!() else { return };
    let _broker = start_broker();
    let mut lying = Lying::new();
    let all = |lying: &mut Lying, written: &[u32], len, room, message| {
        written.iter().for_each(|len| lying.write(*len));
        let mut got = Vec::new();
        while let Some(one) = receive_message(&lying.receiver, len, room, message) {
            got.push(one);
        }
        got
    };
    let one = |len| (len, 0, None);
    assert_eq!(all(&mut lying, &[100, 100, 50], 1000, 64, 0), [one(100), one(100), one(50)], "not asked for");
    let (fd, socket) = (lying.fd(), lying.socket());
    number_option(fd, libc::SOL_UDP, libc::UDP_GRO, 1);
    assert!(socket.has(flags::JOINS) && socket.may_have_rings());
    let cases: [(&[u32], usize, usize, &[Received]); 8] = [
        (&[100, 100, 50], 1000, 64, &[(250, 0, Some(100))]),
        (&[100, 50, 100], 1000, 20, &[(150, 0, Some(100)), one(100)]),
        (&[100, 101], 1000, 64, &[one(100), one(101)]),
        (&[100, 0, 100], 1000, 64, &[one(100), one(0), one(100)]),
        (&[0, 0], 1000, 64, &[one(0), one(0)]),
        // No datagram is cut, and joins happen only where the program has room for the length.
        (&[100; 3], 250, 64, &[(200, 0, Some(100)), one(100)]),
        (&[100; 2], 1000, 19, &[one(100), one(100)]),
        (&[100; 2], 99, 64, &[(99, libc::MSG_TRUNC, None), (99, libc::MSG_TRUNC, None)]),
    ];
    for (written, len, room, wanted) in cases {
        assert_eq!(all(&mut lying, written, len, room, 0), wanted, "{written:?} {len} {room}");
    }
    assert_eq!(all(&mut lying, &[10; 70], 1000, 64, 0), [(640, 0, Some(10)), (60, 0, Some(10))]);
    assert_eq!(all(&mut lying, &[30_000; 3], 100_000, 64, 0), [(60_000, 0, Some(30_000)), one(30_000)]);
    lying.write(100);
    lying.write(100);
    let peeked = receive_message(&lying.receiver, 1000, 64, libc::MSG_PEEK | libc::MSG_TRUNC);
    assert_eq!(peeked, Some(one(100)), "a second look finds the same");
    assert_eq!(receive_message(&lying.receiver, 1000, 64, libc::MSG_TRUNC), Some((200, 0, Some(100))));
    // What is no record any more ends the join, and then the ring.
    lying.write(100);
    lying.write(100_000);
    assert_eq!(receive_message(&lying.receiver, 1000, 64, 0), Some(one(100)));
    assert_eq!(receive_message(&lying.receiver, 1000, 64, 0), None);
    assert_eq!(socket.inbound.load(Ordering::Relaxed), 0, "it is given up");
}
