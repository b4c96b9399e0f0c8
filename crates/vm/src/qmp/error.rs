//! Why a monitor did not do as asked, and what to do about it.

use std::io;
use std::path::PathBuf;

/// Why a monitor did not do as asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum QmpError {
    /// No process serves the monitor's socket.
    #[error("cannot reach the monitor at {path}: {source}; start QEMU with -qmp unix:{path},server=on,wait=off, and run as a user who may open it", path = path.display())]
    Unreachable {
        /// The path of the monitor's socket.
        path: PathBuf,
        /// Why the connection failed.
        source: io::Error,
    },
    /// A process accepts the connection, but does not answer.
    #[error("{path} accepts connections but sends no QMP greeting; another program (libvirt?) probably has this monitor: give QEMU a second -qmp", path = path.display())]
    Busy {
        /// The path of the monitor's socket.
        path: PathBuf,
    },
    /// It is no QMP monitor.
    #[error("{path} does not speak QMP (it said {said:?}); it wants QEMU's -qmp socket, not -monitor, -serial or -chardev", path = path.display())]
    NotQmp {
        /// The path of the socket.
        path: PathBuf,
        /// The beginning of what it said.
        said: String,
    },
    /// QEMU refused a command.
    #[error("QEMU refused {command}: {why}")]
    Refused {
        /// The command that QEMU refused.
        command: String,
        /// In QEMU's words.
        why: String,
    },
    /// The connection broke or fell silent.
    #[error("lost the monitor at {path} during {command}: {source}; the virtual machine has ended or hangs", path = path.display())]
    Lost {
        /// The path of the monitor's socket.
        path: PathBuf,
        /// The command that was sent.
        command: String,
        /// How the connection broke.
        source: io::Error,
    },
    /// An answer of QEMU's was not what its documentation says.
    #[error("QEMU's answer to {command} is not understood; this is a version that Partywall does not know")]
    Answer {
        /// The command that was answered.
        command: &'static str,
    },
}

impl QmpError {
    /// QEMU refused to make an object because there is one of that name.
    pub(crate) fn is_duplicate(&self) -> bool {
        matches!(self, Self::Refused { why, .. } if why.contains("duplicate"))
    }
}
