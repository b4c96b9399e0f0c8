//! Calls that show a datagram, by `MSG_PEEK` or `FIONREAD`, or that fail, and the receiving calls after them.

use super::*;
use crate::calls::testing::{ioctl_number, recvmmsg};
use rustix::io::Errno;

/// Shows the next datagram to the program; returns its length.
type Show = fn(&Lying) -> Option<usize>;

const SHOWS: [Show; 2] = [
    |lying| lying.receive_with(libc::MSG_PEEK | libc::MSG_DONTWAIT),
    |lying| usize::try_from(ioctl_number(lying.fd(), libc::FIONREAD)).ok(),
];

#[test]
fn datagram_shown_in_kernel_queue_is_received_next() {
    let Some(_alone) = alone!() else { return };
    let _broker = start_broker();
    for show in SHOWS {
        let mut lying = Lying::new();
        lying.send_by_kernel();
        assert_eq!(show(&lying), Some(6));
        lying.write(8);
        assert_eq!(show(&lying), Some(6), "a second look finds the same");
        assert_eq!([(); 3].map(|()| lying.receive()), [Some(6), Some(8), None]);
    }
}

#[test]
fn datagram_shown_to_sleeping_call_is_received_next() {
    let Some(_alone) = alone!() else { return };
    let _broker = start_broker();
    let mut lying = Lying::new();
    std::thread::scope(|scope| {
        let (receiver, socket) = (&lying, lying.socket());
        let shown = scope.spawn(|| receiver.receive_with(libc::MSG_PEEK));
        while !socket.sleepers.are_any() {
            std::thread::yield_now();
        }
        std::thread::sleep(Duration::from_millis(30));
        receiver.send_by_kernel();
        assert_eq!(shown.join().unwrap(), Some(6));
    });
    lying.write(8);
    assert_eq!([(); 2].map(|()| lying.receive()), [Some(6), Some(8)]);
}

#[test]
fn datagram_shown_in_ring_is_received_next() {
    let Some(_alone) = alone!() else { return };
    let _broker = start_broker();
    for show in SHOWS {
        // The kernel's queue has its turn after some calls, whichever of them.
        for calls in 0..20 {
            let mut lying = Lying::new();
            for _ in 0..calls {
                lying.write(9);
                assert_eq!(lying.receive(), Some(9));
            }
            lying.write(8);
            // The queue's first datagram is of another sender.
            let other = UdpSocket::bind(("127.0.0.1", 0)).unwrap();
            other.send_to(b"other", lying.receiver.local_addr().unwrap()).unwrap();
            let [shown, next] = [show(&lying), lying.receive()];
            assert_eq!(shown, next, "after {calls} calls");
            assert_eq!(lying.receive(), if next == Some(8) { Some(5) } else { Some(8) });
        }
    }
}

#[test]
fn kernel_queue_is_read_beside_ring_that_is_always_shown() {
    let Some(_alone) = alone!() else { return };
    let _broker = start_broker();
    for show in SHOWS {
        let mut lying = Lying::new();
        let other = UdpSocket::bind(("127.0.0.1", 0)).unwrap();
        other.send_to(b"other", lying.receiver.local_addr().unwrap()).unwrap();
        let is_read = (0..40).any(|_| {
            lying.write(8);
            show(&lying);
            lying.receive() == Some(5)
        });
        assert!(is_read, "it is starved");
    }
}

#[test]
fn corrupt_ring_does_not_hide_other_datagrams() {
    let Some(_alone) = alone!() else { return };
    let _broker = start_broker();
    let mut lying = Lying::new();
    lying.send_by_kernel();
    lying.write(100_000);
    assert_eq!(lying.receive(), Some(6));
}

#[test]
fn error_behind_received_datagrams_is_kept_for_next_call() {
    let Some(_alone) = alone!() else { return };
    let _broker = start_broker();
    let mut lying = Lying::new();
    let fd = lying.fd();
    let on: c_int = 1;
    #[expect(unsafe_code, reason = "the C library's call, past this library")]
    // SAFETY: a number, and its size. With this option an error concerns a socket that is not connected, too.
    let set = unsafe { libc::setsockopt(fd, libc::IPPROTO_IP, libc::IP_RECVERR, (&raw const on).cast(), 4) };
    assert_eq!(set, 0);
    let closed = UdpSocket::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap();
    lying.write(8);
    lying.receiver.send_to(b"refused", closed).unwrap();
    assert_eq!(recvmmsg::<2>(fd, libc::MSG_DONTWAIT), Ok(1));
    assert_eq!(recvmmsg::<2>(fd, libc::MSG_DONTWAIT), Err(Errno::CONNREFUSED));
    assert_eq!(recvmmsg::<2>(fd, libc::MSG_DONTWAIT), Err(Errno::AGAIN));
}

#[test]
fn null_buffer_is_efault_and_takes_ring_datagram() {
    let Some(_alone) = alone!() else { return };
    let _broker = start_broker();
    let mut lying = Lying::new();
    let mut room = [0u8; 8];
    let null = iovec { iov_base: std::ptr::null_mut(), iov_len: 8 };
    let own = iovec { iov_base: room.as_mut_ptr().cast(), iov_len: 8 };
    let mut read = |list: &[iovec]| {
        lying.write(8);
        #[expect(unsafe_code, reason = "stands for the C library's caller")]
        // SAFETY: memory of this test, or none at all, which the call has to find.
        let buffers = unsafe { CallerBuffers::new(list) };
        sys::take(receiving(lying.fd(), buffers, libc::MSG_DONTWAIT, Wanted::NONE, || panic!("by the kernel")))
    };
    assert_eq!(read(&[null]), Err(Errno::FAULT));
    assert_eq!(read(&[own, null]), Ok(8), "the second is not needed");
    assert_eq!(lying.receive(), None);
}
