//! The exchanges between the two machines.

use super::payload::HostFile;
use super::{GuestPair, LONGEST};
use partywall_lab::{CommandOutput, Guest, Running};
use serde_json::Value;
use std::error::Error;

pub(super) type Done<T> = Result<T, Box<dyn Error>>;

/// The exit code of our commands when the peer has died.
const DIED: i32 = 4;
pub(super) const COPY: &str = "/tmp/copy";

impl GuestPair<'_> {
    /// Seconds for the file by Partywall.
    pub(super) fn by_partywall(&self, payload: &HostFile) -> Done<f64> {
        let listen = "partywall --domain b cat -l demo --recv-only --report -o /tmp/copy";
        let connect = "partywall --domain a cat b:demo --send-only --wait 30 -i /tmp/file";
        let receiver = self.begin(self.b, listen)?;
        self.end(self.begin(self.a, connect)?)?;
        self.received(receiver, payload)
    }

    /// Seconds for it by TCP.
    pub(super) fn by_tcp(&self, payload: &HostFile) -> Done<f64> {
        let (receiver, address) = self.listening("partywall tcp-cat -l 0.0.0.0:0 --report -o /tmp/copy")?;
        self.end(self.begin(self.a, &format!("partywall tcp-cat {address} -i /tmp/file"))?)?;
        self.received(receiver, payload)
    }

    /// Checks the copy, removes it, and returns the seconds that the receiver took.
    fn received(&self, receiver: Running<'_>, payload: &HostFile) -> Done<f64> {
        let output = self.end(receiver)?;
        let sum = self.b.shell(&format!("sha256sum < {COPY}; rm {COPY}"))?;
        payload.compare(&sum, "the copy in b")?;
        let said = String::from_utf8_lossy(&output.stderr);
        let report = said.lines().find_map(|line| serde_json::from_str::<Value>(line).ok()).unwrap_or_default();
        report["received"]["seconds"].as_f64().ok_or_else(|| format!("the receiver did not report: {said}").into())
    }

    /// Nanoseconds of a round trip by Partywall: p50, p99.
    pub(super) fn ping_partywall(&self, count: u32, more: &[&str]) -> Done<[f64; 2]> {
        let more = more.iter().map(|word| format!(" {word}")).collect::<String>();
        let responder = self.begin(self.b, &format!("partywall --domain b ping -l{more}"))?;
        let ask = format!("partywall --domain a ping b -c {count} --wait 30 --json{more}");
        let answer = self.end(self.begin(self.a, &ask)?)?;
        // A responder never ends by itself.
        responder.signal(rustix::process::Signal::KILL)?;
        responder.wait(LONGEST)?;
        percentiles(&answer)
    }

    /// The round trips by TCP.
    pub(super) fn ping_tcp(&self, count: u32) -> Done<[f64; 2]> {
        let (responder, address) = self.listening("partywall tcp-ping -l 0.0.0.0:0")?;
        let answer = self.end(self.begin(self.a, &format!("partywall tcp-ping {address} -c {count} --json"))?)?;
        responder.wait(LONGEST)?;
        percentiles(&answer)
    }

    /// `kill -9` for b's QEMU, and what a says to it.
    pub(super) fn kill(&self) -> Done<()> {
        let mut listener = self.begin(self.b, "partywall --domain b cat -l watch")?;
        let caller = self.begin(self.a, "partywall --domain a cat b:watch --wait 30")?;
        caller.input(b"are you there?\n")?;
        listener.wait_for("are you there?\n", LONGEST)?;
        self.show.command("", &format!("kill -9 {}    # the QEMU of b", self.b.pid()));
        self.show.busy("waiting for what a says");
        self.b.kill();
        let end = caller.wait(LONGEST)?;
        let text = String::from_utf8_lossy(&end.stderr);
        let last = text.lines().last().unwrap_or_default();
        if end.status != DIED {
            return Err(
                format!("the program in a ended with {}, not {DIED}, when b was killed: {text}", end.status).into()
            );
        }
        self.show.say(&format!("   the program in a says: {last}"));
        self.show.command("", "partywall vm list");
        let list = self.playground.partywall(["vm", "list"]).output()?;
        for line in String::from_utf8_lossy(&list.stdout).lines() {
            self.show.say(&format!("   {}", line.trim_end()));
        }
        Ok(())
    }

    pub(super) fn begin<'b>(&self, guest: &'b Guest, line: &str) -> Done<Running<'b>> {
        self.show.command(guest.name(), line);
        Ok(guest.start(&["sh", "-c", &format!("exec {line}")])?)
    }

    /// Starts a TCP listener in b; where a reaches it.
    pub(super) fn listening(&self, line: &str) -> Done<(Running<'_>, String)> {
        let mut listener = self.begin(self.b, line)?;
        listener.wait_for("\n", LONGEST)?;
        let said = listener.so_far().text();
        let port = said.rsplit(':').next().unwrap_or_default();
        let address = self.b.address().ok_or("b has no address")?;
        Ok((listener, format!("{address}:{port}")))
    }

    pub(super) fn end(&self, command: Running<'_>) -> Done<CommandOutput> {
        let output = command.wait(LONGEST)?;
        if output.status == 0 {
            return Ok(output);
        }
        let said = String::from_utf8_lossy(&output.stderr);
        Err(format!("a command in a machine ended with {}: {}{}", output.status, said, output.text()).into())
    }
}

fn percentiles(answer: &CommandOutput) -> Done<[f64; 2]> {
    let said: Value = serde_json::from_slice(&answer.stdout)?;
    let point = |name: &str| said["round_trip_ns"][name].as_f64();
    match (point("p50"), point("p99")) {
        (Some(p50), Some(p99)) => Ok([p50, p99]),
        _ => Err(format!("ping's answer lacks percentiles: {said}").into()),
    }
}
