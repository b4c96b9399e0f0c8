//! Flows of datagrams between two sockets of this machine (protocol U15): the broker decides, and the regions of both ends stay here.
//!
//! ```text
//!   sender                   agent                              broker of the host      receiver
//!   OfferDatagrams [region]   checks the region, keeps it ------->
//!   Offered <---------------- knows its number <---------------- Offered
//!                             checks the region, keeps it <--------------------- TakeDatagrams [region]
//!                             hands the sender's over <---------- DatagramsTaken ------------> [region]
//!   FetchReceiver ----------> notes of which flow -------------->
//!   Receiver [region] <------ hands the receiver's over <------- Receiver
//!   Closed -----------------> says up to where the ring is written, and passes it on -->
//! ```
//!
//! A region goes to one session only, that of the other end. The broker names the receiver, by the number of the flow. The sender is the session that
//! has brought the offer. So a program that uses the number of a request twice can at most confuse its own flows.
//!
//! **What is kept.** The broker does not say when a flow ends. It asks about both ends of each flow every 100 ms, so the agent forgets a flow
//! that it is no longer asked about (protocol U15.11). An offer is refused while the table is full. It never takes the place of a flow.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd as _, OwnedFd};
use std::time::{Duration, Instant};

use partywall_protocol::socket::{ReceiverQuestion, SocketFacts};
use partywall_protocol::wire::{Located, Message, RegionReference};
use partywall_region::memfd;

/// Longer than the broker keeps an offer that is not taken (protocol U3.3).
const PATIENCE: Duration = Duration::from_secs(35);
/// The time after which a flow is forgotten about which the broker does not ask. The broker ends a flow that was not proved for 5 seconds
/// (protocol U14.11), and asks about all others.
const UNNAMED: Duration = Duration::from_secs(10);
/// Between two looks for old ones.
const LOOK: Duration = Duration::from_secs(5);
/// Offers and flows, at most: twice as many as the broker lets a machine have (protocol U14.7), since the agent forgets them later.
const MOST: usize = 1024;
/// Requests that the broker has not answered, at most. The first fetch of each flow that is kept does not count: flows are bounded.
const MOST_ASKED: usize = 512;

/// A request of a program that the broker has not answered.
#[derive(Debug)]
enum FlowStep {
    /// To offer a ring in this region.
    Offer(OwnedFd, SenderSocket),
    /// To take an offer with this source, with this region.
    Take(OwnedFd, SocketAddr),
    /// For the receiver's region of this flow.
    Fetch(u64),
}

/// The socket that a flow is sent by, and where to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct SenderSocket {
    cookie: u64,
    /// Where the flow leads.
    to: SocketAddr,
    /// Where a datagram to it is from, for the broker's question who receives that.
    from: SocketAddr,
}

impl SenderSocket {
    /// A socket that sends to `to`.
    fn new(socket: &SocketFacts, to: SocketAddr) -> Self {
        // A socket that is connected is reached from its peer alone.
        let from = canonical(socket.remote.unwrap_or(to));
        Self { cookie: socket.cookie, to: canonical(to), from }
    }

    /// The broker's questions about both ends of a flow with this source: who receives what is sent to the sender, and what it sends.
    fn questions(self, source: SocketAddr) -> [Question; 2] {
        [(self.from, source), (source, self.to)]
    }
}

/// Where a datagram is from, and where it is sent to. IPv4 addresses have one spelling.
type Question = (SocketAddr, SocketAddr);

fn question(of: &ReceiverQuestion) -> Question {
    (canonical(of.from), canonical(of.to))
}

/// An address of which IPv4 has one spelling.
fn canonical(at: SocketAddr) -> SocketAddr {
    SocketAddr::new(at.ip().to_canonical(), at.port())
}

/// What the agent says to a request of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FlowRequest {
    /// Noted, or not about a flow within the machine.
    Fine,
    /// The memory is no region of the shape that the program says.
    BadRegion,
    /// The program has another such request with the same number.
    Twice,
    /// There are as many offers, flows or requests as the agent keeps.
    Full,
}

