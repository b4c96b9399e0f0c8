use super::*;
use partywall_shm::layout::PAGE;
use std::sync::atomic::{AtomicU64, Ordering};

const NUMBER: u64 = 77;
const WINDOW: WindowId = WindowId([3; 16]);
/// A stand-in for the memory of [`WINDOW`].
const MEMORY: u32 = 5;
const BEAT: Heartbeat = Heartbeat { every: Duration::from_secs(1), limit: Duration::from_secs(10) };

/// A relay, what is at the other end of its port, and the time.
struct Bench {
    core: RelayCore<u32>,
    now: Instant,
    /// Reads what the relay writes.
    reader: Decoder,
}

impl Bench {
    /// A relay and another side that have greeted each other.
    fn new(side: PortSide) -> Self {
        let now = Instant::now();
        let core = RelayCore::new(side, (side == PortSide::Host).then_some(BEAT), || NUMBER, now);
        let mut this = Self { core, now, reader: Decoder::default() };
        let hello = if side == PortSide::Guest { Item::Greeting(NUMBER) } else { Item::Greeting(0) };
        assert_eq!(this.written(), [hello]);
        this.hear_bytes(&greeting(NUMBER));
        assert_eq!(this.effects(), [RelayEffect::Report(Notice::Up)]);
        if side == PortSide::Host {
            assert_eq!(this.written(), [Item::Greeting(NUMBER)]);
        }
        this
    }

    fn effects(&mut self) -> Vec<RelayEffect> {
        std::iter::from_fn(|| self.core.next_effect()).collect()
    }

    /// Takes all output for the port, decoded.
    fn written(&mut self) -> Vec<Item> {
        let bytes = self.core.output().to_vec();
        self.core.written(bytes.len());
        self.reader.push(&bytes);
        std::iter::from_fn(|| self.reader.take().unwrap()).collect()
    }

    fn frames(&mut self) -> Vec<Frame> {
        let frame = |item| match item {
            Item::Frame(frame) => frame,
            Item::Greeting(number) => panic!("greeting {number}"),
        };
        self.written().into_iter().map(frame).collect()
    }

    fn hear_bytes(&mut self, bytes: &[u8]) {
        self.core.received(bytes);
        self.core.heard(self.now);
        while self.core.next_item(self.now).unwrap() {}
    }

    fn hear(&mut self, frame: &Frame) -> Vec<RelayEffect> {
        let mut bytes = Vec::new();
        frame.encode(&mut bytes);
        self.hear_bytes(&bytes);
        self.effects()
    }

    /// Time passes, in steps in which the loop looks at the time.
    fn pass(&mut self, time: Duration, step: Duration) {
        let until = self.now + time;
        while self.now < until {
            self.now += step;
            self.core.beat(self.now);
        }
    }
}

fn attach(link: u32, generation: u32, window: WindowId) -> Frame {
    let geometry = partywall_shm::layout::Geometry::new(PAGE, 4096).unwrap();
    Frame::Attach { link, generation, geometry, start: 0, base: PAGE, window }
}

#[test]
fn early_hang_up_ends_the_link_once_it_is_known() {
    let mut host = Bench::new(PortSide::Host);
    for link in 0..5000 {
        assert_eq!(host.hear(&Frame::HungUp { link }), []);
    }
    host.core.link(4999, LinkUse::Channel);
    host.core.close_finished();
    let closed = [RelayEffect::Close(4999), RelayEffect::Report(Notice::Closed(4999))];
    assert_eq!(host.effects(), closed);
    // Once.
    host.core.link(4999, LinkUse::Channel);
    host.core.close_finished();
    assert_eq!(host.effects(), []);
    assert_eq!(host.hear(&Frame::Bell { link: 4999 }), [RelayEffect::Ring(4999)]);
}

#[test]
fn refused_links_leave_no_early_notices() {
    let mut host = Bench::new(PortSide::Host);
    host.hear(&Frame::HungUp { link: 1 });
    for link in (2..5000).step_by(2) {
        host.hear(&Frame::RungBy { link, vector: 3 });
        host.core.forget_link(link);
        // The guest's process closes its end when it learns of the refusal.
        assert_eq!(host.hear(&Frame::HungUp { link }), []);
    }
    host.core.link(1, LinkUse::Channel);
    host.core.close_finished();
    let closed = [RelayEffect::Close(1), RelayEffect::Report(Notice::Closed(1))];
    assert_eq!(host.effects(), closed, "a hang-up that waits for its link is not replaced by those of refused links");
}

