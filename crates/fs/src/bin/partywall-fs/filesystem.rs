//! The kernel's requests, as requests to the server.
#![expect(unsafe_code, reason = "replies to the kernel from memory that the server can change, by its address")]

use crate::convert::{attr, errno, kind_of, parts, who};
use crate::locks;
use fuser::{
    AccessFlags, BsdFileFlags, CopyFileRangeFlags, Errno, FileHandle, Filesystem, FopenFlags, Generation, INodeNo,
    InitFlags, KernelConfig, LockOwner, Notifier, OpenFlags, RenameFlags, ReplyAttr, ReplyCreate, ReplyData,
    ReplyDirectory, ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyLock, ReplyLseek, ReplyOpen, ReplyStatfs,
    ReplyWrite, ReplyXattr, Request, TimeOrNow, WriteFlags,
};
use partywall_fs::remote::{CreatedFile, ListedDirectory, Remote};
use partywall_fs::wire::{
    DirectoryEntry, EntryName, FileAttributes, FileLock, FileRequest, FileSpace, LARGEST_DATA, change, value_of,
};
use rustix::fs::{FallocateFlags, OFlags};
use rustix::io::Errno as SystemErrno;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime};

/// Threads that wait for locks at a time.
const MOST_WAITERS: usize = 512;

/// Long requests of the kernel that have separate threads at a time.
const MOST_LONG: usize = 64;

/// A mounted export, as the kernel uses it.
pub(crate) struct RemoteFilesystem {
    remote: Arc<Remote>,
    /// Tells the kernel what its caches have no more. There is one as soon as the session is made.
    notifier: Arc<OnceLock<Notifier>>,
    waiters: Arc<AtomicUsize>,
    long: Arc<AtomicUsize>,
}

impl RemoteFilesystem {
    pub(crate) fn new(remote: Remote, notifier: Arc<OnceLock<Notifier>>) -> Self {
        Self { remote: Arc::new(remote), notifier, waiters: Arc::default(), long: Arc::default() }
    }

    /// Has a separate thread work for a request that may wait for the server's disk for long, so that the threads of the mount stay free for other
    /// requests. If there are as many as may be, this thread does the work. The kernel gets `EIO` if no thread can be started.
    fn run_long(&self, work: impl FnOnce(&Remote) + Send + 'static) {
        if self.long.fetch_add(1, Ordering::AcqRel) >= MOST_LONG {
            self.long.fetch_sub(1, Ordering::AcqRel);
            return work(&self.remote);
        }
        let (remote, long) = (Arc::clone(&self.remote), Arc::clone(&self.long));
        let run = move || {
            work(&remote);
            long.fetch_sub(1, Ordering::AcqRel);
        };
        if let Err(e) = std::thread::Builder::new().name("pw-fs-long".into()).spawn(run) {
            tracing::warn!(error = %e, "no thread for a request of the kernel");
            self.long.fetch_sub(1, Ordering::AcqRel);
        }
    }

    /// Replies with the entry that `find` finds or makes by this name in a directory, or with the error.
    fn reply_entry<'a>(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &'a OsStr,
        reply: ReplyEntry,
        find: impl FnOnce(EntryName<'a>) -> Result<(u64, FileAttributes), SystemErrno>,
    ) {
        let begun = self.remote.begin(request.pid());
        match EntryName::new(name.as_bytes()).and_then(find) {
            Ok((number, found)) => {
                self.remote.send_attributes(number, Some((parent.0, name.as_bytes())), &found, begun, |ttl| {
                    reply.entry(&ttl, &attr(number, &found), Generation(0));
                })
            }
            Err(e) => reply.error(errno(e)),
        }
    }

