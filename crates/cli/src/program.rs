//! A program to run: its path, its parts, and the obstacles to accelerating its sockets.

pub(crate) mod elf;
pub(crate) mod libraries;
pub(crate) mod obstacle;
pub(crate) mod privilege;
pub(crate) mod resolve;
pub(crate) mod worker;

use std::ffi::OsStr;
use std::path::PathBuf;

use crate::args::Global;
use crate::exit::CommandFailure;
use crate::session;
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

    /// The name under which the library joins in this program, if the program has this process's number. `run` hands its own number on.
    pub(crate) fn domain(&self, global: &Global) -> String {
        let default = || {
            let name = self.binary().file_name().unwrap_or_default().to_string_lossy().into_owned();
            format!("{}-{}", stem(&name), std::process::id())
        };
        session::chosen_name(global).map_or_else(default, str::to_owned)
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

/// What the library keeps of a program's name for the name of its domain (protocol C5).
fn stem(program: &str) -> String {
    let begins = |sign: &char| sign.is_ascii_alphanumeric();
    let fits = |sign: &char| begins(sign) || matches!(sign, '.' | '_' | '-');
    let stem: String = program.chars().take(48).filter(fits).skip_while(|sign| !begins(sign)).collect();
    if stem.is_empty() { "program".into() } else { stem }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stem_of_a_program_is_a_valid_name() {
        for (program, expected) in [("redis-cli", "redis-cli"), ("-bash", "bash"), ("a b", "ab"), ("..", "program")] {
            assert_eq!(stem(program), expected);
        }
    }
}
