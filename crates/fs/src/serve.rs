//! Carries requests to an export: over streams and calls of the library, and over TCP.
//!
//! A stream is a session: it begins with the stream's first request and ends with the stream, whatever ends it. On one host the client also
//! connects to the calls of the same export, under the service's name with `.calls` behind it. Calls name the session by the number that its stream
//! was given, and bytes of files then pass by reference, in the heaps of the connection.

use crate::error::FsError;
use crate::export::{Export, ExportSession};
use crate::frame::{ReplyHeader, RequestHeader, write_parts};
use crate::mutex::lock;
use crate::places::UserPlaces;
use crate::requests::{FurtherThreads, RequestEnd, serve_stream};
use crate::wire::{FileField, FileRequest, LARGEST_BODY, LARGEST_DATA, VERSION};
use partywall::rpc::{CallAnswer, CallError, CallServer, HeapOptions, IncomingCall, Method};
use partywall::{Domain, Listener, PeerInfo};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::sockopt;
use std::io::{self, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

/// The longest that a client may take to send its first request.
const FIRST_REQUEST: Duration = Duration::from_secs(10);
/// How long a TCP connection is silent before the kernel asks whether the peer is still there.
const PROBE_AFTER: Duration = Duration::from_secs(10);
/// Between two of these questions.
const PROBE_INTERVAL: Duration = Duration::from_secs(5);
/// Questions without an answer after which a peer has gone.
const PROBES: u32 = 3;
/// The longest that the host of a client by TCP may be silent.
const LONGEST_SILENCE: Duration = Duration::from_secs(25);
/// Between two attempts to accept while the broker is away.
const PAUSE: Duration = Duration::from_millis(100);
/// Connections that are served at a time, on each of the two ways.
const MOST_CONNECTIONS: usize = 512;
/// Bytes of arguments of a call before its body.
pub(crate) const CALL_HEADER: usize = 16;
/// The most memory that each side of a connection of calls may have in its heap.
pub(crate) const LARGEST_HEAP: u64 = 64 << 20;

/// How both sides make their heaps: with room for several of the largest requests at once.
pub(crate) fn heap_options() -> HeapOptions {
    HeapOptions::default().first(4 << 20).max(LARGEST_HEAP)
}

/// The service of an export's calls.
pub fn calls_service(service: &str) -> String {
    format!("{service}.calls")
}

/// Answers a client's first request, which begins its session. `tcp` is the client's stream if it is one of TCP. Returns `None` if the client was turned away, or has gone.
fn greet(
    export: &Arc<Export>,
    peer: Option<&PeerInfo>,
    tcp: Option<&Arc<TcpStream>>,
    reader: &mut impl Read,
    writer: &mut impl Write,
) -> io::Result<Option<Arc<ExportSession>>> {
    let mut body = Vec::new();
    let Some(first) = RequestHeader::read(reader, &mut body)? else { return Ok(None) };
    let begun = previous_of(&first, &body)?.and_then(|previous| {
        export.end_previous(previous, peer)?;
        let session = export.begin(peer)?;
        // A session that fails here must not end the stream, which carries the error.
        let welcome = session.welcome().inspect_err(|_| export.end(&session))?;
        if let Some(stream) = tcp {
            // Before the welcome is sent: after that, the client can have the session ended.
            session.end_with(stream);
        }
        Ok((session, welcome))
    });
    match begun {
        Ok((session, welcome)) => {
            let header = ReplyHeader { len: welcome.len() as u32, id: first.id, errno: 0 };
            write_parts(writer, &[&header.bytes(), &welcome]).inspect_err(|_| export.end(&session))?;
            Ok(Some(session))
        }
        Err(e) => write_parts(writer, &[&ReplyHeader::failed(first.id, e).bytes()]).map(|()| None),
    }
}

/// The previous session that a greeting names, or `EPROTONOSUPPORT` for one of another version, whose other fields are unknown.
fn previous_of(first: &RequestHeader, body: &[u8]) -> io::Result<Result<u64, Errno>> {
    let other = io::Error::new(io::ErrorKind::InvalidData, "the first request is no greeting");
    if first.number != FileRequest::HELLO {
        return Err(other);
    }
    match (FileRequest::read(first.number, body), u32::take(&mut &body[..])) {
        (_, Ok(version)) if version != VERSION => Ok(Err(Errno::PROTONOSUPPORT)),
        (Ok(FileRequest::Hello { previous, .. }), _) => Ok(Ok(previous)),
        _ => Err(other),
    }
}

/// Executes the requests of a session until its stream ends. `hang_up` ends the stream for a thread that reads.
fn serve_requests(
    session: &ExportSession,
    reader: &mut (impl Read + Send),
    writer: &mut (impl Write + Send),
    further: FurtherThreads<'_>,
    hang_up: impl Fn() + Sync,
) -> io::Result<()> {
    let locking = Mutex::new(());
    let execute = |header: &RequestHeader, body: &[u8], reply: &mut Vec<u8>, waits: &mut dyn FnMut()| {
        let Ok(_running) = session.begin_request() else { return RequestEnd::SessionEnded };
        answer(session, &locking, (header, body), reply, waits)
    };
    let ended = |is_cut| {
        // Calls of the session are executed no more either.
        session.refuse_requests();
        if is_cut {
            hang_up();
        }
    };
    serve_stream(reader, writer, further, &ended, &execute)
}

/// Executes a request and appends what it returns to `reply`. Calls `waits` before it waits for a disk.
///
/// Requests that take locks or give them up are executed in the order of the stream (protocol N3.2): each takes `locking` before another thread can
/// read the next one. The client may have given up a *Flush* or *Release* and locked the same file again, and must not lose that lock.
fn answer(
    session: &ExportSession,
    locking: &Mutex<()>,
    (header, body): (&RequestHeader, &[u8]),
    reply: &mut Vec<u8>,
    waits: &mut dyn FnMut(),
) -> RequestEnd {
    if header.number == FileRequest::WRITE {
        waits();
        return RequestEnd::Reply(answer_write(session, body, reply));
    }
    let request = match FileRequest::read(header.number, body) {
        Ok(request) => request,
        Err(_) if header.number == FileRequest::FORGET => return RequestEnd::NoReply,
        Err(e) => return RequestEnd::Reply(Err(e)),
    };
    let outcome = match request {
        FileRequest::Forget { node, count } => {
            let forgotten = session.forget(node, count);
            if forgotten.is_some() {
                waits();
            }
            return RequestEnd::NoReply;
        }
        FileRequest::Read { handle, offset, len } => {
            let start = reply.len();
            reply.resize(start + len.min(LARGEST_DATA) as usize, 0);
            let read = session.read_unless_waiting(handle, offset, &mut reply[start..], waits);
            read.map(|filled| reply.truncate(start + filled))
        }
        FileRequest::Release { handle, owner } => {
            let released = {
                let _in_order = lock(locking);
                session.release(handle, owner)
            };
            released.map(|file| {
                waits();
                drop(file);
            })
        }
        FileRequest::Flush { .. } | FileRequest::GetLock { .. } | FileRequest::SetLock { .. } => {
            let _in_order = lock(locking);
            waits();
            session.execute(header.uid, header.gid, request).map(|bytes| reply.extend(bytes))
        }
        request => {
            waits();
            session.execute(header.uid, header.gid, request).map(|bytes| reply.extend(bytes))
        }
    };
    RequestEnd::Reply(outcome)
}

fn answer_write(session: &ExportSession, body: &[u8], reply: &mut Vec<u8>) -> Result<(), Errno> {
    let (mut fields, data) = body.split_at_checked(FileRequest::WRITE_HEADER).ok_or(Errno::BADMSG)?;
    let (handle, offset) = (u64::take(&mut fields)?, u64::take(&mut fields)?);
    let place = (offset, u32::take(&mut fields)?);
    let write = |file: rustix::fd::BorrowedFd<'_>, done: usize, at| rustix::io::pwrite(file, &data[done..], at);
    session.write(handle, place, data.len(), write)?.put(reply);
    Ok(())
}

fn failed(e: Errno) -> CallError {
    CallError::application(e.raw_os_error().unsigned_abs(), "")
}

/// Executes a call.
fn answer_call(export: &Export, call: &IncomingCall<'_>) -> Result<CallAnswer, CallError> {
    let args = call.args();
    let header: [u8; CALL_HEADER] = args.array(0)?;
    let mut fields = &header[..];
    let mut word = || u32::take(&mut fields).map_err(failed);
    let (low, high, uid, gid) = (word()?, word()?, word()?, word()?);
    let session = export.session(u64::from(low) | u64::from(high) << 32, call.peer()).map_err(failed)?;
    let _running = session.begin_request().map_err(failed)?;
    let number = call.method().number();
    if number == FileRequest::WRITE {
        let fields: [u8; FileRequest::WRITE_HEADER] = args.array(CALL_HEADER)?;
        let mut fields = &fields[..];
        let mut long = || u64::take(&mut fields).map_err(failed);
        let (handle, offset) = (long()?, long()?);
        let place = (offset, u32::take(&mut fields).map_err(failed)?);
        let start = CALL_HEADER + FileRequest::WRITE_HEADER;
        let write = |file: rustix::fd::BorrowedFd<'_>, done, at| {
            let errno = |e| Errno::from_io_error(&e).unwrap_or(Errno::IO);
            args.write_to(start + done..args.len(), file, at).map_err(errno)
        };
        let written = session.write(handle, place, args.len() - start, write).map_err(failed)?;
        return Ok(written.to_le_bytes().into());
    }
    let len = args.len() - CALL_HEADER;
    if len > LARGEST_BODY {
        return Err(failed(Errno::BADMSG));
    }
    let mut body = vec![0; len];
    args.read_at(CALL_HEADER, &mut body)?;
    match FileRequest::read(number, &body).map_err(failed)? {
        FileRequest::Read { handle, offset, len } => {
            let mut block = call.heap().allocate(len.min(LARGEST_DATA) as usize).map_err(|_| failed(Errno::NOBUFS))?;
            let filled = session.read(handle, offset, &mut block).map_err(failed)?;
            if filled == 0 {
                return Ok(().into());
            }
            block.resize(filled).map_err(|_| failed(Errno::NOBUFS))?;
            Ok(block.into())
        }
        request => Ok(session.execute(uid, gid, request).map_err(failed)?.into()),
    }
}

