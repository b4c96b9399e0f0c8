//! A storage appliance, which exports a file system by NFS, built in three ways, and a client outside of it.
//!
//! ```text
//!   client --- network --- file system --- RAID --- storage --- three disks of the host
//! ```
//! - [`NasKind::Partywall`]: four machines. Between them are only cards of `partywall net` and disks of `partywall blk`.
//! - [`NasKind::Bridge`]: the same four machines over tap and bridge, with NBD for the disks.
//! - [`NasKind::Monolith`]: one machine with all four functions.
//!
//! The machines run Debian's kernel with its NFS server, its RAID and ext4. The study of Fido has such an appliance (its Figures 10 and 11).

mod figure;
mod fio;
mod host;
mod iozone;
mod load;
mod script;
mod tpcc;

pub use figure::{NasFigure, NasUnit};
pub use load::NasLoad;
pub use script::{nfs_options, nfs_server};
pub use tpcc::{TpccDatabase, TpccOptions, TpccScale};

use crate::{Accel, Guest, GuestOptions, LabError, Network, Playground, PlaygroundOptions, beside};
use host::HostParts;
use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Bytes of each of the three disks.
const DISK: u64 = 128 << 20;
/// The longest that one step of a machine takes.
const STEP: Duration = Duration::from_secs(120);
/// The client's directory on the appliance.
pub(crate) const MOUNT: &str = "/mnt";

/// The machines whose caches of files a load finds empty.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cold {
    Client,
    Everywhere,
}

/// How the appliance is built.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NasKind {
    /// Four machines that Partywall connects.
    Partywall,
    /// One machine.
    Monolith,
    /// Four machines over tap, bridge and NBD.
    Bridge,
}

impl fmt::Display for NasKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Partywall => "partywall",
            Self::Monolith => "monolith",
            Self::Bridge => "bridge+nbd",
        })
    }
}

/// A machine of the appliance, or its client.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum NasPart {
    /// The disks.
    Storage,
    /// RAID 5 over the three disks.
    Raid,
    /// ext4 and the kernel's NFS server.
    Files,
    /// The only one with a card of the outside network; it forwards.
    Gateway,
    /// All four functions.
    All,
    /// The client outside.
    Client,
}

impl NasPart {
    fn name(self) -> &'static str {
        match self {
            Self::Storage => "storage",
            Self::Raid => "raid",
            Self::Files => "files",
            Self::Gateway => "gateway",
            Self::All => "nas",
            Self::Client => "client",
        }
    }

    /// The order in which they are set up.
    fn of(kind: NasKind) -> &'static [Self] {
        match kind {
            NasKind::Monolith => &[Self::All, Self::Client],
            NasKind::Partywall | NasKind::Bridge => {
                &[Self::Storage, Self::Raid, Self::Gateway, Self::Files, Self::Client]
            }
        }
    }
}

impl NasPart {
    /// Its function in the appliance, in a few words.
    pub fn purpose(self) -> &'static str {
        script::purpose(self)
    }
}

impl fmt::Display for NasPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// An appliance with its client. All of it ends when it is dropped.
#[derive(Debug)]
pub struct Nas {
    kind: NasKind,
    // Machines go first, then what serves them.
    guests: BTreeMap<NasPart, Guest>,
    host: HostParts,
    playground: Playground,
    network: Network,
    folder: tempfile::TempDir,
    /// The folder of the sockets of the machines' shells, if they have shells.
    consoles: Option<PathBuf>,
}

impl Nas {
    /// Boots the machines and mounts the appliance on the client. `progress` gets the name of each step.
    pub fn boot(kind: NasKind, progress: &mut dyn FnMut(&str)) -> Result<Self, LabError> {
        Self::boot_machines(kind, None, progress)
    }

    /// The same, and each machine has a shell on a socket in a folder of the caller. The socket has the machine's name.
    pub fn boot_with_consoles(
        kind: NasKind,
        consoles: &Path,
        progress: &mut dyn FnMut(&str),
    ) -> Result<Self, LabError> {
        Self::boot_machines(kind, Some(consoles.to_owned()), progress)
    }

