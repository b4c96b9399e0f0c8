//! Message sockets and their listeners.
#![expect(unsafe_code, reason = "takes pointers from C and gives handles to it")]

use crate::argument::{self, Patience};
use crate::domain::DomainHandle;
use crate::failure::{CallFailure, WaitFor};
use crate::options::{self, RawOptions};
use crate::peer::{KeptPeer, RawPeer};
use partywall::{Error, MessageListener, MessageReceiver, MessageSender, MessageSocket, PeerInfo};
use std::cell::UnsafeCell;
use std::ffi::{c_char, c_int, c_void};
use std::os::fd::{AsFd, AsRawFd};

/// `pw_message_listener` of the header.
#[derive(Debug)]
pub struct MessageListenerHandle {
    listener: MessageListener,
}

/// `pw_message_socket` of the header. Its two directions may be used by two threads at the same time, so neither call may have the whole of it.
#[derive(Debug)]
pub struct MessageSocketHandle {
    sender: UnsafeCell<Option<MessageSender>>,
    receiver: UnsafeCell<Option<MessageReceiver>>,
    longest: usize,
    /// Known of an accepted socket.
    peer: Option<KeptPeer>,
}

impl MessageSocketHandle {
    fn new(socket: MessageSocket, peer: Option<PeerInfo>) -> *mut Self {
        let longest = socket.max_message();
        let (sender, receiver) = socket.into_halves();
        let (sender, receiver) = (UnsafeCell::new(sender), UnsafeCell::new(receiver));
        Box::into_raw(Box::new(Self { sender, receiver, longest, peer: peer.map(KeptPeer::new) }))
    }

    /// The sending direction.
    ///
    /// # Safety
    /// The pointer is null or an open handle, whose sending direction only this thread uses during `'a`.
    unsafe fn sender<'a>(this: *const Self) -> Result<&'a mut MessageSender, CallFailure> {
        // SAFETY: the caller's promise.
        let this = unsafe { argument::shared(this, "socket") }?;
        // SAFETY: the caller's promise: no other thread uses this direction, and this thread has no other borrow of it in this call.
        let sender = unsafe { &mut *this.sender.get() };
        sender.as_mut().ok_or_else(|| Error::Closed("this side of a one-way connection only receives").into())
    }

    /// The receiving direction.
    ///
    /// # Safety
    /// The pointer is null or an open handle, whose receiving direction only this thread uses during `'a`.
    unsafe fn receiver<'a>(this: *const Self) -> Result<&'a mut MessageReceiver, CallFailure> {
        // SAFETY: the caller's promise.
        let this = unsafe { argument::shared(this, "socket") }?;
        // SAFETY: the caller's promise: no other thread uses this direction, and this thread has no other borrow of it in this call.
        let receiver = unsafe { &mut *this.receiver.get() };
        receiver.as_mut().ok_or_else(|| Error::Closed("this side of a one-way connection only sends").into())
    }
}

