//! `partywall ivshmem-server` as machines and users see it. The protocol in depth is tested where the server is (`crates/vm`), and
//! real machines in `crates/lab`.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod common;

use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use common::{Guard, partywall};
use rustix::process::{Pid, Signal, kill_process};

/// Longer is a hang.
const HANG: Duration = Duration::from_secs(120);

fn connect(path: &Path) -> UnixStream {
    let deadline = Instant::now() + HANG;
    loop {
        if let Ok(socket) = UnixStream::connect(path) {
            socket.set_read_timeout(Some(HANG)).unwrap();
            return socket;
        }
        assert!(Instant::now() < deadline, "nobody serves at {}", path.display());
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn number(mut socket: &UnixStream) -> i64 {
    let mut bytes = [0; 8];
    socket.read_exact(&mut bytes).unwrap();
    i64::from_le_bytes(bytes)
}

#[test]
fn ivshmem_server_removes_its_socket_when_it_ends() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pair.sock");
    let words = ["ivshmem-server", path.to_str().unwrap(), "--size", "64K", "--machines", "1"];
    let server = Guard::spawn(&mut partywall(&words));
    let machine = connect(&path);
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600, "for this user alone");
    // Version, id, and what comes with the memory.
    assert_eq!([number(&machine), number(&machine), number(&machine)], [0, 0, -1]);
    let mut surplus = connect(&path);
    assert_eq!(surplus.read(&mut [0; 8]).unwrap(), 0, "one more than allowed is hung up on");

    let second = Guard::spawn(&mut partywall(&words)).output();
    assert_eq!(second.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&second.stderr).contains("in use"), "{second:?}");

    kill_process(Pid::from_child(&server.0), Signal::TERM).unwrap();
    let output = server.output();
    assert!(output.status.success(), "{output:?}");
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(said.contains("64.00 KiB") && said.contains("-device ivshmem-doorbell"), "{said}");
    assert!(!path.exists());
}

#[test]
fn impossible_device_size_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x");
    for (option, value) in
        [("--size", "5000"), ("--size", "1K"), ("--vectors", "0"), ("--vectors", "65"), ("--machines", "0")]
    {
        let output = Guard::spawn(&mut partywall(&["ivshmem-server", path.to_str().unwrap(), option, value])).output();
        assert_eq!(output.status.code(), Some(2), "{option} {value}: {output:?}");
        assert!(!path.exists());
    }
}
