//! A disk that a domain exports, as a driver sees it: contents, faults of the exporter, and hostile users and exporters.
#![cfg(not(miri))]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod disk_common;

use disk_common::exported::{BlkProcess, PlayedSessions, PlayedWelcome, Setting, begin_session, refusal, request_of};
use disk_common::random::{Random, noise};
use disk_common::{DISCARD, FLUSH, HANG, IN, IOERR, MIB, OK, OUT, WRITE_ZEROES, range};
use partywall::Domain;
use partywall::rpc::{CallClient, CallError, CallServer, Method};
use partywall_vhost::disk::control::{self, DiskControl, DiskUse};
use partywall_vhost::disk::driver::{DiskDriver, DiskDriverOptions};
use partywall_vhost::disk::{CopiesPerByte, background};
use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use vhost::VhostBackend;
use vm_memory::Bytes;

fn content(image: &Path, at: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    std::fs::File::open(image).unwrap().read_exact_at(&mut bytes, at).unwrap();
    bytes
}

const LONG: Duration = Duration::from_secs(60);

#[test]
fn imported_disk_has_the_contents_of_the_exported_one() {
    let setting = Setting::new(8 * MIB);
    let _export = setting.export();
    let disk = setting.import("user", LONG).unwrap();
    let mut driver = disk.driver();
    assert_eq!(driver.sectors().unwrap(), 8 * MIB / 512);
    let mut random = Random(0x0123_4567_89ab_cdef);
    let mut model = vec![0; 8 << 20];
    let mut carried = 0;
    for n in 0..60_u64 {
        // Some requests are longer than what one call carries.
        let len = if n % 9 == 0 { 3 << 20 } else { (1 + random.below(64) as usize) * 512 };
        let sector = random.below((model.len() - len) as u64 / 512 + 1);
        let at = sector as usize * 512;
        match n % 3 {
            0 | 1 => {
                let bytes = noise(n, len);
                assert_eq!(driver.run(OUT, sector, &bytes, 0).unwrap().0, OK);
                model[at..at + len].copy_from_slice(&bytes);
            }
            _ => assert!(driver.run(IN, sector, &[], len as u32).unwrap() == (OK, model[at..at + len].to_vec())),
        }
        carried += len as u64;
    }
    for (kind, flags) in [(WRITE_ZEROES, 0), (WRITE_ZEROES, 1), (DISCARD, 0)] {
        let sector = random.below(4096) as usize;
        let (status, _) = driver.run(kind, 0, &range(sector as u64, 1024, flags), 0).unwrap();
        assert_eq!(status, OK, "{kind} {flags}");
        model[sector * 512..][..1024 * 512].fill(0);
    }
    assert_eq!(driver.run(FLUSH, 0, &[], 0).unwrap().0, OK);
    assert!(content(&setting.image(), 0, model.len()) == model);
    let report = disk.report();
    assert_eq!(report.counters.copied_bytes, carried, "each byte is copied once");
    assert_eq!(report.copies, CopiesPerByte { read: Some(1.0), written: Some(1.0) });
    assert_eq!(driver.run(IN, 8 * MIB / 512, &[], 512).unwrap().0, IOERR, "beyond the end");
}

#[test]
fn many_requests_under_way_are_all_done() {
    let setting = Setting::new(4 * MIB);
    let _export = setting.export();
    let disk = setting.import("user", LONG).unwrap();
    let mut driver = disk.driver();
    for round in 0..20_u64 {
        let mut offered = 0;
        while let Some(place) = driver.take_place(0) {
            let bytes = noise(round * 100 + u64::from(place), 4096);
            driver.memory().write_slice(&bytes, driver.data(0, place)).unwrap();
            driver.offer(0, place, OUT, u64::from(place) * 8, 4096, true).unwrap();
            offered += 1;
        }
        driver.kick(0).unwrap();
        for _ in 0..offered {
            assert_eq!(driver.wait(0, Duration::ZERO, HANG).unwrap().expect("a request was lost").status, OK);
        }
        for place in 0..offered {
            let stored = content(&setting.image(), place * 4096, 4096);
            assert!(stored == noise(round * 100 + place, 4096), "round {round}, place {place}");
        }
    }
}

