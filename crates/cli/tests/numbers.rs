//! `partywall numbers`, with a real kernel.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod common;

use std::path::Path;

use common::{partywall, said};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

/// Unmounts a file system when it is dropped.
struct Mounted<'a>(&'a Path);

impl Drop for Mounted<'_> {
    fn drop(&mut self) {
        let _ = unmount(self.0, UnmountFlags::DETACH);
    }
}

#[test]
fn record_is_kept_from_on_until_off() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path().join("numbers");
    let numbers = |action: &[&str]| {
        let output = partywall(&["numbers", "--at", at.to_str().unwrap()]).args(action).output().unwrap();
        (output.status.code(), format!("{}{}", String::from_utf8_lossy(&output.stdout), said(&output)))
    };
    let (code, text) = numbers(&["on"]);
    if text.contains("it takes root") || text.contains("no cgroup2") {
        return eprintln!("skipped: the kernel does not record sequence numbers here: {text}");
    }
    assert!(code == Some(1) && text.contains("mount -t bpf"), "{text}");
    mount("bpf", folder.path(), c"bpf", MountFlags::empty(), c"mode=0700").unwrap();
    let _mounted = Mounted(folder.path());
    for (action, begins) in [
        (&[][..], "off: "),
        (&["off"], "it is off already"),
        (&["on"], "on: "),
        (&["on"], "it is on already"),
        (&[], "on: "),
        (&["off"], "off: "),
        (&[], "off: "),
    ] {
        let (code, text) = numbers(action);
        assert!(code == Some(0) && text.starts_with(begins), "{action:?}: {text}");
    }
    assert!(!at.exists());
}
