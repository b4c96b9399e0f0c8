//! One front end's connection: the requests of vhost-user, and what they make of queues and memory.
//!
//! The loop knows nothing of what the queues carry; [`DeviceModel`] says what a device offers. QEMU 7.2 enables queues before it sets
//! features, so the order of requests is left free where a queue cannot be harmed by it.

use crate::VhostError;
use crate::closing::{Reaper, ReceivedFd};
use crate::inflight::InflightRegion;
use crate::memory::{MOST, MemoryTable};
use crate::message::{self, Inbox, Request, read, reply};
use crate::poller::WatchSet;
use crate::ring::VirtioRing;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use vhost::vhost_user::message::{
    BackendReq, FrontendReq, VhostUserConfig, VhostUserInflight, VhostUserMemory, VhostUserMemoryRegion,
    VhostUserProtocolFeatures, VhostUserSingleMemoryRegion, VhostUserU64, VhostUserVirtioFeatures, VhostUserVringAddr,
    VhostUserVringState,
};
use vm_memory::{ByteValued, GuestMemoryMmap};

/// Bits of a vring's number in the messages that bring its descriptors, and the one that says that there is none.
const VRING: u64 = 0xff;
const NO_DESCRIPTOR: u64 = 0x100;
/// Requests that are served before others have their turn.
const TURN: usize = 32;

const EVENT_IDX: u64 = 1 << virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;

/// The properties that a device offers.
#[derive(Debug, Clone, Copy)]
pub struct DeviceModel {
    /// Bits of virtio.
    pub features: u64,
    /// Bits of virtio that a front end may set: those that are offered, and those that an earlier back end of the device may have offered.
    pub accepted: u64,
    /// Bits of vhost-user.
    pub protocol: VhostUserProtocolFeatures,
    /// How many queues it has.
    pub rings: usize,
    /// How many queues the front end sees. A network card counts pairs.
    pub announced: u64,
}

/// A connection with a front end.
#[derive(Debug)]
pub struct FrontendSession {
    model: DeviceModel,
    /// There until the session ends.
    socket: Option<UnixStream>,
    poller: WatchSet,
    /// The tokens of its queues' doorbells are this and the queue's number.
    token: u64,
    inbox: Inbox,
    features: u64,
    memory: MemoryTable,
    rings: Vec<VirtioRing>,
    reaper: Reaper,
    inflight: Option<InflightRegion>,
    /// The device's configuration, as far as the front end asks for it.
    config: Vec<u8>,
    /// Where the back end sends its own requests.
    backend: Option<UnixStream>,
}

/// Bytes that a front end may ask for of the configuration. Behind what the device has are zeroes.
const MOST_CONFIG: u32 = 256;

impl FrontendSession {
    pub(crate) fn new(
        model: DeviceModel,
        socket: UnixStream,
        poller: &WatchSet,
        token: u64,
        socket_token: u64,
        reaper: &Reaper,
    ) -> Result<Self, VhostError> {
        let rings = (0..model.rings).map(|_| VirtioRing::new()).collect::<Result<_, _>>()?;
        poller.add(&socket, socket_token)?;
        Ok(Self {
            model,
            socket: Some(socket),
            poller: poller.clone(),
            token,
            inbox: Inbox::new(reaper),
            features: 0,
            memory: MemoryTable::default(),
            rings,
            reaper: reaper.clone(),
            inflight: None,
            config: Vec::new(),
            backend: None,
        })
    }

    /// Sets the device's configuration. A front end that has asked for reports of changes gets one.
    pub(crate) fn set_config(&mut self, config: Vec<u8>) {
        let changed = !self.config.is_empty() && self.config != config;
        self.config = config;
        // A front end that does not take the message keeps the old configuration.
        if changed && let Some(backend) = &self.backend {
            let _ = message::request(backend, BackendReq::CONFIG_CHANGE_MSG);
        }
    }

    /// Whether the memory for requests in flight outlives this process.
    pub(crate) fn survives(&self) -> bool {
        self.inflight.is_some()
    }

    /// The negotiated features.
    pub fn features(&self) -> u64 {
        self.features
    }

    /// Memory and queues.
    pub fn parts(&mut self) -> (&MemoryTable, &mut [VirtioRing]) {
        (&self.memory, &mut self.rings)
    }

    /// The guest's memory.
    pub(crate) fn memory(&self) -> &GuestMemoryMmap {
        self.memory.map()
    }

