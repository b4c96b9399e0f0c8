//! The messages of files (protocol N): requests, replies, and how both are laid out in bytes. Makes no system call.
//!
//! ```text
//!  request in a frame                              reply in a frame
//!  +--------+--------+--------+--------+           +--------+--------+--------+--------+
//!  | length | id     | number | uid    |           | length | id     | errno  | 0      |
//!  +--------+--------+--------+--------+           +--------+--------+--------+--------+
//!  | gid    | 0      | body ...        |           | body ...                          |
//!  +--------+--------+-----------------+           +-----------------------------------+
//!
//!  arguments of a call                             result of a call
//!  +-----------------+--------+--------+           +-----------------------------------+
//!  | session         | uid    | gid    |           | body ...                          |
//!  +-----------------+--------+--------+           +-----------------------------------+
//!  | body ...                          |           or the application's error, whose code is the errno
//!  +-----------------------------------+
//! ```
//!
//! Numbers are little-endian. A body holds the fields of its operation one after the other, without gaps; bytes of no fixed length come after
//! their length, in 32 bits. In a call, the number of the operation is the method.

use rustix::io::Errno;

/// The version that client and server must have in common (protocol N1).
pub const VERSION: u32 = 4;
/// The most bytes of a file that one request reads or writes (protocol N2).
pub const LARGEST_DATA: u32 = 1 << 20;
/// The most bytes of a body: the data of a write and its other fields.
pub const LARGEST_BODY: usize = LARGEST_DATA as usize + 4096;
/// The longest name of a directory entry, as Linux has it.
pub const LONGEST_NAME: usize = 255;
/// The longest target of a symbolic link, and the longest name of an extended attribute comes below it.
pub const LONGEST_TARGET: usize = 4095;
/// The largest value of an extended attribute, as Linux has it.
pub const LARGEST_VALUE: usize = 65_536;
/// The node of the exported directory.
pub const ROOT: u64 = 1;

/// A part of a body that can be written and read back. A reader checks what it reads.
pub trait FileField<'a>: Sized {
    /// Appends the bytes of the value.
    fn put(&self, to: &mut Vec<u8>);
    /// Takes a value from the front of `from`.
    ///
    /// # Errors
    /// `EBADMSG` if the bytes are no such value; `ENAMETOOLONG` and `EINVAL` for names.
    fn take(from: &mut &'a [u8]) -> Result<Self, Errno>;
}

macro_rules! numbers {
    ($($number:ty),*) => { $(
        impl FileField<'_> for $number {
            fn put(&self, to: &mut Vec<u8>) {
                to.extend_from_slice(&self.to_le_bytes());
            }

            fn take(from: &mut &[u8]) -> Result<Self, Errno> {
                let (bytes, rest) = from.split_first_chunk().ok_or(Errno::BADMSG)?;
                *from = rest;
                Ok(Self::from_le_bytes(*bytes))
            }
        }
    )* };
}
numbers!(u32, i32, u64, i64);

impl<'a> FileField<'a> for &'a [u8] {
    fn put(&self, to: &mut Vec<u8>) {
        (self.len() as u32).put(to);
        to.extend_from_slice(self);
    }

    fn take(from: &mut &'a [u8]) -> Result<Self, Errno> {
        let len = u32::take(from)? as usize;
        let (bytes, rest) = from.split_at_checked(len).ok_or(Errno::BADMSG)?;
        *from = rest;
        Ok(bytes)
    }
}

/// The name of one entry of a directory. It is not empty, has at most [`LONGEST_NAME`] bytes, no slash and no zero byte, and is neither `.` nor
/// `..`, so it names nothing outside its directory.
///
/// ```
/// use partywall_fs::wire::EntryName;
///
/// assert!(EntryName::new(b"notes.txt").is_ok());
/// for bad in [&b""[..], b".", b"..", b"a/b", b"/etc", b"a\0b", &[b'a'; 256]] {
///     assert!(EntryName::new(bad).is_err());
/// }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct EntryName<'a>(&'a [u8]);

impl<'a> EntryName<'a> {
    /// Checks a name.
    ///
    /// # Errors
    /// `ENAMETOOLONG` for a name that is too long, `EINVAL` for one that is not a single entry.
    pub fn new(name: &'a [u8]) -> Result<Self, Errno> {
        if name.len() > LONGEST_NAME {
            return Err(Errno::NAMETOOLONG);
        }
        if name.is_empty() || name == b"." || name == b".." || name.iter().any(|byte| matches!(byte, b'/' | 0)) {
            return Err(Errno::INVAL);
        }
        Ok(Self(name))
    }

