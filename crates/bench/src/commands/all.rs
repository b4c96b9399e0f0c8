//! Everything, one after the other, into one result file.

use super::{CommandResults, advise, apps, broker, channels, cpu, ipc, latency, ratios, residency, rpc, stream};
use crate::{
    bench::Bench,
    error::{BenchError, Result},
};

/// Measures and shows everything; the advice comes from what was measured on the way.
pub(crate) fn run(bench: &mut Bench) -> Result<CommandResults> {
    let mut all = CommandResults::default();
    for run in [
        ratios::run,
        stream::run,
        latency::run,
        rpc::run,
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
            // A subcommand that this machine cannot run is reported, and the others run.
            Err(BenchError::Unavailable(why)) => eprintln!("partywall-bench: not measured: {why}"),
            Err(e) => return Err(e),
        }
    }
    advise::show(bench, &all.cells)?;
    Ok(all)
}
