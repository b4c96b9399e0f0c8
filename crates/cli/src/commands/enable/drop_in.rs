//! The drop-in of a service: written whole, and removed only as it was written.
//!
//! Its second line has a checksum of all that follows. A file with another sum has been changed since, and a file without one is not
//! ours: neither is touched.

use std::io;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::system_root::{HeldFolder, SystemRoot};
use crate::exit::{Code, CommandFailure, Context};

/// The name of the drop-in in the unit's folder.
pub(super) const FILE: &str = "50-partywall.conf";

/// Where an administrator's units are.
const UNITS: &str = "etc/systemd/system";

const SUM: &str = "# sha256: ";

/// The file for one unit.
pub(super) struct DropIn<'a> {
    root: &'a SystemRoot,
    /// The name of its folder.
    folder: String,
}

/// The content at the file's path.
enum Found {
    Nothing,
    /// The file as this program wrote it.
    Ours,
    /// A file that is not ours, or that was changed since.
    Foreign,
}

impl<'a> DropIn<'a> {
    pub(super) fn of(root: &'a SystemRoot, unit: &str) -> Self {
        Self { root, folder: format!("{unit}.d") }
    }

    pub(super) fn path(&self) -> PathBuf {
        self.root.shown(&Path::new(UNITS).join(&self.folder).join(FILE))
    }

    /// Fails if something is there that was not written here, or not like this.
    pub(super) fn check_unchanged(&self) -> Result<(), CommandFailure> {
        match self.look()?.0 {
            Found::Nothing | Found::Ours => Ok(()),
            Found::Foreign => Err(self.foreign()),
        }
    }

    /// Writes the file. A reader never sees it half written.
    pub(super) fn write(&self, unit: &str, variables: &[(&str, String)]) -> Result<(), CommandFailure> {
        let folder = self.root.made_folder(Path::new(UNITS)).and_then(|units| units.made_folder(&self.folder));
        let written = folder.and_then(|folder| folder.write(FILE, text(unit, variables).as_bytes()));
        written.context(format_args!("cannot write {}", self.path().display()))
    }

    /// Removes it, and its folder if nothing else is there.
    pub(super) fn remove(&self, unit: &str) -> Result<(), CommandFailure> {
        match self.look()? {
            (Found::Ours, Some((units, folder))) => {
                folder.remove(FILE).context(format_args!("cannot remove {}", self.path().display()))?;
                // With files of others it stays.
                let _ = units.remove_folder(&self.folder);
                Ok(())
            }
            (Found::Foreign, _) => Err(self.foreign()),
            _ => {
                let message = format!("{unit} is not enabled: {} is not there", self.path().display());
                Err(CommandFailure::new(Code::Refused, message))
            }
        }
    }

    /// The file that is there, and the held folders of units and of the file itself, through which it was examined.
    fn look(&self) -> Result<(Found, Option<(HeldFolder, HeldFolder)>), CommandFailure> {
        let looked = || -> io::Result<_> {
            let units = self.root.folder(Path::new(UNITS))?;
            let folder = units.folder(&self.folder)?;
            let found = match folder.read(FILE)? {
                Some(bytes) if is_as_written(&bytes) => Found::Ours,
                _ => Found::Foreign,
            };
            Ok((found, Some((units, folder))))
        };
        match looked() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok((Found::Nothing, None)),
            other => other.context(format_args!("cannot read {}", self.path().display())),
        }
    }

    fn foreign(&self) -> CommandFailure {
        let path = self.path();
        CommandFailure::general(format!("{} is not as `partywall enable` wrote it", path.display()))
            .hint("keep what you need of it under another name, remove the file, and try again")
    }
}

fn text(unit: &str, variables: &[(&str, String)]) -> String {
    let lines: String =
        variables.iter().map(|(name, value)| format!("Environment=\"{name}={}\"\n", quoted(value))).collect();
    let rest = format!("[Service]\n{lines}");
    format!(
        "# Written by `partywall enable`; `partywall disable {unit}` removes it.\n{SUM}{}\n{rest}",
        sum(rest.as_bytes())
    )
}

/// As systemd reads it between quotes, where `%` begins a specifier.
fn quoted(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('%', "%%")
}

fn is_as_written(bytes: &[u8]) -> bool {
    let mut lines = bytes.splitn(3, |byte| *byte == b'\n');
    let (Some(_), Some(said), Some(rest)) = (lines.next(), lines.next(), lines.next()) else { return false };
    said.strip_prefix(SUM.as_bytes()).is_some_and(|said| said == sum(rest).as_bytes())
}

fn sum(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changed_drop_in_is_not_taken_for_ours() {
        let text = text("x.service", &[("LD_PRELOAD", "/lib.so".to_owned())]);
        assert!(is_as_written(text.as_bytes()));
        assert!(!is_as_written(text.replace("/lib.so", "/other.so").as_bytes()));
        assert!(!is_as_written(format!("{text}# mine\n").as_bytes()));
        assert!(!is_as_written(b"[Service]\nEnvironment=LD_PRELOAD=/lib.so\n"));
        assert!(!is_as_written(b""));
    }

    #[test]
    fn value_is_quoted_for_systemd() {
        let text = text("x.service", &[("PARTYWALL_BROKER", "/a %i\"\\b".to_owned())]);
        assert!(text.ends_with("[Service]\nEnvironment=\"PARTYWALL_BROKER=/a %%i\\\"\\\\b\"\n"), "{text}");
    }
}
