//! A window that this process writes, and the regions in it.

use crate::RegionError;
use crate::region::{OwnRegion, RegionOptions};
use crate::window::Window;
use partywall_shm::carve::Carve;
use partywall_shm::layout::PAGE;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A window that this machine may write, and what of it is in use.
#[derive(Debug)]
pub struct Space {
    window: Window,
    carve: Mutex<Carve>,
}

impl Space {
    /// All of it is free: no other allocator uses this window.
    pub fn new(window: Window) -> Self {
        let carve = Mutex::new(Carve::new(PAGE, window.size()));
        Self { window, carve }
    }

    /// Makes a region in it, as [`OwnRegion::create`] makes one in a memfd. Returns where it is, too.
    ///
    /// It takes up its place until [`Space::give_back`]: the peer may go on reading it when this side has dropped it.
    pub fn create(&self, options: &RegionOptions) -> Result<(OwnRegion, u64), RegionError> {
        let geometry = options.geometry()?;
        let size = geometry.region_size();
        let base = self
            .carve()
            .take(size)
            .ok_or_else(|| RegionError::system("find room in the window", size, rustix::io::Errno::NOSPC))?;
        let region = self.window.create(base, options).inspect_err(|_| {
            self.give_back(base);
        })?;
        Ok((region, base))
    }

    /// Frees the place at `base`, when neither side uses the region any more.
    pub fn give_back(&self, base: u64) -> bool {
        self.carve().give_back(base)
    }

    /// Bytes that are free.
    pub fn free(&self) -> u64 {
        self.carve().free()
    }

    /// The window itself.
    pub fn window(&self) -> &Window {
        &self.window
    }

    fn carve(&self) -> MutexGuard<'_, Carve> {
        // Each change is complete or has not been made.
        self.carve.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
