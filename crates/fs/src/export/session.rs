//! A session: the requests of one client, executed.

use super::actor::{ClientActor, act_as};
use super::gate::{RequestGate, RunningRequest};
use super::tables::{ClosedFile, ExportedNode, OpenHandle, Tables};
use super::{ExportOptions, PeerKey, attributes, lock};
use crate::wire::{FileRequest, LARGEST_DATA, Welcome, bytes_of};
use partywall::User;
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use std::fmt;
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// The open objects of one client, and the user that it acts as.
pub struct ExportSession {
    pub(super) key: u64,
    pub(super) peer: Option<PeerKey>,
    pub(super) client: ClientActor,
    pub(super) read_only: bool,
    has_calls: bool,
    pub(super) tables: Mutex<Tables>,
    pub(super) gate: RequestGate,
    /// The TCP stream of the session. The end of the session ends it.
    stream: Mutex<Option<Arc<TcpStream>>>,
}

impl fmt::Debug for ExportSession {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The key is a secret of the client's.
        f.debug_struct("ExportSession").field("client", &self.client).finish_non_exhaustive()
    }
}

impl ExportSession {
    pub(super) fn new(
        root: OwnedFd,
        key: u64,
        peer: Option<PeerKey>,
        user: Option<User>,
        options: &ExportOptions,
    ) -> Result<Self, Errno> {
        let found = attributes(&root)?;
        let tables = Tables::new(root, (found.device, found.inode), options.limits);
        Ok(Self {
            key,
            peer,
            client: ClientActor::judge(user, options.squash),
            read_only: options.read_only,
            has_calls: options.has_calls && peer.is_some(),
            tables: Mutex::new(tables),
            gate: RequestGate::default(),
            stream: Mutex::default(),
        })
    }

    /// The answer to a client's first request.
    ///
    /// # Errors
    /// The system's, if the exported directory cannot be looked at, or the kernel has no number for its boot.
    pub fn welcome(&self) -> Result<Vec<u8>, Errno> {
        let root = self.node(crate::wire::ROOT)?;
        Ok(bytes_of(&Welcome {
            session: self.key,
            is_read_only: u32::from(self.read_only),
            has_calls: u32::from(self.has_calls),
            boot: boot_number()?,
            root: attributes(&root.path)?,
        }))
    }

