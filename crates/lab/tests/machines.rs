//! The facts that a host finds about machines with common options, and its errors for those that cannot take a window.
//!
//! These machines boot nothing: their monitors answer all the same.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

use partywall_region::pmem::{WindowFile, WindowSpec};
use partywall_vm::qmp::{Qmp, QmpError};
use partywall_vm::{Machine, PlugKind, VmError, WindowDevice, WindowObstacle, WindowRole, coldstart};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;

/// A machine that stands still, ended when it is dropped.
struct Still {
    qemu: Child,
    dir: tempfile::TempDir,
}

impl Still {
    fn start(arguments: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let monitor = format!("unix:{},server=on,wait=off", dir.path().join("qmp").display());
        let qemu = Command::new("setpriv")
            .args(["--pdeathsig", "KILL", "--", "qemu-system-x86_64", "-S", "-nodefaults", "-display", "none"])
            .args(["-accel", "tcg", "-name", "still", "-qmp", &monitor])
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        Self { qemu, dir }
    }

    fn monitor(&self) -> PathBuf {
        self.dir.path().join("qmp")
    }

    fn machine(&self) -> Machine {
        let deadline = Instant::now() + Duration::from_secs(120);
        loop {
            match Machine::connect(self.monitor()) {
                Err(e) if Instant::now() > deadline => panic!("{e}"),
                Err(_) => std::thread::sleep(Duration::from_millis(5)),
                Ok(machine) => return machine,
            }
        }
    }
}

impl Drop for Still {
    fn drop(&mut self) {
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
    }
}

fn file(room: u64) -> WindowFile {
    WindowFile::create(&WindowSpec { room, owner: "a".into(), peer: "b".into() }).unwrap()
}

