//! `partywall fs export` in a guest, mounted in another guest. The server is killed under load, and the mount is killed and made again.
#![cfg(not(miri))]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

#[allow(dead_code, reason = "other tests use the rest")]
mod world;

use partywall_lab::{Guest, ImageOptions, Running};
use std::time::Instant;
use world::{HANG, Inside, World, program};

const FILES: usize = 6;

/// Starts a command of `partywall fs` in the foreground, and waits for the line that says it is ready.
fn start<'a>(guest: &'a Guest, words: &str, ready: &str) -> Running<'a> {
    // An earlier command's line is in it until then.
    guest.sh(&format!(": > /tmp/{ready}.log"));
    let running = guest.begin(&format!("exec partywall fs {words} > /tmp/{ready}.log 2>&1"));
    let log = || guest.sh(&format!("cat /tmp/{ready}.log 2>/dev/null || true"));
    let deadline = Instant::now() + HANG;
    while !log().lines().any(|line| line.starts_with(ready)) {
        assert!(Instant::now() < deadline, "{words}: {}", log());
    }
    running
}

fn start_export(guest: &Guest) -> Running<'_> {
    start(guest, "export /tmp/data --as store:data", "exporting")
}

/// The requests of the guest wait for a minute until the server is back.
fn start_mount<'a>(guest: &'a Guest, transport: &str, by: &str) -> Running<'a> {
    let mount = format!("mount --transport {transport} --grace 60 a.store:data /tmp/mnt");
    let running = start(guest, &mount, "mounted");
    let said = guest.sh("cat /tmp/mounted.log");
    assert!(said.trim_end().ends_with(by), "{said}");
    running
}

fn sums(guest: &Guest, folder: &str) -> String {
    guest.sh(&format!("cd {folder} && find . -type f | sort | xargs sha256sum"))
}

/// Makes files of random sizes, some of them in folders.
fn make_files(guest: &Guest, folder: &str) {
    guest.sh(&format!(
        "cd {folder} && mkdir -p sub/deep && n=0; while [ $n -lt {FILES} ]; do \
         dd if=/dev/urandom of=$([ $((n % 3)) = 0 ] && echo sub/deep/)file-$n bs=$((7001 * (n + 1))) count=3 2>/dev/null || exit 1; \
         n=$((n + 1)); done"
    ));
}

#[test]
fn files_of_one_guest_are_used_by_another_through_kills() {
    let image = ImageOptions::default().program(program("partywall-fs", "partywall-fs"), "partywall-fs").module("fuse");
    let world = World::with("exported-files", image);
    let [a, b] = world.boot(["a", "b"]);
    for guest in [&a, &b] {
        let said = world.attach(guest);
        assert_eq!(said.status, 0, "{}{}", String::from_utf8_lossy(&said.stderr), world.log());
    }
    world.wait_ready(2);
    // Clients in virtual machines are nobody to the server.
    a.sh("mkdir -p /tmp/data/ours /tmp/data/theirs /tmp/mnt; chmod 777 /tmp/data /tmp/data/*");
    b.sh("mkdir -p /tmp/mnt");
    let export = start_export(&a);
    b.wait_service("a.store:data");
    let mount = start_mount(&b, "partywall", "by calls");

    files_have_the_same_content_on_both_sides(&a, &b);
    let export = server_is_killed_under_load(&a, &b, export);
    let mount = mount_is_killed_and_made_again(&a, &b, mount);
    b.sh("partywall fs unmount /tmp/mnt");
    assert_eq!(mount.wait(HANG).unwrap().status, 0, "{}", b.sh("cat /tmp/mounted.log"));
    assert_eq!(b.sh("ls /tmp/mnt"), "");
    drop(export);
}

fn files_have_the_same_content_on_both_sides(a: &Guest, b: &Guest) {
    make_files(a, "/tmp/data/theirs");
    make_files(b, "/tmp/mnt/ours");
    for folder in ["theirs", "ours"] {
        let there = sums(a, &format!("/tmp/data/{folder}"));
        assert_eq!(there.lines().count(), FILES, "{there}");
        assert_eq!(sums(b, &format!("/tmp/mnt/{folder}")), there);
    }
    let owners = a.sh("stat -c %u /tmp/data/ours/file-1 /tmp/data/theirs/file-1");
    assert_eq!(owners, "65534\n0");
    // The other guest has the files of root, and may not change them.
    b.sh("! echo no > /tmp/mnt/theirs/file-1");
}

fn server_is_killed_under_load<'a>(a: &'a Guest, b: &Guest, export: Running<'a>) -> Running<'a> {
    b.sh(": > /tmp/mnt/ours/large");
    let load = "for n in 0 1 2 3; do
            dd if=/dev/urandom of=/tmp/part bs=64k count=24 2>/dev/null
            dd if=/tmp/part of=/tmp/mnt/ours/large bs=64k seek=$((n*24)) conv=notrunc,fsync 2>/tmp/dd.log || exit 1
            cat /tmp/part >> /tmp/all
            echo $n > /tmp/progress
        done";
    let running = b.begin(load);
    b.sh("while [ ! -s /tmp/progress ]; do sleep 0.02; done");
    a.sh("killall -9 partywall-fs");
    export.wait(HANG).unwrap();
    let export = start_export(a);
    let end = running.wait(HANG).unwrap();
    assert_eq!(
        end.status,
        0,
        "{}{}{}",
        b.sh("cat /tmp/dd.log /tmp/mounted.log"),
        a.sh("cat /tmp/exporting.log"),
        b.sh("ls -l /tmp/mnt/ours")
    );
    let sum = b.sh("sha256sum < /tmp/all");
    assert_eq!(a.sh("sha256sum < /tmp/data/ours/large"), sum);
    b.sh("echo 3 > /proc/sys/vm/drop_caches");
    assert_eq!(b.sh("sha256sum < /tmp/mnt/ours/large"), sum);
    export
}

fn mount_is_killed_and_made_again<'b>(a: &Guest, b: &'b Guest, mount: Running<'b>) -> Running<'b> {
    b.sh("killall -9 partywall-fs");
    mount.wait(HANG).unwrap();
    let said = b.sh("ls /tmp/mnt 2>&1 || true");
    assert!(said.contains("not connected"), "{said}");
    b.sh("partywall fs unmount /tmp/mnt");
    let mount = start_mount(b, "stream", "by a stream");
    assert_eq!(sums(b, "/tmp/mnt"), sums(a, "/tmp/data"));
    mount
}
