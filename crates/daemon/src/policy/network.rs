//! Network namespaces as the operator's file names them: which addresses belong to each (protocol U13).
//!
//! A datagram carries nothing that proves which socket has sent it. Within one namespace the kernel says which socket has an address. Between
//! namespaces anyone may have given itself any address, so the operator says which namespace each address belongs to. The same holds for
//! virtual machines (protocol U14).

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use partywall_protocol::directory::is_scoped;
use partywall_protocol::wire::Name;
use serde::Deserialize;

/// Namespaces that a file may name. The broker looks at the file of each whenever a program shows a socket for datagrams.
const NETWORKS: usize = 64;
/// Addresses that one namespace may have.
const ADDRESSES: usize = 64;
/// Stands for the broker's own namespace.
const OWN: &str = "host";

/// A network namespace, and the addresses that belong to it.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(try_from = "RawNetwork")]
pub struct NetworkEntry {
    /// The namespace.
    pub namespace: NamespacePlace,
    /// Its addresses, in canonical form.
    pub addresses: Vec<IpAddr>,
}

/// How a namespace is found.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum NamespacePlace {
    /// It is the broker's own.
    Own,
    /// The file that it is mounted at, as `ip netns` makes them.
    File(PathBuf),
    /// The namespace of the agent of this virtual machine.
    Machine(Name),
}

impl std::fmt::Display for NamespacePlace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Own => f.write_str(OWN),
            Self::File(path) => path.display().fmt(f),
            Self::Machine(name) => write!(f, "machine {name}"),
        }
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawNetwork {
    namespace: Option<String>,
    machine: Option<String>,
    addresses: Vec<String>,
}

impl TryFrom<RawNetwork> for NetworkEntry {
    type Error = String;

    fn try_from(raw: RawNetwork) -> Result<Self, String> {
        let namespace = match (&raw.namespace, &raw.machine) {
            (Some(namespace), None) => place(namespace)?,
            (None, Some(machine)) => {
                NamespacePlace::Machine(Name::new(machine).map_err(|e| format!("machine = {machine:?}: {e}"))?)
            }
            _ => return Err("a network has either a namespace or a machine: write one of the two".to_owned()),
        };
        if !(1..=ADDRESSES).contains(&raw.addresses.len()) {
            let has = raw.addresses.len();
            return Err(format!("network {namespace} has {has} addresses, and can have 1 to {ADDRESSES}"));
        }
        let addresses = raw.addresses.iter().map(|text| address(text)).collect::<Result<_, _>>()?;
        Ok(Self { namespace, addresses })
    }
}

fn place(text: &str) -> Result<NamespacePlace, String> {
    if text == OWN {
        return Ok(NamespacePlace::Own);
    }
    let path = Path::new(text);
    let is_plain = path.is_absolute() && path.components().all(|part| part != std::path::Component::ParentDir);
    if !is_plain {
        return Err(format!("namespace = {text:?}: write \"{OWN}\", or the absolute path of a namespace's file"));
    }
    // Another process may get the number, and its namespace would get the addresses.
    if path.starts_with("/proc") {
        return Err(format!(
            "namespace = {text:?}: the number of a process is used again when the process has ended; give the namespace a name \
             (`ip netns attach NAME PID`) and write /run/netns/NAME"
        ));
    }
    Ok(NamespacePlace::File(path.to_owned()))
}

fn address(text: &str) -> Result<IpAddr, String> {
    let wrong = |why: &str| Err(format!("address {text:?} {why}"));
    let Ok(ip) = text.parse::<IpAddr>() else { return wrong("is no IP address") };
    host_address(ip).or_else(wrong)
}

/// The canonical form of an address that one host has and that other network namespaces can reach; otherwise what it is instead.
pub(super) fn host_address(ip: IpAddr) -> Result<IpAddr, &'static str> {
    let ip = ip.to_canonical();
    let is_broadcast = matches!(ip, IpAddr::V4(four) if four.is_broadcast());
    if ip.is_unspecified() || ip.is_multicast() || is_broadcast {
        return Err("is not the address of one host");
    }
    if is_scoped(ip) {
        return Err("means something else in each network namespace, so no other namespace reaches it");
    }
    Ok(ip)
}

