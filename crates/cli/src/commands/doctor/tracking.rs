//! Whether the broker can tell connections of two users apart where the kernel tracks connections.
//!
//! A kernel that tracks a connection (for a firewall, docker or kube-proxy) may translate its addresses. The broker then compares the sequence
//! numbers of both ends, for which it needs `CAP_NET_ADMIN` (protocol T5). Without it, the connection has the reason `ambiguous`.

use std::net::{TcpListener, TcpStream};

use rustix::io::Errno;
use rustix::net::sockopt;

use super::check::Check;
use crate::args::Global;
use crate::broker_process::{Capability, ServingBroker};
use crate::session;

/// `None` if the broker's process cannot be found from here.
pub(super) fn check(global: &Global) -> Option<Check> {
    let broker = ServingBroker::find(&session::broker_path(global))?;
    Some(judge(is_tracked(), broker.pid, broker.has(Capability::NetAdmin)))
}

fn judge(is_tracked: std::io::Result<bool>, broker: u32, may_read: bool) -> Check {
    let means = "connections between programs of different users stay on TCP, with the reason `ambiguous`";
    let check = |found: String| Check::ok("broker", "connection tracking", means, found);
    let capability = if may_read { "has CAP_NET_ADMIN" } else { "lacks CAP_NET_ADMIN" };
    match (is_tracked, may_read) {
        (Ok(false), _) => check("the kernel does not track connections in this network namespace".into()),
        (Ok(true), true) => check(format!("the kernel tracks connections, and the broker (process {broker}) {capability}")),
        (Ok(true), false) => check(format!("the kernel tracks connections, and the broker (process {broker}) {capability}"))
            .warn("`systemctl edit partywalld`, with the lines [Service] and CapabilityBoundingSet=CAP_NET_ADMIN; then `systemctl restart partywalld`"),
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
        let judged = |tracked, may_read| judge(Ok(tracked), 7, may_read);
        for (tracked, may_read) in [(false, false), (false, true), (true, true)] {
            assert_eq!(judged(tracked, may_read).status, FindingStatus::Ok, "{tracked} {may_read}");
        }
        let warned = judged(true, false);
        assert_eq!(warned.status, FindingStatus::Warn);
        assert!(warned.remedy.unwrap().contains("CapabilityBoundingSet=CAP_NET_ADMIN"));
    }
}
