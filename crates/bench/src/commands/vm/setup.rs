//! The time to give two running machines shared memory, by its size (VMRPC's Table 3).
//!
//! For a *window* each way, the host makes a file and plugs it into both machines; for *ivshmem*, one file and a device in both,
//! whose memory both write. That is the host's part. The rest is the machines': until programs in both can map the memory. A window has
//! some of its memory when it is plugged in; the rest is allocated at the same time, and the measurement ends when all memory is there.

use std::{
    os::fd::AsRawFd,
    thread,
    time::{Duration, Instant},
};

use partywall_lab::{Guest, Running};
use partywall_region::pmem::{WindowFile, WindowSpec};
use partywall_vm::{Machine, WindowDevice, WindowRole, qmp::Qmp};
use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, ftruncate, memfd_create};
use serde_json::json;

use super::machines::fault;
use crate::{
    error::{BenchError, During, Result},
    inside::{READY, SEEN},
    report::metric::Metric,
    task::Figures,
};

/// Longer than a machine needs to see anything.
const SEEN_WITHIN: Duration = Duration::from_secs(180);
/// The names of the device and of its memory in each machine.
const DEVICE: &str = "bench-ivshmem";
const MEMORY: &str = "bench-ivshmem-memory";
/// More than the memory of a doorbell device, of the same kind, which each machine has.
const LEAST: u64 = 2 * partywall_protocol::doorbell::SIZE as u64;

/// A program in a machine that looks out for memory.
struct MemoryWatch<'a> {
    running: Running<'a>,
    seen: usize,
}

impl<'a> MemoryWatch<'a> {
    fn start(guest: &'a Guest) -> Result<Self> {
        let mut running = guest.start(&["partywall-bench", "inside", "watch"]).map_err(fault)?;
        running.wait_for(READY, SEEN_WITHIN).map_err(fault)?;
        Ok(Self { running, seen: 0 })
    }

    fn look_for(&mut self, what: &str) -> Result<()> {
        self.seen += 1;
        self.running.input(format!("{what}\n").as_bytes()).map_err(fault)
    }

    fn wait(&mut self) -> Result<()> {
        let deadline = Instant::now() + SEEN_WITHIN;
        while String::from_utf8_lossy(&self.running.so_far().stdout).matches(SEEN).count() < self.seen {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || self.running.look(left).map_err(fault)? == Some(true) {
                let said = String::from_utf8_lossy(&self.running.so_far().stderr).trim().to_owned();
                return Err(BenchError::Transport(format!("memory that was plugged in is not seen: {said}")));
            }
        }
        Ok(())
    }

    fn end(self) -> Result<()> {
        self.running.end_input().map_err(fault)?;
        self.running.wait(SEEN_WITHIN).map(drop).map_err(fault)
    }
}

/// A window each way between two machines, with room for this many bytes.
pub(super) fn windows(guests: [&Guest; 2], room: u64) -> Result<Figures> {
    let failed = |e: &dyn std::fmt::Display| BenchError::transport("plugging windows in", e);
    let [mut a, mut b] = [MemoryWatch::start(guests[0])?, MemoryWatch::start(guests[1])?];
    let start = Instant::now();
    // As the broker does it, but that here both machines are new.
    let spec =
        |owner: &Guest, peer: &Guest| WindowSpec { room, owner: owner.name().to_owned(), peer: peer.name().to_owned() };
    let specs = [spec(guests[0], guests[1]), spec(guests[1], guests[0])];
    let mut files = Vec::new();
    for spec in &specs {
        files.push(WindowFile::begin(spec).map_err(|e| failed(&e))?);
    }
    let plug = |at: usize| -> Result<()> {
        let mut machine = Machine::connect(guests[at].monitor()).map_err(|e| failed(&e))?;
        for (file, role) in [(at, WindowRole::Owner), (1 - at, WindowRole::Peer)] {
            machine.plug(&WindowDevice::of(&files[file]), role).map_err(|e| failed(&e))?;
        }
        Ok(())
    };
    thread::scope(|scope| {
        let both = [scope.spawn(|| plug(0)), scope.spawn(|| plug(1))];
        both.into_iter().try_for_each(|one| {
            one.join().map_err(|_| BenchError::transport("plugging windows in", "a thread panicked"))?
        })
    })?;
    let host = start.elapsed();
    // Connections can be made from here on, as far as the host is concerned. The rest of the memory comes while the machines take notice.
    let (all, whole) = thread::scope(|scope| {
        let rest = scope.spawn(|| {
            files.iter().try_for_each(WindowFile::allocate).map_err(|e| failed(&e))?;
            Ok::<_, BenchError>(start.elapsed())
        });
        for (watch, [own, peer]) in [(&mut a, [0, 1]), (&mut b, [1, 0])] {
            watch.look_for(&format!("window {} own", files[own].id()))?;
            watch.look_for(&format!("window {} peer", files[peer].id()))?;
        }
        a.wait()?;
        b.wait()?;
        let all = rest.join().map_err(|_| BenchError::transport("plugging windows in", "a thread panicked"))??;
        Ok::<_, BenchError>((all, start.elapsed()))
    })?;
    a.end()?;
    b.end()?;
    Ok(figures(whole, host, all))
}

