//! The files of the system below a folder. The maker of an image chose the links in it, so no link leads out of the folder.

use std::ffi::CString;
use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use crate::exit::{CommandFailure, Context};
use crate::reopen;

/// Most bytes of a file that are read.
const MOST: u64 = 1 << 20;
/// How often a lookup is repeated that meets a change of the tree.
const TRIES: usize = 16;

/// A file that is only named: nothing of it has been opened.
const NAMED: OFlags = OFlags::PATH.union(OFlags::CLOEXEC);
const FOLDER: OFlags = NAMED.union(OFlags::DIRECTORY);

/// The root folder of a system.
#[derive(Debug)]
pub(super) struct SystemRoot {
    path: PathBuf,
    fd: OwnedFd,
}

impl SystemRoot {
    pub(super) fn open(path: &Path) -> Result<Self, CommandFailure> {
        let fd = rustix::fs::openat(CWD, path, FOLDER, Mode::empty()).map_err(io::Error::from);
        Ok(Self { path: path.to_owned(), fd: fd.context(format_args!("cannot open {}", path.display()))? })
    }

    /// Whether it is the system that runs here.
    pub(super) fn is_running(&self) -> bool {
        self.path == Path::new("/")
    }

    /// How messages name a file of it.
    pub(super) fn shown(&self, path: &Path) -> PathBuf {
        self.path.join(path.strip_prefix("/").unwrap_or(path))
    }

    /// Opens what a path means in that system, where `/` is the root folder.
    fn lookup(&self, path: &Path, flags: OFlags) -> io::Result<OwnedFd> {
        let path = path.strip_prefix("/").unwrap_or(path);
        if self.is_running() {
            // The same for kernels before openat2 (Linux 5.6).
            return Ok(rustix::fs::openat(&self.fd, path, flags, Mode::empty())?);
        }
        let within = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
        for _ in 1..TRIES {
            match rustix::fs::openat2(&self.fd, path, flags, Mode::empty(), within) {
                Err(Errno::AGAIN) => {}
                other => return Ok(other?),
            }
        }
        Ok(rustix::fs::openat2(&self.fd, path, flags, Mode::empty(), within)?)
    }

    /// Whether there is something at a path, be it a link to nothing.
    pub(super) fn has(&self, path: &Path) -> bool {
        self.lookup(path, NAMED | OFlags::NOFOLLOW).is_ok()
    }

    /// A regular file, for reading.
    pub(super) fn file(&self, path: &Path) -> io::Result<File> {
        reopen::regular(self.lookup(path, NAMED)?.as_fd())
    }

    /// The text of a file; none if it is masked, as systemd calls a link to /dev/null.
    pub(super) fn text(&self, path: &Path) -> io::Result<String> {
        let named = self.lookup(path, NAMED | OFlags::NOFOLLOW)?;
        if rustix::fs::readlinkat(&named, "", Vec::new()).is_ok_and(|target| target.as_bytes() == b"/dev/null") {
            return Ok(String::new());
        }
        let mut text = String::new();
        self.file(path)?.take(MOST).read_to_string(&mut text)?;
        Ok(text)
    }

    /// The names in a folder; none if it is not there.
    pub(super) fn names(&self, folder: &Path) -> Vec<CString> {
        let entries = self
            .lookup(folder, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC)
            .and_then(|fd| Ok(Dir::new(fd)?))
            .into_iter()
            .flatten();
        entries.flatten().map(|entry| entry.file_name().to_owned()).collect()
    }

    /// A folder that is there.
    pub(super) fn folder(&self, path: &Path) -> io::Result<HeldFolder> {
        Ok(HeldFolder(self.lookup(path, FOLDER)?))
    }

    /// A folder, which is made if it is missing.
    pub(super) fn made_folder(&self, path: &Path) -> io::Result<HeldFolder> {
        let mut folder = self.folder(Path::new("."))?;
        for part in path.ancestors().collect::<Vec<_>>().into_iter().rev().skip(1) {
            folder = match (self.folder(part), part.file_name()) {
                (Err(error), Some(name)) if error.kind() == io::ErrorKind::NotFound => {
                    folder.make(Path::new(name))?;
                    self.folder(part)?
                }
                (other, _) => other?,
            };
        }
        Ok(folder)
    }
}

/// A folder that is held open. A name is looked up in it and nowhere else: none of these calls follows a link.
#[derive(Debug)]
pub(super) struct HeldFolder(OwnedFd);

impl HeldFolder {
    /// Makes a folder in it, unless something of that name is there.
    fn make(&self, name: &Path) -> io::Result<()> {
        match rustix::fs::mkdirat(&self.0, name, Mode::from_raw_mode(0o755)) {
            Err(Errno::EXIST) | Ok(()) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    pub(super) fn folder(&self, name: &str) -> io::Result<Self> {
        Ok(Self(rustix::fs::openat(&self.0, name, FOLDER | OFlags::NOFOLLOW, Mode::empty())?))
    }

    pub(super) fn made_folder(&self, name: &str) -> io::Result<Self> {
        self.make(Path::new(name))?;
        self.folder(name)
    }

    /// The bytes of a regular file; `None` if something else has the name.
    pub(super) fn read(&self, name: &str) -> io::Result<Option<Vec<u8>>> {
        let named = rustix::fs::openat(&self.0, name, NAMED | OFlags::NOFOLLOW, Mode::empty())?;
        if FileType::from_raw_mode(rustix::fs::fstat(&named)?.st_mode) != FileType::RegularFile {
            return Ok(None);
        }
        let mut bytes = Vec::new();
        reopen::regular(named.as_fd())?.take(MOST).read_to_end(&mut bytes)?;
        Ok(Some(bytes))
    }

    /// Writes a file that all users may read. A reader never sees it half written.
    pub(super) fn write(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let (fd, temporary) = self.temporary(name)?;
        let mut file = File::from(fd);
        let written = file.write_all(bytes).and_then(|()| {
            rustix::fs::fchmod(&file, Mode::from_raw_mode(0o644))?;
            Ok(rustix::fs::renameat(&self.0, &temporary, &self.0, name)?)
        });
        if written.is_err() {
            let _ = self.remove(&temporary);
        }
        written
    }

    fn temporary(&self, name: &str) -> io::Result<(OwnedFd, String)> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mut number = 0;
        loop {
            let temporary = format!(".{name}.{}.{number}", std::process::id());
            match rustix::fs::openat(&self.0, &temporary, flags, Mode::from_raw_mode(0o600)) {
                Err(Errno::EXIST) if number < TRIES => number += 1,
                other => return Ok((other?, temporary)),
            }
        }
    }

    pub(super) fn remove(&self, name: &str) -> io::Result<()> {
        Ok(rustix::fs::unlinkat(&self.0, name, AtFlags::empty())?)
    }

    /// Removes a folder in it, if that is empty.
    pub(super) fn remove_folder(&self, name: &str) -> io::Result<()> {
        Ok(rustix::fs::unlinkat(&self.0, name, AtFlags::REMOVEDIR)?)
    }
}
