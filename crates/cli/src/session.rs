//! Joins the broker as the command line asks.

use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use partywall::{Domain, Error, Listener, Options, PeerInfo, Refusal, Stream};

use crate::args::{Global, Target};
use crate::exit::{Code, CommandFailure, Context};

/// Joins under `--domain`, or under a unique name.
pub(crate) fn join(global: &Global) -> Result<Domain, CommandFailure> {
    join_as(global, &name(global))
}

/// Joins under `name`. If the policy denies that, the failure names the rule that would allow it.
pub(crate) fn join_as(global: &Global, name: &str) -> Result<Domain, CommandFailure> {
    try_join(global, name).map_err(|error| explain(global, error, name))
}

/// As [`join`]. Where no rule of the policy lets us join, joins under `other`, which may be all that it allows.
pub(crate) fn join_or_as(global: &Global, other: &str) -> Result<Domain, CommandFailure> {
    match try_join(global, &name(global)) {
        Err(error) if is_denied(&error) => join_as(global, other),
        joined => Ok(joined?),
    }
}

/// A failure to join, with the rule that would allow it.
fn explain(global: &Global, error: Error, name: &str) -> CommandFailure {
    let denied = is_denied(&error);
    let failure = CommandFailure::from(error);
    if denied { failure.hint(remedy_to_join(global, name)) } else { failure }
}

/// What this user can do if the policy does not let it join under `name`.
pub(crate) fn remedy_to_join(global: &Global, name: &str) -> String {
    let rule = rule_to_join(name, rustix::process::geteuid().as_raw());
    match own_broker_beside(&broker_path(global), own_socket(), Path::exists) {
        None => rule,
        Some(own) => format!(
            "this was the broker of the host; your own is at {own}: name that with --broker or PARTYWALL_BROKER\n  {rule}",
            own = own.display()
        ),
    }
}

/// The socket of this user's own broker, by default.
fn own_socket() -> Option<PathBuf> {
    let directory = std::env::var_os("XDG_RUNTIME_DIR").filter(|directory| !directory.is_empty())?;
    Some(PathBuf::from(directory).join("partywall/broker.sock"))
}

/// The user's own broker, if it is there and another was asked because the host's comes first.
fn own_broker_beside(asked: &Path, own: Option<PathBuf>, exists: impl Fn(&Path) -> bool) -> Option<PathBuf> {
    own.filter(|own| asked == Path::new(HOST_SOCKET) && asked != own && exists(own))
}

/// The places where a broker is searched for without `--broker`, for people.
pub(crate) fn search_order() -> String {
    let own =
        own_socket().map_or_else(|| "$XDG_RUNTIME_DIR/partywall/broker.sock".into(), |own| own.display().to_string());
    format!("without these, {HOST_SOCKET} is tried if it exists, else {own}")
}

/// Where the broker of the host serves.
const HOST_SOCKET: &str = "/run/partywall/broker.sock";

pub(crate) fn is_denied(error: &Error) -> bool {
    matches!(error, Error::Refused { code: Refusal::Denied, .. })
}

/// The rule that lets a user join under a name.
pub(crate) fn rule_to_join(name: &str, user: u32) -> String {
    // The default name of a program ends in the number of its process.
    let of_process = name.rsplit_once('-').filter(|(_, number)| number.bytes().all(|byte| byte.is_ascii_digit()));
    let domain = of_process.map_or_else(|| name.to_owned(), |(program, _)| format!("{program}-*"));
    format!("{ADD_RULE}\n    [[join]]\n    domain = \"{domain}\"\n    users = [{user}]")
}

/// The rule that lets a domain connect to a service.
pub(crate) fn rule_to_connect(from: &str, target: &Target) -> String {
    let Target { domain, service } = target;
    format!("{ADD_RULE}\n    [[connect]]\n    from = \"{from}\"\n    to = \"{domain}\"\n    service = \"{service}\"")
}

/// The rule that lets a domain of this host connect to a service on another.
pub(crate) fn rule_to_host(from: &str, target: &Target, host: &str) -> String {
    format!("{}\n    to_host = \"{host}\"", rule_to_connect(from, target))
}

/// The rule that lets a domain of another host connect to a service of this one.
pub(crate) fn rule_from_host(from: &str, host: &str, target: &Target) -> String {
    format!("{}\n    from_host = \"{host}\"", rule_to_connect(from, target))
}

