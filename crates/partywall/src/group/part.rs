//! Parts of buffers that are read without a token, while another party guarantees that they stay (protocol J12); and where machines have the
//! windows that such parts lie in (protocol J11).

use super::members::bytes_at;
use super::{BufferPart, Group, GroupInner};
use crate::domain::lock;
use crate::session::unexpected;
use crate::{Error, Result};
use partywall_protocol::wire::{Message, Refusal};
use partywall_region::pmem::Joint;
use partywall_shm::bytes::PeerBytes;
use rustix::fd::BorrowedFd;
use std::sync::Arc;

/// Where a virtual machine has the window of a member.
///
/// ```
/// use partywall::MachineWindow;
///
/// let (place, address, size) = (0x1_0020_0000, 0x2000_0000_0000, 16 << 20);
/// let window = MachineWindow { member: 0, life: 1, place, address, size, of_host: true };
/// // The group's address of what the machine has here.
/// let physical = 0x1_0022_3000;
/// assert_eq!(window.address + (physical - window.place), 0x2000_0002_3000);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MachineWindow {
    /// The member's index in the group, from 0.
    pub member: u8,
    /// The generation of the member's window. A member that comes back may get a new window.
    pub life: u32,
    /// The guest-physical address of the window's first byte.
    pub place: u64,
    /// The virtual address of the window's first byte, which is the same in every member.
    pub address: u64,
    /// The size of the window in bytes.
    pub size: u64,
    /// Whether the member is a domain of the host. Otherwise it is a virtual machine.
    pub of_host: bool,
}

impl Group {
    /// The places of this group's windows in the memory of a virtual machine that is a member. This is for a process of the host that serves a device
    /// of that machine. A window is left out if the machine does not have it yet, or if this process cannot map it. Blocks until the broker has
    /// answered one request for each member.
    ///
    /// # Errors
    /// [`Error::Refused`] if the machine is no member, or this process is in a machine.
    ///
    /// ```
    /// use partywall::{Domain, Group};
    ///
    /// # let folder = tempfile::tempdir()?;
    /// # let policy = folder.path().join("policy.toml");
    /// # std::fs::write(&policy, "[[group]]\nname = 'pool'\ndomains = ['web']\nmachines = ['a']\nroom = '4M'\n")?;
    /// # let config = partywall_daemon::Config::new(folder.path().join("broker.sock")).policy_file(policy);
    /// # let broker = partywall_daemon::Broker::start(&config)?;
    /// # let web = Domain::builder().name("web").broker(broker.path()).join()?;
    /// let pool = Group::join(&web, "pool")?;
    /// assert!(pool.windows_in("a")?.is_empty()); // The machine does not run.
    /// assert!(pool.windows_in("b").is_err()); // It is no member.
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn windows_in(&self, machine: &str) -> Result<Vec<MachineWindow>> {
        let members = lock(&self.inner.state).members.count();
        let mut windows = Vec::new();
        for member in 0..members {
            let asked = Message::GroupPlace { member, machine: machine.to_owned() };
            match self.inner.ask(|session| session.request(&asked, &[])) {
                // Another window of the member is not at its address here.
                Ok((Message::GroupPlaceIs { life, address, size, place, host }, _)) => {
                    if self.inner.has_window(member, life, size) {
                        windows.push(MachineWindow { member, life, place, address, size, of_host: host });
                    }
                }
                Ok((other, _)) => return Err(unexpected(&other)),
                Err(Error::Refused { code: Refusal::Machine, .. }) => {}
                Err(e) => return Err(e),
            }
        }
        Ok(windows)
    }