    fn boot_machines(
        kind: NasKind,
        consoles: Option<PathBuf>,
        progress: &mut dyn FnMut(&str),
    ) -> Result<Self, LabError> {
        check_programs(kind)?;
        let network = Network::bridge()?;
        let folder = crate::scratch::folder()?;
        let playground = Playground::boot(image(PlaygroundOptions::new(&format!("nas-{kind}")))?, progress)?;
        let host = HostParts::new(folder.path())?;
        let mut nas = Self { kind, guests: BTreeMap::new(), host, playground, network, folder, consoles };
        for disk in 0..script::DISKS {
            let path = nas.disk(disk);
            let make = || File::create(&path)?.set_len(DISK);
            make().map_err(LabError::file("make the disk", &path))?;
        }
        if kind == NasKind::Partywall {
            nas.host.start_switch()?;
        }
        let parts = NasPart::of(kind);
        progress(&format!("{} machines boot, {}", parts.len(), nas.accel()));
        let options = parts.iter().map(|part| nas.options(*part)).collect::<Result<_, _>>()?;
        nas.guests = parts.iter().copied().zip(nas.playground.boot_guests(options)?).collect();
        for part in parts {
            progress(&format!("{part}: {}", script::purpose(*part)));
            nas.set_up(*part, true)?;
        }
        Ok(nas)
    }

    /// How its machines are run.
    pub fn accel(&self) -> Accel {
        self.playground.accel()
    }

    /// The version of their kernel.
    pub fn kernel(&self) -> &str {
        self.playground.kernel()
    }

    /// How it is built.
    pub fn kind(&self) -> NasKind {
        self.kind
    }

