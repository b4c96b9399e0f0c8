//! Whether a window is cached. Its kind suggests that it is; only a measurement shows it.

use super::Window;
use crate::mapping::Mapping;
use crate::{RegionError, memfd};
use partywall_shm::layout::{Geometry, PAGE};
use rustix::fd::AsFd;
use std::time::{Duration, Instant};

/// A page is read so often; the quickest counts.
const READINGS: usize = 20;
/// Memory that is this many times slower than a process's own is not cached.
pub const UNCACHED: f64 = 8.0;

impl Window {
    /// How many times slower it is read than memory of this process. More than [`UNCACHED`], and it is not cached: then TCP may well
    /// be faster.
    pub fn slowness(&self) -> Result<f64, RegionError> {
        let page = Geometry::new(PAGE, 0)?;
        let own = memfd::create(page)?;
        let own = Mapping::new(own.as_fd(), page, false)?;
        Ok(read(&self.first_page()?).as_secs_f64() / read(&own).as_secs_f64().max(1e-9))
    }
}

/// How long it takes to read a page.
fn read(page: &Mapping) -> Duration {
    let mut bytes = [0; PAGE as usize];
    let once = || {
        let start = Instant::now();
        page.first_page().copy_to(&mut bytes);
        std::hint::black_box(&mut bytes);
        start.elapsed()
    };
    std::iter::repeat_with(once).take(READINGS).min().unwrap_or_default()
}
