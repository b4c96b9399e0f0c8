//! A connection to a server, by calls or by frames on a stream.

use super::lanes::{CallLanes, LaneInUse};
use crate::direct::{DataBytes, RemoteData};
use crate::error::FsError;
use crate::frame::{ReplyHeader, RequestHeader, write_parts};
use crate::mutex::lock;
use crate::requests::MOST_LONG;
use crate::serve::{CALL_HEADER, LARGEST_HEAP, calls_service, end_when_silent, heap_options};
use crate::wire::{FileRequest, VERSION, Welcome, value_of};
use partywall::rpc::{CallClient, CallError, Method};
use partywall::{Domain, Options};
use rustix::io::Errno;
use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::io::{self, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
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
    frames: Arc<FrameLink>,
    calls: Option<Arc<CallLanes>>,
    session: u64,
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
        let frames = Arc::new(FrameLink::connect(address, timeout)?);
        let hello = FileRequest::Hello { version: VERSION, previous: previous.map_or(0, |link| link.session) };
        let mut body = Vec::new();
        hello.put(&mut body);
        let welcome = frames.request(hello.number(), (0, 0), &body, &[]).map_err(|failure| match failure {
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
                let lanes = CallLanes::connect(client, domain, calls_service(target));
                lanes
                    .inspect_err(|e| tracing::warn!(error = %e, "no calls to the server; bytes go through the stream"))
                    .ok()
                    .map(Arc::new)
            }
            _ => None,
        };
        Ok(Self { frames, calls, session: welcome.session, has_ended: AtomicBool::new(false), welcome })
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
        let lane = self.calls.as_ref().filter(|_| !FileRequest::goes_by_stream(number)).and_then(CallLanes::take);
        let outcome = match lane.map(|lane| self.call(lane, number, who, body, data)) {
            // The server has no memory for the bytes in its heap, and has not read them.
            Some(Err(RequestFailure::Errno(Errno::NOBUFS))) if number == FileRequest::READ => {
                self.by_frames(number, who, body, data)
            }
            Some(outcome) => outcome,
            None => self.by_frames(number, who, body, data),
        };
        match outcome {
            // The session has ended at the server: the request was not executed.
            Err(RequestFailure::Errno(Errno::NOTCONN)) => {
                self.end();
                Err(RequestFailure::Ended { may_be_executed: false })
            }
            Err(RequestFailure::TimedOut) if may_be_late => {
                self.frames.read_late_replies();
                Err(RequestFailure::TimedOut)
            }
            Err(failure @ (RequestFailure::Ended { .. } | RequestFailure::TimedOut)) => {
                self.end();
                Err(failure)
            }
            other => other,
        }
    }

    fn by_frames(&self, number: u32, who: (u32, u32), body: &[u8], data: &[u8]) -> Result<RemoteData, RequestFailure> {
        let reply = self.frames.request(number, who, body, data);
        reply.map(|bytes| RemoteData { bytes: DataBytes::Own(bytes) })
    }

    fn call(
        &self,
        lane: LaneInUse,
        number: u32,
        (uid, gid): (u32, u32),
        body: &[u8],
        data: &[u8],
    ) -> Result<RemoteData, RequestFailure> {
        let client = lane.client();
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
            // Where there is no memory for the heap of this connection, the stream takes the bytes.
            let Ok(mut block) = client.heap().allocate(len) else {
                return self.by_frames(number, (uid, gid), body, data);
            };
            fill(&mut block);
            let outcome = client.call(Method::numbered(number), &block);
            if let Err(CallError::TimedOut) = outcome {
                // The server may read the block later, so its memory is not used again.
                std::mem::forget(block);
            }
            outcome
        };
        if let Err(CallError::TimedOut) = outcome {
            lane.give_up();
        }
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
            // A *Forget* may close a removed file, which takes long. The server executes it beside the other requests of the stream.
            Some(lanes) if number != FileRequest::FORGET => {
                let mut args = [0; 40];
                args[..8].copy_from_slice(&self.session.to_le_bytes());
                let end = CALL_HEADER + body.len();
                let Some(room) = args.get_mut(CALL_HEADER..end) else { return };
                room.copy_from_slice(body);
                lanes.for_notices().notify(Method::numbered(number), &args[..end]).is_ok()
            }
            _ => self.frames.send(0, number, (0, 0), body, &[]).is_ok(),
        };
        if !sent {
            self.end();
        }
    }
}

