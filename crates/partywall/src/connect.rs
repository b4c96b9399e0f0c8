//! Connecting to a service: this side's memory and links, and the broker's answer.

use crate::channel::{self, EndpointParts, Halves};
use crate::endpoint::Carrier;
use crate::memory::{self, Place};
use crate::session::unexpected;
use crate::{Domain, Error, Options, PeerInfo, Result};
use partywall_protocol::wire::{Directions, Kind, Located, Message, Refusal, RegionReference, Side};
use partywall_region::Link;
use rustix::fd::AsFd;

/// Connects to `DOMAIN:SERVICE`. This side makes its memory. The broker makes the links and passes both to the listener (protocol A1, C7).
/// To another machine, the links lead to a relay; within a machine, its agent makes them.
pub(crate) fn open(
    domain: &Domain,
    target: &str,
    kind: Kind,
    directions: Directions,
    options: &Options,
) -> Result<Halves> {
    let (name, service) = target
        .rsplit_once(':')
        .filter(|(d, s)| !d.is_empty() && !s.is_empty())
        .ok_or_else(|| Error::Invalid(format!("`{target}` is not DOMAIN:SERVICE, as in `web:echo`")))?;
    open_with(domain, None, (name, service), kind, directions, options)
}

/// Connects to a service of this host for a domain of another host, which is `client` (protocol H5).
pub(crate) fn open_for(
    domain: &Domain,
    client: (&str, &str),
    target: (&str, &str),
    directions: Directions,
    options: &Options,
) -> Result<Halves> {
    open_with(domain, Some(client), target, Kind::Stream, directions, options)
}

fn open_with(
    domain: &Domain,
    client: Option<(&str, &str)>,
    target: (&str, &str),
    kind: Kind,
    directions: Directions,
    options: &Options,
) -> Result<Halves> {
    match open_at(domain, client, target, kind, directions, options, None) {
        // The peer is on another machine, and so the region must be in the window between them.
        Err(Error::Refused { code: Refusal::Elsewhere, .. }) => {
            let ring = memory::window_ring(options.ring_bounds(domain.max_ring())?);
            let size = memory::region_size(Side::Connecting, directions, ring.0);
            let place = domain.room(0, target.0, size)?;
            open_at(domain, client, target, kind, directions, options, Some(place))
        }
        other => other,
    }
}

fn open_at(
    domain: &Domain,
    client: Option<(&str, &str)>,
    (name, service): (&str, &str),
    kind: Kind,
    directions: Directions,
    options: &Options,
    place: Option<Place>,
) -> Result<Halves> {
    let ring = options.ring_bounds(domain.max_ring())?;
    let (ring, region, base, memory) = match place {
        Some(place) => {
            let ring = memory::window_ring(ring);
            let region = memory::endpoint_at(&place, Side::Connecting, directions, ring.0, domain.epoch())?;
            (ring, region, place.base, place.memory)
        }
        None => {
            let (region, memory) = memory::endpoint(Side::Connecting, directions, options, ring.0, domain.epoch())?;
            (ring, region, 0, memory)
        }
    };
    let geometry = region.geometry();
    let (target, wanted) = (name.to_owned(), service.to_owned());
    let region_is = RegionReference::new(Located::from_base(base), geometry);
    let connect = match client {
        None => Message::Connect { target, service: wanted, kind, directions, region: region_is },
        Some((from, host)) => {
            let client = format!("{from}@{host}");
            Message::ConnectFor { client, target, service: wanted, kind, directions, region: region_is }
        }
    };
    let (connected, answer) = domain.request_with_ticket(&connect, &[memory.as_fd()])?;
    let (id, domain_id, epoch, came) = match answer {
        (Message::Connected { channel, domain, epoch, .. }, came) => (channel, domain, epoch, came),
        (other, _) => return Err(unexpected(&other)),
    };
    let info = PeerInfo {
        name: name.to_owned(),
        domain_id,
        epoch,
        user: None,
        pid: None,
        at_home: false,
        service: service.to_owned(),
    };
    let claim = (base == 0).then_some(memory);
    let registration = domain.register(id, Side::Connecting, &info, kind, directions, geometry, claim, Some(connected));
    let link = |end| match base {
        0 => Link::bells(end).map_err(|_| Error::BrokerConfused("a link that is none".into())),
        _ => channel::crossing(end),
    };
    let links = came.into_iter().map(link).collect::<Result<Vec<_>>>()?;
    let parts = EndpointParts {
        side: Side::Connecting,
        directions,
        region,
        peer: None,
        links,
        info,
        id,
        carrier: Carrier::Broker(registration),
        ring,
        base,
    };
    channel::assemble(parts, options)
}
