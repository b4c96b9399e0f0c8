//! How long a connection between programs in two machines waits for its rings: from the offer of the connecting side's library until that side uses its
//! ring. Its bytes go by TCP until then.

use std::{collections::HashMap, time::Duration};

use partywall_lab::Guest;
use partywall_protocol::environment;

use super::{NAME, machines::fault, program::execute};
use crate::{
    apps::{AppAddress, databases},
    args::Scale,
    bench::BenchPlan,
    error::{BenchError, Result},
    interrupt::Interrupt,
    mechanism::{Mechanism, Tuning},
    report::{
        cell::{Cell, Key},
        metric::Metric,
        verdict::{Bound, Verdict},
    },
    task::{Figures, MeasuringWork},
};

/// What the library logs of its offer, before the descriptor.
const OFFERED: &str = "offered fd ";
/// What it logs when the connection has its rings, after the descriptor.
const HAS_RING: &str = "has a ring";
/// Calls of each client: the connection has carried enough for a ring after some of them, and the others give both sides occasions for the next step.
const CALLS: u32 = 2000;
/// The file of the clients' library in their machine.
const LOG: &str = "/tmp/bench-rings.log";
/// The longest time that is promised, in nanoseconds.
const PROMISED: f64 = 50e6;

pub(super) fn key() -> Key {
    Key::new(NAME, Mechanism::Transparent).with("program", databases::REDIS.name).with("case", "rings made")
}

pub(super) fn plan() -> BenchPlan {
    BenchPlan {
        key: key(),
        tuning: Tuning::of(Mechanism::Transparent, 0),
        work: MeasuringWork::Transfer { message: 0, total: 0, repeats: 1, warm_up: Duration::ZERO },
        one_cpu: false,
    }
}

/// Clients of one run, one after another. Each has one connection.
fn clients(scale: Scale) -> usize {
    if scale == Scale::Smoke { 3 } else { 40 }
}

/// Clients in a machine call the redis at an address of another machine.
pub(super) fn measure(from: &Guest, to: &AppAddress, scale: Scale, interrupt: &Interrupt) -> Result<Figures> {
    let (clients, AppAddress { address, port, .. }) = (clients(scale), to);
    // It asks for the server's configuration first, by a connection that carries too little to be offered. Both sides move by the default rules, by
    // which both count to the same number of calls.
    let run = "partywall run --quiet redis-benchmark";
    let calls = format!("-h {address} -p {port} -c 1 -n {CALLS} -t get -q");
    let client = format!("{}={LOG} {run} {calls} > /dev/null", environment::LOG);
    let line = format!("rm -f {LOG}; for n in $(seq {clients}); do {client} || exit 1; done; cat {LOG}");
    let log = execute(from, &["sh", "-c", &line].map(str::to_owned), interrupt)?;
    let mut times = setup_times(&log);
    // A connection without a ring after all of its calls has waited longer than the others, nobody knows how long.
    if times.len() != clients {
        return Err(BenchError::Transport(format!(
            "{} of {clients} connections got rings in {CALLS} calls",
            times.len()
        )));
    }
    times.sort_by(f64::total_cmp);
    let all = times.len();
    let at = |part: f64| times[((all as f64 * part) as usize).min(all - 1)];
    Ok(Figures::from([(Metric::P50Ns, at(0.5)), (Metric::MaxNs, at(1.0))]))
}

/// The line of a client whose library logs its rings.
pub(super) fn logged(line: Vec<String>) -> Vec<String> {
    ["env".to_owned(), format!("{}={LOG}", environment::LOG)].into_iter().chain(line).collect()
}

/// Fails if no connection of the clients by [`logged`] has got a ring: their figures would be TCP's.
pub(super) fn verify_made(from: &Guest, program: &str) -> Result<()> {
    let log = from.shell(&format!("cat {LOG}; rm -f {LOG}")).map_err(fault)?;
    if log.contains(HAS_RING) {
        return Ok(());
    }
    Err(BenchError::Transport(format!("no connection of {program} got a ring, so it was not measured: {log}")))
}

/// The nanoseconds from the first offer of each process to its ring, as the library has logged both. Each process offers one connection.
fn setup_times(log: &str) -> Vec<f64> {
    let mut offered: HashMap<&str, f64> = HashMap::new();
    let mut times = Vec::new();
    for line in log.lines() {
        let mut words = line.splitn(4, ' ');
        let (Some(process), Some(_thread), Some(at), Some(text)) =
            (words.next(), words.next(), words.next(), words.next())
        else {
            continue;
        };
        let Ok(at) = at.parse::<f64>() else { continue };
        if text.starts_with(OFFERED) {
            offered.entry(process).or_insert(at);
        } else if text.contains(HAS_RING)
            && let Some(since) = offered.remove(process)
        {
            times.push((at - since) * 1e9);
        }
    }
    times
}

pub(super) fn judge(cells: &[Cell]) -> Verdict {
    let key = key();
    let measured = cells.iter().find(|cell| cell.key == key).and_then(|cell| cell.median(Metric::MaxNs));
    let claim = "redis, the longest time of one run's connections from the offer to the ring, in parts of 50 ms";
    Verdict::figure(claim, Bound::AtMost, 1.0, measured.map(|longest| longest / PROMISED))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn setup_times_run_from_first_offer_of_each_process() {
        let log = "7 7 100.000000 offered fd 3\n8 8 100.500000 offered fd 3\n7 7 100.010000 offered fd 3\n\
                   7 7 100.030000 fd 3 has a ring: 1 bytes out, 1 in\n7 7 100.9 fd 3 has a ring: 1 bytes out, 1 in\n\
                   8 8 100.501000 no ring for fd 3: none\ncut";
        let times = setup_times(log);
        assert_eq!(times.len(), 1);
        assert!((times[0] - 30e6).abs() < 1e3, "{times:?}");
    }
}
