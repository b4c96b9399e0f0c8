//! What may be an argument or a result of a typed method.

use super::frame::{ValueReader, ValueWriter};
use super::plain::PlainData;
use super::slices::{HeapSlice, PeerSlice};
use crate::rpc::answer::CallAnswer;
use crate::rpc::error::CallError;
use crate::rpc::reply::Reply;

type CallResult<T> = Result<T, CallError>;

/// A value that travels by copy, as an argument or a result: plain data, options, pairs and triples of them, `Vec` and `String`.
///
/// ```
/// use partywall::rpc::{Carried, ValueWriter};
///
/// let mut frame = ValueWriter::default();
/// ("two".to_owned(), Some(2u16)).put(&mut frame);
/// assert_eq!(frame.bytes().len(), 8 + 3 + 1 + 2);
/// ```
pub trait Carried: Sized {
    /// Appends the value to a frame.
    fn put(&self, frame: &mut ValueWriter);

    /// Takes the value from a frame that a peer has made.
    ///
    /// # Errors
    /// [`CallError::BadValue`] if the next bytes are no such value, [`CallError::BadPointer`], [`CallError::OutOfMemory`].
    fn take(frame: &mut ValueReader<'_>) -> CallResult<Self>;
}

impl<T: PlainData> Carried for T {
    #[inline]
    fn put(&self, frame: &mut ValueWriter) {
        frame.append(self.as_bytes());
    }

    #[inline]
    fn take(frame: &mut ValueReader<'_>) -> CallResult<Self> {
        frame.plain()
    }
}

impl Carried for () {
    fn put(&self, _: &mut ValueWriter) {}

    fn take(_: &mut ValueReader<'_>) -> CallResult<Self> {
        Ok(())
    }
}

impl<C: Carried> Carried for Option<C> {
    fn put(&self, frame: &mut ValueWriter) {
        self.is_some().put(frame);
        if let Some(value) = self {
            value.put(frame);
        }
    }

    fn take(frame: &mut ValueReader<'_>) -> CallResult<Self> {
        if frame.is_present()? { C::take(frame).map(Some) } else { Ok(None) }
    }
}

impl<A: Carried, B: Carried> Carried for (A, B) {
    fn put(&self, frame: &mut ValueWriter) {
        self.0.put(frame);
        self.1.put(frame);
    }

    fn take(frame: &mut ValueReader<'_>) -> CallResult<Self> {
        Ok((A::take(frame)?, B::take(frame)?))
    }
}

impl<A: Carried, B: Carried, C: Carried> Carried for (A, B, C) {
    fn put(&self, frame: &mut ValueWriter) {
        self.0.put(frame);
        self.1.put(frame);
        self.2.put(frame);
    }

    fn take(frame: &mut ValueReader<'_>) -> CallResult<Self> {
        Ok((A::take(frame)?, B::take(frame)?, C::take(frame)?))
    }
}

impl<T: PlainData> Carried for Vec<T> {
    fn put(&self, frame: &mut ValueWriter) {
        frame.append_elements(self);
    }

    fn take(frame: &mut ValueReader<'_>) -> CallResult<Self> {
        frame.elements()?.to_vec()
    }
}

impl Carried for String {
    fn put(&self, frame: &mut ValueWriter) {
        frame.append_elements(self.as_bytes());
    }

