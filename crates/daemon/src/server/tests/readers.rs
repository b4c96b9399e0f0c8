//! Readers that have no session, and readers that end.

use super::*;
use crate::policy::Policy;
use crate::server::readers::MOST_IDLE;

/// The reason of the next refusal that the broker has sent to a client.
fn refusal(client: &OwnedFd) -> String {
    let mut packet = [0; wire::MAX_PACKET];
    loop {
        let len = packet::try_recv(client.as_fd(), &mut packet).unwrap().len;
        if let Ok((_, Message::Refused { reason, .. })) = wire::decode(&packet[..len]) {
            return reason;
        }
    }
}

#[test]
fn readers_of_refused_first_packets_are_not_kept() {
    let mut bench = Bench::new();
    let policy = Policy::parse("[[join]]\ndomain = '*'\nusers = ['*']\n").unwrap();
    bench.server.control().set_policy(policy);
    bench.settle();
    let pid = rustix::process::getpid().as_raw_nonzero().get();
    let mut clients = Vec::new();
    for uid in (60_000..).take(MOST_IDLE + 2) {
        let (socket, client) = packet::pair().unwrap();
        say(&client, &Message::Join { version: 0, name: "a".to_owned() }, &[]);
        assert!(bench.push(arrival(socket, libc::ucred { pid, uid, gid: uid })).is_none());
        clients.push(client);
    }
    while bench.server.arrivals.has_any(|_| true) {
        bench.server.turn(Some(Duration::ZERO)).unwrap();
    }
    for client in &clients {
        let reason = refusal(client);
        assert!(reason.contains("version"), "{reason}");
    }
    assert!(bench.server.readers.idle() <= MOST_IDLE, "{} readers without a session", bench.server.readers.idle());
}

#[test]
fn end_of_reader_is_not_blamed_on_descriptor() {
    let mut bench = Bench::new();
    let client = bench.connect();
    packet::try_send(client.as_fd(), &join(), &[]).unwrap();
    bench.settle();
    let own = Account::of(User::Host(rustix::process::geteuid().as_raw()), Home::Broker);
    bench.server.readers.end_for_test(own);
    bench.settle();
    for reason in [refusal(&client), bench.server.readers.reader_of(own).unwrap_err()] {
        assert!(reason.contains("could not be started") && !reason.contains("descriptor"), "{reason}");
    }
}
