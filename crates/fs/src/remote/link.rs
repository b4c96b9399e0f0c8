//! A connection to a server, by calls or by frames on a stream.

use crate::direct::{DataBytes, RemoteData};
use crate::error::FsError;
use crate::export::lock;
use crate::frame::{ReplyHeader, RequestHeader, write_parts};
use crate::serve::{CALL_HEADER, LARGEST_HEAP, calls_service, end_when_silent, heap_options};
use crate::wire::{FileRequest, VERSION, Welcome, value_of};
use partywall::rpc::{CallClient, CallError, Method};
use partywall::{Domain, Options};
use rustix::io::Errno;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;
use std::io::{self, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Where a server is, and how it is reached.
#[derive(Debug, Clone)]
pub enum ServerAddress {
    /// A service of the library, as `DOMAIN:SERVICE`. Calls are used where the server is on the same host, also between its virtual machines.
    Service {
        /// The domain that connects.
        domain: Domain,
        /// Its target.
        target: String,
        /// Whether calls are used.
        calls: bool,
    },
    /// A TCP port.
    Tcp(SocketAddr),
}

/// Why a request has no reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RequestFailure {
    /// The error that the server returned.
    Errno(Errno),
    /// The connection has ended.
    Ended {
        /// Whether the server may have executed the request.
        may_be_executed: bool,
    },
    /// There was no answer within the time allowed.
    TimedOut,
}

/// One connection, until it ends.
pub(crate) struct RemoteLink {
    frames: FrameLink,
    calls: Option<CallClient>,
    session: u64,
    timeout: Duration,
    has_ended: AtomicBool,
    pub(crate) welcome: Welcome,
}

impl fmt::Debug for RemoteLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RemoteLink").field("by_calls", &self.calls.is_some()).finish_non_exhaustive()
    }
}

impl RemoteLink {
    /// Connects, after the server has ended the session of the `previous` link, so that nothing of that one is executed later.
    pub(crate) fn connect(
        address: &ServerAddress,
        timeout: Duration,
        previous: Option<&RemoteLink>,
    ) -> Result<Self, FsError> {
        let frames = FrameLink::connect(address, timeout)?;
        let hello = FileRequest::Hello { version: VERSION, previous: previous.map_or(0, |link| link.session) };
        let mut body = Vec::new();
        hello.put(&mut body);
        let welcome = frames.request(hello.number(), (0, 0), &body, &[], timeout).map_err(|failure| match failure {
            RequestFailure::Errno(Errno::PROTONOSUPPORT) => FsError::Refused(
                "the server speaks another version of the protocol of files: install the same release on both sides"
                    .into(),
            ),
            RequestFailure::Errno(Errno::BUSY) => {
                FsError::Refused("the server still executes a request of the previous connection".into())
            }
            RequestFailure::Errno(e) => {
                FsError::System { call: "begin a session with the server".into(), source: e.into() }
            }
            RequestFailure::Ended { .. } => {
                FsError::Refused("the server has closed the connection: is it an export, of the same release?".into())
            }
            RequestFailure::TimedOut => FsError::Refused("the server does not answer".into()),
        })?;
        let welcome: Welcome =
            value_of(&welcome).map_err(|_| FsError::Refused("the server's answer is no welcome".into()))?;
        let calls = match address {
            ServerAddress::Service { domain, target, calls: true } if welcome.has_calls != 0 => {
                let client = CallClient::builder().heap(heap_options()).max_peer_heap(LARGEST_HEAP).timeout(timeout);
                let client = client.connect(domain, &calls_service(target));
                client
                    .inspect_err(|e| tracing::warn!(error = %e, "no calls to the server; bytes go through the stream"))
                    .ok()
            }
            _ => None,
        };
        Ok(Self { frames, calls, session: welcome.session, timeout, has_ended: AtomicBool::new(false), welcome })
    }

    /// Whether bytes of files pass by reference.
    pub(crate) fn has_calls(&self) -> bool {
        self.calls.is_some()
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.has_ended.load(Ordering::Acquire)
    }

    pub(crate) fn end(&self) {
        self.has_ended.store(true, Ordering::Release);
        self.frames.end();
    }

