//! A ring that one thread takes while another one sleeps in the kernel on the same socket.

use super::*;
use crate::calls::testing::{poll, recvmmsg};

/// Milliseconds, for the time limits of sleepers. A sleep of this length has hung, and its test fails.
const HANGING: c_int = 60_000;
const IN: usize = libc::POLLIN as usize;

/// Waits until a thread counts as a sleeper.
fn until_counted(lying: &mut Lying) {
    lying.until(|lying| lying.socket().sleepers.are_any());
}

/// Takes the ring that the sender has offered, while another thread is in `wait`, which a datagram by the kernel ends. Returns the result of
/// `wait`.
fn take_ring_beside<R: Send>(lying: &mut Lying, wait: impl FnOnce(c_int) -> R + Send) -> R {
    lying.receiver.set_read_timeout(Some(Duration::from_millis(HANGING as u64))).unwrap();
    let (fd, socket, from) = (lying.fd(), lying.socket(), lying.sender.local_addr().unwrap());
    std::thread::scope(|scope| {
        let sleeper = scope.spawn(move || wait(fd));
        until_counted(lying);
        socket.take_offer(fd, from, socket.closings()).unwrap();
        assert!(!socket.rx.hold().unwrap().is_open(), "no datagram in it would wake the sleeper");
        lying.send_by_kernel();
        let result = sleeper.join().unwrap();
        assert_eq!(socket.sleepers.count(), 0);
        result
    })
}

#[test]
fn ring_taken_while_another_thread_polls_stays_closed() {
    let Some(_alone) = alone!() else { return };
    let _broker = start_broker();
    let mut lying = Lying::offered();
    assert_eq!(take_ring_beside(&mut lying, |fd| poll(fd, libc::POLLIN, HANGING)), Ok(IN));
}

#[test]
fn ring_taken_while_a_thread_is_in_recvmmsg_stays_closed() {
    let Some(_alone) = alone!() else { return };
    let _broker = start_broker();
    let mut lying = Lying::offered();
    assert_eq!(take_ring_beside(&mut lying, |fd| recvmmsg::<1>(fd, 0)), Ok(1));
    assert!(lying.socket().rx.hold().unwrap().is_open(), "no thread sleeps any more");
}

#[test]
fn sleeper_on_a_shared_socket_is_counted() {
    let Some(_alone) = alone!() else { return };
    let _broker = start_broker();
    let mut lying = Lying::offered();
    // As after a fork. The child may end while this thread sleeps, and then another thread may take rings.
    lying.socket().set(flags::SHARED, true);
    lying.receiver.set_read_timeout(Some(Duration::from_millis(HANGING as u64))).unwrap();
    std::thread::scope(|scope| {
        let fd = lying.fd();
        let polling = scope.spawn(move || poll(fd, libc::POLLIN, HANGING));
        until_counted(&mut lying);
        lying.send_by_kernel();
        assert_eq!(polling.join().unwrap(), Ok(IN));
    });
    assert_eq!(lying.receive(), Some(6));
    std::thread::scope(|scope| {
        let receiver = &lying;
        let receiving = scope.spawn(move || receiver.receive_with(0));
        while !receiver.socket().sleepers.are_any() && !receiving.is_finished() {
            std::thread::yield_now();
        }
        assert!(receiver.socket().sleepers.are_any());
        receiver.send_by_kernel();
        assert_eq!(receiving.join().unwrap(), Some(6));
    });
}

#[test]
fn call_does_not_sleep_beside_a_ring_taken_just_before() {
    let Some(_alone) = alone!() else { return };
    let _broker = start_broker();
    let mut lying = Lying::new();
    let socket = lying.socket();
    // As a call that has found no ring, before another thread has taken one.
    assert_eq!(socket.on_kernel_alone(|| panic!("the ring is open")), None);
    assert!(socket.rx.hold().unwrap().is_open());
    lying.write(8);
    assert_eq!(lying.receive(), Some(8));
}
