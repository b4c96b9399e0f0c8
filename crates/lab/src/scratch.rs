//! Folders for sockets, whose paths must be short. A process that was killed leaves its folder; the next one removes it.

use crate::LabError;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

const PREFIX: &str = "partywall-lab-";

/// A new one, removed when it is dropped.
pub(crate) fn folder() -> Result<tempfile::TempDir, LabError> {
    let parent = std::env::temp_dir();
    sweep(&parent);
    tempfile::Builder::new()
        .prefix(&format!("{PREFIX}{}-", std::process::id()))
        .tempdir_in(&parent)
        .map_err(LabError::file("create a folder in", &parent))
}

/// Those of this process that are there.
pub(crate) fn own_folders(parent: &Path) -> Vec<PathBuf> {
    let own = format!("{PREFIX}{}-", std::process::id());
    let entries = fs::read_dir(parent).into_iter().flatten().flatten();
    let is_own = |path: &PathBuf| path.file_name().and_then(OsStr::to_str).is_some_and(|name| name.starts_with(&own));
    entries.map(|entry| entry.path()).filter(is_own).collect()
}

/// Removes the folders of processes that are gone.
fn sweep(parent: &Path) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let owner = name.to_str().and_then(|name| name.strip_prefix(PREFIX)?.split('-').next()?.parse::<u32>().ok());
        if owner.is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists()) {
            // It may be another user's, who will do it.
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_leftovers_of_killed_processes_are_removed() {
        let parent = tempfile::tempdir().unwrap();
        let folder = |name: &str| fs::create_dir(parent.path().join(name)).unwrap();
        let mine = format!("{PREFIX}{}-x", std::process::id());
        // Numbers of processes are below 2^22.
        for name in ["partywall-lab-9999999-x", "partywall-lab-other", "other-9999999-x", &mine] {
            folder(name);
        }
        sweep(parent.path());
        let mut left: Vec<_> = fs::read_dir(parent.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        left.sort();
        let mut expected = ["other-9999999-x", &mine, "partywall-lab-other"];
        expected.sort_unstable();
        assert_eq!(left, expected);
    }
}
