//! Serves `Echo` as `web:capnp`, until it is killed.
//!
//! ```console
//! $ partywalld &
//! $ cargo run --manifest-path examples/capnp/Cargo.toml --bin capnp-server
//! $ cargo run --manifest-path examples/capnp/Cargo.toml --bin capnp-client hello
//! ```

use partywall::Domain;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let domain = Domain::join("web")?;
    let listener = domain.bind("capnp")?;
    println!("offering web:capnp");
    tokio::task::LocalSet::new().run_until(partywall_capnp::serve_echo(listener)).await?;
    Ok(())
}
