//! The input is what a peer of calls does with its records and its heap (protocol K): to a server that has another, honest client, and to a client.
//!
//! The peers, the broker and what is expected of them are those of `crates/partywall/tests/random_calls.rs`.
#![no_main]

#[path = "../../crates/partywall/tests/common/record_liar.rs"]
mod record_liar;

use partywall::Domain;
use partywall_daemon::Broker;
use record_liar::{LiedToServer, LyingServer};
use std::sync::{Mutex, OnceLock};

/// Both parts of the world, and the broker that has introduced them.
struct CallWorld {
    server: LiedToServer,
    liar: LyingServer,
    _broker: Broker,
}

fn world() -> &'static Mutex<CallWorld> {
    static WORLD: OnceLock<Mutex<CallWorld>> = OnceLock::new();
    WORLD.get_or_init(|| {
        let broker = Broker::embedded().expect("a broker");
        let join = |name| Domain::builder().name(name).broker(broker.path()).join().expect("a domain");
        let (server, liar) = (LiedToServer::new(join("web")), LyingServer::new(join("grave")));
        Mutex::new(CallWorld { server, liar, _broker: broker })
    })
}

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let mut world = world().lock().expect("no input before this one has panicked");
    match input.split_first() {
        Some((side, input)) if side.is_multiple_of(4) => world.liar.run(input),
        Some((_, input)) => world.server.run(input),
        None => {}
    }
});
