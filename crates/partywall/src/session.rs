//! One session with the broker: requests and answers (protocol C).

use crate::keeper::check_process;
use crate::{Error, Result};
use partywall_protocol::environment;
use partywall_protocol::wire::{self, Message, Origin};
use partywall_region::packet;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How long an answer may take before the broker counts as hung.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);

/// The default path of the broker's socket: `$PARTYWALL_BROKER`, else `/run/partywall/broker.sock` if there is one, else
/// `$XDG_RUNTIME_DIR/partywall/broker.sock`.
///
/// ```
/// let path = partywall::default_broker_path();
/// if !path.exists() {
///     eprintln!("no broker at {}: start `partywalld`", path.display());
/// }
/// ```
pub fn default_broker_path() -> PathBuf {
    let system = PathBuf::from("/run/partywall/broker.sock");
    if let Some(path) = std::env::var_os(environment::BROKER).filter(|p| !p.is_empty()) {
        return path.into();
    }
    match std::env::var_os("XDG_RUNTIME_DIR") {
        Some(dir) if !system.exists() => PathBuf::from(dir).join("partywall/broker.sock"),
        _ => system,
    }
}

/// The broker's answer to `Join`.
#[derive(Debug, Clone)]
pub(crate) struct JoinedIdentity {
    pub(crate) domain: u32,
    pub(crate) epoch: u64,
    pub(crate) max_ring: u64,
    /// Where this process runs, as the broker sees it.
    pub(crate) origin: Origin,
    pub(crate) name: String,
}

/// A joined session.
#[derive(Debug)]
pub(crate) struct BrokerSession {
    socket: OwnedFd,
    last_request: u32,
    /// Messages that came while an answer was awaited.
    unasked: Vec<(Message, Vec<OwnedFd>)>,
}

impl BrokerSession {
    /// Connects and joins.
    pub(crate) fn join(path: &Path, name: &str) -> Result<(Self, JoinedIdentity)> {
        let absent = |e: rustix::io::Errno| Error::BrokerAbsent { path: path.to_owned(), source: e.into() };
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
            .map_err(|e| Error::system("open a socket", e))?;
        let address = SocketAddrUnix::new(path).map_err(absent)?;
        rustix::net::connect(&socket, &address).map_err(absent)?;
        let timeout =
            |which| set_socket_timeout(&socket, which, Some(PATIENCE)).map_err(|e| Error::system("set a timeout", e));
        timeout(Timeout::Recv)?;
        timeout(Timeout::Send)?;
        let mut session = Self { socket, last_request: 0, unasked: Vec::new() };
        let answer = session.request(&Message::Join { version: wire::VERSION, name: name.to_owned() }, &[])?;
        match answer {
            (Message::Joined { domain, epoch, max_ring, user, name, .. }, _) => {
                Ok((session, JoinedIdentity { domain, epoch, max_ring, origin: user.origin(), name }))
            }
            (other, _) => Err(unexpected(&other)),
        }
    }

    /// A session, and the broker's end of it.
    #[cfg(test)]
    pub(crate) fn pair() -> (Self, OwnedFd) {
        let (socket, broker) = packet::pair().unwrap();
        (Self { socket, last_request: 0, unasked: Vec::new() }, broker)
    }

