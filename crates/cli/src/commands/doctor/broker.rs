//! The broker: whether one answers, and whether it speaks our protocol.

use std::io::ErrorKind;
use std::process::{Command, Stdio};

use partywall::{Domain, Error, Refusal};
use partywall_vm::inside;

use super::check::Check;
use crate::admission;
use crate::args::Global;
use crate::program::Program;
use crate::{session, siblings, words};

const AREA: &str = "broker";

pub(super) fn checks(global: &Global) -> Vec<Check> {
    // In a machine that has an agent's port the broker is the host's.
    let name = session::chosen_name(global).map_or_else(|| format!("doctor-{}", std::process::id()), str::to_owned);
    // A machine may do without a broker until a program needs one.
    let answers = answers(global, &name, Check::warn);
    if inside::port().is_ok() { vec![answers] } else { vec![daemon(), answers] }
}

fn daemon() -> Check {
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
pub(super) fn when_connections_move(domain: Option<Domain>) -> Option<Check> {
    let moves = domain?.move_rules().ok()?;
    let means = "programs with many short connections are several times slower than on TCP alone";
    let clauses = words::effective(&moves.clauses);
    let check = Check::ok(AREA, "connections move", means, words::join(&clauses));
    Some(match words::moves_all_at_once(&clauses) {
        false => check,
        true => check.warn("let short ones stay on TCP: `partywall moves --after-calls 16 --after-bytes 64K`"),
    })
}

/// Whether a broker lets the program join, without which its connections stay on TCP.
pub(super) fn admits(global: &Global, program: &Program) -> Check {
    answers(global, &program.domain(global), Check::fail)
}

/// Whether a broker lets this user join as `name`. `unless` judges the finding if there is none or it refuses.
fn answers(global: &Global, name: &str, unless: fn(Check, String) -> Check) -> Check {
    let means = "without one, commands that join a domain fail, and programs under `partywall run` stay on TCP";
    let path = session::broker_path(global);
    let at = path.display();
    let check = |found: String| Check::ok(AREA, "reachable", means, found);
    match session::try_join(global, name) {
        Ok(domain) => check(format!(
            "answers on {at}, speaks protocol version {}; we joined as {}",
            partywall_protocol::wire::VERSION,
            domain.name()
        )),
        Err(Error::BrokerAbsent { source, .. }) if source.kind() == ErrorKind::PermissionDenied => {
            unless(check(admission::refusal(&path)), admission::remedy().to_owned())
        }
        Err(Error::BrokerAbsent { source, .. }) => {
            let remedy = match inside::port() {
                Ok(_) => "start `partywall agent`, and have this machine attached on its host".to_owned(),
                Err(_) => format!("start one: `partywalld --socket {at}`, or as a service"),
            };
            unless(check(format!("none on {at} ({source})")), remedy)
        }
        Err(Error::Refused { code: Refusal::Version, reason }) => {
            check(format!("answers on {at}, but speaks another version: {reason}"))
                .fail("install partywall and partywalld from one release, and restart it")
        }
        Err(error) if session::is_denied(&error) => unless(
            check(format!("answers on {at}, and does not let this user join as {name}: {error}")),
            session::remedy_to_join(global, name),
        ),
        Err(Error::Refused { reason, .. }) => unless(
            check(format!("answers on {at}, and refuses a session as {name}: {reason}")),
            "see the broker's log for the cause; `partywall list` shows the names in use".to_owned(),
        ),
        Err(error) => {
            check(format!("{at}: {error}")).fail("restart the broker; what answers there may be another program")
        }
    }
}