    /// The addresses of the guest whose memory a request for another memory table leaves as it is.
    pub(crate) fn kept_by(&self, table: &Request) -> Vec<Range<u64>> {
        let regions = table_regions(table).unwrap_or_default();
        let files = table.fds.iter().map_while(ReceivedFd::get);
        self.memory.kept_by(&regions.into_iter().zip(files).collect::<Vec<_>>())
    }

    /// Its queues.
    pub fn rings(&self) -> &[VirtioRing] {
        &self.rings
    }

    /// Serves requests that have come. An error ends the session.
    pub(crate) fn serve(&mut self) -> Result<(), VhostError> {
        for _ in 0..TURN {
            let Some(request) = self.take()? else { break };
            self.serve_request(request)?;
        }
        Ok(())
    }

    /// The next request, if it has come whole; for [`Self::serve_request`].
    pub(crate) fn take(&mut self) -> Result<Option<Request>, VhostError> {
        self.inbox.take(self.socket.as_ref().ok_or(VhostError::Closed)?)
    }

    /// Serves one request. An error ends the session.
    pub(crate) fn serve_request(&mut self, mut request: Request) -> Result<(), VhostError> {
        if request.code == FrontendReq::GET_INFLIGHT_FD {
            return self.create_inflight(&request);
        }
        let answer = self.answer(&mut request)?;
        let body = match answer {
            Some(body) => body,
            None if request.wants_reply => VhostUserU64::new(0).as_slice().to_vec(),
            None => return Ok(()),
        };
        reply(self.socket()?, request.code, &body, None)
    }

    fn answer(&mut self, request: &mut Request) -> Result<Option<Vec<u8>>, VhostError> {
        let number = |value: u64| Ok(Some(VhostUserU64::new(value).as_slice().to_vec()));
        match request.code {
            FrontendReq::GET_FEATURES => return number(self.model.features),
            FrontendReq::SET_FEATURES => self.set_features(request.body::<VhostUserU64>()?.value)?,
            FrontendReq::GET_PROTOCOL_FEATURES => return number(self.model.protocol.bits()),
            FrontendReq::SET_PROTOCOL_FEATURES => {
                if request.body::<VhostUserU64>()?.value & !self.model.protocol.bits() != 0 {
                    return Err(VhostError::Protocol("it sets protocol features that were not offered".into()));
                }
            }
            FrontendReq::GET_QUEUE_NUM => return number(self.model.announced),
            FrontendReq::GET_MAX_MEM_SLOTS => return number(MOST as u64),
            FrontendReq::SET_OWNER | FrontendReq::SEND_RARP | FrontendReq::NET_SET_MTU | FrontendReq::SET_VRING_ERR => {
            }
            FrontendReq::RESET_OWNER => self.rings.iter_mut().for_each(|ring| {
                ring.stop();
            }),
            FrontendReq::SET_MEM_TABLE => self.set_table(request)?,
            FrontendReq::ADD_MEM_REG => {
                let region = request.body::<VhostUserSingleMemoryRegion>()?;
                self.memory.add(*region, request.fd()?)?;
                // The region may be one that was removed before, with queues in it.
                self.relocate();
            }
            FrontendReq::REM_MEM_REG => {
                self.memory.remove(*request.body::<VhostUserSingleMemoryRegion>()?)?;
                self.relocate();
            }
            FrontendReq::SET_VRING_NUM => {
                let state = request.body::<VhostUserVringState>()?;
                self.stopped(state.index)?.set_size(state.num)?;
            }
            FrontendReq::SET_VRING_BASE => {
                let state = request.body::<VhostUserVringState>()?;
                self.stopped(state.index)?.set_base(state.num);
            }
            FrontendReq::SET_VRING_ADDR => {
                let addresses = request.body::<VhostUserVringAddr>()?;
                let index = self.index(addresses.index)?;
                self.rings[index].set_addresses(addresses, &self.memory)?;
            }
            FrontendReq::SET_VRING_ENABLE => {
                let state = request.body::<VhostUserVringState>()?;
                let index = self.index(state.index)?;
                self.rings[index].enable(state.num != 0);
            }
            FrontendReq::GET_VRING_BASE => {
                let state = request.body::<VhostUserVringState>()?;
                let index = self.index(state.index)?;
                let base = self.rings[index].stop();
                return Ok(Some(VhostUserVringState::new(state.index, base.into()).as_slice().to_vec()));
            }
            FrontendReq::SET_VRING_KICK => self.start(request)?,
            FrontendReq::SET_VRING_CALL => {
                let value = request.body::<VhostUserU64>()?.value;
                let index = self.index_of(value)?;
                let call = if value & NO_DESCRIPTOR == 0 { Some(eventfd(request.fd()?)?) } else { None };
                self.rings[index].set_call(call);
            }
            FrontendReq::GET_CONFIG if self.offers(VhostUserProtocolFeatures::CONFIG) => {
                return self.read_config(request).map(Some);
            }
            // No device here has a part of its configuration that a driver may write; what a driver writes anyway changes nothing.
            FrontendReq::SET_CONFIG if self.offers(VhostUserProtocolFeatures::CONFIG) => {}
            FrontendReq::SET_INFLIGHT_FD if self.offers(VhostUserProtocolFeatures::INFLIGHT_SHMFD) => {
                if self.rings.iter().any(VirtioRing::started) {
                    return Err(VhostError::Protocol(
                        "it changes the memory for requests in flight of running queues".into(),
                    ));
                }
                let told = request.body::<VhostUserInflight>()?;
                self.inflight = Some(InflightRegion::map(told, request.fd()?)?);
            }
            FrontendReq::SET_BACKEND_REQ_FD if self.offers(VhostUserProtocolFeatures::BACKEND_REQ) => {
                self.backend = Some(backend_socket(request.fd()?)?);
            }
            code => return Err(VhostError::Protocol(format!("it sends {code:?}, which was not offered"))),
        }
        Ok(None)
    }

