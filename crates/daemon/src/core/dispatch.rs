//! A message of a client: which part of the core answers it, and what becomes of a refusal.

use partywall_protocol::passed::{PassedSocket, PassedState};
use partywall_protocol::wire::{Message, Origin, Refusal};

use super::action::Order;
use super::events::AskedFor;
use super::explain::{AskedUser, PolicyQuery};
use super::further_regions::{Addition, FurtherKey, FurtherRegion, TakenKind};
use super::id::SessionId;
use super::refuse::{self, Refuse, refuse};
use super::socket::{SocketFacts, at};
use super::{Core, Descriptor, connect, reclaim};

impl<F: Descriptor> Core<F> {
    pub(super) fn message(
        &mut self,
        id: SessionId,
        request: u32,
        message: Message,
        descriptors: Vec<F>,
        socket: Option<Result<SocketFacts, String>>,
    ) {
        let Some(session) = self.sessions.get(&id) else {
            // It was dismissed by an earlier packet of the same read.
            return;
        };
        let joined = session.domain.is_some();
        let name = message.name();
        self.tally.request(name);
        let wanted = (!self.events.is_idle()).then(|| AskedFor::of(&message)).flatten();
        let came = descriptors.len() + usize::from(socket.is_some());
        let answer = if message.fd_count() == came && message.brings_socket() == socket.is_some() {
            self.dispatch(id, request, message, descriptors, socket)
        } else {
            let due = message.fd_count();
            refuse(Refusal::Protocol, format!("{name} brings {due} descriptors, but {came} came"))
        };
        match answer {
            Ok(()) => {}
            Err(Refuse { code, reason, denied }) => {
                tracing::debug!(session = id.0, request = name, %code, reason, "refused");
                self.tally.refusal(name, code);
                match denied {
                    Some(denial) => self.note_denied(*denial),
                    None => self.note_refused(id, wanted, code, &reason),
                }
                self.send(id, request, Message::Refused { code, reason });
                // A session that failed to join may say nothing more (protocol C3).
                if !joined {
                    self.dismiss(id);
                }
            }
        }
    }

    fn dispatch(
        &mut self,
        id: SessionId,
        request: u32,
        message: Message,
        with: Vec<F>,
        socket: Option<Result<SocketFacts, String>>,
    ) -> Result<(), Refuse> {
        let has_joined = self.sessions.get(&id).is_some_and(|session| session.domain.is_some());
        match Concern::of(&message) {
            Concern::Join => self.dispatch_join(id, request, message),
            _ if !has_joined => {
                refuse(Refusal::Protocol, format!("the first message of a session is Join, not {}", message.name()))
            }
            Concern::Session => self.dispatch_session(id, request, message),
            Concern::Channels => self.dispatch_channels(id, request, message, with),
            Concern::Machines => self.dispatch_machines(id, request, message),
            Concern::Groups => self.dispatch_groups(id, request, message, with),
            Concern::Sockets => {
                let origin = self.sessions.get(&id).map_or(Origin::Host, |session| session.peer.origin());
                self.dispatch_sockets(id, request, message, with, ShownSocket { origin, socket })
            }
            Concern::Policy => self.dispatch_policy(id, request, message),
            Concern::Cluster => self.dispatch_cluster(id, request, message, with),
            Concern::Broker => no_request(&message),
        }
    }

    fn dispatch_join(&mut self, id: SessionId, request: u32, message: Message) -> Result<(), Refuse> {
        match message {
            Message::Join { version, name } => self.join(id, request, version, &name, false),
            other => no_request(&other),
        }
    }

    fn dispatch_session(&mut self, id: SessionId, request: u32, message: Message) -> Result<(), Refuse> {
        match message {
            Message::Bind { service, kind, backlog } => self.bind(id, request, &service, kind, backlog, false),
            Message::List { what, after } => self.list(id, request, what, after),
            Message::Inspect { channel } => self.inspect(id, request, channel),
            Message::LetGo { key } => {
                self.let_go(id, key);
                Ok(())
            }
            Message::Ping {} => {
                self.send(id, request, Message::Done {});
                Ok(())
            }
            Message::FollowEvents { after } => self.follow_events(id, request, after),
            other => no_request(&other),
        }
    }

