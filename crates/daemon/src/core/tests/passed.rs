//! Statements about sockets that were passed to other processes.

use super::*;
use partywall_protocol::passed::MOST_OF_USER;

const PASSED: Message = Message::Passed { socket: 5, carrier: 7, side: Side::Accepting, rings: 2 };
const TAKE: Message = Message::TakePassed { socket: 5, carrier: 7 };
const IS: Message = Message::PassedIs { side: Side::Accepting, rings: 2 };

#[test]
fn passed_socket_is_confirmed_once_to_its_user() {
    let mut w = World::with_policy("administrators = []\n[[join]]\ndomain = '*'\nusers = ['*']\n");
    let (sender, receiver) = (w.join_as(1000, "sender", 1), w.join_as(1000, "receiver", 2));
    let other = w.join_as(1001, "other", 3);
    assert_eq!(w.say(sender, PASSED, vec![]), None);
    assert_eq!(w.ask(other, TAKE), Message::Done {}, "another user's");
    let elsewhere = Message::TakePassed { socket: 5, carrier: 8 };
    assert_eq!(w.ask(receiver, elsewhere), Message::Done {}, "it came by another socket");
    assert_eq!(w.ask(receiver, TAKE), IS);
    assert_eq!(w.ask(receiver, TAKE), Message::Done {});
}

#[test]
fn statement_about_passed_socket_outlives_its_session() {
    let mut w = World::new();
    let (sender, receiver) = (w.join("sender", 1), w.join("receiver", 2));
    assert_eq!(w.say(sender, PASSED, vec![]), None);
    w.end(sender);
    assert_eq!(w.ask(receiver, TAKE), IS);
}

#[test]
fn process_of_unknown_home_has_no_statements() {
    let mut w = World::with_policy("administrators = []\n[[join]]\ndomain = '*'\nusers = ['*']\n");
    let here = w.join_as(1000, "here", 1);
    let [first, second] = [(2, "first"), (3, "second")].map(|(pid, name)| w.join_as((1000, Home::Unknown), name, pid));
    let [boxed, also] = [(4, "boxed", 5), (5, "also", 6)]
        .map(|(pid, name, user)| w.join_as((1000, Home::Container { user, pid: 1 }), name, pid));
    assert_eq!(w.say(first, PASSED, vec![]), None);
    for session in [here, second] {
        assert_eq!(w.ask(session, TAKE), Message::Done {});
    }
    assert_eq!(w.say(boxed, PASSED, vec![]), None);
    for session in [here, also] {
        assert_eq!(w.ask(session, TAKE), Message::Done {}, "that user is another one");
    }
    assert_eq!(w.ask(boxed, TAKE), IS);
}

#[test]
fn containers_of_one_user_share_its_number_of_statements() {
    let mut w = World::with_policy("administrators = []\n[[join]]\ndomain = '*'\nusers = ['*']\n");
    let host = w.join_as(1000, "host", 1);
    let other = w.join_as((1001, Home::Container { user: 5, pid: 1 }), "other", 2);
    let [one, two] = [(3, "one", 5), (4, "two", 6)]
        .map(|(pid, name, user)| w.join_as((1000, Home::Container { user, pid: 1 }), name, pid));
    let passed = |socket| Message::Passed { socket, carrier: 7, side: Side::Accepting, rings: 2 };
    for session in [host, other, one] {
        assert_eq!(w.say(session, PASSED, vec![]), None);
    }
    for socket in 100..99 + MOST_OF_USER as u64 {
        assert_eq!(w.say(two, passed(socket), vec![]), None);
    }
    assert_eq!(w.ask(one, TAKE), IS, "there is room for all of both");
    for socket in [5, 6, 99] {
        assert_eq!(w.say(if socket == 5 { one } else { two }, passed(socket), vec![]), None);
    }
    // The oldest two of the account have made room, and none of another account.
    let take = |socket| Message::TakePassed { socket, carrier: 7 };
    assert_eq!([100, 101].map(|socket| w.ask(two, take(socket))), [const { Message::Done {} }; 2]);
    assert_eq!(w.ask(two, take(102)), IS);
    for session in [host, other, one] {
        assert_eq!(w.ask(session, TAKE), IS);
    }
}
