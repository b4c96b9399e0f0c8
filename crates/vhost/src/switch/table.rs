//! The table of Ethernet addresses and their ports.

use super::{MacAddress, PortNumber};
use std::collections::HashMap;

/// How many addresses are kept, and for how long.
#[derive(Debug, Clone)]
pub struct TableOptions {
    /// How long an address is kept that sends nothing, in nanoseconds.
    pub age: u64,
    /// Addresses of one port. A port at its limit keeps what it has; frames to its further addresses are flooded. There is no limit for
    /// all ports together, which some of them could use up for the others.
    pub most_of_port: usize,
}

impl Default for TableOptions {
    fn default() -> Self {
        Self { age: 300_000_000_000, most_of_port: 1024 }
    }
}

/// One row of the table.
#[derive(Debug, Clone, serde::Serialize)]
pub struct LearnedAddress {
    /// The address.
    pub mac: MacAddress,
    /// Where it is.
    pub port: PortNumber,
    /// Seconds since it sent a frame; `None` if policy has fixed it.
    pub idle: Option<u64>,
}

#[derive(Debug, Clone, Copy)]
struct AddressEntry {
    port: PortNumber,
    seen: u64,
    pinned: bool,
}

#[derive(Debug)]
pub(super) struct AddressTable {
    options: TableOptions,
    entries: HashMap<MacAddress, AddressEntry>,
    learned: HashMap<PortNumber, usize>,
}

impl AddressTable {
    pub(super) fn new(options: TableOptions) -> Self {
        Self { options, entries: HashMap::new(), learned: HashMap::new() }
    }

    /// Fixes an address to a port.
    pub(super) fn pin(&mut self, mac: MacAddress, port: PortNumber) {
        self.take_out(mac);
        self.entries.insert(mac, AddressEntry { port, seen: 0, pinned: true });
    }

    /// Notes that `mac` has sent on `port`; `false` if policy has fixed it to another.
    pub(super) fn learn(&mut self, now: u64, mac: MacAddress, port: PortNumber) -> bool {
        if let Some(entry) = self.entries.get_mut(&mac) {
            if entry.pinned || entry.port == port {
                entry.seen = now;
                return entry.port == port;
            }
            self.take_out(mac);
        }
        let count = self.learned.entry(port).or_default();
        if *count < self.options.most_of_port {
            *count += 1;
            self.entries.insert(mac, AddressEntry { port, seen: now, pinned: false });
        }
        true
    }

    pub(super) fn find(&self, now: u64, mac: MacAddress) -> Option<PortNumber> {
        let entry = self.entries.get(&mac)?;
        (entry.pinned || now.saturating_sub(entry.seen) < self.options.age).then_some(entry.port)
    }

    /// Changes how long addresses are kept, in nanoseconds.
    pub(super) fn set_age(&mut self, age: u64) {
        self.options.age = age;
    }

    /// Ends what is fixed to a port, and forgets the addresses that it has sent from, except those that it `may` still send from.
    pub(super) fn restrict(&mut self, port: PortNumber, may: impl Fn(MacAddress) -> bool) {
        self.entries.retain(|mac, entry| entry.port != port || (!entry.pinned && may(*mac)));
        let left = self.entries.values().filter(|entry| entry.port == port).count();
        self.learned.insert(port, left);
    }

    /// Forgets all of a port.
    pub(super) fn forget(&mut self, port: PortNumber) {
        self.entries.retain(|_, entry| entry.port != port);
        self.learned.remove(&port);
    }

    pub(super) fn expire(&mut self, now: u64) {
        let (age, learned) = (self.options.age, &mut self.learned);
        self.entries.retain(|_, entry| {
            let stays = entry.pinned || now.saturating_sub(entry.seen) < age;
            if !stays && let Some(count) = learned.get_mut(&entry.port) {
                *count = count.saturating_sub(1);
            }
            stays
        });
    }

    pub(super) fn list(&self, now: u64) -> Vec<LearnedAddress> {
        let row = |(mac, entry): (&MacAddress, &AddressEntry)| LearnedAddress {
            mac: *mac,
            port: entry.port,
            idle: (!entry.pinned).then(|| now.saturating_sub(entry.seen) / 1_000_000_000),
        };
        let mut all: Vec<LearnedAddress> = self.entries.iter().map(row).collect();
        all.sort_by_key(|row| (row.port, row.mac));
        all
    }

    fn take_out(&mut self, mac: MacAddress) {
        if let Some(entry) = self.entries.remove(&mac)
            && !entry.pinned
            && let Some(count) = self.learned.get_mut(&entry.port)
        {
            *count = count.saturating_sub(1);
        }
    }
}
