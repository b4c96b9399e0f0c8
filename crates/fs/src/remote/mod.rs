//! The client's side of a mount, without FUSE: requests by node and open file, whose numbers stay valid when the server comes back.
//!
//! A request that meets a connection that has ended is repeated on the next one if the server has not executed it, or if executing it twice is the
//! same as once. Otherwise it fails with `EIO`. While there is no server, requests wait for [`RemoteOptions::grace`] and then fail with `EIO`.

mod handles;
mod kernel;
mod lanes;
mod link;
mod operations;
mod refused;
mod tree;

pub use crate::direct::RemoteData;
pub use kernel::KernelRequest;
pub use link::ServerAddress;
pub use operations::{CreatedFile, ListedDirectory};

use crate::error::FsError;
use crate::mutex::lock;
use crate::wire::{EntryName, FileAttributes, FileEntry, FileRequest, OpenedFile, ROOT};
use handles::RemoteHandles;
use link::{RemoteLink, RequestFailure};
use operations::decode;
use rustix::fs::OFlags;
use rustix::io::Errno;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tree::{NodePlace, RemoteTree, identity_of};

/// The place of an entry: the number of its directory, and its name there.
type EntryPlace = (u64, Vec<u8>);

/// Between two attempts to connect again.
const PAUSE: Duration = Duration::from_millis(100);
/// The longest that the kernel keeps names and attributes ([`RemoteOptions::cache`]): a year.
pub const LONGEST_CACHE: Duration = Duration::from_secs(365 * 24 * 3600);
/// The deepest path along which a node is found again.
const DEEPEST: usize = 256;

/// The user and the group of a request.
pub type Caller = (u32, u32);

/// How a client waits.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct RemoteOptions {
    /// The longest that one request may take.
    pub timeout: Duration,
    /// The longest that requests wait for a server that has gone to come back.
    pub grace: Duration,
    /// How long the kernel may use names and attributes without asking the server. An open file is compared with the server's in any case.
    /// More than [`LONGEST_CACHE`] counts as that.
    pub cache: Duration,
}

impl Default for RemoteOptions {
    fn default() -> Self {
        Self { timeout: Duration::from_secs(60), grace: Duration::from_secs(5), cache: Duration::ZERO }
    }
}

struct RemoteState {
    link: Arc<RemoteLink>,
    /// Counts connections.
    epoch: u64,
    missed: Option<MissedServer>,
}

/// A server that has gone.
#[derive(Debug, Clone, Copy)]
struct MissedServer {
    since: Instant,
    /// When the last attempt to connect has ended.
    looked: Option<Instant>,
    /// A thread connects.
    is_looked_for: bool,
}

/// A mounted export.
pub struct Remote {
    address: ServerAddress,
    options: RemoteOptions,
    state: Mutex<RemoteState>,
    tree: Mutex<RemoteTree>,
    /// Held while attributes are sent to the kernel and recorded, so that the record has them in the order in which they were sent.
    sending: Mutex<()>,
    handles: Mutex<RemoteHandles>,
    is_read_only: bool,
    root: FileAttributes,
}

impl std::fmt::Debug for Remote {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Remote").field("address", &self.address).finish_non_exhaustive()
    }
}

/// Whether executing a request in one session and again in the next is the same as once.
fn is_repeatable(request: &FileRequest<'_>) -> bool {
    use FileRequest as R;
    match request {
        R::Open { flags, .. } | R::OpenNamed { flags, .. } => flags & OFlags::TRUNC.bits() == 0,
        R::Lookup { .. }
        | R::GetAttributes { .. }
        | R::ReadLink { .. }
        | R::Read { .. }
        | R::OpenDirectory { .. }
        | R::OpenNamedDirectory { .. }
        | R::ReadDirectory { .. }
        | R::GetSpace { .. }
        | R::GetExtended { .. }
        | R::ListExtended { .. }
        | R::CheckAccess { .. }
        | R::GetLock { .. }
        | R::Seek { .. }
        | R::Sync { .. } => true,
        // The end of the first session has released the lock that it may have taken.
        R::SetLock { .. } => true,
        _ => false,
    }
}

/// Whether a request changes something that the server's machine can lose until the next *Sync*.
fn is_change(request: &FileRequest<'_>) -> bool {
    use FileRequest as R;
    match request {
        R::Open { flags, .. } | R::OpenNamed { flags, .. } => flags & OFlags::TRUNC.bits() != 0,
        R::SetAttributes { .. }
        | R::MakeNode { .. }
        | R::MakeDirectory { .. }
        | R::MakeSymlink { .. }
        | R::Unlink { .. }
        | R::RemoveDirectory { .. }
        | R::Rename { .. }
        | R::MakeLink { .. }
        | R::Create { .. }
        | R::Write { .. }
        | R::SetExtended { .. }
        | R::RemoveExtended { .. }
        | R::Allocate { .. }
        | R::CopyRange { .. } => true,
        _ => false,
    }
}

