//! The library for C and C++: what `partywall` offers for streams and messages, behind `include/partywall.h`, and for calls,
//! behind `include/partywall_rpc.h`.
//!
//! The headers document each function. This crate has no further logic: it checks arguments, turns results into codes, and
//! keeps panics on this side ([`boundary`]).
//!
//! A handle is a pointer to a box. C keeps the rules of use, which the header states: a handle is used after its creation and before it is
//! closed, and each direction of it by one thread at a time.

#[macro_use]
pub mod boundary;
pub mod argument;
pub mod domain;
pub mod failure;
pub mod fork;
pub mod message;
pub mod options;
pub mod peer;
pub mod rpc;
pub mod stream;