    /// Its machines, in the order in which they were set up.
    pub fn parts(&self) -> &'static [NasPart] {
        NasPart::of(self.kind)
    }

    /// Commands for the host that show the broker's machines, the switch and the disks.
    pub fn host_commands(&self) -> Vec<String> {
        let mut commands = vec![format!("partywall --broker {} vm list", self.playground.socket().display())];
        commands.extend(self.host.commands());
        commands
    }

    /// One of its machines.
    pub fn guest(&self, part: NasPart) -> Result<&Guest, LabError> {
        self.guests.get(&part).ok_or_else(|| self.refused(format!("{part} is no machine of this appliance")))
    }

    /// The client.
    pub fn client(&self) -> Result<&Guest, LabError> {
        self.guest(NasPart::Client)
    }

    /// Runs a load on the client.
    pub fn run(&self, load: NasLoad) -> Result<Vec<NasFigure>, LabError> {
        load.check()?;
        load.run(self)
    }

    /// Empties caches of files.
    fn cool(&self, cold: Cold) -> Result<(), LabError> {
        match cold {
            Cold::Client => self.client()?.shell("sync; echo 3 > /proc/sys/vm/drop_caches").map(drop),
            Cold::Everywhere => {
                let drop_all = |guest: &Guest| guest.shell("sync; echo 3 > /proc/sys/vm/drop_caches").map(drop);
                self.guests.values().try_for_each(drop_all)
            }
        }
    }

    /// Ends a machine of the appliance as a loss of power does, and starts it again.
    pub fn kill_and_restart(&mut self, part: NasPart) -> Result<(), LabError> {
        let options = self.options(part)?;
        let Some(guest) = self.guests.remove(&part) else {
            return Err(self.refused(format!("{part} is no machine of this appliance")));
        };
        guest.kill();
        drop(guest);
        // The next QEMU makes the socket of its port again.
        let _ = std::fs::remove_file(self.playground.folder().join(format!("{}.port", part.name())));
        let booted = self.playground.boot_guests(vec![options])?;
        self.guests.extend(booted.into_iter().map(|guest| (part, guest)));
        self.set_up(part, false)
    }

    /// Bytes that the back ends of imported disks have read, written and copied.
    pub fn disk_bytes(&self) -> Result<[u64; 3], LabError> {
        self.host.disk_bytes()
    }

    fn refused(&self, what: String) -> LabError {
        self.playground.refused(what)
    }

    fn disk(&self, number: usize) -> PathBuf {
        self.folder.path().join(format!("disk{number}.raw"))
    }

    fn options(&self, part: NasPart) -> Result<GuestOptions, LabError> {
        // The client has PostgreSQL's programs in its memory.
        let memory = if part == NasPart::Client { 1024 } else { 512 };
        let mut options = GuestOptions::new(part.name()).memory(memory);
        if let Some(consoles) = &self.consoles {
            options = options.console(&consoles.join(part.name()));
        }
        let is_outside = match self.kind {
            NasKind::Partywall => matches!(part, NasPart::Gateway | NasPart::Client),
            NasKind::Monolith | NasKind::Bridge => true,
        };
        if is_outside {
            options = options.network(&self.network)?;
        }
        if matches!(part, NasPart::Storage | NasPart::All) {
            for number in 0..script::DISKS {
                options = options.arguments([
                    "-drive".to_owned(),
                    format!("file={},if=none,id=d{number},format=raw", self.disk(number).display()),
                    "-device".to_owned(),
                    format!("virtio-blk-pci,drive=d{number}"),
                ]);
            }
        }
        let has_devices = matches!(part, NasPart::Raid | NasPart::Files | NasPart::Gateway);
        if self.kind == NasKind::Partywall && has_devices {
            options = options.shared_memory();
        }
        Ok(options)
    }

    /// Gives a machine what it has from its neighbours, and starts its function. `is_new`: its disks are empty.
    fn set_up(&mut self, part: NasPart, is_new: bool) -> Result<(), LabError> {
        match (self.kind, part) {
            (_, NasPart::Client) => self.set_up_client(),
            (NasKind::Monolith, _) => {
                let guest = self.guest(part)?;
                guest.shell(&script::raid("/dev/vda /dev/vdb /dev/vdc", is_new))?;
                guest.shell(&script::files("/dev/md0", is_new)).map(drop)
            }
            (NasKind::Bridge, _) => self.set_up_by_bridge(part, is_new),
            (NasKind::Partywall, _) => self.set_up_by_partywall(part, is_new),
        }
    }

    fn set_up_by_partywall(&mut self, part: NasPart, is_new: bool) -> Result<(), LabError> {
        match part {
            NasPart::Storage => {
                self.attach(part)?;
                for (number, device) in ["vda", "vdb", "vdc"].into_iter().enumerate() {
                    self.export(part, &format!("storage.d{number}"), &format!("/dev/{device}"))?;
                    self.host.serve(&self.playground, &format!("storage.d{number}"))?;
                }
            }
            NasPart::Raid => {
                self.attach(part)?;
                for number in 0..script::DISKS {
                    self.plug_disk(part, &format!("storage.d{number}"))?;
                }
                let guest = self.guest(part)?;
                guest.shell(&script::wait_for_disks(script::DISKS))?;
                guest.shell(&script::raid("/dev/vda /dev/vdb /dev/vdc", is_new))?;
                self.export(part, "raid.md", "/dev/md0")?;
                self.host.serve(&self.playground, "raid.md")?;
            }
            NasPart::Gateway => {
                self.plug_card(part)?;
                self.guest(part)?.shell(&script::gateway("eth1")).map(drop)?;
            }
            NasPart::Files => {
                self.plug_disk(part, "raid.md")?;
                self.plug_card(part)?;
                let guest = self.guest(part)?;
                guest.shell(&script::wait_for_disks(1))?;
                guest.shell(&script::inside("eth0"))?;
                guest.shell(&script::files("/dev/vda", is_new))?;
            }
            NasPart::All | NasPart::Client => {}
        }
        Ok(())
    }

    fn set_up_by_bridge(&self, part: NasPart, is_new: bool) -> Result<(), LabError> {
        let address = |part| -> Result<String, LabError> {
            let address = self.guest(part)?.address();
            address.map(|address| address.to_string()).ok_or_else(|| self.refused(format!("{part} has no address")))
        };
        let guest = self.guest(part)?;
        match part {
            NasPart::Storage => guest.shell(&script::nbd_server(&["/dev/vda", "/dev/vdb", "/dev/vdc"]))?,
            NasPart::Raid => {
                guest.shell(&script::nbd_clients(&address(NasPart::Storage)?, script::DISKS))?;
                guest.shell(&script::raid("/dev/nbd0 /dev/nbd1 /dev/nbd2", is_new))?;
                guest.shell(&script::nbd_server(&["/dev/md0"]))?
            }
            NasPart::Gateway => guest.shell(&script::gateway("eth0"))?,
            NasPart::Files => {
                guest.shell(&script::nbd_clients(&address(NasPart::Raid)?, 1))?;
                guest.shell(&script::inside("eth0"))?;
                guest.shell(&script::files("/dev/nbd0", is_new))?
            }
            NasPart::All | NasPart::Client => String::new(),
        };
        Ok(())
    }

    fn set_up_client(&self) -> Result<(), LabError> {
        let address = |part| -> Result<String, LabError> {
            let address = self.guest(part)?.address();
            address.map(|address| address.to_string()).ok_or_else(|| self.refused(format!("{part} has no address")))
        };
        let client = self.client()?;
        let own = address(NasPart::Client)?;
        let line = match self.kind {
            NasKind::Monolith => script::mount(&address(NasPart::All)?, &own, None),
            NasKind::Partywall | NasKind::Bridge => script::mount(script::INSIDE, &own, Some(script::GATEWAY_OUTSIDE)),
        };
        client.shell(&line).map(drop)
    }

    /// Attaches a machine to the broker, again if it was killed.
    fn attach(&self, part: NasPart) -> Result<(), LabError> {
        let guest = self.guest(part)?;
        let deadline = Instant::now() + STEP;
        while let Err(e) = self.playground.attach(guest) {
            if Instant::now() > deadline {
                return Err(e);
            }
            std::thread::sleep(Duration::from_millis(200));
        }
        self.playground.wait_machine(part.name(), STEP)
    }

    fn export(&self, part: NasPart, domain: &str, device: &str) -> Result<(), LabError> {
        self.guest(part)?.shell(&script::export(domain, device)).map(drop)
    }

    fn plug_disk(&self, part: NasPart, domain: &str) -> Result<(), LabError> {
        let socket = self.host.socket(domain);
        let mut command = self.playground.partywall(["vm", "attach", part.name(), "--disk"]);
        command.arg(socket).arg("--qmp").arg(self.guest(part)?.monitor());
        self.playground.said(&mut command).map(drop)
    }

    fn plug_card(&self, part: NasPart) -> Result<(), LabError> {
        let mut command = self.playground.partywall(["vm", "attach", part.name(), "--net"]);
        command.arg(format!("lan:{}", part.name())).arg("--folder").arg(self.host.folder());
        command.arg("--qmp").arg(self.guest(part)?.monitor());
        self.playground.said(&mut command).map(drop)
    }
}

