//! UDP sockets with rings in epoll sets.

use super::*;
use crate::broker::tests::{ended_well, fork};
use crate::calls::testing::{EpollSet, HUNG, LONG, close, dup, dup2};
use rustix::io::Errno;
use std::sync::atomic::AtomicU32;
use std::thread::ScopedJoinHandle;

const IN: u32 = libc::EPOLLIN as u32;
const ET: u32 = libc::EPOLLET as u32;
const ONCE: u32 = (libc::EPOLLIN | libc::EPOLLONESHOT) as u32;

/// A receiver, and an epoll set that has it under the number 7, or another socket under the number 5.
struct SetOfOne {
    set: EpollSet,
    lying: Lying,
    socket: &'static DatagramSocket,
    other: UdpSocket,
}

impl SetOfOne {
    fn empty() -> Self {
        let (set, lying) = (EpollSet::new(), Lying::new());
        let socket = lying.socket();
        Self { set, lying, socket, other: UdpSocket::bind(("127.0.0.1", 0)).unwrap() }
    }

    fn new(events: u32) -> Self {
        let this = Self::empty();
        this.add(events);
        this
    }

    fn with_another_descriptor(events: u32) -> Self {
        let this = Self::empty();
        this.set.add(this.other.as_raw_fd(), events, 5);
        this
    }

    fn add(&self, events: u32) {
        self.set.add(self.lying.fd(), events, 7);
    }

    fn arm(&self) {
        self.set.change(self.lying.fd(), ONCE, 7);
    }

    /// Whether the receiver is reported. Asks twice: what was reported once is not reported again.
    fn reports_once(&self) -> bool {
        let told = self.set.now();
        assert_eq!(self.set.now(), []);
        assert!([[].as_slice(), &[(IN, 7)]].contains(&told.as_slice()), "{told:?}");
        !told.is_empty()
    }

    fn read_all(&self) -> usize {
        std::iter::from_fn(|| self.lying.receive()).count()
    }

    fn sleepers(&self) -> u32 {
        self.socket.sleepers.count()
    }
}

#[test]
fn oneshot_event_comes_once_by_ring_or_kernel() {
    let Some(_alone) = alone!() else { return };
    let _broker = start_broker();
    let mut set = SetOfOne::new(ONCE);
    assert!(set.socket.may_have_rings() && !set.reports_once());
    set.lying.write(8);
    assert!(set.reports_once(), "by the ring");
    set.lying.send_by_kernel();
    assert!(!set.reports_once(), "another, before it is armed");
    set.arm();
    assert!(set.reports_once());
    assert_eq!(set.read_all(), 2);
    set.arm();
    assert!(!set.reports_once(), "all was read");
    set.lying.send_by_kernel();
    assert!(set.reports_once(), "by the kernel");
    set.lying.write(8);
    assert!(!set.reports_once());
    set.arm();
    assert!(set.reports_once());
    assert_eq!(set.read_all(), 2);
    // Asked for once more without `EPOLLONESHOT`.
    set.set.change(set.lying.fd(), IN, 7);
    set.lying.send_by_kernel();
    assert_eq!([(); 2].map(|()| set.set.now()), [[(IN, 7)]; 2]);
    set.arm();
    set.set.take_out(set.lying.fd()).unwrap();
    assert!(!set.reports_once() && set.read_all() == 1);
}

#[test]
fn oneshot_refusals_of_kernel_reach_program() {
    let Some(_alone) = alone!() else { return };
    let _broker = start_broker();
    let mut set = SetOfOne::new(ONCE);
    let fd = set.lying.fd();
    assert_eq!(set.set.ctl(libc::EPOLL_CTL_ADD, fd, ONCE, 8), Err(Errno::EXIST));
    let exclusive = ONCE | libc::EPOLLEXCLUSIVE as u32;
    assert_eq!(set.set.ctl(libc::EPOLL_CTL_MOD, fd, exclusive, 8), Err(Errno::INVAL));
    set.lying.write(8);
    assert!(set.reports_once(), "it is as it was");
    set.set.take_out(fd).unwrap();
    assert_eq!(set.set.ctl(libc::EPOLL_CTL_MOD, fd, ONCE, 8), Err(Errno::NOENT));
}

#[test]
fn oneshot_in_set_that_becomes_nested_is_reported() {
    let Some(_alone) = alone!() else { return };
    let _broker = start_broker();
    for was_reported in [false, true] {
        let (set, outer) = (SetOfOne::new(ONCE), EpollSet::new());
        if was_reported {
            set.lying.send_by_kernel();
            assert!(set.reports_once() && set.read_all() == 1);
        }
        outer.add(set.set.0, IN, 9);
        set.lying.send_by_kernel();
        assert_eq!(!outer.now().is_empty(), !was_reported);
        assert_eq!(set.reports_once(), !was_reported);
        set.arm();
        assert_eq!(outer.now(), [(IN, 9)]);
        assert!(set.reports_once());
    }
}

