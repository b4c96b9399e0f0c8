//! Disks on block devices, and on a file system that makes no holes: a guest is offered discards only where they are done.
#![cfg(not(miri))]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod disk_common;

use disk_common::exported::Setting;
use disk_common::random::noise;
use disk_common::{DISCARD, Disk, FLUSH, HANG, IN, MIB, OK, OUT, UNSUPP, WRITE_ZEROES, range};
use partywall_vhost::disk::control::DiskReport;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use vhost::VhostBackend;
use vhost::vhost_user::Frontend;
use vm_memory::Bytes;

const DISCARD_BIT: u64 = 1 << 13;

/// Whether this can be tested; otherwise it prints what is missing.
fn is_possible() -> bool {
    let found =
        |name: &&&str| ["/bin", "/sbin", "/usr/bin", "/usr/sbin"].iter().any(|at| Path::new(at).join(name).exists());
    let missing = ["losetup", "mount", "unshare"].iter().find(|name| !found(name));
    if rustix::process::geteuid().is_root() && Path::new("/dev/loop-control").exists() && missing.is_none() {
        return true;
    }
    let needs = "root, loop devices, losetup, mount and unshare";
    println!("skipped: a block device for the test needs {needs} (missing: {missing:?})");
    false
}

/// A block device on a file.
struct LoopDevice(PathBuf);

impl LoopDevice {
    fn on(file: &Path) -> Self {
        let done = Command::new("losetup").args(["--find", "--show"]).arg(file).output().unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        Self(String::from_utf8(done.stdout).unwrap().trim().into())
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("--detach").arg(&self.0).status();
    }
}

/// A file on a file system without holes, which ends with the test.
struct FileWithoutHoles(Child, PathBuf);

impl FileWithoutHoles {
    fn new(folder: &Path) -> Self {
        let folder = folder.canonicalize().unwrap();
        let script =
            "mount -t ramfs none \"$0\" && cd \"$0\" && truncate -s 4M new && mv new image && exec sleep infinity";
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", script]).arg(&folder).stdin(Stdio::null()).stdout(Stdio::null());
        let mut this = Self(command.spawn().unwrap(), PathBuf::new());
        this.1 = format!("/proc/{}/root{}/image", this.0.id(), folder.display()).into();
        let deadline = Instant::now() + HANG;
        while !this.1.exists() {
            assert!(this.0.try_wait().unwrap().is_none() && Instant::now() < deadline, "no file system is mounted");
            std::thread::sleep(Duration::from_millis(5));
        }
        this
    }
}

