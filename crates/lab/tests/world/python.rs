//! Python in guests, for programs that are shorter in it.

use partywall_lab::{Guest, ImageOptions};
use std::process::Command;

/// Python of the host.
pub(crate) const PYTHON: &str = "/usr/bin/python3";
/// The modules, in a guest.
const LIBRARY: &str = "/tmp/python.zip";

/// An image with Python.
pub(crate) fn with(image: ImageOptions) -> ImageOptions {
    image.program(std::fs::canonicalize(PYTHON).unwrap(), "python3")
}

/// Brings the modules into a guest.
pub(crate) fn bring(guest: &Guest) {
    guest.put(&library(), LIBRARY, 0o644).unwrap();
}

/// The beginning of a command of a guest that has Python run by another program.
pub(crate) fn command(under: &str) -> String {
    format!("PYTHONPATH={LIBRARY} PYTHONHOME=/nonexistent {under} python3 -S")
}

/// The modules of Python that programs of sockets and processes load, compiled, as one file. A guest would take a minute to compile them.
fn library() -> Vec<u8> {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("library.zip");
    let collect = "import array, encodings.idna, os, py_compile, socket, subprocess, sys, zipfile\n\
                   root, compiled = os.path.dirname(os.__file__) + '/', sys.argv[1] + '.pyc'\n\
                   paths = {getattr(module, '__file__', None) or '' for module in list(sys.modules.values())}\n\
                   with zipfile.ZipFile(sys.argv[1], 'w') as library:\n\
                   \x20   for path in paths:\n\
                   \x20       if path.startswith(root) and path.endswith('.py'):\n\
                   \x20           py_compile.compile(path, compiled, path[len(root):], doraise=True)\n\
                   \x20           library.write(compiled, path[len(root):] + 'c')\n";
    let made = Command::new(PYTHON).args(["-S", "-E", "-c", collect]).arg(&file).output().unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    std::fs::read(file).unwrap()
}
