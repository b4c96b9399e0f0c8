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

#[test]
fn agent_that_has_ended_has_not_greeted() {
    let served = Served::start();
    for _ in 0..2 {
        let guest = served.greet();
        // The port sends the task after it has taken note of the greeting.
        while !matches!(served.tasks.next_within(HANG).unwrap(), Task::Up { .. }) {}
        assert!(served.port.has_greeted());
        drop(guest);
        let start = Instant::now();
        while served.port.has_greeted() {
            assert!(start.elapsed() < HANG, "the agent that has ended counts as connected");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

#[test]
fn ends_of_connections_are_logged_once_a_minute() {
    let (limit, start) = (LogLimit::default(), Instant::now());
    assert_eq!([0, 1, 59].map(|s| limit.may(start + Duration::from_secs(s))), [true, false, false]);
    assert_eq!([60, 61].map(|s| limit.may(start + Duration::from_secs(s))), [true, false]);
}

#[test]
fn port_with_full_queue_ends_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("port");
    let listener = rustix::net::socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
    rustix::net::bind(&listener, &SocketAddrUnix::new(&path).unwrap()).unwrap();
    rustix::net::listen(&listener, 1).unwrap();
    let waiting = [UnixStream::connect(&path).unwrap(), UnixStream::connect(&path).unwrap()];
    let (name, tasks) = (Name::new("a").unwrap(), AttendantTasks::default());
    let control = ServerControl::new().unwrap();
    let port = Port::start(MachineId::MIN, &name, path.to_str().unwrap(), HANG, control, tasks.clone()).unwrap();
    port.release();
    // It has looked at the port, and comes to the order.
    let has_answered = tasks.next_within(HANG);
    // A thread that waits for room in the queue goes on now.
    drop((listener, waiting));
    drop(port);
    assert!(matches!(has_answered, Some(Task::Released { failure: Some(_), .. })), "{has_answered:?}");
}