/// The rule that lets a domain connect to a service, where `reason` says why the broker of this host or another has denied it (protocol H4.1, H5).
fn rule_against(reason: &str, from: &str, target: &Target) -> String {
    if let Some((_, host)) = reason.rsplit_once(" on the host ") {
        return rule_to_host(from, target, host);
    }
    match reason.split_once(" of the host ").and_then(|(_, rest)| rest.split(' ').next()) {
        Some(host) => rule_from_host(from, host, target).replacen(
            "the broker's policy",
            "the policy of the other host's broker",
            1,
        ),
        None => rule_to_connect(from, target),
    }
}

const ADD_RULE: &str =
    "to allow it, add a rule to the broker's policy (`partywalld --print-sample-policy`) and reload it:";

/// Joins under `name`.
pub(crate) fn try_join(global: &Global, name: &str) -> partywall::Result<Domain> {
    let mut builder = Domain::builder().name(name);
    if let Some(path) = broker(global) {
        builder = builder.broker(path);
    }
    let domain = builder.join()?;
    tracing::info!("joined {} as {} (epoch {})", domain.broker_path().display(), domain.name(), domain.epoch());
    Ok(domain)
}

/// The value of `--broker` or its environment variable. An empty value counts as unset.
fn broker(global: &Global) -> Option<&PathBuf> {
    global.broker.as_ref().filter(|path| !path.as_os_str().is_empty())
}

/// Where the broker is looked for.
pub(crate) fn broker_path(global: &Global) -> PathBuf {
    broker(global).cloned().unwrap_or_else(partywall::default_broker_path)
}

/// The value of `--domain` or its environment variable, or else a free name.
fn name(global: &Global) -> String {
    chosen_name(global).map_or_else(default_name, str::to_owned)
}

/// The value of `--domain` or its environment variable. An empty value counts as unset.
pub(crate) fn chosen_name(global: &Global) -> Option<&str> {
    global.domain.as_deref().filter(|name| !name.is_empty())
}

/// `USER-PID`: readable, and free.
fn default_name() -> String {
    let user: String = ["USER", "LOGNAME"].iter().find_map(|key| std::env::var(key).ok()).unwrap_or_default();
    let user: String = user.chars().filter(|c| c.is_ascii_alphanumeric()).take(32).collect();
    match user.as_str() {
        "" => format!("uid{}-{}", rustix::process::getuid().as_raw(), std::process::id()),
        user => format!("{user}-{}", std::process::id()),
    }
}

/// Joins and connects; what is not there yet is waited for until `wait` has passed.
pub(crate) fn connect(
    global: &Global,
    target: &Target,
    options: &Options,
    wait: Option<Duration>,
) -> Result<(Domain, Stream), CommandFailure> {
    let name = name(global);
    let deadline = wait.and_then(|wait| Instant::now().checked_add(wait));
    let mut pause = Duration::from_millis(5);
    let mut joined = None;
    loop {
        match attempt(global, &name, &mut joined, target, options) {
            Ok(both) => return Ok(both),
            Err(error) if may_appear(&error) && wait.is_some() => {
                let left = deadline.map_or(Duration::MAX, |at| at.saturating_duration_since(Instant::now()));
                if left.is_zero() {
                    return Err(gave_up(error, target));
                }
                tracing::debug!("{target} is not there yet: {error}");
                std::thread::sleep(pause.min(left));
                pause = (pause * 2).min(Duration::from_millis(200));
            }
            Err(error) => {
                let rule = match (&error, &joined) {
                    (Error::Refused { code: Refusal::Denied, reason }, Some(domain)) => {
                        Some(rule_against(reason, domain.name(), target))
                    }
                    (Error::Refused { code: Refusal::Denied, .. }, None) => {
                        Some(rule_to_join(&name, rustix::process::geteuid().as_raw()))
                    }
                    _ => None,
                };
                let failure = CommandFailure::from(error).context(format_args!("cannot connect to {target}"));
                return Err(match rule {
                    Some(rule) => failure.hint(rule),
                    None => failure,
                });
            }
        }
    }
}

fn attempt(
    global: &Global,
    name: &str,
    joined: &mut Option<Domain>,
    target: &Target,
    options: &Options,
) -> partywall::Result<(Domain, Stream)> {
    let domain = match joined.take() {
        Some(domain) => domain,
        None => try_join(global, name)?,
    };
    let result = domain.connect_with(&target.to_string(), options);
    match result {
        Ok(stream) => Ok((domain, stream)),
        Err(error) => {
            // After the end of the broker, join again. A name that does not exist yet is requested again in the same session.
            if matches!(error, Error::Refused { .. }) {
                *joined = Some(domain);
            }
            Err(error)
        }
    }
}

