//! `partywall policy test`: what the broker's policy would decide, and which clause of it.

use std::path::PathBuf;

use partywall::{Domain, PolicyDecision, PolicyRequest, PolicyUser};
use partywall_terminal::table;
use serde::Serialize;

use crate::args::{Global, Target, exit_table, parse_name, parse_target};
use crate::exit::{Code, CommandFailure, Context};
use crate::output;
use crate::program::worker;
use crate::session;

const AFTER: &str = "\
The broker answers with the deciding clause and its place in the policy file. The command changes nothing, and \
neither domain needs to exist. Only administrators may ask about other users.

Examples:
  partywall policy test --from web                    may this user join as web?
  partywall policy test --from web --user www-data    may www-data?
  partywall policy test --from web --to db:in --user www-data
  partywall policy test --from web --to db:in --to-host beta        db of the host beta: rules with to_host
  partywall policy test --from web --from-host beta --to db:in      web of the host beta: rules with from_host
  partywall policy test --sockets --from nginx-1 --to app:tcp-8000 --user www-data --to-user app
  partywall policy test --program /usr/sbin/nginx     does [programs] let it move?
  partywall policy test --from web --to db:in --json";

/// Report whether the policy allows a request, and the clause that decides
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER, after_long_help = exit_table(AFTER))]
pub(crate) struct Args {
    /// Domain to join as
    #[arg(long, value_name = "DOMAIN", value_parser = parse_name, required_unless_present = "program", add = clap_complete::ArgValueCompleter::new(crate::complete::domains))]
    from: Option<String>,

    /// Service to connect to from that domain
    #[arg(long, value_name = "DOMAIN:SERVICE", requires = "from", value_parser = parse_service, add = clap_complete::ArgValueCompleter::new(crate::complete::services))]
    to: Option<Target>,

    /// Ask about a connection to the domain on this other host of the cluster
    #[arg(long, value_name = "HOST", requires = "to", conflicts_with = "sockets", value_parser = parse_name)]
    to_host: Option<String>,

    /// Ask about a connection that a domain of this other host makes to this one; only for administrators
    #[arg(long, value_name = "HOST", requires = "to", conflicts_with_all = ["sockets", "to_host", "user"], value_parser = parse_name)]
    from_host: Option<String>,

    /// Ask about this user, by name or number [default: the caller]
    #[arg(long, value_name = "USER", requires = "from")]
    user: Option<String>,

    /// Ask about a connection of unmodified programs, whose service is tcp-PORT
    #[arg(long, requires = "to")]
    sockets: bool,

    /// User of the program that accepts the connection [default: the same user]
    #[arg(long, value_name = "USER", requires = "sockets")]
    to_user: Option<String>,