/// Checks what only all of them together can have wrong.
pub(super) fn all<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Vec<NetworkEntry>, D::Error> {
    let networks = Vec::<NetworkEntry>::deserialize(from)?;
    let wrong = |why: String| Err(serde::de::Error::custom(why));
    if networks.len() > NETWORKS {
        return wrong(format!("there are {} networks, and can be {NETWORKS}", networks.len()));
    }
    let mut owners: BTreeMap<IpAddr, &NamespacePlace> = BTreeMap::new();
    for (n, NetworkEntry { namespace, addresses }) in networks.iter().enumerate() {
        if networks.iter().take(n).any(|other| other.namespace == *namespace) {
            return wrong(format!("there are two networks with the namespace {namespace}"));
        }
        for ip in addresses {
            if let Some(other) = owners.insert(*ip, namespace) {
                return wrong(format!("the address {ip} is listed twice, for {other} and for {namespace}"));
            }
        }
    }
    Ok(networks)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::Policy;

    fn fault(namespace: &str, addresses: &str) -> String {
        let text = format!("[[network]]\nnamespace = \"{namespace}\"\naddresses = [{addresses}]\n");
        Policy::parse(&text).unwrap_err().to_string()
    }

    #[test]
    fn networks_are_read_with_canonical_addresses() {
        let text = "[[network]]\nnamespace = 'host'\naddresses = ['10.0.0.1']\n[[network]]\nnamespace = '/run/netns/blue'\n\
                    addresses = ['::ffff:10.0.0.2', 'fd00::2']\n";
        let policy = Policy::parse(text).unwrap();
        let [own, blue] = policy.networks() else { panic!("{policy:?}") };
        assert_eq!((&own.namespace, &own.addresses[..]), (&NamespacePlace::Own, &["10.0.0.1".parse().unwrap()][..]));
        assert_eq!(blue.namespace, NamespacePlace::File("/run/netns/blue".into()));
        assert_eq!(blue.addresses, ["10.0.0.2", "fd00::2"].map(|text| text.parse::<IpAddr>().unwrap()));
        assert!(Policy::parse("").unwrap().networks().is_empty());
    }

    #[test]
    fn address_that_is_not_one_hosts_is_refused() {
        for (address, why) in [
            ("10.0.0", "no IP address"),
            ("0.0.0.0", "not the address of one host"),
            ("::", "not the address of one host"),
            ("224.0.0.1", "not the address of one host"),
            ("255.255.255.255", "not the address of one host"),
            ("127.0.0.2", "each network namespace"),
            ("::ffff:127.0.0.1", "each network namespace"),
            ("169.254.1.1", "each network namespace"),
            ("fe80::1", "each network namespace"),
        ] {
            let said = fault("/run/netns/blue", &format!("'{address}'"));
            assert!(said.contains(why), "{address}: {said}");
        }
        assert!(fault("/run/netns/blue", "").contains("0 addresses"));
    }

    #[test]
    fn namespace_that_may_become_another_is_refused() {
        for namespace in ["/proc/17/ns/net", "/proc/self/ns/net"] {
            let said = fault(namespace, "'10.0.0.2'");
            assert!(said.contains("ip netns attach"), "{said}");
        }
        for namespace in ["", "blue", "run/netns/blue", "/run/../proc/17/ns/net"] {
            let said = fault(namespace, "'10.0.0.2'");
            assert!(said.contains("absolute path"), "{namespace}: {said}");
        }
    }

    #[test]
    fn address_or_namespace_listed_twice_is_refused() {
        let network = |name: &str, address: &str| {
            format!("[[network]]\nnamespace = '/run/netns/{name}'\naddresses = ['{address}']\n")
        };
        let said = |a: &str, b: &str| Policy::parse(&format!("{a}{b}")).unwrap_err().to_string();
        let twice = said(&network("blue", "10.0.0.2"), &network("red", "::ffff:10.0.0.2"));
        assert!(twice.contains("10.0.0.2 is listed twice, for /run/netns/blue and for /run/netns/red"), "{twice}");
        let again = said(&network("blue", "10.0.0.2"), &network("blue", "10.0.0.3"));
        assert!(again.contains("two networks with the namespace /run/netns/blue"), "{again}");
        let many: String = (0..=NETWORKS).map(|n| network(&n.to_string(), &format!("10.0.1.{n}"))).collect();
        assert!(Policy::parse(&many).unwrap_err().to_string().contains("65 networks"));
    }

    #[test]
    fn network_names_a_namespace_or_a_machine() {
        let with = |place: &str| Policy::parse(&format!("[[network]]\n{place}\naddresses = ['10.0.0.2']\n"));
        let policy = with("machine = 'web'").unwrap();
        assert_eq!(policy.networks()[0].namespace, NamespacePlace::Machine(Name::new("web").unwrap()));
        for both in ["", "machine = 'web'\nnamespace = 'host'"] {
            let said = with(both).unwrap_err().to_string();
            assert!(said.contains("either a namespace or a machine"), "{said}");
        }
        let said = with("machine = 'no name'").unwrap_err().to_string();
        assert!(said.contains("machine = \"no name\""), "{said}");
    }
}
