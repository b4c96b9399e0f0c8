//! Whether the broker can tell connections of two users apart where the kernel tracks connections.
//!
//! A kernel that tracks a connection (for a firewall, docker or kube-proxy) may translate its addresses. The broker then compares the sequence
//! numbers of both ends, for which it needs `CAP_NET_ADMIN` (protocol T5). Without it, the connection has the reason `ambiguous`.

use std::net::{TcpListener, TcpStream};
use std::path::Path;

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};

use super::check::Check;
use crate::args::Global;
use crate::session;

/// The number of `CAP_NET_ADMIN` in the kernel's masks of capabilities.
const NET_ADMIN: u32 = 12;

/// `None` if there is no broker, or its process cannot be seen from here: it is then outside of this container or machine.
pub(super) fn check(global: &Global) -> Option<Check> {
    // Asked first: a process outside of this PID namespace has no number here, and rustix has no value for that.
    let mut processes = procfs::process::all_processes().ok()?.flatten();
    processes.find(|process| process.stat().is_ok_and(|stat| stat.comm == "partywalld"))?;
    let broker = broker_process(&session::broker_path(global))?;
    Some(judge(is_tracked(), broker, may_read_numbers(broker)?))
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

/// The process that listens on the broker's socket.
fn broker_process(path: &Path) -> Option<u32> {
    let socket =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).ok()?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path).ok()?).ok()?;
    let process = sockopt::socket_peercred(&socket).ok()?.pid.as_raw_nonzero().get();
    u32::try_from(process).ok()
}

fn may_read_numbers(process: u32) -> Option<bool> {
    has_capability(&std::fs::read_to_string(format!("/proc/{process}/status")).ok()?)
}

/// Whether the text of a file `/proc/PID/status` has the capability among the effective ones.
fn has_capability(status: &str) -> Option<bool> {
    let mask = status.lines().find_map(|line| line.strip_prefix("CapEff:"))?;
    Some(u64::from_str_radix(mask.trim(), 16).ok()? & (1 << NET_ADMIN) != 0)
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

    #[test]
    fn capability_is_read_from_the_effective_mask() {
        let status = |mask: &str| {
            format!("Name:\tpartywalld\nCapPrm:\t000001ffffffffff\nCapEff:\t{mask}\nCapBnd:\t000001ffffffffff\n")
        };
        assert_eq!(has_capability(&status("0000000000001000")), Some(true));
        assert_eq!(has_capability(&status("000001ffffffefff")), Some(false));
        assert_eq!(has_capability(&status("0000000000000000")), Some(false));
        assert_eq!(has_capability("Name:\tpartywalld\n"), None);
    }

    #[test]
    fn process_behind_a_socket_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("b.sock");
        assert_eq!(broker_process(&path), None, "nobody listens");
        let listener =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        rustix::net::bind(&listener, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        rustix::net::listen(&listener, 1).unwrap();
        assert_eq!(broker_process(&path), Some(std::process::id()));
        assert!(may_read_numbers(std::process::id()).is_some());
    }
}
