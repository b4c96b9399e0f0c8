//! The broker: whether one answers, and whether it speaks our protocol.

use std::io::ErrorKind;
use std::process::{Command, Stdio};

use partywall::{Error, Refusal};
use partywall_vm::inside;

use super::check::Check;
use crate::admission;
use crate::args::Global;
use crate::{session, siblings, words};

const AREA: &str = "broker";

pub(super) fn checks(global: &Global) -> Vec<Check> {
    // In a machine that has an agent's port the broker is the host's.
    if inside::port().is_ok() { vec![answers(global)] } else { vec![program(), answers(global)] }
}

fn program() -> Check {
    let means = "no broker can be started from here, and the demo needs one";
    let ours = env!("CARGO_PKG_VERSION");
    let check = |found: String| Check::ok(AREA, "partywalld", means, found);
    let path = match siblings::find("partywalld", "partywall-daemon") {
        Ok(path) => path,
        Err(failure) => return check("not found".into()).warn(failure.to_string().replace('\n', ";")),
    };
    let output = Command::new(&path).arg("--version").stdin(Stdio::null()).output();
    let version = match &output {
        Ok(output) if output.status.success() => {
            // More lines tell the commit and the protocol.
            String::from_utf8_lossy(&output.stdout).lines().next().unwrap_or_default().trim().to_owned()
        }
        Ok(output) => {
            return check(format!("{} --version: {}", path.display(), output.status)).warn("install it again");
        }
        Err(error) => return check(format!("{}: {error}", path.display())).warn("install it again"),
    };
    let check = check(format!("{version} at {}", path.display()));
    if version.ends_with(ours) {
        check
    } else {
        check.warn(format!("this is partywall {ours}: install both from one release"))
    }
}

/// When connections of unmodified programs move, by the broker's move rules; nothing if it cannot be asked, which [`answers`] reports.
pub(super) fn when_connections_move(global: &Global) -> Option<Check> {
    let moves = session::join(global).ok()?.move_rules().ok()?;
    let means = "programs with many short connections are several times slower than on TCP alone";
    let check = Check::ok(AREA, "connections move", means, moves.clauses.as_str());
    Some(match words::moves_all_at_once(&words::effective(&moves.clauses)) {
        false => check,
        true => check.warn("let short ones stay on TCP: `partywall moves --after-calls 16 --after-bytes 64K`"),
    })
}

pub(super) fn answers(global: &Global) -> Check {
    let means = "nothing but `doctor`, `demo`, `completions` and `man` works without one";
    let path = session::broker_path(global);
    let at = path.display();
    let check = |found: String| Check::ok(AREA, "reachable", means, found);
    let name =
        global.domain.clone().filter(|n| !n.is_empty()).unwrap_or_else(|| format!("doctor-{}", std::process::id()));
    match session::try_join(global, &name) {
        Ok(domain) => check(format!(
            "answers on {at}, speaks protocol version {}; we joined as {}",
            partywall_protocol::wire::VERSION,
            domain.name()
        )),
        Err(Error::BrokerAbsent { source, .. }) if source.kind() == ErrorKind::PermissionDenied => {
            check(admission::refusal(&path)).warn(admission::remedy())
        }
        Err(Error::BrokerAbsent { source, .. }) => {
            check(format!("none on {at} ({source})")).warn(match inside::port() {
                Ok(_) => "start `partywall agent`, and have this machine attached on its host".to_owned(),
                Err(_) => format!("start one: `partywalld --socket {at}`, or as a service"),
            })
        }
        Err(Error::Refused { code: Refusal::Version, reason }) => {
            check(format!("answers on {at}, but speaks another version: {reason}"))
                .fail("install partywall and partywalld from one release, and restart it")
        }
        Err(Error::Refused { reason, .. }) => {
            check(format!("answers on {at}, and lets us not join as {name}: {reason}"))
                .warn("say with --domain who you are, or change the broker's policy (see `partywalld --help`)")
        }
        Err(error) => {
            check(format!("{at}: {error}")).fail("restart the broker; what answers there may be another program")
        }
    }
}
