//! The gateway of a host: it shares the names of this host's domains and services with other hosts, and carries streams between them
//! (protocol H).
//!
//! ```text
//!   broker  <-- names, claims, routes -->  gateway  <== QUIC, mutual TLS ==>  gateway  <-->  broker
//!                                             |                                  |
//!                                             +---------------- etcd ------------+
//! ```
//!
//! A program connects as always. Its broker hands a connection to a domain of another host to the gateway as an ordinary channel. The gateway
//! finds the host in its table, opens a stream to the gateway there, and copies bytes. That gateway connects to the service as the remote client.
//! Both brokers ask their policies.

#![forbid(unsafe_code)]

pub mod certificates;
pub mod config;
pub mod entry;
mod error;
pub mod table;

mod carry;
mod counters;
mod directory;
mod frame;
mod gateway;
mod handshakes;
mod inbound;
mod listing;
mod metrics;
mod names;
mod peers;
mod routes;
mod shares;
mod socket;
#[cfg(test)]
mod testing;
mod tls;

pub use error::GatewayError;
pub use gateway::run;
