//! A host of virtual machines: what runs them, and what is wrong with those that are attached.

use std::fs::OpenOptions;
use std::process::{Command, Stdio};

use partywall::{Domain, MachineRow};
use partywall_vm::{Facts, Machine, PlugKind};
use rustix::io::Errno;

use super::check::Check;
use super::probe::try_kvm;
use crate::args::Global;
use crate::session;

const AREA: &str = "virtual machines";
const QEMU: &str = "qemu-system-x86_64";
/// The smallest window there is.
const SMALLEST: u64 = 4 << 20;

pub(super) fn checks(global: &Global) -> Vec<Check> {
    let mut all = vec![kvm(), qemu(), tun()];
    all.extend(machines(global));
    all
}

fn kvm() -> Check {
    let means = "virtual machines are emulated here, which is slow; domains of processes and containers need none";
    let opened = OpenOptions::new().read(true).write(true).open("/dev/kvm");
    let check = |found: String| Check::ok(AREA, "KVM", means, found);
    match opened.map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::IO)).and_then(try_kvm) {
        Ok(()) => check("a virtual machine can be made".into()),
        Err(Errno::NOENT) => check("no /dev/kvm".into())
            .warn("only for virtual machines: load kvm_intel or kvm_amd, and turn on virtualisation in the firmware or the outer hypervisor"),
        Err(Errno::ACCESS | Errno::PERM) => {
            check("/dev/kvm is not ours to open".into()).warn("only for virtual machines: add this user to the group that owns /dev/kvm")
        }
        Err(error) => check(format!("/dev/kvm: {error}")).warn("only for virtual machines: see `dmesg | grep kvm`"),
    }
}

