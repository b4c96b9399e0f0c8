//! Exporters that answer late or never, or take few connections: a machine's requests go on, or fail together when the grace is over.
#![cfg(not(miri))]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod disk_common;

use disk_common::exported::{Imported, PlayedSessions, PlayedWelcome, Setting, refusal, request_of};
use disk_common::random::noise;
use disk_common::{HANG, IN, IOERR, MIB, OK, OUT};
use partywall::Domain;
use partywall::rpc::{CallServer, Method};
use partywall_vhost::disk::driver::DiskDriver;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

/// How a played exporter answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Manner {
    /// It executes each request, and takes this long.
    Takes(Duration),
    /// It takes requests and answers nothing until the end of the test.
    Silent,
    /// It says of each request that its session has ended.
    Ended,
    /// It says of each request that it should be sent again.
    Again,
}

/// What the threads of a played exporter share.
struct Played {
    manner: Mutex<Manner>,
    changed: Condvar,
    sessions: Mutex<u64>,
}

/// An exporter that can fall silent.
struct PlayedExporter {
    played: Arc<Played>,
    _sessions: PlayedSessions,
    _calls: CallServer,
    _domain: Domain,
}

impl PlayedExporter {
    fn start(setting: &Setting) -> Self {
        Self::with_connections(setting, 128)
    }

    /// It takes this many connections for requests.
    fn with_connections(setting: &Setting, most: usize) -> Self {
        let domain = setting.join("store");
        let manner = Mutex::new(Manner::Takes(Duration::ZERO));
        let played = Arc::new(Played { manner, changed: Condvar::new(), sessions: Mutex::new(0) });
        let mut calls = CallServer::builder().max_clients(most).max_clients_of_domain(most);
        for number in 1..=3_u32 {
            let played = Arc::clone(&played);
            calls = calls.numbered(Method::numbered(number), move |call| {
                let args = call.args().to_vec();
                let (_, _, length) = request_of(&args, *played.sessions.lock().unwrap())?;
                let manner = played.manner.lock().unwrap();
                let manner = *played.changed.wait_while(manner, |manner| *manner == Manner::Silent).unwrap();
                match manner {
                    Manner::Takes(time) => std::thread::sleep(time),
                    Manner::Again => return Err(refusal(rustix::io::Errno::AGAIN)),
                    Manner::Silent | Manner::Ended => return Err(refusal(rustix::io::Errno::NOTCONN)),
                }
                Ok(vec![7; if number == 1 { length } else { 0 }].into())
            });
        }
        let calls = calls.bind(&domain, "data.calls").unwrap();
        let shared = Arc::clone(&played);
        let sessions = PlayedSessions::begin(&domain, move || {
            let mut session = shared.sessions.lock().unwrap();
            *session += 1;
            Some(PlayedWelcome { session: *session, capacity: MIB, boot: 0 })
        });
        Self { played, _sessions: sessions, _calls: calls, _domain: domain }
    }

    fn turn(&self, manner: Manner) {
        *self.played.manner.lock().unwrap() = manner;
        self.played.changed.notify_all();
    }

    fn sessions(&self) -> u64 {
        *self.played.sessions.lock().unwrap()
    }
}

impl Drop for PlayedExporter {
    fn drop(&mut self) {
        self.turn(Manner::Ended);
    }
}

const READS: u64 = 8;

/// A disk whose requests are executed one after the other.
fn import(setting: &Setting, grace: Duration) -> Imported {
    setting.import_with("user", |options| (options.connections, options.grace) = (1, grace)).unwrap()
}

/// Offers all reads at once, and returns their statuses.
fn read_together(driver: &mut DiskDriver) -> Vec<u8> {
    for n in 0..READS {
        let place = driver.take_place(0).unwrap();
        driver.offer(0, place, IN, n, 512, false).unwrap();
    }
    driver.kick(0).unwrap();
    let mut status = || driver.wait(0, Duration::ZERO, HANG).unwrap().expect("a request was lost").status;
    (0..READS).map(|_| status()).collect()
}

