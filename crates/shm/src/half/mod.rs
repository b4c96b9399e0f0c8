//! One half of one direction: everything that a program decides about a ring, without doing any of it.
//!
//! A [`WritingHalf`] or [`ReadingHalf`] owns the cursors ([`crate::producer`], [`crate::consumer`]), the wish (protocol W1), the judgement of the
//! peer's state (protocol S) and its own end. Its driver maps memory, fences, sleeps and rings. It hands in what it has seen, which is
//! the peer's page and whether the link has hung up, and gets back an [`Effect`]:
//!
//! ```text
//!            what the driver has seen                    what it has to do
//!   page, hung_up, need --->  next()  ---> Ready      use the room, or the bytes
//!                               ^     ---> LookAgain  spin, if that pays
//!                               |     ---> Fence      issue the heavy fence --+
//!                               +---------------------------------------------+  the second look (protocol W2)
//!                               |     ---> Sleep      sleep on the doorbell --+
//!                               +---------------------------------------------+
//!                                     ---> Ended      report it
//! ```
//!
//! A half that several threads or processes share is driven under a lock. A thread that only checks readiness uses a [`ReaderView`] or
//! [`WriterView`], without the lock. It arms through the view, and [`Fenced`] and [`Rounds`] take it from there to its sleep. A [`Broadcaster`] writes one ring for many readers, and
//! follows each by a writer.
//!
//! All are `const` to create, so that they can lie in static memory, and know neither the mapping nor the doorbell. Loom models, the
//! oracle and fuzz targets therefore drive the code that programs run.

mod broadcaster;
mod reader;
mod sleep;
mod view;
mod wish;
mod writer;

pub use broadcaster::Broadcaster;
pub use reader::ReadingHalf;
pub use sleep::{Fenced, NAP, Quiet, ROUNDS, Rounds, SecondLook, SleepStep};
pub use view::{Awaited, ReaderView, WriterView};
pub use writer::{Need, WritingHalf};

use crate::corrupt::Corrupt;
use crate::state::End;

/// The next step of a waiting half's driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum Effect {
    /// The awaited bytes or space are there.
    Ready,
    /// Nothing is there. Look again: only a driver that spins ([`Idle::Spin`]) gets this.
    LookAgain,
    /// The wish has been stored. Issue the heavy fence, then call again: that is the second look.
    Fence,
    /// The wish stands, and the look after the fence has found nothing. Sleep until rung; the peer rings when it moves its cursor past
    /// `until`.
    Sleep {
        /// The value of the wish word.
        until: u64,
    },
    /// It will not come any more.
    Ended(Ending),
}

/// The action of the driver if nothing is there yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Idle {
    /// Look again.
    Spin,
    /// Sleep on the doorbell.
    Sleep,
}

/// Why a half has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// This side has finished or closed it.
    Here,
    /// The peer has finished or closed its half, in order.
    Orderly,
    /// The peer is gone without saying so (protocol L4).
    Dead {
        /// Whether it had attached.
        attached: bool,
    },
    /// The peer says that this side broke the protocol.
    Accused,
    /// The peer broke the protocol.
    Corrupt(Corrupt),
}

impl From<End> for Ending {
    fn from(end: End) -> Self {
        match end {
            End::Orderly => Self::Orderly,
            End::Dead => Self::Dead { attached: true },
            End::Accused => Self::Accused,
        }
    }
}
