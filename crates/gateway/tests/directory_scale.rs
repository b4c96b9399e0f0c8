//! The directory of 1,000 hosts with 100,000 services: memory, time to find a name, and changes. The times are printed, and nothing is
//! asserted about them. Run it alone:
//!
//! ```console
//! $ cargo test --release -p partywall-gateway --test directory_scale -- --nocapture
//! ```
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

#[allow(dead_code, reason = "other tests use the rest")]
mod common;

use std::time::{Duration, Instant};

use common::{Cluster, OPEN, eventually};
use etcd_client::{Client, PutOptions};
use partywall::Kind;
use partywall_gateway::entry::{DomainEntry, HostEntry, Keys};
use partywall_gateway::table::NameTable;

const HOSTS: usize = 1000;
const DOMAINS_PER_HOST: usize = 10;
const SERVICES_PER_DOMAIN: usize = 10;
const DOMAINS: usize = HOSTS * DOMAINS_PER_HOST;

fn host(number: usize) -> String {
    format!("host-{number:04}.example")
}

fn domain(number: usize) -> String {
    format!("application-{:04}.unit{}", number / DOMAINS_PER_HOST, number % DOMAINS_PER_HOST)
}

fn entry(number: usize, services: usize) -> DomainEntry {
    let services = (0..services).map(|n| (format!("service-{n}"), Kind::Stream)).collect();
    DomainEntry { host: host(number / DOMAINS_PER_HOST), services }
}

/// Kilobytes of a process' memory.
fn resident(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// Writes some domains, 64 at a time.
async fn put_all(client: &Client, keys: &Keys, leases: &[i64], services: usize) {
    let mut writers = tokio::task::JoinSet::new();
    for part in 0..64 {
        let (mut client, keys, leases) = (client.clone(), keys.clone(), leases.to_vec());
        writers.spawn(async move {
            for number in (0..DOMAINS).skip(part).step_by(64) {
                let lease = PutOptions::new().with_lease(leases[number / DOMAINS_PER_HOST]);
                let value = entry(number, services).encode();
                client.put(keys.domain(&domain(number)), value, Some(lease)).await.unwrap();
            }
        });
    }
    while let Some(done) = writers.join_next().await {
        done.unwrap();
    }
}

#[test]
fn hundred_thousand_services_of_thousand_hosts() {
    let Some(cluster) = Cluster::start(&[("alpha", OPEN), ("beta", OPEN)]) else { return };
    let (alpha, beta) = cluster.two();
    let gateway = alpha.gateway.as_ref().unwrap().id();
    let before = resident(gateway);
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let (keys, url) = (Keys::new("/partywall/"), cluster.etcd.url.clone());

    let (client, leases) = runtime.block_on(async {
        let mut client = Client::connect([&url], None).await.unwrap();
        let mut leases = Vec::new();
        for number in 0..HOSTS {
            // The hosts are not there, so their leases are to outlast the test.
            let lease = client.lease_grant(600, None).await.unwrap().id();
            let value = HostEntry { address: format!("{}:7411", host(number)) }.encode();
            client.put(keys.host(&host(number)), value, Some(PutOptions::new().with_lease(lease))).await.unwrap();
            leases.push(lease);
        }
        (client, leases)
    });
    let start = Instant::now();
    runtime.block_on(put_all(&client, &keys, &leases, SERVICES_PER_DOMAIN));
    let written = start.elapsed();
    eventually("all domains are known", || alpha.knows(&format!("\"domains\":{DOMAINS},\"services\":100000")));
    let known = start.elapsed();
    println!("{DOMAINS} domains, 100000 services, {HOSTS} hosts");
    println!("written to etcd in {written:.1?}, known to the gateway in {known:.1?}, its list included");
    let growth = resident(gateway).saturating_sub(before);
    println!("resident memory of the gateway: {before} KiB before, {growth} KiB more now");
    println!("resident memory of etcd: {} KiB", resident(cluster.etcd.process.id()));

    // A gateway that starts now reads everything.
    let start = Instant::now();
    partywall_gateway::certificates::make(cluster.folder.path(), &["gamma".to_owned()], 30).unwrap();
    let mut gamma = cluster.host("gamma", OPEN);
    gamma.start_gateway();
    eventually("a new gateway knows all", || gamma.knows("\"services\":100000"));
    let fresh = resident(gamma.gateway.as_ref().unwrap().id());
    println!("a new gateway knows all after {:.1?}, with {fresh} KiB", start.elapsed());

    // Streams to a real domain among them.
    let db = beta.join("db");
    let mut listener = db.bind("queries").unwrap();
    std::thread::spawn(move || while listener.accept().is_ok() {});
    let web = alpha.join("web");
    drop(common::connect(&web, "db:queries"));
    let mut times: Vec<Duration> = (0..200)
        .map(|_| {
            let start = Instant::now();
            drop(web.connect("db:queries").unwrap());
            start.elapsed()
        })
        .collect();
    times.sort();
    println!("connect to the other host: median {:.1?}, p99 {:.1?}", times[100], times[197]);

    // Every domain changes once, as fast as etcd takes it.
    let start = Instant::now();
    runtime.block_on(put_all(&client, &keys, &leases, SERVICES_PER_DOMAIN + 1));
    let written = start.elapsed();
    eventually("all changes are known", || alpha.knows("\"services\":110001"));
    println!(
        "{DOMAINS} changes: written in {written:.1?} ({:.0}/s), known to all gateways after {:.1?}",
        DOMAINS as f64 / written.as_secs_f64(),
        start.elapsed()
    );

    // A tenth of the hosts dies.
    let start = Instant::now();
    runtime.block_on(async {
        for lease in &leases[..HOSTS / 10] {
            client.clone().lease_revoke(*lease).await.unwrap();
        }
    });
    eventually("dead hosts have vanished", || alpha.knows("\"services\":99001"));
    println!("{} hosts with 1000 domains: gone after {:.1?}", HOSTS / 10, start.elapsed());

    look_up();
    assert!(growth < 32 << 10, "the directory takes {growth} KiB");
}

/// The table alone, in this process.
fn look_up() {
    let before = resident(std::process::id());
    let mut table = NameTable::default();
    for number in 0..HOSTS {
        table.put_host(&host(number), HostEntry { address: format!("{}:7411", host(number)) });
    }
    let values: Vec<_> = (0..DOMAINS).map(|number| entry(number, SERVICES_PER_DOMAIN).encode()).collect();
    let start = Instant::now();
    for (number, value) in values.iter().enumerate() {
        table.put_domain(&domain(number), DomainEntry::decode(value).unwrap());
    }
    println!("table: {DOMAINS} entries decoded and entered in {:.1?}", start.elapsed());
    drop(values);
    println!("table: {} KiB", resident(std::process::id()).saturating_sub(before));
    let names: Vec<_> = (0..DOMAINS).map(domain).collect();
    let mut found = 0;
    let start = Instant::now();
    for round in 0..100 {
        // Neighbours are not looked up one after the other.
        for number in 0..DOMAINS {
            let host = table.host_of(&names[(number * 7919 + round) % DOMAINS]).unwrap();
            found += usize::from(table.address_of(host).is_some());
        }
    }
    let each = start.elapsed() / (100 * DOMAINS as u32);
    assert_eq!(found, 100 * DOMAINS);
    println!("table: a domain's host and address are found in {each:?}");
}