    /// Ask whether connections of this unmodified program may move to a ring: a name, or the absolute path of an executable
    #[arg(long, value_name = "PROGRAM", value_hint = clap::ValueHint::ExecutablePath)]
    program: Option<String>,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn parse_service(text: &str) -> Result<Target, String> {
    parse_target(text, None)
}

/// One request of which the broker was asked.
#[derive(Debug, Serialize)]
struct PolicyStep {
    request: String,
    allowed: bool,
    /// The clause that decides, or the default.
    clause: String,
    file: Option<PathBuf>,
    line: Option<u32>,
}

#[derive(Debug, Serialize)]
struct PolicyReport {
    allowed: bool,
    decisions: Vec<PolicyStep>,
}

pub(crate) fn run(global: &Global, args: &Args) -> Result<(), CommandFailure> {
    let (user, to_user) = users(args)?;
    let domain = match &args.from {
        Some(from) => session::join_or_as(global, from)?,
        None => session::join(global)?,
    };
    let mut report = PolicyReport { allowed: true, decisions: Vec::new() };
    let mut hint = None;
    for (user, joins, request) in requests(args, user, to_user) {
        // After a refusal the remaining questions have no meaning.
        if report.allowed {
            let decision = ask(&domain, user, joins, request)?;
            report.allowed = decision.allowed;
            if !decision.allowed {
                hint = Some(rule(args, user, joins, request));
            }
            report.decisions.push(step(joins, request, user, decision));
        }
    }
    if args.json { output::print_json(&report) } else { output::print(report.to_text()) }?;
    match hint {
        None => Ok(()),
        Some(hint) => Err(CommandFailure::new(Code::Refused, "the policy refuses this").hint(hint)),
    }
}

fn ask(
    domain: &Domain,
    user: PolicyUser,
    joins: &str,
    request: PolicyRequest<'_>,
) -> Result<PolicyDecision, CommandFailure> {
    domain.test_policy(user, joins, request).context("cannot ask what the policy would decide")
}

/// The requests that must be allowed, in order: the user, the domain, and the request.
fn requests(args: &Args, user: PolicyUser, to_user: PolicyUser) -> Vec<(PolicyUser, &str, PolicyRequest<'_>)> {
    let mut all = Vec::new();
    if let Some(path) = args.program.as_deref() {
        all.push((PolicyUser::Own, "", PolicyRequest::Program { path }));
    }
    let Some(from) = args.from.as_deref() else { return all };
    if let (Some(host), Some(Target { domain: to, service })) = (args.from_host.as_deref(), &args.to) {
        all.push((PolicyUser::Own, from, PolicyRequest::ConnectFrom { host, to, service }));
        return all;
    }
    all.push((user, from, PolicyRequest::Join));
    if let Some(Target { domain: to, service }) = &args.to {
        let request = if args.sockets {
            all.push((to_user, to, PolicyRequest::Join));
            PolicyRequest::Sockets { to, service, user: to_user }
        } else if let Some(host) = args.to_host.as_deref() {
            PolicyRequest::ConnectTo { to, host, service }
        } else {
            PolicyRequest::Connect { to, service }
        };
        all.push((user, from, request));
    }
    all
}

/// The rule that would allow what was refused.
fn rule(args: &Args, user: PolicyUser, joins: &str, request: PolicyRequest<'_>) -> String {
    match (request, &args.to) {
        (PolicyRequest::Connect { .. } | PolicyRequest::Sockets { .. }, Some(to)) => {
            session::rule_to_connect(joins, to)
        }
        (PolicyRequest::ConnectTo { host, .. }, Some(to)) => session::rule_to_host(joins, to, host),
        (PolicyRequest::ConnectFrom { host, .. }, Some(to)) => session::rule_from_host(joins, host, to),
        (PolicyRequest::Program { path }, _) => {
            format!(
                "if a pattern of `deny` in [programs] matches it, narrow or remove that pattern; otherwise add to `allow`: \"{path}\""
            )
        }
        _ => session::rule_to_join(joins, uid(user)),
    }
}

fn uid(user: PolicyUser) -> u32 {
    match user {
        PolicyUser::Own => rustix::process::geteuid().as_raw(),
        PolicyUser::Host { uid, .. } => uid,
    }
}

fn step(joins: &str, request: PolicyRequest<'_>, user: PolicyUser, decision: PolicyDecision) -> PolicyStep {
    let request = match request {
        PolicyRequest::Join => format!("user {} joins as {joins}", uid(user)),
        PolicyRequest::Connect { to, service } => format!("{joins} connects to {to}:{service}"),
        PolicyRequest::ConnectTo { to, host, service } => {
            format!("{joins} connects to {to}:{service} on the host {host}")
        }
        PolicyRequest::ConnectFrom { host, to, service } => {
            format!("{joins} of the host {host} connects to {to}:{service}")
        }
        PolicyRequest::Sockets { to, service, .. } => format!("sockets of {joins} and {to}:{service} share a ring"),
        PolicyRequest::Program { path } => format!("connections of {path} move"),
    };
    let PolicyDecision { allowed, grounds: clause, file, line } = decision;
    PolicyStep { request, allowed, clause, file, line }
}

/// The user that the question is about, and the user of the other side.
fn users(args: &Args) -> Result<(PolicyUser, PolicyUser), CommandFailure> {
    let named = |name: &Option<String>| name.as_deref().map(|name| user(name, worker::ids(name))).transpose();
    let own = named(&args.user)?.unwrap_or(PolicyUser::Own);
    Ok((own, named(&args.to_user)?.unwrap_or(own)))
}

/// The user of a name or number, given the numbers that the system has for it.
fn user(name: &str, found: Option<(u32, u32)>) -> Result<PolicyUser, CommandFailure> {
    match (found, name.parse()) {
        // A user may ask about itself, also by its own name.
        (Some((uid, _)), _) | (None, Ok(uid)) if uid == rustix::process::geteuid().as_raw() => Ok(PolicyUser::Own),
        (Some((uid, gid)), _) => Ok(PolicyUser::Host { uid, gid: Some(gid) }),
        (None, Ok(uid)) => Ok(PolicyUser::Host { uid, gid: None }),
        (None, Err(_)) => {
            Err(CommandFailure::usage(format!("there is no user {name} on this host")).hint("write the user's number"))
        }
    }
}

impl PolicyReport {
    fn to_text(&self) -> String {
        let mut rows = table(&["REQUEST", "DECISION", "CLAUSE", "PLACE"]);
        for PolicyStep { request, allowed, clause, file, line } in &self.decisions {
            let decision = if *allowed { "allowed" } else { "refused" };
            let place = match (file, line) {
                (Some(file), Some(line)) => format!("{}:{line}", file.display()),
                (Some(file), None) => file.display().to_string(),
                (None, Some(line)) => format!("line {line}"),
                // There is no policy file, or this program runs in a container or a virtual machine, and is not told.
                (None, None) => "-".into(),
            };
            rows.add_row([request.as_str(), decision, clause, &place]);
        }
        rows.to_string()
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    fn args(line: &str) -> Result<Args, clap::Error> {
        Line::try_parse_from(std::iter::once("test").chain(line.split_whitespace())).map(|line| line.args)
    }

    #[test]
    fn requests_are_joins_of_both_sides_and_the_connection() {
        let (web, db) = (PolicyUser::Host { uid: 33, gid: None }, PolicyUser::Host { uid: 7, gid: None });
        let asked = |line: &str| requests(&args(line).unwrap(), web, db).len();
        assert_eq!(asked("--from web"), 1);
        assert_eq!(asked("--from web --to db:in"), 2);
        let sockets = args("--from web --to db:tcp-1 --sockets --to-user 7").unwrap();
        let all = requests(&sockets, web, db);
        assert_eq!(all[1], (db, "db", PolicyRequest::Join));
        assert_eq!(all[2], (web, "web", PolicyRequest::Sockets { to: "db", service: "tcp-1", user: db }));
        assert_eq!(
            requests(&args("--program nginx").unwrap(), web, db),
            [(PolicyUser::Own, "", PolicyRequest::Program { path: "nginx" })]
        );
        assert_eq!(asked("--program nginx --from web --to db:in"), 3);
        let far = args("--from web --to db:in --to-host beta").unwrap();
        let connect = PolicyRequest::ConnectTo { to: "db", host: "beta", service: "in" };
        assert_eq!(requests(&far, web, db), [(web, "web", PolicyRequest::Join), (web, "web", connect)]);
        let far = args("--from web --from-host beta --to db:in").unwrap();
        let connect = PolicyRequest::ConnectFrom { host: "beta", to: "db", service: "in" };
        assert_eq!(requests(&far, web, db), [(PolicyUser::Own, "web", connect)], "it joins there, and not here");
        for wrong in [
            "",
            "--to db:in",
            "--program nginx --to db:in",
            "--from web --sockets",
            "--from web --to db:in --to-user 7",
            "--from web --to db",
            "--from web --to-host beta",
            "--from web --from-host beta",
            "--from web --to db:in --from-host beta --to-host gamma",
            "--from web --to db:in --from-host beta --user 7",
            "--from web --to db:tcp-1 --sockets --to-host beta",
            "--from web --to db:in --to-host no/name",
        ] {
            assert!(args(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn user_is_found_by_name_or_is_a_number() {
        assert_eq!(user("www-data", Some((33, 34))).unwrap(), PolicyUser::Host { uid: 33, gid: Some(34) });
        assert_eq!(user("5000", None).unwrap(), PolicyUser::Host { uid: 5000, gid: None });
        let own = rustix::process::geteuid().as_raw();
        assert_eq!(user(&own.to_string(), None).unwrap(), PolicyUser::Own);
        assert_eq!(user("me", Some((own, 1))).unwrap(), PolicyUser::Own);
        assert!(user("nobody-by-this-name", None).unwrap_err().to_string().contains("no user"));
    }

    #[test]
    fn refusal_is_shown_with_clause_and_place() {
        let decision = |line| PolicyDecision {
            allowed: line != 0,
            grounds: "[[join]] rule 1".into(),
            file: Some("/etc/p.toml".into()),
            line: (line > 0).then_some(line),
        };
        let user = PolicyUser::Host { uid: 33, gid: None };
        let decisions = [4, 0].map(|line| step("web", PolicyRequest::Join, user, decision(line)));
        let text = PolicyReport { allowed: false, decisions: decisions.into() }.to_text();
        for words in ["user 33 joins as web", "allowed", "refused", "[[join]] rule 1", "/etc/p.toml:4"] {
            assert!(text.contains(words), "{words} is missing:\n{text}");
        }
    }
}
