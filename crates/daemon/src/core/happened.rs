//! An event, as the place that knows of it describes it, and whether the log has it.

use partywall_protocol::wire::{EventKind, Refusal, User};

use super::id::{ChannelId, DomainId};
use crate::credentials::Credentials;
use crate::policy::Ruling;

/// Something that has happened, as the place that knows of it describes it.
#[derive(Debug, Default)]
pub(super) struct Happened {
    pub(super) channel: ChannelId,
    /// Why it was refused, if it was.
    pub(super) code: Option<Refusal>,
    pub(super) from: String,
    pub(super) to: String,
    pub(super) service: String,
    /// The clause that decided, or why it was refused otherwise.
    pub(super) grounds: String,
    /// The line of that clause, or 0.
    pub(super) line: u32,
    /// The other side, which sees what was allowed.
    pub(super) other: Option<Party>,
}

/// A side that has done something, or to which something was done.
#[derive(Debug, Clone, Copy)]
pub(super) struct Party {
    pub(super) user: User,
    pub(super) domain: DomainId,
}

impl Happened {
    /// The event of a decision.
    pub(super) fn by(ruling: &Ruling) -> Self {
        Self { grounds: ruling.words.clone(), line: ruling.line, ..Self::default() }
    }

    /// Logs the event, which `peer` has caused.
    pub(super) fn log(&self, kind: EventKind, peer: Credentials) {
        let known = |text: &str| (!text.is_empty()).then(|| text.to_owned());
        let sentence = match kind {
            EventKind::Connected => "connected",
            EventKind::RingMade => "ring made",
            EventKind::JoinRefused => "join denied by policy",
            EventKind::ConnectRefused => "connect denied by policy",
            EventKind::RingRefused => "ring denied by policy",
            _ => kind.words(),
        };
        tracing::info!(
            user = %peer.user,
            pid = peer.pid,
            from = known(&self.from),
            to = known(&self.to),
            service = known(&self.service),
            channel = (self.channel != 0).then_some(self.channel),
            rule = known(&self.grounds),
            line = (self.line != 0).then_some(self.line),
            "{sentence}"
        );
    }
}

/// Domains that come and go are logged once each, elsewhere; refusals for other reasons than the policy are details.
pub(super) fn is_logged(kind: EventKind, code: Option<Refusal>) -> bool {
    match kind {
        EventKind::Connected | EventKind::RingMade => true,
        EventKind::JoinRefused | EventKind::ConnectRefused | EventKind::RingRefused => code == Some(Refusal::Denied),
        _ => false,
    }
}