/// Programs of the host that a machine with the kernel's NFS server gets, and the packages that they are in.
pub const NFS_SERVER: &[(&str, &str)] = &[
    ("/usr/sbin/rpc.nfsd", "nfs-kernel-server"),
    ("/usr/sbin/rpc.mountd", "nfs-kernel-server"),
    ("/usr/sbin/exportfs", "nfs-kernel-server"),
];
/// Programs of the machines with disks.
const DISK_PROGRAMS: &[(&str, &str)] =
    &[("/sbin/mdadm", "mdadm"), ("/sbin/mke2fs", "e2fsprogs"), ("/sbin/e2fsck", "e2fsprogs")];
const NBD: &[(&str, &str)] = &[("/bin/nbd-server", "nbd-server"), ("/sbin/nbd-client", "nbd-client")];

/// Fails with the packages that are missing.
fn check_programs(kind: NasKind) -> Result<(), LabError> {
    let more: &[_] = if kind == NasKind::Bridge { NBD } else { &[] };
    let missing = DISK_PROGRAMS.iter().chain(NFS_SERVER).chain(more).find(|(path, _)| !Path::new(path).exists());
    match missing {
        None => Ok(()),
        Some((path, package)) => Err(LabError::tool(path, format!("it is missing (Debian: {package})"))),
    }
}

fn image(mut options: PlaygroundOptions) -> Result<PlaygroundOptions, LabError> {
    let programs = DISK_PROGRAMS.iter().chain(NFS_SERVER).chain(NBD).chain([&fio::FIO]);
    for (path, _) in programs.filter(|(path, _)| Path::new(path).exists()) {
        let name = Path::new(path).file_name().unwrap_or_default().to_string_lossy();
        options = options.program(*path, &name);
    }
    if let Ok(iozone) = iozone::program() {
        options = options.program(iozone, "iozone");
    }
    for module in ["virtio_blk", "md_mod", "raid456", "ext4", "nfsd", "nfsv4", "nbd"] {
        options = options.module(module);
    }
    Ok(options.program(beside("partywall-blk")?, "partywall-blk").window_mib(64))
}