#[test]
fn disk_has_one_user_and_is_free_after_it() {
    let setting = Setting::new(MIB);
    let _export = setting.export();
    let first = setting.import("first", LONG).unwrap();
    let refused = setting.import("second", Duration::ZERO).err().unwrap().to_string();
    assert!(refused.contains("another back end uses the disk store:data"), "{refused}");
    assert_eq!(first.driver().run(OUT, 0, &noise(1, 512), 0).unwrap().0, OK);
    drop(first);
    let second = setting.import("second", LONG).unwrap();
    assert!(second.driver().run(IN, 0, &[], 512).unwrap() == (OK, noise(1, 512)));
}

#[test]
fn read_only_disk_has_several_users_and_no_writers() {
    let setting = Setting::new(MIB);
    let _export = setting.export_with(|options| options.read_only = true);
    let users = ["first", "second"].map(|name| setting.import(name, LONG).unwrap());
    for user in &users {
        let mut driver = user.driver();
        assert_eq!(driver.run(IN, 0, &[], 512).unwrap().0, OK);
        assert_eq!(driver.run(OUT, 0, &noise(1, 512), 0).unwrap().0, IOERR);
    }
    let raw = Raw::begin(&setting, "raw");
    assert_eq!(raw.ask(2, 0, 512, &noise(1, 512)), Err(rustix::io::Errno::ROFS.raw_os_error()));
    assert_eq!(content(&setting.image(), 0, 512), [0; 512]);
}

#[test]
fn requests_wait_for_an_exporter_that_comes_back() {
    let setting = Setting::new(MIB);
    let export = setting.export();
    let disk = setting.import("user", LONG).unwrap();
    let mut driver = disk.driver();
    assert_eq!(driver.run(OUT, 0, &noise(1, 4096), 0).unwrap().0, OK);
    drop(export);
    for n in 0..8_u64 {
        let place = driver.take_place(0).unwrap();
        driver.memory().write_slice(&noise(n, 4096), driver.data(0, place)).unwrap();
        driver.offer(0, place, OUT, 8 * n, 4096, true).unwrap();
    }
    driver.kick(0).unwrap();
    assert_eq!(driver.wait(0, Duration::ZERO, Duration::from_millis(300)).unwrap(), None, "there is no exporter");
    let _export = setting.export();
    for _ in 0..8 {
        assert_eq!(driver.wait(0, Duration::ZERO, HANG).unwrap().expect("a request was lost").status, OK);
    }
    for n in 0..8 {
        assert_eq!(driver.run(IN, 8 * n, &[], 4096).unwrap(), (OK, noise(n, 4096)));
    }
    assert_eq!(driver.run(FLUSH, 0, &[], 0).unwrap().0, OK, "the kernel of the exporter is the same");
}

#[test]
fn requests_fail_while_an_exporter_is_away_for_long() {
    let setting = Setting::new(MIB);
    let export = setting.export();
    // The calls' time-out is the grace as well.
    let disk = setting.import("user", Duration::from_secs(5)).unwrap();
    let mut driver = disk.driver();
    drop(export);
    assert_eq!(driver.run(OUT, 0, &noise(1, 4096), 0).unwrap().0, IOERR);
    let _export = setting.export();
    assert_eq!(driver.run(OUT, 0, &noise(2, 4096), 0).unwrap().0, OK);
    assert!(driver.run(IN, 0, &[], 4096).unwrap() == (OK, noise(2, 4096)));
}

/// A session that begins late has one attempt.
#[test]
fn request_is_executed_if_a_session_begins_after_its_grace() {
    const GRACE: Duration = Duration::from_secs(3);
    let setting = Setting::new(MIB);
    let exporter = Forgetful::start(&setting);
    let disk = setting.import("user", GRACE).unwrap();
    let mut driver = disk.driver();
    assert_eq!(driver.run(OUT, 0, &noise(1, 4096), 0).unwrap().0, OK);
    exporter.disk.lock().unwrap().greeting = GRACE + Duration::from_millis(500);
    exporter.reconnect();
    assert!(driver.run(IN, 0, &[], 4096).unwrap() == (OK, noise(1, 4096)));
    drop((driver, disk));
}

