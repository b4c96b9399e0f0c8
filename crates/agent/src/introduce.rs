//! Connections that programs of this machine ask for: until the broker has answered, their memory and links are kept here.
//!
//! Between two programs of this machine, the broker introduces them, and memory and links stay here. The listener's message comes first (protocol G5.7), and waits for the connecting program's answer. The broker counts the connection as waiting until the listener accepts or closes it. So the agent closes a connection whose message it gives up.

use partywall_protocol::wire::Side;
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

/// The answer follows the listener's message at once, unless the connecting program has ended meanwhile.
const PATIENCE: Duration = Duration::from_secs(5);
/// Between two looks for old messages.
const LOOK: Duration = Duration::from_secs(1);
/// Introductions that wait at a time; beyond them the oldest is void.
const MOST: usize = 256;
/// Memory in transit that one session may have brought, those of one user, and all of them.
const MOST_OF_A_SESSION: usize = 64;
const MOST_OF_A_USER: usize = 256;
const MOST_PARCELS: usize = 1024;

/// A program's end of a link to another machine.
#[derive(Debug)]
pub(crate) struct NearEnd {
    /// The number of the link on the port.
    pub(crate) link: u32,
    pub(crate) end: OwnedFd,
}

/// A message for a program, once its memory is settled.
#[derive(Debug, Clone)]
pub(crate) struct Incoming {
    pub(crate) session: u32,
    pub(crate) packet: Vec<u8>,
}

/// A connection that its listener does not get.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct GivenUp {
    /// The listener's session.
    pub(crate) session: u32,
    pub(crate) channel: u64,
}

/// Introductions under way.
#[derive(Debug, Default)]
pub(crate) struct Introductions {
    /// By session and request, before the broker has numbered the channel.
    asked: BTreeMap<(u32, u32), Vec<OwnedFd>>,
    /// The link ends of programs that have asked for connections to other machines.
    asked_elsewhere: BTreeMap<(u32, u32), Vec<NearEnd>>,
    /// The listeners' messages that wait for the connecting program's answer, by channel.
    waiting: BTreeMap<u64, (Instant, Incoming)>,
    /// Connections whose message was given up, until the broker hears of it.
    given_up: Vec<GivenUp>,
    /// Memory in transit from one program to the other, until the broker names the receiver: by what it is, and then by the session
    /// and the request that brought it. Another program may claim the same, and the broker refuses that.
    parcels: BTreeMap<(Parcel, u32), Brought>,
    /// Messages whose memory more than one session has brought.
    held: Vec<(Parcel, Incoming)>,
    /// The last number of each session's requests.
    last: BTreeMap<u32, u32>,
}

/// Memory that a session has brought.
#[derive(Debug)]
struct Brought {
    request: u32,
    user: Option<u32>,
    /// The broker has accepted it.
    approved: bool,
    since: Instant,
    /// When its session ended. The broker's message about it comes soon after that, or never.
    ended: Option<Instant>,
    memory: OwnedFd,
}

/// A session that brings memory by a request.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Giver {
    pub(crate) session: u32,
    pub(crate) request: u32,
    pub(crate) user: Option<u32>,
}

/// Too much memory is in transit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NoRoom;

/// The memory for a message of the broker that names some.
#[derive(Debug)]
pub(crate) enum ParcelTaken {
    /// The memory.
    Memory(OwnedFd),
    /// Several sessions have brought such memory. The message waits until the broker has accepted one of them, or refused all but one.
    Held,
    /// No session has brought it.
    Nothing,
}

/// A channel, and the kind of its memory.
pub(crate) type Parcel = (u64, ParcelContent);

/// The kind of a channel's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum ParcelContent {
    /// The accepting side's region.
    Endpoint,
    /// The next ring of a side, by its generation.
    Ring(Side, u32),
    /// A further region of a side, by its number.
    Further(Side, u32),
}

impl Introductions {
    /// A program asks to connect, and brings this.
    pub(crate) fn ask(&mut self, session: u32, request: u32, brought: Vec<OwnedFd>) {
        self.asked.insert((session, request), brought);
    }

    /// A program asks to connect to another machine, and is to get these ends of links.
    pub(crate) fn ask_elsewhere(&mut self, session: u32, request: u32, links: Vec<NearEnd>) {
        self.asked_elsewhere.insert((session, request), links);
    }

    /// It is connected to another machine, and gets these. `None` if it has not asked for that.
    pub(crate) fn connected_elsewhere(&mut self, session: u32, request: u32) -> Option<Vec<NearEnd>> {
        self.asked_elsewhere.remove(&(session, request))
    }

