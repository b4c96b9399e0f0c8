//! Calls between the two machines whose arguments stay where they are: a tree, and the requests of a file system.

use super::carry::{COPY, Done};
use super::{GuestPair, LONGEST};
use partywall_lab::{CommandOutput, PlaygroundOptions, beside};
use rustix::process::Signal;
use serde_json::Value;
use std::time::Instant;

const FS: &str = "partywall-fs";
const MOUNT: &str = "/tmp/mounted";
/// The TCP port of the export that is compared with.
const PORT: u16 = 7100;

/// Nanoseconds for a tree.
#[derive(Debug, Clone, Copy)]
pub(super) struct GuestTreeTimes {
    pub(super) nodes: u32,
    /// By one call, which reads it in place.
    pub(super) call: f64,
    /// A call that looks up one key, in place.
    pub(super) find: f64,
    /// A call without arguments.
    pub(super) null_call: f64,
    /// Serialised, sent over TCP and rebuilt.
    pub(super) tcp: f64,
}

/// Seconds for a file that is read through a mount.
#[derive(Debug, Clone, Copy)]
pub(super) struct MountTimes {
    pub(super) size: u64,
    pub(super) ours: f64,
    pub(super) tcp: f64,
}

/// Adds the file system to the machines, if it is beside this program.
pub(super) fn add_to(options: PlaygroundOptions) -> (PlaygroundOptions, bool) {
    match beside(FS) {
        Ok(program) => (options.program(program, FS).module("fuse"), true),
        Err(_) => (options, false),
    }
}

impl GuestPair<'_> {
    /// Times a tree that is built in a and read in b.
    pub(super) fn tree(&self, nodes: u32) -> Done<GuestTreeTimes> {
        let server = self.begin(self.b, "partywall --domain b tree-call -l tree")?;
        let ours = self.end(self.begin(self.a, &format!("partywall --domain a tree-call b:tree -n {nodes}"))?)?;
        // A server never ends by itself.
        server.signal(Signal::KILL)?;
        server.wait(LONGEST)?;
        let (server, address) = self.listening("partywall tree-call --tcp -l 0.0.0.0:0")?;
        let tcp = self.end(self.begin(self.a, &format!("partywall tree-call --tcp {address} -n {nodes}"))?)?;
        self.end(server)?;
        Ok(GuestTreeTimes {
            nodes,
            call: nanos(&ours, "call_ns")?,
            find: nanos(&ours, "find_ns")?,
            null_call: nanos(&ours, "null_call_ns")?,
            tcp: nanos(&tcp, "call_ns")?,
        })
    }

    /// A file that a exports and b reads through a mount: by Partywall, and by TCP. It is (the beginning of) the file that was carried.
    pub(super) fn files(&self, most: u64) -> Done<MountTimes> {
        // A client in a machine is nobody, who may read what all may read.
        let sum = self.a.shell(&format!(
            "umask 022; mkdir -p /tmp/shared; head -c {most} /tmp/file > /tmp/shared/file && sha256sum < /tmp/shared/file"
        ))?;
        let size = self.a.shell("stat -c %s /tmp/shared/file")?.trim().parse()?;
        self.b.shell(&format!("mkdir -p {MOUNT}"))?;
        let address = self.a.address().ok_or("a has no address")?;
        let ours = self.mounted("--as a:files", "a:files", &sum)?;
        let export = format!("--tcp 0.0.0.0:{PORT} --insecure");
        let tcp = self.mounted(&export, &format!("--transport tcp --insecure {address}:{PORT}"), &sum)?;
        Ok(MountTimes { size, ours, tcp })
    }

    /// Exports, mounts, reads, compares and unmounts. Returns the seconds that the read took.
    fn mounted(&self, export: &str, mount: &str, sum: &str) -> Done<f64> {
        let mut export = self.begin(self.a, &format!("partywall fs export /tmp/shared --read-only {export}"))?;
        export.wait_for("exporting", LONGEST)?;
        let mut mount = self.begin(self.b, &format!("partywall --domain b fs mount {mount} {MOUNT}"))?;
        mount.wait_for("mounted", LONGEST)?;
        self.show.say(&format!("   {}", mount.so_far().text()));
        let copy = format!("dd if={MOUNT}/file of={COPY} bs=1M");
        self.show.command(self.b.name(), &copy);
        let begun = Instant::now();
        self.b.shell(&copy)?;
        let seconds = begun.elapsed().as_secs_f64();
        let read = self.b.shell(&format!("sha256sum < {COPY}; rm {COPY}"))?;
        if read != sum {
            return Err(format!("the file differs through the mount: {read}, not {sum}").into());
        }
        self.b.shell(&format!("partywall fs unmount {MOUNT}"))?;
        self.end(mount)?;
        export.signal(Signal::TERM)?;
        self.end(export)?;
        Ok(seconds)
    }
}

fn nanos(answer: &CommandOutput, name: &str) -> Done<f64> {
    let said: Value = serde_json::from_slice(&answer.stdout)?;
    said[name].as_f64().ok_or_else(|| format!("the answer of tree-call lacks {name}: {said}").into())
}
