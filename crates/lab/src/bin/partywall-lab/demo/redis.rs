//! Redis in one machine and its benchmark in the other, both as Debian has them: by TCP, and under `partywall run`,
//! where the connection is seen to be on a ring.

use super::carry::Done;
use super::{GuestPair, LONGEST};
use partywall_lab::{CommandOutput, PlaygroundOptions, Running, beside};
use rustix::process::Signal;
use serde_json::Value;
use std::path::Path;
use std::time::{Duration, Instant};

const LIBRARY: &str = "libpartywall_preload.so";
const PROGRAMS: [&str; 2] = ["redis-server", "redis-benchmark"];
/// The least requests under `partywall run`: its connection moves to a ring after 128 calls, and a moment later.
const LEAST: u32 = 2_000;
/// The log of the library in the client, and its line for a connection that has its rings.
const LOG: &str = "/tmp/redis.log";
const ON_RING: &str = "has a ring";
/// Between two looks at the client's connection.
const LOOK: Duration = Duration::from_millis(100);

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
    pub(super) fn redis(&self, requests: u32) -> Done<[f64; 2]> {
        let by_ring = self.with_server("partywall run --quiet ", 6380, || self.by_ring(requests.max(LEAST)))?;
        let by_tcp = self.with_server("", 6381, || rate_of(&self.end(self.ask("", 6381, requests)?)?.text()))?;
        Ok([by_ring, by_tcp])
    }

    /// Runs a server in b meanwhile.
    fn with_server(&self, run: &str, port: u16, ask: impl FnOnce() -> Done<f64>) -> Done<f64> {
        let serve = format!("{run}redis-server --port {port} --bind 0.0.0.0 --protected-mode no --save ''");
        let mut server = self.begin(self.b, &serve)?;
        server.wait_for("Ready to accept connections", LONGEST)?;
        let rate = ask()?;
        server.signal(Signal::TERM)?;
        server.wait(LONGEST)?;
        Ok(rate)
    }

    fn ask(&self, run: &str, port: u16, requests: u32) -> Done<Running<'_>> {
        let address = self.b.address().ok_or("b has no address")?;
        let ask = format!("{run}redis-benchmark -h {address} -p {port} -c 1 -n {requests} -t get --csv");
        self.begin(self.a, &ask)
    }

    /// The rate of a client whose connection has had a ring, as the library in it has logged. A connection that was busy for too short a
    /// time gets a second attempt.
    fn by_ring(&self, requests: u32) -> Done<f64> {
        let run = format!("env PARTYWALL_PRELOAD_LOG={LOG} partywall run --quiet ");
        let mut log = String::new();
        for requests in [requests, 4 * requests] {
            let client = self.ask(&run, 6380, requests)?;
            let (said, row) = self.watched(client)?;
            log = self.a.shell(&format!("cat {LOG} 2> /dev/null; rm -f {LOG}"))?;
            if log.contains(ON_RING) {
                self.show.command("", "partywall top --once");
                self.show.say(&format!("   {}", row.unwrap_or_else(|| "it ended before top had looked".to_owned())));
                return rate_of(&said.text());
            }
        }
        let last = log.lines().last().unwrap_or("nothing");
        Err(format!("no connection of redis was on a ring, so both rates are those of TCP; the library logged: {last}")
            .into())
    }

    /// Waits for the client's end, and what top on the host says of its connection meanwhile.
    fn watched(&self, mut client: Running<'_>) -> Done<(CommandOutput, Option<String>)> {
        let start = Instant::now();
        let mut row = None;
        // Each look takes processor time from the machines, so there are few, and none once the ring is there.
        while row.is_none() && client.look(LOOK)? != Some(true) && start.elapsed() < LONGEST {
            let said = self.playground.partywall(["top", "--once", "--json"]).output()?;
            row = row_of(&serde_json::from_slice(&said.stdout).unwrap_or_default());
        }
        Ok((self.end(client)?, row))
    }
}

/// The connection to redis that is on a ring, in one line.
fn row_of(top: &Value) -> Option<String> {
    let text = |row: &Value, part: &str| row[part].as_str().unwrap_or_default().to_owned();
    let is_ours =
        |row: &&Value| text(row, "peer").contains("redis-server") && row["way"] == "ring" && row["reason"].is_null();
    let row = top["connections"].as_array()?.iter().find(is_ours)?;
    Some(format!("{} to {}: {}", text(row, "program"), text(row, "peer"), text(row, "way")))
}

/// `"GET","12345.67",...`, below a line of heads.
fn rate_of(said: &str) -> Done<f64> {
    let row = said.lines().find_map(|line| line.strip_prefix("\"GET\",\""));
    let rate = row.and_then(|row| row.split('"').next()?.parse().ok());
    rate.ok_or_else(|| format!("redis-benchmark reports no rate: {said}").into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn rate_is_read_from_the_benchmarks_table() {
        let said = "\"test\",\"rps\",\"avg_latency_ms\"\n\"GET\",\"1234.50\",\"0.5\"\n";
        assert_eq!(rate_of(said).unwrap(), 1234.5);
        assert!(rate_of("Could not connect\n").unwrap_err().to_string().contains("Could not connect"));
    }

    #[test]
    fn row_of_top_is_that_of_a_ring_to_redis() {
        let row = |peer: &str, way: &str, reason: Value| json!({ "program": "a.redis-benchmark", "peer": peer, "way": way, "reason": reason });
        let others = [
            row("b.redis-server:6380", "tcp", json!("told")),
            row("b.redis-server:6380", "ring", json!("not-accepted")),
            row("b.web:80", "ring", Value::Null),
        ];
        assert_eq!(row_of(&json!({ "connections": others })), None);
        let all: Vec<Value> = others.into_iter().chain([row("b.redis-server:6380", "ring", Value::Null)]).collect();
        let line = "a.redis-benchmark to b.redis-server:6380: ring";
        assert_eq!(row_of(&json!({ "connections": all })).as_deref(), Some(line));
        assert_eq!(row_of(&Value::Null), None);
    }
}
