//! The mechanisms under test, one per file, behind two small traits: bytes that are copied, and bytes that stay where they are.
//!
//! The bench makes what both sides share (sockets, memory) and hands each side its [`SideDescriptors`]; mechanisms that connect by name do so
//! in the measuring processes themselves.

mod calls;
mod descriptor;
mod eventfd;
#[cfg(feature = "iceoryx2")]
pub(crate) mod iceoryx2;
pub(crate) mod memory;
pub(crate) mod partywall;
mod pingpong;
mod plain_ring;
mod tcp;
mod unix;

use std::{collections::VecDeque, os::fd::OwnedFd};

use crate::{
    control::Beat,
    error::{BenchError, Result},
    measure::sum::WordSum,
    mechanism::{Mechanism, Tuning},
    netns::Namespaces,
    task::MeasuringTask,
};

/// A connection over which bytes are copied in and out.
pub(crate) trait CopyLink {
    /// Sends all of `message`, waiting for space.
    fn send(&mut self, message: &[u8]) -> Result<()>;

    /// Receives at least one byte; 0 means that the other side has closed.
    fn receive(&mut self, buffer: &mut [u8]) -> Result<usize>;

    /// Pushes out what the mechanism may hold back; called when nothing more is sent for now.
    fn flush(&mut self) -> Result<()> {
        Ok(())
    }

    /// Whether `receive` gives one whole message, and needs a buffer for it.
    fn whole_messages(&self) -> bool {
        false
    }

    /// Waits until all questions of a round trip have been answered, where the mechanism answers them; `false` where the caller has to.
    fn answers_by_itself(&mut self) -> Result<bool> {
        Ok(false)
    }

    /// Bytes of ring towards the other side, where there is a ring.
    fn ring(&self) -> Option<u64> {
        None
    }
}

/// A connection in whose memory messages are produced and consumed.
pub(crate) trait InPlace {
    /// Sends a message of `len` bytes, every 8 of which are `word`, written straight into the shared memory.
    fn produce(&mut self, len: usize, word: u64) -> Result<()>;

    /// Reads at least 8 and up to `most` bytes where they lie, adding up their words. Gives how many.
    fn consume(&mut self, most: usize, sum: &mut WordSum) -> Result<usize>;

    /// Sends a message of `len` bytes of which only the first 8 are touched.
    fn hand_over(&mut self, len: usize, word: u64) -> Result<()>;

    /// Takes a message of `len` bytes and looks only at the first 8.
    fn take_over(&mut self, len: usize) -> Result<u64>;

    /// Bytes of ring towards the other side, where there is a ring.
    fn ring(&self) -> Option<u64> {
        None
    }
}

/// A job to do over a connection of any kind. It is generic, so that the measuring loops contain the mechanism itself and not calls
/// through a table.
pub(crate) trait LinkJob {
    /// The result of the job.
    type Output;

    /// Over a copying connection.
    fn by_copy(self, link: impl CopyLink) -> Result<Self::Output>;

    /// Over shared memory.
    fn in_place(self, link: impl InPlace) -> Result<Self::Output>;
}

/// The descriptors of one side, in the order in which its mechanism wants them.
#[derive(Debug, Default)]
pub(crate) struct SideDescriptors(VecDeque<OwnedFd>);

impl SideDescriptors {
    /// The next one.
    fn take(&mut self) -> Result<OwnedFd> {
        self.0.pop_front().ok_or_else(|| BenchError::Transport("a descriptor is missing".into()))
    }

    /// All that are left.
    pub(crate) fn into_rest(self) -> impl Iterator<Item = OwnedFd> {
        self.0.into_iter()
    }
}

impl From<Vec<OwnedFd>> for SideDescriptors {
    fn from(fds: Vec<OwnedFd>) -> Self {
        Self(fds.into())
    }
}

/// Makes what the two sides share: the active side's descriptors, then the passive side's.
pub(crate) fn prepare(
    mechanism: Mechanism,
    tuning: &Tuning,
    namespaces: Option<&Namespaces>,
) -> Result<[Vec<OwnedFd>; 2]> {
    match mechanism {
        Mechanism::Pipe => descriptor::pipes(),
        Mechanism::Unix => unix::connect(),
        Mechanism::Tcp => tcp::connect(tuning),
        Mechanism::TcpVeth => tcp::connect_between(namespaces, tuning),
        Mechanism::Transparent => Err(programs_only()),
        Mechanism::TcpVirtio
        | Mechanism::Vsock
        | Mechanism::SerialRelay
        | Mechanism::PmemWindow
        | Mechanism::Ivshmem => Err(machines_only()),
        Mechanism::PlainRing => plain_ring::prepare(tuning),
        Mechanism::OneLine | Mechanism::TwoLine => pingpong::prepare(),
        Mechanism::Eventfd => eventfd::prepare(),
        Mechanism::Partywall
        | Mechanism::PartywallFixed
        | Mechanism::PartywallZeroCopy
        | Mechanism::PartywallMessage
        | Mechanism::PartywallCall
        | Mechanism::PartywallGateway
        | Mechanism::Iceoryx2
        | Mechanism::Iceoryx2ZeroCopy
        | Mechanism::Iceoryx2Call => Ok([Vec::new(), Vec::new()]),
        Mechanism::Ice | Mechanism::XmlRpc | Mechanism::Grpc | Mechanism::Capnp | Mechanism::PartywallPython => {
            Err(separate_programs())
        }
        Mechanism::Memfd => Err(BenchError::Unavailable("it is measured beside heaps: `heap`".into())),
        Mechanism::Local
        | Mechanism::Bindfs
        | Mechanism::PartywallFs
        | Mechanism::PartywallFsTcp
        | Mechanism::Sshfs
        | Mechanism::Nfs
        | Mechanism::NineP
        | Mechanism::Virtiofs => Err(file_systems()),
        Mechanism::Iperf3 => Err(programs_only()),
        Mechanism::PartywallNet | Mechanism::Testpmd => Err(switches()),
        Mechanism::PartywallBlk | Mechanism::QemuStorageDaemon | Mechanism::VirtioBlk => Err(disks()),
    }
}

