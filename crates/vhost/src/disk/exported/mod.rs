//! Disks between domains (protocol E): one exports a disk, and the back end of another one's machine imports it.
//!
//! ```text
//!   machine that uses the disk      host                          machine that exports the disk
//!   virtio-blk driver -- queue -->  back end == one copy ==>  heap of the calls  == no copy ==>  file or block device
//! ```
//! The heaps of the calls lie in windows between machines. So the exporter's kernel reads written data where the back end has put it, and
//! puts read data where the back end copies it from.

mod changes;
mod flush;
mod import;
mod link;
mod passed;
mod server;
mod session;
mod silence;
mod wire;

pub use import::{ImportOptions, ImportedDisk};
pub use server::{DiskExport, DiskExportOptions};
