//! The monitor of a running QEMU (QMP): all commands that Partywall sends to it, and the only place with its JSON.
//!
//! - `client` sends commands and reads their answers and events, `greeting` connects and negotiates, `lines` bounds the length and the time of each line;
//! - `query` reads the state of a machine, `change` adds devices and removes them: one function for each command that is used, or for
//!   several that are sent together.
//!
//! A command costs QEMU microseconds and a turn of its main loop, so several that do not depend on one another's answers are sent
//! at once; the answers come in the order of the commands.
//!
//! A monitor serves one client at once and lets the next wait without a reply. So every wait here has a limit, and the error names the
//! most likely cause.

mod change;
mod client;
mod error;
mod greeting;
mod lines;
mod query;
#[cfg(test)]
mod tests;

pub use change::CardOptions;
pub(crate) use change::{DeviceKind, GivenFile, MemoryBackend, NewDevice, PluggedTogether};
pub use client::Qmp;
pub use error::QmpError;
pub(crate) use query::{DEVICE_FOLDERS, MemoryDevice, Survey};
