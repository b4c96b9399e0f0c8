//! UDP sockets of programs that are loaded with the library.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

mod support;

use std::{
    io::{BufRead, BufReader, Write},
    net::UdpSocket,
    process::{ChildStdout, Command, Stdio},
    time::Duration,
};

use rustix::process::Signal;
use support::{client::Client, eventually, free_port, guard::Guard, stage::python, world::World};

/// One of the programs of `programs/`, which reports its actions line by line.
struct Program {
    guard: Guard,
    lines: BufReader<ChildStdout>,
}

impl Program {
    fn start(world: Option<&World>, script: &str, arguments: &[&str]) -> Self {
        Self::start_with(Stdio::null(), world, script, arguments)
    }

    fn start_with(input: Stdio, world: Option<&World>, script: &str, arguments: &[&str]) -> Self {
        let mut command = Command::new(python());
        command.arg(format!("{}/tests/programs/{script}.py", env!("CARGO_MANIFEST_DIR"))).args(arguments);
        command.env(partywall_protocol::environment::MOVES, "after=1").env_remove("LD_PRELOAD");
        if let Some(world) = world {
            world.preload(&mut command);
        }
        let mut guard = Guard::spawn(command.stdin(input).stdout(Stdio::piped()));
        let lines = BufReader::new(guard.0.stdout.take().unwrap());
        Self { guard, lines }
    }

    fn peer(world: Option<&World>, role: &str, port: u16, count: u32) -> Self {
        Self::start(world, "datagram_peers", &[role, &port.to_string(), &count.to_string()])
    }

    /// `driver/outlive.c`, which takes lines.
    fn outlive(world: &World, role: &str, port: u16) -> Self {
        let mut command = Command::new(support::c::program("outlive", &["outlive.c"], &[]));
        command.args([role, &port.to_string()]).env(partywall_protocol::environment::MOVES, "after=1");
        world.preload(&mut command);
        let mut guard = Guard::spawn(command.stdin(Stdio::piped()).stdout(Stdio::piped()));
        let lines = BufReader::new(guard.0.stdout.take().unwrap());
        Self { guard, lines }
    }

