//! Wishes: what a sleeper stores so that the peer rings, and whether the peer will.

use super::parting;
use super::readiness::enough;
use super::waiters::Interest;
use super::{Conn, Pages, RingReadiness, flags};
use partywall_shm::half::{Awaited, Fenced, Rounds, SecondLook, SleepStep};
use partywall_shm::wake::AWAKE;
use std::sync::atomic::Ordering;

/// The state in which a sleeper has armed a connection.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Armed {
    /// The wish for data; [`AWAKE`] if it waits for none.
    data: u64,
    /// The wish for room; `None` if it waits for none.
    room: Option<Awaited>,
}

impl Armed {
    /// Waits for neither data nor room.
    pub(crate) const NOTHING: Self = Self { data: AWAKE, room: None };
    /// Set in the word of a tail at which there was room. No cursor reaches this bit.
    const THERE: u64 = 1 << 63;

    /// Publishes a wish in our region, so that the peer rings. The wish is not withdrawn: another thread may share it, and a wish that
    /// has come true or is given up costs the peer at most one ring.
    ///
    /// To be followed by [`partywall_shm::half::Fenced::after`], once for any number of connections, and another look; and if that finds
    /// nothing, by [`Armed::is_in_force`].
    pub(crate) fn begin(conn: &Conn, want: Interest) -> Self {
        Self::begin_for_sleep(conn, want, 0)
    }

    /// The same for a sleep that ends by one bell of any of those that are armed for it, if it has a number ([`super::bell::sleep_number`]):
    /// the thread that is woken looks at all of them, and nobody else sleeps on any.
    pub(crate) fn begin_for_sleep(conn: &Conn, want: Interest, sleep: u64) -> Self {
        let mut armed = Self::NOTHING;
        if !conn.is_up() {
            // In an epoll set already, where it waits for its ring: what lies at the place of its region is another connection's past.
            return armed;
        }
        let Some(pages) = conn.pages() else { return armed };
        let Pages { own, local, .. } = pages;
        if want.has(Interest::IN) {
            // A peer that does not see this yet has stored its bytes before our fence, and they are found by the look that follows.
            if own.rx_path.sleep.load(Ordering::Relaxed) != sleep {
                own.rx_path.sleep.store(sleep, Ordering::Relaxed);
            }
            // Rung for any byte beyond those that are there: some may lie there unread, fewer than `SO_RCVLOWAT`, or reported already to
            // an edge-triggered waiter.
            armed.data = pages.reading().arm_from(pages.visible_tail());
        }
        if want.has(Interest::OUT) {
            let size = local.own.ring_size();
            // Rung when enough is free to be worth a wake-up.
            armed.room = Some(pages.writing().arm(size, enough(size)));
        }
        armed
    }

    /// The same for an edge-triggered waiter; `for_room`: it wants room, and gets edges for that from now on. The fence and a look follow.
    /// It drops a wish for room that was already free: a sender that is refused room arms for it itself ([`Conn::refuse`]).
    pub(crate) fn by_edges(self, conn: &Conn, for_room: bool) -> Self {
        if for_room && !conn.has(flags::HEARS_EDGES) {
            conn.ring_path.set_flag(flags::HEARS_EDGES, true);
        }
        Self { room: self.room.filter(|awaited| !matches!(awaited, Awaited::There { .. })), ..self }
    }

    /// Whether the peer will ring for what was armed. To be asked after the fence and a look that has found nothing. If the peer will not,
    /// something came in between that was not enough, or that another thread took. The sleeper then arms and looks once more, at most
    /// [`partywall_shm::half::ROUNDS`] times.
    pub(crate) fn is_in_force(self, conn: &'static Conn) -> bool {
        let Some(pages) = conn.pages().filter(|_| conn.is_up()) else { return true };
        if conn.has(flags::LINK_LOST) && !conn.has(flags::PARTED) {
            // No bell can come. While bytes may come by the ring or leave it, and until it is unmapped, the sleeper polls.
            conn.part_if_lost();
            if !pages.is_on_tcp() || parting::may_part_soon(conn) {
                return false;
            }
        }
        (self.data == AWAKE || pages.reading().is_armed(self.data))
            && self.room.is_none_or(|awaited| pages.writing().is_armed(awaited))
    }

    /// Both in two words, as a registration keeps them.
    pub(crate) fn to_words(self) -> [u64; 2] {
        let room = match self.room {
            None => AWAKE,
            Some(Awaited::There { tail }) => Self::THERE | tail,
            Some(Awaited::Wish(wish)) => wish,
        };
        [self.data, room]
    }

    /// The inverse of [`Armed::to_words`].
    pub(crate) fn from_words([data, room]: [u64; 2]) -> Self {
        let room = match room {
            AWAKE => None,
            there if there & Self::THERE != 0 => Some(Awaited::There { tail: there & !Self::THERE }),
            wish => Some(Awaited::Wish(wish)),
        };
        Self { data, room }
    }
}

impl Conn {
    /// Records that a sending call was refused for want of room. An edge-triggered waiter that was notified of the earlier room gets the
    /// next one, whether it sleeps now or later. Returns whether there is room by now.
    #[cold]
    pub(super) fn refuse(&'static self) -> bool {
        self.moves.refusals.fetch_add(1, Ordering::Relaxed);
        // A waiter that becomes edge-triggered from here on sees that a call was refused.
        super::heavy_fence();
        if !self.is_up() || !self.has(flags::HEARS_EDGES) {
            return false;
        }
        let mut rounds = Rounds::new();
        loop {
            let armed = Armed::begin(self, Interest::OUT);
            self.bell().drain();
            let look = Fenced::after(armed).look(|| (self.look().writable() == RingReadiness::Yes).then_some(()));
            let SecondLook::Nothing(quiet) = look else {
                // Not if this very thread is sending already, below a signal handler.
                return self.tx.hold().is_ok();
            };
            if rounds.next(quiet, |armed| armed.is_in_force(self)) != SleepStep::ArmAgain {
                return false;
            }
        }
    }
}
