//! `partywall vm`: virtual machines that are attached to the broker.

mod device;
mod migrate;
mod start;

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Subcommand;
use partywall::{MachineAttached, MachineSpec, Mobility, PluggedAs, RungBy};
use partywall_terminal::table;
use serde::{Serialize, Serializer};

use crate::args::{Global, exit_table, parse_name};
use crate::exit::{CommandFailure, Context};
use crate::output;
use crate::{human, session};

const AFTER: &str = "\
An attached machine shares windows with each other attached machine and with the host. A window is memory that one side writes and the other \
side reads, plugged in while the machine runs. It is a memory device (virtio-pmem, nvdimm) if the machine was started with slots for \
memory, otherwise a PCI device (ivshmem); `attach` reports the kind and the reason. QEMU drops writes of the reading side. In the \
machine, `partywall agent` serves its programs. The names of their domains begin with the machine's name.

Examples:
  partywall vm args a                                            options to start QEMU with
  partywall vm attach a --qmp /run/a.qmp --port /run/a.port      attach it; may be repeated
  partywall vm attach a --net lan                                plug a card into it, on port a of the switch lan
  partywall vm attach a --disk /run/disk.sock                    plug a disk of `partywall blk` into it
  partywall vm detach a --net lan                                and remove the card
  partywall vm list
  partywall vm migrate a --to tcp:otherhost:4444                 live, to a QEMU with -incoming there; connections go by TCP meanwhile
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
        /// The machine's name; the names of its programs' domains equal it or begin with it and a dot
        #[arg(value_parser = parse_name)]
        name: String,
        /// The machine's monitor: the PATH of -qmp unix:PATH,server=on,wait=off
        #[arg(long, value_name = "SOCKET", required_unless_present_any = ["resume", "net", "disk"])]
        qmp: Option<PathBuf>,
        /// The host's end of the machine's serial port: the path of the chardev of org.partywall.0
        #[arg(long, value_name = "SOCKET", required_unless_present_any = ["resume", "net", "disk"], conflicts_with = "device")]
        port: Option<PathBuf>,
        /// Size of each window of the machine, rounded up to a power of two, at least 8M; 4M of it hold no rings [default: 64M]
        #[arg(long, value_name = "SIZE", value_parser = partywall_terminal::size, conflicts_with = "device")]
        window: Option<u64>,
        /// Plug in only devices that a live migration allows: windows as virtio-pmem, and no doorbell device
        #[arg(long, conflicts_with = "device")]
        migratable: bool,
        /// Keep a machine that `detach --for-migration` has released; it gets the same windows again
        #[arg(long, conflicts_with_all = ["qmp", "port", "window", "migratable", "device"])]
        resume: bool,
        #[command(flatten)]
        device: device::DeviceArgs,
        /// Ethernet address of the card; its port may send only from this address [default: that of the port, or one made from the socket's path and /etc/machine-id]
        #[arg(long, value_name = "ADDRESS", requires = "net")]
        mac: Option<String>,
        /// Pairs of queues of the card, 1 to 4; a guest uses one for each of its processors [default: 1]
        #[arg(long, value_name = "N", requires = "net")]
        queues: Option<u16>,
        /// Largest packet that the guest sends by the card, 68 to 65535 bytes [default: the guest's own, usually 1500]
        #[arg(long, value_name = "BYTES", requires = "net")]
        mtu: Option<u16>,
    },
    /// Detach a machine; its channels end
    Detach {
        /// The machine's name
        #[arg(value_parser = parse_name, add = clap_complete::ArgValueCompleter::new(crate::complete::machines))]
        name: String,
        /// Return the machine's connections to TCP and remove its windows, so that QEMU can migrate it
        #[arg(long, conflicts_with = "device")]
        for_migration: bool,
        #[command(flatten)]
        device: device::DeviceArgs,
        /// With --net or --disk: the monitor of a machine that is not attached
        #[arg(long, value_name = "SOCKET", requires = "device")]
        qmp: Option<PathBuf>,
    },
    /// Migrate a machine live: release its windows, let QEMU migrate it, and take it back if that fails
    Migrate {
        /// The machine's name
        #[arg(value_parser = parse_name, add = clap_complete::ArgValueCompleter::new(crate::complete::machines))]
        name: String,
        /// Address of a waiting QEMU with the same options and -incoming, as tcp:HOST:PORT or unix:PATH
        #[arg(long, value_name = "URI")]
        to: String,
        /// Cancel the migration after this time, in seconds; the machine then stays
        #[arg(long, value_name = "SECONDS", default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..))]
        limit: u64,
    },
    /// Show the attached machines
    List {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Print the options for QEMU, or the XML for libvirt, of a machine that can be attached
    Args {
        /// The machine's name
        #[arg(value_parser = parse_name)]
        name: String,
        /// Folder for the machine's sockets [default: /run/partywall; with --libvirt, /var/lib/libvirt/qemu/domain-NAME]
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
    #[serde(serialize_with = "mobility_in_a_word")]
    mobility: Mobility,
    #[serde(skip_serializing_if = "String::is_empty")]
    fixed_by: String,
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

/// For programs: `fixed`, `migratable` or `migrating`.
fn mobility_in_a_word<S: Serializer>(mobility: &Mobility, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(match mobility {
        Mobility::Fixed => "fixed",
        Mobility::Migratable => "migratable",
        Mobility::Migrating => "migrating",
    })
}

/// The result of attaching a machine, for people.
fn attached_in_words(name: &str, done: &MachineAttached) -> String {
    let mut said = match done.plugged {
        0 => format!("{name} is attached; its windows are in place"),
        1 => format!("{name} is attached; 1 window plugged in, in {}", human::seconds(done.took.as_secs_f64())),
        n => format!("{name} is attached; {n} windows plugged in, in {}", human::seconds(done.took.as_secs_f64())),
    };
    if !done.remark.is_empty() {
        said.push_str(&format!("\n{}", done.remark));
    }
    said
}

pub(crate) fn run(global: &Global, args: &Args) -> Result<(), CommandFailure> {
    match &args.command {
        VmCommand::Attach { name, qmp, device, mac, queues, mtu, .. } if device.is_some() => {
            let [queues, mtu] = [queues, mtu].map(|number| number.map(|number| number.to_string()));
            let options = [("--mac", mac.as_ref()), ("--queues", queues.as_ref()), ("--mtu", mtu.as_ref())];
            let options = options.into_iter().filter_map(|(option, value)| Some([option, value?.as_str()]));
            device.attach(global, name, qmp.as_deref(), options.flatten())
        }
        VmCommand::Detach { name, device, qmp, .. } if device.is_some() => device.detach(global, name, qmp.as_deref()),
        VmCommand::Attach { name, resume: true, .. } => {
            let done = session::join(global)?.resume_machine(name).context(format_args!("cannot resume {name}"))?;
            output::print(attached_in_words(name, &done))
        }
        VmCommand::Attach { name, qmp, port, window, migratable, .. } => {
            let (qmp, port) = (qmp.clone().unwrap_or_default(), port.clone().unwrap_or_default());
            let spec = MachineSpec::new(name, qmp, port).room(window.unwrap_or(0)).migratable(*migratable);
            let done = session::join(global)?.attach_machine(&spec).context(format_args!("cannot attach {name}"))?;
            output::print(attached_in_words(name, &done))
        }
        VmCommand::Detach { name, for_migration: true, .. } => {
            session::join(global)?.release_machine(name).context(format_args!("cannot release {name}"))?;
            output::print(format_args!(
                "{name} has released its windows and can be migrated; `partywall vm attach {name} --resume` lets it stay"
            ))
        }
        VmCommand::Detach { name, for_migration: false, .. } => {
            session::join(global)?.detach_machine(name).context(format_args!("cannot detach {name}"))?;
            output::print(format_args!("{name} is detached"))
        }
        VmCommand::Migrate { name, to, limit } => migrate::run(global, name, to, Duration::from_secs(*limit)),
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
            mobility: row.mobility,
            fixed_by: row.fixed_by,
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
    let mut shown =
        table(&["MACHINE", "AGENT", "SESSIONS", "WINDOWS READY", "DEVICES", "DOORBELL", "MIGRATABLE", "MONITOR"]);
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
            line.mobility.to_string(),
            line.monitor.clone(),
        ]);
    }
    output::print(shown)
}
