//! The demo works, and leaves nothing behind, whatever happens to it.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod common;

use std::path::Path;
use std::process::{Child, Command, Stdio};

use common::{Guard, devices, file_system, lab, library, partywall, partywalld, said};
use rustix::process::{Pid, Signal, kill_process};

/// Everything that has the number of this demo in its name or command line.
fn left_by(pid: u32) -> Vec<String> {
    let mark = format!("pw-demo-{pid}-");
    // Whole names: the number of another test's demo may begin with this one's.
    let interfaces = ["a", "b"].map(|side| format!("pw{pid}{side}"));
    let named = |dir: &str| {
        let names = std::fs::read_dir(dir)
            .into_iter()
            .flatten()
            .flatten()
            .map(|e| e.file_name().to_string_lossy().into_owned());
        names.filter(|name| name.starts_with(&mark) || interfaces.contains(name)).collect::<Vec<_>>()
    };
    let mut left: Vec<String> =
        ["/run/netns", "/dev/shm", "/tmp", "/sys/class/net"].into_iter().flat_map(named).collect();
    for process in std::fs::read_dir("/proc").unwrap().flatten() {
        let line = std::fs::read(process.path().join("cmdline")).unwrap_or_default();
        let line = String::from_utf8_lossy(&line).replace('\0', " ");
        if line.contains(&mark) {
            left.push(line);
        }
    }
    left.extend(mounts(&mark));
    left
}

/// The mounts that have this in their names.
fn mounts(mark: &str) -> Vec<String> {
    let table = std::fs::read_to_string("/proc/self/mounts").unwrap();
    table.lines().filter(|line| line.contains(mark)).map(str::to_owned).collect()
}

/// Whether this user may mount a file system.
fn can_mount() -> bool {
    let may = rustix::process::geteuid().is_root() || Command::new("fusermount3").arg("-V").output().is_ok();
    may && Path::new("/dev/fuse").exists()
}

/// Without virtual machines, which take the longest; one test has them.
fn demo(arguments: &[&str]) -> Command {
    // It needs the broker beside it, the file system, and the library for its last part.
    partywalld();
    library();
    file_system();
    partywall(&[&["demo", "--no-vm"], arguments].concat())
}

/// Processes and folders of a lab that ran as process `pid`.
fn left_by_lab(pid: u32) -> Vec<String> {
    let mark = format!("partywall-lab-{pid}-");
    let folders = std::fs::read_dir(std::env::temp_dir()).unwrap().flatten().map(|e| e.path().display().to_string());
    let lines = std::fs::read_dir("/proc").unwrap().flatten().filter_map(|process| {
        let line = std::fs::read(process.path().join("cmdline")).ok()?;
        Some(String::from_utf8_lossy(&line).replace('\0', " "))
    });
    folders.chain(lines).filter(|thing| thing.contains(&mark)).collect()
}

/// The process of `partywall-lab demo` that this demo has started.
fn lab_of(pid: u32) -> u32 {
    let children = format!("/proc/{pid}/task/{pid}/children");
    let all = std::fs::read_to_string(children).unwrap();
    let named =
        |pid: &u32| std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name == "partywall-lab\n");
    all.split_whitespace().filter_map(|pid| pid.parse().ok()).find(named).unwrap_or_else(|| panic!("no lab in {all}"))
}

#[test]
fn interrupted_demo_ends_its_machines() {
    use std::io::{BufRead, BufReader};
    partywalld();
    lab();
    let mut child =
        Guard::spawn(partywall(&["demo", "--quick", "--size", "1M", "--no-namespaces"]).stdout(Stdio::piped()));
    let mut lines = BufReader::new(child.0.stdout.take().unwrap()).lines();
    // Both are up and attached.
    assert!(lines.any(|line| line.unwrap().contains("both machines see all windows")), "it never came to the machines");
    std::thread::spawn(move || lines.for_each(drop));
    let lab = lab_of(child.0.id());
    assert!(left_by_lab(lab).len() > 3, "machines, broker and folders are there: {:?}", left_by_lab(lab));
    kill_process(Pid::from_child(&child.0), Signal::INT).unwrap();
    let pid = child.0.id();
    let output = child.output();
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    assert!(said(&output).contains("interrupted"), "{}", said(&output));
    assert_eq!(left_by_lab(lab), Vec::<String>::new());
    assert_eq!(left_by(pid), Vec::<String>::new());
}