/// A device in each of two machines, whose memory they share: `ivshmem-plain`, which needs no server. (QEMU 7.2 does not survive it when
/// `ivshmem-doorbell` is unplugged and another plugged in.)
pub(super) fn ivshmem(guests: [&Guest; 2], room: u64) -> Result<Figures> {
    let failed = |e| BenchError::transport("plugging ivshmem in", e);
    let size = room.next_power_of_two().max(LEAST);
    let [mut a, mut b] = [MemoryWatch::start(guests[0])?, MemoryWatch::start(guests[1])?];
    let port = |guest: &Guest| {
        let ports = Machine::connect(guest.monitor()).and_then(|mut machine| Ok(machine.facts()?.free_ports));
        let none = || BenchError::Transport("no PCI Express port of a machine is free".into());
        ports
            .map_err(|e| BenchError::transport("looking for a port", e))?
            .and_then(|ports| ports.into_iter().next())
            .ok_or_else(none)
    };
    let ports = [port(guests[0])?, port(guests[1])?];
    let start = Instant::now();
    let memory = memfd_create("partywall-bench-ivshmem", MemfdFlags::CLOEXEC).during("making shared memory")?;
    ftruncate(&memory, size).during("making shared memory")?;
    fallocate(&memory, FallocateFlags::empty(), 0, size).during("making shared memory")?;
    let all = start.elapsed();
    let path = format!("/proc/{}/fd/{}", std::process::id(), memory.as_raw_fd());
    let mut monitors = Vec::new();
    for (guest, port) in guests.into_iter().zip(&ports) {
        let mut monitor = Qmp::connect(guest.monitor()).map_err(failed)?;
        let backend =
            json!({ "qom-type": "memory-backend-file", "id": MEMORY, "mem-path": path, "size": size, "share": true });
        monitor.execute("object-add", backend).map_err(failed)?;
        let device = json!({ "driver": "ivshmem-plain", "id": DEVICE, "memdev": MEMORY, "master": "on", "bus": port });
        monitor.execute("device_add", device).map_err(failed)?;
        monitors.push(monitor);
    }
    let host = start.elapsed();
    for watch in [&mut a, &mut b] {
        watch.look_for(&format!("device {size}"))?;
    }
    a.wait()?;
    b.wait()?;
    let whole = start.elapsed();
    // Out again, for the next size.
    for (monitor, watch) in monitors.iter_mut().zip([&mut a, &mut b]) {
        monitor.execute("device_del", json!({ "id": DEVICE })).map_err(failed)?;
        let is_it = |data: &serde_json::Value| data["device"] == DEVICE;
        if !monitor.wait_event("DEVICE_DELETED", Instant::now() + SEEN_WITHIN, is_it).map_err(failed)? {
            return Err(BenchError::Transport("a machine does not release its ivshmem device".into()));
        }
        watch.look_for(&format!("no device {size}"))?;
        watch.wait()?;
        monitor.execute("object-del", json!({ "id": MEMORY })).map_err(failed)?;
    }
    a.end()?;
    b.end()?;
    Ok(figures(whole, host, all))
}

fn figures(whole: Duration, host: Duration, all: Duration) -> Figures {
    let [whole, host, all] = [whole, host, all].map(|time| time.as_secs_f64());
    Figures::from([
        (Metric::Seconds, whole),
        (Metric::HostSeconds, host),
        (Metric::GuestSeconds, whole - host),
        (Metric::MemorySeconds, all),
    ])
}
