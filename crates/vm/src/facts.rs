//! The options of a running machine, as far as windows depend on them.

use crate::window::WindowRole;
use std::fmt;

/// The facts that the machine's monitor reports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Facts {
    /// Its name (`-name`), or its process if it has none.
    pub name: String,
    /// `running`, `paused` and so on.
    pub status: String,
    /// QEMU's version.
    pub version: String,
    /// Its kind, as `pc-q35-7.2-machine`.
    pub machine: String,
    /// It runs on the processor, not emulated.
    pub kvm: bool,
    /// It may have nvdimms (`-machine nvdimm=on`).
    pub nvdimm: bool,
    /// Slots for nvdimms (`-m slots=`).
    pub slots: u64,
    /// How much of that is taken.
    pub slots_used: u64,
    /// Bytes of address space for memory devices (`-m maxmem=`, less the memory it has).
    pub room: u64,
    /// How much of that is taken.
    pub room_used: u64,
    /// PCI Express ports that nothing is plugged into, some of them if there are many; `None` if its bus takes devices directly.
    pub free_ports: Option<Vec<String>>,
}

/// The kind of device that a window is plugged in as.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PlugKind {
    /// A memory device: `virtio-pmem`, `nvdimm`.
    Memory,
    /// The memory of a PCI device: `ivshmem-plain`.
    Device {
        /// Why it is not a memory device.
        because: WindowObstacle,
    },
}

/// The obstacle to a window.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum WindowObstacle {
    /// Started without slots for memory devices.
    NoHotPlug,
    /// Started without nvdimms.
    NoNvdimm,
    /// All slots are taken.
    NoSlot {
        /// How many there are.
        slots: u64,
    },
    /// The address space is used up.
    NoRoom {
        /// Bytes needed.
        needed: u64,
        /// Bytes left.
        left: u64,
    },
    /// Each PCI Express port has a device, or is kept for a window.
    NoPort,
    /// Its guest's user space cannot have interrupts.
    NoIommu,
}

impl fmt::Display for WindowObstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoHotPlug => f.write_str(
                "it was started without memory slots; start it with -m SIZE,slots=8,maxmem=SIZE+8G -machine ...,nvdimm=on",
            ),
            Self::NoNvdimm => {
                f.write_str("it was started without nvdimm=on, so it can own windows but not see a peer's; start it with -machine ...,nvdimm=on")
            }
            Self::NoSlot { slots } => {
                write!(f, "all its {slots} memory slots are taken; start it with more (-m ...,slots={})", slots * 2)
            }
            Self::NoRoom { needed, left } => {
                write!(f, "it has room for {left} more bytes of memory devices and {needed} are needed; start it with a larger maxmem")
            }
            Self::NoIommu => f.write_str(
                "it has no IOMMU; start it with -machine q35,...,kernel-irqchip=split -device intel-iommu,intremap=on, and its kernel with intel_iommu=on",
            ),
            Self::NoPort => f.write_str(
                "no PCI Express port is free to plug into; start it with more (-device pcie-root-port,id=pw1,chassis=11, with another id and chassis for each)",
            ),
        }
    }
}

impl Facts {
    /// As what this machine takes windows: by how it was started, so that it stays the same as long as it runs.
    pub fn kind(&self) -> PlugKind {
        match (self.room, self.nvdimm) {
            (0, _) => PlugKind::Device { because: WindowObstacle::NoHotPlug },
            (_, false) => PlugKind::Device { because: WindowObstacle::NoNvdimm },
            _ => PlugKind::Memory,
        }
    }

    /// The obstacle to a window of `size` bytes in either role, as the kind that this machine takes.
    pub fn any_obstacle(&self, size: u64) -> Option<WindowObstacle> {
        match self.kind() {
            PlugKind::Memory => {
                [WindowRole::Owner, WindowRole::Peer].into_iter().find_map(|role| self.obstacle(size, role))
            }
            PlugKind::Device { .. } => {
                self.free_ports.as_ref().is_some_and(Vec::is_empty).then_some(WindowObstacle::NoPort)
            }
        }
    }

    /// The obstacle to a window of `size` bytes as memory.
    pub fn obstacle(&self, size: u64, role: WindowRole) -> Option<WindowObstacle> {
        // Devices begin at multiples of a GiB, at the most.
        let left = self.room.saturating_sub(self.room_used);
        if self.room == 0 {
            return Some(WindowObstacle::NoHotPlug);
        }
        match role {
            WindowRole::Peer if !self.nvdimm => return Some(WindowObstacle::NoNvdimm),
            WindowRole::Peer if self.slots_used >= self.slots => {
                return Some(WindowObstacle::NoSlot { slots: self.slots });
            }
            WindowRole::Owner if self.free_ports.as_ref().is_some_and(Vec::is_empty) => {
                return Some(WindowObstacle::NoPort);
            }
            _ => {}
        }
        (size > left).then_some(WindowObstacle::NoRoom { needed: size, left })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn good() -> Facts {
        Facts {
            name: "a".into(),
            status: "running".into(),
            version: "7.2.0".into(),
            machine: "pc-i440fx-7.2-machine".into(),
            kvm: false,
            nvdimm: true,
            slots: 4,
            slots_used: 3,
            room: 1 << 30,
            room_used: 1 << 29,
            free_ports: None,
        }
    }

    #[test]
    fn machine_without_slots_accepts_device_windows() {
        let good = good();
        assert_eq!(good.kind(), PlugKind::Memory);
        let full = Facts { slots_used: 4, room_used: good.room, ..good.clone() };
        assert_eq!(full.kind(), PlugKind::Memory, "what is full now was not started another way");
        let kind = |because| PlugKind::Device { because };
        assert_eq!(Facts { room: 0, ..good.clone() }.kind(), kind(WindowObstacle::NoHotPlug));
        assert_eq!(Facts { nvdimm: false, ..good }.kind(), kind(WindowObstacle::NoNvdimm));
    }

    #[test]
    fn each_obstacle_is_reported_with_remedy() {
        let good = good();
        let size = 64 << 20;
        for role in [WindowRole::Owner, WindowRole::Peer] {
            assert_eq!(good.obstacle(size, role), None);
        }
        let full = Facts { slots_used: 4, ..good.clone() };
        assert_eq!(full.obstacle(size, WindowRole::Peer), Some(WindowObstacle::NoSlot { slots: 4 }));
        assert_eq!(full.obstacle(size, WindowRole::Owner), None, "virtio-pmem takes no slot");
        assert_eq!(
            Facts { nvdimm: false, ..good.clone() }.obstacle(size, WindowRole::Peer),
            Some(WindowObstacle::NoNvdimm)
        );
        assert_eq!(
            Facts { room: 0, ..good.clone() }.obstacle(size, WindowRole::Owner),
            Some(WindowObstacle::NoHotPlug)
        );
        let small = WindowObstacle::NoRoom { needed: 1 << 30, left: 1 << 29 };
        assert_eq!(good.obstacle(1 << 30, WindowRole::Owner), Some(small.clone()));
        assert!(small.to_string().contains("maxmem"));
        let q35 = Facts { free_ports: Some(vec![]), ..good };
        assert_eq!(q35.obstacle(size, WindowRole::Owner), Some(WindowObstacle::NoPort));
        assert_eq!(q35.obstacle(size, WindowRole::Peer), None);
    }
}
