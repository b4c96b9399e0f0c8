//! `partywall vm migrate`: release, QEMU's migration, and back if that fails.

use std::time::{Duration, Instant};

use partywall::{Domain, Error, MachineRow};
use partywall_vm::{Machine, MigrationProgress, VmError};

use crate::args::Global;
use crate::exit::{Code, CommandFailure, Context};
use crate::{human, output, session};

/// Between two questions to QEMU.
const LOOK: Duration = Duration::from_millis(50);
/// How long a cancelled migration may take to end.
const CANCEL: Duration = Duration::from_secs(10);
/// How long QEMU may take to compute the downtime of a migration that has completed.
const DOWNTIME: Duration = Duration::from_secs(2);
/// How long the broker may take to start again, if it has ended meanwhile.
const RESTART: Duration = Duration::from_secs(10);
/// Between two lines of progress.
const REPORT: Duration = Duration::from_secs(1);

pub(super) fn run(global: &Global, name: &str, to: &str, limit: Duration) -> Result<(), CommandFailure> {
    let admin = session::join(global)?;
    let rows = admin.machines().context("cannot list machines")?;
    let Some(row) = rows.into_iter().find(|row| row.name == name) else {
        return Err(CommandFailure::new(
            Code::Refused,
            format!("no machine is called {name}; `partywall vm list` shows those that are attached"),
        ));
    };
    // Before anything has to be undone.
    let mut monitor = Machine::connect(&row.monitor).map_err(failure)?;
    drop(monitor);
    let start = Instant::now();
    admin.release_machine(name).context(format_args!("cannot release {name}"))?;
    let released = start.elapsed();
    output::print(format_args!("{name} has released its windows, in {}", human::seconds(released.as_secs_f64())))?;
    monitor = match Machine::connect(&row.monitor) {
        Ok(monitor) => monitor,
        Err(error) => return stay(&admin, &row, &error.to_string()),
    };
    let done = match migrate(&mut monitor, to, limit) {
        Ok(done) => done,
        Err(why) => {
            drop(monitor);
            return stay(&admin, &row, &why);
        }
    };
    drop(monitor);
    forget(&admin, name)?;
    output::print(format_args!(
        "{name} has left for {to}: {} sent, {}. Attach it there with `partywall vm attach {name} --migratable`",
        human::bytes(done.sent),
        stopped(done.downtime_ms)
    ))
}

/// How long the machine did not run, in words.
fn stopped(downtime_ms: Option<u64>) -> String {
    downtime_ms.map_or_else(
        || "QEMU has not reported for how long it stopped it".to_owned(),
        |downtime| format!("QEMU stopped it for {downtime} ms"),
    )
}

/// Has QEMU migrate it, and waits for the end.
fn migrate(monitor: &mut Machine, to: &str, limit: Duration) -> Result<MigrationProgress, String> {
    let text = |error: VmError| error.to_string();
    monitor.begin_migration(to).map_err(text)?;
    let (start, mut reported) = (Instant::now(), Instant::now());
    loop {
        let progress = monitor.migration_progress().map_err(text)?;
        match progress.end() {
            Some(true) => return Ok(monitor.await_downtime(progress, DOWNTIME)),
            Some(false) => return Err(progress.why.unwrap_or_else(|| format!("QEMU reports {:?}", progress.status))),
            None => {}
        }
        if start.elapsed() > limit {
            monitor.cancel_migration().map_err(text)?;
            let cancelled = Instant::now();
            while cancelled.elapsed() < CANCEL && monitor.migration_progress().map_err(text)?.is_under_way() {
                std::thread::sleep(LOOK);
            }
            return Err(format!("it has taken longer than {}", human::seconds(limit.as_secs_f64())));
        }
        if reported.elapsed() >= REPORT {
            reported = Instant::now();
            let _ = output::print(format_args!(
                "{} sent, {} left",
                human::bytes(progress.sent),
                human::bytes(progress.left)
            ));
        }
        std::thread::sleep(LOOK);
    }
}

/// Has the broker forget a machine that has left. A broker that has started since the release does not know the machine.
fn forget(admin: &Domain, name: &str) -> Result<(), CommandFailure> {
    let start = Instant::now();
    loop {
        let Err(error) = admin.detach_machine(name) else { return Ok(()) };
        match is_known(admin, name) {
            Ok(false) => return Ok(()),
            Ok(true) if matches!(error, Error::Refused { .. }) => {}
            _ if start.elapsed() < RESTART => {
                std::thread::sleep(LOOK);
                continue;
            }
            _ => {}
        }
        return Err(error).context(format_args!("{name} has left, but this broker cannot forget it"));
    }
}

fn is_known(admin: &Domain, name: &str) -> Result<bool, Error> {
    Ok(admin.machines()?.iter().any(|row| row.name == name))
}

/// The migration has failed: the machine stays, with its windows.
fn stay(admin: &Domain, row: &MachineRow, why: &str) -> Result<(), CommandFailure> {
    let name = &row.name;
    let Err(error) = admin.resume_machine(name) else {
        return Err(CommandFailure::general(format!(
            "cannot migrate {name}: {why}. It stays, and has its windows again"
        )));
    };
    let advice = match is_known(admin, name) {
        Ok(true) => format!("`partywall vm attach {name} --resume` tries again"),
        known => {
            let (monitor, port) = (&row.monitor, &row.port);
            let state = match known {
                Ok(_) => "has started since the release and does not know it",
                Err(_) => "does not answer, and may have forgotten it",
            };
            format!(
                "the broker {state}: `partywall vm attach {name} --qmp {monitor} --port {port} --migratable`, with the size of its windows, \
                 attaches it again"
            )
        }
    };
    Err(CommandFailure::general(format!("cannot migrate {name}: {why}. It stays without windows ({error}); {advice}")))
}

fn failure(error: VmError) -> CommandFailure {
    CommandFailure::general(error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_downtime_is_not_reported_as_zero() {
        assert_eq!(stopped(Some(182)), "QEMU stopped it for 182 ms");
        assert_eq!(stopped(None), "QEMU has not reported for how long it stopped it");
    }
}
