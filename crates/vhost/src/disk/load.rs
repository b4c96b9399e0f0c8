//! Load on a disk, for the bench. Any vhost-user back end can serve the disk.

use super::driver::{DiskDriver, DiskDriverOptions};
use crate::VhostError;
use crate::driver::failed;
use std::path::Path;
use std::time::{Duration, Instant};

/// Longer is a hang.
const HANG: Duration = Duration::from_secs(60);

/// A load for a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiskLoad {
    /// Writes, and no reads.
    pub writes: bool,
    /// Bytes of a request.
    pub bytes: u32,
    /// Requests in flight in each queue.
    pub depth: u16,
    /// The duration of the measurement.
    pub measured: Duration,
    /// How long the driver looks for completions before it sleeps.
    pub spin: Duration,
}

/// The results of a load.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DiskRate {
    /// Requests.
    pub requests: u64,
    /// The time that they took, in seconds.
    pub seconds: f64,
}

impl DiskRate {
    /// Requests a second.
    pub fn per_second(&self) -> f64 {
        self.requests as f64 / self.seconds
    }
}

/// A connection to a disk, over which loads are run.
#[derive(Debug)]
pub struct LoadGenerator {
    driver: DiskDriver,
    sectors: u64,
    random: u64,
}

impl LoadGenerator {
    /// Connects with this many queues, for requests of at most this many bytes and at most this many in flight in each queue.
    pub fn connect(path: &Path, queues: u16, bytes: u32, depth: u16) -> Result<Self, VhostError> {
        let options = DiskDriverOptions { queues, depth, buffer: bytes, ..DiskDriverOptions::default() };
        let mut driver = DiskDriver::connect(path, options)?;
        let sectors = driver.sectors()?;
        Ok(Self { driver, sectors, random: 0x9e37_79b9_7f4a_7c15 })
    }

    /// Runs a load at random places, and counts the requests.
    pub fn run(&mut self, load: DiskLoad) -> Result<DiskRate, VhostError> {
        let per_request = u64::from(load.bytes / 512).max(1);
        let places = self.sectors / per_request;
        if places == 0 {
            return Err(failed("the disk is smaller than a request"));
        }
        let start = Instant::now();
        let mut in_flight = vec![0_u16; self.driver.rings.len()];
        let (mut requests, mut ends) = (0, false);
        while !ends || in_flight.iter().any(|count| *count > 0) {
            for (queue, count) in in_flight.iter_mut().enumerate() {
                while !ends && *count < load.depth {
                    let Some(place) = self.driver.take_place(queue) else { break };
                    self.random ^= self.random << 13;
                    self.random ^= self.random >> 7;
                    self.random ^= self.random << 17;
                    let sector = self.random % places * per_request;
                    self.driver.offer(queue, place, u32::from(load.writes), sector, load.bytes, load.writes)?;
                    *count += 1;
                }
                self.driver.kick(queue)?;
            }
            let mut next = Some(self.driver.wait_any(load.spin, HANG)?.ok_or_else(|| failed("no answer"))?);
            while let Some((queue, reply)) = next {
                if reply.status != 0 {
                    return Err(failed("the disk has failed a request"));
                }
                requests += 1;
                in_flight[queue] -= 1;
                next = self.driver.reply(queue)?.map(|reply| (queue, reply));
            }
            ends = start.elapsed() >= load.measured;
        }
        Ok(DiskRate { requests, seconds: start.elapsed().as_secs_f64() })
    }
}
