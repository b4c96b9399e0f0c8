//! Groups: memory of several members at the same addresses in each, and the bookkeeping of which member holds which buffer (protocol J).
//!
//! A process that takes part has a **seat**: a part of its member's window that only this process writes. The seat begins with these
//! pages. A buffer goes round as a [`Handle`]. With the handle goes one **token**: the member that opens the handle claims the token in
//! its *own* pages, and records there when it has passed the handle on or released it. The owner of the buffer reads these words. No
//! member writes another's memory, and nothing is acknowledged: a word belongs to one place among the owner's tokens, and the owner
//! reuses that place only when its token has ended.
//!
//! ```text
//!     owner's seat              a reader's seat
//!   +---------------+         +------------------------------+
//!   | header        |         | header                       |
//!   | issued        |         | issued                       |
//!   |  [place]: 17 -+- - - - -+- claims [owner's seat]       |
//!   |               |         |           [place]: 17, held  |
//!   +---------------+         +------------------------------+
//!   | buffers       |         | buffers                      |
//! ```
//!
//! The one race is between an owner that withdraws a token and a member that claims it. Each stores its own word, fences, and then
//! looks at the other's; so at least one of them sees the other.

use crate::sync::{Access, Load, Ordering, Own, fence, load_acquire};

/// Processes that can take part at a time. (Models are checked with few words.)
pub const SEATS: usize = if cfg!(loom) { 1 } else { 32 };
/// Tokens that one of them can have given out at a time.
pub const TOKENS: usize = if cfg!(loom) { 1 } else { 512 };
/// Members of one group.
pub const MEMBERS: usize = 16;
/// Groups of one broker.
pub const GROUPS: usize = 16;
/// Bytes of a seat before its buffers.
pub const CONTROL: u64 = 8192 + (SEATS * TOKENS * 8) as u64;
/// Where the first group's first window is seen. Far from where Linux puts anything by itself.
pub const ADDRESS: u64 = 0x2000_0000_0000;
/// From one member's window to the next's.
pub const STRIDE: u64 = 1 << 36;

/// `PWGRSEAT`, little-endian.
const MAGIC: u64 = u64::from_le_bytes(*b"PWGRSEAT");
/// Serial numbers are below this, and not 0.
const SERIALS: u64 = 1 << 48;
/// How often a handle can be passed on.
pub const HOPS: u16 = (1 << 14) - 1;

/// Where the window of a member is seen, by all.
pub fn address(group: usize, member: usize) -> u64 {
    ADDRESS + ((group * MEMBERS + member) as u64) * STRIDE
}

/// The state of a token as one member records it, in its own memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenClaim {
    /// The number of times the handle had been passed on before it came here. The claim with the greatest number is the latest.
    pub hop: u16,
    /// The state that this holder recorded.
    pub state: TokenState,
}

/// The state of a token, as its holder records it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenState {
    /// It reads the buffer.
    Held,
    /// It has read the buffer, and passed the handle on.
    Passed,
    /// It has read the buffer, and ended the token.
    Released,
}

/// The state of a token, as its owner computes it from all claims.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// No member has opened the handle yet.
    Unclaimed,
    /// A member reads the buffer, or the handle is in transit from one reader to the next.
    Out,
    /// It has come to its end.
    Released,
    /// The holder with the latest claim died without releasing the token.
    Orphaned,
}

/// The pages at the beginning of a seat (protocol J4).
#[derive(Debug)]
#[cfg_attr(not(loom), repr(C, align(4096)))]
pub struct SeatPages<A: Access = Own> {
    magic: A::U64,
    key: A::U64,
    #[cfg(not(loom))]
    unused: [A::U64; 510],
    issued: [A::U64; TOKENS],
    claims: [[A::U64; TOKENS]; SEATS],
}

#[cfg(not(loom))]
const _: () =
    assert!(size_of::<SeatPages>() as u64 == CONTROL && size_of::<SeatPages<crate::sync::Peer>>() as u64 == CONTROL);

impl<A: Access> SeatPages<A> {
    /// Whether these are the pages of the seat with this number, ready to be read.
    pub fn is_of(&self, key: u64) -> bool {
        // EDGE seat: acquires from `SeatPages::begin`.
        load_acquire(&self.magic) == MAGIC && self.key.load(Ordering::Relaxed) == key
    }

