//! A model of a correct ring, and drivers that compare the real ring with it.
//!
//! **One job.** State the expectation once, for every tool: property tests (`tests/oracle.rs`), fuzz targets (`fuzz/`) and
//! loom models (`tests/loom.rs`) differ only in how the operations are chosen and interleaved.
//!
//! ```text
//!   bytes --decode--> [Op]  ---> driver  ---+---> Writer + TxHalf + RxHalf + Reader       (the code)
//!                                           +---> Model: a queue of bytes, plain sums     (the expectation)
//!                                                  compared after every operation
//!
//!   bytes --decode--> [Act] ---> hostile ---+---> Producer or Consumer, honest            (the code)
//!                                           +---> the peer's half: any word, any value    (the adversary)
//! ```
//!
//! One direction is enough: the two of a channel share no line of memory (protocol M4).
//!
//! A divergence panics with what was expected. Built for tests only (feature `oracle`); depends on `core` and `alloc`.

mod driver;
mod hostile;
mod memory;
mod model;
mod op;

pub use driver::{Setup, Tally, run, run_bytes};
pub use hostile::{Act, Findings, HostileWord, Prey, Victim, hunt, hunt_bytes};
pub use memory::RingMemory;
pub use model::{Model, Sleeper, byte, expect_bytes};
pub use op::Op;

/// Takes the next byte of an input that chooses operations.
pub(crate) fn take(input: &mut &[u8]) -> Option<u8> {
    let (&first, rest) = input.split_first()?;
    *input = rest;
    Some(first)
}
