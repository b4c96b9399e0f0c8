//! Limits of the process that would end it, were they not looked at before.
#![cfg(not(miri))]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use partywall_region::pmem::{WindowFile, WindowSpec};
use partywall_region::{OwnRegion, RegionOptions};
use std::process::Command;

/// Set in the process that has the limit.
const LIMITED: &str = "PARTYWALL_TEST_LIMITED";

#[test]
fn memory_above_file_size_limit_fails_without_signal() {
    if std::env::var_os(LIMITED).is_some() {
        assert!(OwnRegion::create(&RegionOptions::endpoint(4096)).is_ok());
        let region = OwnRegion::create(&RegionOptions::endpoint(1 << 20)).unwrap_err().to_string();
        let spec = WindowSpec { room: 1 << 20, owner: "a".into(), peer: "b".into() };
        let window = WindowFile::create(&spec).unwrap_err().to_string();
        for why in [region, window] {
            assert!(why.contains("ulimit -f"), "{why}");
        }
        return;
    }
    let mut limited = Command::new("sh");
    limited
        .args(["-c", "ulimit -f 64 && exec \"$0\" --exact --nocapture \"$1\""])
        .arg(std::env::current_exe().unwrap());
    limited.arg("memory_above_file_size_limit_fails_without_signal").env(LIMITED, "1");
    let done = limited.output().unwrap();
    let said = String::from_utf8_lossy(&done.stdout);
    assert!(done.status.success() && said.contains("1 passed"), "{}: {said}", done.status);
}
