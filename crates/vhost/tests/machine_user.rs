//! A port or a disk is for the user of the machine's QEMU, which is not the user of the switch. Needs root and QEMU.
#![cfg(not(miri))]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

use partywall_vhost::control::SwitchReport;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Longer is a hang.
const HANG: Duration = Duration::from_secs(60);
const QEMU: &str = "/usr/bin/qemu-system-x86_64";

/// A process that ends with the test.
struct Guarded(Child);

impl Drop for Guarded {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A folder that each user may enter, and what runs in it.
struct Scene {
    folder: tempfile::TempDir,
    running: Vec<Guarded>,
}

impl Scene {
    /// `None` where this cannot be tested.
    fn new() -> Option<Self> {
        if !rustix::process::geteuid().is_root() || !Path::new(QEMU).exists() {
            println!("skipped: a QEMU of another user needs root and {QEMU}");
            return None;
        }
        let folder = tempfile::tempdir().unwrap();
        std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o755)).unwrap();
        Some(Self { folder, running: Vec::new() })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Starts a program, and waits until it listens on this socket. The file is there a little earlier.
    fn start(&mut self, command: &mut Command, socket: &Path) {
        let _ = std::fs::remove_file(socket);
        self.running.push(Guarded(command.stdout(Stdio::null()).spawn().unwrap()));
        let deadline = Instant::now() + HANG;
        while UnixStream::connect(socket).is_err() {
            assert!(Instant::now() < deadline, "nothing listens on {}", socket.display());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn net(&self, words: &[&str]) -> Result<String, String> {
        said(Command::new(env!("CARGO_BIN_EXE_partywall-net")).arg("--folder").arg(self.folder.path()).args(words))
    }

    fn switch(&mut self) {
        self.switch_with(&[]);
    }

    fn switch_with(&mut self, words: &[&str]) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_partywall-net"));
        command.arg("--folder").arg(self.folder.path()).args(["run", "lan"]).args(words).stderr(Stdio::null());
        let control = self.path("lan/control");
        self.start(&mut command, &control);
    }

    fn disk(&mut self, words: &[&str]) -> PathBuf {
        let (image, socket) = (self.path("image"), self.path(&format!("disk{}.sock", self.running.len())));
        std::fs::File::create(&image).unwrap().set_len(1 << 20).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_partywall-blk"));
        command.arg("serve").arg(image).args(["--read-only", "--socket"]).arg(&socket).args(words);
        let control = PathBuf::from(format!("{}.control", socket.display()));
        self.start(command.stderr(Stdio::null()), &control);
        socket
    }

    /// A stopped machine whose QEMU runs as the user `nobody`; its monitor. The socket of the monitor belongs to root.
    fn machine(&mut self) -> String {
        let monitor = self.path("qmp");
        let mut command = Command::new(QEMU);
        command.args(["-S", "-accel", "tcg", "-nodefaults", "-display", "none", "-m", "32M", "-runas", "nobody"]);
        command.args(["-object", "memory-backend-memfd,id=ram,size=32M,share=on", "-machine", "pc,memory-backend=ram"]);
        command.arg("-qmp").arg(format!("unix:{},server=on,wait=off", monitor.display()));
        self.start(&mut command, &monitor);
        monitor.display().to_string()
    }

    fn report(&self) -> SwitchReport {
        serde_json::from_str(&self.net(&["show", "lan", "--json"]).unwrap()).unwrap()
    }
}

fn said(command: &mut Command) -> Result<String, String> {
    let done = command.output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    if done.status.success() { Ok(text(&done.stdout)) } else { Err(text(&done.stderr)) }
}

fn nobody() -> u32 {
    partywall_vhost::user_number("nobody").unwrap()
}

/// Whether a process of this user can connect.
fn connects(user: u32, socket: &Path) -> bool {
    let line = "import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])";
    let (id, mut command) = (user.to_string(), Command::new("setpriv"));
    command.args(["--reuid", &id, "--regid", &id, "--clear-groups", "/usr/bin/python3", "-c", line]).arg(socket);
    command.stderr(Stdio::null()).status().unwrap().success()
}

#[test]
fn new_port_of_attach_belongs_to_user_of_qemu() {
    let Some(mut scene) = Scene::new() else { return };
    scene.switch();
    let monitor = scene.machine();
    let said = scene.net(&["attach", "lan", "a", "--qmp", &monitor]).unwrap();
    assert!(said.contains("plugged in"), "{said}");
    let there = scene.path("lan/a.port").metadata().unwrap();
    assert_eq!((there.uid(), there.mode() & 0o777), (nobody(), 0o600));
    assert!(scene.report().ports[0].occupied, "QEMU has connected");
    // A repetition asks for no owner, or for the same one.
    let nobody = nobody().to_string();
    for words in [&[][..], &["--owner", &nobody]] {
        let said = scene.net(&[&["attach", "lan", "a", "--qmp", &monitor][..], words].concat()).unwrap();
        assert!(said.contains("in place"), "{said}");
    }
}

#[test]
fn port_of_another_user_is_refused_and_leaves_qemu_alone() {
    let Some(mut scene) = Scene::new() else { return };
    scene.switch();
    let monitor = scene.machine();
    scene.net(&["add", "lan", "a"]).unwrap();
    for (port, words) in [("a", &[][..]), ("b", &["--owner", "root"])] {
        let refused = scene.net(&[&["attach", "lan", port, "--qmp", &monitor][..], words].concat()).unwrap_err();
        assert!(refused.contains("runs as another user") && refused.contains("belongs to user 0"), "{refused}");
    }
    let ports: Vec<String> = scene.report().ports.into_iter().map(|row| row.port.name).collect();
    assert_eq!(ports, ["a"], "a port that was added for the card is removed");
    // Its main loop does not wait.
    scene.net(&["attach", "lan", "c", "--qmp", &monitor]).unwrap();
}

#[test]
fn listed_port_is_attached_with_the_limits_of_its_file() {
    let Some(mut scene) = Scene::new() else { return };
    let file = scene.path("lan.toml");
    let text = "[[port]]\nname = 'a'\nmac = ['02:00:00:00:00:0a']\nowner = 'nobody'\n[[port]]\nname = 'b'\n";
    std::fs::write(&file, text).unwrap();
    std::fs::set_permissions(&file, PermissionsExt::from_mode(0o644)).unwrap();
    let shown = file.display().to_string();
    scene.switch_with(&["--config", &shown]);
    let monitor = scene.machine();
    for (port, words, reasons) in [
        ("a", &["--rate", "1M"][..], ["line 1, fixes the port a", &shown]),
        ("b", &[], ["set `owner` of the port in", "line 5"]),
        ("c", &[], ["does not list the port c", &shown]),
    ] {
        let refused = scene.net(&[&["attach", "lan", port, "--qmp", &monitor][..], words].concat()).unwrap_err();
        assert!(reasons.iter().all(|reason| refused.contains(reason)), "{refused}");
    }
    let said = scene.net(&["attach", "lan", "a", "--qmp", &monitor]).unwrap();
    assert!(said.contains("plugged in"), "{said}");
    let port = scene.report().ports.remove(0);
    assert!(port.occupied && port.port.mac.len() == 1 && port.port.owner == Some(nobody()), "{port:?}");
}

#[test]
fn owner_of_port_alone_connects() {
    let Some(mut scene) = Scene::new() else { return };
    scene.switch();
    scene.net(&["add", "lan", "a", "--owner", "nobody"]).unwrap();
    let socket = scene.path("lan/a.port");
    assert!(connects(nobody(), &socket) && !connects(nobody() - 1, &socket));
    scene.net(&["add", "lan", "b"]).unwrap();
    assert!(!connects(nobody(), &scene.path("lan/b.port")), "a port belongs to the user of the switch");
}

#[test]
fn disk_is_plugged_in_only_if_qemu_may_connect() {
    let Some(mut scene) = Scene::new() else { return };
    let monitor = scene.machine();
    let attach = |socket: &Path| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_partywall-blk"));
        said(command.arg("attach").arg("--socket").arg(socket).args(["--qmp", &monitor]))
    };
    let refused = attach(&scene.disk(&[])).unwrap_err();
    assert!(refused.contains("runs as another user") && refused.contains("--owner"), "{refused}");
    let done = attach(&scene.disk(&["--owner", "nobody"])).unwrap();
    assert!(done.contains("plugged in"), "{done}");
}
