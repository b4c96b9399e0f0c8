//! Redis in one machine and its benchmark in the other, both as Debian has them: by TCP, and under `partywall run`.

use super::{GuestPair, LONGEST};
use partywall_lab::{PlaygroundOptions, beside};
use rustix::process::Signal;
use std::error::Error;
use std::path::Path;

const LIBRARY: &str = "libpartywall_preload.so";
const PROGRAMS: [&str; 2] = ["redis-server", "redis-benchmark"];

/// Adds what it takes to the machines; `None` if this host has no redis.
pub(super) fn add_to(options: PlaygroundOptions) -> Option<PlaygroundOptions> {
    let mut options = options.program(beside(LIBRARY).ok()?, LIBRARY);
    for name in PROGRAMS {
        let path = Path::new("/usr/bin").join(name);
        if !path.exists() {
            return None;
        }
        options = options.program(path, name);
    }
    Some(options)
}

impl GuestPair<'_> {
    /// Requests a second of one client: under `partywall run`, and by TCP.
    pub(super) fn redis(&self, requests: u32) -> Result<[f64; 2], Box<dyn Error>> {
        let address = self.b.address().ok_or("b has no address")?;
        let mut rates = [0.0; 2];
        for (rate, (run, port)) in rates.iter_mut().zip([("partywall run --quiet ", 6380), ("", 6381)]) {
            let serve = format!("{run}redis-server --port {port} --bind 0.0.0.0 --protected-mode no --save ''");
            let mut server = self.begin(self.b, &serve)?;
            server.wait_for("Ready to accept connections", LONGEST)?;
            let ask = format!("{run}redis-benchmark -h {address} -p {port} -c 1 -n {requests} -t get --csv");
            let said = self.end(self.begin(self.a, &ask)?)?.text();
            server.signal(Signal::TERM)?;
            server.wait(LONGEST)?;
            *rate = rate_of(&said).ok_or_else(|| format!("redis-benchmark reports no rate: {said}"))?;
        }
        Ok(rates)
    }
}

/// `"GET","12345.67",...`, below a line of heads.
fn rate_of(said: &str) -> Option<f64> {
    let row = said.lines().find_map(|line| line.strip_prefix("\"GET\",\""))?;
    row.split('"').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rate_is_read_from_the_benchmarks_table() {
        let said = "\"test\",\"rps\",\"avg_latency_ms\"\n\"GET\",\"1234.50\",\"0.5\"\n";
        assert_eq!(rate_of(said), Some(1234.5));
        assert_eq!(rate_of("Could not connect\n"), None);
    }
}
