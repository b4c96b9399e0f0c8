//! Two hosts with real brokers, gateways and a real etcd: what programs see.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

#[allow(dead_code, reason = "other tests use the rest")]
mod common;

use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::process::Command;
use std::thread;
use std::time::Duration;

use common::{Cluster, Etcd, HANG, Host, OPEN, Process, connect, connect_again, connect_known, eventually, free_port};
use partywall::{Domain, Error, Refusal, Stream};
use sha2::{Digest, Sha256};

/// Says to a process of a test what it is.
const ROLE: &str = "PARTYWALL_TEST_ROLE";
const BROKER: &str = "PARTYWALL_TEST_BROKER";

/// A process of a test: a server or a client that can be killed.
#[test]
fn role_of_process() {
    let (Ok(role), Ok(broker)) = (std::env::var(ROLE), std::env::var(BROKER)) else { return };
    let join = |name: &str| Domain::builder().name(name).broker(&broker).join().unwrap();
    match role.as_str() {
        "server" => {
            let domain = join("db");
            let mut listener = domain.bind("queries").unwrap();
            let (mut stream, _) = listener.accept().unwrap();
            stream.write_all(b"committed before death").unwrap();
            thread::sleep(HANG);
        }
        "client" => {
            let domain = join("web");
            let mut stream = connect(&domain, "db:queries");
            stream.write_all(b"committed before death").unwrap();
            thread::sleep(HANG);
        }
        other => panic!("{other}"),
    }
}

fn start_role(role: &str, host: &Host) -> Process {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "role_of_process"]).env(ROLE, role).env(BROKER, host.broker_path());
    Process::start(command.stdout(std::process::Stdio::null()))
}

/// Serves `db:queries`: echoes each connection.
fn echo(host: &Host) -> Domain {
    echo_as(host, "db")
}

fn echo_as(host: &Host, name: &str) -> Domain {
    let domain = host.join(name);
    let mut listener = domain.bind("queries").unwrap();
    thread::spawn(move || {
        while let Ok((stream, _)) = listener.accept() {
            thread::spawn(move || echo_one(stream));
        }
    });
    domain
}

fn echo_one(mut stream: Stream) {
    let (read, write) = stream.halves().unwrap();
    if std::io::copy(read, write).is_ok() {
        write.finish();
    }
}

fn hash_of(reader: &mut impl Read, limit: usize) -> (usize, Vec<u8>) {
    let (mut hash, mut buffer, mut total) = (Sha256::new(), vec![0; 256 << 10], 0);
    while total < limit {
        match reader.read(&mut buffer).unwrap() {
            0 => break,
            n => {
                hash.update(&buffer[..n]);
                total += n;
            }
        }
    }
    (total, hash.finalize().to_vec())
}

