//! Requests of several threads on one session, whose broker is the test.

use super::*;
use partywall_protocol::wire;
use partywall_region::packet;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};

/// How long a request may wait: longer than the test.
const LIMIT: Duration = Duration::from_secs(3600);
/// How long a result may take before the test fails.
const HANG: Duration = Duration::from_secs(60);

/// The broker's end of a session.
struct Far(OwnedFd);

impl Far {
    /// The next request, and the domain that it is about.
    fn hear(&self) -> (u32, String) {
        let mut buffer = [0; wire::MAX_PACKET];
        let received = packet::recv(self.0.as_fd(), &mut buffer).unwrap();
        match wire::decode(&buffer[..received.len]).unwrap() {
            (request, Message::NameClaimed { domain, .. }) => (request, domain),
            other => panic!("{other:?}"),
        }
    }

    fn answer(&self, request: u32, domain: &str) {
        let mut out = Vec::new();
        let message = Message::RouteIs { domain: domain.to_owned(), service: "s".to_owned() };
        wire::encode(request, &message, &mut out);
        packet::send(self.0.as_fd(), &out, &[]).unwrap();
    }
}

fn desk() -> (Arc<SessionDesk>, Far) {
    let (session, broker) = BrokerSession::pair();
    (Arc::new(SessionDesk::new(session).unwrap()), Far(broker))
}

/// Makes a request about a domain, and returns the domain of the answer.
fn ask_here(desk: &SessionDesk, domain: &str) -> Result<String> {
    let message = Message::NameClaimed { domain: domain.to_owned(), claim: 1, holder: String::new() };
    match desk.request_within(LIMIT, &message, &[])?.0 {
        Message::RouteIs { domain, .. } => Ok(domain),
        other => panic!("{other:?}"),
    }
}

/// The same in a separate thread.
fn ask(desk: &Arc<SessionDesk>, domain: &str) -> Receiver<Result<String>> {
    let (tell, told) = channel();
    let (desk, domain) = (Arc::clone(desk), domain.to_owned());
    std::thread::spawn(move || tell.send(ask_here(&desk, &domain)));
    told
}

#[test]
fn later_request_is_answered_while_earlier_one_waits() {
    let (desk, far) = desk();
    let first = ask(&desk, "first");
    let (number, domain) = far.hear();
    assert_eq!(domain, "first");
    let second = ask(&desk, "second");
    let (later, domain) = far.hear();
    far.answer(later, &domain);
    assert_eq!(second.recv_timeout(HANG).unwrap().unwrap(), "second");
    far.answer(number, "first");
    assert_eq!(first.recv_timeout(HANG).unwrap().unwrap(), "first");
}

#[test]
fn channel_of_a_request_that_was_given_up_is_closed() {
    let (desk, far) = desk();
    let asked = Message::NameClaimed { domain: "d".to_owned(), claim: 1, holder: String::new() };
    let hear_closed = |channel| {
        let mut buffer = [0; wire::MAX_PACKET];
        let received = packet::try_recv(far.0.as_fd(), &mut buffer).unwrap();
        let heard = wire::decode(&buffer[..received.len]).unwrap();
        assert!(matches!(heard, (0, Message::Closed { channel: closed }) if closed == channel), "{heard:?}");
    };
    let connect = |channel| {
        let mut out = Vec::new();
        wire::encode(far.hear().0, &Message::Connected { channel, domain: 1, epoch: 1, links: 0 }, &mut out);
        packet::send(far.0.as_fd(), &out, &[]).unwrap();
    };
    // The answer comes after the requester has gone.
    assert!(matches!(desk.request_within(Duration::ZERO, &asked, &[]), Err(Error::TimedOut)));
    connect(7);
    desk.file_news();
    hear_closed(7);
    // Another thread files it after the requester's last look.
    let ticket = desk.ask(&asked, &[]).unwrap();
    connect(8);
    desk.file_news();
    desk.forget(ticket);
    hear_closed(8);
    assert!(desk.state().mailboxes.is_empty());
}

#[test]
fn each_thread_that_watches_hands_over_to_the_next() {
    let (desk, far) = desk();
    let all = [(); 4].map(|()| {
        let told = ask(&desk, "d");
        (far.hear(), told)
    });
    // One of them watches, and the others sleep.
    let start = Instant::now();
    while desk.state().sleepers.len() < all.len() - 1 {
        assert!(start.elapsed() < HANG, "the threads do not sleep");
        std::thread::yield_now();
    }
    // Each thread is served before the next one is answered.
    for ((request, domain), told) in all {
        far.answer(request, &domain);
        assert_eq!(told.recv_timeout(HANG).unwrap().unwrap(), domain);
    }
}

#[test]
fn answers_in_any_order_reach_their_threads() {
    const ROUNDS: usize = 50;
    let (desk, far) = desk();
    let (tell, told) = channel();
    let threads = 2 * REQUESTS_AT_ONCE;
    for n in 0..threads {
        let (desk, tell) = (Arc::clone(&desk), tell.clone());
        std::thread::spawn(move || {
            for round in 0..ROUNDS {
                let name = format!("d{n}-{round}");
                let answer = ask_here(&desk, &name).unwrap();
                tell.send(answer == name).unwrap();
            }
        });
    }
    let broker = std::thread::spawn(move || {
        let (mut waiting, mut left, mut dice) = (Vec::new(), threads * ROUNDS, 1_u32);
        while left > 0 || !waiting.is_empty() {
            let there = PollFd::new(&far.0, PollFlags::IN);
            let wait = Timespec { tv_sec: if waiting.is_empty() { 60 } else { 0 }, tv_nsec: 0 };
            if left > 0 && waiting.len() < 20 && rustix::event::poll(&mut [there], Some(&wait)).unwrap() > 0 {
                waiting.push(far.hear());
                left -= 1;
                continue;
            }
            dice = dice.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let (request, domain) = waiting.swap_remove((dice >> 16) as usize % waiting.len());
            far.answer(request, &domain);
        }
        far
    });
    for _ in 0..threads * ROUNDS {
        assert!(told.recv_timeout(HANG).unwrap());
    }
    drop(broker.join().unwrap());
}