    /// Replies with the attributes that a request about a node or an open file of it returns, or with the error.
    fn reply_attributes<'a>(
        &self,
        request: &Request,
        ino: INodeNo,
        handle: Option<FileHandle>,
        reply: ReplyAttr,
        make: impl Fn(u64, u64) -> FileRequest<'a>,
    ) {
        let begun = self.remote.begin(request.pid());
        match self.remote.attributes(who(request), ino.0, handle.map_or(0, |handle| handle.0), make) {
            Ok(found) => {
                self.remote.send_attributes(ino.0, None, &found, begun, |ttl| reply.attr(&ttl, &attr(ino.0, &found)))
            }
            Err(e) => reply.error(errno(e)),
        }
    }
}

/// A thread has taken a lock or given it up. Programs that lock a file expect what the previous holder of the lock has written.
fn lock_changed(remote: &Remote, notifier: &OnceLock<Notifier>, ino: INodeNo, thread: u32) {
    remote.dropped(ino.0, thread);
    drop_attributes(notifier, ino);
}

/// Has the kernel drop the attributes that it has of a node. Its pages stay: to drop them, it could wait for requests that have no thread here.
fn drop_attributes(notifier: &OnceLock<Notifier>, ino: INodeNo) {
    if let Some(notifier) = notifier.get()
        && let Err(e) = notifier.inval_inode(ino, -1, 0)
    {
        tracing::debug!(error = %e, "the kernel may have old attributes until they expire");
    }
}

/// Replies with nothing, or with the error.
macro_rules! reply_empty {
    ($reply:ident, $outcome:expr) => {
        match $outcome {
            Ok(_) => $reply.ok(),
            Err(e) => $reply.error(errno(e)),
        }
    };
}

impl Filesystem for RemoteFilesystem {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> std::io::Result<()> {
        let wanted = [
            InitFlags::FUSE_POSIX_LOCKS,
            InitFlags::FUSE_FLOCK_LOCKS,
            InitFlags::FUSE_DO_READDIRPLUS,
            InitFlags::FUSE_READDIRPLUS_AUTO,
            InitFlags::FUSE_PARALLEL_DIROPS,
        ];
        // Not FUSE_ASYNC_DIO: with it, the kernel sends all requests of one large write with O_DIRECT at the same time. With O_APPEND as well, the
        // server would append them in any order.
        for flag in wanted {
            // Kernels that have it not do without.
            let _ = config.add_capabilities(flag);
        }
        let _ = config.set_max_write(LARGEST_DATA);
        let _ = config.set_max_readahead(LARGEST_DATA);
        let _ = config.set_max_background(64);
        Ok(())
    }

    fn lookup(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let find =
            |name| self.remote.entry(who(request), parent.0, name, |parent| FileRequest::Lookup { parent, name });
        self.reply_entry(request, parent, name, reply, find);
    }

    fn forget(&self, _request: &Request, ino: INodeNo, nlookup: u64) {
        self.remote.forget(ino.0, nlookup);
    }

    fn getattr(&self, request: &Request, ino: INodeNo, handle: Option<FileHandle>, reply: ReplyAttr) {
        let make = |node, handle| FileRequest::GetAttributes { node, handle };
        self.reply_attributes(request, ino, handle, reply, make);
    }

    fn setattr(
        &self,
        request: &Request,
        ino: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        atime: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        handle: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let bit = |is_set: bool, bit| if is_set { bit } else { 0 };
        let mut mask = bit(mode.is_some(), change::MODE)
            | bit(uid.is_some(), change::UID)
            | bit(gid.is_some(), change::GID)
            | bit(size.is_some(), change::SIZE);
        let mut moment = |given: Option<TimeOrNow>, at, now| match given {
            None => (0, 0),
            Some(TimeOrNow::Now) => {
                mask |= now;
                (0, 0)
            }
            Some(TimeOrNow::SpecificTime(time)) => {
                mask |= at;
                parts(time)
            }
        };
        let (accessed, accessed_nanos) = moment(atime, change::ACCESSED, change::ACCESSED_NOW);
        let (modified, modified_nanos) = moment(mtime, change::MODIFIED, change::MODIFIED_NOW);
        let make = |node, handle| FileRequest::SetAttributes {
            node,
            handle,
            mask,
            mode: mode.unwrap_or(0),
            uid: uid.unwrap_or(0),
            gid: gid.unwrap_or(0),
            size: size.unwrap_or(0),
            accessed,
            accessed_nanos,
            modified,
            modified_nanos,
        };
        self.reply_attributes(request, ino, handle, reply, make);
    }