/// Bytes without a pattern.
fn noise(length: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut bytes = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend(state.to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}

#[test]
fn hundred_megabytes_arrive_unchanged_both_ways() {
    let Some(cluster) = Cluster::start(&[("alpha", OPEN), ("beta", OPEN)]) else { return };
    let (alpha, beta) = cluster.two();
    let _db = echo(beta);
    let web = alpha.join("web");
    let (Some(mut read), Some(mut write)) = connect(&web, "db:queries").into_halves() else { panic!("one way") };
    let bytes = noise(100_000_000);
    let expected = (bytes.len(), Sha256::digest(&bytes).to_vec());
    let writer = thread::spawn(move || {
        write.write_all(&bytes).unwrap();
        write.finish();
    });
    assert_eq!(hash_of(&mut read, usize::MAX), expected);
    writer.join().unwrap();
}

#[test]
fn half_close_leaves_other_direction_open() {
    let Some(cluster) = Cluster::start(&[("alpha", OPEN), ("beta", OPEN)]) else { return };
    let (alpha, beta) = cluster.two();
    let db = beta.join("db");
    let mut listener = db.bind("queries").unwrap();
    let server = thread::spawn(move || {
        let (mut stream, peer) = listener.accept().unwrap();
        assert_eq!((peer.name.as_str(), peer.host(), peer.certain_user()), ("web@alpha", Some("alpha"), None));
        let mut question = String::new();
        stream.read_to_string(&mut question).unwrap();
        stream.write_all(format!("answer to {question}").as_bytes()).unwrap();
    });
    let web = alpha.join("web");
    let mut stream = connect(&web, "db:queries");
    stream.write_all(b"question").unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert_eq!(answer, "answer to question");
    server.join().unwrap();
}

#[test]
fn reader_that_closes_is_closed_to_remote_writer() {
    let Some(cluster) = Cluster::start(&[("alpha", OPEN), ("beta", OPEN)]) else { return };
    let (alpha, beta) = cluster.two();
    let db = beta.join("db");
    let mut listener = db.bind("queries").unwrap();
    let web = alpha.join("web");
    let mut stream = connect(&web, "db:queries");
    let (mut server, _) = listener.accept().unwrap();
    server.shutdown(Shutdown::Read).unwrap();
    let mut error = None;
    eventually("the writer notices", || {
        error = stream.write(b"more").err();
        error.is_some()
    });
    assert_eq!(error.unwrap().kind(), ErrorKind::BrokenPipe, "closed, and not dead");
    // The other direction goes on.
    server.write_all(b"still here").unwrap();
    drop(server);
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    assert_eq!(text, "still here");
}

/// Reads all that a peer has committed, and then its death.
fn assert_dead(stream: &mut Stream, committed: &str) {
    let mut text = String::new();
    let error = stream.read_to_string(&mut text).unwrap_err();
    assert_eq!((text.as_str(), error.kind()), (committed, ErrorKind::ConnectionAborted), "{error}");
}

#[test]
fn killed_server_is_dead_to_remote_client() {
    let Some(cluster) = Cluster::start(&[("alpha", OPEN), ("beta", OPEN)]) else { return };
    let (alpha, beta) = cluster.two();
    let mut server = start_role("server", beta);
    let web = alpha.join("web");
    let mut stream = connect(&web, "db:queries");
    let mut first = [0; 9];
    stream.read_exact(&mut first).unwrap();
    assert_eq!(&first, b"committed");
    server.kill();
    assert_dead(&mut stream, " before death");
    let mut error = None;
    eventually("the writer notices", || {
        error = stream.write(b"more").err();
        error.is_some()
    });
    assert_eq!(error.unwrap().kind(), ErrorKind::ConnectionAborted);
}

#[test]
fn killed_client_is_dead_to_remote_server() {
    let Some(cluster) = Cluster::start(&[("alpha", OPEN), ("beta", OPEN)]) else { return };
    let (alpha, beta) = cluster.two();
    let db = beta.join("db");
    let mut listener = db.bind("queries").unwrap();
    let mut client = start_role("client", alpha);
    let (mut stream, _) = listener.accept().unwrap();
    let mut first = [0; 9];
    stream.read_exact(&mut first).unwrap();
    client.kill();
    assert_dead(&mut stream, " before death");
}

#[test]
fn killed_gateway_ends_streams_as_dead_and_next_one_connects() {
    let Some(mut cluster) = Cluster::start(&[("alpha", OPEN), ("beta", OPEN)]) else { return };
    let _db = echo(&cluster.hosts[1]);
    let web = cluster.hosts[0].join("web");
    for victim in [0, 1] {
        let mut stream = connect(&web, "db:queries");
        stream.write_all(b"hello").unwrap();
        let mut hello = [0; 5];
        stream.read_exact(&mut hello).unwrap();
        cluster.hosts[victim].gateway.as_mut().unwrap().kill();
        assert_dead(&mut stream, "");
        cluster.hosts[victim].start_gateway();
        let mut stream = connect(&web, "db:queries");
        stream.write_all(b"again").unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        let mut again = String::new();
        stream.read_to_string(&mut again).unwrap();
        assert_eq!(again, "again");
    }
}

#[test]
fn name_of_other_host_is_refused() {
    let Some(cluster) = Cluster::start(&[("alpha", OPEN), ("beta", OPEN)]) else { return };
    let (alpha, beta) = cluster.two();
    let db = beta.join("db");
    let refused = alpha.try_join("db").unwrap_err();
    assert!(
        matches!(&refused, Error::Refused { code: Refusal::NameTaken, reason } if reason.contains("beta")),
        "{refused}"
    );
    drop(db);
    // It is free again when the domain has ended.
    let mut domain = None;
    eventually("the name is free", || {
        domain = alpha.try_join("db").ok();
        domain.is_some()
    });
}

#[test]
fn name_claimed_on_two_hosts_at_once_goes_to_one() {
    let Some(cluster) = Cluster::start(&[("alpha", OPEN), ("beta", OPEN)]) else { return };
    for round in 0..20 {
        let name = format!("name{round}");
        let both = thread::scope(|scope| {
            let join = |host: &'static str| {
                let host = cluster.hosts.iter().find(|of| of.name == host).unwrap();
                let name = &name;
                scope.spawn(move || host.try_join(name))
            };
            let (one, other) = (join("alpha"), join("beta"));
            [one.join().unwrap(), other.join().unwrap()]
        });
        let errors: Vec<_> = both.iter().filter_map(|joined| joined.as_ref().err()).collect();
        assert!(matches!(errors[..], [Error::Refused { code: Refusal::NameTaken, .. }]), "{errors:?}");
    }
}