/// The sessions that a silent exporter begins for all reads. Before the reads, the guest may have written what no flush has made durable.
fn sessions_of_silence(has_written: bool) -> u64 {
    let setting = Setting::new(MIB);
    let exporter = PlayedExporter::start(&setting);
    let disk = import(&setting, Duration::from_secs(3));
    let mut driver = disk.driver();
    if has_written {
        assert_eq!(driver.run(OUT, 0, &noise(1, 512), 0).unwrap().0, OK);
    }
    exporter.turn(Manner::Silent);
    let before = exporter.sessions();
    assert_eq!(read_together(&mut driver), [IOERR; READS as usize]);
    let sessions = exporter.sessions() - before;
    // The disk goes on with an exporter that answers again.
    exporter.turn(Manner::Takes(Duration::ZERO));
    assert_eq!(driver.run(IN, 0, &[], 512).unwrap(), (OK, vec![7; 512]));
    sessions
}

/// Each further session could take the time of one grace.
#[test]
fn reads_behind_one_without_answer_fail_with_it() {
    let sessions = sessions_of_silence(false);
    assert!(sessions <= 2, "{sessions} sessions for {READS} reads");
}

/// Each session begins with a flush, which is not answered either.
#[test]
fn reads_behind_kept_changes_without_answer_fail_together() {
    let sessions = sessions_of_silence(true);
    assert!(sessions <= 2, "{sessions} sessions for {READS} reads");
}

#[test]
fn exporter_that_ends_each_session_is_asked_now_and_then() {
    let setting = Setting::new(MIB);
    let exporter = PlayedExporter::start(&setting);
    let disk = import(&setting, Duration::from_secs(1));
    let mut driver = disk.driver();
    exporter.turn(Manner::Ended);
    assert_eq!(read_together(&mut driver), [IOERR; READS as usize]);
    // One begins each 50 ms at most. The requests have one second for all of them.
    let sessions = exporter.sessions();
    assert!(sessions <= 30, "{sessions} sessions for {READS} reads");
    exporter.turn(Manner::Takes(Duration::ZERO));
    assert_eq!(driver.run(IN, 0, &[], 512).unwrap(), (OK, vec![7; 512]));
    drop((driver, disk));
}

/// With each answer, the time of the requests that wait begins again.
#[test]
fn slow_exporter_answers_reads_that_exceed_its_grace() {
    let setting = Setting::new(MIB);
    let exporter = PlayedExporter::start(&setting);
    let disk = import(&setting, Duration::from_secs(3));
    let mut driver = disk.driver();
    exporter.turn(Manner::Takes(Duration::from_millis(600)));
    assert_eq!(read_together(&mut driver), [OK; READS as usize]);
    assert_eq!(exporter.sessions(), 1);
    drop((driver, disk));
}

/// A disk that is only read can have more users than its exporter has connections for.
#[test]
fn session_goes_on_without_a_further_connection() {
    let setting = Setting::new(MIB);
    let exporter = PlayedExporter::with_connections(&setting, 1);
    let disk = setting.import("user", HANG).unwrap();
    let mut driver = disk.driver();
    exporter.turn(Manner::Takes(Duration::from_millis(20)));
    for _ in 0..3 {
        assert_eq!(read_together(&mut driver), [OK; READS as usize]);
    }
    assert_eq!(exporter.sessions(), 1, "the session ends for a connection that it does not need");
    drop((driver, disk));
}

#[test]
fn exporter_that_wants_each_request_again_fails_them() {
    let setting = Setting::new(MIB);
    let exporter = PlayedExporter::start(&setting);
    let disk = setting.import("user", HANG).unwrap();
    let mut driver = disk.driver();
    exporter.turn(Manner::Again);
    assert_eq!(driver.run(OUT, 0, &noise(1, 512), 0).unwrap().0, IOERR);
    assert_eq!(driver.run(IN, 0, &[], 512).unwrap().0, IOERR);
    exporter.turn(Manner::Takes(Duration::ZERO));
    assert_eq!(driver.run(IN, 0, &[], 512).unwrap(), (OK, vec![7; 512]));
    drop((driver, disk));
}
