//! Machines whose programs keep the event loop busy (protocol C16).

use super::*;

use crate::control::ErrandCount;
use crate::machines::{MOST_SESSIONS, carried};
use crate::server::shares::Stopwatch;
use partywall_protocol::wire::Name;
use rustix::event::{EventfdFlags, eventfd};

const MACHINE: MachineId = MachineId::MIN;
/// More than the kernel reports in one turn of the event loop.
const SESSIONS: u32 = 200;
/// Requests that wait in each session.
const WAITING: usize = 16;

/// A broker with a machine whose programs have these many sessions, and the port's ends of the sessions.
fn with_sessions(count: u32) -> (Bench, Vec<OwnedFd>) {
    let mut bench = Bench::new();
    let control = bench.server.control();
    let (name, monitor, port) = (Name::new("a").unwrap(), String::new(), String::new());
    control.errand(Errand::News(MachineNews::Added { machine: MACHINE, name, monitor, port }));
    control.errand(Errand::News(MachineNews::Up { machine: MACHINE, up: true }));
    bench.server.turn(None).unwrap();
    let ports = (1..=count).map(|pid| {
        let (socket, port) = packet::pair().unwrap();
        bench.server.admit_as(socket, MACHINE, pid).unwrap();
        send(&port, &Message::Join { version: wire::VERSION, name: "a".to_owned() });
        port
    });
    let ports: Vec<_> = ports.collect();
    turn_until(&mut bench, |bench| requests(bench, "Join") == u64::from(count));
    (bench, ports)
}

/// A program of the machine sends a packet.
fn send(port: &OwnedFd, message: &Message) {
    let mut bytes = Vec::new();
    wire::encode(1, message, &mut bytes);
    packet::try_send(port.as_fd(), &carried::encode(None, &bytes), &[]).unwrap();
}

/// How many requests of this name the broker has taken.
fn requests(bench: &mut Bench, name: &str) -> u64 {
    bench.server.core.report().requests.get(name).copied().unwrap_or_default()
}

fn turn_until(bench: &mut Bench, is_done: impl Fn(&mut Bench) -> bool) {
    turn_with(bench, Duration::from_millis(100), is_done);
}

/// Likewise, with turns that do not wait.
fn turn_at_once_until(bench: &mut Bench, is_done: impl Fn(&mut Bench) -> bool) {
    turn_with(bench, Duration::ZERO, is_done);
}

fn turn_with(bench: &mut Bench, longest_wait: Duration, is_done: impl Fn(&mut Bench) -> bool) {
    let begin = Instant::now();
    while !is_done(bench) {
        bench.server.turn(Some(longest_wait)).unwrap();
        assert!(begin.elapsed() < Duration::from_secs(60), "the broker does not go on");
    }
}

/// Does what can be done without waiting.
fn turn_some(bench: &mut Bench) {
    for _ in 0..10 {
        bench.server.turn(Some(Duration::ZERO)).unwrap();
    }
}

/// Begins a period that is not over while the test runs. Nobody has used anything of it.
fn begin_long_period(bench: &mut Bench) {
    bench.server.shares = Shares::new(Instant::now() + Duration::from_secs(3600));
    bench.server.hear_all_users();
}

/// The share of the machine in the present period is used up.
fn use_up_share(bench: &mut Bench) {
    begin_long_period(bench);
    bench.server.charge(Account::of_machine(MACHINE), Duration::from_secs(1));
}

/// Begins the next period.
fn renew(bench: &mut Bench) {
    bench.server.shares = Shares::new(Instant::now());
    bench.server.hear_all_users();
}

#[test]
fn host_request_behind_flood_of_machine_is_served_in_turn() {
    let (mut bench, ports) = with_sessions(SESSIONS);
    let host = bench.connect();
    say(&host, &Message::Join { version: wire::VERSION, name: "b".to_owned() }, &[]);
    turn_until(&mut bench, |_| packet::try_recv(host.as_fd(), &mut [0; wire::MAX_PACKET]).is_ok());
    for _ in 0..WAITING {
        ports.iter().for_each(|port| send(port, &Message::Ping {}));
    }
    say(&host, &Message::Directory {}, &[]);
    begin_long_period(&mut bench);
    bench.server.readers.await_report(Account::of(User::Host(rustix::process::geteuid().as_raw()), Home::Broker));
    turn_at_once_until(&mut bench, |bench| requests(bench, "Directory") > 0);
    let served = requests(&mut bench, "Ping");
    assert!(served <= BURST as u64, "{served} requests of a machine were served before one of a user");
    // None of the others is lost.
    renew(&mut bench);
    turn_until(&mut bench, |bench| requests(bench, "Ping") == u64::from(SESSIONS) * WAITING as u64);
}

#[test]
fn sessions_of_one_machine_have_turns() {
    let (mut bench, ports) = with_sessions(2 * BURST as u32);
    for _ in 0..WAITING {
        ports.iter().for_each(|port| send(port, &Message::Ping {}));
    }
    let before = ports.iter().map(packet::unread).collect::<Vec<_>>();
    begin_long_period(&mut bench);
    turn_at_once_until(&mut bench, |bench| requests(bench, "Ping") >= 2 * BURST as u64);
    assert_eq!(requests(&mut bench, "Ping"), 2 * BURST as u64);
    let after = ports.iter().map(packet::unread);
    assert!(after.zip(before).all(|(after, before)| after < before), "a session waits for two turns of another");
}

