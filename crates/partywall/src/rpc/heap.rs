//! This side's heap of a connection: memory that this process writes and its peer reads in place.
//!
//! [`Spaces`] keeps the free lists in private memory. Most allocators (`talc`, `rlsf`) keep them in the memory that they hand out. There a
//! bug of this process could reveal them to a peer, and they would use up huge pages and locked memory.
#![expect(unsafe_code, reason = "hands out parts of a segment's memory, which its books keep apart")]

use super::heap_addresses::{ATTEMPTS, address_for};
use super::spaces::{Spaces, TakenSpace};
use crate::domain::lock;
use crate::further::{PlaceHold, Regions};
use crate::{Error, Result};
use partywall_protocol::wire::Refusal;
use partywall_region::RegionError;
use partywall_region::segment::{OwnSegment, SegmentOptions};
use rustix::fd::AsFd;
use std::collections::HashMap;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// The kind of the further regions that heaps are made of (protocol K6).
pub(crate) const HEAP_KIND: u32 = u32::from_le_bytes(*b"heap");
/// Segments of one heap: as many as a side may have further regions of a channel (protocol F1.2).
pub(crate) const MOST_SEGMENTS: usize = 8;
/// The smallest block. Smaller ones would share a line with their neighbours.
const GRANULE: u64 = 64;
/// The largest alignment of a block.
const MOST_ALIGNMENT: u64 = 4096;
const LARGEST_SEGMENT: u64 = 1 << 30;

/// Options of this side's heap of a connection.
///
/// ```
/// use partywall::rpc::HeapOptions;
///
/// let options = HeapOptions::default().first(1 << 20).max(1 << 30);
/// assert_eq!((options.first, options.huge_pages), (1 << 20, false));
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct HeapOptions {
    /// The least size of the first segment in bytes. A segment is larger if its first block needs more. The least size doubles with each further
    /// segment. A further segment is also at least a quarter of the heap's size so far, and is rounded up to a power of two. `max` limits all of
    /// this.
    pub first: u64,
    /// The most bytes of all segments together, at most 2 GiB.
    pub max: u64,
    /// Take the memory from huge pages, which the operator must have reserved. Between machines this has no effect.
    pub huge_pages: bool,
    /// Keep the memory from being swapped out.
    pub locked: bool,
}

impl Default for HeapOptions {
    fn default() -> Self {
        Self { first: 256 << 10, max: 256 << 20, huge_pages: false, locked: false }
    }
}

impl HeapOptions {
    /// Sets [`HeapOptions::first`], rounded up to a whole page, and between machines to a power of two.
    #[must_use]
    pub fn first(mut self, bytes: u64) -> Self {
        self.first = bytes;
        self
    }

    /// Sets [`HeapOptions::max`].
    #[must_use]
    pub fn max(mut self, bytes: u64) -> Self {
        self.max = bytes;
        self
    }

    /// Sets [`HeapOptions::huge_pages`].
    #[must_use]
    pub fn huge_pages(mut self, yes: bool) -> Self {
        self.huge_pages = yes;
        self
    }

    /// Sets [`HeapOptions::locked`].
    #[must_use]
    pub fn locked(mut self, yes: bool) -> Self {
        self.locked = yes;
        self
    }
}

/// The memory of one side of a connection from which [`Block`]s are allocated. The peer reads it in place and cannot write it.
///
/// All memory is allocated when a segment is made, so no later store can fail. Threads may use one heap at the same time.
///
/// ```
/// use partywall::rpc::{CallClient, CallServer};
///
/// # let broker = partywall_daemon::Broker::embedded()?;
/// # let web = partywall::Domain::builder().name("web").broker(broker.path()).join()?;
/// let _server = CallServer::builder().method("sum", |call| {
///     let sum: u64 = call.args().to_vec().iter().map(|byte| u64::from(*byte)).sum();
///     Ok(sum.to_le_bytes().into())
/// }).bind(&web, "math")?;
///
/// let client = CallClient::connect("web:math")?;
/// let mut numbers = client.heap().allocate(1 << 20)?;
/// numbers.fill(1);
/// let reply = client.call("sum", &numbers)?; // One cache line is sent, and no copy is made here.
/// assert_eq!(u64::from_le_bytes(reply.array(0)?), 1 << 20);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Heap {
    pub(crate) memory: Arc<HeapMemory>,
}

