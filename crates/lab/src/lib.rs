//! Boots virtual machines from Debian's packages, runs commands in them, moves files both ways, and breaks them.
//!
//! ```no_run
//! # fn main() -> Result<(), partywall_lab::LabError> {
//! let lab = partywall_lab::Lab::new("example", &partywall_lab::ImageOptions::default())?;
//! let guest = lab.boot(partywall_lab::GuestOptions::new("a"))?;
//! println!("{} on {}", guest.shell("uname -r")?, lab.accel());
//! # Ok(())
//! # }
//! ```
//!
//! Nothing needs root and nothing is left behind: guests end when they are dropped, and also when the process that booted
//! them ends in any other way. Their serial logs stay.

mod accel;
mod cache;
mod commands;
mod cpio;
mod cycles;
mod error;
mod guest;
mod image;
mod kernel;
mod lab;
pub mod migration;
pub mod nas;
mod network;
mod network_kind;
mod playground;
mod process;
mod program;
mod scratch;
mod switch;
mod tool;
pub mod wire;

pub use accel::Accel;
pub use cache::Cache;
pub use error::LabError;
pub use guest::{CommandOutput, Guest, GuestOptions, Running};
pub use image::{Image, ImageOptions};
pub use kernel::{Kernel, KernelKind};
pub use lab::Lab;
pub use network::Network;
pub use network_kind::NetworkKind;
pub use playground::{AttachReport, Playground, PlaygroundOptions};
pub use process::{interrupt, interrupted};
pub use program::beside;
pub use switch::NetSwitch;
pub use tool::check_tools;