#[test]
fn request_fails_if_no_session_of_its_exporter_has_an_answer() {
    let setting = Setting::new(MIB);
    let exporter = Forgetful::start(&setting);
    let disk = setting.import("user", Duration::from_millis(300)).unwrap();
    let mut driver = disk.driver();
    exporter.disk.lock().unwrap().is_mute = true;
    assert_eq!(driver.run(IN, 0, &[], 4096).unwrap().0, IOERR);
    drop((driver, disk));
}

#[test]
fn smaller_disk_of_a_returned_exporter_is_not_used() {
    let setting = Setting::new(2 * MIB);
    let export = setting.export();
    let disk = setting.import("user", Duration::from_millis(300)).unwrap();
    let mut driver = disk.driver();
    drop(export);
    std::fs::File::options().write(true).open(setting.image()).unwrap().set_len(MIB).unwrap();
    let _export = setting.export();
    assert_eq!(driver.run(IN, 0, &[], 512).unwrap().0, IOERR);
}

#[test]
fn disk_smaller_than_after_its_resize_is_not_used() {
    let setting = Setting::new(MIB);
    let export = setting.export();
    let disk = setting.import("user", Duration::from_secs(2)).unwrap();
    let mut driver = disk.driver();
    let resize = |size| std::fs::File::options().write(true).open(setting.image()).unwrap().set_len(size).unwrap();
    resize(2 * MIB);
    assert_eq!(disk.handle.ask(DiskControl::Resize { size: None }).unwrap(), serde_json::json!(2 * MIB));
    drop(export);
    resize(MIB);
    let export = setting.export();
    assert_eq!(driver.run(IN, 0, &[], 512).unwrap().0, IOERR, "the machine knows a larger disk");
    drop(export);
    resize(2 * MIB);
    let _export = setting.export();
    assert_eq!(driver.run(IN, 0, &[], 512).unwrap().0, OK);
}

#[test]
fn grown_disk_is_seen_after_resize() {
    let setting = Setting::new(MIB);
    let _export = setting.export();
    let disk = setting.import("user", LONG).unwrap();
    let mut driver = disk.driver();
    std::fs::File::options().write(true).open(setting.image()).unwrap().set_len(2 * MIB).unwrap();
    assert!(disk.handle.ask(DiskControl::Resize { size: Some(4 * MIB) }).is_err());
    assert_eq!(disk.handle.ask(DiskControl::Resize { size: None }).unwrap(), serde_json::json!(2 * MIB));
    assert_eq!(driver.run(OUT, MIB / 512, &noise(1, 512), 0).unwrap().0, OK);
}

#[test]
fn reset_waits_briefly_for_an_exporter_that_is_away() {
    let setting = Setting::new(MIB);
    let export = setting.export();
    let disk = setting.import("user", Duration::from_secs(3600)).unwrap();
    let mut driver = disk.driver();
    drop(export);
    let place = driver.take_place(0).unwrap();
    driver.offer(0, place, OUT, 0, 4096, true).unwrap();
    driver.kick(0).unwrap();
    let deadline = Instant::now() + HANG;
    let under_way = || disk.report().under_way;
    while under_way() == 0 {
        assert!(Instant::now() < deadline);
    }
    // The front end's request ends all requests of the queue. It would wait for an hour otherwise, and the test with it.
    driver.frontend().unwrap().get_vring_base(0).unwrap();
    assert_eq!(under_way(), 0);
}

/// A user that follows no rules.
struct Raw {
    calls: CallClient,
    session: u64,
    _stream: partywall::Stream,
    _domain: Domain,
}

impl Raw {
    fn begin(setting: &Setting, name: &str) -> Self {
        let domain = setting.join(name);
        let (stream, session) = begin_session(&domain, "store:data");
        let calls = CallClient::builder().connect(&domain, "store:data.calls").unwrap();
        Self { calls, session, _stream: stream, _domain: domain }
    }

