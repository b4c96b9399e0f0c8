//! The forwarding of frames: learning, ageing, flooding and its limits, and the guard of source addresses. No system call, no clock.
//!
//! Times are nanoseconds since any start; the caller passes them in.

mod address;
mod guard;
mod limit;
mod owner;
mod packet;
mod table;

pub use address::{BadMacAddress, MacAddress};
pub use guard::SourceGuard;
pub use limit::TokenBucket;
pub(crate) use packet::{IPV4, untagged};
pub use table::{LearnedAddress, TableOptions};

use owner::AddressOwners;
use std::collections::BTreeMap;
use std::net::IpAddr;
use table::AddressTable;

/// The first bytes of a frame that the switch reads. Nothing that it decides on lies behind them.
pub const HEAD: usize = 192;
/// An Ethernet header.
pub const ETHERNET: usize = 14;

/// A port's number. Numbers are not reused while a switch runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize)]
pub struct PortNumber(pub u32);

/// The decision about a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FrameDecision {
    /// It goes to one port.
    Forward(PortNumber),
    /// It goes to all other ports.
    Flood,
    /// It goes nowhere.
    Discard(DiscardReason),
}

/// Why a frame goes nowhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DiscardReason {
    /// It is shorter than an Ethernet header, or its source is no station's address.
    Malformed,
    /// Its source is not one that its port may use.
    Spoofed,
    /// Its port has flooded too much.
    FloodLimit,
    /// Its destination is for the next bridge alone, as that of spanning trees and LLDP.
    Reserved,
    /// Its receiver is on the port that it came from.
    SamePort,
    /// There is no such port.
    NoPort,
}

/// How a switch behaves.
#[derive(Debug, Clone)]
pub struct SwitchOptions {
    /// The options of the table of addresses.
    pub table: TableOptions,
    /// The most frames a second of one port that are flooded; 0 is no limit.
    pub floods: u64,
}

impl Default for SwitchOptions {
    fn default() -> Self {
        Self { table: TableOptions::default(), floods: 2_000 }
    }
}

#[derive(Debug)]
struct SwitchPort {
    guard: SourceGuard,
    floods: TokenBucket,
}

/// A learning switch.
///
/// ```
/// use partywall_vhost::switch::{PortNumber, SourceGuard, Switch, SwitchOptions, FrameDecision};
///
/// let mut switch = Switch::new(SwitchOptions::default());
/// let (a, b) = (PortNumber(1), PortNumber(2));
/// switch.add(a, SourceGuard::default(), 0);
/// switch.add(b, SourceGuard::default(), 0);
/// // To b, from a: nobody knows yet where b is.
/// let frame = [2, 0, 0, 0, 0, 0xb, 2, 0, 0, 0, 0, 0xa, 8, 0];
/// assert_eq!(switch.admit(0, a, &frame), FrameDecision::Flood);
/// let answer = [2, 0, 0, 0, 0, 0xa, 2, 0, 0, 0, 0, 0xb, 8, 0];
/// assert_eq!(switch.admit(0, b, &answer), FrameDecision::Forward(a));
/// assert_eq!(switch.admit(0, a, &frame), FrameDecision::Forward(b));
/// ```
#[derive(Debug)]
pub struct Switch {
    options: SwitchOptions,
    table: AddressTable,
    ports: BTreeMap<PortNumber, SwitchPort>,
    owners: AddressOwners,
    last: Option<LastForward>,
}

/// The last frame, if it went to one port, from one whose guard lets all pass. A frame of the same port with the same addresses, at the
/// same time and directly behind it, goes there as well, and changes nothing in the table. Only the owners of IP addresses judge it too.
#[derive(Debug, Clone, Copy)]
struct LastForward {
    now: u64,
    from: PortNumber,
    addresses: (MacAddress, MacAddress),
    to: PortNumber,
}

impl Switch {
    /// A switch without ports.
    pub fn new(options: SwitchOptions) -> Self {
        let table = AddressTable::new(options.table.clone());
        Self { options, table, ports: BTreeMap::new(), owners: AddressOwners::default(), last: None }
    }

    /// Adds a port whose frames `guard` judges. The guard's addresses are this port's alone.
    pub fn add(&mut self, number: PortNumber, guard: SourceGuard, now: u64) {
        self.last = None;
        for mac in guard.macs() {
            self.table.pin(*mac, number);
        }
        let floods = TokenBucket::new(self.options.floods, self.options.floods.max(1), now);
        self.ports.insert(number, SwitchPort { guard, floods });
    }

