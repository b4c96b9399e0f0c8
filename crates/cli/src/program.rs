//! A program to run: its path, its parts, and the obstacles to accelerating its sockets.

pub(crate) mod elf;
pub(crate) mod libraries;
pub(crate) mod obstacle;
pub(crate) mod privilege;
pub(crate) mod resolve;
pub(crate) mod worker;

use std::ffi::OsStr;
use std::path::PathBuf;

use crate::exit::CommandFailure;
use elf::Elf;
use obstacle::RingObstacle;

/// A program, looked at from outside: nothing of it is run.
#[derive(Debug)]
pub(crate) struct Program {
    /// The file that the command names.
    pub(crate) path: PathBuf,
    /// If that is a script: its interpreter, and the interpreter's, the last being a program.
    pub(crate) interpreters: Vec<PathBuf>,
    /// The program's ELF facts; `None` if it is no ELF file.
    pub(crate) elf: Option<Elf>,
}

impl Program {
    /// Looks for `command` as the shell would.
    pub(crate) fn find(command: &OsStr) -> Result<Self, CommandFailure> {
        let path = resolve::find(command)?;
        let interpreters = resolve::interpreters(&path)?;
        let elf = Elf::read(interpreters.last().unwrap_or(&path))?;
        Ok(Self { path, interpreters, elf })
    }

    /// The file whose code will run: the program, or the interpreter of the script.
    pub(crate) fn binary(&self) -> &PathBuf {
        self.interpreters.last().unwrap_or(&self.path)
    }

    /// The obstacles that keep the library out of it, the most important first; empty if there are none.
    pub(crate) fn obstacles(&self) -> Vec<RingObstacle> {
        let mut all = Vec::new();
        match &self.elf {
            None => all.push(RingObstacle::NotElf),
            Some(elf) => all.extend(elf.obstacle()),
        }
        all.extend(privilege::of(self.binary()).map(RingObstacle::Privileged));
        all
    }
}