fn qemu() -> Check {
    let check =
        |found: String| Check::ok(AREA, "QEMU", "no virtual machine can be run, or none that shares memory", found);
    let says = |option: &[&str]| {
        let output = Command::new(QEMU).args(option).stdin(Stdio::null()).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let Some(version) = says(&["--version"]) else {
        return check(format!("no {QEMU} on PATH")).warn("only for virtual machines: install qemu-system-x86");
    };
    let line = version.lines().next().unwrap_or_default().trim_start_matches("QEMU emulator version ").to_owned();
    let devices = says(&["-device", "help"]).unwrap_or_default();
    let lacking: Vec<&str> = ["virtio-pmem-pci", "nvdimm", "ivshmem-plain", "virtserialport"]
        .into_iter()
        .filter(|name| !devices.contains(&format!("\"{name}\"")))
        .collect();
    if lacking.is_empty() {
        check(format!("version {line}, with virtio-pmem, nvdimm and ivshmem"))
    } else {
        check(format!("version {line}, without {}", lacking.join(", ")))
            .warn("only for virtual machines: a QEMU of version 4.1 or later, with these devices built in (Debian's has them)")
    }
}

fn tun() -> Check {
    let means = "the demo and the bench compare with TCP between two QEMUs directly, without a bridge of the kernel";
    let check = |found: String| Check::ok(AREA, "tap devices", means, found);
    match OpenOptions::new().read(true).write(true).open("/dev/net/tun") {
        Ok(_) if rustix::process::geteuid().is_root() => check("/dev/net/tun is there, and we are root".into()),
        Ok(_) => check("making one takes root".into()).warn("only for comparing: run demo or bench as root"),
        Err(error) => check(format!("/dev/net/tun: {error}")).warn("only for comparing: modprobe tun"),
    }
}

/// The machines that the broker attends to. Other checks report a missing broker.
fn machines(global: &Global) -> Vec<Check> {
    let name = format!("doctor-{}", std::process::id());
    let rows = match session::try_join(global, &name).as_ref().map(Domain::machines) {
        Ok(Ok(rows)) => rows,
        Ok(Err(error)) => {
            return vec![Check::ok(AREA, "machines", "their state is not known to this user", error.to_string())];
        }
        Err(_) => return Vec::new(),
    };
    rows.iter().map(|row| machine_check(row, facts(row))).collect()
}

/// The facts that its monitor reports and the number of its windows, or the reason why it does not answer.
fn facts(row: &MachineRow) -> Result<(Facts, u32), String> {
    let mut machine = Machine::connect(&row.monitor).map_err(|e| e.to_string())?;
    let facts = machine.facts().map_err(|e| e.to_string())?;
    let windows = match facts.kind() {
        PlugKind::Memory => machine.windows().map(|windows| windows.len()),
        PlugKind::Device { .. } => machine.devices().map(|devices| devices.len()),
    };
    let windows = windows.map_err(|e| e.to_string())?;
    Ok((facts, u32::try_from(windows).unwrap_or(u32::MAX)))
}

fn machine_check(row: &MachineRow, facts: Result<(Facts, u32), String>) -> Check {
    let name = &row.name;
    let check = |found: String| {
        Check::ok(AREA, "machine", "its programs cannot talk to all others", format!("{name}: {found}"))
    };
    let (facts, plugged) = match facts {
        Ok(said) => said,
        Err(why) => {
            return check(format!("its monitor does not answer: {why}"))
                .warn(format!("start it; or, if it is no more, partywall vm detach {name}"));
        }
    };
    if facts.status != "running" {
        return check(format!("it is {}", facts.status)).warn("let it go on (`cont` to its monitor)");
    }
    let obstacle = facts.any_obstacle(SMALLEST);
    // Without its agent, some are not plugged in yet.
    if plugged < row.windows && (row.up || obstacle.is_some()) {
        let found = format!("{plugged} of {} windows are plugged in", row.windows);
        return check(found).warn(match obstacle {
            Some(obstacle) => obstacle.to_string(),
            None => format!(
                "partywall vm attach {name} --qmp {} --port {}, which says what is in the way",
                row.monitor, row.port
            ),
        });
    }
    if !row.up {
        return check("its agent is silent".into())
            .warn("in the machine: partywall agent; and `partywall doctor` there says what it lacks");
    }
    if row.ready < row.windows {
        return check(format!("{} of {} windows are seen by both sides", row.ready, row.windows)).warn(
            "wait if a machine has just been attached; else, in this machine and in the others: partywall doctor",
        );
    }
    let kind = if facts.kind() == PlugKind::Memory { "" } else { " (PCI devices)" };
    check(format!("up, all {} windows{kind} are seen by both sides, {} program(s)", row.windows, row.sessions))
}

#[cfg(test)]
mod tests {
    use super::super::check::FindingStatus;
    use super::*;

    fn row() -> MachineRow {
        MachineRow {
            machine: 2,
            up: true,
            sessions: 1,
            windows: 4,
            ready: 4,
            plugged_as: partywall::PluggedAs::Memory,
            rung_by: partywall::RungBy::Port,
            mobility: partywall::Mobility::Fixed,
            fixed_by: String::new(),
            name: "a".into(),
            monitor: "/run/a.qmp".into(),
            port: "/run/a.port".into(),
        }
    }

    fn good() -> Facts {
        Facts {
            name: "a".into(),
            status: "running".into(),
            version: "7.2.0".into(),
            machine: "pc".into(),
            kvm: false,
            nvdimm: true,
            slots: 16,
            slots_used: 2,
            room: 8 << 30,
            room_used: 0,
            free_ports: None,
        }
    }

    #[test]
    fn doctor_reports_the_first_problem_of_a_machine() {
        let said = |row: &MachineRow, facts| {
            let check = machine_check(row, facts);
            format!("{:?} {} {}", check.status, check.found, check.remedy.unwrap_or_default())
        };
        assert_eq!(machine_check(&row(), Ok((good(), 4))).status, FindingStatus::Ok);
        for (text, part) in [
            (said(&row(), Err("connection refused".into())), "partywall vm detach a"),
            (said(&row(), Ok((Facts { status: "paused".into(), ..good() }, 4))), "cont"),
            (said(&row(), Ok((Facts { slots_used: 16, ..good() }, 2))), "all its 16 memory slots are taken"),
            (
                said(&row(), Ok((Facts { room: 0, free_ports: Some(vec![]), ..good() }, 2))),
                "no PCI Express port is free",
            ),
            (said(&row(), Ok((good(), 2))), "vm attach a --qmp /run/a.qmp --port /run/a.port"),
            (said(&MachineRow { up: false, ..row() }, Ok((good(), 4))), "agent is silent"),
            (said(&MachineRow { ready: 2, ..row() }, Ok((good(), 4))), "2 of 4 windows are seen"),
        ] {
            assert!(text.starts_with("Warn") && text.contains(part), "{part} in {text}");
        }
    }
}
