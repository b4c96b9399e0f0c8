//! Which sockets of this machine receive datagrams: the broker asks (protocol U14.5), and the agent asks the machine's kernel.
//!
//! The kernel's choice in a `SO_REUSEPORT` group counts only while all members of the group are published (protocol U14.3, U11.12). The broker sees
//! the members of groups only as far as programs show them, and the kernel's answers stay here, so the agent compares the two.
//!
//! ```text
//!   program           agent                                         broker
//!   Publish --------> notes a socket of a group ------------------>
//!   <---------------- it is published from here on <--------------- Published
//!   Withdraw -------> it is published no more -------------------->
//!                     waits its turn <----------------------------- FindReceivers
//!                     asks the kernel, looks for the members -----> ReceiversAre
//! ```
//!
//! The agent serves all programs by one thread. So looking for members takes at most a part of its time: after each look, the next question about
//! groups waits (protocol U14.20).

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use partywall_protocol::directory::Transport;
use partywall_protocol::socket::{ReceiverQuestion, SocketFacts, SocketState};
use partywall_region::inspect::groups::{GroupLook, GroupMembers, SHARE};
use partywall_region::inspect::receivers::{FoundReceiver, ReceiverFinder};

/// Sockets of groups that one session has shown and the broker has not answered about, at most.
const MOST_SHOWN: usize = 512;
/// Messages with questions that wait, at most: more than the broker sends about the flows that a machine may have.
const MOST_WAITING: usize = 32;
/// The time that a look at one group may take, and one at all groups of a message: programs wait meanwhile, and the proofs of other flows.
const LOOK_AT_GROUP: Duration = Duration::from_millis(50);
const LOOK_AT_ALL: Duration = Duration::from_millis(200);
/// After this time the broker asks again, and ignores the answer to the earlier question (protocol U14.7).
const PATIENCE: Duration = Duration::from_secs(1);

/// The outcome of showing a socket to the broker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PublishRequest {
    /// Noted, or not about a socket of a group.
    Fine,
    /// The program has another such request with the same number.
    Twice,
    /// The program has as many such requests as the agent keeps.
    Full,
}

/// The sockets of groups that sessions of this machine publish.
#[derive(Debug, Default)]
struct PublishedMembers {
    /// The numbers of sockets by session and request, until the broker has answered.
    shown: BTreeMap<(u32, u32), u64>,
    /// By session and the key of the publication.
    published: BTreeMap<(u32, u64), u64>,
    /// Withdrawals by session and key that came while the session had shown sockets. A program can guess the key that the broker has not sent yet.
    early: BTreeSet<(u32, u64)>,
    members: GroupMembers,
}

impl PublishedMembers {
    fn show(&mut self, by: (u32, u32), socket: &SocketFacts) -> PublishRequest {
        if socket.transport != Transport::Udp || socket.state != SocketState::Grouped {
            return PublishRequest::Fine;
        }
        if self.shown.contains_key(&by) {
            return PublishRequest::Twice;
        }
        if self.shown.range((by.0, 0)..=(by.0, u32::MAX)).count() >= MOST_SHOWN {
            return PublishRequest::Full;
        }
        self.shown.insert(by, socket.cookie);
        PublishRequest::Fine
    }

    fn published(&mut self, session: u32, request: u32, key: u64) {
        let Some(cookie) = self.shown.remove(&(session, request)) else { return };
        let is_withdrawn = self.early.contains(&(session, key));
        self.forget_early(session);
        if is_withdrawn {
            return;
        }
        self.members.count(cookie, true);
        if let Some(before) = self.published.insert((session, key), cookie) {
            self.members.count(before, false);
        }
    }

    fn withdrawn(&mut self, session: u32, key: u64) {
        if let Some(cookie) = self.published.remove(&(session, key)) {
            self.members.count(cookie, false);
        } else if self.has_shown(session) {
            self.early.insert((session, key));
            if self.early.range((session, 0)..=(session, u64::MAX)).count() > MOST_SHOWN {
                // None of what it has shown will count.
                self.shown.retain(|(of, _), _| *of != session);
                self.forget_early(session);
            }
        }
    }

    fn refused(&mut self, session: u32, request: u32) {
        self.shown.remove(&(session, request));
        self.forget_early(session);
    }

    fn has_shown(&self, session: u32) -> bool {
        self.shown.range((session, 0)..=(session, u32::MAX)).next().is_some()
    }

    /// Withdrawals are of no use once the session waits for no publication.
    fn forget_early(&mut self, session: u32) {
        if !self.has_shown(session) {
            self.early.retain(|(of, _)| *of != session);
        }
    }

    fn session_ended(&mut self, session: u32) {
        self.shown.retain(|(of, _), _| *of != session);
        self.forget_early(session);
        let keys: Vec<u64> =
            self.published.range((session, 0)..=(session, u64::MAX)).map(|((_, key), _)| *key).collect();
        keys.into_iter().for_each(|key| self.withdrawn(session, key));
    }
}

