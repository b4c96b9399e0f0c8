//! `partywall vm`: virtual machines that are attached to the broker.

mod start;

use std::path::{Path, PathBuf};

use clap::Subcommand;
use partywall::{MachineSpec, PluggedAs, RungBy};
use partywall_terminal::table;
use serde::{Serialize, Serializer};

use crate::args::{Global, exit_table, parse_name};
use crate::exit::{CommandFailure, Context};
use crate::output;
use crate::{human, session};

const AFTER: &str = "\
An attached machine shares windows with every other and with the host. A window is memory that one of the two writes and the other \
reads, plugged in while the machine runs. It is a memory device (virtio-pmem, nvdimm) if the machine was started with slots for \
memory, otherwise a PCI device (ivshmem); `attach` reports the kind and the reason. QEMU drops writes of the reading side. In the \
machine, `partywall agent` serves its programs. The names of their domains begin with the machine's name.

Examples:
  partywall vm args a                                            options to start QEMU with
  partywall vm attach a --qmp /run/a.qmp --port /run/a.port      attach it; repeating this is harmless
  partywall vm list
  partywall cat -l files                                         in machine a, with --domain a
  partywall cat a:files                                          in machine b, or on the host";

/// Attach virtual machines, so that their programs connect through shared memory
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER, after_long_help = exit_table(AFTER))]
pub(crate) struct Args {
    #[command(subcommand)]
    command: VmCommand,
}

#[derive(Debug, Subcommand)]
enum VmCommand {
    /// Attach a running QEMU
    Attach {
        /// The machine's name; names of its programs' domains are this or begin with it
        #[arg(value_parser = parse_name)]
        name: String,
        /// Its monitor: the PATH of -qmp unix:PATH,server=on,wait=off
        #[arg(long, value_name = "SOCKET")]
        qmp: PathBuf,
        /// The host's end of its serial port: the path of the chardev of org.partywall.0
        #[arg(long, value_name = "SOCKET")]
        port: PathBuf,
        /// Size of each of its windows, rounded up to a power of two, at least 8M; 4M of it hold no rings [default: 64M]
        #[arg(long, value_name = "SIZE", value_parser = human::parse_size)]
        window: Option<u64>,
    },
    /// Detach a machine; its channels end
    Detach {
        /// Its name
        #[arg(value_parser = parse_name, add = clap_complete::ArgValueCompleter::new(crate::complete::machines))]
        name: String,
    },
    /// Show the machines that are attached
    List {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Print the options for QEMU, or the XML for libvirt, of a machine that can be attached
    Args {
        /// Its name
        #[arg(value_parser = parse_name)]
        name: String,
        /// Folder for its sockets [default: /run/partywall; with --libvirt, /var/lib/libvirt/qemu/domain-NAME]
        #[arg(long, value_name = "FOLDER")]
        sockets: Option<PathBuf>,
        /// Print XML for `virsh edit`, and the remaining steps
        #[arg(long)]
        libvirt: bool,
    },
}

#[derive(Debug, Serialize)]
struct MachineLine {
    name: String,
    agent: bool,
    sessions: u32,
    windows: u32,
    ready: u32,
    #[serde(serialize_with = "in_a_word")]
    plugged_as: PluggedAs,
    #[serde(serialize_with = "rung_in_a_word")]
    rung_by: RungBy,
    monitor: String,
    port: String,
}

/// For programs: `memory`, `pci`, or nothing where it is not known.
fn in_a_word<S: Serializer>(plugged_as: &PluggedAs, to: S) -> Result<S::Ok, S::Error> {
    match plugged_as {
        PluggedAs::Unknown => to.serialize_none(),
        PluggedAs::Memory => to.serialize_str("memory"),
        PluggedAs::Device => to.serialize_str("pci"),
    }
}

/// For programs: `port` or `interrupts`.
fn rung_in_a_word<S: Serializer>(rung_by: &RungBy, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(match rung_by {
        RungBy::Port => "port",
        RungBy::Interrupts => "interrupts",
    })
}

pub(crate) fn run(global: &Global, args: &Args) -> Result<(), CommandFailure> {
    match &args.command {
        VmCommand::Attach { name, qmp, port, window } => {
            let spec = MachineSpec::new(name, qmp, port).room(window.unwrap_or(0));
            let done = session::join(global)?.attach_machine(&spec).context(format_args!("cannot attach {name}"))?;
            let mut said = match done.plugged {
                0 => format!("{name} is attached; its windows are in place"),
                1 => format!("{name} is attached; 1 window plugged in, in {}", human::seconds(done.took.as_secs_f64())),
                n => format!(
                    "{name} is attached; {n} windows plugged in, in {}",
                    human::seconds(done.took.as_secs_f64())
                ),
            };
            if !done.remark.is_empty() {
                said.push_str(&format!("\n{}", done.remark));
            }
            output::print(said)
        }
        VmCommand::Detach { name } => {
            session::join(global)?.detach_machine(name).context(format_args!("cannot detach {name}"))?;
            output::print(format_args!("{name} is detached"))
        }
        VmCommand::List { json } => list(global, *json),
        VmCommand::Args { name, sockets, libvirt: false } => {
            output::print(start::arguments(name, sockets.as_deref().unwrap_or(Path::new("/run/partywall"))))
        }
        VmCommand::Args { name, sockets, libvirt: true } => output::print(start::libvirt(name, sockets.as_deref())),
    }
}

fn list(global: &Global, json: bool) -> Result<(), CommandFailure> {
    let rows = session::join(global)?.machines().context("cannot list machines")?;
    let lines: Vec<MachineLine> = rows
        .into_iter()
        .map(|row| MachineLine {
            name: row.name,
            agent: row.up,
            sessions: row.sessions,
            windows: row.windows,
            ready: row.ready,
            plugged_as: row.plugged_as,
            rung_by: row.rung_by,
            monitor: row.monitor,
            port: row.port,
        })
        .collect();
    if json {
        return output::print_json(&lines);
    }
    if lines.is_empty() {
        return output::print("no machine is attached; `partywall vm attach` attaches one");
    }
    let mut shown = table(&["MACHINE", "AGENT", "SESSIONS", "WINDOWS READY", "DEVICES", "DOORBELL", "MONITOR"]);
    for line in &lines {
        let agent = if line.agent { "up" } else { "not there" };
        let windows = format!("{} of {}", line.ready, line.windows);
        shown.add_row([
            line.name.clone(),
            agent.to_owned(),
            line.sessions.to_string(),
            windows,
            line.plugged_as.to_string(),
            line.rung_by.to_string(),
            line.monitor.clone(),
        ]);
    }
    output::print(shown)
}
