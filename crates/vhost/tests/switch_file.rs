//! A switch with a file: the file fixes ports and their limits, commands cannot change them, and a changed file comes into force while
//! frames flow.
#![cfg(not(miri))]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

#[allow(dead_code, reason = "other tests use the rest")]
mod common;

use common::{EVERYBODY, HANG, World, frame, introduce, mac, next};
use partywall_vhost::config::SwitchConfig;
use partywall_vhost::control::{ControlRequest, SwitchReport};
use partywall_vhost::driver::{DriverOptions, GuestDriver};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// The process of a switch, with its folder and its file. It ends with the test.
struct Scene {
    folder: tempfile::TempDir,
    switch: Option<Child>,
}

impl Drop for Scene {
    fn drop(&mut self) {
        self.kill();
    }
}

impl Scene {
    /// A switch that runs with this file.
    fn new(file: &str) -> Self {
        let mut this = Self { folder: tempfile::tempdir().unwrap(), switch: None };
        this.write(file);
        this.start();
        this
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn file(&self) -> String {
        self.path("lan.toml").display().to_string()
    }

    fn write(&self, file: &str) {
        let path = self.path("lan.toml");
        std::fs::write(&path, file).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o644)).unwrap();
    }

    fn command(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_partywall-net"));
        command.arg("--folder").arg(self.folder.path()).env_remove("RUST_LOG");
        command
    }

    fn start(&mut self) {
        let log = std::fs::File::options().create(true).append(true).open(self.path("log")).unwrap();
        let file = self.file();
        let mut command = self.command();
        self.switch =
            Some(command.args(["run", "lan", "--config", &file]).stdout(Stdio::null()).stderr(log).spawn().unwrap());
        self.wait("the switch answers", || self.ask(&["show", "lan"]).is_ok());
    }

    /// With SIGKILL.
    fn kill(&mut self) {
        if let Some(mut switch) = self.switch.take() {
            let _ = switch.kill();
            let _ = switch.wait();
        }
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.path("log")).unwrap()
    }

    fn wait(&self, event: &str, mut done: impl FnMut() -> bool) {
        let deadline = Instant::now() + HANG;
        while !done() {
            assert!(Instant::now() < deadline, "never: {event}\n{}", self.log());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn ask(&self, words: &[&str]) -> Result<String, String> {
        let done = self.command().args(words).output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        if done.status.success() { Ok(text(&done.stdout)) } else { Err(text(&done.stderr)) }
    }

    /// The command is refused, and its error has these words.
    fn refuse(&self, words: &[&str], reasons: &[&str]) {
        let refused = self.ask(words).unwrap_err();
        assert!(reasons.iter().all(|reason| refused.contains(reason)), "{words:?}: {refused}");
    }

    fn reload(&self, file: &str) -> Result<String, String> {
        self.write(file);
        self.ask(&["reload", "lan"])
    }

    fn report(&self) -> SwitchReport {
        serde_json::from_str(&self.ask(&["show", "lan", "--json"]).unwrap()).unwrap()
    }

    fn ports(&self) -> Vec<String> {
        self.report().ports.into_iter().map(|row| row.port.name).collect()
    }

    fn spoofed(&self, port: &str) -> u64 {
        self.report().ports.iter().find(|row| row.port.name == port).unwrap().counters.spoofed
    }

    /// The known addresses, with the names of their ports.
    fn table(&self) -> String {
        self.ask(&["table", "lan"]).unwrap()
    }

    fn driver(&self, port: &str) -> GuestDriver {
        GuestDriver::connect(&self.path(&format!("lan/{port}.port")), DriverOptions::default()).unwrap()
    }
}

/// `from` may send from station `good`, and not from station `bad`: `to` gets the frame of the former alone.
fn sends_only_from(from: &mut GuestDriver, to: &mut GuestDriver, good: u8, bad: u8) {
    assert!(from.send(&frame(EVERYBODY, mac(bad), 100)).unwrap());
    let sent = frame(EVERYBODY, mac(good), 100);
    assert!(from.send(&sent).unwrap() && from.drain(HANG).unwrap());
    assert!(next(to) == sent, "a frame of another station");
    assert!(to.take().unwrap().is_none(), "a further frame");
}

const FIRST: &str = "[[port]]\nname = 'a'\nmac = ['02:00:00:00:00:01']\n\n[[port]]\nname = 'b'\n";
const SECOND: &str = "\
[[port]]\nname = 'a'\nmac = ['02:00:00:00:00:09']\n\n\
[[port]]\nname = 'b'\nmac = ['02:00:00:00:00:02']\n\n\
[[port]]\nname = 'c'\n";

#[test]
fn file_fixes_addresses_and_reload_changes_them_in_place() {
    let mut scene = Scene::new(FIRST);
    let (mut a, mut b) = (scene.driver("a"), scene.driver("b"));
    sends_only_from(&mut a, &mut b, 1, 9);
    assert_eq!(scene.spoofed("a"), 1);
    introduce(&mut b, 7);
    next(&mut a);
    assert!(scene.table().contains("02:00:00:00:00:07"), "{}", scene.table());

    let said = scene.reload(SECOND).unwrap();
    assert_eq!(said, "the file is in force; added: c; changed: a, b\n");
    // The same connections, and the addresses of before are neither allowed nor known.
    sends_only_from(&mut a, &mut b, 9, 1);
    let table = scene.table();
    assert!(!table.contains(":07") && !table.contains(":01") && table.contains("02:00:00:00:00:09"), "{table}");
    assert_eq!((scene.spoofed("a"), scene.report().ports[0].connected), (2, true));
    assert!(scene.path("lan/c.port").exists());

    // What the process knew dies with it, and the file holds.
    scene.kill();
    scene.start();
    let (mut a, mut b) = (scene.driver("a"), scene.driver("b"));
    sends_only_from(&mut a, &mut b, 9, 1);
    assert_eq!(scene.ports(), ["a", "b", "c"]);
    scene.kill();
    scene.write(FIRST);
    scene.start();
    assert_eq!(scene.ports(), ["a", "b"]);
    assert!(!scene.path("lan/c.port").exists());
    let (mut a, mut b) = (scene.driver("a"), scene.driver("b"));
    sends_only_from(&mut a, &mut b, 1, 9);
}

/// An IPv4 packet to everybody.
fn ipv4_frame(from: u8, source: [u8; 4]) -> Vec<u8> {
    let header = [&[0x45, 0, 0, 20, 0, 0, 0, 0, 64, 6, 0, 0][..], &source, &[10, 0, 0, 9]].concat();
    [&EVERYBODY[..], &mac(from), &[8, 0], &header, &[0; 26]].concat()
}

/// `from` may send from the IP address `good`, and not from `bad`: `to` gets the packet of the former alone.
fn sends_only_from_ip(from: &mut GuestDriver, to: &mut GuestDriver, good: [u8; 4], bad: [u8; 4]) {
    assert!(from.send(&ipv4_frame(7, bad)).unwrap());
    let sent = ipv4_frame(7, good);
    assert!(from.send(&sent).unwrap() && from.drain(HANG).unwrap());
    assert!(next(to) == sent, "a packet from {bad:?}");
    assert!(to.take().unwrap().is_none(), "a further packet");
}

#[test]
fn address_of_listed_port_is_refused_from_every_other_port() {
    let [first, second, third] = [[10, 0, 0, 1], [10, 0, 0, 2], [10, 0, 0, 3]];
    let file = |a: &str, d: &str| {
        format!(
            "other_ports = true\n[[port]]\nname = 'a'\nip = ['{a}']\n[[port]]\nname = 'b'\n[[port]]\nname = 'd'\nip = ['{d}']\n"
        )
    };
    let mut scene = Scene::new(&file("::ffff:10.0.0.1", "10.0.0.3"));
    scene.ask(&["add", "lan", "c"]).unwrap();
    scene.refuse(&["add", "lan", "e", "--ip", "10.0.0.1"], &["10.0.0.1", "port a"]);
    let (mut a, mut b, mut c) = (scene.driver("a"), scene.driver("b"), scene.driver("c"));
    // Neither a listed port without addresses nor a port of a command may use it.
    sends_only_from_ip(&mut b, &mut a, second, first);
    next(&mut c);
    sends_only_from_ip(&mut c, &mut a, second, first);
    next(&mut b);
    sends_only_from_ip(&mut a, &mut b, first, second);
    next(&mut c);
    assert_eq!(["a", "b", "c"].map(|port| scene.spoofed(port)), [1; 3]);
    // The address goes to another port, and what had an owner is free.
    scene.reload(&file("10.0.0.2", "10.0.0.1")).unwrap();
    sends_only_from_ip(&mut b, &mut a, third, second);
    next(&mut c);
    sends_only_from_ip(&mut a, &mut b, second, first);
    next(&mut c);
    sends_only_from_ip(&mut c, &mut a, third, first);
    next(&mut b);
    // A new process has the owners of the file, and also those of a port that it lists from now on.
    scene.kill();
    scene.start();
    let (mut a, mut c) = (scene.driver("a"), scene.driver("c"));
    sends_only_from_ip(&mut c, &mut a, third, second);
    scene.reload(&format!("{}[[port]]\nname = 'f'\nip = ['10.0.0.3']\n", file("10.0.0.2", "10.0.0.1"))).unwrap();
    sends_only_from_ip(&mut c, &mut a, [10, 0, 0, 4], third);
}

#[test]
fn mapped_address_in_a_request_is_the_ipv4_address() {
    let world = World::new();
    let add = |name: &str, ip: &str| {
        let text = format!(r#"{{"request":"add","port":{{"name":"{name}","ip":["{ip}"]}}}}"#);
        world.handle.ask(serde_json::from_str(&text).unwrap())
    };
    add("a", "10.0.0.1").unwrap();
    let refused = add("b", "::ffff:10.0.0.1").unwrap_err().to_string();
    assert!(refused.contains("10.0.0.1 is fixed to the port a already"), "{refused}");
}

#[test]
fn commands_that_contradict_the_file_are_refused() {
    let scene = Scene::new(FIRST);
    let file = scene.file();
    scene.refuse(&["add", "lan", "a", "--rate", "1M"], &[&file, "line 1", "port a"]);
    scene.refuse(&["add", "lan", "b", "--mac", "02:00:00:00:00:05"], &[&file, "line 5", "port b"]);
    scene.refuse(&["add", "lan", "d"], &[&file, "port d", "other_ports"]);
    scene.refuse(&["remove", "lan", "a"], &[&file, "line 1", "port a"]);
    assert_eq!(scene.ports(), ["a", "b"]);
    // A second process checks the file in place of running the switch, and refuses options that contradict it.
    let good = scene.ask(&["run", "lan", "--config", &file, "--check"]).unwrap();
    assert!(good.contains("lists 2 ports"), "{good}");
    let other = Scene { folder: tempfile::tempdir().unwrap(), switch: None };
    other.refuse(&["run", "lan", "--config", &file, "--port", "d"], &[&file, "port d"]);
    assert!(!other.path("lan/a.port").exists());
}

#[test]
fn file_that_cannot_come_into_force_changes_nothing() {
    let scene = Scene::new(FIRST);
    let (mut a, mut b) = (scene.driver("a"), scene.driver("b"));
    let before = serde_json::to_string(&scene.report()).unwrap();
    // The socket of port `c` cannot be made. Port `0` comes before it.
    std::fs::create_dir(scene.path("lan/c.port")).unwrap();
    let unmakeable = format!("[[port]]\nname = '0'\n{SECOND}");
    let why = format!("line 11: the port c: {} exists and is not a socket", scene.path("lan/c.port").display());
    for (file, reason) in [
        ("[[port]]\nname = 'a'\ncolour = 1\n", "line 3"),
        ("[[port]]\nname = 'a'\n[[port]]\nname = 'a'\n", "line 3"),
        ("[[port]\n", "line 1"),
        (&unmakeable, &why),
    ] {
        let refused = scene.reload(file).unwrap_err();
        let reasons = ["nothing was changed", &scene.file(), reason];
        assert!(reasons.iter().all(|reason| refused.contains(reason)), "{refused}");
        assert_eq!(serde_json::to_string(&scene.report()).unwrap(), before);
    }
    assert!(!scene.path("lan/0.port").exists());
    std::fs::remove_file(scene.file()).unwrap();
    assert!(scene.ask(&["reload", "lan"]).is_err());
    sends_only_from(&mut a, &mut b, 1, 9);
}

#[test]
fn ports_of_commands_give_way_to_the_file() {
    let with = |more: &str| format!("other_ports = true\n{more}");
    let mut scene = Scene::new(&with(""));
    let x = ["add", "lan", "x", "--mac", "02:00:00:00:00:05"];
    scene.ask(&x).unwrap();
    scene.ask(&["add", "lan", "y"]).unwrap();
    // Its address is taken, and the switch keeps what it has.
    let taker = with("[[port]]\nname = 'a'\nmac = ['02:00:00:00:00:05']\n");
    let refused = scene.reload(&taker).unwrap_err();
    assert!(refused.contains("line 2: 02:00:00:00:00:05") && refused.contains("port x"), "{refused}");
    assert_eq!(scene.ports(), ["x", "y"]);
    // At a start the file wins.
    scene.kill();
    scene.start();
    assert_eq!(scene.ports(), ["a", "y"]);
    assert!(scene.log().contains("02:00:00:00:00:05"), "{}", scene.log());
    scene.refuse(&x, &["fixed to the port a"]);
    // A port that was listed does not come back as a port of a command.
    scene.kill();
    scene.write(&with(""));
    scene.start();
    assert_eq!(scene.ports(), ["y"]);
    scene.reload(&taker).unwrap();
    // A port that the file lists no longer goes, and that of a command stays.
    scene.reload(&with("")).unwrap();
    assert_eq!(scene.ports(), ["y"]);
    scene.ask(&["add", "lan", "z"]).unwrap();
    // A port that the file lists from now on keeps its machine. One that it allows no longer goes.
    let mut y = scene.driver("y");
    introduce(&mut y, 6);
    scene.write("[[port]]\nname = 'y'\nmac = ['02:00:00:00:00:06']\n");
    let switch = rustix::process::Pid::from_child(scene.switch.as_ref().unwrap());
    rustix::process::kill_process(switch, rustix::process::Signal::HUP).unwrap();
    scene.wait("the file is in force", || scene.ports() == ["y"]);
    let row = scene.report().ports.remove(0);
    assert!(row.connected && row.listed.is_some() && row.counters.sent == 1, "{row:?}");
    // SIGHUP with an invalid file ends nothing.
    scene.write("colour = 1\n");
    rustix::process::kill_process(switch, rustix::process::Signal::HUP).unwrap();
    scene.wait("the fault is reported", || scene.log().contains("unknown field `colour`"));
    assert_eq!(scene.ports(), ["y"]);
}

#[test]
fn new_owner_of_port_disconnects_the_machine_of_the_old_one() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: only root gives sockets to other users");
        return;
    }
    let scene = Scene::new("[[port]]\nname = 'a'\nowner = 7\n[[port]]\nname = 'b'\n");
    let (_a, _b) = (scene.driver("a"), scene.driver("b"));
    let occupied = || scene.report().ports.iter().map(|row| row.occupied).collect::<Vec<_>>();
    let owner = || scene.path("lan/a.port").metadata().unwrap().uid();
    assert_eq!((occupied(), owner()), (vec![true, true], 7));
    scene.reload("[[port]]\nname = 'a'\nowner = 8\nrate = '1M'\n[[port]]\nname = 'b'\nowner = 0\n").unwrap();
    // The owner of `b` is the user of the switch as before.
    assert_eq!((occupied(), owner()), (vec![false, true], 8));
    let _again = scene.driver("a");
    scene.wait("the port is taken again", || occupied()[0]);
    // The socket of `c` cannot be made, so the others keep their owners and their machines.
    std::fs::create_dir(scene.path("lan/c.port")).unwrap();
    let ports = ["a", "b"].map(|name| format!("[[port]]\nname = '{name}'\nowner = 7\n")).concat();
    let refused = scene.reload(&format!("{ports}[[port]]\nname = 'c'\n")).unwrap_err();
    assert!(refused.contains("the port c: "), "{refused}");
    assert_eq!((occupied(), owner()), (vec![true, true], 8));
}

