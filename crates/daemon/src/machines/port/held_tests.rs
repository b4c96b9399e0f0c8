//! Programs of a guest that send faster than the event loop reads.

use super::held::HeldPackets;
use super::sent::Sessions;
use super::tests::{Guest, HANG, Served, broker_says};
use super::*;
use crate::machines::carried;
use partywall_protocol::agent::Say;
use partywall_protocol::wire::{self, Message};
use partywall_region::packet;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use std::os::fd::AsFd;

/// What a guest says of a program that sends a packet with this number.
fn sent_by(session: u32, number: u32) -> Vec<u8> {
    Say::Packet { session, window: None, links: vec![], socket: None, bytes: numbered(number) }.encode()
}

fn numbered(number: u32) -> Vec<u8> {
    let mut bytes = number.to_le_bytes().to_vec();
    bytes.resize(1000, 0);
    bytes
}

/// How many of these packets the socket of a session holds.
fn most() -> u32 {
    let (ours, _theirs) = packet::pair().unwrap();
    let fits = |number: &u32| packet::try_send(ours.as_fd(), &carried::encode(None, &numbered(*number)), &[]).is_ok();
    (0..).take_while(fits).count() as u32
}

/// The next packet that the event loop gets of a session; empty at the end.
fn next(broker: &OwnedFd) -> Vec<u8> {
    set_socket_timeout(broker, Timeout::Recv, Some(HANG)).unwrap();
    let mut buf = [0; wire::MAX_PACKET];
    let received = packet::recv(broker.as_fd(), &mut buf).unwrap();
    buf[..received.len].to_vec()
}

/// Reads the packets of a session up to this number, in order.
fn assert_hears(broker: &OwnedFd, numbers: std::ops::Range<u32>) {
    for number in numbers {
        let heard = next(broker);
        assert!(carried::decode(&heard) == Some((None, &numbered(number)[..])), "{number}: {} bytes", heard.len());
    }
}

/// Fills the socket of a session. Another session is open when all of it has been passed on.
fn fill(served: &Served, guest: &mut Guest, session: u32) -> OwnedFd {
    (0..most()).for_each(|number| guest.say(sent_by(session, number)));
    served.open(guest, session + 1)
}

#[test]
fn burst_of_program_waits_for_room_in_its_session() {
    const PACKETS: u32 = 5000;
    let served = Served::start();
    let mut guest = served.greet();
    let (broker, other) = (served.open(&mut guest, 5), served.open(&mut guest, 6));
    let mut speaker = guest.speaker();
    let speaking = std::thread::spawn(move || {
        (0..PACKETS).for_each(|number| speaker.say(sent_by(5, number)));
        speaker.say(sent_by(6, 0));
    });
    // The broker reads nothing until the guest has heard this, so its packets pass while the guest's wait.
    wait(&[PollFd::new(&broker, PollFlags::IN)], Some(HANG)).unwrap();
    for number in 1..100 {
        broker_says(&other, number, b"news", &[]);
        assert!(matches!(guest.next_said(), Some(Say::Packet { session: 6, .. })), "{number}");
    }
    assert_hears(&broker, 0..PACKETS);
    assert_hears(&other, 0..1);
    speaking.join().unwrap();
    broker_says(&broker, 100, b"answer", &[]);
    assert!(matches!(guest.next_said(), Some(Say::Packet { session: 5, .. })), "the session goes on");
    drop(served);
}

#[test]
fn end_of_program_is_reported_behind_full_socket() {
    let served = Served::start();
    let mut guest = served.greet();
    let broker = served.open(&mut guest, 5);
    let _other = fill(&served, &mut guest, 5);
    guest.say(Say::Close { session: 5, by_program: true }.encode());
    // Only a port that does not wait ends the session before the event loop has read it.
    let ended = wait(&[PollFd::new(&broker, PollFlags::empty())], Some(Duration::from_millis(200))).unwrap();
    assert_eq!(ended, [false]);
    assert_hears(&broker, 0..most());
    assert_eq!(next(&broker), carried::GONE);
    assert_eq!(next(&broker), b"");
    // The number may be another session's by now.
    let again = served.open(&mut guest, 5);
    guest.say(sent_by(5, 7));
    assert_hears(&again, 7..8);
    drop(served);
}

