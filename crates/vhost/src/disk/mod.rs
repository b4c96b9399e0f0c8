//! A disk for virtual machines: a vhost-user back end for files and block devices.
//!
//! ```text
//!   guest                          back end                         host
//!   virtio-blk driver  ---  queue, buffers  === io_uring, no copy ===  file or block device
//!        QEMU  ------ vhost-user socket ------ engine
//!        QEMU  keeps: requests in flight  <--- notes each request that it takes and completes
//! ```
//!
//! - [`request`] reads a request from a queue and judges it. It makes no system call.
//! - [`engine`] is the loop of one disk, in one thread. [`control`] is the socket by which it is resized and asked for counters.
//! - [`exported`] is for disks of other domains, in place of a file of this host.
//! - [`driver`] is a guest's driver without a machine around it, for tests and the bench.

pub mod attach;
pub mod background;
pub mod control;
pub mod driver;
pub mod engine;
pub mod exported;
pub mod load;
pub mod request;

mod counters;
mod discard;
mod discarder;
mod fault;
mod file;
mod flusher;
mod image;
mod store;
mod store_task;
mod task;
mod uring;

pub use counters::{CopiesPerByte, DiskCounters};
pub use fault::{FaultPlan, FaultRule};
pub use image::DiskOptions;

/// Queues that a disk has at most.
pub const MOST_QUEUES: usize = 16;
