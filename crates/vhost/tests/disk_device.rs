//! Disks on block devices and on small file systems: a guest is offered discards only where they are done, and gets an I/O error for what fails.
#![cfg(not(miri))]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod disk_common;

use disk_common::exported::Setting;
use disk_common::random::noise;
use disk_common::{DISCARD, Disk, FLUSH, HANG, IN, IOERR, MIB, OK, OUT, UNSUPP, WRITE_ZEROES, offer_at, range};
use partywall_vhost::disk::control::DiskReport;
use partywall_vhost::disk::driver::DiskDriver;
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
        Self::with(file, "--direct-io=off")
    }

    fn with(file: &Path, option: &str) -> Self {
        let done = Command::new("losetup").args(["--find", "--show", option]).arg(file).output().unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        Self(String::from_utf8(done.stdout).unwrap().trim().into())
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("--detach").arg(&self.0).status();
    }
}

/// A file on a file system that ends with the test.
struct MountedFile(Child, PathBuf);

impl MountedFile {
    /// A file of 4 MiB on a file system that makes no holes.
    fn without_holes(folder: &Path) -> Self {
        Self::new(folder, ["ramfs", "mode=700", "4M"])
    }

    /// A file of 8 MiB on a file system that has room for 2 MiB.
    fn with_little_room(folder: &Path) -> Self {
        Self::new(folder, ["tmpfs", "size=2M", "8M"])
    }

    fn new(folder: &Path, words: [&str; 3]) -> Self {
        let folder = folder.canonicalize().unwrap();
        let script = "mount -t \"$1\" -o \"$2\" none \"$0\" && cd \"$0\" && truncate -s \"$3\" new && mv new image && \
            exec sleep infinity";
        // It ends with the test, also if that is killed.
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "unshare", "--mount", "sh", "-c", script]).arg(&folder).args(words);
        command.stdin(Stdio::null()).stdout(Stdio::null());
        let mut this = Self(command.spawn().unwrap(), PathBuf::new());
        this.1 = format!("/proc/{}/root{}/image", this.0.id(), folder.display()).into();
        let deadline = Instant::now() + HANG;
        while !this.1.exists() {
            assert!(this.0.try_wait().unwrap().is_none() && Instant::now() < deadline, "no file system is mounted");
            std::thread::sleep(Duration::from_millis(5));
        }
        this
    }

    /// The file system gets room for the whole file.
    fn give_room(&self, folder: &Path) {
        let mut command = Command::new("nsenter");
        command.args(["--mount", "--target", &self.0.id().to_string(), "mount", "-o", "remount,size=16M"]);
        assert!(command.arg(folder.canonicalize().unwrap()).status().unwrap().success());
    }
}

impl Drop for MountedFile {
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
    let file = MountedFile::without_holes(folder.path());
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
    let file = MountedFile::without_holes(folder.path());
    expect_no_discards(&disk_on(&file.1));
}

