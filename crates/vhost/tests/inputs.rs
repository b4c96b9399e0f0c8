//! Inputs of the fuzz targets `disk_requests`, `front_end_messages` and `switch_queues`, chosen by chance and the same each time.
#![cfg(not(miri))]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking, in its helpers too"
)]

#[path = "inputs/bytes.rs"]
mod bytes;
#[allow(dead_code, reason = "other tests use the rest")]
mod common;
#[path = "inputs/disk_requests.rs"]
mod disk_requests;
#[path = "inputs/front_end_messages.rs"]
mod front_end_messages;
#[path = "../../shm/tests/random/mod.rs"]
mod random;
#[path = "inputs/switch_queues.rs"]
mod switch_queues;

use random::inputs;

#[test]
fn random_disk_requests_are_judged_as_the_model_does() {
    let (mut refused, mut failed, mut unsupported, mut done) = (0, 0, 0, 0);
    for input in inputs(0, 40000, 200..=200) {
        let reached = disk_requests::run(&input);
        refused += reached.refused;
        failed += reached.failed;
        unsupported += reached.unsupported;
        done += reached.done;
    }
    // Inputs that reach nothing cannot fail.
    assert!(refused > 0 && failed > 0 && unsupported > 0 && done > 0, "{refused} {failed} {unsupported} {done}");
}

#[test]
fn random_messages_of_front_ends_leave_disk_to_the_next() {
    let mut scene = front_end_messages::Scene::new();
    for input in inputs(0, 500, 40..=400) {
        scene.run(&input);
    }
    // Each honest front end has one read and one write.
    let counters = scene.counters();
    let honest = 500;
    let served = counters.reads > honest && counters.writes > honest;
    assert!(
        served && counters.broken > 0 && counters.refused > 0 && scene.answers > 0,
        "{} {counters:?}",
        scene.answers
    );
}

#[test]
fn random_queues_of_a_guest_leave_other_ports_alone() {
    let mut scene = switch_queues::Scene::new();
    for input in inputs(0, 60, 300..=300) {
        scene.run(&input);
    }
    assert!(scene.broken() > 0 && scene.arrived > 0, "{} {}", scene.broken(), scene.arrived);
}

#[test]
fn frames_cut_in_their_ethernet_header_do_not_count_as_sent() {
    let mut scene = switch_queues::Scene::new();
    for length in 0..14 {
        // A broadcast frame with an empty header, cut to this length.
        let (send, plain, everybody, body, keep) = (7, 1, 0, [0, 0, 0], 0);
        scene.run(&[&[send, plain, everybody][..], &body, &[keep, 0, 1 + length, 0, 0]].concat());
    }
    assert!(scene.malformed() > 0);
}

#[test]
fn datagrams_of_an_input_arrive_cut() {
    let mut scene = switch_queues::Scene::new();
    for v6 in 0..2 {
        let (cut, untagged, payload, size, changed, whole) = (8, 0, [250, 0, 0], [100, 0, 0], 0, 1);
        scene.run(&[&[cut, v6, untagged][..], &payload, &size, &[changed, whole, 0, 0]].concat());
    }
    // Behind the honest frames of more inputs.
    for _ in 0..1000 {
        if scene.arrived < 6 {
            scene.run(&[]);
        }
    }
    assert_eq!((scene.arrived, scene.malformed()), (6, 0));
}