    /// Gives it a line, and returns what it says.
    fn ask(&mut self) -> String {
        self.guard.0.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
        self.line()
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.lines.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    fn all(mut self) -> Vec<String> {
        let lines = std::io::read_to_string(&mut self.lines).unwrap().lines().map(str::to_owned).collect();
        assert!(self.guard.wait().success());
        lines
    }
}

/// Bytes that lie, or lay, in rings now.
fn ring_bytes(world: &World) -> u64 {
    let mut client = Client::join(&world.socket(), "watcher").unwrap();
    let rows = client.channels();
    rows.iter().filter_map(|row| client.look(row.channel)).flatten().map(|(tail, _)| tail).sum()
}

#[test]
fn random_datagram_programs_behave_as_without_library() {
    compare_random("datagrams");
}

#[test]
fn random_split_and_joined_datagrams_are_as_without_library() {
    compare_random("segments");
}

/// Runs a random program with the library and without it, for each of some seeds.
fn compare_random(script: &str) {
    let world = World::new();
    let most = std::env::var("PARTYWALL_FUZZ_SEEDS").ok().and_then(|text| text.parse().ok()).unwrap_or(12u32);
    let mut rings = 0;
    for seed in 0..most {
        let arguments = [&*seed.to_string(), "600"];
        let plain = Program::start(None, script, &arguments).all();
        let mut with = Program::start(Some(&world), script, &arguments);
        let mut lines = Vec::new();
        loop {
            let line = with.line();
            // While it runs: its rings go with it.
            if lines.len() == 300 {
                rings += ring_bytes(&world);
            }
            if line.is_empty() {
                break;
            }
            lines.push(line);
        }
        let differs = plain.iter().zip(&lines).find(|(a, b)| a != b);
        assert!(differs.is_none() && plain.len() == lines.len(), "seed {seed}: {differs:#?}");
    }
    assert!(rings > 0, "nothing went by a ring");
}

#[test]
fn datagrams_use_rings_and_replies_reach_their_source() {
    by_rings(&["echo", "connected", "select", "epoll", "edge", "exclusive", "threads", "once", "pool", "copied"]);
}

#[test]
fn pool_of_threads_handles_each_oneshot_event_once() {
    let world = World::new();
    let port = free_port();
    // It aborts if two threads get one event, or if one gets an event without a datagram.
    let mut server = Program::peer(Some(&world), "pool", port, 0);
    assert_eq!(server.line(), "ready");
    let mut clients = [(); 3].map(|()| Program::peer(Some(&world), "ping", port, 6000));
    for client in &mut clients {
        assert_eq!(client.line(), "answered 6000");
    }
    assert_eq!(server.guard.ended(), None);
}

#[test]
fn socket_after_fork_has_rings_once_one_process_holds_it() {
    by_rings(&["parent", "child", "passed", "both"]);
}

/// Whether anything goes by a ring of up to this many clients of the port. Each client gets an answer to all that it sends.
fn any_by_ring(world: &World, port: u16, clients: usize) -> bool {
    (0..clients).any(|_| {
        let arguments = ["ping", &*port.to_string(), "6000"];
        let mut client = Program::start_with(Stdio::piped(), Some(world), "datagram_peers", &arguments);
        assert_eq!(client.line(), "answered 6000");
        // It ends with its input, and its rings with it.
        ring_bytes(world) > 0
    })
}

#[test]
fn group_members_use_rings_while_all_are_published() {
    let world = World::new();
    let port = free_port();
    let member = |of: Option<&World>| {
        let mut server = Program::peer(of, "group", port, 0);
        assert_eq!(server.line(), "ready");
        server
    };
    let _alone = member(Some(&world));
    assert!(any_by_ring(&world, port, 20), "one member");
    let _second = member(Some(&world));
    assert!(any_by_ring(&world, port, 20), "two members");
    let stranger = member(None);
    assert!(!any_by_ring(&world, port, 3), "a member without the library");
    drop(stranger);
    assert!(any_by_ring(&world, port, 20), "two members again");
}

#[test]
fn group_with_a_program_that_chooses_stays_on_kernel() {
    let world = World::new();
    let port = free_port();
    let mut first = Program::peer(Some(&world), "group", port, 0);
    assert_eq!(first.line(), "ready");
    let mut steered = Program::peer(Some(&world), "steered", port, 0);
    assert_eq!(steered.line(), "ready");
    assert!(!any_by_ring(&world, port, 6));
}

#[test]
fn nesting_an_epoll_set_ends_its_rings() {
    let world = World::new();
    let port = free_port();
    let mut server = Program::peer(Some(&world), "nested", port, 0);
    assert_eq!(server.line(), "ready");
    assert!(any_by_ring(&world, port, 20));
    let control = UdpSocket::bind(("127.0.0.1", 0)).unwrap();
    control.send_to(b"nest", ("127.0.0.1", port)).unwrap();
    assert_eq!(control.recv(&mut [0; 8]).unwrap(), 4);
    assert!(!any_by_ring(&world, port, 2));
}

/// Servers that answer all that comes, most of them by rings.
fn by_rings(roles: &[&str]) {
    let world = World::new();
    for &role in roles {
        let port = free_port();
        let mut server = Program::peer(Some(&world), role, port, 0);
        assert_eq!(server.line(), "ready");
        let by_ring = || {
            let arguments = ["ping", &*port.to_string(), "6000"];
            let mut client = Program::start_with(Stdio::piped(), Some(&world), "datagram_peers", &arguments);
            assert_eq!(client.line(), "answered 6000", "{role}");
            // It ends with its input, and its rings with it.
            ring_bytes(&world) > 0
        };
        // A receiver that sleeps is sent to by the kernel, and on a busy machine all of one client's datagrams may meet sleepers.
        // A socket of two processes is left to the kernel, and so is one that another process may have.
        let is_kernels = matches!(role, "both" | "passed");
        let clients = if is_kernels { 1 } else { 20 };
        assert_eq!(!is_kernels, (0..clients).any(|_| by_ring()), "{role}: whether anything went by a ring");
    }
}

#[test]
fn sleeper_is_woken_for_every_datagram() {
    let world = World::new();
    for role in ["echo", "epoll", "edge", "threads", "once", "pool"] {
        let port = free_port();
        let mut server = Program::peer(Some(&world), role, port, 0);
        assert_eq!(server.line(), "ready");
        assert_eq!(Program::peer(Some(&world), "lazy", port, 4000).line(), "answered 4000", "{role}");
    }
}

#[test]
fn datagrams_pass_with_library_on_one_side_only() {
    let world = World::new();
    for (server, client) in [(Some(&world), None), (None, Some(&world))] {
        let port = free_port();
        let mut server = Program::peer(server, "echo", port, 0);
        assert_eq!(server.line(), "ready");
        assert_eq!(Program::peer(client, "ping", port, 3000).line(), "answered 3000");
    }
}

#[test]
fn flood_keeps_datagram_order_and_bytes() {
    let world = World::new();
    let port = free_port();
    let mut sink = Program::peer(Some(&world), "sink", port, 0);
    assert_eq!(sink.line(), "ready");
    let mut flood = Program::peer(Some(&world), "flood", port, 60_000);
    assert_eq!(flood.line(), "sent");
    let line = sink.line();
    let (got, how) = line.split_once(' ').unwrap();
    assert_eq!(how, "well", "{line}");
    assert!(got.parse::<u32>().unwrap() > 100, "{line}");
}

/// The error that a client sees when its server is gone.
fn told_after(end: impl FnOnce(&World, &mut Program)) -> String {
    let world = World::new();
    let port = free_port();
    let mut server = Program::peer(Some(&world), "echo", port, 0);
    assert_eq!(server.line(), "ready");
    let mut client = Program::peer(Some(&world), "refused", port, 0);
    assert_eq!(client.line(), "busy");
    eventually("it goes by a ring", || ring_bytes(&world) > 0);
    end(&world, &mut server);
    client.line()
}

#[test]
fn client_of_killed_server_gets_refusal_or_timeout() {
    for signal in [Signal::KILL, Signal::TERM] {
        let told = told_after(|_, server| {
            server.guard.signal(signal);
            server.guard.wait();
        });
        // A datagram in transit when the server died is lost, as before: then the client gets no answer.
        assert!(["ECONNREFUSED", "TimeoutError('timed out')"].contains(&&*told), "{told}");
    }
}

#[test]
fn datagrams_outlive_broker_and_rings_return_with_next() {
    let world = World::new();
    let port = free_port();
    let mut server = Program::peer(Some(&world), "echo", port, 0);
    assert_eq!(server.line(), "ready");
    let arguments = ["endless", &*port.to_string(), "6000"];
    let mut client = Program::start_with(Stdio::piped(), Some(&world), "datagram_peers", &arguments);
    eventually("it goes by a ring", || ring_bytes(&world) > 0);
    world.kill_broker();
    assert_eq!(client.ask(), "answered 6000");
    world.restart_broker();
    // The server is found again when it next looks after its session.
    let mut most = 0;
    eventually("a ring of the next broker", || {
        let mut again = Program::peer(Some(&world), "ping", port, 5000);
        eventually("it has its answers", || {
            most = most.max(ring_bytes(&world));
            again.guard.ended().is_some()
        });
        assert_eq!(again.line(), "answered 5000");
        most > 0
    });
}

#[test]
fn killed_clients_leave_no_descriptors_or_rings() {
    let world = World::new();
    let port = free_port();
    let mut server = Program::peer(Some(&world), "echo", port, 0);
    assert_eq!(server.line(), "ready");
    let descriptors = || std::fs::read_dir(format!("/proc/{}/fd", server.guard.id())).unwrap().count();
    let before = descriptors();
    let mut after = Vec::new();
    for _ in 0..70 {
        let client = Program::peer(Some(&world), "refused", port, 0);
        eventually("it goes by a ring", || ring_bytes(&world) > 0);
        client.guard.signal(Signal::KILL);
        drop(client);
        eventually("the broker has forgotten it", || ring_bytes(&world) == 0);
        after.push(descriptors());
    }
    // At most two descriptors for each of the 64 whose rings it keeps.
    assert!(after.iter().all(|n| *n < 150), "{after:?}");
    // The first few are for the session, and to sleep on.
    eventually("the server has forgotten them", || {
        assert_eq!(Program::peer(Some(&world), "ping", port, 3000).line(), "answered 3000");
        descriptors() <= before + 6
    });
}

#[test]
#[cfg(target_arch = "x86_64")]
fn next_owner_of_a_port_gets_its_datagrams() {
    let world = World::new();
    let port = free_port();
    let mut holder = Program::outlive(&world, "hold", port);
    assert_eq!(holder.line(), "ready");
    let _sender = Program::outlive(&world, "send", port);
    eventually("the datagrams go by a ring", || ring_bytes(&world) > 0);
    assert_eq!(holder.ask(), "closed");

    // The port is free, though the program that had it still has the ring.
    let owner = UdpSocket::bind(("127.0.0.1", port)).unwrap();
    owner.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let receive = || {
        let mut number = [0; 8];
        let got = owner.recv(&mut number);
        assert_eq!(got.expect("the owner of the port gets nothing"), 8);
        u64::from_ne_bytes(number)
    };
    let first = receive();
    for number in first + 1..first + 200 {
        assert_eq!(receive(), number, "one that was sent after the first did not come");
    }
    let told = holder.ask();
    let last: u64 = told.rsplit_once(' ').unwrap().1.parse().unwrap();
    assert!(last < first, "the holder of the ring {told}, the owner of the port from {first} on");
}
