//! The network namespaces between which datagrams may go by rings, of the host and of virtual machines (protocol U13 to U15).
//!
//! Every process that may change the addresses of its namespace can give itself the address of another namespace. So addresses that
//! sockets show count only within one namespace. Between namespaces the operator's list alone says whose an address is.
//!
//! Within the broker's own namespace, and within that of a machine's agent, no list is needed: the process that has examined the socket has
//! tested its address there, and the kernel can be asked which socket receives.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use partywall_protocol::directory::Transport;
use partywall_protocol::socket::{NamespaceId, SocketFacts, SocketState};
use partywall_protocol::wire::{MachineId, Origin};

/// The operator's list, with the namespaces by their numbers (`SO_NETNS_COOKIE`). It has the namespaces that exist and in which the broker
/// can ask about sockets, itself or by the agents of virtual machines.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Networks {
    /// The broker's own namespace, in which the addresses of sockets were tested when the sockets were shown.
    own: Option<u64>,
    /// The namespaces of the agents of machines, as far as they are known. Each agent has tested addresses in its own.
    agents: BTreeMap<MachineId, u64>,
    /// The namespace of each listed address.
    owners: BTreeMap<IpAddr, NamespaceId>,
}

impl Networks {
    /// A list. No address is in it twice.
    pub fn new(own: Option<u64>, owners: impl IntoIterator<Item = (IpAddr, NamespaceId)>) -> Self {
        Self { own, agents: BTreeMap::new(), owners: owners.into_iter().collect() }
    }

    /// The same, with the namespaces of these machines' agents.
    pub fn with_agents(self, agents: impl IntoIterator<Item = (MachineId, u64)>) -> Self {
        Self { agents: agents.into_iter().collect(), ..self }
    }

    /// The host and the machines for whose sockets `self` and `other` may say different things. An address of another one than these is, for
    /// sockets of another one than these, the same in both.
    pub(super) fn changed(&self, other: &Self) -> BTreeSet<Origin> {
        let mut changed = BTreeSet::new();
        if self.own != other.own {
            changed.insert(Origin::Host);
        }
        for (one, two) in [(self, other), (other, self)] {
            let agents = one.agents.iter().filter(|(machine, netns)| two.agents.get(machine) != Some(netns));
            changed.extend(agents.map(|(machine, _)| Origin::Machine(*machine)));
            let owners = one.owners.iter().filter(|(ip, owner)| two.owners.get(ip) != Some(owner));
            changed.extend(owners.map(|(_, owner)| owner.origin));
        }
        changed
    }

    /// Whether any address is listed for this namespace.
    fn lists(&self, namespace: NamespaceId) -> bool {
        self.owners.values().any(|owner| *owner == namespace)
    }

    /// Whether a namespace is the broker's own, or that of a machine's agent.
    fn is_own(&self, namespace: NamespaceId) -> bool {
        let own = match namespace.origin {
            Origin::Host => self.own,
            Origin::Machine(machine) => self.agents.get(&machine).copied(),
        };
        own == Some(namespace.cookie)
    }

    /// The machine, or the host, whose kernel has the namespace that this address is listed for.
    pub(super) fn origin_of(&self, ip: IpAddr) -> Option<Origin> {
        self.owners.get(&ip.to_canonical()).map(|owner| owner.origin)
    }

    /// Whether an address is listed for this namespace.
    pub(super) fn has(&self, namespace: NamespaceId, ip: IpAddr) -> bool {
        self.owners.get(&ip.to_canonical()) == Some(&namespace)
    }

    /// Whether a socket that was shown may have flows as far as its namespace is concerned (protocol U2.2, U2.3, U15.1). In the broker's own
    /// namespace, the process that has examined the socket has tested the address. In that of an agent, the agent has.
    pub(super) fn admits(&self, socket: &SocketFacts) -> bool {
        let ip = socket.local.ip().to_canonical();
        let has_address = || ip.is_unspecified() || ip.is_loopback() || self.has(socket.namespace(), ip);
        self.is_own(socket.namespace()) || (self.lists(socket.namespace()) && has_address())
    }

    /// Takes the right to flows from a socket for datagrams whose namespace gives it none.
    pub(super) fn judge(&self, socket: &mut SocketFacts) {
        if socket.transport == Transport::Udp && !self.admits(socket) {
            socket.state = SocketState::Other;
        }
    }

    /// The source address that datagrams of a socket to an address of another namespace have. `None` if `to` is listed for no other namespace.
    /// The inner `None`: the list does not say which address that is, or the address is not the socket's namespace's.
    pub(super) fn source_to(&self, socket: &SocketFacts, to: IpAddr) -> Option<Option<IpAddr>> {
        self.owners.get(&to).filter(|owner| **owner != socket.namespace())?;
        let own = socket.local.ip().to_canonical();
        if !own.is_unspecified() {
            return Some(Some(own).filter(|own| own.is_ipv4() == to.is_ipv4() && self.has(socket.namespace(), *own)));
        }
        // The kernel chooses one by the route. The broker does not know the routes, so there must be one to choose.
        let is_its = |ip: &IpAddr, owner: &NamespaceId| *owner == socket.namespace() && ip.is_ipv4() == to.is_ipv4();
        let mut all = self.owners.iter().filter(|(ip, owner)| is_its(ip, owner));
        Some(all.next().map(|(ip, _)| *ip).filter(|_| all.next().is_none()))
    }

