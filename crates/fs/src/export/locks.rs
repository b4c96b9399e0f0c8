//! Locks on ranges. Each owner of a client has a separate open file description, whose OFD locks conflict with those of other owners, other
//! clients, and programs of the server's machine. The kernel gives them up with the description.

use super::actor::act_as;
use super::lock;
use super::node::reopen;
use super::session::ExportSession;
use super::tables::OpenHandle;
use crate::wire::FileLock;
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;
use rustix::fd::OwnedFd;
use rustix::fs::OFlags;
use rustix::io::Errno;
use std::sync::Arc;

fn flock_of(start: u64, end: u64, kind: i32) -> Result<libc::flock, Errno> {
    let start = i64::try_from(start).map_err(|_| Errno::INVAL)?;
    let l_type = match kind {
        libc::F_RDLCK | libc::F_WRLCK | libc::F_UNLCK => kind as libc::c_short,
        _ => return Err(Errno::INVAL),
    };
    // The last byte of an endless range is the largest offset, and a length of 0 means the same.
    let l_len = match i64::try_from(end) {
        Ok(end) if end < start => return Err(Errno::INVAL),
        Ok(end) if end < i64::MAX => end - start + 1,
        _ => 0,
    };
    Ok(libc::flock { l_type, l_whence: libc::SEEK_SET as libc::c_short, l_start: start, l_len, l_pid: 0 })
}

fn errno(e: nix::errno::Errno) -> Errno {
    Errno::from_raw_os_error(e as i32)
}

/// The access mode that a file was opened with.
fn access_of(open: &OpenHandle) -> Result<OFlags, Errno> {
    Ok(rustix::fs::fcntl_getfl(&open.file)? & OFlags::RWMODE)
}

/// Whether an open file may have a lock: a shared one takes a file that can be read, an exclusive one a file that can be written.
fn check_access(open: &OpenHandle, kind: i32) -> Result<(), Errno> {
    let access = access_of(open)?;
    let is_granted = match kind {
        libc::F_RDLCK => access != OFlags::WRONLY,
        libc::F_WRLCK => access != OFlags::RDONLY,
        _ => true,
    };
    if is_granted { Ok(()) } else { Err(Errno::BADF) }
}

impl ExportSession {
    /// Another description of an open file, for the user that opened it. Its data is never used, only its locks: those of one owner may be taken
    /// by several open files of different access.
    fn description_of(&self, open: &OpenHandle) -> Result<OwnedFd, Errno> {
        act_as(&open.actor)?;
        let access = access_of(open)?;
        if self.read_only {
            return reopen(&open.node, access);
        }
        reopen(&open.node, OFlags::RDWR).or_else(|_| reopen(&open.node, access))
    }

    fn owner_locks(&self, open: &OpenHandle, owner: u64) -> Result<Arc<OwnedFd>, Errno> {
        let held = lock(&self.tables).locks_of(open.node.identity, owner);
        match held {
            Some(held) => Ok(held),
            None => {
                let file = self.description_of(open)?;
                lock(&self.tables).add_locks(open.node.identity, owner, file)
            }
        }
    }

    pub(super) fn get_lock(&self, handle: u64, owner: u64, start: u64, end: u64, kind: i32) -> Result<FileLock, Errno> {
        let open = self.handle(handle)?;
        let mut asked = flock_of(start, end, kind)?;
        let held = lock(&self.tables).locks_of(open.node.identity, owner);
        // An owner without locks asks through a description that is gone afterwards.
        let file = held.map_or_else(|| self.description_of(&open).map(Arc::new), Ok)?;
        fcntl(&*file, FcntlArg::F_OFD_GETLK(&mut asked)).map_err(errno)?;
        let start = asked.l_start.cast_unsigned();
        let end = if asked.l_len == 0 { i64::MAX } else { asked.l_start + asked.l_len - 1 };
        Ok(FileLock { start, end: end.cast_unsigned(), kind: i32::from(asked.l_type) })
    }

    pub(super) fn set_lock(&self, handle: u64, owner: u64, start: u64, end: u64, kind: i32) -> Result<(), Errno> {
        let open = self.handle(handle)?;
        if open.is_directory {
            return Err(Errno::BADF);
        }
        let asked = flock_of(start, end, kind)?;
        check_access(&open, kind)?;
        if kind == libc::F_UNLCK && lock(&self.tables).locks_of(open.node.identity, owner).is_none() {
            return Ok(());
        }
        let file = self.owner_locks(&open, owner)?;
        fcntl(&*file, FcntlArg::F_OFD_SETLK(&asked)).map(drop).map_err(errno)
    }
}
