//! The kernel's record of the sequence numbers that TCP connections began with (protocol T3.11).
//!
//! A process that asks the kernel for the numbers of a connection later must put the connection into repair mode for that time ([`crate::inspect`]), and needs
//! `CAP_NET_ADMIN`. An eBPF program can note them when the connection is established instead ([`recorder`]). It stores them at the socket, where only a process
//! that has the socket's descriptor and the record finds them. Then no connection enters repair mode, and the reader needs no capability: only the
//! permission to open the record, which the administrator keeps in a file system of type `bpf`.
//!
//! Connections that were established before recording began are not in the record.

mod bpf;
mod program;
pub mod recorder;

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::Path;

use partywall_protocol::socket::Numbers;

/// Where a record is kept if nothing else is said.
pub const DIRECTORY: &str = "/sys/fs/bpf/partywall";
/// The names in that directory: the numbers, and what keeps the program attached.
const MAP: &str = "first-numbers";
const LINK: &str = "first-numbers-link";

/// A record, and what keeps it complete: the program is attached from when the map is made until nobody has the link, or an administrator detaches
/// it. So a record whose link is attached never has the numbers of an earlier connection of a socket.
#[derive(Debug)]
pub struct NumberRecord {
    map: OwnedFd,
    link: OwnedFd,
}

