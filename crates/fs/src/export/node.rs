//! Requests about names and nodes.

use super::actor::Actor;
use super::session::ExportSession;
use super::tables::{ExportedNode, OpenHandle};
use super::{DIRECTORY, KIND, REGULAR, SYMLINK, attributes, lock};
use crate::wire::{
    EntryName, FileAttributes, FileEntry, FileRequest, FileSpace, LARGEST_VALUE, LONGEST_NAME, LONGEST_TARGET,
    OpenedFile, change,
};
use rustix::fd::{AsFd, AsRawFd, OwnedFd};
use rustix::fs::{
    Access, AtFlags, CWD, FileType, Gid, Mode, OFlags, RenameFlags, ResolveFlags, Timespec, Timestamps, Uid, XattrFlags,
};
use rustix::io::Errno;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

/// How long a file must be unchanged until its times tell all changes (protocol N7). The kernel's coarse clock moves at least every 10 ms.
const SETTLED_NANOS: i128 = 50_000_000;

/// Flags of `open` that a client may give.
const OPEN_FLAGS: OFlags =
    OFlags::RDWR.union(OFlags::WRONLY).union(OFlags::APPEND).union(OFlags::TRUNC).union(OFlags::SYNC);
/// The flags of every open of data. `O_NONBLOCK` keeps an open from waiting for a lease.
const ALWAYS: OFlags = OFlags::CLOEXEC.union(OFlags::NOCTTY).union(OFlags::NONBLOCK);
/// How an entry of a directory is reached. See [`super`].
const RESOLVE: ResolveFlags = ResolveFlags::BENEATH
    .union(ResolveFlags::NO_MAGICLINKS)
    .union(ResolveFlags::NO_XDEV)
    .union(ResolveFlags::NO_SYMLINKS);

/// A descriptor of kind `O_PATH` for one entry of a directory, whatever the entry is.
pub(super) fn entry_of(parent: impl AsFd, name: &[u8]) -> Result<OwnedFd, Errno> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    // With O_PATH and O_NOFOLLOW a symbolic link is opened itself, also under RESOLVE_NO_SYMLINKS.
    again(|| rustix::fs::openat2(parent.as_fd(), name, flags, Mode::empty(), RESOLVE))
}

/// `openat2` fails with `EAGAIN` if a rename elsewhere keeps it from being sure that it stayed beneath its directory.
fn again<T>(mut call: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
    for _ in 0..100 {
        match call() {
            Err(Errno::AGAIN) => std::thread::yield_now(),
            other => return other,
        }
    }
    Err(Errno::AGAIN)
}

/// The path by which the kernel finds the file of a descriptor again. It names a descriptor of this process, never a name of a client's.
pub(super) fn proc_path(fd: impl AsFd) -> String {
    format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd())
}

/// Opens the data of a node. Only for regular files and directories: other kinds could block, or do something by being opened.
pub(super) fn reopen(node: &ExportedNode, flags: OFlags) -> Result<OwnedFd, Errno> {
    match node.kind {
        REGULAR | DIRECTORY => rustix::fs::open(proc_path(&node.path), flags | ALWAYS, Mode::empty()),
        SYMLINK => Err(Errno::LOOP),
        _ => Err(Errno::NXIO),
    }
}

impl ExportSession {
    /// The node of a descriptor, as a reply mentions it.
    pub(super) fn mention(&self, path: OwnedFd) -> Result<FileEntry, Errno> {
        self.mention_node(path).map(|(_, entry)| entry)
    }

    fn mention_node(&self, path: OwnedFd) -> Result<(Arc<ExportedNode>, FileEntry), Errno> {
        let found = attributes(&path)?;
        let (node, dropped) = {
            let mut tables = lock(&self.tables);
            (tables.mention(path, (found.device, found.inode), found.mode & KIND)?, tables.take_dropped())
        };
        drop(dropped);
        let entry = FileEntry { node: node.number, attributes: found };
        Ok((node, entry))
    }

    fn directory(&self, number: u64) -> Result<Arc<ExportedNode>, Errno> {
        let node = self.node(number)?;
        if node.kind == DIRECTORY { Ok(node) } else { Err(Errno::NOTDIR) }
    }

    pub(super) fn lookup(&self, parent: u64, name: EntryName<'_>) -> Result<FileEntry, Errno> {
        let parent = self.directory(parent)?;
        self.mention(entry_of(&parent.path, name.bytes())?)
    }

    pub(super) fn get_attributes(&self, node: u64, handle: u64) -> Result<FileAttributes, Errno> {
        match handle {
            0 => attributes(&self.node(node)?.path),
            handle => attributes(&self.handle(handle)?.file),
        }
    }

