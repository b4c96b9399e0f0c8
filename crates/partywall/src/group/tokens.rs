//! The tokens that this process has given out: which buffer each is of, and what has become of it.

use crate::{Error, Result};
use partywall_region::pmem::OwnSpan;
use partywall_shm::group::{Fate, SeatPages, Serials, TOKENS, TokenClaim, fate};
use std::collections::BTreeMap;
use std::sync::Arc;

#[derive(Debug)]
struct HeldToken {
    serial: u64,
    /// Keeps the memory from being used for something else.
    span: Arc<OwnSpan>,
    /// A member that has not claimed it yet is too late.
    recalled: bool,
}

/// All of them, by place.
#[derive(Debug)]
pub(super) struct Tokens {
    out: BTreeMap<u16, HeldToken>,
    serials: Serials,
}

/// The claims of other members to a token, each with whether its process is alive.
type Said = Vec<(bool, TokenClaim)>;

impl Tokens {
    pub(super) fn new(serials: Serials) -> Self {
        Self { out: BTreeMap::new(), serials }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.out.is_empty()
    }

    /// Gives one out. Its place and number.
    pub(super) fn give(&mut self, own: &SeatPages, span: &Arc<OwnSpan>) -> Result<(u16, u64)> {
        let place = (0..TOKENS as u16).find(|place| !self.out.contains_key(place));
        let place = place.ok_or(Error::Full("this process has given out as many handles as it can at a time"))?;
        let serial = self.serials.take();
        self.out.insert(place, HeldToken { serial, span: Arc::clone(span), recalled: false });
        own.issue(place.into(), serial);
        Ok((place, serial))
    }

    /// Takes back the tokens of a buffer that no member has claimed. The others end when their holders release them.
    pub(super) fn recall(&mut self, own: &SeatPages, span: &Arc<OwnSpan>) {
        for (place, token) in self.out.iter_mut().filter(|(_, token)| Arc::ptr_eq(&token.span, span)) {
            token.recalled = true;
            own.take_back((*place).into());
        }
    }

    /// Whether any is out of this buffer.
    pub(super) fn any_of(&self, span: &Arc<OwnSpan>) -> bool {
        self.out.values().any(|token| Arc::ptr_eq(&token.span, span))
    }

    /// Frees the tokens that have ended. `complete`: `said` knows the claims of all members.
    pub(super) fn sweep(&mut self, own: &SeatPages, complete: bool, said: impl Fn(usize, u64) -> Said) {
        self.out.retain(|place, token| {
            let place = usize::from(*place);
            let fate_now = || fate(said(place, token.serial).into_iter());
            match fate_now() {
                Fate::Out => return true,
                Fate::Unclaimed if !token.recalled => return true,
                Fate::Orphaned | Fate::Unclaimed if !complete => return true,
                _ => {}
            }
            // Later claims are refused. A claim made at this moment is seen by the second look (protocol J6).
            own.take_back(place);
            token.recalled = true;
            fate_now() == Fate::Out
        });
    }
}