    /// A program makes a request with this number; 0 is none. `Some(true)` if an answer to it cannot be meant for an earlier request of
    /// the session: only such a request may bring memory, because the broker's answer accepts that memory. `None` if the number is that
    /// of a request
    /// that has brought memory and is not answered.
    pub(crate) fn number(&mut self, session: u32, request: u32) -> Option<bool> {
        let awaits =
            |(key, one): (&(Parcel, u32), &Brought)| key.1 == session && one.request == request && !one.approved;
        if request == 0 {
            return Some(false);
        }
        if self.parcels.iter().any(awaits) {
            return None;
        }
        // Numbers rise, and begin again at 1 after the largest.
        let is_new = self.last.get(&session).is_none_or(|last| (request.wrapping_sub(*last) as i32) > 0);
        if is_new {
            self.last.insert(session, request);
        }
        Some(is_new)
    }

    /// A program gives memory to its peer. Where too much of its session is in transit, the oldest of that is void.
    ///
    /// Fails if too much of its user, or in all, is in transit. The memory of another session is never given up for it: its peer would get what a
    /// third session has brought in its place.
    pub(crate) fn give(&mut self, from: Giver, parcel: Parcel, memory: OwnedFd) -> Result<(), NoRoom> {
        let Giver { session, request, user } = from;
        let own = || self.parcels.iter().filter(|((_, of), _)| *of == session);
        if own().count() >= MOST_OF_A_SESSION {
            let oldest = own().min_by_key(|(_, brought)| brought.since).map(|(key, _)| *key);
            oldest.and_then(|key| self.parcels.remove(&key));
        }
        let of_user = self.parcels.values().filter(|brought| brought.user == user).count();
        if of_user >= MOST_OF_A_USER || self.parcels.len() >= MOST_PARCELS {
            return Err(NoRoom);
        }
        let brought = Brought { request, user, approved: false, since: Instant::now(), ended: None, memory };
        self.parcels.insert((parcel, session), brought);
        Ok(())
    }

    /// The broker says that a session is to have it, in a message.
    pub(crate) fn take(&mut self, parcel: Parcel, message: &Incoming) -> ParcelTaken {
        let all: Vec<(bool, (Parcel, u32))> =
            self.parcels.range((parcel, 0)..=(parcel, u32::MAX)).map(|(key, one)| (one.approved, *key)).collect();
        let found = match (all.iter().find(|(approved, _)| *approved), &all[..]) {
            (Some((_, key)), _) | (None, [(_, key)]) => *key,
            (None, []) => return ParcelTaken::Nothing,
            (None, _) => {
                if self.held.len() >= MOST {
                    self.held.remove(0);
                }
                self.held.push((parcel, message.clone()));
                return ParcelTaken::Held;
            }
        };
        self.parcels.remove(&found).map_or(ParcelTaken::Nothing, |one| ParcelTaken::Memory(one.memory))
    }

    /// The broker has done what a session asked for, by which it may have brought memory.
    pub(crate) fn done(&mut self, session: u32, request: u32) {
        let brought = self.parcels.iter_mut().filter(|((_, of), _)| *of == session);
        brought.filter(|(_, one)| one.request == request).for_each(|(_, one)| one.approved = true);
    }

    /// Messages that were held back, and can be sent since the broker has judged what was brought.
    ///
    /// Memory that is accepted and that no message takes is dropped. Its message comes before the answer (protocol G5.7), so none will come.
    pub(crate) fn settled(&mut self) -> Vec<(Incoming, OwnedFd)> {
        let mut settled = Vec::new();
        for (parcel, message) in std::mem::take(&mut self.held) {
            // Memory that is not settled is held again.
            if let ParcelTaken::Memory(memory) = self.take(parcel, &message) {
                settled.push((message, memory));
            }
        }
        self.parcels.retain(|_, brought| !brought.approved);
        settled
    }

    /// It was refused, or has ended.
    pub(crate) fn refused(&mut self, session: u32, request: u32) {
        self.asked.remove(&(session, request));
        self.asked_elsewhere.remove(&(session, request));
        self.parcels.retain(|(_, of), brought| (*of, brought.request) != (session, request));
    }

