//! The storage appliance in three forms, and their table.

use super::{FormArg, UNAVAILABLE};
use crate::stop;
use partywall_lab::LabError;
use partywall_lab::nas::{Nas, NasFigure, NasKind, NasLoad, NasUnit, TpccOptions, TpccScale};
use partywall_terminal::{Show, table};
use serde_json::{Value, json};
use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;

/// Builds a storage appliance of four machines that Partywall connects, runs loads on it by NFS from a client outside, and compares it with
/// one machine that has all four functions, and with four machines over tap, bridge and NBD.
#[derive(Debug, clap::Args)]
pub(super) struct NasMeasureArgs {
    /// Runs of each load; the table has their medians
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = partywall_terminal::whole::<u32>(1..=99))]
    runs: u32,

    /// Build only these forms: the four machines that Partywall connects, the one machine, the four over tap, bridge and NBD; may be repeated
    #[arg(long = "form", value_enum, default_values_t = [FormArg::Partywall, FormArg::Monolith, FormArg::Bridge])]
    forms: Vec<FormArg>,

    /// Run only these loads: IOZone (where it is missing, fio), fio with forms of what IOZone measures, TPC-C's transactions; may be repeated
    #[arg(long = "load", value_enum, default_values_t = [LoadArg::Iozone, LoadArg::Tpcc])]
    loads: Vec<LoadArg>,

    /// TPC-C: warehouses of ten districts
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = partywall_terminal::whole::<u32>(1..=100))]
    warehouses: u32,

    /// TPC-C: items (100,000 in the specification)
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = partywall_terminal::whole::<u32>(20..=100_000))]
    items: u32,

    /// TPC-C: customers of each district (3,000 in the specification)
    #[arg(long, value_name = "N", default_value_t = 300, value_parser = partywall_terminal::whole::<u32>(30..=3000))]
    customers: u32,

    /// TPC-C: terminals, each with one transaction after the other
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = partywall_terminal::whole::<u32>(1..=90))]
    terminals: u32,

    /// TPC-C: seconds of each run
    #[arg(long, value_name = "N", default_value_t = 60, value_parser = partywall_terminal::whole::<u32>(1..=3600))]
    seconds: u32,

    /// Write all results to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// A load.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum LoadArg {
    Iozone,
    Fio,
    Tpcc,
}

impl NasMeasureArgs {
    fn loads(&self) -> impl Iterator<Item = NasLoad> {
        let scale = TpccScale { warehouses: self.warehouses, items: self.items, customers: self.customers };
        let tpcc = TpccOptions { scale, terminals: self.terminals, seconds: self.seconds };
        self.loads.iter().map(move |load| match load {
            LoadArg::Iozone => NasLoad::Iozone,
            LoadArg::Fio => NasLoad::Fio,
            LoadArg::Tpcc => NasLoad::Tpcc(tpcc),
        })
    }
}

/// The figures of a form, each with the values of all runs.
type Results = Vec<(String, NasUnit, Vec<f64>)>;