impl fmt::Debug for Heap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Heap").field("stats", &self.stats()).finish()
    }
}

/// The size of a heap and its use.
///
/// ```
/// # use partywall::rpc::{CallClient, CallServer};
/// # let broker = partywall_daemon::Broker::embedded()?;
/// # let web = partywall::Domain::builder().name("web").broker(broker.path()).join()?;
/// # let _server = CallServer::builder().bind(&web, "math")?;
/// let client = CallClient::connect("web:math")?;
/// let block = client.heap().allocate(1000)?;
/// let stats = client.heap().stats();
/// assert_eq!((stats.blocks, stats.bytes_used, stats.segments), (1, 1000, 1));
/// drop(block);
/// assert_eq!(client.heap().stats().blocks, 0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct HeapStats {
    /// Segments of the heap.
    pub segments: usize,
    /// Bytes of these segments.
    pub bytes: u64,
    /// Allocated blocks.
    pub blocks: usize,
    /// Requested bytes of these blocks.
    pub bytes_used: u64,
}

/// Bytes that some heaps may have together.
#[derive(Debug)]
pub(crate) struct HeapShare {
    left: AtomicU64,
}

/// Bytes of a share that a segment has.
#[derive(Debug)]
struct HeapPortion {
    share: Arc<HeapShare>,
    bytes: u64,
}

impl HeapShare {
    pub(crate) fn new(bytes: u64) -> Arc<Self> {
        Arc::new(Self { left: AtomicU64::new(bytes) })
    }

    fn left(&self) -> u64 {
        self.left.load(Ordering::Relaxed)
    }

    fn take(self: &Arc<Self>, bytes: u64) -> Option<HeapPortion> {
        let less = |left: u64| left.checked_sub(bytes);
        self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).ok()?;
        Some(HeapPortion { share: Arc::clone(self), bytes })
    }
}

impl Drop for HeapPortion {
    fn drop(&mut self) {
        self.share.left.fetch_add(self.bytes, Ordering::Relaxed);
    }
}

/// The state that the blocks of one heap share.
pub(crate) struct HeapMemory {
    regions: Regions,
    options: HeapOptions,
    share: Arc<HeapShare>,
    books: Mutex<HeapBooks>,
    /// Segments that there are, for those who only look whether there is another.
    count: AtomicUsize,
}

#[derive(Default)]
struct HeapBooks {
    segments: Vec<HeapSegment>,
    stats: HeapStats,
}

struct HeapSegment {
    memory: OwnSegment,
    number: u32,
    address: u64,
    size: u64,
    spaces: Spaces,
    blocks: HashMap<u64, BlockEntry>,
    _portion: HeapPortion,
    /// Dropped after `memory`.
    _place: Option<PlaceHold>,
}

/// The record of a block in the heap's books.
struct BlockEntry {
    space: TakenSpace,
    /// Bytes that were asked for.
    asked: u64,
    /// It has no [`Block`] any more, and is freed by its address.
    is_raw: bool,
}

/// What the size of a new segment depends on.
#[derive(Debug, Clone, Copy)]
struct SegmentShape {
    /// Bytes of a page of its memory.
    page: u64,
    /// Places in a window are powers of two.
    is_in_window: bool,
    /// Segments that the heap has already.
    before: usize,
    /// Bytes of these segments.
    bytes: u64,
}

impl SegmentShape {
    /// Bytes of a segment for a block of `room` bytes, where the first segment has `first`, and at most `left` may be used. It is smaller than
    /// `room` if that is not possible.
    ///
    /// All of a segment is allocated, so the first one fits its first block. A heap has few segments, so further ones have powers of two, and
    /// a share of the heap so far: neither blocks that become longer and longer nor small ones after a long one use them up.
    fn size(self, room: u64, first: u64, left: u64) -> u64 {
        let doubled = first.clamp(self.page, LARGEST_SEGMENT) << self.before.min(MOST_SEGMENTS);
        let usual = doubled.max(self.bytes / 4);
        if self.is_in_window {
            let largest = if left == 0 { 0 } else { 1 << left.ilog2() };
            return room.max(usual).next_power_of_two().min(largest).min(LARGEST_SEGMENT);
        }
        let needed = room.max(usual);
        let wanted = if self.before == 0 { needed } else { needed.next_power_of_two() };
        let largest = left.min(LARGEST_SEGMENT) / self.page * self.page;
        wanted.next_multiple_of(self.page).min(largest)
    }
}