/// An export that is served to the clients of a domain's service. Dropping it stops it; sessions under way go on until their streams end.
#[derive(Debug)]
pub struct ExportServer {
    stop: Arc<OwnedFd>,
    accepting: Option<JoinHandle<()>>,
    _calls: CallServer,
}

impl ExportServer {
    /// Binds a service of the domain, and the service of the calls beside it.
    ///
    /// # Errors
    /// As [`Domain::bind`].
    pub fn bind(export: &Arc<Export>, domain: &Domain, service: &str) -> Result<Self, FsError> {
        let mut calls = CallServer::builder().heap(heap_options()).max_peer_heap(LARGEST_HEAP);
        for (number, _) in FileRequest::TABLE.iter().skip(1) {
            let export = Arc::clone(export);
            calls = calls.numbered(Method::numbered(*number), move |call| answer_call(&export, call));
        }
        let calls = calls.bind(domain, &calls_service(service))?;
        let mut listener = domain.bind(service)?;
        listener.set_nonblocking(true);
        let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(FsError::system("make the event that stops a server"))?;
        let stop = Arc::new(stop);
        let (export, stopped) = (Arc::clone(export), Arc::clone(&stop));
        let accepting = std::thread::Builder::new()
            .name("pw-fs-accept".into())
            .spawn(move || accept(&export, listener, &stopped))
            .map_err(FsError::system("start a thread"))?;
        Ok(Self { stop, accepting: Some(accepting), _calls: calls })
    }
}

