//! Finds the other programs of Partywall: beside this executable first, then on PATH.

use std::path::PathBuf;

use crate::exit::{Context, Failure};

/// Path of `program`, or how to get it.
pub(crate) fn find(program: &str, package: &str) -> Result<PathBuf, Failure> {
    let here = std::env::current_exe().context("cannot tell where this program is")?;
    let beside = here.parent().map(|dir| dir.join(program));
    let on_path = std::env::var_os("PATH")
        .map(|path| std::env::split_paths(&path).map(|dir| dir.join(program)).collect::<Vec<_>>());
    beside.into_iter().chain(on_path.into_iter().flatten()).find(|candidate| is_program(candidate)).ok_or_else(|| {
        Failure::general(format!("{program} is neither beside {} nor on PATH", here.display()))
            .hint(format!("build it with `cargo build --release -p {package}`"))
    })
}

fn is_program(path: &std::path::Path) -> bool {
    path.is_file() && rustix::fs::access(path, rustix::fs::Access::EXEC_OK).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_on_path_and_says_what_is_missing() {
        assert!(find("sh", "none").unwrap().is_absolute());
        let missing = find("no-such-program-of-partywall", "some-package").unwrap_err().to_string();
        assert!(missing.contains("some-package"), "{missing}");
    }
}
