//! The ends of flows that are in virtual machines: the agents of the machines are asked whether their sockets still receive (protocol U14).
//!
//! ```text
//!   every look at the flows:   MachineSockets::ask -- FindReceivers --> agent
//!                              MachineSockets::answered <-- ReceiversAre, dated by the machine's clock --
//!                                 another socket     -> Event::FlowLost
//!                                 both ends proved   -> the flow's date, in the directories of both ends
//! ```
//!
//! Each flow has a separate date, so a machine that is late delays its own flows alone. A flow that no answer has proved for [`LATE`] ends.
//!
//! The agents also look for the members of `SO_REUSEPORT` groups. A machine has flows of a bounded number of groups, so that this takes its agent a
//! bounded time.
//!
//! **Clocks.** The clocks of two kernels have nothing to do with one another. A proof that was asked for at some moment of this host is dated
//! in a machine's directory by a date which that machine's agent had sent before that moment. So the date is at most too old.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::SocketAddr;

use partywall_protocol::agent::Say;
use partywall_protocol::socket::MOST_QUESTIONS;
use partywall_protocol::wire::{MachineId, Origin, Side};
use partywall_region::inspect::groups::GROUPS;

use crate::control::PortQuestions;
use crate::core::{FlowSocket, MachineNews};

/// Milliseconds after which a flow ends that was not proved.
const LATE: u64 = 5_000;
/// Milliseconds after which an agent that has not answered is asked again.
const PATIENCE: u64 = 1_000;
/// Dates of a machine that are remembered: more than it sends in the time in which a proof is of use.
const DATES: usize = 64;

/// A flow that has an end in a machine.
#[derive(Debug)]
struct SeparateFlow {
    sockets: [FlowSocket; 2],
    /// When each end was last asked about and found, in milliseconds of this host's clock.
    proved: [Option<u64>; 2],
    begun: u64,
}

/// Questions that were sent together and are not answered.
#[derive(Debug)]
struct OpenQuestions {
    asked_at: u64,
    /// The agent looks for members of groups.
    about_groups: bool,
    ends: Vec<(u64, Side)>,
}

/// A machine with a port.
#[derive(Debug)]
struct AskedMachine {
    port: PortQuestions,
    open: BTreeMap<u32, OpenQuestions>,
    /// When its answers came, by this host's clock, and the dates in them, by its own.
    dates: VecDeque<(u64, u64)>,
}

/// A proof for a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FlowDate {
    pub(super) flow: u64,
    /// Whose directory.
    pub(super) reader: Origin,
    /// By the clock of that.
    pub(super) at: u64,
}

/// The outcome of an answer.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Answered {
    /// Flows of which an end is not the one that receives any more.
    pub(super) lost: Vec<(u64, Side)>,
    pub(super) proved: Vec<FlowDate>,
}

/// All machines, and the flows that have an end in one.
#[derive(Debug, Default)]
pub(super) struct MachineSockets {
    machines: BTreeMap<MachineId, AskedMachine>,
    flows: BTreeMap<u64, SeparateFlow>,
    /// The number of the last question.
    number: u32,
}

impl MachineSockets {
    /// A machine has this port from now on.
    pub(super) fn has_port(&mut self, machine: MachineId, port: PortQuestions) {
        self.machines.insert(machine, AskedMachine { port, open: BTreeMap::new(), dates: VecDeque::new() });
    }

    /// Takes in what concerns the ports of machines.
    pub(super) fn hear<F>(&mut self, news: &MachineNews<F>) {
        match news {
            MachineNews::Removed { machine } => drop(self.machines.remove(machine)),
            // The agent may have been started again, and so may the machine: its clock is another one then.
            MachineNews::Up { machine, .. } => {
                if let Some(asked) = self.machines.get_mut(machine) {
                    asked.open.clear();
                    asked.dates.clear();
                }
            }
            _ => {}
        }
    }

    /// A flow is watched from now on. Returns the side whose machine has flows of too many groups, if there is one (protocol U11.15).
    pub(super) fn add(&mut self, flow: u64, sockets: [FlowSocket; 2], now: u64) -> Option<Side> {
        if sockets.iter().any(|socket| socket.host_netns().is_none()) {
            self.flows.insert(flow, SeparateFlow { sockets, proved: [None; 2], begun: now });
        }
        let is_crowded = |socket: &FlowSocket| {
            let machine = socket.namespace.origin.machine();
            machine.is_some_and(|machine| socket.is_chosen && self.groups(machine).len() > GROUPS)
        };
        let [sender, receiver] = &sockets;
        match (is_crowded(receiver), is_crowded(sender)) {
            (true, _) => Some(Side::Accepting),
            (_, true) => Some(Side::Connecting),
            _ => None,
        }
    }

