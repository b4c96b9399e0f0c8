//! One queue of a guest: where it is, what is in it, and who is to be woken.
//!
//! `virtio-queue` reads what the driver offers. Completions are written here, because buffers of one frame must become visible
//! together, which its `add_used` cannot do.

use crate::VhostError;
use crate::chain::{ChainBuffers, LARGEST, locate};
use crate::inflight::{InflightQueue, InflightRegion};
use crate::memory::{LocatedPlace, MemoryTable};
use crate::poller::{WatchSet, Watched};
use std::fmt;
use std::num::Wrapping;
use std::os::fd::OwnedFd;
use std::sync::atomic::{Ordering, fence};
use vhost::vhost_user::message::VhostUserVringAddr;
use virtio_queue::{Queue, QueueT};
use vm_memory::{Address, Bytes, GuestAddress, GuestMemoryMmap};

const NO_INTERRUPT: u16 = 1;

/// A queue and its two doorbells.
pub struct VirtioRing {
    queue: Queue,
    addresses: Option<VhostUserVringAddr>,
    kick: Option<Watched<OwnedFd>>,
    call: Option<OwnedFd>,
    enabled: bool,
    /// Its driver broke the rules. Only a start ends this.
    given_up: bool,
    /// Where its parts are, if each lies in one region.
    places: Option<RingPlaces>,
    /// The driver's position at the last look. It is not read again before all that was offered then is taken.
    known: u16,
    next_used: Wrapping<u16>,
    /// Completions that are written and not visible yet.
    pending: u16,
    /// Completions that are visible, and for which the driver may not have been called.
    uncalled: u16,
    /// Where requests in flight are noted.
    inflight: Option<InflightQueue>,
    /// Heads of the completions that are not visible yet, if requests in flight are noted.
    batch: Vec<u16>,
    /// Heads that an earlier back end took and did not complete, the next one last.
    unfinished: Vec<u16>,
}

/// Where the parts of a queue are.
#[derive(Debug)]
struct RingPlaces {
    descriptors: LocatedPlace,
    available: LocatedPlace,
    used: LocatedPlace,
}

impl fmt::Debug for VirtioRing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VirtioRing").field("queue", &self.queue).field("enabled", &self.enabled).finish_non_exhaustive()
    }
}

impl VirtioRing {
    /// A queue that is not set up yet.
    pub fn new() -> Result<Self, VhostError> {
        let queue = Queue::new(LARGEST).map_err(|_| VhostError::Queue("it has an impossible size"))?;
        Ok(Self {
            queue,
            addresses: None,
            kick: None,
            call: None,
            enabled: false,
            given_up: false,
            places: None,
            known: 0,
            next_used: Wrapping(0),
            pending: 0,
            uncalled: 0,
            inflight: None,
            batch: Vec::new(),
            unfinished: Vec::new(),
        })
    }

    /// Whether frames pass.
    pub fn runs(&self) -> bool {
        self.enabled && self.queue.ready() && !self.given_up
    }

    pub(crate) fn started(&self) -> bool {
        self.kick.is_some()
    }

    pub(crate) fn enable(&mut self, enabled: bool) {
        self.enabled = enabled;
    }

    pub(crate) fn set_size(&mut self, size: u32) -> Result<(), VhostError> {
        let size = u16::try_from(size).map_err(|_| VhostError::Queue("its size is out of range"))?;
        self.queue.try_set_size(size).map_err(|_| VhostError::Queue("its size is no power of two up to 1024"))
    }

    pub(crate) fn set_base(&mut self, base: u32) {
        self.queue.set_next_avail(u16::try_from(base & 0xffff).unwrap_or(0));
    }

    pub(crate) fn set_call(&mut self, call: Option<OwnedFd>) {
        self.call = call;
        // Something may have been completed by a back end that died before it called.
        if let Some(call) = &self.call
            && self.started()
        {
            let _ = rustix::io::write(call, &1_u64.to_ne_bytes());
        }
    }