    pub(super) fn set_attributes(&self, actor: &Actor, request: &FileRequest<'_>) -> Result<FileAttributes, Errno> {
        let FileRequest::SetAttributes {
            node,
            handle,
            mask,
            mode,
            uid,
            gid,
            size,
            accessed,
            accessed_nanos,
            modified,
            modified_nanos,
        } = *request
        else {
            return Err(Errno::BADMSG);
        };
        self.must_be_writable()?;
        let open = if handle == 0 { None } else { Some(self.handle(handle)?) };
        let node = match &open {
            Some(open) => Arc::clone(&open.node),
            None => self.node(node)?,
        };
        let has = |bit: u32| mask & bit != 0;
        if has(change::MODE) {
            if node.kind == SYMLINK {
                return Err(Errno::OPNOTSUPP);
            }
            let mode = self.client.permitted_mode(actor, mode);
            rustix::fs::chmodat(CWD, proc_path(&node.path), Mode::from_raw_mode(mode), AtFlags::empty())?;
        }
        if has(change::UID) || has(change::GID) {
            let id = |bit, id: u32| {
                if !has(bit) {
                    Ok(None)
                } else if id == u32::MAX {
                    Err(Errno::INVAL)
                } else {
                    Ok(Some(id))
                }
            };
            let (uid, gid) = (id(change::UID, uid)?.map(Uid::from_raw), id(change::GID, gid)?.map(Gid::from_raw));
            rustix::fs::chownat(&node.path, c"", uid, gid, AtFlags::EMPTY_PATH | AtFlags::SYMLINK_NOFOLLOW)?;
        }
        if has(change::SIZE) {
            let size = i64::try_from(size).map_err(|_| Errno::FBIG)?.cast_unsigned();
            match (&open, node.kind) {
                (_, DIRECTORY) => return Err(Errno::ISDIR),
                (_, kind) if kind != REGULAR => return Err(Errno::INVAL),
                (Some(open), _) => match rustix::fs::ftruncate(&open.file, size) {
                    // It is open for reading alone: `open` with O_RDONLY and O_TRUNC, to which the client's kernel has agreed.
                    Err(Errno::INVAL) => rustix::fs::ftruncate(reopen(&node, OFlags::WRONLY)?, size)?,
                    done => done?,
                },
                (None, _) => rustix::fs::ftruncate(reopen(&node, OFlags::WRONLY)?, size)?,
            }
        }
        if mask & (change::ACCESSED | change::MODIFIED | change::ACCESSED_NOW | change::MODIFIED_NOW) != 0 {
            let time = |given, now, seconds, nanos: u32| match (has(given), has(now)) {
                (_, true) => Ok(Timespec { tv_sec: 0, tv_nsec: rustix::fs::UTIME_NOW }),
                (true, _) if nanos >= 1_000_000_000 => Err(Errno::INVAL),
                (true, _) => Ok(Timespec { tv_sec: seconds, tv_nsec: i64::from(nanos) }),
                _ => Ok(Timespec { tv_sec: 0, tv_nsec: rustix::fs::UTIME_OMIT }),
            };
            let times = Timestamps {
                last_access: time(change::ACCESSED, change::ACCESSED_NOW, accessed, accessed_nanos)?,
                last_modification: time(change::MODIFIED, change::MODIFIED_NOW, modified, modified_nanos)?,
            };
            rustix::fs::utimensat(&node.path, c"", &times, AtFlags::EMPTY_PATH)?;
        }
        match &open {
            Some(open) => attributes(&open.file),
            None => attributes(&node.path),
        }
    }

    pub(super) fn read_link(&self, node: u64) -> Result<Vec<u8>, Errno> {
        let node = self.node(node)?;
        if node.kind != SYMLINK {
            return Err(Errno::INVAL);
        }
        let target = rustix::fs::readlinkat(&node.path, c"", Vec::with_capacity(256))?.into_bytes();
        if target.len() > LONGEST_TARGET { Err(Errno::NAMETOOLONG) } else { Ok(target) }
    }

    pub(super) fn make_node(
        &self,
        actor: &Actor,
        parent: u64,
        name: EntryName<'_>,
        mode: u32,
    ) -> Result<FileEntry, Errno> {
        self.must_be_writable()?;
        let kind = match FileType::from_raw_mode(mode) {
            kind @ (FileType::RegularFile | FileType::Fifo | FileType::Socket) => kind,
            // A device would be the server's.
            _ => return Err(Errno::PERM),
        };
        let permitted = self.client.permitted_mode(actor, mode);
        let parent = self.directory(parent)?;
        rustix::fs::mknodat(&parent.path, name.bytes(), kind, Mode::from_raw_mode(permitted), 0)?;
        self.mention(entry_of(&parent.path, name.bytes())?)
    }