#[test]
fn hang_ups_that_cross_leave_no_early_notices() {
    let mut host = Bench::new(PortSide::Host);
    host.hear(&Frame::HungUp { link: 1 });
    for link in 2..3000 {
        host.core.link(link, LinkUse::Channel);
        host.core.hang_up(link);
        host.hear(&Frame::HungUp { link });
    }
    host.core.link(1, LinkUse::Channel);
    host.core.close_finished();
    let closed = [RelayEffect::Close(1), RelayEffect::Report(Notice::Closed(1))];
    assert_eq!(host.effects(), closed);
}

#[test]
fn link_that_exists_is_not_forgotten() {
    let mut host = Bench::new(PortSide::Host);
    host.core.link(2, LinkUse::Channel);
    host.core.forget_link(2);
    assert_eq!(host.hear(&Frame::Bell { link: 2 }), [RelayEffect::Ring(2)]);
}

#[test]
fn greeting_forgets_early_hang_ups_and_links() {
    let mut host = Bench::new(PortSide::Host);
    host.core.link(1, LinkUse::Channel);
    host.hear(&Frame::HungUp { link: 7 });
    host.hear_bytes(&greeting(2));
    assert_eq!(host.effects(), [RelayEffect::Close(1), RelayEffect::Report(Notice::Up)]);
    host.core.link(7, LinkUse::Channel);
    host.core.close_finished();
    assert_eq!(host.effects(), []);
}

#[test]
fn host_answers_another_version_with_its_own_and_ends() {
    let theirs = [&greeting(2)[..32], &[9, 0, 0, 0], &[1; 8]].concat();
    for (side, said) in [(PortSide::Host, vec![Item::Greeting(0)]), (PortSide::Guest, vec![])] {
        let mut this = Bench::new(side);
        this.core.received(&theirs);
        assert_eq!(this.core.next_item(this.now), Err(PortError::Version(9)));
        assert_eq!(this.written(), said, "{side:?}");
    }
}

/// A host that has hung up the links of a silent guest greets when it hears it again. Frames before a greeting are discarded, if they are read with
/// it, and those hang-ups may be among them.
#[test]
fn guest_greets_a_new_broker_and_ends_its_links() {
    static NEXT: AtomicU64 = AtomicU64::new(NUMBER);
    let mut guest = Bench::new(PortSide::Guest);
    guest.core.random = || NEXT.fetch_add(1, Ordering::Relaxed) + 1;
    guest.core.link(1, LinkUse::Channel);
    guest.hear_bytes(&greeting(0));
    assert_eq!(guest.written(), [Item::Greeting(NUMBER + 1)]);
    assert_eq!(guest.effects(), [RelayEffect::Close(1)], "not up yet");
    // An answer to an earlier greeting does not count.
    guest.hear_bytes(&greeting(NUMBER));
    assert_eq!(guest.effects(), []);
    guest.hear_bytes(&greeting(NUMBER + 1));
    assert_eq!(guest.effects(), [RelayEffect::Report(Notice::Up)]);
    assert_eq!(guest.hear(&Frame::Bell { link: 1 }), []);
}

/// The broker that was greeted has ended before it could answer, and the next was there before the guest noticed.
#[test]
fn guest_greets_the_next_broker_if_the_answer_is_lost() {
    let mut guest = Bench::new(PortSide::Guest);
    for _ in 0..3 {
        guest.hear_bytes(&greeting(0));
        assert_eq!(guest.written(), [Item::Greeting(NUMBER)]);
    }
    // A greeting that the guest has made unasked may cross that of a broker, which answers it.
    guest.core.port_ended();
    guest.core.accompanied();
    assert_eq!(guest.written(), [Item::Greeting(NUMBER)]);
    guest.hear_bytes(&greeting(0));
    assert_eq!(guest.written(), []);
    guest.hear_bytes(&greeting(0));
    assert_eq!(guest.written(), [Item::Greeting(NUMBER)]);
}