const ALPHA_RULES: &str = "
[[connect]]
from = '*'
to = 'gateway'
[[connect]]
from = 'web'
to = 'db'
to_host = 'beta'
[[connect]]
from = 'other'
to = '*'
to_host = 'beta'
[[connect]]
from = 'lost'
to = 'db'
to_host = 'gamma'
";
const BETA_RULES: &str = "
[[connect]]
from = '*'
to = 'gateway'
[[connect]]
from = 'web'
from_host = 'alpha'
to = 'db'
service = 'queries'
[[connect]]
from = 'other'
from_host = 'gamma'
to = '*'
";

#[test]
fn policies_of_both_hosts_decide() {
    let Some(cluster) = Cluster::start(&[("alpha", ALPHA_RULES), ("beta", BETA_RULES)]) else { return };
    let (alpha, beta) = cluster.two();
    let db = echo(beta);
    let _admin = db.bind("admin").unwrap();
    let web = alpha.join("web");
    drop(connect(&web, "db:queries"));
    let denied = |domain: &str, target: &str, of: &str| {
        let refused = alpha.join(domain).connect(target).unwrap_err();
        let expected = matches!(&refused, Error::Refused { code: Refusal::Denied, reason } if reason.contains(of));
        assert!(expected, "{domain} to {target}: {refused}");
    };
    // By the other host: another service, and a client of another host's rule.
    denied("web", "db:admin", "of the host alpha");
    denied("other", "db:queries", "of the host alpha");
    // By this host: the domain is on a host that the rule does not name, and no rule at all.
    denied("lost", "db:queries", "on the host beta");
    denied("nothing", "db:queries", "does not let nothing");
}

#[test]
fn refusals_of_other_host_reach_the_client() {
    let Some(cluster) = Cluster::start(&[("alpha", OPEN), ("beta", OPEN)]) else { return };
    let (alpha, beta) = cluster.two();
    let db = beta.join("db");
    let _full = db.bind_with("full", &partywall::Options::default().backlog(1)).unwrap();
    eventually("db is known", || alpha.knows("\"full\""));
    let web = alpha.join("web");
    let refusal = |target: &str| match web.connect(target) {
        Err(Error::Refused { code, reason }) => {
            assert!(!reason.is_empty());
            code
        }
        other => panic!("{target}: {other:?}"),
    };
    assert_eq!(refusal("db:nothing"), Refusal::NoSuchService);
    assert_eq!(refusal("nowhere:queries"), Refusal::NoSuchDomain);
    let _waits = connect_again(&web, "db:full");
    assert_eq!(refusal("db:full"), Refusal::BacklogFull);
}

