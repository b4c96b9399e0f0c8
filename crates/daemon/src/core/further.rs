//! Further regions of a channel: memory of one side that the other asked for by its kind (protocol F).
//!
//! ```text
//!   owner                        broker                    reader
//!                                 <---------------------  TakeRegions (kind, how many, how many bytes)
//!   AddRegion [region] -------->  checks, counts for both
//!                                 RegionAdded [region] ->
//!   Done <----------------------  delivered
//!   DropRegion ---------------->         <--------------  DropRegion
//!                after a restart of the broker
//!   ReclaimRegion ------------->         <--------------  ReclaimRegion
//! ```

use partywall_protocol::wire::{Kind, Located, Message, Origin, Refusal, RegionReference, Side, User};

use super::channel::{Channel, EndState};
use super::further_regions::{Addition, FurtherKey, FurtherRegion, TakenKind};
use super::id::{ChannelId, DomainId, SessionId};
use super::refuse::{Refuse, refuse};
use super::region::{check_region, located_further};
use super::{Core, Descriptor};

/// Most further regions that a side of a channel owns at a time (protocol F1.2).
pub(super) const MOST_OWNED: usize = 8;
/// Most kinds that a side of a channel takes (protocol F2).
const MOST_KINDS: usize = 8;
/// Most regions of the other side that an end can have come to hold: as many as the count of a kind can say, of each kind.
const MOST_HELD: usize = MOST_KINDS * u8::MAX as usize;

impl<F: Descriptor> Core<F> {
    /// A channel that can have further regions, of which the session's process has this side, and where this side and the other are.
    fn side_with_regions(
        &self,
        id: SessionId,
        number: ChannelId,
        side: Side,
    ) -> Result<(&Channel<F>, (Origin, Origin)), Refuse> {
        let Some((domain, _, peer)) = self.member(id) else {
            return refuse(Refusal::Protocol, "the first message of a session is Join");
        };
        let Some(channel) = self.channels.get(&number) else {
            return refuse(Refusal::NoSuchChannel, format!("there is no channel {number}"));
        };
        if channel.end(side).state != (EndState::Held { domain, pid: peer.pid }) {
            return refuse(Refusal::NoSuchChannel, format!("you do not have the {side} side of channel {number}"));
        }
        if !matches!(channel.kind, Kind::Stream | Kind::Message) {
            return refuse(Refusal::Protocol, "a channel of this kind has no further regions (protocol F1)");
        }
        let here = peer.origin();
        Ok((channel, (here, channel.end(side.other()).user.map_or(here, User::origin))))
    }

    /// A side says which further regions it takes.
    pub(super) fn take_regions(
        &mut self,
        id: SessionId,
        request: u32,
        (number, side): (ChannelId, Side),
        kind: u32,
        allowance: TakenKind,
    ) -> Result<(), Refuse> {
        let further = &self.side_with_regions(id, number, side)?.0.end(side).further;
        if !further.takes.contains_key(&kind) && further.takes.len() >= MOST_KINDS && allowance.count > 0 {
            return refuse(Refusal::Quota, format!("this side takes {MOST_KINDS} kinds of regions already"));
        }
        if let Some(channel) = self.channels.get_mut(&number) {
            let takes = &mut channel.end_mut(side).further.takes;
            match allowance.count {
                0 => takes.remove(&kind),
                _ => takes.insert(kind, allowance),
            };
        }
        self.send(id, request, Message::Done {});
        Ok(())
    }

    /// A side adds a region. The other side is sent it before this one gets the answer. A region that is refused loses
    /// the place in a window that it was to have.
    pub(super) fn add_region(
        &mut self,
        id: SessionId,
        request: u32,
        addition: Addition,
        with: Vec<F>,
    ) -> Result<(), Refuse> {
        let Addition { channel, side, region, .. } = addition;
        let (_, between) = self.side_with_regions(id, channel, side)?;
        let added = self.try_to_add_region((id, request), addition, between, with);
        if added.is_err()
            && let Ok((Located::Window { base }, _)) = located_further(region)
        {
            self.machines.give_back_unused(between, base, channel);
        }
        added
    }

    fn try_to_add_region(
        &mut self,
        (id, request): (SessionId, u32),
        addition: Addition,
        between: (Origin, Origin),
        with: Vec<F>,
    ) -> Result<(), Refuse> {
        let Addition { channel: number, side, number: region_number, kind, region } = addition;
        let (channel, (here, there)) = (self.side_with_regions(id, number, side)?.0, between);
        let (end, other) = (channel.end(side), channel.end(side.other()));
        if region_number <= end.further.last {
            let last = end.further.last;
            return refuse(
                Refusal::Protocol,
                format!("region {region_number} comes after {last}: numbers go up (protocol F1.1)"),
            );
        }
        if other.further.counts(FurtherKey { own: false, number: region_number }) {
            // The reader may be wrong about it. So this is no error of the owner, which can take a greater number.
            let reason =
                format!("the other side still has a region {region_number}; use a greater number (protocol F1.1)");
            return refuse(Refusal::Quota, reason);
        }
        if end.further.owned() >= MOST_OWNED {
            let reason = format!("this side owns {MOST_OWNED} further regions of channel {number}: give one up first");
            return refuse(Refusal::Quota, reason);
        }
        let (located, geometry) = located_further(region)?;
        if region.ring_size == 0 {
            return refuse(Refusal::BadRegion, "a further region has content");
        }
        let EndState::Held { domain: to, .. } = other.state else {
            return refuse(Refusal::NoSuchChannel, "the other side is not there to take a region");
        };
        other.further.would_take(kind, region.ring_size)?;
        self.afford_for_both(end.domain, to, region.ring_size)?;
        let Some(memory) = with.into_iter().next() else { return Ok(()) };
        let session = self.inbox_for_region(number, side.other())?;
        let memory = match located {
            Located::Window { base } if here != there => {
                let place = (base, geometry.region_size());
                self.machines.settle_further(between, place, number, (side, region_number))?
            }
            Located::OwnMemory if here != there => {
                let reason = "the other side is on another machine: the region must be in a window (protocol G4)";
                return refuse(Refusal::Elsewhere, reason);
            }
            Located::Window { .. } => {
                return refuse(Refusal::BadRegion, "a place in a window is for channels to other machines");
            }
            // Within a machine, the memory is in the machine.
            Located::OwnMemory => {
                if here == Origin::Host {
                    check_region(&memory, geometry)?;
                }
                memory
            }
        };
        let message = Message::RegionAdded { channel: number, side, number: region_number, kind, region };
        self.offer_region((id, request), session, addition, message, memory);
        Ok(())
    }