    /// The broker ends the connections that wait for a session with that session (protocol C7.4).
    pub(crate) fn session_ended(&mut self, session: u32) {
        self.asked.retain(|(of, _), _| *of != session);
        self.asked_elsewhere.retain(|(of, _), _| *of != session);
        self.waiting.retain(|_, (_, incoming)| incoming.session != session);
        let of_session = self.parcels.iter_mut().filter(|((_, of), _)| *of == session);
        of_session.for_each(|(_, brought)| brought.ended = Some(Instant::now()));
        self.last.remove(&session);
    }

    /// It is connected, and these are the listener's ends of the links. Returns what the listener is to get. `None` if one of the two
    /// programs has ended: what is here for the other one is dropped.
    pub(crate) fn connected(
        &mut self,
        session: u32,
        request: u32,
        channel: u64,
        links: Vec<OwnedFd>,
    ) -> Option<(Incoming, Vec<OwnedFd>)> {
        let Some(mut brought) = self.asked.remove(&(session, request)) else {
            self.give_up(channel);
            return None;
        };
        // Without a message the listener's session has ended: the message comes first (protocol G5.7).
        let (_, incoming) = self.waiting.remove(&channel)?;
        brought.extend(links);
        Some((incoming, brought))
    }

    /// The listener's message waits for the connecting program's answer.
    pub(crate) fn incoming(&mut self, channel: u64, incoming: Incoming) {
        self.forget_old();
        // Numbers of channels count up.
        if self.waiting.len() >= MOST
            && let Some((oldest, _)) = self.waiting.first_key_value()
        {
            self.give_up(*oldest);
        }
        self.waiting.insert(channel, (Instant::now(), incoming));
    }

    /// The listener does not get this connection, if its message still waits.
    pub(crate) fn give_up(&mut self, channel: u64) {
        if let Some((_, Incoming { session, .. })) = self.waiting.remove(&channel) {
            self.given_up.push(GivenUp { session, channel });
        }
    }

    /// Gives up the messages that have waited too long, and the memory of sessions that ended long ago.
    pub(crate) fn forget_old(&mut self) {
        let now = Instant::now();
        let old = self.waiting.extract_if(.., |_, (since, _)| now >= *since + PATIENCE);
        self.given_up.extend(old.map(|(channel, (_, incoming))| GivenUp { session: incoming.session, channel }));
        self.parcels.retain(|_, brought| brought.ended.is_none_or(|ended| now < ended + PATIENCE));
    }

    /// When there may be something to forget.
    pub(crate) fn patience(&self) -> Option<Duration> {
        let waits = !self.waiting.is_empty() || self.parcels.values().any(|brought| brought.ended.is_some());
        waits.then_some(LOOK)
    }

