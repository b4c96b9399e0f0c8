//! Slices of plain data: in this side's heap, and in the peer's.
#![expect(unsafe_code, reason = "a block of the heap is seen as the elements that were stored in it")]

use super::plain::{self, PlainData};
use crate::rpc::error::CallError;
use crate::rpc::heap::{Block, Heap};
use crate::rpc::reply::Reply;
use crate::rpc::view::PeerView;
use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use zerocopy::{IntoBytes, TryFromBytes};

type CallResult<T> = Result<T, CallError>;

/// How much of a slice is copied at once.
const STAGE: usize = 4096;
/// Every block begins at a multiple of this.
const BLOCK_ALIGNMENT: usize = 64;

/// Elements of plain data in this side's [`Heap`]. The peer reads them in place, and no copy is made for a call.
///
/// ```
/// use partywall::rpc::{CallClient, CallError, CallServer, HeapSlice, IncomingCall, PeerSlice};
///
/// partywall::service! {
///     trait Math, client MathClient {
///         fn sum(numbers: &HeapSlice<u64>) -> u64;
///         fn squares(count: u32) -> HeapSlice<u64>;
///     }
/// }
///
/// struct Adder;
/// impl Math for Adder {
///     fn sum(&self, _: &IncomingCall<'_>, numbers: PeerSlice<u64>) -> Result<u64, CallError> {
///         numbers.iter().sum()
///     }
///     fn squares(&self, call: &IncomingCall<'_>, count: u32) -> Result<HeapSlice<u64>, CallError> {
///         let mut squares = HeapSlice::filled(call.heap(), count as usize, 0u64)?;
///         for (n, square) in (0u64..).zip(squares.iter_mut()) {
///             *square = n * n;
///         }
///         Ok(squares)
///     }
/// }
///
/// # let broker = partywall_daemon::Broker::embedded()?;
/// # let web = partywall::Domain::builder().name("web").broker(broker.path()).join()?;
/// let _server = Adder.add_to(CallServer::builder()).bind(&web, "math")?;
/// let client = MathClient::new(CallClient::connect("web:math")?);
/// let numbers = HeapSlice::copied(client.calls().heap(), &[1u64, 2, 3])?;
/// assert_eq!(client.sum(&numbers)?, 6);
/// // Read in the server's memory, which it keeps until the slice is dropped.
/// assert_eq!(client.squares(1000)?.get(999)?, 998_001);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct HeapSlice<T> {
    /// Its bytes are those of valid elements.
    block: Block,
    elements: PhantomData<T>,
}

impl<T: PlainData> HeapSlice<T> {
    const FITS: () = assert!(align_of::<T>() <= BLOCK_ALIGNMENT && size_of::<T>() > 0, "an element of this type");

    /// A copy of elements.
    ///
    /// # Errors
    /// As [`Heap::allocate`].
    pub fn copied(heap: &Heap, elements: &[T]) -> crate::Result<Self> {
        const { Self::FITS };
        let bytes = elements.as_bytes();
        let mut block = heap.allocate(bytes.len())?;
        block.copy_from_slice(bytes);
        Ok(Self { block, elements: PhantomData })
    }

    /// `len` elements of this value.
    ///
    /// # Errors
    /// As [`Heap::allocate`].
    pub fn filled(heap: &Heap, len: usize, value: T) -> crate::Result<Self> {
        const { Self::FITS };
        // A length that overflows is larger than every heap.
        let mut block = heap.allocate(len.saturating_mul(size_of::<T>()))?;
        for place in block.chunks_exact_mut(size_of::<T>()) {
            place.copy_from_slice(value.as_bytes());
        }
        Ok(Self { block, elements: PhantomData })
    }

    /// The address of the first element. The peer uses the same one in pointers to it.
    pub fn address(&self) -> u64 {
        self.block.address()
    }

    /// The bytes of the elements.
    ///
    /// ```
    /// # use partywall::rpc::{CallClient, CallServer, HeapSlice};
    /// # let broker = partywall_daemon::Broker::embedded()?;
    /// # let web = partywall::Domain::builder().name("web").broker(broker.path()).join()?;
    /// # let _server = CallServer::builder().bind(&web, "math")?;
    /// # let client = CallClient::connect("web:math")?;
    /// assert_eq!(&*HeapSlice::copied(client.heap(), &[1u16, 2])?.into_block(), [1, 0, 2, 0]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn into_block(self) -> Block {
        self.block
    }
}

