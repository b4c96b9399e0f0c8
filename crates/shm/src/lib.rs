//! The structures in memory that two domains share.
//!
//! Layouts ([`layout`]), one half of one direction ([`half`]), the byte ring's index logic in it ([`producer`], [`consumer`]), the wake-up
//! protocol ([`wake`]), racing copies ([`bytes`]), the states of a half ([`state`]), its counters ([`counters`]), message framing
//! ([`record`]), records of calls ([`call`]), the policy by which a ring changes size ([`sizing`]), the state of a program's sockets for
//! other tools ([`status`]), addresses in 128 bits ([`address`]), the buffers of a group and their holders ([`group`]), and the allocator
//! of a window's pages ([`carve`]). The messages between programs are in `partywall-protocol`.
//!
//! Nothing here makes a system call, sleeps or rings a doorbell: a commit *returns* whether the peer must be rung.
//! Every value loaded from memory that a peer can write is loaded once, validated where it is loaded, and kept in
//! private memory. `docs/protocol.md` has the contract; the code names its clauses.
#![no_std]

extern crate alloc;
#[cfg(any(test, loom))]
extern crate std;

pub mod address;
pub mod bytes;
pub mod call;
pub mod carve;
pub mod consumer;
mod copying;
pub mod corrupt;
pub mod counters;
pub mod group;
pub mod half;
pub mod held;
pub mod layout;
mod numbered;
#[cfg(any(test, feature = "oracle"))]
pub mod oracle;
pub mod path;
pub mod producer;
pub mod record;
pub mod sizing;
pub mod state;
pub mod status;
pub mod sync;
pub mod wake;
