//! Connections of unmodified programs whose two ends are in this machine (protocol T4): the broker decides, and what the two ends bring to
//! each other, memory and bells, stays here.
//!
//! ```text
//!   offering program        agent                       broker of the host          accepting program
//!   Offer [socket, region]   keeps the region --------->
//!   SocketRead <-----------  (after each of the steps, protocol T3.12)
//!   Bell [its end] <-------  makes the bell <----------- Bell
//!                            keeps the region <--------------------- Take [socket, region]
//!                            hands over -------> Bell [the other end] -------------->
//!   its bell is rung <--------------------------------------------------- makes its region
//!   Confirm [socket] ------->
//!   PeerIs [region] <----------------------------------- PeerIs
//!   rings --------------------------------------------------------------> its bell is rung
//!                            <-------------------------------------- Finish [socket]
//!                            forgets it <--------------- PeerIs -----> PeerIs [region]
//! ```
//!
//! The descriptors of a handshake that is not completed are closed after [`PATIENCE`]. Both programs then see that their bell hangs up.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use partywall_protocol::wire::Message;
use partywall_region::{bell, closing};

/// Longer than the broker keeps an offer that nothing happens to (protocol T4.7).
const PATIENCE: Duration = Duration::from_secs(35);
/// Between two looks for old ones.
const LOOK: Duration = Duration::from_secs(5);
/// LocalHandshakes at a time; beyond them the oldest is void.
const MOST: usize = 1024;

/// A step that a program has asked for.
#[derive(Debug)]
enum Step {
    Offer(OwnedFd),
    Take(OwnedFd),
    Confirm(u64),
    Finish(u64),
}

/// The accepting side's end of a bell. The offering program may have left descriptors in it.
#[derive(Debug)]
struct UntakenBell(Option<OwnedFd>);

impl UntakenBell {
    fn into_inner(mut self) -> Option<OwnedFd> {
        self.0.take()
    }
}

impl Drop for UntakenBell {
    fn drop(&mut self) {
        self.0.take().into_iter().for_each(closing::close);
    }
}

/// The state of one handshake.
#[derive(Debug)]
struct LocalHandshake {
    since: Instant,
    /// The sessions that have offered and taken.
    sessions: [Option<u32>; 2],
    /// The offering side's region, until the accepting side has it.
    offered: OwnedFd,
    /// The accepting side's end of the bell, until it has taken.
    far: Option<UntakenBell>,
    /// The accepting side's region, once it has taken and until the offering side has it.
    taken: Option<OwnedFd>,
}

impl LocalHandshake {
    fn is_of(&self, session: u32) -> bool {
        self.sessions.contains(&Some(session))
    }
}

/// All that are under way.
#[derive(Debug, Default)]
pub(crate) struct LocalHandshakes {
    /// By session and request, until the broker has answered.
    asked: BTreeMap<(u32, u32), Step>,
    /// By the number of the offer.
    open: BTreeMap<u64, LocalHandshake>,
}

impl LocalHandshakes {
    /// A program asks for a step of a connection within the machine, with the region that it brings, if it brings one.
    pub(crate) fn ask(&mut self, (session, request): (u32, u32), message: &Message, region: Option<OwnedFd>) {
        let step = match (message, region) {
            (Message::Offer { .. }, Some(region)) => Step::Offer(region),
            (Message::Take { .. }, Some(region)) => Step::Take(region),
            (Message::Confirm { offer }, _) => Step::Confirm(*offer),
            (Message::Finish { offer }, _) => Step::Finish(*offer),
            _ => return,
        };
        self.asked.insert((session, request), step);
    }

    /// The broker has allowed the offer or take. Returns the program's end of the bell; `None` if the agent has nothing for this request.
    ///
    /// # Errors
    /// Out of descriptors.
    pub(crate) fn bell(&mut self, session: u32, request: u32, offer: u64) -> io::Result<Option<OwnedFd>> {
        match self.asked.remove(&(session, request)) {
            Some(Step::Offer(offered)) => {
                let (own, far) = bell::pair()?;
                self.make_room();
                let since = Instant::now();
                let sessions = [Some(session), None];
                self.open.insert(
                    offer,
                    LocalHandshake { since, sessions, offered, far: Some(UntakenBell(Some(far))), taken: None },
                );
                Ok(Some(own))
            }
            Some(Step::Take(region)) => {
                let Some(handshake) = self.open.get_mut(&offer) else { return Ok(None) };
                let Some(far) = handshake.far.take().and_then(UntakenBell::into_inner) else { return Ok(None) };
                (handshake.taken, handshake.since) = (Some(region), Instant::now());
                handshake.sessions[1] = Some(session);
                Ok(Some(far))
            }
            _ => Ok(None),
        }
    }

