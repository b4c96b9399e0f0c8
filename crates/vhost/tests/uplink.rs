//! Uplinks: tap devices of the host's kernel, in network namespaces that end with the test.
#![cfg(not(miri))]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

#[allow(dead_code, reason = "other tests use the rest")]
mod common;
#[path = "uplink/world.rs"]
mod world;

use common::datagram::ones_complement;
use common::segment::{large_segment, segments};
use common::{HANG, introduce};
use partywall_vhost::driver::{DriverOptions, GuestDriver, plain_features};
use std::io::{BufRead, BufReader, Write};
use std::process::Stdio;
use std::time::{Duration, Instant};
use world::{Guarded, Host, Namespace, is_possible, processor_time, wait_until};

/// Sends datagrams of 1,400 bytes to the driver's address.
const DATAGRAMS: &str = "
import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for n in range(80):
    s.sendto(bytes([n]) * 1400, ('10.0.0.1', 9))
";

#[test]
fn rate_of_uplink_holds_frames_back_without_loss_or_spinning() {
    if !is_possible() {
        return;
    }
    let host = Host::new();
    host.ask(&["add", "lan", "a"]);
    host.ask(&["add", "lan", "up0", "--tap", "--rate", "50K"]);
    for line in [
        "link set up0 up",
        "address add 10.0.0.2/24 dev up0",
        "neighbour replace 10.0.0.1 lladdr 02:00:00:00:00:01 dev up0",
    ] {
        host.namespace.ip(line);
    }
    let mut a = host.driver("a");
    introduce(&mut a, 1);
    let (start, spent) = (Instant::now(), processor_time(host.switch_pid()));
    assert!(host.namespace.command("python3").args(["-c", DATAGRAMS]).status().unwrap().success());
    let mut got = Vec::new();
    while got.len() < 80 {
        let frame = a.wait(HANG).unwrap().expect("a datagram is lost");
        // Everything else is the kernel's own search for neighbours.
        if frame.len() == 12 + 42 + 1400 && frame[24..26] == [8, 0] {
            got.push(frame[12 + 42]);
        }
    }
    assert!(got.iter().copied().eq(0..80), "{got:?}");
    // More than 115,000 bytes, 65,549 of them as a burst: it can take longer, and not less.
    let (took, spent) = (start.elapsed(), processor_time(host.switch_pid()) - spent);
    assert!(took >= Duration::from_millis(900), "{took:?}");
    assert!(spent < took / 4, "the switch has not slept: {spent:?} of {took:?}");
}

/// Sends a frame by the uplink's device, behind a header of virtio, and then receives one from station 1. Prints the network of its tag, how it
/// is to be cut, and its bytes without the tag.
const TAGGED: &str = "
import socket, struct, sys
s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
s.setsockopt(263, 15, 1)
s.setsockopt(263, 8, 1)
s.bind(('up0', 3))
s.send(bytes.fromhex(sys.stdin.readline()))
while True:
    frame, aux, _, _ = s.recvmsg(70000, 100)
    status, _, _, _, _, tci, kind = struct.unpack('IIIHHHH', aux[0][2])
    if frame[10:16] == b'\\x02\\0\\0\\0\\0\\x01' and status & 0x50 == 0x50:
        print(hex(kind), tci & 0xfff, frame[1], struct.unpack('<H', frame[4:6])[0], frame[10:].hex())
        break
";

