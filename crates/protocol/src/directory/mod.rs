//! The directory: the broker's published facts about the sockets of all programs, in memory that programs only read.
//!
//! One memfd, written by the broker alone and mapped read-only by everyone (protocol T). A program that is about to connect
//! looks its destination up here, without a system call: for a remote destination, this is its only contact with Partywall.
//!
//! ```text
//!        0 +--------------------+
//!          | header             |  once, and `closed` when the broker goes
//!       64 +--------------------+
//!          | generations        |  count the changes of listeners (with addresses) and of offers
//!      128 +--------------------+
//!          | terms              |  the policy, for connections that no rule fits
//!      192 +--------------------+
//!          | proof              |  when all flows of datagrams were last found proved
//!      256 +--------------------+
//!          | unused             |
//!     4096 +--------------------+
//!          | rules              |  64 of the policy, two lines each
//!    12288 +--------------------+
//!          | listeners          |  2^18 slots: (transport, address, port, scope)
//!  2109440 +--------------------+
//!          | addresses          |  2^14 slots: (address, scope) of who runs under Partywall
//!  2240512 +--------------------+
//!          | offers             |  2^16 slots: (both ends) of connections, keyed; (UDP, both ends, scope) of datagrams
//!  2764800 +--------------------+
//!          | flows              |  2^12 slots: which flows of datagrams are proved
//!  2895872 +--------------------+
//! ```
//!
//! All but the flows is a hint: a fingerprint that is found means "ask the broker", and one that is missed means TCP. So a reader needs
//! only loads, and no value that it reads can harm it.

mod clause;
mod fingerprint;
mod flows;
mod table;
mod terms;
#[cfg(test)]
mod tests;

pub use clause::{BadClause, Clause, ProgramPattern, Subject};
pub use fingerprint::{Fingerprint, OfferKey, Transport, is_scoped};
pub use flows::{FLOWS, FlowSlot, Proof, ProofLine, slot_of};
pub use table::{Bucket, MAX_PROBE, SLOTS, TableWriter, contains};
pub use terms::{MAX_RULES, PolicyCase, RuleLine, Terms, TermsLine};

use partywall_shm::sync::{Access, Load, Ordering, Own, load_acquire, load_acquire_u32};

/// `PARTYDIR`, little-endian.
pub const MAGIC: u64 = u64::from_le_bytes(*b"PARTYDIR");
/// The layout that this code reads and writes, capacities included.
pub const VERSION: u32 = 2;
/// Bytes of the whole directory.
pub const SIZE: u64 = 2_895_872;

/// Buckets of each table.
const LISTENERS: usize = 1 << 15;
const ADDRESSES: usize = 1 << 11;
const OFFERS: usize = 1 << 13;

/// The first line.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct DirectoryHeader<A: Access = Own> {
    magic: A::U64,
    /// Stored last: non-zero means ready.
    version: A::U32,
    /// Not 0: the broker has gone, and the directory is not written any more.
    closed: A::U32,
    instance: A::U64,
    /// Slots of each table.
    capacities: [A::U64; 3],
}

/// How often what has changed. A reader that finds the number it knows need not look again.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct Generations<A: Access = Own> {
    listeners: A::U64,
    offers: A::U64,
}

/// All of it.
#[derive(Debug)]
#[repr(C, align(4096))]
pub struct Directory<A: Access = Own> {
    header: DirectoryHeader<A>,
    generations: Generations<A>,
    terms: TermsLine<A>,
    proof_line: ProofLine<A>,
    unused: [[A::U64; 8]; 60],
    rules: [RuleLine<A>; MAX_RULES],
    listeners: [Bucket<A>; LISTENERS],
    addresses: [Bucket<A>; ADDRESSES],
    offers: [Bucket<A>; OFFERS],
    flows: [FlowSlot<A>; FLOWS],
}

/// Why a memory is no directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NotDirectory;

impl core::fmt::Display for NotDirectory {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("the broker's directory is of another version than this program knows")
    }
}

impl core::error::Error for NotDirectory {}

