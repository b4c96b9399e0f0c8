//! Virtual machines as seen from their host: the monitor of a running QEMU, and the windows plugged into it.
//!
//! A window (`region::pmem`) is a file of the host. Its owner gets it as a writable `virtio-pmem` device, its peer as a
//! read-only `nvdimm`: [`Machine::plug`] does either in a running machine, and [`coldstart`] has the options to start one with. Machines
//! that were
//! started without places for these get it as a PCI device: [`Machine::plug_device`]. [`Machine::plug_doorbell`] adds a device that rings
//! the guest without its serial port. Network cards and disks of vhost-user back ends come by [`Machine::plug_vhost_user`].

mod bar;
pub mod coldstart;
mod doorbell;
mod error;
mod facts;
pub mod inside;
pub mod ivshmem;
mod machine;
pub mod qmp;
mod vhost_user;
mod window;

pub use bar::PluggedDevice;
pub use error::VmError;
pub use facts::{Facts, PlugKind, WindowObstacle};
pub use machine::{Machine, MigrationProgress, Unplugged, WindowLayout};
pub use qmp::CardOptions;
pub use vhost_user::{VhostUserDevice, VhostUserKind, VhostUserOptions};
pub use window::{PluggedWindow, WindowDevice, WindowRole};
