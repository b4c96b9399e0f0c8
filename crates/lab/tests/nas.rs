//! The storage appliance of four machines that Partywall connects: each of the four loses its power under load and starts again. Afterwards its
//! file system and the parity of its RAID are checked.
#![cfg(not(miri))]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

use partywall_lab::LabError;
use partywall_lab::nas::{Nas, NasKind, NasPart};
use std::time::{Duration, Instant};

/// Longer is a hang.
const HANG: Duration = Duration::from_secs(180);

/// Writes files one after the other, each durable before its sum is noted.
const LOAD: &str = "n=0
while [ ! -e /tmp/stop ]; do
    n=$((n+1))
    dd if=/dev/urandom of=/tmp/part bs=64k count=4 2>/dev/null
    dd if=/tmp/part of=/mnt/$n bs=64k conv=fsync 2>/tmp/dd.log || exit 1
    (cd /tmp && sha256sum < part) >> /tmp/sums
    echo $n > /tmp/progress
done";

/// Writes to the disk of the machine with the file system. Nothing but the flushes of others makes this durable.
const UNFLUSHED: &str = "dd if=/dev/urandom of=/tmp/unflushed bs=1M count=16 2>/dev/null
n=0
while [ ! -e /tmp/stop ]; do
    dd if=/tmp/unflushed of=/mnt/unflushed bs=64k skip=$n seek=$n count=1 oflag=direct conv=notrunc 2>/dev/null || exit 1
    n=$(((n+1)%256))
done
touch /tmp/end";

#[test]
fn appliance_survives_the_end_of_each_of_its_machines() {
    if !rustix::process::geteuid().is_root() || !std::path::Path::new("/dev/net/tun").exists() {
        println!("skipped: the appliance's network needs root and /dev/net/tun");
        return;
    }
    let mut nas = match Nas::boot(NasKind::Partywall, &mut |said| println!("{said}")) {
        Ok(nas) => nas,
        Err(e @ LabError::Tool { .. }) => panic!("{e} (scripts/setup.sh programs brings it)"),
        Err(e) => panic!("{e}"),
    };
    let client = nas.client().unwrap();
    client.put(LOAD.as_bytes(), "/tmp/load.sh", 0o755).unwrap();
    client.shell("(sh /tmp/load.sh > /tmp/load.log 2>&1; echo $? > /tmp/end) > /dev/null 2>&1 &").unwrap();
    let progress = |nas: &Nas| -> u64 {
        let said =
            nas.client().unwrap().shell("cat /tmp/progress 2>/dev/null; cat /tmp/end 2>/dev/null | sed 's/^/ended /'");
        let said = said.unwrap();
        assert!(!said.contains("ended"), "the client has seen an error: {said}");
        said.trim().parse().unwrap_or(0)
    };
    let goes_on = |nas: &Nas, since: u64| {
        let deadline = Instant::now() + HANG;
        while progress(nas) < since + 1 {
            assert!(Instant::now() < deadline, "the client has stalled at {}", progress(nas));
            std::thread::sleep(Duration::from_millis(50));
        }
    };
    goes_on(&nas, 0);
    let files = nas.guest(NasPart::Files).unwrap();
    files.put(UNFLUSHED.as_bytes(), "/tmp/unflushed.sh", 0o755).unwrap();
    files.shell("sh /tmp/unflushed.sh > /dev/null 2>&1 & until [ -s /mnt/unflushed ]; do sleep 0.02; done").unwrap();
    for part in [NasPart::Storage, NasPart::Raid, NasPart::Files, NasPart::Gateway] {
        let start = Instant::now();
        nas.kill_and_restart(part).unwrap();
        println!("{part} is back after {:?}", start.elapsed());
        let before = progress(&nas);
        goes_on(&nas, before);
        println!("the client goes on {:?} after the end of {part}", start.elapsed());
        if part == NasPart::Raid {
            unflushed_writes_are_there(&nas);
        }
    }
    let client = nas.client().unwrap();
    let line = "touch /tmp/stop; n=0; until [ -e /tmp/end ]; do sleep 0.1; n=$((n+1)); [ $n -lt 600 ] || exit 1; done; cat /tmp/end";
    assert_eq!(client.shell(line).unwrap().trim(), "0");
    let count: u64 = client.shell("cat /tmp/progress").unwrap().trim().parse().unwrap();
    client.shell("echo 3 > /proc/sys/vm/drop_caches").unwrap();
    let sums = client.shell(&format!("for n in $(seq 1 {count}); do sha256sum < /mnt/$n; done")).unwrap();
    assert_eq!(sums, client.shell("cat /tmp/sums").unwrap(), "what was acknowledged is lost");
    let files = nas.guest(NasPart::Files).unwrap();
    assert_eq!(files.shell("dmesg | grep -ciE 'ext4-fs error|i/o error' || true").unwrap().trim(), "0");
    let [read, written, copied] = nas.disk_bytes().unwrap();
    // Requests that a kill has interrupted were copied and are repeated.
    let done = read + written;
    assert!(
        written > 0 && (done..done + done / 50).contains(&copied),
        "{read} read, {written} written, {copied} copied"
    );
    println!("{count} files, {copied} bytes copied by back ends, each once");
    file_system_is_clean(&nas);
    full_stripes_are_copied_once_for_each_disk(&nas);
    parity_is_right(&nas);
}

