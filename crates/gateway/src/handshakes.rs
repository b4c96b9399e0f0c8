//! Connections that are being set up. Their senders have shown that they have their addresses, and nothing else yet.
//!
//! One address has a part of the places, so a sender without a certificate that never finishes does not keep hosts away (protocol H6.3).

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Connections that are being set up at the same time.
const HANDSHAKES: usize = 64;
/// Of these, from one address.
pub(crate) const HANDSHAKES_PER_ADDRESS: usize = 8;

/// The connections that are being set up, by address.
#[derive(Debug, Default)]
pub(crate) struct Handshakes {
    running: Mutex<HashMap<IpAddr, usize>>,
}

/// A connection that is being set up. It counts until this is dropped.
#[derive(Debug)]
pub(crate) struct HandshakePlace {
    all: Arc<Handshakes>,
    address: IpAddr,
}

/// The addresses that one sender is taken to have: an IPv6 network of 64 bits is one sender.
fn sender(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() >> 64 << 64)),
        address => address,
    }
}

impl Handshakes {
    fn running(&self) -> MutexGuard<'_, HashMap<IpAddr, usize>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts one more; `None` if there are too many, or too many of this address.
    pub(crate) fn begin(self: &Arc<Self>, address: IpAddr) -> Option<HandshakePlace> {
        let address = sender(address);
        let mut running = self.running();
        let all: usize = running.values().sum();
        let of_address = running.get(&address).copied().unwrap_or_default();
        if all >= HANDSHAKES || of_address >= HANDSHAKES_PER_ADDRESS {
            return None;
        }
        running.insert(address, of_address + 1);
        Some(HandshakePlace { all: Arc::clone(self), address })
    }

    #[cfg(test)]
    pub(crate) fn count(&self) -> usize {
        self.running().values().sum()
    }
}

impl Drop for HandshakePlace {
    fn drop(&mut self) {
        let mut running = self.all.running();
        if let Some(count) = running.get_mut(&self.address) {
            *count -= 1;
            if *count == 0 {
                running.remove(&self.address);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_address_has_a_part_of_all_handshakes() {
        let all = Arc::new(Handshakes::default());
        let of = |address: &str| all.begin(address.parse().unwrap());
        let mut running: Vec<_> = (0..HANDSHAKES_PER_ADDRESS).map(|_| of("192.0.2.1").unwrap()).collect();
        assert!(of("192.0.2.1").is_none() && of("::ffff:192.0.2.1").is_none());
        running.extend((0..HANDSHAKES_PER_ADDRESS).map(|n| of(&format!("2001:db8::{n}")).unwrap()));
        assert!(of("2001:db8::ffff").is_none(), "a network of 64 bits is one sender");
        let others = HANDSHAKES - running.len();
        running.extend((0..others).map(|n| of(&format!("198.51.100.{n}")).unwrap()));
        assert!(of("203.0.113.1").is_none(), "all are taken");
        running.clear();
        assert!(of("192.0.2.1").is_some() && all.count() == 0, "what has ended counts no more");
    }
}
