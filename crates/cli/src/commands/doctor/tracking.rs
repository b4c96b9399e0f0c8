//! Whether the broker can tell connections of two users apart where the kernel tracks connections.
//!
//! A kernel that tracks a connection (for a firewall, docker or kube-proxy) may translate its addresses. The broker then compares the sequence
//! numbers of both ends, for which it needs `CAP_NET_ADMIN` or the kernel's record of them (protocol T3, T5). Without either, the connection has the
//! reason `ambiguous`.

use std::net::{TcpListener, TcpStream};
use std::path::Path;

use partywall_region::number_record::{self, NumberRecord};
use rustix::io::Errno;
use rustix::net::sockopt;

use super::check::Check;
use crate::args::Global;
use crate::broker_process::{Capability, ServingBroker};
use crate::session;

/// `None` if the broker's process cannot be found from here.
pub(super) fn check(global: &Global) -> Option<Check> {
    let broker = ServingBroker::find(&session::broker_path(global))?;
    let source = match NumberRecord::open(Path::new(number_record::DIRECTORY)) {
        Ok(Some(_)) => NumberSource::Record,
        _ if broker.has(Capability::NetAdmin) => NumberSource::RepairMode,
        Ok(None) => NumberSource::Nowhere,
        Err(_) => NumberSource::Unseen,
    };
    Some(judge(is_tracked(), broker.pid, source))
}

/// Where the broker has sequence numbers from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum NumberSource {
    Record,
    RepairMode,
    Nowhere,
    /// There may be a record. This user may not see it.
    Unseen,
}

fn judge(is_tracked: std::io::Result<bool>, broker: u32, source: NumberSource) -> Check {
    let means = "connections between programs of different users stay on TCP, with the reason `ambiguous`";
    let check = |found: String| Check::ok("broker", "connection tracking", means, found);
    let tracks = |and: &str| check(format!("the kernel tracks connections, and {and}"));
    match (is_tracked, source) {
        (Ok(false), _) => check("the kernel does not track connections in this network namespace".into()),
        (Ok(true), NumberSource::Record) => tracks("records their sequence numbers"),
        (Ok(true), NumberSource::RepairMode) => tracks(&format!("the broker (process {broker}) has CAP_NET_ADMIN")),
        (Ok(true), NumberSource::Nowhere) => tracks(&format!("the broker (process {broker}) lacks CAP_NET_ADMIN")).warn(
            "`partywall numbers on`; or `systemctl edit partywalld`, with the lines [Service] and CapabilityBoundingSet=CAP_NET_ADMIN, and \
             `systemctl restart partywalld`",
        ),
        (Ok(true), NumberSource::Unseen) => tracks(&format!(
            "the broker (process {broker}) lacks CAP_NET_ADMIN; only root sees whether the kernel records sequence numbers"
        ))
        .warn("`partywall numbers`, as root"),
        (Err(error), _) => check(format!("no connection over the loopback interface can be made: {error}"))
            .warn("`ip link set lo up`, if programs of this network namespace are to connect to each other"),
    }
}

/// Whether the kernel tracks a connection over the loopback interface.
fn is_tracked() -> std::io::Result<bool> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let connecting = TcpStream::connect(listener.local_addr()?)?;
    let (_accepting, _) = listener.accept()?;
    // The kernel only knows the first destination of a connection that it tracks.
    match sockopt::ip_original_dst(&connecting) {
        Ok(_) => Ok(true),
        Err(Errno::NOENT | Errno::NOPROTOOPT | Errno::OPNOTSUPP) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::doctor::check::FindingStatus;

    #[test]
    fn tracked_connections_without_capability_are_a_warning() {
        use NumberSource::{Nowhere, Record, RepairMode};
        let judged = |tracked, source| judge(Ok(tracked), 7, source);
        for (tracked, source) in [(false, Nowhere), (false, RepairMode), (true, RepairMode), (true, Record)] {
            assert_eq!(judged(tracked, source).status, FindingStatus::Ok, "{tracked} {source:?}");
        }
        let warned = judged(true, Nowhere);
        assert_eq!(warned.status, FindingStatus::Warn);
        let remedy = warned.remedy.unwrap();
        assert!(remedy.contains("CapabilityBoundingSet=CAP_NET_ADMIN") && remedy.contains("partywall numbers on"));
    }
}
