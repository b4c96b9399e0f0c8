//! A broker on a thread of this process.

use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::thread::JoinHandle;

use tempfile::TempDir;

use crate::config::Config;
use crate::control::ServerControl;
use crate::core::CoreStatus;
use crate::policy::Policy;
use crate::server::{Server, StartError};

/// A running broker; dropping it stops it.
///
/// Open channels go on without it. For tests, demonstrations and programs that are their own only users,
/// [`embedded`](Self::embedded) needs nothing prepared:
///
/// ```
/// let broker = partywall_daemon::Broker::embedded()?;
/// assert!(broker.path().exists());
/// # Ok::<(), partywall_daemon::StartError>(())
/// ```
#[derive(Debug)]
pub struct Broker {
    path: std::path::PathBuf,
    control: ServerControl,
    metrics_port: Option<SocketAddr>,
    thread: Option<JoinHandle<io::Result<()>>>,
    /// Removed last, when the broker in it has stopped.
    _dir: Option<TempDir>,
}

impl Broker {
    /// Starts a broker on its own socket in a new temporary directory that only this user can enter.
    ///
    /// Only the same user and root may use it. Raises this process's soft limit on descriptors to the hard one, as every broker does.
    ///
    /// # Errors
    /// If the system refuses the directory, the socket or the thread.
    pub fn embedded() -> Result<Self, StartError> {
        let private = std::fs::Permissions::from_mode(0o700);
        let dir = tempfile::Builder::new().prefix("partywall-").permissions(private).tempdir()?;
        Self::spawn(&Config::new(dir.path().join("broker.sock")), Some(dir), |_| ())
    }

    /// As [`embedded`](Self::embedded), and recomputes all accounts after each event. A wrong account ends the broker by a panic.
    ///
    /// # Errors
    /// Those of [`embedded`](Self::embedded).
    #[cfg(feature = "invariants")]
    #[doc(hidden)]
    pub fn embedded_with_checks() -> Result<Self, StartError> {
        let dir = tempfile::tempdir()?;
        Self::spawn(&Config::new(dir.path().join("broker.sock")), Some(dir), Server::check_each_event)
    }

    /// Starts a broker as told.
    ///
    /// # Errors
    /// [`StartError`] says what is in the way.
    pub fn start(config: &Config) -> Result<Self, StartError> {
        Self::spawn(config, None, |_| ())
    }

    fn spawn(config: &Config, dir: Option<TempDir>, prepare: impl FnOnce(&mut Server)) -> Result<Self, StartError> {
        let mut server = Server::open(config)?;
        prepare(&mut server);
        let (path, control, metrics_port) = (server.path().to_owned(), server.control(), server.metrics_port());
        let thread =
            std::thread::Builder::new().name("partywall-broker".to_owned()).spawn(move || server.run(|_| ()))?;
        Ok(Self { path, control, metrics_port, thread: Some(thread), _dir: dir })
    }

    /// The socket to join by.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The port at which metrics are served, if they are served at a port.
    pub fn metrics_port(&self) -> Option<SocketAddr> {
        self.metrics_port
    }

    /// How much there was of everything after the latest event.
    pub fn status(&self) -> CoreStatus {
        self.control.status()
    }

    /// Puts another policy in force soon. Sessions that it would not let join are ended; open channels go on.
    pub fn set_policy(&self, policy: Policy) {
        self.control.set_policy(policy);
    }

    /// Stops it and waits until it has stopped: no session, thread or socket file is left.
    ///
    /// # Errors
    /// What ended it before, if something did.
    pub fn stop(mut self) -> io::Result<()> {
        self.join()
    }

    fn join(&mut self) -> io::Result<()> {
        self.control.stop();
        match self.thread.take().map(JoinHandle::join) {
            None => Ok(()),
            Some(Ok(result)) => result,
            Some(Err(_)) => Err(io::Error::other("the broker's thread panicked")),
        }
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        if let Err(error) = self.join() {
            tracing::error!(%error, "the broker did not end well");
        }
    }
}