    fn socket(&self) -> Result<&UnixStream, VhostError> {
        self.socket.as_ref().ok_or(VhostError::Closed)
    }

    fn offers(&self, feature: VhostUserProtocolFeatures) -> bool {
        self.model.protocol.contains(feature)
    }

    fn read_config(&self, request: &Request) -> Result<Vec<u8>, VhostError> {
        let bad = || VhostError::Protocol("it asks for a configuration that no device has".into());
        let head = request.body.get(..size_of::<VhostUserConfig>()).ok_or_else(bad)?;
        let wanted = read::<VhostUserConfig>(head).ok_or_else(bad)?;
        let (offset, size) = (wanted.offset, wanted.size);
        if offset.checked_add(size).is_none_or(|end| end > MOST_CONFIG) {
            return Err(bad());
        }
        let byte = |at: u32| usize::try_from(at).ok().and_then(|at| self.config.get(at)).copied().unwrap_or(0);
        Ok(head.iter().copied().chain((offset..offset + size).map(byte)).collect())
    }

    fn create_inflight(&mut self, request: &Request) -> Result<(), VhostError> {
        if !self.offers(VhostUserProtocolFeatures::INFLIGHT_SHMFD) {
            return Err(VhostError::Protocol("it sends GET_INFLIGHT_FD, which was not offered".into()));
        }
        let wanted = request.body::<VhostUserInflight>()?;
        let fits = usize::from(wanted.num_queues) <= self.rings.len() && wanted.queue_size <= crate::chain::LARGEST;
        if wanted.num_queues == 0 || wanted.queue_size == 0 || !fits {
            return Err(VhostError::Protocol(
                "it wants memory for requests in flight of queues that do not exist".into(),
            ));
        }
        let (told, file) = InflightRegion::create(wanted.num_queues, wanted.queue_size)?;
        reply(self.socket()?, request.code, told.as_slice(), Some(file.as_fd()))
    }

    fn set_features(&mut self, features: u64) -> Result<(), VhostError> {
        if features & !self.model.accepted != 0 {
            return Err(VhostError::Protocol("it sets features that were not offered".into()));
        }
        if features != self.features && self.rings.iter().any(VirtioRing::started) {
            return Err(VhostError::Protocol("it changes features while queues run".into()));
        }
        self.features = features;
        if features & VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits() == 0 {
            self.rings.iter_mut().for_each(|ring| ring.enable(true));
        }
        Ok(())
    }

    fn set_table(&mut self, request: &mut Request) -> Result<(), VhostError> {
        let regions = table_regions(request)?;
        let fds = std::mem::take(&mut request.fds);
        self.memory.replace(regions.into_iter().zip(fds).collect())?;
        self.relocate();
        Ok(())
    }

    fn relocate(&mut self) {
        self.rings.iter_mut().for_each(|ring| ring.relocate(&self.memory));
    }

    fn start(&mut self, request: &mut Request) -> Result<(), VhostError> {
        let value = request.body::<VhostUserU64>()?.value;
        let index = self.index_of(value)?;
        if value & NO_DESCRIPTOR != 0 {
            return Err(VhostError::Protocol("its queues have no doorbells, so they would have to be polled".into()));
        }
        let kick = eventfd(request.fd()?)?;
        let event_idx = self.features & EVENT_IDX != 0;
        self.rings[index].track(index, self.inflight.as_ref())?;
        self.rings[index].start(kick, &self.poller, self.token + index as u64, &self.memory, event_idx)
    }