#[test]
fn known_names_are_reached_without_etcd() {
    let Some(cluster) = Cluster::start(&[("alpha", OPEN), ("beta", OPEN)]) else { return };
    let (alpha, beta) = cluster.two();
    let _db = echo(beta);
    let web = alpha.join("web");
    let mut before = connect(&web, "db:queries");
    cluster.etcd.process.signal("STOP");
    eventually("the directory is stale", || alpha.knows("\"fresh\":false"));
    // Open streams go on, known domains are reached, known names are refused, and new names are used.
    before.write_all(b"still").unwrap();
    let mut still = [0; 5];
    before.read_exact(&mut still).unwrap();
    let mut stream = connect_known(&web, "db:queries");
    stream.write_all(b"hello").unwrap();
    stream.read_exact(&mut still).unwrap();
    assert!(matches!(alpha.try_join("db"), Err(Error::Refused { code: Refusal::NameTaken, .. })));
    let late = alpha.join("late");
    let _listener = late.bind("service").unwrap();
    cluster.etcd.process.signal("CONT");
    eventually("the directory is fresh again", || alpha.knows("\"fresh\":true"));
    eventually("a name of meanwhile is known", || beta.knows("\"late\""));
}

#[test]
fn names_of_dead_host_vanish_with_its_lease() {
    let Some(mut cluster) = Cluster::start(&[("alpha", OPEN), ("beta", OPEN)]) else { return };
    let db = echo(&cluster.hosts[1]);
    let (alpha, _) = cluster.two();
    eventually("db is known", || alpha.knows("\"db\""));
    cluster.hosts[1].gateway.as_mut().unwrap().kill();
    let (alpha, _) = cluster.two();
    eventually("db has vanished", || !alpha.knows("\"db\"") && alpha.knows("\"hosts\":1"));
    let web = alpha.join("web");
    assert!(matches!(web.connect("db:queries"), Err(Error::Refused { code: Refusal::NoSuchDomain, .. })));
    drop(db);
}

#[test]
fn gateway_that_is_stopped_leaves_at_once() {
    let Some(mut cluster) = Cluster::start(&[("alpha", OPEN), ("beta", OPEN)]) else { return };
    let _db = echo(&cluster.hosts[1]);
    eventually("db is known", || cluster.hosts[0].knows("\"db\""));
    // With a lease that outlasts this test.
    let config = &cluster.hosts[1].config;
    let text = std::fs::read_to_string(config).unwrap();
    std::fs::write(config, text.replace("ttl = 3", "ttl = 300")).unwrap();
    for _ in 0..2 {
        let gateway = cluster.hosts[1].gateway.as_mut().unwrap();
        gateway.signal("TERM");
        assert!(gateway.wait());
        eventually("db has vanished", || !cluster.hosts[0].knows("\"db\""));
        cluster.hosts[1].start_gateway();
        eventually("db is known again", || cluster.hosts[0].knows("\"db\""));
    }
}

