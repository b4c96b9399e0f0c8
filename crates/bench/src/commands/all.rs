//! Everything, one after the other, into one result file.

use super::{Results, advise, apps, broker, channels, cpu, ipc, latency, ratios, residency, stream};
use crate::{
    bench::Bench,
    error::{Error, Result},
};

/// Measures and shows everything; the advice comes from what was measured on the way.
pub(crate) fn run(bench: &mut Bench) -> Result<Results> {
    let mut all = Results::default();
    for run in [
        ratios::run,
        stream::run,
        latency::run,
        ipc::run,
        cpu::run,
        channels::run,
        broker::run,
        apps::run,
        residency::run,
    ] {
        match run(bench) {
            Ok(results) => {
                all.cells.extend(results.cells);
                all.verdicts.extend(results.verdicts);
            }
            // What this machine lacks as a whole is said, and the rest goes on.
            Err(Error::Unavailable(why)) => eprintln!("partywall-bench: not measured: {why}"),
            Err(e) => return Err(e),
        }
    }
    advise::show(bench, &all.cells)?;
    Ok(all)
}
