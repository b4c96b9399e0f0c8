//! The operations of a mounted file system, by node and by open file.

use super::handles::RemoteHandle;
use super::kernel::KernelRequest;
use super::link::{RemoteLink, RequestFailure, body_of};
use super::tree::NameCheck;
use super::{Caller, Remote, RemoteData};
use crate::mutex::lock;
use crate::wire::{
    DirectoryEntry, EntryName, FileAttributes, FileEntry, FileField, FileLock, FileRequest, LARGEST_DATA, OpenedFile,
    value_of, write_flags,
};
use rustix::fs::OFlags;
use rustix::io::Errno;
use std::sync::Arc;
use std::time::Duration;

/// A directory whose entries are listed.
#[derive(Debug, Clone, Copy)]
pub struct ListedDirectory {
    /// Its node.
    pub node: u64,
    /// The open directory.
    pub handle: u64,
    /// The kernel's request, if the kernel gets the attributes of the entries ([`Remote::send_attributes`]).
    pub attributes_for: Option<KernelRequest>,
}

/// A file that was made, or found, and opened.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct CreatedFile {
    /// Its node.
    pub node: u64,
    /// Its attributes.
    pub attributes: FileAttributes,
    /// The open file.
    pub handle: u64,
    /// The request for its attributes, for [`Remote::send_attributes`].
    pub request: KernelRequest,
}

