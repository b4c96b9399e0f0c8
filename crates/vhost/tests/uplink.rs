//! Uplinks: tap devices of the host's kernel, in network namespaces that end with the test.
#![cfg(not(miri))]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

#[allow(dead_code, reason = "other tests use the rest")]
mod common;
#[path = "uplink/world.rs"]
mod world;

use common::{HANG, introduce};
use std::time::{Duration, Instant};
use world::{Host, is_possible, processor_time};

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