impl<T: PlainData> Deref for HeapSlice<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        let bytes: &[u8] = &self.block;
        debug_assert!(bytes.as_ptr().cast::<T>().is_aligned());
        // SAFETY: a block begins at a multiple of 64, which `FITS` checks to suffice. Its bytes are those of whole valid elements: `copied`
        // and `filled` have stored them, and only elements are stored since. No other process can write them (protocol M1).
        unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast(), bytes.len() / size_of::<T>()) }
    }
}

impl<T: PlainData> DerefMut for HeapSlice<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        let bytes: &mut [u8] = &mut self.block;
        // SAFETY: as above, and `&mut self` makes this the only reference. An element has no padding (`IntoBytes`), so the bytes stay
        // initialised whatever is stored.
        unsafe { std::slice::from_raw_parts_mut(bytes.as_mut_ptr().cast(), bytes.len() / size_of::<T>()) }
    }
}

impl<T> fmt::Debug for HeapSlice<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("HeapSlice").field(&self.block).finish()
    }
}

/// Elements of plain data that the peer has, seen guarded: each read copies, and judges the copy.
///
/// The peer can change elements in its heap while they are read. So decide by one copy, and do not read twice.
///
/// ```
/// use partywall::rpc::{CallError, PeerSlice};
///
/// /// The middle of three elements or more.
/// fn middle(letters: &PeerSlice<char>) -> Result<char, CallError> {
///     if letters.is_empty() {
///         return Err(CallError::application(1, "no letters"));
///     }
///     let middle = letters.get(letters.len() / 2)?;
///     assert!(letters.view().len() >= 4);
///     Ok(middle)
/// }
/// # let _ = middle;
/// ```
pub struct PeerSlice<T> {
    view: PeerView,
    /// Keeps the server from using the memory again.
    _reply: Option<Reply>,
    elements: PhantomData<T>,
}

impl<T: PlainData> PeerSlice<T> {
    pub(super) fn of_view(view: PeerView) -> CallResult<Self> {
        const { assert!(size_of::<T>() > 0, "an element of this type") };
        if !view.len().is_multiple_of(size_of::<T>()) {
            return Err(CallError::BadValue(format!(
                "{} bytes are no elements of {} each",
                view.len(),
                size_of::<T>()
            )));
        }
        Ok(Self { view, _reply: None, elements: PhantomData })
    }

    pub(super) fn of_reply(reply: Reply) -> CallResult<Self> {
        Ok(Self { _reply: None, ..Self::of_view(reply.view().clone())? }.holding(reply))
    }

    fn holding(mut self, reply: Reply) -> Self {
        self._reply = Some(reply);
        self
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        self.view.len() / size_of::<T>()
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.view.is_empty()
    }

    /// A copy of one element.
    ///
    /// # Errors
    /// [`CallError::BadPointer`] if there are fewer; [`CallError::BadValue`] if its bytes are no value of the type.
    pub fn get(&self, index: usize) -> CallResult<T> {
        let at = index.checked_mul(size_of::<T>()).ok_or(CallError::BadPointer)?;
        plain::copied(|bytes| self.view.read_at(at, bytes))
    }