impl Drop for RemoteLink {
    fn drop(&mut self) {
        // The thread that reads late replies shares the frames, and stops.
        self.frames.end();
    }
}

/// An errno from a peer. Invalid values become `EIO`, so that no reply can be taken for a success or for another kind of answer.
fn errno_of(raw: i32) -> Errno {
    if (1..4096).contains(&raw) { Errno::from_raw_os_error(raw) } else { Errno::IO }
}

/// Requests and replies as frames. Threads share it: one of those that wait reads the replies of all.
struct FrameLink {
    writer: Mutex<Box<dyn Write + Send>>,
    reader: Mutex<Box<dyn Read + Send>>,
    state: Mutex<FrameState>,
    turn: Condvar,
    next: AtomicU32,
    tcp: Option<TcpStream>,
    /// The longest that a request may take.
    timeout: Duration,
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
    /// Long requests that are sent and have no reply yet, also those that their callers have given up. A server executes up to
    /// [`MOST_LONG`] of them at the same time.
    long: HashSet<u32>,
    /// A thread reads the stream.
    is_read: bool,
    /// A thread runs that reads the replies to abandoned requests.
    has_late_reader: bool,
    has_ended: bool,
}

impl FrameState {
    fn has_abandoned(&self) -> bool {
        self.requests.values().any(|request| matches!(request, FrameRequest::Abandoned))
    }
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
            timeout,
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

