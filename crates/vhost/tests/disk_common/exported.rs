//! A broker, and the exporter of a disk and its user.

use partywall::rpc::CallError;
use partywall::{Domain, Stream};
use partywall_daemon::{Broker, Config};
use partywall_vhost::VhostError;
use partywall_vhost::disk::DiskOptions;
use partywall_vhost::disk::control::{DiskControl, DiskHandle, DiskReport};
use partywall_vhost::disk::driver::{DiskDriver, DiskDriverOptions};
use partywall_vhost::disk::engine::DiskEngine;
use partywall_vhost::disk::exported::{DiskExport, DiskExportOptions, ImportOptions};
use rustix::io::Errno;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// A broker, and a file to export.
pub(crate) struct Setting {
    pub(crate) broker: Broker,
    pub(crate) folder: tempfile::TempDir,
}

impl Setting {
    pub(crate) fn new(size: u64) -> Self {
        Self::of(Broker::embedded().unwrap(), tempfile::tempdir().unwrap(), size)
    }

    /// The broker has this policy.
    pub(crate) fn with_policy(policy: &str, size: u64) -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("policy.toml"), policy).unwrap();
        // The broker has a socket for containers in this folder.
        std::fs::create_dir(folder.path().join("containers")).unwrap();
        let broker = start_broker(&folder);
        Self::of(broker, folder, size)
    }

    /// Ends the broker of a setting with a policy, and starts the next one at its place.
    pub(crate) fn restart_broker(&mut self) {
        drop(std::mem::replace(&mut self.broker, Broker::embedded().unwrap()));
        self.broker = start_broker(&self.folder);
    }

    fn of(broker: Broker, folder: tempfile::TempDir, size: u64) -> Self {
        let setting = Self { broker, folder };
        std::fs::File::create(setting.image()).unwrap().set_len(size).unwrap();
        setting
    }

    pub(crate) fn image(&self) -> PathBuf {
        self.folder.path().join("image")
    }

    pub(crate) fn join(&self, name: &str) -> Domain {
        Domain::builder().name(name).broker(self.broker.path()).join().unwrap()
    }

    pub(crate) fn export(&self) -> (Domain, DiskExport) {
        self.export_with(|_| ())
    }

    pub(crate) fn export_with(&self, change: impl FnOnce(&mut DiskExportOptions)) -> (Domain, DiskExport) {
        let domain = self.join("store");
        let mut options =
            DiskExportOptions { path: self.image(), read_only: false, direct: false, discard: true, group: None };
        change(&mut options);
        let export = DiskExport::bind(options, &domain, "data").unwrap();
        (domain, export)
    }

    pub(crate) fn import(&self, name: &str, grace: Duration) -> Result<Imported, VhostError> {
        self.import_with(name, |options| options.grace = grace)
    }

    pub(crate) fn import_with(
        &self,
        name: &str,
        change: impl FnOnce(&mut ImportOptions),
    ) -> Result<Imported, VhostError> {
        let mut from = ImportOptions {
            domain: self.join(name),
            target: "store:data".into(),
            connections: 3,
            grace: Duration::from_secs(60),
            group: None,
            machine: None,
        };
        change(&mut from);
        let socket = self.folder.path().join(name);
        let (engine, handle) = DiskEngine::import(DiskOptions::new("store:data"), from, &socket, None)?;
        Ok(Imported { handle, socket, engine: Some(std::thread::spawn(|| engine.run())) })
    }
}

fn start_broker(folder: &tempfile::TempDir) -> Broker {
    let folder = folder.path();
    Broker::start(&Config::new(folder.join("broker.sock")).policy_file(folder.join("policy.toml"))).unwrap()
}

/// A back end that ends with the test.
pub(crate) struct Imported {
    pub(crate) handle: DiskHandle,
    socket: PathBuf,
    engine: Option<JoinHandle<Result<(), VhostError>>>,
}

impl Imported {
    pub(crate) fn driver(&self) -> DiskDriver {
        let options = DiskDriverOptions { buffer: 4 << 20, ..DiskDriverOptions::default() };
        DiskDriver::connect(&self.socket, options).unwrap()
    }

