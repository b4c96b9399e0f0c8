//! One front end's connection: the requests of vhost-user, and what they make of queues and memory.
//!
//! The loop knows nothing of what the queues carry; [`DeviceModel`] says what a device offers. QEMU 7.2 enables queues before it sets
//! features, so the order of requests is left free where a queue cannot be harmed by it.

use crate::VhostError;
use crate::memory::{MOST, MemoryTable};
use crate::message::{Inbox, Request, read, reply};
use crate::poller::{WatchSet, Watched};
use crate::ring::VirtioRing;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use vhost::vhost_user::message::{
    FrontendReq, VhostUserMemory, VhostUserMemoryRegion, VhostUserProtocolFeatures, VhostUserSingleMemoryRegion,
    VhostUserU64, VhostUserVirtioFeatures, VhostUserVringAddr, VhostUserVringState,
};
use vm_memory::ByteValued;

/// Bits of a vring's number in the messages that bring its descriptors, and the one that says that there is none.
const VRING: u64 = 0xff;
const NO_DESCRIPTOR: u64 = 0x100;
/// Requests that are served before others have their turn.
const TURN: usize = 32;

const EVENT_IDX: u64 = 1 << virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;

/// What a device offers.
#[derive(Debug, Clone, Copy)]
pub struct DeviceModel {
    /// Bits of virtio.
    pub features: u64,
    /// Bits of vhost-user.
    pub protocol: VhostUserProtocolFeatures,
    /// How many queues it has.
    pub rings: usize,
}

/// A connection with a front end.
#[derive(Debug)]
pub struct FrontendSession {
    model: DeviceModel,
    socket: Watched<UnixStream>,
    poller: WatchSet,
    /// The tokens of its queues' doorbells are this and the queue's number.
    token: u64,
    inbox: Inbox,
    features: u64,
    memory: MemoryTable,
    rings: Vec<VirtioRing>,
}

impl FrontendSession {
    pub(crate) fn new(
        model: DeviceModel,
        socket: UnixStream,
        poller: &WatchSet,
        token: u64,
        socket_token: u64,
    ) -> Result<Self, VhostError> {
        let rings = (0..model.rings).map(|_| VirtioRing::new()).collect::<Result<_, _>>()?;
        let socket = poller.watch(socket, socket_token)?;
        let (inbox, memory) = (Inbox::default(), MemoryTable::default());
        Ok(Self { model, socket, poller: poller.clone(), token, inbox, features: 0, memory, rings })
    }

    /// What was negotiated.
    pub fn features(&self) -> u64 {
        self.features
    }

    /// Memory and queues.
    pub fn parts(&mut self) -> (&MemoryTable, &mut [VirtioRing]) {
        (&self.memory, &mut self.rings)
    }

    /// Its queues.
    pub fn rings(&self) -> &[VirtioRing] {
        &self.rings
    }

    /// Serves requests that have come. An error ends the session.
    pub(crate) fn serve(&mut self) -> Result<(), VhostError> {
        for _ in 0..TURN {
            let Some(mut request) = self.inbox.take(self.socket.get())? else { break };
            let answer = self.answer(&mut request)?;
            match answer {
                Some(body) => reply(self.socket.get(), request.code, &body)?,
                None if request.wants_reply => reply(self.socket.get(), request.code, VhostUserU64::new(0).as_slice())?,
                None => {}
            }
        }
        Ok(())
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
            FrontendReq::GET_QUEUE_NUM => return number(self.model.rings as u64 / 2),
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
            code => return Err(VhostError::Protocol(format!("it sends {code:?}, which was not offered"))),
        }
        Ok(None)
    }

    fn set_features(&mut self, features: u64) -> Result<(), VhostError> {
        if features & !self.model.features != 0 {
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
        let bad = || VhostError::Protocol("its memory table is not one".into());
        let (head, rest) = request.body.split_at_checked(size_of::<VhostUserMemory>()).ok_or_else(bad)?;
        let count = read::<VhostUserMemory>(head).map_or(0, |memory| memory.num_regions);
        let regions: Vec<VhostUserMemoryRegion> =
            rest.chunks(size_of::<VhostUserMemoryRegion>()).filter_map(read).collect();
        let fds = std::mem::take(&mut request.fds);
        if usize::try_from(count) != Ok(regions.len()) || regions.len() != fds.len() {
            return Err(bad());
        }
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

/// A descriptor that is an eventfd: reading and writing any other could block the switch.
fn eventfd(fd: OwnedFd) -> Result<OwnedFd, VhostError> {
    let link = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()))
        .map_err(|source| VhostError::System { call: "look at a doorbell", source })?;
    if link.as_os_str() != "anon_inode:[eventfd]" {
        return Err(VhostError::Protocol("a doorbell is not an eventfd".into()));
    }
    rustix::io::ioctl_fionbio(fd.as_fd(), true).map_err(VhostError::system("use a doorbell"))?;
    Ok(fd)
}