    /// Takes the connections that the broker has to hear of.
    pub(crate) fn take_given_up(&mut self) -> Vec<GivenUp> {
        std::mem::take(&mut self.given_up)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn brought() -> Vec<OwnedFd> {
        vec![std::fs::File::open("/dev/null").unwrap().into()]
    }

    fn by(session: u32, request: u32) -> Giver {
        Giver { session, request, user: Some(1000) }
    }

    fn incoming(session: u32) -> Incoming {
        Incoming { session, packet: vec![7] }
    }

    #[test]
    fn listener_gets_memory_and_links_once_connected() {
        let mut all = Introductions::default();
        all.ask(1, 10, brought());
        all.incoming(99, incoming(2));
        let (to, with) = all.connected(1, 10, 99, brought()).unwrap();
        assert_eq!((to.session, to.packet, with.len()), (2, vec![7], 2));
        assert!(all.asked.is_empty() && all.waiting.is_empty() && all.take_given_up().is_empty());
    }

    #[test]
    fn connection_of_ended_connecting_program_is_given_up() {
        let mut all = Introductions::default();
        all.ask(1, 10, brought());
        all.session_ended(1);
        all.incoming(99, incoming(2));
        assert!(all.connected(1, 10, 99, brought()).is_none());
        assert_eq!(all.take_given_up(), [GivenUp { session: 2, channel: 99 }]);
        assert!(all.take_given_up().is_empty(), "said once");
    }

    #[test]
    fn message_without_answer_is_given_up_after_patience() {
        let mut all = Introductions::default();
        all.incoming(99, incoming(2));
        all.forget_old();
        assert_eq!((all.take_given_up().len(), all.patience()), (0, Some(LOOK)));
        all.waiting.values_mut().for_each(|(since, _)| *since -= PATIENCE);
        all.forget_old();
        assert_eq!(all.take_given_up(), [GivenUp { session: 2, channel: 99 }]);
        assert_eq!(all.patience(), None);
    }

    #[test]
    fn links_of_ended_listener_hang_up_once_connected() {
        let mut all = Introductions::default();
        let (near, far) = std::os::unix::net::UnixStream::pair().unwrap();
        near.set_nonblocking(true).unwrap();
        all.ask(1, 10, brought());
        all.incoming(99, incoming(2));
        all.session_ended(2);
        assert!(all.connected(1, 10, 99, vec![far.into()]).is_none());
        assert_eq!(std::io::Read::read(&mut &near, &mut [0]).unwrap(), 0);
        assert!(all.take_given_up().is_empty(), "the broker has ended it with the session");
    }

    #[test]
    fn accepted_memory_that_no_message_takes_is_dropped() {
        let mut all = Introductions::default();
        let [file] = <[OwnedFd; 1]>::try_from(brought()).unwrap();
        let message = incoming(3);
        let [gone, held] = [5, 6].map(|channel| (channel, ParcelContent::Endpoint));
        all.give(by(1, 10), gone, file.try_clone().unwrap()).unwrap();
        all.give(by(1, 11), held, file.try_clone().unwrap()).unwrap();
        all.give(by(2, 20), held, file).unwrap();
        assert!(matches!(all.take(held, &message), ParcelTaken::Held));
        assert!(all.settled().is_empty() && all.parcels.len() == 3, "no answer has come");
        all.done(1, 10);
        assert!(all.settled().is_empty());
        assert!(!all.parcels.contains_key(&(gone, 1)) && all.parcels.len() == 2);
        all.done(1, 11);
        assert_eq!(all.settled().len(), 1, "a message that is held takes its memory first");
    }

    #[test]
    fn links_elsewhere_are_returned_once_and_only_if_connected() {
        let mut all = Introductions::default();
        for request in 1..=3 {
            all.ask_elsewhere(7, request, brought().into_iter().map(|end| NearEnd { link: 2, end }).collect());
        }
        assert_eq!(all.connected_elsewhere(7, 1).map(|links| links.len()), Some(1));
        assert!(all.connected_elsewhere(7, 1).is_none(), "given once");
        all.refused(7, 2);
        assert!(all.connected_elsewhere(7, 2).is_none(), "refused");
        all.session_ended(7);
        assert!(all.asked_elsewhere.is_empty());
    }

    #[test]
    fn memory_of_unrelated_session_does_not_reach_peer() {
        let size = |fd: &OwnedFd| std::fs::File::from(fd.try_clone().unwrap()).metadata().unwrap().len();
        let memory = |len: u64| {
            let file = std::fs::File::from(rustix::fs::memfd_create("x", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
            file.set_len(len).unwrap();
            OwnedFd::from(file)
        };
        let parcel = (9, ParcelContent::Endpoint);
        let message = Incoming { session: 3, packet: vec![1] };
        for first in [true, false] {
            let mut all = Introductions::default();
            // Session 1 is a side of the channel, and session 2 is not.
            let both = [(by(1, 10), 100), (by(2, 20), 200)];
            for (from, len) in if first { both } else { [both[1], both[0]] } {
                all.give(from, parcel, memory(len)).unwrap();
            }
            assert!(matches!(all.take(parcel, &message), ParcelTaken::Held));
            assert!(all.settled().is_empty(), "the broker has not judged");
            // One of the two sessions may have ended before it got the answer.
            if first {
                all.refused(2, 20)
            } else {
                all.done(1, 10)
            }
            let settled = all.settled();
            assert_eq!(settled.iter().map(|(to, fd)| (to.session, size(fd))).collect::<Vec<_>>(), [(3, 100)]);
            assert!(all.settled().is_empty());
        }
    }

    #[test]
    fn answer_to_another_request_does_not_accept_memory() {
        let mut all = Introductions::default();
        let [file] = <[OwnedFd; 1]>::try_from(brought()).unwrap();
        let parcel = (9, ParcelContent::Endpoint);
        // A list of domains is asked for, and its answer is still to come.
        assert_eq!(all.number(2, 20), Some(true));
        assert_eq!(all.number(2, 20), Some(false), "memory by this number would be accepted by the list");
        assert_eq!(all.number(2, 21), Some(true));
        all.give(by(2, 21), parcel, file).unwrap();
        assert_eq!(all.number(2, 21), None, "nor may a list be asked for by the number of the memory");
        assert_eq!(all.number(2, 0), Some(false), "it has no answer");
        assert_eq!(all.number(3, 21), Some(true), "another session");
        all.done(2, 21);
        assert_eq!(all.number(2, 21), Some(false));
        assert_eq!(all.number(2, 7), Some(false), "not a new number");
        all.number(4, u32::MAX);
        assert_eq!(all.number(4, 1), Some(true), "numbers begin again");
        all.session_ended(2);
        assert_eq!(all.number(2, 1), Some(true));
    }

    #[test]
    fn many_sessions_cannot_push_out_memory_of_another() {
        let mut all = Introductions::default();
        let [file] = <[OwnedFd; 1]>::try_from(brought()).unwrap();
        let parcel = (9, ParcelContent::Endpoint);
        all.give(by(1, 1), parcel, file.try_clone().unwrap()).unwrap();
        all.give(by(2, 1), parcel, file.try_clone().unwrap()).unwrap();
        let mut refused = 0;
        for session in 3..40 {
            for channel in 100..100 + MOST_OF_A_SESSION as u64 {
                let user = Some(session % 7);
                let from = Giver { session, request: 1, user };
                let given = all.give(from, (channel, ParcelContent::Endpoint), file.try_clone().unwrap());
                refused += usize::from(given.is_err());
            }
        }
        assert!(refused > 0 && all.parcels.len() == MOST_PARCELS);
        assert!(matches!(all.take(parcel, &incoming(5)), ParcelTaken::Held), "neither of the two was given up");
    }

    #[test]
    fn user_has_a_part_of_the_memory_in_transit() {
        let mut all = Introductions::default();
        let [file] = <[OwnedFd; 1]>::try_from(brought()).unwrap();
        let mut give = |user: u32, session: u32, channel: u64| {
            let from = Giver { session, request: 1, user: Some(user) };
            all.give(from, (channel, ParcelContent::Endpoint), file.try_clone().unwrap())
        };
        for session in 0..4 {
            (0..64).for_each(|channel| give(1, session, channel).unwrap());
        }
        assert_eq!(give(1, 4, 0), Err(NoRoom));
        assert_eq!((give(1, 3, 99), give(2, 5, 0)), (Ok(()), Ok(())), "its oldest goes; and another user");
    }

    #[test]
    fn memory_of_ended_session_is_dropped_after_patience() {
        let mut all = Introductions::default();
        let [file] = <[OwnedFd; 1]>::try_from(brought()).unwrap();
        all.give(by(1, 1), (9, ParcelContent::Endpoint), file).unwrap();
        assert_eq!(all.patience(), None);
        all.session_ended(1);
        all.forget_old();
        assert_eq!((all.parcels.len(), all.patience()), (1, Some(LOOK)), "the broker may have accepted it");
        all.parcels.values_mut().for_each(|brought| brought.ended = brought.ended.map(|ended| ended - PATIENCE));
        all.forget_old();
        assert!(all.parcels.is_empty() && all.patience().is_none());
    }

    #[test]
    fn session_that_brings_too_much_loses_its_own_memory_only() {
        let mut all = Introductions::default();
        let [file] = <[OwnedFd; 1]>::try_from(brought()).unwrap();
        let honest = (u64::MAX, ParcelContent::Endpoint);
        all.give(by(1, 1), honest, file.try_clone().unwrap()).unwrap();
        for channel in 0..2 * MOST_OF_A_SESSION as u64 {
            all.give(by(2, 1), (channel, ParcelContent::Endpoint), file.try_clone().unwrap()).unwrap();
        }
        assert_eq!(all.parcels.len(), 1 + MOST_OF_A_SESSION);
        let message = Incoming { session: 3, packet: vec![] };
        assert!(matches!(all.take(honest, &message), ParcelTaken::Memory(_)));
        assert!(matches!(all.take((0, ParcelContent::Endpoint), &message), ParcelTaken::Nothing));
    }

    #[test]
    fn message_beyond_bound_gives_oldest_connection_up() {
        let mut all = Introductions::default();
        for channel in 0..=MOST as u64 {
            all.incoming(channel, incoming(1));
        }
        assert_eq!(all.waiting.len(), MOST);
        assert_eq!(all.take_given_up(), [GivenUp { session: 1, channel: 0 }]);
    }

    #[test]
    fn refused_or_ended_request_is_not_connected() {
        let mut all = Introductions::default();
        all.incoming(5, incoming(2));
        all.ask(1, 1, brought());
        all.ask(1, 2, brought());
        all.refused(1, 1);
        all.session_ended(1);
        assert!(all.asked.is_empty());
        assert!(all.connected(1, 2, 5, vec![]).is_none());
    }
}
