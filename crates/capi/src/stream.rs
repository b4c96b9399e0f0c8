//! Streams and their listeners.
#![expect(
    unsafe_code,
    reason = "takes pointers from C, gives handles to it, and keeps a span beside the half that lends it"
)]

use crate::argument::{self, Patience};
use crate::domain::DomainHandle;
use crate::failure::{CallFailure, WaitFor};
use crate::fork;
use crate::options::{self, RawOptions};
use crate::peer::{KeptPeer, RawPeer};
use partywall::{Error, Listener, PeerInfo, ReadHalf, Reserved, Stream, WriteHalf};
use std::cell::UnsafeCell;
use std::ffi::{c_char, c_int, c_void};
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::ptr::NonNull;

/// `pw_listener` of the header.
#[derive(Debug)]
pub struct ListenerHandle {
    listener: Listener,
}

/// `pw_stream` of the header. Its two directions may be used by two threads at the same time, so neither call may have the whole of it.
#[derive(Debug)]
pub struct StreamHandle {
    read: UnsafeCell<Option<Reading>>,
    write: UnsafeCell<Option<Writing>>,
    peer: KeptPeer,
    channel: u64,
}

#[derive(Debug)]
struct Reading {
    half: ReadHalf,
    /// The bytes that the last peek has shown, and that nothing has taken since.
    shown: usize,
}

/// A writing half, and the span that it has lent. The span borrows the half, so the half is behind a pointer and is only used while there is
/// no span.
#[derive(Debug)]
struct Writing {
    reserved: Option<Reserved<'static>>,
    half: NonNull<WriteHalf>,
}

impl Writing {
    fn new(half: WriteHalf) -> Self {
        Self { reserved: None, half: NonNull::from(Box::leak(Box::new(half))) }
    }

    /// The half, which has lent nothing.
    fn half(&mut self) -> Result<&mut WriteHalf, CallFailure> {
        if self.reserved.is_some() {
            return Err(CallFailure::invalid("a span is reserved: commit it first; 0 bytes give it up"));
        }
        // SAFETY: the pointer comes from a box that only `drop` frees. There is no span that borrows the half, and `self` is exclusive.
        Ok(unsafe { self.half.as_mut() })
    }

    /// Lends a span, in place of an earlier one.
    fn reserve(&mut self, n: usize, patience: Patience) -> Result<*mut c_void, CallFailure> {
        self.reserved = None;
        // SAFETY: the box lives until `drop`, which drops the span first. Until the span is gone, `half` refuses to lend the half again.
        let half: &'static mut WriteHalf = unsafe { self.half.as_mut() };
        half.set_nonblocking(patience.nonblocking);
        half.set_timeout(patience.timeout);
        let span = half.reserve(n).map_err(|e| CallFailure::of(&e, WaitFor::Room))?;
        // The pointer is taken where the span stays: it is not moved before it is committed.
        Ok(self.reserved.insert(span).as_mut_ptr().cast())
    }
}

impl Drop for Writing {
    fn drop(&mut self) {
        self.reserved = None;
        // SAFETY: the pointer comes from a box, nothing borrows the half any more, and it is freed here only.
        drop(unsafe { Box::from_raw(self.half.as_ptr()) });
    }
}

impl StreamHandle {
    fn new(stream: Stream, peer: Option<PeerInfo>) -> Result<*mut Self, CallFailure> {
        let peer = peer.or_else(|| stream.peer().cloned());
        let peer = KeptPeer::new(peer.ok_or_else(|| CallFailure::bug("a stream without a direction"))?);
        let channel = stream.channel_id().unwrap_or(0);
        let (read, write) = stream.into_halves();
        let read = UnsafeCell::new(read.map(|half| Reading { half, shown: 0 }));
        let write = UnsafeCell::new(write.map(Writing::new));
        Ok(Box::into_raw(Box::new(Self { read, write, peer, channel })))
    }

    /// The reading direction.
    ///
    /// # Safety
    /// The pointer is null or an open handle, whose reading direction only this thread uses during `'a`.
    unsafe fn reading<'a>(this: *const Self) -> Result<&'a mut Reading, CallFailure> {
        // SAFETY: the caller's promise.
        let this = unsafe { argument::shared(this, "stream") }?;
        // SAFETY: the caller's promise: no other thread uses this direction, and this thread has no other borrow of it in this call.
        let reading = unsafe { &mut *this.read.get() };
        reading
            .as_mut()
            .ok_or_else(|| CallFailure::from(Error::Closed("this side of a one-way connection only writes")))
    }

    /// The writing direction.
    ///
    /// # Safety
    /// The pointer is null or an open handle, whose writing direction only this thread uses during `'a`.
    unsafe fn writing<'a>(this: *const Self) -> Result<&'a mut Writing, CallFailure> {
        // SAFETY: the caller's promise.
        let this = unsafe { argument::shared(this, "stream") }?;
        // SAFETY: the caller's promise: no other thread uses this direction, and this thread has no other borrow of it in this call.
        let writing = unsafe { &mut *this.write.get() };
        writing.as_mut().ok_or_else(|| CallFailure::from(Error::Closed("this side of a one-way connection only reads")))
    }
}

