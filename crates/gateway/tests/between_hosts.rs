//! How fast a stream between two hosts is, through both gateways on this machine. The figures are printed, and nothing is asserted about them:
//!
//! ```console
//! $ cargo test --release -p partywall-gateway --test between_hosts -- --nocapture
//! ```
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

#[allow(dead_code, reason = "other tests use the rest")]
mod common;

use std::io::{Read, Write};
use std::thread;
use std::time::{Duration, Instant};

use common::{Cluster, OPEN, connect};

/// Bytes of the long stream.
const BYTES: usize = 256 << 20;
const ROUND_TRIPS: usize = 2000;

#[test]
fn bytes_and_round_trips_between_two_hosts() {
    let Some(cluster) = Cluster::start(&[("alpha", OPEN), ("beta", OPEN)]) else { return };
    let (alpha, beta) = cluster.two();
    let db = beta.join("db");
    let mut listener = db.bind("queries").unwrap();
    let server = thread::spawn(move || {
        // The first connection is only counted, and the second is echoed.
        let (mut sink, _) = listener.accept().unwrap();
        let (mut buffer, mut total) = (vec![0; 256 << 10], 0);
        while total < BYTES {
            total += sink.read(&mut buffer).unwrap();
        }
        sink.write_all(b"!").unwrap();
        let (mut stream, _) = listener.accept().unwrap();
        let mut message = [0; 64];
        while stream.read_exact(&mut message).is_ok() && stream.write_all(&message).is_ok() {}
    });
    let web = alpha.join("web");
    let mut stream = connect(&web, "db:queries");
    let chunk = vec![7; 256 << 10];
    let start = Instant::now();
    for _ in 0..BYTES / chunk.len() {
        stream.write_all(&chunk).unwrap();
    }
    stream.read_exact(&mut [0]).unwrap();
    println!("one stream: {:.0} MB/s", BYTES as f64 / start.elapsed().as_secs_f64() / 1e6);

    let mut stream = connect(&web, "db:queries");
    let mut message = [1; 64];
    let mut times: Vec<Duration> = (0..ROUND_TRIPS)
        .map(|_| {
            let start = Instant::now();
            stream.write_all(&message).unwrap();
            stream.read_exact(&mut message).unwrap();
            start.elapsed()
        })
        .collect();
    times.sort();
    println!(
        "64 bytes there and back: median {:.1?}, p99 {:.1?}",
        times[ROUND_TRIPS / 2],
        times[ROUND_TRIPS * 99 / 100]
    );
    drop(stream);
    server.join().unwrap();
}