impl<A: Access> Directory<A> {
    /// Checks that this is a directory by our layout. To be called once, before anything else.
    ///
    /// # Errors
    /// [`NotDirectory`].
    pub fn check(&self) -> Result<(), NotDirectory> {
        let version = load_acquire_u32(&self.header.version);
        let capacities: [u64; 3] = core::array::from_fn(|i| self.header.capacities[i].load(Ordering::Relaxed));
        let sound = version == VERSION
            && self.header.magic.load(Ordering::Relaxed) == MAGIC
            && capacities == Self::capacities();
        if sound { Ok(()) } else { Err(NotDirectory) }
    }

    fn capacities() -> [u64; 3] {
        [LISTENERS, ADDRESSES, OFFERS].map(|buckets| (buckets * SLOTS) as u64)
    }

    /// The instance number of the broker that writes it.
    pub fn instance(&self) -> u64 {
        self.header.instance.load(Ordering::Relaxed)
    }

    /// Whether its broker has gone in good order. (One that was killed says nothing here; its sessions have ended.)
    #[inline]
    pub fn is_closed(&self) -> bool {
        load_acquire_u32(&self.header.closed) != 0
    }

    /// Whether a program listens there.
    #[inline]
    pub fn has_listener(&self, listener: Fingerprint) -> bool {
        contains(&self.listeners, listener)
    }

    /// Whether programs under Partywall run where this is an address.
    #[inline]
    pub fn has_address(&self, address: Fingerprint) -> bool {
        contains(&self.addresses, address)
    }

    /// Whether a connection is offered.
    #[inline]
    pub fn has_offer(&self, offer: Fingerprint) -> bool {
        contains(&self.offers, offer)
    }

    /// Changes whenever a listener comes or goes, and whenever programs have come to an address.
    #[inline]
    pub fn listener_generation(&self) -> u64 {
        load_acquire(&self.generations.listeners)
    }

    /// Changes whenever an offer has come.
    #[inline]
    pub fn offer_generation(&self) -> u64 {
        load_acquire(&self.generations.offers)
    }

    /// Changes whenever the policy does.
    #[inline]
    pub fn policy_generation(&self) -> u64 {
        self.terms.sequence()
    }

    /// The policy's decision about a connection.
    pub fn decide(&self, question: &PolicyCase<'_>) -> Terms {
        self.terms.decide(&self.rules, question)
    }
}

/// A change of the directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DirectoryChange {
    /// A listener came, or came once more.
    Listener(Fingerprint),
    /// A listener went.
    NoListener(Fingerprint),
    /// A program has come to run at an address.
    Address(Fingerprint),
    /// A program that ran at an address has gone.
    NoAddress(Fingerprint),
    /// A connection is offered.
    Offer(Fingerprint),
    /// It is not offered any more.
    NoOffer(Fingerprint),
    /// Another policy holds.
    Policy {
        /// The terms of connections that no clause fits.
        terms: Terms,
        /// The clauses, at most [`MAX_RULES`].
        clauses: alloc::vec::Vec<Clause>,
    },
    /// A flow of datagrams is proved from here on (protocol U11).
    Flow(u64),
    /// A flow of datagrams is live that is proved separately, and was not proved yet (protocol U14).
    SeparateFlow(u64),
    /// Such a flow was found proved.
    FlowProved {
        /// The number of the flow.
        flow: u64,
        /// When, in milliseconds of the clock of this directory's readers.
        at: u64,
    },
    /// It was proved up to a byte of its ring, and is no more.
    FlowEnded {
        /// The number of the flow.
        flow: u64,
        /// The byte of the ring up to which the flow was proved.
        limit: u64,
    },
    /// All flows that have not ended, and are not proved separately, were found proved at a moment, in milliseconds of `CLOCK_MONOTONIC_COARSE`.
    Proved(u64),
}

/// The broker's private state of the directory.
#[derive(Debug)]
pub struct DirectoryKeeper {
    listeners: TableWriter,
    addresses: TableWriter,
    offers: TableWriter,
}

