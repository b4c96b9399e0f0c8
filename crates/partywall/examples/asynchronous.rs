//! Streams under tokio: a server with one task for each connection, and a client that has many requests under way at once.
//!
//! ```console
//! $ cargo run -p partywall-daemon &                                                       # the broker, one per host
//! $ cargo run -p partywall --features tokio --example asynchronous -- serve               # in one terminal
//! $ cargo run -p partywall --features tokio --example asynchronous -- ask one two three   # in another
//! ```
//!
//! Both use the broker's default socket; `PARTYWALL_BROKER` names another one.

use partywall::asynchronous::{AsyncListener, AsyncStream};
use partywall::{Domain, Listener};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    match words.split_first().map(|(first, rest)| (first.as_str(), rest)) {
        Some(("serve", [])) => serve().await?,
        Some(("ask", questions @ [_, ..])) => {
            let _domain = Domain::join("visitor")?;
            // All connections at once, on one thread.
            let asked: Vec<_> = questions.iter().map(|question| tokio::spawn(ask(question.clone()))).collect();
            for answer in asked {
                println!("{}", answer.await??);
            }
        }
        _ => return Err("asynchronous serve, or asynchronous ask WORD...".into()),
    }
    Ok(())
}

async fn serve() -> Result<(), Box<dyn std::error::Error>> {
    let _domain = Domain::join("web")?;
    let mut listener = AsyncListener::new(Listener::bind("upper")?);
    loop {
        let (stream, peer) = listener.accept().await?;
        tokio::spawn(async move {
            if let Err(error) = answer(stream).await {
                eprintln!("{}: {error}", peer.name);
            }
        });
    }
}

async fn answer(mut stream: AsyncStream) -> std::io::Result<()> {
    let mut text = String::new();
    stream.read_to_string(&mut text).await?;
    stream.write_all(text.to_uppercase().as_bytes()).await?;
    stream.shutdown().await
}

async fn ask(question: String) -> std::io::Result<String> {
    let mut stream = AsyncStream::connect("web:upper").await?;
    stream.write_all(question.as_bytes()).await?;
    // Nothing follows, so the server answers.
    stream.shutdown().await?;
    let mut text = String::new();
    stream.read_to_string(&mut text).await?;
    Ok(text)
}
