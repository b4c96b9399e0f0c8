#![expect(unsafe_code, reason = "a tap device is configured by ioctls that take pointers")]
//! An uplink: a tap device of the host's kernel. The kernel makes sums and segments for what lies behind it.

use crate::VhostError;
use crate::offload::{Accepts, LONG};
use crate::poller::{WatchSet, Watched};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::os::fd::{AsRawFd, OwnedFd};

/// Of `linux/if_tun.h`.
const IFF_TAP: libc::c_short = 0x0002;
const IFF_NO_PI: libc::c_short = 0x1000;
const IFF_VNET_HDR: libc::c_short = 0x4000;
const TUNSETIFF: libc::c_ulong = 0x4004_54ca;
const TUNSETOFFLOAD: libc::c_ulong = 0x4004_54d0;
const TUNSETVNETHDRSZ: libc::c_ulong = 0x4004_54d8;
const TUN_F_CSUM: libc::c_ulong = 1;
const TUN_F_TSO4: libc::c_ulong = 2;
const TUN_F_TSO6: libc::c_ulong = 4;
const TUN_F_USO4: libc::c_ulong = 0x20;
const TUN_F_USO6: libc::c_ulong = 0x40;

/// A tap device. It is made if there is none of that name, and then ends with the switch.
#[derive(Debug)]
pub(crate) struct TapDevice {
    fd: Watched<OwnedFd>,
    accepts: Accepts,
}

impl TapDevice {
    pub(crate) fn open(name: &str, poller: &WatchSet, token: u64) -> Result<Self, VhostError> {
        let bytes = name.as_bytes();
        // SAFETY: `ifreq` is a plain structure of integers and bytes, for which zeroes are a value.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        if bytes.is_empty() || bytes.len() >= request.ifr_name.len() || bytes.contains(&b'/') {
            return Err(VhostError::Refused(format!("`{name}` is no name of a network device")));
        }
        for (to, from) in request.ifr_name.iter_mut().zip(bytes) {
            *to = libc::c_char::from_ne_bytes([*from]);
        }
        request.ifr_ifru.ifru_flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR;
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
        Ok(Self { fd: poller.watch(fd, token)?, accepts })
    }

    /// The offloads of frames that it takes.
    pub(crate) fn accepts(&self) -> Accepts {
        self.accepts
    }

    /// Takes a frame with its header; `None` if there is none.
    pub(crate) fn receive(&self, into: &mut [u8]) -> Option<usize> {
        rustix::io::read(self.fd.get(), into).ok().filter(|length| *length > LONG)
    }

    /// Frames that come do not wake the loop until [`Self::resume`]. They wait in the device's queue.
    pub(crate) fn pause(&mut self) {
        self.fd.pause();
    }

    /// Frames that come wake the loop again.
    pub(crate) fn resume(&mut self) {
        self.fd.resume();
    }

    /// Whether frames that come do not wake the loop.
    pub(crate) fn is_paused(&self) -> bool {
        self.fd.is_paused()
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