impl HeapBooks {
    fn block(&mut self, address: u64) -> Option<&mut BlockEntry> {
        self.segments.iter_mut().find_map(|segment| segment.blocks.get_mut(&address))
    }
}

/// A segment, as it is announced to the peer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SegmentNotice {
    pub(crate) number: u32,
    pub(crate) address: u64,
    pub(crate) size: u64,
}

impl Heap {
    pub(crate) fn new(regions: Regions, options: HeapOptions) -> Self {
        let share = HeapShare::new(options.max);
        Self::within(regions, options, share)
    }

    /// A heap that has its segments out of a share, which other heaps may use as well.
    pub(crate) fn within(regions: Regions, options: HeapOptions, share: Arc<HeapShare>) -> Self {
        let memory = HeapMemory { regions, options, share, books: Mutex::default(), count: AtomicUsize::new(0) };
        Self { memory: Arc::new(memory) }
    }

    /// Allocates a block of `len` bytes. Its content is that of an earlier block, or zeros.
    ///
    /// The first block of a heap, and each block that finds no room, requires a request to the broker, and blocks until its answer.
    ///
    /// # Errors
    /// [`Error::TooLarge`] if the heap may not grow that far; [`Error::Refused`] if the peer or a quota does not allow another segment;
    /// [`Error::Memory`], [`Error::System`], [`Error::Closed`].
    pub fn allocate(&self, len: usize) -> Result<Block> {
        self.allocate_aligned(len, 1)
    }

    /// Allocates a block at a multiple of `alignment`, a power of two up to 4096.
    ///
    /// # Errors
    /// As [`Heap::allocate`]; [`Error::Invalid`] for another alignment.
    ///
    /// ```
    /// # use partywall::rpc::{CallClient, CallServer};
    /// # let broker = partywall_daemon::Broker::embedded()?;
    /// # let web = partywall::Domain::builder().name("web").broker(broker.path()).join()?;
    /// # let _server = CallServer::builder().bind(&web, "math")?;
    /// # let client = CallClient::connect("web:math")?;
    /// let page = client.heap().allocate_aligned(4096, 4096)?;
    /// assert_eq!(page.address() % 4096, 0);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn allocate_aligned(&self, len: usize, alignment: usize) -> Result<Block> {
        let alignment = alignment as u64;
        if !alignment.is_power_of_two() || alignment > MOST_ALIGNMENT {
            return Err(Error::Invalid(format!(
                "an alignment of {alignment}: it is a power of two up to {MOST_ALIGNMENT}"
            )));
        }
        let (address, content) = self.memory.allocate(len as u64, alignment)?;
        Ok(Block { heap: Arc::clone(&self.memory), address, content, len })
    }

    /// Allocates a block if the heap need not grow for it, which would block.
    #[cfg(feature = "tokio")]
    pub(crate) fn allocate_without_growth(&self, len: usize) -> Option<Block> {
        let room = (len.max(1) as u64).checked_next_multiple_of(GRANULE)?;
        let (address, content) = HeapMemory::take_room(&mut lock(&self.memory.books), room, len as u64, 1)?;
        Some(Block { heap: Arc::clone(&self.memory), address, content, len })
    }

    /// The size of the heap, and its use.
    pub fn stats(&self) -> HeapStats {
        lock(&self.memory.books).stats
    }

    /// Whether all of these bytes are in blocks of this heap, so that a peer can read them in place.
    pub(crate) fn holds(&self, bytes: &[u8]) -> bool {
        self.memory.holds(bytes.as_ptr().addr() as u64, bytes.len() as u64)
    }

    /// Frees a block that [`Block::into_raw`] turned into an address. Returns `false` if there is no block at that address, or if a [`Block`]
    /// owns it.
    ///
    /// ```
    /// # use partywall::rpc::{CallClient, CallServer};
    /// # let broker = partywall_daemon::Broker::embedded()?;
    /// # let web = partywall::Domain::builder().name("web").broker(broker.path()).join()?;
    /// # let _server = CallServer::builder().bind(&web, "math")?;
    /// # let client = CallClient::connect("web:math")?;
    /// let address = client.heap().allocate(100)?.into_raw();
    /// assert!(client.heap().free(address.addr() as u64));
    /// assert!(!client.heap().free(address.addr() as u64), "it was given back already");
    /// let block = client.heap().allocate(100)?;
    /// assert!(!client.heap().free(block.address()), "it is freed when `block` is dropped");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn free(&self, address: u64) -> bool {
        self.memory.free(address, true)
    }
}