/// The error for libraries that are measured by separate programs.
fn separate_programs() -> BenchError {
    BenchError::Unavailable("it is measured by separate programs: `rpc`".into())
}

/// The error for file systems.
fn file_systems() -> BenchError {
    BenchError::Unavailable("it is a file system: `fs` and `vm`".into())
}

/// The error for switches.
fn switches() -> BenchError {
    BenchError::Unavailable("it is a switch for virtual machines: `net`".into())
}

/// The error for disks.
fn disks() -> BenchError {
    BenchError::Unavailable("it is a disk of a virtual machine: `vm --part disks`".into())
}

/// The library is loaded into programs, and this is not how they are started.
fn programs_only() -> crate::error::BenchError {
    crate::error::BenchError::Unavailable(
        "it is measured with whole programs: `apps`, `residency` and `gateway`".into(),
    )
}

/// The error for mechanisms that exist only between virtual machines.
fn machines_only() -> BenchError {
    BenchError::Unavailable("it is measured between virtual machines: `vm`".into())
}

/// Makes this side's end of what stands between two virtual machines, in one of them.
pub(crate) fn prepare_inside(
    task: &MeasuringTask,
    place: &crate::task::Inside,
    beat: &Beat,
) -> Result<SideDescriptors> {
    let wires = match task.mechanism {
        Mechanism::TcpVirtio => tcp::connect_machines(task, place, beat)?,
        Mechanism::SerialRelay => {
            let port = crate::inside::open_port(crate::inside::BYTES)?;
            crate::inside::drain(&port)?;
            beat.meet()?;
            descriptor::twice(port)?
        }
        _ => Vec::new(),
    };
    Ok(wires.into())
}

/// Connects this side and does the job over it.
pub(crate) fn open<J: LinkJob>(task: &MeasuringTask, wires: SideDescriptors, beat: &Beat, job: J) -> Result<J::Output> {
    match task.mechanism {
        Mechanism::Pipe
        | Mechanism::Unix
        | Mechanism::Tcp
        | Mechanism::TcpVeth
        | Mechanism::TcpVirtio
        | Mechanism::SerialRelay => job.by_copy(descriptor::DescriptorLink::open(wires, task)?),
        Mechanism::Transparent => Err(programs_only()),
        Mechanism::Vsock | Mechanism::PmemWindow | Mechanism::Ivshmem => Err(machines_only()),
        Mechanism::PlainRing => job.by_copy(plain_ring::PlainRing::open(wires, task)?),
        Mechanism::OneLine => job.by_copy(pingpong::OneLine::open(wires)?),
        Mechanism::TwoLine => job.by_copy(pingpong::TwoLine::open(wires, task.side)?),
        Mechanism::Eventfd => job.by_copy(eventfd::Eventfds::open(wires)?),
        Mechanism::Partywall | Mechanism::PartywallFixed | Mechanism::PartywallGateway => {
            job.by_copy(partywall::CopyingStream::open(task, beat)?)
        }
        Mechanism::PartywallZeroCopy => job.in_place(partywall::InPlaceStream::open(task, beat)?),
        Mechanism::PartywallMessage => job.by_copy(partywall::Messages::open(task, beat)?),
        Mechanism::PartywallCall => job.by_copy(calls::CallLink::open(task, beat)?),
        #[cfg(feature = "iceoryx2")]
        Mechanism::Iceoryx2 => job.by_copy(iceoryx2::Iceoryx2::open(task, beat)?),
        #[cfg(feature = "iceoryx2")]
        Mechanism::Iceoryx2ZeroCopy => job.in_place(iceoryx2::Iceoryx2::open(task, beat)?),
        #[cfg(feature = "iceoryx2")]
        Mechanism::Iceoryx2Call => job.by_copy(iceoryx2::Iceoryx2Call::open(task, beat)?),
        Mechanism::Ice | Mechanism::XmlRpc | Mechanism::Grpc | Mechanism::Capnp | Mechanism::PartywallPython => {
            Err(separate_programs())
        }
        Mechanism::Memfd => Err(BenchError::Unavailable("it is measured beside heaps: `heap`".into())),
        Mechanism::Local
        | Mechanism::Bindfs
        | Mechanism::PartywallFs
        | Mechanism::PartywallFsTcp
        | Mechanism::Sshfs
        | Mechanism::Nfs
        | Mechanism::NineP
        | Mechanism::Virtiofs => Err(file_systems()),
        Mechanism::Iperf3 => Err(programs_only()),
        Mechanism::PartywallNet | Mechanism::Testpmd => Err(switches()),
        Mechanism::PartywallBlk | Mechanism::QemuStorageDaemon | Mechanism::VirtioBlk => Err(disks()),
        #[cfg(not(feature = "iceoryx2"))]
        Mechanism::Iceoryx2 | Mechanism::Iceoryx2ZeroCopy | Mechanism::Iceoryx2Call => {
            Err(BenchError::Unavailable("this build has no iceoryx2 in it (cargo feature `iceoryx2`)".into()))
        }
    }
}
