//! Network cards of `partywall net` and disks of `partywall blk`, which come into a running machine and go.
//!
//! The programs of the switch and of disks plug them in. This finds the machine's monitor, which the broker knows, and executes them.

use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::args::Global;
use crate::exit::{CommandFailure, Context as _};
use crate::{session, siblings};

/// The device of a command.
#[derive(Debug, clap::Args)]
#[group(id = "device", multiple = true)]
pub(super) struct DeviceArgs {
    /// A network card on this switch of `partywall net`, and on this port [default: the machine's name]
    #[arg(long, value_name = "SWITCH[:PORT]", conflicts_with = "disk")]
    net: Option<String>,
    /// A disk: the socket of its `partywall blk serve`, or one that a domain offers by `partywall blk export`
    #[arg(long, value_name = "SOCKET|DOMAIN:NAME")]
    disk: Option<PathBuf>,
    /// Folder of all switches [default: /run/partywall/net for root, else $XDG_RUNTIME_DIR/partywall/net]
    #[arg(long, value_name = "FOLDER", requires = "net")]
    folder: Option<PathBuf>,
}

impl DeviceArgs {
    pub(super) fn is_some(&self) -> bool {
        self.net.is_some() || self.disk.is_some()
    }

    /// Plugs it into the machine behind `monitor`, or else behind that of the attached machine. `options` are those of a card.
    pub(super) fn attach<'a>(
        &self,
        global: &Global,
        name: &str,
        monitor: Option<&Path>,
        options: impl Iterator<Item = &'a str>,
    ) -> Result<(), CommandFailure> {
        let mut command = self.command("attach", global, name, &find_monitor(global, name, monitor)?)?;
        command.args(options);
        execute(command)
    }

    /// Takes it out again.
    pub(super) fn detach(&self, global: &Global, name: &str, monitor: Option<&Path>) -> Result<(), CommandFailure> {
        execute(self.command("detach", global, name, &find_monitor(global, name, monitor)?)?)
    }

    fn command(&self, what: &str, global: &Global, name: &str, monitor: &Path) -> Result<Command, CommandFailure> {
        let program = if self.net.is_some() { "partywall-net" } else { "partywall-blk" };
        let mut command = Command::new(siblings::find(program, "partywall-vhost")?);
        command.arg(what);
        if let Some(net) = &self.net {
            let (switch, port) = net.split_once(':').unwrap_or((net, name));
            command.args([switch, port]);
        }
        if let Some(disk) = &self.disk {
            if is_exported(disk) {
                command.arg("--from").arg(disk);
                command.args(global.broker.iter().flat_map(|broker| ["--broker".as_ref(), broker.as_os_str()]));
            } else {
                command.arg("--socket").arg(disk);
            }
        }
        if let Some(folder) = &self.folder {
            command.arg("--folder").arg(folder);
        }
        command.arg("--qmp").arg(monitor);
        Ok(command)
    }
}

/// Whether this is `DOMAIN:NAME`. A path with a colon is written with a slash.
fn is_exported(disk: &Path) -> bool {
    let text = disk.to_string_lossy();
    text.contains(':') && !text.contains('/')
}

fn find_monitor(global: &Global, name: &str, monitor: Option<&Path>) -> Result<PathBuf, CommandFailure> {
    if let Some(monitor) = monitor {
        return Ok(monitor.to_owned());
    }
    let machines = session::join(global)?.machines().context("cannot list machines")?;
    machines.into_iter().find(|row| row.name == name).map(|row| row.monitor.into()).ok_or_else(|| {
        CommandFailure::general(format!("no machine called {name} is attached"))
            .hint("`partywall vm list` shows those that are; with --qmp, the machine need not be attached")
    })
}

fn execute(mut command: Command) -> Result<(), CommandFailure> {
    // Only comes back when it failed.
    let program = PathBuf::from(command.get_program());
    Err(command.exec()).context(format_args!("cannot run {}", program.display()))
}
