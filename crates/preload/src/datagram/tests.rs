//! A receiver against a sender that owns its region and writes into it what it likes.

use super::address::Wanted;
use super::flow::{FlowPlaces, proof_for_receiver};
use super::*;
use crate::broker::tests::alone::alone;
use crate::broker::tests::{broker as start_broker, ended_well, fork};
use crate::calls::testing::{close, dup, dup2, epoll_create, epoll_ctl, epoll_wait, set_option};
use libc::iovec;
use partywall_protocol::directory::Proof;
use partywall_shm::record;
use rustix::fd::{AsFd, AsRawFd};
use rustix::io::Errno;
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
    /// A flow from the one to the other, after one datagram by the kernel.
    fn new() -> Self {
        let [receiver, sender] = [(); 2].map(|()| UdpSocket::bind(("127.0.0.1", 0)).unwrap());
        let fd = receiver.as_raw_fd();
        made(fd, libc::AF_INET, libc::SOCK_DGRAM, 0);
        broker::datagram::be_open();
        let socket = DatagramSocket::of(fd).unwrap();
        socket.publish(fd);
        assert!(socket.has(flags::PUBLISHED));
        let flow = FlowPlaces::allocate().unwrap();
        let (region, geometry) = flow.make_region(RING).unwrap();
        let to = receiver.local_addr().unwrap();
        let number = broker::offer_datagrams(sender.as_raw_fd(), to, geometry, region.as_fd()).unwrap();
        sender.send_to(b"by the kernel", to).unwrap();
        let mut this = Self { receiver, sender, flow, tail: 0, number };
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
        let fd = self.receiver.as_raw_fd();
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
        dropped(self.receiver.as_raw_fd());
        self.flow.free();
    }
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
fn datagram_longer_than_the_kernel_carries_is_refused() {
    let Some(_alone) = alone!() else { return };
    let _broker = start_broker();
    let mut lying = Lying::new();
    lying.write(65_507);
    assert_eq!(lying.receive(), Some(65_507));
    lying.write(100_000);
    assert_eq!(lying.receive(), None);
    let socket = DatagramSocket::of(lying.receiver.as_raw_fd()).unwrap();
    lying.until(|lying| lying.receive().is_none() && socket.rx.hold().unwrap().next_len().is_none());
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
        let socket = DatagramSocket::of(receiver.receiver.as_raw_fd()).unwrap();
        let received = scope.spawn(move || receiver.receive_with(0));
        while socket.sleepers.load(Ordering::SeqCst) == 0 {
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
fn sender_that_never_finishes_loses_its_ring() {
    let Some(_alone) = alone!() else { return };
    let _broker = start_broker();
    let lying = Lying::new();
    own_page(lying.flow).tx_path.switched_at.store(1, Ordering::Release);
    let socket = DatagramSocket::of(lying.receiver.as_raw_fd()).unwrap();
    lying.receiver.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    let start = Instant::now();
    while socket.inbound.load(Ordering::Relaxed) != 0 {
        assert_eq!(lying.receive_with(0), None);
        assert!(start.elapsed() < Duration::from_secs(100), "it keeps its ring");
    }
}

/// The length of a message, its flags, and the length of the datagrams of which it consists if it says so.
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
    let fd = lying.receiver.as_raw_fd();
    let socket = DatagramSocket::of(fd).unwrap();
    set_option(fd, libc::SOL_UDP, libc::UDP_GRO, 1).unwrap();
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

const IN: c_int = libc::EPOLLIN;
const ONCE: c_int = libc::EPOLLIN | libc::EPOLLONESHOT;

/// An epoll set that has the receiver under the number 7.
struct SetOfOne<'a>(c_int, &'a mut Lying);

impl<'a> SetOfOne<'a> {
    fn new(lying: &'a mut Lying, events: c_int) -> Self {
        let set = epoll_create();
        epoll_ctl(set, libc::EPOLL_CTL_ADD, lying.receiver.as_raw_fd(), events, 7).unwrap();
        Self(set, lying)
    }

    fn arm(&self) {
        epoll_ctl(self.0, libc::EPOLL_CTL_MOD, self.1.receiver.as_raw_fd(), ONCE, 7).unwrap();
    }

    /// Twice: what was told once is not told again.
    fn reports_once(&self) -> bool {
        let told = epoll_wait(self.0, 0).unwrap();
        assert_eq!(epoll_wait(self.0, 0).unwrap(), []);
        assert!([[].as_slice(), &[(IN, 7)]].contains(&told.as_slice()), "{told:?}");
        !told.is_empty()
    }

    fn send_by_kernel(&self) {
        self.1.sender.send_to(b"kernel", self.1.receiver.local_addr().unwrap()).unwrap();
    }

    fn read_all(&self) -> usize {
        std::iter::from_fn(|| self.1.receive()).count()
    }
}

impl Drop for SetOfOne<'_> {
    fn drop(&mut self) {
        close(self.0);
    }
}