impl HeapMemory {
    /// How many segments there are.
    #[inline]
    pub(crate) fn count(&self) -> usize {
        self.count.load(Ordering::Acquire)
    }

    /// The segments from the `from`th on.
    pub(crate) fn notices(&self, from: usize) -> Vec<SegmentNotice> {
        let notice = |s: &HeapSegment| SegmentNotice { number: s.number, address: s.address, size: s.size };
        lock(&self.books).segments.iter().skip(from).map(notice).collect()
    }

    fn holds(&self, address: u64, len: u64) -> bool {
        self.count() > 0 && lock(&self.books).segments.iter().any(|segment| segment.holds(address, len))
    }

    fn allocate(&self, len: u64, alignment: u64) -> Result<(u64, *mut u8)> {
        let room = len.max(1).checked_next_multiple_of(GRANULE).and_then(|room| match alignment {
            ..=GRANULE => Some(room),
            _ => room.checked_add(alignment - GRANULE),
        });
        let room = room.filter(|room| *room <= LARGEST_SEGMENT).ok_or_else(|| self.too_large(len))?;
        let mut books = lock(&self.books);
        loop {
            if let Some(taken) = Self::take_room(&mut books, room, len, alignment) {
                return Ok(taken);
            }
            let segment = self.segment_for(&books, room, len)?;
            books.stats.segments += 1;
            books.stats.bytes += segment.size;
            books.segments.push(segment);
            self.count.store(books.segments.len(), Ordering::Release);
        }
    }

    /// A place in a segment that there is.
    fn take_room(books: &mut HeapBooks, room: u64, len: u64, alignment: u64) -> Option<(u64, *mut u8)> {
        let taken = books.segments.iter_mut().find_map(|segment| segment.take(room, len, alignment))?;
        books.stats.blocks += 1;
        books.stats.bytes_used += len;
        Some(taken)
    }

    fn too_large(&self, asked: u64) -> Error {
        let advice = "free blocks, or allow the heap to grow further (HeapOptions::max, and what the other side takes)";
        Error::TooLarge { asked, max: self.options.max, advice }
    }