#[test]
fn slow_reader_does_not_stop_other_streams() {
    let Some(cluster) = Cluster::start(&[("alpha", OPEN), ("beta", OPEN)]) else { return };
    let (alpha, beta) = cluster.two();
    let db = beta.join("db");
    let mut slow = db.bind("slow").unwrap();
    let mut listener = db.bind("queries").unwrap();
    thread::spawn(move || echo_one(listener.accept().unwrap().0));
    let web = alpha.join("web");
    let mut blocked = connect(&web, "db:slow");
    let (mut reader, _) = slow.accept().unwrap();
    blocked.set_nonblocking(true);
    let chunk = noise(64 << 10);
    let (mut sent, mut idle) = (0, 0);
    // Until nothing has moved for a while: both rings and the window are full.
    while idle < 50 {
        match blocked.write(&chunk) {
            Ok(n) => (sent, idle) = (sent + n, 0),
            Err(e) if e.kind() == ErrorKind::WouldBlock => {
                idle += 1;
                thread::sleep(Duration::from_millis(10));
            }
            Err(e) => panic!("{e}"),
        }
        assert!(sent < 512 << 20, "no back-pressure");
    }
    let bytes = noise(20_000_000);
    let expected = (bytes.len(), Sha256::digest(&bytes).to_vec());
    let (Some(mut read), Some(mut write)) = connect(&web, "db:queries").into_halves() else { panic!("one way") };
    let writer = thread::spawn(move || {
        write.write_all(&bytes).unwrap();
        write.finish();
    });
    assert_eq!(hash_of(&mut read, usize::MAX), expected);
    writer.join().unwrap();
    // The slow reader gets everything in the end.
    let drained = thread::spawn(move || hash_of(&mut reader, sent).0);
    assert_eq!(drained.join().unwrap(), sent);
}

#[test]
fn certificate_of_other_authority_is_refused() {
    let Some(cluster) = Cluster::start(&[("alpha", OPEN), ("beta", OPEN)]) else { return };
    let (alpha, _) = cluster.two();
    // A host with the right name and a certificate of another authority.
    let false_folder = cluster.folder.path().join("false");
    std::fs::create_dir(&false_folder).unwrap();
    partywall_gateway::certificates::make(&false_folder, &["gamma".into()], 30).unwrap();
    let mut gamma = cluster.host("gamma", OPEN);
    for file in ["gamma.pem", "gamma.key"] {
        std::fs::copy(false_folder.join(file), cluster.folder.path().join(file)).unwrap();
    }
    gamma.start_gateway();
    let _liar = echo_as(&gamma, "liar");
    eventually("the false host is in the directory", || alpha.knows("\"liar\""));
    let web = alpha.join("web");
    let refused = web.connect("liar:queries").unwrap_err();
    assert!(matches!(refused, Error::Refused { code: Refusal::OutOfResources, .. }), "{refused}");
    // Nor does it reach any host.
    let _db = echo_as(alpha, "db");
    eventually("db is known", || gamma.knows("\"db\""));
    let client = gamma.join("client");
    let refused = client.connect("db:queries").unwrap_err();
    assert!(matches!(refused, Error::Refused { code: Refusal::OutOfResources, .. }), "{refused}");
}

#[test]
fn host_cannot_pass_for_another() {
    let Some(cluster) = Cluster::start(&[("alpha", OPEN), ("beta", OPEN)]) else { return };
    let (alpha, beta) = cluster.two();
    // Beta's domain stands in the directory as one of a third host, at beta's address.
    let names = ["gamma".to_owned()];
    partywall_gateway::certificates::make(cluster.folder.path(), &names, 30).unwrap();
    let _db = echo_as(beta, "target");
    eventually("the target is known", || alpha.knows("\"target\""));
    cluster.etcd.put("/partywall/h/gamma", &format!("{{\"address\":\"127.0.0.1:{}\"}}", beta.port));
    cluster.etcd.put("/partywall/d/pretended", "{\"host\":\"gamma\",\"services\":{\"queries\":1}}");
    eventually("the false entry is known", || alpha.knows("\"pretended\""));
    let web = alpha.join("web");
    let refused = web.connect("pretended:queries").unwrap_err();
    let expected =
        matches!(&refused, Error::Refused { code: Refusal::OutOfResources, reason } if reason.contains("gamma"));
    assert!(expected, "{refused}");
}

