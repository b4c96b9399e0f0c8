//! A program in a virtual machine and a program of another host reach each other by name: real brokers, gateways and an etcd.
#![cfg(not(miri))]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

#[allow(dead_code, reason = "other tests use the rest")]
mod world;

#[path = "../../gateway/tests/common/ports.rs"]
mod ports;

use partywall_lab::Guest;
use ports::free_port;
use std::fs::{self, File};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;
use world::{HANG, Inside, Process, World, program};

/// Any domain may connect to any domain of the other host.
const RULES: &str = "
[[connect]]
from = '*'
to = '*'
to_host = '*'
[[connect]]
from = '*'
from_host = '*'
to = '*'
";

fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + HANG;
    while !holds() {
        assert!(Instant::now() < deadline, "it does not happen that {what}");
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
}

fn start(command: &mut Command) -> Process {
    Process(command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap_or_else(|e| panic!("{command:?}: {e}")))
}

/// An etcd and its URL.
fn start_etcd(folder: &Path) -> (Process, String) {
    let (port, peers) = (free_port(), format!("http://127.0.0.1:{}", free_port()));
    let url = format!("http://127.0.0.1:{port}");
    let mut command = Command::new("etcd");
    command.arg("--data-dir").arg(folder.join("etcd")).args(["--unsafe-no-fsync", "--listen-client-urls", &url]);
    command.args(["--advertise-client-urls", &url, "--listen-peer-urls", &peers]);
    command.args(["--initial-advertise-peer-urls", &peers, "--initial-cluster", &format!("default={peers}")]);
    let etcd = start(command.stderr(Stdio::null()));
    eventually("etcd answers", || TcpStream::connect(("127.0.0.1", port)).is_ok());
    (etcd, url)
}

/// The part of a host's policy that makes it a part of the cluster. The gateway's user is the broker's administrator here.
fn cluster(host: &str, machines: bool) -> String {
    format!("{RULES}[cluster]\nhost = '{host}'\nmachines = {machines}\n")
}

/// The gateway of a host, which has its certificates in `folder`.
fn start_gateway(world: &World, host: &str, folder: &Path, etcd: &str) -> Process {
    let port = free_port();
    let config = folder.join(format!("{host}.toml"));
    let text = format!(
        "broker = '{}'\nlisten = '127.0.0.1:{port}'\naddress = '127.0.0.1:{port}'\nca = 'ca.pem'\ncertificate = '{host}.pem'\n\
         key = '{host}.key'\n[etcd]\nendpoints = ['{etcd}']\nttl = 3\n",
        world.path("broker.sock").display()
    );
    fs::write(&config, text).unwrap();
    let mut command = Command::new(program("partywall-gateway", "partywall-gateway"));
    let log = File::create(world.path("gateway.log")).unwrap();
    start(command.arg("--config").arg(config).stderr(log))
}

fn log_of(world: &World) -> String {
    world.log() + &fs::read_to_string(world.path("gateway.log")).unwrap_or_default()
}

fn sum(bytes: &[u8]) -> String {
    let mut child = Command::new("sha256sum").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), bytes).unwrap();
    String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap().trim().to_owned()
}

/// A program of the other host sends a file to one in the guest.
fn host_reaches_guest(far: &World, guest: &Guest, bytes: &[u8]) {
    let receiver = guest.begin("exec partywall --domain a cat -l inbox < /dev/null > /tmp/got");
    guest.wait_service("inbox");
    fs::write(far.path("file"), bytes).unwrap();
    eventually("the guest's domain is reached", || {
        let mut command = far.command(&["--domain", "web", "cat", "a:inbox"]);
        let done = command.stdin(File::open(far.path("file")).unwrap()).output().unwrap();
        let said = String::from_utf8_lossy(&done.stderr).into_owned();
        assert!(done.status.success() || said.contains("no domain is called a"), "{said}{}", log_of(far));
        done.status.success()
    });
    let done = receiver.wait(HANG).unwrap();
    assert_eq!(done.status, 0, "{}", String::from_utf8_lossy(&done.stderr));
    assert_eq!(guest.sh("sha256sum < /tmp/got"), sum(bytes));
}

/// A program in the guest sends the file that it has got to one of the other host.
fn guest_reaches_host(home: &World, far: &World, guest: &Guest, bytes: &[u8]) {
    let mut command = far.command(&["--domain", "db", "cat", "-l", "queries"]);
    let got = File::create(far.path("got")).unwrap();
    let mut receiver = Process(command.stdout(got).spawn().unwrap());
    eventually("the service is there", || far.partywall(&["list", "services"]).text().contains("queries"));
    eventually("the other host's domain is reached", || {
        let done = guest.run(&["sh", "-c", "exec partywall --domain a cat db:queries < /tmp/got"]).unwrap();
        let said = String::from_utf8_lossy(&done.stderr).into_owned();
        // The directory of the cluster hears of the domain, and then of the service.
        let is_early = said.contains("no domain is called db") || said.contains("has no service queries");
        assert!(done.status == 0 || is_early, "{said}{}{}", log_of(home), log_of(far));
        done.status == 0
    });
    let mut status = None;
    eventually("the receiver ends", || {
        status = receiver.0.try_wait().unwrap();
        status.is_some()
    });
    assert!(status.unwrap().success());
    assert_eq!(sum(&fs::read(far.path("got")).unwrap()), sum(bytes));
}

#[test]
fn guest_and_program_of_other_host_meet_by_name() {
    let there = Command::new("etcd").arg("--version").stdout(Stdio::null()).status().is_ok();
    assert!(there, "etcd is missing (scripts/setup.sh programs brings it)");
    let folder = tempfile::Builder::new().prefix("partywall-lab-").tempdir().unwrap();
    let (_etcd, url) = start_etcd(folder.path());
    let made = Command::new(program("partywall-gateway", "partywall-gateway"))
        .arg("certificates")
        .arg(folder.path())
        .args(["alpha", "beta"])
        .output()
        .unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let (mut home, mut far) = (World::new("cluster"), World::new("cluster-far"));
    for world in [&mut home, &mut far] {
        world.kill_broker();
    }
    home.start_broker_with(&cluster("alpha", true));
    far.start_broker_with(&cluster("beta", false));
    let _gateways =
        [("alpha", &home), ("beta", &far)].map(|(host, world)| start_gateway(world, host, folder.path(), &url));
    let [guest] = home.boot(["a"]);
    let said = home.attach(&guest);
    assert_eq!(said.status, 0, "{}{}", String::from_utf8_lossy(&said.stderr), home.log());
    home.wait_ready(1);

    let bytes: Vec<u8> = (0..3_000_000u32).flat_map(|n| (n.wrapping_mul(0x9e37_79b9) >> 24).to_le_bytes()).collect();
    host_reaches_guest(&far, &guest, &bytes);
    guest_reaches_host(&home, &far, &guest, &bytes);
    let shown = home.partywall(&["list", "--cluster"]).text();
    assert!(shown.contains("of 2"), "{shown}");

    // Machines have no part in it any more.
    home.set_policy(&cluster("alpha", false));
    eventually("the guest no longer reaches other hosts", || {
        let done = guest.run(&["sh", "-c", "exec partywall --domain a cat db:queries < /dev/null"]).unwrap();
        String::from_utf8_lossy(&done.stderr).contains("no domain is called db")
    });
}
