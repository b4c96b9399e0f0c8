//! The Partywall broker: it names domains, authorises connections, and hands out memory and links. It never touches payload.
//!
//! - [`core`] decides everything, without any I/O: events in, actions out.
//! - [`policy`] has the operator's rules.
//! - [`Server`] is the event loop around the core; [`Broker`] runs one on a thread, for programs and tests.
//!
//! The program `partywalld` is a command line, signals and a log around a [`Server`]. The contract with clients is
//! `docs/protocol.md`, clause C; this crate depends on `partywall-protocol` for its messages and on `partywall-region` for
//! packets and for the proof that a descriptor is a sealed region.

mod broker;
mod config;
mod control;
pub mod core;
mod credentials;
mod machines;
mod metrics;
pub mod policy;
pub mod priority;
mod server;
mod unix_socket;

pub use broker::Broker;
pub use config::Config;
pub use control::ServerControl;
pub use credentials::{Credentials, Home};
pub use server::{Server, StartError};