/// An offer of a flow, or a flow.
#[derive(Debug)]
struct LocalFlow {
    offered: Instant,
    /// The session of the sender, and its socket.
    sender: u32,
    socket: SenderSocket,
    /// The sender's region. Its tail is read when the sender gives the flow up.
    ring: OwnedFd,
    /// Once it is a flow.
    taken: Option<TakenFlow>,
}

/// What a flow has beside its offer.
#[derive(Debug)]
struct TakenFlow {
    /// The session of the receiver.
    receiver: u32,
    /// The receiver's region, until the sender has it.
    region: Option<OwnedFd>,
    /// The number of the request by which the sender fetches it, which may be answered by now.
    fetch: Option<u32>,
    /// The broker's questions about the sender's and the receiver's end, and when each was asked last.
    questions: [(Question, Instant); 2],
    /// The tail and the time when the kernel was first asked and did not find the sender's socket. Bytes beyond it are not that socket's.
    lost: Option<(u64, Instant)>,
}

impl LocalFlow {
    /// Whether a session has an end of it.
    fn is_of(&self, session: u32) -> bool {
        self.sender == session || self.taken.as_ref().is_some_and(|taken| taken.receiver == session)
    }

    /// Up to where its socket has written, if there is a receiver.
    fn written(&self) -> Option<u64> {
        match self.taken.as_ref()?.lost {
            Some((tail, _)) => Some(tail),
            None => memfd::written(self.ring.as_fd(), 0),
        }
    }

    /// Whether the broker has it no more.
    fn is_old(&self, now: Instant) -> bool {
        let Some(taken) = &self.taken else { return now >= self.offered + PATIENCE };
        let is_lost = taken.lost.is_some_and(|(_, since)| now >= since + UNNAMED);
        is_lost || taken.questions.iter().any(|(_, asked)| now >= *asked + UNNAMED)
    }
}

/// All of them.
#[derive(Debug, Default)]
pub(crate) struct LocalFlows {
    /// By session and request, until the broker has answered.
    asked: BTreeMap<(u32, u32), FlowStep>,
    /// By the number of the offer, which becomes that of the flow.
    open: BTreeMap<u64, LocalFlow>,
}

impl LocalFlows {
    /// A program offers a flow, or takes one, with a socket and the memory of its region.
    pub(crate) fn bring(
        &mut self,
        by: (u32, u32),
        message: &Message,
        socket: &SocketFacts,
        memory: Option<OwnedFd>,
    ) -> FlowRequest {
        let (Message::OfferDatagrams { region, .. } | Message::TakeDatagrams { region, .. }, Some(memory)) =
            (message, memory)
        else {
            return FlowRequest::Fine;
        };
        if region.is_in_window() {
            // The other end is elsewhere.
            return FlowRequest::Fine;
        }
        if !is_region(*region, &memory) {
            return FlowRequest::BadRegion;
        }
        let step = match *message {
            Message::OfferDatagrams { to_high, to_low, to_port, .. } => {
                let socket = SenderSocket::new(socket, at(to_high, to_low, to_port));
                if !self.has_room(by.0, socket) {
                    return FlowRequest::Full;
                }
                FlowStep::Offer(memory, socket)
            }
            Message::TakeDatagrams { from_high, from_low, from_port, .. } => {
                FlowStep::Take(memory, at(from_high, from_low, from_port))
            }
            _ => return FlowRequest::Fine,
        };
        self.ask(by, step)
    }

    /// Whether another offer may be made. One of the same socket to the same address needs no further room: the new one replaces it.
    fn has_room(&self, session: u32, socket: SenderSocket) -> bool {
        let asked = self.asked.values().filter(|step| matches!(step, FlowStep::Offer(..))).count();
        asked + self.open.len() < MOST || self.open.values().any(|flow| replaces(flow, session, socket))
    }

    /// A program asks for the region of its receiver.
    pub(crate) fn fetch(&mut self, by: (u32, u32), flow: u64) -> FlowRequest {
        let (session, request) = by;
        let kept = self.open.get_mut(&flow).filter(|kept| kept.sender == session).and_then(|kept| kept.taken.as_mut());
        // One request of each flow has its room beside the others.
        if let Some(taken) =
            kept.filter(|taken| taken.fetch.is_none_or(|last| !self.asked.contains_key(&(session, last))))
        {
            if self.asked.contains_key(&by) {
                return FlowRequest::Twice;
            }
            taken.fetch = Some(request);
            self.asked.insert(by, FlowStep::Fetch(flow));
            return FlowRequest::Fine;
        }
        self.ask(by, FlowStep::Fetch(flow))
    }

