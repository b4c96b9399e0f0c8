//! The bytes of a typed call: one value after the other, without padding.

use super::plain::{self, PlainData};
use super::slices::PeerSlice;
use crate::rpc::error::CallError;
use crate::rpc::incoming::IncomingCall;
use crate::rpc::view::PeerView;
use partywall_shm::call::INLINE;
use zerocopy::IntoBytes;

type CallResult<T> = Result<T, CallError>;

/// Collects the values of a typed call or result. Up to 40 bytes need no memory.
///
/// ```
/// use partywall::rpc::{Carried, ValueWriter};
///
/// let mut frame = ValueWriter::default();
/// 7u32.put(&mut frame);
/// Some(true).put(&mut frame);
/// assert_eq!(frame.bytes(), [7, 0, 0, 0, 1, 1]);
/// ```
#[derive(Debug)]
pub struct ValueWriter {
    short: [u8; INLINE],
    len: usize,
    /// All bytes, once there are more than a record carries.
    long: Vec<u8>,
}

impl Default for ValueWriter {
    fn default() -> Self {
        Self { short: [0; INLINE], len: 0, long: Vec::new() }
    }
}

impl ValueWriter {
    /// Appends bytes.
    #[inline]
    pub(super) fn append(&mut self, bytes: &[u8]) {
        let end = self.len + bytes.len();
        if end <= INLINE {
            self.short[self.len..end].copy_from_slice(bytes);
        } else {
            if self.len <= INLINE {
                self.long.extend_from_slice(&self.short[..self.len]);
            }
            self.long.extend_from_slice(bytes);
        }
        self.len = end;
    }

    /// Appends elements behind a word with their bytes. The lowest bit of that word says that an address follows, and not the elements.
    pub(super) fn append_elements<T: PlainData>(&mut self, elements: &[T]) {
        let bytes = elements.as_bytes();
        self.append(&((bytes.len() as u64) << 1).to_le_bytes());
        self.append(bytes);
    }

    pub(super) fn append_reference(&mut self, address: u64, len: usize) {
        self.append(&((len as u64) << 1 | 1).to_le_bytes());
        self.append(&address.to_le_bytes());
    }

    /// What has been put in.
    #[inline]
    pub fn bytes(&self) -> &[u8] {
        if self.len <= INLINE { &self.short[..self.len] } else { &self.long }
    }

    /// What has been put in, for an answer.
    pub(super) fn into_vec(self) -> Vec<u8> {
        if self.len <= INLINE { self.short[..self.len].to_vec() } else { self.long }
    }

    pub(super) fn as_inline(&self) -> Option<&[u8]> {
        (self.len <= INLINE).then(|| &self.short[..self.len])
    }
}

/// Reads the values of a typed call or result, each byte once. A value that is none of its type is an error.
///
/// ```
/// # use partywall::rpc::{CallClient, CallServer};
/// # let broker = partywall_daemon::Broker::embedded()?;
/// # let web = partywall::Domain::builder().name("web").broker(broker.path()).join()?;
/// use partywall::rpc::{Carried, ValueReader};
///
/// let _server = CallServer::builder().method("not", |call| {
///     let mut frame = ValueReader::of_call(call);
///     let (value, times) = (bool::take(&mut frame)?, u32::take(&mut frame)?);
///     frame.finish()?;
///     Ok([u8::from(value ^ (times % 2 == 1))].into())
/// }).bind(&web, "math")?;
/// let client = CallClient::connect("web:math")?;
/// assert_eq!(client.call("not", &[1, 3, 0, 0, 0])?.to_vec(), [0]);
/// assert!(client.call("not", &[2, 3, 0, 0, 0]).is_err(), "2 is no `bool`");
/// assert!(client.call("not", &[1, 3, 0, 0]).is_err(), "it is too short");
/// assert!(client.call("not", &[1, 3, 0, 0, 0, 0]).is_err(), "it is too long");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct ValueReader<'a> {
    view: &'a PeerView,
    at: usize,
    /// The call whose pointers are followed; `None` for a result, which contains no pointers.
    call: Option<&'a IncomingCall<'a>>,
}

impl<'a> ValueReader<'a> {
    /// Reads the arguments of a call.
    pub fn of_call(call: &'a IncomingCall<'_>) -> Self {
        Self { view: call.args(), at: 0, call: Some(call) }
    }

    /// Reads a result.
    ///
    /// ```
    /// # use partywall::rpc::{CallClient, CallServer};
    /// # let broker = partywall_daemon::Broker::embedded()?;
    /// # let web = partywall::Domain::builder().name("web").broker(broker.path()).join()?;
    /// # let _server = CallServer::builder().method("echo", |call| Ok(call.args().to_vec().into())).bind(&web, "math")?;
    /// use partywall::rpc::{Carried, ValueReader};
    ///
    /// let reply = CallClient::connect("web:math")?.call("echo", &[1, 7, 0])?;
    /// assert_eq!(<Option<u16> as Carried>::take(&mut ValueReader::of_result(&reply))?, Some(7));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn of_result(view: &'a PeerView) -> Self {
        Self { view, at: 0, call: None }
    }

    /// The values have been read.
    ///
    /// # Errors
    /// [`CallError::BadValue`] if there are more bytes.
    pub fn finish(self) -> CallResult<()> {
        let more = self.view.len() - self.at;
        if more == 0 { Ok(()) } else { Err(CallError::BadValue(format!("{more} bytes too many"))) }
    }

    fn next<const N: usize>(&mut self) -> CallResult<[u8; N]> {
        let mut bytes = [0; N];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    #[inline]
    fn fill(&mut self, to: &mut [u8]) -> CallResult<()> {
        let short = |_| CallError::BadValue("the bytes end before the last value".into());
        self.view.read_at(self.at, to).map_err(short)?;
        self.at += to.len();
        Ok(())
    }

    /// The next value: a copy of its bytes, which is judged.
    #[inline]
    pub(super) fn plain<T: PlainData>(&mut self) -> CallResult<T> {
        plain::copied(|bytes| self.fill(bytes))
    }

    /// Whether an optional value follows.
    pub(super) fn is_present(&mut self) -> CallResult<bool> {
        self.plain()
    }

    /// The elements that follow, or to which a pointer leads.
    pub(super) fn elements<T: PlainData>(&mut self) -> CallResult<PeerSlice<T>> {
        let word = u64::from_le_bytes(self.next()?);
        let (len, is_reference) = (word >> 1, word & 1 == 1);
        let view = match self.call {
            Some(call) if is_reference => call.follow(u64::from_le_bytes(self.next()?), len)?,
            None if is_reference => return Err(CallError::BadValue("a pointer in a result".into())),
            _ => {
                let len = usize::try_from(len).ok();
                let part = len.and_then(|len| self.view.part(self.at, len));
                let part = part.ok_or_else(|| CallError::BadValue("more elements than bytes".into()))?;
                self.at += part.len();
                part
            }
        };
        PeerSlice::of_view(view)
    }
}
