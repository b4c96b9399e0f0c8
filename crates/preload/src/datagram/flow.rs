//! A ring from one UDP socket to another, seen from one of its ends: two regions and a link (protocol U1, U5).
//!
//! The link carries one message, attach; afterwards it only tells that the other end's process is gone.

use crate::{hidden, sys};
use partywall_region::RegionOptions;
use partywall_region::berth::Berth;
use partywall_shm::layout::{Geometry, PAGE, RegionKind, SocketPage};
use partywall_shm::status::Reason;
use partywall_shm::sync::{Own, Peer};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::net::RecvFlags;
use std::ffi::c_int;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// How many ends of flows a process has at once, at most.
const FLOWS: usize = 1024;
/// So often at most it is seen whether those at the other ends live.
pub(super) const SWEEP: Duration = Duration::from_millis(100);

/// The places of one end. All zeros when new.
#[derive(Debug)]
pub(super) struct Flow {
    used: AtomicU32,
    /// Our end of the link plus 1.
    link: AtomicU32,
    /// Our region.
    pub(super) own: Berth,
    /// The other end's.
    pub(super) peer: Berth,
}

static TABLE: [Flow; FLOWS] = [const { Flow::new() }; FLOWS];

impl Flow {
    const fn new() -> Self {
        Self { used: AtomicU32::new(0), link: AtomicU32::new(0), own: Berth::new(), peer: Berth::new() }
    }

    /// A free one.
    pub(super) fn allocate() -> Option<&'static Self> {
        TABLE.iter().find(|flow| flow.used.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Relaxed).is_ok())
    }

    /// Makes our region, with so large a ring. Returns its memory and its shape.
    pub(super) fn make_region(&self, ring_size: u64) -> Result<(OwnedFd, Geometry), Reason> {
        let geometry = Geometry::new(PAGE, ring_size).map_err(|_| Reason::Resources)?;
        let options = RegionOptions { kind: RegionKind::Socket, ..RegionOptions::endpoint(ring_size) };
        let region = self.own.create(&options).map_err(|_| Reason::Resources)?;
        Ok((region, geometry))
    }

    pub(super) fn keep_link(&self, link: OwnedFd) {
        self.link.store(hidden::keep(link).cast_unsigned() + 1, Ordering::Relaxed);
    }

    /// Our end of the link; -1 if there is none.
    pub(super) fn link(&self) -> c_int {
        self.link.load(Ordering::Relaxed).wrapping_sub(1).cast_signed()
    }

    /// Whether the process at the other end has let go of it, or is dead.
    pub(super) fn has_hung_up(&self) -> bool {
        let link = self.link();
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        link < 0
            || !matches!(
                rustix::net::recv(sys::borrow(link), &mut [0u8; 1], flags),
                Ok((1.., _)) | Err(Errno::AGAIN | Errno::INTR)
            )
    }

    /// Gives everything back. Who calls this holds the lock under which the pages are used.
    pub(super) fn free(&self) {
        let link = self.link();
        if link >= 0 {
            self.link.store(0, Ordering::Relaxed);
            hidden::discard(link);
        }
        self.own.vacate();
        self.peer.vacate();
        self.used.store(0, Ordering::Release);
    }

    /// The first pages of both regions. Only between `make_region` and `free`, under the lock of the end that it is.
    #[inline]
    pub(super) fn pages(&self) -> Option<(&'static SocketPage<Own>, &'static SocketPage<Peer>)> {
        #[expect(unsafe_code, reason = "reaches the page of a region that stays mapped")]
        // SAFETY: our region's berth is only ever filled by `Berth::create`, and vacated under the same lock.
        let own = unsafe { self.own.own_page() }?;
        Some((own, self.peer.peer_page()?))
    }
}

/// In a child: none of them is its own.
pub(super) fn after_fork() {
    for flow in TABLE.iter().filter(|flow| flow.used.load(Ordering::Relaxed) != 0) {
        flow.free();
    }
}
