//! The source tree: its root, and its files by kind.

use std::path::{Path, PathBuf};

use cargo_metadata::{CargoOpt, Metadata, MetadataCommand};
use walkdir::WalkDir;

use crate::error::Error;

/// Folders that hold nothing anyone wrote.
const SKIPPED: &[&str] = &["target", ".git", "corpus", "artifacts", "coverage"];

/// One text file of the tree.
#[derive(Clone, Debug)]
pub(crate) struct File {
    /// Relative to the root, with `/`.
    pub(crate) path: String,
    pub(crate) text: String,
}

/// The source tree.
#[derive(Debug)]
pub(crate) struct Tree {
    root: PathBuf,
}

impl Tree {
    pub(crate) fn new(root: impl Into<PathBuf>) -> Self {
        Tree { root: root.into() }
    }

    /// The workspace that this program was built from.
    pub(crate) fn this_workspace() -> Result<Self, Error> {
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        let root = here.parent().unwrap_or(here);
        Ok(Tree::new(root.canonicalize().map_err(|source| Error::Read { path: root.to_owned(), source })?))
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    pub(crate) fn read(&self, path: &str) -> Result<File, Error> {
        let full = self.root.join(path);
        let text = std::fs::read_to_string(&full).map_err(|source| Error::Read { path: full.clone(), source })?;
        Ok(File { path: path.to_owned(), text })
    }

    /// All files whose names end in `.extension`, in order of path.
    pub(crate) fn files(&self, extension: &str) -> Result<Vec<File>, Error> {
        let mut files = Vec::new();
        let walk = WalkDir::new(&self.root).sort_by_file_name().into_iter().filter_entry(|entry| {
            !(entry.file_type().is_dir() && SKIPPED.iter().any(|skipped| entry.file_name() == *skipped))
        });
        for entry in walk {
            let entry = entry?;
            if !entry.file_type().is_file() || entry.path().extension().is_none_or(|e| e != extension) {
                continue;
            }
            let relative = entry.path().strip_prefix(&self.root).unwrap_or(entry.path());
            files.push(self.read(&relative.to_string_lossy())?);
        }
        Ok(files)
    }

    /// The metadata of the workspace (and of `fuzz/` and `examples/`, separate ones), for this machine's target only.
    pub(crate) fn metadata(&self) -> Result<Vec<Metadata>, Error> {
        let host = host()?;
        ["Cargo.toml", "fuzz/Cargo.toml", "examples/Cargo.toml"]
            .into_iter()
            .map(|manifest| self.root.join(manifest))
            .filter(|manifest| manifest.exists())
            .map(|manifest| {
                MetadataCommand::new()
                    .manifest_path(manifest)
                    .features(CargoOpt::AllFeatures)
                    .other_options(["--filter-platform".to_owned(), host.clone()])
                    .exec()
                    .map_err(Error::from)
            })
            .collect()
    }
}

fn host() -> Result<String, Error> {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let output =
        std::process::Command::new(rustc).arg("-vV").output().map_err(|error| Error::Host(error.to_string()))?;
    String::from_utf8_lossy(&output.stdout)
        .lines()
        .find_map(|line| line.strip_prefix("host: "))
        .map(str::to_owned)
        .ok_or_else(|| Error::Host("`rustc -vV` names no host".to_owned()))
}
