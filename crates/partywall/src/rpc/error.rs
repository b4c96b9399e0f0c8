//! Errors of calls: what failed, and whose fault it is.

use super::view::PeerView;
use crate::Error;
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

/// The largest code of an application's error (protocol K5). C passes it on as `-1000 - code` in an `int`.
const LARGEST_CODE: u32 = i32::MAX as u32 - 1000;
/// The most bytes of an error's text (protocol K5).
pub(crate) const MOST_TEXT: usize = 4096;

/// Whether an application's error may have this code.
fn is_code(code: u32) -> bool {
    (1..=LARGEST_CODE).contains(&code)
}

impl CallError {
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
            CallError::Dead { .. } => Kind::ConnectionAborted,
            CallError::Closed { .. } => Kind::BrokenPipe,
            CallError::Corrupt(_) => Kind::InvalidData,
            CallError::Application { .. } | CallError::Panicked | CallError::Connection(_) => Kind::Other,
        };
        Self::new(kind, e)
    }
}

/// How a reply says that a call went (protocol K5).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u16)]
pub(crate) enum CallStatus {
    Done = 0,
    UnknownMethod = 1,
    Refused = 2,
    Application = 3,
    BadPointer = 4,
    OutOfMemory = 5,
    Panicked = 6,
}

impl CallStatus {
    pub(crate) fn from_wire(status: u16) -> Option<Self> {
        let all = [
            Self::Done,
            Self::UnknownMethod,
            Self::Refused,
            Self::Application,
            Self::BadPointer,
            Self::OutOfMemory,
            Self::Panicked,
        ];
        all.into_iter().find(|known| *known as u16 == status)
    }

    /// Whether a reply with this status may have this code.
    pub(crate) fn admits(self, code: u32) -> bool {
        self != Self::Application || is_code(code)
    }

    /// The error that a status stands for; `None` for a call that was done.
    pub(crate) fn error(self, code: u32, bytes: &PeerView) -> Option<CallError> {
        let text = || {
            // The server chooses the length.
            let mut text = vec![0; bytes.len().min(MOST_TEXT)];
            match bytes.read_at(0, &mut text) {
                Ok(()) => String::from_utf8_lossy(&text).into_owned(),
                Err(_) => String::new(),
            }
        };
        Some(match self {
            Self::Done => return None,
            Self::UnknownMethod => CallError::UnknownMethod,
            Self::Refused => CallError::Refused(text()),
            Self::Application => CallError::Application { code, message: text() },
            Self::BadPointer => CallError::BadPointer,
            Self::OutOfMemory => CallError::OutOfMemory(text()),
            Self::Panicked => CallError::Panicked,
        })
    }

    /// The status, code and text by which a server reports an error.
    pub(crate) fn from_error(error: CallError) -> (Self, u32, String) {
        let (status, code, mut text) = Self::from_whole_error(error);
        text.truncate(text.floor_char_boundary(MOST_TEXT));
        (status, code, text)
    }

    fn from_whole_error(error: CallError) -> (Self, u32, String) {
        match error {
            CallError::UnknownMethod => (Self::UnknownMethod, 0, String::new()),
            CallError::Application { code, message } if is_code(code) => (Self::Application, code, message),
            CallError::Application { code, message } => {
                let text =
                    format!("the function failed with code {code}; codes go from 1 to {LARGEST_CODE}: {message}");
                (Self::Refused, 0, text)
            }
            CallError::BadPointer => (Self::BadPointer, 0, String::new()),
            CallError::OutOfMemory(text) => (Self::OutOfMemory, 0, text),
            CallError::Panicked => (Self::Panicked, 0, String::new()),
            CallError::Refused(text) => (Self::Refused, 0, text),
            other => (Self::Refused, 0, other.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_of_an_error_is_cut_between_characters() {
        let (_, _, text) = CallStatus::from_error(CallError::Refused("x".to_owned() + &"é".repeat(1 << 16)));
        assert_eq!(text.len(), MOST_TEXT - 1);
        let (status, code, text) = CallStatus::from_error(CallError::application(7, "short"));
        assert_eq!((status, code, text.as_str()), (CallStatus::Application, 7, "short"));
    }
}
