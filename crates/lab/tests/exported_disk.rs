//! `partywall blk export` in a guest: another guest, which has nothing of Partywall inside, has the disk as an ordinary virtio disk. The
//! exporter, the back end and the broker are killed under load.
#![cfg(not(miri))]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

#[allow(dead_code, reason = "other tests use the rest")]
mod world;

use partywall_lab::{Guest, GuestOptions, ImageOptions, Running};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::Stdio;
use std::time::Instant;
use world::{HANG, Inside, Process, World, program};

const MIB: u64 = 1 << 20;
const DMSETUP: &str = "/sbin/dmsetup";

/// The service of the disk. The socket of a back end in the background has a name that is made of it.
fn service() -> String {
    format!("data-{}", std::process::id())
}

fn target() -> String {
    format!("a.store:{}", service())
}

fn start_export<'a>(guest: &'a Guest, more: &str) -> Running<'a> {
    start_export_as(guest, "store", "/dev/vda", more)
}

fn start_export_as<'a>(guest: &'a Guest, domain: &str, path: &str, more: &str) -> Running<'a> {
    let line = format!("partywall blk export {} {path} --domain {domain} {more} > /tmp/{domain}.log 2>&1", service());
    guest.sh(&format!(": > /tmp/{domain}.log"));
    let running = guest.start(&["sh", "-c", &format!("exec {line}")]).unwrap();
    let deadline = Instant::now() + HANG;
    let log = format!("cat /tmp/{domain}.log");
    while !guest.sh(&log).contains("exporting") {
        assert!(Instant::now() < deadline, "{}", guest.sh(&log));
    }
    running
}

fn start_back_end(world: &World) -> Process {
    start_back_end_of(world, &target(), "disk.sock", "60")
}

fn start_back_end_of(world: &World, target: &str, socket: &str, grace: &str) -> Process {
    let socket = world.path(socket);
    // More connections than the window has memory for.
    let words = ["blk", "serve", "--from", target, "--connections", "8", "--grace", grace, "--socket"];
    let mut command = world.command(&words);
    command.arg(socket).arg("--broker").arg(world.path("broker.sock")).env("RUST_LOG", "warn");
    let mut child = Process(command.stdout(Stdio::piped()).spawn().unwrap());
    let mut line = String::new();
    BufReader::new(child.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert!(line.starts_with("serving"), "{line} {}", world.log());
    child
}

/// `partywall vm attach` or `detach` with a disk.
fn plug(world: &World, guest: &Guest, what: &str, disk: &str) {
    let mut command = world.command(&["vm", what, guest.name(), "--disk", disk, "--qmp"]);
    let done = command.arg(guest.monitor()).arg("--broker").arg(world.path("broker.sock")).output().unwrap();
    assert!(done.status.success(), "{what} {disk}: {}", String::from_utf8_lossy(&done.stderr));
}

/// A disk that was plugged in with a back end in the background. Both go with the test.
struct BackgroundDisk<'a>(&'a World, &'a Guest);

impl Drop for BackgroundDisk<'_> {
    fn drop(&mut self) {
        let mut command = self.0.command(&["vm", "detach", self.1.name(), "--disk", &target(), "--qmp"]);
        let _ = command.arg(self.1.monitor()).arg("--broker").arg(self.0.path("broker.sock")).output();
    }
}

/// Waits for a disk of a guest.
fn wait_for(guest: &Guest, device: &str) {
    guest.sh(&format!("n=0; while [ ! -e /sys/block/{device} ]; do sleep 0.1; n=$((n+1)); [ $n -lt 200 ]; done"));
}

fn report(world: &World, name: &str) -> u64 {
    report_of(world, "disk.sock", name)
}

fn report_of(world: &World, socket: &str, name: &str) -> u64 {
    let shown = world.command(&["blk", "show", "--json", "--socket"]).arg(world.path(socket)).output().unwrap();
    let report: serde_json::Value = serde_json::from_slice(&shown.stdout).unwrap();
    report[name].as_u64().or(report["counters"][name].as_u64()).unwrap()
}