#[test]
fn oneshot_event_comes_once_by_ring_or_kernel() {
    let Some(_alone) = alone!() else { return };
    let _broker = start_broker();
    let mut lying = Lying::new();
    let set = SetOfOne::new(&mut lying, ONCE);
    let socket = DatagramSocket::of(set.1.receiver.as_raw_fd()).unwrap();
    assert!(socket.may_have_rings() && !set.reports_once());
    set.1.write(8);
    assert!(set.reports_once(), "by the ring");
    set.send_by_kernel();
    assert!(!set.reports_once(), "another, before it is armed");
    set.arm();
    assert!(set.reports_once());
    assert_eq!(set.read_all(), 2);
    set.arm();
    assert!(!set.reports_once(), "all was read");
    set.send_by_kernel();
    assert!(set.reports_once(), "by the kernel");
    set.1.write(8);
    assert!(!set.reports_once());
    set.arm();
    assert!(set.reports_once());
    assert_eq!(set.read_all(), 2);
    // Asked for once more without `EPOLLONESHOT`.
    epoll_ctl(set.0, libc::EPOLL_CTL_MOD, set.1.receiver.as_raw_fd(), IN, 7).unwrap();
    set.send_by_kernel();
    assert_eq!([(); 2].map(|()| epoll_wait(set.0, 0).unwrap()), [[(IN, 7)]; 2]);
    set.arm();
    epoll_ctl(set.0, libc::EPOLL_CTL_DEL, set.1.receiver.as_raw_fd(), 0, 0).unwrap();
    assert!(!set.reports_once() && set.read_all() == 1);
}

#[test]
fn oneshot_refusals_of_kernel_reach_program() {
    let Some(_alone) = alone!() else { return };
    let _broker = start_broker();
    let mut lying = Lying::new();
    let set = SetOfOne::new(&mut lying, ONCE);
    let fd = set.1.receiver.as_raw_fd();
    assert_eq!(epoll_ctl(set.0, libc::EPOLL_CTL_ADD, fd, ONCE, 8), Err(Errno::EXIST));
    let exclusive = ONCE | libc::EPOLLEXCLUSIVE;
    assert_eq!(epoll_ctl(set.0, libc::EPOLL_CTL_MOD, fd, exclusive, 8), Err(Errno::INVAL));
    set.1.write(8);
    assert!(set.reports_once(), "it is as it was");
    epoll_ctl(set.0, libc::EPOLL_CTL_DEL, fd, 0, 0).unwrap();
    assert_eq!(epoll_ctl(set.0, libc::EPOLL_CTL_MOD, fd, ONCE, 8), Err(Errno::NOENT));
}

#[test]
fn oneshot_in_set_that_becomes_nested_is_reported() {
    let Some(_alone) = alone!() else { return };
    let _broker = start_broker();
    for was_reported in [false, true] {
        let mut lying = Lying::new();
        let set = SetOfOne::new(&mut lying, ONCE);
        let outer = epoll_create();
        if was_reported {
            set.send_by_kernel();
            assert!(set.reports_once() && set.read_all() == 1);
        }
        epoll_ctl(outer, libc::EPOLL_CTL_ADD, set.0, IN, 9).unwrap();
        set.send_by_kernel();
        assert_eq!(!epoll_wait(outer, 0).unwrap().is_empty(), !was_reported);
        assert_eq!(set.reports_once(), !was_reported);
        set.arm();
        assert_eq!(epoll_wait(outer, 0).unwrap(), [(IN, 9)]);
        assert!(set.reports_once());
        close(outer);
    }
}

