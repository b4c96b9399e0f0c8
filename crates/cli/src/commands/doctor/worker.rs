//! Whether the user as whom a server's workers run may join the broker.

use std::ffi::OsStr;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use super::check::Check;
use crate::args::Global;
use crate::exit::{Code, Failure};
use crate::program::{Program, worker};
use crate::session;

const AREA: &str = "program";

/// What a try to join as another user came to.
enum Tried {
    Joined,
    Denied(String),
    /// Nothing can be said, and why.
    Unknown(String),
}

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
    Ok(match try_as(global, uid, gid, &name) {
        Tried::Joined => check(format!("{found}, whom the policy lets join as {name}")),
        Tried::Denied(reason) => {
            check(format!("{found}: {reason}")).warn(session::rule_to_join(&name, uid).replace('\n', "\n    "))
        }
        Tried::Unknown(why) => check(format!("{found}; whether they may join is not known: {why}")).warn(allow(user)),
    })
}

fn allow(user: &str) -> String {
    format!("make sure that the broker's policy lets {user} join (`partywalld --print-sample-policy`)")
}

/// Joins as another user: this program again, with that user's rights alone.
fn try_as(global: &Global, uid: u32, gid: u32, name: &str) -> Tried {
    let program = match std::env::current_exe() {
        Ok(program) => program,
        Err(error) => return Tried::Unknown(error.to_string()),
    };
    let mut command = Command::new(&program);
    command.arg("--broker").arg(session::broker_path(global)).args(["--domain", name, "list", "domains"]);
    command.env_clear().uid(uid).gid(gid).current_dir("/");
    let output = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).output();
    match output {
        Ok(output) if output.status.success() => Tried::Joined,
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            let said = said.lines().next().unwrap_or_default().trim_start_matches("partywall: ").to_owned();
            match output.status.code() {
                Some(code) if code == Code::Refused as i32 => Tried::Denied(said),
                _ => Tried::Unknown(said),
            }
        }
        Err(error) => Tried::Unknown(format!("{} as that user: {error}", program.display())),
    }
}