#[test]
fn disk_of_one_guest_is_used_by_another_through_kills() {
    let blk = program("partywall-vhost", "partywall-blk");
    let image = ImageOptions::default().program(blk, "partywall-blk").module("virtio_blk");
    let mut world = World::with("exported-disk", image);
    std::fs::File::create(world.path("disk.raw")).unwrap().set_len(16 * MIB).unwrap();
    let drive = format!("file={},if=none,id=disk,format=raw", world.path("disk.raw").display());
    let store = GuestOptions::new("a").arguments(["-drive", &drive, "-device", "virtio-blk-pci,drive=disk"]);
    let [a, b] = world.boot_as([store, GuestOptions::new("b").shared_memory()]);
    let said = world.attach(&a);
    assert_eq!(said.status, 0, "{}{}", String::from_utf8_lossy(&said.stderr), world.log());
    world.wait_ready(1);
    let export = start_export(&a, "");
    let back_end = start_back_end(&world);
    plug(&world, &b, "attach", world.path("disk.sock").to_str().unwrap());
    wait_for(&b, "vda");
    assert_eq!(b.sh("cat /sys/block/vda/size").trim(), (16 * MIB / 512).to_string());

    // Each part is written and flushed, through kills of the exporter, of the back end and of the broker. The exporter that comes back bypasses its
    // page cache. The guest keeps the sums alone: its files are in its memory, which has little room.
    let load = "set -e
        for n in 0 1 2 3 4 5 6 7; do
            dd if=/dev/urandom of=/tmp/part bs=64k count=32 2>/dev/null
            dd if=/tmp/part of=/dev/vda bs=64k seek=$((n*32)) conv=fsync 2>/dev/null
            sha256sum < /tmp/part >> /tmp/sums
            echo $n > /tmp/progress
        done";
    let sums = "for n in 0 1 2 3 4 5 6 7; do dd if=DISK bs=64k skip=$((n*32)) count=32 2>/dev/null | sha256sum; done";
    let (sums_b, sums_a) = (sums.replace("DISK", "/dev/vda"), sums.replace("if=DISK", "if=/dev/vda iflag=direct"));
    let running = b.start(&["sh", "-c", load]).unwrap();
    let reaches = |n: u32| {
        b.sh(&format!("while [ ! -s /tmp/progress ] || [ $(cat /tmp/progress) -lt {n} ]; do sleep 0.02; done"));
    };
    reaches(0);
    a.sh("killall -9 partywall-blk");
    export.wait(HANG).unwrap();
    let export = start_export(&a, "--direct");
    reaches(2);
    drop(back_end);
    let back_end = start_back_end(&world);
    reaches(4);
    let deadline = Instant::now() + HANG;
    while report(&world, "under_way") == 0 {
        assert!(Instant::now() < deadline, "no request is in flight when the broker is killed");
    }
    world.kill_broker();
    world.start_broker();
    let end = running.wait(HANG).unwrap();
    assert_eq!(end.status, 0, "the guest has seen an error of its disk: {}", a.sh("cat /tmp/store.log"));
    for guest in [&a, &b] {
        guest.sh("sync; echo 3 > /proc/sys/vm/drop_caches");
    }
    let written = b.sh("cat /tmp/sums");
    assert_eq!(written.lines().count(), 8);
    let bytes = || ["read_bytes", "written_bytes", "copied_bytes"].map(|name| report(&world, name));
    let before = bytes();
    b.sh("dd if=/tmp/part of=/dev/vda bs=64k seek=224 oflag=direct conv=fsync 2>/dev/null");
    assert_eq!(b.sh(&sums_b), written);
    let after = bytes();
    let [read, wrote, copied]: [u64; 3] = std::array::from_fn(|n| after[n] - before[n]);
    assert!(
        read >= 16 * MIB && wrote == 2 * MIB && copied == read + wrote,
        "{read} read, {wrote} written, {copied} copied"
    );
    // What b has read is not in the page cache of a.
    let cached: u64 = a.sh("sed -n 's/^Buffers: *\\([0-9]*\\).*/\\1/p' /proc/meminfo").trim().parse().unwrap();
    assert!(cached < 1024, "{cached} KiB");
    assert_eq!(a.sh(&sums_a), written);
    assert_eq!(b.sh("dmesg | grep -ciE 'i/o error' || true").trim(), "0");
    // The same with a back end in the background.
    plug(&world, &b, "detach", world.path("disk.sock").to_str().unwrap());
    drop(back_end);
    let wait = |is_there: &str| {
        b.sh(&format!("n=0; while [ {is_there} -e /sys/block/vda ]; do sleep 0.1; n=$((n+1)); [ $n -lt 200 ]; done"));
    };
    wait("");
    let background = BackgroundDisk(&world, &b);
    plug(&world, &b, "attach", &target());
    wait("!");
    assert_eq!(b.sh(&sums_b), written);
    plug(&world, &b, "detach", &target());
    drop((export, background));
}

