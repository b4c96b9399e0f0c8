use super::client::{file_user, start_time};
use super::*;
use serde_json::json;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// A monitor that says `script`, one line after each line it hears (the first at once).
fn monitor(script: &[&'static str]) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("qmp");
    let listener = UnixListener::bind(&path).unwrap();
    let script = script.to_vec();
    std::thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        let mut heard = BufReader::new(stream.try_clone().unwrap());
        for (n, line) in script.iter().enumerate() {
            if n > 0 {
                heard.read_line(&mut String::new()).unwrap();
            }
            (&stream).write_all(line.as_bytes()).unwrap();
        }
        let _ = (&stream).read(&mut [0; 1000]);
    });
    (dir, path)
}

const HELLO: &str = "{\"QMP\": {\"version\": {}, \"capabilities\": []}}\n";
const DONE: &str = "{\"return\": {}}\n";

#[test]
fn file_user_is_the_fourth_uid() {
    assert_eq!(file_user("Name:\tqemu\nUid:\t0\t1\t2\t64055\nGid:\t3\t3\t3\t3\n"), Some(64055));
    assert_eq!(file_user("Name:\tUid:\n"), None);
    let (_dir, path) = monitor(&[HELLO, DONE]);
    assert_eq!(Qmp::connect(&path).unwrap().user().unwrap(), rustix::process::geteuid().as_raw());
}

#[test]
fn start_of_process_is_boot_and_field_22() {
    let ticks = 50 * rustix::param::clock_ticks_per_second();
    let stat = format!("7 (a) 1 b) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 {ticks} 20\n");
    assert_eq!(start_time(&stat, "cpu 1 2\nbtime 1000\n"), Some(1050));
    assert_eq!(start_time("7 (a) S 1\n", "btime 1000\n"), None);
    let own = std::fs::read_to_string("/proc/self/stat").unwrap();
    let started = start_time(&own, &std::fs::read_to_string("/proc/stat").unwrap()).unwrap();
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs() as i64;
    assert!((now - 3600..=now + 1).contains(&started), "{started}, and it is {now}");
}

#[test]
fn socket_of_another_user_names_the_user() {
    let (_dir, path) = monitor(&[HELLO, DONE]);
    if rustix::process::geteuid().is_root() {
        std::os::unix::fs::chown(&path, Some(64055), None).unwrap();
        assert_eq!(Qmp::connect(&path).unwrap().user().unwrap(), 64055);
    }
}

#[test]
fn events_between_answers_are_kept() {
    let event = "{\"event\": \"STOP\", \"data\": {\"n\": 1}}\n{\"return\": {\"status\": \"running\"}}\n";
    let (_dir, path) = monitor(&[HELLO, DONE, event]);
    let mut qmp = Qmp::connect(&path).unwrap();
    assert_eq!(qmp.execute("query-status", json!({})).unwrap()["status"], "running");
    let soon = Instant::now() + Duration::from_millis(20);
    assert!(!qmp.wait_event("STOP", soon, |d| d["n"] == 2).unwrap());
    assert!(qmp.wait_event("STOP", soon, |d| d["n"] == 1).unwrap());
    assert!(!qmp.wait_event("STOP", soon, |_| true).unwrap(), "taken");
}

#[test]
fn events_without_end_end_the_exchange_and_fill_no_memory() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("qmp");
    let listener = UnixListener::bind(&path).unwrap();
    let monitor = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(format!("{HELLO}{DONE}").as_bytes()).unwrap();
        let long = format!("{{\"event\": \"LONG\", \"data\": \"{}\"}}\n", "x".repeat(20_000));
        let event = format!("{long}{{\"event\": \"STOP\"}}\n");
        while stream.write_all(event.as_bytes()).is_ok() {}
    });
    let mut qmp = Qmp::connect_within(&path, Duration::from_millis(300)).unwrap();
    for command in ["query-status", "query-name"] {
        assert!(matches!(qmp.execute(command, json!({})), Err(QmpError::Lost { .. })));
    }
    let kept = qmp.take_events();
    assert!(kept.len() <= 256 && kept.iter().all(|event| event["event"] == "STOP"), "{} events", kept.len());
    drop(qmp);
    monitor.join().unwrap();
}