    pub(crate) fn report(&self) -> DiskReport {
        serde_json::from_value(self.handle.ask(DiskControl::Show).unwrap()).unwrap()
    }
}

impl Drop for Imported {
    fn drop(&mut self) {
        let _ = self.handle.ask(DiskControl::Stop);
        let end = self.engine.take().map(JoinHandle::join);
        if !std::thread::panicking() {
            end.unwrap().unwrap().unwrap();
        }
    }
}

/// `partywall-blk`, killed with the test.
pub(crate) struct BlkProcess(Child);

impl BlkProcess {
    /// Starts it with these arguments, and waits for its first line, which begins with `ready`.
    pub(crate) fn start(setting: &Setting, ready: &str, with: impl FnOnce(&mut Command)) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_partywall-blk"));
        with(&mut command);
        command.arg("--broker").arg(setting.broker.path()).env("RUST_LOG", "warn").stdout(Stdio::piped());
        let mut process = Self(command.spawn().unwrap());
        let mut line = String::new();
        BufReader::new(process.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert!(line.starts_with(ready), "{line}");
        process
    }
}

impl Drop for BlkProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Begins a session as a user of the disk `target`. Returns the number of the session, which ends with the stream.
pub(crate) fn begin_session(domain: &Domain, target: &str) -> (Stream, u64) {
    let mut stream = domain.connect(target).unwrap();
    stream.write_all(&[1, 0, 0, 0, 0, 0, 0, 0]).unwrap();
    let mut welcome = [0; 48];
    stream.read_exact(&mut welcome).unwrap();
    assert_eq!(welcome[..4], [0; 4], "no session");
    (stream, u64::from_le_bytes(*welcome[8..].first_chunk().unwrap()))
}

/// The sessions of an exporter that a test plays. It begins no more of them when this is dropped.
pub(crate) struct PlayedSessions {
    stop: Arc<AtomicBool>,
    serving: Option<JoinHandle<()>>,
}

/// What a played exporter answers to a user.
pub(crate) struct PlayedWelcome {
    pub(crate) session: u64,
    pub(crate) capacity: u64,
    /// Which start of the exporter's machine this is.
    pub(crate) boot: u8,
}

impl PlayedSessions {
    /// Begins sessions of the disk `data` with what `welcome` returns. A user for which it returns nothing is sent away.
    pub(crate) fn begin(domain: &Domain, mut welcome: impl FnMut() -> Option<PlayedWelcome> + Send + 'static) -> Self {
        let mut listener = domain.bind("data").unwrap();
        listener.set_nonblocking(true);
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let serving = std::thread::spawn(move || {
            let mut streams = Vec::new();
            while !stopped.load(Ordering::Relaxed) {
                let Ok((mut stream, _)) = listener.accept() else {
                    std::thread::sleep(Duration::from_millis(1));
                    continue;
                };
                let Some(PlayedWelcome { session, capacity, boot }) = welcome() else { continue };
                let mut bytes = [0; 48];
                bytes[8..16].copy_from_slice(&session.to_le_bytes());
                bytes[16..24].copy_from_slice(&capacity.to_le_bytes());
                bytes[24..28].copy_from_slice(&512_u32.to_le_bytes());
                bytes[32] = boot;
                let _ = stream.write_all(&bytes);
                streams.push(stream);
            }
        });
        Self { stop, serving: Some(serving) }
    }
}

impl Drop for PlayedSessions {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let end = self.serving.take().map(JoinHandle::join);
        if !std::thread::panicking() {
            end.unwrap().unwrap();
        }
    }
}

/// The data, the offset and the length of a request to a played exporter, which fails if it is of another session than this one.
pub(crate) fn request_of(args: &[u8], session: u64) -> Result<(&[u8], usize, usize), CallError> {
    let (data, fields) = args.split_at(args.len() - 32);
    let [of, offset, length] = [0, 8, 16].map(|at: usize| u64::from_le_bytes(*fields[at..].first_chunk().unwrap()));
    if of != session {
        return Err(refusal(Errno::NOTCONN));
    }
    Ok((data, offset as usize, length as usize))
}

pub(crate) fn refusal(errno: Errno) -> CallError {
    CallError::application(errno.raw_os_error() as u32, "")
}