pub(super) fn run(args: &NasMeasureArgs) -> Result<ExitCode, Box<dyn Error>> {
    let _stop = stop::on_signals()?;
    let show = Show::new();
    let loads = available(args, &show);
    if loads.is_empty() {
        return Ok(UNAVAILABLE.into());
    }
    let mut results: Vec<(NasKind, Results)> = Vec::new();
    let mut about = Value::Null;
    for kind in args.forms.iter().copied().map(NasKind::from) {
        show.step(&format!("The appliance: {kind}"));
        let booted = partywall_lab::check_tools().and_then(|()| Nas::boot(kind, &mut |said| show.busy(said)));
        let nas = match booted {
            Ok(nas) => nas,
            Err(e @ (LabError::Tool { .. } | LabError::Program { .. })) if !partywall_lab::interrupted() => {
                show.quiet();
                show.say(&format!("   left out: {e}"));
                if results.is_empty() {
                    return Ok(UNAVAILABLE.into());
                }
                continue;
            }
            Err(e) => return Err(e.into()),
        };
        about = json!({ "accel": nas.accel().to_string(), "kernel": nas.kernel() });
        results.push((kind, measure(&nas, &loads, args.runs, &show)?));
        show.busy("taking the machines down");
        drop(nas);
        show.quiet();
    }
    print(&show, &results);
    if let Some(path) = &args.json {
        let rows: Vec<Value> = results
            .iter()
            .map(|(kind, figures)| {
                let one = |(name, unit, values): &(String, NasUnit, Vec<f64>)| json!({ "figure": name, "unit": unit.to_string(), "values": values });
                json!({ "appliance": kind.to_string(), "figures": figures.iter().map(one).collect::<Vec<_>>() })
            })
            .collect();
        let text = serde_json::to_string_pretty(&json!({ "environment": about, "appliances": rows }))?;
        std::fs::write(path, text).map_err(|e| format!("cannot write {}: {e}", path.display()))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The loads whose programs are there. fio stands in for IOZone.
fn available(args: &NasMeasureArgs, show: &Show) -> Vec<NasLoad> {
    let mut loads = Vec::new();
    for load in args.loads() {
        let missing = load.check().err();
        let load = match (load, missing) {
            (load, None) => load,
            (NasLoad::Iozone, Some(e)) if NasLoad::Fio.check().is_ok() => {
                show.say(&format!("IOZONE DOES NOT RUN, fio's equivalents do in its place: {e}"));
                NasLoad::Fio
            }
            (load, Some(e)) => {
                show.say(&format!("{load} is left out: {e}"));
                continue;
            }
        };
        if !loads.contains(&load) {
            loads.push(load);
        }
    }
    loads
}

/// The figures of each load.
fn measure(nas: &Nas, loads: &[NasLoad], runs: u32, show: &Show) -> Result<Results, LabError> {
    let mut results: Results = Vec::new();
    for run in 1..=runs {
        for load in loads {
            show.busy(&format!("run {run} of {runs}: {load}"));
            for NasFigure { name, unit, value } in nas.run(*load)? {
                match results.iter_mut().find(|(known, ..)| *known == name) {
                    Some((_, _, values)) => values.push(value),
                    None => results.push((name, unit, vec![value])),
                }
            }
        }
    }
    let [read, written, copied] = nas.disk_bytes()?;
    if copied > 0 {
        show.say(&format!(
            "   disks between machines: {} MiB read, {} MiB written, each byte copied {:.2} times by a back end",
            read >> 20,
            written >> 20,
            copied as f64 / (read + written).max(1) as f64
        ));
    }
    Ok(results)
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(0.0)
}

fn print(show: &Show, results: &[(NasKind, Results)]) {
    show.say("\nResults at the client, by NFS 4.2 (median, and the range of the runs; of ms less is better)\n");
    let mut head = vec!["FIGURE".to_owned(), "UNIT".to_owned()];
    head.extend(results.iter().map(|(kind, _)| format!(">{}", kind.to_string().to_uppercase())));
    head.extend(results.iter().skip(1).map(|(kind, _)| format!(">x {kind}")));
    let head: Vec<&str> = head.iter().map(String::as_str).collect();
    let mut shown = table(&head);
    let Some((_, first)) = results.first() else { return };
    for (name, unit, _) in first {
        let mut cells = vec![name.clone(), unit.to_string()];
        // A transaction that is rare may be missing from a short run.
        let of =
            |figures: &Results| figures.iter().find(|(other, ..)| other == name).map(|(_, _, values)| values.clone());
        let values: Vec<Option<Vec<f64>>> = results.iter().map(|(_, figures)| of(figures)).collect();
        for values in &values {
            cells.push(values.as_ref().map_or_else(|| "-".to_owned(), |values| range(values)));
        }
        let medians: Vec<Option<f64>> = values.iter().map(|values| values.as_deref().map(median)).collect();
        let ratio = |other: &Option<f64>| Some(format!("{:.2}", medians[0]? / (*other)?));
        cells.extend(medians.iter().skip(1).map(|other| ratio(other).unwrap_or_else(|| "-".to_owned())));
        shown.add_row(cells);
    }
    show.say(&shown.to_string());
}

fn range(values: &[f64]) -> String {
    let least = values.iter().copied().fold(f64::INFINITY, f64::min);
    let most = values.iter().copied().fold(0.0, f64::max);
    format!("{:.1} ({least:.1} .. {most:.1})", median(values))
}
