//! Builds the C programs and libraries of `driver/`.

use std::{
    path::{Path, PathBuf},
    process::Command,
    sync::Mutex,
};

fn build(output: &str, sources: &[&str], flags: &[&str]) -> PathBuf {
    // Several tests of one process may ask for the same.
    static ONE: Mutex<()> = Mutex::new(());
    let _one = ONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/driver");
    // Several processes may build the same at once: each its own, moved into place.
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(output);
    let fresh = path.with_extension(format!("new-{}", std::process::id()));
    let mut cc = Command::new("cc");
    cc.args(["-std=gnu17", "-O2", "-g", "-Wall", "-Wextra", "-Werror", "-Wno-unused-result"]).args(flags);
    cc.arg("-o").arg(&fresh).args(sources.iter().map(|source| folder.join(source))).args(["-ldl", "-pthread"]);
    let output = cc.output().unwrap_or_else(|e| panic!("{cc:?}: {e}; gcc is in Debian's package gcc"));
    assert!(output.status.success(), "{cc:?}: {}", String::from_utf8_lossy(&output.stderr));
    std::fs::rename(&fresh, &path).unwrap();
    path
}

/// A program.
pub(crate) fn program(name: &str, sources: &[&str], flags: &[&str]) -> PathBuf {
    build(&format!("driver-{name}"), sources, flags)
}

/// A library for `LD_PRELOAD`.
pub(crate) fn library(name: &str, sources: &[&str], flags: &[&str]) -> PathBuf {
    let mut all = vec!["-shared", "-fPIC"];
    all.extend(flags);
    build(&format!("lib{name}.so"), sources, &all)
}