#[test]
fn demo_without_lab_skips_machines_and_says_why() {
    let dir = tempfile::tempdir().unwrap();
    let copy = dir.path().join("partywall");
    common::copy_program(common::PARTYWALL, &copy);
    common::copy_program(partywalld(), dir.path().join("partywalld"));
    let run = || {
        let mut command = Command::new(&copy);
        command.args(["demo", "--quick", "--size", "1M", "--no-namespaces"]).env_remove("PARTYWALL_BROKER");
        Guard::spawn(command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped())).output()
    };
    let output = run();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", said(&output));
    assert!(text.contains("left out: partywall-lab is neither beside"), "{text}");
    // A program that finds no QEMU reports that, and the demo goes on.
    let fake = dir.path().join("partywall-lab");
    common::make_script(&fake, "echo '   left out: no such tool'\nexit 69");
    let output = run();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("left out: no such tool"), "{text}{}", said(&output));
    // A program that fails is a failure of the demo.
    common::make_script(&fake, "exit 1");
    let output = run();
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    assert!(said(&output).contains("virtual machines failed"), "{}", said(&output));
}

#[test]
fn quick_demo_shows_both_transports_and_leaves_nothing() {
    for more in [&[][..], &["--no-namespaces"]] {
        let child = Guard::spawn(&mut demo(&[&["--quick", "--size", "4M"], more].concat()));
        let pid = child.0.id();
        let output = child.output();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{text}{}", said(&output));
        for word in [
            "Partywall",
            "TCP over",
            "round trip",
            "p99.9",
            "SHA-256",
            "100000 nodes",
            "looks up one key",
            if can_mount() { "all 2 reads of 4.00 MiB" } else { "left out: " },
            "$ ",
            "Unmodified programs",
            "Checked: no namespace",
        ] {
            assert!(text.contains(word), "{word} is missing:\n{text}");
        }
        assert_eq!(left_by(pid), Vec::<String>::new());
    }
}

#[test]
fn interrupted_demo_leaves_nothing() {
    let mut command = demo(&["--size", "64M", "--rounds", "99"]);
    let mut child = Guard::spawn(command.stdout(Stdio::piped()));
    wait_until_it_transfers(&mut child.0);
    let pid = child.0.id();
    kill_process(Pid::from_child(&child.0), Signal::INT).unwrap();
    let output = child.output();
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    assert!(said(&output).contains("interrupted"), "{}", said(&output));
    assert_eq!(left_by(pid), Vec::<String>::new());
}

#[test]
fn interrupted_demo_unmounts_its_directory() {
    if !can_mount() {
        println!("skipped: a mount needs /dev/fuse, and root or fusermount3");
        return;
    }
    let mut child = Guard::spawn(demo(&["--rounds", "1", "--size", "64M"]).stdout(Stdio::piped()));
    wait_until_it_says(&mut child.0, "mounted b:files");
    let pid = child.0.id();
    kill_process(Pid::from_child(&child.0), Signal::INT).unwrap();
    let output = child.output();
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    assert_eq!(left_by(pid), Vec::<String>::new());
}