    /// The broker has found that the program that asked has an end of a connection. Returns the region of the other side, if that is kept here.
    pub(crate) fn peer(&mut self, session: u32, request: u32) -> Option<OwnedFd> {
        match self.asked.remove(&(session, request))? {
            // The number of a request that a program uses twice may stand for another program's handshake here.
            Step::Confirm(offer) => {
                let handshake = self.open.get_mut(&offer).filter(|of| of.sessions[0] == Some(session))?;
                handshake.taken.take()
            }
            Step::Finish(offer) => {
                self.open.get(&offer).filter(|of| of.sessions[1] == Some(session))?;
                self.open.remove(&offer).map(|handshake| handshake.offered)
            }
            Step::Offer(_) | Step::Take(_) => None,
        }
    }

    /// A request was refused. If it was a step of an offer, the broker has given that up.
    pub(crate) fn refused(&mut self, session: u32, request: u32) {
        if let Some(Step::Confirm(offer) | Step::Finish(offer)) = self.asked.remove(&(session, request)) {
            self.cancelled(session, offer);
        }
    }

    /// The other end of what a program has offered or taken is elsewhere. What the program has shown is of no use, because its region is to be
    /// in a window.
    pub(crate) fn placed(&mut self, session: u32, request: u32) {
        if matches!(self.asked.get(&(session, request)), Some(Step::Offer(_) | Step::Take(_))) {
            self.asked.remove(&(session, request));
        }
    }

    /// A program takes its offer, or what it has taken, back.
    pub(crate) fn cancelled(&mut self, session: u32, offer: u64) {
        if self.open.get(&offer).is_some_and(|handshake| handshake.is_of(session)) {
            self.open.remove(&offer);
        }
    }

    /// The broker gives up what a session has offered or taken, and so do we.
    pub(crate) fn session_ended(&mut self, session: u32) {
        self.asked.retain(|(of, _), _| *of != session);
        self.open.retain(|_, handshake| !handshake.is_of(session));
    }

    /// Forgets what the broker has forgotten.
    pub(crate) fn forget_old(&mut self) {
        if !self.open.is_empty() {
            let now = Instant::now();
            self.open.retain(|_, handshake| now < handshake.since + PATIENCE);
        }
    }

    /// When there may be something to forget.
    pub(crate) fn patience(&self) -> Option<Duration> {
        (!self.open.is_empty()).then_some(LOOK)
    }

