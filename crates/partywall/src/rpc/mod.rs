//! Calls that pass pointers: functions of another process, called without serialising their data (protocol K).
//!
//! A call is a record of one cache line in a ring. Up to 40 bytes of arguments travel in it; larger ones stay where they are, in the caller's
//! [`Heap`], and the server reads them there. Results come back the same way, in the server's heap.
//!
//! ```text
//!        client                                  server
//!   +------------------+   record: call     +------------------+
//!   | ring of records  | -----------------> | reads in place   |
//!   | heap: arguments  | - - - - - - - - -> |                  |
//!   |                  |   record: reply    |                  |
//!   | reads in place   | <----------------- | ring of records  |
//!   |                  | <- - - - - - - - - | heap: results    |
//!   +------------------+                    +------------------+
//! ```
//!
//! ```
//! use partywall::rpc::{CallClient, CallServer};
//!
//! # let broker = partywall_daemon::Broker::embedded()?;
//! # let web = partywall::Domain::builder().name("web").broker(broker.path()).join()?;
//! let _server = CallServer::builder()
//!     .method("add", |call| {
//!         let (a, b): ([u8; 8], [u8; 8]) = (call.args().array(0)?, call.args().array(8)?);
//!         Ok((u64::from_le_bytes(a) + u64::from_le_bytes(b)).to_le_bytes().into())
//!     })
//!     .bind(&web, "math")?;
//!
//! let client = CallClient::connect("web:math")?;
//! let arguments = [7u64.to_le_bytes(), 8u64.to_le_bytes()].concat();
//! let reply = client.call("add", &arguments)?;
//! assert_eq!(u64::from_le_bytes(reply.array(0)?), 15);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! The memory of a peer is read at one of two levels of trust. A [`PeerView`] is guarded: it copies, and checks every extent.
//! [`PeerView::trusting`] gives the bytes in place, to programs that trust their peer.

pub(crate) mod answer;
pub(crate) mod calling_peer;
pub(crate) mod client;
pub(crate) mod conversation;
pub(crate) mod driver;
pub(crate) mod error;
mod exclusive;
pub(crate) mod functions;
pub(crate) mod heap;
mod heap_addresses;
pub(crate) mod incoming;
pub(crate) mod method;
pub(crate) mod methods;
pub(crate) mod reply;
pub(crate) mod reply_side;
pub(crate) mod sender;
pub(crate) mod server;
pub(crate) mod slots;
mod spaces;
pub(crate) mod status;
mod typed;
pub(crate) mod view;

pub use answer::CallAnswer;
pub use client::{CallClient, CallClientBuilder, Ongoing};
pub use error::CallError;
pub use exclusive::ExclusiveClient;
pub use heap::{Block, Heap, HeapOptions, HeapStats};
pub use incoming::IncomingCall;
pub use method::Method;
pub use reply::Reply;
pub use server::{CallServer, CallServerBuilder};
pub use typed::{
    Argument, Carried, Declared, HeapSlice, MethodResult, PeerSlice, PeerSliceIter, PlainData, ValueReader, ValueWriter,
};
pub use view::PeerView;

use crate::{Options, RingSize};

/// Calls of one connection that may be unanswered at a time (protocol K4).
pub(crate) const WINDOW: usize = 512;
/// Records in each side's ring: the answers to all of them, and every record about memory.
const RECORDS: u64 = 1024;

/// Options of the channel under a connection of calls. Its rings keep their size, which the window of calls is made for.
pub(crate) fn channel_options(options: &Options) -> Options {
    let ring = RingSize::Fixed(RECORDS * partywall_shm::call::RECORD);
    Options { ring, one_way: false, ..options.clone() }
}
