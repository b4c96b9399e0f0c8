//! Virtual machines as seen from their host: the monitor of a running QEMU, and the windows plugged into it.
//!
//! A window (`region::pmem`) is a file of the host. Its owner gets it as a writable `virtio-pmem` device, its peer as a
//! read-only `nvdimm`: [`Machine::plug`] does either in a running machine, [`coldstart`] says what to start one with.

pub mod coldstart;
mod error;
mod facts;
pub mod inside;
pub mod ivshmem;
mod machine;
pub mod qmp;
mod window;

pub use error::VmError;
pub use facts::{Facts, Obstacle};
pub use machine::{Machine, Unplugged};
pub use window::{Plugged, Role, Window};
