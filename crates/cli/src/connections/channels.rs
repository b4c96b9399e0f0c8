//! Channels that the broker knows of, with the counters in their own memory.

use std::collections::{HashMap, HashSet};

use partywall::{
    ChannelRow, Domain, Error, PolicyDecision, PolicyRequest, PolicyUser, Refusal, Snapshot, SocketPaths, StatPage,
    User,
};

use crate::args::Global;
use crate::exit::CommandFailure;
use crate::session;

/// The session with the broker, and mappings kept from one look to the next.
#[derive(Debug, Default)]
pub(crate) struct Channels {
    domain: Option<Domain>,
    pages: HashMap<u64, Vec<StatPage>>,
    rows: Vec<ChannelRow>,
}

/// The counters of one side of a channel.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SideCounters {
    pub(crate) written: Snapshot,
    pub(crate) read: Snapshot,
    /// If it is a socket's.
    pub(crate) paths: Option<SocketPaths>,
}

impl Channels {
    /// Asks the broker; returns why nothing new can be said of channels.
    pub(crate) fn update(&mut self, global: &Global) -> Result<(), CommandFailure> {
        let asked = self.ask(global);
        if asked.is_err() {
            // Join again after a restart of the broker. Channels go on without it, so what was known of them stays.
            self.domain = None;
        }
        asked
    }

    /// The policy's decision about a user who joins as `name`; `None` if this user may not ask, or there is no broker.
    pub(crate) fn may_join(&self, user: PolicyUser, name: &str) -> Option<PolicyDecision> {
        self.domain.as_ref()?.test_policy(user, name, PolicyRequest::Join).ok()
    }

    /// The names of the domains that the broker shows us, by the process of their first session; empty without a broker.
    pub(crate) fn sessions(&self) -> HashMap<u32, String> {
        let rows = self.domain.as_ref().and_then(|domain| domain.domains().ok()).unwrap_or_default();
        let on_host = rows.into_iter().filter(|row| matches!(row.user, User::Host(_)));
        on_host.map(|row| (row.pid, row.name)).collect()
    }

    fn ask(&mut self, global: &Global) -> Result<(), CommandFailure> {
        let domain = match &mut self.domain {
            Some(domain) => domain,
            none => none.insert(session::join(global)?),
        };
        self.rows = domain.channels()?;
        self.pages.retain(|channel, _| self.rows.iter().any(|row| row.channel == *channel));
        for row in &self.rows {
            // Until the other side has accepted, it has no page: ask again.
            if self.pages.get(&row.channel).is_some_and(|pages| pages.len() == 2) {
                continue;
            }
            match domain.inspect(row.channel) {
                Ok(pages) => {
                    self.pages.insert(row.channel, pages);
                }
                // Not ours to see, or closed since it was listed, or its maker lies: the others are shown all the same.
                Err(Error::Refused { code: Refusal::Denied | Refusal::NoSuchChannel, .. } | Error::Corrupt(_)) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Forgets the channels that have closed since the broker listed them.
    pub(crate) fn drop_closed(&mut self) -> partywall::Result<()> {
        let Some(domain) = &self.domain else { return Ok(()) };
        let open: HashSet<u64> = domain.channels()?.iter().map(|row| row.channel).collect();
        self.rows.retain(|row| open.contains(&row.channel));
        Ok(())
    }

    /// The channels that the broker listed.
    pub(crate) fn rows(&self) -> &[ChannelRow] {
        &self.rows
    }

    /// A side of a channel, if it can be seen.
    pub(crate) fn side(&self, channel: u64, connecting: bool) -> Option<SideCounters> {
        let page = self.pages.get(&channel)?.iter().find(|page| page.is_connecting() == connecting)?;
        Some(SideCounters { written: page.written(), read: page.read(), paths: page.paths() })
    }
}
