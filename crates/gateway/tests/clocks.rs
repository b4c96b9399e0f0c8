//! Hosts whose wall clocks jump. Leases, time-outs and pauses go by another clock. Only the validity of certificates goes by this one, when two
//! hosts connect.
//!
//! The clock of etcd cannot be changed this way, since it is written in Go. It counts leases by Go's monotonic clock.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

#[allow(dead_code, reason = "other tests use the rest")]
mod common;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use common::traffic::{assert_in_order, busy_stream};
use common::{Cluster, Host, OPEN, assert_echoes, connect, connect_again, connect_known, echo, eventually};

const DAY: i64 = 24 * 60 * 60;
/// Longer than the lease of a host and the silence of another that are borne.
const PATIENCE: Duration = Duration::from_secs(6);

/// A library that adds seconds to the wall clock of a process. They are the number in the file `$CLOCK_OFFSET`, which it maps.
const LIBRARY: &str = r#"
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static volatile int64_t *offset;
__attribute__((constructor)) static void begin(void) {
    void *map = mmap(0, 8, PROT_READ, MAP_SHARED, open(getenv("CLOCK_OFFSET"), O_RDONLY), 0);
    if (map == MAP_FAILED) abort();
    offset = map;
}
int clock_gettime(clockid_t clock, struct timespec *time) {
    int status = syscall(SYS_clock_gettime, clock, time);
    if (status == 0 && offset && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) time->tv_sec += *offset;
    return status;
}
int gettimeofday(struct timeval *time, void *zone) {
    struct timespec now;
    int status = clock_gettime(CLOCK_REALTIME, &now);
    time->tv_sec = now.tv_sec, time->tv_usec = now.tv_nsec / 1000;
    return status;
}
time_t time(time_t *into) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (into) *into = now.tv_sec;
    return now.tv_sec;
}
"#;

/// The wall clock of a host's gateway.
struct HostClock(PathBuf);

impl HostClock {
    /// Starts the gateway again, with a clock that can be set.
    fn of(host: &mut Host, library: &Path) -> Self {
        let clock = Self(host.config.with_extension("clock"));
        clock.set(0);
        let (library, offset) = (library.display(), clock.0.display());
        host.enter =
            ["env", &format!("LD_PRELOAD={library}"), &format!("CLOCK_OFFSET={offset}")].map(str::to_owned).into();
        host.restart_gateway();
        clock
    }

    /// Makes it this many seconds fast.
    fn set(&self, seconds: i64) {
        // Nothing may find the file empty.
        let file = std::fs::File::options().write(true).create(true).truncate(false).open(&self.0).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, &seconds.to_ne_bytes(), 0).unwrap();
    }
}

/// For how many seconds a host's directory has been fresh, `None` if it is stale; and the list that shows it.
fn fresh_for(host: &Host) -> (Option<u64>, String) {
    let list = host.shown();
    let state: serde_json::Value = serde_json::from_str(list.lines().next().unwrap()).unwrap();
    (state["for_s"].as_u64().filter(|_| state["fresh"] == true), list)
}

#[test]
fn wall_clocks_that_jump_disturb_only_certificates() {
    // The clock of gamma is right all along: where its directory is not fresh either, the machine is too loaded. A loaded machine may also stop
    // only one of the others, so each loss of freshness is tried again.
    let hosts = ["alpha", "beta", "gamma"].map(|name| (name, OPEN));
    let Some(mut cluster) = Cluster::start(&hosts) else { return };
    let (source, library) = (cluster.folder.path().join("clock.c"), cluster.folder.path().join("clock.so"));
    std::fs::write(&source, LIBRARY).unwrap();
    let built = Command::new("cc").args(["-O1", "-shared", "-fPIC", "-o"]).args([&library, &source]).status().unwrap();
    assert!(built.success());
    let [of_alpha, of_beta] = [0, 1].map(|n| HostClock::of(&mut cluster.hosts[n], &library));
    let (db, web) = (echo(&cluster.hosts[1], "db"), echo(&cluster.hosts[0], "web"));
    let mut listener = db.bind("queries").unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let busy = busy_stream(&web, "db:queries", &mut listener, &stop);
    for host in &cluster.hosts {
        eventually("all names are known", || ["\"hosts\":3", "\"db\"", "\"web\""].iter().all(|part| host.knows(part)));
    }
    let set = |(alpha, beta)| {
        of_alpha.set(alpha);
        of_beta.set(beta);
    };
    for [from, to] in [[(0, 0), (DAY, -DAY)], [(DAY, -DAY), (-DAY, DAY)], [(-DAY, DAY), (0, 0)]] {
        let mut last_loss = String::new();
        let mut stays_fresh = || {
            set(from);
            eventually("all directories are fresh", || cluster.hosts.iter().all(|host| fresh_for(host).0.is_some()));
            let before: Vec<_> = cluster.hosts.iter().map(|host| fresh_for(host).0.unwrap_or_default()).collect();
            set(to);
            thread::sleep(PATIENCE);
            busy.iter().for_each(|end| end.wait_for(1_000_000));
            assert_echoes(connect_known(&web, "db:echo"));
            let after: Vec<_> = cluster.hosts.iter().map(fresh_for).collect();
            last_loss.clear();
            for ((host, before), (fresh, list)) in cluster.hosts.iter().zip(before).zip(&after) {
                if *fresh < Some(before + PATIENCE.as_secs() - 1) {
                    last_loss += &format!("\n{}: {before} s, and then {list}", host.name);
                }
            }
            if !last_loss.is_empty() {
                return false;
            }
            for (host, (_, list)) in cluster.hosts.iter().zip(&after) {
                assert!(list.contains("\"domains\":2"), "{}: {list}", host.name);
            }
            true
        };
        let is_fresh = (0..5).any(|_| stays_fresh());
        assert!(
            is_fresh,
            "each jump from {from:?} to {to:?} makes a directory stale, or the machine is too loaded:{last_loss}"
        );
    }
    stop.store(true, Ordering::Relaxed);
    assert_in_order(busy);

    // Certificates are valid from an hour before they are made, and the other host's clock is right.
    of_beta.set(-DAY);
    cluster.hosts[0].restart_gateway();
    eventually("hosts know each other", || cluster.hosts.iter().all(|host| host.knows("\"domains\":2")));
    let refused = db.connect("web:echo").unwrap_err().to_string();
    assert!(refused.contains("not valid yet"), "{refused}");
    let refused = web.connect("db:echo").unwrap_err().to_string();
    assert!(refused.contains("certificate"), "{refused}");
    // They are valid for 30 days.
    of_beta.set(DAY);
    assert_echoes(connect_again(&db, "web:echo"));
    assert_echoes(connect(&web, "db:echo"));
}
