//! Loaded into an unmodified program, whose sockets then go through shared memory while their peer is on this host and is
//! loaded with it too, and over TCP otherwise.
//!
//! Every socket is the kernel's. A connection whose other end is known to the broker becomes a *candidate*: its bytes are
//! counted. When it has lived long enough to be worth it, both sides hand their socket and a region to the broker, and from
//! then on each direction may move, at a byte offset that its sender publishes, to a ring in shared memory, and back
//! (protocol T).
//!
//! ```text
//!   calls/   the exported functions: one file per group, thin
//!      |
//!   conn/    one connection: the two directions, bringing it up and down        ready/   poll, select, epoll, sleeping
//!      |                                                                        broker/  the session with the broker
//!   table    descriptor -> connection         arena    connections, in memory that survives fork
//!   local    the state of one process         lock     one holder per direction, who may be in another process
//!   real     the next definition of each function                             process   which process this memory belongs to
//! ```
//!
//! The house rules of a guest: no thread, nothing on the program's standard output or error, no allocation and no waiting for
//! a lock on the way of a byte, `errno` unchanged by successful calls, and everything that cannot be done correctly on a ring stays on TCP.

#![cfg_attr(test, allow(dead_code, reason = "in unit tests the functions that programs call are not exported"))]

mod arena;
mod awake;
mod broker;
mod buffers;
mod calls;
mod carrier;
mod conn;
mod datagram;
mod errno;
mod frames;
mod hidden;
mod installed;
mod kernel_questions;
mod local;
mod lock;
mod log;
mod netlink;
mod patience;
mod process;
mod processor_turns;
mod ready;
mod real;
mod scratch;
mod signals;
mod sockaddr;
mod start;
mod status;
mod submission;
mod sys;
mod table;
mod unconnected;
mod unseen;
mod watched;