    /// Requests about channels, their rings and their further regions.
    fn dispatch_channels(&mut self, id: SessionId, request: u32, message: Message, with: Vec<F>) -> Result<(), Refuse> {
        match message {
            Message::Connect { target, service, kind, directions, region } => {
                let shape = connect::Shape { kind, directions, region };
                let done = self.connect(id, request, &target, &service, shape, with);
                if done.is_err() {
                    self.give_place_back(id, region);
                }
                done
            }
            Message::Accepted { channel, start, region } => self.accepted(id, request, channel, start, region, with),
            Message::Grow { channel, side, generation, region } => {
                let growth = connect::Growth { channel, side, generation, region };
                self.grow(id, request, growth, with)
            }
            Message::TakeRegions { channel, side, kind, count, bytes } => {
                let allowance = TakenKind { count, bytes };
                self.take_regions(id, request, (channel, side), kind, allowance)
            }
            Message::AddRegion { channel, side, number, kind, region } => {
                let addition = Addition { channel, side, number, kind, region };
                self.add_region(id, request, addition, with)
            }
            Message::ReclaimRegion { channel, side, own, number, kind, bytes } => {
                let (key, region) = (FurtherKey { own, number }, FurtherRegion { kind, bytes });
                self.reclaim_region(id, request, (channel, side), key, region)
            }
            Message::DropRegion { channel, side, own, number } => {
                self.drop_region(id, (channel, side), FurtherKey { own, number })
            }
            Message::Closed { channel } => self.closed(id, channel),
            Message::Room { channel, size, peer } => self.room(id, request, channel, size, &peer),
            Message::Reclaim { channel, side, peer, service, kind, directions, region } => {
                let shape = connect::Shape { kind, directions, region };
                self.reclaim(id, request, reclaim::ChannelClaim { channel, side, peer, service, shape }, with)
            }
            other => no_request(&other),
        }
    }

    fn dispatch_machines(&mut self, id: SessionId, request: u32, message: Message) -> Result<(), Refuse> {
        let order = match message {
            Message::AddMachine { room, migratable, name, monitor, port } => {
                Order::Add { name: refuse::name(&name)?, monitor, port, room, migratable }
            }
            Message::ReleaseMachine { name } => Order::Release { name: refuse::name(&name)? },
            Message::ResumeMachine { name } => Order::Resume { name: refuse::name(&name)? },
            Message::RemoveMachine { name } => Order::Remove { name: refuse::name(&name)? },
            other => return no_request(&other),
        };
        self.order(id, request, order)
    }

    fn dispatch_groups(&mut self, id: SessionId, request: u32, message: Message, with: Vec<F>) -> Result<(), Refuse> {
        match message {
            Message::JoinGroup { room, group, .. } => self.join_group(id, request, room, &group, with),
            Message::FetchSeat { key } => self.fetch_seat(id, request, key),
            Message::GroupWindow { member } => self.group_window(id, request, member),
            Message::GroupPlace { member, machine } => self.group_place(id, request, member, &machine),
            other => no_request(&other),
        }
    }

    /// Requests about the sockets of unmodified programs.
    fn dispatch_sockets(
        &mut self,
        id: SessionId,
        request: u32,
        message: Message,
        with: Vec<F>,
        socket: ShownSocket,
    ) -> Result<(), Refuse> {
        match message {
            Message::ReclaimSocket { .. } if self.is_in_machine(id) => {
                let name = message.name();
                refuse(Refusal::Machine, format!("{name} is for programs of the host"))
            }
            Message::Directory {} => self.directory(id, request),
            Message::Publish { addresses } => self.publish(id, request, &addresses.0, &socket.facts()?),
            Message::Withdraw { key } => self.withdraw(id, request, key),
            Message::Offer { region } => {
                let socket = socket.facts()?;
                let done = self.may_move(id).and_then(|()| self.offer(id, request, region, socket, with));
                if done.is_err() {
                    self.give_place_back(id, region);
                }
                done
            }
            Message::Cancel { offer } => self.cancel(id, request, offer),
            Message::Take { region } => {
                self.may_move(id)?;
                self.take(id, request, region, socket.facts()?, with)
            }
            Message::Confirm { offer } => self.confirm(id, request, offer, socket.facts()?),
            Message::Finish { offer } => self.finish(id, request, offer, socket.facts()?),
            Message::ReclaimSocket { channel, side, region } => {
                self.reclaim_socket(id, request, (channel, side), region, socket.facts()?, with)
            }
            Message::OfferDatagrams { to_high, to_low, to_port, region } => {
                let (socket, to) = (socket.facts()?, at(to_high, to_low, to_port));
                let offered = |core: &mut Self| core.offer_datagrams(id, request, to, region, socket, with);
                let done = self.may_move(id).and_then(|()| offered(self));
                if done.is_err() {
                    self.give_place_back(id, region);
                }
                done
            }
            Message::TakeDatagrams { from_high, from_low, from_port, region } => {
                let (socket, from) = (socket.facts()?, at(from_high, from_low, from_port));
                let taken = |core: &mut Self| core.take_datagrams(id, request, (from, region), socket, with);
                let done = self.may_move(id).and_then(|()| taken(self));
                if done.is_err() {
                    self.give_place_back(id, region);
                }
                done
            }
            Message::FetchReceiver { flow } => self.fetch_receiver(id, request, flow),
            Message::Passed { socket, carrier, side, rings } => {
                self.passed(id, PassedSocket { socket, carrier }, PassedState { side, rings });
                Ok(())
            }
            Message::TakePassed { socket, carrier } => {
                self.take_passed(id, request, PassedSocket { socket, carrier });
                Ok(())
            }
            other => no_request(&other),
        }
    }