#[test]
fn connection_turned_down_at_full_socket_keeps_the_session() {
    let served = Served::start();
    let mut guest = served.greet();
    let broker = served.open(&mut guest, 5);
    let _other = fill(&served, &mut guest, 5);
    broker_says(&broker, 1, &super::tests::incoming(9), &[]);
    broker_says(&broker, 2, b"more", &[]);
    assert!(matches!(guest.next_said(), Some(Say::Packet { session: 5, .. })), "the session goes on");
    assert_hears(&broker, 0..most());
    let closed = next(&broker);
    let (socket, bytes) = carried::decode(&closed).unwrap();
    assert_eq!((socket, wire::decode(bytes).unwrap()), (None, (0, Message::Closed { channel: 9 })));
    drop(served);
}

#[test]
fn session_that_broker_ends_drops_its_waiting_packet() {
    let served = Served::start();
    let mut guest = served.greet();
    let broker = served.open(&mut guest, 5);
    let other = fill(&served, &mut guest, 5);
    (0..3).for_each(|number| guest.say(sent_by(5, number)));
    guest.say(sent_by(6, 3));
    broker_says(&broker, 1, b"refused", &[]);
    drop(broker);
    assert!(matches!(guest.next_said(), Some(Say::Packet { bytes, .. }) if bytes == b"refused"));
    assert_eq!(guest.next_said(), Some(Say::Close { session: 5, by_program: false }));
    assert_hears(&other, 3..4);
    drop(served);
}

#[test]
fn waiting_packets_of_sessions_that_broker_ended_are_dropped() {
    let stand_in = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
    let mut held = HeldPackets::new(stand_in.as_fd());
    let ((ours, broker), (gone, its_broker)) = (packet::pair().unwrap(), packet::pair().unwrap());
    let mut sessions = Sessions::from([(5, ours)]);
    while held.is_empty() {
        held.send(&sessions, 5, numbered(0), 1).unwrap();
    }
    held.send_gone(&sessions, gone);
    assert_eq!(held.send_waiting(&sessions), Vec::<u32>::new());
    assert!(held.full_socket(&sessions).is_some());
    drop((broker, its_broker));
    assert_eq!(held.send_waiting(&sessions), Vec::<u32>::new());
    assert!(held.is_empty());
    // The same if the guest has heard of that end before.
    let (ours, _broker) = packet::pair().unwrap();
    sessions.insert(5, ours);
    while held.is_empty() {
        held.send(&sessions, 5, numbered(0), 1).unwrap();
    }
    sessions.clear();
    assert!(held.full_socket(&sessions).is_none());
    assert_eq!(held.send_waiting(&sessions), Vec::<u32>::new());
    assert!(held.is_empty());
}

#[test]
fn greeting_behind_waiting_packet_ends_its_session() {
    let served = Served::start();
    let mut guest = served.greet();
    let broker = served.open(&mut guest, 5);
    let _other = fill(&served, &mut guest, 5);
    let most = most();
    guest.say(sent_by(5, most));
    guest.ping();
    guest.greet_again();
    assert_hears(&broker, 0..most + 1);
    assert_eq!(next(&broker), b"");
    assert_eq!(guest.next_said(), Some(Say::Name { name: "a".into() }));
    drop(served);
}

#[test]
fn port_with_waiting_packet_ends_when_it_is_stopped() {
    let served = Served::start();
    let mut guest = served.greet();
    let broker = served.open(&mut guest, 5);
    let _other = fill(&served, &mut guest, 5);
    let most = most();
    guest.say(sent_by(5, most));
    // A guest that gives up its windows while a packet waits answers behind it.
    served.port.release();
    assert_eq!(guest.next_said(), Some(Say::Release {}));
    drop(served);
    assert_hears(&broker, 0..most);
}