impl Remote {
    /// Connects to an export.
    ///
    /// # Errors
    /// [`FsError`] if there is no server, or if it refuses.
    pub fn connect(address: ServerAddress, options: RemoteOptions) -> Result<Self, FsError> {
        let link = Arc::new(RemoteLink::connect(&address, options.timeout, None)?);
        let welcome = link.welcome;
        // A request of the second attempt waits as long for its server as others.
        let retry = options.timeout.saturating_add(options.grace);
        let tree = Mutex::new(RemoteTree::new(&welcome.root, options.cache, retry));
        Ok(Self {
            address,
            options,
            state: Mutex::new(RemoteState { link, epoch: 1, missed: None }),
            tree,
            sending: Mutex::default(),
            handles: Mutex::default(),
            is_read_only: welcome.is_read_only != 0,
            root: welcome.root,
        })
    }

    /// Whether the export cannot be changed.
    pub fn is_read_only(&self) -> bool {
        self.is_read_only
    }

    /// Whether bytes of files pass by reference.
    pub fn has_calls(&self) -> bool {
        lock(&self.state).link.has_calls()
    }

    /// How many nodes the kernel knows.
    pub fn nodes(&self) -> usize {
        lock(&self.tree).len()
    }

    /// The connection, made again if it has ended.
    fn link(&self) -> Result<(Arc<RemoteLink>, u64), Errno> {
        loop {
            let mut state = lock(&self.state);
            if !state.link.has_ended() {
                return Ok((Arc::clone(&state.link), state.epoch));
            }
            let now = Instant::now();
            let missed = state.missed.get_or_insert_with(|| {
                tracing::warn!("the server has gone");
                MissedServer { since: now, looked: None, is_looked_for: false }
            });
            let is_over = now.duration_since(missed.since) >= self.options.grace;
            // After the grace, one request in a while looks for the server; the others fail at once.
            let pause = if is_over { PAUSE * 10 } else { PAUSE };
            let is_due = missed.looked.is_none_or(|looked| now.duration_since(looked) >= pause);
            if is_due && !missed.is_looked_for {
                missed.is_looked_for = true;
                let previous = Arc::clone(&state.link);
                // An attempt can take long. Others wait for it no longer than the grace.
                drop(state);
                let outcome = RemoteLink::connect(&self.address, self.options.timeout, Some(&previous));
                state = lock(&self.state);
                if let Some(missed) = &mut state.missed {
                    (missed.looked, missed.is_looked_for) = (Some(Instant::now()), false);
                }
                match outcome {
                    // Another directory would not have the files that are open.
                    Ok(link) if identity_of(&link.welcome.root) == identity_of(&self.root) => {
                        tracing::info!("connected to the server again");
                        if link.welcome.boot != previous.welcome.boot {
                            lock(&self.handles).server_has_booted();
                        }
                        state.link = Arc::new(link);
                        state.epoch += 1;
                        state.missed = None;
                        return Ok((Arc::clone(&state.link), state.epoch));
                    }
                    Ok(_) => tracing::warn!("the server exports another directory now; mount it again"),
                    Err(e) => tracing::debug!(error = %e, "the server is not back yet"),
                }
            }
            drop(state);
            if is_over {
                return Err(Errno::IO);
            }
            std::thread::sleep(PAUSE / 4);
        }
    }

    /// The server's number of a node, which is found again by its names if it must be.
    fn resolve(&self, link: &RemoteLink, epoch: u64, who: Caller, number: u64) -> Result<u64, RequestFailure> {
        let stale = RequestFailure::Errno(Errno::STALE);
        // From the node up to a directory that the server knows, then down again.
        let mut lost = Vec::new();
        let mut at = number;
        let mut known = loop {
            match lock(&self.tree).find(at, epoch) {
                NodePlace::Known(server) => break server,
                NodePlace::Named { parent, name, identity } if lost.len() < DEEPEST => {
                    lost.push((at, name, identity));
                    at = parent;
                }
                NodePlace::Named { .. } | NodePlace::Lost => return Err(stale),
            }
        };
        for (node, name, identity) in lost.into_iter().rev() {
            let name = EntryName::new(&name).map_err(RequestFailure::Errno)?;
            let request = FileRequest::Lookup { parent: known, name };
            let reply = match link.request(who, &request) {
                Err(RequestFailure::Errno(Errno::NOENT)) => return Err(stale),
                other => other?,
            };
            let entry: FileEntry = decode(reply).map_err(RequestFailure::Errno)?;
            if identity_of(&entry.attributes) != identity {
                return Err(stale);
            }
            lock(&self.tree).found(node, epoch, entry.node);
            known = entry.node;
        }
        Ok(known)
    }