    /// Whether there may be a flow between sockets with these addresses in these namespaces. Between two namespaces of one machine there is none.
    pub(super) fn allow(&self, [sender, receiver]: [(NamespaceId, IpAddr); 2]) -> bool {
        let is_listed = |(namespace, ip): (NamespaceId, IpAddr)| self.has(namespace, ip);
        if sender.0 != receiver.0 {
            let are_within_machine = sender.0.origin == receiver.0.origin && sender.0.origin != Origin::Host;
            return !are_within_machine && is_listed(sender) && is_listed(receiver);
        }
        if sender.0.origin != Origin::Host {
            return self.is_own(sender.0);
        }
        let is_own = self.own.is_none() || self.is_own(sender.0);
        let is_inner = |end: (NamespaceId, IpAddr)| end.1.to_canonical().is_loopback() && self.lists(end.0);
        is_own || [sender, receiver].into_iter().all(|end| is_inner(end) || is_listed(end))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::tests::facts;

    const OWN: u64 = 1;
    const BLUE: u64 = 2;

    fn networks() -> Networks {
        let list = [("10.0.0.2", BLUE), ("10.0.0.3", 3)];
        let of_host = |cookie| NamespaceId { origin: Origin::Host, cookie };
        Networks::new(Some(OWN), list.map(|(ip, netns)| (ip.parse().unwrap(), of_host(netns))))
    }

    #[test]
    fn socket_at_unlisted_address_is_admitted_in_own_namespace_only() {
        for (netns, local, well) in [
            (OWN, "10.0.0.3:53", true),
            (BLUE, "10.0.0.2:53", true),
            (BLUE, "[::ffff:10.0.0.2]:53", true),
            (BLUE, "0.0.0.0:53", true),
            (BLUE, "[::1]:53", true),
            // Another's, and one that the list does not have.
            (BLUE, "10.0.0.3:53", false),
            (BLUE, "10.0.0.9:53", false),
            (4, "0.0.0.0:53", false),
            (4, "10.0.0.2:53", false),
            (4, "127.0.0.1:53", false),
        ] {
            for transport in [Transport::Udp, Transport::Tcp] {
                let mut socket = SocketFacts { netns, ..facts(transport, local.parse().unwrap(), None) };
                networks().judge(&mut socket);
                let is_admitted = socket.state == SocketState::Listening;
                assert_eq!(is_admitted, well || transport == Transport::Tcp, "{netns} {local}");
            }
        }
    }

    #[test]
    fn socket_in_machine_is_admitted_in_namespace_of_its_agent() {
        let [one, other] = [1, 2].map(|id| MachineId::new(id).unwrap());
        let networks = networks().with_agents([(one, BLUE)]);
        for (origin, netns, well) in [
            (Origin::Machine(one), BLUE, true),
            // A container in the machine, and machines of which the agent's namespace is another one or not known.
            (Origin::Machine(one), 3, false),
            (Origin::Machine(one), OWN, false),
            (Origin::Machine(other), BLUE, false),
        ] {
            let local = "10.9.9.9:53".parse().unwrap();
            let socket = SocketFacts { origin, netns, ..facts(Transport::Udp, local, None) };
            let end = (socket.namespace(), local.ip());
            assert_eq!((networks.admits(&socket), networks.allow([end; 2])), (well, well), "{origin:?} {netns}");
        }
    }

    #[test]
    fn broker_that_cannot_ask_the_kernel_admits_no_socket() {
        let socket = SocketFacts { netns: OWN, ..facts(Transport::Udp, "127.0.0.1:53".parse().unwrap(), None) };
        assert!(networks().admits(&socket) && !Networks::default().admits(&socket));
    }

    #[test]
    fn changed_list_names_origins_that_it_concerns() {
        let [a, b] = [1, 2].map(|n| MachineId::new(n).unwrap());
        let of = |origin, cookie| NamespaceId { origin, cookie };
        let list = |own, owners: &[(&str, Origin)], agents: &[(MachineId, u64)]| {
            let owners = owners.iter().map(|(ip, origin)| (ip.parse().unwrap(), of(*origin, 3)));
            Networks::new(own, owners).with_agents(agents.iter().copied())
        };
        let (in_a, in_b) = (Origin::Machine(a), Origin::Machine(b));
        let before = list(Some(OWN), &[("10.0.0.1", in_a), ("10.0.0.9", Origin::Host)], &[(a, 3), (b, 3)]);
        assert_eq!(before.changed(&before), [].into());
        for (own, owners, agents, expected) in [
            // The agent of `b` has greeted, and answers from another namespace.
            (Some(OWN), &[("10.0.0.1", in_a), ("10.0.0.9", Origin::Host)][..], &[(a, 3)][..], vec![in_b]),
            (Some(OWN), &[("10.0.0.1", in_a), ("10.0.0.9", Origin::Host)], &[(a, 3), (b, 4)], vec![in_b]),
            (Some(OWN), &[("10.0.0.9", Origin::Host)], &[(a, 3), (b, 3)], vec![in_a]),
            (Some(OWN), &[("10.0.0.1", in_b), ("10.0.0.9", Origin::Host)], &[(a, 3), (b, 3)], vec![in_a, in_b]),
            (None, &[("10.0.0.1", in_a), ("10.0.0.9", Origin::Host)], &[(a, 3), (b, 3)], vec![Origin::Host]),
        ] {
            let after = list(own, owners, agents);
            let expected: BTreeSet<_> = expected.into_iter().collect();
            assert_eq!((after.changed(&before), before.changed(&after)), (expected.clone(), expected));
        }
    }
}