    /// Finds the process whose buffers contain the `len` bytes at `address` of a member's window, and returns these bytes as a part of its buffers.
    /// `None` unless all bytes lie in the buffers of one other process that takes part in the group, or if the member has another window now.
    ///
    /// ```
    /// use partywall::{Domain, Group, MachineWindow};
    ///
    /// # let folder = tempfile::tempdir()?;
    /// # let policy = folder.path().join("policy.toml");
    /// # std::fs::write(&policy, "[[group]]\nname = 'pool'\ndomains = ['web']\nroom = '4M'\n")?;
    /// # let config = partywall_daemon::Config::new(folder.path().join("broker.sock")).policy_file(policy);
    /// # let broker = partywall_daemon::Broker::start(&config)?;
    /// # let web = Domain::builder().name("web").broker(broker.path()).join()?;
    /// let pool = Group::join(&web, "pool")?;
    /// let buffer = pool.alloc(4096)?;
    /// let part = buffer.part();
    /// assert_eq!((part.address, part.len), (buffer.address(), 4096));
    /// let window = MachineWindow { member: 0, life: 1, place: 0, address: 0, size: 4 << 20, of_host: true };
    /// assert_eq!(pool.part_at(&window, part.address, part.len), None); // It is this process's own.
    /// assert!(pool.borrow(&part).is_err());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn part_at(&self, window: &MachineWindow, address: u64, len: u64) -> Option<BufferPart> {
        if len == 0 {
            return None;
        }
        self.inner.hear();
        lock(&self.inner.state).members.part_at((window.member, window.life), address, len)
    }

    /// Fills `to` with the bytes at `address` of a member's window, and returns `true`. The bytes may lie outside of all buffers. The process that
    /// wrote them may have ended. This is for a device that reads the memory of its machine: the caller decides whether the machine may read these
    /// bytes.
    ///
    /// Returns `false` if a byte lies outside the window or in the memory of this process, or if this process has not mapped this window of the
    /// member.
    ///
    /// ```
    /// use partywall::{Domain, Group, MachineWindow};
    ///
    /// # let folder = tempfile::tempdir()?;
    /// # let policy = folder.path().join("policy.toml");
    /// # std::fs::write(&policy, "[[group]]\nname = 'pool'\ndomains = ['web']\nmachines = ['a']\nroom = '4M'\n")?;
    /// # let config = partywall_daemon::Config::new(folder.path().join("broker.sock")).policy_file(policy);
    /// # let broker = partywall_daemon::Broker::start(&config)?;
    /// # let web = Domain::builder().name("web").broker(broker.path()).join()?;
    /// let pool = Group::join(&web, "pool")?;
    /// let mut bytes = [0; 16];
    /// let buffer = pool.alloc(4096)?;
    /// let window = MachineWindow { member: 0, life: 1, place: 0, address: 0, size: 4 << 20, of_host: true };
    /// assert!(!pool.copy_at(&window, buffer.address(), &mut bytes)); // It is this process's own.
    /// assert!(!pool.copy_at(&window, 0, &mut bytes));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn copy_at(&self, window: &MachineWindow, address: u64, to: &mut [u8]) -> bool {
        lock(&self.inner.state).members.copy_at((window.member, window.life), address, to)
    }

    /// Maps a part of another process's buffers, for reading in place without a token. The memory stays that process's until this is dropped,
    /// but the process may reuse the buffer, unless another agreement prevents that.
    ///
    /// # Errors
    /// [`Error::Gone`] if its owner has ended; [`Error::Invalid`] if the bytes are not among that owner's buffers.
    pub fn borrow(&self, part: &BufferPart) -> Result<BorrowedPart> {
        self.inner.with_owner(part.owner, || self.inner.try_borrow(part))
    }
}

impl GroupInner {
    fn try_borrow(self: &Arc<Self>, part: &BufferPart) -> Result<BorrowedPart> {
        if part.owner == self.me || part.len == 0 {
            return Err(Error::Invalid("this part is empty, or this process's own".into()));
        }
        let mut state = lock(&self.state);
        let found = state.members.owner(part)?;
        state.members.opened(part.owner);
        Ok(BorrowedPart { group: Arc::clone(self), map: found.map, part: *part })
    }
}

/// A part of another process's buffers, mapped here. The owner can change the bytes at any time.
///
/// ```
/// use partywall::{BufferPart, Domain, Group};
/// use std::error::Error;
/// use std::io::{Read, Write};
/// use std::os::fd::AsFd;
///
/// /// The process that is the member `db` reads a part of a buffer where it is, and answers.
/// fn db(domain: &Domain) -> Result<(), Box<dyn Error>> {
///     let pool = Group::join(domain, "pool")?;
///     let mut stream = domain.connect("web:parts")?;
///     let mut words = [[0; 8]; 3];
///     for word in &mut words {
///         stream.read_exact(word)?;
///     }
///     let [owner, address, len] = words.map(u64::from_le_bytes);
///
///     let borrowed = pool.borrow(&BufferPart { owner, address, len })?;
///     assert_eq!(borrowed.part(), BufferPart { owner, address, len });
///     let mut word = [0; 5];
///     borrowed.copy_to(0, &mut word);
///     assert_eq!(&word, b"hello");
///     let file = tempfile::tempfile()?;
///     assert_eq!(borrowed.write_at(file.as_fd(), 4000, 512)?, 96);
///     drop(borrowed);
///     Ok(stream.write_all(b"read")?)
/// }
///
/// /// The process that is the member `web` writes a buffer, and keeps it until the other process has answered.
/// fn web(domain: &Domain) -> Result<(), Box<dyn Error>> {
///     let pool = Group::join(domain, "pool")?;
///     let mut listener = domain.bind("parts")?;
///     # let mut db = std::process::Command::new(std::env::current_exe()?)
///     #     .args(std::env::args_os().skip(1))
///     #     .env("PARTYWALL_DOCTEST_BROKER", domain.broker_path())
///     #     .spawn()?;
///     let mut buffer = pool.alloc(4096)?;
///     buffer[..5].copy_from_slice(b"hello");
///     let (mut stream, _) = listener.accept()?;
///     let BufferPart { owner, address, len } = buffer.part();
///     for word in [owner, address, len] {
///         stream.write_all(&word.to_le_bytes())?;
///     }
///     stream.read_exact(&mut [0; 4])?;
///     drop(buffer);
///     # assert!(db.wait()?.success());
///     Ok(())
/// }
/// # fn main() -> Result<(), Box<dyn Error>> {
/// #     if let Some(broker) = std::env::var_os("PARTYWALL_DOCTEST_BROKER") {
/// #         return db(&Domain::builder().name("db").broker(broker).join()?);
/// #     }
/// #     let folder = tempfile::tempdir()?;
/// #     let policy = folder.path().join("policy.toml");
/// #     std::fs::write(&policy, "[[group]]\nname = 'pool'\ndomains = ['web', 'db']\nroom = '4M'\n")?;
/// #     let config = partywall_daemon::Config::new(folder.path().join("broker.sock")).policy_file(policy);
/// #     let broker = partywall_daemon::Broker::start(&config)?;
/// #     web(&Domain::builder().name("web").broker(broker.path()).join()?)
/// # }
/// ```
#[derive(Debug)]
pub struct BorrowedPart {
    group: Arc<GroupInner>,
    map: Arc<Joint>,
    part: BufferPart,
}

