//! Options of a connection or a listener, as C passes them.
#![expect(unsafe_code, reason = "reads a structure that C passes")]

use crate::failure::CallFailure;
use partywall::{Options, RingSize};
use std::time::Duration;

/// `pw_options` of the header. A program that was compiled for another version has a shorter or longer one, with its own size in the
/// first field.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct RawOptions {
    /// Bytes of the structure as the program knows it.
    pub size: u32,
    /// The longest spin in microseconds; negative for the default.
    pub spin_us: i32,
    /// The ring's first size; 0 for the default.
    pub ring_initial: u64,
    /// The ring's largest size; 0 for the default.
    pub ring_max: u64,
    /// The most bytes of rings that the peer may have sent and this side not begun to read; 0 for the default.
    pub max_peer_ring: u64,
    /// Connections that may wait to be accepted; 0 for the default.
    pub backlog: u16,
    /// Not 0: only the connecting side writes.
    pub one_way: u8,
    /// Not 0: the ring is taken from huge pages.
    pub huge_pages: u8,
    /// Not 0: each write and read has a fence, and a sleep interrupts no other processor.
    pub sleeps_often: u32,
}

/// Bytes of the first version's structure. No program has a shorter one.
const FIRST: usize = 40;

/// The caller's options; the defaults for null.
///
/// # Safety
/// The pointer is null, or points to as many bytes as its first field says.
pub unsafe fn chosen(options: *const RawOptions) -> Result<Options, CallFailure> {
    if options.is_null() {
        return Ok(Options::default());
    }
    // SAFETY: the caller's promise: there is at least the first field.
    let size = unsafe { (&raw const (*options).size).read() } as usize;
    if size < FIRST {
        return Err(CallFailure::invalid("pw_options has no size: initialise it by PW_OPTIONS_INIT"));
    }
    // SAFETY: the caller's promise: `size` bytes are there.
    let rest = unsafe { std::slice::from_raw_parts(options.cast::<u8>(), size) };
    if rest.iter().skip(size_of::<RawOptions>()).any(|byte| *byte != 0) {
        return Err(CallFailure::invalid(
            "pw_options asks for what this libpartywall does not have: install a newer one",
        ));
    }
    // SAFETY: `size` bytes are there, at least as many as this structure has.
    let raw = unsafe { options.read() };
    let default = Options::default();
    let (initial, max) = match RingSize::DEFAULT {
        RingSize::Adaptive { initial, max } => (initial, max),
        RingSize::Fixed(size) => (size, size),
    };
    let (initial, max) = match (raw.ring_initial, raw.ring_max) {
        (0, 0) => (initial, max),
        (0, chosen) => (initial.min(chosen), chosen),
        (chosen, 0) => (chosen, max.max(chosen)),
        both => both,
    };
    let mut options = default.ring(RingSize::Adaptive { initial, max });
    options.one_way = raw.one_way != 0;
    options.huge_pages = raw.huge_pages != 0;
    options.sleeps_often = raw.sleeps_often != 0;
    if let Ok(micros) = u64::try_from(raw.spin_us) {
        options.spin = Duration::from_micros(micros);
    }
    if raw.max_peer_ring != 0 {
        options.max_peer_ring = raw.max_peer_ring;
    }
    if raw.backlog != 0 {
        options.backlog = raw.backlog;
    }
    Ok(options)
}
