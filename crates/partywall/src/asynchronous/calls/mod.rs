//! Calls driven by tokio: a client whose calls are futures, and a server whose functions are.
//!
//! A connection has one task that sleeps until its descriptor is readable. No thread waits.

mod calls_back;
mod client;
mod client_builder;
mod functions;
mod server;
mod shared_calls;

pub use client::{AsyncCallClient, AsyncOngoing};
pub use client_builder::AsyncCallClientBuilder;
pub use server::{AsyncCallServer, AsyncCallServerBuilder};

use crate::Result;
use crate::asynchronous::blocking::blocking;
use crate::rpc::Heap;
use crate::rpc::answer::{AnswerBytes, CallAnswer};
use crate::rpc::error::CallError;
use crate::rpc::heap::Block;
use crate::rpc::status::MOST_TEXT;
use partywall_shm::call::{CallBytes, INLINE};

/// Bytes as a record carries them, and the block that they were copied to.
type Prepared = (CallBytes, Option<Block>);

/// Sees to it that this heap has memory for a copy of some bytes. A heap that has to grow asks the broker, which a thread for blocking
/// calls waits for.
async fn make_room(heap: &Heap, len: usize) -> Result<()> {
    if len <= INLINE || heap.allocate_without_growth(len).is_some() {
        return Ok(());
    }
    let heap = heap.clone();
    blocking(move || heap.allocate(len)).await.map(drop)
}

/// Bytes of an answer, or of the text of an error, that are copied to the heap if a record does not carry them.
fn copied_len(result: &std::result::Result<CallAnswer, CallError>) -> usize {
    match result {
        Ok(CallAnswer { bytes: AnswerBytes::Copied(bytes) }) => bytes.len(),
        Ok(_) | Err(CallError::UnknownMethod | CallError::BadPointer | CallError::Panicked) => 0,
        Err(CallError::Application { message: text, .. } | CallError::Refused(text) | CallError::OutOfMemory(text)) => {
            text.len().min(MOST_TEXT)
        }
        Err(other) => other.to_string().len(),
    }
}