impl BorrowedPart {
    /// Which bytes these are.
    pub fn part(&self) -> BufferPart {
        self.part
    }

    /// Copies bytes from byte `from` on, as many as there are and fit, and returns how many.
    pub fn copy_to(&self, from: usize, to: &mut [u8]) -> usize {
        self.bytes().slice(from, to.len()).copy_to(to)
    }

    /// Writes the bytes from byte `from` on to a file, at `offset`, and returns how many were written. No copy is made here.
    ///
    /// # Errors
    /// The error of `pwrite`.
    pub fn write_at(&self, file: BorrowedFd<'_>, from: usize, offset: u64) -> std::io::Result<usize> {
        partywall_region::write_racing_at(file, self.bytes().slice(from, usize::MAX), offset)
    }

    fn bytes(&self) -> PeerBytes<'_> {
        // Looked at when it was borrowed.
        bytes_at(&self.map, self.part.address, self.part.len)
            .expect("a part is in its window, and not in this process's seat")
    }
}

impl Drop for BorrowedPart {
    fn drop(&mut self) {
        self.group.returned(self.part.owner);
    }
}

#[cfg(test)]
#[cfg(not(miri))]
mod tests {
    use super::super::GroupState;
    use super::super::members::Members;
    use super::super::tokens::Tokens;
    use super::*;
    use crate::keeper::HangUpWatch;
    use crate::session::BrokerSession;
    use partywall_protocol::wire;
    use partywall_region::packet;
    use partywall_region::pmem::{OwnSeat, SeatMemory, WindowAddresses, WindowFile, WindowSpec};
    use partywall_shm::group::Serials;
    use partywall_shm::layout::PAGE;
    use rustix::fd::{AsFd, OwnedFd};
    use rustix::net::sockopt::{Timeout, set_socket_timeout};
    use std::sync::Mutex;
    use std::sync::atomic::AtomicBool;
    use std::time::{Duration, Instant};

    /// Far from what [`partywall_shm::group::address`] gives: the window of the other member, and this process's seat.
    const WINDOW: u64 = 0x4a00_0000_0000;
    const OWN: u64 = 0x4b00_0000_0000;
    /// The seat in the other test, which may run at the same time.
    const OTHER_OWN: u64 = 0x4c00_0000_0000;

    /// A group of two members, with this process's seat at an address. The other end of the session plays the broker.
    fn group(own: u64) -> (Group, OwnedFd) {
        let (session, broker) = BrokerSession::pair();
        let addresses = WindowAddresses::reserve(own, 1 << 20).unwrap();
        let (memory, _) = SeatMemory::create(PAGE).unwrap();
        let inner = GroupInner {
            name: "pool".into(),
            session: Mutex::new(session),
            unheard: AtomicBool::new(false),
            alone: AtomicBool::new(false),
            own: Arc::new(OwnSeat::settle(memory, &addresses, PAGE, 1).unwrap()),
            me: 1,
            seat: 0,
            state: Mutex::new(GroupState::new(Members::new(2), Tokens::new(Serials::new(1)))),
            watch: Mutex::default(),
        };
        (Group { inner: Arc::new(inner) }, broker)
    }

