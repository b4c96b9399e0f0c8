//! Why a check could not be made at all (as opposed to what it found).

use std::path::PathBuf;

/// A check could not read what it judges.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("cannot read {}: {source}", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("cannot walk the source tree: {0}")]
    Walk(#[from] walkdir::Error),
    #[error("cargo metadata failed: {0}")]
    Metadata(#[from] cargo_metadata::Error),
    #[error("{}: {source}", path.display())]
    Toml { path: PathBuf, source: Box<toml::de::Error> },
    #[error("{path}:{line}: {source}")]
    Rust { path: String, line: usize, source: syn::Error },
    #[error("cannot ask rustc which machine this is: {0}")]
    Host(String),
}