#[test]
fn garbage_in_directory_is_ignored() {
    let Some(cluster) = Cluster::start(&[("alpha", OPEN), ("beta", OPEN)]) else { return };
    let (alpha, beta) = cluster.two();
    for (key, value) in [
        ("/partywall/d/db", "[[[["),
        ("/partywall/d/web", "{\"host\":\"\u{1b}[2J\",\"services\":{}}"),
        ("/partywall/d/a b", "{\"host\":\"beta\",\"services\":{}}"),
        ("/partywall/h/alpha/x", "{}"),
        ("/partywall/z", "z"),
        ("/partywall/h/beta2", "{\"address\":7}"),
    ] {
        cluster.etcd.put(key, value);
    }
    // A name with garbage is free.
    let _db = echo(beta);
    let web = alpha.join("web");
    let mut stream = connect(&web, "db:queries");
    stream.write_all(b"hello").unwrap();
    let mut hello = [0; 5];
    stream.read_exact(&mut hello).unwrap();
    let list = alpha.shown();
    assert!(list.contains("\"hosts\":2") && !list.contains('\u{1b}'), "{list}");
}

#[test]
fn silent_host_is_dead_after_some_seconds_and_comes_back() {
    let Some(cluster) = Cluster::start(&[("alpha", OPEN), ("beta", OPEN)]) else { return };
    let (alpha, beta) = cluster.two();
    let _db = echo(beta);
    let web = alpha.join("web");
    let mut stream = connect(&web, "db:queries");
    stream.write_all(b"hello").unwrap();
    stream.read_exact(&mut [0; 5]).unwrap();
    // As if the network between the two had broken: nothing comes, and nothing says so.
    let gateway = beta.gateway.as_ref().unwrap();
    gateway.signal("STOP");
    assert_dead(&mut stream, "");
    let refused = web.connect("db:queries").unwrap_err();
    let expected = matches!(&refused, Error::Refused { code: Refusal::OutOfResources | Refusal::NoSuchDomain, .. });
    assert!(expected, "{refused}");
    gateway.signal("CONT");
    let mut stream = connect(&web, "db:queries");
    stream.write_all(b"again").unwrap();
    stream.read_exact(&mut [0; 5]).unwrap();
}

#[test]
fn stream_outlives_restart_of_broker() {
    let Some(mut cluster) = Cluster::start(&[("alpha", OPEN), ("beta", OPEN)]) else { return };
    let _db = echo(&cluster.hosts[1]);
    let web = cluster.hosts[0].join("web");
    let mut stream = connect(&web, "db:queries");
    for victim in [0, 1] {
        cluster.hosts[victim].restart_broker();
        stream.write_all(b"hello").unwrap();
        stream.read_exact(&mut [0; 5]).unwrap();
        let mut next = connect_again(&web, "db:queries");
        next.write_all(b"again").unwrap();
        next.read_exact(&mut [0; 5]).unwrap();
    }
}

#[test]
fn one_way_stream_ends_in_order() {
    let Some(cluster) = Cluster::start(&[("alpha", OPEN), ("beta", OPEN)]) else { return };
    let (alpha, beta) = cluster.two();
    let db = beta.join("db");
    let mut listener = db.bind("log").unwrap();
    let web = alpha.join("web");
    drop(connect(&web, "db:log"));
    drop(listener.accept().unwrap());
    let mut stream = web.connect_with("db:log", &partywall::Options::default().one_way(true)).unwrap();
    stream.write_all(b"a line").unwrap();
    drop(stream);
    let (mut server, _) = listener.accept().unwrap();
    assert!(server.writer().is_err());
    let mut text = String::new();
    server.read_to_string(&mut text).unwrap();
    assert_eq!(text, "a line");
}

#[test]
fn streams_of_one_host_are_limited() {
    let Some(mut cluster) = Cluster::start(&[("alpha", OPEN), ("beta", OPEN)]) else { return };
    cluster.hosts[1].reconfigure("streams_per_host = 2\n");
    let _db = echo(&cluster.hosts[1]);
    let (alpha, _) = cluster.two();
    let web = alpha.join("web");
    let first = connect(&web, "db:queries");
    let mut second = connect_again(&web, "db:queries");
    let refused = web.connect("db:queries").unwrap_err();
    assert!(matches!(refused, Error::Refused { code: Refusal::OutOfResources, .. }), "{refused}");
    second.write_all(b"hello").unwrap();
    second.read_exact(&mut [0; 5]).unwrap();
    drop(first);
    drop(connect(&web, "db:queries"));
}