/// The disks of one guest share its windows. The first disk is under load before the others come, and while requests of another one fail.
#[test]
fn later_disks_of_a_guest_are_served_beside_a_busy_one() {
    let blk = program("partywall-vhost", "partywall-blk");
    let mut image = ImageOptions::default().program(blk, "partywall-blk").module("virtio_blk");
    let has_dmsetup = Path::new(DMSETUP).exists();
    if has_dmsetup {
        image = image.program(DMSETUP, "dmsetup").module("loop").module("dm_mod");
    }
    let world = World::with("exported-disks", image);
    let [a, b] = world.boot_as([GuestOptions::new("a"), GuestOptions::new("b").shared_memory()]);
    let said = world.attach(&a);
    assert_eq!(said.status, 0, "{}{}", String::from_utf8_lossy(&said.stderr), world.log());
    world.wait_ready(1);
    let mut disks = Vec::new();
    let add = |disk: &str, path: &str, device: &str| {
        a.sh(&format!("truncate -s 8M /tmp/{disk}.raw"));
        let export = start_export_as(&a, disk, path, "");
        // A request that gets no memory within this time fails.
        let back_end = start_back_end_of(&world, &format!("a.{disk}:{}", service()), &format!("{disk}.sock"), "10");
        plug(&world, &b, "attach", world.path(&format!("{disk}.sock")).to_str().unwrap());
        wait_for(&b, device);
        (export, back_end)
    };
    // The file of the third disk lies in a file system that has less room.
    a.sh("mkdir /tmp/small; mount -t tmpfs -o size=6M small /tmp/small; ln -s /tmp/small/third.raw /tmp");
    disks.push(add("first", "/tmp/first.raw", "vda"));
    // Long requests, more than the back end has connections for.
    let load = "all=; for n in 0 1 2 3 4 5 6 7; do
            (while [ ! -e /tmp/stop ]; do
                dd if=/dev/zero of=/dev/vda bs=1M seek=$n count=1 oflag=direct 2>/dev/null || exit 1
                dd if=/dev/vda of=/dev/null bs=1M skip=$n count=1 iflag=direct 2>/dev/null || exit 1
                echo > /tmp/done.$n
            done) &
            all=\"$all $!\"
        done
        for one in $all; do wait $one || exit 1; done";
    let running = b.start(&["sh", "-c", load]).unwrap();
    b.sh("while [ $(ls /tmp | grep -c ^done) -lt 8 ]; do sleep 0.05; done");
    for (disk, device) in [("second", "vdb"), ("third", "vdc")] {
        disks.push(add(disk, &format!("/tmp/{disk}.raw"), device));
        b.sh("dd if=/dev/urandom of=/tmp/part bs=1M count=4 2>/dev/null");
        b.sh(&format!("dd if=/tmp/part of=/dev/{device} bs=2M oflag=direct conv=fsync 2>/dev/null"));
        b.sh(&format!("dd if=/dev/{device} bs=2M count=2 iflag=direct 2>/dev/null | cmp - /tmp/part"));
        a.sh(&format!("dd if=/tmp/{disk}.raw bs=1M count=4 2>/dev/null | sha256sum > /tmp/sum"));
        assert_eq!(a.sh("cat /tmp/sum"), b.sh("sha256sum < /tmp/part"));
    }
    full_disk_and_lost_sectors_fail_single_requests(&world, [&a, &b]);
    if has_dmsetup {
        make_failing_device(&a);
        let disk = add("fourth", "/dev/mapper/failing", "vdd");
        disks.push(failing_device_fails_single_requests(&world, [&a, &b], disk));
    } else {
        println!("skipped: a device that fails, since {DMSETUP} is missing (Debian: dmsetup)");
    }
    b.sh("rm -f /tmp/done.*; while [ $(ls /tmp | grep -c ^done) -lt 8 ]; do sleep 0.05; done; : > /tmp/stop");
    assert_eq!(running.wait(HANG).unwrap().status, 0, "{}", a.sh("cat /tmp/first.log"));
    assert_eq!(b.sh("dmesg | grep -iE 'i/o error' | grep -cv 'dev vd[cd]' || true").trim(), "0");
    drop(disks);
}