    /// The serial number of the token that is given out at a place, or 0.
    pub fn issued(&self, place: usize) -> u64 {
        // EDGE token: acquires what lies in the buffer, from `SeatPages::issue`.
        self.issued.get(place).map_or(0, load_acquire)
    }

    /// The claim in these pages for the token `serial` that the owner in `seat` issued at `place`.
    pub fn claim_of(&self, seat: usize, place: usize, serial: u64) -> Option<TokenClaim> {
        // EDGE claim: acquires from `SeatPages::say`; what was read of the buffer is read.
        let word = load_acquire(self.claims.get(seat)?.get(place)?);
        let state = match word & 3 {
            _ if word >> 16 != serial => return None,
            1 => TokenState::Held,
            2 => TokenState::Passed,
            3 => TokenState::Released,
            _ => return None,
        };
        Some(TokenClaim { hop: (word >> 2) as u16 & HOPS, state })
    }
}

#[cfg(any(test, loom))]
impl Default for SeatPages<Own> {
    /// Zeroed pages, before a seat begins.
    fn default() -> Self {
        use crate::sync::AtomicU64;
        let zero = |_| AtomicU64::new(0);
        Self {
            magic: zero(0),
            key: zero(0),
            #[cfg(not(loom))]
            unused: core::array::from_fn(zero),
            issued: core::array::from_fn(zero),
            claims: core::array::from_fn(|_| core::array::from_fn(zero)),
        }
    }
}

impl SeatPages<Own> {
    /// Makes these the pages of a new seat. The remains of an earlier seat are cleared before the new key is visible.
    pub fn begin(&self, key: u64) {
        self.magic.store(0, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let words = self.issued.iter().chain(self.claims.iter().flatten());
        words.for_each(|word| word.store(0, Ordering::Relaxed));
        self.key.store(key, Ordering::Relaxed);
        // EDGE seat: releases the pages of the new seat; acquired in `SeatPages::is_of`.
        self.magic.store(MAGIC, Ordering::Release);
    }

    /// Issues a token. A member that sees the token also sees what the owner has written to the buffer.
    pub fn issue(&self, place: usize, serial: u64) {
        if let Some(word) = self.issued.get(place) {
            // EDGE token: releases what lies in the buffer; acquired in `SeatPages::issued`.
            word.store(serial, Ordering::Release);
        }
    }

    /// Withdraws a token. The owner looks for claims afterwards; a later claim is refused.
    pub fn take_back(&self, place: usize) {
        self.issue(place, 0);
        fence(Ordering::SeqCst);
    }

    /// Records the state of a token of the owner in `seat`. After a claim ([`TokenState::Held`]) the caller looks at the owner's word:
    /// the claim is valid only if the token is still issued then.
    pub fn say(&self, seat: usize, place: usize, serial: u64, claim: TokenClaim) {
        let state = match claim.state {
            TokenState::Held => 1,
            TokenState::Passed => 2,
            TokenState::Released => 3,
        };
        if let Some(word) = self.claims.get(seat).and_then(|of| of.get(place)) {
            // EDGE claim: what was read of the buffer was read before this; acquired in `SeatPages::claim_of`.
            word.store(serial << 16 | u64::from(claim.hop & HOPS) << 2 | state, Ordering::Release);
        }
        fence(Ordering::SeqCst);
    }
}

/// The fate of a token, from the claims of all seats (protocol J7), each with whether the seat's process is alive.
///
/// A token has one holder at a time, so the latest claim decides. If a handle was copied against the rules, any live member that holds it
/// keeps the token out.
pub fn fate(said: impl Iterator<Item = (bool, TokenClaim)>) -> Fate {
    let (mut read, mut last) = (false, None::<(bool, TokenClaim)>);
    for (alive, claim) in said {
        read |= alive && claim.state == TokenState::Held;
        if last.is_none_or(|(_, other)| claim.hop > other.hop) {
            last = Some((alive, claim));
        }
    }
    match last {
        _ if read => Fate::Out,
        None => Fate::Unclaimed,
        Some((_, TokenClaim { state: TokenState::Released, .. })) => Fate::Released,
        Some((true, _)) => Fate::Out,
        Some((false, _)) => Fate::Orphaned,
    }
}

/// Serial numbers of tokens, from a random one on: that of an earlier process in the same seat is not met again.
#[derive(Debug)]
pub struct Serials(u64);

impl Serials {
    /// Starts at the given random number.
    pub fn new(random: u64) -> Self {
        Self(random)
    }