exported! {
    /// Offers a service for messages.
    pub fn pw_message_listen(domain: *const DomainHandle, service: *const c_char, options: *const RawOptions, listener: *mut *mut MessageListenerHandle) -> c_int {
        // SAFETY: C passes an open handle, a text, and options or null.
        let (domain, service, options) = unsafe {
            (argument::shared(domain, "domain")?, argument::text(service, "service")?, options::chosen(options)?)
        };
        let listen = || {
            let listener = MessageListener::bind(&domain.domain, service, &options)?;
            Ok(Box::into_raw(Box::new(MessageListenerHandle { listener })))
        };
        // SAFETY: C passes the address of a variable, or null.
        unsafe { argument::store(listener, "listener", listen) }?;
        Ok(0)
    }

    /// Waits for a message socket.
    pub fn pw_message_accept(listener: *mut MessageListenerHandle, timeout_ms: c_int, socket: *mut *mut MessageSocketHandle) -> c_int {
        // SAFETY: C passes an open handle that one thread at a time uses.
        let listener = &mut unsafe { argument::exclusive(listener, "listener") }?.listener;
        let patience = Patience::from_ms(timeout_ms);
        let accept = || {
            listener.set_nonblocking(patience.nonblocking);
            listener.set_timeout(patience.timeout);
            let (socket, peer) = listener.accept()?;
            Ok(MessageSocketHandle::new(socket, Some(peer)))
        };
        // SAFETY: C passes the address of a variable, or null.
        unsafe { argument::store(socket, "socket", accept) }?;
        Ok(0)
    }

    /// The descriptor that is readable when there is a connection to accept.
    pub fn pw_message_listener_fd(listener: *const MessageListenerHandle) -> c_int {
        // SAFETY: C passes an open handle.
        Ok(unsafe { argument::shared(listener, "listener") }?.listener.as_fd().as_raw_fd())
    }

    /// Withdraws a service.
    pub fn pw_message_listener_close(listener: *mut MessageListenerHandle) -> () {
        // SAFETY: C passes a handle that it uses no more.
        drop(unsafe { argument::take(listener) });
        Ok(())
    }

    /// Connects a message socket.
    pub fn pw_message_connect(domain: *const DomainHandle, target: *const c_char, options: *const RawOptions, socket: *mut *mut MessageSocketHandle) -> c_int {
        // SAFETY: C passes an open handle, a text, and options or null.
        let (domain, target, options) = unsafe {
            (argument::shared(domain, "domain")?, argument::text(target, "target")?, options::chosen(options)?)
        };
        let connect = || Ok(MessageSocketHandle::new(MessageSocket::connect_with(&domain.domain, target, &options)?, None));
        // SAFETY: C passes the address of a variable, or null.
        unsafe { argument::store(socket, "socket", connect) }?;
        Ok(0)
    }

    /// Sends a message.
    pub fn pw_send(socket: *mut MessageSocketHandle, message: *const c_void, size: usize, timeout_ms: c_int) -> c_int {
        // SAFETY: C passes an open handle whose sending direction one thread uses, and as many bytes.
        let (sender, message) = unsafe { (MessageSocketHandle::sender(socket)?, argument::bytes(message, size)?) };
        let patience = Patience::from_ms(timeout_ms);
        sender.set_nonblocking(patience.nonblocking);
        sender.set_timeout(patience.timeout);
        sender.send(message).map_err(|e| CallFailure::of(&e, WaitFor::Room))?;
        Ok(0)
    }

    /// Receives a message.
    pub fn pw_receive(socket: *mut MessageSocketHandle, buffer: *mut c_void, size: usize, length: *mut usize, timeout_ms: c_int) -> c_int {
        // SAFETY: C passes an open handle whose receiving direction one thread uses, and a buffer of this size.
        let (receiver, buffer) = unsafe { (MessageSocketHandle::receiver(socket)?, argument::buffer(buffer, size)?) };
        let patience = Patience::from_ms(timeout_ms);
        receiver.set_nonblocking(patience.nonblocking);
        receiver.set_timeout(patience.timeout);
        let mut outcome = Ok(0);
        let receive = || match receiver.recv_into(buffer) {
            Ok(length) => Ok(length),
            // The caller gets the length that it needs room for, and the failure.
            Err(e @ Error::TooLarge { asked, .. }) => {
                outcome = Err(CallFailure::of(&e, WaitFor::Data));
                Ok(usize::try_from(asked).unwrap_or(usize::MAX))
            }
            Err(e) => Err(CallFailure::of(&e, WaitFor::Data)),
        };
        // SAFETY: C passes the address of a variable, or null.
        unsafe { argument::store(length, "length", receive) }?;
        outcome
    }

    /// The longest message that can be sent.
    pub fn pw_longest_message(socket: *const MessageSocketHandle) -> usize {
        // SAFETY: C passes an open handle.
        Ok(unsafe { argument::shared(socket, "socket") }?.longest)
    }

    /// Ends the sending direction.
    pub fn pw_finish(socket: *mut MessageSocketHandle) -> c_int {
        // SAFETY: C passes an open handle whose sending direction one thread uses.
        unsafe { MessageSocketHandle::sender(socket) }?.finish();
        Ok(0)
    }

    /// The descriptor that is readable when there may be a message.
    pub fn pw_receive_fd(socket: *const MessageSocketHandle) -> c_int {
        // SAFETY: C passes an open handle whose receiving direction one thread uses.
        Ok(unsafe { MessageSocketHandle::receiver(socket) }?.as_fd().as_raw_fd())
    }

    /// The descriptor that is readable when there may be room for a message.
    pub fn pw_send_fd(socket: *const MessageSocketHandle) -> c_int {
        // SAFETY: C passes an open handle whose sending direction one thread uses.
        Ok(unsafe { MessageSocketHandle::sender(socket) }?.as_fd().as_raw_fd())
    }

    /// Describes the other side of an accepted socket.
    pub fn pw_message_peer(socket: *const MessageSocketHandle, peer: *mut RawPeer) -> c_int {
        // SAFETY: C passes an open handle.
        let kept = unsafe { argument::shared(socket, "socket") }?.peer.as_ref();
        let kept = kept.ok_or_else(|| CallFailure::invalid("this side has connected: the peer is the target that it named"))?;
        // SAFETY: C passes a structure that says how long it is.
        unsafe { kept.describe(peer) }?;
        Ok(0)
    }

    /// Closes a message socket.
    pub fn pw_message_close(socket: *mut MessageSocketHandle) -> () {
        // SAFETY: C passes a handle that it uses no more.
        drop(unsafe { argument::take(socket) });
        Ok(())
    }
}