#[test]
fn etcd_with_certificates_is_used() {
    let folder = tempfile::tempdir().unwrap();
    partywall_gateway::certificates::make(folder.path(), &["localhost".into(), "client".into()], 30).unwrap();
    let Some(etcd) = Etcd::start_with_certificates(folder.path()) else { return };
    let cluster = Cluster::start_with(etcd, &[("alpha", OPEN), ("beta", OPEN)]);
    let (alpha, beta) = cluster.two();
    let _db = echo(beta);
    let web = alpha.join("web");
    drop(connect(&web, "db:queries"));
}

/// The metrics of a gateway.
fn scrape(port: u16) -> String {
    let mut socket = std::net::TcpStream::connect(("127.0.0.1", port)).unwrap();
    socket.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    socket.shutdown(Shutdown::Write).unwrap();
    let mut text = String::new();
    socket.read_to_string(&mut text).unwrap();
    text
}

#[test]
fn metrics_count_streams_bytes_and_refusals() {
    let Some(mut cluster) = Cluster::start(&[("alpha", OPEN), ("beta", OPEN)]) else { return };
    let ports = [free_port(), free_port()];
    for (host, port) in cluster.hosts.iter_mut().zip(ports) {
        host.reconfigure(&format!("metrics = {{ listen = '127.0.0.1:{port}' }}\n"));
    }
    let _db = echo(&cluster.hosts[1]);
    let web = cluster.hosts[0].join("web");
    let mut stream = connect(&web, "db:queries");
    stream.write_all(b"hello").unwrap();
    stream.read_exact(&mut [0; 5]).unwrap();
    assert!(web.connect("db:nothing").is_err());
    let shows = |port, line: &str| {
        let line = format!("partywall_gateway_{line}\n");
        eventually(&line, || scrape(port).contains(&line));
    };
    let [alpha, beta] = ports;
    shows(alpha, "streams{host=\"beta\",direction=\"out\"} 1");
    shows(beta, "streams{host=\"alpha\",direction=\"in\"} 1");
    for port in ports {
        shows(port, "bytes_total{direction=\"in\"} 5");
        shows(port, "bytes_total{direction=\"out\"} 5");
        shows(port, "directory_fresh 1");
        shows(port, "directory_hosts 2");
    }
    shows(alpha, "refusals_total{direction=\"out\",reason=\"no-such-service\"} 1");
    shows(beta, "refusals_total{direction=\"in\",reason=\"no-such-service\"} 1");
    drop(stream);
    eventually("no stream is left", || !scrape(beta).contains("direction=\"in\"} 1\n"));
    cluster.etcd.process.signal("STOP");
    shows(alpha, "directory_fresh 0");
    cluster.etcd.process.signal("CONT");
}

/// The threads of a runtime, by the name that it gives to all of them. Threads for blocking calls are among them.
fn runtime_threads(gateway: &Process) -> usize {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", gateway.id())).unwrap();
    // A thread may end while the folder is read.
    let name = |task: std::io::Result<std::fs::DirEntry>| std::fs::read_to_string(task.ok()?.path().join("comm")).ok();
    tasks.filter_map(name).filter(|name| name.starts_with("tokio")).count()
}

#[test]
fn gateway_has_as_many_threads_as_its_file_says() {
    // More than an idle gateway has for blocking calls.
    const MANY: usize = 40;
    let Some(mut cluster) = Cluster::start(&[("alpha", OPEN)]) else { return };
    let host = &mut cluster.hosts[0];
    host.reconfigure("threads = 1\n");
    host.shown();
    let few = runtime_threads(host.gateway.as_ref().unwrap());
    host.configure("threads = 1\n", &format!("threads = {MANY}\n"));
    host.restart_gateway();
    host.shown();
    let many = runtime_threads(host.gateway.as_ref().unwrap());
    assert!((1..MANY).contains(&few) && (MANY..2 * MANY).contains(&many), "{few} and {many}");
}