    /// The addresses of the groups of a machine that have flows.
    fn groups(&self, machine: MachineId) -> BTreeSet<SocketAddr> {
        let sockets = self.flows.values().flat_map(|flow| &flow.sockets);
        let of_groups = sockets.filter(|of| of.is_chosen && of.namespace.origin == Origin::Machine(machine));
        of_groups.map(|socket| socket.to).collect()
    }

    pub(super) fn remove(&mut self, flow: u64) {
        self.flows.remove(&flow);
    }

    /// The ends on this host were found proved.
    pub(super) fn found_here(&mut self, at: u64) {
        for SeparateFlow { sockets, proved, .. } in self.flows.values_mut() {
            let here = sockets.iter().zip(proved).filter(|(socket, _)| socket.host_netns().is_some());
            here.for_each(|(_, proved)| *proved = Some(at));
        }
    }

    /// The flows that no answer has proved for too long, and the end that is to blame.
    pub(super) fn late(&self, now: u64) -> Vec<(u64, Side)> {
        let late = |(flow, of): (&u64, &SeparateFlow)| {
            let [sender, receiver] = of.proved.map(|at| at.unwrap_or(of.begun));
            let (oldest, side) =
                if receiver <= sender { (receiver, Side::Accepting) } else { (sender, Side::Connecting) };
            (now.saturating_sub(oldest) > LATE).then_some((*flow, side))
        };
        self.flows.iter().filter_map(late).collect()
    }

    /// Asks the agents about the flows of their machines, and those of `unknown` machines for their network namespace. An agent that has
    /// not answered the last questions is not asked again for a while. Questions about groups are apart: the agent takes its time to answer them, and
    /// other flows must not wait for that.
    pub(super) fn ask(&mut self, unknown: &[MachineId], now: u64) {
        for (machine, asked) in &mut self.machines {
            let of_machine = |socket: &FlowSocket| socket.namespace.origin == Origin::Machine(*machine);
            let mut ends: Vec<_> = (self.flows.iter())
                .flat_map(|(flow, of)| {
                    let sides = [Side::Connecting, Side::Accepting];
                    of.sockets.iter().zip(sides).map(|(socket, side)| (*flow, side, socket))
                })
                .filter(|(.., socket)| of_machine(socket))
                .collect();
            // The agent looks for the members of a group once for each message that asks about the group.
            ends.sort_by_key(|(.., socket)| socket.is_chosen.then_some(socket.to));
            let (plain, of_groups) = ends.split_at(ends.partition_point(|(.., socket)| !socket.is_chosen));
            let mut questions = Vec::new();
            for (mut ends, about_groups) in [(plain, false), (of_groups, true)] {
                if ends.is_empty() && (about_groups || !unknown.contains(machine)) {
                    continue;
                }
                let mut open = asked.open.values().filter(|open| open.about_groups == about_groups);
                if open.any(|open| now.saturating_sub(open.asked_at) < PATIENCE) {
                    continue;
                }
                asked.open.retain(|_, open| open.about_groups != about_groups);
                loop {
                    let (some, rest) = ends.split_at(ends.len().min(MOST_QUESTIONS));
                    self.number = self.number.wrapping_add(1);
                    let of = some.iter().map(|(.., socket)| socket.question()).collect();
                    questions.push(Say::FindReceivers { number: self.number, questions: of });
                    let ends_of = some.iter().map(|(flow, side, _)| (*flow, *side)).collect();
                    asked.open.insert(self.number, OpenQuestions { asked_at: now, about_groups, ends: ends_of });
                    ends = rest;
                    if ends.is_empty() {
                        break;
                    }
                }
            }
            if questions.is_empty() {
                continue;
            }
            asked.port.ask(questions);
        }
    }

