//! The lab itself: that commands, files and faults do what they say.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

use partywall_lab::{GuestOptions, ImageOptions, Lab, LabError};
use rustix::process::Signal;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Longer is a hang.
const HANG: Duration = Duration::from_secs(180);

#[test]
fn guest_runs_commands_moves_files_and_takes_faults() {
    let lab = Lab::new("guests", &ImageOptions::default()).unwrap();
    let guest = lab.boot(GuestOptions::new("a")).unwrap();
    println!("{} guest up in {:?}", lab.accel(), guest.booted_in());
    assert_eq!(guest.shell("uname -r; hostname").unwrap(), format!("{}\na", lab.image().version));

    // Status, output and errors are separate.
    let output = guest.run(&["sh", "-c", "echo out; echo err >&2; exit 3"]).unwrap();
    assert_eq!((output.status, &output.stdout[..], &output.stderr[..]), (3, &b"out\n"[..], &b"err\n"[..]));
    let e = guest.shell("echo why >&2; false").unwrap_err().to_string();
    assert!(e.contains("why") && e.contains("last lines of"), "{e}");
    let e = guest.run(&["no-such-program"]).unwrap_err();
    assert!(matches!(&e, LabError::Refused { why, .. } if why.contains("no-such-program")), "{e}");

    // Files come back as they went, larger than any frame.
    let content: Vec<u8> = (0..700_001u32).map(|i| (i * 7 % 251) as u8).collect();
    guest.put(&content, "/tmp/deep/file", 0o640).unwrap();
    assert_eq!(guest.shell("stat -c %a:%s /tmp/deep/file").unwrap(), "640:700001");
    assert!(guest.get("/tmp/deep/file").unwrap() == content);
    assert!(matches!(guest.get("/no/such").unwrap_err(), LabError::Refused { .. }));

    // Several commands at a time, one of which is fed and one killed.
    let mut cat = guest.start(&["cat"]).unwrap();
    let sleeper = guest.start(&["sleep", "1000"]).unwrap();
    cat.input(b"fed\n").unwrap();
    cat.wait_for("fed", HANG).unwrap();
    cat.end_input().unwrap();
    assert_eq!(cat.wait(HANG).unwrap().status, 0);
    sleeper.signal(Signal::TERM).unwrap();
    assert_eq!(sleeper.wait(HANG).unwrap().status, -15);

    // Paused it is silent, and afterwards goes on.
    guest.pause().unwrap();
    let late = guest.start(&["echo", "late"]).unwrap();
    let e = late.wait(Duration::from_millis(200)).unwrap_err();
    assert!(matches!(e, LabError::Silent { .. }), "{e}");
    guest.resume().unwrap();
    assert_eq!(guest.shell("echo again").unwrap(), "again");

    // A reset loses what was in memory, and commands that ran are said to be lost.
    let lost = guest.start(&["sleep", "1000"]).unwrap();
    guest.reset().unwrap();
    assert!(lost.wait(HANG).unwrap_err().to_string().contains("reset"));
    assert_eq!(guest.shell("ls /tmp").unwrap(), "");

    guest.kill();
    assert!(guest.has_ended());
    let e = guest.shell("true").unwrap_err().to_string();
    assert!(e.contains("QEMU has ended"), "{e}");
}

#[test]
fn guest_that_cannot_start_reports_cause() {
    let lab = Lab::new("no-start", &ImageOptions::default()).unwrap();
    let e = lab.boot(GuestOptions::new("b").arguments(["-device", "no-such-device"])).unwrap_err().to_string();
    assert!(e.contains("no-such-device"), "{e}");
}

/// Set in a process that a test has started.
const KEEPER: &str = "PARTYWALL_TEST_KEEPER";

#[test]
fn guest_ends_with_its_killed_parent() {
    let mut keeper = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "helper_process_that_keeps_guest", "--nocapture"])
        .env(KEEPER, "yes")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(keeper.stdout.take().unwrap()).lines();
    let pid = lines.map_while(Result::ok).find_map(|line| Some(line.strip_prefix("guest ")?.to_owned())).unwrap();
    let process = Path::new("/proc").join(pid);
    assert!(process.exists());
    keeper.kill().unwrap();
    keeper.wait().unwrap();
    let deadline = Instant::now() + HANG;
    while process.exists() {
        assert!(Instant::now() < deadline, "{} is still there", process.display());
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Not a separate test: the test above kills it.
#[test]
fn helper_process_that_keeps_guest() {
    if std::env::var_os(KEEPER).is_some() {
        let lab = Lab::new("keeper", &ImageOptions::default()).unwrap();
        let guest = lab.boot(GuestOptions::new("k")).unwrap();
        println!("\nguest {}", guest.pid());
        std::thread::sleep(HANG);
    }
}