#[test]
fn mount_of_killed_demo_is_removed_by_next_demo() {
    use std::io::{BufRead, BufReader};
    if !can_mount() {
        println!("skipped: a mount needs /dev/fuse, and root or fusermount3");
        return;
    }
    file_system();
    // The demo of this process. It lives until all is set up, so that no demo of another test removes it before.
    let mut killed = Guard::spawn(Command::new("sleep").arg("1000"));
    let name = format!("pw-demo-{}-x", killed.0.id());
    let stale = Path::new("/dev/shm").join(&name);
    let shared = tempfile::tempdir().unwrap();
    std::fs::write(shared.path().join("file"), "kept").unwrap();
    std::fs::create_dir_all(stale.join("mounted")).unwrap();
    let started = |command: &mut Command| {
        let mut child = Guard::spawn(command.stdin(Stdio::null()).stdout(Stdio::piped()));
        let mut line = String::new();
        BufReader::new(child.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
        (child, line)
    };
    let mut export = partywall(&["fs", "export"]);
    let (_export, said) = started(export.arg(shared.path()).args(["--tcp", "127.0.0.1:0", "--squash", "none"]));
    let address = said.trim().rsplit(' ').next().unwrap();
    let mut mount = partywall(&["fs", "mount", "--transport", "tcp", address]);
    let (_mount, said) = started(mount.arg(stale.join("mounted")));
    assert!(said.starts_with("mounted") && !mounts(&name).is_empty(), "{said}");
    killed.kill();
    assert!(Guard::spawn(&mut demo(&["--quick", "--size", "1M"])).output().status.success());
    assert_eq!(mounts(&name), Vec::<String>::new());
    assert!(!stale.exists());
    assert_eq!(std::fs::read_to_string(shared.path().join("file")).unwrap(), "kept");
}

/// `partywall-lab net`, if this user can run it.
fn net() -> Option<Command> {
    if !rustix::process::geteuid().is_root() || !Path::new("/dev/net/tun").exists() {
        println!("skipped: a bridge needs root and /dev/net/tun");
        return None;
    }
    devices();
    let mut command = Command::new(lab());
    command.args(["net", "--quick"]).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    Some(command)
}

#[test]
fn plain_machines_are_measured_over_switch_and_bridge() {
    let Some(mut command) = net() else { return };
    let child = Guard::spawn(&mut command);
    let pid = child.0.id();
    let output = child.output();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", said(&output));
    for word in
        ["without Partywall inside", "10.99.0.2", "B/s", "times as fast as tap and bridge", "Checked: no machine"]
    {
        assert!(text.contains(word), "{word} is missing:\n{text}");
    }
    assert_eq!(left_by_lab(pid), Vec::<String>::new());
}

#[test]
fn interrupted_measurement_of_the_switch_leaves_nothing() {
    let Some(mut command) = net() else { return };
    let mut child = Guard::spawn(&mut command);
    // The stream begins.
    wait_until_it_says(&mut child.0, "10.99.0.2");
    let pid = child.0.id();
    assert!(left_by_lab(pid).len() > 3, "machines, switch and folders are there: {:?}", left_by_lab(pid));
    kill_process(Pid::from_child(&child.0), Signal::INT).unwrap();
    let output = child.output();
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    assert!(said(&output).contains("interrupted"), "{}", said(&output));
    assert_eq!(left_by_lab(pid), Vec::<String>::new());
}

/// Reads its output up to the first transfer.
fn wait_until_it_transfers(child: &mut Child) {
    wait_until_it_says(child, "tcp-cat");
}

/// Reads its output up to a line with this text.
fn wait_until_it_says(child: &mut Child, text: &str) {
    use std::io::{BufRead, BufReader};
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().contains(text)), "it never said {text}");
    // The rest is read, so that it is not stopped by a closed pipe.
    std::thread::spawn(move || lines.for_each(drop));
}

#[test]
fn demo_cleans_up_after_killed_demo() {
    let mut command = demo(&["--size", "64M", "--rounds", "99"]);
    let mut child = Guard::spawn(command.stdout(Stdio::piped()));
    wait_until_it_transfers(&mut child.0);
    let pid = child.0.id();
    child.kill();
    assert!(!left_by(pid).is_empty(), "the kill came too late to show anything");
    assert!(Guard::spawn(&mut demo(&["--quick", "--size", "1M"])).output().status.success());
    // The next demo ends no processes; it removes files and namespaces.
    let named: Vec<_> = left_by(pid).into_iter().filter(|left| !left.contains(' ')).collect();
    assert_eq!(named, Vec::<String>::new());
    end_orphans(pid);
}

/// The broker of the killed demo, by its unique directory.
fn end_orphans(pid: u32) {
    for process in std::fs::read_dir("/proc").unwrap().flatten() {
        let line = std::fs::read(process.path().join("cmdline")).unwrap_or_default();
        let ours = String::from_utf8_lossy(&line).contains(&format!("pw-demo-{pid}-"));
        let number = process.file_name().to_string_lossy().parse::<i32>().ok().and_then(Pid::from_raw);
        if let (true, Some(number)) = (ours, number) {
            let _ = kill_process(number, Signal::KILL);
        }
    }
}

#[test]
fn demo_without_broker_says_why_and_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let copy = dir.path().join("partywall");
    common::copy_program(common::PARTYWALL, &copy);
    common::make_script(&dir.path().join("partywalld"), "echo no such luck >&2\nexit 1");
    let mut command = Command::new(&copy);
    command
        .args(["demo", "--quick", "--size", "1M", "--no-vm"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let child = Guard::spawn(&mut command);
    let pid = child.0.id();
    let output = child.output();
    assert_eq!(output.status.code(), Some(69), "{}", said(&output));
    assert!(said(&output).contains("no such luck"), "{}", said(&output));
    assert_eq!(left_by(pid), Vec::<String>::new());
    assert!(Path::new("/proc/self").exists());
}
