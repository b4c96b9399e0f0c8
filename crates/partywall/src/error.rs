//! Errors of the library: what failed, and whose fault it is.

use partywall_protocol::wire::Refusal;
use partywall_region::RegionError;
use partywall_shm::corrupt::Corrupt;
use std::fmt;
use std::io;
use std::path::PathBuf;

/// The result of a Partywall call.
///
/// ```
/// use partywall::{Options, Stream};
///
/// fn smallest_ring() -> partywall::Result<u64> {
///     let (mut stream, _peer) = Stream::pair(&Options::default())?;
///     Ok(stream.writer()?.ring_size())
/// }
/// assert_eq!(smallest_ring()?, 16 << 10);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub type Result<T> = std::result::Result<T, Error>;

/// The reason why a call failed.
///
/// A full or an empty ring gives [`Error::WouldBlock`] or [`Error::TimedOut`]. *Closed*, *dead*, *moved* and *corrupt* are
/// different ends of a half, and final: every later call on that half returns the same error.
///
/// ```
/// use partywall::{Domain, Error, Refusal};
///
/// # let broker = partywall_daemon::Broker::embedded()?;
/// # let web = Domain::builder().name("web").broker(broker.path()).join()?;
/// match web.connect("web:echo") {
///     Err(Error::Refused { code: Refusal::NoSuchService, reason }) => println!("not yet: {reason}"),
///     other => panic!("there is no such service: {other:?}"),
/// }
/// // For functions that return `std::io::Result`:
/// let error = std::io::Error::from(web.connect("web:echo").unwrap_err());
/// assert_eq!(error.kind(), std::io::ErrorKind::NotFound);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No broker listens at the path.
    #[error("no broker at {}: start `partywalld`, or name its socket with --broker or $PARTYWALL_BROKER ({source})", path.display())]
    BrokerAbsent {
        /// The path of the socket.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// The broker refused the request.
    #[error("refused ({code}): {reason}")]
    Refused {
        /// The reason, for programs.
        code: Refusal,
        /// The reason, for people.
        reason: String,
    },
    /// The answer is not one of the protocol: the program at the socket is a broker of another version, or no broker.
    #[error("the broker's answer makes no sense: {0}")]
    BrokerConfused(String),
    /// A non-blocking call would have to wait.
    #[error("nothing to do now; try again when the descriptor is readable")]
    WouldBlock,
    /// The time limit has passed. No byte was lost, and the call can be repeated.
    #[error("timed out")]
    TimedOut,
    /// The peer has ended this direction, or this half was shut down before.
    #[error("closed: {0}")]
    Closed(&'static str),
    /// The peer ended without closing. All bytes that it had committed have been read.
    #[error("the peer died{}", if *attached { "" } else { " or went away before it accepted" })]
    Dead {
        /// Whether it had accepted the connection.
        attached: bool,
    },
    /// The connection leads to another virtual machine, or from a virtual machine to its host, and an administrator migrates a machine at
    /// one of its ends. The peer has not died. All bytes that it had committed before have been read.
    ///
    /// Drop the connection, which unmaps its memory, and connect again by the same name. That succeeds once the machine is attached at its
    /// destination.
    ///
    /// ```
    /// use partywall::{Error, Stream};
    ///
    /// /// Where to connect again after a failed read, if that is worthwhile.
    /// fn next_target(error: &Error) -> Option<&str> {
    ///     match error {
    ///         // On the side that had connected. The other side waits for its client.
    ///         Error::Moved { target } => target.as_deref(),
    ///         _ => None,
    ///     }
    /// }
    /// let moved = Error::Moved { target: Some("a:echo".into()) };
    /// assert_eq!(next_target(&moved), Some("a:echo"));
    /// assert!(moved.to_string().contains("connect again to `a:echo`"));
    /// ```
    #[error("moved: a virtual machine at an end of this connection is being migrated; {}", remedy_of_move(target.as_deref()))]
    Moved {
        /// The name that this side had connected to, as `DOMAIN:SERVICE`; `None` on the side that had accepted.
        target: Option<String>,
    },
    /// The peer broke the protocol. This half has ended. Other channels are not affected.
    #[error("the peer broke the protocol: {0}")]
    Corrupt(Corrupt),
    /// The peer reports that this side broke the protocol. The peer has ended its half.
    #[error("the peer says that this side broke the protocol, and has closed")]
    Accused,
    /// More than a ring or a message can hold.
    #[error("{asked} bytes asked for, at most {max} possible; {advice}")]
    TooLarge {
        /// Requested bytes.
        asked: u64,
        /// The most bytes that are possible.
        max: u64,
        /// The remedy.
        advice: &'static str,
    },
    /// The requested memory or tokens exist, but are in use. A group's memory is free again when its readers have released it.
    #[error("full: {0}")]
    Full(&'static str),
    /// The buffer or token of a handle has ended.
    #[error("gone: {0}")]
    Gone(&'static str),
    /// A broadcast subscriber was too slow. With [`SlowReader::Drop`](crate::SlowReader::Drop), the publisher has dropped the subscriber (protocol
    /// B2). With [`SlowReader::Newest`](crate::SlowReader::Newest), the publisher has overwritten one message after the other while the subscriber
    /// copied it. The subscriber is still connected, and a later call may succeed (protocol B4).
    #[error("too slow: the publisher has overwritten what was not read yet")]
    Lagged,
    /// An argument is invalid.
    #[error("invalid: {0}")]
    Invalid(String),
    /// No memory of the requested kind.
    #[error(transparent)]
    Memory(RegionError),
    /// A system call failed.
    #[error("cannot {doing}: {source}")]
    System {
        /// The operation that failed.
        doing: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
}

/// The same text as `Display`: `main() -> Result` and `unwrap` print this, and it should contain the remedy.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// What to do after a move.
pub(crate) fn remedy_of_move(target: Option<&str>) -> String {
    const ONCE: &str = "once that machine is attached at its destination";
    match target {
        Some(target) => format!("connect again to `{target}` {ONCE}"),
        None => format!("drop the connection and accept the next: the peer can connect again {ONCE}"),
    }
}

impl Error {
    pub(crate) fn system(doing: &'static str, source: impl Into<io::Error>) -> Self {
        Self::System { doing, source: source.into() }
    }
}

impl From<Corrupt> for Error {
    fn from(what: Corrupt) -> Self {
        Self::Corrupt(what)
    }
}

impl From<RegionError> for Error {
    fn from(e: RegionError) -> Self {
        match e {
            RegionError::Corrupt(what) => Self::Corrupt(what),
            other => Self::Memory(other),
        }
    }
}

impl From<Error> for io::Error {
    fn from(e: Error) -> Self {
        use io::ErrorKind as Kind;
        let kind = match &e {
            Error::BrokerAbsent { source, .. } | Error::System { source, .. } => source.kind(),
            Error::Refused { code, .. } => match code {
                Refusal::Denied | Refusal::NameTaken => Kind::PermissionDenied,
                Refusal::NoSuchDomain | Refusal::NoSuchService | Refusal::NoSuchChannel => Kind::NotFound,
                Refusal::ServiceTaken => Kind::AddrInUse,
                _ => Kind::ConnectionRefused,
            },
            Error::WouldBlock | Error::Full(_) => Kind::WouldBlock,
            Error::Gone(_) => Kind::NotFound,
            Error::TimedOut => Kind::TimedOut,
            Error::Closed(_) => Kind::BrokenPipe,
            Error::Dead { .. } | Error::Moved { .. } => Kind::ConnectionAborted,
            Error::Accused => Kind::ConnectionReset,
            Error::Corrupt(_) | Error::BrokerConfused(_) | Error::Lagged => Kind::InvalidData,
            Error::TooLarge { .. } | Error::Invalid(_) => Kind::InvalidInput,
            Error::Memory(RegionError::System { source, .. }) => source.kind(),
            Error::Memory(_) => Kind::Other,
        };
        Self::new(kind, e)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debug_output_equals_display_with_advice() {
        let absent = Error::BrokerAbsent { path: "/run/broker.sock".into(), source: io::ErrorKind::NotFound.into() };
        let refused = Error::Refused { code: Refusal::Denied, reason: "no [[join]] rule".into() };
        for (error, words) in [(absent, "/run/broker.sock"), (refused, "no [[join]] rule")] {
            let printed = format!("{error:?}");
            assert!(printed == error.to_string() && printed.contains(words), "{printed}");
        }
    }
}
