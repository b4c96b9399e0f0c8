//! What the directory holds: one key for each domain, and one for each host, with JSON as values.
//!
//! Everything that is read from etcd is checked here. Anyone who may write there may write anything, so a wrong entry is ignored, whatever it
//! is.

use std::collections::BTreeMap;

use partywall::Kind;
use partywall::cluster::Name;
use serde::{Deserialize, Serialize};

/// The most bytes of a value that is looked at.
pub const MAX_VALUE: usize = 512 << 10;
/// The most services of one domain.
pub const MAX_SERVICES: usize = 4096;
/// The most bytes of an address.
const MAX_ADDRESS: usize = 256;

/// A domain, as it stands in the directory.
///
/// ```
/// use partywall::Kind;
/// use partywall_gateway::entry::DomainEntry;
///
/// let entry = DomainEntry { host: "alpha".into(), services: [("sql".into(), Kind::Stream)].into() };
/// assert_eq!(DomainEntry::decode(&entry.encode()), Some(entry));
/// assert_eq!(DomainEntry::decode(br#"{"host":"no name","services":{}}"#), None);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DomainEntry {
    /// The host that it is on.
    pub host: String,
    /// Its services, and the kinds of their channels.
    pub services: BTreeMap<String, Kind>,
}

#[derive(Serialize, Deserialize)]
struct DomainValue {
    host: String,
    services: BTreeMap<String, u8>,
}

/// A host, as it stands in the directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostEntry {
    /// Where its gateway listens.
    pub address: String,
}

impl DomainEntry {
    /// The value of the key.
    pub fn encode(&self) -> Vec<u8> {
        let services = self.services.iter().map(|(name, kind)| (name.clone(), kind.number())).collect();
        encode(&DomainValue { host: self.host.clone(), services })
    }

    /// Reads a value; `None` if it is none that a gateway writes.
    pub fn decode(value: &[u8]) -> Option<Self> {
        let DomainValue { host, services } = decode(value)?;
        Name::new(&host).ok()?;
        if services.len() > MAX_SERVICES {
            return None;
        }
        let service = |(name, kind): (String, u8)| Some((Name::new(&name).ok()?.into(), Kind::from_number(kind)?));
        let services = services.into_iter().map(service).collect::<Option<_>>()?;
        Some(Self { host, services })
    }
}

impl HostEntry {
    /// The value of the key.
    pub fn encode(&self) -> Vec<u8> {
        encode(self)
    }

    /// Reads a value; `None` if it is none that a gateway writes.
    pub fn decode(value: &[u8]) -> Option<Self> {
        let entry: Self = decode(value)?;
        let plain = |c: char| c.is_ascii_graphic();
        (entry.address.len() <= MAX_ADDRESS && entry.address.chars().all(plain)).then_some(entry)
    }
}

fn encode(value: &impl Serialize) -> Vec<u8> {
    // Maps with text as keys always serialise.
    serde_json::to_vec(value).unwrap_or_default()
}

fn decode<'a, T: Deserialize<'a>>(value: &'a [u8]) -> Option<T> {
    (value.len() <= MAX_VALUE).then(|| serde_json::from_slice(value).ok())?
}

/// What a key names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DirectoryKey {
    /// A host.
    Host(String),
    /// A domain.
    Domain(String),
}

/// The keys of one cluster.
#[derive(Debug, Clone)]
pub struct Keys {
    prefix: String,
}

impl Keys {
    /// The key whose value tells this directory's data from those of an earlier or a later etcd. The first gateway writes it.
    pub fn identity(&self) -> String {
        format!("{}identity", self.prefix)
    }

    /// Keys that begin with `prefix`.
    pub fn new(prefix: &str) -> Self {
        Self { prefix: prefix.to_owned() }
    }

    /// What all of them begin with.
    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    /// The key of a domain.
    pub fn domain(&self, name: &str) -> String {
        format!("{}d/{name}", self.prefix)
    }

    /// The key of a host.
    pub fn host(&self, name: &str) -> String {
        format!("{}h/{name}", self.prefix)
    }

    /// What a key names; `None` if it is no key of a cluster.
    pub fn parse(&self, key: &[u8]) -> Option<DirectoryKey> {
        let (table, name) = std::str::from_utf8(key).ok()?.strip_prefix(&self.prefix)?.split_once('/')?;
        let name = String::from(Name::new(name).ok()?);
        match table {
            "h" => Some(DirectoryKey::Host(name)),
            "d" => Some(DirectoryKey::Domain(name)),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_values_are_ignored() {
        let long = "x".repeat(65);
        let many: Vec<_> = (0..=MAX_SERVICES).map(|n| format!("\"s{n}\":1")).collect();
        for value in [
            "",
            "[]",
            "{}",
            "{\"host\":\"a\"}",
            "{\"host\":1,\"services\":{}}",
            "{\"host\":\"\",\"services\":{}}",
            "{\"host\":\"a@b\",\"services\":{}}",
            "{\"host\":\"a\",\"services\":{\"s\":9}}",
            "{\"host\":\"a\",\"services\":{\"s\":-1}}",
            "{\"host\":\"a\",\"services\":{\"a b\":1}}",
            "{\"host\":\"a\",\"services\":{\"\u{1b}[2J\":1}}",
            &format!("{{\"host\":\"a\",\"services\":{{\"{long}\":1}}}}"),
            &format!("{{\"host\":\"a\",\"services\":{{{}}}}}", many.join(",")),
            &format!("{{\"host\":\"a\",\"services\":{{}},\"x\":\"{}\"}}", "y".repeat(MAX_VALUE)),
            &"[".repeat(10_000),
        ] {
            assert_eq!(DomainEntry::decode(value.as_bytes()), None, "{}", &value[..value.len().min(80)]);
        }
        assert_eq!(DomainEntry::decode(&[0xff, 0xfe]), None);
        for value in ["{\"address\":\"a b\"}", "{\"address\":\"\u{1b}\"}", "{}", "{\"address\":1}"] {
            assert_eq!(HostEntry::decode(value.as_bytes()), None, "{value}");
        }
    }

    #[test]
    fn keys_are_parsed_as_they_are_made() {
        let keys = Keys::new("/p/");
        assert_eq!(keys.parse(keys.domain("db").as_bytes()), Some(DirectoryKey::Domain("db".into())));
        assert_eq!(keys.parse(keys.host("alpha").as_bytes()), Some(DirectoryKey::Host("alpha".into())));
        for key in ["", "/p/", "/p/d/", "/p/d/a/b", "/p/x/a", "/q/d/a", "/p/d/a b"] {
            assert_eq!(keys.parse(key.as_bytes()), None, "{key}");
        }
    }
}