    /// Sends a request for a user and group, and waits for the reply.
    pub(crate) fn request(&self, who: (u32, u32), request: &FileRequest<'_>) -> Result<RemoteData, RequestFailure> {
        self.send(request.number(), who, &body_of(request), &[], may_be_late(request))
    }

    /// Sends a write with its data, and waits for the reply.
    pub(crate) fn write(
        &self,
        who: (u32, u32),
        (handle, offset, flags): (u64, u64, u32),
        data: &[u8],
    ) -> Result<RemoteData, RequestFailure> {
        let request = FileRequest::Write { handle, offset, flags };
        self.send(request.number(), who, &body_of(&request), data, may_be_late(&request))
    }

    /// Sends a request, with `data` behind its body, and waits for the reply. A request that is not answered in time ends the connection, unless it
    /// may be late.
    fn send(
        &self,
        number: u32,
        who: (u32, u32),
        body: &[u8],
        data: &[u8],
        may_be_late: bool,
    ) -> Result<RemoteData, RequestFailure> {
        let outcome = match &self.calls {
            Some(client) => self.call(client, number, who, body, data),
            None => {
                let reply = self.frames.request(number, who, body, data, self.timeout);
                reply.map(|bytes| RemoteData { bytes: DataBytes::Own(bytes) })
            }
        };
        match outcome {
            // The session has ended at the server: the request was not executed.
            Err(RequestFailure::Errno(Errno::NOTCONN)) => {
                self.end();
                Err(RequestFailure::Ended { may_be_executed: false })
            }
            Err(RequestFailure::TimedOut) if may_be_late => Err(RequestFailure::TimedOut),
            Err(failure @ (RequestFailure::Ended { .. } | RequestFailure::TimedOut)) => {
                self.end();
                Err(failure)
            }
            other => other,
        }
    }

    fn call(
        &self,
        client: &CallClient,
        number: u32,
        (uid, gid): (u32, u32),
        body: &[u8],
        data: &[u8],
    ) -> Result<RemoteData, RequestFailure> {
        let mut header = [0; CALL_HEADER];
        header[..8].copy_from_slice(&self.session.to_le_bytes());
        header[8..12].copy_from_slice(&uid.to_le_bytes());
        header[12..].copy_from_slice(&gid.to_le_bytes());
        let parts = [&header[..], body, data];
        let len = parts.iter().map(|part| part.len()).sum();
        let fill = |to: &mut [u8]| {
            let mut at = 0;
            for part in parts {
                to[at..at + part.len()].copy_from_slice(part);
                at += part.len();
            }
        };
        let mut inline = [0; 40];
        let outcome = if len <= inline.len() {
            fill(&mut inline[..len]);
            client.call(Method::numbered(number), &inline[..len])
        } else {
            let mut block = client.heap().allocate(len).map_err(|_| RequestFailure::Errno(Errno::NOBUFS))?;
            fill(&mut block);
            let outcome = client.call(Method::numbered(number), &block);
            if let Err(CallError::TimedOut) = outcome {
                // The server may read the block later, so its memory is not used again.
                std::mem::forget(block);
            }
            outcome
        };
        outcome.map(|reply| RemoteData { bytes: DataBytes::Lent(reply) }).map_err(|e| match e {
            CallError::Application { code, .. } => RequestFailure::Errno(errno_of(code.cast_signed())),
            CallError::TimedOut => RequestFailure::TimedOut,
            CallError::Dead { seen } | CallError::Moved { seen, .. } | CallError::Closed { seen } => {
                RequestFailure::Ended { may_be_executed: seen }
            }
            CallError::OutOfMemory(_) | CallError::BadPointer => RequestFailure::Errno(Errno::NOBUFS),
            CallError::UnknownMethod => RequestFailure::Errno(Errno::NOSYS),
            CallError::Panicked | CallError::Refused(_) => RequestFailure::Errno(Errno::IO),
            _ => RequestFailure::Ended { may_be_executed: true },
        })
    }

    /// Closes an open file that has no locks. By calls, this does not wait for the server.
    pub(crate) fn dismiss(&self, release: &FileRequest<'_>) {
        match self.has_calls() {
            true => self.notify(release.number(), &body_of(release)),
            false => drop(self.request((0, 0), release)),
        }
    }

