//! Interrupts between guests: programs in machines with an IOMMU are rung by interrupts, whatever becomes of agents, brokers and devices,
//! and those in others by port. One set of guests for all.
#![cfg(not(miri))]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

#[allow(dead_code, reason = "other tests use the rest")]
mod world;

use partywall_lab::{Guest, GuestOptions, ImageOptions, Network};
use std::time::{Duration, Instant};
use world::{HANG, Inside, World, preload_library};

/// The PCI ports of each machine: for its windows, and for the doorbell devices of successive brokers, which all stay.
const PORTS: u32 = 12;
/// Lines that go there and back, each when the last is back.
const LINES: u64 = 40;

#[test]
fn machine_with_iommu_gets_interrupts_as_doorbells() {
    let image = ImageOptions::default().module("vfio_pci").module("vfio_iommu_type1");
    let image = ["redis-server", "redis-cli", "redis-benchmark"]
        .into_iter()
        .fold(image, |image, name| image.program(format!("/usr/bin/{name}"), name))
        .program(preload_library(), "libpartywall_preload.so");
    let network = Network::new().unwrap();
    let mut world = World::with("interrupts", image);
    let [a, b, plain] = world.boot_as([
        GuestOptions::new("a").memory(512).interrupts(PORTS).network(&network).unwrap(),
        GuestOptions::new("b").memory(512).interrupts(PORTS).network(&network).unwrap(),
        GuestOptions::new("plain").memory(512).network(&network).unwrap(),
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
    serve(&a);
    // Each of the device's 64 vectors has had a link then, so the next link takes one that another has had.
    wait_until("too few connections get rings", || {
        b.sh("partywall run --quiet --move after=4,bytes=1K redis-benchmark -h 10.77.0.1 -c 70 -n 14000 -t get -q > /tmp/many 2>&1");
        a.sh("grep -c 'has a ring' /tmp/server.log || true").parse().is_ok_and(|rings: u32| rings >= 64)
    });
    let rung = programs_sleep_and_wake(&a, &b);
    // An answer comes so soon that the client rarely sleeps until then.
    assert!(rung[0] >= LINES / 2, "rung by interrupts {rung:?} times");
    // The server's machine has interrupts, and the client's is rung by its port.
    let rung = programs_sleep_and_wake(&a, &plain);
    assert!(rung[0] >= LINES / 2, "rung by interrupts {rung:?} times");

    // An agent that dies leaves the device to the next.
    b.kill_agent();
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

/// Starts redis in a machine.
fn serve(guest: &Guest) {
    guest.sh("PARTYWALL_PRELOAD_LOG=/tmp/server.log partywall run --quiet --move after=4,bytes=1K redis-server --bind 0.0.0.0 --protected-mode no --save '' > /tmp/redis.log 2>&1 & true");
    wait_until("redis does not start", || guest.sh("cat /tmp/redis.log").contains("Ready to accept connections"));
}

/// Calls of a client come one by one, each after both programs have fallen asleep, while their connection has rings. Returns how often
/// the server's and the client's machine were interrupted meanwhile.
fn programs_sleep_and_wake(server: &Guest, client: &Guest) -> [u64; 2] {
    let count = |guest: &Guest| if guest.name() == "plain" { 0 } else { interrupts(guest) };
    client.sh("rm -f /tmp/client.log /tmp/calls; mkfifo /tmp/calls");
    let running = client.begin(
        "sleep 600 > /tmp/calls & held=$!
         PARTYWALL_PRELOAD_LOG=/tmp/client.log timeout 500 \
         partywall run --quiet --move after=4,bytes=1K redis-cli -h 10.77.0.1 < /tmp/calls > /tmp/answers
         kill $held",
    );
    let has_ring = "n=0; while ! grep -q 'has a ring' /tmp/client.log && [ $n -lt 500 ]; do echo ping > /tmp/calls; sleep 0.02; n=$((n + 1)); done; echo $n; sleep 1";
    let said = client.sh(has_ring);
    let logs = || (client.sh("cat /tmp/client.log /tmp/agent.log"), server.sh("cat /tmp/server.log /tmp/agent.log"));
    assert_ne!(said, "500", "the client has no ring: {:?}", logs());
    let before = [count(server), count(client)];
    // The server sleeps again only when it has answered.
    let calls = client.begin(&format!(
        "n=0; while [ $n -lt {LINES} ]; do echo 'incr calls' > /tmp/calls; n=$((n + 1)); \
         until [ \"$(tail -n 1 /tmp/answers)\" = $n ]; do usleep 10000; done; sleep 0.05; done"
    ));
    assert_eq!(calls.wait(HANG).unwrap().status, 0, "{:?}", logs());
    let after = [count(server), count(client)];
    client.sh("echo 'del calls' > /tmp/calls; echo quit > /tmp/calls");
    assert_eq!(running.wait(HANG).unwrap().status, 0);
    [after[0] - before[0], after[1] - before[1]]
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
