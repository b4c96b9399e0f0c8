//! Names of domains and services (protocol C5).

use alloc::string::{String, ToString};
use core::fmt;

/// A valid name: 1 to 64 characters of `A-Z a-z 0-9 . _ -`, the first a letter or digit.
///
/// The type is the proof; a `String` in a [`Message`](super::Message) is unchecked.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name(String);

impl Name {
    /// The longest name.
    pub const MAX: usize = 64;

    /// Accepts `text` if it is a name.
    ///
    /// # Errors
    /// [`NameError`] says what is wrong with it.
    pub fn new(text: &str) -> Result<Self, NameError> {
        let first = text.chars().next().ok_or(NameError::Empty)?;
        if text.len() > Self::MAX {
            return Err(NameError::Long(text.len()));
        }
        if let Some(bad) = text.chars().find(|c| !(c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-'))) {
            return Err(NameError::Character(bad));
        }
        if !first.is_ascii_alphanumeric() {
            return Err(NameError::First(first));
        }
        Ok(Self(text.to_string()))
    }

    /// The text of the name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.0)
    }
}

impl AsRef<str> for Name {
    fn as_ref(&self) -> &str {
        &self.0
    }
}

impl core::borrow::Borrow<str> for Name {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl core::str::FromStr for Name {
    type Err = NameError;
    fn from_str(text: &str) -> Result<Self, NameError> {
        Self::new(text)
    }
}

impl From<Name> for String {
    fn from(name: Name) -> Self {
        name.0
    }
}

/// Why a text is not a [`Name`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum NameError {
    /// There is nothing in it.
    Empty,
    /// It is longer than [`Name::MAX`] bytes.
    Long(usize),
    /// It has a character that names do not have.
    Character(char),
    /// It begins with punctuation.
    First(char),
}

impl fmt::Display for NameError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty => f.write_str("a name needs at least one character"),
            Self::Long(n) => write!(f, "a name has at most {} characters, not {n}", Name::MAX),
            Self::Character(c) => {
                write!(f, "a name cannot contain {c:?}; it is made of letters, digits, '.', '_' and '-'")
            }
            Self::First(c) => write!(f, "a name begins with a letter or a digit, not with {c:?}"),
        }
    }
}

impl core::error::Error for NameError {}
