//! Typed methods: a trait that a server implements, and a client with a function for each method, from one declaration.
//!
//! The declaration is the macro [`service!`](crate::service). The traits here say what may be an argument or a result, and how its bytes
//! travel. The reader copies the bytes first and judges the copy, so a value of a peer's is a valid value of its type, whatever the peer does.

mod carried;
mod frame;
mod plain;
mod slices;

pub use carried::{Argument, Carried, Declared, MethodResult};
pub use frame::{ValueReader, ValueWriter};
pub use plain::PlainData;
pub use slices::{HeapSlice, PeerSlice, PeerSliceIter};
