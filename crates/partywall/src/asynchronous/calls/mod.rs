//! Calls driven by tokio: a client whose calls are futures, and a server whose functions are.
//!
//! A connection has one task that sleeps until its descriptor is readable. No thread waits.

mod client;
mod server;

pub use client::{AsyncCallClient, AsyncOngoing};
pub use server::{AsyncCallServer, AsyncCallServerBuilder};

use crate::Result;
use crate::asynchronous::blocking::blocking;
use crate::rpc::Heap;
use partywall_shm::call::INLINE;

/// Sees to it that this heap has memory for a copy of some bytes. A heap that has to grow asks the broker, which a thread for blocking
/// calls waits for.
async fn make_room(heap: &Heap, len: usize) -> Result<()> {
    if len <= INLINE || heap.allocate_without_growth(len).is_some() {
        return Ok(());
    }
    let heap = heap.clone();
    blocking(move || heap.allocate(len)).await.map(drop)
}