#[test]
fn frames_that_wait_for_a_rate_go_on_when_it_ends() {
    let world = World::new();
    let apply = |text: &str| {
        let config = Box::new(SwitchConfig::parse(text).unwrap());
        world.handle.ask(ControlRequest::Apply { config }).unwrap();
    };
    // A second for each byte.
    apply("[[port]]\nname = 'a'\nrate = 1\n[[port]]\nname = 'b'\n");
    let connect = |name: &str| {
        let path = world.report().ports.iter().find(|row| row.port.name == name).unwrap().path.clone();
        GuestDriver::connect(&path, DriverOptions::default()).unwrap()
    };
    let (mut a, mut b) = (connect("a"), connect("b"));
    let (first, sent) = (frame(EVERYBODY, mac(1), 1000), frame(EVERYBODY, mac(1), 65_535));
    for sent in [&first, &sent, &sent] {
        assert!(a.send(sent).unwrap());
    }
    // The burst is one large frame. What is taken beyond it is a debt of a thousand seconds.
    assert!(next(&mut b) == first && next(&mut b) == sent);
    assert_eq!(world.counters("a").sent, 2);
    apply("[[port]]\nname = 'a'\n[[port]]\nname = 'b'\n");
    assert!(next(&mut b) == sent);
}

#[test]
fn reloads_under_traffic_lose_no_frame() {
    let world = World::new();
    let b = "[[port]]\nname = 'b'\nmac = ['02:00:00:00:00:02']\n";
    let own = "[[port]]\nname = 'a'\nmac = ['02:00:00:00:00:01'";
    let files =
        [format!("{b}{own}]\n"), format!("{b}{own}, '02:00:00:00:00:05']\nrate = '1G'\n[[port]]\nname = 'c'\n")];
    let requests = files.map(|text| {
        let config = Box::new(SwitchConfig::parse(&text).unwrap());
        ControlRequest::Apply { config }
    });
    world.handle.ask(requests[0].clone()).unwrap();
    let connect = |name: &str| {
        let path = world.report().ports.iter().find(|row| row.port.name == name).unwrap().path.clone();
        GuestDriver::connect(&path, DriverOptions::default()).unwrap()
    };
    let (mut a, mut b) = (connect("a"), connect("b"));
    let (stop, reloads) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU32::new(0)));
    let (handle, stopped, done) = (world.handle.clone(), Arc::clone(&stop), Arc::clone(&reloads));
    let reloading = std::thread::spawn(move || {
        let changes = requests.iter().cycle().take_while(|_| !stopped.load(Ordering::Relaxed));
        changes.for_each(|request| {
            handle.ask(request.clone()).unwrap();
            done.fetch_add(1, Ordering::Relaxed);
        });
    });
    let mut frames = 0;
    // On a busy machine the other thread may begin only after many frames.
    let is_late = || reloads.load(Ordering::Relaxed) < 2 && !reloading.is_finished();
    for round in (0_u32..).take_while(|round| *round < 500 || is_late()) {
        let sent = [&frame(mac(2), mac(1), 60)[..], &round.to_le_bytes()].concat();
        assert!(a.send(&sent).unwrap());
        assert!(next(&mut b) == sent, "round {round}");
        frames += 1;
    }
    stop.store(true, Ordering::Relaxed);
    reloading.join().unwrap();
    let counters = world.counters("a");
    assert_eq!((counters.sent, counters.spoofed), (frames, 0));
}