/// An event of a set as the kernel has it, without this library.
fn kernel(set: c_int) -> Option<(c_int, u64)> {
    let mut event = libc::epoll_event { events: 0, u64: 0 };
    #[expect(unsafe_code, reason = "the C library's call")]
    // SAFETY: an array of one.
    let n = unsafe { crate::real::epoll_wait(set, &raw mut event, 1, 0) };
    (n == 1).then_some((event.events.cast_signed(), event.u64))
}

#[test]
fn next_socket_of_a_number_keeps_its_registration() {
    let Some(_alone) = alone!() else { return };
    let _broker = start_broker();
    let lying = Lying::new();
    let fd = lying.receiver.as_raw_fd();
    let (set, outer) = (epoll_create(), epoll_create());
    epoll_ctl(set, libc::EPOLL_CTL_ADD, fd, ONCE, 7).unwrap();
    let copy = dup(fd);
    let next = UdpSocket::bind(("127.0.0.1", 0)).unwrap();
    dup2(next.as_raw_fd(), fd);
    epoll_ctl(set, libc::EPOLL_CTL_ADD, fd, IN, 5).unwrap();
    // The kernel gets back what it has under a number of ours.
    epoll_ctl(outer, libc::EPOLL_CTL_ADD, set, IN, 9).unwrap();
    lying.sender.send_to(b"kernel", next.local_addr().unwrap()).unwrap();
    assert_eq!([(); 2].map(|()| epoll_wait(set, 0).unwrap()), [[(IN, 5)]; 2]);
    [copy, set, outer].into_iter().for_each(close);
}

#[test]
fn event_told_before_child_uses_set_is_not_told_again() {
    let Some(_alone) = alone!() else { return };
    let _broker = start_broker();
    let mut lying = Lying::new();
    let set = SetOfOne::new(&mut lying, ONCE);
    let socket = DatagramSocket::of(set.1.receiver.as_raw_fd()).unwrap();
    let (mut hears, says) = std::io::pipe().unwrap();
    crate::ready::before_fork();
    let child = fork(|| {
        crate::process::became_child();
        crate::ready::after_fork();
        std::io::Read::read_exact(&mut hears, &mut [0]).unwrap();
        epoll_wait(set.0, 0).unwrap().is_empty()
    });
    crate::ready::forked();
    set.send_by_kernel();
    assert!(set.reports_once());
    std::io::Write::write_all(&mut &says, &[1]).unwrap();
    assert!(ended_well(child));
    assert_eq!(kernel(set.0), None, "the child has armed it");
    // Another process may have the set, which knows no number of ours.
    set.arm();
    assert_eq!([kernel(set.0), kernel(set.0)], [Some((IN, 7)), None]);
    assert!(!socket.may_have_rings());
}

#[test]
fn set_that_is_passed_on_has_oneshot_as_program_made_it() {
    let Some(_alone) = alone!() else { return };
    let _broker = start_broker();
    for was_reported in [false, true] {
        let mut lying = Lying::new();
        let set = SetOfOne::new(&mut lying, ONCE);
        if was_reported {
            set.1.write(8);
            assert!(set.reports_once());
        }
        crate::ready::hand_over(set.0);
        set.send_by_kernel();
        assert_eq!(kernel(set.0), (!was_reported).then_some((IN, 7)));
        set.arm();
        assert_eq!([kernel(set.0), kernel(set.0)], [Some((IN, 7)), None]);
    }
}

/// Has a thread sleep in a set while something is done; returns what it was told.
fn sleep_while(set: c_int, socket: &DatagramSocket, until: impl Fn() -> bool, act: impl FnOnce()) -> (c_int, u64) {
    std::thread::scope(|scope| {
        let start = Instant::now();
        let sleeper = scope.spawn(|| epoll_wait(set, 100_000).unwrap());
        while !until() {
            std::thread::yield_now();
        }
        act();
        let told = sleeper.join().unwrap();
        assert_eq!(socket.sleepers.load(Ordering::SeqCst), 0);
        assert!(start.elapsed() < Duration::from_secs(60), "found when time was up: it was not woken");
        *told.first().expect("it was not woken")
    })
}

