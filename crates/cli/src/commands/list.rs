//! `partywall list`: the broker's domains, services and channels.

mod cluster;

use std::time::{SystemTime, UNIX_EPOCH};

use partywall::{ChannelRow, Directions, Domain, DomainRow, Error, MachineId, Refusal, ServiceRow};
use partywall_terminal::table;
use serde::Serialize;

use crate::args::{Global, exit_table};
use crate::exit::{Code, CommandFailure, Context};
use crate::output;
use crate::{human, session};

const AFTER: &str = "\
The list shows all entries that the policy lets this domain see. `partywall stat` shows the traffic of channels.

Examples:
  partywall list
  partywall list services
  partywall list --cluster
  partywall list channels --json | jq -r '.channels[].channel'";

/// Show domains, services and channels
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER, after_long_help = exit_table(AFTER))]
pub(crate) struct Args {
    /// The subject of the list
    #[arg(value_enum, default_value = "all")]
    what: ListSubject,

    /// Show the domains and services of all hosts of the cluster, as this host's gateway knows them; GATEWAY: the gateway's domain [default: gateway]
    #[arg(long, value_name = "GATEWAY", num_args = 0..=1, require_equals = true, default_missing_value = "gateway")]
    cluster: Option<String>,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum ListSubject {
    /// All of the following
    All,
    /// Domains that have joined
    Domains,
    /// Services that accept connections
    Services,
    /// Open channels
    Channels,
}

/// The answer; what was not asked for is absent.
#[derive(Debug, Default, Serialize)]
struct Listing {
    #[serde(skip_serializing_if = "Option::is_none")]
    domains: Option<Vec<DomainLine>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    services: Option<Vec<ServiceLine>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    channels: Option<Vec<ChannelLine>>,
}

#[derive(Debug, Serialize)]
struct DomainLine {
    name: String,
    id: u32,
    epoch: u64,
    /// The number of its user on the host.
    uid: Option<u32>,
    /// The number of its virtual machine.
    machine: Option<MachineId>,
    pid: u32,
    sessions: u32,
    channels: u32,
}

#[derive(Debug, Serialize)]
struct ServiceLine {
    service: String,
    domain: String,
    kind: String,
    accepted: u64,
    waiting: u16,
}

/// The broker's description of a channel.
#[derive(Debug, Serialize)]
pub(crate) struct ChannelLine {
    pub(crate) channel: u64,
    pub(crate) from: String,
    pub(crate) to: String,
    pub(crate) service: String,
    pub(crate) kind: String,
    #[serde(serialize_with = "in_words")]
    pub(crate) directions: Directions,
    pub(crate) accepted: bool,
    pub(crate) since_s: u64,
}

pub(crate) fn run(global: &Global, args: &Args) -> Result<(), CommandFailure> {
    let domain = session::join(global)?;
    if let Some(gateway) = &args.cluster {
        let listing = cluster::ask(&domain, gateway).map_err(|error| no_cluster(error, gateway))?;
        return if args.json { output::print_json(&listing) } else { output::print(listing.to_text()) };
    }
    let listing = ask(&domain, args.what).context("cannot list")?;
    if args.json { output::print_json(&listing) } else { output::print(listing.to_text()) }
}

/// Why the gateway gives no list.
fn no_cluster(error: Error, gateway: &str) -> CommandFailure {
    let failure = match error {
        Error::Refused { code: Refusal::NoSuchDomain | Refusal::NoSuchService, .. } => {
            let message = format!("no gateway is connected to this broker as {gateway}");
            let hint = "start `partywall-gateway` on this host (docs/cluster.md), or name its domain by --cluster=NAME";
            CommandFailure::new(Code::Refused, message).hint(hint)
        }
        error => error.into(),
    };
    failure.context("cannot list the cluster")
}

fn ask(domain: &Domain, what: ListSubject) -> partywall::Result<Listing> {
    let wanted = |one| what == ListSubject::All || what == one;
    let mut listing = Listing::default();
    if wanted(ListSubject::Domains) {
        // Ourselves would only puzzle: this session ends with the command.
        let others = domain.domains()?.into_iter().filter(|row| row.id != domain.id() || row.sessions > 1);
        listing.domains = Some(others.map(DomainLine::from).collect());
    }
    if wanted(ListSubject::Services) {
        listing.services = Some(domain.services()?.into_iter().map(ServiceLine::from).collect());
    }
    if wanted(ListSubject::Channels) {
        listing.channels = Some(domain.channels()?.into_iter().map(ChannelLine::from).collect());
    }
    Ok(listing)
}

impl From<DomainRow> for DomainLine {
    fn from(row: DomainRow) -> Self {
        let DomainRow { id, epoch, sessions, channels, user, pid, name } = row;
        Self { name, id, epoch, uid: user.uid(), machine: user.origin().machine(), pid, sessions, channels }
    }
}

impl DomainLine {
    /// The user that it counts as, for people: the number of a user of the host, or the machine that it is in.
    fn user(&self) -> String {
        match (self.machine, self.uid) {
            (Some(machine), _) => format!("machine {machine}"),
            (None, uid) => uid.map_or_else(String::new, |uid| uid.to_string()),
        }
    }
}

impl From<ServiceRow> for ServiceLine {
    fn from(row: ServiceRow) -> Self {
        let ServiceRow { kind, accepted, waiting, name, domain_name, .. } = row;
        Self { service: name, domain: domain_name, kind: kind.to_string(), accepted, waiting }
    }
}

impl From<ChannelRow> for ChannelLine {
    fn from(row: ChannelRow) -> Self {
        let ChannelRow { channel, kind, directions, accepted, since_s, from_name, to_name, service, .. } = row;
        Self { channel, from: from_name, to: to_name, service, kind: kind.to_string(), directions, accepted, since_s }
    }
}

/// `both`, `forward` or `reverse`, for programs.
fn in_words<S: serde::Serializer>(directions: &Directions, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(directions)
}

/// The directions of a channel, seen from the connecting side.
pub(crate) fn arrow(directions: Directions) -> &'static str {
    match (directions.contains(Directions::FORWARD), directions.contains(Directions::REVERSE)) {
        (true, true) => "<->",
        (true, false) => "->",
        (false, _) => "<-",
    }
}

