//! `partywall numbers`: has the kernel record the sequence numbers that TCP connections begin with, so that nobody reads them in repair mode.

use std::path::{Path, PathBuf};

use clap::Subcommand;
use partywall_region::number_record::recorder::{self, forget};
use partywall_region::number_record::{self, NumberRecord};

use crate::exit::{CommandFailure, Context};
use crate::output;

const AFTER: &str = "\
Two sockets are the ends of one connection if the sequence numbers that they began with match. Broker and agent read these numbers when a \
connection is to move to shared memory. The kernel reports them in TCP's repair mode, to a process with CAP_NET_ADMIN, and for that moment the \
connection stands still. After `on`, an eBPF program notes the numbers of each new connection at its socket. Then broker and agent need neither the \
mode nor, from Linux 5.19 on, the capability. Connections from before `on` are read as before.

`on` lasts until `off` or the next boot; the unit partywall-numbers.service repeats it at each boot. It needs root (CAP_BPF and CAP_NET_ADMIN), cgroups of version 2, and a file system of type bpf at \
/sys/fs/bpf; systemd mounts both. Broker and agent find the record without a restart. After `off`, those that have used it go on with it until they end.

Examples:
  partywall numbers on                                from now on, for all connections of this machine
  partywall numbers                                   whether it is on
  partywall numbers off";

/// Have the kernel record sequence numbers, for a broker or agent without CAP_NET_ADMIN
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER)]
pub(crate) struct Args {
    #[command(subcommand)]
    action: Option<NumbersAction>,

    /// Directory of the record, in a file system of type bpf (--number-record of partywalld and partywall-agent)
    #[arg(long, global = true, value_name = "DIR", default_value = number_record::DIRECTORY)]
    at: PathBuf,
}

#[derive(Debug, Subcommand)]
enum NumbersAction {
    /// Record the numbers of connections that are established from now on
    On,
    /// Stop recording
    Off,
}

pub(crate) fn run(args: &Args) -> Result<(), CommandFailure> {
    let at = &args.at;
    let record = NumberRecord::open(at).or_else(|error| {
        let hint = match error.kind() {
            std::io::ErrorKind::PermissionDenied => "only root, or the user who has turned it on, can open it",
            _ => "`partywall numbers off` removes it",
        };
        let failure = Err(error).context(format_args!("cannot open the record at {}", at.display()));
        failure.map_err(|failure| failure.hint(hint))
    });
    match &args.action {
        None => match record? {
            Some(_) => output::print(format_args!("on: the kernel records sequence numbers at {}", at.display())),
            None => output::print(format_args!("off: there is no record at {}", at.display())),
        },
        Some(NumbersAction::On) => match record? {
            Some(_) => output::print(format_args!("it is on already: the record at {} is kept", at.display())),
            None => turn_on(at),
        },
        // Also what cannot be opened is removed.
        Some(NumbersAction::Off) => match forget(at) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                output::print(format_args!("it is off already: there is no record at {}", at.display()))
            }
            other => {
                other.context(format_args!("cannot remove the record at {}", at.display()))?;
                output::print(format_args!("off: broker and agent read numbers in repair mode, where they may"))
            }
        },
    }
}

fn turn_on(at: &Path) -> Result<(), CommandFailure> {
    let record = recorder::record().or_else(|error| {
        let is_forbidden = error.kind() == std::io::ErrorKind::PermissionDenied;
        let failure = Err(error).context("the kernel does not record sequence numbers");
        if is_forbidden {
            failure.map_err(|failure| failure.hint("it takes root: CAP_BPF and CAP_NET_ADMIN"))
        } else {
            failure
        }
    })?;
    recorder::keep(&record, at).context(format_args!("cannot keep the record at {}", at.display()))?;
    output::print(format_args!("on: the kernel records the sequence numbers of new connections at {}", at.display()))
}
