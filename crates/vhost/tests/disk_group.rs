//! A disk whose user and exporter are members of a group: what is written lies in the group. One test, since a process takes part in a group once.
#![cfg(not(miri))]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod disk_common;

use disk_common::random::noise;
use disk_common::{FLUSH, IOERR, MIB, OK, OUT, WRITE_ZEROES, range};
use partywall::rpc::{CallClient, CallError, CallServer, Method};
use partywall::{Domain, Group};
use partywall_daemon::{Broker, Config};
use partywall_vhost::disk::DiskOptions;
use partywall_vhost::disk::control::{DiskControl, DiskReport};
use partywall_vhost::disk::driver::{DiskDriver, DiskDriverOptions};
use partywall_vhost::disk::engine::DiskEngine;
use partywall_vhost::disk::exported::{DiskExport, DiskExportOptions, ImportOptions};
use rustix::io::Errno;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Duration;

const POLICY: &str = "[[group]]\nname = 'pool'\ndomains = ['store', 'user']\nroom = '32M'\n";

struct Setting {
    broker: Broker,
    folder: tempfile::TempDir,
}

/// `partywall-blk export`, killed with the test.
struct Exporter(Child);

impl Drop for Exporter {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Setting {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let policy = folder.path().join("policy.toml");
        std::fs::write(&policy, POLICY).unwrap();
        std::fs::File::create(folder.path().join("image")).unwrap().set_len(8 * MIB).unwrap();
        let broker = Broker::start(&Config::new(folder.path().join("broker.sock")).policy_file(policy)).unwrap();
        Self { broker, folder }
    }

    fn image(&self) -> PathBuf {
        self.folder.path().join("image")
    }

    fn join(&self, name: &str) -> Domain {
        Domain::builder().name(name).broker(self.broker.path()).join().unwrap()
    }