    /// Sends a request with the fields behind its data.
    fn ask(&self, method: u32, offset: u64, length: u64, data: &[u8]) -> Result<Vec<u8>, i32> {
        self.ask_of(self.session, method, (offset, length), 0, data)
    }

    fn ask_of(
        &self,
        session: u64,
        method: u32,
        (offset, length): (u64, u64),
        mode: u32,
        data: &[u8],
    ) -> Result<Vec<u8>, i32> {
        let mut bytes = data.to_vec();
        for long in [session, offset, length] {
            bytes.extend(long.to_le_bytes());
        }
        bytes.extend(0_u32.to_le_bytes());
        bytes.extend(mode.to_le_bytes());
        match self.calls.call(Method::numbered(method), &bytes) {
            Ok(reply) => Ok(reply.to_vec()),
            Err(CallError::Application { code, .. }) => Err(code.cast_signed()),
            Err(e) => panic!("{e}"),
        }
    }
}

#[test]
fn requests_of_a_hostile_user_change_nothing_but_its_disk() {
    use rustix::io::Errno;
    let setting = Setting::new(MIB);
    let _export = setting.export();
    let raw = Raw::begin(&setting, "raw");
    let other = CallClient::builder().connect(&setting.join("other"), "store:data.calls").unwrap();
    let errno = |e: Errno| Err(e.raw_os_error());
    assert_eq!(raw.ask(1, MIB, 512, &[]), errno(Errno::INVAL), "beyond the end");
    assert_eq!(raw.ask(1, u64::MAX - 511, 512, &[]), errno(Errno::INVAL), "an overflow");
    assert_eq!(raw.ask(1, 0, 2 << 20, &[]), errno(Errno::BADMSG), "too long");
    assert_eq!(raw.ask(1, 0, 0, &[]), errno(Errno::BADMSG), "nothing");
    assert_eq!(raw.ask(1, 1, 512, &[]), errno(Errno::INVAL), "no whole block");
    assert_eq!(raw.ask(2, 0, 1024, &[7; 512]), errno(Errno::BADMSG), "fewer data than said");
    assert_eq!(raw.ask(2, MIB, 512, &[7; 512]), errno(Errno::INVAL), "a write beyond the end");
    assert_eq!(raw.ask(4, 0, (64 << 20) + 512, &[]), errno(Errno::BADMSG), "too many zeroes");
    assert_eq!(raw.ask(3, 0, 0, &[1]), errno(Errno::BADMSG), "a flush with data");
    // COLLAPSE_RANGE would move what lies behind, and no mode at all would make the file larger.
    for mode in [0, 1, 8, 32, 1 << 31] {
        assert_eq!(raw.ask_of(raw.session, 5, (0, 4096), mode, &[]), errno(Errno::INVAL), "mode {mode}");
    }
    assert_eq!(raw.ask_of(raw.session + 1, 1, (0, 512), 0, &[]), errno(Errno::NOTCONN), "no session");
    // Another domain names the session that is there.
    let mut fields = [0; 32];
    fields[..8].copy_from_slice(&raw.session.to_le_bytes());
    fields[16..24].copy_from_slice(&512_u64.to_le_bytes());
    let stolen = other.call(Method::numbered(1), &fields);
    assert!(matches!(stolen, Err(CallError::Application { code, .. }) if code == Errno::NOTCONN.raw_os_error() as u32));
    assert_eq!(std::fs::metadata(setting.image()).unwrap().len(), MIB);
    assert!(content(&setting.image(), 0, MIB as usize).iter().all(|byte| *byte == 0));
    // The export still serves.
    assert_eq!(raw.ask(2, 0, 512, &[7; 512]), Ok(Vec::new()));
    assert_eq!(raw.ask(1, 0, 512, &[]), Ok(vec![7; 512]));
}