#[test]
fn refused_command_gives_reason_and_monitor_stays_usable() {
    let no = "{\"error\": {\"class\": \"GenericError\", \"desc\": \"no free slots\"}}\n";
    let (_dir, path) = monitor(&[HELLO, DONE, no, DONE]);
    let mut qmp = Qmp::connect(&path).unwrap();
    let e = qmp.execute("device_add", json!({})).unwrap_err().to_string();
    assert!(e.contains("device_add") && e.contains("no free slots"), "{e}");
    assert!(qmp.execute("query-status", json!({})).is_ok());
}

#[test]
fn pipelined_commands_get_their_own_answers() {
    let answers = "{\"return\": 1}\n{\"event\": \"STOP\"}\n{\"error\": {\"desc\": \"no\"}}\n{\"return\": 3}\n";
    // All three are heard before the first answer: the script answers after the third.
    let (_dir, path) = monitor(&[HELLO, DONE, "", "", answers]);
    let mut qmp = Qmp::connect(&path).unwrap();
    let done = qmp.execute_all(&[("a", json!({})), ("b", json!({})), ("c", json!({}))]).unwrap();
    assert_eq!(done[0].as_ref().unwrap(), 1);
    assert!(matches!(&done[1], Err(QmpError::Refused { command, .. }) if command == "b"));
    assert_eq!(done[2].as_ref().unwrap(), 3);
    assert!(qmp.wait_event("STOP", Instant::now(), |_| true).unwrap(), "events are kept");
}

#[test]
fn socket_without_monitor_is_reported() {
    let (_dir, path) = monitor(&["login: \n"]);
    let e = Qmp::connect(&path).unwrap_err();
    assert!(matches!(&e, QmpError::NotQmp { said, .. } if said.starts_with("login")), "{e}");
    let (_dir, path) = monitor(&[]);
    let e = Qmp::connect(path.with_file_name("absent")).unwrap_err().to_string();
    assert!(e.contains("-qmp unix:"), "{e}");
}

#[test]
fn machine_that_ends_in_mid_command_is_lost() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("qmp");
    let listener = UnixListener::bind(&path).unwrap();
    let server = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(HELLO.as_bytes()).unwrap();
        let mut heard = BufReader::new(stream.try_clone().unwrap());
        heard.read_line(&mut String::new()).unwrap();
        stream.write_all(DONE.as_bytes()).unwrap();
        heard.read_line(&mut String::new()).unwrap();
    });
    let mut qmp = Qmp::connect(&path).unwrap();
    assert!(matches!(qmp.execute("quit", json!({})), Err(QmpError::Lost { .. })));
    server.join().unwrap();
}

#[test]
fn connect_to_full_queue_is_busy_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("qmp");
    let (family, kind) = (rustix::net::AddressFamily::UNIX, rustix::net::SocketType::STREAM);
    let listener = rustix::net::socket(family, kind, None).unwrap();
    rustix::net::bind(&listener, &rustix::net::SocketAddrUnix::new(&path).unwrap()).unwrap();
    // As QEMU listens, which accepts no connection while it has a client.
    rustix::net::listen(&listener, 1).unwrap();
    let waiting: Vec<_> = (0..2).map(|_| std::os::unix::net::UnixStream::connect(&path).unwrap()).collect();
    let (tell, told) = std::sync::mpsc::channel();
    let connecting = std::thread::spawn(move || {
        let errors: Vec<QmpError> = (0..3).map(|_| Qmp::connect(&path).unwrap_err()).collect();
        tell.send(errors).unwrap();
    });
    let errors = told.recv_timeout(Duration::from_secs(60));
    // Whatever still waits for room fails now.
    drop((listener, waiting));
    connecting.join().unwrap();
    let errors = errors.expect("a connection waits for room in the queue");
    assert!(errors.iter().all(|e| matches!(e, QmpError::Busy { .. })), "{errors:?}");
}
