//! Finds programs of ours that this one needs.

use crate::LabError;
use std::path::PathBuf;

/// A program or library of ours, beside this program or beside the folder of tests that it is in.
///
/// # Errors
/// It is in neither.
pub fn beside(name: &str) -> Result<PathBuf, LabError> {
    let here = std::env::current_exe().map_err(|e| LabError::tool(name, e))?;
    let found = here.ancestors().skip(1).take(2).map(|folder| folder.join(name)).find(|path| path.is_file());
    found.ok_or_else(|| LabError::Program { name: name.to_owned(), beside: here })
}
