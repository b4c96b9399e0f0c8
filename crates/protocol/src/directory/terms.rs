//! The policy's words in the directory: when connections go to a ring, how large that is, and how long to spin.
//!
//! The writer makes `sequence` odd, writes, and makes it even again; a reader takes what it has copied if `sequence` was
//! even and the same before and after. Policies change rarely, by an operator's command, so a reader that repeatedly finds a change in
//! progress takes the safe answer: never.

use core::net::IpAddr;

use super::clause::{Clause, ProgramPattern, Subject};
use crate::upgrade::{Net, Of, Upgrade};
use partywall_shm::address::{narrow, wide};
use partywall_shm::sync::{Access, Load, Ordering, Own, fence, load_acquire};

/// The most rules that a policy can have.
pub const MAX_RULES: usize = 64;

/// Looks before a reader gives up on a policy that is being written. The writer needs about a microsecond.
const LOOKS: usize = 64;

/// The policy's decision about one connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Terms {
    /// When it goes to a ring.
    pub upgrade: Upgrade,
    /// Bytes of the ring that each side brings: a power of two from 4096 to 2^30.
    pub ring_size: u64,
    /// Longest time to spin in microseconds; 0 sleeps at once.
    pub spin_us: u32,
    /// The policy lists programs: each asks the broker whether it may have rings (protocol T6.1).
    pub lists_programs: bool,
}

impl Terms {
    /// The terms while no policy can be read.
    pub const NEVER: Self = Self { upgrade: Upgrade::Never, ..Self::DEFAULT };

    /// The terms unless an operator sets others. The threshold is so late that a connection that ends before it loses nothing, and one
    /// that ends just after it loses a part of the time that it took to get there (measured in the README of `partywall-preload`).
    pub const DEFAULT: Self = Self {
        upgrade: Upgrade::After { calls: 128, bytes: 2 << 20 },
        ring_size: 256 << 10,
        spin_us: 50,
        lists_programs: false,
    };
}

impl Default for Terms {
    fn default() -> Self {
        Self::DEFAULT
    }
}

/// The connection that a policy decides about.
#[derive(Debug, Clone, Copy)]
pub struct PolicyCase<'a> {
    /// The listener's port.
    pub port: u16,
    /// The other side's address.
    pub peer: IpAddr,
    /// Name of the program that asks: the last part of its path.
    pub program: &'a [u8],
}

/// The terms of connections that no rule fits.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct TermsLine<A: Access = Own> {
    /// Odd while the policy is being written; grows with every change.
    sequence: A::U64,
    upgrade: A::U64,
    calls: A::U64,
    bytes: A::U64,
    ring_size: A::U64,
    spin_us: A::U64,
    rules: A::U64,
    /// 1 if the policy lists programs; 0 if not, and in directories of brokers that know no such lists.
    lists_programs: A::U64,
}

/// One rule, in two lines.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct RuleLine<A: Access = Own> {
    /// 0 all, 1 port, 2 network, 3 program.
    subject: A::U64,
    /// The port, the bits of the network's prefix, or the length of the pattern.
    argument: A::U64,
    address: [A::U64; 2],
    upgrade: A::U64,
    calls: A::U64,
    bytes: A::U64,
    unused: A::U64,
    /// The pattern, zeros behind it.
    program: [A::U64; 8],
}

impl TermsLine {
    /// Puts a policy into force. Clauses beyond [`MAX_RULES`] are left out. Only the one writer calls this.
    pub fn write(&self, lines: &[RuleLine], terms: &Terms, clauses: &[Clause]) {
        let before = self.sequence.load(Ordering::Relaxed);
        self.sequence.store(before.wrapping_add(1), Ordering::Relaxed);
        // SYNC POINT: no word below is seen before the odd number (pairs with the second look of `read`).
        fence(Ordering::Release);
        let (upgrade, calls, bytes) = upgrade_words(terms.upgrade);
        self.upgrade.store(upgrade, Ordering::Relaxed);
        self.calls.store(calls, Ordering::Relaxed);
        self.bytes.store(bytes, Ordering::Relaxed);
        self.ring_size.store(terms.ring_size, Ordering::Relaxed);
        self.spin_us.store(terms.spin_us.into(), Ordering::Relaxed);
        self.lists_programs.store(terms.lists_programs.into(), Ordering::Relaxed);
        let mut rules = 0;
        for (line, clause) in lines.iter().zip(clauses) {
            line.write(clause);
            rules += 1;
        }
        self.rules.store(rules, Ordering::Relaxed);
        self.sequence.store(before.wrapping_add(2), Ordering::Release);
    }
}

impl<A: Access> TermsLine<A> {
    /// A number that changes with the policy; odd while that is being written.
    #[inline]
    pub fn sequence(&self) -> u64 {
        load_acquire(&self.sequence)
    }

