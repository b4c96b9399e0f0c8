//! A broadcast: one program publishes samples, and any number of others each take the newest one when they are ready. The publisher waits
//! for none of them.
//!
//! ```console
//! $ cargo run -p partywall-daemon &                                 # the broker, one per host (or an installed `partywalld`)
//! $ cargo run -p partywall --example broadcast -- publish           # in one terminal
//! $ cargo run -p partywall --example broadcast -- subscribe 5       # in others: takes five samples, one every 100 ms
//! ```
//!
//! All use the broker's default socket; `PARTYWALL_BROKER` names another one.

use partywall::{Domain, Error, Options, Publisher, SlowReader, Subscriber};
use std::thread::sleep;
use std::time::Duration;

/// Between two samples of the publisher.
const FAST: Duration = Duration::from_millis(1);
/// Between two samples that a subscriber takes.
const SLOW: Duration = Duration::from_millis(100);

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    match &words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["publish"] => publish(&Domain::join("sensor")?)?,
        ["subscribe", count] => subscribe(&Domain::join("display")?, count.parse()?)?,
        _ => return Err("broadcast publish, or broadcast subscribe COUNT".into()),
    }
    Ok(())
}

fn publish(domain: &Domain) -> Result<(), Error> {
    // With SlowReader::Hold each subscriber would get every sample, and the slowest would set the pace.
    let mut publisher = Publisher::bind(domain, "samples", SlowReader::Newest, &Options::default())?;
    for number in 0u64.. {
        publisher.send(format!("sample {number}").as_bytes())?;
        sleep(FAST);
    }
    Ok(())
}

fn subscribe(domain: &Domain, count: u32) -> Result<(), Error> {
    let mut subscriber = Subscriber::connect_with(domain, "sensor:samples", &Options::default())?;
    let mut sample = Vec::new();
    for _ in 0..count {
        subscriber.recv_newest(&mut sample)?;
        println!("{}, {} left out", String::from_utf8_lossy(&sample), subscriber.lost());
        sleep(SLOW);
    }
    Ok(())
}
