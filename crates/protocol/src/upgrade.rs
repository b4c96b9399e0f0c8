//! When a socket connection moves from TCP to a ring, and how that is written.
//!
//! The same words are used on the command line, in an environment variable and in the broker's control messages:
//!
//! ```text
//! now                            as soon as both sides have it in common
//! never                          stays on TCP
//! after=16,bytes=65536           after 16 calls or 65536 bytes, whichever is first; either may be left out
//! never@port=22                  only for connections to a listener on this port
//! now@address=10.0.0.0/8         only for connections with a peer of these addresses
//! ```
//!
//! Several clauses are separated by spaces; of those that fit a connection, the last decides. Nothing here allocates, so
//! that a library in a foreign program can read it at any time.

use core::fmt;
use core::net::IpAddr;

use partywall_shm::address::wide;

/// When one connection goes to a ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Upgrade {
    /// As soon as it can.
    Now,
    /// When it has lived long enough to be worth the trip, by either count.
    After {
        /// Calls that carried bytes, both ways together; 0: calls do not count.
        calls: u64,
        /// Bytes carried, both ways together; 0: bytes do not count.
        bytes: u64,
    },
    /// It stays on TCP.
    Never,
}

impl Upgrade {
    /// Whether a connection that has carried this much is to go to a ring.
    pub const fn is_due(self, calls: u64, bytes: u64) -> bool {
        match self {
            Self::Now => true,
            Self::Never => false,
            Self::After { calls: least_calls, bytes: least_bytes } => {
                (least_calls != 0 && calls >= least_calls) || (least_bytes != 0 && bytes >= least_bytes)
            }
        }
    }

    /// Reads `now`, `never` or `after=CALLS,bytes=BYTES`.
    ///
    /// # Errors
    /// [`Fault`] says which part cannot be understood.
    pub fn parse(text: &str) -> Result<Self, Fault> {
        match text {
            "now" => return Ok(Self::Now),
            "never" => return Ok(Self::Never),
            _ => {}
        }
        let (mut calls, mut bytes) = (None, None);
        for part in text.split(',') {
            let (key, value) = part.split_once('=').ok_or(Fault::Mode)?;
            let slot = match key {
                "after" => &mut calls,
                "bytes" => &mut bytes,
                _ => return Err(Fault::Mode),
            };
            let value: u64 = value.parse().map_err(|_| Fault::Number)?;
            // Zero in memory means that this count does not matter; in words one leaves it out.
            if value == 0 || slot.replace(value).is_some() {
                return Err(Fault::Number);
            }
        }
        Ok(Self::After { calls: calls.unwrap_or(0), bytes: bytes.unwrap_or(0) })
    }
}

impl fmt::Display for Upgrade {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Now => f.write_str("now"),
            // Neither count: it is never due.
            Self::Never | Self::After { calls: 0, bytes: 0 } => f.write_str("never"),
            Self::After { calls, bytes: 0 } => write!(f, "after={calls}"),
            Self::After { calls: 0, bytes } => write!(f, "bytes={bytes}"),
            Self::After { calls, bytes } => write!(f, "after={calls},bytes={bytes}"),
        }
    }
}

/// The connections that a rule applies to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Of {
    /// Every connection.
    All,
    /// Those to a listener on this port, seen from either side.
    Port(u16),
    /// Those whose peer is in this network.
    Net(Net),
}

impl Of {
    /// Whether a connection to a listener on `port`, with `peer` at the other end, is one of them.
    pub fn fits(self, port: u16, peer: IpAddr) -> bool {
        match self {
            Self::All => true,
            Self::Port(of) => of == port,
            Self::Net(net) => net.contains(peer),
        }
    }

    /// Reads what stands after the `@`: `port=N` or `address=ADDRESS[/PREFIX]`.
    ///
    /// # Errors
    /// [`Fault`] says which part cannot be understood.
    pub fn parse(text: &str) -> Result<Self, Fault> {
        match text.split_once('=') {
            Some(("port", port)) => match port.parse() {
                Ok(0) | Err(_) => Err(Fault::Port),
                Ok(port) => Ok(Self::Port(port)),
            },
            Some(("address", net)) => Net::parse(net).map(Self::Net),
            _ => Err(Fault::Of),
        }
    }
}

impl fmt::Display for Of {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::All => Ok(()),
            Self::Port(port) => write!(f, "@port={port}"),
            Self::Net(net) => write!(f, "@address={net}"),
        }
    }
}

/// Addresses that begin alike. IPv4 addresses and those IPv6 addresses that stand for them are the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Net {
    address: IpAddr,
    prefix: u8,
}

impl Net {
    /// The addresses whose first `prefix` bits are those of `address`; `None` if the address has fewer bits.
    pub const fn new(address: IpAddr, prefix: u8) -> Option<Self> {
        let bits = if address.is_ipv4() { 32 } else { 128 };
        if prefix <= bits { Some(Self { address, prefix }) } else { None }
    }

    /// An address of the network.
    pub const fn address(self) -> IpAddr {
        self.address
    }

    /// How many of its bits they have in common.
    pub const fn prefix(self) -> u8 {
        self.prefix
    }

    /// Whether `address` is one of them.
    pub fn contains(self, address: IpAddr) -> bool {
        let (ours, theirs) = (wide(self.address), wide(address));
        let prefix = u32::from(self.prefix) + if self.address.is_ipv4() { 96 } else { 0 };
        // A shift by all bits is none.
        let mask = u128::MAX.checked_shl(128 - prefix).unwrap_or(0);
        ours & mask == theirs & mask
    }

