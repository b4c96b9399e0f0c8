//! What is not Partywall's at the ports of a switch: the host's kernel behind an uplink, and DPDK's virtio-user in place of a machine.
#![cfg(not(miri))]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

#[allow(dead_code, reason = "other tests use the rest")]
mod common;

use common::HANG;
use common::datagram::{cut_header, datagram};
use partywall_vhost::PortCounters;
use partywall_vhost::control::{PortReport, SwitchReport};
use partywall_vhost::driver::{DriverOptions, GuestDriver};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// A process that ends with the test.
struct Guarded(Child);

impl Drop for Guarded {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The first of these programs that is not there.
fn missing<'a>(programs: &[&'a str]) -> Option<&'a str> {
    let folders = || ["/bin", "/sbin", "/usr/bin", "/usr/sbin"].map(Path::new);
    programs.iter().copied().find(|name| !folders().iter().any(|folder| folder.join(name).exists()))
}

/// A switch with these ports, in a separate network namespace if it is `apart`.
fn switch(folder: &Path, apart: bool, ports: &[&str]) -> Guarded {
    let program = env!("CARGO_BIN_EXE_partywall-net");
    let mut command = Command::new(if apart { "unshare" } else { program });
    if apart {
        command.args(["--net", program]);
    }
    command.arg("--folder").arg(folder).args(["run", "lan"]).args(ports);
    let switch = Guarded(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap());
    // It answers last, when all its ports listen.
    let deadline = Instant::now() + HANG;
    while !show(folder).status.success() {
        assert!(Instant::now() < deadline, "the switch does not answer");
        std::thread::sleep(Duration::from_millis(2));
    }
    switch
}

/// What the switch says of its ports.
fn show(folder: &Path) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_partywall-net"));
    command.arg("--folder").arg(folder).args(["show", "lan", "--json"]).output().unwrap()
}

fn socket(folder: &Path, port: &str) -> PathBuf {
    folder.join("lan").join(format!("{port}.port"))
}

/// Receives datagrams, shows their lengths and bytes, and sends as many bytes as it got, to be cut by the kernel or behind it.
const HOST: &str = "
import socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind(('10.0.0.2', 9))
print('ready', flush=True)
got = b''
while len(got) < 60000:
    piece = s.recv(65535)
    print(len(piece), flush=True)
    got += piece
print(got == bytes(n % 251 for n in range(60000)), flush=True)
s.setsockopt(17, 103, 1472)
s.sendto(got, ('10.0.0.1', 4096))
";

/// Whether the kernel takes and gives datagrams that are still to be cut over a tap device, as Linux 6.2 was the first to do.
fn kernel_takes_datagrams() -> bool {
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    let mut numbers = release.split(['.', '-']).map_while(|part| part.parse::<u32>().ok());
    (numbers.next(), numbers.next()) >= (Some(6), Some(2))
}

