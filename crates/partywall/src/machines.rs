//! Virtual machines of the broker (protocol G1): attaching, detaching, listing. For administrators.

use crate::session::unexpected;
use crate::{Domain, Error, Result};
use partywall_protocol::wire::{MachineRow, Message, What};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How long a machine may take to give up its windows: longer than the broker waits for its agent.
const RELEASE: Duration = Duration::from_secs(75);

/// A virtual machine to attach.
///
/// ```
/// use partywall::MachineSpec;
///
/// let spec = MachineSpec::new("build", "/run/vm/build.qmp", "/run/vm/build.port").room(256 << 20);
/// assert_eq!((spec.name.as_str(), spec.room), ("build", 256 << 20));
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct MachineSpec {
    /// The machine's name. The names of its programs' domains equal it or begin with it and a dot.
    pub name: String,
    /// The socket of its monitor (QMP).
    pub monitor: PathBuf,
    /// The socket of its serial port `org.partywall.0`.
    pub port: PathBuf,
    /// Bytes of each window between this machine and others, rounded up to a power of two; 0 leaves it to the broker.
    pub room: u64,
    /// Only devices that QEMU can migrate: all windows are `virtio-pmem`, and there is no doorbell device.
    pub migratable: bool,
}

impl MachineSpec {
    /// A machine with windows of the usual size.
    pub fn new(name: impl Into<String>, monitor: impl Into<PathBuf>, port: impl Into<PathBuf>) -> Self {
        Self { name: name.into(), monitor: monitor.into(), port: port.into(), room: 0, migratable: false }
    }

    /// Sets [`MachineSpec::room`].
    #[must_use]
    pub fn room(mut self, bytes: u64) -> Self {
        self.room = bytes;
        self
    }

    /// Sets [`MachineSpec::migratable`].
    ///
    /// ```
    /// use partywall::MachineSpec;
    ///
    /// let spec = MachineSpec::new("build", "/run/vm/build.qmp", "/run/vm/build.port").migratable(true);
    /// assert!(spec.migratable);
    /// ```
    #[must_use]
    pub fn migratable(mut self, migratable: bool) -> Self {
        self.migratable = migratable;
        self
    }
}

/// The result of attaching a machine.
///
/// ```no_run
/// use partywall::{Domain, MachineSpec};
///
/// let admin = Domain::join("admin")?;
/// let spec = MachineSpec::new("build", "/run/vm/build.qmp", "/run/vm/build.port");
/// let attached = admin.attach_machine(&spec)?;
/// println!("machine {}: {} windows plugged in {:?}", attached.machine, attached.plugged, attached.took);
/// println!("{}", attached.remark);
///
/// admin.release_machine("build")?;
/// // QEMU migrates the machine here. If that fails, the machine stays:
/// admin.resume_machine("build")?;
///
/// admin.detach_machine("build")?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MachineAttached {
    /// The broker's number of the machine.
    pub machine: u32,
    /// Windows that were plugged into it; 0 if all were there before.
    pub plugged: u32,
    /// The time that the host took for that.
    pub took: Duration,
    /// For people: the kind of its windows with the reason, and missing parts.
    pub remark: String,
}

impl Domain {
    /// Attaches a virtual machine to the broker. The broker plugs windows into it towards every other machine and the host, and serves its
    /// programs as sessions. Attaching the machine again has no further effect. Blocks until the windows are plugged in, at most ten seconds.
    ///
    /// # Errors
    /// [`Error::Refused`] names the obstacle: the policy, the monitor, or the machine's options. [`Error::TimedOut`] after ten seconds.
    pub fn attach_machine(&self, spec: &MachineSpec) -> Result<MachineAttached> {
        let message = Message::AddMachine {
            room: spec.room,
            migratable: spec.migratable,
            name: spec.name.clone(),
            monitor: text(&spec.monitor)?,
            port: text(&spec.port)?,
        };
        match self.request(&message, &[])? {
            (Message::MachineAdded { machine, plugged, took_us, remark }, _) => {
                Ok(MachineAttached { machine, plugged, took: Duration::from_micros(took_us), remark: remark.0 })
            }
            (other, _) => Err(unexpected(&other)),
        }
    }

    /// Detaches a virtual machine from the broker: its sessions and channels end.
    ///
    /// # Errors
    /// [`Error::Refused`] by policy, or if there is no such machine.
    pub fn detach_machine(&self, name: &str) -> Result<()> {
        match self.request(&Message::RemoveMachine { name: name.to_owned() }, &[])? {
            (Message::Done {}, _) => Ok(()),
            (other, _) => Err(unexpected(&other)),
        }
    }

    /// Makes a machine give up its windows, before a migration: its connections go back to TCP, its channels end, and its agent
    /// removes the devices. QEMU can then migrate the machine, or [`Domain::resume_machine`] takes it back. Blocks for at most 75 seconds.
    ///
    /// # Errors
    /// [`Error::Refused`] names the obstacle, or the process in the machine that still holds a window. The machine then gets no new
    /// connections through memory until it is released again, resumed or detached.
    pub fn release_machine(&self, name: &str) -> Result<()> {
        match self.request_within(RELEASE, &Message::ReleaseMachine { name: name.to_owned() })? {
            (Message::Done {}, _) => Ok(()),
            (other, _) => Err(unexpected(&other)),
        }
    }

    /// Gives a machine that was released for a migration its windows again.
    ///
    /// # Errors
    /// [`Error::Refused`] if the machine was not released, has left its QEMU, or its monitor does not answer.
    pub fn resume_machine(&self, name: &str) -> Result<MachineAttached> {
        match self.request(&Message::ResumeMachine { name: name.to_owned() }, &[])? {
            (Message::MachineAdded { machine, plugged, took_us, remark }, _) => {
                Ok(MachineAttached { machine, plugged, took: Duration::from_micros(took_us), remark: remark.0 })
            }
            (other, _) => Err(unexpected(&other)),
        }
    }

    /// The attached virtual machines.
    ///
    /// # Errors
    /// [`Error::Refused`] by policy.
    ///
    /// ```
    /// use partywall::Domain;
    ///
    /// # let broker = partywall_daemon::Broker::embedded()?;
    /// # let web = Domain::builder().name("web").broker(broker.path()).join()?;
    /// for machine in web.machines()? {
    ///     println!("{}: {} of {} windows ready", machine.name, machine.ready, machine.windows);
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn machines(&self) -> Result<Vec<MachineRow>> {
        self.list(
            What::Machines,
            |m| match m {
                Message::Machines { page } => Ok((page.more, page.rows)),
                other => Err(unexpected(&other)),
            },
            |row| u64::from(row.machine),
        )
    }
}

/// The broker runs in another folder, so paths must say where they begin.
fn text(path: &Path) -> Result<String> {
    let absolute = std::path::absolute(path).map_err(|e| Error::system("tell where a socket is", e))?;
    absolute.into_os_string().into_string().map_err(|path| Error::Invalid(format!("the path {path:?} is not UTF-8")))
}
