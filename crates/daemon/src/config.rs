//! The configuration that a broker starts with.

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::policy::{MetricsAddress, Policy, PolicyError};

/// Where a broker serves, and by which rules.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Config {
    /// The socket to serve. Its directory must exist; a lock file is kept beside it.
    pub socket: PathBuf,
    /// Permissions of the socket file: the users who may connect to it at all.
    pub socket_mode: u32,
    /// The policy file; without one the broker's user and root may do everything, and others nothing.
    pub policy_file: Option<PathBuf>,
    /// The file need not be there when the broker starts; it may be made later.
    pub policy_file_is_optional: bool,
    /// How long a virtual machine may send nothing before it counts as hung.
    pub machine_silence: Duration,
    /// Where metrics are served; without it, where the policy file says.
    pub metrics: Option<MetricsAddress>,
    /// Where the kernel's record of sequence numbers is kept (protocol T3.11). If there is none, the broker reads numbers in repair mode.
    pub number_record: Option<PathBuf>,
}

/// An emulated guest on a busy host takes its time.
const SILENCE: Duration = Duration::from_secs(15);

impl Config {
    /// A broker for the user who runs it, on this socket.
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self {
            socket: socket.into(),
            socket_mode: 0o600,
            policy_file: None,
            policy_file_is_optional: false,
            machine_silence: SILENCE,
            metrics: None,
            number_record: None,
        }
    }

    /// Lets others connect to the socket, such as `0o666`; the policy still decides what they may do.
    #[must_use]
    pub fn socket_mode(mut self, mode: u32) -> Self {
        self.socket_mode = mode;
        self
    }

    /// Reads the policy from this file.
    #[must_use]
    pub fn policy_file(mut self, path: impl Into<PathBuf>) -> Self {
        self.policy_file = Some(path.into());
        self
    }

    /// Reads the policy from this file if it is there.
    #[must_use]
    pub fn optional_policy_file(mut self, path: impl Into<PathBuf>) -> Self {
        self.policy_file_is_optional = true;
        self.policy_file(path)
    }

    /// The file that the policy is read from now; `None` if there is none, or it is optional and not there.
    pub fn present_policy_file(&self) -> Option<&Path> {
        self.policy_file.as_deref().filter(|path| !self.policy_file_is_optional || path.exists())
    }

    /// Takes a virtual machine for hung after this time without a sign of life.
    #[must_use]
    pub fn machine_silence(mut self, silence: Duration) -> Self {
        self.machine_silence = silence;
        self
    }

    /// Serves metrics there.
    #[must_use]
    pub fn metrics(mut self, address: MetricsAddress) -> Self {
        self.metrics = Some(address);
        self
    }

    /// Reads sequence numbers from the record that is kept at this directory, if one is.
    #[must_use]
    pub fn number_record(mut self, directory: impl Into<PathBuf>) -> Self {
        self.number_record = Some(directory.into());
        self
    }

    /// The policy that this asks for, read now.
    ///
    /// # Errors
    /// [`PolicyError`] says what is wrong with the file.
    pub fn policy(&self) -> Result<Policy, PolicyError> {
        match self.present_policy_file() {
            Some(path) => Policy::read(path),
            None => Ok(Policy::for_user(rustix::process::geteuid().as_raw())),
        }
    }
}