#[test]
fn rearmed_oneshot_with_data_in_ring_wakes_sleeper() {
    let Some(_alone) = alone!() else { return };
    let _broker = start_broker();
    let mut lying = Lying::new();
    let set = SetOfOne::new(&mut lying, ONCE);
    let socket = DatagramSocket::of(set.1.receiver.as_raw_fd()).unwrap();
    set.1.write(8);
    assert!(set.reports_once());
    let is_asleep = || socket.sleepers.load(Ordering::SeqCst) != 0;
    let told = sleep_while(set.0, socket, is_asleep, || set.arm());
    assert_eq!((told, set.read_all()), ((IN, 7), 1));
}

#[test]
fn sleeper_closes_rings_of_socket_that_is_added_meanwhile() {
    let Some(_alone) = alone!() else { return };
    let _broker = start_broker();
    for events in [IN, ONCE] {
        let lying = Lying::new();
        let fd = lying.receiver.as_raw_fd();
        let socket = DatagramSocket::of(fd).unwrap();
        let (set, other) = (epoll_create(), UdpSocket::bind(("127.0.0.1", 0)).unwrap());
        epoll_ctl(set, libc::EPOLL_CTL_ADD, other.as_raw_fd(), IN, 5).unwrap();
        let asleep = std::sync::atomic::AtomicBool::new(false);
        let told = sleep_while(
            set,
            socket,
            || {
                // It is given some time to sleep in the kernel.
                std::thread::sleep(Duration::from_millis(20));
                asleep.swap(true, Ordering::Relaxed)
            },
            || {
                epoll_ctl(set, libc::EPOLL_CTL_ADD, fd, events, 7).unwrap();
                let start = Instant::now();
                while socket.sleepers.load(Ordering::SeqCst) == 0 {
                    assert!(start.elapsed() < Duration::from_secs(60), "its rings stay open");
                    std::thread::yield_now();
                }
                lying.sender.send_to(b"kernel", lying.receiver.local_addr().unwrap()).unwrap();
            },
        );
        assert_eq!(told, (IN, 7));
        assert_eq!(lying.receive(), Some(6));
        close(set);
    }
}

#[test]
fn rings_stay_closed_until_each_earlier_sleeper_has_woken() {
    let Some(_alone) = alone!() else { return };
    let _broker = start_broker();
    for events in [IN, ONCE] {
        let lying = Lying::new();
        let fd = lying.receiver.as_raw_fd();
        let socket = DatagramSocket::of(fd).unwrap();
        let (set, other) = (epoll_create(), UdpSocket::bind(("127.0.0.1", 0)).unwrap());
        epoll_ctl(set, libc::EPOLL_CTL_ADD, other.as_raw_fd(), IN | libc::EPOLLET, 5).unwrap();
        std::thread::scope(|scope| {
            let mut sleepers = [(); 2].map(|()| Some(scope.spawn(|| epoll_wait(set, 100_000).unwrap())));
            // They are given some time to sleep in the kernel.
            std::thread::sleep(Duration::from_millis(50));
            epoll_ctl(set, libc::EPOLL_CTL_ADD, fd, events, 7).unwrap();
            assert!(socket.sleepers.load(Ordering::SeqCst) > 0, "its rings are open");
            lying.sender.send_to(b"edge", other.local_addr().unwrap()).unwrap();
            let start = Instant::now();
            let first = loop {
                if let Some(one) = sleepers.iter_mut().find(|one| one.as_ref().is_some_and(|it| it.is_finished())) {
                    break one.take().unwrap();
                }
                assert!(start.elapsed() < Duration::from_secs(60), "no thread has woken");
                std::thread::yield_now();
            };
            assert_eq!(first.join().unwrap(), [(IN, 5)]);
            assert!(socket.sleepers.load(Ordering::SeqCst) > 0, "open while one sleeps that may not know of it");
            lying.sender.send_to(b"kernel", lying.receiver.local_addr().unwrap()).unwrap();
            for last in sleepers.into_iter().flatten() {
                assert_eq!(last.join().unwrap(), [(IN, 7)]);
            }
        });
        assert_eq!(socket.sleepers.load(Ordering::SeqCst), 0);
        assert_eq!(lying.receive(), Some(6));
        close(set);
    }
}
