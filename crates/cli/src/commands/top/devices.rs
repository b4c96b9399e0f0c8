//! Network switches and disks, which are shown below the connections.

use std::path::PathBuf;

use serde::Serialize;

use crate::commands::stat::devices::{self, DeviceTotals};
use crate::connections::Look;

/// Which devices are shown.
#[derive(Debug, Clone, Default, clap::Args)]
pub(super) struct ShownDeviceArgs {
    /// Folder of the switches (`partywall net`) whose ports are shown [default: that of `partywall net`]
    #[arg(long, value_name = "FOLDER")]
    net_folder: Option<PathBuf>,

    /// Also show the disk (`partywall blk`) at this socket; may be repeated
    #[arg(long = "disk", value_name = "SOCKET", value_hint = clap::ValueHint::FilePath)]
    disks: Vec<PathBuf>,
}

/// Connections and devices at one moment.
#[derive(Debug, Default, Serialize)]
pub(super) struct TopLook {
    #[serde(flatten)]
    pub(super) look: Look,
    #[serde(flatten)]
    pub(super) devices: DeviceTotals,
}

impl ShownDeviceArgs {
    /// Adds the devices. A device that does not answer becomes a note.
    pub(super) fn look(&self, mut look: Look) -> TopLook {
        let devices = devices::look(self.net_folder.as_deref(), &self.disks, &mut look.notes);
        TopLook { look, devices }
    }
}

impl TopLook {
    /// A line for each device.
    pub(super) fn device_lines(&self) -> Vec<String> {
        let lines = self.devices.lines();
        let width = lines.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(0);
        let line = |(name, text): (String, String)| {
            partywall_terminal::printable(&format!("{name:<width$}  {text}")).to_string()
        };
        lines.into_iter().map(line).collect()
    }
}