    /// The server's number of an open file, which is opened again if it must be, as the caller that opened it.
    fn reopen(&self, link: &RemoteLink, epoch: u64, handle: u64) -> Result<u64, RequestFailure> {
        let known = lock(&self.handles).usable(handle, epoch)?;
        if known.epoch == epoch {
            return Ok(known.server);
        }
        let node = self.resolve(link, epoch, known.opener, known.number)?;
        let flags = known.flags & !(OFlags::CREATE | OFlags::EXCL | OFlags::TRUNC).bits();
        let request = match known.is_directory {
            true => FileRequest::OpenDirectory { node },
            false => FileRequest::Open { node, flags },
        };
        let reply = link.request(known.opener, &request)?;
        let opened: OpenedFile = decode(reply).map_err(RequestFailure::Errno)?;
        let used = lock(&self.handles).reopened(handle, epoch, opened.handle);
        if used != Ok(opened.handle) {
            let request = FileRequest::Release { handle: opened.handle, owner: 0 };
            link.dismiss(&request);
        }
        used
    }

    /// Executes a request about nodes and an open file of this mount, which `make` is given the server's numbers of.
    fn execute<'a>(
        &self,
        who: Caller,
        nodes: [u64; 2],
        handles: [u64; 2],
        make: impl Fn([u64; 2], [u64; 2]) -> FileRequest<'a>,
    ) -> Result<(RemoteData, u64), Errno> {
        self.execute_with(who, nodes, handles, make, |link, _, request| link.request(who, request))
    }

    /// As [`Remote::execute`]. `send` sends the request by a connection, whose epoch it gets, and waits for the reply.
    fn execute_with<'a>(
        &self,
        who: Caller,
        nodes: [u64; 2],
        handles: [u64; 2],
        make: impl Fn([u64; 2], [u64; 2]) -> FileRequest<'a>,
        send: impl Fn(&RemoteLink, u64, &FileRequest<'a>) -> Result<RemoteData, RequestFailure>,
    ) -> Result<(RemoteData, u64), Errno> {
        let mut is_found_again = false;
        // A server that goes and comes back again and again does not keep a request forever.
        for _ in 0..5 {
            let (link, epoch) = self.link()?;
            let (mut is_sent, mut syncs) = (None, None);
            let outcome = (|| {
                let (mut known, mut open) = ([0; 2], [0; 2]);
                for (known, node) in known.iter_mut().zip(nodes).filter(|(_, node)| *node != 0) {
                    *known = self.resolve(&link, epoch, who, node)?;
                }
                for (open, handle) in open.iter_mut().zip(handles).filter(|(_, handle)| *handle != 0) {
                    *open = self.reopen(&link, epoch, handle)?;
                }
                let request = make(known, open);
                syncs = self.note_changes(&request, nodes, handles)?;
                is_sent = Some((is_repeatable(&request), known));
                let data = send(&link, epoch, &request)?;
                if is_change(&request) {
                    // Once more: a sync that began meanwhile may have been executed first.
                    self.note_changes(&request, nodes, handles)?;
                }
                Ok(data)
            })();
            match outcome {
                Ok(data) => {
                    if let Some(changes) = syncs {
                        lock(&self.handles).synced(changes);
                    }
                    return Ok((data, epoch));
                }
                Err(RequestFailure::Errno(Errno::STALE)) if !is_found_again => {
                    // The server may have dropped a node for others.
                    is_found_again = true;
                    let Some((_, known)) = is_sent else { return Err(Errno::STALE) };
                    let mut tree = lock(&self.tree);
                    nodes.iter().zip(known).for_each(|(node, server)| tree.lose(*node, server));
                }
                Err(RequestFailure::Errno(e)) => return Err(e),
                Err(RequestFailure::TimedOut) => return Err(Errno::IO),
                Err(RequestFailure::Ended { may_be_executed }) => {
                    let is_safe = !may_be_executed || is_sent.is_none_or(|(is_repeatable, _)| is_repeatable);
                    if !is_safe {
                        return Err(Errno::IO);
                    }
                }
            }
        }
        Err(Errno::IO)
    }

    /// Notes what a request is about to change. Returns the changes that it makes durable.
    fn note_changes(
        &self,
        request: &FileRequest<'_>,
        nodes: [u64; 2],
        handles: [u64; 2],
    ) -> Result<Option<(u64, u64)>, RequestFailure> {
        let mut open = lock(&self.handles);
        if matches!(request, FileRequest::Sync { .. }) {
            return open.begin_sync(handles[0]);
        }
        if is_change(request) {
            // A copy changes the second file alone.
            let handles = if matches!(request, FileRequest::CopyRange { .. }) { &handles[1..] } else { &handles[..] };
            handles.iter().for_each(|handle| open.change_file(*handle));
            nodes.into_iter().filter(|node| *node != 0).for_each(|node| open.change(node));
        }
        Ok(None)
    }

    fn on_node<'a>(
        &self,
        who: Caller,
        node: u64,
        make: impl Fn(u64) -> FileRequest<'a>,
    ) -> Result<(RemoteData, u64), Errno> {
        self.execute(who, [node, 0], [0; 2], |[node, _], _| make(node))
    }

    fn mentioned(&self, epoch: u64, parent: u64, name: EntryName<'_>, entry: &FileEntry) -> u64 {
        lock(&self.tree).mention(epoch, parent, name.bytes(), entry)
    }

    /// The attributes of the exported directory's root as they were at the mount.
    pub fn root(&self) -> (u64, FileAttributes) {
        (ROOT, self.root)
    }
}
