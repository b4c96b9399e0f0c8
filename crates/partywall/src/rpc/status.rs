//! How a reply says that a call went (protocol K5).

use super::error::CallError;
use super::view::PeerView;

/// The largest code of an application's error (protocol K5). C passes it on as `-1000 - code` in an `int`.
const LARGEST_CODE: u32 = i32::MAX as u32 - 1000;
/// The most bytes of an error's text (protocol K5).
pub(crate) const MOST_TEXT: usize = 4096;

/// Whether an application's error may have this code.
fn is_code(code: u32) -> bool {
    (1..=LARGEST_CODE).contains(&code)
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
