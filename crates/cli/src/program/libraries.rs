//! The libraries that a dynamically linked program will have, and what they want of the C library.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::Program;
use super::elf::Elf;

/// Everything that will be loaded at the start.
#[derive(Debug, Default)]
pub(crate) struct Loaded {
    /// Files that the loader found.
    pub(crate) paths: Vec<PathBuf>,
    /// The names of missing libraries.
    pub(crate) missing: Vec<String>,
    /// Symbols that the program and its libraries want of others, without those of the C library itself.
    pub(crate) imports: BTreeSet<String>,
}

impl Loaded {
    /// Asks the program's own loader, which lists without running anything of the program.
    pub(crate) fn of(program: &Program) -> Option<Self> {
        let elf = program.elf.as_ref()?;
        let loader = Path::new(elf.loader.as_deref()?);
        // Another would not know `--list`, and is not ours to run.
        let is_glibc = loader.file_name()?.to_str()?.starts_with("ld-linux");
        if !is_glibc || !loader.is_absolute() {
            return None;
        }
        let path = std::path::absolute(program.binary()).ok()?;
        let output =
            Command::new(loader).arg("--list").arg(path).env_remove("LD_PRELOAD").stdin(Stdio::null()).output();
        let mut loaded = Self::parse(&String::from_utf8_lossy(&output.ok()?.stdout));
        loaded.imports.clone_from(&elf.imports);
        for path in &loaded.paths {
            if let Ok(Some(library)) = Elf::read(path)
                && !is_libc(path)
            {
                loaded.imports.extend(library.imports);
            }
        }
        Some(loaded)
    }

    /// Lines are `NAME => PATH (0x...)`, `NAME => not found`, or `PATH (0x...)`.
    fn parse(text: &str) -> Self {
        let mut loaded = Self::default();
        for line in text.lines().map(str::trim) {
            let (name, found) = line.split_once(" => ").unwrap_or((line, line));
            let path = found.split(" (0x").next().unwrap_or(found);
            if found.starts_with("not found") {
                loaded.missing.push(name.to_owned());
            } else if path.starts_with('/') {
                loaded.paths.push(path.into());
            }
        }
        loaded
    }

    /// Whether a library of this name is among them, whatever its version: `liburing` for `liburing.so.2`.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.paths.iter().any(|path| stem(path) == Some(name))
    }

    /// The C library among them.
    pub(crate) fn libc(&self) -> Option<&PathBuf> {
        self.paths.iter().find(|path| stem(path) == Some("libc"))
    }
}

fn stem(path: &Path) -> Option<&str> {
    path.file_name()?.to_str()?.split(".so").next()
}

fn is_libc(path: &Path) -> bool {
    let theirs = ["libc", "libpthread", "libresolv", "libnss_files", "libanl"];
    stem(path).is_some_and(|name| theirs.contains(&name) || name.starts_with("ld-linux"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loader_output_is_parsed() {
        let loaded = Loaded::parse(
            "\tlinux-vdso.so.1 (0x00007ffd)\n\tliburing.so.2 => /usr/lib/liburing.so.2 (0x00007f)\n\tlibgone.so => not found\n\t/lib64/ld-linux-x86-64.so.2 (0x00007f)\n",
        );
        assert_eq!(loaded.missing, ["libgone.so"]);
        assert!(loaded.has("liburing") && !loaded.has("libssl"));
        assert_eq!(loaded.paths.len(), 2);
        assert_eq!(loaded.libc(), None);
    }

    #[test]
    fn this_program_has_a_libc() {
        let program = Program::find(std::env::current_exe().unwrap().as_os_str()).unwrap();
        let loaded = Loaded::of(&program).unwrap();
        let libc = Elf::read(loaded.libc().unwrap()).unwrap().unwrap();
        assert!(libc.versions_defined.contains("GLIBC_2.2.5") || libc.versions_defined.contains("GLIBC_2.17"));
    }
}
