//! The storage appliance of four machines that Partywall connects: each of the four loses its power under load and starts again.
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
    for part in [NasPart::Storage, NasPart::Raid, NasPart::Files, NasPart::Gateway] {
        let start = Instant::now();
        nas.kill_and_restart(part).unwrap();
        println!("{part} is back after {:?}", start.elapsed());
        let before = progress(&nas);
        goes_on(&nas, before);
        println!("the client goes on {:?} after the end of {part}", start.elapsed());
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
}
