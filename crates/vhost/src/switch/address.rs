//! Addresses of Ethernet.

use std::fmt;
use std::str::FromStr;

/// An Ethernet address.
///
/// ```
/// use partywall_vhost::switch::MacAddress;
///
/// let mac: MacAddress = "52:54:00:12:34:56".parse()?;
/// assert!(mac.is_station() && mac.to_string() == "52:54:00:12:34:56");
/// # Ok::<(), partywall_vhost::switch::BadMacAddress>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MacAddress(pub [u8; 6]);

/// A text that is no Ethernet address.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("`{0}` is no station's Ethernet address: write six pairs of hexadecimal digits, as in 52:54:00:12:34:56")]
pub struct BadMacAddress(String);

impl MacAddress {
    /// Destination and source of a frame.
    pub fn pair(head: &[u8]) -> Option<(Self, Self)> {
        let (destination, rest) = head.get(..super::ETHERNET)?.split_first_chunk::<6>()?;
        Some((Self(*destination), Self(*rest.first_chunk::<6>()?)))
    }

    /// Whether it stands for several stations, broadcast included.
    pub fn is_group(self) -> bool {
        self.0[0] & 1 == 1
    }

    /// Whether no bridge passes on what is sent to it (01:80:c2:00:00:00 to 0f).
    pub fn is_reserved(self) -> bool {
        matches!(self.0, [0x01, 0x80, 0xc2, 0, 0, 0..=0x0f])
    }

    /// Whether one station can have it.
    pub fn is_station(self) -> bool {
        !self.is_group() && self.0 != [0; 6]
    }
}

impl fmt::Display for MacAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl fmt::Debug for MacAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for MacAddress {
    type Err = BadMacAddress;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let bad = || BadMacAddress(text.to_owned());
        let mut bytes = [0; 6];
        let mut parts = text.split(':');
        for byte in &mut bytes {
            let part = parts.next().filter(|part| part.len() == 2).ok_or_else(bad)?;
            *byte = u8::from_str_radix(part, 16).map_err(|_| bad())?;
        }
        let mac = Self(bytes);
        if parts.next().is_none() && mac.is_station() { Ok(mac) } else { Err(bad()) }
    }
}

impl serde::Serialize for MacAddress {
    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

impl<'de> serde::Deserialize<'de> for MacAddress {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        String::deserialize(from)?.parse().map_err(serde::de::Error::custom)
    }
}
