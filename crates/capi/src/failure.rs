//! Codes, their texts, and each thread's last message.

use partywall::{Error, Refusal};
use std::borrow::Cow;
use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int};
use std::io;

/// The codes of failed calls, as `enum pw_code` of the header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub enum ErrorCode {
    /// No data now.
    Empty = -1,
    /// No space now.
    Full = -2,
    /// The time allowed has passed.
    TimedOut = -3,
    /// The peer, or this side, has ended this direction.
    Closed = -4,
    /// The peer has ended without closing.
    Dead = -5,
    /// The peer has broken the protocol.
    Corrupt = -6,
    /// The peer reports that this side has broken the protocol.
    Accused = -7,
    /// More than a ring, a message or a buffer can hold.
    TooLarge = -8,
    /// An argument makes no sense.
    Invalid = -9,
    /// No broker answers.
    NoBroker = -10,
    /// No such domain or service now.
    NotFound = -11,
    /// The broker's policy does not allow it.
    Denied = -12,
    /// The name is in use.
    InUse = -13,
    /// The broker has refused for another reason.
    Refused = -14,
    /// No memory of the kind that was asked for.
    NoMemory = -15,
    /// The system has refused something.
    System = -16,
    /// This process is the child of a fork.
    Forked = -17,
    /// A bug in Partywall.
    Bug = -18,
    /// The server has no such method.
    UnknownMethod = -19,
    /// A pointer leads outside the heap of the side that sent it.
    BadPointer = -20,
    /// A virtual machine at an end of the connection is being migrated.
    Moved = -21,
}

impl ErrorCode {
    /// Every code.
    pub const ALL: [Self; 21] = [
        Self::Empty,
        Self::Full,
        Self::TimedOut,
        Self::Closed,
        Self::Dead,
        Self::Corrupt,
        Self::Accused,
        Self::TooLarge,
        Self::Invalid,
        Self::NoBroker,
        Self::NotFound,
        Self::Denied,
        Self::InUse,
        Self::Refused,
        Self::NoMemory,
        Self::System,
        Self::Forked,
        Self::Bug,
        Self::UnknownMethod,
        Self::BadPointer,
        Self::Moved,
    ];

    fn text(self) -> &'static CStr {
        match self {
            Self::Empty => c"no data now: wait until the descriptor is readable, then try again",
            Self::Full => c"no space now: wait until the descriptor is readable, then try again",
            Self::TimedOut => c"timed out: nothing was lost, the call can be repeated",
            Self::Closed => c"closed: this direction has ended",
            Self::Dead => c"the peer has ended without closing: connect again when it is back",
            Self::Corrupt => c"the peer has broken the protocol: close the connection",
            Self::Accused => c"the peer reports that this side has broken the protocol: close the connection",
            Self::TooLarge => c"too large for the ring, the message or the buffer",
            Self::Invalid => c"an argument makes no sense",
            Self::NoBroker => c"no broker answers: start partywalld, or set PARTYWALL_BROKER to its socket",
            Self::NotFound => c"no such domain or service now: try again when the program that offers it runs",
            Self::Denied => c"the broker's policy does not allow this: `partywall policy test` names the rule",
            Self::InUse => c"the name is in use: another program offers this service",
            Self::Refused => c"the broker has refused",
            Self::NoMemory => c"no memory of the kind that was asked for: use smaller rings, or raise the limit",
            Self::System => c"the system has refused something",
            Self::Forked => c"this process is the child of a fork: call exec first, or fork before the first join",
            Self::Bug => c"a bug in Partywall: please report it, and do not use the handle again",
            Self::UnknownMethod => c"the server has no such method: compare its methods with the name that was called",
            Self::BadPointer => c"a pointer or length leads outside the heap of the side that sent it",
            Self::Moved => c"a virtual machine at an end of this connection is being migrated: close it and connect again by the same name, which succeeds once the machine is attached at its destination",
        }
    }

    /// Whether [`ErrorCode::text`] has to follow an error's own text, because only it says what to do.
    fn has_remedy(self) -> bool {
        matches!(self, Self::Dead | Self::Corrupt | Self::Accused | Self::NotFound | Self::InUse | Self::NoMemory)
    }
}

/// The event that a waiting function waits for. It decides the code of [`Error::WouldBlock`].
#[derive(Debug, Clone, Copy)]
pub enum WaitFor {
    /// Bytes, a message or a connection.
    Data,
    /// Room in the ring.
    Room,
}

/// Why a function fails.
#[derive(Debug)]
pub struct CallFailure {
    code: ErrorCode,
    text: Option<String>,
}

thread_local! {
    /// The text is made only where there is more to say than the code does: a caller that polls fails often.
    static LAST: RefCell<Cow<'static, CStr>> = const { RefCell::new(Cow::Borrowed(c"no call of this thread has failed")) };
}