    /// Whether a region of this size can count for the domains of both ends.
    fn afford_for_both(&self, owner: DomainId, reader: DomainId, bytes: u64) -> Result<(), Refuse> {
        let (Some(of_owner), Some(of_reader)) = (self.domains.get(&owner), self.domains.get(&reader)) else {
            return refuse(Refusal::NoSuchChannel, "the other side is gone");
        };
        of_owner.afford_ring(bytes)?;
        // A domain that has both ends pays for both.
        let share = if owner == reader { 2 } else { 1 };
        of_reader.afford_memory(bytes.saturating_mul(share))
    }

    /// A region has been delivered: it counts for both ends from now on.
    pub(super) fn count_region(&mut self, addition: Addition) {
        let Some(channel) = self.channels.get_mut(&addition.channel) else { return };
        for side in Side::ALL.iter().copied() {
            let end = channel.end_mut(side);
            if !matches!(end.state, EndState::Held { .. }) {
                continue;
            }
            let key = FurtherKey { own: side == addition.side, number: addition.number };
            end.further.add(key, FurtherRegion { kind: addition.kind, bytes: addition.region.ring_size });
            if let Some(domain) = self.domains.get_mut(&end.domain) {
                domain.ring_bytes += addition.region.ring_size;
            }
        }
    }

    /// A side has a region since an earlier broker (protocol F6): it counts for that side's domain again, and for no other.
    pub(super) fn reclaim_region(
        &mut self,
        id: SessionId,
        request: u32,
        (number, side): (ChannelId, Side),
        key: FurtherKey,
        region: FurtherRegion,
    ) -> Result<(), Refuse> {
        let (channel, (here, there)) = self.side_with_regions(id, number, side)?;
        if here != there {
            return refuse(Refusal::Machine, "a region between machines ends with the broker that gave it its place");
        }
        let end = channel.end(side);
        if !end.further.counts(key) {
            if !key.own && !end.further.reclaimed {
                let reason =
                    format!("this broker made channel {number}, and has passed on no such region (protocol F6)");
                return refuse(Refusal::Protocol, reason);
            }
            located_further(RegionReference::with_ring(region.bytes))?;
            if region.bytes == 0 {
                return refuse(Refusal::BadRegion, "a further region has content");
            }
            let (has, most) = match key.own {
                true => (end.further.owned(), MOST_OWNED),
                false => (end.further.counted.len() - end.further.owned(), MOST_HELD),
            };
            if has >= most {
                let reason = format!("this side has {most} further regions of channel {number} already");
                return refuse(Refusal::Quota, reason);
            }
            let domain = end.domain;
            self.domains.get(&domain).map_or(Ok(()), |domain| domain.afford_memory(region.bytes))?;
            if let Some(channel) = self.channels.get_mut(&number) {
                channel.end_mut(side).further.add(key, region);
            }
            if let Some(domain) = self.domains.get_mut(&domain) {
                domain.ring_bytes += region.bytes;
            }
        }
        self.send(id, request, Message::Done {});
        Ok(())
    }

    /// A side gives up a region, its own or the other side's.
    pub(super) fn drop_region(
        &mut self,
        id: SessionId,
        (number, side): (ChannelId, Side),
        key: FurtherKey,
    ) -> Result<(), Refuse> {
        let Some((domain, _, peer)) = self.member(id) else { return Ok(()) };
        // The end may have been given up meanwhile, with all its regions. A session that never had it gives nothing up.
        let Some(end) = self.channels.get_mut(&number).map(|channel| channel.end_mut(side)) else { return Ok(()) };
        if end.state != (EndState::Held { domain, pid: peer.pid }) {
            return Ok(());
        }
        let Some(region) = end.further.counted.remove(&key) else { return Ok(()) };
        if let Some(domain) = self.domains.get_mut(&end.domain) {
            domain.ring_bytes -= region.bytes;
        }
        let other = self.channels.get(&number).map(|channel| channel.end(side.other()));
        if other.is_none_or(|end| !end.further.counts(key.seen_from_other_side())) {
            let owner = if key.own { side } else { side.other() };
            self.machines.further_gone(number, owner, key.number);
        }
        Ok(())
    }
}