    /// Whether a request takes part of the room that all programs share.
    fn takes_room(&self, (session, request): (u32, u32), step: &FlowStep) -> bool {
        let FlowStep::Fetch(flow) = step else { return true };
        let kept = self.open.get(flow).filter(|kept| kept.sender == session).and_then(|kept| kept.taken.as_ref());
        kept.is_none_or(|taken| taken.fetch != Some(request))
    }

    fn ask(&mut self, by: (u32, u32), step: FlowStep) -> FlowRequest {
        if self.asked.contains_key(&by) {
            return FlowRequest::Twice;
        }
        let waiting = self.asked.iter().filter(|(by, step)| self.takes_room(**by, step)).count();
        if waiting >= MOST_ASKED {
            return FlowRequest::Full;
        }
        self.asked.insert(by, step);
        FlowRequest::Fine
    }

    /// The broker has numbered an offer.
    pub(crate) fn offered(&mut self, session: u32, request: u32, offer: u64) {
        let Some(FlowStep::Offer(ring, socket)) = self.asked.remove(&(session, request)) else { return };
        // As for the broker, the new offer replaces one of the same socket to the same address.
        self.open.retain(|_, flow| !replaces(flow, session, socket));
        let offered = Instant::now();
        self.open.insert(offer, LocalFlow { offered, sender: session, socket, ring, taken: None });
    }

    /// The broker has let a program take an offer. Returns the sender's region; `None` if it is not kept here.
    pub(crate) fn taken(&mut self, session: u32, request: u32, number: u64) -> Option<OwnedFd> {
        let Some(FlowStep::Take(region, source)) = self.asked.remove(&(session, request)) else { return None };
        let flow = self.open.get_mut(&number)?;
        let now = Instant::now();
        let (socket, questions) = (flow.socket, flow.socket.questions(source));
        let named = questions.map(|question| (question, now));
        flow.taken =
            Some(TakenFlow { receiver: session, region: Some(region), fetch: None, questions: named, lost: None });
        let ring = flow.ring.try_clone().ok();
        // A flow between the same sockets has ended, or the receiver's socket is another one now. Questions would name both.
        let is_same = |flow: &LocalFlow| {
            let taken = flow.taken.as_ref();
            flow.socket.cookie == socket.cookie
                && taken.is_some_and(|taken| taken.questions.map(|(question, _)| question) == questions)
        };
        self.open.retain(|other, flow| *other == number || !is_same(flow));
        ring
    }

    /// The broker lets the sender of a flow have the receiver's region. Returns it; `None` if it is not kept here.
    pub(crate) fn fetched(&mut self, session: u32, request: u32) -> Option<OwnedFd> {
        let Some(FlowStep::Fetch(flow)) = self.asked.remove(&(session, request)) else { return None };
        self.open.get_mut(&flow).filter(|flow| flow.sender == session)?.taken.as_mut()?.region.take()
    }

    /// A request was refused, or the other end is on another machine. What the program has brought is of no use.
    pub(crate) fn refused(&mut self, session: u32, request: u32) {
        self.asked.remove(&(session, request));
    }

    /// A program takes its offer back. The broker keeps what is a flow by now, and so does the agent.
    pub(crate) fn cancelled(&mut self, session: u32, offer: u64) {
        if self.open.get(&offer).is_some_and(|flow| flow.sender == session && flow.taken.is_none()) {
            self.open.remove(&offer);
        }
    }

    /// A program gives up its end of a flow. Returns up to where it has written, if it is the sender (protocol U15.6).
    pub(crate) fn closed(&mut self, session: u32, flow: u64) -> Option<u64> {
        self.open.get(&flow).filter(|flow| flow.is_of(session))?;
        self.open.remove(&flow).filter(|flow| flow.sender == session)?.written()
    }

