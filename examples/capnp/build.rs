//! Makes Rust of the schema, by the program `capnp` (Debian's package capnproto).

fn main() {
    let made = capnpc::CompilerCommand::new().file("echo.capnp").run();
    if let Err(e) = made {
        println!("cargo::error=echo.capnp: {e}; the program capnp is in Debian's package capnproto");
    }
}
