//! A server for QEMU's `ivshmem-doorbell` device: shared memory and interrupts for machines that cannot take windows.
//!
//! ```text
//!   each message: one i64, little-endian, and at most one descriptor
//!
//!   to who comes:    0 (version) · its id · -1 [memory] · id [event] per vector of each peer · its id [event] per vector
//!   to the others:   id [event] per vector of who has come;   id alone when it has gone
//! ```
//!
//! All clients share one piece of memory, and each can write all of it: the device has no notion of an owner. So it is for
//! machines that trust one another with it, or for one pair per server.
//!
//! A machine that is to be rung by its peers alone has a [`Switchboard`] instead.
//!
//! Ids are never used again. QEMU (7.2 and 10.0) corrupts its heap when an id leaves and comes back.

mod clients;
mod switchboard;

use clients::Clients;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd};
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{FallocateFlags, MemfdFlags, Mode, SealFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::io;
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;
pub use switchboard::{Switchboard, VECTORS};

/// The version of the protocol; there is one.
const VERSION: i64 = 0;
/// Instead of an id: the memory.
const MEMORY: i64 = -1;
/// How long to wait where nothing can be done.
const PAUSE: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// The shape of a server's device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IvshmemOptions {
    /// Bytes of shared memory, a power of two.
    pub size: u64,
    /// Interrupt vectors of each client.
    pub vectors: u16,
    /// The most clients that may be connected at once.
    pub max_clients: usize,
}

impl Default for IvshmemOptions {
    fn default() -> Self {
        Self { size: 4 << 20, vectors: 1, max_clients: 16 }
    }
}

/// Why there is no server.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum IvshmemError {
    /// Not what a PCI device can have.
    #[error("{0} bytes cannot be the memory of a PCI device; give a power of two, at least 4096")]
    Size(u64),
    /// No vectors, or more than MSI-X has.
    #[error("a client has 1 to 64 vectors, not {0}")]
    Vectors(u16),
    /// Another server uses the path, or the file is no socket.
    #[error("{path} is in use: by another server, or it is a file that is no socket", path = .0.display())]
    InUse(PathBuf),
    /// This machine refused.
    #[error("cannot {doing}: {source}")]
    System {
        /// The operation that failed.
        doing: &'static str,
        /// The error of the kernel.
        source: io::Error,
    },
}

fn system(doing: &'static str) -> impl Fn(rustix::io::Errno) -> IvshmemError {
    move |e| IvshmemError::System { doing, source: e.into() }
}

/// A running server. Its clients outlive it, as far as they have one another already.
#[derive(Debug)]
pub struct IvshmemServer {
    path: PathBuf,
    memory: OwnedFd,
    stop: OwnedFd,
    thread: Option<JoinHandle<()>>,
}

impl IvshmemServer {
    /// Serves on a new socket at `path`, which only this user can connect to.
    pub fn start(path: &Path, options: IvshmemOptions) -> Result<Self, IvshmemError> {
        if !options.size.is_power_of_two() || options.size < 4096 {
            return Err(IvshmemError::Size(options.size));
        }
        if !(1..=64).contains(&options.vectors) {
            return Err(IvshmemError::Vectors(options.vectors));
        }
        let memory = memory(options.size).map_err(system("make the shared memory"))?;
        let listener = listen(path)?;
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let stop = eventfd(0, flags).map_err(system("make an event"))?;
        let dup = |fd: &OwnedFd| fd.try_clone().map_err(|source| IvshmemError::System { doing: "keep it", source });
        let (clients, stopped) = (Clients::new(dup(&memory)?, options), dup(&stop)?);
        let thread = std::thread::Builder::new()
            .name("partywall-ivshmem".into())
            .spawn(move || serve(&listener, &stopped, clients))
            .map_err(|source| IvshmemError::System { doing: "start a thread", source })?;
        Ok(Self { path: path.to_owned(), memory, stop, thread: Some(thread) })
    }

    /// The shared memory.
    pub fn memory(&self) -> &OwnedFd {
        &self.memory
    }

    /// The options to start a machine with.
    pub fn arguments(&self, vectors: u16) -> [String; 4] {
        let path = self.path.display().to_string().replace(',', ",,");
        [
            "-chardev".into(),
            format!("socket,id=pw-ivshmem,path={path}"),
            "-device".into(),
            format!("ivshmem-doorbell,chardev=pw-ivshmem,vectors={vectors}"),
        ]
    }
}

impl Drop for IvshmemServer {
    fn drop(&mut self) {
        let _ = rustix::io::write(&self.stop, &1u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        let _ = std::fs::remove_file(&self.path);
    }
}

fn memory(size: u64) -> rustix::io::Result<OwnedFd> {
    let fd = rustix::fs::memfd_create("partywall-ivshmem", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&fd, size)?;
    rustix::fs::fallocate(&fd, FallocateFlags::empty(), 0, size)?;
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(fd)
}

fn listen(path: &Path) -> Result<OwnedFd, IvshmemError> {
    let address = SocketAddrUnix::new(path).map_err(system("use this path for a socket"))?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
        .map_err(system("make a socket"))?;
    match rustix::net::bind(&socket, &address) {
        // The socket of a server that was killed. A file that is no socket is left alone.
        Err(Errno::ADDRINUSE) if is_socket(path) && std::os::unix::net::UnixStream::connect(path).is_err() => {
            std::fs::remove_file(path)
                .map_err(|source| IvshmemError::System { doing: "remove the old socket", source })?;
            rustix::net::bind(&socket, &address).map_err(system("bind the socket"))?;
        }
        Err(Errno::ADDRINUSE) => return Err(IvshmemError::InUse(path.to_owned())),
        other => other.map_err(system("bind the socket"))?,
    }
    // No client can connect before it listens, so the permissions are set in time.
    rustix::fs::chmod(path, Mode::RUSR | Mode::WUSR).map_err(system("restrict the socket"))?;
    rustix::net::listen(&socket, 16).map_err(system("listen"))?;
    Ok(socket)
}

/// Waits a little, or until the server is to stop.
fn pause(stop: &OwnedFd) {
    let _ = rustix::event::poll(&mut [PollFd::new(stop, PollFlags::IN)], Some(&PAUSE));
}

fn is_socket(path: &Path) -> bool {
    use std::os::unix::fs::FileTypeExt;
    std::fs::symlink_metadata(path).is_ok_and(|meta| meta.file_type().is_socket())
}

fn serve(listener: &OwnedFd, stop: &OwnedFd, mut clients: Clients) {
    loop {
        let mut fds = vec![PollFd::new(stop, PollFlags::IN), PollFd::new(listener, PollFlags::IN)];
        fds.extend(clients.sockets().map(|socket| PollFd::from_borrowed_fd(socket, PollFlags::IN)));
        if rustix::event::poll(&mut fds, None).is_err() {
            continue;
        }
        let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        if ready[0] {
            return;
        }
        // Clients have nothing to say: whatever comes from one is its end.
        clients.remove(&ready[2..]);
        if ready[1] {
            match rustix::net::accept_with(listener.as_fd(), SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(socket) => clients.add(socket),
                // It has gone again.
                Err(Errno::AGAIN | Errno::CONNABORTED | Errno::INTR) => {}
                // No descriptors are left. It stays in the queue, which is not to keep a processor busy.
                Err(_) => pause(stop),
            }
        }
    }
}
