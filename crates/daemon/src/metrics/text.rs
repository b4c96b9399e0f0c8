//! A report as OpenMetrics text.

use std::fmt;

use partywall_protocol::wire::{Refusal, VERSION};
use partywall_region::relay::{BellBuckets, BellDirection, RelayLatency};
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{EncodeMetric, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Registry, Unit};

use crate::core::{CoreReport, DecisionKey};

type Labels = Vec<(&'static str, String)>;

/// The whole answer.
pub(super) fn of(report: &CoreReport, relays: &RelayLatency) -> Result<String, fmt::Error> {
    let mut registry = Registry::with_prefix("partywall");
    let info = vec![("version", env!("CARGO_PKG_VERSION").to_owned()), ("protocol", VERSION.to_string())];
    registry.register("build", "The broker that serves this", Info::new(info));
    let alone = [
        ("domains", "Domains that have joined", report.status.domains as u64),
        ("services", "Services bound", report.status.services as u64),
        ("offers", "Connections of unmodified programs that wait for their other end", report.offers),
        ("listeners", "Entries of the directory: addresses at which unmodified programs listen", report.listeners),
    ];
    for (name, help, value) in alone {
        registry.register(name, help, ConstGauge::new(value));
    }
    registry.register("sessions_opened", "Sessions begun since the start", ConstCounter::new(report.sessions_opened));

    let mut gauges = |name: &str, help: &str, values: Vec<(Labels, u64)>| registry.register(name, help, gauge(values));

    let of_kind = |(kind, count): (&&'static str, &u64)| (vec![("user", (*kind).to_owned())], *count);
    gauges("sessions", "Sessions by the kind of user", report.sessions.iter().map(of_kind).collect());
    let channels = report
        .channels
        .iter()
        .map(|((kind, state), count)| (vec![("kind", (*kind).to_owned()), ("state", (*state).to_owned())], *count));
    gauges("channels", "Channels by kind and state; kind tcp and udp are of unmodified programs", channels.collect());
    let [up, down] = report.machines;
    let machines = [("up", up), ("down", down)].map(|(state, count)| (vec![("state", state.to_owned())], count));
    gauges("machines", "Virtual machines by the state of their port", machines.into());

    let of_domain = |(name, bytes): &(String, u64)| (vec![("domain", name.clone())], *bytes);
    let rings = gauge(report.ring_bytes.iter().map(of_domain).collect());
    registry.register_with_unit("ring", "Memory of rings by the domain that brought it", Unit::Bytes, rings);

    let mut counters =
        |name: &str, help: &str, values: Vec<(Labels, u64)>| registry.register(name, help, counter(values));
    let of_request = |(name, count): (&&'static str, &u64)| (vec![("request", kebab(name))], *count);
    counters("requests", "Requests by message since the start", report.requests.iter().map(of_request).collect());
    let refusals = report
        .refusals
        .iter()
        .map(|((name, code), count)| (vec![("request", kebab(name)), ("reason", refusal_code(*code))], *count));
    counters("refusals", "Refused requests by message and reason since the start", refusals.collect());

    let of_clause = |((request, allowed, rule), count): (&DecisionKey, &u64)| {
        let decision = if *allowed { "allowed" } else { "refused" };
        let labels =
            vec![("request", (*request).to_owned()), ("decision", decision.to_owned()), ("rule", rule.to_string())];
        (labels, *count)
    };
    let help = "Decisions of the policy by request and clause since the start";
    counters("policy_decisions", help, report.decisions.iter().map(of_clause).collect());
    let help = "Connections and flows of unmodified programs that have got rings, since the start";
    registry.register("rings_made", help, ConstCounter::new(report.rings_made));

    let help = "Time from the wake-up of a relay of a virtual machine until it has delivered a bell";
    let directions = [("to-machine", BellDirection::ToPort), ("from-machine", BellDirection::FromPort)];
    let bells = directions.map(|(name, direction)| (name, relays.buckets(direction)));
    registry.register_with_unit("relay_bell", help, Unit::Seconds, BellHistograms(bells));

    let mut text = String::new();
    encode(&mut text, &registry)?;
    Ok(text)
}

/// Histograms that were counted elsewhere, by direction.
#[derive(Debug)]
struct BellHistograms([(&'static str, BellBuckets); 2]);

impl EncodeMetric for BellHistograms {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> Result<(), fmt::Error> {
        for (direction, counted) in &self.0 {
            // The encoder adds the buckets up, and spells the largest number as infinity.
            let buckets = counted.buckets.map(|(end, count)| (end.min(f64::MAX), count));
            let labels = [("direction", *direction)];
            encoder.encode_family(&labels)?.encode_histogram::<NoLabelSet>(
                counted.sum,
                counted.count(),
                &buckets,
                None,
            )?;
        }
        Ok(())
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Histogram
    }
}

fn gauge(values: Vec<(Labels, u64)>) -> Family<Labels, Gauge> {
    let family = Family::<Labels, Gauge>::default();
    for (labels, value) in values {
        family.get_or_create(&labels).set(i64::try_from(value).unwrap_or(i64::MAX));
    }
    family
}

fn counter(values: Vec<(Labels, u64)>) -> Family<Labels, Counter> {
    let family = Family::<Labels, Counter>::default();
    for (labels, value) in values {
        family.get_or_create(&labels).inc_by(value);
    }
    family
}

/// The stable code of a refusal, such as `name-taken`.
fn refusal_code(code: Refusal) -> String {
    kebab(&format!("{code:?}"))
}

fn kebab(name: &str) -> String {
    let mut kebab = String::new();
    for letter in name.chars() {
        if letter.is_ascii_uppercase() && !kebab.is_empty() {
            kebab.push('-');
        }
        kebab.push(letter.to_ascii_lowercase());
    }
    kebab
}