#[test]
fn end_of_session_ends_every_wait() {
    let (desk, far) = desk();
    let all = [(); 4].map(|()| {
        let told = ask(&desk, "d");
        far.hear();
        told
    });
    drop(far);
    for told in all {
        assert!(matches!(told.recv_timeout(HANG).unwrap(), Err(Error::System { .. })));
    }
}

#[test]
fn new_session_ends_every_wait_on_the_old_one() {
    let (desk, far) = desk();
    let all = [(); 4].map(|()| {
        let told = ask(&desk, "d");
        far.hear();
        told
    });
    let (session, next) = BrokerSession::pair();
    desk.replace(session);
    for told in all {
        assert!(matches!(told.recv_timeout(HANG).unwrap(), Err(Error::System { .. })));
    }
    let again = ask(&desk, "again");
    let next = Far(next);
    let (request, domain) = next.hear();
    next.answer(request, &domain);
    assert_eq!(again.recv_timeout(HANG).unwrap().unwrap(), "again");
}

/// The channel of the next packet, which says that one was closed.
fn hear_closed(far: &Far) -> Option<u64> {
    let mut buffer = [0; wire::MAX_PACKET];
    set_socket_timeout(&far.0, Timeout::Recv, Some(HANG)).unwrap();
    let received = packet::recv(far.0.as_fd(), &mut buffer).unwrap();
    match wire::decode(&buffer[..received.len]).unwrap() {
        (0, Message::Closed { channel }) => Some(channel),
        _ => None,
    }
}

/// A desk whose session the keeper watches, as it does for a domain.
fn watched_desk() -> (Arc<SessionDesk>, Far) {
    let (desk, far) = desk();
    watch(&desk);
    (desk, far)
}

fn watch(desk: &Arc<SessionDesk>) {
    let weak = Arc::downgrade(desk);
    desk.watch_session(|| {}, move || weak.upgrade().into_iter().for_each(|desk| desk.tell_untold())).unwrap();
}

/// Fills the session's socket with requests. Returns their number.
fn fill(desk: &SessionDesk) -> usize {
    let request = Message::NameClaimed { domain: "d".to_owned(), claim: 1, holder: String::new() };
    std::iter::repeat_with(|| desk.ask(&request, &[])).take_while(Result::is_ok).count()
}

#[test]
fn farewell_to_full_socket_is_sent_without_further_request() {
    let (desk, far) = watched_desk();
    // Each time again: the keeper is asked for room once more.
    for _ in 0..3 {
        let requests = fill(&desk);
        let channels = 0..2 * requests as u64;
        channels.clone().for_each(|channel| desk.close(channel));
        assert_eq!(desk.state().untold.len(), channels.clone().count());
        (0..requests).for_each(|_| assert_eq!(hear_closed(&far), None));
        channels.for_each(|channel| assert_eq!(hear_closed(&far), Some(channel)));
        assert!(desk.state().untold.is_empty());
    }
    assert!(!desk.state().awaits_room, "the keeper would wake up for each packet that the broker reads");
}

#[test]
fn farewell_from_before_the_watch_is_sent_when_there_is_room() {
    let (desk, far) = desk();
    let requests = fill(&desk);
    desk.close(7);
    watch(&desk);
    (0..requests).for_each(|_| assert_eq!(hear_closed(&far), None));
    assert_eq!(hear_closed(&far), Some(7));
}

#[test]
fn farewell_to_full_socket_of_ended_session_reaches_the_next() {
    let (desk, far) = watched_desk();
    fill(&desk);
    desk.close(7);
    drop(far);
    let (session, next) = BrokerSession::pair();
    // The next socket is full as well before there is a watch.
    let mut request = Vec::new();
    wire::encode(1, &Message::Ping {}, &mut request);
    let full = std::iter::repeat_with(|| packet::try_send(session.as_fd(), &request, &[]));
    let requests = full.take_while(std::io::Result::is_ok).count();
    desk.replace(session);
    watch(&desk);
    let next = Far(next);
    (0..requests).for_each(|_| assert_eq!(hear_closed(&next), None));
    assert_eq!(hear_closed(&next), Some(7));
}

#[test]
fn channel_without_its_links_is_closed_at_once() {
    let (desk, far) = watched_desk();
    let request = Message::NameClaimed { domain: "d".to_owned(), claim: 1, holder: String::new() };
    let ticket = desk.ask(&request, &[]).unwrap();
    let mut out = Vec::new();
    wire::encode(far.hear().0, &Message::Connected { channel: 7, domain: 1, epoch: 1, links: 2 }, &mut out);
    packet::send(far.0.as_fd(), &out, &[]).unwrap();
    desk.file_news();
    assert_eq!(hear_closed(&far), Some(7));
    assert!(matches!(desk.answer(ticket), Some(Err(_))));
}