    /// Answers questions until the group is dropped: member 0 has the life `placed` of a window in the machine, and this window of the life
    /// `shown` is shown here. Member 1 has none.
    fn answer(broker: &OwnedFd, file: &WindowFile, size: u64, (placed, shown): (&Mutex<u32>, u32)) {
        let mut buffer = [0; wire::MAX_PACKET];
        loop {
            let received = packet::recv(broker.as_fd(), &mut buffer).unwrap();
            if received.len == 0 {
                return;
            }
            let (request, asked) = wire::decode(&buffer[..received.len]).unwrap();
            let answer = match asked {
                Message::GroupPlace { member: 0, .. } => {
                    Message::GroupPlaceIs { life: *lock(placed), address: WINDOW, size, place: 1 << 32, host: true }
                }
                Message::GroupWindow { member: 0 } => {
                    Message::GroupWindowIs { life: shown, address: WINDOW, size, own: false, name: "a".into() }
                }
                _ => Message::Refused { code: Refusal::Machine, reason: "it has none".into() },
            };
            let mut out = Vec::new();
            wire::encode(request, &answer, &mut out);
            let reader = file.reader().unwrap();
            let with = [reader.as_fd()];
            let is_window = matches!(answer, Message::GroupWindowIs { .. });
            packet::send(broker.as_fd(), &out, if is_window { &with } else { &[] }).unwrap();
        }
    }

    #[test]
    fn window_of_a_later_member_is_mapped_when_its_place_is_known() {
        let file = WindowFile::create(&WindowSpec { room: 1 << 20, owner: "a".into(), peer: "pool".into() }).unwrap();
        let size = file.window().unwrap().size();
        let (group, broker) = group(OWN);
        let placed = Mutex::new(3);
        std::thread::scope(|scope| {
            scope.spawn(|| answer(&broker, &file, size, (&placed, 3)));
            let group = group;
            assert!(!lock(&group.inner.state).members.is_mapped(0, 3, size));
            let windows = group.windows_in("a").unwrap();
            let window = MachineWindow { member: 0, life: 3, place: 1 << 32, address: WINDOW, size, of_host: true };
            assert_eq!(windows, [window]);
            let mut bytes = [1; 16];
            assert!(group.copy_at(&window, WINDOW + size - 16, &mut bytes));
            assert_eq!(bytes, [0; 16]);
            // A window of another life, or bytes that are not all in it, are not read.
            assert!(!group.copy_at(&MachineWindow { life: 2, ..window }, WINDOW + size - 16, &mut bytes));
            assert!(!group.copy_at(&window, WINDOW + size - 15, &mut bytes));
            assert!(!group.copy_at(&window, WINDOW - 1, &mut bytes));
            // The machine has a later window of the member, which is not at its address here.
            *lock(&placed) = 4;
            assert_eq!(group.windows_in("a").unwrap(), []);
        });
    }

    #[test]
    fn keeper_does_not_wait_for_room_to_let_a_dead_seat_go() {
        const HANG: Duration = Duration::from_secs(60);
        let (group, broker) = group(OTHER_OWN);
        set_socket_timeout(&broker, Timeout::Recv, Some(HANG)).unwrap();
        let ping = || lock(&group.inner.session).try_post(1, &Message::Ping {}, &[]);
        let pings = std::iter::repeat_with(ping).take_while(crate::Result::is_ok).count();
        GroupInner::watch_session(&group.inner).unwrap();
        for alive in [true, false] {
            let seat = Message::SeatIs { key: 7, seat: 1, member: 1, life: 1, alive, memory: false, base: 0, size: 0 };
            let mut out = Vec::new();
            wire::encode(0, &seat, &mut out);
            packet::send(broker.as_fd(), &out, &[]).unwrap();
        }
        // The keeper reports another hang-up after it has processed these.
        let (near, far) = packet::pair().unwrap();
        let watch = HangUpWatch::link(near.as_fd()).unwrap();
        drop(far);
        let start = Instant::now();
        while !watch.has_hung_up() {
            assert!(start.elapsed() < HANG, "the keeper waits for the broker");
            std::thread::sleep(Duration::from_millis(1));
        }
        let hear = || {
            let mut buffer = [0; wire::MAX_PACKET];
            let received = packet::recv(broker.as_fd(), &mut buffer).unwrap();
            wire::decode(&buffer[..received.len]).unwrap().1
        };
        (0..pings).for_each(|_| assert!(matches!(hear(), Message::Ping {})));
        assert!(matches!(hear(), Message::LetGo { key: 7 }));
        let state = lock(&group.inner.state);
        assert!(state.untold.is_empty() && !state.awaits_room);
    }
}
