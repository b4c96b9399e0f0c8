#![expect(unsafe_code, reason = "a tap device is configured by ioctls that take pointers")]
//! An uplink: a tap device of the host's kernel. The kernel makes sums and segments for what lies behind it.
//!
//! A device that the switch makes is persistent: it outlives the process with its addresses and its bridge, and the next process of the
//! switch takes it up again. It goes when its port is removed.

mod record;

use crate::VhostError;
use crate::offload::{Accepts, LONG};
use crate::poller::{WatchSet, Watched};
use record::{RecordedDevice, TapRecord};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, netdevice, socket_with};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;

/// Of `linux/if_tun.h`.
const IFF_TAP: libc::c_short = 0x0002;
const IFF_NO_PI: libc::c_short = 0x1000;
const IFF_VNET_HDR: libc::c_short = 0x4000;
/// Refuse a device that exists.
const IFF_TUN_EXCL: libc::c_short = 0x8000_u16 as libc::c_short;
const TUNSETIFF: libc::c_ulong = 0x4004_54ca;
const TUNSETPERSIST: libc::c_ulong = 0x4004_54cb;
const TUNSETOWNER: libc::c_ulong = 0x4004_54cc;
const TUNSETOFFLOAD: libc::c_ulong = 0x4004_54d0;
const TUNSETVNETHDRSZ: libc::c_ulong = 0x4004_54d8;
/// Of `asm-generic/socket.h`.
const SO_NETNS_COOKIE: libc::c_int = 71;
const TUN_F_CSUM: libc::c_ulong = 1;
const TUN_F_TSO4: libc::c_ulong = 2;
const TUN_F_TSO6: libc::c_ulong = 4;
const TUN_F_USO4: libc::c_ulong = 0x20;
const TUN_F_USO6: libc::c_ulong = 0x40;

/// A tap device.
#[derive(Debug)]
pub(crate) struct TapDevice {
    fd: Watched<OwnedFd>,
    accepts: Accepts,
    /// It was removed under the switch, by `ip link delete` or with its network namespace.
    gone: bool,
    /// This process has made it.
    fresh: bool,
    made: Option<MadeDevice>,
    record: TapRecord,
}

/// A device that the switch has made, now or in an earlier process.
#[derive(Debug)]
struct MadeDevice {
    name: String,
    index: u32,
}

