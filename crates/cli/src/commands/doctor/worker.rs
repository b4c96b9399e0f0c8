//! The check whether the user of a server's workers may join the broker.

use super::check::Check;
use crate::admission::{self, SocketAdmission};
use crate::args::Global;
use crate::program::Program;
use crate::program::worker::{self, Standing};
use crate::session;

const AREA: &str = "program";

pub(super) fn check(global: &Global, program: &Program) -> Check {
    let means = "connections of a process whose user may not join stay on TCP";
    let check = |found: String| Check::ok(AREA, "user", means, found);
    if !rustix::process::geteuid().is_root() {
        return check("the same as ours; see \"reachable\" below".into());
    }
    let Some(worker) = worker::of(&program.path) else {
        let socket = SocketAdmission::of(&session::broker_path(global)).filter(|socket| !socket.admits_all());
        let connect =
            socket.map_or_else(String::new, |socket| format!(", and the broker's socket ({socket}) let it connect"));
        let found = "root; if it gives root's rights up for those of another user, the policy must let that user join";
        return check(format!("{found}{connect}"));
    };
    let user = &worker.user;
    let source = worker.file.as_ref().map_or_else(|| "by default".into(), |file| format!("by {}", file.display()));
    let found = format!("root, and workers run as {user} ({source})");
    match worker::standing(global, program, &worker) {
        Standing::May { name, grounds } => check(format!("{found}, whom the policy lets join as {name} by {grounds}")),
        Standing::MayNot { name, grounds, rule } => {
            check(format!("{found}, whom the policy does not let join as {name} ({grounds})")).warn(rule)
        }
        Standing::ShutOut { socket } => {
            check(format!("{found}, whom the broker's socket does not let connect ({socket})"))
                .warn(admission::remedy())
        }
        Standing::Unknown(why) => check(format!("{found}; whether they may join is not known: {why}")).warn(format!(
            "make sure that the broker's policy lets {user} join (`partywall policy test --from NAME --user {user}`)"
        )),
    }
}
