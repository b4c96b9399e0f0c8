//! Connections of domains of other hosts to services of this host (protocol H5).

use partywall_protocol::wire::{EventKind, Kind, Name, Refusal, Side};

use crate::core::channel::{Channel, EndState};
use crate::core::connect::{ConnectPlan, Shape};
use crate::core::id::SessionId;
use crate::core::refuse::{self, Denial, Refuse, refuse};
use crate::core::{Core, Descriptor};

impl<F: Descriptor> Core<F> {
    /// Fails if the connections of a host that wait for a service are half of its backlog (protocol H5.2).
    fn has_share_of_backlog(&self, host: &Name, plan: &ConnectPlan) -> Result<(), Refuse> {
        let (Some(bound), Some(listener)) = (self.services.get(&plan.key), self.sessions.get(&plan.listener)) else {
            return Ok(());
        };
        let waits = |id| {
            let waiting = EndState::Waiting { listener: plan.listener, service: plan.key };
            let channel: &Channel<F> = self.channels.get(id)?;
            (channel.host.as_ref() == Some(host) && channel.end(Side::Accepting).state == waiting).then_some(())
        };
        let (waiting, share) = (listener.waiting.iter().filter_map(waits).count(), bound.backlog.div_ceil(2));
        if waiting < usize::from(share) {
            return Ok(());
        }
        let ConnectPlan { target, service, .. } = plan;
        let reason = format!(
            "{waiting} connections of the host {host} wait for {target}:{service} already, which does not accept them: a host has \
             at most half of a service's backlog"
        );
        refuse(Refusal::BacklogFull, reason)
    }

    /// Connects the gateway to a service here for a domain of another host (protocol H5).
    pub(super) fn connect_for(
        &mut self,
        (id, request): (SessionId, u32),
        client: &str,
        (target, service): (&str, &str),
        (shape, with): (Shape, Vec<F>),
    ) -> Result<(), Refuse> {
        self.as_gateway(id)?;
        let Some((from, host)) = client.split_once('@') else {
            return refuse(Refusal::NameInvalid, "a client of another host is called DOMAIN@HOST");
        };
        let [from, host, target, service] =
            [refuse::name(from)?, refuse::name(host)?, refuse::name(target)?, refuse::name(service)?];
        let (located, geometry) = shape.check()?;
        let Some((domain, _, peer)) = self.member(id) else { return Ok(()) };
        let ruling = self.policy.ruling(&self.policy.judge_connect_from((&from, &host), &target, &service));
        self.tally.decision("connect", &ruling);
        if !ruling.allowed {
            let reason = format!("the policy does not let {from} of the host {host} connect to {target}:{service}");
            let (kind, from, to) = (EventKind::ConnectRefused, format!("{from}@{host}"), target.to_string());
            let service = service.to_string();
            return Err(Refuse::denied(reason, Denial { kind, peer, domain, from, to, service, other: None, ruling }));
        }
        if shape.kind != Kind::Stream {
            return refuse(Refusal::KindMismatch, "only streams go to other hosts");
        }
        if self.is_gateways_name(&target) {
            return refuse(Refusal::NoSuchDomain, format!("no domain is called {target} now"));
        }
        let Some(mut plan) = self.plan_connect(id, (target, service), shape, located, ruling)? else { return Ok(()) };
        self.has_share_of_backlog(&host, &plan)?;
        (plan.shown, plan.at_home, plan.host) = (format!("{from}@{host}"), false, Some(host));
        self.carry_out((id, request), plan, (shape, located, geometry), with)
    }
}
