//! The sleeper's fence (protocol W4).
//!
//! `membarrier(GLOBAL_EXPEDITED)` makes every core that runs a process registered for it execute a full fence. With it the
//! side that sends messages need not fence at all; the side that is about to sleep pays instead. Where the call is missing
//! (old kernels, seccomp, a peer in another kernel), both sides fence in full.

use partywall_shm::layout::flags;
use partywall_shm::wake::Fencing;
use rustix::thread::{MembarrierCommand, membarrier};
use std::sync::OnceLock;
use std::sync::atomic::{Ordering, fence};

/// Registers this process, once, and returns the header flags that say whether that worked. Thread-safe; the
/// registration survives fork and is lost by exec.
pub fn register() -> u32 {
    static REGISTERED: OnceLock<u32> = OnceLock::new();
    *REGISTERED.get_or_init(|| match membarrier(MembarrierCommand::RegisterGlobalExpedited) {
        Ok(()) => flags::ASYMMETRIC,
        Err(_) => 0,
    })
}

/// The heavy fence that goes with `fencing`.
pub fn heavy(fencing: Fencing) {
    match fencing {
        Fencing::Symmetric => fence(Ordering::SeqCst),
        Fencing::Asymmetric => {
            // It can only fail where registering has failed, and then no half has agreed to be asymmetric.
            if membarrier(MembarrierCommand::GlobalExpedited).is_err() {
                fence(Ordering::SeqCst);
            }
        }
    }
}
