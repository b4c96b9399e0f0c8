//! Sends its arguments and prints the answer. `echo_server.rs` has the commands for both.

use partywall::{Domain, Stream};
use std::error::Error;
use std::io::{Read, Write};
use std::net::Shutdown;

fn main() -> Result<(), Box<dyn Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let message = if words.is_empty() { "hello".to_owned() } else { words.join(" ") };

    let _domain = Domain::join("visitor")?;
    let mut stream = Stream::connect("web:echo")?;
    stream.write_all(message.as_bytes())?;
    // No more data follows. The other side sees the end, and ends too.
    stream.shutdown(Shutdown::Write)?;

    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    println!("{answer}");
    Ok(())
}