#[test]
fn session_ends_with_its_stream() {
    let setting = Setting::new(MIB);
    let _export = setting.export();
    let Raw { calls, session, _stream: stream, _domain } = Raw::begin(&setting, "raw");
    drop(stream);
    // The next user's session begins only after the end of this one.
    let _next = Raw::begin(&setting, "next");
    let mut fields = [0; 32];
    fields[..8].copy_from_slice(&session.to_le_bytes());
    fields[16..24].copy_from_slice(&512_u64.to_le_bytes());
    let late = calls.call(Method::numbered(1), &fields);
    let code = rustix::io::Errno::NOTCONN.raw_os_error() as u32;
    assert!(matches!(late, Err(CallError::Application { code: said, .. }) if said == code), "{late:?}");
}

#[test]
fn other_version_and_other_greeting_get_no_session() {
    let setting = Setting::new(MIB);
    let _export = setting.export();
    for (greeting, errno) in
        [([2, 0, 0, 0, 0, 0, 0, 0], Some(rustix::io::Errno::PROTONOSUPPORT.raw_os_error())), (*b"GET / HT", None)]
    {
        let mut stream = setting.join("raw").connect("store:data").unwrap();
        stream.write_all(&greeting).unwrap();
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        assert_eq!(answer.first_chunk().map(|code| i32::from_le_bytes(*code)), errno);
    }
}

/// An exporter in this process, whose machine can start again and lose what was not flushed.
struct Forgetful {
    disk: Arc<Mutex<ForgetfulDisk>>,
    _sessions: PlayedSessions,
    _calls: CallServer,
    _domain: Domain,
}

struct ForgetfulDisk {
    boot: u8,
    stored: Vec<u8>,
    cached: Vec<u8>,
    flushes: u32,
    /// The session that is not over.
    session: u64,
    /// Writes that are to be refused for lack of memory.
    refusals: u32,
    /// The longest read for which there is memory.
    most_read: usize,
    /// Reads that were too long.
    refused_reads: u32,
    /// How long it takes to begin a session.
    greeting: Duration,
    /// It refuses all requests, as if their session had ended.
    is_mute: bool,
    /// Its flushes fail.
    loses: bool,
    /// Writes at this offset fail.
    broken: Option<usize>,
}

impl Forgetful {
    fn start(setting: &Setting) -> Self {
        let domain = setting.join("store");
        let empty = vec![0; 4 << 20];
        let (stored, most_read) = (empty.clone(), usize::MAX);
        let (cached, flushes, session) = (empty, 0, 0);
        let (refusals, refused_reads, greeting, is_mute, loses) = (0, 0, Duration::ZERO, false, false);
        let disk = ForgetfulDisk {
            boot: 1,
            stored,
            cached,
            flushes,
            session,
            refusals,
            most_read,
            refused_reads,
            greeting,
            is_mute,
            loses,
            broken: None,
        };
        let disk = Arc::new(Mutex::new(disk));
        let mut calls = CallServer::builder();
        for number in 1..=3_u32 {
            let disk = Arc::clone(&disk);
            calls = calls.numbered(Method::numbered(number), move |call| {
                let mut disk = disk.lock().unwrap();
                let args = call.args().to_vec();
                let (data, at, length) = request_of(&args, disk.session)?;
                if disk.is_mute {
                    return Err(refusal(rustix::io::Errno::NOTCONN));
                }
                if number == 2 && disk.broken == Some(at) {
                    return Err(refusal(rustix::io::Errno::IO));
                }
                if number == 2 && disk.refusals > 0 {
                    disk.refusals -= 1;
                    return Err(refusal(rustix::io::Errno::NOMEM));
                }
                match number {
                    1 if length > disk.most_read => {
                        disk.refused_reads += 1;
                        return Err(refusal(rustix::io::Errno::NOMEM));
                    }
                    1 => return Ok(disk.cached[at..at + length].to_vec().into()),
                    2 => disk.cached[at..at + data.len()].copy_from_slice(data),
                    _ if disk.loses => return Err(refusal(rustix::io::Errno::IO)),
                    _ => {
                        disk.flushes += 1;
                        disk.stored = disk.cached.clone();
                    }
                }
                Ok(().into())
            });
        }
        let calls = calls.bind(&domain, "data.calls").unwrap();
        let shared = Arc::clone(&disk);
        let sessions = PlayedSessions::begin(&domain, move || {
            let greeting = shared.lock().unwrap().greeting;
            std::thread::sleep(greeting);
            let mut disk = shared.lock().unwrap();
            disk.session += 1;
            Some(PlayedWelcome { session: disk.session, capacity: disk.cached.len() as u64, boot: disk.boot })
        });
        Self { disk, _sessions: sessions, _calls: calls, _domain: domain }
    }

