//! Rings that are older than the broker, as it hears of them (protocol T14).
//!
//! The connections are above this module, so they install here how to go over them.

use crate::installed::Installed;
use partywall_shm::layout::Geometry;
use partywall_shm::status::Role;
use rustix::fd::BorrowedFd;

/// One ring, as the broker is shown it.
#[derive(Debug)]
pub(crate) struct ConnClaim {
    pub(crate) channel: u64,
    pub(crate) role: Role,
    pub(crate) geometry: Geometry,
    pub(crate) socket: BorrowedFd<'static>,
    pub(crate) region: BorrowedFd<'static>,
}

/// Calls the function for each ring of this process that the broker with this number has not heard of, until it returns `false`.
pub(crate) type EachClaim = fn(u64, &mut dyn FnMut(&ConnClaim) -> bool);

static EACH: Installed<EachClaim> = Installed::new();

/// Installs how to go over all rings. To be called before there is one.
pub(crate) fn install(each: &'static EachClaim) {
    EACH.set(each);
}

/// Goes over all rings; over none before that was installed, when there is none.
pub(super) fn each_claim(broker: u64, tell: &mut dyn FnMut(&ConnClaim) -> bool) {
    if let Some(each) = EACH.get() {
        each(broker, tell);
    }
}
