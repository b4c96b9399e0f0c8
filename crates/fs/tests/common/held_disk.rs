//! A file system whose disk is slow: reads, writes and syncs of its files `held-0` to `held-9` have no answer until the test releases them. Its other
//! file is `free`. This process serves it.

use super::eventually;
use fuser::{
    BackgroundSession, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo,
    LockOwner, OpenFlags, ReplyAttr, ReplyData, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyWrite, Request, Session,
    SessionACL, WriteFlags,
};
use rustix::mount::{MountFlags, UnmountFlags};
use std::ffi::{CString, OsStr};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, UNIX_EPOCH};
use tempfile::TempDir;

/// Every file has this length.
pub(crate) const LENGTH: u64 = 64 << 10;
/// The number of `free`. Those of the other files follow.
const FREE: u64 = 2;

type HeldReply = Box<dyn FnOnce() + Send>;

/// `None` in it: nothing is held any more.
#[derive(Clone)]
struct HeldReplies(Arc<Mutex<Option<Vec<HeldReply>>>>);

impl HeldReplies {
    fn hold(&self, is_held: bool, reply: impl FnOnce() + Send + 'static) {
        match self.0.lock().unwrap().as_mut().filter(|_| is_held) {
            Some(held) => held.push(Box::new(reply)),
            None => reply(),
        }
    }
}

/// The mounted file system.
pub(crate) struct HeldDisk {
    held: HeldReplies,
    folder: TempDir,
    _session: Option<BackgroundSession>,
}

impl HeldDisk {
    /// `None`, and the reason on standard error, where nothing can be mounted.
    pub(crate) fn mount() -> Option<Self> {
        let device = File::options().read(true).write(true).open("/dev/fuse");
        let Some(device) = device.ok().filter(|_| rustix::process::geteuid().is_root()) else {
            eprintln!("SKIPPED: this test mounts a file system, which takes root and /dev/fuse");
            return None;
        };
        let folder = tempfile::Builder::new().prefix("partywall-held-").tempdir().unwrap();
        let options =
            CString::new(format!("fd={},rootmode=40000,user_id=0,group_id=0,allow_other", device.as_raw_fd()));
        let flags = MountFlags::NODEV | MountFlags::NOSUID;
        rustix::mount::mount("held", folder.path(), "fuse.held", flags, Some(&*options.unwrap())).unwrap();
        let held = HeldReplies(Arc::new(Mutex::new(Some(Vec::new()))));
        let mut disk = Self { held: held.clone(), folder, _session: None };
        let mut config = Config::default();
        config.acl = SessionACL::All;
        let session = Session::from_fd(HeldFilesystem(held), device.into(), SessionACL::All, config).unwrap();
        disk._session = Some(session.spawn().unwrap());
        Some(disk)
    }

    pub(crate) fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Waits until this many requests are held.
    pub(crate) fn wait_for(&self, count: usize) {
        eventually("no request is held", || {
            self.held.0.lock().unwrap().as_ref().is_some_and(|held| held.len() >= count)
        });
    }

    /// Answers what is held, and holds nothing any more.
    pub(crate) fn release(&self) {
        let held = self.held.0.lock().unwrap().take();
        held.into_iter().flatten().for_each(|reply| reply());
    }
}

impl Drop for HeldDisk {
    fn drop(&mut self) {
        self.release();
        // By force, so that files that this process still has open are closed without an answer at its end.
        let _ = rustix::mount::unmount(self.folder.path(), UnmountFlags::DETACH | UnmountFlags::FORCE);
    }
}

struct HeldFilesystem(HeldReplies);

fn attributes(ino: INodeNo) -> FileAttr {
    let is_directory = ino == INodeNo::ROOT;
    FileAttr {
        ino,
        size: if is_directory { 0 } else { LENGTH },
        blocks: 1,
        atime: UNIX_EPOCH,
        mtime: UNIX_EPOCH,
        ctime: UNIX_EPOCH,
        crtime: UNIX_EPOCH,
        kind: if is_directory { FileType::Directory } else { FileType::RegularFile },
        perm: 0o777,
        nlink: 1,
        uid: 0,
        gid: 0,
        rdev: 0,
        blksize: 4096,
        flags: 0,
    }
}

impl Filesystem for HeldFilesystem {
    fn lookup(&self, _request: &Request, _parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let number = match name.as_encoded_bytes() {
            b"free" => FREE,
            [b'h', b'e', b'l', b'd', b'-', digit @ b'0'..=b'9'] => FREE + 1 + u64::from(digit - b'0'),
            _ => return reply.error(Errno::ENOENT),
        };
        reply.entry(&Duration::from_secs(60), &attributes(INodeNo(number)), Generation(0));
    }

    fn getattr(&self, _request: &Request, ino: INodeNo, _handle: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&Duration::from_secs(60), &attributes(ino));
    }

    fn open(&self, _request: &Request, _ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        reply.opened(FileHandle(1), FopenFlags::FOPEN_DIRECT_IO);
    }

    fn read(
        &self,
        _request: &Request,
        ino: INodeNo,
        _handle: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let len = LENGTH.saturating_sub(offset).min(size.into()) as usize;
        self.0.hold(ino.0 > FREE, move || reply.data(&vec![b'a'; len]));
    }

    fn write(
        &self,
        _request: &Request,
        ino: INodeNo,
        _handle: FileHandle,
        _offset: u64,
        data: &[u8],
        _write_flags: WriteFlags,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let len = data.len() as u32;
        self.0.hold(ino.0 > FREE, move || reply.written(len));
    }

    fn flush(&self, _request: &Request, _ino: INodeNo, _handle: FileHandle, _owner: LockOwner, reply: ReplyEmpty) {
        reply.ok();
    }

    fn fsync(&self, _request: &Request, ino: INodeNo, _handle: FileHandle, _data_only: bool, reply: ReplyEmpty) {
        self.0.hold(ino.0 > FREE, move || reply.ok());
    }
}
