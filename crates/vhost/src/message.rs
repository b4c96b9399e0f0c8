//! Messages of vhost-user on their socket: taken whole, each with its own descriptors, and never waited for.

use crate::VhostError;
use crate::closing::{Reaper, ReceivedFd};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use vhost::vhost_user::message::{BackendReq, FrontendReq, MAX_MSG_SIZE};
use vm_memory::ByteValued;

const HEADER: usize = 12;
const VERSION: u32 = 1;
const REPLY: u32 = 4;
const NEED_REPLY: u32 = 8;
/// Descriptors of one message at most: those of a memory table.
const DESCRIPTORS: usize = 8;
/// Descriptors that the kernel lets one message carry. All are received, because the kernel closes those that have no room, which may
/// block.
const MOST_SENT: usize = 253;

/// A request of the front end.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) code: FrontendReq,
    pub(crate) wants_reply: bool,
    pub(crate) body: Vec<u8>,
    pub(crate) fds: Vec<ReceivedFd>,
}

impl Request {
    /// The body, which must be exactly a `T`.
    pub(crate) fn body<T: ByteValued + Default>(&self) -> Result<T, VhostError> {
        read(&self.body).ok_or_else(|| VhostError::Protocol(format!("{:?} has a body of another length", self.code)))
    }

    /// Its only descriptor.
    pub(crate) fn fd(&mut self) -> Result<ReceivedFd, VhostError> {
        match (self.fds.pop(), self.fds.is_empty()) {
            (Some(fd), true) => Ok(fd),
            _ => Err(VhostError::Protocol(format!("{:?} must come with one descriptor", self.code))),
        }
    }
}

/// A `T` of exactly these bytes.
pub(crate) fn read<T: ByteValued + Default>(bytes: &[u8]) -> Option<T> {
    let mut value = T::default();
    if bytes.len() != size_of::<T>() {
        return None;
    }
    value.as_mut_slice().copy_from_slice(bytes);
    Some(value)
}

/// The bytes of a message that have come.
#[derive(Debug)]
pub(crate) struct Inbox {
    bytes: Vec<u8>,
    fds: Vec<ReceivedFd>,
    reaper: Reaper,
}

impl Inbox {
    pub(crate) fn new(reaper: &Reaper) -> Self {
        Self { bytes: Vec::new(), fds: Vec::new(), reaper: reaper.clone() }
    }

    /// The next message, if it has come whole.
    pub(crate) fn take(&mut self, socket: &UnixStream) -> Result<Option<Request>, VhostError> {
        loop {
            let wanted = self.wanted()?;
            if self.bytes.len() == wanted && wanted >= HEADER {
                return self.parse().map(Some);
            }
            if !self.receive(socket, wanted)? {
                return Ok(None);
            }
        }
    }

    fn word(&self, at: usize) -> u32 {
        self.bytes.get(at..).and_then(|rest| rest.first_chunk::<4>()).map_or(0, |word| u32::from_le_bytes(*word))
    }

    /// How long the message is, as far as is known.
    fn wanted(&self) -> Result<usize, VhostError> {
        if self.bytes.len() < HEADER {
            return Ok(HEADER);
        }
        let size = usize::try_from(self.word(8)).unwrap_or(usize::MAX);
        if size > MAX_MSG_SIZE {
            return Err(VhostError::Protocol(format!("a message of {size} bytes")));
        }
        Ok(HEADER + size)
    }

    fn parse(&mut self) -> Result<Request, VhostError> {
        let (code, flags) = (self.word(0), self.word(4));
        if flags & 3 != VERSION || flags & REPLY != 0 {
            return Err(VhostError::Protocol(format!("a message with the flags {flags:#x}")));
        }
        let code = FrontendReq::try_from(code)
            .map_err(|_| VhostError::Protocol(format!("a message of unknown type {code}")))?;
        let bytes = std::mem::take(&mut self.bytes);
        let fds = std::mem::take(&mut self.fds);
        Ok(Request { code, wants_reply: flags & NEED_REPLY != 0, body: bytes[HEADER..].to_vec(), fds })
    }

    /// Takes more of this message, and nothing of the next. `false` if nothing has come.
    fn receive(&mut self, socket: &UnixStream, wanted: usize) -> Result<bool, VhostError> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_SENT))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut buffer = [0; MAX_MSG_SIZE + HEADER];
        let missing = wanted.saturating_sub(self.bytes.len());
        let part = &mut buffer[..missing];
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        let got = match rustix::net::recvmsg(socket, &mut [IoSliceMut::new(part)], &mut control, flags) {
            Ok(got) => got,
            Err(Errno::AGAIN | Errno::INTR) => return Ok(false),
            Err(Errno::CONNRESET) => return Err(VhostError::Closed),
            Err(e) => return Err(VhostError::system("receive a message")(e)),
        };
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                self.fds.extend(rights.map(|fd| ReceivedFd::new(fd, &self.reaper)));
            }
        }
        if self.reaper.is_full() {
            return Err(VhostError::Protocol("it sends descriptors that take long to close".into()));
        }
        if got.flags.contains(ReturnFlags::CTRUNC) || self.fds.len() > DESCRIPTORS {
            return Err(VhostError::Protocol("a message with too many descriptors".into()));
        }
        if got.bytes == 0 {
            return Err(VhostError::Closed);
        }
        self.bytes.extend_from_slice(&buffer[..got.bytes]);
        Ok(true)
    }
}

/// Answers a request. A front end that does not read its answers loses its connection.
pub(crate) fn reply(
    socket: &UnixStream,
    code: FrontendReq,
    body: &[u8],
    fd: Option<BorrowedFd<'_>>,
) -> Result<(), VhostError> {
    send(socket, u32::from(code), VERSION | REPLY, body, fd)
}

/// Sends a request of the back end, to which it wants no answer.
pub(crate) fn request(socket: &UnixStream, code: BackendReq) -> Result<(), VhostError> {
    send(socket, u32::from(code), VERSION, &[], None)
}

fn send(socket: &UnixStream, code: u32, flags: u32, body: &[u8], fd: Option<BorrowedFd<'_>>) -> Result<(), VhostError> {
    let size = u32::try_from(body.len()).unwrap_or(0);
    let mut bytes = Vec::with_capacity(HEADER + body.len());
    for word in [code, flags, size] {
        bytes.extend_from_slice(&word.to_le_bytes());
    }
    bytes.extend_from_slice(body);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds: &[BorrowedFd<'_>] = fd.as_slice();
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(VhostError::Protocol("an answer has no room for its descriptor".into()));
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    match rustix::net::sendmsg(socket, &[IoSlice::new(&bytes)], &mut control, flags) {
        Ok(sent) if sent == bytes.len() => Ok(()),
        Ok(_) | Err(Errno::AGAIN) => Err(VhostError::Protocol("it does not read its answers".into())),
        Err(Errno::PIPE | Errno::CONNRESET) => Err(VhostError::Closed),
        Err(e) => Err(VhostError::system("send an answer")(e)),
    }
}
