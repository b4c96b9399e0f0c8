//! How a command ends: one exit code per outcome, and an error that carries its code, its text and the remedy.

use std::fmt;
use std::io;
use std::os::unix::fs::FileTypeExt as _;
use std::path::Path;
use std::process::ExitCode;

use partywall::{Error, Refusal};

use crate::admission;

/// The table of exit codes, as the help texts and the manual print it.
pub(crate) const TABLE: &str = "\
Exit codes:
  0   success
  1   a local failure: a file, a full disk, output of `cat` closed by its reader, or the peer closed early
  2   wrong usage: unknown flag, value out of range, malformed name
  3   refused: forbidden by policy, or no such domain, service, channel, machine or port of a machine
  4   the peer died or stopped before the end of its input, or a virtual machine at one end is being migrated (bytes that
      the peer had committed were delivered)
  5   the peer broke the protocol
  6   timed out
  69  no broker answers, so start one with `partywalld`; or this user may not connect to its socket
  126 the program exists but cannot be executed
  127 there is no such program";

/// The codes of `partywall run`: most are those of the program that it runs.
pub(crate) const RUN_TABLE: &str = "\
Exit codes:
  the program's own, once it runs; before that:
  1   a local failure, such as a library that is not installed
  2   wrong usage: unknown flag, value out of range, malformed name
  126 the program exists but cannot be executed
  127 there is no such program";

/// One exit code per outcome.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Code {
    /// The reader of standard output has closed it. Nothing failed, and there is nothing to report.
    ReaderLeft = 0,
    /// A local failure.
    General = 1,
    /// The command line is invalid.
    Usage = 2,
    /// The broker refused the request.
    Refused = 3,
    /// The peer ended without closing cleanly, or a machine at one end is being migrated.
    Died = 4,
    /// The peer broke the protocol.
    Corrupt = 5,
    /// A time limit has passed.
    TimedOut = 6,
    /// No broker answers on the socket (`EX_UNAVAILABLE` of sysexits.h).
    NoBroker = 69,
    /// The program exists but cannot be executed (the code that `env` and shells use).
    NotExecutable = 126,
    /// There is no such program.
    NotFound = 127,
}

impl From<Code> for ExitCode {
    fn from(code: Code) -> Self {
        ExitCode::from(code as u8)
    }
}

/// Why a command did not succeed.
#[derive(Debug, Clone)]
pub(crate) struct CommandFailure {
    /// The exit code.
    pub(crate) code: Code,
    message: String,
    hint: Option<String>,
}

impl CommandFailure {
    pub(crate) fn new(code: Code, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), hint: None }
    }

    /// A local failure.
    pub(crate) fn general(message: impl Into<String>) -> Self {
        Self::new(Code::General, message)
    }

    /// The command line asks for something that cannot be.
    pub(crate) fn usage(message: impl Into<String>) -> Self {
        Self::new(Code::Usage, message)
    }

    /// Standard output has no reader any more.
    pub(crate) fn reader_left() -> Self {
        Self::new(Code::ReaderLeft, "standard output was closed by its reader")
    }

    /// Adds what the user can do about it.
    pub(crate) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// Prepends the operation that failed: `operation: error`.
    pub(crate) fn context(mut self, doing: impl fmt::Display) -> Self {
        self.message = format!("{doing}: {}", self.message);
        self
    }
}

impl fmt::Display for CommandFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        if let Some(hint) = &self.hint {
            write!(f, "\n  {hint}")?;
        }
        Ok(())
    }
}

impl std::error::Error for CommandFailure {}

impl From<Error> for CommandFailure {
    fn from(error: Error) -> Self {
        let message = error.to_string();
        let code = match error {
            Error::BrokerAbsent { path, source } => return Self::no_broker(&path, &source),
            Error::Refused { code, .. } => return Self::from_refusal(code, message),
            Error::TimedOut | Error::WouldBlock => Code::TimedOut,
            Error::Gone(_) => Code::Refused,
            Error::Dead { .. } | Error::Moved { .. } => Code::Died,
            Error::Corrupt(_) | Error::Accused => Code::Corrupt,
            Error::Invalid(_) | Error::TooLarge { .. } => Code::Usage,
            _ => Code::General,
        };
        Self::new(code, message)
    }
}