    /// Changes the guards of these ports, all at once: an address may move from one to another of them. An address that a port has sent
    /// from, and may not send from now, is forgotten.
    pub fn set_guards(&mut self, guards: Vec<(PortNumber, SourceGuard)>) {
        self.last = None;
        for (number, guard) in &guards {
            self.table.restrict(*number, |mac| guard.has(mac));
        }
        for (number, guard) in guards {
            let Some(port) = self.ports.get_mut(&number) else { continue };
            for mac in guard.macs() {
                self.table.pin(*mac, number);
            }
            port.guard = guard;
        }
    }

    /// Changes the ports to which IP addresses belong. No other port sends from these addresses from now on. All addresses that had an
    /// owner before and are not among these have none.
    pub fn set_address_owners(&mut self, owners: impl IntoIterator<Item = (IpAddr, PortNumber)>) {
        self.owners = AddressOwners::new(owners);
    }

    /// Changes the most frames a second of one port that are flooded, and how long addresses are kept, in nanoseconds.
    pub fn set_limits(&mut self, floods: u64, age: u64, now: u64) {
        self.last = None;
        self.table.set_age(age);
        if self.options.floods != floods {
            self.options.floods = floods;
            for port in self.ports.values_mut() {
                port.floods = TokenBucket::new(floods, floods.max(1), now);
            }
        }
    }

    /// Removes a port and what was learned of it.
    pub fn remove(&mut self, number: PortNumber) {
        self.last = None;
        self.ports.remove(&number);
        self.table.forget(number);
    }

    /// Decides for the frame that begins with `head` ([`HEAD`] bytes, or all of a shorter frame), and learns its source.
    pub fn admit(&mut self, now: u64, from: PortNumber, head: &[u8]) -> FrameDecision {
        self.admit_segments(now, from, head, 1)
    }

    /// As [`Self::admit`]; a flood of the frame counts as this many.
    pub fn admit_segments(&mut self, now: u64, from: PortNumber, head: &[u8], segments: u64) -> FrameDecision {
        let addresses = MacAddress::pair(head);
        if let Some(last) = self.last
            && (last.now, last.from, Some(last.addresses)) == (now, from, addresses)
            && self.owners.permit(from, head)
        {
            return FrameDecision::Forward(last.to);
        }
        self.last = None;
        let Some(port) = self.ports.get_mut(&from) else { return FrameDecision::Discard(DiscardReason::NoPort) };
        let Some((destination, source)) = addresses else {
            return FrameDecision::Discard(DiscardReason::Malformed);
        };
        if !source.is_station() {
            return FrameDecision::Discard(DiscardReason::Malformed);
        }
        if !port.guard.permits(head) || !self.owners.permit(from, head) {
            return FrameDecision::Discard(DiscardReason::Spoofed);
        }
        if !self.table.learn(now, source, from) {
            return FrameDecision::Discard(DiscardReason::Spoofed);
        }
        if destination.is_reserved() {
            return FrameDecision::Discard(DiscardReason::Reserved);
        }
        let known = if destination.is_group() { None } else { self.table.find(now, destination) };
        match known {
            Some(to) if to == from => FrameDecision::Discard(DiscardReason::SamePort),
            Some(to) => {
                // A guard judges each frame.
                let is_open = port.guard.is_open();
                self.last = is_open.then_some(LastForward { now, from, addresses: (destination, source), to });
                FrameDecision::Forward(to)
            }
            None if self.options.floods == 0 || port.floods.take(now, segments.max(1)) => FrameDecision::Flood,
            None => FrameDecision::Discard(DiscardReason::FloodLimit),
        }
    }

    /// Whether a frame's head may come from this port, nothing learned of it.
    pub fn knows(&self, number: PortNumber) -> bool {
        self.ports.contains_key(&number)
    }

    /// Forgets addresses that have not been heard of for long. To be called now and then.
    pub fn expire(&mut self, now: u64) {
        self.table.expire(now);
    }

    /// The addresses that are known.
    pub fn addresses(&self, now: u64) -> Vec<LearnedAddress> {
        self.table.list(now)
    }
}

#[cfg(test)]
mod tests;
