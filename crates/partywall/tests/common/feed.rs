//! A broadcast of numbered messages, which show whether a reader has taken a torn one for a whole one.

use super::{Pattern, World, fixed};
use partywall::{Domain, Options, Publisher, SlowReader, Subscriber};
use std::time::Duration;

/// Long enough for a wait that is to time out.
pub(crate) const SHORT: Duration = Duration::from_millis(30);

/// A publisher of the domain `web`, with a ring of this size.
pub(crate) fn publisher(world: &World, slow: SlowReader, ring: u64) -> Publisher {
    Publisher::bind(&world.web, "feed", slow, &fixed(ring)).unwrap()
}

/// A subscriber of it, of this domain.
pub(crate) fn subscriber(domain: &Domain) -> Subscriber {
    Subscriber::connect_with(domain, "web:feed", &Options::default()).unwrap()
}

/// A message that shows if parts of two were mixed: its number, and bytes that follow from it.
pub(crate) fn numbered(number: u64, len: usize) -> Vec<u8> {
    let mut message = number.to_le_bytes().to_vec();
    message.extend(Pattern.bytes(number.wrapping_mul(7919), len));
    message
}

/// Checks it, and returns its number.
pub(crate) fn number_of(message: &[u8]) -> u64 {
    let (number, rest) = message.split_at(8);
    let number = u64::from_le_bytes(number.try_into().unwrap());
    Pattern.check(number.wrapping_mul(7919), rest);
    number
}
