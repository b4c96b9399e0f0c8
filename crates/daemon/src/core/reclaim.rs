//! `Reclaim`: after a restart of the broker, the two sides report their channel to it (protocol C9).
//!
//! The broker trusts a side only about itself, and compares its statements about the other side with the other side's own. A false claim
//! gains at most a line in a list: regions are shown to the user who brought them (C10), and no channel depends on the broker's record of
//! it.

use partywall_protocol::wire::{Located, Message, Name, Origin, Refusal, Side, User};

use super::channel::{Channel, ChannelEnd, EndState};
use super::connect::Shape;
use super::further_regions::FurtherRegions;
use super::id::ChannelId;
use super::refuse::{self, Refuse, refuse};
use super::region::check_region;
use super::{Core, Descriptor, SessionId};

/// A side's claim to its channel.
#[derive(Debug)]
pub(super) struct ChannelClaim {
    pub(super) channel: ChannelId,
    pub(super) side: Side,
    pub(super) peer: String,
    pub(super) service: String,
    pub(super) shape: Shape,
}

impl<F: Descriptor> Core<F> {
    pub(super) fn reclaim(
        &mut self,
        id: SessionId,
        request: u32,
        claim: ChannelClaim,
        with: Vec<F>,
    ) -> Result<(), Refuse> {
        let ChannelClaim { channel: number, side, ref peer, ref service, shape } = claim;
        let (other, service) = (refuse::name(peer)?, refuse::name(service)?);
        let (located, geometry) = shape.check()?;
        if located != Located::OwnMemory {
            return refuse(Refusal::Machine, "a channel between machines ends with the broker that carries its links");
        }
        let Some((domain_id, domain, peer)) = self.member(id) else { return Ok(()) };
        let name = domain.name.clone();
        self.has_been(number)?;
        // Accepting needs no permission, and only the connecting user's own claim can show who that user was.
        let may_connect = || {
            self.policy.may_connect(peer, &name, &other, &service)
                || self.policy.judge_connect_to(peer, &name, (&other, None), &service).allow()
        };
        if side == Side::Connecting && !may_connect() {
            return refuse(Refusal::Denied, format!("the policy does not let {name} connect to {other}:{service}"));
        }
        if let Some(channel) = self.channels.get(&number) {
            agree(channel, side, &name, &other, &service, shape, peer.user)
                .or_else(|what| refuse(Refusal::SelfContradiction, format!("channel {number}: {what}")))?;
        }
        domain.afford(shape.region.ring_size)?;
        let Some(region) = with.into_iter().next() else { return Ok(()) };
        let region = match peer.origin() {
            Origin::Host => {
                check_region(&region, geometry)?;
                self.keep(region)
            }
            Origin::Machine(_) => None,
        };
        let since = self.now;
        let channel = self.channels.entry(number).or_insert_with(|| {
            let ends = match side {
                Side::Connecting => [ChannelEnd::unclaimed(&name), ChannelEnd::unclaimed(&other)],
                Side::Accepting => [ChannelEnd::unclaimed(&other), ChannelEnd::unclaimed(&name)],
            };
            Channel { kind: shape.kind, directions: shape.directions, service, since, host: None, ends }
        });
        *channel.end_mut(side) = ChannelEnd {
            name,
            domain: domain_id,
            user: Some(peer.user),
            state: EndState::Held { domain: domain_id, pid: peer.pid },
            ring_size: shape.region.ring_size,
            region,
            socket: None,
            further: FurtherRegions::of_reclaimed_end(),
        };
        self.hold(number, side, domain_id, peer.pid, shape.region.ring_size);
        self.inboxes.insert((number, side), id);
        self.send(id, request, Message::Done {});
        Ok(())
    }

    /// Refuses a number that no channel can have now.
    pub(super) fn has_been(&self, number: ChannelId) -> Result<(), Refuse> {
        let is_handshake = self.sockets.offers.contains_key(&number) || self.machines.ended.contains_key(&number);
        if number >= self.next_channel || is_handshake {
            return refuse(Refusal::NoSuchChannel, format!("no channel has had the number {number} yet"));
        }
        Ok(())
    }
}

/// Whether a claim agrees with the known facts of the channel.
fn agree<F>(
    channel: &Channel<F>,
    side: Side,
    name: &Name,
    other: &Name,
    service: &Name,
    shape: Shape,
    user: User,
) -> Result<(), String> {
    let (mine, theirs) = (channel.end(side), channel.end(side.other()));
    if mine.state.is_live() {
        return Err(format!("its {side} side is held already"));
    }
    if mine.name != *name || mine.user.is_some_and(|known| known != user) {
        return Err(format!("its {side} side is another domain"));
    }
    if theirs.name != *other {
        return Err(format!("its {} side is another domain than {other}", side.other()));
    }
    if (channel.kind, channel.directions, &channel.service) != (shape.kind, shape.directions, service) {
        let Channel { kind, directions, service, .. } = channel;
        return Err(format!("the other side says it carries {kind}, {directions}, for the service {service}"));
    }
    Ok(())
}
