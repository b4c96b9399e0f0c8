//! A table that one program writes and another reads in place: a further region of their channel. The two programs can be on one
//! host, in one virtual machine, or in two.
//!
//! ```console
//! $ cargo run -p partywall --example shared_table -- serve shop tables           # in one terminal
//! $ cargo run -p partywall --example shared_table -- read visitor shop:tables    # in another
//! ```
//!
//! Both use the broker's default socket; `PARTYWALL_BROKER` names another one.

use partywall::{Domain, Stream};
use std::error::Error;
use std::io::{Read, Write};

/// The number by which the two programs know tables.
const TABLE: u32 = 1;
/// Bytes of a table.
const SIZE: u64 = 256 << 10;
/// Tables, one after the other: each has the memory of the one before, which both sides have given up.
const ROUNDS: u8 = 14;

fn main() -> Result<(), Box<dyn Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    match &words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["serve", domain, service] => {
            let domain = Domain::join(domain)?;
            let (stream, peer) = domain.bind(service)?.accept()?;
            serve(stream)?;
            println!("{} has read {ROUNDS} tables", peer.name);
        }
        ["read", domain, target] => {
            let sum = read(Domain::join(domain)?.connect(target)?)?;
            println!("read {ROUNDS} tables, sum {sum}");
        }
        _ => return Err("shared_table serve DOMAIN SERVICE, or shared_table read DOMAIN TARGET".into()),
    }
    Ok(())
}

fn serve(mut stream: Stream) -> Result<(), Box<dyn Error>> {
    let regions = stream.regions();
    for round in 0..ROUNDS {
        // The reader is ready for one.
        stream.read_exact(&mut [0])?;
        let mut table = regions.add(TABLE, SIZE)?;
        if table.bytes_mut().iter().any(|byte| *byte != 0) {
            return Err("a new table has something in it".into());
        }
        table.bytes_mut().fill(round);
        // The program that reads this byte sees everything that was written before it.
        stream.write_all(&[round])?;
        // Until it has been read. Dropping it gives it up.
        stream.read_exact(&mut [0])?;
    }
    Ok(())
}

fn read(mut stream: Stream) -> Result<u64, Box<dyn Error>> {
    let regions = stream.regions();
    regions.take(TABLE, 1, SIZE)?;
    let (mut sum, mut bytes) = (0, vec![0; SIZE as usize]);
    for _ in 0..ROUNDS {
        stream.write_all(b"!")?;
        stream.read_exact(&mut [0])?;
        let table = regions.next()?.ok_or("the table was added before the byte was sent")?;
        table.read_at(0, &mut bytes)?;
        sum += bytes.iter().map(|byte| u64::from(*byte)).sum::<u64>();
        // Dropping it would do the same, but the broker could process that after the next table arrives, and this side takes one at a
        // time.
        table.give_up()?;
        stream.write_all(b".")?;
    }
    Ok(sum)
}