    fn dispatch_policy(&mut self, id: SessionId, request: u32, message: Message) -> Result<(), Refuse> {
        match message {
            Message::SetMoveRules { reset, clauses, ring_size, spin_us } => {
                self.set_move_rules(id, request, reset, &clauses.0, ring_size, spin_us)
            }
            Message::GetMoveRules {} => {
                self.get_move_rules(id, request);
                Ok(())
            }
            Message::TestPolicy { question, own, user, gid, to_own, to_user, from, to, service } => {
                let asked = |own, user, gid| if own { AskedUser::Own } else { AskedUser::Other { user, gid } };
                let gid = (gid != u32::MAX).then_some(gid);
                let (of, to_user) = (asked(own, user, gid), asked(to_own, to_user, None));
                let asked = PolicyQuery { question, of, to: to_user, names: [from, to, service] };
                self.test_policy(id, request, &asked)
            }
            other => no_request(&other),
        }
    }
}

/// The part of the core that a message is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Concern {
    /// The beginning of a session.
    Join,
    /// The session itself, and what it may list.
    Session,
    Channels,
    Machines,
    Groups,
    Sockets,
    Policy,
    Cluster,
    /// No part: only the broker sends such a message.
    Broker,
}

impl Concern {
    fn of(message: &Message) -> Self {
        match message {
            Message::Join { .. } => Self::Join,
            Message::Bind { .. }
            | Message::List { .. }
            | Message::Inspect { .. }
            | Message::LetGo { .. }
            | Message::Ping {}
            | Message::FollowEvents { .. } => Self::Session,
            Message::Connect { .. }
            | Message::Accepted { .. }
            | Message::Grow { .. }
            | Message::TakeRegions { .. }
            | Message::AddRegion { .. }
            | Message::ReclaimRegion { .. }
            | Message::DropRegion { .. }
            | Message::Closed { .. }
            | Message::Room { .. }
            | Message::Reclaim { .. } => Self::Channels,
            Message::AddMachine { .. }
            | Message::ReleaseMachine { .. }
            | Message::ResumeMachine { .. }
            | Message::RemoveMachine { .. } => Self::Machines,
            Message::JoinGroup { .. }
            | Message::FetchSeat { .. }
            | Message::GroupWindow { .. }
            | Message::GroupPlace { .. } => Self::Groups,
            Message::Directory {}
            | Message::Publish { .. }
            | Message::Withdraw { .. }
            | Message::Offer { .. }
            | Message::Cancel { .. }
            | Message::Take { .. }
            | Message::Confirm { .. }
            | Message::Finish { .. }
            | Message::ReclaimSocket { .. }
            | Message::OfferDatagrams { .. }
            | Message::TakeDatagrams { .. }
            | Message::FetchReceiver { .. }
            | Message::Passed { .. }
            | Message::TakePassed { .. } => Self::Sockets,
            Message::SetMoveRules { .. } | Message::GetMoveRules {} | Message::TestPolicy { .. } => Self::Policy,
            Message::FollowNames { .. }
            | Message::NameClaimed { .. }
            | Message::Route { .. }
            | Message::RouteTo { .. }
            | Message::RefuseRoute { .. }
            | Message::ConnectFor { .. } => Self::Cluster,
            Message::Joined { .. }
            | Message::Names { .. }
            | Message::RouteIs { .. }
            | Message::DirectoryIs { .. }
            | Message::Published { .. }
            | Message::Offered { .. }
            | Message::Bell { .. }
            | Message::PeerIs { .. }
            | Message::DatagramsTaken { .. }
            | Message::Receiver { .. }
            | Message::MoveRulesAre { .. }
            | Message::PolicyDecides { .. }
            | Message::Events { .. }
            | Message::RoomIs { .. }
            | Message::MachineAdded { .. }
            | Message::Machines { .. }
            | Message::GroupJoined { .. }
            | Message::GroupWindowIs { .. }
            | Message::GroupPlaceIs { .. }
            | Message::SeatIs { .. }
            | Message::Groups { .. }
            | Message::Refused { .. }
            | Message::Done {}
            | Message::Connected { .. }
            | Message::Incoming { .. }
            | Message::Attached { .. }
            | Message::Ring { .. }
            | Message::RegionAdded { .. }
            | Message::Domains { .. }
            | Message::Services { .. }
            | Message::Channels { .. }
            | Message::Regions { .. }
            | Message::PassedIs { .. }
            | Message::SocketRead {} => Self::Broker,
        }
    }
}

/// The socket that a message brings, or the reason why its facts could not be read.
#[derive(Debug)]
struct ShownSocket {
    /// Where the session's program runs.
    origin: Origin,
    socket: Option<Result<SocketFacts, String>>,
}

impl ShownSocket {
    fn facts(self) -> Result<SocketFacts, Refuse> {
        let origin = self.origin;
        match self.socket {
            // An agent's statements about namespaces apply to its own machine only.
            Some(Ok(facts)) => Ok(SocketFacts { origin, trusted: facts.trusted && origin == Origin::Host, ..facts }),
            Some(Err(reason)) => refuse(Refusal::BadSocket, reason),
            // `message` has checked that a socket came exactly if the message brings one.
            None => refuse(Refusal::Protocol, "a socket is missing"),
        }
    }
}

pub(super) fn no_request(message: &Message) -> Result<(), Refuse> {
    refuse(Refusal::Protocol, format!("{} is a message of the broker, not of a client", message.name()))
}
