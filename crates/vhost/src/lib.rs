//! Devices for virtual machines that have nothing of Partywall inside: a learning switch for vhost-user network cards, and disks.
//!
//! QEMU gives the switch the guest's memory and its queues. The switch copies a frame once, from the buffers in which the sending
//! guest's driver put it into the buffers that the receiving guest's driver offers.
//!
//! ```text
//!   guest a                         switch                          guest b
//!   virtio-net driver   --- transmit queue ==copy==> receive queue ---   virtio-net driver
//!        QEMU  ------ vhost-user socket ------ engine ------ vhost-user socket ------  QEMU
//! ```
//!
//! - [`switch`] decides where a frame goes. It makes no system call and sees only the first bytes of a frame.
//! - [`offload`] reads virtio-net headers, and splits and sums frames for receivers that cannot.
//! - [`ring`] reads and completes the queues of a guest, [`memory`] maps its memory, and [`session`] speaks vhost-user.
//! - [`disk`] is the back end of disks, on the same protocol loop.
//! - [`engine`] is the loop that serves all ports, [`control`] the socket by which ports come and go, [`config`] the file that fixes them.
//! - [`driver`] is the other end, a guest without a machine around it, for tests and the bench.

pub mod attach;
pub mod chain;
pub mod config;
pub mod control;
pub mod disk;
pub mod driver;
pub mod engine;
pub mod memory;
pub mod offload;
pub mod ring;
pub mod session;
pub mod switch;

mod card;
mod closing;
mod counters;
mod error;
mod folder;
mod handle;
mod host_address;
mod inflight;
mod line;
mod listener;
mod message;
mod poller;
mod port;
mod socket_file;
mod spin;
mod tap;
mod transfer;
mod user;

#[cfg(test)]
#[path = "../../shm/tests/random/mod.rs"]
mod random;

pub use card::PAIRS;
pub use counters::PortCounters;
pub use error::VhostError;
pub use handle::RequestHandle;
pub use user::{check_access, machine_user, user_number};