#[test]
fn owner_is_late_until_it_has_heard_of_each_greeting() {
    let mut host = Bench::new(PortSide::Host);
    // Of the greeting that all benches begin with.
    assert!(host.core.is_owner_late());
    host.hear_bytes(&greeting(2));
    host.core.owner_heard();
    assert!(host.core.is_owner_late(), "there was another");
    host.core.owner_heard();
    assert!(!host.core.is_owner_late());
    host.hear_bytes(&greeting(3));
    assert!(host.core.is_owner_late());
    host.core.owner_heard();
    host.pass(BEAT.limit * 2, BEAT.every);
    assert!(host.core.is_owner_late(), "the guest is silent");
    host.core.owner_heard();
    assert!(!host.core.is_owner_late());
}

/// The host takes all that comes behind a greeting for new.
#[test]
fn owner_of_guest_is_late_until_its_greeting_is_answered() {
    let mut guest = Bench::new(PortSide::Guest);
    guest.core.owner_heard();
    assert!(!guest.core.is_owner_late());
    guest.hear_bytes(&greeting(0));
    assert!(guest.core.is_owner_late(), "not answered");
    guest.hear_bytes(&greeting(NUMBER));
    assert!(guest.core.is_owner_late(), "not heard of");
    guest.core.owner_heard();
    assert!(!guest.core.is_owner_late());
    guest.core.port_ended();
    assert!(guest.core.is_owner_late(), "there is no other side");
}

#[test]
fn guest_that_greets_after_long_silence_is_asked_at_once() {
    let mut host = Bench::new(PortSide::Host);
    // Until the pauses between two questions are longer than the limit.
    host.pass(BEAT.limit * 20, BEAT.every);
    host.hear_bytes(&greeting(2));
    host.effects();
    host.written();
    host.core.beat(host.now);
    assert_eq!(host.frames(), [Frame::Ping {}]);
    host.pass(BEAT.limit - BEAT.every, BEAT.every);
    assert_eq!(host.effects(), []);
    assert!(host.frames().len() > 1, "and again");
}

#[test]
fn guest_without_other_side_ends_its_links_and_greets_the_next() {
    let mut guest = Bench::new(PortSide::Guest);
    guest.core.link(1, LinkUse::Channel);
    guest.core.control(vec![1]);
    assert!(guest.core.port_ended() && guest.core.port_ended());
    assert_eq!(guest.effects(), [RelayEffect::Close(1), RelayEffect::Report(Notice::Alone)], "reported once");
    guest.core.control(vec![2]);
    assert!(guest.core.is_alone() && guest.core.output().is_empty());
    guest.core.accompanied();
    assert_eq!(guest.written(), [Item::Greeting(NUMBER)], "what waited was for nobody");
    assert!(!Bench::new(PortSide::Host).core.port_ended(), "a host's port does not come again");
}

#[test]
fn answered_pings_keep_links_and_silence_ends_them() {
    let mut host = Bench::new(PortSide::Host);
    host.core.link(1, LinkUse::Channel);
    for _ in 0..30 {
        host.pass(BEAT.every, BEAT.every / 4);
        assert_eq!(host.frames(), [Frame::Ping {}]);
        host.hear(&Frame::Pong {});
    }
    host.pass(BEAT.limit - BEAT.every, BEAT.every / 4);
    assert_eq!(host.effects(), []);
    host.frames();
    host.pass(BEAT.every, BEAT.every / 4);
    assert_eq!(host.effects(), [RelayEffect::Close(1), RelayEffect::Report(Notice::Silent)]);
    assert_eq!(host.frames().last(), Some(&Frame::HungUp { link: 1 }));
    // It is asked more and more rarely, in case it has lost the interrupt for what it was sent.
    assert!(host.core.patience(host.now).is_some_and(|patience| patience <= BEAT.limit));
    for pause in [1, 2, 4] {
        let before = BEAT.limit * pause - BEAT.every;
        host.pass(before, BEAT.every);
        assert_eq!(host.frames(), [], "{pause}");
        host.pass(BEAT.every, BEAT.every);
        assert_eq!((host.frames(), host.effects()), (vec![Frame::Ping {}], vec![]), "{pause}");
    }
    // It can come again.
    host.hear_bytes(&greeting(2));
    assert_eq!(host.effects(), [RelayEffect::Report(Notice::Up)]);
    assert_eq!(host.written(), [Item::Greeting(2)]);
}

#[test]
fn time_in_which_the_relay_was_held_up_is_not_silence() {
    let mut host = Bench::new(PortSide::Host);
    host.core.link(1, LinkUse::Channel);
    host.pass(BEAT.every, BEAT.every);
    // The host's own process was stopped in between.
    host.pass(BEAT.limit * 5, BEAT.limit * 5);
    assert_eq!(host.effects(), []);
    host.pass(BEAT.limit, BEAT.every);
    assert_eq!(host.effects(), [RelayEffect::Close(1), RelayEffect::Report(Notice::Silent)]);
}

