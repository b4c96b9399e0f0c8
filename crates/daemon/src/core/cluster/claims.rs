//! Names that wait until the cluster has decided about them (protocol H3).

use partywall_protocol::wire::{Message, Name, Refusal};

use super::Cluster;
use super::names::is_of_process;
use crate::core::claim::{Claiming, WaitingRequest};
use crate::core::id::SessionId;
use crate::core::refuse::{self, Refuse, refuse};
use crate::core::{Core, Descriptor};

/// Seconds that a name may wait for the cluster's decision (protocol H3.2).
const CLAIM_PATIENCE: u64 = 4;

/// A name that the cluster has not decided about.
#[derive(Debug)]
pub(super) struct Claim {
    /// It tells the answer to this claim from one to an earlier claim of the name (protocol H3.3).
    pub(super) number: u64,
    pub(super) since: u64,
    pub(super) waiting: Vec<WaitingRequest>,
}

impl<F: Descriptor> Core<F> {
    /// Whether the cluster has to be asked before a program may be this domain (protocol H3).
    pub(in crate::core) fn must_claim(&self, name: &Name, binds: bool) -> bool {
        self.cluster.follower.is_some()
            && self.policy.cluster().is_some()
            && !self.is_gateways_name(name)
            && binds == is_of_process(name)
    }

    /// Has a request wait until the cluster has decided about a name.
    pub(in crate::core) fn claim(&mut self, name: Name, waiting: WaitingRequest) -> Result<(), Refuse> {
        if self.cluster.claims.values().flat_map(|claim| &claim.waiting).any(|one| one.session == waiting.session) {
            return refuse(Refusal::Protocol, "this session waits for its name already");
        }
        let (since, Cluster { claims, next_claim, .. }) = (self.now, &mut self.cluster);
        let claim = claims.entry(name.clone()).or_insert_with(|| {
            let number = *next_claim;
            *next_claim += 1;
            Claim { number, since, waiting: Vec::new() }
        });
        claim.waiting.push(waiting);
        self.touch_name(&name, None);
        Ok(())
    }

    pub(in crate::core) fn name_claimed(
        &mut self,
        id: SessionId,
        request: u32,
        (domain, claim): (&str, u64),
        holder: &str,
    ) -> Result<(), Refuse> {
        self.as_gateway(id)?;
        let domain = refuse::name(domain)?;
        let holder = if holder.is_empty() { None } else { Some(refuse::name(holder)?) };
        self.send(id, request, Message::Done {});
        // An answer to an earlier claim of the name decides nothing (protocol H3.4).
        if self.cluster.claims.get(&domain).is_some_and(|waiting| waiting.number == claim) {
            self.decide_claim(&domain, holder.as_ref());
        }
        Ok(())
    }

    /// The number of the claim that waits for a name.
    #[cfg(test)]
    pub(in crate::core) fn number_of_claim(&self, name: &str) -> Option<u64> {
        self.cluster.claims.get(&Name::new(name).ok()?).map(|claim| claim.number)
    }

    /// Executes the requests that wait for a name, or refuses them because another host has it.
    fn decide_claim(&mut self, name: &Name, holder: Option<&Name>) {
        let Some(claim) = self.cluster.claims.remove(name) else { return };
        for WaitingRequest { session, request, what } in claim.waiting {
            let (asked, done) = match (what, holder) {
                (Claiming::Join { version }, None) => {
                    ("Join", self.join(session, request, version, name.as_str(), true))
                }
                (Claiming::Bind { service, kind, backlog }, None) => {
                    ("Bind", self.bind(session, request, &service, kind, backlog, true))
                }
                (what, Some(host)) => {
                    let asked = if matches!(what, Claiming::Join { .. }) { "Join" } else { "Bind" };
                    (asked, refuse(Refusal::NameTaken, format!("{name} is a domain of the host {host}")))
                }
            };
            if let Err(refused) = done {
                self.refuse_later(session, request, asked, refused);
            }
        }
        self.touch_name(name, None);
    }

    /// Executes the waiting requests of some claims, as without a cluster.
    pub(super) fn decide_all(&mut self, which: impl Fn(&Claim) -> bool) {
        let names: Vec<_> =
            self.cluster.claims.iter().filter(|(_, claim)| which(claim)).map(|(name, _)| name.clone()).collect();
        for name in names {
            tracing::warn!(domain = %name, "the cluster has not decided about this name: it is used without");
            self.decide_claim(&name, None);
        }
    }

    /// Executes the requests that have waited too long.
    pub(super) fn tick_claims(&mut self) {
        let now = self.now;
        self.decide_all(|claim| now >= claim.since.saturating_add(CLAIM_PATIENCE));
    }

    /// A session has ended that may wait for a name.
    pub(super) fn end_claims(&mut self, id: SessionId) {
        let waits = |claim: &Claim| claim.waiting.iter().any(|one| one.session == id);
        let names: Vec<_> =
            self.cluster.claims.iter().filter(|(_, claim)| waits(claim)).map(|(name, _)| name.clone()).collect();
        for name in names {
            let Some(claim) = self.cluster.claims.get_mut(&name) else { continue };
            claim.waiting.retain(|one| one.session != id);
            if claim.waiting.is_empty() {
                self.cluster.claims.remove(&name);
                self.touch_name(&name, None);
            }
        }
    }
}