impl Remote {
    /// A request that makes or finds an entry. Returns its node.
    ///
    /// # Errors
    /// As all methods here: the server's errno; `EIO` without a server; `ESTALE` for what cannot be found again.
    pub fn entry<'a>(
        &self,
        who: Caller,
        parent: u64,
        name: EntryName<'a>,
        make: impl Fn(u64) -> FileRequest<'a>,
    ) -> Result<(u64, FileAttributes), Errno> {
        let (reply, epoch) = self.on_node(who, parent, make)?;
        let entry: FileEntry = decode(reply)?;
        Ok((self.mentioned(epoch, parent, name, &entry), entry.attributes))
    }

    /// Makes another name of a node.
    ///
    /// # Errors
    /// As [`Remote::entry`].
    pub fn link_node(
        &self,
        who: Caller,
        node: u64,
        parent: u64,
        name: EntryName<'_>,
    ) -> Result<(u64, FileAttributes), Errno> {
        let make = |[node, parent]: [u64; 2], _| FileRequest::MakeLink { node, parent, name };
        let (reply, epoch) = self.execute(who, [node, parent], [0; 2], make)?;
        let entry: FileEntry = decode(reply)?;
        Ok((self.mentioned(epoch, parent, name, &entry), entry.attributes))
    }

    /// A request about one node, whose reply is bytes.
    ///
    /// # Errors
    /// As [`Remote::entry`].
    pub fn bytes<'a>(&self, who: Caller, node: u64, make: impl Fn(u64) -> FileRequest<'a>) -> Result<Vec<u8>, Errno> {
        self.on_node(who, node, make)?.0.into_vec()
    }

    /// A request about one node or an open file of it, if `handle` is not 0, whose reply is attributes.
    ///
    /// # Errors
    /// As [`Remote::entry`].
    pub fn attributes<'a>(
        &self,
        who: Caller,
        node: u64,
        handle: u64,
        make: impl Fn(u64, u64) -> FileRequest<'a>,
    ) -> Result<FileAttributes, Errno> {
        // An open file is enough, and may be all that is left of the node.
        let nodes = if handle == 0 { [node, 0] } else { [0; 2] };
        decode(self.execute(who, nodes, [handle, 0], |[node, _], [handle, _]| make(node, handle))?.0)
    }

    /// Removes a name.
    ///
    /// # Errors
    /// As [`Remote::entry`].
    pub fn remove(&self, who: Caller, parent: u64, name: EntryName<'_>, is_directory: bool) -> Result<(), Errno> {
        self.on_node(who, parent, |parent| match is_directory {
            true => FileRequest::RemoveDirectory { parent, name },
            false => FileRequest::Unlink { parent, name },
        })?;
        lock(&self.tree).removed(parent, name.bytes());
        Ok(())
    }

    /// Renames an entry.
    ///
    /// # Errors
    /// As [`Remote::entry`].
    pub fn rename(
        &self,
        who: Caller,
        from: (u64, EntryName<'_>),
        to: (u64, EntryName<'_>),
        flags: u32,
    ) -> Result<(), Errno> {
        self.execute(who, [from.0, to.0], [0; 2], |[parent, new_parent], _| FileRequest::Rename {
            parent,
            name: from.1,
            new_parent,
            new_name: to.1,
            flags,
        })?;
        let is_exchange = flags & rustix::fs::RenameFlags::EXCHANGE.bits() != 0;
        lock(&self.tree).renamed((from.0, from.1.bytes()), (to.0, to.1.bytes()), is_exchange);
        Ok(())
    }

    fn keep(&self, open: RemoteHandle) -> u64 {
        lock(&self.handles).add(open)
    }

    /// Records that a request of this thread begins, whose reply [`Remote::send_attributes`] passes to the kernel. The thread is 0 if it is not known.
    pub fn begin(&self, thread: u32) -> KernelRequest {
        lock(&self.tree).begin(thread)
    }

    /// The kernel is about to drop the attributes that it has of a node, before it gets the reply to a request of this thread.
    pub fn dropped(&self, node: u64, thread: u32) {
        let mut tree = lock(&self.tree);
        let request = tree.begin(thread);
        tree.dropped(node, request);
    }

    /// Sends the kernel the attributes of a node, and the name that the node has in a directory if the kernel asked for it. `reply` gets how long
    /// the kernel may use them.
    pub fn send_attributes<T>(
        &self,
        node: u64,
        name: Option<(u64, &[u8])>,
        found: &FileAttributes,
        request: KernelRequest,
        reply: impl FnOnce(Duration) -> T,
    ) -> T {
        let _sending = lock(&self.sending);
        let ttl = {
            let mut tree = lock(&self.tree);
            let ttl = tree.ttl(node, name, found, request);
            tree.attributes_sent(node, name.is_some(), found, request, ttl);
            ttl
        };
        reply(ttl)
    }

    /// Opens a file. Returns its handle, and whether the data that the kernel has of it is current. `invalidate` has the kernel drop the attributes
    /// that it has of the file. `thread` is the number of the thread that opens it.
    ///
    /// # Errors
    /// As [`Remote::entry`]; `ESTALE` if the kernel must look the name up again first, which it does by itself and then calls this again.
    pub fn open(
        &self,
        who: Caller,
        thread: u32,
        node: u64,
        flags: u32,
        invalidate: impl FnOnce(),
    ) -> Result<(u64, bool), Errno> {
        let (check, is_second) = lock(&self.tree).check(node, thread);
        let plain = |node| FileRequest::Open { node, flags };
        let named = |node, parent, name| FileRequest::OpenNamed { node, flags, parent, name };
        let request = self.begin(thread);
        let (opened, epoch) = self.open_checked(who, request, node, (&check, is_second), plain, named)?;
        let knows = {
            let _sending = lock(&self.sending);
            let knows = lock(&self.tree).opened(node, &opened.attributes, opened.is_settled != 0, request);
            if !knows.attributes {
                invalidate();
            }
            knows
        };
        let truncates = flags & OFlags::TRUNC.bits() != 0;
        let server = opened.handle;
        let handle = self.keep(RemoteHandle { number: node, flags, is_directory: false, opener: who, server, epoch });
        if !knows.size && !truncates && !is_second {
            // The kernel gets a file's size only with its name or by a separate request, which it does not make before it maps the file.
            self.release(handle, 0);
            lock(&self.tree).refuse(node, thread);
            return Err(Errno::STALE);
        }
        if truncates {
            lock(&self.tree).truncated(node, request);
        }
        Ok((handle, knows.data))
    }

    /// Opens a node if it has the name that is recorded for it. At the second attempt, another file may have been given the name since the kernel
    /// has looked it up. Then the file that the kernel has found is opened, because the kernel does not try again.
    fn open_checked<'a>(
        &self,
        who: Caller,
        request: KernelRequest,
        node: u64,
        (check, is_second): (&'a NameCheck, bool),
        plain: impl Fn(u64) -> FileRequest<'a>,
        named: impl Fn(u64, u64, EntryName<'a>) -> FileRequest<'a>,
    ) -> Result<(OpenedFile, u64), Errno> {
        let outcome = match check {
            NameCheck::Nothing => self.on_node(who, node, &plain),
            NameCheck::Lookup => Err(Errno::REMCHG),
            NameCheck::Name { parent, name } => {
                let name = EntryName::new(name)?;
                self.execute(who, [node, *parent], [0; 2], |[node, parent], _| named(node, parent, name))
            }
        };
        let (reply, epoch) = match outcome {
            Err(e) if check.is_refuted_by(e) && is_second => self.on_node(who, node, &plain)?,
            Err(e) if check.is_refuted_by(e) => {
                lock(&self.tree).refuse(node, request.thread);
                return Err(Errno::STALE);
            }
            outcome => outcome?,
        };
        Ok((decode(reply)?, epoch))
    }

    /// Opens a directory. `thread` is the number of the thread that opens it.
    ///
    /// # Errors
    /// As [`Remote::open`].
    pub fn open_directory(&self, who: Caller, thread: u32, node: u64) -> Result<u64, Errno> {
        let (check, is_second) = lock(&self.tree).check(node, thread);
        let plain = |node| FileRequest::OpenDirectory { node };
        let named = |node, parent, name| FileRequest::OpenNamedDirectory { node, parent, name };
        let request = self.begin(thread);
        let (opened, epoch) = self.open_checked(who, request, node, (&check, is_second), plain, named)?;
        let server = opened.handle;
        Ok(self.keep(RemoteHandle { number: node, flags: 0, is_directory: true, opener: who, server, epoch }))
    }

    /// Makes and opens a file. `thread` is the number of the thread that makes it, or 0.
    ///
    /// # Errors
    /// As [`Remote::entry`].
    pub fn create(
        &self,
        who: Caller,
        thread: u32,
        parent: u64,
        name: EntryName<'_>,
        mode: u32,
        flags: u32,
    ) -> Result<CreatedFile, Errno> {
        let request = self.begin(thread);
        let make = |parent| FileRequest::Create { parent, name, mode, flags };
        let (reply, epoch) = self.on_node(who, parent, make)?;
        let reply = reply.into_vec()?;
        let mut rest = &reply[..];
        let (entry, opened) = (FileEntry::take(&mut rest)?, OpenedFile::take(&mut rest)?);
        let number = self.mentioned(epoch, parent, name, &entry);
        let request = lock(&self.tree).created(number, &opened.attributes, opened.is_settled != 0, request);
        let server = opened.handle;
        let handle = self.keep(RemoteHandle { number, flags, is_directory: false, opener: who, server, epoch });
        Ok(CreatedFile { node: number, attributes: opened.attributes, handle, request })
    }

    /// Closes an open file or directory.
    pub fn release(&self, handle: u64, owner: u64) {
        let Some((open, may_have_locks)) = lock(&self.handles).remove(handle) else { return };
        // One of an older connection was closed with it.
        let Ok((link, epoch)) = self.present_link() else { return };
        if open.epoch == epoch {
            let request = FileRequest::Release { handle: open.server, owner };
            // Another client may wait for the locks, and the kernel for the answer.
            if may_have_locks {
                let _ = link.request((0, 0), &request);
            } else {
                link.dismiss(&request);
            }
        }
    }

    /// The connection if there is one; it is not made again.
    fn present_link(&self) -> Result<(Arc<RemoteLink>, u64), Errno> {
        let state = lock(&self.state);
        if state.link.has_ended() { Err(Errno::IO) } else { Ok((Arc::clone(&state.link), state.epoch)) }
    }

    /// A descriptor of an open file was closed. Gives up all POSIX locks of an owner on the file, by whichever open file they were taken
    /// (protocol N9.2).
    /// Does not wait for a server that has gone, which has none of them any more.
    pub fn flush(&self, handle: u64, owner: u64) {
        let Ok((link, epoch)) = self.present_link() else { return };
        let locked = lock(&self.handles).locked_of_node(handle, epoch);
        if let Some(open) = locked {
            let request = FileRequest::Flush { handle: open.server, owner };
            let _ = link.request((0, 0), &request);
        }
    }

    /// A request about an open file, whose reply is bytes.
    ///
    /// # Errors
    /// As [`Remote::entry`].
    pub fn on_file<'a>(
        &self,
        who: Caller,
        handle: u64,
        make: impl Fn(u64) -> FileRequest<'a>,
    ) -> Result<RemoteData, Errno> {
        Ok(self.execute(who, [0; 2], [handle, 0], |_, [handle, _]| make(handle))?.0)
    }

    /// Copies between two open files on the server.
    ///
    /// # Errors
    /// As [`Remote::entry`].
    pub fn copy_range(
        &self,
        who: Caller,
        thread: u32,
        from: (u64, u64),
        to: (u64, u64),
        len: u64,
    ) -> Result<u64, Errno> {
        let make = |_, [from_handle, to_handle]: [u64; 2]| FileRequest::CopyRange {
            from: from_handle,
            from_offset: from.1,
            to: to_handle,
            to_offset: to.1,
            len,
        };
        let copied = decode(self.execute(who, [0; 2], [from.0, to.0], make)?.0)?;
        self.extended(to.0, to.1.saturating_add(copied), thread);
        Ok(copied)
    }

    /// This mount has made an open file reach to this byte at least, which the kernel takes for its size then.
    /// `thread` is the number of the thread that did so, or 0.
    pub fn extended(&self, handle: u64, end: u64, thread: u32) {
        if let Some(open) = lock(&self.handles).get(handle) {
            let mut tree = lock(&self.tree);
            let request = tree.begin(thread);
            tree.extended(open.number, end, request);
        }
    }

    /// A read of an open file has found the file's end at this byte.
    pub fn ended(&self, handle: u64, end: u64) {
        if let Some(open) = lock(&self.handles).get(handle) {
            lock(&self.tree).ended(open.number, end);
        }
    }

    /// Takes or gives up a lock, without waiting.
    ///
    /// # Errors
    /// `EAGAIN` if another owner has a lock that conflicts; as [`Remote::entry`].
    pub fn set_lock(&self, handle: u64, owner: u64, range: FileLock) -> Result<(), Errno> {
        let FileLock { start, end, kind } = range;
        let make = |_, [handle, _]: [u64; 2]| FileRequest::SetLock { handle, owner, start, end, kind };
        let send = |link: &RemoteLink, epoch, request: &FileRequest<'_>| {
            let send = || link.request((0, 0), request);
            if kind == nix::libc::F_UNLCK {
                return send();
            }
            // This is recorded before the answer, so that no other thread opens the file again between the two.
            lock(&self.handles).lock_begins(handle, epoch)?;
            let outcome = send();
            lock(&self.handles).lock_ends(handle, outcome.is_ok());
            outcome
        };
        self.execute_with((0, 0), [0; 2], [handle, 0], make, send).map(drop)
    }

    /// Writes to an open file at this offset, also if it was opened with `O_APPEND`. Returns how many bytes were written. `thread` is the number of
    /// the thread that writes, or 0.
    ///
    /// # Errors
    /// As [`Remote::entry`].
    pub fn write(&self, who: Caller, thread: u32, handle: u64, offset: u64, data: &[u8]) -> Result<u32, Errno> {
        self.write_with(who, thread, handle, (offset, 0), data)
    }

    /// Appends to an open file. `offset` is where the caller takes the end of the file to be. Returns how many bytes were written.
    ///
    /// # Errors
    /// As [`Remote::entry`].
    pub fn append(&self, who: Caller, thread: u32, handle: u64, offset: u64, data: &[u8]) -> Result<u32, Errno> {
        self.write_with(who, thread, handle, (offset, write_flags::APPEND), data)
    }

    fn write_with(
        &self,
        who: Caller,
        thread: u32,
        handle: u64,
        (offset, flags): (u64, u32),
        data: &[u8],
    ) -> Result<u32, Errno> {
        if let Some(open) = lock(&self.handles).get(handle) {
            let mut tree = lock(&self.tree);
            let request = tree.begin(thread);
            tree.writing(open.number, offset.saturating_add(data.len() as u64), request);
        }
        let mut written = 0;
        for part in data.chunks(LARGEST_DATA as usize) {
            match self.write_part(who, handle, (offset + written as u64, flags), part) {
                Ok(n) => written += n as usize,
                Err(_) if written > 0 => break,
                Err(e) => {
                    self.extended(handle, 0, thread);
                    return Err(e);
                }
            }
            if written % LARGEST_DATA as usize != 0 {
                break;
            }
        }
        self.extended(handle, offset + written as u64, thread);
        Ok(written as u32)
    }

    fn write_part(&self, who: Caller, handle: u64, (offset, flags): (u64, u32), data: &[u8]) -> Result<u32, Errno> {
        let appends = flags & write_flags::APPEND != 0;
        for _ in 0..5 {
            let (link, epoch) = self.link()?;
            let outcome = self.reopen(&link, epoch, handle).and_then(|server| {
                lock(&self.handles).change_file(handle);
                link.write(who, (server, offset, flags), data)
            });
            match outcome {
                Ok(reply) => {
                    // Once more: a sync that began meanwhile may have been executed first.
                    lock(&self.handles).change_file(handle);
                    let written: u32 = decode(reply)?;
                    return if written as usize <= data.len() { Ok(written) } else { Err(Errno::IO) };
                }
                Err(RequestFailure::Errno(e)) => return Err(e),
                Err(RequestFailure::TimedOut) => return Err(Errno::IO),
                // The same bytes at the same place can be written twice, but not appended. The next session begins after the end of this one, so
                // the server cannot execute the first request after a later write to the same place.
                Err(RequestFailure::Ended { may_be_executed: true }) if appends => return Err(Errno::IO),
                Err(RequestFailure::Ended { .. }) => {}
            }
        }
        Err(Errno::IO)
    }

    /// Entries of a directory from a position on, about `len` bytes of them. `take` gets each with its node's number, or 0 if the kernel does not
    /// learn it, and how long the kernel may use its name and attributes. It returns `false` when it has no room for an entry, which then counts
    /// as not mentioned. `end` passes the reply to the kernel.
    pub fn read_directory<R>(
        &self,
        who: Caller,
        directory: ListedDirectory,
        (offset, len): (u64, u32),
        mut reply: R,
        mut take: impl FnMut(&mut R, &DirectoryEntry<'_>, u64, Duration) -> bool,
        end: impl FnOnce(R, Result<(), Errno>),
    ) {
        let make = |_, [handle, _]: [u64; 2]| FileRequest::ReadDirectory { handle, offset, len };
        let found = self.execute(who, [0; 2], [directory.handle, 0], make);
        let listed = found.and_then(|(entries, epoch)| Ok((entries.into_vec()?, epoch)));
        let _sending = directory.attributes_for.map(|_| lock(&self.sending));
        let outcome = listed.and_then(|(entries, epoch)| {
            self.list(directory, &entries, epoch, |entry, number, ttl| take(&mut reply, entry, number, ttl))
        });
        end(reply, outcome);
    }

    fn list(
        &self,
        directory: ListedDirectory,
        mut entries: &[u8],
        epoch: u64,
        mut take: impl FnMut(&DirectoryEntry<'_>, u64, Duration) -> bool,
    ) -> Result<(), Errno> {
        let mut is_full = false;
        while !entries.is_empty() {
            let entry = DirectoryEntry::take(&mut entries)?;
            let number = match EntryName::new(entry.name) {
                Ok(name) if entry.entry.node != 0 => self.mentioned(epoch, directory.node, name, &entry.entry),
                Ok(_) => 0,
                Err(_) if matches!(entry.name, b"." | b"..") => 0,
                // The server breaks the protocol.
                Err(_) => return Err(Errno::IO),
            };
            let found = &entry.entry.attributes;
            let attributes_for = directory.attributes_for.filter(|_| number != 0 && !is_full);
            let ttl = attributes_for.map_or(Duration::ZERO, |request| {
                lock(&self.tree).ttl(number, Some((directory.node, entry.name)), found, request)
            });
            is_full = is_full || !take(&entry, number, ttl);
            if is_full && number != 0 {
                self.forget(number, 1);
            } else if let Some(request) = attributes_for {
                // The kernel gets no entry for which there is no room.
                lock(&self.tree).attributes_sent(number, true, found, request, ttl);
            }
        }
        Ok(())
    }

    /// The kernel has forgotten a node.
    pub fn forget(&self, node: u64, lookups: u64) {
        let Ok((link, epoch)) = self.present_link() else {
            lock(&self.tree).forget(node, lookups, u64::MAX);
            return;
        };
        let forgotten = lock(&self.tree).forget(node, lookups, epoch);
        if let Some((node, count)) = forgotten {
            let request = FileRequest::Forget { node, count };
            link.notify(request.number(), &body_of(&request));
        }
    }
}

/// Reads a reply. A server whose reply is none has broken the protocol.
pub(super) fn decode<T: for<'a> FileField<'a>>(reply: RemoteData) -> Result<T, Errno> {
    value_of(&reply.into_vec()?).map_err(|_| Errno::IO)
}