impl TapDevice {
    /// Opens a device, which is made if there is none of that name. The record of a device that is made is in `folder`.
    pub(crate) fn open(name: &str, folder: &Path, poller: &WatchSet, token: u64) -> Result<Self, VhostError> {
        let bytes = name.as_bytes();
        // SAFETY: `ifreq` is a plain structure of integers and bytes, for which zeroes are a value.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        if bytes.is_empty() || bytes.len() >= request.ifr_name.len() || bytes.contains(&b'/') {
            return Err(VhostError::Refused(format!("`{name}` is no name of a network device")));
        }
        for (to, from) in request.ifr_name.iter_mut().zip(bytes) {
            *to = libc::c_char::from_ne_bytes([*from]);
        }
        let record = TapRecord::new(folder, name, namespace());
        let recorded = record.find();
        let find = || index_of(name).map_err(VhostError::file("look for the network device", name));
        let before = find()?;
        let exclusive = if before.is_none() { IFF_TUN_EXCL } else { 0 };
        request.ifr_ifru.ifru_flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR | exclusive;
        if before.is_none() && matches!(recorded, RecordedDevice::Here(_)) {
            let why = "it was deleted, renamed or moved to another network namespace; a new one is made";
            tracing::warn!(port = name, "the device of this port is not there: {why}");
        }
        let stays = "the switch does not remove it, and `ip link delete` does";
        match recorded {
            RecordedDevice::Elsewhere => {
                tracing::warn!(port = name, "the device of this port was made in another network namespace: {stays}");
            }
            RecordedDevice::Unknown => {
                tracing::warn!(
                    port = name,
                    "it is unknown in which network namespace the device of this port was made: {stays}"
                );
            }
            RecordedDevice::Absent | RecordedDevice::Here(_) => {}
        }
        let path = "/dev/net/tun";
        let fd = rustix::fs::open(path, OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty())
            .map_err(|e| VhostError::file("open", path)(e.into()))?;
        let size: libc::c_int = LONG as libc::c_int;
        // SAFETY: the descriptor is open. The first call reads and writes an `ifreq`, the second reads an `int`, both alive.
        let done = unsafe {
            libc::ioctl(fd.as_raw_fd(), TUNSETIFF, &mut request) == 0
                && libc::ioctl(fd.as_raw_fd(), TUNSETVNETHDRSZ, &size) == 0
        };
        // SAFETY: the descriptor is open, and the call takes a number.
        let takes = |bits: libc::c_ulong| done && unsafe { libc::ioctl(fd.as_raw_fd(), TUNSETOFFLOAD, bits) } == 0;
        let all = TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6;
        // Linux before 6.2 refuses the bits of UDP, and then takes no datagrams that are still to be cut.
        let uso = takes(all | TUN_F_USO4 | TUN_F_USO6);
        if !uso && !takes(all) {
            return Err(VhostError::file("use the tap device", name)(std::io::Error::last_os_error()));
        }
        let accepts = Accepts { csum: true, tso4: true, tso6: true, uso4: uso, uso6: uso };
        let fd = poller.watch(fd, token)?;
        let mut made = None;
        let index = find()?;
        if before.is_some() && index != before {
            return Err(VhostError::Refused(format!("the network device `{name}` was replaced while it was opened")));
        }
        if let Some(index) = index
            && (before.is_none() || recorded == RecordedDevice::Here(index))
        {
            set_owner(fd.get()).map_err(VhostError::file("set the owner of the tap device", name))?;
            // The record comes first, so that each persistent device that the switch has made has one.
            record.write(index)?;
            set_persistent(fd.get(), true).map_err(|e| {
                record.remove();
                VhostError::file("keep the tap device", name)(e)
            })?;
            made = Some(MadeDevice { name: name.to_owned(), index });
        }
        Ok(Self { fd, accepts, gone: false, fresh: before.is_none(), made, record })
    }

    /// Removes the device with its port, if the switch has made it. A record of another device goes in any case.
    pub(crate) fn remove(self) {
        if self.made.is_some() {
            // The device goes with its last descriptor, which is this one.
            let _ = set_persistent(self.fd.get(), false);
        }
        self.record.remove();
    }

    /// Removes the device only if this process has made it. For a port that did not come into being.
    pub(crate) fn abandon(self) {
        if self.fresh {
            self.remove();
        }
    }

    /// The process ends, and its port does not: the device stays. The next process could not find a device that is not in this network
    /// namespace under this name, so such a device goes.
    pub(crate) fn release(self) {
        // After a failed search, the device stays.
        let is_elsewhere = |made: &MadeDevice| index_of(&made.name).is_ok_and(|index| index != Some(made.index));
        if self.made.as_ref().is_some_and(is_elsewhere) {
            self.remove();
        }
    }

    /// Whether the kernel still has the device.
    pub(crate) fn exists(&self) -> bool {
        !self.gone
    }

    /// The offloads of frames that it takes.
    pub(crate) fn accepts(&self) -> Accepts {
        self.accepts
    }

    /// Takes a frame with its header; `None` if there is none.
    pub(crate) fn receive(&mut self, into: &mut [u8]) -> Option<usize> {
        match rustix::io::read(self.fd.get(), into) {
            // Its descriptor has an error to report from now on, which would end each sleep.
            Err(Errno::BADFD) if !self.gone => {
                self.gone = true;
                self.fd.pause();
                tracing::warn!(
                    "the tap device of a port is gone; reload the file that lists the port, or remove the port and add it again"
                );
                None
            }
            read => read.ok().filter(|length| *length > LONG),
        }
    }

    /// Frames that come do not wake the loop until [`Self::resume`]. They wait in the device's queue.
    pub(crate) fn pause(&mut self) {
        self.fd.pause();
    }

    /// Frames that come wake the loop again.
    pub(crate) fn resume(&mut self) {
        if !self.gone {
            self.fd.resume();
        }
    }

    /// Whether frames that come do not wake the loop, and shall.
    pub(crate) fn is_paused(&self) -> bool {
        self.fd.is_paused() && !self.gone
    }

    /// Sends a frame with its header; `false` if the device has no room or refuses it.
    pub(crate) fn send(&self, frame: &[u8]) -> bool {
        loop {
            match rustix::io::write(self.fd.get(), frame) {
                Err(Errno::INTR) => {}
                other => return other.is_ok(),
            }
        }
    }
}

