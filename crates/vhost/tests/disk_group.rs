//! A disk whose user and exporter are members of a group: what is written lies in the group. One test, since a process takes part in a group once.
#![cfg(not(miri))]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod disk_common;

use disk_common::exported::{
    BlkProcess, Imported, PlayedSessions, PlayedWelcome, Setting, begin_session, refusal, request_of,
};
use disk_common::random::noise;
use disk_common::{FLUSH, HANG, IOERR, MIB, OK, OUT, WRITE_ZEROES, offer_at, range};
use partywall::Domain;
use partywall::Group;
use partywall::rpc::{CallClient, CallError, CallServer, Method};
use partywall_vhost::disk::exported::{DiskExport, DiskExportOptions};
use rustix::io::Errno;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

const LONG: Duration = Duration::from_secs(60);
const POLICY: &str = "[[group]]\nname = 'pool'\ndomains = ['store', 'user']\nroom = '32M'\n";

/// Starts an exporter of the disk that takes part in the group.
fn start_exporter(setting: &Setting) -> BlkProcess {
    BlkProcess::start(setting, "exporting", |command| {
        command.args(["export", "data"]).arg(setting.image()).args(["--domain", "store", "--group", "pool"]);
    })
}

/// A back end of `user`, which takes part in the group.
fn import(setting: &Setting, group: &Group, grace: Duration) -> Imported {
    let imported = setting.import_with("user", |options| {
        (options.group, options.grace) = (Some(group.clone()), grace);
    });
    imported.unwrap()
}

#[test]
fn data_in_a_group_is_written_once_and_for_members_only() {
    let setting = Setting::with_policy(POLICY, 8 * MIB);
    let user = setting.join("user");
    let group = Group::join(&user, "pool").unwrap();
    drop(user);
    writes_lie_in_the_group_until_they_are_durable(&setting, &group);
    exporter_without_the_group_gets_data_by_copies(&setting, &group);
    buffers_are_kept_for_repeats_and_for_exporters_that_may_still_read(&setting, &group);
    log_without_a_flush_is_flushed(&setting, &group);
    write_from_unknown_address_waits_for_the_broker(&setting, &group);
    drop(group);
    write_larger_than_the_room_goes_in_parts(&setting);
    strangers_and_lies_are_refused(&setting);
}

fn writes_lie_in_the_group_until_they_are_durable(setting: &Setting, group: &Group) {
    let exporter = start_exporter(setting);
    let free = group.free();
    let disk = import(setting, group, LONG);
    let mut driver = disk.driver();
    let bytes = noise(1, 3 << 20);
    assert_eq!(driver.run(OUT, 8, &bytes, 0).unwrap().0, OK);
    assert_eq!(group.free(), free - (3 << 20), "what is not durable is kept where it was written from");
    assert!(std::fs::read(setting.image()).unwrap()[4096..][..bytes.len()] == bytes);
    let counters = disk.report().counters;
    assert_eq!([counters.written_bytes, counters.copied_written_bytes, counters.passed_bytes], [3 << 20, 3 << 20, 0]);
    assert_eq!(driver.run(FLUSH, 0, &[], 0).unwrap().0, OK);
    assert_eq!(group.free(), free);
    // More than the group has room for, so the back end flushes by itself.
    for n in 0..8_u64 {
        assert_eq!(driver.run(OUT, 0, &noise(n, 2 << 20), 0).unwrap().0, OK);
    }
    // An exporter is killed, and the next one is of the group as well.
    drop(exporter);
    let _exporter = start_exporter(setting);
    assert_eq!(driver.run(OUT, 0, &noise(9, 2 << 20), 0).unwrap().0, OK);
    assert!(std::fs::read(setting.image()).unwrap()[..2 << 20] == noise(9, 2 << 20));
    assert_eq!(driver.run(FLUSH, 0, &[], 0).unwrap().0, OK);
    assert_eq!(group.free(), free, "nothing is left of requests without an answer");
}

fn exporter_without_the_group_gets_data_by_copies(setting: &Setting, group: &Group) {
    let _export = setting.export();
    let disk = import(setting, group, LONG);
    let mut driver = disk.driver();
    assert_eq!(driver.run(OUT, 0, &noise(3, 4096), 0).unwrap().0, OK);
    assert_eq!(disk.report().counters.copied_written_bytes, 2 * 4096, "into the group, and then for the exporter");
    assert_eq!(driver.run(OUT, 8, &noise(4, 4096), 0).unwrap().0, OK);
    assert_eq!(disk.report().counters.copied_written_bytes, 3 * 4096, "the group is not tried again");
    assert!(std::fs::read(setting.image()).unwrap()[..8192] == [noise(3, 4096), noise(4, 4096)].concat());
}

/// An exporter in this process that only notes what it is to write. It reads nothing, since a process takes part in a group once.
struct Recorder {
    state: Arc<Mutex<Recorded>>,
    _sessions: PlayedSessions,
    _calls: CallServer,
    _domain: Domain,
}

