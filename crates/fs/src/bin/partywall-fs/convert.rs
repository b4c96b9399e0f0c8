//! Between the types of `fuser` and those of the protocol of files.

use fuser::{Errno, FileAttr, FileType, INodeNo, Request};
use partywall_fs::remote::Caller;
use partywall_fs::wire::{FileAttributes, FileTime};
use rustix::io::Errno as SystemErrno;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

pub(crate) fn who(request: &Request) -> Caller {
    (request.uid(), request.gid())
}

pub(crate) fn errno(e: SystemErrno) -> Errno {
    Errno::from_i32(e.raw_os_error())
}

pub(crate) fn time(time: FileTime) -> SystemTime {
    let nanos = Duration::from_nanos(u64::from(time.nanos.min(999_999_999)));
    let seconds = Duration::from_secs(time.seconds.unsigned_abs());
    let whole = if time.seconds < 0 { UNIX_EPOCH.checked_sub(seconds) } else { UNIX_EPOCH.checked_add(seconds) };
    whole.and_then(|whole| whole.checked_add(nanos)).unwrap_or(UNIX_EPOCH)
}

pub(crate) fn kind_of(mode: u32) -> FileType {
    match mode & 0o170_000 {
        0o040_000 => FileType::Directory,
        0o120_000 => FileType::Symlink,
        0o010_000 => FileType::NamedPipe,
        0o140_000 => FileType::Socket,
        0o020_000 => FileType::CharDevice,
        0o060_000 => FileType::BlockDevice,
        _ => FileType::RegularFile,
    }
}

pub(crate) fn attr(number: u64, found: &FileAttributes) -> FileAttr {
    FileAttr {
        ino: INodeNo(number),
        // A length that the kernel cannot have would be a server's lie.
        size: found.size.min(i64::MAX.cast_unsigned()),
        blocks: found.blocks,
        atime: time(found.accessed),
        mtime: time(found.modified),
        ctime: time(found.changed),
        crtime: time(found.born),
        kind: kind_of(found.mode),
        perm: (found.mode & 0o7777) as u16,
        nlink: found.links,
        uid: found.uid,
        gid: found.gid,
        // A device of the server's is nothing here.
        rdev: 0,
        blksize: found.block_size,
        flags: 0,
    }
}

/// Seconds and nanoseconds of a time that the kernel has sent, as the kernel has sent them.
///
/// `fuser` 0.18.0 takes the nanoseconds of a time before 1970 for nanoseconds before its second, so they come back from the distance to 1970.
pub(crate) fn parts(time: SystemTime) -> (i64, u32) {
    match time.duration_since(UNIX_EPOCH) {
        Ok(after) => (i64::try_from(after.as_secs()).unwrap_or(i64::MAX), after.subsec_nanos()),
        Err(before) => {
            let before = before.duration();
            (-i64::try_from(before.as_secs()).unwrap_or(i64::MAX), before.subsec_nanos())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_before_1970_are_those_of_the_kernel() {
        // As `fuser` reads them.
        let read = |seconds: i64, nanos| match u64::try_from(seconds) {
            Ok(seconds) => UNIX_EPOCH + Duration::new(seconds, nanos),
            Err(_) => UNIX_EPOCH - Duration::new(seconds.unsigned_abs(), nanos),
        };
        for (seconds, nanos) in [(0, 0), (5, 6), (-1, 999_999_999), (-1, 0), (-100, 5)] {
            assert_eq!(parts(read(seconds, nanos)), (seconds, nanos));
        }
        assert_eq!(time(FileTime { seconds: -1, nanos: 5 }), UNIX_EPOCH - Duration::from_nanos(999_999_995));
    }
}