    /// Sends a request and waits for its answer (protocol C2); a refusal is an error.
    pub(crate) fn request(&mut self, message: &Message, fds: &[BorrowedFd<'_>]) -> Result<(Message, Vec<OwnedFd>)> {
        self.last_request = self.last_request.wrapping_add(1).max(1);
        let request = self.last_request;
        let answer = self.post(request, message, fds).and_then(|()| self.answer_to(request));
        match answer {
            Err(e @ Error::System { .. }) => Err(self.last_words().unwrap_or(e)),
            answer => answer,
        }
    }

    /// Sends a request whose answer is taken later. Returns its number.
    pub(crate) fn ask(&mut self, message: &Message) -> Result<u32> {
        self.last_request = self.last_request.wrapping_add(1).max(1);
        self.post(self.last_request, message, &[])?;
        Ok(self.last_request)
    }

    fn answer_to(&mut self, request: u32) -> Result<(Message, Vec<OwnedFd>)> {
        loop {
            match self.receive_any()? {
                (answered, Message::Refused { code, reason }, _) if answered == request || answered == 0 => {
                    return Err(Error::Refused { code, reason });
                }
                (answered, message, fds) if answered == request => {
                    whole(&message, &fds)?;
                    return Ok((message, fds));
                }
                // The caller of `take_unasked` tests whether the descriptors have come.
                (0, message, fds) => self.unasked.push((message, fds)),
                // An answer to a request that was given up after a timeout.
                _ => {}
            }
        }
    }

    /// The reason that the broker gave for hanging up, if it gave one. It refuses some clients before they have sent anything, so that
    /// their first message fails. If it has not read that message, the kernel reports a reset before the refusal.
    pub(crate) fn last_words(&self) -> Option<Error> {
        let mut failed = false;
        loop {
            match self.try_next() {
                Ok((Message::Refused { code, reason }, _)) => return Some(Error::Refused { code, reason }),
                Ok(_) => {}
                Err(_) if failed => return None,
                Err(_) => failed = true,
            }
        }
    }

    /// Removes the time limit of [`BrokerSession::next`], once there are no more requests to make.
    pub(crate) fn wait_for_ever(&self) -> Result<()> {
        set_socket_timeout(&self.socket, Timeout::Recv, None).map_err(|e| Error::system("set a timeout", e))
    }

    /// Waits for the next message. Descriptors may be missing ([`whole`]).
    pub(crate) fn next(&self) -> Result<(Message, Vec<OwnedFd>)> {
        self.receive_any().map(|(_, message, fds)| (message, fds))
    }

    /// The next message if there is one: [`Error::WouldBlock`] otherwise. Descriptors may be missing ([`whole`]).
    pub(crate) fn try_next(&self) -> Result<(Message, Vec<OwnedFd>)> {
        self.try_receive_any().map(|(_, message, fds)| (message, fds))
    }

    /// The broker's unrequested messages. Descriptors may be missing ([`whole`]).
    pub(crate) fn take_unasked(&mut self) -> Vec<(Message, Vec<OwnedFd>)> {
        while let Ok(next) = self.try_next() {
            self.unasked.push(next);
        }
        std::mem::take(&mut self.unasked)
    }

    fn post(&self, request: u32, message: &Message, fds: &[BorrowedFd<'_>]) -> Result<()> {
        check_process()?;
        let mut out = Vec::with_capacity(256);
        wire::encode(request, message, &mut out);
        packet::send(self.socket.as_fd(), &out, fds).map_err(gone)
    }

    /// As `post`, but [`Error::WouldBlock`] where the broker does not read.
    pub(crate) fn try_post(&self, request: u32, message: &Message, fds: &[BorrowedFd<'_>]) -> Result<()> {
        check_process()?;
        let mut out = Vec::with_capacity(256);
        wire::encode(request, message, &mut out);
        packet::try_send(self.socket.as_fd(), &out, fds).map_err(|e| match e.kind() {
            std::io::ErrorKind::WouldBlock => Error::WouldBlock,
            _ => gone(e),
        })
    }

    fn receive_any(&self) -> Result<(u32, Message, Vec<OwnedFd>)> {
        let mut buf = [0; wire::MAX_PACKET];
        let received = packet::recv(self.socket.as_fd(), &mut buf);
        match Self::parse(&buf, received) {
            // On a blocking socket, only the timeout says this.
            Err(Error::WouldBlock) => Err(Error::TimedOut),
            other => other,
        }
    }

    pub(crate) fn try_receive_any(&self) -> Result<(u32, Message, Vec<OwnedFd>)> {
        let mut buf = [0; wire::MAX_PACKET];
        let received = packet::try_recv(self.socket.as_fd(), &mut buf);
        Self::parse(&buf, received)
    }

    /// Decodes a packet. Descriptors may be missing: this process may have had none left for them.
    fn parse(buf: &[u8], received: std::io::Result<packet::ReceivedPacket>) -> Result<(u32, Message, Vec<OwnedFd>)> {
        let received = received.map_err(|e| match e.kind() {
            std::io::ErrorKind::WouldBlock => Error::WouldBlock,
            _ => gone(e),
        })?;
        if received.len == 0 {
            return Err(gone(std::io::ErrorKind::UnexpectedEof.into()));
        }
        let (request, message) =
            wire::decode(&buf[..received.len]).map_err(|e| Error::BrokerConfused(e.to_string()))?;
        if received.fds.len() > message.fd_count() {
            return Err(Error::BrokerConfused(format!("{} with {} descriptors", message.name(), received.fds.len())));
        }
        Ok((request, message, received.fds))
    }
}

/// Fails if descriptors of a message are missing: the kernel leaves out those that find no place in this process.
pub(crate) fn whole(message: &Message, fds: &[OwnedFd]) -> Result<()> {
    if fds.len() == message.fd_count() {
        return Ok(());
    }
    let full = std::io::Error::from_raw_os_error(rustix::io::Errno::MFILE.raw_os_error());
    Err(Error::system("take the descriptors that the broker sends", full))
}

impl AsFd for BrokerSession {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn gone(e: std::io::Error) -> Error {
    Error::system("talk to the broker", e)
}

pub(crate) fn unexpected(message: &Message) -> Error {
    Error::BrokerConfused(format!("{} was not asked for", message.name()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use partywall_protocol::wire::Refusal;

    fn session() -> (BrokerSession, OwnedFd) {
        BrokerSession::pair()
    }

    fn refuse_and_hang_up(broker: OwnedFd) {
        let mut out = Vec::new();
        wire::encode(0, &Message::Refused { code: Refusal::Denied, reason: "not you".into() }, &mut out);
        packet::send(broker.as_fd(), &out, &[]).unwrap();
    }

    fn assert_refusal_with_reason<T: std::fmt::Debug>(answer: Result<T>) {
        assert!(matches!(answer, Err(Error::Refused { code: Refusal::Denied, .. })), "{answer:?}");
    }

    #[test]
    fn refusal_before_first_request_reports_reason() {
        let (mut session, broker) = session();
        refuse_and_hang_up(broker);
        assert_refusal_with_reason(session.request(&Message::Ping {}, &[]));
        // Once it is said it is said.
        assert!(matches!(session.request(&Message::Ping {}, &[]), Err(Error::System { .. })));
    }

    #[test]
    fn refusal_of_pending_request_reports_reason() {
        let (mut session, broker) = session();
        session.post(1, &Message::Ping {}, &[]).unwrap();
        refuse_and_hang_up(broker);
        assert_refusal_with_reason(session.request(&Message::Ping {}, &[]));

        let (mut session, broker) = self::session();
        std::thread::scope(|s| {
            s.spawn(move || {
                let mut fds = [rustix::event::PollFd::new(&broker, rustix::event::PollFlags::IN)];
                rustix::event::poll(&mut fds, None).unwrap();
                refuse_and_hang_up(broker);
            });
            assert_refusal_with_reason(session.request(&Message::Ping {}, &[]));
        });
    }
}