    /// Another segment, in which `room` bytes fit, and which the peer has.
    fn segment_for(&self, books: &HeapBooks, room: u64, asked: u64) -> Result<HeapSegment> {
        // Memory of a window is of whatever pages the host has given it.
        let is_between_machines = self.regions.is_between_machines()?;
        let huge_pages = self.options.huge_pages && !is_between_machines;
        let left = self.options.max.min(2 << 30).saturating_sub(books.stats.bytes).min(self.share.left());
        let shape = SegmentShape {
            page: if huge_pages { 2 << 20 } else { 4096 },
            is_in_window: is_between_machines,
            before: books.segments.len(),
            bytes: books.stats.bytes,
        };
        let size = shape.size(room, self.options.first, left);
        if size < room || books.segments.len() >= MOST_SEGMENTS {
            return Err(self.too_large(asked));
        }
        let portion = |size| self.share.take(size).ok_or_else(|| self.too_large(asked));
        let (mut size, mut taken) = (size, portion(size)?);
        let place = loop {
            match self.regions.place_for(size) {
                // The broker gives a quarter of what is free in the window, at most.
                Err(Error::Refused { code: Refusal::OutOfResources, .. })
                    if room.max(shape.page).next_power_of_two() < size =>
                {
                    size /= 2;
                    drop(taken);
                    taken = portion(size)?;
                }
                place => break place?,
            }
        };
        let (channel, side) = self.regions.end()?;
        let mut candidates = (0..ATTEMPTS).map(|attempt| address_for(channel, side, attempt, shape.bytes, shape.page));
        let make = |address| match &place {
            Some(place) => OwnSegment::create_in(place.memory.as_fd(), place.base, size, address).map(|it| (it, None)),
            None => {
                let options = SegmentOptions { huge_pages, locked: self.options.locked, address };
                OwnSegment::create(size, options).map(|(it, memory)| (it, Some(memory)))
            }
        };
        let (memory, separate) = loop {
            let address = candidates.next();
            match make(address) {
                // Another broker's channel has the same number. Without any address of heaps, the peer maps it where it can and reads by an
                // offset.
                Err(RegionError::HeapAddress { .. }) if address.is_some() => {}
                other => break other?,
            }
        };
        if self.options.locked && is_between_machines {
            memory.lock()?;
        }
        let (base, shared) = match (separate, place) {
            (Some(separate), _) => (0, separate),
            (None, Some(place)) => (place.base, place.memory),
            (None, None) => return Err(Error::BrokerConfused("a segment without memory".into())),
        };
        let held = self.regions.hold_place(base)?;
        let number = self.regions.add_memory(HEAP_KIND, memory.geometry(), base, shared)?;
        let address = memory.content().addr() as u64;
        let granules = u32::try_from(size / GRANULE).map_err(|_| self.too_large(asked))?;
        let spaces = Spaces::new(granules);
        Ok(HeapSegment { memory, number, address, size, spaces, blocks: HashMap::new(), _portion: taken, _place: held })
    }

    /// Frees the block at this address. Only a raw block is freed by its address: any other block has an owner, which frees it once.
    fn free(&self, address: u64, is_raw: bool) -> bool {
        let mut books = lock(&self.books);
        let Some(segment) = books.segments.iter_mut().find(|segment| segment.holds(address, 0)) else { return false };
        if segment.blocks.get(&address).is_none_or(|block| block.is_raw != is_raw) {
            return false;
        }
        let Some(block) = segment.blocks.remove(&address) else { return false };
        segment.spaces.free(block.space);
        books.stats.blocks -= 1;
        books.stats.bytes_used -= block.asked;
        true
    }
}

impl HeapSegment {
    fn holds(&self, address: u64, len: u64) -> bool {
        let end = self.address + self.size;
        (self.address..end).contains(&address) && len <= end - address
    }

    fn take(&mut self, room: u64, len: u64, alignment: u64) -> Option<(u64, *mut u8)> {
        let space = self.spaces.take(u32::try_from(room / GRANULE).ok()?)?;
        let at = (self.address + u64::from(space.offset) * GRANULE).next_multiple_of(alignment);
        self.blocks.insert(at, BlockEntry { space, asked: len, is_raw: false });
        Some((at, self.memory.content().wrapping_add((at - self.address) as usize)))
    }
}

impl Drop for HeapMemory {
    fn drop(&mut self) {
        for segment in &lock(&self.books).segments {
            segment.memory.give_up();
            self.regions.give_up(true, segment.number);
        }
    }
}

/// Memory of a [`Heap`], which is freed when it is dropped.
///
/// It can outlive its connection. Between machines, it then keeps the place in the window that its heap has, and this side of the channel counts as
/// open for the broker until the last block is dropped.
///
/// The peer may read it at any time after its address was passed in a call. A server may still read the arguments of a call that has timed
/// out, so their block should be kept until a later call of the same connection has been answered.
pub struct Block {
    heap: Arc<HeapMemory>,
    address: u64,
    content: *mut u8,
    len: usize,
}

// SAFETY: the block is the only owner of its bytes, which belong to the process and not to a thread.
unsafe impl Send for Block {}
// SAFETY: `&Block` gives `&[u8]` alone.
unsafe impl Sync for Block {}

impl Block {
    /// The address of the block. The peer uses the same address in pointers to it.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// The address of the block. The block stays allocated until [`Heap::free`].
    pub fn into_raw(self) -> *mut u8 {
        let content = self.content;
        if let Some(block) = lock(&self.heap.books).block(self.address) {
            block.is_raw = true;
        }
        // The books must not be freed with the block, so the heap is released by hand.
        let this = std::mem::ManuallyDrop::new(self);
        // SAFETY: `this` is not used again, so the heap is read, and dropped, once.
        drop(unsafe { std::ptr::read(&raw const this.heap) });
        content
    }