#[test]
fn guest_heard_again_after_silence_is_greeted() {
    let mut host = Bench::new(PortSide::Host);
    host.pass(BEAT.limit * 2, BEAT.every);
    assert_eq!(host.effects(), [RelayEffect::Report(Notice::Silent)]);
    host.written();
    // It does not know that its links are gone.
    host.hear(&Frame::Pong {});
    assert_eq!(host.written(), [Item::Greeting(0)]);
    host.hear(&Frame::Pong {});
    assert_eq!(host.written(), [], "greeted once");
    // It may be paused again, and lose the interrupt for the greeting.
    host.pass(BEAT.limit * 2, BEAT.every);
    assert_eq!(host.frames(), [Frame::Ping {}]);
    // What it says before it greets does not count: its silence would not be reported once more.
    assert_eq!(host.hear(&Frame::Control { message: vec![1] }), []);
    assert_eq!(host.written(), [Item::Greeting(0)], "it may have taken the first for one that crossed its own");
    host.hear_bytes(&greeting(2));
    assert_eq!(host.written(), [Item::Greeting(2)]);
    host.pass(BEAT.limit * 2, BEAT.every);
    host.written();
    host.hear(&Frame::Pong {});
    assert_eq!(host.written(), [Item::Greeting(0)], "once for each silence");
}

#[test]
fn guest_that_did_not_greet_a_new_host_is_asked() {
    let now = Instant::now();
    let core = RelayCore::new(PortSide::Host, Some(BEAT), || NUMBER, now);
    let mut host = Bench { core, now, reader: Decoder::default() };
    assert_eq!(host.written(), [Item::Greeting(0)]);
    host.pass(BEAT.limit, BEAT.every);
    assert_eq!(host.frames(), [Frame::Ping {}]);
    // It has greeted the broker before, which ended before it could answer.
    host.hear(&Frame::Pong {});
    assert_eq!(host.written(), [Item::Greeting(0)]);
}

#[test]
fn port_that_takes_nothing_holds_up_links_and_pongs() {
    for side in [PortSide::Guest, PortSide::Host] {
        let mut bench = Bench::new(side);
        bench.core.link(1, LinkUse::Channel);
        let mut rings = 0;
        while bench.core.may_read_links() {
            bench.core.ring(1);
            rings += 1;
        }
        assert_eq!(bench.core.waiting(), HIGH);
        assert_eq!(bench.core.may_read_port(0, 0), side == PortSide::Guest);
        bench.hear(&Frame::Ping {});
        assert_eq!(bench.core.waiting(), HIGH, "no pong is kept");
        bench.core.written(8);
        assert!(bench.core.may_read_links() && bench.core.may_read_port(0, 0));
        bench.hear(&Frame::Ping {});
        assert_eq!(bench.core.waiting(), HIGH);
        assert!(rings > 1000);
    }
}

#[test]
fn host_does_not_read_a_guest_that_sends_more_than_is_taken() {
    let host = Bench::new(PortSide::Host);
    assert!(host.core.may_read_port(HIGH - 1, MOST_NOTICES - 1));
    assert!(!host.core.may_read_port(HIGH, 0) && !host.core.may_read_port(0, MOST_NOTICES));
    assert!(Bench::new(PortSide::Guest).core.may_read_port(usize::MAX, usize::MAX));
}

#[test]
fn attach_of_a_window_not_given_ends_the_link() {
    let mut host = Bench::new(PortSide::Host);
    host.core.window(WINDOW, MEMORY);
    host.core.link(1, LinkUse::Channel);
    host.core.link(2, LinkUse::Channel);
    assert_eq!(host.hear(&attach(1, 0, WINDOW)), [RelayEffect::Deliver(1)]);
    assert_eq!(host.core.next_delivery(1).unwrap().memory, MEMORY);
    assert_eq!(host.hear(&attach(9, 0, WINDOW)), [], "a link that is not there");
    let closed = [RelayEffect::Close(2), RelayEffect::Report(Notice::Closed(2))];
    assert_eq!(host.hear(&attach(2, 0, WindowId([4; 16]))), closed);
    assert_eq!(host.frames(), [Frame::HungUp { link: 2 }]);
    host.core.forget_window(WINDOW);
    host.hear(&attach(1, 0, WINDOW));
    assert_eq!(host.frames(), [Frame::HungUp { link: 1 }]);
}