impl Drop for ExportServer {
    fn drop(&mut self) {
        let _ = rustix::io::write(&*self.stop, &1u64.to_ne_bytes());
        if let Some(accepting) = self.accepting.take() {
            let _ = accepting.join();
        }
    }
}

/// Accepts streams until the server stops.
fn accept(export: &Arc<Export>, mut listener: Listener, stop: &OwnedFd) {
    let served = UserPlaces::new(MOST_CONNECTIONS, MOST_CONNECTIONS);
    loop {
        match listener.accept() {
            Ok((stream, peer)) => {
                let Some(place) = served.take(Some((peer.user, peer.at_home))) else { continue };
                let export = Arc::clone(export);
                let serve = move || {
                    let _place = place;
                    let (Some(mut reader), Some(mut writer)) = stream.into_halves() else { return };
                    reader.set_timeout(Some(FIRST_REQUEST));
                    let outcome = greet(&export, Some(&peer), None, &mut reader, &mut writer).and_then(|session| {
                        let Some(session) = session else { return Ok(()) };
                        reader.set_timeout(None);
                        let user = Some((peer.user, peer.at_home));
                        let further = FurtherThreads::new(export.threads(), user);
                        // The end of the other direction shows in this one as well, or at the client's next request.
                        let outcome = serve_requests(&session, &mut reader, &mut writer, further, || ());
                        export.end(&session);
                        outcome
                    });
                    if let Err(e) = outcome {
                        tracing::debug!(client = peer.name, error = %e, "a client has ended");
                    }
                };
                let _ = std::thread::Builder::new().name("pw-fs-serve".into()).spawn(serve);
            }
            Err(partywall::Error::WouldBlock) => {
                let mut fds =
                    [PollFd::from_borrowed_fd(listener.as_fd(), PollFlags::IN), PollFd::new(stop, PollFlags::IN)];
                let _ = poll(&mut fds, None);
                let has_hung_up = fds[0].revents().intersects(PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL);
                // Without a broker, the listener's session stays readable until the broker is back.
                if !fds[1].revents().is_empty() || (has_hung_up && pause(stop)) {
                    return;
                }
            }
            Err(e) => {
                tracing::warn!(error = %e, "no client can be accepted now");
                if pause(stop) {
                    return;
                }
            }
        }
    }
}

