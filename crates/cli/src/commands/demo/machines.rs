//! Virtual machines, shown by `partywall-lab`, the only program that can boot them: two with Partywall inside, and two without.

use std::process::{Command, Stdio};
use std::time::Duration;

use partywall_protocol::environment;
use partywall_terminal::{Show, typed};

use super::children::DemoChild;
use super::payload::CarriedFile;
use crate::exit::CommandFailure;
use crate::siblings;

/// A guard against hangs. The first time, a kernel is fetched.
const LONGEST: Duration = Duration::from_secs(1200);
/// The exit code where there can be no machines, after a message with the reason (`EX_UNAVAILABLE` of sysexits.h).
const UNAVAILABLE: i32 = 69;
/// A smaller file gives no useful rate; the lab then uses its own.
const SMALLEST: u64 = 1 << 20;

/// Does nothing, having said why, where the lab or QEMU is missing.
pub(super) fn run(rounds: u32, quick: bool, payload: &CarriedFile, show: &Show) -> Result<(), CommandFailure> {
    let program = match siblings::find("partywall-lab", "partywall-lab") {
        Ok(program) => program,
        Err(failure) => {
            show.step("Two virtual machines");
            show.say(&format!("   left out: {}", failure.to_string().replace("\n  ", "; ")));
            return Ok(());
        }
    };
    let rounds = rounds.to_string();
    let mut demo = Command::new(&program);
    demo.args(["demo", "--rounds", &rounds]);
    if quick {
        demo.arg("--quick");
    }
    if payload.size >= SMALLEST {
        demo.arg("--file").arg(&payload.path);
    }
    lab(demo, show)?;
    if quick {
        show.step("Two virtual machines without Partywall inside");
        show.say(&format!("   left out: --quick; `{} net` shows them", program.display()));
        return Ok(());
    }
    let mut net = Command::new(&program);
    net.args(["net", "--rounds", &rounds]);
    lab(net, show)
}

/// Runs a part of the lab.
fn lab(mut command: Command, show: &Show) -> Result<(), CommandFailure> {
    show.say("");
    show.show_commands(true);
    show.command("", &typed(&command));
    command.env_remove(environment::BROKER).env_remove(environment::DOMAIN).env_remove("RUST_LOG").stdin(Stdio::null());
    let status = DemoChild::start_orderly(&mut command)?.wait(LONGEST)?;
    match status.code() {
        Some(0) => Ok(()),
        Some(UNAVAILABLE) => {
            show.say("   the rest of the demo does not need it");
            Ok(())
        }
        _ => Err(CommandFailure::general(format!(
            "the part with virtual machines failed ({status}); its words are above"
        ))
        .hint("`partywall demo --no-vm` leaves it out")),
    }
}
