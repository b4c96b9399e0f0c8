//! The exporter of a disk: executes the requests of its user in a file or block device.

use super::flush::FlushGate;
use super::session::{UserSession, UserSessions};
use super::wire::{
    ExportOperation, FIELDS, HELLO, LARGEST_DATA, LARGEST_RANGE, LARGEST_ZEROES, MOST_PARTS, PART, RequestFields,
    VERSION, Welcome, calls_service, read_hello, read_parts, session_options,
};
use crate::VhostError;
use crate::disk::image::{ALIGN, DiskImage, DiskOptions};
use partywall::rpc::{CallAnswer, CallError, CallServer, HeapOptions, IncomingCall, Method};
use partywall::{BorrowedPart, Domain, Group, Listener, Origin, PeerInfo, Stream};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fs::FallocateFlags;
use rustix::io::Errno;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;
use tracing::{debug, info, warn};

/// The longest that a user may take to say hello.
const FIRST: Duration = Duration::from_secs(10);
/// Between two attempts to accept while the broker is away.
const PAUSE: Duration = Duration::from_millis(100);
/// Connections of calls at a time, and streams whose user waits for a session.
const MOST_CONNECTIONS: usize = 128;
/// Connections of one user among them: its back end has at most 32.
const MOST_OF_USER: usize = 32;
/// The most memory of each side's heap on one connection.
pub(super) const LARGEST_HEAP: u64 = 8 << 20;

/// The first segment of a connection's heap, with room for one of the largest answers.
const FIRST_SEGMENT: u64 = 2 << 20;

/// How a disk is exported.
#[derive(Debug, Clone)]
pub struct DiskExportOptions {
    /// The file or block device.
    pub path: PathBuf,
    /// The disk cannot be written, and may have several users.
    pub read_only: bool,
    /// Data bypasses the page cache.
    pub direct: bool,
    /// Sectors that the user gives up are given back to the file system or device.
    pub discard: bool,
    /// A group in which data of writes may lie. Its members of this host may write from it.
    pub group: Option<Group>,
}

/// An exported disk.
#[derive(Debug)]
struct ExportedDisk {
    image: DiskImage,
    /// The size that users know. It does not become smaller while they may use it.
    capacity: AtomicU64,
    file: OwnedFd,
    flushes: FlushGate,
    block: u64,
    read_only: bool,
    direct: bool,
    discard: bool,
    boot: [u8; 16],
    sessions: UserSessions,
    /// The group, and the domains of the host that are members.
    group: Option<(Group, Vec<String>)>,
}

/// A disk that is exported as a service of a domain. Dropping this stops it.
///
/// ```
/// use partywall_vhost::disk::exported::{DiskExport, DiskExportOptions};
///
/// # let broker = partywall_daemon::Broker::embedded()?;
/// # let store = partywall::Domain::builder().name("store").broker(broker.path()).join()?;
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("disk.raw");
/// # std::fs::File::create(&path)?.set_len(1 << 20)?;
/// let options = DiskExportOptions { path, read_only: false, direct: false, discard: true, group: None };
/// let _export = DiskExport::bind(options, &store, "data")?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct DiskExport {
    stop: Arc<OwnedFd>,
    accepting: Option<JoinHandle<()>>,
    _calls: CallServer,
}

impl DiskExport {
    /// Opens the disk and binds a service of the domain, with the service of its calls beside it: the same name with `.calls` behind it.
    ///
    /// # Errors
    /// Those of the file, which another process may have locked, and of the library.
    pub fn bind(options: DiskExportOptions, domain: &Domain, service: &str) -> Result<Self, VhostError> {
        let mut open = DiskOptions::new(&options.path);
        open.read_only = options.read_only;
        open.direct = options.direct;
        let image = DiskImage::open(&open)?;
        let file = image.fd().try_clone_to_owned();
        let group = match options.group {
            Some(group) => Some((group.clone(), host_members(domain, &group)?)),
            None => None,
        };
        let disk = Arc::new(ExportedDisk {
            file: file.map_err(|source| VhostError::System { call: "keep the disk", source })?,
            flushes: FlushGate::default(),
            block: image.block().into(),
            read_only: options.read_only,
            direct: options.direct,
            discard: options.discard,
            boot: boot_number()?,
            capacity: AtomicU64::new(image.geometry(false).capacity),
            image,
            sessions: UserSessions::new()?,
            group,
        });
        let mut calls = CallServer::builder()
            .heap(HeapOptions::default().first(FIRST_SEGMENT).max(LARGEST_HEAP * MOST_OF_USER as u64))
            .max_peer_heap(LARGEST_HEAP)
            .max_clients(MOST_CONNECTIONS)
            .max_clients_of_domain(2 * MOST_OF_USER);
        for operation in [
            ExportOperation::Read,
            ExportOperation::Write,
            ExportOperation::Sync,
            ExportOperation::Zero,
            ExportOperation::Allocate,
            ExportOperation::Measure,
            ExportOperation::WriteFrom,
        ] {
            let disk = Arc::clone(&disk);
            calls = calls.numbered(Method::numbered(operation as u32), move |call| disk.answer(operation, call));
        }
        let calls = calls.bind(domain, &calls_service(service))?;
        let mut listener = domain.bind_with(service, &session_options())?;
        listener.set_nonblocking(true);
        let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let stop = Arc::new(stop.map_err(VhostError::system("make the event that stops an export"))?);
        let stopped = Arc::clone(&stop);
        let accepting = std::thread::Builder::new()
            .name("pw-blk-accept".into())
            .spawn(move || accept(&disk, listener, &stopped))
            .map_err(|source| VhostError::System { call: "start a thread", source })?;
        Ok(Self { stop, accepting: Some(accepting), _calls: calls })
    }
}

