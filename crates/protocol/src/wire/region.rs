//! Where a region lies, as messages name it (protocol G3).

use partywall_shm::layout::{BadGeometry, Geometry, PAGE};
use partywall_shm::numbered;

use super::WireError;
use super::codec::{PacketReader, PacketWriter, Put, Take, plain_field};

numbered! {
    /// The memory that a region lies in, which comes with the message.
    Within: u8 {
        /// Memory that has nothing else in it.
        OwnMemory = 0 "its own memory",
        /// A window between two machines.
        Window = 1 "a window",
    }
}

/// A reference to a region: the memory that it lies in, its offset there, and its shape.
///
/// The values come from a peer; [`check`](Self::check) verifies that such a region is possible.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RegionReference {
    /// The memory that the region lies in.
    pub within: Within,
    /// The byte of that memory at which the region begins.
    pub base: u64,
    /// The byte of the region at which its ring begins.
    pub ring_offset: u64,
    /// Bytes of the ring, or 0.
    pub ring_size: u64,
}

impl RegionReference {
    /// A region in separate memory.
    pub const fn own_memory(geometry: Geometry) -> Self {
        let (ring_offset, ring_size) = (geometry.ring_offset(), geometry.ring_size());
        Self { within: Within::OwnMemory, base: 0, ring_offset, ring_size }
    }

    /// A region that begins at byte `base` of a window.
    pub const fn in_window(base: u64, geometry: Geometry) -> Self {
        Self { within: Within::Window, base, ..Self::own_memory(geometry) }
    }

    /// A region of this shape that lies there.
    pub const fn new(located: Located, geometry: Geometry) -> Self {
        match located {
            Located::OwnMemory => Self::own_memory(geometry),
            Located::Window { base } => Self::in_window(base, geometry),
        }
    }

    /// A region with small pages in separate memory, whether or not it can have a ring of this size.
    pub const fn with_ring(ring_size: u64) -> Self {
        Self { within: Within::OwnMemory, base: 0, ring_offset: PAGE, ring_size }
    }

    /// Whether it is said to be in a window.
    pub const fn is_in_window(self) -> bool {
        matches!(self.within, Within::Window)
    }

    /// Where the region lies and what its shape is, if there can be such a region.
    ///
    /// # Errors
    /// [`BadGeometry`] if there can be none.
    pub fn check(self) -> Result<(Located, Geometry), BadGeometry> {
        self.locate(Geometry::new(self.ring_offset, self.ring_size)?)
    }

    /// The same for a further region, whose content may be any number of whole pages in separate memory (protocol F1.6).
    ///
    /// # Errors
    /// [`BadGeometry`] if there can be no such region.
    pub fn check_further(self) -> Result<(Located, Geometry), BadGeometry> {
        match self.within {
            Within::OwnMemory => self.locate(Geometry::of_content(self.ring_offset, self.ring_size)?),
            Within::Window => self.check(),
        }
    }

    fn locate(self, geometry: Geometry) -> Result<(Located, Geometry), BadGeometry> {
        let ends = self.base.checked_add(geometry.region_size()).is_some();
        match self.within {
            Within::OwnMemory if self.base == 0 => Ok((Located::OwnMemory, geometry)),
            Within::Window if self.base != 0 && self.base.is_multiple_of(PAGE) && ends && self.ring_offset == PAGE => {
                Ok((Located::Window { base: self.base }, geometry))
            }
            _ => Err(BadGeometry),
        }
    }

    /// The shape of a region that must be in separate memory.
    ///
    /// # Errors
    /// [`BadGeometry`] if there can be no such region, or if it is in a window.
    pub fn check_own_memory(self) -> Result<Geometry, BadGeometry> {
        match self.check()? {
            (Located::OwnMemory, geometry) => Ok(geometry),
            (Located::Window { .. }, _) => Err(BadGeometry),
        }
    }
}

/// Where a region lies, once that has been checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Located {
    /// At the beginning of memory that has nothing else in it.
    OwnMemory,
    /// In a window.
    Window {
        /// The byte of the window at which it begins: a multiple of 4096, and not 0.
        base: u64,
    },
}

impl Located {
    /// The byte of the memory at which the region begins: 0 in separate memory, and nowhere else.
    pub const fn base(self) -> u64 {
        match self {
            Self::OwnMemory => 0,
            Self::Window { base } => base,
        }
    }

    /// The place of which [`base`](Self::base) is this.
    pub const fn from_base(base: u64) -> Self {
        match base {
            0 => Self::OwnMemory,
            base => Self::Window { base },
        }
    }
}

/// `window u8, base u64, ring_offset u64, ring_size u64`.
impl Put for RegionReference {
    fn put(&self, out: &mut PacketWriter<'_>) {
        self.within.number().put(out);
        self.base.put(out);
        self.ring_offset.put(out);
        self.ring_size.put(out);
    }
}

impl<'a> Take<'a> for RegionReference {
    const MIN: usize = size_of::<u8>() + 3 * size_of::<u64>();
    fn take(reader: &mut PacketReader<'a>) -> Result<Self, WireError> {
        let within = u8::take(reader)?;
        Ok(Self {
            within: Within::from_number(within)
                .ok_or(WireError::Value { field: "the memory of a region", value: within.into() })?,
            base: Take::take(reader)?,
            ring_offset: Take::take(reader)?,
            ring_size: Take::take(reader)?,
        })
    }
}

plain_field! { RegionReference, "{name} reference"; }