    fn index(&self, index: u32) -> Result<usize, VhostError> {
        let known = usize::try_from(index).ok().filter(|index| *index < self.rings.len());
        known.ok_or_else(|| VhostError::Protocol(format!("it speaks of the queue {index}, which does not exist")))
    }

    fn index_of(&self, value: u64) -> Result<usize, VhostError> {
        self.index(u32::try_from(value & VRING).unwrap_or(u32::MAX))
    }

    fn stopped(&mut self, index: u32) -> Result<&mut VirtioRing, VhostError> {
        let index = self.index(index)?;
        if self.rings[index].started() {
            return Err(VhostError::Protocol("it changes the size or place of a queue that runs".into()));
        }
        Ok(&mut self.rings[index])
    }
}

/// The connection ends elsewhere: messages that wait in it may carry descriptors that take long to close.
impl Drop for FrontendSession {
    fn drop(&mut self) {
        if let Some(socket) = self.socket.take() {
            self.poller.remove(&socket);
            self.reaper.close(socket.into());
        }
        if let Some(backend) = self.backend.take() {
            self.reaper.close(backend.into());
        }
    }
}

/// The regions of a memory table, one for each descriptor.
fn table_regions(request: &Request) -> Result<Vec<VhostUserMemoryRegion>, VhostError> {
    let bad = || VhostError::Protocol("its memory table is not one".into());
    let (head, rest) = request.body.split_at_checked(size_of::<VhostUserMemory>()).ok_or_else(bad)?;
    let count = read::<VhostUserMemory>(head).map_or(0, |memory| memory.num_regions);
    let regions: Vec<VhostUserMemoryRegion> =
        rest.chunks(size_of::<VhostUserMemoryRegion>()).filter_map(read).collect();
    let is_table = usize::try_from(count) == Ok(regions.len()) && regions.len() == request.fds.len();
    if is_table { Ok(regions) } else { Err(bad()) }
}

/// The kind of the descriptor, by its link in `/proc`; no other process is asked for it.
fn kind_of(fd: &ReceivedFd) -> Result<String, VhostError> {
    let fd = fd.get().ok_or(VhostError::Closed)?;
    let link = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()))
        .map_err(|source| VhostError::System { call: "look at a descriptor", source })?;
    Ok(link.to_string_lossy().into_owned())
}

/// A descriptor that is an eventfd: reading and writing any other could block this process.
fn eventfd(fd: ReceivedFd) -> Result<OwnedFd, VhostError> {
    if kind_of(&fd)? != "anon_inode:[eventfd]" {
        return Err(VhostError::Protocol("a doorbell is not an eventfd".into()));
    }
    let fd = fd.harmless().ok_or(VhostError::Closed)?;
    rustix::io::ioctl_fionbio(fd.as_fd(), true).map_err(VhostError::system("use a doorbell"))?;
    Ok(fd)
}

/// A UNIX socket, for requests of the back end.
fn backend_socket(fd: ReceivedFd) -> Result<UnixStream, VhostError> {
    let unix = kind_of(&fd)?.starts_with("socket:")
        && fd.get().is_some_and(|fd| {
            rustix::net::sockopt::socket_domain(fd) == Ok(rustix::net::AddressFamily::UNIX)
                && rustix::net::sockopt::socket_type(fd) == Ok(rustix::net::SocketType::STREAM)
        });
    if !unix {
        return Err(VhostError::Protocol("its socket for requests of the back end is no UNIX socket".into()));
    }
    Ok(fd.harmless().ok_or(VhostError::Closed)?.into())
}

#[cfg(test)]
#[cfg(not(miri))]
mod tests {
    use super::*;
    use crate::card;
    use rustix::event::EventfdFlags;
    use rustix::fs::{MemfdFlags, SealFlags};
    use std::fs::File;
    use std::os::unix::fs::FileExt;
    use vhost::vhost_user::message::VhostUserVringAddrFlags;

    /// Places of the only queue's parts.
    const AVAILABLE: u64 = 0x1000;
    const USED: u64 = 0x2000;
    const MEMORY: u64 = 0x3000;
    /// The memory has this address for the front end.
    const USER: u64 = 0x7000_0000_0000;

    /// A session with a queue that runs, and the file of the memory that the queue is in.
    struct RunningQueue {
        session: FrontendSession,
        file: File,
        offered: u16,
        _frontend: UnixStream,
    }

