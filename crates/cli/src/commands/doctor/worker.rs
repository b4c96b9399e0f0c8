//! Whether the user as whom a server's workers run may join the broker.

use std::ffi::OsStr;

use partywall::{PolicyDecision, PolicyRequest, PolicyUser};

use super::check::Check;
use crate::args::Global;
use crate::exit::Failure;
use crate::program::{Program, worker};
use crate::session;

const AREA: &str = "program";

pub(super) fn check(global: &Global, command: &OsStr) -> Result<Check, Failure> {
    let means = "connections of a process whose user may not join stay on TCP";
    let check = |found: String| Check::ok(AREA, "user", means, found);
    if !rustix::process::geteuid().is_root() {
        return Ok(check("the same as ours; see \"reachable\" below".into()));
    }
    let program = Program::find(command)?;
    let Some(worker) = worker::of(&program.path) else {
        let found = "root; if it gives root's rights up for those of another user, the policy must let that user join";
        return Ok(check(found.into()));
    };
    let user = &worker.user;
    let source = worker.file.as_ref().map_or_else(|| "by default".into(), |file| format!("by {}", file.display()));
    let found = format!("root, and workers run as {user} ({source})");
    let passwd = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
    let Some((uid, gid)) = worker::ids(&passwd, user) else {
        return Ok(check(format!("{found}, a user that /etc/passwd does not have")).warn(allow(user)));
    };
    let stem = program.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let name = match global.domain.as_deref().filter(|name| !name.is_empty()) {
        Some(name) => name.to_owned(),
        None => format!("{stem}-{}", std::process::id()),
    };
    Ok(match ask(global, uid, gid, &name) {
        Ok(decision) if decision.allowed => {
            check(format!("{found}, whom the policy lets join as {name} by {}", decision.grounds))
        }
        Ok(decision) => check(format!("{found}, whom the policy does not let join as {name} ({})", decision.grounds))
            .warn(session::rule_to_join(&name, uid).replace('\n', "\n    ")),
        Err(failure) => {
            let (text, unknown) = (failure.to_string(), "whether they may join is not known");
            let why = text.lines().next().unwrap_or_default();
            check(format!("{found}; {unknown}: {why}")).warn(allow(user))
        }
    })
}

fn allow(user: &str) -> String {
    format!("make sure that the broker's policy lets {user} join (`partywalld --print-sample-policy`)")
}

/// Asks the broker whether another user may join.
fn ask(global: &Global, uid: u32, gid: u32, name: &str) -> Result<PolicyDecision, Failure> {
    let user = PolicyUser::Host { uid, gid: Some(gid) };
    Ok(session::join(global)?.test_policy(user, name, PolicyRequest::Join)?)
}