#[test]
fn block_device_without_discards_offers_none() {
    if !is_possible() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let file = MountedFile::without_holes(folder.path());
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
    let file = MountedFile::without_holes(folder.path());
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

/// Sectors of one request of the tests below.
const STEP: u64 = 128;

fn write(driver: &mut DiskDriver, step: u64) -> u8 {
    driver.run(OUT, step * STEP, &noise(step, 65_536), 0).unwrap().0
}

fn flush(driver: &mut DiskDriver) -> u8 {
    driver.run(FLUSH, 0, &[], 0).unwrap().0
}

/// Writes until there is no room. What is written stays, and room that is given back can be used.
fn fill_disk_with_little_room(driver: &mut DiskDriver) {
    let full = (0..64).find(|step| write(driver, *step) != OK).expect("there is room for more than 2 MiB");
    assert!(full >= 16, "there is room for {full} steps");
    assert_eq!(write(driver, 100), IOERR);
    assert_eq!(driver.run(WRITE_ZEROES, 0, &range(101 * STEP, STEP as u32, 0), 0).unwrap().0, IOERR);
    assert_eq!(flush(driver), OK, "what was written is durable");
    for step in 0..full {
        assert!(driver.run(IN, step * STEP, &[], 65_536).unwrap() == (OK, noise(step, 65_536)), "step {step}");
    }
    assert_eq!(driver.run(DISCARD, 0, &range(0, 4 * STEP as u32, 0), 0).unwrap().0, OK);
    assert_eq!(write(driver, 100), OK, "room was given back");
    assert_eq!((write(driver, 8), flush(driver)), (OK, OK), "it has its room");
    assert!(driver.run(IN, 100 * STEP, &[], 65_536).unwrap() == (OK, noise(100, 65_536)));
}

#[test]
fn full_file_system_fails_only_requests_that_need_room() {
    if !is_possible() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let file = MountedFile::with_little_room(folder.path());
    let disk = disk_on(&file.1);
    fill_disk_with_little_room(&mut disk.driver());
    assert_eq!(disk.counters().failed, 3);
}

#[test]
fn full_exporter_fails_only_requests_that_need_room() {
    if !is_possible() {
        return;
    }
    let setting = Setting::new(MIB);
    let folder = tempfile::tempdir().unwrap();
    let file = MountedFile::with_little_room(folder.path());
    let _export = setting.export_with(|options| file.1.clone_into(&mut options.path));
    let imported = setting.import("user", HANG).unwrap();
    fill_disk_with_little_room(&mut imported.driver());
    assert_eq!(imported.report().counters.failed, 3);
}

/// The device loses the second half of the sectors that are read here.
#[test]
fn lost_sectors_of_a_device_fail_alone() {
    if !is_possible() {
        return;
    }
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("file");
    let content = noise(1, 4 << 20);
    std::fs::write(&path, &content).unwrap();
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    let device = LoopDevice::with(&path, "--direct-io=on");
    // Only then does the kernel report reads behind the end of the file.
    let unbuffered = Path::new("/sys/block").join(device.0.file_name().unwrap()).join("loop/dio");
    if std::fs::read_to_string(unbuffered).unwrap().trim() != "1" {
        println!("skipped: the file system of {} has no unbuffered access for a loop device", folder.path().display());
        return;
    }
    file.set_len(2 * MIB).unwrap();
    for direct in [false, true] {
        let disk = Disk::on(tempfile::tempdir().unwrap(), |options| {
            device.0.clone_into(&mut options.path);
            options.direct = direct;
        });
        let mut driver = disk.driver();
        for (sector, reads) in [(0, true), (4096, false), (3968, true), (4032, false), (6000, false), (2048, true)] {
            let (status, read) = driver.run(IN, sector, &[], 65_536).unwrap();
            assert_eq!(status, if reads { OK } else { IOERR }, "sector {sector}");
            assert!(!reads || read == content[sector as usize * 512..][..65_536], "sector {sector}");
        }
        assert_eq!(flush(&mut driver), OK);
        let counters = disk.counters();
        assert_eq!((counters.reads, counters.failed), (3, 3));
        if direct {
            // A request that is done by a copy.
            file.set_len(0).unwrap();
            let place = driver.data(0, 1).0 + 1;
            offer_at(&mut driver, IN, place, 2);
            assert_eq!(driver.wait(0, Duration::ZERO, HANG).unwrap().expect("no answer").status, IOERR);
            assert_eq!(disk.counters().failed, 4);
        }
    }
}

/// The page cache takes writes for which the device has no room. The kernel reports their loss once.
fn lose_writes(driver: &mut DiskDriver) {
    assert_eq!((write(driver, 0), flush(driver)), (OK, OK));
    for step in 1..64 {
        assert_eq!(write(driver, step), OK);
    }
    for attempt in 0..3 {
        assert_eq!(flush(driver), IOERR, "flush {attempt}");
        assert_eq!(write(driver, 0), OK);
    }
    assert!(driver.run(IN, 0, &[], 65_536).unwrap() == (OK, noise(0, 65_536)));
}

#[test]
fn flush_after_lost_writes_fails_until_restart() {
    if !is_possible() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let file = MountedFile::with_little_room(folder.path());
    let device = LoopDevice::on(&file.1);
    lose_writes(&mut disk_on(&device.0).driver());
    assert_eq!(flush(&mut disk_on(&device.0).driver()), OK);
    // Writes that are durable when they complete use the page cache as well.
    let through = Disk::on(tempfile::tempdir().unwrap(), |options| {
        device.0.clone_into(&mut options.path);
        options.writethrough = true;
    });
    let mut driver = through.driver();
    assert_eq!(write(&mut driver, 0), OK);
    assert!((0..64).any(|step| write(&mut driver, step) == IOERR));
    assert_eq!(write(&mut driver, 0), IOERR);
    drop((driver, through));
    // Without the page cache it is the write that fails, and nothing else.
    let disk = Disk::on(tempfile::tempdir().unwrap(), |options| {
        device.0.clone_into(&mut options.path);
        options.direct = true;
    });
    let mut driver = disk.driver();
    assert!((0..64).any(|step| write(&mut driver, step) == IOERR));
    assert_eq!((write(&mut driver, 0), flush(&mut driver)), (OK, OK));
}

#[test]
fn flush_after_writes_lost_by_exporter_fails_until_restart() {
    if !is_possible() {
        return;
    }
    let setting = Setting::new(MIB);
    let folder = tempfile::tempdir().unwrap();
    let file = MountedFile::with_little_room(folder.path());
    let device = LoopDevice::on(&file.1);
    let export = || setting.export_with(|options| device.0.clone_into(&mut options.path));
    let first = export();
    let imported = setting.import("user", HANG).unwrap();
    let mut driver = imported.driver();
    lose_writes(&mut driver);
    drop(first);
    let second = export();
    assert_eq!(
        (write(&mut driver, 0), flush(&mut driver)),
        (OK, IOERR),
        "the lost writes are repeated, and lost again"
    );
    drop(second);
    file.give_room(folder.path());
    let _third = export();
    assert_eq!((write(&mut driver, 0), flush(&mut driver)), (OK, OK));
    let stored = std::fs::read(&file.1).unwrap();
    for (step, sectors) in stored.chunks(65_536).take(64).enumerate() {
        assert!(sectors == noise(step as u64, 65_536), "step {step} is lost");
    }
}

#[test]
fn ranges_of_partial_blocks_of_a_device_are_done() {
    if !is_possible() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    std::fs::File::create(&file).unwrap().set_len(4 * MIB).unwrap();
    let device = LoopDevice::with(&file, "--sector-size=4096");
    let disk = disk_on(&device.0);
    let mut driver = disk.driver();
    let before = noise(1, 65_536);
    assert_eq!(driver.run(OUT, 0, &before, 0).unwrap().0, OK);
    assert_eq!(driver.run(DISCARD, 0, &range(1, 7, 0), 0).unwrap().0, OK, "there is no whole block in it");
    assert_eq!(driver.run(IN, 0, &[], 65_536).unwrap(), (OK, before.clone()));
    assert_eq!(driver.run(DISCARD, 0, &range(1, 30, 0), 0).unwrap().0, OK);
    let (status, discarded) = driver.run(IN, 0, &[], 65_536).unwrap();
    assert!(status == OK && discarded[..4096] == before[..4096] && discarded[12_288..] == before[12_288..]);
    for unmap in [0, 1] {
        let at = 32 + 8 * u64::from(unmap);
        assert_eq!(driver.run(WRITE_ZEROES, 0, &range(at + 1, 6, unmap), 0).unwrap().0, OK);
        let (status, content) = driver.run(IN, at, &[], 4096).unwrap();
        let old = &before[at as usize * 512..][..4096];
        assert!(status == OK && content[..512] == old[..512] && content[3584..] == old[3584..], "neighbours changed");
        assert!(content[512..3584] == [0; 3072]);
    }
}