#[test]
fn bell_carries_rings_and_hang_up_and_no_descriptor() {
    let mut host = Bench::new(PortSide::Host);
    host.core.doorbells(DoorbellSide::Host);
    host.core.window(WINDOW, MEMORY);
    for link in [1, 2] {
        host.core.link(link, LinkUse::Bell);
    }
    assert_eq!(host.hear(&Frame::Bell { link: 1 }), [RelayEffect::Ring(1)]);
    let kept = [RelayEffect::KeepVector { link: 1, vector: 3 }];
    assert_eq!(host.hear(&Frame::RungBy { link: 1, vector: 3 }), kept, "no event is passed to its process");
    assert!(!host.core.wants_event(1));
    host.core.vector_passed(1, 3);
    for round in 0..4 {
        host.core.ring(1);
        assert_eq!(host.effects(), [RelayEffect::SignalVector(1)]);
        assert_eq!(host.frames().len(), usize::from(round < 2), "the first two go by the port as well");
    }
    assert_eq!(host.hear(&attach(1, 0, WINDOW)), [RelayEffect::Close(1), RelayEffect::Report(Notice::Closed(1))]);
    assert_eq!(host.frames(), [Frame::HungUp { link: 1 }]);
    host.hear(&Frame::HungUp { link: 2 });
    host.core.close_finished();
    assert_eq!(host.effects(), [RelayEffect::Close(2), RelayEffect::Report(Notice::Closed(2))]);
    let mut guest = Bench::new(PortSide::Guest);
    guest.core.doorbells(DoorbellSide::Guest);
    guest.core.link(1, LinkUse::Bell);
    assert_eq!(guest.effects(), [RelayEffect::TakeVector(1)]);
}

#[test]
fn bell_between_machines_passes_events_and_no_memory() {
    let mut host = Bench::new(PortSide::Host);
    host.core.doorbells(DoorbellSide::Host);
    host.core.window(WINDOW, MEMORY);
    host.core.link(1, LinkUse::BellBetweenMachines);
    let passed = [RelayEffect::PassVector { link: 1, vector: 3 }];
    assert_eq!(host.hear(&Frame::RungBy { link: 1, vector: 3 }), passed);
    host.core.vector_passed(1, 3);
    assert_eq!(host.hear(&Frame::RungBy { link: 1, vector: 4 }), [], "once");
    assert!(host.core.wants_event(1));
    host.core.introduced(1, Some(9));
    assert_eq!(host.frames(), [Frame::RingAs { link: 1, peer: 9 }]);
    assert!(!host.core.wants_event(1), "once");
    assert_eq!(host.hear(&attach(1, 0, WINDOW)), [RelayEffect::Close(1), RelayEffect::Report(Notice::Closed(1))]);
}

#[test]
fn ninth_delivery_that_finds_no_room_ends_the_link() {
    let mut host = Bench::new(PortSide::Host);
    host.core.window(WINDOW, MEMORY);
    host.core.link(1, LinkUse::Channel);
    for generation in 0..8 {
        host.hear(&attach(1, generation, WINDOW));
        host.core.not_delivered(1);
        assert_eq!(host.effects(), []);
    }
    // The process has taken one.
    assert_eq!(host.core.next_delivery(1).unwrap().generation, 0);
    host.core.delivered(1);
    assert_eq!(host.core.next_delivery(1).unwrap().generation, 1);
    for generation in 8..10 {
        host.hear(&attach(1, generation, WINDOW));
        host.core.not_delivered(1);
    }
    assert_eq!(host.effects(), [RelayEffect::Close(1), RelayEffect::Report(Notice::Closed(1))]);
    assert_eq!(host.frames(), [Frame::HungUp { link: 1 }]);
}

#[test]
fn ending_link_delivers_pending_packets_before_close() {
    let mut host = Bench::new(PortSide::Host);
    host.core.window(WINDOW, MEMORY);
    host.core.link(1, LinkUse::Channel);
    host.hear(&attach(1, 0, WINDOW));
    host.hear(&Frame::HungUp { link: 1 });
    host.core.close_finished();
    assert_eq!(host.effects(), []);
    host.core.delivered(1);
    host.core.close_finished();
    assert_eq!(host.effects(), [RelayEffect::Close(1), RelayEffect::Report(Notice::Closed(1))]);
}

