//! Sockets of groups that sessions publish, withdraw and take with them, and what the agent answers about them.

use super::*;
use partywall_protocol::wire::Origin;
use partywall_region::inspect::{Inspector, Unhurried};
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};
use std::net::{SocketAddr, UdpSocket};

/// Sessions of programs of this machine.
const ONE: u32 = 1;
const TWO: u32 = 2;

/// A socket in the group at this address; port 0 begins one.
fn member(at: SocketAddr) -> UdpSocket {
    let flags = SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::INET, SocketType::DGRAM, flags, None).unwrap();
    sockopt::set_socket_reuseport(&socket, true).unwrap();
    rustix::net::bind(&socket, &at).unwrap();
    UdpSocket::from(socket)
}

fn first_member() -> UdpSocket {
    member("127.0.0.1:0".parse().unwrap())
}

/// What the agent says of a socket to the broker.
fn facts(socket: &UdpSocket) -> SocketFacts {
    Inspector::new().inspect(Unhurried(socket.try_clone().unwrap().into()), false).unwrap()
}

fn cookie(socket: &UdpSocket) -> u64 {
    sockopt::socket_cookie(socket).unwrap()
}

/// The broker's question about a flow to this socket.
fn about(socket: &UdpSocket) -> ReceiverQuestion {
    ReceiverQuestion { from: "127.0.0.1:9".parse().unwrap(), to: socket.local_addr().unwrap(), in_group: true }
}

/// A program publishes a socket, by a request with the number of the publication's key.
fn publish(all: &mut MachineReceivers, session: u32, key: u32, socket: &UdpSocket) {
    assert_eq!(all.show((session, key), &facts(socket)), PublishRequest::Fine);
    all.published(session, key, key.into());
}

#[test]
fn socket_of_a_group_is_found_while_all_members_are_published() {
    let mut all = MachineReceivers::open();
    let one = first_member();
    assert_eq!(facts(&one).state, SocketState::Grouped, "so the broker hears it");
    assert_eq!(all.find(&[about(&one)]), [0], "not published");
    assert_eq!(all.show((ONE, 7), &facts(&one)), PublishRequest::Fine);
    assert_eq!(all.find(&[about(&one)]), [0], "the broker has not answered");
    all.published(ONE, 7, 70);
    assert_eq!(all.find(&[about(&one)]), [cookie(&one)]);
    let two = member(one.local_addr().unwrap());
    assert_eq!(all.find(&[about(&one)]), [0], "a member that joins later");
    publish(&mut all, TWO, 8, &two);
    let [found] = all.find(&[about(&one)])[..] else { panic!("one answer") };
    assert!([&one, &two].map(cookie).contains(&found), "one of them, as the kernel chooses");
    drop(two);
    assert_eq!(all.find(&[about(&one)]), [cookie(&one)], "the member has ended");
}

#[test]
fn socket_outside_of_a_group_is_found_without_a_publication() {
    let mut all = MachineReceivers::open();
    let alone = UdpSocket::bind(("127.0.0.1", 0)).unwrap();
    let question = ReceiverQuestion { in_group: false, ..about(&alone) };
    let connected = first_member();
    connected.connect("127.0.0.1:9").unwrap();
    let other = member(connected.local_addr().unwrap());
    let questions = [question, about(&connected), about(&alone)];
    assert_eq!(all.find(&questions), [cookie(&alone), cookie(&connected), 0], "the connected one comes first");
    drop(other);
}

#[test]
fn withdrawn_or_ended_publication_counts_no_more() {
    let mut all = MachineReceivers::open();
    let one = first_member();
    let ends: [fn(&mut MachineReceivers); 3] =
        [|all| all.withdrawn(ONE, 7), |all| all.session_ended(ONE), MachineReceivers::forget_all];
    for (at, end) in ends.into_iter().enumerate() {
        publish(&mut all, ONE, 7, &one);
        all.withdrawn(TWO, 7);
        all.session_ended(TWO);
        assert_eq!(all.find(&[about(&one)]), [cookie(&one)], "{at}: another session's");
        end(&mut all);
        assert_eq!(all.find(&[about(&one)]), [0], "{at}");
        assert!(all.members.members.is_empty() && all.members.published.is_empty(), "{at}");
    }
    // Shown, and no longer awaited.
    all.show((ONE, 7), &facts(&one));
    all.refused(ONE, 7);
    all.published(ONE, 7, 7);
    all.show((ONE, 8), &facts(&one));
    all.session_ended(ONE);
    all.published(ONE, 8, 8);
    assert_eq!(all.find(&[about(&one)]), [0], "refused, or of an ended session");
}

