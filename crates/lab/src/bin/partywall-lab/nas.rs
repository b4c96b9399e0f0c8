//! The storage appliance in three forms, and their table.

use crate::stop;
use partywall_lab::LabError;
use partywall_lab::nas::{Nas, NasKind, NasLoad};
use partywall_terminal::{Show, table};
use serde_json::{Value, json};
use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;

/// The exit code where machines cannot be booted (`EX_UNAVAILABLE` of sysexits.h).
const UNAVAILABLE: u8 = 69;

/// Builds a storage appliance of four machines that Partywall connects, runs loads on it by NFS from a client outside, and compares it with
/// one machine that has all four functions, and with four machines over tap, bridge and NBD.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Runs of each load; the table has their medians
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = partywall_terminal::whole::<u32>(1..=99))]
    runs: u32,

    /// Build only these forms: the four machines that Partywall connects, the one machine, the four over tap, bridge and NBD; may be repeated
    #[arg(long = "form", value_enum, default_values_t = [FormArg::Partywall, FormArg::Monolith, FormArg::Bridge])]
    forms: Vec<FormArg>,

    /// Write all results to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// A form of the appliance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum FormArg {
    Partywall,
    Monolith,
    Bridge,
}

impl From<FormArg> for NasKind {
    fn from(form: FormArg) -> Self {
        match form {
            FormArg::Partywall => Self::Partywall,
            FormArg::Monolith => Self::Monolith,
            FormArg::Bridge => Self::Bridge,
        }
    }
}

pub(crate) fn run(args: &Args) -> Result<ExitCode, Box<dyn Error>> {
    let _stop = stop::on_signals()?;
    let show = Show::new();
    let mut results: Vec<(NasKind, Vec<Vec<f64>>)> = Vec::new();
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
        results.push((kind, measure(&nas, args.runs, &show)?));
        show.busy("taking the machines down");
        drop(nas);
        show.quiet();
    }
    print(&show, &results);
    if let Some(path) = &args.json {
        let rows: Vec<Value> = results
            .iter()
            .map(|(kind, loads)| {
                let loads: Vec<Value> = NasLoad::ALL
                    .iter()
                    .zip(loads)
                    .map(|(load, rates)| json!({ "load": load.to_string(), "bytes_per_second": rates }))
                    .collect();
                json!({ "appliance": kind.to_string(), "loads": loads })
            })
            .collect();
        let text = serde_json::to_string_pretty(&json!({ "environment": about, "appliances": rows }))?;
        std::fs::write(path, text).map_err(|e| format!("cannot write {}: {e}", path.display()))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The rates of each load, in bytes a second.
fn measure(nas: &Nas, runs: u32, show: &Show) -> Result<Vec<Vec<f64>>, LabError> {
    let mut rates = vec![Vec::new(); NasLoad::ALL.len()];
    for run in 1..=runs {
        for (load, rates) in NasLoad::ALL.into_iter().zip(&mut rates) {
            show.busy(&format!("run {run} of {runs}: {load}"));
            rates.push(nas.run(load)?.bytes_per_second);
        }
        nas.client()?.shell("rm -f /mnt/file /mnt/load*")?;
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
    Ok(rates)
}

fn median(rates: &[f64]) -> f64 {
    let mut sorted = rates.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(0.0)
}

fn print(show: &Show, results: &[(NasKind, Vec<Vec<f64>>)]) {
    show.say("\nResults: MB/s at the client, by NFS 4.2 (median, and the range of the runs)\n");
    let mut head = vec!["LOAD".to_owned()];
    head.extend(results.iter().map(|(kind, _)| format!(">{}", kind.to_string().to_uppercase())));
    head.extend(results.iter().skip(1).map(|(kind, _)| format!(">x {kind}")));
    let head: Vec<&str> = head.iter().map(String::as_str).collect();
    let mut shown = table(&head);
    for (number, load) in NasLoad::ALL.iter().enumerate() {
        let mut cells = vec![load.to_string()];
        let medians: Vec<f64> = results.iter().map(|(_, loads)| median(&loads[number])).collect();
        for ((_, loads), median) in results.iter().zip(&medians) {
            let least = loads[number].iter().copied().fold(f64::INFINITY, f64::min);
            let most = loads[number].iter().copied().fold(0.0, f64::max);
            cells.push(format!("{:.1} ({:.1} .. {:.1})", median / 1e6, least / 1e6, most / 1e6));
        }
        cells.extend(medians.iter().skip(1).map(|other| format!("{:.2}", medians[0] / other)));
        shown.add_row(cells);
    }
    show.say(&shown.to_string());
}
