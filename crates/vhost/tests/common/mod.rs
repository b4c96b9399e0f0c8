//! A switch in this process, and drivers on its ports.

pub(crate) mod datagram;
#[allow(dead_code, reason = "each test uses a part of it")]
pub(crate) mod segment;

use partywall_vhost::PortCounters;
use partywall_vhost::VhostError;
use partywall_vhost::control::{ControlRequest, EngineHandle, PortSpec, SwitchReport};
use partywall_vhost::driver::{DriverOptions, GuestDriver};
use partywall_vhost::engine::{Engine, EngineOptions};
use std::path::PathBuf;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Longer is a hang.
pub(crate) const HANG: Duration = Duration::from_secs(60);

/// A switch that ends with the test.
pub(crate) struct World {
    pub(crate) handle: EngineHandle,
    folder: tempfile::TempDir,
    engine: Option<JoinHandle<Result<(), VhostError>>>,
}

impl World {
    pub(crate) fn new() -> Self {
        Self::with(|_| {})
    }

    pub(crate) fn with(change: impl FnOnce(&mut EngineOptions)) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut options = EngineOptions::new(folder.path());
        change(&mut options);
        let (engine, handle) = Engine::new(options).unwrap();
        let engine = Some(std::thread::spawn(|| engine.run()));
        Self { handle, folder, engine }
    }

    pub(crate) fn add(&self, spec: PortSpec) -> PathBuf {
        let path = spec.socket(self.folder.path());
        self.handle.ask(ControlRequest::Add { port: spec }).unwrap();
        path
    }

    /// A port and a driver on it.
    pub(crate) fn driver(&self, name: &str) -> GuestDriver {
        self.driver_with(name, DriverOptions::default())
    }

    pub(crate) fn driver_with(&self, name: &str, options: DriverOptions) -> GuestDriver {
        GuestDriver::connect(&self.add(PortSpec::new(name)), options).unwrap()
    }

    pub(crate) fn report(&self) -> SwitchReport {
        serde_json::from_value(self.handle.ask(ControlRequest::Show).unwrap()).unwrap()
    }

    pub(crate) fn counters(&self, name: &str) -> PortCounters {
        self.report().ports.into_iter().find(|row| row.port.name == name).unwrap().counters
    }

    /// Waits until a port's counters are as wanted.
    pub(crate) fn wait_counters(&self, name: &str, wanted: impl Fn(&PortCounters) -> bool) -> PortCounters {
        let deadline = Instant::now() + HANG;
        loop {
            let counters = self.counters(name);
            if wanted(&counters) {
                return counters;
            }
            assert!(Instant::now() < deadline, "{name}: {counters:?}");
        }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        let _ = self.handle.ask(ControlRequest::Stop);
        let end = self.engine.take().map(JoinHandle::join);
        if !std::thread::panicking() {
            end.unwrap().unwrap().unwrap();
        }
    }
}

pub(crate) fn mac(n: u8) -> [u8; 6] {
    [2, 0, 0, 0, 0, n]
}

pub(crate) const EVERYBODY: [u8; 6] = [0xff; 6];

/// A frame with this many bytes behind its header.
pub(crate) fn frame(to: [u8; 6], from: [u8; 6], body: usize) -> Vec<u8> {
    let body: Vec<u8> = (0..body).map(|n| (n % 253) as u8).collect();
    [&to[..], &from, &[0x88, 0xb5], &body].concat()
}

/// Lets the switch learn that `n` is on this driver's port.
pub(crate) fn introduce(driver: &mut GuestDriver, n: u8) {
    assert!(driver.send(&frame(EVERYBODY, mac(n), 46)).unwrap());
    assert!(driver.drain(HANG).unwrap());
}

/// The next frame, without its header.
pub(crate) fn next(driver: &mut GuestDriver) -> Vec<u8> {
    driver.wait(HANG).unwrap().expect("no frame has come")[12..].to_vec()
}
