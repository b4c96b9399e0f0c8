//! A group: one program makes a buffer and lends it, and others read it in place, at the same address. Its handle is plain text, so it can go by
//! any way, here by the command line.
//!
//! The broker's policy names the group and its members:
//!
//! ```toml
//! [[group]]
//! name = "pool"
//! domains = ["maker", "reader"]
//! room = "16M"
//! ```
//!
//! ```console
//! $ cargo run -p partywall-daemon -- --policy policy.toml &
//! $ cargo run -p partywall --example group -- lend hello          # in one terminal: prints a handle, and waits until it was read
//! $ cargo run -p partywall --example group -- read HANDLE         # in another
//! ```
//!
//! Both use the broker's default socket; `PARTYWALL_BROKER` names another one.

use partywall::{Domain, Group, Handle};
use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    match &words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["lend", text] => lend(&Group::join(&Domain::join("maker")?, "pool")?, text)?,
        // This process needs no room for buffers.
        ["read", handle] => read(&Group::builder("pool").room(0).join(&Domain::join("reader")?)?, handle.parse()?)?,
        _ => return Err("group lend TEXT, or group read HANDLE".into()),
    }
    Ok(())
}

fn lend(pool: &Group, text: &str) -> Result<(), Box<dyn Error>> {
    let mut buffer = pool.alloc(text.len())?;
    buffer.copy_from_slice(text.as_bytes());
    // From here on nobody can write it, this process included.
    let lent = buffer.lend();
    // A token for one reader. Each further reader needs a separate handle.
    println!("{}", lent.handle()?);
    lent.wait(None)?;
    println!("read; the buffer at {:#x} can be used again", lent.address());
    Ok(())
}

fn read(pool: &Group, handle: Handle) -> Result<(), Box<dyn Error>> {
    let shared = pool.open(&handle)?;
    let mut text = vec![0; shared.len()];
    shared.copy_to(0, &mut text);
    println!("{} at {:#x}", String::from_utf8_lossy(&text), shared.address());
    // Dropping it gives the token back.
    Ok(())
}
