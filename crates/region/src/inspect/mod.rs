//! The kernel's facts about a socket that a program shows (protocol T3) to the broker on the host, or to the agent in a virtual machine.
//!
//! The descriptor is a copy of the program's: it must be closed before the program is answered, or a connection that the program
//! closes would stay open by it. Any of these system calls may block for as long as the socket's owner likes, so the broker makes them in
//! a separate process. So nothing here logs, and only facts about namespaces are kept.
#![expect(unsafe_code, reason = "socket options and requests that no safe function reads")]

mod datagram;
pub mod groups;
mod numbers;
pub mod receivers;
mod repair;

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::path::PathBuf;

use partywall_protocol::directory::Transport;
use partywall_protocol::socket::{Identity, Numbers, SocketFacts, SocketState};
use partywall_protocol::wire::Origin;
use rustix::net::{AddressFamily, SocketType, sockopt};

use crate::number_record::NumberRecord;
pub use crate::sockopt::option;

/// `SIOCGSKNS`: the network namespace of a socket, as a descriptor.
const GET_SOCKET_NETNS: libc::Ioctl = 0x894C;
/// `NS_GET_USERNS`: the user namespace that owns a namespace, as a descriptor.
const GET_OWNER: libc::Ioctl = 0xB701;
/// States of TCP, as `tcp_info` numbers them.
pub(crate) const ESTABLISHED: u8 = 1;
const CLOSE_WAIT: u8 = 8;
const LISTEN: u8 = 10;
/// `SO_BINDTOIFINDEX`: the number of the device that a socket is bound to, 0 for none.
const BOUND_TO: libc::c_int = 62;
/// `SO_ORIGINAL_DST` and `IP6T_SO_ORIGINAL_DST`: where a tracked connection was sent to at first.
const ORIGINAL_DESTINATION: libc::c_int = 80;
/// Namespaces whose owner is remembered. They are few; should they not be, all are asked about again.
const REMEMBERED: usize = 1024;

/// A stranger's descriptor, that does not make us wait when it is closed: a TCP socket may have been told to linger until its
/// peer has taken everything, and ours may be the last descriptor of it.
#[derive(Debug)]
pub struct Unhurried(pub OwnedFd);

impl Drop for Unhurried {
    fn drop(&mut self) {
        // For other files than sockets this fails, and there is nothing to do.
        if let Ok(Some(_)) = sockopt::socket_linger(&self.0) {
            let _ = sockopt::set_socket_linger(&self.0, None);
        }
    }
}

/// Reads sockets, and remembers whose network namespaces are.
#[derive(Debug)]
pub struct Inspector {
    /// Device and inode of the broker's own user namespace.
    own: Option<(u64, u64)>,
    /// By cookie: whether our user namespace owns the network namespace. Neither ever changes.
    trusted: HashMap<u64, bool>,
    /// Where the kernel's record of sequence numbers is kept, if there is one.
    record_at: Option<PathBuf>,
    /// That record, once it is there.
    record: Option<NumberRecord>,
}

impl Default for Inspector {
    fn default() -> Self {
        Self::new()
    }
}

impl Inspector {
    /// An inspector without remembered namespaces.
    pub fn new() -> Self {
        let own = rustix::fs::stat("/proc/self/ns/user").ok().map(|stat| (stat.st_dev, stat.st_ino));
        Self { own, trusted: HashMap::new(), record_at: None, record: None }
    }

    /// Takes sequence numbers from the record that is kept at this directory, as soon as there is one. A record that cannot be opened is as good as
    /// none.
    #[must_use]
    pub fn with_record_at(self, directory: Option<PathBuf>) -> Self {
        Self { record_at: directory, ..self }
    }

    #[cfg(test)]
    pub(crate) fn with_record(self, record: Option<NumberRecord>) -> Self {
        Self { record, ..self }
    }

    /// Reads a socket and closes it. `with_numbers`: the sequence numbers of a connection are to be read, too. No thread of its program may be inside
    /// a system call on it then (protocol T3.3).
    ///
    /// # Errors
    /// What the descriptor is instead of a TCP or UDP socket, for the one who showed it.
    pub fn inspect(&mut self, socket: Unhurried, with_numbers: bool) -> Result<SocketFacts, String> {
        self.read(socket.0.as_fd(), with_numbers)
    }

    fn read(&mut self, socket: BorrowedFd<'_>, with_numbers: bool) -> Result<SocketFacts, String> {
        let no = |what: &str| Err(format!("the descriptor is {what}, not a TCP or UDP socket"));
        let family = match sockopt::socket_domain(socket) {
            Ok(family) => family,
            Err(_) => return no("no socket at all"),
        };
        let inet = matches!(family, AddressFamily::INET | AddressFamily::INET6);
        if inet && sockopt::socket_protocol(socket) == Ok(Some(rustix::net::ipproto::UDP)) {
            return datagram::read(self, socket, family)
                .map_err(|e| format!("the kernel does not say what the socket is: {e}"));
        }
        let stream = sockopt::socket_type(socket) == Ok(SocketType::STREAM);
        let tcp = sockopt::socket_protocol(socket) == Ok(Some(rustix::net::ipproto::TCP));
        if !inet || !stream || !tcp {
            return no("a socket of another sort");
        }
        self.ask(socket, family, with_numbers).map_err(|e| format!("the kernel does not say what the socket is: {e}"))
    }