impl Drop for DiskExport {
    fn drop(&mut self) {
        let _ = rustix::io::write(&*self.stop, &1_u64.to_ne_bytes());
        if let Some(accepting) = self.accepting.take() {
            let _ = accepting.join();
        }
    }
}

/// The kernel's number of its boot: after another boot, what was not made durable is lost.
fn boot_number() -> Result<[u8; 16], VhostError> {
    const PATH: &str = "/proc/sys/kernel/random/boot_id";
    let text = std::fs::read_to_string(PATH).map_err(VhostError::file_error("read", PATH))?;
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    let number = u128::from_str_radix(&digits, 16);
    number.map(u128::to_le_bytes).map_err(|_| VhostError::Refused(format!("{PATH} has no number")))
}

impl ExportedDisk {
    /// Looks at the size again and returns it, also if it is smaller than the one that users know. They decide what follows from that, and requests
    /// beyond the new end fail one by one.
    fn measure(&self) -> Result<u64, Errno> {
        let measured = self.image.measure().map_err(|error| {
            warn!(%error, "the disk cannot be measured");
            Errno::IO
        })?;
        self.capacity.fetch_max(measured, Ordering::Relaxed);
        Ok(measured)
    }

    fn begin(&self, peer: &PeerInfo) -> Welcome {
        let session = match self.sessions.begin(peer, self.read_only) {
            Ok(session) => session,
            Err(e) => return Welcome::refusal(e),
        };
        Welcome {
            errno: 0,
            read_only: self.read_only,
            discards: self.image.geometry(self.discard).discards && self.image.makes_holes(),
            session,
            capacity: self.capacity.load(Ordering::Relaxed),
            block: u32::try_from(self.block).unwrap_or(512),
            boot: self.boot,
        }
    }

    /// Executes one call (protocol E2).
    fn answer(&self, operation: ExportOperation, call: &IncomingCall<'_>) -> Result<CallAnswer, CallError> {
        let args = call.args();
        let data = args.len().checked_sub(FIELDS).ok_or_else(|| failed(Errno::BADMSG))?;
        let fields = RequestFields::read(&args.array(data)?).ok_or_else(|| failed(Errno::BADMSG))?;
        let session = self.sessions.find(fields.session, call.peer()).ok_or_else(|| failed(Errno::NOTCONN))?;
        // Held until the answer is made: the session's end waits for this request.
        let _running = UserSession::enter(&session).ok_or_else(|| failed(Errno::NOTCONN))?;
        self.check(operation, &fields, data).map_err(failed)?;
        match operation {
            ExportOperation::Read => self.read(call, &fields),
            ExportOperation::Write => self.write(call, &fields).map_err(failed),
            ExportOperation::WriteFrom => self.write_from(call, data, &fields).map_err(failed),
            ExportOperation::Sync => self.sync().map(CallAnswer::from).map_err(failed),
            ExportOperation::Zero => self.zero(&fields).map_err(failed),
            ExportOperation::Allocate => self.allocate(&fields).map_err(failed),
            ExportOperation::Measure => self.measure().map(|capacity| capacity.to_le_bytes().into()).map_err(failed),
        }
    }

