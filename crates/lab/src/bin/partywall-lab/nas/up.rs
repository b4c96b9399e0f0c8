//! An appliance that stays until its user ends it.

use super::{FormArg, UNAVAILABLE};
use crate::playground::Folder;
use crate::stop;
use partywall_lab::LabError;
use partywall_lab::nas::{Nas, NasKind, NasPart};
use std::error::Error;
use std::process::ExitCode;

/// The options of `partywall-lab nas up`.
#[derive(Debug, clap::Args)]
pub(super) struct NasUpArgs {
    /// The form to build: four machines that Partywall connects, one machine, four over tap, bridge and NBD
    #[arg(long, value_enum, default_value_t = FormArg::Partywall)]
    form: FormArg,
}

impl NasUpArgs {
    pub(super) fn form(&self) -> NasKind {
        self.form.into()
    }
}

pub(super) fn run(args: &NasUpArgs) -> Result<ExitCode, Box<dyn Error>> {
    let folder = Folder::new()?;
    let stop = stop::on_signals()?;
    let booted = partywall_lab::check_tools()
        .and_then(|()| Nas::boot_with_consoles(args.form(), folder.path(), &mut |said| println!("{said}")));
    let nas = match booted {
        Ok(nas) => nas,
        Err(e @ (LabError::Tool { .. } | LabError::Program { .. })) if !partywall_lab::interrupted() => {
            eprintln!("partywall-lab: the appliance cannot be built here: {e}");
            return Ok(UNAVAILABLE.into());
        }
        Err(e) => return Err(e.into()),
    };
    explain(&nas)?;
    stop.wait();
    println!("ending the machines");
    Ok(ExitCode::SUCCESS)
}

fn explain(nas: &Nas) -> Result<(), LabError> {
    println!("\nThe appliance runs ({}, {}, kernel {}):", nas.kind(), nas.accel(), nas.kernel());
    for part in nas.parts() {
        println!("{part}: {}; a shell: partywall-lab shell {part}", part.purpose());
    }
    let mounted = "df -h /mnt && echo hello > /mnt/hello && ls -l /mnt";
    println!("\n{}$ {mounted}\n{}", NasPart::Client, nas.client()?.shell(mounted)?);
    if nas.kind() == NasKind::Partywall {
        println!("\nand here, its switch and its disks:");
        for command in nas.host_commands() {
            println!("{command}");
        }
    }
    println!("Ctrl-C ends the machines and removes their disks.");
    Ok(())
}