/// An event of a set as the kernel has it, without this library.
fn kernel(set: &EpollSet) -> Option<(u32, u64)> {
    let mut event = libc::epoll_event { events: 0, u64: 0 };
    #[expect(unsafe_code, reason = "the C library's call")]
    // SAFETY: an array of one.
    let n = unsafe { crate::real::epoll_wait(set.0, &raw mut event, 1, 0) };
    (n == 1).then_some((event.events, event.u64))
}

#[test]
fn next_socket_of_a_number_keeps_its_registration() {
    let Some(_alone) = alone!() else { return };
    let _broker = start_broker();
    let (set, outer) = (SetOfOne::new(ONCE), EpollSet::new());
    let fd = set.lying.fd();
    let copy = dup(fd);
    let next = UdpSocket::bind(("127.0.0.1", 0)).unwrap();
    dup2(next.as_raw_fd(), fd);
    set.set.add(fd, IN, 5);
    // The kernel gets back what it has under a number of ours.
    outer.add(set.set.0, IN, 9);
    set.lying.sender.send_to(b"kernel", next.local_addr().unwrap()).unwrap();
    assert_eq!([(); 2].map(|()| set.set.now()), [[(IN, 5)]; 2]);
    close(copy);
}

#[test]
fn event_told_before_child_uses_set_is_not_told_again() {
    let Some(_alone) = alone!() else { return };
    let _broker = start_broker();
    let set = SetOfOne::new(ONCE);
    let (mut hears, says) = std::io::pipe().unwrap();
    crate::ready::before_fork();
    let child = fork(|| {
        crate::process::became_child();
        crate::ready::after_fork();
        std::io::Read::read_exact(&mut hears, &mut [0]).unwrap();
        set.set.now().is_empty()
    });
    crate::ready::forked();
    set.lying.send_by_kernel();
    assert!(set.reports_once());
    std::io::Write::write_all(&mut &says, &[1]).unwrap();
    assert!(ended_well(child));
    assert_eq!(kernel(&set.set), None, "the child has armed it");
    // Another process may have the set, which knows no number of ours.
    set.arm();
    assert_eq!([kernel(&set.set), kernel(&set.set)], [Some((IN, 7)), None]);
    assert!(!set.socket.may_have_rings());
}

#[test]
fn set_that_is_passed_on_has_oneshot_as_program_made_it() {
    let Some(_alone) = alone!() else { return };
    let _broker = start_broker();
    for was_reported in [false, true] {
        let mut set = SetOfOne::new(ONCE);
        if was_reported {
            set.lying.write(8);
            assert!(set.reports_once());
        }
        crate::ready::hand_over(set.set.0);
        set.lying.send_by_kernel();
        assert_eq!(kernel(&set.set), (!was_reported).then_some((IN, 7)));
        set.arm();
        assert_eq!([kernel(&set.set), kernel(&set.set)], [Some((IN, 7)), None]);
    }
}

/// The kernel's number of a thread of this process, which the thread enters.
#[derive(Default)]
struct ThreadNumber(AtomicU32);

impl ThreadNumber {
    fn enter(&self) {
        self.0.store(crate::sys::thread(), Ordering::Relaxed);
    }

    /// Waits until the thread sleeps in the kernel, in a wait for an epoll set.
    fn await_sleep(&self) {
        let start = Instant::now();
        while !self.sleeps_in_epoll() {
            assert!(start.elapsed() < HUNG, "it does not sleep");
            std::thread::yield_now();
        }
    }

    fn sleeps_in_epoll(&self) -> bool {
        // The number of the call if the thread is blocked in one, and `running` otherwise.
        let path = format!("/proc/self/task/{}/syscall", self.0.load(Ordering::Relaxed));
        let call = std::fs::read_to_string(path).unwrap_or_default();
        let number = call.split(' ').next().and_then(|number| number.parse().ok());
        number.is_some_and(|number| {
            [libc::SYS_epoll_wait, libc::SYS_epoll_pwait, libc::SYS_epoll_pwait2].contains(&number)
        })
    }
}

/// Does something while a thread sleeps in the set; returns what the thread gets.
fn sleep_while(set: &SetOfOne, act: impl FnOnce()) -> Vec<(u32, u64)> {
    let number = ThreadNumber::default();
    let told = std::thread::scope(|scope| {
        let sleeper = scope.spawn(|| {
            number.enter();
            set.set.wait()
        });
        number.await_sleep();
        act();
        sleeper.join().unwrap()
    });
    assert_eq!(set.sleepers(), 0);
    told
}

