//! Where a lab keeps what is costly to make: kernels, images, verdicts; and the logs of its guests.
//!
//! Everything in it is named after what it was made from, so that nothing in it is ever out of date. Entries that were not wanted for long make
//! room for new ones.

use crate::LabError;
use rustix::fs::FlockOperation;
use sha2::{Digest, Sha256};
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// Entries of a folder that stay, those that were wanted last. A whole run of the tests makes fewer images.
const KEPT: usize = 32;
/// An entry that was wanted within this time stays in any case: a machine may be about to open it.
const FRESH: Duration = Duration::from_secs(3600);

/// The folder that keeps packages and images between runs.
#[derive(Debug, Clone)]
pub struct Cache {
    root: PathBuf,
}

impl Cache {
    /// `$PARTYWALL_LAB_CACHE`, else `lab/` in the target folder that this program was built in, else in the user's cache.
    pub fn open() -> Result<Self, LabError> {
        let named = std::env::var_os("PARTYWALL_LAB_CACHE").map(PathBuf::from);
        let root =
            named.or_else(in_target).or_else(user_folder).unwrap_or_else(|| std::env::temp_dir().join("partywall-lab"));
        fs::create_dir_all(&root).map_err(LabError::file("create", &root))?;
        Ok(Self { root })
    }

    /// A path in it, the folder made if need be.
    pub fn path(&self, folder: &str, name: &str) -> Result<PathBuf, LabError> {
        let folder = self.root.join(folder);
        fs::create_dir_all(&folder).map_err(LabError::file("create", &folder))?;
        Ok(folder.join(name))
    }

    /// The path, made by `make` if it is not there: into a temporary sibling first, so that it is whole or absent.
    ///
    /// Others who want the same wait for it to be made.
    pub fn entry(
        &self,
        folder: &str,
        name: &str,
        make: impl FnOnce(&Path) -> Result<(), LabError>,
    ) -> Result<PathBuf, LabError> {
        let path = self.path(folder, name)?;
        let lock_path = self.root.join("lock");
        let lock = File::create(&lock_path).map_err(LabError::file("create", &lock_path))?;
        rustix::fs::flock(&lock, FlockOperation::LockExclusive)
            .map_err(|e| LabError::file("lock", &lock_path)(e.into()))?;
        if path.exists() {
            // For `forget_unused`. Where it is refused, the entry only counts as older than it is.
            let _ = File::open(&path).and_then(|entry| entry.set_modified(SystemTime::now()));
            return Ok(path);
        }
        let draft = path.with_file_name(format!(".{name}.{}", std::process::id()));
        remove(&draft);
        let made = make(&draft).and_then(|()| fs::rename(&draft, &path).map_err(LabError::file("rename", &draft)));
        if made.is_err() {
            remove(&draft);
        }
        made?;
        if let Some(folder) = path.parent() {
            forget_unused(folder, SystemTime::now());
        }
        Ok(path)
    }
}

/// Removes all entries of a folder except those that were wanted last or lately. The cache is locked. A file that a machine has open stays for it.
fn forget_unused(folder: &Path, now: SystemTime) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    let wanted = |entry: fs::DirEntry| Some((entry.metadata().ok()?.modified().ok()?, entry.path()));
    let mut entries: Vec<_> = entries.flatten().filter_map(wanted).collect();
    entries.sort();
    let too_many = entries.len().saturating_sub(KEPT);
    for (wanted, path) in entries.into_iter().take(too_many) {
        // A clock that was set back makes it fresh.
        if now.duration_since(wanted).is_ok_and(|age| age > FRESH) {
            remove(&path);
        }
    }
}

/// The hash of files and words that names an entry.
#[derive(Debug, Default)]
pub(crate) struct ContentHash(Sha256);

impl ContentHash {
    pub(crate) fn word(&mut self, word: &str) {
        self.0.update((word.len() as u64).to_le_bytes());
        self.0.update(word);
    }

    pub(crate) fn file(&mut self, path: &Path) -> Result<(), LabError> {
        let mut file = File::open(path).map_err(LabError::file("open", path))?;
        let mut buf = vec![0; 1 << 20];
        loop {
            match file.read(&mut buf).map_err(LabError::file("read", path))? {
                0 => return Ok(()),
                n => self.0.update(&buf[..n]),
            }
        }
    }

    pub(crate) fn name(self) -> String {
        self.0.finalize().iter().take(16).map(|b| format!("{b:02x}")).collect()
    }
}

fn remove(path: &Path) {
    // Whichever it is; most often it is not there.
    let _ = fs::remove_dir_all(path);
    let _ = fs::remove_file(path);
}

fn in_target() -> Option<PathBuf> {
    let program = std::env::current_exe().ok()?;
    // Cargo marks its target folder as a cache.
    program.ancestors().find(|dir| dir.join("CACHEDIR.TAG").exists()).map(|dir| dir.join("lab"))
}

fn user_folder() -> Option<PathBuf> {
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let home = || std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache"));
    cache.or_else(home).map(|dir| dir.join("partywall/lab"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    fn age(path: &Path, age: Duration) {
        File::open(path).unwrap().set_modified(SystemTime::now() - age).unwrap();
    }

    #[test]
    fn entries_not_wanted_for_long_make_room() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache { root: folder.path().to_owned() };
        let make = |name: &str| {
            let made =
                cache.entry("image", name, |draft| fs::write(draft, name).map_err(LabError::file("write", draft)));
            made.unwrap()
        };
        let first = make("first");
        let second = make("second");
        for n in 0..KEPT as u32 {
            age(&make(&n.to_string()), 50 * HOUR - n * HOUR / 2);
        }
        age(&first, 99 * HOUR);
        age(&second, 98 * HOUR);
        // This one is wanted again.
        make("first");
        let last = make("last");
        assert!(first.exists() && last.exists() && !second.exists());
        assert!(!last.with_file_name("0").exists() && !last.with_file_name("1").exists());
        assert_eq!(fs::read_dir(last.parent().unwrap()).unwrap().count(), KEPT);
    }

    #[test]
    fn fresh_entries_stay_however_many_there_are() {
        let folder = tempfile::tempdir().unwrap();
        let now = SystemTime::now();
        for n in 0..KEPT + 3 {
            fs::create_dir(folder.path().join(n.to_string())).unwrap();
        }
        forget_unused(folder.path(), now);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), KEPT + 3);
        forget_unused(folder.path(), now + 2 * HOUR);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), KEPT);
    }
}