    /// Lets a request be executed until what is returned is dropped.
    ///
    /// # Errors
    /// `ENOTCONN` if the session has ended: its client has begun another one, and may have repeated the request there.
    pub fn begin_request(&self) -> Result<RunningRequest<'_>, Errno> {
        self.gate.enter().ok_or(Errno::NOTCONN)
    }

    /// Lets no further request be executed. Those that are executed go on.
    pub(crate) fn refuse_requests(&self) {
        self.gate.close(Some(Duration::ZERO));
    }

    /// Has the end of the session end this stream as well. Its client may have gone without closing it.
    pub(crate) fn end_with(&self, stream: &Arc<TcpStream>) {
        *lock(&self.stream) = Some(Arc::clone(stream));
    }

    /// Closes everything.
    pub(super) fn close(&self) {
        lock(&self.tables).end();
        if let Some(stream) = lock(&self.stream).take() {
            // A stream that is not connected any more cannot be shut down.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// How many nodes, open files and owners of locks the session has.
    pub fn counts(&self) -> (usize, usize, usize) {
        lock(&self.tables).counts()
    }

    pub(super) fn node(&self, number: u64) -> Result<Arc<ExportedNode>, Errno> {
        lock(&self.tables).node(number)
    }

    pub(super) fn handle(&self, number: u64) -> Result<Arc<OpenHandle>, Errno> {
        lock(&self.tables).handle(number)
    }

    pub(super) fn must_be_writable(&self) -> Result<(), Errno> {
        if self.read_only { Err(Errno::ROFS) } else { Ok(()) }
    }

    /// Gives mentions of a node back. Returns the node if the session has it no more: to drop it closes it, which can wait for a disk.
    pub(crate) fn forget(&self, node: u64, count: u64) -> Option<Arc<ExportedNode>> {
        lock(&self.tables).forget(node, count)
    }

    /// Takes an open file out of the tables and gives its owner's locks up. To drop what is returned closes the file, which can wait for a disk.
    pub(crate) fn release(&self, handle: u64, owner: u64) -> Result<Arc<OpenHandle>, Errno> {
        let ClosedFile { handle, locks } = lock(&self.tables).close(handle, owner)?;
        drop(locks);
        Ok(handle)
    }

    /// Executes a request that names this user and group, and returns the bytes of the reply.
    ///
    /// Reads and writes of data are separate ([`ExportSession::read`], [`ExportSession::write`]), because each transport has its own memory for
    /// them; here a read copies, and a write fails.
    ///
    /// # Errors
    /// The system's answer, which is the client's as well.
    pub fn execute(&self, uid: u32, gid: u32, request: FileRequest<'_>) -> Result<Vec<u8>, Errno> {
        use FileRequest as R;
        // Requests about an open file are the opener's.
        let actor = match request {
            R::Flush { .. } | R::Release { .. } | R::Forget { .. } => None,
            R::Read { .. } | R::Sync { .. } | R::Allocate { .. } | R::Seek { .. } | R::CopyRange { .. } => None,
            R::GetLock { .. } | R::SetLock { .. } => None,
            _ => Some(self.client.actor(uid, gid)),
        };
        if let Some(actor) = &actor {
            act_as(actor)?;
        }
        match request {
            R::Hello { .. } | R::Write { .. } => Err(Errno::BADMSG),
            R::Forget { node, count } => {
                self.forget(node, count);
                Ok(Vec::new())
            }
            R::Lookup { parent, name } => self.lookup(parent, name).map(|entry| bytes_of(&entry)),
            R::GetAttributes { node, handle } => self.get_attributes(node, handle).map(|found| bytes_of(&found)),
            R::SetAttributes { .. } => {
                self.set_attributes(&actor.ok_or(Errno::BADMSG)?, &request).map(|found| bytes_of(&found))
            }
            R::ReadLink { node } => self.read_link(node),
            R::MakeNode { parent, name, mode } => {
                self.make_node(&actor.ok_or(Errno::BADMSG)?, parent, name, mode).map(|entry| bytes_of(&entry))
            }
            R::MakeDirectory { parent, name, mode } => {
                self.make_directory(&actor.ok_or(Errno::BADMSG)?, parent, name, mode).map(|entry| bytes_of(&entry))
            }
            R::MakeSymlink { parent, name, target } => {
                self.make_symlink(parent, name, target).map(|entry| bytes_of(&entry))
            }
            R::Unlink { parent, name } => self.remove(parent, name, false).map(|()| Vec::new()),
            R::RemoveDirectory { parent, name } => self.remove(parent, name, true).map(|()| Vec::new()),
            R::Rename { parent, name, new_parent, new_name, flags } => {
                self.rename(parent, name, new_parent, new_name, flags).map(|()| Vec::new())
            }
            R::MakeLink { node, parent, name } => self.make_link(node, parent, name).map(|entry| bytes_of(&entry)),
            R::Open { node, flags } => {
                let actor = actor.ok_or(Errno::BADMSG)?;
                self.open(node, flags, actor).map(|opened| bytes_of(&opened))
            }
            R::Create { parent, name, mode, flags } => {
                let actor = actor.ok_or(Errno::BADMSG)?;
                let (entry, opened) = self.create(parent, name, mode, flags, actor)?;
                let mut reply = bytes_of(&entry);
                reply.extend(bytes_of(&opened));
                Ok(reply)
            }
            R::Read { handle, offset, len } => {
                let mut data = vec![0; len.min(LARGEST_DATA) as usize];
                let filled = self.read(handle, offset, &mut data)?;
                data.truncate(filled);
                Ok(data)
            }
            R::Flush { handle, owner } => self.flush(handle, owner).map(|()| Vec::new()),
            R::Release { handle, owner } => self.release(handle, owner).map(|_| Vec::new()),
            R::Sync { handle, data_only } => self.sync(handle, data_only != 0).map(|()| Vec::new()),
            R::OpenDirectory { node } => {
                let actor = actor.ok_or(Errno::BADMSG)?;
                self.open_directory(node, actor).map(|opened| bytes_of(&opened))
            }
            R::ReadDirectory { handle, offset, len } => self.read_directory(handle, offset, len),
            R::OpenNamed { node, flags, parent, name } => {
                let actor = actor.ok_or(Errno::BADMSG)?;
                self.must_be_named(node, parent, name)?;
                self.open(node, flags, actor).map(|opened| bytes_of(&opened))
            }
            R::OpenNamedDirectory { node, parent, name } => {
                let actor = actor.ok_or(Errno::BADMSG)?;
                self.must_be_named(node, parent, name)?;
                self.open_directory(node, actor).map(|opened| bytes_of(&opened))
            }
            R::GetSpace { node } => self.space(node).map(|space| bytes_of(&space)),
            R::GetExtended { node, name } => self.get_extended(node, name),
            R::SetExtended { node, name, value, flags } => {
                self.set_extended(node, name, value, flags).map(|()| Vec::new())
            }
            R::ListExtended { node } => self.list_extended(node),
            R::RemoveExtended { node, name } => self.remove_extended(node, name).map(|()| Vec::new()),
            R::CheckAccess { node, mask } => self.check_access(node, mask).map(|()| Vec::new()),
            R::GetLock { handle, owner, start, end, kind } => {
                self.get_lock(handle, owner, start, end, kind).map(|held| bytes_of(&held))
            }
            R::SetLock { handle, owner, start, end, kind } => {
                self.set_lock(handle, owner, start, end, kind).map(|()| Vec::new())
            }
            R::Allocate { handle, mode, offset, len } => self.allocate(handle, mode, offset, len).map(|()| Vec::new()),
            R::Seek { handle, offset, whence } => self.seek(handle, offset, whence).map(|found| bytes_of(&found)),
            R::CopyRange { from, from_offset, to, to_offset, len } => {
                self.copy_range(from, from_offset, to, to_offset, len).map(|copied| bytes_of(&copied))
            }
        }
    }
}

/// The first half of the kernel's random number of its boot.
fn boot_number() -> Result<u64, Errno> {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")
        .map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::IO))?;
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).take(16).collect();
    u64::from_str_radix(&digits, 16).map_err(|_| Errno::IO)
}