/// The file below `vdc` has 8 MiB, and room for 6 MiB. Then it loses what is behind its first 2 MiB. Requests fail only where there is no room, and
/// where nothing is.
fn full_disk_and_lost_sectors_fail_single_requests(world: &World, [a, b]: [&Guest; 2]) {
    let fails = |line: &str| expect_error(b, line);
    let is_as_written = "dd if=/dev/vdc bs=1M count=2 iflag=direct 2>/dev/null | cmp - /tmp/first";
    b.sh("dd if=/dev/urandom of=/tmp/first bs=1M count=2 2>/dev/null");
    fails("if=/tmp/part of=/dev/vdc bs=1M seek=4 oflag=direct");
    b.sh("dd if=/tmp/first of=/dev/vdc bs=1M oflag=direct conv=fsync 2>/dev/null");
    b.sh(is_as_written);
    a.sh("truncate -s 2M /tmp/third.raw");
    fails("if=/dev/vdc of=/dev/null bs=1M skip=3 count=1 iflag=direct");
    b.sh(is_as_written);
    assert!(report_of(world, "third.sock", "failed") >= 2);
}

/// A `dd` with these words ends with an I/O error.
fn expect_error(guest: &Guest, line: &str) {
    let failed = guest.run(&["sh", "-c", &format!("dd {line} 2>&1")]).unwrap();
    assert!(failed.status != 0 && failed.text().contains("Input/output error"), "{line}: {}", failed.text());
}

/// The sectors 6144 to 10239 of the device fail. All others are those of a file.
fn make_failing_device(guest: &Guest) {
    guest.sh("set -e; truncate -s 8M /tmp/fourth.raw; losetup /dev/loop0 /tmp/fourth.raw
        printf '0 6144 linear /dev/loop0 0\n6144 4096 error\n10240 6144 linear /dev/loop0 10240\n' > /tmp/table
        dmsetup create failing --noudevrules --noudevsync < /tmp/table; dmsetup mknodes; [ -b /dev/mapper/failing ]");
}

/// The device below `vdd` fails in its middle. Requests fail only there. Through the page cache of the exporter, a write fails with its flush: the
/// kernel then counts the lost bytes as written, so all further flushes fail as well. After another exporter has come, the back end repeats these
/// writes, which fail again, until it starts again and gives them up.
fn failing_device_fails_single_requests<'a>(
    world: &World,
    [a, b]: [&'a Guest; 2],
    (export, back_end): (Running<'a>, Process),
) -> (Running<'a>, Process) {
    let fails = |line: &str| expect_error(b, line);
    let write_parts = "set -e; for at in 0 6; do dd if=/tmp/first of=/dev/vdd bs=1M seek=$at oflag=direct conv=fsync 2>/dev/null; done";
    let are_as_written = || {
        b.sh("set -e; for at in 0 6; do dd if=/dev/vdd bs=1M skip=$at count=2 iflag=direct 2>/dev/null | cmp - /tmp/first; done");
        b.sh("set -e; for at in 6143 10240; do dd if=/dev/vdd of=/dev/null skip=$at count=1 iflag=direct 2>/dev/null; done");
        for read in ["bs=512 skip=6144", "bs=512 skip=10239", "bs=64k skip=50", "bs=2M skip=1"] {
            fails(&format!("if=/dev/vdd of=/tmp/read {read} count=1 iflag=direct"));
            b.sh("[ ! -s /tmp/read ]");
        }
    };
    b.sh(write_parts);
    are_as_written();
    fails("if=/tmp/part of=/dev/vdd bs=64k seek=60 count=1 oflag=direct conv=fsync");
    fails("if=/tmp/first of=/dev/vdd bs=1M oflag=direct conv=fsync");
    are_as_written();
    export.signal(rustix::process::Signal::KILL).unwrap();
    export.wait(HANG).unwrap();
    let export = start_export_as(a, "fourth", "/dev/mapper/failing", "--direct");
    for write in ["bs=64k seek=60", "bs=512 seek=6144", "bs=512 seek=10239", "bs=2M seek=1"] {
        fails(&format!("if=/tmp/part of=/dev/vdd {write} count=1 oflag=direct"));
    }
    fails("if=/tmp/first of=/dev/vdd bs=1M oflag=direct conv=fsync");
    are_as_written();
    let failed_before = report_of(world, "fourth.sock", "failed");
    drop(back_end);
    let back_end = start_back_end_of(world, &format!("a.fourth:{}", service()), "fourth.sock", "10");
    // It has lost no write, so a flush succeeds.
    b.sh(write_parts);
    are_as_written();
    for at in [0, 6] {
        let sum = a.sh(&format!("dd if=/tmp/fourth.raw bs=1M skip={at} count=2 2>/dev/null | sha256sum"));
        assert_eq!(sum, b.sh("sha256sum < /tmp/first"), "the sectors behind {at} MiB");
    }
    let failed = failed_before + report_of(world, "fourth.sock", "failed");
    assert!(failed >= 17, "{failed} requests have failed");
    (export, back_end)
}
