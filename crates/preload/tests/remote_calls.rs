//! The cost of the library where it cannot help: calls on connections whose peer runs without it. Valgrind counts the instructions in user space
//! and the system calls of a program, so the cost does not depend on the machine's speed or load.
//!
//! The library that tests use is built without optimisation. For another one, and to see the figures:
//!
//! ```text
//! PARTYWALL_TEST_LIBRARY=$PWD/target/release/libpartywall_preload.so cargo test -p partywall-preload --test remote_calls -- --nocapture
//! ```

#![expect(clippy::unwrap_used, clippy::panic, reason = "a failed test is to stop")]

mod support;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;

use partywall_protocol::environment;
use support::{
    c, find,
    guard::Guard,
    world::{World, library},
};

/// Steps that are counted.
const STEPS: u64 = 2000;
/// Most additional instructions in a call, of a library without optimisation.
const MOST: f64 = 1000.0;
/// How often the broker may be late. See [`count_settled`].
const PATIENCE: usize = 5;

/// What a step takes.
#[derive(Debug, Clone, Copy)]
struct StepCost {
    instructions: f64,
    system_calls: f64,
}

/// A server without the library, which discards what it gets or sends it back. It serves one client after another until the test has ended.
fn serve(listener: TcpListener, answers: bool) {
    let serve_one = move |mut client: TcpStream| {
        let mut bytes = vec![0; 1 << 16];
        while let Ok(count @ 1..) = client.read(&mut bytes) {
            if answers && client.write_all(&bytes[..count]).is_err() {
                return;
            }
        }
    };
    thread::spawn(move || listener.incoming().flatten().for_each(serve_one));
}

fn count(valgrind: &Path, driver: &Path, broker: Option<&Path>, port: u16, flow: &str, size: u32) -> StepCost {
    let mut command = Command::new(valgrind);
    command.args([
        "--tool=callgrind",
        "--callgrind-out-file=/dev/null",
        "--toggle-collect=measured",
        "--collect-systime=yes",
    ]);
    command.arg(driver).arg(port.to_string()).args([flow, &STEPS.to_string(), &size.to_string()]);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    if let Some(broker) = broker {
        command.env(environment::PRELOAD, library()).env(environment::BROKER, broker);
    }
    let output = Guard::spawn(&mut command).output();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{flow}: {}: {said}", output.status);
    // Instructions, system calls, time in them.
    let totals = said.lines().find_map(|line| line.split_once("Collected : ")).map(|(_, totals)| totals);
    let totals: Vec<f64> = totals.iter().flat_map(|t| t.split_whitespace()).map(|n| n.parse().unwrap()).collect();
    let [instructions, system_calls, ..] = totals[..] else { panic!("valgrind does not tell what it counted: {said}") };
    StepCost { instructions: instructions / STEPS as f64, system_calls: system_calls / STEPS as f64 }
}

/// Counts with a broker. A connection that is made more than a second before the broker answers may still come to a ring, so its calls cost
/// as much as without a broker. On a busy machine a broker can be that late. Then the program runs again.
fn count_settled(most: f64, count: impl Fn() -> StepCost) -> StepCost {
    let mut cost = count();
    for _ in 1..PATIENCE {
        if cost.instructions < most {
            break;
        }
        println!("{cost:?}: more than {most}, as if the broker was late");
        cost = count();
    }
    cost
}

#[test]
fn call_to_remote_peer_makes_no_further_system_call() {
    let Some(valgrind) = find("valgrind", "valgrind") else { return };
    let driver = c::program("remote_calls", &["remote_calls.c"], &[]);
    let world = World::new();
    for (flow, calls) in [("stream", 1.0), ("rounds", 2.0), ("polled", 3.0)] {
        let mut sizes = Vec::new();
        for size in [4, 16384] {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let port = listener.local_addr().unwrap().port();
            serve(listener, flow != "stream");
            let plain = count(&valgrind, &driver, None, port, flow, size);
            let ours = count_settled(plain.instructions + MOST * calls, || {
                count(&valgrind, &driver, Some(&world.socket()), port, flow, size)
            });
            let more = ours.instructions - plain.instructions;
            // Valgrind counts a system call several times, always as often.
            let further = calls * (ours.system_calls / plain.system_calls - 1.0);
            println!(
                "{flow} of {size} B: {:.1} instructions a step, {:.1} without the library; {further:.3} further system calls",
                ours.instructions, plain.instructions
            );
            // Now and then valgrind counts one call more.
            assert!(further.abs() < 0.05, "{flow} of {size} B: {further} further system calls a step");
            assert!((1.0..MOST * calls).contains(&more), "{flow} of {size} B: {more} instructions more");
            sizes.push(more);
            if size == 4 {
                // The library asks for a broker again and again, and the connection may still come to a ring.
                let alone = count(&valgrind, &driver, Some(&world.path("nobody")), port, flow, size);
                println!("{flow} of {size} B without a broker: {:.1} instructions a step", alone.instructions);
            }
        }
        assert!((sizes[0] - sizes[1]).abs() < 2.0, "{flow}: the cost grows with the size: {sizes:?}");
    }
}
