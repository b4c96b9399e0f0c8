//! Memory-speed streams, messages and broadcasts between domains that share a host.
//!
//! ```
//! use partywall::{Domain, Stream};
//! use std::io::{Read, Write};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // Usually the broker is the daemon `partywalld`; a single process can have its own.
//! let broker = partywall_daemon::Broker::embedded()?;
//! let web = Domain::builder().name("web").broker(broker.path()).join()?;
//! let mut listener = web.bind("echo")?;
//!
//! let shop = Domain::builder().name("shop").broker(broker.path()).join()?;
//! let mut client = shop.connect("web:echo")?;
//! client.write_all(b"hello")?;
//!
//! let (mut server, peer) = listener.accept()?;
//! assert_eq!(peer.name, "shop");
//! let mut hello = [0; 5];
//! server.read_exact(&mut hello)?;
//! assert_eq!(&hello, b"hello");
//! # Ok(())
//! # }
//! ```
//!
//! A channel is two rings of shared memory, one for each direction. Each side writes only its own memory and maps the
//! other's read-only, which the kernel enforces; everything read from the other side is validated. The broker
//! introduces the two and is not needed afterwards.

#[cfg(feature = "tokio")]
pub mod asynchronous;
mod broadcast;
mod channel;
mod connect;
mod desk;
mod domain;
mod endpoint;
mod error;
mod group;
mod keeper;
mod listener;
mod machines;
mod memory;
mod message;
mod options;
mod peer;
mod rx;
mod session;
mod sockets;
mod span;
mod stat;
mod stream;
mod tx;
mod waiter;

pub use broadcast::{Publisher, SlowReader, Subscriber};
pub use domain::{Domain, DomainBuilder};
pub use error::{Error, Result};
pub use group::{BadHandle, Buffer, Group, GroupBuilder, Handle, Lent, Shared};
pub use machines::{MachineAttached, MachineSpec};
pub use message::{MessageListener, MessageSocket};
pub use options::{Options, RingSize};
pub use partywall_protocol::wire::{
    ChannelRow, Directions, DomainRow, GroupRow, Kind, MachineId, MachineRow, Origin, PluggedAs, Refusal, RungBy,
    ServiceRow, User,
};
pub use partywall_shm::counters::Snapshot;
pub use peer::PeerInfo;
pub use session::default_broker_path;
pub use sockets::{SocketPolicy, SocketPolicyChange};
pub use span::{Peeked, Reserved};
pub use stat::{SocketPaths, StatPage};
pub use stream::{Listener, ReadHalf, Stream, WriteHalf};
