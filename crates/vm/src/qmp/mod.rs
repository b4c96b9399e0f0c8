//! The monitor of a running QEMU (QMP): all that Partywall asks of it, and the only place with JSON of it.
//!
//! - `client` sends commands and reads their answers and events, `greeting` connects and negotiates;
//! - `query` asks what a machine is and has, `change` adds to it and takes from it: one function for each command that is used, or for
//!   several that are sent together.
//!
//! A command costs QEMU microseconds and a turn of its main loop, so several that do not depend on one another's answers are sent
//! at once; the answers come in the order of the commands.
//!
//! A monitor serves one client at a time and lets the next wait without a word. Every wait here therefore has an end, and
//! the message says what the silence most likely means.

mod change;
mod client;
mod error;
mod greeting;
mod query;
#[cfg(test)]
mod tests;

pub(crate) use change::{DeviceKind, GivenFile, MemoryBackend, NewDevice, PluggedTogether};
pub use client::Qmp;
pub use error::QmpError;
pub(crate) use query::{DEVICE_FOLDERS, MemoryDevice, Survey};
