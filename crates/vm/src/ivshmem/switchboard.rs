//! One machine's end of QEMU's `ivshmem-doorbell` (protocol I): the vectors that ring its guest, and the peers that the guest may ring.
//!
//! The device is made for servers that introduce all their clients to one another. Here each machine has its own server, and gets only
//! processes that it has, or has had, a link to, each as a peer with one event: a guest that rings without end rings only these.
//!
//! The departure of a peer is never announced: QEMU (7.2) would free what it has of that peer once more if the number came again, or the
//! device went.

use super::{MEMORY, VERSION};
use partywall_protocol::doorbell;
use partywall_region::packet;
use partywall_region::relay::{HostDoorbells, VectorEvent};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{MemfdFlags, SealFlags};
use std::collections::BTreeMap;
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError};

/// Links that a machine can be rung for at a time; the rest are rung by its port. Each is an interrupt vector of its kernel's.
pub const VECTORS: u16 = 64;
/// The machine's own number. Those it may ring have other ones.
const OWN: i64 = 0;
/// Peers of one device: each is a descriptor that its QEMU keeps as long as the device is there.
const MOST_PEERS: usize = 256;

/// A machine's switchboard. Clones are the same one.
#[derive(Debug, Clone)]
pub struct Switchboard {
    id: u128,
    shared: Arc<Mutex<PeerDevice>>,
}

#[derive(Debug)]
struct PeerDevice {
    /// To the device.
    socket: UnixStream,
    events: Vec<VectorEvent>,
    /// The peers that the device was given, by the kernel's number of each event. The events are kept, so that no other event gets that
    /// number.
    peers: BTreeMap<u64, (u32, OwnedFd)>,
}

impl Switchboard {
    /// Makes one, and the socket that its device is to be plugged in with. All that QEMU reads while it does so is there already.
    pub fn new() -> io::Result<(Self, UnixStream)> {
        let mut id = [0; 16];
        rustix::rand::getrandom(&mut id, rustix::rand::GetRandomFlags::empty())?;
        let id = u128::from_le_bytes(id);
        let (socket, theirs) = UnixStream::pair()?;
        let events = (0..VECTORS).map(|_| VectorEvent::new()).collect::<io::Result<Vec<_>>>()?;
        let shared = PeerDevice { socket, events, peers: BTreeMap::new() };
        let memory = memory(id)?;
        shared.tell(VERSION, None)?;
        shared.tell(OWN, None)?;
        shared.tell(MEMORY, Some(memory.as_fd()))?;
        for event in &shared.events {
            shared.tell(OWN, Some(event.as_fd()))?;
        }
        Ok((Self { id, shared: Arc::new(Mutex::new(shared)) }, theirs))
    }

    /// The id by which the guest knows the device.
    pub fn id(&self) -> u128 {
        self.id
    }

    fn with<T>(&self, work: impl FnOnce(&mut PeerDevice) -> T) -> T {
        work(&mut self.shared.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl PeerDevice {
    /// A device that does not read is not waited for.
    fn tell(&self, number: i64, fd: Option<BorrowedFd<'_>>) -> io::Result<()> {
        packet::try_send(self.socket.as_fd(), &number.to_le_bytes(), fd.as_slice())
    }
}

impl HostDoorbells for Switchboard {
    fn event(&self, vector: u32) -> Option<OwnedFd> {
        self.with(|shared| shared.events.get(usize::try_from(vector).ok()?)?.as_fd().try_clone_to_owned().ok())
    }

    fn introduce(&mut self, event: OwnedFd) -> Option<u32> {
        self.with(|shared| {
            let key = VectorEvent::number(&event)?;
            if let Some((peer, _)) = shared.peers.get(&key) {
                return Some(*peer);
            }
            if shared.peers.len() >= MOST_PEERS {
                return None;
            }
            let peer = u32::try_from(shared.peers.len()).ok()? + 1;
            shared.tell(peer.into(), Some(event.as_fd())).ok()?;
            shared.peers.insert(key, (peer, event));
            Some(peer)
        })
    }
}

/// The memory that the device shows its guest. The guest can write it, and only the guest reads it.
fn memory(id: u128) -> io::Result<OwnedFd> {
    let fd = rustix::fs::memfd_create("partywall-doorbell", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::io::pwrite(&fd, &doorbell::memory(id), 0)?;
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(fd)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};

    fn heard(device: &UnixStream) -> (i64, Option<OwnedFd>) {
        let mut number = [0; 8];
        let mut received = packet::recv(device.as_fd(), &mut number).unwrap();
        assert_eq!(received.len, 8);
        (i64::from_le_bytes(number), received.fds.pop())
    }

    fn is_signalled(event: &OwnedFd) -> bool {
        rustix::io::read(event, &mut [0; 8]).is_ok()
    }

    #[test]
    fn device_receives_its_events_before_its_peers() {
        let (mut board, device) = Switchboard::new().unwrap();
        assert_eq!(heard(&device).0, 0);
        assert_eq!(heard(&device).0, OWN);
        let (-1, Some(memory)) = heard(&device) else { panic!("no memory") };
        let mut bytes = [0; doorbell::SIZE];
        assert_eq!(rustix::io::pread(&memory, &mut bytes, 0), Ok(doorbell::SIZE));
        assert_eq!(doorbell::id(&bytes), Some(board.id()));
        let own: Vec<OwnedFd> = (0..VECTORS)
            .map(|_| {
                let (OWN, Some(event)) = heard(&device) else { panic!("no event") };
                event
            })
            .collect();

        let third = board.event(3).unwrap();
        rustix::io::write(&third, &1u64.to_ne_bytes()).unwrap();
        let rung: Vec<usize> = (0..own.len()).filter(|n| is_signalled(&own[*n])).collect();
        assert_eq!(rung, [3]);
        assert!(board.event(VECTORS.into()).is_none() && board.event(u32::MAX).is_none());

        let peers = [event(), event()];
        for (peer, number) in peers.iter().zip([1, 2]) {
            // For any number of introductions, with any descriptor.
            for _ in 0..3 {
                assert_eq!(board.introduce(peer.try_clone().unwrap()), Some(number));
            }
            let (told, Some(event)) = heard(&device) else { panic!("no event") };
            assert_eq!(told, i64::from(number));
            rustix::io::write(&event, &1u64.to_ne_bytes()).unwrap();
            assert!(is_signalled(peer));
        }
        device.set_nonblocking(true).unwrap();
        assert!(packet::try_recv(device.as_fd(), &mut [0; 8]).is_err(), "each was told of once");
    }

    fn event() -> OwnedFd {
        eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()
    }

    #[test]
    fn exhausted_peer_ids_are_refused() {
        let (mut board, device) = Switchboard::new().unwrap();
        let reader = std::thread::spawn(move || {
            let mut peers = 0;
            while packet::recv(device.as_fd(), &mut [0; 8]).is_ok_and(|received| received.len > 0) {
                peers += 1;
            }
            peers
        });
        let most = u32::try_from(MOST_PEERS).unwrap();
        for number in 1..=most {
            while board.introduce(event()) != Some(number) {
                // It reads more slowly than messages are sent.
                std::thread::yield_now();
            }
        }
        assert_eq!(board.introduce(event()), None);
        drop(board);
        assert_eq!(reader.join().unwrap(), 3 + usize::from(VECTORS) + MOST_PEERS);
    }

    #[test]
    fn removed_device_accepts_no_introduction() {
        let (mut board, device) = Switchboard::new().unwrap();
        drop(device);
        assert_eq!(board.introduce(event()), None);
    }
}