#[test]
fn rearmed_oneshot_with_data_in_ring_wakes_sleeper() {
    let Some(_alone) = alone!() else { return };
    let _broker = start_broker();
    let mut set = SetOfOne::new(ONCE);
    set.lying.write(8);
    assert!(set.reports_once());
    assert_eq!(sleep_while(&set, || set.arm()), [(IN, 7)]);
    assert_eq!(set.read_all(), 1);
}

#[test]
fn bytes_in_ring_without_proof_are_there_for_a_sleeper() {
    let Some(_alone) = alone!() else { return };
    let broker = start_broker();
    let mut lying = Lying::new();
    let poller = Poller::registered(table::get(lying.fd()).bits()).unwrap();
    assert!(!poller.has_bytes());
    lying.write(8);
    drop(broker);
    lying.until(|lying| proof_for_receiver(lying.number) != Proof::Good);
    assert!(poller.has_bytes() && !poller.is_waiting(), "the thread that is woken waits until they are proved");
}

#[test]
fn sleeper_closes_rings_of_socket_that_is_added_meanwhile() {
    let Some(_alone) = alone!() else { return };
    let _broker = start_broker();
    for events in [IN, ONCE] {
        let set = SetOfOne::with_another_descriptor(IN);
        let told = sleep_while(&set, || {
            set.add(events);
            let start = Instant::now();
            while set.sleepers() == 0 {
                assert!(start.elapsed() < HUNG, "its rings stay open");
                std::thread::yield_now();
            }
            set.lying.send_by_kernel();
        });
        assert_eq!(told, [(IN, 7)]);
        assert_eq!(set.lying.receive(), Some(6));
    }
}

#[test]
fn rings_stay_closed_until_each_earlier_sleeper_has_woken() {
    let Some(_alone) = alone!() else { return };
    let _broker = start_broker();
    for events in [IN, ONCE] {
        let set = SetOfOne::with_another_descriptor(IN | ET);
        let numbers = [(); 2].map(|()| ThreadNumber::default());
        std::thread::scope(|scope| {
            let mut sleepers = numbers.each_ref().map(|number| {
                Some(scope.spawn(|| {
                    number.enter();
                    set.set.wait_for(16, LONG).unwrap()
                }))
            });
            numbers.iter().for_each(ThreadNumber::await_sleep);
            set.add(events);
            assert!(set.sleepers() > 0, "its rings are open");
            set.lying.sender.send_to(b"edge", set.other.local_addr().unwrap()).unwrap();
            let start = Instant::now();
            let first = loop {
                let is_over = |one: &Option<ScopedJoinHandle<'_, _>>| one.as_ref().is_some_and(|it| it.is_finished());
                if let Some(first) = sleepers.iter().position(is_over) {
                    break first;
                }
                assert!(start.elapsed() < HUNG, "no thread has woken");
                std::thread::yield_now();
            };
            assert_eq!(sleepers[first].take().unwrap().join().unwrap(), [(IN, 5)]);
            // If the bell has woken it, it sleeps again.
            numbers[1 - first].await_sleep();
            assert!(set.sleepers() > 0, "open while one sleeps that may not know of it");
            set.lying.send_by_kernel();
            for last in sleepers.into_iter().flatten() {
                assert_eq!(last.join().unwrap(), [(IN, 7)]);
            }
        });
        assert_eq!(set.sleepers(), 0);
        assert_eq!(set.lying.receive(), Some(6));
    }
}

#[test]
fn ring_event_is_added_to_event_of_kernel() {
    let Some(_alone) = alone!() else { return };
    let _broker = start_broker();
    const OUT: u32 = libc::EPOLLOUT as u32;
    let mut set = SetOfOne::new(IN | OUT);
    assert_eq!(set.set.now(), [(OUT, 7)]);
    set.lying.write(8);
    assert_eq!(set.set.now(), [(IN | OUT, 7)]);
    assert_eq!(set.set.wait_for(1, 0).unwrap(), [(IN | OUT, 7)], "it needs no room");
}

#[test]
fn ring_datagram_behind_unread_one_is_a_new_edge() {
    let Some(_alone) = alone!() else { return };
    let _broker = start_broker();
    let mut set = SetOfOne::new(IN | ET);
    for _ in 0..2 {
        set.lying.write(8);
        assert!(set.reports_once());
    }
    assert_eq!(set.lying.receive(), Some(8));
    assert!(!set.reports_once(), "the one that is left was reported");
}

#[test]
fn sockets_take_turns_in_answer_with_little_room() {
    let Some(_alone) = alone!() else { return };
    let _broker = start_broker();
    let mut set = SetOfOne::new(IN);
    let mut second = Lying::new();
    set.set.add(second.fd(), IN, 8);
    set.lying.write(8);
    second.write(8);
    let told = [(); 3].map(|()| set.set.wait_for(1, 0).unwrap());
    assert_eq!(told, [[(IN, 7)], [(IN, 8)], [(IN, 7)]]);
}
