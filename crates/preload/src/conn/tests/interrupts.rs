//! Bells by interrupts: what wakes a sleeper, and what becomes of the events.

use super::*;

#[test]
fn sleeping_reader_is_woken_by_event_and_link_stays_silent() {
    let p = Pair::up_with_events(4096, false);
    for byte in 0..20 {
        std::thread::scope(|s| {
            let reader = s.spawn(|| recv(p.b, 10, 0));
            std::thread::sleep(Duration::from_millis(5));
            send(p.a, &[byte], 0).unwrap();
            assert_eq!(reader.join().unwrap().unwrap(), [byte]);
        });
    }
    let on_link = rustix::io::ioctl_fionread(crate::sys::borrow(p.conn_b().bell().fd())).unwrap();
    assert_eq!(on_link, 0, "no bell comes by the link");
}

#[test]
fn sleeping_reader_finds_bytes_of_lost_interrupt() {
    let p = Pair::up_with_events(4096, true);
    std::thread::scope(|s| {
        let reader = s.spawn(|| recv(p.b, 10, 0));
        std::thread::sleep(Duration::from_millis(50));
        send(p.a, b"late", 0).unwrap();
        assert_eq!(reader.join().unwrap().unwrap(), b"late");
    });
}

#[test]
fn first_ring_is_heard_by_link_or_by_event() {
    use partywall_region::bell::Heard;

    let event = || rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
    for is_by_event in [false, true] {
        let (link, far) = partywall_region::bell::pair().unwrap();
        let (heard, ringing) = (event(), event());
        let signals = heard.try_clone().unwrap();
        let bell = crate::local::OwnBell::new();
        assert_eq!(bell.hear(), Heard::Gone, "there is none");
        assert!(bell.keep(link, Some((heard, ringing))));
        assert_eq!(bell.hear(), Heard::Nothing);
        if is_by_event {
            rustix::io::write(&signals, &1u64.to_ne_bytes()).unwrap();
        } else {
            assert!(partywall_region::bell::ring(&far, b'B'));
        }
        assert_eq!(bell.hear(), Heard::Bell, "by event: {is_by_event}");
        drop(far);
        assert_eq!(bell.hear(), Heard::Gone, "by event: {is_by_event}");
        bell.discard();
    }
}

#[test]
fn events_of_bell_are_closed_with_it() {
    let p = Pair::up_with_events(4096, false);
    let bell = p.conn_a().bell();
    let all: Vec<c_int> = bell.listening().collect();
    assert_eq!(all.len(), 2);
    bell.discard();
    assert_eq!(bell.listening().count(), 0);
    assert!(!bell.ring(), "nothing is left to ring by");
}