/// Waits for a moment; `true` if the server is to stop.
fn pause(stop: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(stop, PollFlags::IN)];
    let longest = Timespec { tv_sec: 0, tv_nsec: PAUSE.subsec_nanos().into() };
    let _ = poll(&mut fds, Some(&longest));
    !fds[0].revents().is_empty()
}

/// Serves an export over TCP, forever. These clients are unverified.
///
/// # Errors
/// The listener's.
pub fn serve_tcp(export: &Arc<Export>, listener: &TcpListener) -> io::Result<()> {
    let served = UserPlaces::new(MOST_CONNECTIONS, MOST_CONNECTIONS);
    loop {
        let (stream, from) = match listener.accept() {
            Ok(accepted) => accepted,
            Err(e) if has_listener_failed(&e) => return Err(e),
            Err(e) if matches!(e.kind(), io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted) => continue,
            Err(e) => {
                tracing::warn!(error = %e, "no client can be accepted now");
                std::thread::sleep(PAUSE);
                continue;
            }
        };
        let Some(place) = served.take(None) else { continue };
        let export = Arc::clone(export);
        let serve = move || {
            let _place = place;
            if let Err(e) = serve_tcp_stream(&export, &Arc::new(stream)) {
                tracing::debug!(client = %from, error = %e, "a client has ended");
            }
        };
        let _ = std::thread::Builder::new().name("pw-fs-tcp".into()).spawn(serve);
    }
}

/// Whether `accept` fails in this way forever. All other failures are of one connection, or of the machine for a while.
fn has_listener_failed(e: &io::Error) -> bool {
    let errno = e.raw_os_error().map(Errno::from_raw_os_error);
    matches!(errno, Some(Errno::BADF | Errno::INVAL | Errno::NOTSOCK | Errno::OPNOTSUPP | Errno::FAULT))
}

/// Has the kernel end a connection whose peer has gone without closing it, or has not taken what was sent to it for this time.
pub(crate) fn end_when_silent(stream: &TcpStream, longest: Duration) -> io::Result<()> {
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, PROBE_AFTER)?;
    sockopt::set_tcp_keepintvl(stream, PROBE_INTERVAL)?;
    sockopt::set_tcp_keepcnt(stream, PROBES)?;
    let longest = i32::try_from(longest.as_millis()).unwrap_or(i32::MAX);
    Ok(sockopt::set_tcp_user_timeout(stream, longest.cast_unsigned())?)
}