#[derive(Default)]
struct Recorded {
    boot: u8,
    session: u64,
    /// It answers nothing, and begins no session.
    is_silent: bool,
    /// Its answer to writes.
    failure: Option<Errno>,
    /// The arguments of writes, without their fields.
    parts: Vec<Vec<u8>>,
    syncs: usize,
}

impl Recorder {
    fn start(setting: &Setting) -> Self {
        let domain = setting.join("store");
        let state = Arc::new(Mutex::new(Recorded::default()));
        let mut calls = CallServer::builder();
        for number in [3, 4, 7_u32] {
            let state = Arc::clone(&state);
            calls = calls.numbered(Method::numbered(number), move |call| {
                while state.lock().unwrap().is_silent {
                    std::thread::sleep(Duration::from_millis(1));
                }
                let mut state = state.lock().unwrap();
                let args = call.args().to_vec();
                let (parts, ..) = request_of(&args, state.session)?;
                match number {
                    3 => state.syncs += 1,
                    7 => {
                        state.parts.push(parts.to_vec());
                        if let Some(failure) = state.failure {
                            return Err(refusal(failure));
                        }
                    }
                    _ => {}
                }
                Ok(().into())
            });
        }
        let calls = calls.bind(&domain, "data.calls").unwrap();
        let shared = Arc::clone(&state);
        let sessions = PlayedSessions::begin(&domain, move || {
            let mut state = shared.lock().unwrap();
            if state.is_silent {
                return None;
            }
            state.session += 1;
            Some(PlayedWelcome { session: state.session, capacity: MIB, boot: state.boot })
        });
        Self { state, _sessions: sessions, _calls: calls, _domain: domain }
    }

    fn state(&self) -> MutexGuard<'_, Recorded> {
        self.state.lock().unwrap()
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.state().is_silent = false;
    }
}

fn buffers_are_kept_for_repeats_and_for_exporters_that_may_still_read(setting: &Setting, group: &Group) {
    let exporter = Recorder::start(setting);
    let free = group.free();
    let disk = import(setting, group, LONG);
    let mut driver = disk.driver();
    assert_eq!(driver.run(OUT, 0, &noise(1, 4096), 0).unwrap().0, OK);
    {
        // Its machine starts again.
        let mut state = exporter.state();
        state.boot += 1;
        state.session += 1;
    }
    assert_eq!(driver.run(OUT, 8, &noise(2, 4096), 0).unwrap().0, OK);
    let parts = exporter.state().parts.clone();
    assert_eq!(parts.len(), 3);
    assert_eq!(parts[0], parts[1], "what was lost is named again, and not copied");
    assert_eq!(group.free(), free - 4096, "the repeated change is durable, the next one is not");

    exporter.state().failure = Some(Errno::IO);
    assert_eq!(driver.run(OUT, 16, &noise(3, 4096), 0).unwrap().0, IOERR);
    assert_eq!(group.free(), free - 2 * 4096, "a back end behind the exporter may have a part of it");
    exporter.state().failure = None;
    assert_eq!(driver.run(FLUSH, 0, &[], 0).unwrap().0, OK);
    assert_eq!(group.free(), free);
    drop((driver, disk));
    // The call's time-out is the grace as well.
    let disk = import(setting, group, Duration::from_secs(5));
    let mut driver = disk.driver();
    assert_eq!(driver.run(OUT, 8, &noise(2, 4096), 0).unwrap().0, OK);
    exporter.state().is_silent = true;
    assert_eq!(driver.run(OUT, 16, &noise(3, 4096), 0).unwrap().0, IOERR);
    assert_eq!(group.free(), free - 2 * 4096, "the exporter may still read the buffer");
    exporter.state().is_silent = false;
    assert_eq!(driver.run(OUT, 24, &noise(4, 4096), 0).unwrap().0, OK);
    assert_eq!(driver.run(FLUSH, 0, &[], 0).unwrap().0, OK);
    assert_eq!(group.free(), free, "the session in which it could have been read has ended");
}

fn log_without_a_flush_is_flushed(setting: &Setting, group: &Group) {
    let exporter = Recorder::start(setting);
    let disk = import(setting, group, LONG);
    let mut driver = disk.driver();
    for _ in 0..4097 {
        assert_eq!(driver.run(WRITE_ZEROES, 0, &range(0, 8, 0), 0).unwrap().0, OK);
    }
    assert_eq!(exporter.state().syncs, 1);
}

/// The broker answers no question about this machine, so the address may be in a window of it.
fn write_from_unknown_address_waits_for_the_broker(setting: &Setting, group: &Group) {
    let _exporter = Recorder::start(setting);
    let disk = setting.import_with("user", |options| {
        (options.group, options.machine) = (Some(group.clone()), Some("absent".into()));
    });
    let disk = disk.unwrap();
    let mut driver = disk.driver();
    let began = Instant::now();
    offer_at(&mut driver, OUT, 0x1_0000_0000, 0);
    assert_eq!(driver.wait(0, Duration::ZERO, HANG).unwrap().unwrap().status, IOERR);
    assert!(began.elapsed() >= Duration::from_secs(2), "it has not waited for an answer");
    assert_eq!(driver.run(OUT, 0, &noise(1, 4096), 0).unwrap().0, OK);
}