fn may_appear(error: &Error) -> bool {
    match error {
        Error::BrokerAbsent { .. } => true,
        Error::Refused { code, .. } => {
            matches!(code, Refusal::NoSuchDomain | Refusal::NoSuchService | Refusal::BacklogFull)
        }
        _ => false,
    }
}

fn gave_up(error: Error, target: &Target) -> CommandFailure {
    match error {
        Error::BrokerAbsent { .. } => CommandFailure::from(error).context(format_args!("gave up waiting for {target}")),
        _ => CommandFailure::new(Code::TimedOut, format!("gave up waiting for {target}: {error}")),
    }
}

/// Prints where a service can be found, if a user is there to read it, or could not know the name otherwise.
pub(crate) fn announce(global: &Global, domain: &Domain, service: &str) {
    if chosen_name(global).is_none() || std::io::stderr().is_terminal() {
        let _ = writeln!(std::io::stderr(), "partywall: listening as {}:{service}", domain.name());
    } else {
        tracing::info!("listening as {}:{service}", domain.name());
    }
}

/// The next visitor. A failure with one visitor does not end a listener that goes on (`keep`).
pub(crate) fn accept(listener: &mut Listener, service: &str, keep: bool) -> Result<(Stream, PeerInfo), CommandFailure> {
    loop {
        match listener.accept() {
            Err(error @ (Error::Memory(_) | Error::System { .. })) if keep => {
                tracing::warn!("a visitor of {service} is lost: {error}");
                // The missing resource (memory, descriptors) is not available at once.
                std::thread::sleep(Duration::from_millis(100));
            }
            Ok((stream, peer)) => {
                tracing::info!("connection from {}", describe(&peer));
                return Ok((stream, peer));
            }
            Err(error) => return Err(error).context(format_args!("cannot accept on {service}")),
        }
    }
}

/// A peer, for logs: who it is, and what the broker says of its process.
fn describe(peer: &PeerInfo) -> String {
    let user = peer.user.map_or_else(|| "user ?".into(), |user| user.to_string());
    let pid = peer.pid.map_or_else(|| "?".into(), |pid| pid.to_string());
    format!("{} ({user}, pid {pid})", peer.name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rule_covers_all_processes_of_a_program() {
        assert!(rule_to_join("nginx-4242", 33).contains("domain = \"nginx-*\"\n    users = [33]"));
        assert!(rule_to_join("vm-web", 33).contains("domain = \"vm-web\""));
        let target = Target { domain: "b".into(), service: "tcp-80".into() };
        assert!(rule_to_connect("a", &target).ends_with("from = \"a\"\n    to = \"b\"\n    service = \"tcp-80\""));
        let here = rule_against("the policy does not let a connect to b:tcp-80 on the host beta", "a", &target);
        assert!(here.contains("the broker's policy") && here.ends_with("to_host = \"beta\""), "{here}");
        let there = rule_against("the policy does not let a of the host alpha connect to b:tcp-80", "a", &target);
        assert!(there.contains("other host's") && there.ends_with("from_host = \"alpha\""), "{there}");
        let local = rule_against("the policy does not let a connect to b:tcp-80", "a", &target);
        assert_eq!(local, rule_to_connect("a", &target));
    }

    #[test]
    fn own_broker_is_named_where_that_of_the_host_was_asked() {
        let own = || Some(PathBuf::from("/run/user/7/partywall/broker.sock"));
        let host = Path::new(HOST_SOCKET);
        assert_eq!(own_broker_beside(host, own(), |_| true), own());
        assert_eq!(own_broker_beside(host, own(), |_| false), None);
        assert_eq!(own_broker_beside(host, None, |_| true), None);
        for chosen in ["/tmp/b.sock", "/run/user/7/partywall/broker.sock"] {
            assert_eq!(own_broker_beside(Path::new(chosen), own(), |_| true), None, "{chosen} was named");
        }
    }

    #[test]
    fn default_name_is_valid_name() {
        let name = default_name();
        assert!(crate::args::parse_name(&name).is_ok(), "{name}");
        assert!(name.ends_with(&std::process::id().to_string()));
    }
}
