//! Interrupts between guests: programs in machines with an IOMMU are rung by interrupts, whatever becomes of agents, brokers and devices,
//! and those in others by port. One set of guests for all.
#![cfg(not(miri))]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

#[allow(dead_code, reason = "other tests use the rest")]
mod world;

use partywall_lab::{Guest, GuestOptions, ImageOptions};
use std::time::{Duration, Instant};
use world::{HANG, Inside, World};

/// The PCI ports of each machine: for its windows, and for the doorbell devices of successive brokers, which all stay.
const PORTS: u32 = 12;
/// Lines that go there and back, each when the last is back.
const LINES: u64 = 40;

#[test]
fn machine_with_iommu_gets_interrupts_as_doorbells() {
    let image = ImageOptions::default().module("vfio_pci").module("vfio_iommu_type1");
    let mut world = World::with("interrupts", image);
    let [a, b, plain] = world.boot_as([
        GuestOptions::new("a").interrupts(PORTS),
        GuestOptions::new("b").interrupts(PORTS),
        GuestOptions::new("plain"),
    ]);
    for (guest, said) in
        [(&a, "can be rung by interrupts"), (&b, "can be rung by interrupts"), (&plain, "-device intel-iommu")]
    {
        let attached = world.attach(guest);
        println!("{}", attached.text());
        assert_eq!(attached.status, 0, "{}", String::from_utf8_lossy(&attached.stderr));
        assert!(attached.text().contains(said), "{}", attached.text());
    }
    let by_interrupts = [("a", "interrupts"), ("b", "interrupts"), ("plain", "port")];
    world.wait_ready(3);
    wait_rung_by(&world, &by_interrupts);

    let before = [interrupts(&a), interrupts(&b)];
    lines_go_there_and_back(&a, &b);
    for (guest, before) in [&a, &b].into_iter().zip(before) {
        // How many depends on how often it slept.
        assert!(interrupts(guest) > before, "{} was not rung by interrupts", guest.name());
    }
    // One of the two has interrupts.
    lines_go_there_and_back(&a, &plain);
    lines_go_there_and_back(&plain, &b);

    // An agent that dies leaves the device to the next.
    b.sh("kill -9 $(cat /tmp/agent.pid)");
    b.start_agent();
    wait_until("the new agent does not get the device", || b.shell("grep 'by interrupts' /tmp/agent.log").is_ok());
    world.wait_ready(3);
    wait_rung_by(&world, &by_interrupts);
    lines_go_there_and_back(&b, &a);

    // A machine that is attached again goes on with the device that it has, for taking one out would end its QEMU.
    assert_eq!(doorbells(&a), 1);
    assert_eq!(world.partywall(&["vm", "detach", "a"]).status, 0);
    assert_eq!(world.attach(&a).status, 0);
    world.wait_ready(3);
    wait_rung_by(&world, &by_interrupts);
    assert_eq!(doorbells(&a), 1);
    lines_go_there_and_back(&a, &b);

    // A broker that dies leaves devices that ring no process; the next broker brings its own.
    world.kill_broker();
    let entries = [&a, &b, &plain].map(|guest| world.entry(guest)).concat();
    world.start_broker_with(&entries);
    world.wait_ready(3);
    wait_rung_by(&world, &by_interrupts);
    assert_eq!(doorbells(&a), 2);
    lines_go_there_and_back(&a, &b);
}

/// Waits until the broker reports this for these machines.
fn wait_rung_by(world: &World, wanted: &[(&str, &str)]) {
    let listed = || {
        let said = world.partywall(&["vm", "list", "--json"]);
        serde_json::from_slice::<serde_json::Value>(&said.stdout).unwrap_or_default()
    };
    let is = |(name, by): &(&str, &str)| {
        listed().as_array().into_iter().flatten().any(|line| line["name"] == *name && line["rung_by"] == *by)
    };
    wait_until(&format!("not {wanted:?}"), || wanted.iter().all(is));
}

fn wait_until(otherwise: &str, holds: impl Fn() -> bool) {
    let deadline = Instant::now() + HANG;
    while !holds() {
        assert!(Instant::now() < deadline, "{otherwise}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Interrupts that its present doorbell device has sent.
fn interrupts(guest: &Guest) -> u64 {
    let lines = guest.sh("grep vfio /proc/interrupts");
    lines.lines().map(|line| line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap()).sum()
}

/// How many doorbell devices its QEMU has.
fn doorbells(guest: &Guest) -> usize {
    let listed = guest.monitor_command("qom-list", serde_json::json!({ "path": "/machine/peripheral" })).unwrap();
    listed.as_array().unwrap().iter().filter(|device| device["type"] == "child<ivshmem-doorbell>").count()
}

/// Each line is sent when the one before has come back, so that both sides sleep in between.
fn lines_go_there_and_back(from: &Guest, to: &Guest) {
    let (me, you) = (from.name(), to.name());
    let echo = to.begin(&format!(
        "rm -f /tmp/echo; mkfifo /tmp/echo; partywall --domain {you} cat -l echo < /tmp/echo | cat > /tmp/echo"
    ));
    wait_until("nobody answers", || from.shell("partywall list services").is_ok_and(|said| said.contains("echo")));
    let said = from.sh(&format!(
        "rm -f /tmp/in /tmp/out; mkfifo /tmp/in /tmp/out
         timeout 120 partywall --domain {me} cat {you}:echo < /tmp/in > /tmp/out &
         exec 3> /tmp/in 4< /tmp/out
         n=0
         while [ $n -lt {LINES} ]; do echo $n >&3; read -r back <&4; [ \"$back\" = $n ] || exit 1; n=$((n + 1)); done
         exec 3>&-
         wait
         echo $n"
    ));
    assert_eq!(said, LINES.to_string());
    assert_eq!(echo.wait(HANG).unwrap().status, 0);
}