    /// Sends a request that has no reply.
    pub(crate) fn notify(&self, number: u32, body: &[u8]) {
        let sent = match &self.calls {
            Some(client) => {
                let mut args = [0; 40];
                args[..8].copy_from_slice(&self.session.to_le_bytes());
                let end = CALL_HEADER + body.len();
                let Some(room) = args.get_mut(CALL_HEADER..end) else { return };
                room.copy_from_slice(body);
                client.notify(Method::numbered(number), &args[..end]).is_ok()
            }
            None => self.frames.send(0, number, (0, 0), body, &[]).is_ok(),
        };
        if !sent {
            self.end();
        }
    }
}

/// An errno from a peer. Invalid values become `EIO`, so that no reply can be taken for a success or for another kind of answer.
fn errno_of(raw: i32) -> Errno {
    if (1..4096).contains(&raw) { Errno::from_raw_os_error(raw) } else { Errno::IO }
}

/// Requests and replies as frames. Threads share it: whichever waits reads the replies of all.
struct FrameLink {
    writer: Mutex<Box<dyn Write + Send>>,
    reader: Mutex<Box<dyn Read + Send>>,
    state: Mutex<FrameState>,
    turn: Condvar,
    next: AtomicU32,
    tcp: Option<TcpStream>,
}

/// A request under way.
enum FrameRequest {
    /// Its caller waits for the reply.
    Awaited,
    /// The reply has been read.
    Answered(Result<Vec<u8>, Errno>),
    /// Its caller has given it up. The reply may still come.
    Abandoned,
}

#[derive(Default)]
struct FrameState {
    requests: HashMap<u32, FrameRequest>,
    is_read: bool,
    has_ended: bool,
}

/// How long one read waits before the reader looks whether its own time is up.
const LOOK: Duration = Duration::from_millis(500);

impl FrameLink {
    fn connect(address: &ServerAddress, timeout: Duration) -> Result<Self, FsError> {
        let (reader, writer, tcp): (Box<dyn Read + Send>, Box<dyn Write + Send>, _) = match address {
            ServerAddress::Service { domain, target, .. } => {
                let stream = domain.connect_with(target, &Options::default())?;
                let (Some(mut reader), Some(mut writer)) = stream.into_halves() else {
                    return Err(FsError::Refused("the server offers a one-way stream, so it is no export".into()));
                };
                reader.set_timeout(Some(LOOK));
                writer.set_timeout(Some(Duration::from_secs(30)));
                (Box::new(reader), Box::new(writer), None)
            }
            ServerAddress::Tcp(address) => {
                let connect = || -> io::Result<_> {
                    let stream = TcpStream::connect_timeout(address, Duration::from_secs(5))?;
                    stream.set_nodelay(true)?;
                    end_when_silent(&stream, timeout)?;
                    stream.set_read_timeout(Some(LOOK))?;
                    stream.set_write_timeout(Some(Duration::from_secs(30)))?;
                    let (reader, kept) = (stream.try_clone()?, stream.try_clone()?);
                    Ok((BufReader::with_capacity(64 << 10, reader), stream, kept))
                };
                let (reader, writer, kept) = connect().map_err(FsError::system(format!("connect to {address}")))?;
                (Box::new(reader), Box::new(writer), Some(kept))
            }
        };
        Ok(Self {
            writer: Mutex::new(writer),
            reader: Mutex::new(reader),
            state: Mutex::default(),
            turn: Condvar::new(),
            next: AtomicU32::new(1),
            tcp,
        })
    }

    fn send(&self, id: u32, number: u32, (uid, gid): (u32, u32), body: &[u8], data: &[u8]) -> io::Result<()> {
        let len = (body.len() + data.len()) as u32;
        let header = RequestHeader { len, id, number, uid, gid };
        write_parts(&mut **lock(&self.writer), &[&header.bytes(), body, data])
    }

    fn end(&self) {
        lock(&self.state).has_ended = true;
        if let Some(tcp) = &self.tcp {
            let _ = tcp.shutdown(std::net::Shutdown::Both);
        }
        self.turn.notify_all();
    }

