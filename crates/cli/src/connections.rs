//! Connections of this host's programs, and channels: where their bytes go, and why.
//!
//! [`processes`] finds sockets in /proc, [`channels`] asks the broker, [`gather`] combines both into one [`row`] for each end of a
//! connection, and [`cause`] has every reason why it is not on the ring, [`history`] the last moves. `top` shows all rows, `why` those of
//! one connection.

mod cause;
mod channels;
mod gather;
mod history;
mod processes;
mod row;

pub(crate) use cause::Cause;
pub(crate) use gather::{Gatherer, Look, Scope};
pub(crate) use history::{MoveWatch, ObservedMove};
pub(crate) use row::{ConnectionRow, DirectionCount, HEADINGS, SHORT, WIDE};