/// What a change leaves behind: files, and what is in force.
mod changes {
    use super::*;

    #[test]
    fn socket_of_new_owner_has_no_rights_of_the_old_one() {
        if !rustix::process::geteuid().is_root() {
            println!("skipped: only root gives sockets to other users");
            return;
        }
        let scene = Scene::new("[[port]]\nname = 'a'\nowner = 7\n");
        let socket = scene.path("lan/a.port");
        // As its owner may.
        std::fs::set_permissions(&socket, PermissionsExt::from_mode(0o666)).unwrap();
        scene.reload("[[port]]\nname = 'a'\nowner = 8\n").unwrap();
        let there = socket.metadata().unwrap();
        assert_eq!((there.uid(), there.mode() & 0o777), (8, 0o600));
        let mut names: Vec<_> =
            std::fs::read_dir(scene.path("lan")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, ["a.port", "control", "lock", "ports.json"], "files of the change stay");
        // A file that cannot come into force gives the socket to nobody. The folder is where the socket of `c` would be.
        std::fs::create_dir(scene.path("lan/c.port")).unwrap();
        for file in
            ["[[port]]\nname = 'a'\nowner = 9\n[[port]]\nname = 'c'\n", "[[port]]\nname = 'a'\nowner = 4294967295\n"]
        {
            scene.reload(file).unwrap_err();
            assert_eq!((socket.metadata().unwrap().uid(), socket.metadata().unwrap().ino()), (8, there.ino()));
        }
        let _driver = scene.driver("a");
        scene.wait("the port is taken", || scene.report().ports[0].occupied);
    }

