//! Whether the broker can use the list of network namespaces of its policy, for datagrams between containers.

use super::check::Check;
use crate::args::Global;
use crate::broker_process::Capability;
use crate::networks::{ListedNetworks, broker_and_list};

const REMEDY: &str = "`systemctl edit partywalld`, with the lines [Service], CapabilityBoundingSet=CAP_SYS_ADMIN, RestrictNamespaces=net, \
PrivateNetwork=no and RestrictAddressFamilies=AF_UNIX AF_NETLINK AF_INET AF_INET6; then `systemctl restart partywalld` (docs/packages.md). Without \
systemd, start the broker as root";

/// `None` if the policy lists none, or the broker or its policy file cannot be seen from here.
pub(super) fn check(global: &Global) -> Option<Check> {
    let (broker, listed) = broker_and_list(global)?;
    judge(broker.pid, broker.has(Capability::SysAdmin), &listed)
}

fn judge(broker: u32, may_enter: bool, listed: &ListedNetworks) -> Option<Check> {
    let means = "datagrams of their programs stay on the kernel";
    let check = |found: String| Check::ok("broker", "listed networks", means, found);
    let capability = if may_enter { "has CAP_SYS_ADMIN" } else { "lacks CAP_SYS_ADMIN" };
    match listed {
        ListedNetworks::Known(paths) if paths.is_empty() => None,
        ListedNetworks::Known(paths) => {
            let found =
                format!("[[network]] lists {}, and the broker (process {broker}) {capability}", paths.join(", "));
            Some(if may_enter { check(found) } else { check(found).warn(REMEDY) })
        }
        ListedNetworks::Unknown(_) if may_enter => None,
        ListedNetworks::Unknown(why) => {
            let found = format!("the broker (process {broker}) {capability}, which [[network]] needs; {why}");
            Some(check(found))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::doctor::check::FindingStatus;

    #[test]
    fn listed_namespaces_without_capability_are_a_warning() {
        let listed = ListedNetworks::Known(vec!["/run/netns/blue".into()]);
        let warned = judge(7, false, &listed).unwrap();
        assert_eq!(warned.status, FindingStatus::Warn);
        assert!(warned.found.contains("/run/netns/blue") && warned.remedy.unwrap().contains("CAP_SYS_ADMIN"));
        assert_eq!(judge(7, true, &listed).unwrap().status, FindingStatus::Ok);
        for may_enter in [false, true] {
            assert!(judge(7, may_enter, &ListedNetworks::Known(Vec::new())).is_none());
        }
        let unknown = ListedNetworks::Unknown("cannot read p.toml".into());
        assert_eq!(judge(7, false, &unknown).unwrap().status, FindingStatus::Ok);
    }
}