#[test]
fn memory_in_no_window_ends_the_link() {
    let mut guest = Bench::new(PortSide::Guest);
    let geometry = partywall_shm::layout::Geometry::new(PAGE, 4096).unwrap();
    for (base, memory) in [(PAGE, None), (0, Some(WINDOW))] {
        guest.core.link(1, LinkUse::Channel);
        guest.core.attach(1, MemoryDelivery { base, start: 0, generation: 0, geometry, memory });
        assert_eq!(guest.frames(), [Frame::HungUp { link: 1 }]);
    }
    guest.core.link(1, LinkUse::Channel);
    guest.core.attach(1, MemoryDelivery { base: PAGE, start: 0, generation: 2, geometry, memory: Some(WINDOW) });
    assert_eq!(guest.frames(), [attach(1, 2, WINDOW)]);
}

#[test]
fn guest_rings_both_ways_first_and_then_by_its_device_alone() {
    let mut guest = Bench::new(PortSide::Guest);
    guest.core.doorbells(DoorbellSide::Guest);
    guest.core.link(1, LinkUse::Channel);
    assert_eq!(guest.effects(), [RelayEffect::TakeVector(1)]);
    guest.core.vector_taken(1, 4);
    assert_eq!(guest.frames(), [Frame::RungBy { link: 1, vector: 4 }]);
    guest.core.ring(1);
    assert_eq!((guest.frames(), guest.effects()), (vec![Frame::Bell { link: 1 }], vec![]));
    guest.hear(&Frame::RingAs { link: 1, peer: 9 });
    guest.core.ring(1);
    assert_eq!((guest.frames(), guest.effects()), (vec![Frame::Bell { link: 1 }], vec![RelayEffect::RingPeer(9)]));
    guest.core.ring(1);
    let passed = vec![RelayEffect::RingPeer(9), RelayEffect::PassPeer { link: 1, peer: 9 }];
    assert_eq!((guest.frames(), guest.effects()), (vec![Frame::Bell { link: 1 }], passed));
    guest.core.ring(1);
    assert_eq!((guest.frames(), guest.effects()), (vec![], vec![RelayEffect::RingPeer(9)]));
    guest.core.hang_up(1);
    let over = [RelayEffect::GiveBackVector(4), RelayEffect::ForgetPeer(9), RelayEffect::Close(1)];
    assert_eq!(guest.effects()[..3], over);
    // A vector that comes too late is given back.
    guest.core.vector_taken(1, 5);
    assert_eq!(guest.effects(), [RelayEffect::GiveBackVector(5)]);
}

#[test]
fn host_passes_one_vector_and_introduces_one_event_per_link() {
    let mut host = Bench::new(PortSide::Host);
    host.core.link(1, LinkUse::Channel);
    assert_eq!(host.hear(&Frame::RungBy { link: 1, vector: 0 }), [], "no device");
    host.core.doorbells(DoorbellSide::Host);
    assert_eq!(host.hear(&Frame::RingAs { link: 1, peer: 3 }), [], "not for a guest to say");
    let pass = |vector| RelayEffect::PassVector { link: 1, vector };
    assert_eq!(host.hear(&Frame::RungBy { link: 1, vector: 9 }), [pass(9)]);
    // The guest has no such vector, so it may name another.
    assert_eq!(host.hear(&Frame::RungBy { link: 1, vector: 1 }), [pass(1)]);
    host.core.vector_passed(1, 1);
    assert_eq!(host.hear(&Frame::RungBy { link: 1, vector: 2 }), []);

    assert!(host.core.wants_event(1) && !host.core.wants_event(2));
    host.core.introduced(1, Some(6));
    assert_eq!(host.frames(), [Frame::RingAs { link: 1, peer: 6 }]);
    assert!(!host.core.wants_event(1));
    host.core.link(2, LinkUse::Channel);
    host.core.introduced(2, None);
    assert!(!host.core.wants_event(2) && host.frames().is_empty(), "signalled by the host from now on");
    // Another device knows nothing of this.
    host.core.doorbells(DoorbellSide::Host);
    assert!(host.core.wants_event(1) && host.core.wants_event(2));
    assert!(!Bench::new(PortSide::Guest).core.wants_event(1));
}