exported! {
    /// Offers a service for streams.
    pub fn pw_listen(domain: *const DomainHandle, service: *const c_char, options: *const RawOptions, listener: *mut *mut ListenerHandle) -> c_int {
        // SAFETY: C passes an open handle, a text, and options or null.
        let (domain, service, options) = unsafe {
            (argument::shared(domain, "domain")?, argument::text(service, "service")?, options::chosen(options)?)
        };
        let listen = || Ok(Box::into_raw(Box::new(ListenerHandle { listener: domain.domain.bind_with(service, &options)? })));
        // SAFETY: C passes the address of a variable, or null.
        unsafe { argument::store(listener, "listener", listen) }?;
        Ok(0)
    }

    /// Waits for a stream.
    pub fn pw_accept(listener: *mut ListenerHandle, timeout_ms: c_int, stream: *mut *mut StreamHandle) -> c_int {
        // SAFETY: C passes an open handle that one thread at a time uses.
        let listener = &mut unsafe { argument::exclusive(listener, "listener") }?.listener;
        let patience = Patience::from_ms(timeout_ms);
        let accept = || {
            listener.set_nonblocking(patience.nonblocking);
            listener.set_timeout(patience.timeout);
            let (stream, peer) = listener.accept()?;
            StreamHandle::new(stream, Some(peer))
        };
        // SAFETY: C passes the address of a variable, or null.
        unsafe { argument::store(stream, "stream", accept) }?;
        Ok(0)
    }

    /// The descriptor that is readable when there is a connection to accept.
    pub fn pw_listener_fd(listener: *const ListenerHandle) -> c_int {
        // SAFETY: C passes an open handle.
        Ok(unsafe { argument::shared(listener, "listener") }?.listener.as_fd().as_raw_fd())
    }

    /// Withdraws a service.
    pub fn pw_listener_close(listener: *mut ListenerHandle) -> () {
        // SAFETY: C passes a handle that it uses no more.
        drop(unsafe { argument::take(listener) });
        Ok(())
    }

    /// Connects a stream.
    pub fn pw_connect(domain: *const DomainHandle, target: *const c_char, options: *const RawOptions, stream: *mut *mut StreamHandle) -> c_int {
        // SAFETY: C passes an open handle, a text, and options or null.
        let (domain, target, options) = unsafe {
            (argument::shared(domain, "domain")?, argument::text(target, "target")?, options::chosen(options)?)
        };
        let connect = || StreamHandle::new(domain.domain.connect_with(target, &options)?, None);
        // SAFETY: C passes the address of a variable, or null.
        unsafe { argument::store(stream, "stream", connect) }?;
        Ok(0)
    }

    /// Makes two streams that are connected to each other.
    pub fn pw_pair(options: *const RawOptions, a: *mut *mut StreamHandle, b: *mut *mut StreamHandle) -> c_int {
        fork::begin_use();
        // SAFETY: C passes options or null.
        let options = unsafe { options::chosen(options) }?;
        let mut second = None;
        let first = || {
            let (here, there) = Stream::pair(&options)?;
            second = Some(there);
            StreamHandle::new(here, None)
        };
        if b.is_null() {
            return Err(CallFailure::invalid("b is NULL: pass the address of a variable for the second stream"));
        }
        // SAFETY: C passes the address of a variable, or null.
        unsafe { argument::store(a, "a", first) }?;
        let there = second.ok_or_else(|| CallFailure::bug("a pair of one"))?;
        // SAFETY: as for the first.
        unsafe { argument::store(b, "b", || StreamHandle::new(there, None)) }?;
        Ok(0)
    }

    /// Reads.
    pub fn pw_read(stream: *mut StreamHandle, buffer: *mut c_void, size: usize, timeout_ms: c_int) -> isize {
        // SAFETY: C passes an open handle whose reading direction one thread uses, and a buffer of this size.
        let (reading, buffer) = unsafe { (StreamHandle::reading(stream)?, argument::buffer(buffer, size)?) };
        let patience = Patience::from_ms(timeout_ms);
        reading.shown = 0;
        reading.half.set_nonblocking(patience.nonblocking);
        reading.half.set_timeout(patience.timeout);
        let n = reading.half.read(buffer).map_err(|e| CallFailure::from_io(&e, WaitFor::Data))?;
        Ok(n.cast_signed())
    }

    /// Writes.
    pub fn pw_write(stream: *mut StreamHandle, bytes: *const c_void, size: usize, timeout_ms: c_int) -> isize {
        // SAFETY: C passes an open handle whose writing direction one thread uses, and as many bytes.
        let (writing, bytes) = unsafe { (StreamHandle::writing(stream)?, argument::bytes(bytes, size)?) };
        let patience = Patience::from_ms(timeout_ms);
        let half = writing.half()?;
        half.set_nonblocking(patience.nonblocking);
        half.set_timeout(patience.timeout);
        let n = half.write(bytes).map_err(|e| CallFailure::from_io(&e, WaitFor::Room))?;
        Ok(n.cast_signed())
    }

    /// Lends room in the ring.
    pub fn pw_reserve(stream: *mut StreamHandle, size: usize, timeout_ms: c_int, span: *mut *mut c_void) -> c_int {
        // SAFETY: C passes an open handle whose writing direction one thread uses.
        let writing = unsafe { StreamHandle::writing(stream) }?;
        // SAFETY: C passes the address of a variable, or null.
        unsafe { argument::store(span, "span", || writing.reserve(size, Patience::from_ms(timeout_ms))) }?;
        Ok(0)
    }

    /// Commits bytes of the reserved span.
    pub fn pw_commit(stream: *mut StreamHandle, size: usize) -> c_int {
        // SAFETY: C passes an open handle whose writing direction one thread uses.
        let writing = unsafe { StreamHandle::writing(stream) }?;
        let Some(span) = writing.reserved.take_if(|span| size <= span.len()) else {
            let reserved = writing.reserved.as_ref().map_or(0, |span| span.len());
            return Err(CallFailure::invalid(format!("{size} bytes to commit of {reserved} reserved")));
        };
        if size > 0 {
            span.commit(size);
        }
        Ok(0)
    }

    /// Shows the next bytes in the peer's ring.
    pub fn pw_peek(stream: *mut StreamHandle, at_least: usize, timeout_ms: c_int, span: *mut *const c_void) -> isize {
        // SAFETY: C passes an open handle whose reading direction one thread uses.
        let Reading { half, shown } = unsafe { StreamHandle::reading(stream) }?;
        let patience = Patience::from_ms(timeout_ms);
        *shown = 0;
        half.set_nonblocking(patience.nonblocking);
        half.set_timeout(patience.timeout);
        let peek = || {
            let peeked = half.peek_at_least(at_least)?;
            *shown = peeked.len();
            Ok(peeked.as_ptr().cast())
        };
        // SAFETY: C passes the address of a variable, or null.
        unsafe { argument::store(span, "span", peek) }?;
        Ok(shown.cast_signed())
    }

    /// Gives peeked bytes back to the writer.
    pub fn pw_release(stream: *mut StreamHandle, size: usize) -> c_int {
        // SAFETY: C passes an open handle whose reading direction one thread uses.
        let Reading { half, shown } = unsafe { StreamHandle::reading(stream) }?;
        if size > *shown {
            return Err(CallFailure::invalid(format!("{size} bytes to release of {shown} peeked")));
        }
        if size > 0 {
            // The bytes that were shown are still there, so this does not wait.
            half.peek()?.release(size);
            *shown -= size;
        }
        Ok(0)
    }

    /// Ends one direction or both.
    pub fn pw_shutdown(stream: *mut StreamHandle, how: c_int) -> c_int {
        const READ: c_int = 1;
        const WRITE: c_int = 2;
        if !(READ..=READ | WRITE).contains(&how) {
            return Err(CallFailure::invalid("how is one of PW_SHUT_READ, PW_SHUT_WRITE and PW_SHUT_BOTH"));
        }
        // SAFETY: C passes an open handle.
        unsafe { argument::shared(stream, "stream") }?;
        // A direction that a one-way connection does not have needs no end.
        if how & WRITE != 0
            // SAFETY: the writing direction is used by this thread only.
            && let Ok(writing) = unsafe { StreamHandle::writing(stream) }
        {
            writing.reserved = None;
            writing.half()?.finish();
        }
        if how & READ != 0
            // SAFETY: the reading direction is used by this thread only.
            && let Ok(reading) = unsafe { StreamHandle::reading(stream) }
        {
            reading.shown = 0;
            reading.half.close();
        }
        Ok(0)
    }

    /// The descriptor that is readable when there may be bytes to read.
    pub fn pw_read_fd(stream: *const StreamHandle) -> c_int {
        // SAFETY: C passes an open handle whose reading direction one thread uses.
        Ok(unsafe { StreamHandle::reading(stream) }?.half.as_raw_fd())
    }

    /// The descriptor that is readable when there may be room to write.
    pub fn pw_write_fd(stream: *const StreamHandle) -> c_int {
        // SAFETY: C passes an open handle whose writing direction one thread uses.
        Ok(unsafe { StreamHandle::writing(stream) }?.half()?.as_raw_fd())
    }

    /// Describes the other side.
    pub fn pw_stream_peer(stream: *const StreamHandle, peer: *mut RawPeer) -> c_int {
        // SAFETY: C passes an open handle, and a structure that says how long it is.
        unsafe { argument::shared(stream, "stream")?.peer.describe(peer)? };
        Ok(0)
    }

    /// The channel's number, as `partywall list` shows it.
    pub fn pw_stream_channel(stream: *const StreamHandle, channel: *mut u64) -> c_int {
        // SAFETY: C passes an open handle.
        let stream = unsafe { argument::shared(stream, "stream") }?;
        // SAFETY: C passes the address of a variable, or null.
        unsafe { argument::store(channel, "channel", || Ok(stream.channel)) }?;
        Ok(0)
    }

    /// Closes a stream.
    pub fn pw_close(stream: *mut StreamHandle) -> () {
        // SAFETY: C passes a handle that it uses no more.
        drop(unsafe { argument::take(stream) });
        Ok(())
    }
}