    /// The agent of a machine has answered. `None` if it was not asked that.
    pub(super) fn answered(
        &mut self,
        (machine, netns): (MachineId, u64),
        (number, date): (u32, u64),
        receivers: &[u64],
        now: u64,
    ) -> Option<Answered> {
        let asked = self.machines.get_mut(&machine)?;
        let OpenQuestions { asked_at, ends, .. } = asked.open.remove(&number)?;
        if asked.dates.len() >= DATES {
            asked.dates.pop_front();
        }
        asked.dates.push_back((now, date));
        let mut answered = Answered::default();
        // An answer that is too short proves nothing.
        for ((flow, side), cookie) in ends.into_iter().zip(receivers) {
            let Some(of) = self.flows.get_mut(&flow) else { continue };
            let at = match side {
                Side::Connecting => 0,
                Side::Accepting => 1,
            };
            let socket = of.sockets[at];
            if socket.cookie != *cookie || socket.namespace.cookie != netns {
                answered.lost.push((flow, side));
                continue;
            }
            of.proved[at] = Some(asked_at);
            let [Some(sender), Some(receiver)] = of.proved else { continue };
            let (proved_at, readers) = (sender.min(receiver), of.sockets.map(|socket| socket.namespace.origin));
            let date =
                |reader: &Origin| Some(FlowDate { flow, reader: *reader, at: self.date_of(*reader, proved_at)? });
            // A flow within a machine is in one directory.
            let readers = if readers[0] == readers[1] { &readers[..1] } else { &readers[..] };
            answered.proved.extend(readers.iter().filter_map(date));
        }
        Some(answered)
    }