impl CallFailure {
    /// The failure of a caller that has passed something wrong.
    pub fn invalid(text: impl Into<String>) -> Self {
        Self { code: ErrorCode::Invalid, text: Some(text.into()) }
    }

    /// A failure with this code and text.
    pub(crate) fn new(code: ErrorCode, text: String) -> Self {
        Self { code, text: Some(text) }
    }

    pub(crate) fn forked() -> Self {
        Self { code: ErrorCode::Forked, text: None }
    }

    pub(crate) fn bug(text: &str) -> Self {
        Self { code: ErrorCode::Bug, text: Some(format!("a bug in Partywall: {text}; please report it")) }
    }

    /// Turns an error of a call that waits for `awaited` into a failure.
    pub fn of(error: &Error, awaited: WaitFor) -> Self {
        let code = match error {
            Error::WouldBlock => match awaited {
                WaitFor::Data => ErrorCode::Empty,
                WaitFor::Room => ErrorCode::Full,
            },
            Error::Full(_) => ErrorCode::Full,
            Error::TimedOut => ErrorCode::TimedOut,
            Error::Closed(_) | Error::Gone(_) => ErrorCode::Closed,
            Error::Dead { .. } | Error::Lagged => ErrorCode::Dead,
            Error::Moved { .. } => ErrorCode::Moved,
            Error::Corrupt(_) => ErrorCode::Corrupt,
            Error::Accused => ErrorCode::Accused,
            Error::TooLarge { .. } => ErrorCode::TooLarge,
            Error::Invalid(_) => ErrorCode::Invalid,
            Error::BrokerAbsent { .. } | Error::BrokerConfused(_) => ErrorCode::NoBroker,
            Error::Refused { code, .. } => match code {
                Refusal::NoSuchDomain | Refusal::NoSuchService => ErrorCode::NotFound,
                Refusal::Denied | Refusal::NameTaken => ErrorCode::Denied,
                Refusal::ServiceTaken => ErrorCode::InUse,
                _ => ErrorCode::Refused,
            },
            Error::Memory(_) => ErrorCode::NoMemory,
            _ => ErrorCode::System,
        };
        let text = match error {
            Error::WouldBlock | Error::TimedOut => None,
            other if code.has_remedy() => Some(format!("{other}; {}", code.text().to_string_lossy())),
            other => Some(other.to_string()),
        };
        Self { code, text }
    }

    /// The failure of a function of `std::io`, whose error carries the library's.
    pub fn from_io(error: &io::Error, awaited: WaitFor) -> Self {
        match error.get_ref().and_then(|inner| inner.downcast_ref::<Error>()) {
            Some(inner) => Self::of(inner, awaited),
            None => Self { code: ErrorCode::System, text: Some(error.to_string()) },
        }
    }

    /// Makes this the thread's last failure, and returns its code.
    pub(crate) fn keep(self) -> ErrorCode {
        let text = match self.text {
            // Texts come from formatted errors. A peer's name in one has no zero: names are checked by the broker.
            Some(text) => Cow::Owned(CString::new(text.replace('\0', "?")).unwrap_or_default()),
            None => Cow::Borrowed(self.code.text()),
        };
        // A thread that is about to end has no last message any more.
        let _ = LAST.try_with(|last| *last.borrow_mut() = text);
        self.code
    }
}

impl From<Error> for CallFailure {
    fn from(error: Error) -> Self {
        Self::of(&error, WaitFor::Data)
    }
}

/// The text of a code, for `pw_strerror`.
fn text_of(code: c_int) -> &'static CStr {
    match ErrorCode::ALL.into_iter().find(|known| *known as c_int == code) {
        Some(known) => known.text(),
        None if code >= 0 => c"success",
        None => c"unknown code: the program was made for a newer libpartywall",
    }
}

/// The text of each code. The text is static.
// SAFETY: only this library defines symbols that begin with `pw_`.
#[expect(unsafe_code, reason = "exports a symbol to C; it has no guard, so that it works in the child of a fork")]
#[unsafe(no_mangle)]
pub extern "C" fn pw_strerror(code: c_int) -> *const c_char {
    text_of(code).as_ptr()
}

/// The text of the last failure of this thread, until the thread's next failure.
// SAFETY: only this library defines symbols that begin with `pw_`.
#[expect(unsafe_code, reason = "exports a symbol to C; it has no guard, so that it works in the child of a fork")]
#[unsafe(no_mangle)]
pub extern "C" fn pw_last_error() -> *const c_char {
    LAST.try_with(|last| last.borrow().as_ptr()).unwrap_or(c"the thread is ending".as_ptr())
}

/// The version of the library. The text is static.
// SAFETY: only this library defines symbols that begin with `pw_`.
#[expect(unsafe_code, reason = "exports a symbol to C; it has no guard, so that it works in the child of a fork")]
#[unsafe(no_mangle)]
pub extern "C" fn pw_version() -> *const c_char {
    const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");
    VERSION.as_ptr().cast()
}
