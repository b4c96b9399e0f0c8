//! The process of the broker, and the rights that it has.

use std::path::Path;

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};

/// A right that the kernel gives to a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Capability {
    /// `CAP_NET_ADMIN`: reads sequence numbers of sockets.
    NetAdmin,
    /// `CAP_SYS_ADMIN`: enters network namespaces.
    SysAdmin,
}

impl Capability {
    /// Its bit in the kernel's masks.
    fn bit(self) -> u64 {
        match self {
            Self::NetAdmin => 1 << 12,
            Self::SysAdmin => 1 << 21,
        }
    }
}

/// The broker's process.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ServingBroker {
    pub(crate) pid: u32,
    /// Its effective capabilities.
    effective: u64,
}

impl ServingBroker {
    /// The process that serves this socket. `None` if there is no broker, or its process cannot be seen from here: it is then outside of this
    /// container or machine.
    pub(crate) fn find(socket: &Path) -> Option<Self> {
        // Asked first: a process outside of this PID namespace has no number here, and rustix has no value for that.
        let mut processes = procfs::process::all_processes().ok()?.flatten();
        processes.find(|process| process.stat().is_ok_and(|stat| stat.comm == "partywalld"))?;
        let pid = listener_of(socket)?;
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        Some(Self { pid, effective: effective(&status)? })
    }

    pub(crate) fn has(self, capability: Capability) -> bool {
        self.effective & capability.bit() != 0
    }
}

/// The process that listens on a socket.
fn listener_of(path: &Path) -> Option<u32> {
    let socket =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).ok()?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path).ok()?).ok()?;
    let process = sockopt::socket_peercred(&socket).ok()?.pid.as_raw_nonzero().get();
    u32::try_from(process).ok()
}

/// The effective capabilities in the text of a file `/proc/PID/status`.
fn effective(status: &str) -> Option<u64> {
    let mask = status.lines().find_map(|line| line.strip_prefix("CapEff:"))?;
    u64::from_str_radix(mask.trim(), 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capability_is_read_from_the_effective_mask() {
        let has = |mask: &str, capability| {
            let status =
                format!("Name:\tpartywalld\nCapPrm:\t000001ffffffffff\nCapEff:\t{mask}\nCapBnd:\t000001ffffffffff\n");
            ServingBroker { pid: 7, effective: effective(&status).unwrap() }.has(capability)
        };
        assert!(has("0000000000001000", Capability::NetAdmin) && !has("0000000000001000", Capability::SysAdmin));
        assert!(has("0000000000200000", Capability::SysAdmin) && !has("0000000000200000", Capability::NetAdmin));
        assert!(!has("000001ffffdfefff", Capability::NetAdmin) && !has("000001ffffdfefff", Capability::SysAdmin));
        assert_eq!(effective("Name:\tpartywalld\n"), None);
    }

    #[test]
    fn process_behind_a_socket_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("b.sock");
        assert_eq!(listener_of(&path), None, "nobody listens");
        let listener =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        rustix::net::bind(&listener, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        rustix::net::listen(&listener, 1).unwrap();
        assert_eq!(listener_of(&path), Some(std::process::id()));
    }
}
