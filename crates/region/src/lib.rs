//! The back ends for memory and doorbells.
//!
//! A back end provides three things, whose requirements are in [`conformance`]: memory that one side writes and the
//! other maps read-only ([`OwnRegion`], [`PeerRegion`]), a [`Link`] per direction (the doorbell and the notice of death),
//! and the sleeper's fence ([`membarrier`]). The back ends are sealed memfds with
//! links that the broker makes, and an in-process double with injectable faults for tests ([`double`]). Between virtual machines
//! regions are parts of windows ([`window`]), which are files of the host ([`pmem`]) or the memory of a PCI device ([`bar`]), and links go
//! over a serial port ([`relay`]). Heaps are made of segments ([`segment`]). The kernel's facts about a socket are read in [`inspect`], with
//! the numbers that it has recorded, where it does ([`number_record`]).

pub mod bar;
pub mod bell;
pub mod berth;
pub mod closing;
#[cfg(any(test, feature = "conformance"))]
pub mod conformance;
pub mod descriptors;
pub mod directory;
pub mod double;
pub mod ending;
mod error;
mod event;
pub mod inspect;
pub mod link;
mod mapping;
pub mod membarrier;
pub mod memfd;
pub mod number_record;
pub mod packet;
pub mod pmem;
mod racing;
mod region;
pub mod relay;
pub mod revocation;
pub mod segment;
mod sockopt;
pub mod wait;
pub mod window;

pub use error::{FindError, RegionError};
pub use event::LinkEvent;
pub use link::{Bells, Crossing, LATE, Link};
pub use racing::{write_racing, write_racing_at};
pub use region::{OwnRegion, PeerRegion, RegionHandle, RegionOptions};