/// Questions of the broker that wait.
#[derive(Debug)]
struct WaitingQuestions {
    came: Instant,
    number: u32,
    questions: Vec<ReceiverQuestion>,
}

impl WaitingQuestions {
    fn are_about_groups(&self) -> bool {
        self.questions.iter().any(|question| question.in_group)
    }
}

/// Answers the broker's questions.
#[derive(Debug)]
pub(crate) struct MachineReceivers {
    /// Asks the kernel; `None` if it does not find sockets.
    finder: Option<ReceiverFinder>,
    members: PublishedMembers,
    waiting: VecDeque<WaitingQuestions>,
    /// When the last look at groups has been paid for, so that there may be another.
    rested: Instant,
}

impl MachineReceivers {
    pub(crate) fn open() -> Self {
        let (members, waiting) = (PublishedMembers::default(), VecDeque::new());
        Self { finder: find_receivers(), members, waiting, rested: Instant::now() }
    }

    /// The number of the network namespace whose sockets are found; 0 if none are.
    pub(crate) fn netns(&self) -> u64 {
        self.finder.as_ref().map_or(0, ReceiverFinder::netns)
    }

    /// A program shows a socket to publish it.
    pub(crate) fn show(&mut self, by: (u32, u32), socket: &SocketFacts) -> PublishRequest {
        self.members.show(by, socket)
    }

    /// The broker has published what a program has shown.
    pub(crate) fn published(&mut self, session: u32, request: u32, key: u64) {
        self.members.published(session, request, key);
    }

    /// The broker has refused a request of a program.
    pub(crate) fn refused(&mut self, session: u32, request: u32) {
        self.members.refused(session, request);
    }

    /// A program withdraws a socket. From here on its group is not proved (protocol U14.19): the program may have had the kernel choose otherwise.
    pub(crate) fn withdrawn(&mut self, session: u32, key: u64) {
        self.members.withdrawn(session, key);
    }

    /// A session ends, and its publications with it.
    pub(crate) fn session_ended(&mut self, session: u32) {
        self.members.session_ended(session);
    }

    /// All sessions have ended, and no question is open.
    pub(crate) fn forget_all(&mut self) {
        self.members = PublishedMembers::default();
        self.waiting.clear();
    }

    /// The broker asks.
    pub(crate) fn ask(&mut self, number: u32, questions: Vec<ReceiverQuestion>) {
        if self.waiting.len() >= MOST_WAITING {
            self.waiting.pop_front();
        }
        self.waiting.push_back(WaitingQuestions { came: Instant::now(), number, questions });
    }

    /// How long until questions are to be answered.
    pub(crate) fn due_in(&self) -> Option<Duration> {
        let due = |waiting: &WaitingQuestions| match waiting.are_about_groups() {
            true => self.rested.saturating_duration_since(Instant::now()),
            false => Duration::ZERO,
        };
        self.waiting.iter().map(due).min()
    }

    /// Questions that are to be answered now.
    pub(crate) fn next_question(&mut self) -> Option<(u32, Vec<ReceiverQuestion>)> {
        let now = Instant::now();
        self.waiting.retain(|waiting| now < waiting.came + PATIENCE);
        let at = self.waiting.iter().position(|waiting| now >= self.rested || !waiting.are_about_groups())?;
        self.waiting.remove(at).map(|WaitingQuestions { number, questions, .. }| (number, questions))
    }

    /// The sockets that receive datagrams with these ends; 0 where there is none, or where it is not certain which member of a group receives.
    pub(crate) fn find(&mut self, questions: &[ReceiverQuestion]) -> Vec<u64> {
        let Some(finder) = &mut self.finder else { return Vec::new() };
        let begun = Instant::now();
        let found = finder.find(questions);
        let mut groups = GroupLook::new(&self.members.members).within(LOOK_AT_GROUP, LOOK_AT_ALL);
        let mut cookie_of = |(question, found): (&ReceiverQuestion, Option<FoundReceiver>)| {
            let found = found?;
            let counts = groups.counts((question.to, *question), found, |probes| finder.find(probes));
            if !counts {
                tracing::debug!(at = %question.to, "a socket of the group is not published, or too many groups have flows");
            }
            counts.then_some(found.cookie)
        };
        let cookies = questions.iter().zip(found).map(|of| cookie_of(of).unwrap_or(0)).collect();
        if questions.iter().any(|question| question.in_group) {
            self.rested = Instant::now() + begun.elapsed() * (SHARE - 1);
        }
        cookies
    }
}

/// The finder of UDP sockets of this machine; `None` if the kernel does not find them.
fn find_receivers() -> Option<ReceiverFinder> {
    const STAY: &str = "datagrams to and from this machine stay on the kernel";
    let opened = ReceiverFinder::open();
    let mut finder = opened
        .inspect_err(
            |error| tracing::info!(%error, "{STAY}: the agent may not ask it about UDP sockets (docs/policy.md)"),
        )
        .ok()?;
    if finder.works() {
        return Some(finder);
    }
    tracing::info!("{STAY}, which does not find UDP sockets (module udp_diag)");
    None
}

#[cfg(test)]
mod tests;