impl Drop for FileWithoutHoles {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A disk on the file or device at this path.
fn disk_on(path: &Path) -> Disk {
    Disk::on(tempfile::tempdir().unwrap(), |options| path.clone_into(&mut options.path))
}

#[test]
fn discards_of_a_block_device_reach_it() {
    if !is_possible() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    std::fs::File::create(&file).unwrap().set_len(4 * MIB).unwrap();
    let device = LoopDevice::on(&file);
    let disk = disk_on(&device.0);
    let mut driver = disk.driver();
    assert_ne!(driver.features() & DISCARD_BIT, 0, "discards are not offered");
    for sector in (0..8192).step_by(128) {
        assert_eq!(driver.run(OUT, sector, &noise(sector, 65_536), 0).unwrap().0, OK);
    }
    assert_eq!(driver.run(FLUSH, 0, &[], 0).unwrap().0, OK);
    let blocks = || std::fs::metadata(&file).unwrap().blocks();
    let before = blocks();
    assert_eq!(driver.run(DISCARD, 0, &range(0, 4096, 0), 0).unwrap().0, OK);
    assert!(blocks() < before, "nothing was given back");
    assert_eq!(driver.run(IN, 4096, &[], 65_536).unwrap(), (OK, noise(4096, 65_536)));
    assert_eq!(disk.counters().ranges, 1);
}

#[test]
fn discards_at_once_all_end_also_when_the_queue_stops() {
    if !is_possible() {
        return;
    }
    const DISCARDS: u32 = 32;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    std::fs::File::create(&file).unwrap().set_len(4 * MIB).unwrap();
    let device = LoopDevice::on(&file);
    // All of them then begin together.
    let disk = Disk::on(tempfile::tempdir().unwrap(), |options| {
        device.0.clone_into(&mut options.path);
        options.faults.delay = Duration::from_millis(100);
    });
    let mut driver = disk.driver();
    assert_eq!(driver.config().unwrap()[36..40], (128 * MIB as u32 / 512).to_le_bytes(), "the longest discard");
    for (round, stops) in [false, true].into_iter().enumerate() {
        for n in 0..DISCARDS {
            let place = driver.take_place(0).unwrap();
            driver.memory().write_slice(&range(u64::from(n) * 64, 64, 0), driver.data(0, place)).unwrap();
            driver.offer(0, place, DISCARD, 0, 16, true).unwrap();
        }
        driver.kick(0).unwrap();
        // All are taken. A request that is still in the queue when it stops is not done.
        let all = u64::from(DISCARDS) * (round as u64 + 1);
        let deadline = Instant::now() + HANG;
        let taken = |report: DiskReport| report.under_way + report.counters.ranges;
        while taken(disk.report()) < all {
            assert!(Instant::now() < deadline, "not all discards are taken");
        }
        if stops {
            driver.frontend().unwrap().get_vring_base(0).unwrap();
        }
        for _ in 0..DISCARDS {
            assert_eq!(driver.wait(0, Duration::ZERO, HANG).unwrap().expect("a discard is lost").status, OK);
        }
        assert_eq!(disk.counters().ranges, all);
    }
}

/// A guest that has accepted discards goes on with its disk on a back end without them.
fn expect_disk_without_discards_is_kept(disk: &Disk) {
    let earlier = Disk::new(4 * MIB, |_| {});
    let mut driver = earlier.driver();
    assert_eq!(driver.run(DISCARD, 0, &range(0, 64, 0), 0).unwrap().0, OK);
    driver.reconnect(&disk.socket()).unwrap();
    assert_ne!(driver.features() & DISCARD_BIT, 0, "the guest's features have changed");
    assert_eq!(driver.run(OUT, 0, &noise(2, 65_536), 0).unwrap().0, OK);
    assert_eq!(driver.run(DISCARD, 0, &range(0, 64, 0), 0).unwrap().0, UNSUPP);
    assert_eq!(driver.run(IN, 0, &[], 65_536).unwrap(), (OK, noise(2, 65_536)));
    assert_eq!(disk.counters().broken, 0);
}

#[test]
fn guest_keeps_disk_that_is_restarted_without_discards() {
    expect_disk_without_discards_is_kept(&Disk::new(4 * MIB, |options| options.discard = false));
}

#[test]
fn guest_keeps_disk_whose_file_makes_no_holes_any_more() {
    if !is_possible() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let file = FileWithoutHoles::new(folder.path());
    expect_disk_without_discards_is_kept(&disk_on(&file.1));
}

#[test]
fn read_only_disk_rejects_guest_with_discards() {
    let disk = Disk::new(MIB, |options| options.read_only = true);
    let front_end = Frontend::connect(disk.socket(), 1).unwrap();
    let offered = front_end.get_features().unwrap();
    front_end.set_features(offered).unwrap();
    front_end.set_features(offered | DISCARD_BIT).unwrap();
    disk.wait_counters(|counters| counters.broken == 1);
}

/// What a disk without discards does with requests to give sectors up.
fn expect_no_discards(disk: &Disk) {
    let mut driver = disk.driver();
    assert_eq!(driver.features() & DISCARD_BIT, 0, "discards are offered");
    assert_eq!(driver.run(OUT, 0, &noise(1, 65_536), 0).unwrap().0, OK);
    assert_eq!(driver.run(DISCARD, 0, &range(0, 64, 0), 0).unwrap().0, UNSUPP);
    // Zeroes need no holes, also if the guest would give the sectors up.
    for (sector, flags) in [(0, 0), (64, 1)] {
        assert_eq!(driver.run(WRITE_ZEROES, 0, &range(sector, 64, flags), 0).unwrap().0, OK);
    }
    assert_eq!(driver.run(IN, 0, &[], 65_536).unwrap(), (OK, vec![0; 65_536]));
}

#[test]
fn file_without_holes_offers_no_discards() {
    if !is_possible() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let file = FileWithoutHoles::new(folder.path());
    expect_no_discards(&disk_on(&file.1));
}

#[test]
fn block_device_without_discards_offers_none() {
    if !is_possible() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let file = FileWithoutHoles::new(folder.path());
    let device = LoopDevice::on(&file.1);
    expect_no_discards(&disk_on(&device.0));
}

#[test]
fn exported_device_without_discards_offers_none() {
    if !is_possible() {
        return;
    }
    let setting = Setting::new(MIB);
    let folder = tempfile::tempdir().unwrap();
    let file = FileWithoutHoles::new(folder.path());
    let device = LoopDevice::on(&file.1);
    let with = |path: &Path| {
        let _export = setting.export_with(|options| path.clone_into(&mut options.path));
        let imported = setting.import("user", HANG).unwrap();
        let mut driver = imported.driver();
        let status = driver.run(DISCARD, 0, &range(0, 64, 0), 0).unwrap().0;
        (driver.features() & DISCARD_BIT != 0, status)
    };
    assert_eq!(with(&device.0), (false, UNSUPP));
    assert_eq!(with(&setting.image()), (true, OK));
}