    /// Judges a request before anything is executed (protocol E2.3).
    fn check(&self, operation: ExportOperation, fields: &RequestFields, data: usize) -> Result<(), Errno> {
        let RequestFields { offset, length, .. } = *fields;
        let most = match operation {
            ExportOperation::Sync | ExportOperation::Measure => {
                return if data == 0 { Ok(()) } else { Err(Errno::BADMSG) };
            }
            ExportOperation::Read | ExportOperation::Write | ExportOperation::WriteFrom => LARGEST_DATA,
            ExportOperation::Zero => LARGEST_ZEROES,
            ExportOperation::Allocate => LARGEST_RANGE,
        };
        let has_right_data = match operation {
            ExportOperation::Write => data as u64 == length,
            // They are read by `read_parts`.
            ExportOperation::WriteFrom => data > 0,
            _ => data == 0,
        };
        if !has_right_data || length == 0 || length > most {
            return Err(Errno::BADMSG);
        }
        if operation != ExportOperation::Read && self.read_only {
            return Err(Errno::ROFS);
        }
        let end = offset.checked_add(length).ok_or(Errno::INVAL)?;
        if end > self.capacity.load(Ordering::Relaxed) || !(offset | length).is_multiple_of(self.block) {
            return Err(Errno::INVAL);
        }
        Ok(())
    }

    fn read(&self, call: &IncomingCall<'_>, fields: &RequestFields) -> Result<CallAnswer, CallError> {
        let len = usize::try_from(fields.length).map_err(|_| failed(Errno::INVAL))?;
        let mut block = call.heap().allocate_aligned(len, ALIGN).map_err(|_| failed(Errno::NOMEM))?;
        let mut done = 0;
        while done < len {
            match rustix::io::pread(&self.file, &mut block[done..], fields.offset + done as u64) {
                // The file has become smaller.
                Ok(0) => return Err(failed(Errno::IO)),
                Ok(read) => done += read,
                Err(Errno::INTR) => {}
                Err(e) => return Err(failed(e)),
            }
        }
        Ok(block.into())
    }

    fn write(&self, call: &IncomingCall<'_>, fields: &RequestFields) -> Result<CallAnswer, Errno> {
        let len = usize::try_from(fields.length).map_err(|_| Errno::INVAL)?;
        if self.direct && self.group.is_some() {
            // The disk may lie on one that a back end of the group serves. It finds windows of the group, and not the one that the arguments are in.
            let mut room = vec![0; len + ALIGN];
            let start = room.as_ptr().align_offset(ALIGN);
            let bytes = room.get_mut(start..start + len).ok_or(Errno::NOMEM)?;
            call.args().read_at(0, bytes).map_err(|_| Errno::BADMSG)?;
            write_all(len, |done| Ok(rustix::io::pwrite(&self.file, &bytes[done..], fields.offset + done as u64)?))?;
        } else {
            write_all(len, |done| call.args().write_to(done..len, &self.file, fields.offset + done as u64))?;
        }
        self.settle(fields)
    }

    /// Writes what the user names in a group (protocol E4). The user has it until the answer.
    fn write_from(&self, call: &IncomingCall<'_>, data: usize, fields: &RequestFields) -> Result<CallAnswer, Errno> {
        let (group, members) = self.group.as_ref().ok_or(Errno::OPNOTSUPP)?;
        let peer = call.peer();
        // A stranger could have bytes of the group written to a disk that it reads.
        if peer.origin() != Some(Origin::Host) || !members.contains(&peer.name) {
            return Err(Errno::OPNOTSUPP);
        }
        let mut named = vec![0; data.min(MOST_PARTS * PART + 1)];
        call.args().read_at(0, &mut named).map_err(|_| Errno::BADMSG)?;
        let parts = read_parts(&named, fields.length).ok_or(Errno::BADMSG)?;
        let parts: Vec<BorrowedPart> =
            parts.iter().map(|part| group.borrow(part)).collect::<Result<_, _>>().map_err(|e| {
                debug!(error = %e, "a user names bytes that cannot be read in the group");
                Errno::STALE
            })?;
        let mut offset = fields.offset;
        for part in parts {
            let len = usize::try_from(part.part().len).map_err(|_| Errno::INVAL)?;
            write_all(len, |done| part.write_at(self.file.as_fd(), done, offset + done as u64))?;
            offset += len as u64;
        }
        self.settle(fields)
    }

    /// Makes a change durable, if its user wants that.
    fn settle(&self, fields: &RequestFields) -> Result<CallAnswer, Errno> {
        if fields.durable {
            self.sync()?;
        }
        Ok(().into())
    }

    fn sync(&self) -> Result<(), Errno> {
        self.flushes.flush(|| {
            rustix::fs::fdatasync(&self.file).inspect_err(|error| {
                warn!(%error, "a flush of the disk has failed; its data may be lost, so all further flushes fail until the export is started again");
            })
        })
    }

    fn zero(&self, fields: &RequestFields) -> Result<CallAnswer, Errno> {
        self.image.write_zeroes(fields.offset, fields.length)?;
        self.settle(fields)
    }