    /// Notes requests in flight from the next start on, if there is memory for it. `index` is the queue's number.
    pub(crate) fn track(&mut self, index: usize, region: Option<&InflightRegion>) -> Result<(), VhostError> {
        self.inflight = region.map(|region| region.queue(index, self.queue.size())).transpose()?;
        Ok(())
    }

    pub(crate) fn set_addresses(
        &mut self,
        addresses: VhostUserVringAddr,
        memory: &MemoryTable,
    ) -> Result<(), VhostError> {
        self.addresses = Some(addresses);
        if self.started() { self.locate(memory) } else { Ok(()) }
    }

    /// Starts it: `kick` is rung by the guest.
    pub(crate) fn start(
        &mut self,
        kick: OwnedFd,
        poller: &WatchSet,
        token: u64,
        memory: &MemoryTable,
        event_idx: bool,
    ) -> Result<(), VhostError> {
        self.kick = None;
        self.given_up = false;
        self.queue.set_event_idx(event_idx);
        self.locate(memory)?;
        self.next_used = self
            .queue
            .used_idx(&**memory.map(), Ordering::Acquire)
            .map_err(|_| VhostError::Queue("its used ring is outside of the memory"))?;
        (self.pending, self.uncalled) = (0, 0);
        self.batch.clear();
        self.unfinished.clear();
        if let Some(inflight) = &mut self.inflight
            && let Some(mut heads) = inflight.recover(self.next_used.0)?
        {
            // All that were taken are complete or in flight.
            let taken = u16::try_from(heads.len()).unwrap_or(0);
            self.queue.set_next_avail(self.next_used.0.wrapping_add(taken));
            heads.reverse();
            self.unfinished = heads;
        }
        self.known = self.queue.next_avail();
        if let Some(call) = &self.call {
            let _ = rustix::io::write(call, &1_u64.to_ne_bytes());
        }
        self.kick = Some(poller.watch(kick, token)?);
        Ok(())
    }

    /// Stops it, and returns where it was.
    pub(crate) fn stop(&mut self) -> u16 {
        self.queue.set_ready(false);
        self.kick = None;
        self.call = None;
        self.queue.next_avail()
    }

    /// Stops reading it until the front end starts it again: its driver broke the rules.
    pub(crate) fn give_up(&mut self) {
        self.given_up = true;
    }

    /// Finds its parts again after the memory table has changed. A queue whose memory has gone does not run until the memory is there again.
    pub(crate) fn relocate(&mut self, memory: &MemoryTable) {
        if self.started() && self.locate(memory).is_err() {
            self.queue.set_ready(false);
        }
    }

    /// Whether a part of it is between these addresses of the guest, the second one excluded.
    pub(crate) fn lies_in(&self, start: u64, end: u64) -> bool {
        self.started() && self.parts().into_iter().any(|(at, length)| at < end && at.saturating_add(length) > start)
    }

    /// The addresses of its parts for the guest, and their lengths.
    pub(crate) fn parts(&self) -> [(u64, u64); 3] {
        let size = u64::from(self.queue.size());
        let (descriptors, available, used) = (self.queue.desc_table(), self.queue.avail_ring(), self.queue.used_ring());
        [(descriptors, 16 * size), (available, 6 + 2 * size), (used, 6 + 8 * size)]
    }

    fn locate(&mut self, memory: &MemoryTable) -> Result<(), VhostError> {
        let outside = || VhostError::Queue("its rings are outside of the memory table or not aligned");
        let found = self.addresses.ok_or(VhostError::Queue("it is started before its addresses are given"))?;
        let guest = |address: u64| memory.guest_address(address).ok_or_else(outside);
        self.queue.set_ready(false);
        self.places = None;
        self.queue.try_set_desc_table_address(guest(found.descriptor)?).map_err(|_| outside())?;
        self.queue.try_set_avail_ring_address(guest(found.available)?).map_err(|_| outside())?;
        self.queue.try_set_used_ring_address(guest(found.used)?).map_err(|_| outside())?;
        self.queue.set_ready(true);
        if !self.queue.is_valid(&**memory.map()) {
            self.queue.set_ready(false);
            return Err(outside());
        }
        let size = u64::from(self.queue.size());
        let place = |address: u64, length: u64| memory.locate(GuestAddress(address), length);
        let descriptors = place(self.queue.desc_table(), 16 * size);
        let (available, used) =
            (place(self.queue.avail_ring(), 6 + 2 * size), place(self.queue.used_ring(), 6 + 8 * size));
        if let (Some(descriptors), Some(available), Some(used)) = (descriptors, available, used) {
            self.places = Some(RingPlaces { descriptors, available, used });
        }
        Ok(())
    }