    /// The machine loses its power: sessions end, and what was not flushed is gone.
    fn restart(&self) {
        let mut disk = self.disk.lock().unwrap();
        disk.boot += 1;
        disk.session += 1;
        disk.cached = disk.stored.clone();
    }

    /// The exporter's process alone ends and starts.
    fn reconnect(&self) {
        self.disk.lock().unwrap().session += 1;
    }
}

#[test]
fn changes_that_an_exporter_lost_are_repeated() {
    let setting = Setting::new(MIB);
    let exporter = Forgetful::start(&setting);
    let disk = setting.import("user", LONG).unwrap();
    let mut driver = disk.driver();
    assert_eq!(driver.run(OUT, 0, &noise(1, 4096), 0).unwrap().0, OK);
    assert_eq!(driver.run(FLUSH, 0, &[], 0).unwrap().0, OK);
    // The same sectors twice: the order of the changes counts.
    for n in 2..5 {
        assert_eq!(driver.run(OUT, 4, &noise(n, 4096), 0).unwrap().0, OK);
    }
    exporter.restart();
    assert!(driver.run(IN, 4, &[], 4096).unwrap() == (OK, noise(4, 4096)), "lost writes are not repeated");
    assert!(driver.run(IN, 0, &[], 2048).unwrap() == (OK, noise(1, 4096)[..2048].to_vec()));
    assert!(exporter.disk.lock().unwrap().stored[2048..2048 + 4096] == noise(4, 4096), "they are durable now");
    // Changes that were flushed are not repeated over newer ones.
    exporter.disk.lock().unwrap().stored[..512].fill(9);
    exporter.restart();
    assert!(driver.run(IN, 0, &[], 512).unwrap() == (OK, vec![9; 512]));
    drop((driver, disk));
}

/// The exporter's machine has started again, and one of the writes that it has lost cannot be done any more.
#[test]
fn change_that_cannot_be_repeated_fails_later_flushes_alone() {
    let setting = Setting::new(MIB);
    let exporter = Forgetful::start(&setting);
    let disk = setting.import("user", LONG).unwrap();
    let mut driver = disk.driver();
    for n in 0..3 {
        assert_eq!(driver.run(OUT, 8 * n, &noise(n, 4096), 0).unwrap().0, OK);
    }
    exporter.disk.lock().unwrap().broken = Some(4096);
    exporter.restart();
    for n in [0, 2] {
        assert!(driver.run(IN, 8 * n, &[], 4096).unwrap() == (OK, noise(n, 4096)), "the write {n} is not repeated");
    }
    assert_eq!(driver.run(OUT, 8, &noise(1, 4096), 0).unwrap().0, IOERR);
    exporter.disk.lock().unwrap().broken = None;
    for _ in 0..2 {
        assert_eq!(driver.run(FLUSH, 0, &[], 0).unwrap().0, IOERR, "an acknowledged write is lost");
        assert_eq!(driver.run(OUT, 0, &noise(3, 4096), 0).unwrap().0, OK);
    }
    drop((driver, disk));
}

/// The broker has no such group.
#[test]
fn back_end_refused_in_a_group_serves_by_copies() {
    let setting = Setting::new(MIB);
    let _export = setting.export();
    let socket = setting.folder.path().join("socket");
    let _back_end = BlkProcess::start(&setting, "serving", |command| {
        command.args(["serve", "--from", "store:data", "--domain", "user", "--group", "pool", "--machine", "a"]);
        command.arg("--socket").arg(&socket);
    });
    let mut driver = DiskDriver::connect(&socket, DiskDriverOptions::default()).unwrap();
    assert_eq!(driver.run(OUT, 0, &noise(1, 4096), 0).unwrap().0, OK);
    assert!(content(&setting.image(), 0, 4096) == noise(1, 4096));
}