    fn readlink(&self, request: &Request, ino: INodeNo, reply: ReplyData) {
        match self.remote.bytes(who(request), ino.0, |node| FileRequest::ReadLink { node }) {
            Ok(target) => reply.data(&target),
            Err(e) => reply.error(errno(e)),
        }
    }

    fn mknod(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        _umask: u32,
        _rdev: u32,
        reply: ReplyEntry,
    ) {
        let make = |name| {
            self.remote.entry(who(request), parent.0, name, |parent| FileRequest::MakeNode { parent, name, mode })
        };
        self.reply_entry(request, parent, name, reply, make);
    }

    fn mkdir(&self, request: &Request, parent: INodeNo, name: &OsStr, mode: u32, _umask: u32, reply: ReplyEntry) {
        let make = |name| {
            self.remote.entry(who(request), parent.0, name, |parent| FileRequest::MakeDirectory { parent, name, mode })
        };
        self.reply_entry(request, parent, name, reply, make);
    }

    fn unlink(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let remove = |name| self.remote.remove(who(request), parent.0, name, false);
        reply_empty!(reply, EntryName::new(name.as_bytes()).and_then(remove));
    }

    fn rmdir(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let remove = |name| self.remote.remove(who(request), parent.0, name, true);
        reply_empty!(reply, EntryName::new(name.as_bytes()).and_then(remove));
    }

    fn symlink(&self, request: &Request, parent: INodeNo, name: &OsStr, target: &Path, reply: ReplyEntry) {
        let target = target.as_os_str().as_bytes();
        let make = |name| {
            self.remote.entry(who(request), parent.0, name, |parent| FileRequest::MakeSymlink { parent, name, target })
        };
        self.reply_entry(request, parent, name, reply, make);
    }

    fn rename(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        newparent: INodeNo,
        newname: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let outcome = EntryName::new(name.as_bytes()).and_then(|name| {
            let new_name = EntryName::new(newname.as_bytes())?;
            self.remote.rename(who(request), (parent.0, name), (newparent.0, new_name), flags.bits())
        });
        reply_empty!(reply, outcome);
    }

    fn link(&self, request: &Request, ino: INodeNo, newparent: INodeNo, newname: &OsStr, reply: ReplyEntry) {
        let make = |name| self.remote.link_node(who(request), ino.0, newparent.0, name);
        self.reply_entry(request, newparent, newname, reply, make);
    }

    fn open(&self, request: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let invalidate = || drop_attributes(&self.notifier, ino);
        match self.remote.open(who(request), request.pid(), ino.0, flags.0.cast_unsigned(), invalidate) {
            // Without this flag, the kernel drops what it has cached of the file's data (protocol N7).
            Ok((handle, true)) => reply.opened(FileHandle(handle), FopenFlags::FOPEN_KEEP_CACHE),
            Ok((handle, false)) => reply.opened(FileHandle(handle), FopenFlags::empty()),
            Err(e) => reply.error(errno(e)),
        }
    }

    fn read(
        &self,
        request: &Request,
        _ino: INodeNo,
        handle: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let len = size.min(LARGEST_DATA);
        let make = |handle| FileRequest::Read { handle, offset, len };
        match self.remote.on_file(who(request), handle.0, make) {
            // The server breaks the protocol.
            Ok(data) if data.len() > size as usize => reply.error(Errno::EIO),
            Ok(data) => {
                if data.len() < len as usize {
                    self.remote.ended(handle.0, offset.saturating_add(data.len() as u64));
                }
                // SAFETY: `data` passes the slice to `writev` and reads nothing of it (fuser 0.18.0, which is fixed for this reason).
                reply.data(unsafe { data.for_the_kernel() });
            }
            Err(e) => reply.error(errno(e)),
        }
    }