#[test]
fn machine_with_used_share_waits_while_host_users_are_heard() {
    let (mut bench, ports) = with_sessions(3);
    let host = bench.connect();
    bench.settle();
    use_up_share(&mut bench);
    ports.iter().for_each(|port| send(port, &Message::Ping {}));
    // A session that begins now waits, too.
    let (socket, late) = packet::pair().unwrap();
    bench.server.admit_as(socket, MACHINE, 9).unwrap();
    send(&late, &Message::Join { version: wire::VERSION, name: "a".to_owned() });
    say(&host, &Message::Join { version: wire::VERSION, name: "b".to_owned() }, &[]);
    turn_until(&mut bench, |bench| requests(bench, "Join") == 4);
    turn_some(&mut bench);
    assert_eq!((requests(&mut bench, "Join"), requests(&mut bench, "Ping")), (4, 0));
    renew(&mut bench);
    turn_until(&mut bench, |bench| requests(bench, "Join") == 5 && requests(bench, "Ping") == 3);
}

#[test]
fn session_of_machine_with_used_share_ends_in_next_period() {
    let (mut bench, mut ports) = with_sessions(3);
    use_up_share(&mut bench);
    let last = ports.pop();
    ports.clear();
    turn_some(&mut bench);
    assert_eq!(bench.server.core.status().sessions, 3);
    renew(&mut bench);
    turn_until(&mut bench, |bench| bench.server.core.status().sessions == 1);
    drop(last);
    // Without a timeout: if the end did not wake the event loop, this would hang.
    bench.server.turn(None).unwrap();
    assert_eq!(bench.server.core.status(), CoreStatus::default());
}

#[test]
fn errands_of_machine_with_used_share_count_until_next_period() {
    let (mut bench, _ports) = with_sessions(1);
    let (control, count) = (bench.server.control(), ErrandCount::new(MACHINE));
    let bring = |control: &ServerControl| {
        control.errand_of(&count, Errand::News(MachineNews::Up { machine: MACHINE, up: true }));
        control.errand_of(&count, Errand::News(MachineNews::Up { machine: MACHINE, up: false }));
    };
    begin_long_period(&mut bench);
    bring(&control);
    bench.server.turn(None).unwrap();
    assert_eq!(count.waiting(), 0, "the machine has a share left");
    use_up_share(&mut bench);
    bring(&control);
    turn_some(&mut bench);
    assert_eq!(count.waiting(), 2, "the port would hear the guest at once");
    renew(&mut bench);
    assert_eq!(count.waiting(), 0);
}

#[test]
fn session_beyond_most_of_machine_is_hung_up_on() {
    let (mut bench, _ports) = with_sessions(1);
    let most = 2 * MOST_SESSIONS;
    let watched: Vec<OwnedFd> = (1..most).map(|_| eventfd(0, EventfdFlags::CLOEXEC).unwrap()).collect();
    for (number, fd) in (1000..).zip(&watched) {
        let server = &mut bench.server;
        server.machine_turns.add(server.epoll.as_fd(), MACHINE, SessionId(number), fd).unwrap();
    }
    let (socket, port) = packet::pair().unwrap();
    bench.server.admit_as(socket, MACHINE, 9).unwrap();
    assert_eq!(packet::try_recv(port.as_fd(), &mut [0; 64]).unwrap().len, 0, "the port sees the end at once");
    assert_eq!(bench.server.machine_turns.sessions(MACHINE), most);
    // One that has ended makes room.
    bench.server.machine_turns.remove(MACHINE);
    let (socket, _port) = packet::pair().unwrap();
    bench.server.admit_as(socket, MACHINE, 9).unwrap();
    assert_eq!(bench.server.machine_turns.sessions(MACHINE), most);
}

#[test]
fn reports_of_rings_during_work_are_charged_once() {
    const REPORTS: u64 = 1000;
    let (mut bench, _ports) = with_sessions(1);
    let (machine, other) = (Account::of_machine(MACHINE), Account::of_machine(MachineId::MAX));
    begin_long_period(&mut bench);
    let watch = Stopwatch::start();
    for account in [machine, other] {
        (0..REPORTS).for_each(|flow| bench.server.control.ring_reports().put(MACHINE, flow, 64));
        let work = bench.server.begin_work();
        bench.server.hear_of_rings();
        bench.server.charge_work(account, work);
    }
    let all = watch.elapsed();
    let [used, of_other] = [machine, other].map(|account| bench.server.shares.used_for_test(account));
    assert!(used + of_other <= all, "{used:?} and {of_other:?} of {all:?}");
    // Work that takes reports alone costs a bystander nothing.
    bench.server.shares = Shares::new(Instant::now() + Duration::from_secs(3600));
    let work = bench.server.begin_work();
    bench.server.rings_time += Duration::from_secs(3600);
    bench.server.charge_work(other, work);
    assert!(bench.server.shares.used_for_test(other).is_zero());
}

#[test]
fn packets_and_errands_of_machine_use_its_share() {
    let (mut bench, ports) = with_sessions(1);
    let account = Account::of_machine(MACHINE);
    let (control, count) = (bench.server.control(), ErrandCount::new(MACHINE));
    begin_long_period(&mut bench);
    send(&ports[0], &Message::Ping {});
    turn_some(&mut bench);
    let of_packet = bench.server.shares.used_for_test(account);
    assert!(!of_packet.is_zero());
    control.errand_of(&count, Errand::News(MachineNews::Up { machine: MACHINE, up: true }));
    turn_some(&mut bench);
    assert!(bench.server.shares.used_for_test(account) > of_packet);
    let of_both = bench.server.shares.used_for_test(account);
    control.ring_reports().put(MACHINE, 1, 64);
    bench.server.hear_of_rings();
    assert!(bench.server.shares.used_for_test(account) > of_both);
    let of_all = bench.server.shares.used_for_test(account);
    // What the broker's own thread reports of the machine costs the machine nothing.
    control.errand(Errand::News(MachineNews::Up { machine: MACHINE, up: false }));
    turn_some(&mut bench);
    assert_eq!(bench.server.shares.used_for_test(account), of_all);
}
