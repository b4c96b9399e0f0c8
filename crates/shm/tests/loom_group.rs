//! Tokens of a group's buffers under every interleaving (`group.rs`, protocol J5 to J7).
//!
//! `RUSTFLAGS="--cfg loom" cargo test --profile loom -p partywall-shm --test loom_group`
//!
//! The buffer is a loom cell: an owner that writes it again while a member reads, or before the end of that read is visible, is a race
//! that loom reports.
#![cfg(loom)]
#![expect(unsafe_code, reason = "loom's cells hand out raw pointers")]

use std::sync::Arc;

use loom::cell::UnsafeCell;
use loom::thread;
use partywall_shm::group::{Fate, SeatPages, TokenClaim, TokenState, fate};

/// The token's number, and that of the next at the same place.
const SERIAL: u64 = 5;

struct Group {
    owner: SeatPages,
    readers: [SeatPages; 2],
    buffer: UnsafeCell<u32>,
}

// SAFETY: what is not atomic is the cell, whose accesses loom checks.
unsafe impl Sync for Group {}
// SAFETY: as above.
unsafe impl Send for Group {}

impl Group {
    /// The token is out.
    fn new() -> Arc<Self> {
        let this = Self {
            owner: SeatPages::default(),
            readers: [SeatPages::default(), SeatPages::default()],
            buffer: UnsafeCell::new(0),
        };
        this.write(1);
        this.owner.issue(0, SERIAL);
        Arc::new(this)
    }

    fn write(&self, value: u32) {
        // SAFETY: loom reports it if this races.
        self.buffer.with_mut(|cell| unsafe { *cell = value });
    }

    /// Opens the handle, reads, and says what it has done with the token. Whether it was there.
    fn open(&self, reader: usize, hop: u16, then: TokenState) -> bool {
        let pages = &self.readers[reader];
        let say = |state| pages.say(0, 0, SERIAL, TokenClaim { hop, state });
        say(TokenState::Held);
        if self.owner.issued(0) != SERIAL {
            say(TokenState::Released);
            return false;
        }
        // SAFETY: loom reports it if this races.
        assert_eq!(self.buffer.with(|cell| unsafe { *cell }), 1, "what was lent");
        say(then);
        true
    }

    fn fate(&self) -> Fate {
        fate(self.readers.iter().filter_map(|pages| Some((true, pages.claim_of(0, 0, SERIAL)?))))
    }

    /// Looks once, as an owner does that wants room: whether the token has come to its end, and memory and place are used again.
    fn reuse(&self, ended: impl Fn(Fate) -> bool) -> bool {
        if !ended(self.fate()) {
            return false;
        }
        self.owner.take_back(0);
        if self.fate() == Fate::Out {
            return false;
        }
        self.write(2);
        self.owner.issue(0, SERIAL + 1);
        true
    }
}

fn is_released(fate: Fate) -> bool {
    fate == Fate::Released
}

#[test]
fn loom_memory_is_used_again_when_it_has_been_read() {
    loom::model(|| {
        let group = Group::new();
        let reader = {
            let group = group.clone();
            thread::spawn(move || assert!(group.open(0, 0, TokenState::Released)))
        };
        let done = group.reuse(is_released);
        reader.join().unwrap();
        assert!(done || group.reuse(is_released));
    });
}

#[test]
fn loom_withdrawn_token_is_read_before_reuse_or_not_at_all() {
    loom::model(|| {
        let group = Group::new();
        let reader = {
            let group = group.clone();
            thread::spawn(move || group.open(0, 0, TokenState::Released))
        };
        group.owner.take_back(0);
        let ended = |fate| fate != Fate::Out;
        let done = group.reuse(ended);
        reader.join().unwrap();
        assert!(done || group.reuse(ended));
    });
}

#[test]
fn loom_passed_token_is_read_by_next_member_before_reuse() {
    loom::model(|| {
        let group = Group::new();
        let readers = {
            let group = group.clone();
            thread::spawn(move || {
                assert!(group.open(0, 0, TokenState::Passed));
                let next = group.clone();
                // The member that gets the handle sees all that its sender did before.
                thread::spawn(move || assert!(next.open(1, 1, TokenState::Released))).join().unwrap();
            })
        };
        let done = group.reuse(is_released);
        readers.join().unwrap();
        assert!(done || group.reuse(is_released));
    });
}