    /// Changes the block's length: in place if it becomes shorter, by a copy to another block if it becomes longer.
    ///
    /// # Errors
    /// As [`Heap::allocate`]; the block stays as it was.
    ///
    /// ```
    /// # use partywall::rpc::{CallClient, CallServer};
    /// # let broker = partywall_daemon::Broker::embedded()?;
    /// # let web = partywall::Domain::builder().name("web").broker(broker.path()).join()?;
    /// # let _server = CallServer::builder().bind(&web, "math")?;
    /// # let client = CallClient::connect("web:math")?;
    /// let mut block = client.heap().allocate(3)?;
    /// block.copy_from_slice(b"abc");
    /// block.resize(10_000)?;
    /// assert_eq!((block.len(), &block[..3]), (10_000, &b"abc"[..]));
    /// block.resize(2)?;
    /// assert_eq!(&*block, b"ab");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn resize(&mut self, len: usize) -> Result<()> {
        if len > self.len {
            let mut longer = Heap { memory: Arc::clone(&self.heap) }.allocate(len)?;
            longer[..self.len].copy_from_slice(self);
            *self = longer;
            return Ok(());
        }
        let mut books = lock(&self.heap.books);
        let address = self.address;
        let before = books.block(address).map_or(0, |block| std::mem::replace(&mut block.asked, len as u64));
        books.stats.bytes_used = books.stats.bytes_used - before + len as u64;
        self.len = len;
        Ok(())
    }
}

impl Deref for Block {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the books have given these bytes to this block alone; they are mapped as long as the heap lives, which the block keeps
        // alive, and were zeroed when the segment was made. No other process can write them (protocol M1).
        unsafe { std::slice::from_raw_parts(self.content, self.len) }
    }
}

impl DerefMut for Block {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `&mut self` makes this the only reference. Peers that read meanwhile read by copies.
        unsafe { std::slice::from_raw_parts_mut(self.content, self.len) }
    }
}

impl fmt::Debug for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Block({} bytes at {:#x})", self.len, self.address)
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        self.heap.free(self.address, false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_segment_fits_its_block_and_further_ones_double() {
        const MIB: u64 = 1 << 20;
        let shape = |before, is_in_window| SegmentShape { page: 4096, is_in_window, before, bytes: 0 };
        let most = 2048 * MIB;
        assert_eq!(shape(0, false).size(100_000_000, 4096, most), 100_003_840, "whole pages");
        assert_eq!(shape(1, false).size(100_000_000, 4096, most), 128 * MIB);
        assert_eq!(shape(0, true).size(100_000_000, 4096, most), 128 * MIB, "a place in a window");
        assert_eq!(shape(0, false).size(64, 3 * MIB, most), 3 * MIB);
        assert_eq!(shape(2, false).size(64, 3 * MIB, most), 16 * MIB);
        let mut bytes = 100_003_840;
        for before in 1..MOST_SEGMENTS {
            bytes += SegmentShape { bytes, ..shape(before, false) }.size(64, 4096, most - bytes);
        }
        assert!(bytes > 400 * MIB, "small blocks after a long one: {bytes}");
        assert_eq!(shape(2, false).size(64, 3 * MIB, 5 * MIB + 1), 5 * MIB, "what is left");
        assert_eq!(shape(2, true).size(64, 3 * MIB, 5 * MIB + 1), 4 * MIB);
        assert_eq!(SegmentShape { page: 2 * MIB, ..shape(0, false) }.size(64, 0, most), 2 * MIB, "a huge page");
        for before in [0, 7, usize::MAX] {
            assert_eq!(shape(before, false).size(64, u64::MAX, u64::MAX), LARGEST_SEGMENT);
            assert_eq!(shape(before, true).size(LARGEST_SEGMENT, u64::MAX, 0), 0);
            assert_eq!(shape(before, false).size(LARGEST_SEGMENT, 0, 4095), 0);
        }
    }
}