    /// A session ends, and its ends of flows with it. Returns the flows of which it was the sender, and up to where it has written each.
    pub(crate) fn session_ended(&mut self, session: u32) -> Vec<(u64, u64)> {
        self.asked.retain(|(of, _), _| *of != session);
        let ends = self.open.iter().filter(|(_, flow)| flow.is_of(session)).map(|(number, _)| *number);
        let ends: Vec<u64> = ends.collect();
        ends.into_iter().filter_map(|flow| Some((flow, self.closed(session, flow)?))).collect()
    }

    /// Answers the broker's questions by asking the kernel. Returns the sockets that it finds, and the flows whose sender's socket it does not
    /// find any more, each once, with the byte up to which that socket has written (protocol U15.7).
    pub(crate) fn answer(
        &mut self,
        questions: &[ReceiverQuestion],
        ask: impl FnOnce(&[ReceiverQuestion]) -> Vec<u64>,
    ) -> (Vec<u64>, Vec<(u64, u64)>) {
        // Before the kernel is asked (protocol U15.9): what was written by then was the socket's if the kernel still finds it, and if it does not, what is
        // written later never was.
        let before = self.named(questions);
        let found = ask(questions);
        let all: BTreeSet<(Question, u64)> = questions.iter().map(question).zip(found.iter().copied()).collect();
        let now = Instant::now();
        let mut lost = Vec::new();
        for (number, tail) in before {
            let Some(flow) = self.open.get_mut(&number) else { continue };
            let Some(taken) = &mut flow.taken else { continue };
            let (end, _) = taken.questions[0];
            // Two questions about one end may have been answered differently.
            let answers: Vec<u64> = all.range((end, 0)..=(end, u64::MAX)).map(|(_, cookie)| *cookie).collect();
            if answers.is_empty() {
                continue;
            }
            if answers == [flow.socket.cookie] {
                // If it was lost before, the broker has not used that answer.
                taken.lost = None;
            } else if taken.lost.is_none() {
                taken.lost = Some((tail, now));
                lost.push((number, tail));
            }
        }
        (found, lost)
    }

    /// Notes about which flows the broker asks. Returns those whose sender's end is one of them, with their tails.
    fn named(&mut self, questions: &[ReceiverQuestion]) -> Vec<(u64, u64)> {
        let questions: BTreeSet<Question> = questions.iter().map(question).collect();
        let now = Instant::now();
        let mut senders = Vec::new();
        for (number, flow) in &mut self.open {
            let Some(taken) = &mut flow.taken else { continue };
            let named = taken.questions.each_mut().map(|(question, asked)| {
                let is_named = questions.contains(question);
                if is_named {
                    *asked = now;
                }
                is_named
            });
            if named[0] {
                // Of a region whose word cannot be read, nothing is written.
                senders.push((*number, memfd::written(flow.ring.as_fd(), 0).unwrap_or(0)));
            }
        }
        senders
    }

    /// Forgets what the broker has forgotten.
    pub(crate) fn forget_old(&mut self) {
        let now = Instant::now();
        self.open.retain(|_, flow| !flow.is_old(now));
    }

    /// When there may be something to forget.
    pub(crate) fn patience(&self) -> Option<Duration> {
        (!self.open.is_empty()).then_some(LOOK)
    }
}

/// Whether an offer of this socket, by this session, replaces another one.
fn replaces(flow: &LocalFlow, session: u32, socket: SenderSocket) -> bool {
    flow.taken.is_none() && (flow.sender, flow.socket) == (session, socket)
}

/// An address of a message.
fn at(high: u64, low: u64, port: u16) -> SocketAddr {
    let ip = IpAddr::V6((u128::from(high) << 64 | u128::from(low)).into());
    canonical(SocketAddr::new(ip, port))
}

/// Whether memory in this machine is a region as its program says. The host's broker cannot check it (protocol U15.2).
fn is_region(reference: RegionReference, memory: &OwnedFd) -> bool {
    match reference.check() {
        Ok((Located::OwnMemory, geometry)) => memfd::verify_blocks(memory.as_fd(), geometry).is_ok(),
        _ => false,
    }
}

#[cfg(test)]
mod tests;
