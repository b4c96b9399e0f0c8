//! Offers that a receiver finds while it cannot take them, or beside others, and requests that end after another thread has closed the rings.

use super::*;
use crate::broker::tests::{busy_session, requests};
use partywall_shm::status::Reason;

impl Lying {
    /// Sends a datagram by the kernel, and receives it.
    fn exchange_by_kernel(&mut self) {
        self.send_by_kernel();
        self.until(|this| this.receive() == Some(6));
    }

    fn rings(&self) -> u32 {
        self.socket().inbound.load(Ordering::Relaxed)
    }
}

#[test]
fn offer_found_while_session_is_busy_is_taken_later() {
    let Some(_alone) = alone!() else { return };
    let _broker = start_broker();
    let mut lying = Lying::offered();
    let busy = busy_session();
    lying.exchange_by_kernel();
    assert_eq!(lying.rings(), 0, "the broker could not be asked");
    drop(busy);
    lying.until(|lying| {
        lying.exchange_by_kernel();
        lying.rings() == 1
    });
}

#[test]
fn second_offer_of_one_generation_is_taken_too() {
    let Some(_alone) = alone!() else { return };
    let _broker = start_broker();
    let mut lying = Lying::offered();
    let second = UdpSocket::bind(("127.0.0.1", 0)).unwrap();
    let (flow, _) = offer(&second, &lying.receiver);
    lying.exchange_by_kernel();
    assert_eq!(lying.rings(), 1);
    second.send_to(b"second", lying.receiver.local_addr().unwrap()).unwrap();
    lying.until(|lying| lying.receive() == Some(6));
    assert_eq!(lying.rings(), 2);
    flow.free();
}

#[test]
fn refused_offer_is_asked_for_a_few_times() {
    let Some(_alone) = alone!() else { return };
    let _broker = start_broker();
    let lying = Lying::offered();
    let (fd, socket, from) = (lying.fd(), lying.socket(), lying.sender.local_addr().unwrap());
    // A receiver that is connected to another source cannot have this offer, which stays in the directory.
    lying.receiver.connect(("127.0.0.1", 9)).unwrap();
    let before = requests();
    for _ in 0..100 {
        socket.look_for_offer(fd, from);
    }
    let made = requests() - before;
    assert!((1..=4).contains(&made), "{made}");
    assert!(broker::knows_datagram_offer((fd, &mut None), socket.port(fd), from), "the directory shows it still");
}

#[test]
fn namespace_of_a_receiver_is_asked_for_once() {
    let Some(_alone) = alone!() else { return };
    let _broker = start_broker();
    let mut lying = Lying::offered();
    let (fd, socket, from) = (lying.fd(), lying.socket(), lying.sender.local_addr().unwrap());
    let stranger = UdpSocket::bind(("127.0.0.1", 0)).unwrap();
    stranger.send_to(b"x", lying.receiver.local_addr().unwrap()).unwrap();
    lying.until(|lying| lying.receive() == Some(1));
    let mut rx = socket.rx.hold().unwrap();
    // Another look needs no descriptor.
    assert!(rx.shows_offer(-1, socket.port(fd), from));
}

#[test]
fn flow_taken_before_rings_closed_is_given_up() {
    let Some(_alone) = alone!() else { return };
    let _broker = start_broker();
    let mut lying = Lying::offered();
    let (fd, socket, from) = (lying.fd(), lying.socket(), lying.sender.local_addr().unwrap());
    let closings = socket.closings();
    // As `connect` of another thread, while the broker is being asked.
    socket.close_rings();
    assert_eq!(socket.take_offer(fd, from, closings), Err(Reason::Option));
    assert_eq!(lying.rings(), 0);
    lying.until(|lying| matches!(proof_for_receiver(lying.number), Proof::Ended { .. }));
}

#[test]
fn publication_that_ends_after_rings_closed_is_withdrawn() {
    let Some(_alone) = alone!() else { return };
    let _broker = start_broker();
    let lying = Lying::offered();
    let (fd, socket, at) = (lying.fd(), lying.socket(), lying.receiver.local_addr().unwrap());
    let closes: [fn(&DatagramSocket); 2] = [
        // As `connect` does.
        |socket| {
            socket.close_rings();
            socket.unpublish();
        },
        DatagramSocket::stay_on_kernel,
    ];
    for close in closes {
        let closings = socket.closings();
        close(socket);
        assert!(!broker::knows_receiver(fd, at));
        socket.publish_since(fd, closings);
        assert!(!socket.has(flags::PUBLISHED) && !broker::knows_receiver(fd, at));
    }
}

#[test]
fn publication_that_finds_session_busy_is_tried_again() {
    let Some(_alone) = alone!() else { return };
    let _broker = start_broker();
    let lying = Lying::offered();
    let (fd, socket, at) = (lying.fd(), lying.socket(), lying.receiver.local_addr().unwrap());
    socket.unpublish();
    let busy = busy_session();
    socket.publish(fd);
    drop(busy);
    assert!(!socket.has(flags::PUBLISHED | flags::UNWANTED), "the broker has not refused it");
    let start = Instant::now();
    while !socket.has(flags::PUBLISHED) {
        assert!(start.elapsed() < Duration::from_secs(100), "it stays unpublished");
        socket.publish(fd);
    }
    assert!(broker::knows_receiver(fd, at));
}

#[test]
fn refused_udp_socket_is_published_after_connect() {
    let Some(_alone) = alone!() else { return };
    let _broker = start_broker();
    let lying = Lying::offered();
    let (fd, socket) = (lying.fd(), lying.socket());
    socket.unpublish();
    socket.set(flags::UNWANTED, true);
    lying.receiver.connect(lying.sender.local_addr().unwrap()).unwrap();
    connected(fd, ProgramAddress::NONE);
    assert!(!socket.has(flags::UNWANTED));
    socket.publish(fd);
    assert!(socket.has(flags::PUBLISHED));
}
