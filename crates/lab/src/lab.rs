//! An image, the way to run it, and its guests.

use crate::{Accel, Cache, Guest, GuestOptions, Image, ImageOptions, LabError};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// An image, the way to run it, and a folder for the logs.
#[derive(Debug)]
pub struct Lab {
    image: Image,
    accel: Accel,
    logs: PathBuf,
}

impl Lab {
    /// Prepares a lab. `name`, of the test for example, names the folder of its logs.
    pub fn new(name: &str, options: &ImageOptions) -> Result<Self, LabError> {
        let cache = Cache::open()?;
        let image = Image::build(&cache, options)?;
        let logs = cache.path("logs", name)?;
        std::fs::create_dir_all(&logs).map_err(LabError::file("create", &logs))?;
        let accel = choose(&cache, &image, &logs)?;
        Ok(Self { image, accel, logs })
    }

    /// How its guests are run.
    pub fn accel(&self) -> Accel {
        self.accel
    }

    /// The image that the guests boot.
    pub fn image(&self) -> &Image {
        &self.image
    }

    /// Boots a guest.
    pub fn boot(&self, options: GuestOptions) -> Result<Guest, LabError> {
        // The log of an arriving machine lies beside that of the leaving one.
        let ending = if options.arrives() { "-arrived.log" } else { ".log" };
        let serial = self.logs.join(format!("{}{ending}", options.name()));
        Guest::boot(options, &self.image, self.accel, serial)
    }
}

/// A machine may have `/dev/kvm` and yet be unable to run a guest with it (in a virtual machine, or in a sandbox), and only
/// a boot tells. It is tried once per boot of the host.
fn choose(cache: &Cache, image: &Image, logs: &Path) -> Result<Accel, LabError> {
    if std::fs::File::options().read(true).write(true).open("/dev/kvm").is_err() {
        return Ok(Accel::Tcg);
    }
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let verdict = cache.entry("kvm", boot.trim(), |draft| {
        let guest = GuestOptions::new("kvm-probe").boot_limit(Duration::from_secs(15));
        let word = match Guest::boot(guest, image, Accel::Kvm, logs.join("kvm-probe.log")) {
            Ok(_) => "kvm",
            Err(_) => "tcg",
        };
        std::fs::write(draft, word).map_err(LabError::file("write", draft))
    })?;
    let word = std::fs::read_to_string(&verdict).map_err(LabError::file("read", &verdict))?;
    Ok(if word == "kvm" { Accel::Kvm } else { Accel::Tcg })
}