    impl RunningQueue {
        fn start() -> Self {
            let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
            let file = File::from(rustix::fs::memfd_create("guest", flags).unwrap());
            file.set_len(MEMORY).unwrap();
            rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
            let poller = WatchSet::new().unwrap();
            let (socket, frontend) = UnixStream::pair().unwrap();
            let session = FrontendSession::new(card::model(), socket, &poller, 0, 100, &Reaper::default()).unwrap();
            let mut queue = Self { session, file, offered: 0, _frontend: frontend };
            queue.add(0, MEMORY);
            queue.ask(FrontendReq::SET_VRING_NUM, VhostUserVringState::new(0, 4).as_slice(), None);
            let [descriptors, used, available] = [0, USED, AVAILABLE].map(|at| USER + at);
            let none = VhostUserVringAddrFlags::empty();
            let addresses = VhostUserVringAddr::new(0, none, descriptors, used, available, 0);
            queue.ask(FrontendReq::SET_VRING_ADDR, addresses.as_slice(), None);
            queue.kick();
            queue.ask(FrontendReq::SET_VRING_ENABLE, VhostUserVringState::new(0, 1).as_slice(), None);
            assert!(queue.session.rings()[0].runs());
            queue
        }

        fn ask(&mut self, code: FrontendReq, body: &[u8], fd: Option<OwnedFd>) {
            let fds = fd.into_iter().map(|fd| ReceivedFd::new(fd, &self.session.reaper)).collect();
            self.session.serve_request(Request { code, wants_reply: false, body: body.to_vec(), fds }).unwrap();
        }

        /// Gives the queue a doorbell, with which it starts.
        fn kick(&mut self) {
            let doorbell = rustix::event::eventfd(0, EventfdFlags::CLOEXEC).unwrap();
            self.ask(FrontendReq::SET_VRING_KICK, VhostUserU64::new(0).as_slice(), Some(doorbell));
        }

        /// Adds the memory from `start` on.
        fn add(&mut self, start: u64, length: u64) {
            let region = VhostUserSingleMemoryRegion::new(start, length, USER + start, start);
            let file = self.file.try_clone().unwrap();
            self.ask(FrontendReq::ADD_MEM_REG, region.as_slice(), Some(file.into()));
        }

        fn remove(&mut self, start: u64, length: u64) {
            let region = VhostUserSingleMemoryRegion::new(start, length, USER + start, start);
            self.ask(FrontendReq::REM_MEM_REG, region.as_slice(), None);
        }

        fn offer(&mut self, head: u16) {
            let slot = AVAILABLE + 4 + 2 * u64::from(self.offered % 4);
            self.file.write_all_at(&head.to_le_bytes(), slot).unwrap();
            self.offered += 1;
            self.file.write_all_at(&self.offered.to_le_bytes(), AVAILABLE + 2).unwrap();
        }

        fn next(&mut self) -> Option<u16> {
            let (memory, rings) = self.session.parts();
            rings[0].next_head(memory.map()).unwrap()
        }

        fn runs(&self) -> bool {
            self.session.rings()[0].runs()
        }
    }

    #[test]
    fn queue_whose_memory_is_added_again_runs_on() {
        let mut queue = RunningQueue::start();
        queue.offer(1);
        assert_eq!((queue.next(), queue.next()), (Some(1), None));
        queue.remove(0, MEMORY);
        assert!(!queue.runs());
        queue.offer(3);
        queue.add(0, AVAILABLE);
        assert!(!queue.runs(), "a part of the memory is away");
        queue.add(AVAILABLE, MEMORY - AVAILABLE);
        assert!(queue.runs(), "the queue stays away");
        let lies_in = |start, end| queue.session.rings()[0].lies_in(start, end);
        assert!(lies_in(0, 1) && lies_in(AVAILABLE + 13, USED) && lies_in(USED + 37, MEMORY));
        assert!(!lies_in(64, AVAILABLE) && !lies_in(AVAILABLE + 14, USED) && !lies_in(USED + 38, MEMORY));
        assert_eq!((queue.next(), queue.next()), (Some(3), None));
    }

    #[test]
    fn broken_queue_runs_only_after_its_next_start() {
        let mut queue = RunningQueue::start();
        queue.session.rings[0].give_up();
        queue.remove(0, MEMORY);
        queue.add(0, MEMORY);
        assert!(!queue.runs(), "changes of the memory start the queue");
        queue.session.relocate();
        assert!(!queue.runs());
        queue.kick();
        assert!(queue.runs());
    }
}
