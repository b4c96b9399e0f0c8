//! This machine's doorbell device (protocol I): QEMU's `ivshmem-doorbell`, driven from here by vfio.
//!
//! ```text
//!   register 12 (write)   peer << 16 | vector      rings a peer; a process has an event for it, upon which the kernel writes it
//!   MSI-X vector n        signals the event of the link that has it
//! ```
//!
//! An event that a process has had is never another's: it could take what is meant for that one.
#![expect(
    unsafe_code,
    reason = "requests to vfio that its library has no function for, and descriptors that it does not part with safely"
)]

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, IntoRawFd as _, OwnedFd, RawFd};
use std::path::Path;
use std::sync::Arc;

use partywall_protocol::doorbell;
use partywall_region::bar::{self, BarDevice};
use partywall_region::relay::GuestDoorbells;
use vfio_bindings::bindings::vfio::{
    VFIO_BASE, VFIO_DEVICE_IOEVENTFD_32, VFIO_IRQ_SET_ACTION_TRIGGER, VFIO_IRQ_SET_DATA_EVENTFD,
    VFIO_PCI_BAR0_REGION_INDEX, VFIO_PCI_BAR2_REGION_INDEX, VFIO_PCI_CONFIG_REGION_INDEX, VFIO_PCI_MSIX_IRQ_INDEX,
    VFIO_TYPE, vfio_device_ioeventfd,
};
use vfio_ioctls::{VfioContainer, VfioDevice};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};
use vmm_sys_util::ioctl::ioctl_with_ref;
use vmm_sys_util::ioctl_io_nr;

/// The driver that lets a process have a device.
const DRIVER: &str = "vfio-pci";
/// The register that rings.
const RING: u64 = 12;
/// The command register, and what it says when the device may answer and send interrupts.
const COMMAND: u64 = 4;
const MEMORY_AND_MASTER: u8 = 0x6;

/// The state of a vector.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Use {
    /// No link has used its event.
    Fresh,
    /// A link has it.
    Taken,
    /// A link has had it.
    Over,
}

/// The active device. Dropping it releases it.
pub(crate) struct Doorbell {
    device: VfioDevice,
    events: Vec<EventFd>,
    uses: Vec<Use>,
    /// Peers that an event of this machine's rings.
    rung: BTreeSet<u32>,
}

impl std::fmt::Debug for Doorbell {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Doorbell").field("uses", &self.uses).finish_non_exhaustive()
    }
}

/// Why it is not in use.
fn failed(doing: &str) -> impl Fn(vfio_ioctls::VfioError) -> io::Error {
    let advice = "; it takes root, the module vfio-pci, and a kernel with an IOMMU (intel_iommu=on)";
    move |e| io::Error::other(format!("cannot {doing}: {e}{advice}"))
}

impl Doorbell {
    /// Opens the device that is known by `id`; `None` if there is none.
    pub(crate) fn open(id: u128) -> io::Result<Option<Self>> {
        let candidates = bar::devices().into_iter().filter(|device| device.size == doorbell::SIZE as u64);
        let (ours, others): (Vec<BarDevice>, Vec<BarDevice>) = candidates.partition(|device| is_ours(device.folder()));
        if let Some(device) = others.into_iter().find(|device| bar::doorbell_id(device) == Some(id)) {
            make_ours(&device)?;
            return Self::begin(open(&device)?).map(Some);
        }
        // A device that an earlier agent has used. Reading the devices requires opening them, which resets them, and another process may
        // use one.
        let mut opened = ours.iter().filter_map(|device| open(device).ok());
        opened.find(|device| memory_of(device) == Some(id)).map(Self::begin).transpose()
    }

    fn begin(device: VfioDevice) -> io::Result<Self> {
        let count = device.get_irq_info(VFIO_PCI_MSIX_IRQ_INDEX).map_or(0, |irq| irq.count);
        let mut command = [0; 2];
        device.region_read(VFIO_PCI_CONFIG_REGION_INDEX, &mut command, COMMAND);
        command[0] |= MEMORY_AND_MASTER;
        device.region_write(VFIO_PCI_CONFIG_REGION_INDEX, &command, COMMAND);
        let events = (0..count).map(|_| event()).collect::<io::Result<Vec<_>>>()?;
        device.enable_msix(events.iter().collect()).map_err(failed("have interrupts"))?;
        Ok(Self { device, uses: vec![Use::Fresh; events.len()], events, rung: BTreeSet::new() })
    }

    /// Makes a new event for a vector whose link is no more. The kernel takes an interrupt apart and makes it again for that, up to 1 ms in an
    /// emulated machine. So this is done for one vector at a time: the agent's links and frames wait meanwhile.
    fn renew(&mut self, vector: usize) -> io::Result<()> {
        let event = event()?;
        let request = OneInterrupt {
            argsz: size_of::<OneInterrupt>() as u32,
            flags: VFIO_IRQ_SET_DATA_EVENTFD | VFIO_IRQ_SET_ACTION_TRIGGER,
            index: VFIO_PCI_MSIX_IRQ_INDEX,
            start: u32::try_from(vector).unwrap_or(u32::MAX),
            count: 1,
            event: event.as_raw_fd(),
        };
        // SAFETY: `VFIO_DEVICE_SET_IRQS` reads one such structure, of the size that is in it, and keeps no pointer to it.
        if unsafe { ioctl_with_ref(&self.device, VFIO_DEVICE_SET_IRQS(), &request) } != 0 {
            return Err(io::Error::last_os_error());
        }
        self.events[vector] = event;
        Ok(())
    }