impl CommandFailure {
    fn no_broker(path: &Path, source: &io::Error) -> Self {
        if source.kind() == io::ErrorKind::PermissionDenied {
            return Self::new(Code::NoBroker, admission::refusal(path)).hint(admission::remedy());
        }
        let is_socket = |file: std::fs::Metadata| file.file_type().is_socket();
        if std::fs::metadata(path).is_ok_and(|file| !is_socket(file)) {
            return Self::new(Code::NoBroker, format!("{} is not a socket", path.display()))
                .hint("name the broker's socket with --broker or PARTYWALL_BROKER");
        }
        let path = path.display();
        Self::new(Code::NoBroker, format!("no broker answers on {path} ({source})")).hint(format!(
            "start one with `partywalld --socket {path}`, or name another with --broker or PARTYWALL_BROKER ({})",
            crate::session::search_order()
        ))
    }

    fn from_refusal(code: Refusal, message: String) -> Self {
        let failure = Self::new(Code::Refused, message);
        match code {
            Refusal::NoSuchDomain | Refusal::NoSuchService => {
                failure.hint(
                    "`partywall list` shows what exists, and `partywall list --cluster` what other hosts have; `--wait` waits for it",
                )
            }
            Refusal::Denied => failure.hint("the broker's policy decides (see `partywalld --print-sample-policy`)"),
            Refusal::Version => {
                failure.hint("partywall and partywalld come from different releases; restart the older one")
            }
            _ => failure,
        }
    }
}

impl From<io::Error> for CommandFailure {
    fn from(error: io::Error) -> Self {
        // The library's streams wrap their own error, so that `Read` and `Write` lose nothing.
        match error.downcast::<Error>() {
            Ok(ours) => ours.into(),
            Err(theirs) if theirs.kind() == io::ErrorKind::TimedOut => Self::new(Code::TimedOut, theirs.to_string()),
            Err(theirs) => Self::general(theirs.to_string()),
        }
    }
}

impl From<rustix::io::Errno> for CommandFailure {
    fn from(errno: rustix::io::Errno) -> Self {
        io::Error::from(errno).into()
    }
}

/// Adds the operation that failed to an error.
pub(crate) trait Context<T> {
    /// Turns the error into a [`Failure`] that begins with `doing`.
    fn context(self, doing: impl fmt::Display) -> Result<T, CommandFailure>;
}

impl<T, E: Into<CommandFailure>> Context<T> for Result<T, E> {
    fn context(self, doing: impl fmt::Display) -> Result<T, CommandFailure> {
        self.map_err(|error| error.into().context(doing))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn absent(path: &str) -> Error {
        Error::BrokerAbsent { path: path.into(), source: io::ErrorKind::NotFound.into() }
    }

    #[test]
    fn every_outcome_of_the_library_has_its_code() {
        let refused = |code| Error::Refused { code, reason: "no".into() };
        assert_eq!(CommandFailure::from(absent("/x")).code, Code::NoBroker);
        assert_eq!(CommandFailure::from(refused(Refusal::Denied)).code, Code::Refused);
        assert_eq!(CommandFailure::from(refused(Refusal::NoSuchDomain)).code, Code::Refused);
        assert_eq!(CommandFailure::from(Error::TimedOut).code, Code::TimedOut);
        assert_eq!(CommandFailure::from(Error::Closed("done")).code, Code::General);
    }

    #[test]
    fn error_wrapped_by_io_keeps_its_code() {
        let io = io::Error::from(Error::TimedOut);
        assert_eq!(CommandFailure::from(io).code, Code::TimedOut);
        assert_eq!(CommandFailure::from(io::Error::other("disk")).code, Code::General);
    }

    #[test]
    fn absent_broker_error_names_the_command_to_start_one() {
        let text = CommandFailure::from(absent("/tmp/b.sock")).to_string();
        assert!(text.contains("/tmp/b.sock") && text.contains("partywalld"), "{text}");
        assert!(text.contains("/run/partywall/broker.sock is tried if it exists, else "), "{text}");
    }
}