    pub(super) fn make_directory(
        &self,
        actor: &Actor,
        parent: u64,
        name: EntryName<'_>,
        mode: u32,
    ) -> Result<FileEntry, Errno> {
        self.must_be_writable()?;
        let parent = self.directory(parent)?;
        rustix::fs::mkdirat(&parent.path, name.bytes(), Mode::from_raw_mode(self.client.permitted_mode(actor, mode)))?;
        self.mention(entry_of(&parent.path, name.bytes())?)
    }

    pub(super) fn make_symlink(&self, parent: u64, name: EntryName<'_>, target: &[u8]) -> Result<FileEntry, Errno> {
        self.must_be_writable()?;
        if target.len() > LONGEST_TARGET {
            return Err(Errno::NAMETOOLONG);
        }
        let parent = self.directory(parent)?;
        rustix::fs::symlinkat(target, &parent.path, name.bytes())?;
        self.mention(entry_of(&parent.path, name.bytes())?)
    }

    pub(super) fn remove(&self, parent: u64, name: EntryName<'_>, is_directory: bool) -> Result<(), Errno> {
        self.must_be_writable()?;
        let flags = if is_directory { AtFlags::REMOVEDIR } else { AtFlags::empty() };
        rustix::fs::unlinkat(&self.directory(parent)?.path, name.bytes(), flags)
    }

    pub(super) fn rename(
        &self,
        parent: u64,
        name: EntryName<'_>,
        new_parent: u64,
        new_name: EntryName<'_>,
        flags: u32,
    ) -> Result<(), Errno> {
        self.must_be_writable()?;
        let flags =
            RenameFlags::from_bits(flags).filter(|flags| !flags.contains(RenameFlags::WHITEOUT)).ok_or(Errno::INVAL)?;
        let (parent, new_parent) = (self.directory(parent)?, self.directory(new_parent)?);
        rustix::fs::renameat_with(&parent.path, name.bytes(), &new_parent.path, new_name.bytes(), flags)
    }

    pub(super) fn make_link(&self, node: u64, parent: u64, name: EntryName<'_>) -> Result<FileEntry, Errno> {
        self.must_be_writable()?;
        let (node, parent) = (self.node(node)?, self.directory(parent)?);
        if node.kind == DIRECTORY {
            return Err(Errno::PERM);
        }
        rustix::fs::linkat(CWD, proc_path(&node.path), &parent.path, name.bytes(), AtFlags::SYMLINK_FOLLOW)?;
        self.mention(entry_of(&parent.path, name.bytes())?)
    }

    /// Fails with `EREMCHG` unless the node has this name (protocol N7.4). Another file may get the name directly afterwards, so this is for
    /// clients that remember names, and protects nothing.
    pub(super) fn must_be_named(&self, node: u64, parent: u64, name: EntryName<'_>) -> Result<(), Errno> {
        let (node, parent) = (self.node(node)?, self.directory(parent)?);
        let found = rustix::fs::statat(&parent.path, name.bytes(), AtFlags::SYMLINK_NOFOLLOW);
        if found.is_ok_and(|found| (found.st_dev, found.st_ino) == node.identity) { Ok(()) } else { Err(Errno::REMCHG) }
    }

    pub(super) fn open(&self, node: u64, flags: u32, actor: Actor) -> Result<OpenedFile, Errno> {
        let node = self.node(node)?;
        if node.kind == DIRECTORY {
            return Err(Errno::ISDIR);
        }
        self.open_node(node, flags, actor)
    }

    fn open_node(&self, node: Arc<ExportedNode>, flags: u32, actor: Actor) -> Result<OpenedFile, Errno> {
        let flags = OFlags::from_bits_retain(flags) & OPEN_FLAGS;
        if flags.intersects(OFlags::WRONLY | OFlags::RDWR | OFlags::TRUNC) {
            self.must_be_writable()?;
        }
        let file = reopen(&node, flags)?;
        self.opened(OpenHandle::new(file, flags, node, actor))
    }

    fn opened(&self, open: OpenHandle) -> Result<OpenedFile, Errno> {
        let found = attributes(&open.file)?;
        let handle = lock(&self.tables).open(open)?;
        Ok(OpenedFile { handle, is_settled: u32::from(is_settled(&found)), attributes: found })
    }