    fn take(frame: &mut ValueReader<'_>) -> CallResult<Self> {
        let bytes = frame.elements()?.to_vec()?;
        Self::from_utf8(bytes).map_err(|_| CallError::BadValue("a text that is no UTF-8".into()))
    }
}

/// What a client passes as an argument: whatever is [`Carried`], `&str`, slices of plain data, and [`HeapSlice`]s, which are passed in place.
///
/// ```
/// use partywall::rpc::{Argument, ValueWriter};
///
/// let mut frame = ValueWriter::default();
/// "text".pass(&mut frame);
/// [1u16, 2].as_slice().pass(&mut frame);
/// assert_eq!(frame.bytes().len(), 8 + 4 + 8 + 4);
/// ```
pub trait Argument {
    /// Appends the argument to a frame.
    fn pass(&self, frame: &mut ValueWriter);
}

impl<C: Carried> Argument for C {
    #[inline]
    fn pass(&self, frame: &mut ValueWriter) {
        self.put(frame);
    }
}

impl<T: PlainData> Argument for &[T] {
    fn pass(&self, frame: &mut ValueWriter) {
        frame.append_elements(self);
    }
}

impl Argument for &str {
    fn pass(&self, frame: &mut ValueWriter) {
        frame.append_elements(self.as_bytes());
    }
}

impl<T: PlainData> Argument for &HeapSlice<T> {
    fn pass(&self, frame: &mut ValueWriter) {
        let elements: &[T] = self;
        frame.append_reference(self.address(), size_of_val(elements));
    }
}

/// What the server sees of an argument. It is implemented for functions of the declared type, because that type may contain a lifetime.
///
/// | declared | the client passes | the server sees |
/// | --- | --- | --- |
/// | plain data, `Option`, `Vec`, `String`, a pair | the value | the value, a copy |
/// | `&[T]` | a slice, which is copied | a [`PeerSlice`] |
/// | `&HeapSlice<T>` | a [`HeapSlice`], in place | a [`PeerSlice`] |
/// | `&str` | a text | a `String` |
///
/// ```
/// use partywall::rpc::{Declared, PeerSlice};
///
/// fn len(numbers: <fn(&[u64]) as Declared>::Seen) -> usize {
///     let numbers: PeerSlice<u64> = numbers;
///     numbers.len()
/// }
/// # let _ = len;
/// ```
pub trait Declared {
    /// What the server sees.
    type Seen: Send + 'static;

    /// Takes the argument from a frame that a client has made.
    ///
    /// # Errors
    /// As [`Carried::take`].
    fn see(frame: &mut ValueReader<'_>) -> CallResult<Self::Seen>;
}

impl<C: Carried + Send + 'static> Declared for fn(C) {
    type Seen = C;

    #[inline]
    fn see(frame: &mut ValueReader<'_>) -> CallResult<C> {
        C::take(frame)
    }
}

impl<T: PlainData> Declared for fn(&[T]) {
    type Seen = PeerSlice<T>;

    fn see(frame: &mut ValueReader<'_>) -> CallResult<PeerSlice<T>> {
        frame.elements()
    }
}

impl<T: PlainData> Declared for fn(&HeapSlice<T>) {
    type Seen = PeerSlice<T>;

    fn see(frame: &mut ValueReader<'_>) -> CallResult<PeerSlice<T>> {
        frame.elements()
    }
}

impl Declared for fn(&str) {
    type Seen = String;

    fn see(frame: &mut ValueReader<'_>) -> CallResult<String> {
        String::take(frame)
    }
}

/// The result of a typed method: whatever is [`Carried`], or a [`HeapSlice`] that the client reads in place as a [`PeerSlice`].
///
/// ```
/// use partywall::rpc::{CallError, MethodResult, Reply};
///
/// fn number(reply: Reply) -> Result<u64, CallError> {
///     u64::receive(reply)
/// }
/// # let _ = number;
/// ```
pub trait MethodResult: Sized {
    /// What the client gets.
    type Received;

    /// The answer of the server.
    fn give(self) -> CallAnswer;

    /// Takes the result from the server's reply.
    ///
    /// # Errors
    /// As [`Carried::take`].
    fn receive(reply: Reply) -> CallResult<Self::Received>;
}

impl<C: Carried> MethodResult for C {
    type Received = C;

    #[inline]
    fn give(self) -> CallAnswer {
        let mut frame = ValueWriter::default();
        self.put(&mut frame);
        match frame.as_inline().and_then(CallAnswer::inline) {
            Some(answer) => answer,
            None => frame.into_vec().into(),
        }
    }

    #[inline]
    fn receive(reply: Reply) -> CallResult<C> {
        let mut frame = ValueReader::of_result(&reply);
        let value = C::take(&mut frame)?;
        frame.finish()?;
        Ok(value)
    }
}

impl<T: PlainData> MethodResult for HeapSlice<T> {
    type Received = PeerSlice<T>;

    fn give(self) -> CallAnswer {
        self.into_block().into()
    }

    fn receive(reply: Reply) -> CallResult<PeerSlice<T>> {
        PeerSlice::of_reply(reply)
    }
}