    fn make_room(&mut self) {
        self.forget_old();
        if self.open.len() >= MOST {
            // Numbers of offers count up.
            self.open.pop_first();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use partywall_protocol::wire::RegionReference;
    use partywall_region::bell::{Heard, hear};
    use std::os::fd::AsRawFd as _;

    fn memory() -> OwnedFd {
        std::fs::File::open("/dev/null").unwrap().into()
    }

    fn offer() -> Message {
        Message::Offer { region: RegionReference::with_ring(4096) }
    }

    fn take() -> Message {
        Message::Take { region: RegionReference::with_ring(4096) }
    }

    #[test]
    fn local_handshake_rings_in_turn_and_exchanges_regions() {
        let mut all = LocalHandshakes::default();
        let (offered, taken) = (memory(), memory());
        let numbers = (offered.as_raw_fd(), taken.as_raw_fd());
        all.ask((1, 10), &offer(), Some(offered));
        let near = all.bell(1, 10, 7).unwrap().unwrap();
        assert_eq!(hear(&near), Heard::Nothing);
        all.ask((2, 20), &take(), Some(taken));
        let far = all.bell(2, 20, 7).unwrap().unwrap();
        assert_eq!((hear(&near), hear(&far)), (Heard::Nothing, Heard::Nothing), "the accepting side rings itself");
        all.ask((1, 11), &Message::Confirm { offer: 7 }, None);
        assert_eq!(all.peer(1, 11).unwrap().as_raw_fd(), numbers.1);
        assert_eq!(hear(&far), Heard::Nothing, "the offering side rings itself");
        all.ask((2, 21), &Message::Finish { offer: 7 }, None);
        assert_eq!(all.peer(2, 21).unwrap().as_raw_fd(), numbers.0);
        assert!(all.open.is_empty() && all.asked.is_empty());
        drop(far);
        assert_eq!(hear(&near), Heard::Gone, "nobody else has an end");
    }

    #[test]
    fn place_in_window_discards_shown_region_and_leaves_other_steps() {
        let mut all = LocalHandshakes::default();
        all.ask((1, 10), &offer(), Some(memory()));
        all.placed(1, 10);
        assert!(all.asked.is_empty() && all.bell(1, 10, 7).unwrap().is_none());
        all.ask((1, 11), &Message::Confirm { offer: 7 }, None);
        all.placed(1, 11);
        assert_eq!(all.asked.len(), 1, "a place does not answer this step");
    }

    #[test]
    fn refused_step_and_cancelled_offer_hang_up() {
        for refused in [true, false] {
            let mut all = LocalHandshakes::default();
            all.ask((1, 10), &offer(), Some(memory()));
            let near = all.bell(1, 10, 7).unwrap().unwrap();
            if refused {
                all.ask((1, 11), &Message::Confirm { offer: 7 }, None);
                all.refused(1, 11);
            } else {
                all.cancelled(9, 7);
                assert_eq!(all.open.len(), 1, "another program's");
                all.cancelled(1, 7);
            }
            // The copy by which the other side is rung is gone too, so that closing this end is heard there.
            assert_eq!(hear(&near), Heard::Gone);
            assert!(all.open.is_empty() && all.asked.is_empty());
        }
    }

    #[test]
    fn handshake_of_other_programs_is_neither_used_nor_ended() {
        let mut all = LocalHandshakes::default();
        all.ask((1, 10), &offer(), Some(memory()));
        let _near = all.bell(1, 10, 7).unwrap().unwrap();
        all.ask((2, 20), &take(), Some(memory()));
        let _far = all.bell(2, 20, 7).unwrap().unwrap();
        let steps = [Message::Confirm { offer: 7 }, Message::Finish { offer: 7 }];
        // The broker has answered a request of the program for its own handshake, which has had the same number.
        for step in &steps {
            all.ask((3, 30), step, None);
            assert!(all.peer(3, 30).is_none());
            all.ask((3, 30), step, None);
            all.refused(3, 30);
        }
        for (session, step) in [(2, &steps[0]), (1, &steps[1])] {
            all.ask((session, 11), step, None);
            assert!(all.peer(session, 11).is_none(), "the step of the other side");
        }
        for (session, step) in [(1, &steps[0]), (2, &steps[1])] {
            all.ask((session, 12), step, None);
            assert!(all.peer(session, 12).is_some());
        }
        assert!(all.open.is_empty() && all.asked.is_empty());
    }

    #[test]
    fn answers_without_request_return_nothing() {
        let mut all = LocalHandshakes::default();
        assert!(all.bell(1, 10, 7).unwrap().is_none());
        assert!(all.peer(1, 10).is_none());
        all.ask((2, 20), &take(), Some(memory()));
        assert!(all.bell(2, 20, 7).unwrap().is_none(), "an offer that is not there");
        all.ask((1, 10), &offer(), Some(memory()));
        all.session_ended(1);
        assert!(all.bell(1, 10, 8).unwrap().is_none(), "its program has gone");
    }

    #[test]
    fn handshakes_are_bounded() {
        let mut all = LocalHandshakes::default();
        let bells: Vec<_> = (0..MOST as u64 + 5)
            .map(|number| {
                all.ask((1, 10), &offer(), Some(memory()));
                all.bell(1, 10, number).unwrap().unwrap()
            })
            .collect();
        assert_eq!(all.open.len(), MOST);
        assert_eq!(hear(&bells[0]), Heard::Gone);
    }
}
