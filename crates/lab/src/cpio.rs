//! Archives that the kernel unpacks at boot (`newc`), written without root: owners are what the header says.

use std::io::{self, Write};

/// The kind of an archive's entry.
#[derive(Debug, Clone, Copy)]
pub(crate) enum EntryKind {
    Folder,
    Program,
    File,
    Link,
}

/// Writes an archive to `out`.
#[derive(Debug)]
pub(crate) struct Archive<W> {
    out: W,
    entries: u32,
}

impl<W: Write> Archive<W> {
    pub(crate) fn new(out: W) -> Self {
        Self { out, entries: 0 }
    }

    /// Adds an entry; `name` without a leading slash, its folder added before. A link's content is its target.
    pub(crate) fn add(&mut self, name: &str, kind: EntryKind, content: &[u8]) -> io::Result<()> {
        let mode = match kind {
            EntryKind::Folder => 0o040_755,
            EntryKind::Program => 0o100_755,
            EntryKind::File => 0o100_644,
            EntryKind::Link => 0o120_777,
        };
        self.entry(name, mode, content)
    }

    /// Ends the archive.
    pub(crate) fn finish(mut self) -> io::Result<W> {
        self.entry("TRAILER!!!", 0, &[])?;
        Ok(self.out)
    }

    fn entry(&mut self, name: &str, mode: u32, content: &[u8]) -> io::Result<()> {
        self.entries += 1;
        let size = u32::try_from(content.len()).map_err(|_| io::Error::other("a file of 4 GiB or more"))?;
        // ino mode uid gid nlink mtime size dev(2) rdev(2) namesize check
        let fields = [self.entries, mode, 0, 0, 1, 0, size, 0, 0, 0, 0, name.len() as u32 + 1, 0];
        let mut header = String::from("070701");
        for field in fields {
            header.push_str(&format!("{field:08x}"));
        }
        self.out.write_all(header.as_bytes())?;
        self.out.write_all(name.as_bytes())?;
        self.out.write_all(&[0])?;
        self.pad(header.len() + name.len() + 1)?;
        self.out.write_all(content)?;
        self.pad(content.len())
    }

    fn pad(&mut self, len: usize) -> io::Result<()> {
        self.out.write_all(&[0; 3][..len.next_multiple_of(4) - len])
    }
}