    /// Clears the doorbell.
    pub(crate) fn clear_kick(&self) {
        if let Some(kick) = &self.kick {
            let _ = rustix::io::read(kick.get(), &mut [0_u8; 8]);
        }
    }

    /// Heads that an earlier back end took and did not complete. They come first from [`Self::next_head`].
    pub fn unfinished(&self) -> usize {
        self.unfinished.len()
    }

    /// The head of the next chain that the driver offers. It is noted as in flight until [`Self::publish`].
    pub fn next_head(&mut self, memory: &GuestMemoryMmap) -> Result<Option<u16>, VhostError> {
        if let Some(head) = self.unfinished.pop() {
            return Ok(Some(head));
        }
        let next = self.queue.next_avail();
        if self.known == next {
            self.known = self.offered(memory);
        }
        let waiting = self.known.wrapping_sub(next);
        if waiting == 0 {
            return Ok(None);
        }
        if waiting > self.queue.size() {
            return Err(VhostError::Queue("its available index jumped"));
        }
        let head = self.load(memory, 4 + 2 * u64::from(next & (self.queue.size() - 1)));
        if head >= self.queue.size() {
            return Err(VhostError::Queue("a chain begins outside of its table"));
        }
        self.queue.set_next_avail(next.wrapping_add(1));
        if let Some(inflight) = &mut self.inflight {
            inflight.begin(head);
        }
        Ok(Some(head))
    }

    /// Whether [`Self::next_head`] has something.
    pub fn has_work(&self, memory: &GuestMemoryMmap) -> bool {
        let next = self.queue.next_avail();
        !self.unfinished.is_empty() || self.known != next || self.offered(memory) != next
    }

    /// The buffers of a chain.
    pub fn buffers(&self, memory: &GuestMemoryMmap, head: u16, into: &mut ChainBuffers) -> Result<(), VhostError> {
        into.load(memory, GuestAddress(self.queue.desc_table()), self.queue.size(), head)
    }