    /// The policy's decision about a connection.
    pub fn decide(&self, lines: &[RuleLine<A>], question: &PolicyCase<'_>) -> Terms {
        for _ in 0..LOOKS {
            let before = load_acquire(&self.sequence);
            let terms = self.read(lines, question);
            // SYNC POINT: the words above were loaded before this second look (pairs with the fence of `write`).
            fence(Ordering::Acquire);
            if before.is_multiple_of(2) && self.sequence.load(Ordering::Relaxed) == before {
                return terms;
            }
            core::hint::spin_loop();
        }
        Terms::NEVER
    }

    /// Reads a mixture of words, which is valid only if nothing was written at the same time.
    fn read(&self, lines: &[RuleLine<A>], question: &PolicyCase<'_>) -> Terms {
        let words = [&self.upgrade, &self.calls, &self.bytes].map(|word| word.load(Ordering::Relaxed));
        let rules = usize::try_from(self.rules.load(Ordering::Relaxed)).unwrap_or(usize::MAX);
        let fitting = lines.iter().take(rules).filter_map(|line| line.read(question)).last();
        Terms {
            upgrade: fitting.unwrap_or_else(|| upgrade_of(words)),
            ring_size: self.ring_size.load(Ordering::Relaxed),
            spin_us: u32::try_from(self.spin_us.load(Ordering::Relaxed)).unwrap_or(0),
            lists_programs: self.lists_programs.load(Ordering::Relaxed) != 0,
        }
    }
}

impl RuleLine {
    fn write(&self, clause: &Clause) {
        let (subject, argument, address) = match clause.subject {
            Subject::Of(Of::All) => (0, 0, 0),
            Subject::Of(Of::Port(port)) => (1, u64::from(port), 0),
            Subject::Of(Of::Net(net)) => {
                // Prefixes of the 128 bits that the address is written in.
                let shorter = if net.address().is_ipv4() { 96 } else { 0 };
                (2, u64::from(net.prefix()) + shorter, wide(net.address()))
            }
            Subject::Program(pattern) => (3, pattern.as_bytes().len() as u64, 0),
        };
        if let Subject::Program(pattern) = clause.subject {
            for (word, value) in self.program.iter().zip(pattern.words()) {
                word.store(value, Ordering::Relaxed);
            }
        }
        let (upgrade, calls, bytes) = upgrade_words(clause.upgrade);
        self.subject.store(subject, Ordering::Relaxed);
        self.argument.store(argument, Ordering::Relaxed);
        self.address[0].store(address as u64, Ordering::Relaxed);
        self.address[1].store((address >> 64) as u64, Ordering::Relaxed);
        self.upgrade.store(upgrade, Ordering::Relaxed);
        self.calls.store(calls, Ordering::Relaxed);
        self.bytes.store(bytes, Ordering::Relaxed);
    }
}

impl<A: Access> RuleLine<A> {
    /// The rule's decision about a connection, if it fits.
    fn read(&self, question: &PolicyCase<'_>) -> Option<Upgrade> {
        let argument = self.argument.load(Ordering::Relaxed);
        let fits = match self.subject.load(Ordering::Relaxed) {
            0 => true,
            1 => argument == u64::from(question.port),
            2 => {
                let [low, high] = [&self.address[0], &self.address[1]].map(|word| word.load(Ordering::Relaxed));
                let net = narrow_net(u128::from(low) | u128::from(high) << 64, argument);
                net.is_some_and(|net| net.contains(question.peer))
            }
            3 => {
                let words = core::array::from_fn(|i| self.program[i].load(Ordering::Relaxed));
                ProgramPattern::from_words(words, argument).is_some_and(|pattern| pattern.matches(question.program))
            }
            _ => false,
        };
        let words = [&self.upgrade, &self.calls, &self.bytes].map(|word| word.load(Ordering::Relaxed));
        fits.then(|| upgrade_of(words))
    }
}

fn narrow_net(bits: u128, prefix: u64) -> Option<Net> {
    let prefix = u8::try_from(prefix).ok()?;
    let address = narrow(bits);
    Net::new(address, if address.is_ipv4() { prefix.checked_sub(96)? } else { prefix })
}

fn upgrade_words(upgrade: Upgrade) -> (u64, u64, u64) {
    match upgrade {
        Upgrade::Never => (0, 0, 0),
        Upgrade::Now => (1, 0, 0),
        Upgrade::After { calls, bytes } => (2, calls, bytes),
    }
}

fn upgrade_of([upgrade, calls, bytes]: [u64; 3]) -> Upgrade {
    match upgrade {
        1 => Upgrade::Now,
        2 => Upgrade::After { calls, bytes },
        _ => Upgrade::Never,
    }
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<TermsLine>() == 64 && size_of::<RuleLine>() == 128);