    /// The elements one after the other. They are copied by pieces of 4 KiB.
    ///
    /// ```
    /// # use partywall::rpc::{CallClient, CallError, CallServer, IncomingCall, PeerSlice};
    /// # partywall::service! {
    /// #     trait Math, client MathClient { fn largest(numbers: &[u32]) -> Option<u32>; }
    /// # }
    /// # struct Largest;
    /// impl Math for Largest {
    ///     fn largest(&self, _: &IncomingCall<'_>, numbers: PeerSlice<u32>) -> Result<Option<u32>, CallError> {
    ///         let mut largest = None;
    ///         for number in numbers.iter() {
    ///             largest = largest.max(Some(number?));
    ///         }
    ///         Ok(largest)
    ///     }
    /// }
    /// # let broker = partywall_daemon::Broker::embedded()?;
    /// # let web = partywall::Domain::builder().name("web").broker(broker.path()).join()?;
    /// # let _server = Largest.add_to(CallServer::builder()).bind(&web, "math")?;
    /// let client = MathClient::new(CallClient::connect("web:math")?);
    /// assert_eq!(client.largest(&[3, 9, 4])?, Some(9));
    /// assert_eq!(client.largest(&[])?, None);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn iter(&self) -> PeerSliceIter<'_, T> {
        PeerSliceIter { slice: self, next: 0, stage: Vec::new(), at: 0 }
    }

    /// A copy of all elements.
    ///
    /// # Errors
    /// [`CallError::BadValue`] if the bytes of one are no value of the type; [`CallError::OutOfMemory`].
    pub fn to_vec(&self) -> CallResult<Vec<T>> {
        let mut all = Vec::new();
        let no_memory = |_| CallError::OutOfMemory(format!("a copy of {} elements of the peer's", self.len()));
        all.try_reserve_exact(self.len()).map_err(no_memory)?;
        for element in self.iter() {
            all.push(element?);
        }
        Ok(all)
    }

    /// The bytes of the elements.
    pub fn view(&self) -> &PeerView {
        &self.view
    }

    /// The elements in place: the *trusting* level of trust. No copy is made.
    ///
    /// # Errors
    /// [`CallError::BadValue`] unless the bytes are values of the type, and lie where such values may.
    ///
    /// # Safety
    /// As [`PeerView::trusting`]: the peer must not change the elements while the slice is used, and nothing keeps it from that.
    ///
    /// ```
    /// # use partywall::rpc::{CallClient, CallError, CallServer, HeapSlice, IncomingCall, PeerSlice};
    /// # partywall::service! {
    /// #     trait Math, client MathClient { fn sum(numbers: &HeapSlice<u64>) -> u64; }
    /// # }
    /// # struct Adder;
    /// impl Math for Adder {
    ///     fn sum(&self, _: &IncomingCall<'_>, numbers: PeerSlice<u64>) -> Result<u64, CallError> {
    ///         // SAFETY: this program is its own client, and changes no arguments of a call under way.
    ///         let numbers = unsafe { numbers.trusting()? };
    ///         Ok(numbers.iter().sum())
    ///     }
    /// }
    /// # let broker = partywall_daemon::Broker::embedded()?;
    /// # let web = partywall::Domain::builder().name("web").broker(broker.path()).join()?;
    /// # let _server = Adder.add_to(CallServer::builder()).bind(&web, "math")?;
    /// # let client = MathClient::new(CallClient::connect("web:math")?);
    /// # assert_eq!(client.sum(&HeapSlice::copied(client.calls().heap(), &[1, 2, 3])?)?, 6);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub unsafe fn trusting(&self) -> CallResult<&[T]> {
        // SAFETY: the caller promises for the elements what is asked for the bytes.
        let bytes = unsafe { self.view.trusting() };
        let bad = || CallError::BadValue(format!("no elements of type `{}` in place", std::any::type_name::<T>()));
        <[T]>::try_ref_from_bytes(bytes).map_err(|_| bad())
    }
}

impl<'a, T: PlainData> IntoIterator for &'a PeerSlice<T> {
    type Item = CallResult<T>;
    type IntoIter = PeerSliceIter<'a, T>;

    fn into_iter(self) -> PeerSliceIter<'a, T> {
        self.iter()
    }
}

impl<T> fmt::Debug for PeerSlice<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("PeerSlice").field(&self.view).finish()
    }
}

/// Copies of the elements of a [`PeerSlice`]. Each may be an error, and the ones behind it are looked at all the same.
///
/// ```
/// use partywall::rpc::{CallError, PeerSlice};
///
/// fn sum(numbers: &PeerSlice<u64>) -> Result<u64, CallError> {
///     numbers.iter().sum()
/// }
/// # let _ = sum;
/// ```
#[derive(Debug)]
pub struct PeerSliceIter<'a, T> {
    slice: &'a PeerSlice<T>,
    /// The element behind those that have been copied.
    next: usize,
    /// The copy of some elements, of which the bytes before `at` have been judged.
    stage: Vec<u8>,
    at: usize,
}

impl<T: PlainData> Iterator for PeerSliceIter<'_, T> {
    type Item = CallResult<T>;

    #[inline]
    fn next(&mut self) -> Option<CallResult<T>> {
        if self.at == self.stage.len() {
            let left = self.slice.len() - self.next;
            let count = left.min((STAGE / size_of::<T>()).max(1));
            if count == 0 {
                return None;
            }
            self.stage.resize(count * size_of::<T>(), 0);
            let copied = self.slice.view.read_at(self.next * size_of::<T>(), &mut self.stage);
            (self.next, self.at) = (self.next + count, 0);
            if let Err(e) = copied {
                self.at = self.stage.len();
                return Some(Err(e));
            }
        }
        let end = self.at + size_of::<T>();
        let value = plain::judge(&self.stage[self.at..end]);
        self.at = end;
        Some(value)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let staged = (self.stage.len() - self.at) / size_of::<T>();
        let left = self.slice.len() - self.next + staged;
        (left, Some(left))
    }
}