    fn request(
        &self,
        number: u32,
        who: (u32, u32),
        body: &[u8],
        data: &[u8],
        longest: Duration,
    ) -> Result<Vec<u8>, RequestFailure> {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        lock(&self.state).requests.insert(id, FrameRequest::Awaited);
        if self.send(id, number, who, body, data).is_err() {
            self.end();
            return Err(RequestFailure::Ended { may_be_executed: true });
        }
        let deadline = Instant::now() + longest;
        let mut state = lock(&self.state);
        loop {
            if let Entry::Occupied(request) = state.requests.entry(id)
                && matches!(request.get(), FrameRequest::Answered(_))
                && let FrameRequest::Answered(reply) = request.remove()
            {
                return reply.map_err(RequestFailure::Errno);
            }
            if state.has_ended {
                return Err(RequestFailure::Ended { may_be_executed: true });
            }
            if Instant::now() >= deadline {
                state.requests.insert(id, FrameRequest::Abandoned);
                return Err(RequestFailure::TimedOut);
            }
            if state.is_read {
                state = self.turn.wait_timeout(state, LOOK).unwrap_or_else(PoisonError::into_inner).0;
                continue;
            }
            state.is_read = true;
            drop(state);
            let mut bytes = Vec::new();
            let read = {
                let mut reader = lock(&self.reader);
                wait_for(&mut **reader, deadline).and_then(|first| match first {
                    None => Ok(None),
                    Some(first) => {
                        let first = [first];
                        let mut rest = (&first[..]).chain(PatientReader(&mut **reader, deadline));
                        // The rest of a reply would be taken for the next one.
                        let cut =
                            |e: io::Error| if is_timeout(&e) { io::ErrorKind::ConnectionAborted.into() } else { e };
                        ReplyHeader::read(&mut rest, &mut bytes).map_err(cut)
                    }
                })
            };
            state = lock(&self.state);
            state.is_read = false;
            match read {
                Ok(Some(header)) => {
                    let reply = if header.errno == 0 { Ok(bytes) } else { Err(errno_of(header.errno)) };
                    match state.requests.remove(&header.id) {
                        Some(FrameRequest::Awaited) => {
                            state.requests.insert(header.id, FrameRequest::Answered(reply));
                        }
                        Some(FrameRequest::Abandoned) => {}
                        // A second reply, or one to what was not asked.
                        Some(FrameRequest::Answered(_)) | None => state.has_ended = true,
                    }
                }
                Err(e) if e.kind() == io::ErrorKind::TimedOut => {}
                Ok(None) | Err(_) => state.has_ended = true,
            }
            self.turn.notify_all();
        }
    }
}

fn is_timeout(e: &io::Error) -> bool {
    matches!(e.kind(), io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock)
}

/// The first byte of a reply: `None` at the end of the stream, `TimedOut` if none has come by the deadline.
fn wait_for(reader: &mut dyn Read, deadline: Instant) -> io::Result<Option<u8>> {
    let mut first = [0];
    Ok((PatientReader(reader, deadline).read(&mut first)? == 1).then_some(first[0]))
}

/// A reader that reads again after a time-out, until a deadline.
struct PatientReader<'a>(&'a mut dyn Read, Instant);

impl Read for PatientReader<'_> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.0.read(to) {
                Err(e) if is_timeout(&e) && Instant::now() < self.1 => {}
                Err(e) if is_timeout(&e) => return Err(io::ErrorKind::TimedOut.into()),
                other => return other,
            }
        }
    }
}

/// The bytes of a request's body.
pub(crate) fn body_of(request: &FileRequest<'_>) -> Vec<u8> {
    let mut body = Vec::with_capacity(64);
    request.put(&mut body);
    body
}

/// Whether the server may execute a request after its caller has given it up: it changes nothing, or what the caller does not depend on.
fn may_be_late(request: &FileRequest<'_>) -> bool {
    use FileRequest as R;
    matches!(
        request,
        R::Lookup { .. }
            | R::GetAttributes { .. }
            | R::ReadLink { .. }
            | R::Read { .. }
            | R::ReadDirectory { .. }
            | R::GetSpace { .. }
            | R::GetExtended { .. }
            | R::ListExtended { .. }
            | R::CheckAccess { .. }
            | R::GetLock { .. }
            | R::Seek { .. }
            | R::Sync { .. }
            // The file is closed in any case.
            | R::Flush { .. }
            | R::Release { .. }
    )
}