    fn allocate(&self, fields: &RequestFields) -> Result<CallAnswer, Errno> {
        let mode = FallocateFlags::from_bits(fields.mode.cast_unsigned()).ok_or(Errno::INVAL)?;
        let may = [FallocateFlags::PUNCH_HOLE, FallocateFlags::ZERO_RANGE].map(|kind| kind | FallocateFlags::KEEP_SIZE);
        if !may.contains(&mode) {
            return Err(Errno::INVAL);
        }
        rustix::io::retry_on_intr(|| rustix::fs::fallocate(&self.file, mode, fields.offset, fields.length))?;
        self.settle(fields)
    }
}

/// Writes `len` bytes, also if a call writes fewer. `write` gets how many are written, and writes from there on.
fn write_all(len: usize, mut write: impl FnMut(usize) -> std::io::Result<usize>) -> Result<(), Errno> {
    let mut done = 0;
    while done < len {
        match write(done) {
            Ok(0) => return Err(Errno::IO),
            Ok(written) => done += written,
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(Errno::from_io_error(&e).unwrap_or(Errno::IO)),
        }
    }
    Ok(())
}

/// The domains of the host that are members of the group.
fn host_members(domain: &Domain, group: &Group) -> Result<Vec<String>, VhostError> {
    let rows = domain.groups()?.into_iter().filter(|row| row.group == group.name() && !row.machine);
    Ok(rows.map(|row| row.member).collect())
}

fn failed(e: Errno) -> CallError {
    CallError::application(e.raw_os_error().unsigned_abs(), "")
}

/// Accepts the streams of users until the export stops.
fn accept(disk: &Arc<ExportedDisk>, mut listener: Listener, stop: &Arc<OwnedFd>) {
    let mut sessions: Vec<JoinHandle<()>> = Vec::new();
    loop {
        sessions.retain(|session| !session.is_finished());
        match listener.accept() {
            // One more would have to wait for a session in any case. Its stream is dropped.
            Ok(_) if sessions.len() >= MOST_CONNECTIONS => {}
            Ok((stream, peer)) => {
                let (disk, stop) = (Arc::clone(disk), Arc::clone(stop));
                let serve = move || {
                    if let Err(e) = serve(&disk, stream, &peer, &stop) {
                        debug!(user = peer.name, error = %e, "a user of the disk has ended");
                    }
                };
                sessions.extend(std::thread::Builder::new().name("pw-blk-session".into()).spawn(serve));
            }
            Err(partywall::Error::WouldBlock) => {
                let mut fds =
                    [PollFd::from_borrowed_fd(listener.as_fd(), PollFlags::IN), PollFd::new(&**stop, PollFlags::IN)];
                let _ = poll(&mut fds, None);
                let has_hung_up = fds[0].revents().intersects(PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL);
                // Without a broker, the listener's session stays readable until the broker is back.
                if !fds[1].revents().is_empty() || (has_hung_up && pause(stop)) {
                    break;
                }
            }
            Err(e) => {
                warn!(error = %e, "no user can be accepted now");
                if pause(stop) {
                    break;
                }
            }
        }
    }
    for session in sessions {
        let _ = session.join();
    }
}

/// Waits for a moment; `true` if the export is to stop.
fn pause(stop: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(stop, PollFlags::IN)];
    let longest = Timespec { tv_sec: 0, tv_nsec: PAUSE.subsec_nanos().into() };
    let _ = poll(&mut fds, Some(&longest));
    !fds[0].revents().is_empty()
}

/// One session, until its stream or the export ends.
fn serve(disk: &ExportedDisk, stream: Stream, peer: &PeerInfo, stop: &OwnedFd) -> std::io::Result<()> {
    let (Some(mut reader), Some(mut writer)) = stream.into_halves() else { return Ok(()) };
    reader.set_timeout(Some(FIRST));
    let mut first = [0; HELLO];
    reader.read_exact(&mut first)?;
    let welcome = match read_hello(first) {
        Some(VERSION) => disk.begin(peer),
        Some(_) => Welcome::refusal(Errno::PROTONOSUPPORT),
        None => return Ok(()),
    };
    if welcome.errno != 0 {
        return writer.write_all(&welcome.bytes());
    }
    info!(user = peer.name, "the disk is in use");
    let ended = writer.write_all(&welcome.bytes()).and_then(|()| {
        reader.set_nonblocking(true);
        // Nothing follows. The end of the stream is the end of the session.
        while let Err(e) = reader.read(&mut [0; 1])
            && e.kind() == ErrorKind::WouldBlock
        {
            let mut fds = [PollFd::new(&reader, PollFlags::IN), PollFd::new(stop, PollFlags::IN)];
            poll(&mut fds, None)?;
            if !fds[1].revents().is_empty() {
                break;
            }
        }
        Ok(())
    });
    disk.sessions.end(welcome.session);
    info!(user = peer.name, "the disk is free");
    ended
}
