//! One move rule, as the broker writes it: the words of [`crate::upgrade`], and rules by program.
//!
//! ```text
//! never@program=backup*     connections of programs whose name fits; * stands for any characters, ? for one
//! ```

use core::fmt;

use crate::upgrade::{Fault, Of, Upgrade};

/// The connections that a rule applies to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Subject {
    /// The connections that an [`Of`] describes.
    Of(Of),
    /// The connections of programs whose name fits.
    Program(ProgramPattern),
}

/// One rule; of those that fit a connection, the last decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Clause {
    /// The connections that the rule is about.
    pub subject: Subject,
    /// When they go to a ring.
    pub upgrade: Upgrade,
}

impl Clause {
    /// Reads `UPGRADE` or `UPGRADE@SUBJECT`.
    ///
    /// # Errors
    /// [`BadClause`] says which part cannot be understood.
    pub fn parse(text: &str) -> Result<Self, BadClause> {
        let (upgrade, subject) = match text.split_once('@') {
            None => (text, Subject::Of(Of::All)),
            Some((upgrade, subject)) => match subject.split_once("program=") {
                Some(("", pattern)) => {
                    (upgrade, Subject::Program(ProgramPattern::new(pattern).ok_or(BadClause::Program)?))
                }
                _ => (upgrade, Subject::Of(Of::parse(subject)?)),
            },
        };
        Ok(Self { subject, upgrade: Upgrade::parse(upgrade)? })
    }
}

impl fmt::Display for Clause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.subject {
            Subject::Of(of) => write!(f, "{}{of}", self.upgrade),
            Subject::Program(pattern) => write!(f, "{}@program={pattern}", self.upgrade),
        }
    }
}

/// The fault of a clause.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BadClause {
    /// A part that every policy has.
    Word(Fault),
    /// Not the pattern of a program's name.
    Program,
}

impl From<Fault> for BadClause {
    fn from(fault: Fault) -> Self {
        Self::Word(fault)
    }
}

impl fmt::Display for BadClause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Word(Fault::Of) => write!(f, "{}, or program=PATTERN", Fault::Of),
            Self::Word(fault) => fault.fmt(f),
            Self::Program => f.write_str("the name of a program has 1 to 64 bytes without spaces, @ and /"),
        }
    }
}

impl core::error::Error for BadClause {}

/// A pattern for the name of a program.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct ProgramPattern {
    bytes: [u8; Self::MAX],
    len: u8,
}

impl ProgramPattern {
    /// The most bytes it has.
    pub const MAX: usize = 64;

    /// A pattern: 1 to 64 bytes without spaces, control characters, `@` and `/`.
    pub fn new(text: &str) -> Option<Self> {
        let bad = |c: char| c.is_whitespace() || c.is_control() || matches!(c, '@' | '/');
        if text.is_empty() || text.len() > Self::MAX || text.contains(bad) {
            return None;
        }
        let mut bytes = [0; Self::MAX];
        bytes[..text.len()].copy_from_slice(text.as_bytes());
        Some(Self { bytes, len: text.len() as u8 })
    }

    pub(super) fn as_bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }

    pub(super) fn words(&self) -> [u64; 8] {
        core::array::from_fn(|i| {
            self.bytes[i * 8..][..8].iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte))
        })
    }

    pub(super) fn from_words(words: [u64; 8], len: u64) -> Option<Self> {
        let len = u8::try_from(len).ok().filter(|len| usize::from(*len) <= Self::MAX)?;
        Some(Self { bytes: core::array::from_fn(|i| words[i / 8].to_le_bytes()[i % 8]), len })
    }

    /// Whether the whole of `name` fits.
    pub fn matches(&self, name: &[u8]) -> bool {
        let pattern = self.as_bytes();
        let (mut at, mut of) = (0, 0);
        // Where to go on if what follows the latest star does not fit: the star takes one byte more.
        let mut retry = None;
        while at < name.len() {
            match pattern.get(of) {
                Some(b'*') => {
                    retry = Some((at, of));
                    of += 1;
                }
                Some(byte) if *byte == b'?' || *byte == name[at] => (at, of) = (at + 1, of + 1),
                _ => match retry {
                    Some((from, star)) => {
                        (at, of) = (from + 1, star + 1);
                        retry = Some((from + 1, star));
                    }
                    None => return false,
                },
            }
        }
        pattern[of..].iter().all(|byte| *byte == b'*')
    }
}

impl fmt::Display for ProgramPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // It was made of text.
        f.write_str(core::str::from_utf8(self.as_bytes()).unwrap_or("?"))
    }
}

impl fmt::Debug for ProgramPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pattern({self})")
    }
}
