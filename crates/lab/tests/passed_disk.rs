//! A write of one guest that goes through a second guest to the disks of a third. The back ends copy it once: what lies in a group is passed on
//! where it is. The second guest has a linear device, a RAID 0 or a RAID 1 over the disks of the third.
#![cfg(not(miri))]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

#[allow(dead_code, reason = "other tests use the rest")]
mod world;

use partywall_lab::{Guest, GuestOptions, ImageOptions};
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Stdio;
use std::time::Instant;
use world::{HANG, Inside, Process, World, program};

const MIB: u64 = 1 << 20;
/// A chunk of RAID 0, and the length of a request.
const CHUNK: usize = 64 << 10;
const MDADM: &str = "/sbin/mdadm";
const POLICY: &str = "[[group]]\nname = \"pool\"\nmachines = [\"b\", \"c\"]\n\
    domains = [\"outer\", \"inner0\", \"inner1\"]\nroom = \"16M\"\n";

/// Offers a disk of a guest, and waits until it is offered.
fn export(guest: &Guest, name: &str, device: &str) {
    let log = format!("/tmp/{name}.log");
    guest.sh(&format!(
        "partywall blk export {name} {device} --domain {}.disks-{name} --direct --group pool > {log} 2>&1 & \
         n=0; until grep -q exporting {log}; do sleep 0.1; n=$((n+1)); [ $n -lt 600 ] || {{ cat {log}; exit 1; }}; done",
        guest.name()
    ));
}

/// A back end of the host, in the group.
fn serve(world: &World, domain: &str, from: &str, more: &[&str]) -> Process {
    serve_alone(world, domain, from, &[&["--group", "pool"], more].concat())
}

