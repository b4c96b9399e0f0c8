//! Reads the counters of live channels in their regions.

use crate::session::unexpected;
use crate::{Domain, Error, Result};
use partywall_protocol::wire::{Message, Side};
use partywall_region::PeerRegion;
use partywall_shm::counters::Snapshot;
use partywall_shm::layout::{Geometry, RegionKind, RxPath, SocketPage, TxPath, path_flags};
use partywall_shm::path::Way;
use rustix::fd::{AsFd, OwnedFd};
use std::mem::offset_of;
use std::sync::atomic::Ordering;

/// The control page of one side of a live channel, mapped read-only. Reading it does not disturb the channel.
///
/// ```
/// use partywall::Domain;
/// use std::io::Write;
///
/// # let broker = partywall_daemon::Broker::embedded()?;
/// # let web = Domain::builder().name("web").broker(broker.path()).join()?;
/// # let mut listener = web.bind("echo")?;
/// let mut client = web.connect("web:echo")?;
/// let (_server, _) = listener.accept()?;
/// client.write_all(b"hello")?;
///
/// let channel = client.channel_id().expect("a stream has a channel");
/// let pages = web.inspect(channel)?;
/// assert!(pages[0].is_connecting());
/// assert_eq!((pages[0].written().bytes, pages[1].read().bytes), (5, 0));
/// assert_eq!(pages[0].cursors(), (5, 0)); // Committed and released.
/// assert_eq!(pages[0].ring_size(), client.writer()?.ring_size());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct StatPage {
    region: PeerRegion,
    side: Side,
    /// The region's memory, if it belongs to a socket connection: it says more than others.
    socket: Option<OwnedFd>,
}

/// The present transports of one side of a socket connection (protocol T).
///
/// ```
/// use partywall::{Domain, StatPage};
///
/// fn describe(page: &StatPage) -> &'static str {
///     match page.paths() {
///         Some(paths) if paths.sends_on_ring => "a program's socket, on its ring",
///         Some(_) => "a program's socket, on TCP",
///         None => "a stream, which has no other path than its rings",
///     }
/// }
///
/// # let broker = partywall_daemon::Broker::embedded()?;
/// # let web = Domain::builder().name("web").broker(broker.path()).join()?;
/// # let _listener = web.bind("echo")?;
/// let client = web.connect("web:echo")?;
/// let pages = web.inspect(client.channel_id().expect("a stream has a channel"))?;
/// assert_eq!(describe(&pages[0]), "a stream, which has no other path than its rings");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SocketPaths {
    /// Whether this side sends through its ring; otherwise by TCP.
    pub sends_on_ring: bool,
    /// Whether this side last received through the peer's ring; otherwise by TCP.
    pub receives_on_ring: bool,
    /// How often the sending transport has changed.
    pub switches: u32,
    /// Whether this side requests that its peer goes back to TCP.
    pub wants_tcp: bool,
}

impl StatPage {
    /// Whether this is the connecting side.
    pub fn is_connecting(&self) -> bool {
        self.side == Side::Connecting
    }

    /// The counters of this side's writing half.
    pub fn written(&self) -> Snapshot {
        self.region.page().tx.counters.snapshot()
    }

    /// The counters of this side's reading half.
    pub fn read(&self) -> Snapshot {
        self.region.page().rx.counters.snapshot()
    }

    /// Size of this side's present ring in bytes, as this side reports it; 0 if it does not write.
    pub fn ring_size(&self) -> u64 {
        self.region.page().tx.control.ring_size.load(Ordering::Relaxed)
    }

    /// The present transports, if this is a side of a socket connection.
    pub fn paths(&self) -> Option<SocketPaths> {
        let mut lines = [0; 128];
        let at = offset_of!(SocketPage, tx_path);
        // Read and not mapped: two lines at each look are not worth more.
        let read = rustix::io::pread(self.socket.as_ref()?, &mut lines, at as u64).ok()?;
        let word = |at: usize| Some(u32::from_le_bytes(lines[..read].get(at..at + 4)?.try_into().ok()?));
        let receives = offset_of!(SocketPage, rx_path) - at;
        let switches = word(offset_of!(TxPath, switches))?;
        let seen = word(receives + offset_of!(RxPath, seen))?;
        let flags = word(receives + offset_of!(RxPath, flags))?;
        Some(SocketPaths {
            sends_on_ring: Way::after(switches) == Way::Ring,
            receives_on_ring: Way::after(seen) == Way::Ring,
            switches,
            wants_tcp: flags & path_flags::WANT_TCP != 0,
        })
    }

    /// All bytes that this side has committed, and all that it has released.
    pub fn cursors(&self) -> (u64, u64) {
        let page = self.region.page();
        (page.tx.cursor.tail.load(Ordering::Relaxed), page.rx.cursor.head.load(Ordering::Relaxed))
    }
}

impl Domain {
    /// Maps the control pages of a channel that this program may see (protocol C10), the connecting side's first. The accepting side has
    /// none before it accepts. A side in a virtual machine has none on the host. For a connection of unmodified programs, only an
    /// administrator gets the page of another user. Blocks until the broker has answered.
    ///
    /// # Errors
    /// [`Error::Refused`] if there is no such channel, or this user may not see it.
    pub fn inspect(&self, channel: u64) -> Result<Vec<StatPage>> {
        let (sides, fds) = match self.request(&Message::Inspect { channel }, &[])? {
            (Message::Regions { connecting, accepting }, fds) => {
                let sides = [(connecting, Side::Connecting), (accepting, Side::Accepting)];
                (sides.into_iter().filter_map(|(there, side)| there.then_some(side)), fds)
            }
            (other, _) => return Err(unexpected(&other)),
        };
        fds.into_iter()
            .zip(sides)
            .map(|(fd, side)| {
                // The size is the truth here: the seals that `attach` verifies keep it so.
                let stat = rustix::fs::fstat(&fd).map_err(|e| Error::system("look at a region", e))?;
                let size = u64::try_from(stat.st_size).unwrap_or(0);
                let offset = if partywall_region::memfd::is_hugetlb(&fd) {
                    partywall_shm::layout::HUGE_PAGE
                } else {
                    partywall_shm::layout::PAGE
                };
                let geometry = Geometry::new(offset, size.saturating_sub(offset))
                    .map_err(|_| partywall_shm::corrupt::Corrupt::BadRegion)?;
                match PeerRegion::attach(fd.as_fd(), RegionKind::Endpoint, geometry) {
                    Ok(region) => Ok(StatPage { region, side, socket: None }),
                    Err(_) => {
                        let region = PeerRegion::attach(fd.as_fd(), RegionKind::Socket, geometry)?;
                        Ok(StatPage { region, side, socket: Some(fd) })
                    }
                }
            })
            .collect()
    }
}
