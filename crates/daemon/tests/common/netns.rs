//! Network namespaces without a name: they end with the last descriptor and thread in them.
#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};
use std::process::{Child, Command, Stdio};

use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space};

/// A network namespace without a name.
pub(crate) struct Netns {
    file: File,
    /// The process that keeps a foreign user namespace alive.
    holder: Option<Child>,
}

impl Netns {
    /// Makes a namespace of this user namespace; `None` without the right to make it, or without `ip`.
    pub(crate) fn own() -> Option<Self> {
        let made = std::thread::spawn(|| {
            #[expect(unsafe_code, reason = "rustix marks every sort of unshare alike")]
            // SAFETY: a new network namespace for this thread alone; descriptors stay shared.
            unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }.ok()?;
            File::open("/proc/thread-self/ns/net").ok()
        });
        Self { file: made.join().unwrap()?, holder: None }.up()
    }

    /// Makes a namespace of a separate user namespace, as any user can.
    pub(crate) fn foreign() -> Option<Self> {
        let mut holder = Command::new("unshare")
            .args(["--user", "--map-root-user", "--net", "sh", "-c", "echo; exec sleep 1000"])
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .ok()?;
        // It speaks once it is there.
        let spoke = std::io::Read::read(holder.stdout.as_mut()?, &mut [0]).unwrap_or(0);
        let file = File::open(format!("/proc/{}/ns/net", holder.id()));
        let this = Self { file: file.ok()?, holder: Some(holder) };
        if spoke == 1 { this.up() } else { None }
    }

    fn up(self) -> Option<Self> {
        self.ip("link set lo up").then_some(self)
    }

    /// Runs something in it; sockets made there stay there.
    pub(crate) fn within<T: Send>(&self, what: impl FnOnce() -> T + Send) -> T {
        std::thread::scope(|scope| {
            let inside = scope.spawn(|| {
                move_into_link_name_space(self.file.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
                what()
            });
            inside.join().unwrap()
        })
    }

    /// Runs `ip` in it; whether that went well.
    pub(crate) fn ip(&self, arguments: &str) -> bool {
        self.within(|| Command::new("ip").args(arguments.split(' ')).status().is_ok_and(|status| status.success()))
    }

    /// Joins two by a cable, at the addresses 192.0.2.1 and 192.0.2.2.
    pub(crate) fn join(&self, other: &Self) {
        let there = format!("/proc/{}/fd/{}", std::process::id(), other.file.as_raw_fd());
        assert!(self.ip(&format!("link add pw0 type veth peer name pw0 netns {there}")));
        for (netns, address) in [(self, "192.0.2.1/30"), (other, "192.0.2.2/30")] {
            assert!(netns.ip(&format!("address add {address} dev pw0")) && netns.ip("link set pw0 up"));
        }
    }
}

impl Drop for Netns {
    fn drop(&mut self) {
        if let Some(holder) = &mut self.holder {
            let _ = holder.kill();
            let _ = holder.wait();
        }
    }
}
