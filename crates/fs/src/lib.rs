//! A networked file system: the protocol, a server that cannot leave its directory, and the client's side without FUSE.
//!
//! - [`wire`] is the protocol (protocol N), without system calls.
//! - [`export`] executes requests in one directory.
//! - [`serve`] carries them over calls, streams of the library, and TCP.
//! - [`remote`] is the client: nodes and open files that survive a restart of the server.
//!
//! The program `partywall-fs`, which `partywall fs` runs, adds the command line and FUSE.

mod direct;
mod error;
pub mod export;
pub mod frame;
mod mutex;
mod places;
pub mod remote;
mod requests;
pub mod serve;
pub mod wire;

pub use error::FsError;
