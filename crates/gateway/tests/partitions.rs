//! Packets that are dropped between two hosts, or between a host and etcd, and an etcd that is killed: what programs see.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

#[allow(dead_code, reason = "other tests use the rest")]
mod common;

use std::io::ErrorKind;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use common::traffic::{Traffic, assert_in_order, busy_stream};
use common::wires::{Node, Wires};
use common::{Cluster, Host, assert_echoes, connect, connect_again, connect_known, echo, eventually};
use partywall::{Error, Refusal};

/// Both ends of a stream hear that the other is dead, and have the beginning of what was sent.
fn assert_dead([client, server]: [Traffic; 2]) {
    let ((sent_there, came_back), (sent_back, came_there)) = (client.end(), server.end());
    for (sent, came) in [(sent_there, came_there), (sent_back, came_back)] {
        let kinds = [&sent, &came].map(|end| end.error.as_ref().map(std::io::Error::kind));
        assert_eq!(kinds, [Some(ErrorKind::ConnectionAborted); 2], "{sent:?} {came:?}");
        // A write that failed may have been carried in part.
        assert!(came.bytes <= sent.bytes + (16 << 10), "more has come than was sent: {sent:?} {came:?}");
    }
}

fn packets_are_dropped(lost: &[(Node, Node)]) {
    let Some(wires) = Wires::new() else { return };
    // Names vanish with a lease, which a loaded machine must not end.
    let Some(cluster) = Cluster::start_on(&wires, 300) else { return };
    let (alpha, beta) = cluster.two();
    let (db, web) = (echo(beta, "db"), echo(alpha, "web"));
    let mut listener = db.bind("queries").unwrap();
    let busy = busy_stream(&web, "db:queries", &mut listener, &Arc::default());
    for (from, to) in lost {
        wires.drop_packets(*from, *to);
    }
    assert_dead(busy);
    for (client, target) in [(&web, "db:echo"), (&db, "web:echo")] {
        let refused = client.connect(target).unwrap_err();
        let expected = matches!(&refused, Error::Refused { code: Refusal::OutOfResources, reason } if reason.contains("does not answer"));
        assert!(expected, "{target}: {refused}");
    }
    for host in [alpha, beta] {
        eventually(&format!("{} reaches etcd", host.name), || host.knows("\"fresh\":true"));
    }
    wires.mend();
    assert_echoes(connect(&web, "db:echo"));
    assert_echoes(connect(&db, "web:echo"));
}

#[test]
fn dropped_packets_between_hosts_end_streams_as_dead() {
    packets_are_dropped(&[(Node::Alpha, Node::Beta), (Node::Beta, Node::Alpha)]);
}

#[test]
fn dropped_packets_of_client_end_streams_as_dead() {
    packets_are_dropped(&[(Node::Alpha, Node::Beta)]);
}

#[test]
fn dropped_packets_to_client_end_streams_as_dead() {
    packets_are_dropped(&[(Node::Beta, Node::Alpha)]);
}

#[test]
fn host_cut_off_from_etcd_goes_on_and_comes_back() {
    let Some(wires) = Wires::new() else { return };
    let Some(cluster) = Cluster::start_on(&wires, 3) else { return };
    let (alpha, beta) = cluster.two();
    let (db, web) = (echo(beta, "db"), echo(alpha, "web"));
    let mut listener = db.bind("queries").unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let busy = busy_stream(&web, "db:queries", &mut listener, &stop);
    assert_echoes(connect(&db, "web:echo"));

    wires.drop_packets(Node::Beta, Node::Etcd);
    wires.drop_packets(Node::Etcd, Node::Beta);
    eventually("beta says that its directory is stale", || beta.knows("\"fresh\":false"));
    eventually("the names of beta vanish with its lease", || {
        let list = alpha.list();
        !list.contains("\"db\"") && list.contains("\"hosts\":1") && list.contains("\"fresh\":true")
    });
    let refused = web.connect("db:echo").unwrap_err();
    assert!(matches!(&refused, Error::Refused { code: Refusal::NoSuchDomain, .. }), "{refused}");
    assert_echoes(connect_known(&db, "web:echo"));
    busy.iter().for_each(|end| end.wait_for(1_000_000));
    // Both hosts take a name of meanwhile.
    let of_alpha = alpha.join("meanwhile");
    eventually("alpha has the name", || alpha.knows("\"meanwhile\""));
    let _of_beta = beta.join("meanwhile");

    wires.mend();
    eventually("beta is up to date", || beta.knows("\"fresh\":true"));
    assert_echoes(connect(&web, "db:echo"));
    eventually("beta shows the conflict", || beta.knows("\"conflicts\":[[\"meanwhile\",\"alpha\"]]"));
    drop(of_alpha);
    eventually("beta has the name that alpha has given up", || {
        beta.knows("\"conflicts\":[]") && alpha.knows("{\"domain\":\"meanwhile\",\"host\":\"beta\"")
    });
    busy.iter().for_each(|end| end.wait_for(1_000_000));
    stop.store(true, Ordering::Relaxed);
    assert_in_order(busy);
}