    /// Takes the next serial number.
    pub fn take(&mut self) -> u64 {
        self.0 = self.0 % (SERIALS - 1) + 1;
        self.0
    }
}

/// A buffer and a token, as they go from hand to hand (protocol J8): by any stream, message or line of text.
///
/// A member that opens one takes nothing in it for granted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Handle {
    /// The owner's seat.
    pub owner: u64,
    /// Where the buffer is, in every member.
    pub address: u64,
    /// How long it is.
    pub len: u64,
    /// The serial number of the token.
    pub serial: u64,
    /// Its place among the owner's.
    pub place: u16,
    /// How often it has been passed on, at most [`HOPS`].
    pub hop: u16,
}

/// Bytes that are no [`Handle`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BadHandle;

impl core::fmt::Display for BadHandle {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(
            f,
            "a handle of a buffer is {} bytes, or {} hexadecimal digits, as it was given out",
            Handle::BYTES,
            2 * Handle::BYTES
        )
    }
}

impl core::error::Error for BadHandle {}

impl Handle {
    /// Bytes of it.
    pub const BYTES: usize = 40;
    const MAGIC: u32 = u32::from_le_bytes(*b"PWGB");

    /// As it travels.
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        let mut out = [0; Self::BYTES];
        out[..4].copy_from_slice(&Self::MAGIC.to_le_bytes());
        out[4..6].copy_from_slice(&self.place.to_le_bytes());
        out[6..8].copy_from_slice(&self.hop.to_le_bytes());
        for (n, field) in [self.owner, self.serial, self.address, self.len].into_iter().enumerate() {
            out[8 + 8 * n..16 + 8 * n].copy_from_slice(&field.to_le_bytes());
        }
        out
    }

    /// Reads it.
    ///
    /// # Errors
    /// If it is not as [`Handle::to_bytes`] makes it.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, BadHandle> {
        let bytes: &[u8; Self::BYTES] = bytes.try_into().map_err(|_| BadHandle)?;
        let (head, fields) = bytes.split_at(8);
        if head[..4] != Self::MAGIC.to_le_bytes() {
            return Err(BadHandle);
        }
        let mut fields = fields.chunks_exact(8).map(|f| f.try_into().map_or(0, u64::from_le_bytes));
        let mut field = || fields.next().ok_or(BadHandle);
        let (owner, serial, address, len) = (field()?, field()?, field()?, field()?);
        let (place, hop) = (u16::from_le_bytes([head[4], head[5]]), u16::from_le_bytes([head[6], head[7]]));
        if hop > HOPS || serial == 0 || serial >= SERIALS || usize::from(place) >= TOKENS || len == 0 {
            return Err(BadHandle);
        }
        Ok(Self { owner, address, len, serial, place, hop })
    }
}

impl core::fmt::Display for Handle {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        self.to_bytes().iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl core::str::FromStr for Handle {
    type Err = BadHandle;

    fn from_str(text: &str) -> Result<Self, BadHandle> {
        let digits = text.as_bytes();
        let mut bytes = [0; Self::BYTES];
        if digits.len() != 2 * bytes.len() {
            return Err(BadHandle);
        }
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
            let digit = |c: u8| char::from(c).to_digit(16).and_then(|d| u8::try_from(d).ok());
            *byte = digit(pair[0]).zip(digit(pair[1])).map(|(high, low)| high << 4 | low).ok_or(BadHandle)?;
        }
        Self::from_bytes(&bytes)
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;
    use alloc::boxed::Box;
    use alloc::string::ToString;

    #[test]
    fn handles_round_trip_and_others_are_refused() {
        let handle =
            Handle { owner: 7 << 32, address: ADDRESS + 4096, len: 1, serial: SERIALS - 1, place: 511, hop: HOPS };
        assert_eq!(Handle::from_bytes(&handle.to_bytes()), Ok(handle));
        assert_eq!(handle.to_string().parse(), Ok(handle));
        for (at, byte) in [(0, 0), (5, 2), (7, 0x40), (22, 1)] {
            let mut bad = handle.to_bytes();
            bad[at] = byte;
            assert_eq!(Handle::from_bytes(&bad), Err(BadHandle), "byte {at}");
        }
        for bad in [Handle { serial: 0, ..handle }, Handle { len: 0, ..handle }] {
            assert_eq!(Handle::from_bytes(&bad.to_bytes()), Err(BadHandle));
        }
        assert_eq!(Handle::from_bytes(&handle.to_bytes()[1..]), Err(BadHandle));
        for bad in ["", "zz", &"+1".repeat(40), &"00".repeat(40)] {
            assert_eq!(bad.parse::<Handle>(), Err(BadHandle), "{bad}");
        }
    }