    /// Has the kernel ring a peer whenever this event is signalled; no more if the descriptor is -1.
    fn ring_by(&self, peer: u32, fd: RawFd) -> io::Result<()> {
        let request = vfio_device_ioeventfd {
            argsz: size_of::<vfio_device_ioeventfd>() as u32,
            flags: VFIO_DEVICE_IOEVENTFD_32,
            offset: self.device.get_region_offset(VFIO_PCI_BAR0_REGION_INDEX) + RING,
            data: word(peer).into(),
            fd,
            ..Default::default()
        };
        // SAFETY: `VFIO_DEVICE_IOEVENTFD` reads one such structure, of the size that is in it, and keeps no pointer to it.
        match unsafe { ioctl_with_ref(&self.device, VFIO_DEVICE_IOEVENTFD(), &request) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

impl GuestDoorbells for Doorbell {
    fn take(&mut self) -> Option<(u32, OwnedFd)> {
        let fresh = self.uses.iter().position(|used| *used == Use::Fresh);
        let vector = fresh.or_else(|| {
            let over: Vec<usize> = (0..self.uses.len()).filter(|at| self.uses[*at] == Use::Over).collect();
            over.into_iter().find(|vector| match self.renew(*vector) {
                Ok(()) => true,
                Err(error) => {
                    tracing::debug!(%error, vector, "a vector cannot signal another event");
                    false
                }
            })
        })?;
        let event = self.events[vector].try_clone().ok()?;
        self.uses[vector] = Use::Taken;
        Some((u32::try_from(vector).ok()?, owned(event)))
    }

    fn give_back(&mut self, vector: u32) {
        if let Some(used) = self.uses.get_mut(vector as usize) {
            *used = Use::Over;
        }
    }

    fn ring(&self, peer: u32) {
        self.device.region_write(VFIO_PCI_BAR0_REGION_INDEX, &word(peer).to_le_bytes(), RING);
    }

    fn ring_upon(&mut self, peer: u32, event: BorrowedFd<'_>) -> bool {
        if let Err(error) = self.ring_by(peer, event.as_raw_fd()) {
            tracing::debug!(%error, "processes ring by the agent");
            return false;
        }
        tracing::debug!(peer, "a process rings by itself");
        self.rung.insert(peer);
        true
    }

    fn forget(&mut self, peer: u32) {
        if self.rung.remove(&peer) {
            // It fails only for what there is not.
            let _ = self.ring_by(peer, -1);
        }
    }
}

/// The kernel's `vfio_irq_set` with one descriptor, which its library makes for all vectors of a device only.
#[repr(C)]
struct OneInterrupt {
    argsz: u32,
    flags: u32,
    index: u32,
    start: u32,
    count: u32,
    event: RawFd,
}

ioctl_io_nr!(VFIO_DEVICE_SET_IRQS, VFIO_TYPE.into(), VFIO_BASE + 10);
ioctl_io_nr!(VFIO_DEVICE_IOEVENTFD, VFIO_TYPE.into(), VFIO_BASE + 16);

/// The word that rings a peer: its first event, of those that the device was given.
fn word(peer: u32) -> u32 {
    peer << 16
}

fn owned(event: EventFd) -> OwnedFd {
    // SAFETY: the descriptor has just been parted with, and is nobody else's.
    unsafe { OwnedFd::from_raw_fd(event.into_raw_fd()) }
}

fn event() -> io::Result<EventFd> {
    EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK)
}

/// Whether processes may have it.
fn is_ours(folder: &Path) -> bool {
    fs::read_link(folder.join("driver")).is_ok_and(|driver| driver.file_name().is_some_and(|name| name == DRIVER))
}

/// Gives it the driver that lets processes have it.
fn make_ours(device: &BarDevice) -> io::Result<()> {
    let folder = device.folder();
    let write = |path: &Path, text: &str| {
        fs::write(path, text).map_err(|e| io::Error::new(e.kind(), format!("cannot write {}: {e}", path.display())))
    };
    write(&folder.join("driver_override"), DRIVER)?;
    write(Path::new("/sys/bus/pci/drivers_probe"), &device.name)?;
    if is_ours(folder) {
        return Ok(());
    }
    let name = &device.name;
    Err(io::Error::other(match folder.join("iommu_group").exists() {
        false => format!("{name} has no IOMMU; boot this machine's kernel with intel_iommu=on"),
        true => format!("{name} does not get the driver {DRIVER}; modprobe {DRIVER}"),
    }))
}

fn open(device: &BarDevice) -> io::Result<VfioDevice> {
    let container = VfioContainer::new(None).map_err(failed("open vfio"))?;
    VfioDevice::new(device.folder(), Arc::new(container), false).map_err(failed("open the doorbell device"))
}

fn memory_of(device: &VfioDevice) -> Option<u128> {
    let mut memory = [0; doorbell::SIZE];
    device.region_read(VFIO_PCI_BAR2_REGION_INDEX, &mut memory, 0);
    doorbell::id(&memory)
}