fn write_larger_than_the_room_goes_in_parts(setting: &Setting) {
    const ROOM: usize = 64 << 10;
    let user = setting.join("user");
    let group = Group::builder("pool").room(ROOM as u64).join(&user).unwrap();
    drop(user);
    let exporter = Recorder::start(setting);
    let disk = import(setting, &group, LONG);
    let mut driver = disk.driver();
    assert_eq!(driver.run(OUT, 0, &noise(1, 4 * ROOM), 0).unwrap().0, OK);
    let parts = exporter.state().parts.clone();
    let lengths = parts.iter().map(|part| u64::from_le_bytes(*part[16..].first_chunk().unwrap()) as usize);
    let lengths: Vec<usize> = lengths.collect();
    assert_eq!((lengths[0], lengths.iter().sum::<usize>()), (ROOM, 4 * ROOM), "{lengths:?}");
}

fn strangers_and_lies_are_refused(setting: &Setting) {
    let store = setting.join("store");
    let group = Group::join(&store, "pool").unwrap();
    let own = group.alloc(4096).unwrap().part();
    let group = Some(group);
    let (_store, _export) = setting.export_with(|options| options.group = group.clone());
    let path = setting.folder.path().join("direct");
    std::fs::File::create(&path).unwrap().set_len(MIB).unwrap();
    let options = DiskExportOptions { path: path.clone(), read_only: false, direct: true, discard: true, group };
    let _direct = DiskExport::bind(options, &store, "direct").unwrap();
    arguments_are_copied_before_direct_access(setting, &path);
    let before = std::fs::read(setting.image()).unwrap();
    for (name, of_member) in [("stranger", Errno::OPNOTSUPP), ("user", Errno::STALE)] {
        let domain = setting.join(name);
        let (_stream, session) = begin_session(&domain, "store:data");
        let calls = CallClient::builder().connect(&domain, "store:data.calls").unwrap();
        let ask = |parts: &[[u64; 3]], length: u64| {
            let words = parts.iter().flatten().copied().chain([session, 0, length, 0]);
            let bytes: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
            match calls.call(Method::numbered(7), &bytes) {
                Err(CallError::Application { code, .. }) => Errno::from_raw_os_error(code.cast_signed()),
                other => panic!("{other:?}"),
            }
        };
        let part = [own.owner, own.address, 4096];
        // A seat that nobody has, the exporter's own, and the pages in front of its buffers.
        assert_eq!(ask(&[[own.owner + 7, own.address, 4096]], 4096), of_member, "{name}");
        assert_eq!(ask(&[part], 4096), of_member, "{name}");
        assert_eq!(ask(&[[own.owner, own.address - 8192, 4096]], 4096), of_member, "{name}");
        let malformed = if name == "user" { Errno::BADMSG } else { Errno::OPNOTSUPP };
        assert_eq!(ask(&[part], 8192), malformed, "{name}: more than it names");
        assert_eq!(ask(&[[own.owner, own.address, 512]; 300], 300 * 512), malformed, "{name}: too many");
        assert_eq!(ask(&[], 4096), Errno::BADMSG, "{name}: nothing");
    }
    assert!(std::fs::read(setting.image()).unwrap() == before, "the disk has changed");
}

/// The kernel would refuse to write from the arguments themselves, which lie across the blocks of the disk's memory.
fn arguments_are_copied_before_direct_access(setting: &Setting, path: &std::path::Path) {
    let domain = setting.join("stranger");
    let (_stream, session) = begin_session(&domain, "store:direct");
    let calls = CallClient::builder().connect(&domain, "store:direct.calls").unwrap();
    let _before = calls.heap().allocate_aligned(1, 1).unwrap();
    for (seed, len) in [(5, 8192), (6, 256 << 10)] {
        let bytes = noise(seed, len);
        let fields = [session, 4096, len as u64, 0].map(u64::to_le_bytes).concat();
        let arguments = [bytes.clone(), fields].concat();
        let mut block = calls.heap().allocate_aligned(arguments.len(), 16).unwrap();
        assert!(len > 8192 || !(block.as_ptr() as usize).is_multiple_of(512), "the test writes aligned memory");
        block.copy_from_slice(&arguments);
        let before = read_by_this_process();
        calls.call(Method::numbered(2), &block).unwrap();
        let read = read_by_this_process() - before;
        assert!(read < 256 << 10, "{read} bytes were read for a write of whole blocks");
        assert!(std::fs::read(path).unwrap()[4096..][..len] == bytes);
    }
}

/// Bytes that system calls have read so far.
fn read_by_this_process() -> u64 {
    let io = std::fs::read_to_string("/proc/self/io").unwrap();
    io.lines().find_map(|line| line.strip_prefix("rchar: ")).unwrap().parse().unwrap()
}