    /// A date of a reader's clock that is not later than a moment of this host's clock.
    fn date_of(&self, reader: Origin, moment: u64) -> Option<u64> {
        let Origin::Machine(machine) = reader else { return Some(moment) };
        let dates = &self.machines.get(&machine)?.dates;
        // The clock is coarse: within one of its steps, the order is unknown.
        dates.iter().rev().find(|(came, _)| *came < moment).map(|(_, date)| *date)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use partywall_protocol::socket::NamespaceId;
    use rustix::event::{EventfdFlags, eventfd};
    use std::sync::Arc;

    const A: MachineId = MachineId::MIN;
    const B: MachineId = MachineId::new(2).unwrap();
    /// The namespaces of both agents, and their sockets, have equal numbers.
    const NETNS: u64 = 3;
    const COOKIE: u64 = 9;

    struct World {
        sockets: MachineSockets,
        ports: [(MachineId, PortQuestions); 2],
    }

    impl World {
        fn new() -> Self {
            let port = || PortQuestions::new(Arc::new(eventfd(0, EventfdFlags::CLOEXEC).unwrap()));
            let ports = [(A, port()), (B, port())];
            let mut sockets = MachineSockets::default();
            ports.iter().for_each(|(machine, port)| sockets.has_port(*machine, port.clone()));
            Self { sockets, ports }
        }

        /// The numbers of the questions that a machine is asked, and how many ends they are about.
        fn asked(&self, machine: MachineId) -> Vec<(u32, usize)> {
            let (_, port) = self.ports.iter().find(|(of, _)| *of == machine).unwrap();
            let number = |question| match question {
                Say::FindReceivers { number, questions } => (number, questions.len()),
                other => panic!("{other:?}"),
            };
            port.take().into_iter().map(number).collect()
        }

        fn answer(&mut self, machine: MachineId, number: u32, date: u64, now: u64) -> Answered {
            self.sockets.answered((machine, NETNS), (number, date), &[COOKIE], now).expect("it was asked")
        }
    }

    fn socket(origin: impl Into<Origin>) -> FlowSocket {
        let namespace = NamespaceId { origin: origin.into(), cookie: NETNS };
        let at = |text: &str| text.parse().unwrap();
        FlowSocket { cookie: COOKIE, namespace, from: at("10.0.0.1:5"), to: at("10.0.0.2:6"), is_chosen: false }
    }

    #[test]
    fn flow_is_dated_by_dates_from_before_the_question() {
        let mut w = World::new();
        w.sockets.add(1, [socket(A), socket(B)], 1000);
        w.sockets.ask(&[], 1000);
        let [(a, 1)] = w.asked(A)[..] else { panic!() };
        let [(b, 1)] = w.asked(B)[..] else { panic!() };
        assert_eq!(w.answer(A, a, 70_000, 1010), Answered::default(), "one end is not proved");
        assert_eq!(w.answer(B, b, 5, 1020), Answered::default(), "no date of theirs is from before the question");
        w.sockets.ask(&[], 1100);
        let ([(a, _)], [(b, _)]) = (&w.asked(A)[..], &w.asked(B)[..]) else { panic!() };
        let (a, b) = (*a, *b);
        let first = w.answer(A, a, 70_100, 1130);
        assert_eq!(first.proved, [], "the older proof, that of b, is of 1000");
        let date = |reader, at| FlowDate { flow: 1, reader: Origin::Machine(reader), at };
        assert_eq!(w.answer(B, b, 105, 1140).proved, [date(A, 70_000), date(B, 5)]);
    }

    #[test]
    fn flow_within_a_machine_is_dated_when_both_ends_are_found() {
        let mut w = World::new();
        w.sockets.add(1, [socket(A), FlowSocket { cookie: COOKIE + 1, ..socket(A) }], 1000);
        let mut answer = |now, cookies: [u64; 2]| {
            w.sockets.ask(&[], now);
            let [(number, 2)] = w.asked(A)[..] else { panic!("both ends at once") };
            w.sockets.answered((A, NETNS), (number, now * 10), &cookies, now + 1).unwrap()
        };
        assert_eq!(answer(1000, [COOKIE, COOKIE + 1]).proved, [], "no date is from before the question");
        let date = FlowDate { flow: 1, reader: Origin::Machine(A), at: 10_000 };
        assert_eq!(answer(1100, [COOKIE, COOKIE + 1]).proved, [date], "in one directory");
        assert_eq!(answer(1200, [COOKIE, COOKIE]).lost, [(1, Side::Accepting)]);
        assert_eq!(answer(1300, [0, COOKIE + 1]).lost, [(1, Side::Connecting)]);
    }

    #[test]
    fn flow_of_host_and_machine_is_dated_by_the_older_proof() {
        let mut w = World::new();
        w.sockets.add(1, [socket(Origin::Host), socket(B)], 1000);
        w.sockets.found_here(1050);
        w.sockets.ask(&[], 1100);
        let [(b, 1)] = w.asked(B)[..] else { panic!() };
        assert!(w.asked(A).is_empty(), "it has no flow");
        assert_eq!(w.answer(B, b, 5, 1110).proved, [FlowDate { flow: 1, reader: Origin::Host, at: 1050 }]);
        w.sockets.found_here(1200);
        w.sockets.ask(&[], 1150);
        let [(b, 1)] = w.asked(B)[..] else { panic!() };
        let dates = [(Origin::Host, 1150), (Origin::Machine(B), 5)];
        assert_eq!(w.answer(B, b, 60, 1210).proved, dates.map(|(reader, at)| FlowDate { flow: 1, reader, at }));
    }

    #[test]
    fn other_socket_or_namespace_ends_the_flow() {
        for (netns, receivers, lost) in [
            (NETNS, vec![COOKIE], vec![]),
            (NETNS, vec![COOKIE + 1], vec![(1, Side::Accepting)]),
            (NETNS, vec![0], vec![(1, Side::Accepting)]),
            (NETNS + 1, vec![COOKIE], vec![(1, Side::Accepting)]),
            (0, vec![], vec![]),
        ] {
            let mut w = World::new();
            w.sockets.add(1, [socket(Origin::Host), socket(B)], 1000);
            w.sockets.ask(&[], 1000);
            let [(number, 1)] = w.asked(B)[..] else { panic!() };
            let answered = w.sockets.answered((B, netns), (number, 1), &receivers, 1001).unwrap();
            assert_eq!((answered.lost, answered.proved), (lost, vec![]), "{netns} {receivers:?}");
        }
    }

    #[test]
    fn answer_that_was_not_asked_for_is_ignored() {
        let mut w = World::new();
        w.sockets.add(1, [socket(Origin::Host), socket(B)], 1000);
        w.sockets.ask(&[], 1000);
        let [(number, 1)] = w.asked(B)[..] else { panic!() };
        let mut answered = |machine, number| w.sockets.answered((machine, NETNS), (number, 1), &[COOKIE], 1001);
        assert_eq!(answered(B, number + 1), None);
        assert_eq!(answered(A, number), None, "another machine was asked");
        assert!(answered(B, number).is_some());
        assert_eq!(answered(B, number), None, "twice");
        w.sockets.ask(&[], 1100);
        let [(number, 1)] = w.asked(B)[..] else { panic!() };
        w.sockets.hear::<()>(&MachineNews::Up { machine: B, up: true });
        assert_eq!(w.sockets.answered((B, NETNS), (number, 1), &[COOKIE], 1101), None, "by the agent before");
    }

    #[test]
    fn silent_agent_delays_and_ends_its_own_flows_alone() {
        let mut w = World::new();
        w.sockets.add(1, [socket(A), socket(Origin::Host)], 1000);
        w.sockets.add(2, [socket(B), socket(Origin::Host)], 1000);
        let mut now = 1000;
        let mut asked_a = 0;
        while now <= 1000 + LATE {
            assert_eq!(w.sockets.late(now), []);
            w.sockets.found_here(now);
            w.sockets.ask(&[], now);
            asked_a += w.asked(A).len();
            let [(number, 1)] = w.asked(B)[..] else { panic!("asked again as soon as it has answered") };
            w.answer(B, number, now, now + 1);
            now += 100;
        }
        assert_eq!(w.sockets.late(now), [(1, Side::Connecting)]);
        assert!((2..=1 + (LATE / PATIENCE) as usize).contains(&asked_a), "{asked_a}: it is not flooded");
        w.sockets.remove(1);
        assert_eq!(w.sockets.late(now), []);
    }

    #[test]
    fn many_flows_are_asked_about_in_several_messages() {
        let mut w = World::new();
        let flows = MOST_QUESTIONS as u64 + 1;
        for flow in 0..flows {
            w.sockets.add(flow, [socket(Origin::Host), socket(B)], 1000);
        }
        w.sockets.ask(&[A], 1000);
        let ends: Vec<_> = w.asked(B).into_iter().map(|(_, ends)| ends).collect();
        assert_eq!(ends, [MOST_QUESTIONS, 1]);
        assert_eq!(w.asked(A).into_iter().map(|(_, ends)| ends).collect::<Vec<_>>(), [0], "for its namespace alone");
    }
    /// A socket of a group in a machine, with this port.
    fn member(machine: MachineId, port: u16) -> FlowSocket {
        let mut member = FlowSocket { is_chosen: true, ..socket(machine) };
        member.to.set_port(port);
        member
    }

    #[test]
    fn groups_of_a_machine_that_have_flows_are_limited() {
        let mut w = World::new();
        let mut add = |flow, sockets| w.sockets.add(flow, sockets, 1000);
        for group in 1..=GROUPS as u16 {
            let flow = u64::from(group);
            assert_eq!(add(flow, [socket(Origin::Host), member(A, group)]), None, "{group}");
        }
        let next = GROUPS as u16 + 1;
        assert_eq!(add(100, [socket(Origin::Host), member(A, 1)]), None, "another flow of a group");
        assert_eq!(add(101, [socket(A), socket(A)]), None, "of no group");
        assert_eq!(add(102, [member(B, next), socket(A)]), None, "another machine's group");
        assert_eq!(add(103, [socket(Origin::Host), member(A, next)]), Some(Side::Accepting));
        w.sockets.remove(103);
        assert_eq!(w.sockets.add(104, [member(A, next), socket(B)], 1000), Some(Side::Connecting));
        w.sockets.remove(104);
        w.sockets.remove(1);
        w.sockets.remove(100);
        assert_eq!(w.sockets.add(105, [member(A, next), socket(B)], 1000), None, "another one has ended");
    }

    #[test]
    fn unanswered_question_about_a_group_delays_no_other_flow() {
        let mut w = World::new();
        w.sockets.add(1, [socket(Origin::Host), socket(B)], 1000);
        w.sockets.add(2, [socket(Origin::Host), member(B, 7)], 1000);
        w.sockets.ask(&[], 1000);
        let [(plain, 1), (_, 1)] = w.asked(B)[..] else { panic!("a message for each kind") };
        for now in (1000..1000 + PATIENCE).step_by(100) {
            let plain = if now == 1000 { plain } else { w.asked(B)[0].0 };
            w.answer(B, plain, now, now + 1);
            w.sockets.ask(&[], now + 100);
        }
        assert_eq!(w.asked(B).len(), 2, "both again, after the patience");
        assert_eq!((w.sockets.flows[&1].proved[1], w.sockets.flows[&2].proved[1]), (Some(900 + PATIENCE), None));
    }

    #[test]
    fn questions_about_one_group_are_asked_together() {
        let mut w = World::new();
        // Flows of four groups, in turn, each with its own client and socket.
        for flow in 1..=4 * MOST_QUESTIONS as u16 {
            let mut socket_of_flow = FlowSocket { cookie: flow.into(), ..member(B, 1 + flow % 4) };
            socket_of_flow.from.set_port(flow);
            w.sockets.add(flow.into(), [socket(Origin::Host), socket_of_flow], 1000);
        }
        w.sockets.ask(&[], 1000);
        let (_, port) = w.ports.iter().find(|(of, _)| *of == B).unwrap();
        for question in port.take() {
            let Say::FindReceivers { number, questions } = question else { panic!("{question:?}") };
            assert!(questions.iter().all(|one| one.in_group && one.to == questions[0].to), "{questions:?}");
            let cookies: Vec<u64> = questions.iter().map(|one| one.from.port().into()).collect();
            let answered = w.sockets.answered((B, NETNS), (number, 1), &cookies, 1001).unwrap();
            assert_eq!(answered.lost, [], "an answer is about another end");
        }
        assert!(w.sockets.flows.values().all(|flow| flow.proved[1] == Some(1000)));
    }
}
