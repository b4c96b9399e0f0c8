//! Addresses at which listeners are reached by way of a translator, as the operator's file lists them: published ports of containers, addresses
//! of services, and other translations of a destination.
//!
//! An entry proves nothing. It says where a connection may lead, and the sequence numbers of the two sockets show whether it does (protocol
//! T5.8). Connections of a wrong entry stay on TCP, and no program gets another's.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use serde::Deserialize;

use super::network::host_address;

/// Entries of one file. The broker goes through all of them for each listener and each connection that is offered.
const FORWARDS: usize = 256;
/// Addresses of one entry.
const ADDRESSES: usize = 16;

/// TCP connections to these addresses reach the listener at another one.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(try_from = "RawForward")]
pub struct ForwardEntry {
    /// Where programs connect to, in canonical form.
    pub addresses: Vec<SocketAddr>,
    /// Where the program listens, in canonical form.
    pub to: SocketAddr,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawForward {
    addresses: Vec<String>,
    to: String,
}

impl TryFrom<RawForward> for ForwardEntry {
    type Error = String;

    fn try_from(raw: RawForward) -> Result<Self, String> {
        if !(1..=ADDRESSES).contains(&raw.addresses.len()) {
            let (to, has) = (&raw.to, raw.addresses.len());
            return Err(format!("the forward to {to:?} has {has} addresses, and can have 1 to {ADDRESSES}"));
        }
        let addresses = raw.addresses.iter().map(|text| address(text)).collect::<Result<Vec<_>, _>>()?;
        let to = address(&raw.to)?;
        if let Some(other) = addresses.iter().find(|at| at.is_ipv4() != to.is_ipv4()) {
            return Err(format!(
                "the address {other} is of another family than {to}: only a proxy leads from one to the other, and it makes two connections of one"
            ));
        }
        Ok(Self { addresses, to })
    }
}

fn address(text: &str) -> Result<SocketAddr, String> {
    let wrong = |why: &str| Err(format!("address {text:?} {why}"));
    let Ok(at) = text.parse::<SocketAddr>() else {
        return wrong("is no IP address with a port, such as \"192.0.2.1:8080\" or \"[2001:db8::1]:8080\"");
    };
    if at.port() == 0 {
        return wrong("has port 0, at which nothing listens");
    }
    host_address(at.ip()).map(|ip| SocketAddr::new(ip, at.port())).or_else(wrong)
}

/// Checks what only all of them together can have wrong.
pub(super) fn all<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Vec<ForwardEntry>, D::Error> {
    let forwards = Vec::<ForwardEntry>::deserialize(from)?;
    let wrong = |why: String| Err(serde::de::Error::custom(why));
    if forwards.len() > FORWARDS {
        return wrong(format!("there are {} forwards, and can be {FORWARDS}", forwards.len()));
    }
    let mut targets = BTreeMap::new();
    for ForwardEntry { addresses, to } in &forwards {
        for at in addresses {
            if at == to {
                return wrong(format!("the address {at} is forwarded to itself"));
            }
            if let Some(other) = targets.insert(at, to) {
                return wrong(format!("the address {at} is forwarded twice, to {other} and to {to}"));
            }
        }
    }
    Ok(forwards)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::Policy;

    fn forward(addresses: &str, to: &str) -> String {
        format!("[[forward]]\naddresses = [{addresses}]\nto = '{to}'\n")
    }

    fn fault(addresses: &str, to: &str) -> String {
        Policy::parse(&forward(addresses, to)).unwrap_err().to_string()
    }

    #[test]
    fn forwards_are_read_with_canonical_addresses() {
        let text = forward("'192.0.2.1:8080', '[::ffff:192.0.2.2]:8080'", "[::ffff:172.17.0.2]:80");
        let policy = Policy::parse(&text).unwrap();
        let [only] = policy.forwards() else { panic!("{policy:?}") };
        let at = |text: &str| text.parse::<SocketAddr>().unwrap();
        assert_eq!(only.addresses, [at("192.0.2.1:8080"), at("192.0.2.2:8080")]);
        assert_eq!(only.to, at("172.17.0.2:80"));
        assert!(Policy::parse("").unwrap().forwards().is_empty());
    }

    #[test]
    fn address_that_cannot_be_translated_to_is_refused() {
        for (wrong, why) in [
            ("192.0.2.1", "no IP address with a port"),
            ("localhost:80", "no IP address with a port"),
            ("192.0.2.1:0", "port 0"),
            ("0.0.0.0:80", "not the address of one host"),
            ("224.0.0.1:80", "not the address of one host"),
            ("127.0.0.1:80", "each network namespace"),
            ("[fe80::1]:80", "each network namespace"),
        ] {
            for said in [fault(&format!("'{wrong}'"), "10.0.0.2:80"), fault("'10.0.0.2:80'", wrong)] {
                assert!(said.contains(why) && said.contains(wrong), "{wrong}: {said}");
            }
        }
        assert!(fault("'[2001:db8::1]:80'", "10.0.0.2:80").contains("another family"));
        assert!(fault("", "10.0.0.2:80").contains("0 addresses"));
        let many: String = (1..=17).map(|port| format!("'192.0.2.1:{port}',")).collect();
        assert!(fault(&many, "10.0.0.2:80").contains("17 addresses"));
    }

    #[test]
    fn address_forwarded_twice_or_to_itself_is_refused() {
        let said = fault("'[::ffff:10.0.0.2]:80'", "10.0.0.2:80");
        assert!(said.contains("10.0.0.2:80 is forwarded to itself"), "{said}");
        let twice = forward("'192.0.2.1:80'", "10.0.0.2:80") + &forward("'192.0.2.1:80'", "10.0.0.3:80");
        let said = Policy::parse(&twice).unwrap_err().to_string();
        assert!(said.contains("192.0.2.1:80 is forwarded twice, to 10.0.0.2:80 and to 10.0.0.3:80"), "{said}");
        let many: String = (1..=257).map(|port| forward(&format!("'192.0.2.1:{port}'"), "10.0.0.2:80")).collect();
        assert!(Policy::parse(&many).unwrap_err().to_string().contains("257 forwards"));
    }
}