    fn write(
        &self,
        request: &Request,
        _ino: INodeNo,
        handle: FileHandle,
        offset: u64,
        data: &[u8],
        write_flags: WriteFlags,
        flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        // The kernel writes a page of a mapping by any open file, and where the page belongs, also if that file was opened to append.
        let is_page = write_flags.contains(WriteFlags::FUSE_WRITE_CACHE);
        let appends = !is_page && flags.0 & OFlags::APPEND.bits().cast_signed() != 0;
        let written = match appends {
            true => self.remote.append(who(request), request.pid(), handle.0, offset, data),
            false => self.remote.write(who(request), request.pid(), handle.0, offset, data),
        };
        match written {
            Ok(written) => reply.written(written),
            Err(e) => reply.error(errno(e)),
        }
    }

    fn flush(&self, _request: &Request, _ino: INodeNo, handle: FileHandle, owner: LockOwner, reply: ReplyEmpty) {
        self.remote.flush(handle.0, owner.0);
        reply.ok();
    }

    fn release(
        &self,
        _request: &Request,
        _ino: INodeNo,
        handle: FileHandle,
        _flags: OpenFlags,
        owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        self.remote.release(handle.0, owner.map_or(0, |owner| owner.0));
        reply.ok();
    }

    fn fsync(&self, request: &Request, _ino: INodeNo, handle: FileHandle, data_only: bool, reply: ReplyEmpty) {
        let (caller, data_only) = (who(request), u32::from(data_only));
        self.run_long(move |remote| {
            let make = |handle| FileRequest::Sync { handle, data_only };
            reply_empty!(reply, remote.on_file(caller, handle.0, make));
        });
    }

    fn opendir(&self, request: &Request, ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        match self.remote.open_directory(who(request), request.pid(), ino.0) {
            Ok(handle) => reply.opened(FileHandle(handle), FopenFlags::empty()),
            Err(e) => reply.error(errno(e)),
        }
    }

