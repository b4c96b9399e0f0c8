//! Connections between two guests, over IPv4 and IPv6, whose ends see with rings what they see without the library: half-close, urgent
//! bytes, both directions at once, and `fork`.

use crate::world::{HANG, Inside, World, python};
use crate::{ON_RING, RUN};
use partywall_lab::Guest;
use std::time::{Duration, Instant};

const PROGRAM: &str = "conversation.py";
const PORT: u16 = 7005;
/// Addresses of the server's guest.
const ADDRESSES: [&str; 2] = ["10.77.0.1", "fd77::1"];
/// Uses of connections in the program.
const USES: usize = 8;

/// Both guests have an IPv6 address after this.
pub(crate) fn connections_do_what_they_do_over_tcp(world: &World, a: &Guest, b: &Guest) {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs");
    for (guest, address) in [(a, ADDRESSES[1]), (b, "fd77::2")] {
        // It is alone in having the address, and need not find that out first.
        let no_search = "for of in all eth0; do echo 0 > /proc/sys/net/ipv6/conf/$of/accept_dad; done";
        guest.sh(&format!("{no_search}; ip -6 address add {address}/64 dev eth0"));
        guest.put(&std::fs::read(folder.join(PROGRAM)).unwrap(), &format!("/tmp/{PROGRAM}"), 0o644).unwrap();
    }
    let plain = seen_at_both_ends(world, a, b, "");
    let ours = seen_at_both_ends(world, a, b, RUN);
    assert_eq!(plain, ours, "without, and with the library");
}

/// Runs the program at both ends, and returns what each has printed. With the library, no use begins before every connection has rings.
fn seen_at_both_ends(world: &World, a: &Guest, b: &Guest, run: &str) -> [String; 2] {
    let python = python::command(&format!("PARTYWALL_PRELOAD_LOG=/tmp/conversation.log {run}"));
    let begin = |guest: &Guest, words: &str| {
        guest.sh(&format!(
            "rm -f /tmp/conversation.out /tmp/conversation.log /tmp/enough; touch /tmp/conversation.log; \
             ({python} /tmp/{PROGRAM} {words}; echo ended with $?) > /tmp/conversation.out 2>&1 & true"
        ));
    };
    let log =
        || [a, b].map(|guest| guest.sh("tail -n 40 /tmp/conversation.out /tmp/conversation.log 2>&1; true")).join("\n");
    begin(a, &format!("serve {PORT} {}", ADDRESSES.len()));
    assert!(a.wait_until(&format!("grep -q ':{PORT:04X} 0*:0000 0A' /proc/net/tcp6")), "{}", log());
    begin(b, &format!("call {PORT} /tmp/enough {}", ADDRESSES.join(" ")));
    if !run.is_empty() {
        let connections = USES * ADDRESSES.len();
        for guest in [a, b] {
            let have = format!("[ $(grep -c '{ON_RING}' /tmp/conversation.log) -ge {connections} ]");
            assert!(guest.wait_until(&have), "{}\n{}", log(), world.log());
        }
        all_use_rings(a, b, connections);
    }
    b.sh("touch /tmp/enough");
    for guest in [a, b] {
        assert!(guest.wait_until("grep -q 'ended with' /tmp/conversation.out"), "{}", log());
    }
    let seen = [a, b].map(|guest| guest.sh("cat /tmp/conversation.out"));
    assert!(seen.iter().all(|seen| seen.trim_end().ends_with("ended with 0")), "{}", log());
    seen
}

/// Waits until each end of each connection sends and receives by its ring.
fn all_use_rings(a: &Guest, b: &Guest, connections: usize) {
    let deadline = Instant::now() + HANG;
    for (guest, end) in [(a, "local"), (b, "peer")] {
        loop {
            let shown: serde_json::Value = serde_json::from_str(&guest.sh("partywall top --once --json")).unwrap();
            let is_on_ring = |row: &&serde_json::Value| {
                row["way"] == "ring" && row[end].as_str().is_some_and(|end| end.ends_with(&format!(":{PORT}")))
            };
            if shown["connections"].as_array().unwrap().iter().filter(is_on_ring).count() == connections {
                break;
            }
            assert!(Instant::now() < deadline, "{}: {}", guest.name(), guest.sh("partywall top --once"));
            // The command uses the guest's only processor, too.
            std::thread::sleep(Duration::from_millis(200));
        }
    }
}