/// Removes the devices that earlier processes of a switch have made, by the records in its folder, for ports that it has no longer.
pub(crate) fn remove_strays(folder: &Path, is_port: impl Fn(&str) -> bool) {
    let names = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let names = names.filter_map(|entry| Some(entry.file_name().to_str()?.strip_suffix(".tap")?.to_owned()));
    for name in names.filter(|name| !is_port(name)) {
        let recorded = TapRecord::new(folder, &name, namespace()).find();
        // A device of this name that the switch has not made stays.
        if !index_of(&name).is_ok_and(|index| index.is_some_and(|index| recorded == RecordedDevice::Here(index))) {
            continue;
        }
        match WatchSet::new().and_then(|poller| TapDevice::open(&name, folder, &poller, 0)) {
            Ok(device) => {
                device.remove();
                tracing::info!(port = name, "the device of a port that the switch has no longer was removed");
            }
            Err(e) => tracing::warn!(port = name, "the device of a port that the switch has no longer stays: {e}"),
        }
    }
}

/// The index of a device of this network namespace; `None` if there is no device of this name.
fn index_of(name: &str) -> std::io::Result<Option<u32>> {
    let socket = socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    match netdevice::name_to_index(&socket, name) {
        Ok(index) => Ok(Some(index)),
        Err(Errno::NODEV) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

/// The network namespace of this thread. The number of its file may be used again after it has ended. Its cookie, which Linux has since 5.14,
/// is unique until the host boots.
fn namespace() -> Option<String> {
    let status = rustix::fs::stat("/proc/thread-self/ns/net").ok()?;
    let socket = socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None).ok()?;
    let mut cookie = 0_u64;
    let mut size = size_of::<u64>() as libc::socklen_t;
    let to = (&raw mut cookie).cast();
    // SAFETY: the socket is open during the call, which writes at most `size` bytes to `cookie`, and to `size`. Both are alive.
    unsafe { libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, SO_NETNS_COOKIE, to, &raw mut size) };
    Some(format!("{}:{}:{cookie}", status.st_dev, status.st_ino))
}

/// Whether the device outlives its descriptors.
fn set_persistent(fd: &impl AsFd, persistent: bool) -> std::io::Result<()> {
    // SAFETY: the borrowed descriptor is open during the call, which takes a number and no pointer.
    let done = unsafe { libc::ioctl(fd.as_fd().as_raw_fd(), TUNSETPERSIST, libc::c_ulong::from(persistent)) };
    if done == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

/// Only this process's user and administrators of the network may attach to the device. A device without an owner is open to all users.
fn set_owner(fd: &impl AsFd) -> std::io::Result<()> {
    let user = libc::c_ulong::from(rustix::process::geteuid().as_raw());
    // SAFETY: the borrowed descriptor is open during the call, which takes a number and no pointer.
    let done = unsafe { libc::ioctl(fd.as_fd().as_raw_fd(), TUNSETOWNER, user) };
    if done == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}
