//! Messages: each arrives whole, with its boundaries.
//!
//! ```console
//! $ cargo run -p partywall-daemon &                                  # the broker, one per host (or an installed `partywalld`)
//! $ cargo run -p partywall --example messages -- serve               # in one terminal
//! $ cargo run -p partywall --example messages -- order 2 apples      # in another
//! ```
//!
//! Both use the broker's default socket; `PARTYWALL_BROKER` names another one.

use partywall::{Domain, Error, MessageListener, MessageSocket, Options};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    match words.split_first().map(|(first, rest)| (first.as_str(), rest)) {
        Some(("serve", [])) => serve(&Domain::join("shop")?)?,
        Some(("order", order @ [_, ..])) => println!("{}", send(&Domain::join("visitor")?, order)?),
        _ => return Err("messages serve, or messages order WORD...".into()),
    }
    Ok(())
}

fn serve(domain: &Domain) -> Result<(), Error> {
    let mut listener = MessageListener::bind(domain, "orders", &Options::default())?;
    loop {
        let (mut socket, peer) = listener.accept()?;
        let (mut words, mut word) = (Vec::new(), Vec::new());
        loop {
            match socket.recv(&mut word) {
                Ok(()) => words.push(String::from_utf8_lossy(&word).into_owned()),
                // The visitor has finished: that was the whole order.
                Err(Error::Closed(_)) => break,
                Err(error) => {
                    eprintln!("{}: {error}", peer.name);
                    break;
                }
            }
        }
        // A visitor that has left needs no answer.
        let _ = socket.send(format!("{} words for {}: {}", words.len(), peer.name, words.join(", ")).as_bytes());
    }
}

fn send(domain: &Domain, order: &[String]) -> Result<String, Error> {
    let mut socket = MessageSocket::connect_with(domain, "shop:orders", &Options::default())?;
    for word in order {
        socket.send(word.as_bytes())?;
    }
    // The other direction stays open for the answer.
    socket.finish();
    let mut answer = Vec::new();
    socket.recv(&mut answer)?;
    Ok(String::from_utf8_lossy(&answer).into_owned())
}
