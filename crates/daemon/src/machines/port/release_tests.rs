//! A guest that is to give up its windows, and does not do what an honest one does.

use super::tests::{HANG, Served};
use super::*;
use partywall_protocol::agent::{LastReason, Say};
use partywall_region::packet;
use std::os::fd::AsFd;
use std::time::Instant;

/// The port's report of a release.
fn released(served: &Served) -> Option<String> {
    let start = Instant::now();
    loop {
        match served.tasks.next_within(HANG.saturating_sub(start.elapsed())).unwrap() {
            Task::Released { failure, .. } => return failure,
            _ => continue,
        }
    }
}

#[test]
fn released_is_passed_on_once_and_only_if_it_was_asked_for() {
    let served = Served::start();
    let mut guest = served.greet();
    guest.say(Say::Released { held: LastReason(String::new()) }.encode());
    // Earlier frames have been processed when the session is there.
    guest.say(Say::Open { session: 1, pid: 7 }.encode());
    let session = served.admitted();
    served.port.release();
    assert_eq!(guest.next_said(), Some(Say::Release {}));
    guest.say(Say::Released { held: LastReason("process 7".into()) }.encode());
    assert_eq!(released(&served), Some("process 7".into()), "the first answer was to nothing");
    assert_eq!(packet::recv(session.as_fd(), &mut [0; 8]).unwrap().len, 0, "its sessions have ended");
    served.port.release();
    assert_eq!(guest.next_said(), Some(Say::Release {}));
    guest.say(Say::Released { held: LastReason(String::new()) }.encode());
    assert_eq!(released(&served), None);
}

#[test]
fn agent_that_ends_or_starts_again_has_not_released() {
    let served = Served::start();
    for ends in [true, false] {
        let mut guest = served.greet();
        served.port.release();
        assert_eq!(guest.next_said(), Some(Say::Release {}));
        if !ends {
            guest.greet_again();
        } else {
            drop(guest);
        }
        assert!(released(&served).is_some(), "ends: {ends}");
    }
}

#[test]
fn release_without_agent_fails_at_once() {
    let served = Served::start();
    served.port.release();
    // The connection is accepted, but no greeting comes: the port is open, and the answer comes with its end.
    let (stream, _) = served.listener.accept().unwrap();
    drop(stream);
    assert!(released(&served).is_some());
}