#[test]
fn more_changes_than_a_heap_has_room_for_are_flushed() {
    let setting = Setting::new(MIB);
    let exporter = Forgetful::start(&setting);
    let disk = setting.import("user", LONG).unwrap();
    let mut driver = disk.driver();
    for n in 0..60_u64 {
        assert_eq!(driver.run(OUT, n % 4 * 2048, &noise(n, 1 << 20), 0).unwrap().0, OK, "write {n}");
        if n == 20 {
            // What is kept in heaps of ended connections is flushed with the next session.
            exporter.reconnect();
        }
    }
    let flushes = exporter.disk.lock().unwrap().flushes;
    assert!((2..20).contains(&flushes), "{flushes} flushes");
    exporter.restart();
    for n in 56..60_u64 {
        assert!(driver.run(IN, n % 4 * 2048, &[], 1 << 20).unwrap() == (OK, noise(n, 1 << 20)), "write {n}");
    }
    drop((driver, disk));
}

/// The back end keeps what is not flushed. An exporter cannot make it keep more and more by a lack of memory between writes.
#[test]
fn connection_that_ends_for_lack_of_memory_is_flushed_first() {
    let setting = Setting::new(MIB);
    let exporter = Forgetful::start(&setting);
    let disk = setting.import("user", LONG).unwrap();
    let mut driver = disk.driver();
    assert_eq!(driver.run(OUT, 0, &noise(1, 4096), 0).unwrap().0, OK);
    exporter.disk.lock().unwrap().refusals = 1;
    assert_eq!(driver.run(OUT, 8, &noise(2, 4096), 0).unwrap().0, OK);
    let disk_now = exporter.disk.lock().unwrap();
    assert_eq!((disk_now.refusals, disk_now.flushes), (0, 1));
    assert!(disk_now.stored[..4096] == noise(1, 4096));
    drop(disk_now);
    drop((driver, disk));
}

/// The back end keeps what no flush has made durable. The disk goes on in later sessions, until that is too much.
#[test]
fn exporter_whose_flushes_fail_is_used_until_too_much_is_kept() {
    let setting = Setting::new(MIB);
    let exporter = Forgetful::start(&setting);
    exporter.disk.lock().unwrap().loses = true;
    let disk = setting.import("user", LONG).unwrap();
    let mut driver = disk.driver();
    let mut kept = 0;
    let mut write = |driver: &mut DiskDriver| {
        // The heaps of one session have room for two of these writes, whichever connections take them.
        if kept % 2 == 0 {
            exporter.reconnect();
        }
        let (status, _) = driver.run(OUT, kept % 4 * 2048, &noise(kept, 1 << 20), 0).unwrap();
        kept += u64::from(status == OK);
        (status, kept)
    };
    let last = (0..200).map(|_| write(&mut driver)).find(|(status, _)| *status != OK);
    let (status, kept) = last.expect("more than 200 MiB are kept");
    assert!(status == IOERR && kept >= 32, "{kept} MiB are kept");
    assert_eq!(driver.run(FLUSH, 0, &[], 0).unwrap().0, IOERR);
    let at = (kept - 1) % 4 * 2048;
    assert!(driver.run(IN, at, &[], 1 << 20).unwrap() == (OK, noise(kept - 1, 1 << 20)));
    exporter.disk.lock().unwrap().loses = false;
    assert_eq!(driver.run(FLUSH, 0, &[], 0).unwrap().0, OK);
    assert_eq!(write(&mut driver).0, OK);
    drop((driver, disk));
}

