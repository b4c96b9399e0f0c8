//! Two result files side by side.

use std::{io::Write, path::Path};

use crate::{
    error::{During, Result},
    report::{compare::compare, json::BenchReport, table},
};

/// Reads both and shows what changed.
pub(crate) fn run(before: &Path, after: &Path) -> Result<()> {
    let (first, second) = (BenchReport::read(before)?, BenchReport::read(after)?);
    let mut out = std::io::stdout().lock();
    let mut say = |text: String| writeln!(out, "{text}").during("writing to standard output");
    for (path, report) in [(before, &first), (after, &second)] {
        say(format!("# {}: {} ({})", path.display(), report.host.line(), report.date))?;
    }
    if (&first.host.cpu, &first.host.kernel) != (&second.host.cpu, &second.host.kernel) {
        say("# NOTE: the two were not measured on the same processor and kernel".into())?;
    }
    say(String::new())?;
    say(table::comparison(&compare(&first, &second)))
}