/// Each host lists every name of both hosts once.
fn assert_names(cluster: &Cluster, names: &[(&str, &str)]) {
    for host in &cluster.hosts {
        eventually(&format!("{} lists each name once", host.name), || {
            let list = host.list();
            let lines: Vec<_> = list.lines().filter(|line| line.starts_with("{\"domain\"")).collect();
            let has = |(name, of): &(&str, &str)| {
                let start = format!("{{\"domain\":\"{name}\",\"host\":\"{of}\"");
                lines.iter().filter(|line| line.starts_with(&start)).count() == 1
            };
            let state = "\"hosts\":2";
            list.contains(state)
                && list.contains("\"conflicts\":[]")
                && lines.len() == names.len()
                && names.iter().all(has)
        });
    }
}

/// Joins and leaves under changing names until told to stop. A name may only be refused for the sake of the other host.
fn come_and_go(host: &Host, stop: &AtomicBool) -> usize {
    let mut joined = 0;
    while !stop.load(Ordering::Relaxed) {
        let domain = host.join(&format!("{}-guest{}", host.name, joined % 10));
        let _listener = domain.bind("service").unwrap();
        joined += 1;
    }
    joined
}

/// Ends what goes on until a word is true, also if the test fails.
struct AtEnd<'a>(&'a AtomicBool);

impl Drop for AtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// How etcd starts again after it was killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum EtcdData {
    Kept,
    Lost,
}

fn etcd_is_killed(data: EtcdData) {
    let Some(mut cluster) = Cluster::start_with_leases(300) else { return };
    let (alpha, beta) = (&cluster.hosts[0], &cluster.hosts[1]);
    let (db, web) = (echo(beta, "db"), echo(alpha, "web"));
    let mut listener = db.bind("queries").unwrap();
    let (stop, no_more) = (Arc::new(AtomicBool::new(false)), AtomicBool::new(false));
    let busy = busy_stream(&web, "db:queries", &mut listener, &stop);
    let (hosts, etcd) = (&cluster.hosts, &mut cluster.etcd);
    thread::scope(|scope| {
        let at_end = AtEnd(&no_more);
        let guests: Vec<_> = hosts.iter().map(|host| scope.spawn(|| come_and_go(host, &no_more))).collect();
        for round in 0..3 {
            // This name is written before, ends while etcd is away, and does not come again.
            let ending = hosts[0].join(&format!("ending{round}"));
            eventually("the name is known", || hosts[1].knows(&format!("\"ending{round}\"")));
            etcd.process.kill();
            for host in hosts {
                eventually("the directory is stale", || host.knows("\"fresh\":false"));
            }
            drop(ending);
            assert_echoes(connect_known(&web, "db:echo"));
            if data == EtcdData::Lost {
                etcd.lose_data();
            }
            etcd.start_again();
            for (host, client, target) in [(&hosts[0], &web, "db:echo"), (&hosts[1], &db, "web:echo")] {
                eventually("the directory is fresh", || host.knows("\"fresh\":true"));
                // The other host's name stays known, and is not free.
                assert_echoes(connect_known(client, target));
                let name = target.split(':').next().unwrap();
                let taken = host.try_join(name).unwrap_err();
                assert!(matches!(taken, Error::Refused { code: Refusal::NameTaken, .. }), "round {round}: {taken}");
            }
            busy.iter().for_each(|end| end.wait_for(1_000_000));
        }
        drop(at_end);
        assert!(guests.into_iter().all(|guest| guest.join().unwrap() > 0));
    });
    assert_names(&cluster, &[("db", "beta"), ("web", "alpha")]);
    // Nothing is left that would end with a lease of an earlier session.
    eventually("all entries belong to the two leases", || cluster.etcd.leases() == 2);
    stop.store(true, Ordering::Relaxed);
    assert_in_order(busy);
    assert_echoes(connect_again(&web, "db:echo"));
}

#[test]
fn etcd_killed_with_its_data_kept_leaves_names_on_their_hosts() {
    etcd_is_killed(EtcdData::Kept);
}

#[test]
fn etcd_killed_with_its_data_lost_gets_all_names_again() {
    etcd_is_killed(EtcdData::Lost);
}