impl NumberRecord {
    /// Opens the record that is kept at a directory. `None` if there is none.
    ///
    /// # Errors
    /// Permissions, what is there instead, or a directory that another user than root and this one may change.
    pub fn open(directory: &Path) -> io::Result<Option<Self>> {
        // Not what a link leads to: it may lead elsewhere when the record is opened.
        let is = match rustix::fs::lstat(directory) {
            Err(rustix::io::Errno::NOENT) => return Ok(None),
            other => other?,
        };
        let is_directory = rustix::fs::FileType::from_raw_mode(is.st_mode) == rustix::fs::FileType::Directory;
        let is_owned = [0, rustix::process::geteuid().as_raw()].contains(&is.st_uid) && is.st_mode & 0o022 == 0;
        if !is_directory || !is_owned {
            let why = format!("{} is no directory, or may be changed by other users", directory.display());
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
        }
        let map = || match bpf::pinned_socket_map(&directory.join(MAP)) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            other => other.map(Some),
        };
        let Some((_, before)) = map()? else { return Ok(None) };
        let link = bpf::pinned_link(&directory.join(LINK))?;
        // A record may have been made in place of another meanwhile. The map of a record is kept after its link, and removed before it.
        match map()? {
            Some((map, number)) if number == before => Ok(Some(Self { map, link })),
            _ => Err(io::Error::new(io::ErrorKind::Interrupted, "the record was replaced at this moment")),
        }
    }

    /// Whether the kernel still records.
    pub fn is_attached(&self) -> bool {
        bpf::is_attached(self.link.as_fd()).unwrap_or(false)
    }

    /// The numbers that the latest connection of a socket began with; `None` if it was established before recording began.
    ///
    /// The kernel writes them under the socket's lock, in the same hold of the lock in which the connection is established. `TCP_INFO` waits for that lock.
    /// So a caller that has read the state ESTABLISHED there gets the numbers of that connection, or of a later one.
    pub fn numbers(&self, socket: BorrowedFd<'_>) -> Option<Numbers> {
        let value = bpf::look_up(self.map.as_fd(), socket).ok()?;
        // After the look-up: until then, no connection has been established without the program.
        // Each half is a number.
        self.is_attached().then_some(Numbers { sent_from: value as u32, received_from: (value >> 32) as u32 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inspect::{Inspector, Unhurried};
    use std::net::{TcpListener, TcpStream};

    fn recording() -> Option<NumberRecord> {
        match recorder::record() {
            Ok(record) => Some(record),
            Err(e) => {
                eprintln!(
                    "skipped: the kernel does not record here, which takes CAP_BPF, CAP_NET_ADMIN and cgroup2: {e}"
                );
                None
            }
        }
    }

    fn connection(at: &str) -> [TcpStream; 2] {
        let listener = TcpListener::bind(at).unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        [client, listener.accept().unwrap().0]
    }

    /// The numbers of a socket as the broker gets them, with a record or in repair mode.
    fn inspected(socket: &TcpStream, record: Option<NumberRecord>) -> Option<Numbers> {
        let copy = Unhurried(socket.try_clone().unwrap().into());
        Inspector::new().with_record(record).inspect(copy, true).unwrap().identity.numbers
    }

    /// Runs something without any capability.
    fn without_capabilities<T: Send>(run: impl FnOnce() -> T + Send) -> T {
        std::thread::scope(|s| {
            let thread = s.spawn(|| {
                let none = rustix::thread::CapabilitySet::empty();
                let sets = rustix::thread::CapabilitySets { effective: none, permitted: none, inheritable: none };
                rustix::thread::set_capabilities(None, sets).unwrap();
                run()
            });
            thread.join().unwrap()
        })
    }

    #[test]
    fn recorded_numbers_are_those_of_repair_mode() {
        let Some(record) = recording() else { return };
        for at in ["127.0.0.1:0", "[::1]:0"] {
            let sockets = connection(at);
            for bytes in [0, 100_000] {
                std::io::copy(&mut std::io::Read::take(std::io::repeat(7), bytes), &mut &sockets[0]).unwrap();
                std::io::copy(&mut std::io::Read::take(&sockets[1], bytes), &mut std::io::sink()).unwrap();
                for socket in &sockets {
                    let recorded = record.numbers(socket.as_fd());
                    assert!(recorded.is_some(), "a connection that was established under the record");
                    assert_eq!(recorded, inspected(socket, None), "after {bytes} bytes over {at}");
                }
            }
        }
    }

    /// The record of a socket must not outlive the connection that it is about: it is a proof of that one.
    #[test]
    fn socket_that_connects_again_has_its_new_numbers() {
        let Some(record) = recording() else { return };
        let [client, _server] = connection("127.0.0.1:0");
        let before = record.numbers(client.as_fd());
        rustix::net::connect_unspec(&client).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        rustix::net::connect(&client, &listener.local_addr().unwrap()).unwrap();
        let (server, _) = listener.accept().unwrap();
        let [ours, theirs] = [&client, &server].map(|socket| record.numbers(socket.as_fd()).unwrap());
        assert_ne!(Some(ours), before);
        // On the side that connected, the SYN counts among the bytes that were sent.
        assert_eq!((ours.sent_from.wrapping_add(1), ours.received_from), (theirs.received_from, theirs.sent_from));
        assert_eq!(Some(ours), inspected(&client, None));
    }

    #[test]
    fn recorded_numbers_are_read_without_capabilities() {
        let Some(record) = recording() else { return };
        let [client, _server] = connection("127.0.0.1:0");
        let recorded = record.numbers(client.as_fd());
        without_capabilities(|| {
            assert_eq!(inspected(&client, None), None, "repair mode takes CAP_NET_ADMIN");
            assert!(recorded.is_some());
            assert_eq!(inspected(&client, Some(record)), recorded);
        });
    }

    #[test]
    fn connection_from_before_the_record_is_read_in_repair_mode() {
        let [client, _server] = connection("127.0.0.1:0");
        let Some(record) = recording() else { return };
        assert_eq!(record.numbers(client.as_fd()), None);
        assert!(inspected(&client, Some(record)).is_some());
    }

    #[test]
    fn connection_left_in_repair_mode_is_taken_out_of_it() {
        let Some(record) = recording() else { return };
        let [client, _server] = connection("127.0.0.1:0");
        let repair = |socket: &TcpStream| {
            crate::sockopt::option::<libc::c_int>(socket.as_fd(), libc::IPPROTO_TCP, libc::TCP_REPAIR).unwrap()
        };
        crate::sockopt::set_option(client.as_fd(), libc::IPPROTO_TCP, libc::TCP_REPAIR, 1).unwrap();
        assert_eq!(repair(&client), 1);
        assert!(inspected(&client, Some(record)).is_some());
        assert_eq!(repair(&client), 0);
    }

    #[test]
    fn kept_record_is_found_until_it_is_forgotten() {
        let Some(record) = recording() else { return };
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path().join("kept");
        let elsewhere = recorder::keep(&record, &at).unwrap_err();
        assert_eq!(elsewhere.kind(), io::ErrorKind::Unsupported, "{elsewhere}");
        let mounted = BpfFileSystem::mount(folder.path());
        assert!(NumberRecord::open(&at).unwrap().is_none());
        recorder::keep(&record, &at).unwrap();
        let again = recorder::keep(&record, &at).unwrap_err();
        assert_eq!(again.kind(), io::ErrorKind::AlreadyExists, "{again}");
        drop(record);
        // The kernel goes on, for the file system has the record.
        let [client, _server] = connection("127.0.0.1:0");
        let opened = without_capabilities(|| NumberRecord::open(&at).unwrap().unwrap());
        assert_eq!(opened.numbers(client.as_fd()), inspected(&client, None));
        recorder::forget(&at).unwrap();
        assert!(NumberRecord::open(&at).unwrap().is_none());
        // Nor does it stop as long as anyone has it open.
        let [client, _server] = connection("127.0.0.1:0");
        assert!(opened.numbers(client.as_fd()).is_some());
        drop(mounted);
    }

    #[test]
    fn something_else_at_the_place_of_a_record_is_refused() {
        let Some(record) = recording() else { return };
        let folder = tempfile::tempdir().unwrap();
        let _mounted = BpfFileSystem::mount(folder.path());
        // A link where the map should be, and a map where the link should be.
        for (map, link) in [(record.link.as_fd(), record.link.as_fd()), (record.map.as_fd(), record.map.as_fd())] {
            let at = folder.path().join("wrong");
            std::fs::create_dir(&at).unwrap();
            bpf::pin(map, &at.join(MAP)).unwrap();
            bpf::pin(link, &at.join(LINK)).unwrap();
            NumberRecord::open(&at).unwrap_err();
            recorder::forget(&at).unwrap();
        }
    }

    #[test]
    fn no_process_can_write_the_record() {
        let Some(record) = recording() else { return };
        let [client, _server] = connection("127.0.0.1:0");
        let before = record.numbers(client.as_fd());
        let written = bpf::write(record.map.as_fd(), client.as_fd(), 7);
        assert_eq!(written.unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        assert_eq!(record.numbers(client.as_fd()), before);
    }

    #[test]
    fn record_whose_program_was_detached_has_no_numbers() {
        let Some(record) = recording() else { return };
        let [client, _server] = connection("127.0.0.1:0");
        assert!(record.numbers(client.as_fd()).is_some());
        bpf::detach(record.link.as_fd()).unwrap();
        assert_eq!(record.numbers(client.as_fd()), None);
        let mut inspector = Inspector::new().with_record(Some(record));
        let copy = Unhurried(client.try_clone().unwrap().into());
        assert!(inspector.inspect(copy, true).unwrap().identity.numbers.is_some(), "in repair mode");
    }

    #[test]
    fn connection_that_stays_in_repair_mode_has_no_numbers() {
        let Some(record) = recording() else { return };
        let [client, _server] = connection("127.0.0.1:0");
        crate::sockopt::set_option(client.as_fd(), libc::IPPROTO_TCP, libc::TCP_REPAIR, 1).unwrap();
        without_capabilities(|| assert_eq!(inspected(&client, Some(record)), None));
        crate::sockopt::set_option(client.as_fd(), libc::IPPROTO_TCP, libc::TCP_REPAIR, -1).unwrap();
    }

    #[test]
    fn record_that_others_may_change_is_refused() {
        use std::os::unix::fs::PermissionsExt as _;
        let Some(record) = recording() else { return };
        let folder = tempfile::tempdir().unwrap();
        let _mounted = BpfFileSystem::mount(folder.path());
        let at = folder.path().join("kept");
        recorder::keep(&record, &at).unwrap();
        std::fs::set_permissions(&at, std::fs::Permissions::from_mode(0o777)).unwrap();
        assert_eq!(NumberRecord::open(&at).unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        std::fs::set_permissions(&at, std::fs::Permissions::from_mode(0o700)).unwrap();
        let elsewhere = tempfile::tempdir().unwrap();
        let link = elsewhere.path().join("link");
        std::os::unix::fs::symlink(&at, &link).unwrap();
        assert!(NumberRecord::open(&at).unwrap().is_some());
        assert_eq!(NumberRecord::open(&link).unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        recorder::forget(&at).unwrap();
    }

    struct BpfFileSystem<'a>(&'a Path);

    impl<'a> BpfFileSystem<'a> {
        fn mount(at: &'a Path) -> Self {
            rustix::mount::mount("bpf", at, c"bpf", rustix::mount::MountFlags::empty(), c"mode=0700").unwrap();
            Self(at)
        }
    }

    impl Drop for BpfFileSystem<'_> {
        fn drop(&mut self) {
            let _ = rustix::mount::unmount(self.0, rustix::mount::UnmountFlags::DETACH);
        }
    }
}
