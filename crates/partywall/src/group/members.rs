//! The other processes of a group: the members' windows as they are mapped here, and the seats in them.
//!
//! In a group with virtual machines a window is mapped as a whole. In a group of the host alone each seat is.

use super::BufferPart;
use crate::session::{BrokerSession, unexpected};
use crate::{Error, Result};
use partywall_protocol::wire::{GroupRow, Message};
use partywall_region::pmem::{self, Joint, OwnSeat, WindowAddresses};
use partywall_region::window::Window;
use partywall_shm::bytes::PeerBytes;
use partywall_shm::group::{CONTROL, SEATS, TokenClaim};
use rustix::fd::{AsFd, OwnedFd};
use std::collections::BTreeMap;
use std::sync::Arc;

/// A window, before it is mapped.
#[derive(Debug)]
pub(super) struct Fetched {
    pub(super) window: Window,
    pub(super) address: u64,
    life: u32,
}

#[derive(Debug)]
struct Mapped {
    life: u32,
    map: Arc<Joint>,
}

#[derive(Debug)]
struct MemberSeat {
    seat: usize,
    member: u8,
    life: u32,
    alive: bool,
    base: u64,
    size: u64,
    /// Handles of its buffers that are open here.
    open: u32,
    /// Its memory, in a group of the host alone; `None` if that could not be received or mapped yet.
    map: Option<Arc<Joint>>,
}

/// The part of another member's memory that is not mapped yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Missing {
    /// The window of a member.
    Window(u8),
    /// The memory of a seat.
    Seat(u64),
}

/// Where the owner of a buffer is.
#[derive(Debug)]
pub(super) struct Owner {
    pub(super) map: Arc<Joint>,
    pub(super) base: u64,
    pub(super) seat: usize,
}

/// All of them.
#[derive(Debug)]
pub(super) struct Members {
    windows: Vec<Option<Mapped>>,
    /// In a group of the host alone: where the seats of each member are mapped. Empty otherwise.
    addresses: Vec<Arc<WindowAddresses>>,
    /// Life of this process's own member's window, until it is mapped.
    own_life: u32,
    seats: BTreeMap<u64, MemberSeat>,
}

impl Members {
    pub(super) fn new(members: u8) -> Self {
        Self {
            windows: (0..members).map(|_| None).collect(),
            addresses: Vec::new(),
            own_life: 0,
            seats: BTreeMap::new(),
        }
    }

    /// The members of a group whose seats have separate memory: takes the addresses of all their windows.
    pub(super) fn on_host(rows: &[GroupRow]) -> Result<Self> {
        let mut this = Self::new(u8::try_from(rows.len()).unwrap_or(u8::MAX));
        for row in rows {
            this.addresses.push(WindowAddresses::reserve(row.address, row.size)?);
        }
        Ok(this)
    }

    /// Where the seats of a member are mapped, in a group of the host alone.
    pub(super) fn addresses(&self, member: u8) -> Option<&Arc<WindowAddresses>> {
        self.addresses.get(usize::from(member))
    }

    /// Asks for a window.
    pub(super) fn get(session: &mut BrokerSession, member: u8) -> Result<Fetched> {
        match session.request(&Message::GroupWindow { member }, &[])? {
            (Message::GroupWindowIs { life, address, size, .. }, fds) => {
                let fd = fds.into_iter().next().ok_or_else(|| Error::BrokerConfused("a window is missing".into()))?;
                let window = pmem::received(fd.as_fd())?;
                if window.size() < size {
                    return Err(Error::BrokerConfused("a window that is smaller than it should be".into()));
                }
                Ok(Fetched { window, address, life })
            }
            (other, _) => Err(unexpected(&other)),
        }
    }

    pub(super) fn fetch(&mut self, session: &mut BrokerSession, member: u8) -> Result<Fetched> {
        let fetched = Self::get(session, member)?;
        self.own_life = fetched.life;
        Ok(fetched)
    }

    pub(super) fn add_own(&mut self, member: u8, own: &OwnSeat) {
        let mapped = Mapped { life: self.own_life, map: Arc::clone(own.window()) };
        if let Some(window) = self.windows.get_mut(usize::from(member)) {
            *window = Some(mapped);
        }
    }

    pub(super) fn map(&mut self, session: &mut BrokerSession, member: u8) -> Result<()> {
        let fetched = Self::get(session, member)?;
        self.put(member, &fetched)
    }

    /// Maps a window, in place of an earlier one of that member if nothing of that is open.
    pub(super) fn put(&mut self, member: u8, fetched: &Fetched) -> Result<()> {
        let Some(window) = self.windows.get_mut(usize::from(member)) else { return Ok(()) };
        match window {
            Some(there) if there.life == fetched.life => return Ok(()),
            Some(there) if Arc::strong_count(&there.map) > 1 => {
                return Err(Error::Invalid("buffers of an earlier life of a member are open still; drop them".into()));
            }
            _ => {}
        }
        // Two windows cannot be at one address.
        *window = None;
        let map = Arc::new(Joint::map(&fetched.window, fetched.address)?);
        *window = Some(Mapped { life: fetched.life, map });
        Ok(())
    }

    /// Takes in what the broker has said.
    pub(super) fn hear(&mut self, message: Message, fds: &[OwnedFd]) {
        let Message::SeatIs { key, seat, member, life, alive, base, size, .. } = message else { return };
        let seat = usize::from(seat);
        if seat >= SEATS || usize::from(member) >= self.windows.len() {
            return;
        }
        match self.seats.get_mut(&key) {
            Some(known) => known.alive &= alive,
            None if alive => {
                self.seats.insert(key, MemberSeat { seat, member, life, alive, base, size, open: 0, map: None });
            }
            None => {}
        }
        if let Some(memory) = fds.first()
            && let Some(addresses) = self.addresses.get(usize::from(member))
            && let Some(seat) = self.seats.get_mut(&key).filter(|seat| seat.map.is_none())
        {
            // The broker's first statement about the seat is the one that counts.
            match Joint::map_seat(memory.as_fd(), addresses, seat.base, seat.size) {
                Ok(map) => seat.map = Some(Arc::new(map)),
                Err(error) => tracing::debug!(key, %error, "the memory of a seat cannot be mapped yet"),
            }
        }
    }