    fn request(&self, number: u32, who: (u32, u32), body: &[u8], data: &[u8]) -> Result<Vec<u8>, RequestFailure> {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        if FileRequest::is_long(number) {
            self.begin_long(id)?;
        }
        lock(&self.state).requests.insert(id, FrameRequest::Awaited);
        if self.send(id, number, who, body, data).is_err() {
            self.end();
            return Err(RequestFailure::Ended { may_be_executed: true });
        }
        let deadline = Instant::now() + self.timeout;
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
            state = self.take_turn(state, deadline);
        }
    }

    /// Waits until the server can execute this long request, so that the time allowed is not spent behind others.
    ///
    /// # Errors
    /// `EIO` if no long request has had its reply within the time allowed; the end of the link.
    fn begin_long(&self, id: u32) -> Result<(), RequestFailure> {
        let mut deadline = Instant::now() + self.timeout;
        let mut state = lock(&self.state);
        let mut others = state.long.clone();
        loop {
            if state.has_ended {
                return Err(RequestFailure::Ended { may_be_executed: false });
            }
            if state.long.len() < MOST_LONG {
                state.long.insert(id);
                return Ok(());
            }
            if state.long != others {
                (deadline, others) = (Instant::now() + self.timeout, state.long.clone());
            }
            if Instant::now() >= deadline {
                return Err(RequestFailure::Errno(Errno::IO));
            }
            state = self.take_turn(state, deadline);
        }
    }

    /// Reads one reply until the deadline. While another thread reads, waits for that one instead, for [`LOOK`] at most. The caller looks at the
    /// state after either.
    fn take_turn<'a>(&'a self, mut state: MutexGuard<'a, FrameState>, deadline: Instant) -> MutexGuard<'a, FrameState> {
        if state.is_read {
            return self.turn.wait_timeout(state, LOOK).unwrap_or_else(PoisonError::into_inner).0;
        }
        state.is_read = true;
        drop(state);
        let read = self.read_reply(deadline);
        state = lock(&self.state);
        state.is_read = false;
        match read {
            Ok(Some((header, bytes))) => {
                let reply = if header.errno == 0 { Ok(bytes) } else { Err(errno_of(header.errno)) };
                state.long.remove(&header.id);
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
        state
    }

    /// Reads one reply. Returns `None` at the end of the stream.
    ///
    /// # Errors
    /// `TimedOut` if the reply has not begun by the deadline. After any other error, the stream cannot be used.
    fn read_reply(&self, deadline: Instant) -> io::Result<Option<(ReplyHeader, Vec<u8>)>> {
        let mut reader = lock(&self.reader);
        let mut from = PatientReader { link: self, reader: &mut **reader, deadline };
        let mut first = [0];
        if from.read(&mut first)? == 0 {
            return Ok(None);
        }
        // The reply may be another caller's, so the time of this caller is no bound for the rest of it.
        from.deadline = Instant::now() + self.timeout;
        let mut bytes = Vec::new();
        // The rest of a reply would be taken for the next one.
        let cut = |e: io::Error| if is_timeout(&e) { io::ErrorKind::ConnectionAborted.into() } else { e };
        let header = ReplyHeader::read(&mut (&first[..]).chain(from), &mut bytes).map_err(cut)?;
        Ok(header.map(|header| (header, bytes)))
    }

    /// Has a thread read until every abandoned request has its reply, or the link ends.
    ///
    /// Without it nothing reads the stream until the next request. A late reply that does not fit in the receive buffer would then stay at the
    /// server, whose kernel ends the connection after a while.
    fn read_late_replies(self: &Arc<Self>) {
        let mut state = lock(&self.state);
        if state.has_late_reader || state.has_ended || !state.has_abandoned() {
            return;
        }
        state.has_late_reader = true;
        drop(state);
        let link = Arc::clone(self);
        let read = move || {
            let mut state = lock(&link.state);
            while state.has_abandoned() && !state.has_ended {
                // A past deadline: the thread looks at the state after each time-out of the stream.
                state = link.take_turn(state, Instant::now());
            }
            state.has_late_reader = false;
        };
        if let Err(e) = std::thread::Builder::new().name("pw-fs-late".into()).spawn(read) {
            tracing::warn!(error = %e, "no thread to read late replies; the next request reads them");
            lock(&self.state).has_late_reader = false;
        }
    }
}

fn is_timeout(e: &io::Error) -> bool {
    matches!(e.kind(), io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock)
}

/// A reader that reads again after a time-out, until a deadline or the end of the link.
struct PatientReader<'a> {
    link: &'a FrameLink,
    reader: &'a mut dyn Read,
    deadline: Instant,
}

