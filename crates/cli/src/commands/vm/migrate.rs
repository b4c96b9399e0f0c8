//! `partywall vm migrate`: release, QEMU's migration, and back if that fails.

use std::time::{Duration, Instant};

use partywall::{Domain, Error, MachineRow, Mobility};
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
/// The beginning of the broker's remark about a machine that was taken back without some of its windows.
const UNPLUGGED: &str = "some windows are not plugged in";
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
            let mut progress = monitor.migration_progress().map_err(text)?;
            while cancelled.elapsed() < CANCEL && progress.is_under_way() {
                std::thread::sleep(LOOK);
                progress = monitor.migration_progress().map_err(text)?;
            }
            // The machine had left already.
            if progress.end() == Some(true) {
                return Ok(monitor.await_downtime(progress, DOWNTIME));
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
    Ok(mobility(admin, name)?.is_some())
}

/// Whether a machine can be migrated; `None` if the broker does not know the machine.
fn mobility(admin: &Domain, name: &str) -> Result<Option<Mobility>, Error> {
    Ok(admin.machines()?.into_iter().find(|row| row.name == name).map(|row| row.mobility))
}

/// The migration has failed: the machine stays, with its windows.
fn stay(admin: &Domain, row: &MachineRow, why: &str) -> Result<(), CommandFailure> {
    let name = &row.name;
    let error = match admin.resume_machine(name) {
        Ok(done) => {
            return Err(CommandFailure::general(format!("cannot migrate {name}: {why}. {}", stays(&done.remark))));
        }
        Err(error) => error,
    };
    let advice = advice(row, mobility(admin, name).map_err(drop));
    Err(CommandFailure::general(format!("cannot migrate {name}: {why}. It stays without windows ({error}); {advice}")))
}

/// What has become of a machine that stays, by the broker's remark about its windows.
fn stays(remark: &str) -> String {
    match remark.lines().find(|line| line.starts_with(UNPLUGGED)) {
        Some(line) => format!("It stays, but {line}"),
        None => "It stays, and has its windows again".to_owned(),
    }
}

/// What to do about a machine that the broker could not take back, by what the broker says of it now.
fn advice(row: &MachineRow, known: Result<Option<Mobility>, ()>) -> String {
    let MachineRow { name, monitor, port, .. } = row;
    let attach = format!("`partywall vm attach {name} --qmp {monitor} --port {port} --migratable`");
    match known {
        Ok(Some(Mobility::Migrating)) => format!("`partywall vm attach {name} --resume` tries again"),
        Ok(Some(_)) => format!("{attach} plugs in what it lacks"),
        Ok(None) => format!(
            "the broker has started since the release and does not know it: {attach}, with the size of its windows, attaches it again"
        ),
        Err(()) => format!(
            "the broker does not answer, and may have forgotten it: {attach}, with the size of its windows, attaches it again"
        ),
    }
}

fn failure(error: VmError) -> CommandFailure {
    CommandFailure::general(error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(mobility: Mobility) -> MachineRow {
        MachineRow {
            machine: 1,
            up: true,
            sessions: 0,
            windows: 2,
            ready: 0,
            plugged_as: partywall::PluggedAs::Memory,
            rung_by: partywall::RungBy::Port,
            mobility,
            fixed_by: String::new(),
            name: "a".into(),
            monitor: "/run/a.qmp".into(),
            port: "/run/a.port".into(),
        }
    }

    #[test]
    fn advice_to_resume_is_for_migrating_machines_only() {
        let advice = |known| advice(&row(Mobility::Migrating), known);
        assert!(advice(Ok(Some(Mobility::Migrating))).contains("--resume"));
        for known in [Ok(Some(Mobility::Migratable)), Ok(Some(Mobility::Fixed)), Ok(None), Err(())] {
            let advice = advice(known);
            let attach = "`partywall vm attach a --qmp /run/a.qmp --port /run/a.port --migratable`";
            assert!(advice.contains(attach) && !advice.contains("--resume"), "{known:?}: {advice}");
        }
    }

    #[test]
    fn machine_that_stays_without_windows_is_reported() {
        assert_eq!(stays("as memory devices"), "It stays, and has its windows again");
        let remark = "as memory devices\nsome windows are not plugged in: no place; `b` tries again\nmore";
        assert_eq!(stays(remark), "It stays, but some windows are not plugged in: no place; `b` tries again");
    }

    /// A monitor that answers `query-migrate` with these statuses, one after the other.
    fn monitor(statuses: [&'static str; 2]) -> (tempfile::TempDir, std::thread::JoinHandle<()>) {
        use std::io::{BufRead as _, BufReader, Write as _};
        let folder = tempfile::tempdir().unwrap();
        let listener = std::os::unix::net::UnixListener::bind(folder.path().join("qmp")).unwrap();
        let thread = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut statuses = statuses.into_iter();
            stream.write_all(b"{\"QMP\": {}}\n").unwrap();
            for line in BufReader::new(stream.try_clone().unwrap()).lines() {
                let asks = line.unwrap().contains("query-migrate");
                let status = if asks { statuses.next().unwrap_or_default() } else { "" };
                let answer =
                    format!("{{\"return\": {{\"status\": \"{status}\", \"total-time\": 9, \"downtime\": 4}}}}\n");
                stream.write_all(answer.as_bytes()).unwrap();
            }
        });
        (folder, thread)
    }

    #[test]
    fn migration_that_ends_before_it_is_cancelled_has_succeeded() {
        for (last, left) in [("completed", true), ("cancelled", false)] {
            let (folder, thread) = monitor(["active", last]);
            let mut machine = Machine::connect(folder.path().join("qmp")).unwrap();
            let done = migrate(&mut machine, "tcp:there:1", Duration::ZERO);
            assert_eq!(done.is_ok(), left, "{done:?}");
            drop(machine);
            thread.join().unwrap();
        }
    }

    #[test]
    fn unknown_downtime_is_not_reported_as_zero() {
        assert_eq!(stopped(Some(182)), "QEMU stopped it for 182 ms");
        assert_eq!(stopped(None), "QEMU has not reported for how long it stopped it");
    }
}