fn obstacle(machine: &mut Machine, file: &WindowFile, role: WindowRole) -> WindowObstacle {
    match machine.plug(&WindowDevice::of(file), role) {
        Err(VmError::Obstacle { machine, obstacle }) => {
            assert_eq!(machine, "still");
            obstacle
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn machine_without_slots_names_the_missing_options() {
    let file = file(MIB);
    let plain = Still::start(&["-machine", "pc", "-m", "128"]);
    let mut machine = plain.machine();
    assert_eq!(obstacle(&mut machine, &file, WindowRole::Owner), WindowObstacle::NoHotPlug);
    let facts = machine.facts().unwrap();
    assert!(!facts.nvdimm && facts.room == 0 && !facts.kvm && facts.free_ports.is_none(), "{facts:?}");

    let no_nvdimm = Still::start(&["-machine", "pc", "-m", "128,slots=2,maxmem=1G"]);
    let mut machine = no_nvdimm.machine();
    assert_eq!(obstacle(&mut machine, &file, WindowRole::Peer), WindowObstacle::NoNvdimm);
    assert!(machine.plug(&WindowDevice::of(&file), WindowRole::Owner).is_ok(), "it can own one all the same");
}

#[test]
fn pci_window_is_plugged_once_and_with_valid_sizes_only() {
    let plain = Still::start(&["-machine", "pc", "-m", "128"]);
    let mut machine = plain.machine();
    assert_eq!(machine.facts().unwrap().kind(), PlugKind::Device { because: WindowObstacle::NoHotPlug });
    // QEMU would end.
    let odd = file(7 * MIB);
    assert!(matches!(machine.plug_device(&WindowDevice::of(&odd), WindowRole::Owner), Err(VmError::DeviceSize { .. })));
    let lost = WindowDevice { path: "/no/such/file".into(), size: 8 * MIB, ..WindowDevice::of(&odd) };
    assert!(matches!(machine.plug_device(&lost, WindowRole::Owner), Err(VmError::Grant { .. })));

    let even = file(5 * MIB);
    assert_eq!(even.size(), 8 * MIB);
    for role in [WindowRole::Owner, WindowRole::Peer] {
        assert!(machine.plug_device(&WindowDevice::of(&even), role).unwrap().took.is_some());
        assert!(machine.plug_device(&WindowDevice::of(&even), role).unwrap().took.is_none(), "it is there already");
    }
    assert_eq!(machine.devices().unwrap().len(), 2);
    // On the bus of such a machine is room for about 30.
    let why = loop {
        match machine.plug_device(&WindowDevice::of(&file(5 * MIB)), WindowRole::Owner) {
            Ok(_) => assert!(machine.devices().unwrap().len() < 40),
            Err(e) => break e.to_string(),
        }
    };
    assert!(why.contains("no slot"), "{why}");
}

#[test]
fn express_machine_plugs_each_device_into_a_free_port() {
    let port = "pcie-root-port,id=pw1,chassis=1";
    let still = Still::start(&["-machine", "q35", "-m", "128", "-device", port]);
    let mut machine = still.machine();
    let [first, second] = [(); 2].map(|()| file(5 * MIB));
    assert!(machine.plug_device(&WindowDevice::of(&first), WindowRole::Peer).is_ok());
    let full = machine.plug_device(&WindowDevice::of(&second), WindowRole::Owner);
    assert!(matches!(full, Err(VmError::Obstacle { obstacle: WindowObstacle::NoPort, .. })), "{full:?}");
    assert_eq!(machine.facts().unwrap().any_obstacle(8 * MIB), Some(WindowObstacle::NoPort));
}

#[test]
fn all_of_many_ports_are_found_in_several_searches() {
    let ports: Vec<String> = (1..=11).map(|n| format!("pcie-root-port,id=pw{n},chassis={n}")).collect();
    let mut arguments = vec!["-machine", "q35", "-m", "128"];
    arguments.extend(ports.iter().flat_map(|port| ["-device", port]));
    let still = Still::start(&arguments);
    let mut machine = still.machine();
    assert!((4..11).contains(&machine.facts().unwrap().free_ports.unwrap().len()));
    for n in 0..11 {
        if n == 6 {
            // Another session begins where this one was.
            drop(machine);
            machine = still.machine();
        }
        assert!(machine.plug_device(&WindowDevice::of(&file(5 * MIB)), WindowRole::Owner).is_ok(), "{n}");
    }
    let full = machine.plug_device(&WindowDevice::of(&file(5 * MIB)), WindowRole::Owner);
    assert!(matches!(full, Err(VmError::Obstacle { obstacle: WindowObstacle::NoPort, .. })), "{full:?}");
    assert_eq!(machine.facts().unwrap().free_ports, Some(vec![]));
}

#[test]
fn exhausted_slots_and_memory_are_named_and_leave_nothing() {
    let still = Still::start(&["-machine", "pc,nvdimm=on", "-m", "128,slots=1,maxmem=192M"]);
    let mut machine = still.machine();
    let (first, second, large) = (file(MIB), file(MIB), file(80 * MIB));
    assert_eq!(
        obstacle(&mut machine, &large, WindowRole::Peer),
        WindowObstacle::NoRoom { needed: large.size(), left: 64 * MIB }
    );
    assert!(machine.plug(&WindowDevice::of(&first), WindowRole::Peer).unwrap().took.is_some());
    assert_eq!(obstacle(&mut machine, &second, WindowRole::Peer), WindowObstacle::NoSlot { slots: 1 });
    assert!(machine.plug(&WindowDevice::of(&second), WindowRole::Owner).is_ok(), "virtio-pmem takes no slot");
    assert_eq!(machine.windows().unwrap().len(), 2);
}

#[test]
fn express_machine_plugs_owned_window_into_a_free_port() {
    let still = Still::start(&["-machine", "q35,nvdimm=on", "-m", "128,slots=2,maxmem=1G"]);
    let mut machine = still.machine();
    let (first, second) = (file(MIB), file(MIB));
    assert_eq!(obstacle(&mut machine, &first, WindowRole::Owner), WindowObstacle::NoPort);
    assert!(machine.plug(&WindowDevice::of(&first), WindowRole::Peer).is_ok(), "an nvdimm is on no PCI bus");
    drop((machine, still));

    let port = "pcie-root-port,id=pw1,chassis=1";
    let still = Still::start(&["-machine", "q35,nvdimm=on", "-m", "128,slots=2,maxmem=1G", "-device", port]);
    let mut machine = still.machine();
    assert_eq!(machine.facts().unwrap().free_ports, Some(vec!["pw1".to_owned()]));
    assert!(machine.plug(&WindowDevice::of(&first), WindowRole::Owner).is_ok());
    assert_eq!(obstacle(&mut machine, &second, WindowRole::Owner), WindowObstacle::NoPort);
}

#[test]
fn cold_start_has_the_same_windows_as_hot_plug() {
    let files = [file(MIB), file(3 * MIB)];
    let mut arguments: Vec<String> =
        ["-machine", "pc,nvdimm=on", "-m", "128,slots=4,maxmem=1G"].map(str::to_owned).to_vec();
    for (file, role) in files.iter().zip([WindowRole::Owner, WindowRole::Peer]) {
        arguments.extend(coldstart::arguments(&WindowDevice::of(file), role));
    }
    let still = Still::start(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
    let mut machine = still.machine();
    for (file, role) in files.iter().zip([WindowRole::Owner, WindowRole::Peer]) {
        let plugged = machine.plug(&WindowDevice::of(file), role).unwrap();
        assert!(plugged.took.is_none(), "it is there already: {plugged:?}");
        assert_eq!((plugged.size, plugged.role), (file.size(), role));
    }
}

#[test]
fn monitor_in_use_is_reported_as_busy() {
    let still = Still::start(&["-machine", "pc", "-m", "64"]);
    let _has_it = still.machine();
    let e = Qmp::connect(still.monitor()).unwrap_err();
    assert!(matches!(e, QmpError::Busy { .. }), "{e}");
    assert!(e.to_string().contains("second -qmp"), "{e}");
}