/// Keys are easy to guess, and the broker answers later than the program may write.
#[test]
fn withdrawal_before_the_brokers_answer_counts() {
    let mut all = MachineReceivers::open();
    let one = first_member();
    assert_eq!(all.show((ONE, 7), &facts(&one)), PublishRequest::Fine);
    all.withdrawn(ONE, 70);
    all.withdrawn(TWO, 71);
    all.published(ONE, 7, 70);
    assert_eq!(all.find(&[about(&one)]), [0]);
    assert!(all.members.published.is_empty() && all.members.early.is_empty(), "nothing is left");
    publish(&mut all, ONE, 71, &one);
    assert_eq!(all.find(&[about(&one)]), [cookie(&one)], "another session's, and not one of this publication");

    assert_eq!(all.show((TWO, 8), &facts(&one)), PublishRequest::Fine);
    (0..=MOST_SHOWN as u64).for_each(|key| all.withdrawn(TWO, 1000 + key));
    assert!(all.members.early.is_empty() && all.members.shown.is_empty(), "the session has too many");
    all.session_ended(ONE);
    all.published(TWO, 8, 80);
    assert_eq!(all.find(&[about(&one)]), [0]);
}

#[test]
fn socket_that_two_sessions_publish_counts_until_both_end() {
    let mut all = MachineReceivers::open();
    let one = first_member();
    publish(&mut all, ONE, 7, &one);
    publish(&mut all, TWO, 7, &one);
    all.session_ended(ONE);
    assert_eq!(all.find(&[about(&one)]), [cookie(&one)]);
    all.session_ended(TWO);
    assert_eq!(all.find(&[about(&one)]), [0]);
}

#[test]
fn sockets_that_are_shown_are_bounded_for_each_session() {
    let mut all = MachineReceivers::open();
    let grouped = SocketFacts { state: SocketState::Grouped, ..facts(&first_member()) };
    for request in 0..MOST_SHOWN as u32 {
        assert_eq!(all.show((ONE, request), &grouped), PublishRequest::Fine);
    }
    assert_eq!(all.show((ONE, 3), &grouped), PublishRequest::Twice);
    assert_eq!(all.show((ONE, 1000), &grouped), PublishRequest::Full);
    assert_eq!(all.show((TWO, 3), &grouped), PublishRequest::Fine, "another session");
    let others = [
        SocketFacts { state: SocketState::Listening, ..grouped },
        SocketFacts { transport: Transport::Tcp, origin: Origin::Host, ..grouped },
    ];
    for other in others {
        assert_eq!(all.show((ONE, 3), &other), PublishRequest::Fine, "not noted");
    }
    all.published(ONE, 3, 3);
    assert_eq!(all.show((ONE, 1000), &grouped), PublishRequest::Fine);
}

#[test]
fn questions_about_groups_wait_until_a_look_is_paid_for() {
    let mut all = MachineReceivers::open();
    let one = first_member();
    let (grouped, plain) = (about(&one), ReceiverQuestion { in_group: false, ..about(&one) });
    assert_eq!((all.due_in(), all.next_question()), (None, None));
    all.find(&[plain]);
    assert!(all.rested <= Instant::now(), "no look at a group");
    let begun = Instant::now();
    all.find(&[plain, grouped]);
    let took = begun.elapsed();
    assert!(all.rested > begun && all.rested <= begun + took * SHARE, "a part of the time");
    all.rested = Instant::now() + Duration::from_secs(1000);
    all.ask(1, vec![plain, grouped]);
    assert_eq!(all.next_question(), None);
    assert!(all.due_in() > Some(Duration::from_secs(500)));
    all.ask(2, vec![plain]);
    all.ask(3, vec![]);
    assert_eq!(all.due_in(), Some(Duration::ZERO));
    assert_eq!(all.next_question(), Some((2, vec![plain])));
    assert_eq!(all.next_question(), Some((3, vec![])));
    assert_eq!(all.next_question(), None);
    all.rested = Instant::now();
    assert_eq!(all.next_question(), Some((1, vec![plain, grouped])));
}

#[test]
fn question_that_broker_has_given_up_is_dropped() {
    let mut all = MachineReceivers::open();
    all.ask(1, vec![]);
    all.waiting[0].came -= PATIENCE;
    all.ask(2, vec![]);
    assert_eq!(all.next_question(), Some((2, vec![])));
    assert!(all.waiting.is_empty());
    (0..=MOST_WAITING as u32).for_each(|number| all.ask(number, vec![]));
    assert_eq!((all.waiting.len(), all.waiting[0].number), (MOST_WAITING, 1), "the oldest gives room");
    all.forget_all();
    assert!(all.waiting.is_empty(), "they were another broker's");
}
