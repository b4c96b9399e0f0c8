//! Errors of calls: what failed, and whose fault it is.

use crate::Error;
use crate::error::remedy_of_move;
use partywall_shm::corrupt::Corrupt;
use std::io;

/// The reason why a call has no result.
///
/// ```
/// use partywall::rpc::{CallError, CallClient, CallServer};
///
/// # let broker = partywall_daemon::Broker::embedded()?;
/// # let web = partywall::Domain::builder().name("web").broker(broker.path()).join()?;
/// let _server = CallServer::builder().method("withdraw", |_| {
///     Err(CallError::application(7, "the account is empty"))
/// }).bind(&web, "bank")?;
///
/// let client = CallClient::connect("web:bank")?;
/// match client.call("withdraw", &[]) {
///     Err(CallError::Application { code: 7, message }) => assert_eq!(message, "the account is empty"),
///     other => panic!("{other:?}"),
/// }
/// assert!(matches!(client.call("deposit", &[]), Err(CallError::UnknownMethod)));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CallError {
    /// The server has no such method.
    #[error("the server has no such method: compare its methods with the name that was called")]
    UnknownMethod,
    /// The server does not take this call.
    #[error("the server refused the call: {0}")]
    Refused(String),
    /// The application's own error.
    #[error("the called function failed with code {code}: {message}")]
    Application {
        /// The application's number for it.
        code: u32,
        /// The application's text.
        message: String,
    },
    /// A pointer or an extent does not lie wholly in the heap of the side that sent it, or more pointers were followed than allowed.
    #[error("a pointer or length leads outside the sender's heap, or too many pointers were followed")]
    BadPointer,
    /// The peer's bytes are no value of the type that was declared.
    #[error("the peer's bytes are no value of the declared type: {0}; compare the declarations of both sides")]
    BadValue(String),
    /// There is no memory for the arguments here, or for the result there.
    #[error("out of memory: {0}")]
    OutOfMemory(String),
    /// The function on the other side has panicked.
    #[error("the called function panicked; the server goes on")]
    Panicked,
    /// The time allowed has passed. The server may still execute the call; a late result is dropped.
    #[error("the call timed out; the server may still execute it")]
    TimedOut,
    /// The peer has ended without closing.
    #[error("the peer died {}", seen_text(*.seen))]
    Dead {
        /// Whether the server had taken the call. If not, it has not executed it, and the call can be repeated elsewhere.
        seen: bool,
    },
    /// A virtual machine at an end of the connection is being migrated. The peer has not died: connect again by the same name once that
    /// machine is attached at its destination ([`Error::Moved`]).
    #[error("moved: a virtual machine at an end of this connection is being migrated, {}; {}", seen_text(*.seen), remedy_of_move(target.as_deref()))]
    Moved {
        /// Whether the server had taken the call. If not, it has not executed it, and the call can be repeated after connecting again.
        seen: bool,
        /// The name that this side had connected to, as `DOMAIN:SERVICE`; `None` for a server that calls back.
        target: Option<String>,
    },
    /// The peer, or this side, has closed the connection.
    #[error("the connection is closed; it was closed {}", seen_text(*.seen))]
    Closed {
        /// Whether the server had taken the call.
        seen: bool,
    },
    /// The peer broke the protocol. The connection has ended.
    #[error("the peer broke the protocol of calls: {0}")]
    Corrupt(Corrupt),
    /// The connection failed in another way.
    #[error(transparent)]
    Connection(Error),
}

fn seen_text(seen: bool) -> &'static str {
    if seen {
        "after the server had taken the call, which it may have executed"
    } else {
        "before the server saw the call"
    }
}

impl CallError {
    /// Fills in whether the server had taken the call, where the connection has ended.
    pub(crate) fn with_seen(self, seen: bool) -> Self {
        match self {
            Self::Dead { .. } => Self::Dead { seen },
            Self::Closed { .. } => Self::Closed { seen },
            Self::Moved { target, .. } => Self::Moved { seen, target },
            other => other,
        }
    }

    /// An error of the application's own, for a function of a server. Codes go from 1 to 2,147,482,647; the client of a function that fails
    /// with another code gets [`CallError::Refused`]. Of the message, 4096 bytes arrive.
    pub fn application(code: u32, message: impl Into<String>) -> Self {
        Self::Application { code, message: message.into() }
    }
}

impl From<Error> for CallError {
    fn from(e: Error) -> Self {
        match e {
            Error::TimedOut => Self::TimedOut,
            Error::Dead { .. } => Self::Dead { seen: false },
            Error::Moved { target } => Self::Moved { seen: false, target },
            Error::Closed(_) => Self::Closed { seen: false },
            Error::Corrupt(what) => Self::Corrupt(what),
            e @ (Error::TooLarge { .. } | Error::Memory(_)) => Self::OutOfMemory(e.to_string()),
            other => Self::Connection(other),
        }
    }
}

impl From<CallError> for io::Error {
    fn from(e: CallError) -> Self {
        use io::ErrorKind as Kind;
        let kind = match &e {
            CallError::UnknownMethod => Kind::Unsupported,
            CallError::Refused(_) => Kind::ConnectionRefused,
            CallError::BadPointer => Kind::InvalidInput,
            CallError::BadValue(_) => Kind::InvalidData,
            CallError::OutOfMemory(_) => Kind::OutOfMemory,
            CallError::TimedOut => Kind::TimedOut,
            CallError::Dead { .. } | CallError::Moved { .. } => Kind::ConnectionAborted,
            CallError::Closed { .. } => Kind::BrokenPipe,
            CallError::Corrupt(_) => Kind::InvalidData,
            CallError::Application { .. } | CallError::Panicked | CallError::Connection(_) => Kind::Other,
        };
        Self::new(kind, e)
    }
}