/// Two machines behind the disk have lost what they had not written. The back ends have repeated it.
fn unflushed_writes_are_there(nas: &Nas) {
    let files = nas.guest(NasPart::Files).unwrap();
    let said = files.shell(
        ": > /tmp/stop; n=0; until [ -e /tmp/end ]; do sleep 0.1; n=$((n+1)); [ $n -lt 600 ] || exit 1; done
        echo 3 > /proc/sys/vm/drop_caches; ls -l /mnt/unflushed
        head -c $(wc -c < /mnt/unflushed) /tmp/unflushed | cmp - /mnt/unflushed && rm /mnt/unflushed",
    );
    println!("{}", said.unwrap());
}

/// The machine with the file system gives it up, and checks it.
fn file_system_is_clean(nas: &Nas) {
    nas.client().unwrap().shell("umount /mnt").unwrap();
    let files = nas.guest(NasPart::Files).unwrap();
    files.shell("rpc.nfsd 0; exportfs -ua; exportfs -f; umount /mnt").unwrap();
    println!("{}", files.shell("e2fsck -f -n /dev/vda 2>&1").unwrap());
}

/// What the back ends have read, written and copied, at a moment when nothing changes it. They are asked one after the other, and the array
/// writes its records at any time.
fn settled_bytes(nas: &Nas) -> [u64; 3] {
    let deadline = Instant::now() + HANG;
    let mut before = nas.disk_bytes().unwrap();
    loop {
        std::thread::sleep(Duration::from_millis(300));
        let now = nas.disk_bytes().unwrap();
        if now == before {
            return now;
        }
        assert!(Instant::now() < deadline, "the back ends are never at rest: {before:?}, {now:?}");
        before = now;
    }
}

/// What docs/blk.md says of RAID 5: a full stripe of three disks writes 1.5 bytes for each byte.
fn full_stripes_are_copied_once_for_each_disk(nas: &Nas) {
    const LEN: u64 = 8 << 20;
    let files = nas.guest(NasPart::Files).unwrap();
    let before = settled_bytes(nas);
    files.shell("dd if=/dev/urandom of=/dev/vda bs=1M count=8 oflag=direct conv=fsync 2>&1").unwrap();
    let after = settled_bytes(nas);
    let [read, written, copied]: [u64; 3] = std::array::from_fn(|n| after[n] - before[n]);
    println!("{LEN} bytes in full stripes: {read} read, {written} written, {copied} copied");
    assert_eq!(read + written, copied);
    // `LEN` by the first back end, and 1.5 times as much by those of the three disks. The array's own records come on top. In partial stripes, the
    // parity would be written twice: 3 times `LEN` in all.
    assert!((LEN * 5 / 2..LEN * 11 / 4).contains(&written), "{written}");
}

/// The machine with the RAID compares all stripes with their parity.
fn parity_is_right(nas: &Nas) {
    let raid = nas.guest(NasPart::Raid).unwrap();
    let start = Instant::now();
    let idle = "n=0; while [ $(cat sync_action) != idle ]; do sleep 0.1; n=$((n+1)); [ $n -lt 1000 ] || exit 1; done";
    let line = format!("cd /sys/block/md0/md; {idle}; echo 1000000 > sync_speed_min; echo check > sync_action; {idle}");
    raid.shell(&line).unwrap();
    println!("the parity was checked in {:?}", start.elapsed());
    assert_eq!(raid.shell("cat /sys/block/md0/md/mismatch_cnt /sys/block/md0/md/degraded").unwrap(), "0\n0");
}
