//! Everything, one after the other, into one result file.

use super::{Results, advise, channels, cpu, ipc, latency, ratios, stream};
use crate::{bench::Bench, error::Result};

/// Measures and shows everything; the advice comes from what was measured on the way.
pub(crate) fn run(bench: &mut Bench) -> Result<Results> {
    let mut all = Results::default();
    for run in [ratios::run, stream::run, latency::run, ipc::run, cpu::run, channels::run] {
        let results = run(bench)?;
        all.cells.extend(results.cells);
        all.verdicts.extend(results.verdicts);
    }
    advise::show(bench, &all.cells)?;
    Ok(all)
}
