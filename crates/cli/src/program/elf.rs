//! The facts in an ELF file: its architecture, its loader, and the libraries and symbols that it needs.

use std::collections::BTreeSet;
use std::fs::File;
use std::path::Path;

use object::read::elf::{FileHeader, ProgramHeader, SectionHeader, Sym};
use object::read::{FileKind, ReadCache, ReadRef};
use object::{Endianness, elf};

use super::obstacle::RingObstacle;
use crate::exit::{CommandFailure, Context};

/// The facts that matter.
#[derive(Debug, Clone, Default)]
pub(crate) struct Elf {
    /// Whether it is of 64 bits.
    pub(crate) wide: bool,
    /// Number of the machine.
    pub(crate) machine: u16,
    /// The loader it asks for; a static program asks for none.
    pub(crate) loader: Option<String>,
    /// Libraries it names.
    pub(crate) needed: Vec<String>,
    /// Symbols that it expects of others.
    pub(crate) imports: BTreeSet<String>,
    /// Symbol versions that it expects of others, as `GLIBC_2.34`.
    pub(crate) versions_needed: BTreeSet<String>,
    /// Symbol versions that it offers.
    pub(crate) versions_defined: BTreeSet<String>,
    /// Whether the Go toolchain made it.
    pub(crate) go: bool,
}

impl Elf {
    /// Reads a file; `None` if it is no ELF file, or may be run but not read.
    pub(crate) fn read(path: &Path) -> Result<Option<Self>, CommandFailure> {
        let file = match File::open(path) {
            Ok(file) => file,
            Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => return Ok(None),
            Err(error) => return Err(error).context(format_args!("cannot read {}", path.display())),
        };
        let data = ReadCache::new(file);
        let parsed = match FileKind::parse(&data) {
            Ok(FileKind::Elf64) => facts::<elf::FileHeader64<Endianness>, _>(&data, true),
            Ok(FileKind::Elf32) => facts::<elf::FileHeader32<Endianness>, _>(&data, false),
            _ => return Ok(None),
        };
        let failed = |e: object::read::Error| {
            CommandFailure::new(
                crate::exit::Code::NotExecutable,
                format!("{} is a damaged program: {e}", path.display()),
            )
        };
        parsed.map(Some).map_err(failed)
    }

    /// The obstacle that keeps a library of this build out of it.
    pub(super) fn obstacle(&self) -> Option<RingObstacle> {
        let loader = self.loader.as_deref().map(|path| path.rsplit('/').next().unwrap_or(path));
        if self.machine != MACHINE {
            // On x86-64, a 32-bit program is one of another machine, and runs all the same.
            return Some(if self.wide { RingObstacle::Machine } else { RingObstacle::Bits });
        }
        if !self.wide {
            return Some(RingObstacle::Bits);
        }
        if self.go {
            return Some(RingObstacle::Go);
        }
        match loader {
            None => Some(RingObstacle::Static),
            Some(name) if name.starts_with("ld-musl") => Some(RingObstacle::Musl),
            Some(_) => None,
        }
    }
}

/// The machine that we, and so the library, are built for.
#[cfg(target_arch = "x86_64")]
const MACHINE: u16 = 62;
#[cfg(target_arch = "aarch64")]
const MACHINE: u16 = 183;
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
compile_error!("say which ELF machine this is");

fn facts<'data, H, R>(data: R, wide: bool) -> Result<Elf, object::read::Error>
where
    H: FileHeader<Endian = Endianness>,
    R: ReadRef<'data>,
{
    let header = H::parse(data)?;
    let endian = header.endian()?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let mut found = Elf { wide, machine: header.e_machine(endian).0, ..Elf::default() };
    for segment in header.program_headers(endian, data)? {
        if let Some(loader) = segment.interpreter(endian, data)? {
            found.loader = Some(text(loader));
        }
    }
    // If the sections are stripped too, only the loader is left to look at.
    let sections = header.sections(endian, data)?;
    found.go = sections.iter().any(|section| {
        section.sh_type(endian) != elf::SHT_NULL
            && sections
                .section_name(endian, section)
                .is_ok_and(|name| name.starts_with(b".go.buildinfo") || name.starts_with(b".note.go."))
    });
    let dynamic = sections.dynamic_table(endian, data)?;
    for entry in dynamic.iter().filter(|entry| entry.tag == elf::DT_NEEDED) {
        found.needed.push(text(dynamic.string(entry)?));
    }
    let symbols = sections.symbols(endian, data, elf::SHT_DYNSYM)?;
    for symbol in symbols.iter().filter(|symbol| symbol.is_undefined(endian)) {
        found.imports.insert(text(symbol.name(endian, symbols.strings())?));
    }
    if let Some((mut needs, link)) = sections.gnu_verneed(endian, data)? {
        let strings = sections.strings(endian, data, link)?;
        while let Some((_, mut versions)) = needs.next()? {
            while let Some(version) = versions.next()? {
                found.versions_needed.insert(text(version.name(endian, strings)?));
            }
        }
    }
    if let Some((mut definitions, link)) = sections.gnu_verdef(endian, data)? {
        let strings = sections.strings(endian, data, link)?;
        while let Some((_, mut names)) = definitions.next()? {
            if let Some(name) = names.next()? {
                found.versions_defined.insert(text(name.name(endian, strings)?));
            }
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_program_can_be_accelerated() {
        let elf = Elf::read(&std::env::current_exe().unwrap()).unwrap().unwrap();
        assert!(elf.wide && elf.loader.is_some() && !elf.go, "{elf:?}");
        assert!(elf.needed.iter().any(|name| name == "libc.so.6"), "{:?}", elf.needed);
        assert!(elf.imports.contains("memcpy"), "{:?}", elf.imports);
        assert!(elf.versions_needed.iter().any(|version| version.starts_with("GLIBC_2.")), "{:?}", elf.versions_needed);
        assert_eq!(elf.obstacle(), None);
    }

    #[test]
    fn non_program_is_recognised() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, "#!/bin/sh\n").unwrap();
        assert!(Elf::read(&path).unwrap().is_none());
        std::fs::write(&path, "").unwrap();
        assert!(Elf::read(&path).unwrap().is_none());
        let ours = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        std::fs::write(&path, &ours[..4096]).unwrap();
        assert!(Elf::read(&path).unwrap_err().to_string().contains("damaged"));
    }

    #[test]
    fn elf_obstacles_are_recognised() {
        let good =
            Elf { wide: true, machine: MACHINE, loader: Some("/lib64/ld-linux-x86-64.so.2".into()), ..Elf::default() };
        assert_eq!(good.obstacle(), None);
        for (elf, obstacle) in [
            (Elf { loader: None, ..good.clone() }, RingObstacle::Static),
            (Elf { loader: None, go: true, ..good.clone() }, RingObstacle::Go),
            (Elf { go: true, ..good.clone() }, RingObstacle::Go),
            (Elf { loader: Some("/lib/ld-musl-x86_64.so.1".into()), ..good.clone() }, RingObstacle::Musl),
            (Elf { wide: false, machine: 3, ..good.clone() }, RingObstacle::Bits),
            (Elf { wide: false, ..good.clone() }, RingObstacle::Bits),
            (Elf { machine: 243, ..good.clone() }, RingObstacle::Machine),
        ] {
            assert_eq!(elf.obstacle(), Some(obstacle), "{elf:?}");
        }
    }
}