#[test]
fn datagrams_pass_uplink_whole_in_both_directions() {
    let missing = missing(&["unshare", "nsenter", "ip", "python3"]);
    if !rustix::process::geteuid().is_root() || !Path::new("/dev/net/tun").exists() || missing.is_some() {
        println!(
            "skipped: an uplink needs root, /dev/net/tun, unshare, nsenter, ip and python3 (missing: {missing:?})"
        );
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let switch = switch(folder.path(), true, &["--port", "a", "--tap", "up0"]);
    let mut a = GuestDriver::connect(&socket(folder.path(), "a"), DriverOptions::default()).unwrap();
    let inside = |program: &str| {
        let mut command = Command::new("nsenter");
        command.args([&format!("--net=/proc/{}/ns/net", switch.0.id()), program]);
        command
    };
    for line in [
        "link set up0 address 02:00:00:00:00:02",
        "link set up0 up",
        "address add 10.0.0.2/24 dev up0",
        "neighbour replace 10.0.0.1 lladdr 02:00:00:00:00:01 dev up0",
    ] {
        assert!(inside("ip").args(line.split(' ')).status().unwrap().success(), "ip {line} fails");
    }
    let mut command = inside("python3");
    let mut host = Guarded(command.args(["-c", HOST]).stdout(Stdio::piped()).spawn().unwrap());
    let mut said = BufReader::new(host.0.stdout.take().unwrap()).lines().map(Result::unwrap);
    assert_eq!(said.next().as_deref(), Some("ready"));

    let payload: Vec<u8> = (0..60_000).map(|n| (n % 251) as u8).collect();
    assert!(a.send_with(&cut_header(false, 0, 1472), &datagram(false, 0, 1, &payload)).unwrap());
    let lengths: Vec<String> = said.by_ref().take(41).collect();
    assert!(lengths[..40].iter().all(|length| length == "1472") && lengths[40] == "1120", "{lengths:?}");
    assert_eq!(said.next().as_deref(), Some("True"));

    let (mut got, mut frames) = (Vec::new(), 0);
    while got.len() < payload.len() {
        let one = a.wait(HANG).unwrap().expect("nothing comes from the uplink");
        // Everything else is the kernel's own search for neighbours.
        if one[24..26] == [8, 0] && one[35] == 17 {
            assert!(one[1] == 0 || one[1] == 5);
            got.extend_from_slice(&one[12 + 42..]);
            frames += 1;
        }
    }
    assert!(got == payload);
    assert_eq!(frames, if kernel_takes_datagrams() { 1 } else { 41 });
}

/// DPDK as the front end of both ports: its `testpmd` sends frames from one to the other and back, over and over. With `seals`, its memory
/// is sealed by a small library.
fn virtio_user(folder: &Path, seals: Option<&Path>, options: &str) -> Guarded {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let cpus = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap().trim();
    let cpu = cpus.split([',', '-']).next().unwrap();
    let mut command = Command::new("dpdk-testpmd");
    command.args(["--no-huge", "-m", "256", "--no-pci", "--no-telemetry", "--no-shconf"]);
    command.args(["--lcores", &format!("0@{cpu},1@{cpu}")]);
    for (n, port) in ["a", "b"].iter().enumerate() {
        let path = socket(folder, port);
        command
            .args(["--vdev", &format!("net_virtio_user{n},path={},mac=02:00:00:00:00:0{n}{options}", path.display())]);
    }
    command.args(["--", "--forward-mode=io", "--tx-first", "--nb-cores=1", "--disable-link-check"]);
    command.args(["--eth-peer=0,02:00:00:00:00:01", "--eth-peer=1,02:00:00:00:00:00", "--total-num-mbufs=4096"]);
    if let Some(seals) = seals {
        command.env("LD_PRELOAD", seals);
    }
    let log = || std::fs::File::options().create(true).append(true).open(folder.join("log")).unwrap();
    // It ends at the end of a line of its input.
    Guarded(command.stdin(Stdio::piped()).stdout(log()).stderr(log()).spawn().unwrap())
}

/// The counters of both ports, when the ports are as wanted.
fn counters(folder: &Path, wanted: impl Fn(&PortReport) -> bool) -> Vec<PortCounters> {
    let deadline = Instant::now() + HANG;
    loop {
        let report: SwitchReport = serde_json::from_slice(&show(folder).stdout).unwrap();
        if report.ports.iter().all(&wanted) {
            return report.ports.iter().map(|port| port.counters).collect();
        }
        if Instant::now() >= deadline {
            panic!("{report:?}\n{}", std::fs::read_to_string(folder.join("log")).unwrap_or_default());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn dpdk_in_place_of_machines_is_served_if_its_memory_is_sealed() {
    if let Some(missing) = missing(&["dpdk-testpmd", "cc"]) {
        println!("skipped: {missing} is not there (Debian's dpdk-dev and gcc)");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let seals = folder.join("sealed.so");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/../bench/peers/sealed.c");
    let built = Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&seals).arg(source).status().unwrap();
    assert!(built.success());
    let _switch = switch(folder, false, &["--port", "a", "--port", "b"]);

    let refused = virtio_user(folder, None, "");
    counters(folder, |port| port.counters.broken > 0);
    drop(refused);
    // Until then it may connect and be refused again.
    let before = counters(folder, |port| !port.occupied);
    assert!(before.iter().all(|port| port.sent == 0), "{before:?}");
    // Packed queues are not offered, so it uses the other form.
    let mut least = 0;
    for options in ["", ",mrg_rxbuf=0", ",packed_vq=1"] {
        least += 2000;
        let mut dpdk = virtio_user(folder, Some(&seals), options);
        let now = counters(folder, |port| port.counters.sent >= least && port.counters.received >= least);
        assert!(now.iter().zip(&before).all(|(now, then)| now.broken == then.broken), "{options}: {now:?}");
        assert!(now.iter().all(|port| port.malformed == 0 && port.spoofed == 0), "{options}: {now:?}");
        dpdk.0.stdin.take().unwrap().write_all(b"\n").unwrap();
        assert!(dpdk.0.wait().unwrap().success(), "{options}");
        least = counters(folder, |_| true).iter().map(|port| port.sent.max(port.received)).max().unwrap();
    }
}
