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
//! other's read-only, which the kernel enforces. Everything read from the other side is validated. The broker
//! connects the two sides, and is not needed for their bytes afterwards.

mod arrivals;
#[cfg(feature = "tokio")]
pub mod asynchronous;
mod broadcast;
mod channel;
pub mod cluster;
mod connect;
mod desk;
mod domain;
mod endpoint;
mod error;
mod events;
mod further;
mod group;
mod keeper;
mod late_answer;
mod listener;
mod machines;
mod memory;
mod message;
#[cfg(test)]
mod moved_tests;
mod options;
mod peer;
pub mod rpc;
mod rx;
mod service;
mod service_of_tasks;
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
pub use events::{EventBatch, EventFeed};
pub use further::{ChannelRegion, PeerChannelRegion, Regions};
pub use group::{
    BadHandle, BorrowedPart, Buffer, BufferPart, Group, GroupBuilder, Handle, Lent, MachineWindow, Shared,
};
pub use machines::{MachineAttached, MachineSpec};
pub use message::{MessageListener, MessageReceiver, MessageSender, MessageSocket};
pub use options::{Options, RingSize};
/// A row of the broker's list of groups: a member, and its memory.
///
/// ```
/// use partywall::GroupRow;
///
/// fn line(member: &GroupRow) -> String {
///     format!("{}: {} has {} of {} bytes free", member.group, member.member, member.free, member.size)
/// }
/// # let _ = line;
/// ```
pub use partywall_protocol::wire::GroupRow;
/// Why the broker refused a request.
///
/// ```
/// use partywall::{Domain, Error, Refusal};
///
/// /// Whether the same call may succeed later.
/// fn may_come(error: &Error) -> bool {
///     let Error::Refused { code, .. } = error else { return false };
///     matches!(code, Refusal::NoSuchDomain | Refusal::NoSuchService | Refusal::BacklogFull)
/// }
///
/// # let broker = partywall_daemon::Broker::embedded()?;
/// # let web = Domain::builder().name("web").broker(broker.path()).join()?;
/// assert!(may_come(&web.connect("db:queries").unwrap_err()));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub use partywall_protocol::wire::Refusal;
/// Rows of the broker's lists of domains, services and channels.
///
/// ```
/// use partywall::{ChannelRow, Directions, Domain, DomainRow, Kind, ServiceRow};
///
/// fn line(channel: &ChannelRow) -> String {
///     let arrow = match channel.directions {
///         Directions::FORWARD => "->",
///         Directions::REVERSE => "<-",
///         _ => "<->",
///     };
///     format!("{} {arrow} {}", channel.from_name, channel.to_name)
/// }
///
/// # let broker = partywall_daemon::Broker::embedded()?;
/// # let web = Domain::builder().name("web").broker(broker.path()).join()?;
/// # let _listener = web.bind("echo")?;
/// let _client = web.connect("web:echo")?;
/// let (domains, services): (Vec<DomainRow>, Vec<ServiceRow>) = (web.domains()?, web.services()?);
/// assert_eq!((domains[0].sessions, services[0].kind), (2, Kind::Stream));
/// assert_eq!(line(&web.channels()?[0]), "web <-> web");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub use partywall_protocol::wire::{ChannelRow, Directions, DomainRow, Kind, ServiceRow};
/// An event of the broker.
///
/// ```
/// use partywall::{EventKind, EventRow, Refusal};
///
/// fn line(event: &EventRow) -> String {
///     match (event.kind, Refusal::from_number(event.code)) {
///         (EventKind::ConnectRefused, Some(code)) => {
///             format!("{} -> {}:{} refused ({code}): {}", event.from, event.to, event.service, event.grounds)
///         }
///         (kind, _) => format!("{kind} {} by {}", event.from, event.user),
///     }
/// }
/// # let _ = line;
/// ```
pub use partywall_protocol::wire::{EventKind, EventRow};
/// The user that a program counts as, and the place where it runs.
///
/// ```
/// use partywall::{MachineId, Origin, User};
///
/// assert_eq!(User::Host(1000).origin(), Origin::Host);
/// assert_eq!(User::Host(1000).uid(), Some(1000));
///
/// // All programs of a virtual machine count as one user: only its own kernel could tell them apart.
/// let machine = MachineId::new(7).expect("a number from 1 on");
/// assert_eq!(User::Machine(machine).origin(), Origin::Machine(machine));
/// assert_eq!(User::Machine(machine).uid(), None);
/// ```
pub use partywall_protocol::wire::{MachineId, Origin, User};
/// A row of the broker's list of virtual machines.
///
/// ```
/// use partywall::{MachineRow, Mobility, PluggedAs, RungBy};
///
/// /// Why a machine is slower than it could be.
/// fn advice(machine: &MachineRow) -> Option<&'static str> {
///     match (machine.plugged_as, machine.rung_by) {
///         (PluggedAs::Device, _) => Some("start it with slots for memory, so that its windows are no PCI devices"),
///         (_, RungBy::Port) => Some("start it with a doorbell device"),
///         _ => None,
///     }
/// }
/// /// Whether QEMU can migrate it to another host as it is.
/// fn may_leave(machine: &MachineRow) -> bool {
///     machine.mobility == Mobility::Migratable
/// }
/// # let _ = (advice, may_leave);
/// ```
pub use partywall_protocol::wire::{MachineRow, Mobility, PluggedAs, RungBy};
/// The counters of a half of a connection.
///
/// ```
/// use partywall::{Options, Snapshot, Stream};
/// use std::io::Write;
///
/// let (mut client, _server) = Stream::pair(&Options::default())?;
/// client.write_all(b"hello")?;
/// let snapshot: Snapshot = client.writer()?.counters();
/// assert_eq!(snapshot.bytes, 5);
/// for (name, value) in snapshot.named() {
///     println!("{name}: {value}");
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub use partywall_shm::counters::Snapshot;
pub use peer::PeerInfo;
pub use session::default_broker_path;
pub use sockets::{MoveRules, MoveRulesChange, PolicyDecision, PolicyRequest, PolicyUser};
pub use span::{Peeked, Reserved};
pub use stat::{SocketPaths, StatPage};
pub use stream::{Listener, ReadHalf, Stream, WriteHalf};