    fn ask(&mut self, socket: BorrowedFd<'_>, family: AddressFamily, with_numbers: bool) -> io::Result<SocketFacts> {
        let info = info(socket)?;
        if with_numbers && info.state != ESTABLISHED {
            repair::end(socket);
        }
        let netns: u64 = option(socket, libc::SOL_SOCKET, libc::SO_NETNS_COOKIE)?;
        let local = SocketAddr::try_from(rustix::net::getsockname(socket)?)?;
        let remote = match rustix::net::getpeername(socket) {
            Ok(at) => at.map(SocketAddr::try_from).transpose()?,
            Err(rustix::io::Errno::NOTCONN) => None,
            Err(e) => return Err(e.into()),
        };
        Ok(SocketFacts {
            origin: Origin::Host,
            transport: Transport::Tcp,
            local,
            remote,
            state: match info.state {
                LISTEN => SocketState::Listening,
                ESTABLISHED => SocketState::Established,
                CLOSE_WAIT => SocketState::HalfClosed,
                _ => SocketState::Other,
            },
            identity: if info.state == ESTABLISHED {
                self.identity(socket, local, with_numbers)
            } else {
                Identity::default()
            },
            only_v6: family == AddressFamily::INET6 && sockopt::ipv6_v6only(socket)?,
            cookie: sockopt::socket_cookie(socket)?,
            netns,
            trusted: self.is_trusted(socket, netns),
            // On the side that connected, the SYN counts among the acknowledged bytes.
            acknowledged: info.bytes_acked.saturating_sub(1),
            received: info.bytes_received,
            sent: info.bytes_sent,
        })
    }

    /// The values that identify the other end of a connection, besides its addresses. It has been seen ESTABLISHED.
    fn identity(&mut self, socket: BorrowedFd<'_>, local: SocketAddr, with_numbers: bool) -> Identity {
        // If the kernel does not say, the broker must fear it.
        let device = option::<libc::c_int>(socket, libc::SOL_SOCKET, BOUND_TO).unwrap_or(1);
        let numbers = with_numbers.then(|| self.numbers(socket)).flatten();
        Identity { bound_to_device: device != 0, tracked: is_tracked(socket, local), numbers }
    }

    fn numbers(&mut self, socket: BorrowedFd<'_>) -> Option<Numbers> {
        if self.record.is_none() {
            self.record = self.record_at.as_deref().and_then(|at| NumberRecord::open(at).ok().flatten());
        }
        // The state right before the look-up, and by `TCP_INFO`, which waits for the socket's lock ([`NumberRecord::numbers`]).
        let is_established = || info(socket).is_ok_and(|info| info.state == ESTABLISHED);
        let recorded = self.record.as_ref().filter(|_| is_established()).and_then(|record| record.numbers(socket));
        let Some(recorded) = recorded else {
            self.record = self.record.take().filter(NumberRecord::is_attached);
            return numbers::read(socket);
        };
        // A connection that stays in the mode sends no end of its stream.
        repair::end(socket).then_some(recorded)
    }

    /// Whether the network namespace of a socket belongs to our user namespace. Only root may ask; without, none does.
    pub(crate) fn is_trusted(&mut self, socket: BorrowedFd<'_>, netns: u64) -> bool {
        if let Some(known) = self.trusted.get(&netns) {
            return *known;
        }
        let owner = request(socket, GET_SOCKET_NETNS)
            .and_then(|netns| request(netns.as_fd(), GET_OWNER))
            .and_then(|owner| Ok(rustix::fs::fstat(owner)?));
        let trusted = match (owner, self.own) {
            (Ok(owner), Some(own)) => (owner.st_dev, owner.st_ino) == own,
            _ => false,
        };
        if self.trusted.len() >= REMEMBERED {
            self.trusted.clear();
        }
        self.trusted.insert(netns, trusted);
        trusted
    }
}

/// Whether the kernel's connection tracking knows the connection: only then may it translate addresses.
fn is_tracked(socket: BorrowedFd<'_>, local: SocketAddr) -> bool {
    let level = if local.ip().to_canonical().is_ipv4() { libc::SOL_IP } else { libc::SOL_IPV6 };
    match option::<[u8; 28]>(socket, level, ORIGINAL_DESTINATION) {
        // No such connection is tracked; or nothing is, in this kernel.
        Err(e) => !matches!(e.raw_os_error(), Some(libc::ENOENT | libc::ENOPROTOOPT | libc::EOPNOTSUPP)),
        Ok(_) => true,
    }
}

pub(crate) fn info(socket: BorrowedFd<'_>) -> io::Result<TcpInfo> {
    option(socket, libc::IPPROTO_TCP, libc::TCP_INFO)
}

/// As much of `tcp_info` as is used here, in the kernel's layout, which grows at its end.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct TcpInfo {
    pub(crate) state: u8,
    before: [u8; 119],
    pub(crate) bytes_acked: u64,
    pub(crate) bytes_received: u64,
    between: [u64; 8],
    bytes_sent: u64,
}

/// A request that answers with a new descriptor.
fn request(fd: BorrowedFd<'_>, request: libc::Ioctl) -> io::Result<OwnedFd> {
    // SAFETY: both requests take no argument that the kernel would read or write.
    let new = unsafe { libc::ioctl(fd.as_raw_fd(), request) };
    if new < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel made it for us just now.
    Ok(unsafe { OwnedFd::from_raw_fd(new) })
}
