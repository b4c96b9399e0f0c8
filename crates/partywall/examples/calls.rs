//! Calls: a server offers functions, and a client calls them with arguments in its own heap, which the server reads where they are.
//!
//! ```console
//! $ cargo run -p partywall-daemon &                            # the broker, one per host (or an installed `partywalld`)
//! $ cargo run -p partywall --example calls -- serve            # in one terminal
//! $ cargo run -p partywall --example calls -- sum 1 2 39       # in another
//! ```
//!
//! Both use the broker's default socket; `PARTYWALL_BROKER` names another one. docs/rpc.md is the guide.

use partywall::Domain;
use partywall::rpc::{CallClient, CallServer};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    match words.split_first().map(|(first, rest)| (first.as_str(), rest)) {
        Some(("serve", [])) => serve(&Domain::join("web")?)?,
        Some(("sum", numbers @ [_, ..])) => {
            let numbers = numbers.iter().map(|word| word.parse()).collect::<Result<Vec<u64>, _>>()?;
            let _domain = Domain::join("visitor")?;
            println!("{}", sum(&numbers)?);
        }
        _ => return Err("calls serve, or calls sum NUMBER...".into()),
    }
    Ok(())
}

fn serve(domain: &Domain) -> Result<(), partywall::Error> {
    let _server = CallServer::builder()
        .method("sum", |call| {
            // A private copy: the client may change its memory at any time.
            let numbers = call.args().to_vec();
            let numbers = numbers.as_chunks().0.iter().map(|number| u64::from_le_bytes(*number));
            Ok(numbers.fold(0, u64::wrapping_add).to_le_bytes().into())
        })
        .bind(domain, "math")?;
    loop {
        std::thread::park();
    }
}

fn sum(numbers: &[u64]) -> Result<u64, Box<dyn std::error::Error>> {
    let client = CallClient::connect("web:math")?;
    let mut block = client.heap().allocate(numbers.len() * 8)?;
    for (bytes, number) in block.chunks_exact_mut(8).zip(numbers) {
        bytes.copy_from_slice(&number.to_le_bytes());
    }
    // By reference: however many numbers there are, the call is one cache line.
    let reply = client.call("sum", &block)?;
    Ok(u64::from_le_bytes(reply.array(0)?))
}
