//! Listing directories.

use super::lock;
use super::node::entry_of;
use super::session::ExportSession;
use crate::wire::{DirectoryEntry, FileAttributes, FileEntry, FileField, LARGEST_DATA};
use rustix::fs::{FileType, RawDir, SeekFrom};
use rustix::io::Errno;
use std::mem::MaybeUninit;

/// Bytes of entries that are asked of the kernel at a time.
const ROOM: usize = 32 << 10;

impl ExportSession {
    pub(super) fn read_directory(&self, handle: u64, offset: u64, len: u32) -> Result<Vec<u8>, Errno> {
        let open = self.handle(handle)?;
        if !open.is_directory {
            return Err(Errno::NOTDIR);
        }
        let len = len.min(LARGEST_DATA / 4) as usize;
        let _listing = lock(&open.listing);
        rustix::fs::seek(&open.file, SeekFrom::Start(offset))?;
        let mut room = vec![MaybeUninit::uninit(); ROOM];
        let mut entries = RawDir::new(&open.file, &mut room);
        let mut reply = Vec::with_capacity(len.min(ROOM) * 2);
        while reply.len() < len {
            let entry = match entries.next() {
                None => break,
                Some(Ok(entry)) => entry,
                Some(Err(e)) if reply.is_empty() => return Err(e),
                Some(Err(_)) => break,
            };
            let name = entry.file_name().to_bytes();
            let node = match name {
                b"." | b".." => FileEntry { node: 0, attributes: FileAttributes::default() },
                // An entry that has gone meanwhile, or that is out of reach, is listed by its name alone.
                name => entry_of(&open.node.path, name).and_then(|path| self.mention(path)).unwrap_or_default(),
            };
            let kind = match entry.file_type() {
                FileType::Unknown => 0,
                known => known.as_raw_mode(),
            };
            let (offset, inode) = (entry.next_entry_cookie(), entry.ino());
            DirectoryEntry { offset, inode, kind, entry: node, name }.put(&mut reply);
        }
        Ok(reply)
    }
}
