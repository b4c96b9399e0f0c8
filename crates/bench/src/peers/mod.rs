//! Other libraries for calls, and Partywall's own sequences: pairs of programs that take orders on their input.

pub(crate) mod calls;
pub(crate) mod order;
pub(crate) mod programs;
pub(crate) mod running;
pub(crate) mod sequence;
pub(crate) mod sources;
