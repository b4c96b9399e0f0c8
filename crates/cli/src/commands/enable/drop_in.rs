//! The drop-in of a service: written whole, and removed only as it was written.
//!
//! Its second line has a checksum of all that follows. A file with another sum has been changed since, and a file without one is somebody else's:
//! neither is touched.

use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::exit::{Code, CommandFailure, Context};

/// The name of the drop-in in the unit's folder.
pub(super) const FILE: &str = "50-partywall.conf";

const SUM: &str = "# sha256: ";

/// The file for one unit.
pub(super) struct DropIn {
    folder: PathBuf,
}

/// What is at the file's place.
enum Found {
    Nothing,
    /// As it was written.
    Ours,
    /// Of somebody else, or changed since.
    Foreign,
}

impl DropIn {
    pub(super) fn of(root: &Path, unit: &str) -> Self {
        Self { folder: root.join("etc/systemd/system").join(format!("{unit}.d")) }
    }

    pub(super) fn path(&self) -> PathBuf {
        self.folder.join(FILE)
    }

    /// Fails if something is there that was not written here, or not like this.
    pub(super) fn check_unchanged(&self) -> Result<(), CommandFailure> {
        match self.look()? {
            Found::Nothing | Found::Ours => Ok(()),
            Found::Foreign => Err(self.foreign()),
        }
    }

    /// Writes it. Nobody finds it half written.
    pub(super) fn write(&self, unit: &str, variables: &[(&str, String)]) -> Result<(), CommandFailure> {
        let path = self.path();
        let failed = || format!("cannot write {}", path.display());
        std::fs::create_dir_all(&self.folder).context(failed())?;
        let mut file = tempfile::NamedTempFile::new_in(&self.folder).context(failed())?;
        file.write_all(text(unit, variables).as_bytes()).context(failed())?;
        file.as_file().set_permissions(std::fs::Permissions::from_mode(0o644)).context(failed())?;
        file.persist(&path).map_err(|error| error.error).context(failed())?;
        Ok(())
    }

    /// Removes it, and its folder if nothing else is there.
    pub(super) fn remove(&self, unit: &str) -> Result<(), CommandFailure> {
        match self.look()? {
            Found::Nothing => {
                let message = format!("{unit} is not enabled: {} is not there", self.path().display());
                Err(CommandFailure::new(Code::Refused, message))
            }
            Found::Foreign => Err(self.foreign()),
            Found::Ours => {
                std::fs::remove_file(self.path()).context(format_args!("cannot remove {}", self.path().display()))?;
                // With files of others it stays.
                let _ = std::fs::remove_dir(&self.folder);
                Ok(())
            }
        }
    }

    fn look(&self) -> Result<Found, CommandFailure> {
        let path = self.path();
        match std::fs::read(&path) {
            Ok(bytes) if path.is_symlink() || !is_as_written(&bytes) => Ok(Found::Foreign),
            Ok(_) => Ok(Found::Ours),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Found::Nothing),
            Err(error) => Err(error).context(format_args!("cannot read {}", path.display())),
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