/// A back end of the host.
fn serve_alone(world: &World, domain: &str, from: &str, more: &[&str]) -> Process {
    let mut command = world.command(&["blk", "serve", "--from", from, "--domain", domain]);
    // Two back ends share the memory of a window. One that starts again must find some, whatever the other has taken.
    command
        .args(more)
        .args(["--connections", "1", "--socket"])
        .arg(world.path(domain))
        .arg("--broker")
        .arg(world.path("broker.sock"));
    let mut child = Process(command.env("RUST_LOG", "warn").stdout(Stdio::piped()).spawn().unwrap());
    let mut line = String::new();
    BufReader::new(child.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert!(line.starts_with("serving"), "{line} {}", world.log());
    child
}

fn plug(world: &World, guest: &Guest, domain: &str, device: &str) {
    let mut command = world.command(&["vm", "attach", guest.name(), "--disk"]);
    command.arg(world.path(domain)).arg("--qmp").arg(guest.monitor()).arg("--broker").arg(world.path("broker.sock"));
    let done = command.output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    guest.sh(&format!("n=0; until [ -b /dev/{device} ]; do sleep 0.1; n=$((n+1)); [ $n -lt 600 ] || exit 1; done"));
}

/// Bytes that a back end has written, copied for that, and passed on.
fn written(world: &World, domain: &str) -> [u64; 3] {
    let shown = world.command(&["blk", "show", "--json", "--socket"]).arg(world.path(domain)).output().unwrap();
    let report: serde_json::Value = serde_json::from_slice(&shown.stdout).unwrap();
    ["written_bytes", "copied_written_bytes", "passed_bytes"].map(|name| report["counters"][name].as_u64().unwrap())
}

fn difference(now: [u64; 3], before: [u64; 3]) -> [u64; 3] {
    std::array::from_fn(|n| now[n] - before[n])
}

/// The part of the written data that a disk behind the device then has, from this chunk on.
struct DiskPart {
    disk: &'static str,
    at: u64,
    data: Vec<u8>,
}

/// The chunk of the device at which data is written, and the parts of its disks.
fn parts(level: &str, data: &[u8]) -> (u64, Vec<DiskPart>) {
    let half = |first| data.chunks(CHUNK).skip(first).step_by(2).collect::<Vec<_>>().concat();
    let part = |disk, at, data| DiskPart { disk, at, data };
    match level {
        "linear" => (0, vec![part("d0", 0, data.to_vec())]),
        "0" => (128, vec![part("d0", 64, half(0)), part("d1", 64, half(1))]),
        _ => (32, vec![part("d0", 32, data.to_vec()), part("d1", 32, data.to_vec())]),
    }
}

/// The first back end is killed, and then one of the others. Their successors go on, and no machine sees an error.
fn back_ends_are_killed_under_load(
    world: &World,
    [a, b]: [&Guest; 2],
    outer: Process,
    others: &mut Vec<Process>,
) -> Process {
    let load = "set -e
        for n in 0 1 2 3 4 5 6 7 8 9; do
            dd if=/dev/urandom of=/tmp/load bs=64k count=8 2>/dev/null
            dd if=/tmp/load of=/dev/vda bs=64k seek=$((n*8)) oflag=direct 2>/dev/null
            sha256sum < /tmp/load >> /tmp/sums
            echo $n > /tmp/progress
        done
        dd if=/tmp/load of=/dev/vda bs=64k seek=72 oflag=direct conv=fsync 2>/dev/null";
    let running = a.start(&["sh", "-c", load]).unwrap();
    let wait = |n: u32| {
        a.sh(&format!("while [ ! -s /tmp/progress ] || [ $(cat /tmp/progress) -lt {n} ]; do sleep 0.02; done"));
    };
    wait(1);
    drop(outer);
    let outer = serve(world, "outer", "b.disks-md:md", &[]);
    wait(5);
    drop(others.remove(0));
    others.insert(0, serve(world, "inner0", "c.disks-d0:d0", &["--machine", "b"]));
    let end = running.wait(HANG).unwrap();
    assert_eq!(end.status, 0, "the first machine has seen an error: {}", b.sh("cat /tmp/md.log; dmesg | tail"));
    for guest in [a, b] {
        let errors = guest.sh("dmesg | grep -iE 'i/o error|disk failure' || true");
        assert_eq!(errors, "", "{}", guest.name());
    }
    let sums: Vec<String> = a.sh("cat /tmp/sums").lines().map(str::to_owned).collect();
    assert_eq!(sums.len(), 10);
    for disk in ["vda", "vdb"] {
        let sum = format!(
            "for n in 0 1 2 3 4 5 6 7 8 9; do dd if=/dev/{disk} iflag=direct bs=64k skip=$((n*8)) count=8 2>/dev/null | sha256sum; done"
        );
        assert_eq!(b.sh(&sum).lines().collect::<Vec<_>>(), sums, "{disk}");
    }
    println!("back ends were killed: {:?}", ["outer", "inner0", "inner1"].map(|domain| written(world, domain)));
    outer
}

/// What the first back end does not lay into the group is written as well.
fn data_by_copy_is_written(world: &World, a: &Guest, random: &[u8], outer: Process) -> Process {
    drop(outer);
    let outer = serve_alone(world, "outer", "b.disks-md:md", &["--grace", "20"]);
    let before = written(world, "inner0");
    a.sh("dd if=/tmp/part of=/dev/vda bs=64k seek=16 oflag=direct conv=fsync 2>/dev/null");
    assert_eq!(difference(written(world, "inner0"), before), [MIB, MIB, 0]);
    let mut bytes = vec![0; random.len()];
    std::fs::File::open(world.path("d0")).unwrap().read_exact_at(&mut bytes, MIB).unwrap();
    assert!(bytes == random);
    outer
}

#[test]
fn write_through_three_machines_is_copied_once() {
    if !Path::new(MDADM).exists() {
        println!("skipped: {MDADM} is missing (Debian: mdadm)");
        return;
    }
    let blk = program("partywall-vhost", "partywall-blk");
    let image =
        ["virtio_blk", "md_mod", "linear", "raid0", "raid1"].iter().fold(ImageOptions::default(), |i, m| i.module(m));
    let image = image.program(blk, "partywall-blk").program(MDADM, "mdadm");
    let mut world = World::with("passed-disk", image);
    world.kill_broker();
    world.start_broker_with(POLICY);
    let shared = |name: &str| GuestOptions::new(name).shared_memory();
    let mut third = GuestOptions::new("c");
    for disk in ["d0", "d1"] {
        std::fs::File::create(world.path(disk)).unwrap().set_len(8 * MIB).unwrap();
        let file = format!("file={},if=none,id={disk},format=raw", world.path(disk).display());
        let device = format!("virtio-blk-pci,drive={disk}");
        third = third.arguments(["-drive".to_owned(), file, "-device".to_owned(), device]);
    }
    let [a, b, c] = world.boot_as([shared("a"), shared("b"), third]);
    for guest in [&b, &c] {
        let said = world.attach(guest);
        assert_eq!(said.status, 0, "{}{}", String::from_utf8_lossy(&said.stderr), world.log());
    }
    world.wait_ready(2);
    let mut processes = Vec::new();
    for (number, device) in ["vda", "vdb"].into_iter().enumerate() {
        let (name, domain) = (format!("d{number}"), format!("inner{number}"));
        export(&c, &name, &format!("/dev/{device}"));
        processes.push(serve(&world, &domain, &format!("c.disks-{name}:{name}"), &["--machine", "b"]));
        plug(&world, &b, &domain, device);
    }
    let mut random = vec![0; MIB as usize];
    std::fs::File::open("/dev/urandom").unwrap().read_exact(&mut random).unwrap();
    a.put(&random, "/tmp/part", 0o644).unwrap();
    for (level, more, times) in [("linear", "", 1), ("0", "--chunk=64", 1), ("1", "--assume-clean", 2)] {
        b.sh(&format!(
            "mkdir -p /run/mdadm; mdadm --build /dev/md0 --level={level} --raid-devices=2 {more} /dev/vda /dev/vdb > /tmp/mdadm.log 2>&1 || {{ cat /tmp/mdadm.log; exit 1; }}"
        ));
        export(&b, "md", "/dev/md0");
        let outer = serve(&world, "outer", "b.disks-md:md", &[]);
        plug(&world, &a, "outer", "vda");
        let all = || ["outer", "inner0", "inner1"].map(|domain| written(&world, domain));
        let before = all();
        let (seek, parts) = parts(level, &random);
        a.sh(&format!("dd if=/tmp/part of=/dev/vda bs=64k seek={seek} oflag=direct conv=fsync 2>/dev/null"));
        let after = all();
        let [first, second, third] = std::array::from_fn(|n| difference(after[n], before[n]));
        println!("{level}: written, copied and passed bytes are {first:?}, {second:?} and {third:?}");
        assert_eq!(
            first,
            [MIB, MIB, 0],
            "the first back end copies each byte once, {}",
            b.sh("cat /tmp/md.log; dmesg | tail")
        );
        let passed = times * MIB;
        assert_eq!([0, 1, 2].map(|n| second[n] + third[n]), [passed, 0, passed], "the others copy none");
        for DiskPart { disk, at, data } in parts {
            let mut bytes = vec![0; data.len()];
            std::fs::File::open(world.path(disk)).unwrap().read_exact_at(&mut bytes, at * CHUNK as u64).unwrap();
            assert!(bytes == data, "level {level}, {disk}");
        }
        let outer = if level == "linear" { data_by_copy_is_written(&world, &a, &random, outer) } else { outer };
        let outer =
            if level == "1" { back_ends_are_killed_under_load(&world, [&a, &b], outer, &mut processes) } else { outer };
        let detached = world
            .command(&["vm", "detach", "a", "--disk"])
            .arg(world.path("outer"))
            .arg("--qmp")
            .arg(a.monitor())
            .output();
        assert!(detached.unwrap().status.success());
        drop(outer);
        b.sh("killall partywall-blk; n=0; while pidof partywall-blk > /dev/null; do sleep 0.1; n=$((n+1)); [ $n -lt 100 ] || exit 1; done; mdadm --stop /dev/md0 > /dev/null 2>&1");
        let deadline = Instant::now() + HANG;
        while a.shell("[ ! -b /dev/vda ]").is_err() {
            assert!(Instant::now() < deadline, "the disk stays");
        }
    }
}