impl Read for PatientReader<'_> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.reader.read(to) {
                // The kernel interrupts a read that has a time-out when the process goes on after SIGSTOP.
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if is_timeout(&e) => {
                    if lock(&self.link.state).has_ended {
                        return Err(io::ErrorKind::ConnectionAborted.into());
                    }
                    if Instant::now() >= self.deadline {
                        return Err(io::ErrorKind::TimedOut.into());
                    }
                }
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::VecDeque;

    /// Returns each of these results, and then the end of the stream.
    struct ScriptedReader(VecDeque<Result<Vec<u8>, io::ErrorKind>>);

    impl Read for ScriptedReader {
        fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
            let bytes = self.0.pop_front().unwrap_or(Ok(Vec::new()))?;
            to[..bytes.len()].copy_from_slice(&bytes);
            Ok(bytes.len())
        }
    }

    fn link_that_reads(script: impl IntoIterator<Item = Result<Vec<u8>, io::ErrorKind>>) -> FrameLink {
        FrameLink {
            writer: Mutex::new(Box::new(io::sink())),
            reader: Mutex::new(Box::new(ScriptedReader(script.into_iter().collect()))),
            state: Mutex::default(),
            turn: Condvar::new(),
            next: AtomicU32::new(1),
            tcp: None,
            timeout: Duration::from_secs(3600),
        }
    }

    /// A reply without a body: its first byte, and its rest.
    fn reply_in_two_parts() -> (ReplyHeader, Vec<u8>, Vec<u8>) {
        let header = ReplyHeader { len: 0, id: 1, errno: 0 };
        let (first, rest) = (header.bytes()[..1].to_vec(), header.bytes()[1..].to_vec());
        (header, first, rest)
    }

    #[test]
    fn reply_cut_by_its_readers_deadline_is_read_whole() {
        let (header, first, rest) = reply_in_two_parts();
        let link = link_that_reads([Ok(first), Err(io::ErrorKind::WouldBlock), Ok(rest)]);
        assert_eq!(link.read_reply(Instant::now()).unwrap(), Some((header, Vec::new())));
    }

    #[test]
    fn reply_not_begun_by_the_deadline_times_out() {
        let link = link_that_reads([Err(io::ErrorKind::WouldBlock)]);
        assert_eq!(link.read_reply(Instant::now()).unwrap_err().kind(), io::ErrorKind::TimedOut);
        assert_eq!(link.read_reply(Instant::now()).unwrap(), None, "the stream was to be read once");
    }

    /// Keeps what is sent.
    #[derive(Clone, Default)]
    struct SentBytes(Arc<Mutex<Vec<u8>>>);

    impl Write for SentBytes {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            lock(&self.0).extend(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    const SYNC: u32 = 20;

    /// A link with as many long requests under way as a server executes, with the ids from 101 on, and what is sent by it.
    fn link_with_long_requests(
        script: impl IntoIterator<Item = Result<Vec<u8>, io::ErrorKind>>,
    ) -> (FrameLink, SentBytes) {
        let (mut link, sent) = (link_that_reads(script), SentBytes::default());
        link.writer = Mutex::new(Box::new(sent.clone()));
        let mut state = lock(&link.state);
        for id in 101..=100 + MOST_LONG as u32 {
            state.requests.insert(id, FrameRequest::Abandoned);
            state.long.insert(id);
        }
        drop(state);
        (link, sent)
    }

    #[test]
    fn long_request_is_sent_after_the_reply_to_another() {
        let first = ReplyHeader { len: 0, id: 101, errno: 0 }.bytes();
        let (link, sent) = link_with_long_requests([Ok(first[..1].to_vec()), Ok(first[1..].to_vec())]);
        let outcome = link.request(SYNC, (0, 0), &[], &[]);
        // The script ends behind the reply that the request has waited for.
        assert_eq!(outcome, Err(RequestFailure::Ended { may_be_executed: true }));
        assert!(!lock(&sent.0).is_empty());
        let (link, sent) = link_with_long_requests([]);
        let outcome = link.request(SYNC, (0, 0), &[], &[]);
        assert_eq!(outcome, Err(RequestFailure::Ended { may_be_executed: false }));
        assert!(lock(&sent.0).is_empty());
    }

    #[test]
    fn long_request_fails_unsent_if_no_other_ends() {
        let (mut link, sent) = link_with_long_requests([Err(io::ErrorKind::WouldBlock)]);
        link.timeout = Duration::ZERO;
        assert_eq!(link.request(SYNC, (0, 0), &[], &[]), Err(RequestFailure::Errno(Errno::IO)));
        assert!(lock(&sent.0).is_empty() && !lock(&link.state).has_ended);
    }

    #[test]
    fn interrupted_read_of_a_reply_is_repeated() {
        let (header, first, rest) = reply_in_two_parts();
        let interrupted = || Err(io::ErrorKind::Interrupted);
        let link = link_that_reads([interrupted(), Ok(first), interrupted(), Ok(rest)]);
        assert_eq!(link.read_reply(Instant::now()).unwrap(), Some((header, Vec::new())));
    }

    #[test]
    fn reader_of_an_ended_link_stops_at_its_next_time_out() {
        let link = link_that_reads([Err(io::ErrorKind::WouldBlock)]);
        link.end();
        let far = Instant::now() + Duration::from_secs(3600);
        assert_eq!(link.read_reply(far).unwrap_err().kind(), io::ErrorKind::ConnectionAborted);
    }
}