    /// The bytes of the name.
    pub fn bytes(self) -> &'a [u8] {
        self.0
    }
}

impl<'a> FileField<'a> for EntryName<'a> {
    fn put(&self, to: &mut Vec<u8>) {
        self.0.put(to);
    }

    fn take(from: &mut &'a [u8]) -> Result<Self, Errno> {
        Self::new(<&[u8]>::take(from)?)
    }
}

macro_rules! requests {
    ($($(#[$doc:meta])* $number:literal $name:ident { $($field:ident: $kind:ty),* $(,)? })*) => {
        /// A client's request. The numbers are those of the table in protocol N4.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum FileRequest<'a> {
            $($(#[$doc])* #[expect(missing_docs, reason = "protocol N4 has the fields")] $name { $($field: $kind),* },)*
        }

        impl<'a> FileRequest<'a> {
            /// The numbers and names of all operations.
            pub const TABLE: &'static [(u32, &'static str)] = &[$(($number, stringify!($name))),*];

            /// The number of the operation.
            pub fn number(&self) -> u32 {
                match self { $(Self::$name { .. } => $number),* }
            }

            /// Appends the body to `to`.
            pub fn put(&self, to: &mut Vec<u8>) {
                match self { $(Self::$name { $($field),* } => { $($field.put(to);)* let _ = to; })* }
            }

            /// Reads the body of the operation with this number.
            ///
            /// # Errors
            /// `ENOSYS` for a number that is not in the table; `EBADMSG` for a body with too few or too many bytes; as [`EntryName::new`].
            pub fn read(number: u32, mut body: &'a [u8]) -> Result<Self, Errno> {
                let request = match number {
                    $($number => Self::$name { $($field: FileField::take(&mut body)?),* },)*
                    _ => return Err(Errno::NOSYS),
                };
                if body.is_empty() { Ok(request) } else { Err(Errno::BADMSG) }
            }
        }
    };
}

requests! {
    /// Begins a session, after the end of the session `previous` if that is not 0 (protocol N1.2). The first request of a stream, and only there.
    1 Hello { version: u32, previous: u64 }
    /// Finds an entry of a directory.
    2 Lookup { parent: u64, name: EntryName<'a> }
    /// Gives `count` mentions of a node back. Has no reply.
    3 Forget { node: u64, count: u64 }
    /// The attributes of a node, or of an open file if `handle` is not 0.
    4 GetAttributes { node: u64, handle: u64 }
    /// Changes those attributes that `mask` has a bit for ([`change`]).
    5 SetAttributes {
        node: u64, handle: u64, mask: u32, mode: u32, uid: u32, gid: u32, size: u64,
        accessed: i64, accessed_nanos: u32, modified: i64, modified_nanos: u32,
    }
    /// The target of a symbolic link.
    6 ReadLink { node: u64 }
    /// Makes a regular file, a FIFO or a socket.
    7 MakeNode { parent: u64, name: EntryName<'a>, mode: u32 }
    /// Makes a directory.
    8 MakeDirectory { parent: u64, name: EntryName<'a>, mode: u32 }
    /// Makes a symbolic link.
    9 MakeSymlink { parent: u64, name: EntryName<'a>, target: &'a [u8] }
    /// Removes an entry that is no directory.
    10 Unlink { parent: u64, name: EntryName<'a> }
    /// Removes an empty directory.
    11 RemoveDirectory { parent: u64, name: EntryName<'a> }
    /// Renames an entry; `flags` are those of `renameat2`, without `RENAME_WHITEOUT`.
    12 Rename { parent: u64, name: EntryName<'a>, new_parent: u64, new_name: EntryName<'a>, flags: u32 }
    /// Makes another name of a node.
    13 MakeLink { node: u64, parent: u64, name: EntryName<'a> }
    /// Opens a regular file; `flags` are those of `open`.
    14 Open { node: u64, flags: u32 }
    /// Makes a regular file if there is none of this name, and opens it.
    15 Create { parent: u64, name: EntryName<'a>, mode: u32, flags: u32 }
    /// Reads from an open file. The reply is the data: fewer bytes at the end of the file.
    16 Read { handle: u64, offset: u64, len: u32 }
    /// Writes to an open file, at its end if `flags` say so ([`write_flags`]). The data is the rest of the body and has no length before it
    /// ([`FileRequest::WRITE_HEADER`]).
    17 Write { handle: u64, offset: u64, flags: u32 }
    /// Gives up the POSIX locks of an owner on an open file: a descriptor was closed.
    18 Flush { handle: u64, owner: u64 }
    /// Closes an open file or directory, and gives up the owner's locks.
    19 Release { handle: u64, owner: u64 }
    /// Writes an open file or directory to the disk; its data alone if `data_only` is not 0.
    20 Sync { handle: u64, data_only: u32 }
    /// Opens a directory.
    21 OpenDirectory { node: u64 }
    /// Entries of an open directory from a position on: about `len` bytes of them.
    22 ReadDirectory { handle: u64, offset: u64, len: u32 }
    /// The state of the file system.
    23 GetSpace { node: u64 }
    /// An extended attribute.
    24 GetExtended { node: u64, name: &'a [u8] }
    /// Sets an extended attribute; `flags` are those of `setxattr`.
    25 SetExtended { node: u64, name: &'a [u8], value: &'a [u8], flags: u32 }
    /// The names of all extended attributes, each with a zero byte after it.
    26 ListExtended { node: u64 }
    /// Removes an extended attribute.
    27 RemoveExtended { node: u64, name: &'a [u8] }
    /// Whether the caller may access a node; `mask` is that of `access`.
    28 CheckAccess { node: u64, mask: u32 }
    /// A lock that conflicts with this one.
    29 GetLock { handle: u64, owner: u64, start: u64, end: u64, kind: i32 }
    /// Takes or gives up a lock, without waiting.
    30 SetLock { handle: u64, owner: u64, start: u64, end: u64, kind: i32 }
    /// Allocates or frees room of an open file; `mode` is that of `fallocate`.
    31 Allocate { handle: u64, mode: u32, offset: u64, len: u64 }
    /// The next data or hole of an open file.
    32 Seek { handle: u64, offset: u64, whence: u32 }
    /// Copies from one open file to another on the server.
    33 CopyRange { from: u64, from_offset: u64, to: u64, to_offset: u64, len: u64 }
    /// Opens a regular file that has this name in a directory (protocol N7.4); `flags` are those of `open`.
    34 OpenNamed { node: u64, flags: u32, parent: u64, name: EntryName<'a> }
    /// Opens a directory that has this name in another (protocol N7.4).
    35 OpenNamedDirectory { node: u64, parent: u64, name: EntryName<'a> }
}

impl FileRequest<'_> {
    /// The number of [`FileRequest::Hello`].
    pub const HELLO: u32 = 1;
    /// The number of [`FileRequest::Forget`].
    pub const FORGET: u32 = 3;
    /// The number of [`FileRequest::Read`].
    pub const READ: u32 = 16;
    /// The number of [`FileRequest::Write`].
    pub const WRITE: u32 = 17;
    /// Bytes of a write before its data.
    pub const WRITE_HEADER: usize = 20;

    /// Whether the operation with this number often waits for a disk for long: *Sync*, *Allocate* and *CopyRange*.
    pub const fn is_long(number: u32) -> bool {
        matches!(number, 20 | 31 | 33)
    }

    /// Whether a client sends the operation with this number by its stream, also if it has calls: the long ones, and *Flush*, *Release*, *GetLock* and
    /// *SetLock*, whose order a server keeps on a stream (protocol N3.2).
    pub const fn goes_by_stream(number: u32) -> bool {
        Self::is_long(number) || matches!(number, 18 | 19 | 29 | 30)
    }
}

/// Bits of the flags in [`FileRequest::Write`].
pub mod write_flags {
    /// The data is appended to the file, and `offset` has no effect (protocol N4.5).
    pub const APPEND: u32 = 1;
}

/// Bits of the mask in [`FileRequest::SetAttributes`].
pub mod change {
    /// The permissions.
    pub const MODE: u32 = 1;
    /// The user.
    pub const UID: u32 = 2;
    /// The group.
    pub const GID: u32 = 4;
    /// The length.
    pub const SIZE: u32 = 8;
    /// The time of the last access, to the time given.
    pub const ACCESSED: u32 = 16;
    /// The time of the last change of the data, to the time given.
    pub const MODIFIED: u32 = 32;
    /// The time of the last access, to the server's present.
    pub const ACCESSED_NOW: u32 = 64;
    /// The time of the last change of the data, to the server's present.
    pub const MODIFIED_NOW: u32 = 128;
}

macro_rules! records {
    ($($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident: $kind:ty),* $(,)? })*) => { $(
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
        pub struct $name {
            $($(#[$field_doc])* pub $field: $kind,)*
        }

        impl FileField<'_> for $name {
            fn put(&self, to: &mut Vec<u8>) {
                $(self.$field.put(to);)*
            }

            fn take(from: &mut &[u8]) -> Result<Self, Errno> {
                Ok(Self { $($field: FileField::take(from)?),* })
            }
        }
    )* };
}

records! {
    /// A time, in seconds and nanoseconds since 1970.
    FileTime {
        /// Seconds, negative before 1970.
        seconds: i64,
        /// Nanoseconds after them.
        nanos: u32,
    }

    /// The attributes of a file, as `statx` has them.
    FileAttributes {
        /// Its number in its file system.
        inode: u64,
        /// The number of its file system.
        device: u64,
        /// Length in bytes.
        size: u64,
        /// Allocated room, in units of 512 bytes.
        blocks: u64,
        /// Last access.
        accessed: FileTime,
        /// Last change of the data.
        modified: FileTime,
        /// Last change of the attributes.
        changed: FileTime,
        /// When it was made; zero where the file system does not say.
        born: FileTime,
        /// Kind and permissions.
        mode: u32,
        /// Number of names.
        links: u32,
        /// User.
        uid: u32,
        /// Group.
        gid: u32,
        /// The size that I/O should have.
        block_size: u32,
    }

    /// A node that the client may name from now on, until it forgets it.
    FileEntry {
        /// The number of the node in this session.
        node: u64,
        /// Its attributes.
        attributes: FileAttributes,
    }

    /// An open file.
    OpenedFile {
        /// The number of the open file in this session.
        handle: u64,
        /// 1 if the file has not changed for long enough that its times tell all changes (protocol N7), else 0.
        is_settled: u32,
        /// Its attributes at that time.
        attributes: FileAttributes,
    }

    /// The answer to [`FileRequest::Hello`].
    Welcome {
        /// The identity of the session in calls. It is a secret between client and server.
        session: u64,
        /// 1 if the export cannot be changed.
        is_read_only: u32,
        /// 1 if the same session can be used by calls.
        has_calls: u32,
        /// A number of the boot of the server's kernel. After another boot, what was not synced is lost (protocol N9.4).
        boot: u64,
        /// The exported directory.
        root: FileAttributes,
    }

    /// The state of a file system, as `statvfs` has it.
    FileSpace {
        /// Blocks of all.
        blocks: u64,
        /// Free blocks.
        free: u64,
        /// Blocks that are free for those without rights.
        available: u64,
        /// Files of all.
        files: u64,
        /// Files that can still be made.
        files_free: u64,
        /// Bytes of a block, as I/O should have it.
        block_size: u32,
        /// Bytes of a block, as counted here.
        fragment_size: u32,
        /// The longest name.
        longest_name: u32,
    }

    /// A lock on a range of a file.
    FileLock {
        /// First byte.
        start: u64,
        /// Last byte.
        end: u64,
        /// `F_RDLCK`, `F_WRLCK` or `F_UNLCK`.
        kind: i32,
    }
}

/// One entry of a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DirectoryEntry<'a> {
    /// The position behind it.
    pub offset: u64,
    /// The number that the directory has for it.
    pub inode: u64,
    /// `S_IFMT` bits of its kind; 0 if the directory does not say.
    pub kind: u32,
    /// Its node, which counts as mentioned; the number is 0 where the server did not look (`.` and `..`, and entries that are out of reach).
    pub entry: FileEntry,
    /// Its name, unchecked: `.` and `..` occur.
    pub name: &'a [u8],
}

impl<'a> FileField<'a> for DirectoryEntry<'a> {
    fn put(&self, to: &mut Vec<u8>) {
        self.offset.put(to);
        self.inode.put(to);
        self.kind.put(to);
        self.entry.put(to);
        self.name.put(to);
    }

    fn take(from: &mut &'a [u8]) -> Result<Self, Errno> {
        Ok(Self {
            offset: FileField::take(from)?,
            inode: FileField::take(from)?,
            kind: FileField::take(from)?,
            entry: FileField::take(from)?,
            name: FileField::take(from)?,
        })
    }
}

/// The bytes of a value.
pub fn bytes_of<'a>(value: &impl FileField<'a>) -> Vec<u8> {
    let mut bytes = Vec::new();
    value.put(&mut bytes);
    bytes
}

/// The value that is all of these bytes.
///
/// # Errors
/// As [`FileField::take`]; `EBADMSG` if bytes are left.
pub fn value_of<'a, T: FileField<'a>>(mut bytes: &'a [u8]) -> Result<T, Errno> {
    let value = T::take(&mut bytes)?;
    if bytes.is_empty() { Ok(value) } else { Err(Errno::BADMSG) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples() -> Vec<FileRequest<'static>> {
        let name = EntryName::new(b"name").unwrap();
        vec![
            FileRequest::Hello { version: VERSION, previous: 7 },
            FileRequest::Lookup { parent: 1, name },
            FileRequest::Rename { parent: 1, name, new_parent: 7, new_name: name, flags: 2 },
            FileRequest::MakeSymlink { parent: 1, name, target: b"../x" },
            FileRequest::SetExtended { node: 3, name: b"user.a", value: b"v", flags: 0 },
            FileRequest::Read { handle: u64::MAX, offset: 5, len: 6 },
            FileRequest::Seek { handle: 1, offset: 2, whence: 3 },
        ]
    }

    #[test]
    fn requests_round_trip_and_no_prefix_or_extension_is_read() {
        for request in samples() {
            let mut body = Vec::new();
            request.put(&mut body);
            assert_eq!(FileRequest::read(request.number(), &body), Ok(request));
            for cut in 0..body.len() {
                assert!(FileRequest::read(request.number(), &body[..cut]).is_err(), "{request:?} cut at {cut}");
            }
            body.push(0);
            assert_eq!(FileRequest::read(request.number(), &body), Err(Errno::BADMSG));
        }
    }

    #[test]
    fn every_operation_has_one_number_and_others_are_unknown() {
        let numbers: std::collections::BTreeSet<u32> = FileRequest::TABLE.iter().map(|(number, _)| *number).collect();
        assert_eq!(numbers.len(), FileRequest::TABLE.len());
        assert_eq!(FileRequest::read(0, &[]), Err(Errno::NOSYS));
        assert_eq!(FileRequest::read(numbers.len() as u32 + 1, &[]), Err(Errno::NOSYS));
    }

    #[test]
    fn kinds_of_operations_have_the_numbers_of_the_table() {
        let names_of = |is_of: fn(u32) -> bool| -> Vec<&str> {
            FileRequest::TABLE.iter().filter(|(number, _)| is_of(*number)).map(|(_, name)| *name).collect()
        };
        assert_eq!(names_of(FileRequest::is_long), ["Sync", "Allocate", "CopyRange"]);
        let by_stream = ["Flush", "Release", "Sync", "GetLock", "SetLock", "Allocate", "CopyRange"];
        assert_eq!(names_of(FileRequest::goes_by_stream), by_stream);
        let named = |number: u32| FileRequest::TABLE.iter().find(|(other, _)| *other == number).map(|(_, name)| *name);
        assert_eq!(named(FileRequest::FORGET), Some("Forget"));
    }

    #[test]
    fn lengths_that_lie_are_rejected() {
        let mut body = bytes_of(&1u64);
        body.extend_from_slice(&u32::MAX.to_le_bytes());
        body.extend_from_slice(b"abc");
        assert_eq!(FileRequest::read(2, &body), Err(Errno::BADMSG));
    }

    #[test]
    fn escaping_names_are_rejected() {
        for name in [&b".."[..], b".", b"", b"a/../..", b"x\0y"] {
            let mut body = bytes_of(&1u64);
            name.put(&mut body);
            assert_eq!(FileRequest::read(2, &body), Err(Errno::INVAL), "{name:?}");
        }
        let mut body = bytes_of(&1u64);
        (&[b'n'; 256][..]).put(&mut body);
        assert_eq!(FileRequest::read(2, &body), Err(Errno::NAMETOOLONG));
    }

    #[test]
    fn read_and_attributes_fit_into_the_record_of_a_call() {
        // Session, uid and gid take 16 of the 40 bytes that travel with a call.
        let mut body = Vec::new();
        FileRequest::Read { handle: 1, offset: 2, len: 3 }.put(&mut body);
        assert!(body.len() <= 24);
        body.clear();
        FileRequest::GetAttributes { node: 1, handle: 2 }.put(&mut body);
        assert!(body.len() <= 24);
        body.clear();
        FileRequest::Write { handle: 1, offset: 2, flags: write_flags::APPEND }.put(&mut body);
        assert_eq!(body.len(), FileRequest::WRITE_HEADER);
    }

    #[test]
    fn listings_round_trip() {
        let entry = DirectoryEntry { offset: 9, inode: 4, kind: 0o100_000, entry: FileEntry::default(), name: b"n" };
        let mut bytes = bytes_of(&entry);
        bytes.extend(bytes_of(&DirectoryEntry { name: b"..", ..entry }));
        let mut rest = &bytes[..];
        assert_eq!(DirectoryEntry::take(&mut rest), Ok(entry));
        assert_eq!(DirectoryEntry::take(&mut rest).map(|e| e.name), Ok(&b".."[..]));
        assert!(rest.is_empty());
    }
}
