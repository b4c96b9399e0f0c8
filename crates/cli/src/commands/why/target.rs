//! The selection of a connection.

use std::fmt;
use std::net::{IpAddr, SocketAddr};

use crate::connections::ConnectionRow;

/// A connection, or several.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum WantedConnection {
    /// The sockets of a process.
    Process(u32),
    /// One descriptor of a process.
    Descriptor(u32, u32),
    /// The connections that have this address at one end.
    Address(Address),
    /// The sockets of a program, of a domain, or of a virtual machine.
    Program(String),
}

/// An address, or a port at any.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Address {
    ip: Option<IpAddr>,
    port: u16,
}

/// Reads `PROGRAM`, `PID`, `PID:FD`, `IP:PORT` or `:PORT`.
pub(super) fn parse(text: &str) -> Result<WantedConnection, String> {
    if let Ok(address) = parse_address(text) {
        return Ok(WantedConnection::Address(address));
    }
    if let Ok(pid) = text.parse() {
        return Ok(WantedConnection::Process(pid));
    }
    match text.split_once(':').map(|(pid, fd)| (pid.parse(), fd.parse())) {
        Some((Ok(pid), Ok(fd))) => Ok(WantedConnection::Descriptor(pid, fd)),
        Some(_) => Err("write PROGRAM, PID, PID:FD, IP:PORT, [IPV6]:PORT or :PORT".into()),
        None if text.is_empty() => Err("write which program, process or address".into()),
        None => Ok(WantedConnection::Program(text.into())),
    }
}

/// Reads `IP:PORT` or `:PORT`.
pub(super) fn parse_address(text: &str) -> Result<Address, String> {
    let wrong = "write IP:PORT, [IPV6]:PORT or :PORT";
    if let Some(port) = text.strip_prefix(':') {
        return port.parse().map(|port| Address { ip: None, port }).map_err(|_| wrong.into());
    }
    let address: SocketAddr = text.parse().map_err(|_| wrong)?;
    Ok(Address { ip: Some(address.ip().to_canonical()), port: address.port() })
}

impl Address {
    fn is(self, text: &str) -> bool {
        text.parse().is_ok_and(|address: SocketAddr| {
            self.port == address.port() && self.ip.is_none_or(|ip| ip == address.ip().to_canonical())
        })
    }
}

impl WantedConnection {
    /// Whether a row is of this connection. `other`: the address of the end that is not [`WantedConnection::Address`].
    pub(super) fn is_of(&self, row: &ConnectionRow, other: Option<&Address>) -> bool {
        match self {
            Self::Process(pid) => row.pid == Some(*pid),
            Self::Descriptor(pid, fd) => row.pid == Some(*pid) && row.fd == Some(*fd),
            Self::Program(name) => {
                let of_channel = || {
                    let (peer, _) = row.peer.split_once(':').unwrap_or((&row.peer, ""));
                    [&row.program, peer].into_iter().any(|domain| names(name, domain))
                };
                row.program == *name || row.program == shortened(name) || (row.local.is_none() && of_channel())
            }
            Self::Address(address) => {
                let (local, peer) = (row.local.as_deref().unwrap_or_default(), row.peer.as_str());
                match other {
                    None => address.is(local) || address.is(peer),
                    Some(other) => (address.is(local) && other.is(peer)) || (address.is(peer) && other.is(local)),
                }
            }
        }
    }
}

/// Whether a name is that of a domain, of the program that has joined as it (`redis-server` of `redis-server-7`, which `partywall run` chooses; in a
/// virtual machine, `a.redis-server` of `a.redis-server-7`), or of its virtual machine (`a`).
fn names(name: &str, domain: &str) -> bool {
    domain.strip_prefix(name).is_some_and(|rest| {
        let is_number = |number: &str| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
        rest.is_empty() || rest.starts_with('.') || rest.strip_prefix('-').is_some_and(is_number)
    })
}

/// As the kernel keeps the name of a program: the first 15 bytes.
fn shortened(name: &str) -> &str {
    name.get(..15).unwrap_or(name)
}

impl fmt::Display for WantedConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Process(pid) => write!(f, "process {pid}"),
            Self::Descriptor(pid, fd) => write!(f, "descriptor {fd} of process {pid}"),
            Self::Program(name) => write!(f, "program {name}"),
            Self::Address(Address { ip: None, port }) => write!(f, "port {port}"),
            Self::Address(Address { ip: Some(ip), port }) => write!(f, "{}", SocketAddr::new(*ip, *port)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row() -> ConnectionRow {
        ConnectionRow {
            program: "a-program-of-17".into(),
            pid: Some(42),
            fd: Some(7),
            local: Some("[::ffff:10.0.0.1]:40000".into()),
            peer: "10.0.0.2:6379".into(),
            ..ConnectionRow::default()
        }
    }

    #[test]
    fn connection_is_found_by_each_way_to_name_it() {
        for (text, other, expected) in [
            ("42", None, true),
            ("43", None, false),
            ("42:7", None, true),
            ("42:8", None, false),
            ("10.0.0.1:40000", None, true),
            (":6379", None, true),
            (":22", None, false),
            ("10.0.0.2:6379", Some("10.0.0.1:40000"), true),
            ("10.0.0.1:40000", Some("10.0.0.2:6379"), true),
            ("10.0.0.2:6379", Some("10.0.0.1:40001"), false),
            (":6379", Some(":6379"), false),
            ("a-program-of-17-characters", None, true),
            ("a-program", None, false),
        ] {
            let (target, other) = (parse(text).unwrap(), other.map(|other| parse_address(other).unwrap()));
            assert_eq!(target.is_of(&row(), other.as_ref()), expected, "{text} {other:?}");
        }
        let channel = ConnectionRow { program: "web".into(), peer: "db:in".into(), ..ConnectionRow::default() };
        assert!(parse("db").unwrap().is_of(&channel, None) && parse("web").unwrap().is_of(&channel, None));
        let between_machines = ConnectionRow {
            program: "b.redis-cli-12".into(),
            peer: "a.redis-server-7:6379".into(),
            ..ConnectionRow::default()
        };
        for (text, expected) in [
            ("a.redis-server", true),
            ("a.redis-server-7", true),
            ("b.redis-cli", true),
            ("a", true),
            ("b", true),
            ("a.redis", false),
            ("a.redis-server-", false),
            ("redis-server", false),
            ("6379-x", false),
        ] {
            assert_eq!(parse(text).unwrap().is_of(&between_machines, None), expected, "{text}");
        }
    }

    #[test]
    fn malformed_connection_error_shows_expected_form() {
        for wrong in ["", "1.2.3.4:x", "x:7", ":", ":70000", "7:"] {
            assert!(parse(wrong).unwrap_err().contains("write "), "{wrong}");
        }
        assert!(parse_address("redis").unwrap_err().contains(":PORT"));
    }
}