    fn start_exporter(&self) -> Exporter {
        let mut command = Command::new(env!("CARGO_BIN_EXE_partywall-blk"));
        command.args(["export", "data"]).arg(self.image()).args(["--domain", "store", "--group", "pool", "--broker"]);
        let command = command.arg(self.broker.path()).env("RUST_LOG", "warn").stdout(Stdio::piped());
        let mut exporter = Exporter(command.spawn().unwrap());
        let mut line = String::new();
        BufReader::new(exporter.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert!(line.starts_with("exporting"), "{line}");
        exporter
    }

    fn import(&self, group: &Group, with: impl FnOnce(&mut DiskDriver, &dyn Fn() -> DiskReport)) {
        self.import_within(Duration::from_secs(60), group, with);
    }

    /// A back end of `user`, for as long as `with` runs, which gets a driver and a way to ask for the counters.
    fn import_within(
        &self,
        grace: Duration,
        group: &Group,
        with: impl FnOnce(&mut DiskDriver, &dyn Fn() -> DiskReport),
    ) {
        let (group, domain, target) = (Some(group.clone()), self.join("user"), "store:data".into());
        let from = ImportOptions { domain, target, connections: 3, grace, group, machine: None };
        let socket = self.folder.path().join("socket");
        let (engine, handle) = DiskEngine::import(DiskOptions::new("store:data"), from, &socket, None).unwrap();
        let running = std::thread::spawn(|| engine.run());
        let options = DiskDriverOptions { buffer: 4 << 20, ..DiskDriverOptions::default() };
        let mut driver = DiskDriver::connect(&socket, options).unwrap();
        let report = || serde_json::from_value(handle.ask(DiskControl::Show).unwrap()).unwrap();
        with(&mut driver, &report);
        handle.ask(DiskControl::Stop).unwrap();
        running.join().unwrap().unwrap();
    }
}

#[test]
fn data_in_a_group_is_written_once_and_for_members_only() {
    let setting = Setting::new();
    let user = setting.join("user");
    let group = Group::join(&user, "pool").unwrap();
    drop(user);
    writes_lie_in_the_group_until_they_are_durable(&setting, &group);
    exporter_without_the_group_gets_data_by_copies(&setting, &group);
    buffers_are_kept_for_repeats_and_for_exporters_that_may_still_read(&setting, &group);
    log_without_a_flush_is_flushed(&setting, &group);
    drop(group);
    strangers_and_lies_are_refused(&setting);
}

fn writes_lie_in_the_group_until_they_are_durable(setting: &Setting, group: &Group) {
    let exporter = setting.start_exporter();
    let free = group.free();
    setting.import(group, |driver, report| {
        let bytes = noise(1, 3 << 20);
        assert_eq!(driver.run(OUT, 8, &bytes, 0).unwrap().0, OK);
        assert_eq!(group.free(), free - (3 << 20), "what is not durable is kept where it was written from");
        assert!(std::fs::read(setting.image()).unwrap()[4096..][..bytes.len()] == bytes);
        let counters = report().counters;
        assert_eq!(
            [counters.written_bytes, counters.copied_written_bytes, counters.passed_bytes],
            [3 << 20, 3 << 20, 0]
        );
        assert_eq!(driver.run(FLUSH, 0, &[], 0).unwrap().0, OK);
        assert_eq!(group.free(), free);
        // More than the group has room for, so the back end flushes by itself.
        for n in 0..8_u64 {
            assert_eq!(driver.run(OUT, 0, &noise(n, 2 << 20), 0).unwrap().0, OK);
        }
        // An exporter is killed, and the next one is of the group as well.
        drop(exporter);
        let exporter = setting.start_exporter();
        assert_eq!(driver.run(OUT, 0, &noise(9, 2 << 20), 0).unwrap().0, OK);
        assert!(std::fs::read(setting.image()).unwrap()[..2 << 20] == noise(9, 2 << 20));
        assert_eq!(driver.run(FLUSH, 0, &[], 0).unwrap().0, OK);
        assert_eq!(group.free(), free, "nothing is left of requests without an answer");
        drop(exporter);
    });
}

fn exporter_without_the_group_gets_data_by_copies(setting: &Setting, group: &Group) {
    let store = setting.join("store");
    let path = setting.image();
    let options = DiskExportOptions { path, read_only: false, direct: false, discard: true, group: None };
    let _export = DiskExport::bind(options, &store, "data").unwrap();
    setting.import(group, |driver, report| {
        assert_eq!(driver.run(OUT, 0, &noise(3, 4096), 0).unwrap().0, OK);
        assert_eq!(report().counters.copied_written_bytes, 2 * 4096, "into the group, and then for the exporter");
        assert_eq!(driver.run(OUT, 8, &noise(4, 4096), 0).unwrap().0, OK);
        assert_eq!(report().counters.copied_written_bytes, 3 * 4096, "the group is not tried again");
        assert!(std::fs::read(setting.image()).unwrap()[..8192] == [noise(3, 4096), noise(4, 4096)].concat());
    });
}

/// An exporter in this process that only notes what it is to write. It reads nothing, since a process takes part in a group once.
struct Recorder {
    state: Arc<Mutex<Recorded>>,
    stop: Arc<AtomicBool>,
    serving: Option<JoinHandle<()>>,
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
                let (parts, fields) = args.split_at(args.len() - 32);
                if fields[..8] != state.session.to_le_bytes() {
                    return Err(CallError::application(Errno::NOTCONN.raw_os_error() as u32, ""));
                }
                match number {
                    3 => state.syncs += 1,
                    7 => {
                        state.parts.push(parts.to_vec());
                        if let Some(failure) = state.failure {
                            return Err(CallError::application(failure.raw_os_error() as u32, ""));
                        }
                    }
                    _ => {}
                }
                Ok(().into())
            });
        }
        let calls = calls.bind(&domain, "data.calls").unwrap();
        let mut listener = domain.bind("data").unwrap();
        listener.set_nonblocking(true);
        let stop = Arc::new(AtomicBool::new(false));
        let (stopped, shared) = (Arc::clone(&stop), Arc::clone(&state));
        let serving = std::thread::spawn(move || {
            let mut streams = Vec::new();
            while !stopped.load(Ordering::Relaxed) {
                let Ok((mut stream, _)) = listener.accept() else {
                    std::thread::sleep(Duration::from_millis(1));
                    continue;
                };
                let mut state = shared.lock().unwrap();
                if state.is_silent {
                    continue;
                }
                state.session += 1;
                let mut welcome = [0; 48];
                welcome[8..16].copy_from_slice(&state.session.to_le_bytes());
                welcome[16..24].copy_from_slice(&MIB.to_le_bytes());
                welcome[24..28].copy_from_slice(&512_u32.to_le_bytes());
                welcome[32] = state.boot;
                let _ = stream.write_all(&welcome);
                streams.push(stream);
            }
        });
        Self { state, stop, serving: Some(serving), _calls: calls, _domain: domain }
    }

    fn state(&self) -> MutexGuard<'_, Recorded> {
        self.state.lock().unwrap()
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.state().is_silent = false;
        self.stop.store(true, Ordering::Relaxed);
        let _ = self.serving.take().map(JoinHandle::join);
    }
}