#[test]
fn tagged_large_frames_pass_the_uplink_both_ways() {
    if !is_possible() {
        return;
    }
    let host = Host::new();
    host.ask(&["add", "lan", "a"]);
    host.ask(&["add", "lan", "up0", "--tap"]);
    host.namespace.ip("link set up0 up");
    let options = DriverOptions { features: plain_features(), ..DriverOptions::default() };
    let payload: Vec<u8> = (0..20_000).map(|n| (n % 251) as u8).collect();
    for v6 in [false, true] {
        // This driver cuts nothing and is given nothing to cut.
        let mut plain = host.driver_with("a", options);
        introduce(&mut plain, 2);
        let mut python = host.namespace.command("python3");
        let python = python.args(["-c", TAGGED]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut python = Guarded(python);
        let (header, sent) = large_segment(v6, 1, 1448, &payload);
        let hex: String = [&header[..10], &sent].concat().iter().map(|byte| format!("{byte:02x}")).collect();
        writeln!(python.0.stdin.as_mut().unwrap(), "{hex}").unwrap();
        for (n, expected) in segments(v6, 1, 1448, &payload).into_iter().enumerate() {
            // Everything else is the kernel's own search for neighbours.
            let got = loop {
                let got = plain.wait(HANG).unwrap().unwrap_or_else(|| panic!("IPv6: {v6}: no segment {n}"));
                if got[24..26] == [0x81, 0] {
                    break got;
                }
            };
            assert!(got[..10] == [0; 10] && got[12..] == expected, "IPv6: {v6}: the segment {n}");
        }
        drop(plain);
        // The kernel gets a large frame as it is. This one goes from station 2 to station 1.
        let mut a = host.driver("a");
        let mut sent = sent;
        (sent[5], sent[11]) = (1, 2);
        assert!(a.send_with(&header, &sent).unwrap());
        let mut line = String::new();
        BufReader::new(python.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let untagged: String = [&sent[..12], &sent[16..]].concat().iter().map(|byte| format!("{byte:02x}")).collect();
        let kind = if v6 { 4 } else { 1 };
        assert_eq!(line.trim_end(), format!("0x8100 7 {kind} 1448 {untagged}"), "IPv6: {v6}");
    }
}

/// Another user tries to attach to the uplink. It succeeds only if the kernel refuses that.
const STRANGER: &str = "
import fcntl, os, struct
tun = os.open('/dev/net/tun', os.O_RDWR)
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
try:
    fcntl.ioctl(tun, 0x400454ca, struct.pack('16sH22x', b'up0', 0x5002))
except PermissionError:
    raise SystemExit(0)
raise SystemExit('another user has the uplink')
";

/// Station 1, the driver, asks station 2 for an echo of this number, and gets it.
fn ping(driver: &mut GuestDriver, number: u16) {
    let mut icmp = [&[8, 0, 0, 0, 0x77, 0x77][..], &number.to_be_bytes(), &[number as u8; 1000]].concat();
    let sum = ones_complement(&icmp).to_be_bytes();
    icmp[2..4].copy_from_slice(&sum);
    let length = (20 + icmp.len() as u16).to_be_bytes();
    let mut ip = [&[0x45, 0][..], &length, &[0, 1, 0x40, 0, 64, 1, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]].concat();
    let sum = ones_complement(&ip).to_be_bytes();
    ip[10..12].copy_from_slice(&sum);
    let ethernet = [2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 8, 0];
    let sent = [&ethernet[..], &ip, &icmp].concat();
    let deadline = Instant::now() + HANG;
    loop {
        // The kernel may not forward yet.
        assert!(driver.send(&sent).unwrap());
        while let Some(frame) = driver.wait(Duration::from_millis(200)).unwrap() {
            let Some((head, body)) = frame[12..].split_at_checked(42) else { continue };
            // An answer to this one, from station 2.
            if head[6..14] == [2, 0, 0, 0, 0, 2, 8, 0] && head[34] == 0 && head[38..42] == icmp[4..8] {
                assert!(body == &icmp[8..], "an echo with other bytes");
                return;
            }
        }
        assert!(Instant::now() < deadline, "there is no echo");
    }
}

/// A namespace with station 2 behind a bridge of the host, on which `up0` is.
fn container(host: &Host) -> Namespace {
    let container = Namespace::new();
    for line in [
        "link add br0 type bridge",
        "link set br0 up",
        "link set up0 master br0",
        "link set up0 up",
        "address add 192.0.2.7/24 dev up0",
        &format!("link add v0 type veth peer name c0 netns {}", container.pid()),
        "link set v0 master br0",
        "link set v0 up",
    ] {
        host.namespace.ip(line);
    }
    for line in [
        "link set c0 address 02:00:00:00:00:02",
        "address add 10.0.0.2/24 dev c0",
        "link set c0 up",
        "neighbour replace 10.0.0.1 lladdr 02:00:00:00:00:01 dev c0",
    ] {
        container.ip(line);
    }
    container
}

#[test]
fn uplink_of_a_killed_switch_keeps_bridge_and_address() {
    if !is_possible() {
        return;
    }
    let mut host = Host::new();
    host.ask(&["add", "lan", "a"]);
    host.ask(&["add", "lan", "up0", "--tap"]);
    let _container = container(&host);
    let shown = |host: &Host| {
        let text =
            host.namespace.ip("-oneline address show dev up0") + &host.namespace.ip("-oneline link show dev up0");
        assert!(text.contains("192.0.2.7/24") && text.contains("master br0"), "{text}");
    };
    let mut driver = host.driver("a");
    ping(&mut driver, 1);
    for (number, ends) in [(2, Host::kill as fn(&mut Host)), (3, Host::stop), (4, Host::kill)] {
        ends(&mut host);
        shown(&host);
        assert!(host.namespace.command("python3").args(["-c", STRANGER]).status().unwrap().success());
        host.start();
        shown(&host);
        let mut driver = host.driver("a");
        ping(&mut driver, number);
    }
    host.ask(&["remove", "lan", "up0"]);
    assert!(!host.namespace.try_ip("link show dev up0").0, "the device goes with its port");
    // Its next process has no such port either.
    host.kill();
    host.start();
    assert!(!host.namespace.try_ip("link show dev up0").0);
    assert!(!host.log().contains("WARN"), "{}", host.log());
}

#[test]
fn device_of_the_operator_outlives_its_port() {
    if !is_possible() {
        return;
    }
    let mut host = Host::new();
    host.namespace.ip("tuntap add dev own0 mode tap");
    host.ask(&["add", "lan", "own0", "--tap"]);
    host.kill();
    host.start();
    host.ask(&["remove", "lan", "own0"]);
    host.namespace.ip("link show dev own0");
}

#[test]
fn moved_uplink_ends_with_the_switch_or_is_reported() {
    if !is_possible() {
        return;
    }
    let mut host = Host::new();
    host.ask(&["add", "lan", "up0", "--tap"]);
    let other = Namespace::new();
    let pid = other.pid();
    host.namespace.ip(&format!("link set up0 netns {pid}"));
    host.stop();
    assert!(!other.try_ip("link show dev up0").0, "no next process could find it");
    host.start();
    host.namespace.ip(&format!("link set up0 netns {pid}"));
    host.kill();
    host.start();
    assert!(host.log().contains("moved to another network namespace"), "{}", host.log());
    other.ip("link delete up0");
    host.namespace.ip("link show dev up0");
}

#[test]
fn deleted_device_is_reported_and_does_not_keep_switch_awake() {
    if !is_possible() {
        return;
    }
    let host = Host::new();
    host.ask(&["add", "lan", "up0", "--tap"]);
    host.namespace.ip("link delete up0");
    wait_until("the switch notices it", || !host.port("up0").connected);
    assert!(host.ask(&["show", "lan"]).contains("no device"));
    let spent = processor_time(host.switch_pid());
    std::thread::sleep(Duration::from_secs(1));
    let spent = processor_time(host.switch_pid()) - spent;
    assert!(spent < Duration::from_millis(300), "the switch has not slept: {spent:?} of a second");
    host.ask(&["remove", "lan", "up0"]);
    host.ask(&["add", "lan", "up0", "--tap"]);
    assert!(host.port("up0").connected);
}

#[test]
fn switch_that_does_not_start_leaves_no_device() {
    if !is_possible() {
        return;
    }
    let host = Host::new();
    let folder = tempfile::tempdir().unwrap();
    let mut command = host.namespace.command(env!("CARGO_BIN_EXE_partywall-net"));
    command.arg("--folder").arg(folder.path()).args(["run", "wan", "--tap", "up0", "--tap", "lo"]);
    let failed = command.output().unwrap();
    assert!(!failed.status.success() && !host.namespace.try_ip("link show dev up0").0);
}

#[test]
fn device_of_another_namespace_is_not_taken_for_the_own() {
    if !is_possible() {
        return;
    }
    let mut host = Host::new();
    host.ask(&["add", "lan", "up0", "--tap"]);
    let index = |host: &Host| host.namespace.ip("-o link show up0").split(':').next().unwrap().to_owned();
    let first = index(&host);
    host.kill();
    // The operator's device, in another namespace.
    let earlier = std::mem::replace(&mut host.namespace, Namespace::new());
    host.namespace.ip("tuntap add up0 mode tap");
    assert_eq!(index(&host), first, "the devices differ only by their namespaces");
    host.start();
    let warnings = |host: &Host| host.log().matches("another network namespace").count();
    assert_eq!(warnings(&host), 1, "{}", host.log());
    // The record goes with the port.
    host.ask(&["remove", "lan", "up0"]);
    host.ask(&["add", "lan", "up0", "--tap"]);
    assert_eq!(warnings(&host), 1, "{}", host.log());
    host.ask(&["remove", "lan", "up0"]);
    host.namespace.ip("link show up0");
    // The switch's own device stays as well.
    earlier.ip("link show up0");
}

#[test]
fn uplink_of_a_file_stays_and_goes_with_its_entry() {
    if !is_possible() {
        return;
    }
    let mut host = Host::new();
    let there = |host: &Host| host.namespace.try_ip("link show dev up0").0;
    let (with, without) = ("[[port]]\nname = 'up0'\ntap = true\n", "");
    host.stop();
    host.write_file(with);
    host.start();
    host.namespace.ip("address add 192.0.2.7/24 dev up0");
    let keeps_address = |host: &Host| host.namespace.ip("-oneline address show dev up0").contains("192.0.2.7/24");
    // Through a reload, and through a kill.
    host.write_file(&format!("{with}rate = '1M'\n"));
    assert!(host.ask(&["reload", "lan"]).contains("changed: up0") && keeps_address(&host));
    host.kill();
    host.start();
    assert!(keeps_address(&host));
    host.write_file(without);
    assert!(host.ask(&["reload", "lan"]).contains("removed: up0") && !there(&host));
    // The entry goes while the switch is down.
    host.write_file(with);
    host.ask(&["reload", "lan"]);
    host.kill();
    assert!(there(&host));
    host.write_file(without);
    host.start();
    assert!(!there(&host), "{}", host.log());
    // A device that was deleted is made again by a reload.
    host.write_file(with);
    host.ask(&["reload", "lan"]);
    host.namespace.ip("link delete dev up0");
    wait_until("the device is gone", || host.ask(&["show", "lan"]).contains("no device"));
    assert!(host.ask(&["reload", "lan"]).contains("changed: up0") && there(&host));
    assert!(!host.ask(&["show", "lan"]).contains("no device"));
    host.kill();
    host.write_file(without);
    host.start();
    assert!(!there(&host), "{}", host.log());
    // A file that cannot come into force leaves no device behind: a folder is where the socket of `a` would be.
    std::fs::create_dir(host.path("lan/a.port")).unwrap();
    host.write_file(&format!("{with}[[port]]\nname = 'a'\n"));
    assert!(!host.try_ask(&["reload", "lan"]).0 && !there(&host));
}
