//! This side's two ends: where bytes come from, and where they go.

use std::fs::File;
use std::io::IsTerminal;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use super::CatDirections;
use crate::exit::{CommandFailure, Context};

/// Input and output of `cat`, kept across connections.
#[derive(Debug)]
pub(super) struct Endpoints {
    pub(super) input: Input,
    pub(super) output: ByteSink,
}

impl Endpoints {
    /// Opens the input now, so that a wrong name is reported before connecting. The output is opened when it is needed.
    pub(super) fn open(
        input: Option<&Path>,
        output: Option<&Path>,
        ways: CatDirections,
    ) -> Result<Self, CommandFailure> {
        let input = match input {
            Some(path) if ways.send => Input {
                file: Some(File::open(path).context(format_args!("cannot open {}", path.display()))?),
                name: path.display().to_string(),
                at_end: AtomicBool::new(false),
            },
            _ => Input { file: None, name: "standard input".into(), at_end: AtomicBool::new(!ways.send) },
        };
        Ok(Self { input, output: ByteSink { path: output.map(Path::to_owned), file: OnceLock::new() } })
    }
}

/// Where bytes come from.
#[derive(Debug)]
pub(super) struct Input {
    file: Option<File>,
    /// The name that messages call the input by.
    pub(super) name: String,
    /// The input has ended; a later connection gets an empty input.
    at_end: AtomicBool,
}

impl Input {
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        match &self.file {
            Some(file) => file.as_fd(),
            None => rustix::stdio::stdin(),
        }
    }

    /// Whether the input is a terminal, where a user types it.
    pub(super) fn is_terminal(&self) -> bool {
        self.file.is_none() && std::io::stdin().is_terminal()
    }

    pub(super) fn is_at_end(&self) -> bool {
        self.at_end.load(Ordering::Relaxed)
    }

    pub(super) fn set_at_end(&self) {
        self.at_end.store(true, Ordering::Relaxed);
    }

    /// Bytes that are still to come, where the kernel knows.
    pub(super) fn expected(&self) -> Option<u64> {
        if self.is_at_end() {
            return None;
        }
        let stat = rustix::fs::fstat(self.fd()).ok()?;
        if rustix::fs::FileType::from_raw_mode(stat.st_mode) != rustix::fs::FileType::RegularFile {
            return None;
        }
        let at = rustix::fs::tell(self.fd()).ok()?;
        Some(u64::try_from(stat.st_size).ok()?.saturating_sub(at))
    }
}

/// Where bytes go.
#[derive(Debug)]
pub(super) struct ByteSink {
    path: Option<PathBuf>,
    file: OnceLock<File>,
}

impl ByteSink {
    /// Makes or empties the file, the first time.
    pub(super) fn prepare(&self) -> Result<(), CommandFailure> {
        if let (Some(path), None) = (&self.path, self.file.get()) {
            let file = File::create(path).context(format_args!("cannot write {}", path.display()))?;
            // One connection at once, so no other thread has set it.
            let _ = self.file.set(file);
        }
        Ok(())
    }

    /// Ends the output: the reader of our standard output sees its end now, while we may still send.
    pub(super) fn finish(&self) -> Result<(), CommandFailure> {
        if self.path.is_some() || self.is_terminal() {
            return Ok(());
        }
        // The descriptor stays taken, lest the next file that is opened becomes standard output.
        let null = File::options().write(true).open("/dev/null").context("cannot open /dev/null")?;
        rustix::stdio::dup2_stdout(&null).context("cannot close standard output")
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        match self.file.get() {
            Some(file) => file.as_fd(),
            None => rustix::stdio::stdout(),
        }
    }

    /// The name that messages call the output by.
    pub(super) fn name(&self) -> String {
        self.path.as_ref().map_or_else(|| "standard output".into(), |path| path.display().to_string())
    }

    /// Whether the output is a terminal.
    pub(super) fn is_terminal(&self) -> bool {
        self.path.is_none() && std::io::stdout().is_terminal()
    }
}