    /// Adds the buffers of a chain to those of earlier ones.
    pub(crate) fn append_buffers<'m>(
        &'m self,
        memory: &'m GuestMemoryMmap,
        head: u16,
        into: &mut ChainBuffers,
    ) -> Result<(), VhostError> {
        let size = self.queue.size();
        let table = self.places.as_ref().and_then(|places| places.descriptors.array(0, size.into()));
        let table = table.or_else(|| locate(memory, GuestAddress(self.queue.desc_table()), size.into()));
        into.append(memory, GuestAddress(self.queue.desc_table()), table, size, head)
    }

    /// Its entries.
    pub fn size(&self) -> u16 {
        self.queue.size()
    }

    /// Where [`Self::next_head`] reads; for [`Self::rewind`].
    pub fn position(&self) -> u16 {
        self.queue.next_avail()
    }

    /// Returns to an earlier position: what was taken since is offered again.
    pub fn rewind(&mut self, position: u16) {
        self.queue.set_next_avail(position);
    }

    /// The driver's own position, as it was when [`Self::next_head`] found nothing.
    pub(crate) fn known(&self) -> u16 {
        self.known
    }

    /// The driver's own position, as of now.
    pub fn offered(&self, memory: &GuestMemoryMmap) -> u16 {
        if let Some(index) = self.places.as_ref().and_then(|places| places.available.index(2)) {
            return u16::from_le(index.load(Ordering::Acquire));
        }
        self.queue.avail_idx(memory, Ordering::Acquire).map_or(self.queue.next_avail(), |index| index.0)
    }

    /// Notes that a chain is done. [`Self::publish`] makes it visible.
    pub fn complete(&mut self, memory: &GuestMemoryMmap, head: u16, length: usize) -> Result<(), VhostError> {
        if head >= self.queue.size() {
            return Err(VhostError::Queue("a chain begins outside of its table"));
        }
        // The size is a power of two.
        let slot = (self.next_used + Wrapping(self.pending)).0 & (self.queue.size() - 1);
        let length = u32::try_from(length).unwrap_or(0);
        let element = (u64::from(length) << 32 | u64::from(head)).to_le();
        let size = usize::from(self.queue.size());
        if let Some(elements) = self.places.as_ref().and_then(|places| places.used.array::<u64>(4, size)) {
            elements.store(usize::from(slot), element);
        } else {
            let address = GuestAddress(self.queue.used_ring()).checked_add(4 + 8 * u64::from(slot));
            let outside = || VhostError::Queue("its used ring is outside of the memory");
            memory.write_obj(element, address.ok_or_else(outside)?).map_err(|_| outside())?;
        }
        self.pending += 1;
        if let Some(inflight) = &self.inflight {
            inflight.link(head);
            self.batch.push(head);
        }
        Ok(())
    }

    /// Makes all completions visible.
    pub fn publish(&mut self, memory: &GuestMemoryMmap) {
        if self.pending == 0 {
            return;
        }
        self.next_used += Wrapping(self.pending);
        self.uncalled = self.uncalled.saturating_add(self.pending);
        self.pending = 0;
        if let Some(address) = GuestAddress(self.queue.used_ring()).checked_add(2) {
            // Acquired by the driver, together with the entries and the buffers' bytes.
            let _ = memory.store(self.next_used.0.to_le(), address, Ordering::Release);
        }
        if let Some(inflight) = &self.inflight {
            inflight.clear(&self.batch, self.next_used.0);
            self.batch.clear();
        }
    }

    /// Calls the driver if it wants to be called for what was published.
    pub fn notify(&mut self, memory: &GuestMemoryMmap) {
        if self.uncalled == 0 {
            return;
        }
        // The index is visible before the wish is read; the driver writes its wish and then reads the index.
        fence(Ordering::SeqCst);
        let wanted = if self.queue.event_idx_enabled() {
            let at = 4 + 2 * u64::from(self.queue.size());
            let event = Wrapping(self.load(memory, at));
            let old = self.next_used - Wrapping(self.uncalled);
            self.next_used - event - Wrapping(1) < self.next_used - old
        } else {
            self.load(memory, 0) & NO_INTERRUPT == 0
        };
        self.uncalled = 0;
        if wanted && let Some(call) = &self.call {
            let _ = rustix::io::write(call, &1_u64.to_ne_bytes());
        }
    }

    fn load(&self, memory: &GuestMemoryMmap, at: u64) -> u16 {
        let place = usize::try_from(at).ok().zip(self.places.as_ref());
        if let Some(index) = place.and_then(|(at, places)| places.available.index(at)) {
            return u16::from_le(index.load(Ordering::Relaxed));
        }
        let address = GuestAddress(self.queue.avail_ring()).checked_add(at);
        address.and_then(|address| memory.load::<u16>(address, Ordering::Relaxed).ok()).map_or(0, u16::from_le)
    }

    /// Asks the driver to ring. `true` if it has offered something since the last look.
    pub fn arm(&mut self, memory: &GuestMemoryMmap) -> bool {
        self.queue.enable_notification(memory).unwrap_or(false)
    }

    /// Asks the driver to ring for what it offers behind `seen`, its own position at an earlier look. `true` if there is any.
    ///
    /// A queue that waits for more buffers than there are has been rewound, and [`Self::arm`] would ask for a ring at buffers that the driver
    /// offers already.
    pub(crate) fn arm_behind(&mut self, memory: &GuestMemoryMmap, seen: u16) -> bool {
        let position = self.position();
        self.rewind(seen);
        self.arm(memory);
        self.rewind(position);
        self.offered(memory) != seen
    }

    /// Asks the driver not to ring.
    pub fn disarm(&mut self, memory: &GuestMemoryMmap) {
        let _ = self.queue.disable_notification(memory);
    }
}