    pub(super) fn create(
        &self,
        parent: u64,
        name: EntryName<'_>,
        mode: u32,
        flags: u32,
        actor: Actor,
    ) -> Result<(FileEntry, OpenedFile), Errno> {
        self.must_be_writable()?;
        let parent = self.directory(parent)?;
        let given = OFlags::from_bits_retain(flags);
        let fresh = (given & OPEN_FLAGS) | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | ALWAYS;
        let mode = Mode::from_raw_mode(self.client.permitted_mode(&actor, mode));
        match again(|| rustix::fs::openat2(&parent.path, name.bytes(), fresh, mode, RESOLVE)) {
            Ok(file) => {
                // A descriptor of the very file, not of what has the name by now.
                let path = rustix::fs::open(proc_path(&file), OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
                let (node, entry) = self.mention_node(path)?;
                Ok((entry, self.opened(OpenHandle::new(file, fresh, node, actor))?))
            }
            Err(Errno::EXIST) if !given.contains(OFlags::EXCL) => {
                let entry = self.mention(entry_of(&parent.path, name.bytes())?)?;
                let opened = self.open(entry.node, flags, actor);
                if opened.is_err() {
                    self.forget(entry.node, 1);
                }
                Ok((entry, opened?))
            }
            Err(e) => Err(e),
        }
    }

    pub(super) fn open_directory(&self, node: u64, actor: Actor) -> Result<OpenedFile, Errno> {
        let node = self.directory(node)?;
        let file = reopen(&node, OFlags::DIRECTORY)?;
        self.opened(OpenHandle::new(file, OFlags::DIRECTORY, node, actor))
    }

    pub(super) fn space(&self, node: u64) -> Result<FileSpace, Errno> {
        let found = rustix::fs::fstatvfs(&self.node(node)?.path)?;
        Ok(FileSpace {
            blocks: found.f_blocks,
            free: found.f_bfree,
            available: found.f_bavail,
            files: found.f_files,
            files_free: found.f_ffree,
            block_size: u32::try_from(found.f_bsize).unwrap_or(4096),
            fragment_size: u32::try_from(found.f_frsize).unwrap_or(4096),
            longest_name: u32::try_from(found.f_namemax).unwrap_or(LONGEST_NAME as u32),
        })
    }

    pub(super) fn check_access(&self, node: u64, mask: u32) -> Result<(), Errno> {
        let access = Access::from_bits(mask).ok_or(Errno::INVAL)?;
        if access.contains(Access::WRITE_OK) {
            self.must_be_writable()?;
        }
        let node = self.node(node)?;
        if node.kind == SYMLINK {
            return Ok(());
        }
        rustix::fs::accessat(CWD, proc_path(&node.path), access, AtFlags::EACCESS)
    }

    pub(super) fn get_extended(&self, node: u64, name: &[u8]) -> Result<Vec<u8>, Errno> {
        let node = self.with_extended(node, name)?;
        let mut value = vec![0; LARGEST_VALUE];
        let len = rustix::fs::getxattr(proc_path(&node.path), name, &mut value[..])?;
        value.truncate(len);
        Ok(value)
    }

    pub(super) fn set_extended(&self, node: u64, name: &[u8], value: &[u8], flags: u32) -> Result<(), Errno> {
        self.must_be_writable()?;
        let flags = XattrFlags::from_bits(flags).ok_or(Errno::INVAL)?;
        if value.len() > LARGEST_VALUE {
            return Err(Errno::TOOBIG);
        }
        let node = self.with_extended(node, name)?;
        rustix::fs::setxattr(proc_path(&node.path), name, value, flags)
    }

    pub(super) fn list_extended(&self, node: u64) -> Result<Vec<u8>, Errno> {
        let node = self.node(node)?;
        if node.kind == SYMLINK {
            return Ok(Vec::new());
        }
        let mut names = vec![0; LARGEST_VALUE];
        let len = rustix::fs::listxattr(proc_path(&node.path), &mut names[..])?;
        let shown = names[..len].split_inclusive(|byte| *byte == 0).filter(|name| name.starts_with(b"user."));
        Ok(shown.flatten().copied().collect())
    }

    pub(super) fn remove_extended(&self, node: u64, name: &[u8]) -> Result<(), Errno> {
        self.must_be_writable()?;
        let node = self.with_extended(node, name)?;
        rustix::fs::removexattr(proc_path(&node.path), name)
    }

    /// The node, if it may have this extended attribute. Others than `user.` give rights, or belong to the server's kernel.
    fn with_extended(&self, node: u64, name: &[u8]) -> Result<Arc<ExportedNode>, Errno> {
        if name.len() > LONGEST_NAME {
            return Err(Errno::RANGE);
        }
        let node = self.node(node)?;
        if !name.starts_with(b"user.") || !matches!(node.kind, REGULAR | DIRECTORY) {
            return Err(Errno::OPNOTSUPP);
        }
        Ok(node)
    }
}

/// Whether a file was last changed long enough ago that another change would show in its times.
fn is_settled(found: &FileAttributes) -> bool {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_nanos() as i128);
    let changed = i128::from(found.changed.seconds) * 1_000_000_000 + i128::from(found.changed.nanos);
    now - changed > SETTLED_NANOS
}
