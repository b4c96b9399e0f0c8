//! Echoes all bytes of each connection. The other end is `echo_client.rs`.
//!
//! ```console
//! $ cargo run -p partywall-daemon &                       # the broker, one per host (or an installed `partywalld`)
//! $ cargo run -p partywall --example echo_server          # in one terminal
//! $ cargo run -p partywall --example echo_client          # in another
//! ```
//!
//! Both use the broker's default socket; `PARTYWALL_BROKER` names another one.

use partywall::{Domain, Listener, Stream};
use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    let _domain = Domain::join("web")?;
    let mut listener = Listener::bind("echo")?;
    println!("offering web:echo");
    loop {
        let (stream, peer) = listener.accept()?;
        println!("{} has come", peer.name);
        std::thread::spawn(move || {
            if let Err(e) = echo(stream) {
                eprintln!("{}: {e}", peer.name);
            }
        });
    }
}

fn echo(mut stream: Stream) -> Result<(), Box<dyn Error + Send + Sync>> {
    let (reader, writer) = stream.halves()?;
    std::io::copy(reader, writer)?;
    // Dropping the stream says that nothing follows.
    Ok(())
}