    #[test]
    fn token_is_returned_when_its_last_holder_dies() {
        use TokenState::{Held, Passed, Released};
        let of = |said: &[(bool, u16, TokenState)]| {
            fate(said.iter().map(|&(alive, hop, state)| (alive, TokenClaim { hop, state })))
        };
        assert_eq!(of(&[]), Fate::Unclaimed);
        assert_eq!(of(&[(true, 0, Held)]), Fate::Out);
        assert_eq!(of(&[(true, 0, Passed)]), Fate::Out, "in transit");
        assert_eq!(of(&[(true, 0, Passed), (true, 1, Held)]), Fate::Out);
        assert_eq!(of(&[(true, 0, Passed), (true, 1, Released)]), Fate::Released);
        assert_eq!(of(&[(true, 2, Released), (true, 0, Passed)]), Fate::Released);
        assert_eq!(of(&[(true, 0, Released), (true, 0, Held)]), Fate::Out, "a handle that was copied");
        assert_eq!(of(&[(false, 0, Passed), (true, 1, Held)]), Fate::Out, "passed on before it died");
        assert_eq!(of(&[(false, 0, Passed)]), Fate::Orphaned);
        assert_eq!(of(&[(true, 0, Passed), (false, 1, Held)]), Fate::Orphaned, "it was the last");
        assert_eq!(of(&[(true, 2, Passed), (false, 1, Passed)]), Fate::Out, "back where it was, and in transit again");
        assert_eq!(of(&[(false, 0, Held)]), Fate::Orphaned);
        assert_eq!(of(&[(false, 0, Released)]), Fate::Released);
    }

    #[test]
    fn words_of_an_earlier_seat_are_ignored() {
        let seat = Box::<SeatPages>::default();
        assert!(!seat.is_of(0), "before it has begun");
        seat.begin(5);
        seat.issue(3, 99);
        let held = TokenClaim { hop: 3, state: TokenState::Held };
        seat.say(31, 511, 77, held);
        assert!(seat.is_of(5) && seat.issued(3) == 99);
        assert_eq!(seat.claim_of(31, 511, 77), Some(held));
        assert_eq!(seat.claim_of(31, 511, 78), None, "of another token");
        assert_eq!(seat.claim_of(30, 511, 77), None, "of another owner");
        let done = TokenClaim { hop: HOPS, state: TokenState::Released };
        seat.say(31, 511, 77, done);
        assert_eq!(seat.claim_of(31, 511, 77), Some(done));
        seat.take_back(3);
        assert_eq!(seat.issued(3), 0);
        seat.begin(6);
        assert!(seat.is_of(6) && !seat.is_of(5));
        assert_eq!(seat.claim_of(31, 511, 77), None);
        // Places that are none are harmless.
        seat.say(SEATS, 0, 1, held);
        seat.issue(TOKENS, 1);
        assert_eq!((seat.issued(TOKENS), seat.claim_of(0, TOKENS, 1)), (0, None));
    }

    #[test]
    fn serial_is_never_zero() {
        for start in [0, SERIALS - 1, u64::MAX, u64::MAX - 1] {
            let mut serials = Serials::new(start);
            let all: alloc::vec::Vec<u64> = (0..4).map(|_| serials.take()).collect();
            assert!(all.iter().all(|s| (1..SERIALS).contains(s)), "{all:?}");
            assert!(all.windows(2).all(|w| w[0] != w[1]), "{all:?}");
        }
    }

    #[test]
    fn group_addresses_are_outside_linux_mappings() {
        let last = address(GROUPS - 1, MEMBERS - 1) + STRIDE;
        assert!(ADDRESS > 1 << 44 && last <= 0x4000_0000_0000, "{last:#x}");
        assert_eq!(address(1, 0) - address(0, MEMBERS - 1), STRIDE);
    }
}