    fn readdir(&self, request: &Request, ino: INodeNo, handle: FileHandle, offset: u64, reply: ReplyDirectory) {
        let take = |reply: &mut ReplyDirectory, entry: &DirectoryEntry<'_>, number: u64, _| {
            let shown = if number == 0 { entry.inode } else { number };
            let is_taken = !reply.add(INodeNo(shown), entry.offset, kind_of(entry.kind), OsStr::from_bytes(entry.name));
            if is_taken && number != 0 {
                // The kernel does not count entries of this kind of reply.
                self.remote.forget(number, 1);
            }
            is_taken
        };
        let end = |reply: ReplyDirectory, outcome| reply_empty!(reply, outcome);
        let directory = ListedDirectory { node: ino.0, handle: handle.0, attributes_for: None };
        self.remote.read_directory(who(request), directory, (offset, 4096), reply, take, end);
    }

    fn readdirplus(&self, request: &Request, ino: INodeNo, handle: FileHandle, offset: u64, reply: ReplyDirectoryPlus) {
        let begun = self.remote.begin(request.pid());
        let take = |reply: &mut ReplyDirectoryPlus, entry: &DirectoryEntry<'_>, number: u64, ttl: Duration| {
            let mut shown = attr(number, &entry.entry.attributes);
            if number == 0 {
                // Such an entry is only listed; the kernel looks it up if it must.
                shown.kind = kind_of(entry.kind);
            }
            let listed = if number == 0 { entry.inode } else { number };
            let name = OsStr::from_bytes(entry.name);
            !reply.add(INodeNo(listed), entry.offset, name, &ttl, &shown, Generation(0))
        };
        let end = |reply: ReplyDirectoryPlus, outcome| reply_empty!(reply, outcome);
        let directory = ListedDirectory { node: ino.0, handle: handle.0, attributes_for: Some(begun) };
        self.remote.read_directory(who(request), directory, (offset, 16 << 10), reply, take, end);
    }

    fn releasedir(&self, _request: &Request, _ino: INodeNo, handle: FileHandle, _flags: OpenFlags, reply: ReplyEmpty) {
        self.remote.release(handle.0, 0);
        reply.ok();
    }

    fn fsyncdir(&self, request: &Request, _ino: INodeNo, handle: FileHandle, data_only: bool, reply: ReplyEmpty) {
        let (caller, data_only) = (who(request), u32::from(data_only));
        self.run_long(move |remote| {
            let make = |handle| FileRequest::Sync { handle, data_only };
            reply_empty!(reply, remote.on_file(caller, handle.0, make));
        });
    }

    fn statfs(&self, request: &Request, ino: INodeNo, reply: ReplyStatfs) {
        let space = self.remote.bytes(who(request), ino.0, |node| FileRequest::GetSpace { node });
        match space.and_then(|space| value_of::<FileSpace>(&space)) {
            Ok(s) => reply.statfs(
                s.blocks,
                s.free,
                s.available,
                s.files,
                s.files_free,
                s.block_size,
                s.longest_name,
                s.fragment_size,
            ),
            Err(e) => reply.error(errno(e)),
        }
    }

    fn setxattr(
        &self,
        request: &Request,
        ino: INodeNo,
        name: &OsStr,
        value: &[u8],
        flags: i32,
        _position: u32,
        reply: ReplyEmpty,
    ) {
        let (name, flags) = (name.as_bytes(), flags.cast_unsigned());
        let make = |node| FileRequest::SetExtended { node, name, value, flags };
        reply_empty!(reply, self.remote.bytes(who(request), ino.0, make));
    }

    fn getxattr(&self, request: &Request, ino: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        let name = name.as_bytes();
        // The kernel asks for `security.capability` before each write. No server has others than those of `user.`.
        if !name.starts_with(b"user.") {
            return reply.error(Errno::EOPNOTSUPP);
        }
        let value = self.remote.bytes(who(request), ino.0, |node| FileRequest::GetExtended { node, name });
        reply_extended(reply, value, size);
    }

    fn listxattr(&self, request: &Request, ino: INodeNo, size: u32, reply: ReplyXattr) {
        let names = self.remote.bytes(who(request), ino.0, |node| FileRequest::ListExtended { node });
        reply_extended(reply, names, size);
    }

    fn removexattr(&self, request: &Request, ino: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let name = name.as_bytes();
        let make = |node| FileRequest::RemoveExtended { node, name };
        reply_empty!(reply, self.remote.bytes(who(request), ino.0, make));
    }

    fn access(&self, request: &Request, ino: INodeNo, mask: AccessFlags, reply: ReplyEmpty) {
        let mask = mask.bits().cast_unsigned();
        let make = |node| FileRequest::CheckAccess { node, mask };
        reply_empty!(reply, self.remote.bytes(who(request), ino.0, make));
    }

    fn create(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        _umask: u32,
        flags: i32,
        reply: ReplyCreate,
    ) {
        let make = |name| self.remote.create(who(request), request.pid(), parent.0, name, mode, flags.cast_unsigned());
        match EntryName::new(name.as_bytes()).and_then(make) {
            Ok(CreatedFile { node, attributes, handle, request, .. }) => {
                let (shown, handle) = (attr(node, &attributes), FileHandle(handle));
                self.remote.send_attributes(node, Some((parent.0, name.as_bytes())), &attributes, request, |ttl| {
                    reply.created(&ttl, &shown, Generation(0), handle, FopenFlags::empty());
                });
            }
            Err(e) => reply.error(errno(e)),
        }
    }

    fn getlk(
        &self,
        request: &Request,
        _ino: INodeNo,
        handle: FileHandle,
        owner: LockOwner,
        start: u64,
        end: u64,
        typ: i32,
        _pid: u32,
        reply: ReplyLock,
    ) {
        let make = |handle| FileRequest::GetLock { handle, owner: owner.0, start, end, kind: typ };
        let held = self.remote.on_file(who(request), handle.0, make).and_then(|held| held.into_vec());
        match held.and_then(|held| value_of::<FileLock>(&held)) {
            Ok(held) => reply.locked(held.start, held.end, held.kind, 0),
            Err(e) => reply.error(errno(e)),
        }
    }

    fn setlk(
        &self,
        request: &Request,
        ino: INodeNo,
        handle: FileHandle,
        owner: LockOwner,
        start: u64,
        end: u64,
        typ: i32,
        pid: u32,
        sleep: bool,
        reply: ReplyEmpty,
    ) {
        let range = FileLock { start, end, kind: typ };
        let outcome = self.remote.set_lock(handle.0, owner.0, range);
        if outcome.is_ok() {
            lock_changed(&self.remote, &self.notifier, ino, request.pid());
        }
        if !sleep || outcome != Err(SystemErrno::AGAIN) {
            reply_empty!(reply, outcome);
            return;
        }
        if self.waiters.fetch_add(1, Ordering::AcqRel) >= MOST_WAITERS {
            self.waiters.fetch_sub(1, Ordering::AcqRel);
            reply.error(Errno::ENOLCK);
            return;
        }
        let (remote, waiters) = (Arc::clone(&self.remote), Arc::clone(&self.waiters));
        let (notifier, thread) = (Arc::clone(&self.notifier), request.pid());
        // A thread for each that waits, so that the threads of the mount stay free for those who could give the lock up.
        std::thread::spawn(move || {
            let outcome = locks::wait(pid, || remote.set_lock(handle.0, owner.0, range));
            waiters.fetch_sub(1, Ordering::AcqRel);
            if outcome.is_ok() {
                lock_changed(&remote, &notifier, ino, thread);
            }
            reply_empty!(reply, outcome);
        });
    }

    fn fallocate(
        &self,
        request: &Request,
        _ino: INodeNo,
        handle: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let (mode, caller, thread) = (mode.cast_unsigned(), who(request), request.pid());
        self.run_long(move |remote| {
            let make = |handle| FileRequest::Allocate { handle, mode, offset, len: length };
            let outcome = remote.on_file(caller, handle.0, make);
            if outcome.is_ok() && mode & FallocateFlags::KEEP_SIZE.bits() == 0 {
                remote.extended(handle.0, offset.saturating_add(length), thread);
            }
            reply_empty!(reply, outcome);
        });
    }

    fn lseek(&self, request: &Request, _ino: INodeNo, handle: FileHandle, offset: i64, whence: i32, reply: ReplyLseek) {
        let Ok(offset) = u64::try_from(offset) else { return reply.error(Errno::ENXIO) };
        let make = |handle| FileRequest::Seek { handle, offset, whence: whence.cast_unsigned() };
        let found = self.remote.on_file(who(request), handle.0, make).and_then(|found| found.into_vec());
        match found.and_then(|found| value_of::<u64>(&found)) {
            Ok(found) => reply.offset(found.cast_signed()),
            Err(e) => reply.error(errno(e)),
        }
    }

    fn copy_file_range(
        &self,
        request: &Request,
        _ino_in: INodeNo,
        handle_in: FileHandle,
        offset_in: u64,
        _ino_out: INodeNo,
        handle_out: FileHandle,
        offset_out: u64,
        len: u64,
        _flags: CopyFileRangeFlags,
        reply: ReplyWrite,
    ) {
        let (caller, thread) = (who(request), request.pid());
        let (from, to) = ((handle_in.0, offset_in), (handle_out.0, offset_out));
        self.run_long(move |remote| match remote.copy_range(caller, thread, from, to, len) {
            Ok(copied) => reply.written(u32::try_from(copied).unwrap_or(u32::MAX)),
            Err(e) => reply.error(errno(e)),
        });
    }
}

fn reply_extended(reply: ReplyXattr, outcome: Result<Vec<u8>, SystemErrno>, size: u32) {
    match outcome {
        Err(e) => reply.error(errno(e)),
        Ok(bytes) if size == 0 => reply.size(bytes.len() as u32),
        Ok(bytes) if bytes.len() > size as usize => reply.error(Errno::ERANGE),
        Ok(bytes) => reply.data(&bytes),
    }
}