/// Another disk of the exporter's machine can have taken most of the window in which the exporter's answers lie.
#[test]
fn reads_are_divided_if_the_exporter_has_little_memory() {
    let setting = Setting::new(MIB);
    let exporter = Forgetful::start(&setting);
    exporter.disk.lock().unwrap().cached = noise(1, 4 << 20);
    exporter.disk.lock().unwrap().most_read = 64 << 10;
    let disk = setting.import("user", LONG).unwrap();
    let mut driver = disk.driver();
    let begun = Instant::now();
    for sector in (0..4096).step_by(200) {
        let read = driver.run(IN, sector, &[], 2 << 20).unwrap();
        let at = sector as usize * 512;
        assert!(read == (OK, noise(1, 4 << 20)[at..at + (2 << 20)].to_vec()), "sector {sector}");
    }
    assert_eq!(disk.report().counters.failed, 0);
    // Each connection tries long reads again after 5 s.
    let tries = 1 + u32::try_from(begun.elapsed().as_secs()).unwrap() / 5;
    let refused = exporter.disk.lock().unwrap().refused_reads;
    assert!(refused <= tries * 12, "{refused} reads were too long in {tries} tries");
    drop((driver, disk));
}

/// An exporter that answers reads with bytes of another number.
#[test]
fn answer_of_a_lying_exporter_is_an_error() {
    let setting = Setting::new(MIB);
    let domain = setting.join("store");
    let _calls = CallServer::builder()
        .numbered(Method::numbered(1), |call| {
            let fields: [u8; 32] = call.args().array(0)?;
            let length = u64::from_le_bytes(*fields[16..].first_chunk().unwrap());
            Ok(vec![7; if length == 512 { 512 } else { 100 }].into())
        })
        .bind(&domain, "data.calls")
        .unwrap();
    let mut begun = 0;
    let _sessions = PlayedSessions::begin(&domain, move || {
        begun += 1;
        assert!(begun < 4);
        Some(PlayedWelcome { session: 1, capacity: MIB, boot: 0 })
    });
    let disk = setting.import("user", LONG).unwrap();
    let mut driver = disk.driver();
    assert_eq!(driver.run(IN, 0, &[], 4096).unwrap().0, IOERR, "a short answer");
    assert!(driver.run(IN, 0, &[], 512).unwrap() == (OK, vec![7; 512]));
    assert_eq!(driver.run(OUT, 0, &noise(1, 512), 0).unwrap().0, IOERR, "an exporter that does not write");
    drop((driver, disk));
}

/// A back end in the background, which ends with the test.
struct Background<'a>(&'a Path);

impl Drop for Background<'_> {
    fn drop(&mut self) {
        let _ = background::stop(self.0);
    }
}

#[test]
fn unused_back_end_of_another_user_gives_way_to_a_new_one() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: only root gives sockets to other users");
        return;
    }
    let setting = Setting::new(MIB);
    let _export = setting.export();
    let socket = setting.folder.path().join("data.sock");
    let (program, broker) =
        (Path::new(env!("CARGO_BIN_EXE_partywall-blk")), setting.broker.path().display().to_string());
    let start = |user: u32| {
        let owner = user.to_string();
        let words = ["serve", "--from", "store:data", "--broker", &broker, "--owner", &owner];
        background::start(program, &words, &socket, user)
    };
    let _ended = Background(&socket);
    let owner = || socket.metadata().unwrap().uid();
    start(7).unwrap();
    let made = || socket.metadata().unwrap().modified().unwrap();
    let first = made();
    // That the folder is closed to the user does not make it another user's.
    start(7).unwrap();
    assert_eq!((made(), owner()), (first, 7), "the same one");
    let used =
        || serde_json::from_value::<DiskUse>(control::ask(&socket, &DiskControl::StopIfUnused).unwrap()).unwrap();
    assert_eq!(used(), DiskUse::Recent, "a machine is about to connect");
    let driver = DiskDriver::connect(&socket, DiskDriverOptions::default()).unwrap();
    let refused = start(8).unwrap_err().to_string();
    assert!(refused.contains("a machine of another user has this disk") && owner() == 7, "{refused}");
    drop(driver);
    // The user may open the socket to others. It stays his.
    std::fs::set_permissions(&socket, std::os::unix::fs::PermissionsExt::from_mode(0o666)).unwrap();
    start(8).unwrap();
    assert_eq!(owner(), 8);
    assert!(control::ask(&socket, &DiskControl::Show).is_ok());
    background::stop(&socket).unwrap();
    assert!(!socket.exists() && !control::path(&socket).exists());
}