    /// Reads `ADDRESS` or `ADDRESS/PREFIX`.
    ///
    /// # Errors
    /// [`Fault::Address`].
    pub fn parse(text: &str) -> Result<Self, Fault> {
        let (address, prefix) = match text.split_once('/') {
            Some((address, prefix)) => (address, Some(prefix.parse().map_err(|_| Fault::Address)?)),
            None => (text, None),
        };
        let address: IpAddr = address.parse().map_err(|_| Fault::Address)?;
        let prefix = prefix.unwrap_or(if address.is_ipv4() { 32 } else { 128 });
        Self::new(address, prefix).ok_or(Fault::Address)
    }
}

impl fmt::Display for Net {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.prefix)
    }
}

/// One clause of a policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rule {
    /// The connections that the clause is about.
    pub of: Of,
    /// When they go to a ring.
    pub upgrade: Upgrade,
}

impl Rule {
    /// Reads one clause.
    ///
    /// # Errors
    /// [`Fault`] says which part cannot be understood.
    pub fn parse(text: &str) -> Result<Self, Fault> {
        let (upgrade, of) = match text.split_once('@') {
            Some((upgrade, of)) => (upgrade, Of::parse(of)?),
            None => (text, Of::All),
        };
        Ok(Self { of, upgrade: Upgrade::parse(upgrade)? })
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.upgrade, self.of)
    }
}

/// The decision of the last clause that fits a connection, or `None` if no clause does. Clauses that cannot be parsed are ignored.
pub fn decide(text: &str, port: u16, peer: IpAddr) -> Option<Upgrade> {
    let mut rules = text.split_ascii_whitespace().filter_map(|clause| Rule::parse(clause).ok());
    rules.rfind(|rule| rule.of.fits(port, peer)).map(|rule| rule.upgrade)
}

/// The fault in the words of a policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// Not a time to upgrade.
    Mode,
    /// A count that is no number, zero, or there twice.
    Number,
    /// Not a choice of connections.
    Of,
    /// Not a port.
    Port,
    /// Not a network.
    Address,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Mode => "write now, never, after=CALLS, bytes=BYTES, or after=CALLS,bytes=BYTES",
            Self::Number => "after= and bytes= take a whole number of 1 or more, once each",
            Self::Of => "after @ write port=PORT or address=ADDRESS[/PREFIX]",
            Self::Port => "a port is 1 to 65535",
            Self::Address => "an address is like 10.0.0.0/8 or fd00::/8, with a prefix that it has the bits for",
        })
    }
}

impl core::error::Error for Fault {}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;
    use core::net::Ipv6Addr;

    const HERE: IpAddr = IpAddr::V6(Ipv6Addr::LOCALHOST);

    fn four(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn rule_survives_parse_and_display() {
        for text in [
            "now",
            "never",
            "after=16",
            "bytes=65536",
            "after=16,bytes=65536",
            "never@port=22",
            "after=1@address=10.0.0.0/8",
            "now@address=fd00::/8",
        ] {
            assert_eq!(Rule::parse(text).unwrap().to_string(), text);
        }
        assert_eq!(Rule::parse("now@address=10.1.2.3").unwrap().to_string(), "now@address=10.1.2.3/32");
    }

    #[test]
    fn rules_that_cannot_be_read_are_refused() {
        for (text, fault) in [
            ("", Fault::Mode),
            ("soon", Fault::Mode),
            ("calls=3", Fault::Mode),
            ("after=", Fault::Number),
            ("after=-1", Fault::Number),
            ("after=0", Fault::Number),
            ("after=1,after=2", Fault::Number),
            ("after=1,", Fault::Mode),
            ("now@22", Fault::Of),
            ("now@port=0", Fault::Port),
            ("now@port=65536", Fault::Port),
            ("now@address=here", Fault::Address),
            ("now@address=10.0.0.0/33", Fault::Address),
            ("now@address=::/129", Fault::Address),
        ] {
            assert_eq!(Rule::parse(text), Err(fault), "{text}");
        }
    }

    #[test]
    fn upgrade_is_due_when_first_count_is_reached() {
        let both = Upgrade::After { calls: 16, bytes: 1000 };
        assert!(both.is_due(16, 0) && both.is_due(0, 1000) && !both.is_due(15, 999));
        assert!(!Upgrade::After { calls: 16, bytes: 0 }.is_due(0, u64::MAX));
        assert!(!Upgrade::After { calls: 0, bytes: 0 }.is_due(u64::MAX, u64::MAX));
        assert!(Upgrade::Now.is_due(0, 0) && !Upgrade::Never.is_due(u64::MAX, u64::MAX));
    }

    #[test]
    fn last_matching_clause_decides() {
        let text = "after=16 never@port=22 now@address=10.0.0.0/8  nonsense";
        assert_eq!(decide(text, 80, HERE), Some(Upgrade::After { calls: 16, bytes: 0 }));
        assert_eq!(decide(text, 22, HERE), Some(Upgrade::Never));
        assert_eq!(decide(text, 22, four("10.9.9.9")), Some(Upgrade::Now));
        assert_eq!(decide("never@port=22", 80, HERE), None);
        assert_eq!(decide("", 80, HERE), None);
    }

    #[test]
    fn networks_hold_mapped_addresses_too() {
        let net = Net::parse("10.0.0.0/8").unwrap();
        assert!(net.contains(four("10.255.0.1")) && !net.contains(four("11.0.0.1")));
        assert!(net.contains("::ffff:10.0.0.1".parse().unwrap()) && !net.contains(HERE));
        let all = Net::parse("::/0").unwrap();
        assert!(all.contains(four("1.2.3.4")) && all.contains(HERE));
        let four_all = Net::parse("0.0.0.0/0").unwrap();
        assert!(four_all.contains(four("255.0.0.1")) && !four_all.contains(HERE));
    }
}
