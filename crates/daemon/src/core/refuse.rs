//! A refusal in transit to the client.

use partywall_protocol::wire::{Name, Refusal};

/// Why the broker does not do as asked; nothing has changed.
#[derive(Debug)]
pub(super) struct Refuse {
    pub(super) code: Refusal,
    pub(super) reason: String,
}

pub(super) fn refuse<T>(code: Refusal, reason: impl Into<String>) -> Result<T, Refuse> {
    Err(Refuse { code, reason: reason.into() })
}

/// Proves a name, or refuses it.
pub(super) fn name(text: &str) -> Result<Name, Refuse> {
    Name::new(text).or_else(|e| refuse(Refusal::NameInvalid, e.to_string()))
}