impl DirectoryKeeper {
    /// Begins a directory in memory of zeros that is not shared yet.
    pub fn begin(directory: &Directory, instance: u64) -> Self {
        for (word, capacity) in directory.header.capacities.iter().zip(Directory::<Own>::capacities()) {
            word.store(capacity, Ordering::Relaxed);
        }
        directory.header.instance.store(instance, Ordering::Relaxed);
        directory.terms.write(&directory.rules, &Terms::NEVER, &[]);
        directory.header.magic.store(MAGIC, Ordering::Relaxed);
        directory.header.version.store(VERSION, Ordering::Release);
        Self {
            listeners: TableWriter::new(LISTENERS),
            addresses: TableWriter::new(ADDRESSES),
            offers: TableWriter::new(OFFERS),
        }
    }

    /// Makes a change. An entry that finds no room is invisible to readers, and must still be taken back.
    pub fn apply(&mut self, directory: &Directory, change: &DirectoryChange) {
        let Directory { generations, .. } = directory;
        match change {
            DirectoryChange::Listener(listener) => {
                self.listeners.insert(&directory.listeners, *listener);
                step(&generations.listeners);
            }
            DirectoryChange::NoListener(listener) => {
                self.listeners.remove(&directory.listeners, *listener);
                step(&generations.listeners);
            }
            DirectoryChange::Address(address) => {
                self.addresses.insert(&directory.addresses, *address);
                step(&generations.listeners);
            }
            DirectoryChange::NoAddress(address) => self.addresses.remove(&directory.addresses, *address),
            DirectoryChange::Offer(offer) => {
                self.offers.insert(&directory.offers, *offer);
                step(&generations.offers);
            }
            DirectoryChange::NoOffer(offer) => self.offers.remove(&directory.offers, *offer),
            DirectoryChange::Policy { terms, clauses } => directory.terms.write(&directory.rules, terms, clauses),
            DirectoryChange::Flow(flow) => flows::begin(directory, *flow, false),
            DirectoryChange::SeparateFlow(flow) => flows::begin(directory, *flow, true),
            DirectoryChange::FlowProved { flow, at } => flows::prove_one(directory, *flow, *at),
            DirectoryChange::FlowEnded { flow, limit } => flows::end(directory, *flow, *limit),
            DirectoryChange::Proved(now) => flows::prove(directory, *now),
        }
    }

    /// Marks the directory as closed: no broker writes it any more.
    pub fn close(&self, directory: &Directory) {
        directory.header.closed.store(1, Ordering::Release);
    }
}

/// One more, by the only writer. Released after what it counts.
fn step(generation: &<Own as Access>::U64) {
    generation.store(generation.load(Ordering::Relaxed).wrapping_add(1), Ordering::Release);
}

mod asserts {
    use super::*;
    use core::mem::{align_of, offset_of, size_of};
    use partywall_shm::sync::Peer;

    const _: () = assert!(size_of::<DirectoryHeader>() == 64 && offset_of!(DirectoryHeader, version) == 8);
    const _: () = assert!(offset_of!(DirectoryHeader, closed) == 12 && offset_of!(DirectoryHeader, instance) == 16);
    const _: () = assert!(size_of::<Generations>() == 64 && size_of::<Bucket>() == 64);
    const _: () = assert!(offset_of!(Directory, generations) == 64 && offset_of!(Directory, terms) == 128);
    const _: () = assert!(offset_of!(Directory, rules) == 4096 && offset_of!(Directory, listeners) == 12288);
    const _: () = assert!(offset_of!(Directory, addresses) == 2_109_440);
    const _: () = assert!(offset_of!(Directory, offers) == 2_240_512);
    const _: () = assert!(offset_of!(Directory, proof_line) == 192 && size_of::<FlowSlot>() == 32);
    const _: () = assert!(offset_of!(Directory, flows) == 2_764_800);
    const _: () = assert!(size_of::<Directory>() as u64 == SIZE && SIZE.is_multiple_of(4096));
    const _: () = assert!(size_of::<Directory<Peer>>() as u64 == SIZE);
    const _: () = assert!(align_of::<Directory<Peer>>() == align_of::<Directory>());
    const _: () = assert!(LISTENERS * SLOTS / 2 >= 100_000);
}