    /// Seats whose memory is not mapped, or the windows that such seats are in.
    pub(super) fn unmapped(&self) -> Vec<Missing> {
        let missing = self.seats.iter().filter(|(_, seat)| self.map_of(seat).is_none());
        let mut missing: Vec<Missing> = if self.addresses.is_empty() {
            missing.map(|(_, seat)| Missing::Window(seat.member)).collect()
        } else {
            missing.map(|(key, _)| Missing::Seat(*key)).collect()
        };
        missing.sort_unstable();
        missing.dedup();
        missing
    }

    fn map_of<'a>(&'a self, seat: &'a MemberSeat) -> Option<&'a Arc<Joint>> {
        if !self.addresses.is_empty() {
            return seat.map.as_ref();
        }
        let window = self.windows.get(usize::from(seat.member))?.as_ref()?;
        (window.life == seat.life).then_some(&window.map)
    }

    /// The claims of all seats to a token of this process, each with whether its process is alive.
    pub(super) fn claims(&self, me: usize, place: usize, serial: u64) -> impl Iterator<Item = (bool, TokenClaim)> {
        self.seats.iter().filter_map(move |(key, seat)| {
            let pages = self.map_of(seat)?.seat(seat.base)?;
            // A seat that has not begun, or that has a new holder, has no claim.
            let claim = pages.is_of(*key).then(|| pages.claim_of(me, place, serial))??;
            Some((seat.alive, claim))
        })
    }

    pub(super) fn any_dead(&self) -> bool {
        self.seats.values().any(|seat| !seat.alive)
    }

    /// Forgets the dead that nothing is open of. Their numbers.
    pub(super) fn bury(&mut self) -> Vec<u64> {
        let gone = |seat: &MemberSeat| !seat.alive && seat.open == 0;
        let keys = self.seats.iter().filter(|(_, seat)| gone(seat)).map(|(key, _)| *key).collect();
        self.seats.retain(|_, seat| !gone(seat));
        keys
    }

    /// Whether something of this seat can be opened.
    pub(super) fn is_open_to(&self, owner: u64) -> bool {
        self.seats.get(&owner).is_some_and(|seat| self.map_of(seat).is_some())
    }

    /// The owner of a part, if the part is among that owner's buffers.
    pub(super) fn owner(&self, part: &BufferPart) -> Result<Owner> {
        let absent = Error::Gone("the process that owned the buffer is gone, or is not of this group");
        let Some(seat) = self.seats.get(&part.owner).filter(|seat| seat.alive) else { return Err(absent) };
        let map = self.map_of(seat).ok_or(Error::Gone("the window of the buffer's owner is not seen from here"))?;
        let begins = map.address() + seat.base;
        let ends = part.address.checked_add(part.len);
        if part.address < begins + CONTROL || ends.is_none_or(|end| end > begins + seat.size) {
            return Err(Error::Invalid("the handle names memory that is not its owner's buffers'".into()));
        }
        Ok(Owner { map: Arc::clone(map), base: seat.base, seat: seat.seat })
    }

    /// How many members there are.
    pub(super) fn count(&self) -> u8 {
        u8::try_from(self.windows.len()).unwrap_or(u8::MAX)
    }

    /// The live seat of another process, in this life of a member's window, whose buffers have these bytes.
    pub(super) fn part_at(&self, (member, life): (u8, u32), address: u64, len: u64) -> Option<BufferPart> {
        let seats = self.seats.iter().filter(|(_, seat)| seat.member == member && seat.life == life);
        let mut parts = seats.map(|(owner, _)| BufferPart { owner: *owner, address, len });
        parts.find(|part| self.owner(part).is_ok())
    }

    /// Whether a window is mapped, of this life and size.
    pub(super) fn is_mapped(&self, member: u8, life: u32, size: u64) -> bool {
        let window = self.windows.get(usize::from(member)).and_then(Option::as_ref);
        window.is_some_and(|window| {
            window.life == life && size.checked_sub(1).is_some_and(|last| window.map.covers(last))
        })
    }

    /// Copies bytes of another process in this life of a member's window, whatever they are of.
    pub(super) fn copy_at(&self, (member, life): (u8, u32), address: u64, to: &mut [u8]) -> bool {
        let window =
            self.windows.get(usize::from(member)).and_then(Option::as_ref).filter(|window| window.life == life);
        let bytes = window.and_then(|window| bytes_at(&window.map, address, to.len() as u64));
        bytes.is_some_and(|bytes| bytes.copy_to(to) == to.len())
    }

    pub(super) fn opened(&mut self, owner: u64) {
        if let Some(seat) = self.seats.get_mut(&owner) {
            seat.open += 1;
        }
    }

    /// Returns the place of the owner's seat.
    pub(super) fn closed(&mut self, owner: u64) -> Option<usize> {
        let seat = self.seats.get_mut(&owner)?;
        seat.open = seat.open.saturating_sub(1);
        Some(seat.seat)
    }
}

/// Bytes of others at an address of the group, if they are all in this mapping.
pub(super) fn bytes_at(map: &Joint, address: u64, len: u64) -> Option<PeerBytes<'_>> {
    map.bytes(address.checked_sub(map.address())?, len)
}
