//! Gives the shared library the name by which programs ask for it at run time, and keeps it loaded: its thread runs until the process ends.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libpartywall.so.0");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
