//! Finds the other parts of Partywall: programs beside this executable, then on PATH; the preloaded library beside it, or where
//! `make install` puts it.

use std::path::PathBuf;

use partywall_protocol::environment::LIBRARY;

use crate::exit::{CommandFailure, Context};

/// Path of `program`, or how to get it.
pub(crate) fn find(program: &str, package: &str) -> Result<PathBuf, CommandFailure> {
    let here = std::env::current_exe().context("cannot tell where this program is")?;
    let beside = here.parent().map(|dir| dir.join(program));
    let on_path = std::env::var_os("PATH")
        .map(|path| std::env::split_paths(&path).map(|dir| dir.join(program)).collect::<Vec<_>>());
    beside.into_iter().chain(on_path.into_iter().flatten()).find(|candidate| is_program(candidate)).ok_or_else(|| {
        CommandFailure::general(format!("{program} is neither beside {} nor on PATH", here.display()))
            .hint(format!("build it with `cargo build --release -p {package}`"))
    })
}

/// Path of the library that `run` preloads, or how to get it.
pub(crate) fn find_library() -> Result<PathBuf, CommandFailure> {
    let here = std::env::current_exe().context("cannot tell where this program is")?;
    let places = library_places(&here);
    places.iter().find(|place| place.is_file()).cloned().ok_or_else(|| {
        let places: Vec<_> = places.iter().map(|place| place.display().to_string()).collect();
        CommandFailure::general(format!("the library is missing: it is neither {}", places.join(" nor ")))
            .hint("install it with `make install`, or build it with `cargo build --release -p partywall-preload`")
    })
}

fn library_places(program: &std::path::Path) -> Vec<PathBuf> {
    let beside = program.parent();
    let installed = beside.and_then(std::path::Path::parent).map(|prefix| prefix.join("lib/partywall"));
    beside.map(PathBuf::from).into_iter().chain(installed).map(|dir| dir.join(LIBRARY)).collect()
}

fn is_program(path: &std::path::Path) -> bool {
    path.is_file() && rustix::fs::access(path, rustix::fs::Access::EXEC_OK).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn library_is_searched_beside_program_and_where_installed() {
        let places = library_places(std::path::Path::new("/usr/local/bin/partywall"));
        let expected = ["/usr/local/bin/libpartywall_preload.so", "/usr/local/lib/partywall/libpartywall_preload.so"];
        assert_eq!(places, expected.map(PathBuf::from));
    }

    #[test]
    fn missing_program_error_names_its_package() {
        assert!(find("sh", "none").unwrap().is_absolute());
        let missing = find("no-such-program-of-partywall", "some-package").unwrap_err().to_string();
        assert!(missing.contains("some-package"), "{missing}");
    }
}
