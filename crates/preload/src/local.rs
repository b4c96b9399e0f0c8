//! What of a connection is this process' own: where its regions are mapped, and its descriptors.
//!
//! Beside the arena, by the same index. Private memory: `fork` copies it, with the mappings and descriptors that it tells of.

use crate::arena::CONNECTIONS;
use partywall_region::berth::Berth;
use std::ffi::c_int;
use std::sync::atomic::{AtomicU32, Ordering};

/// One process' part of one connection.
#[derive(Debug)]
pub(crate) struct Local {
    /// The generation of the connection that this is about.
    pub(crate) generation: AtomicU32,
    /// Descriptors that this process has of it.
    pub(crate) descriptors: AtomicU32,
    /// One of them, plus 1.
    fd: AtomicU32,
    /// Our end of the link, plus 1; 0 if none.
    link: AtomicU32,
    /// Our region.
    pub(crate) own: Berth,
    /// The peer's.
    pub(crate) peer: Berth,
    /// What readiness needs.
    pub(crate) ready: crate::ready::Local,
}

impl Local {
    /// All zeros, so that untouched ones are neither in the file nor in memory.
    const fn new() -> Self {
        Self {
            generation: AtomicU32::new(0),
            descriptors: AtomicU32::new(0),
            fd: AtomicU32::new(0),
            link: AtomicU32::new(0),
            own: Berth::new(),
            peer: Berth::new(),
            ready: crate::ready::Local::new(),
        }
    }

    /// A descriptor of it; -1 if this process has none.
    #[inline]
    pub(crate) fn fd(&self) -> c_int {
        self.fd.load(Ordering::Relaxed).wrapping_sub(1).cast_signed()
    }

    /// Says which descriptor is to be used for questions to the kernel; -1 for none.
    pub(crate) fn set_fd(&self, fd: c_int) {
        self.fd.store(fd.cast_unsigned().wrapping_add(1), Ordering::Relaxed);
    }

    /// Our end of the link; -1 if there is none.
    #[inline]
    pub(crate) fn link(&self) -> c_int {
        self.link.load(Ordering::Relaxed).wrapping_sub(1).cast_signed()
    }

    /// Says which it is; -1 for none.
    pub(crate) fn set_link(&self, fd: c_int) {
        self.link.store(fd.cast_unsigned().wrapping_add(1), Ordering::Relaxed);
    }
}

static LOCALS: [Local; CONNECTIONS] = [const { Local::new() }; CONNECTIONS];

/// This process' part of the connection at `index` of the arena.
#[inline]
pub(crate) fn get(index: u16) -> &'static Local {
    &LOCALS[usize::from(index)]
}