fn serve_tcp_stream(export: &Arc<Export>, stream: &Arc<TcpStream>) -> io::Result<()> {
    stream.set_nodelay(true)?;
    end_when_silent(stream, LONGEST_SILENCE)?;
    stream.set_read_timeout(Some(FIRST_REQUEST))?;
    let (mut reader, mut writer) = (BufReader::with_capacity(64 << 10, &**stream), &**stream);
    let Some(session) = greet(export, None, Some(stream), &mut reader, &mut writer)? else { return Ok(()) };
    let further = FurtherThreads::new(export.threads(), None);
    let hang_up = || drop(stream.shutdown(Shutdown::Both));
    let outcome = stream
        .set_read_timeout(None)
        .and_then(|()| serve_requests(&session, &mut reader, &mut writer, further, hang_up));
    export.end(&session);
    outcome
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;
    use crate::export::{ExportOptions, Squash};
    use crate::wire::{EntryName, FileEntry, OpenedFile, ROOT};
    use rustix::fs::OFlags;

    /// A session with an open file, and the number of that.
    fn session_with_file(folder: &tempfile::TempDir) -> (Arc<Export>, Arc<ExportSession>, u64) {
        let options = ExportOptions { squash: Squash::None, ..ExportOptions::default() };
        let export = Export::open(folder.path(), options).unwrap();
        let session = export.begin(None).unwrap();
        let name = EntryName::new(b"file").unwrap();
        let create = FileRequest::Create { parent: ROOT, name, mode: 0o600, flags: OFlags::RDWR.bits() };
        let reply = session.execute(0, 0, create).unwrap();
        let mut rest = &reply[..];
        FileEntry::take(&mut rest).unwrap();
        let handle = OpenedFile::take(&mut rest).unwrap().handle;
        (export, session, handle)
    }

    /// Executes a request, and `waits` before it waits. Returns whether it succeeded.
    fn is_answered(session: &ExportSession, locking: &Mutex<()>, request: &FileRequest<'_>, waits: impl Fn()) -> bool {
        let mut body = Vec::new();
        request.put(&mut body);
        let header = RequestHeader { len: body.len() as u32, id: 1, number: request.number(), uid: 0, gid: 0 };
        let end = answer(session, locking, (&header, &body), &mut Vec::new(), &mut || waits());
        matches!(end, RequestEnd::Reply(Ok(())))
    }

    #[test]
    fn requests_about_locks_keep_the_next_one_out_while_they_wait() {
        let folder = tempfile::tempdir().unwrap();
        let (_export, session, handle) = session_with_file(&folder);
        let (start, end, kind) = (0, 9, 1);
        for request in [
            FileRequest::SetLock { handle, owner: 1, start, end, kind },
            FileRequest::GetLock { handle, owner: 2, start, end, kind },
            FileRequest::Flush { handle, owner: 1 },
        ] {
            let (locking, has_waited) = (Mutex::new(()), std::cell::Cell::new(false));
            let waits = || {
                assert!(locking.try_lock().is_err(), "{request:?} lets a later one overtake it");
                has_waited.set(true);
            };
            assert!(is_answered(&session, &locking, &request, waits));
            assert!(has_waited.get(), "{request:?} keeps the reader");
        }
    }

    #[test]
    fn release_gives_locks_up_before_it_waits_for_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let (_export, session, handle) = session_with_file(&folder);
        let lock = FileRequest::SetLock { handle, owner: 1, start: 0, end: 9, kind: 1 };
        let locking = Mutex::new(());
        assert!(is_answered(&session, &locking, &lock, || ()));
        assert_eq!(session.counts().2, 1);
        let release = FileRequest::Release { handle, owner: 1 };
        let waits = || {
            let (_, files, owners) = session.counts();
            assert_eq!((files, owners), (0, 0));
            assert!(locking.try_lock().is_ok(), "the close of a file delays requests about locks");
        };
        assert!(is_answered(&session, &locking, &release, waits));
    }
}