/// How long ago that was.
pub(crate) fn since(since_s: u64) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    human::age(now.saturating_sub(since_s))
}

impl Listing {
    fn to_text(&self) -> String {
        let mut parts = Vec::new();
        if let Some(domains) = &self.domains {
            let mut t = table(&["DOMAIN", ">ID", ">EPOCH", ">USER", ">PID", ">SESSIONS", ">CHANNELS"]);
            for d in domains {
                t.add_row([
                    d.name.clone(),
                    d.id.to_string(),
                    d.epoch.to_string(),
                    d.user(),
                    d.pid.to_string(),
                    d.sessions.to_string(),
                    d.channels.to_string(),
                ]);
            }
            parts.push(or_none(&t, domains.is_empty(), "no other domain has joined"));
        }
        if let Some(services) = &self.services {
            let mut t = table(&["SERVICE", "KIND", ">ACCEPTED", ">WAITING"]);
            for s in services {
                let name = format!("{}:{}", s.domain, s.service);
                t.add_row([name, s.kind.clone(), s.accepted.to_string(), s.waiting.to_string()]);
            }
            parts.push(or_none(&t, services.is_empty(), "no service is offered"));
        }
        if let Some(channels) = &self.channels {
            let mut t = table(&[">CHANNEL", "FROM", "", "TO", "KIND", ">SINCE"]);
            for c in channels {
                let to = format!("{}:{}", c.to, c.service);
                t.add_row([
                    c.channel.to_string(),
                    c.from.clone(),
                    arrow(c.directions).into(),
                    to,
                    c.kind.clone(),
                    since(c.since_s),
                ]);
            }
            parts.push(or_none(&t, channels.is_empty(), "no channel is open"));
        }
        parts.join("\n\n")
    }
}

fn or_none(table: &partywall_terminal::Table, empty: bool, none: &str) -> String {
    if empty { none.into() } else { table.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use partywall::User;

    #[test]
    fn only_requested_tables_are_shown() {
        let nothing = Listing { services: Some(vec![]), ..Listing::default() };
        assert_eq!(nothing.to_text(), "no service is offered");
        assert_eq!(serde_json::to_string(&nothing).unwrap(), r#"{"services":[]}"#);
    }

    #[test]
    fn user_of_a_machine_is_shown_as_its_machine() {
        let row = |user| DomainRow { id: 1, epoch: 1, sessions: 1, channels: 0, user, pid: 7, name: "a.web".into() };
        let machine = User::Machine(MachineId::MIN);
        let listing =
            Listing { domains: Some(vec![row(machine).into(), row(User::Host(33)).into()]), ..Listing::default() };
        let text = listing.to_text();
        assert!(text.contains("machine 1") && text.contains("33"), "{text}");
        assert_eq!(DomainLine::from(row(machine)).uid, None, "it is no user of the host");
    }

    #[test]
    fn channels_show_their_direction() {
        let row = ChannelRow {
            channel: 7,
            from: 1,
            to: 2,
            kind: partywall::Kind::Stream,
            directions: Directions::FORWARD,
            accepted: true,
            since_s: 0,
            from_name: "shop".into(),
            to_name: "web".into(),
            service: "echo".into(),
        };
        let text = Listing { channels: Some(vec![row.into()]), ..Listing::default() }.to_text();
        let line: Vec<&str> = text.lines().nth(1).unwrap().split_whitespace().collect();
        assert_eq!(line[..5], ["7", "shop", "->", "web:echo", "stream"]);
    }
}