#[test]
fn end_hangs_up_all_links_towards_both_sides() {
    let mut guest = Bench::new(PortSide::Guest);
    guest.core.link(1, LinkUse::Channel);
    guest.core.link(2, LinkUse::Channel);
    guest.core.end();
    assert_eq!(guest.effects(), [RelayEffect::Close(1), RelayEffect::Close(2)]);
    assert_eq!(guest.frames(), [Frame::HungUp { link: 1 }, Frame::HungUp { link: 2 }]);
}

#[test]
fn links_of_leaving_guest_end_as_moved_until_it_greets() {
    let mut host = Bench::new(PortSide::Host);
    host.core.link(1, LinkUse::Channel);
    host.hear(&Frame::HungUp { link: 1 });
    host.core.close_finished();
    let dead = |link| [RelayEffect::Close(link), RelayEffect::Report(Notice::Closed(link))];
    assert_eq!(host.effects(), dead(1), "nothing is being migrated");
    for link in [2, 3, 4] {
        host.core.link(link, if link == 3 { LinkUse::Bell } else { LinkUse::Channel });
    }
    host.core.leave();
    for link in [2, 3] {
        host.hear(&Frame::HungUp { link });
    }
    host.core.close_finished();
    let ends: Vec<RelayEffect> = [RelayEffect::SayMoved(2)].into_iter().chain(dead(2)).chain(dead(3)).collect();
    assert_eq!(host.effects(), ends, "a bell carries rings and hang-ups alone");
    // The guest has released its windows, and the port is closed.
    host.core.end();
    assert_eq!(host.effects(), [RelayEffect::SayMoved(4), RelayEffect::Close(4)]);
    host.hear_bytes(&greeting(2));
    host.core.link(5, LinkUse::Channel);
    host.effects();
    host.hear(&Frame::HungUp { link: 5 });
    host.core.close_finished();
    assert_eq!(host.effects(), dead(5), "the agent has begun again");
}

#[test]
fn move_reported_by_guest_is_hang_up_to_host() {
    let mut host = Bench::new(PortSide::Host);
    host.core.link(1, LinkUse::Channel);
    host.hear(&Frame::Moved { link: 1 });
    host.core.close_finished();
    assert_eq!(host.effects(), [RelayEffect::Close(1), RelayEffect::Report(Notice::Closed(1))]);
}

#[test]
fn move_between_two_guests_reaches_process_of_the_other() {
    // The host's relay of the guest that stays: the relay of the leaving one is at the other end of the socket.
    let mut host = Bench::new(PortSide::Host);
    for (link, carries) in [(1, LinkUse::Channel), (2, LinkUse::Bell), (3, LinkUse::Channel)] {
        host.core.link(link, carries);
        if link != 3 {
            host.core.moved(link);
        }
        host.core.hang_up(link);
    }
    let frames = host.frames();
    assert_eq!(frames, [Frame::Moved { link: 1 }, Frame::HungUp { link: 2 }, Frame::HungUp { link: 3 }]);
    let mut guest = Bench::new(PortSide::Guest);
    // The frame may come before the link.
    assert_eq!(guest.hear(&Frame::Moved { link: 1 }), []);
    guest.core.link(1, LinkUse::Channel);
    guest.core.close_finished();
    let moved = [RelayEffect::SayMoved(1), RelayEffect::Close(1), RelayEffect::Report(Notice::Closed(1))];
    assert_eq!(guest.effects(), moved);
}

#[test]
fn move_reported_by_process_of_guest_ends_its_link() {
    let mut guest = Bench::new(PortSide::Guest);
    guest.core.link(1, LinkUse::Channel);
    guest.core.moved(1);
    assert_eq!(guest.frames(), [Frame::HungUp { link: 1 }]);
    assert_eq!(guest.effects(), [RelayEffect::Close(1), RelayEffect::Report(Notice::Closed(1))]);
}

#[test]
fn links_of_leaving_guest_end_as_moved_inside_it() {
    let mut guest = Bench::new(PortSide::Guest);
    guest.core.link(1, LinkUse::Channel);
    guest.core.link(2, LinkUse::Bell);
    guest.core.leave();
    guest.core.end();
    assert_eq!(guest.effects(), [RelayEffect::SayMoved(1), RelayEffect::Close(1), RelayEffect::Close(2)]);
    assert_eq!(guest.frames(), [Frame::HungUp { link: 1 }, Frame::HungUp { link: 2 }]);
}
