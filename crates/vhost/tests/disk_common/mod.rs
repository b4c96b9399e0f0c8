//! A disk in this process, and a driver on it.
#![allow(dead_code, reason = "each test uses a part of it")]

pub(crate) mod exported;
#[path = "../../../shm/tests/random/mod.rs"]
pub(crate) mod random;

use partywall_vhost::VhostError;
use partywall_vhost::disk::control::{DiskControl, DiskHandle, DiskReport};
use partywall_vhost::disk::driver::{DiskDriver, DiskDriverOptions};
use partywall_vhost::disk::engine::DiskEngine;
use partywall_vhost::disk::{DiskCounters, DiskOptions};
use std::path::PathBuf;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use vm_memory::{Bytes, GuestAddress};

/// Longer is a hang.
pub(crate) const HANG: Duration = Duration::from_secs(60);
pub(crate) const MIB: u64 = 1 << 20;

// Kinds of requests, and statuses.
pub(crate) const IN: u32 = 0;
pub(crate) const OUT: u32 = 1;
pub(crate) const FLUSH: u32 = 4;
pub(crate) const GET_ID: u32 = 8;
pub(crate) const DISCARD: u32 = 11;
pub(crate) const WRITE_ZEROES: u32 = 13;
pub(crate) const OK: u8 = 0;
pub(crate) const IOERR: u8 = 1;
pub(crate) const UNSUPP: u8 = 2;

/// A disk that ends with the test.
pub(crate) struct Disk {
    pub(crate) handle: DiskHandle,
    pub(crate) folder: tempfile::TempDir,
    engine: Option<JoinHandle<Result<(), VhostError>>>,
}

impl Disk {
    /// A disk of this size on an empty file.
    pub(crate) fn new(size: u64, change: impl FnOnce(&mut DiskOptions)) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let image = folder.path().join("image");
        std::fs::File::create(&image).unwrap().set_len(size).unwrap();
        Self::on(folder, change)
    }

    pub(crate) fn on(folder: tempfile::TempDir, change: impl FnOnce(&mut DiskOptions)) -> Self {
        let mut options = DiskOptions::new(folder.path().join("image"));
        change(&mut options);
        let (engine, handle) = DiskEngine::new(options, &folder.path().join("socket"), None).unwrap();
        let engine = Some(std::thread::spawn(|| engine.run()));
        Self { handle, folder, engine }
    }

    pub(crate) fn image(&self) -> PathBuf {
        self.folder.path().join("image")
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.folder.path().join("socket")
    }

    pub(crate) fn driver(&self) -> DiskDriver {
        self.driver_with(DiskDriverOptions::default())
    }

    pub(crate) fn driver_with(&self, options: DiskDriverOptions) -> DiskDriver {
        DiskDriver::connect(&self.socket(), options).unwrap()
    }

    pub(crate) fn report(&self) -> DiskReport {
        serde_json::from_value(self.handle.ask(DiskControl::Show).unwrap()).unwrap()
    }

    pub(crate) fn counters(&self) -> DiskCounters {
        self.report().counters
    }

    /// Waits until the counters are as wanted.
    pub(crate) fn wait_counters(&self, wanted: impl Fn(&DiskCounters) -> bool) -> DiskCounters {
        let deadline = Instant::now() + HANG;
        loop {
            let counters = self.counters();
            if wanted(&counters) {
                return counters;
            }
            assert!(Instant::now() < deadline, "{counters:?}");
            std::thread::yield_now();
        }
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = self.handle.ask(DiskControl::Stop);
        let end = self.engine.take().map(JoinHandle::join);
        if !std::thread::panicking() {
            end.unwrap().unwrap().unwrap();
        }
    }
}

/// A range to discard or to fill with zeroes.
pub(crate) fn range(sector: u64, count: u32, flags: u32) -> Vec<u8> {
    [&sector.to_le_bytes()[..], &count.to_le_bytes(), &flags.to_le_bytes()].concat()
}

/// Offers a request for the 512 bytes of a buffer at any address, also outside of the driver's memory. `flags` are those of the buffer.
pub(crate) fn offer_at(driver: &mut DiskDriver, kind: u32, address: u64, flags: u32) {
    const NEXT: u32 = 1;
    const WRITE: u32 = 2;
    let memory = driver.memory().clone();
    let place = driver.take_place(0).unwrap();
    let (header, first) = (driver.header(0, place), 3 * place);
    memory.write_obj(kind, header).unwrap();
    memory.write_obj(0_u64, GuestAddress(header.0 + 8)).unwrap();
    let ring = &mut driver.rings[0];
    ring.describe(&memory, first, header.0, 16, NEXT, first + 1).unwrap();
    ring.describe(&memory, first + 1, address, 512, NEXT | flags, first + 2).unwrap();
    ring.describe(&memory, first + 2, header.0 + 16, 1, WRITE, 0).unwrap();
    ring.offer(&memory, first).unwrap();
    driver.kick(0).unwrap();
}