    #[test]
    fn socket_that_was_deleted_comes_back_with_a_reload() {
        let scene = Scene::new(FIRST);
        let (mut a, mut b) = (scene.driver("a"), scene.driver("b"));
        std::fs::remove_file(scene.path("lan/b.port")).unwrap();
        assert_eq!(scene.reload(FIRST).unwrap(), "the file is in force; changed: b\n");
        // Its machine has stayed connected, and can come back.
        sends_only_from(&mut a, &mut b, 1, 9);
        drop(b);
        scene.wait("the port is free", || !scene.report().ports[1].occupied);
        let mut b = scene.driver("b");
        sends_only_from(&mut a, &mut b, 1, 9);
    }

    #[test]
    fn change_whose_ports_cannot_be_saved_is_not_made() {
        let with = |more: &str| format!("other_ports = true\n{more}");
        let mut scene = Scene::new(&with(FIRST));
        scene.ask(&["add", "lan", "x"]).unwrap();
        let before = serde_json::to_string(&scene.report()).unwrap();
        let draft = scene.path("lan/ports.json.new");
        std::fs::create_dir(&draft).unwrap();
        let refused = scene.reload(SECOND).unwrap_err();
        assert!(refused.contains("nothing was changed") && refused.contains("ports.json"), "{refused}");
        scene.refuse(&["add", "lan", "y"], &["ports.json"]);
        scene.refuse(&["remove", "lan", "x"], &["ports.json"]);
        assert_eq!(serde_json::to_string(&scene.report()).unwrap(), before);
        std::fs::remove_dir(&draft).unwrap();
        // A command that is refused saves nothing.
        scene.ask(&["add", "lan", "x"]).unwrap_err();
        scene.ask(&["remove", "lan", "a"]).unwrap_err();
        scene.ask(&["add", "lan", "y"]).unwrap();
        scene.ask(&["remove", "lan", "x"]).unwrap();
        scene.kill();
        scene.write(&with(""));
        scene.start();
        assert_eq!(scene.ports(), ["y"]);
        // After the change, its failure is reported as such.
        let saved = scene.path("lan/ports.json");
        std::fs::remove_file(&saved).unwrap();
        std::fs::create_dir(&saved).unwrap();
        let refused = scene.reload(SECOND).unwrap_err();
        assert!(refused.contains("the change is in force, but") && !refused.contains("nothing"), "{refused}");
        assert_eq!(scene.ports(), ["a", "b", "c"]);
    }

    #[test]
    fn switch_without_a_file_removes_sockets_left_behind() {
        let mut scene = Scene::new(FIRST);
        scene.kill();
        assert!(scene.path("lan/a.port").exists());
        scene.refuse(&["run", "lan", "--check"], &["the switch has no file"]);
        let mut command = scene.command();
        scene.switch = Some(command.args(["run", "lan"]).stdout(Stdio::null()).spawn().unwrap());
        scene.wait("the switch answers", || scene.ask(&["show", "lan"]).is_ok());
        assert!(!scene.path("lan/a.port").exists() && scene.ports().is_empty());
        // It has no file to read, and ends at SIGHUP.
        let mut switch = scene.switch.take().unwrap();
        rustix::process::kill_process(rustix::process::Pid::from_child(&switch), rustix::process::Signal::HUP).unwrap();
        assert!(switch.wait().unwrap().success());
    }
}