fn buffers_are_kept_for_repeats_and_for_exporters_that_may_still_read(setting: &Setting, group: &Group) {
    let exporter = Recorder::start(setting);
    let free = group.free();
    setting.import_within(Duration::from_secs(5), group, |driver, _| {
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
    });
    // The call's time-out is the grace as well.
    setting.import_within(Duration::from_secs(2), group, |driver, _| {
        assert_eq!(driver.run(OUT, 8, &noise(2, 4096), 0).unwrap().0, OK);
        exporter.state().is_silent = true;
        assert_eq!(driver.run(OUT, 16, &noise(3, 4096), 0).unwrap().0, IOERR);
        assert_eq!(group.free(), free - 2 * 4096, "the exporter may still read the buffer");
        exporter.state().is_silent = false;
        assert_eq!(driver.run(OUT, 24, &noise(4, 4096), 0).unwrap().0, OK);
        assert_eq!(driver.run(FLUSH, 0, &[], 0).unwrap().0, OK);
        assert_eq!(group.free(), free, "the session in which it could have been read has ended");
    });
    drop(exporter);
}

fn log_without_a_flush_is_flushed(setting: &Setting, group: &Group) {
    let exporter = Recorder::start(setting);
    setting.import(group, |driver, _| {
        for _ in 0..4097 {
            assert_eq!(driver.run(WRITE_ZEROES, 0, &range(0, 8, 0), 0).unwrap().0, OK);
        }
        assert_eq!(exporter.state().syncs, 1);
    });
    drop(exporter);
}

fn strangers_and_lies_are_refused(setting: &Setting) {
    let store = setting.join("store");
    let group = Group::join(&store, "pool").unwrap();
    let own = group.alloc(4096).unwrap().part();
    let path = setting.image();
    let group = Some(group);
    let options = DiskExportOptions { path, read_only: false, direct: false, discard: true, group: group.clone() };
    let _export = DiskExport::bind(options, &store, "data").unwrap();
    let path = setting.folder.path().join("direct");
    std::fs::File::create(&path).unwrap().set_len(MIB).unwrap();
    let options = DiskExportOptions { path: path.clone(), read_only: false, direct: true, discard: true, group };
    let _direct = DiskExport::bind(options, &store, "direct").unwrap();
    arguments_are_copied_before_direct_access(setting, &path);
    let before = std::fs::read(setting.image()).unwrap();
    for (name, of_member) in [("stranger", Errno::OPNOTSUPP), ("user", Errno::STALE)] {
        let domain = setting.join(name);
        let mut stream = domain.connect("store:data").unwrap();
        stream.write_all(&[1, 0, 0, 0, 0, 0, 0, 0]).unwrap();
        let mut welcome = [0; 48];
        stream.read_exact(&mut welcome).unwrap();
        let session = u64::from_le_bytes(*welcome[8..].first_chunk().unwrap());
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
    let mut stream = domain.connect("store:direct").unwrap();
    stream.write_all(&[1, 0, 0, 0, 0, 0, 0, 0]).unwrap();
    let mut welcome = [0; 48];
    stream.read_exact(&mut welcome).unwrap();
    let session = &welcome[8..16];
    let calls = CallClient::builder().connect(&domain, "store:direct.calls").unwrap();
    let _before = calls.heap().allocate_aligned(1, 1).unwrap();
    let bytes = noise(5, 8192);
    let fields = [4096_u64, 8192, 0].map(u64::to_le_bytes).concat();
    let arguments = [&bytes, session, &fields].concat();
    let mut block = calls.heap().allocate_aligned(arguments.len(), 16).unwrap();
    assert_ne!(block.as_ptr() as usize % 512, 0, "the test writes aligned memory");
    block.copy_from_slice(&arguments);
    calls.call(Method::numbered(2), &block).unwrap();
    assert!(std::fs::read(path).unwrap()[4096..][..8192] == bytes);
}
