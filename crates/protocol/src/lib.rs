//! The messages between programs, and their encoding.
//!
//! The messages between a client and the broker ([`wire`]), the packets of a link ([`link`]), the frames on a machine's serial port
//! ([`port`]) and the agent's messages in them ([`agent`]), the facts about a socket ([`socket`]), the headers by which windows
//! ([`window`]) and doorbell devices ([`doorbell`]) are found, the directory that the broker
//! publishes ([`directory`]), the move rules ([`upgrade`]), the statements about sockets that were passed to other processes ([`passed`]), and
//! the environment that a program is started with ([`environment`]).
//!
//! Nothing here makes a system call. The structures in memory that two domains share are in `partywall-shm`; `docs/protocol.md` has the
//! contract, and the code names its clauses.
#![no_std]

extern crate alloc;
#[cfg(test)]
extern crate std;

pub mod agent;
pub mod directory;
pub mod doorbell;
pub mod environment;
pub mod link;
pub mod passed;
pub mod port;
pub mod socket;
pub mod upgrade;
pub mod window;
pub mod wire;
