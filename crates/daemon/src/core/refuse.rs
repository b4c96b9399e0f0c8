//! A refusal in transit to the client.

use partywall_protocol::wire::{EventKind, Name, Refusal};

use super::happened::Party;
use super::id::DomainId;
use crate::credentials::Credentials;
use crate::policy::Ruling;

/// Why the broker does not do as asked; nothing has changed.
#[derive(Debug)]
pub(super) struct Refuse {
    pub(super) code: Refusal,
    pub(super) reason: String,
    /// The denial of the policy, if the policy refused it.
    pub(super) denied: Option<Box<Denial>>,
}

/// A denial of the policy.
#[derive(Debug)]
pub(super) struct Denial {
    /// The kind of the request.
    pub(super) kind: EventKind,
    /// The client that asked.
    pub(super) peer: Credentials,
    /// As which domain; 0 if there is none yet.
    pub(super) domain: DomainId,
    pub(super) from: String,
    pub(super) to: String,
    pub(super) service: String,
    /// The other side, if it was there.
    pub(super) other: Option<Party>,
    pub(super) ruling: Ruling,
}

impl Refuse {
    /// A denial by the policy.
    pub(super) fn denied(reason: String, denial: Denial) -> Self {
        Self { code: Refusal::Denied, reason, denied: Some(Box::new(denial)) }
    }
}

pub(super) fn refuse<T>(code: Refusal, reason: impl Into<String>) -> Result<T, Refuse> {
    Err(Refuse { code, reason: reason.into(), denied: None })
}

/// Proves a name, or refuses it.
pub(super) fn name(text: &str) -> Result<Name, Refuse> {
    Name::new(text).or_else(|e| refuse(Refusal::NameInvalid, e.to_string()))
}
