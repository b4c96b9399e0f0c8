//! Lines are written, copied and read back.
#![expect(unsafe_code, reason = "the bytes of a structure that the test itself owns")]

use super::*;
use alloc::boxed::Box;

/// As a process has it.
#[repr(C)]
struct Memory {
    header: StatusHeader,
    lines: [StatusLine; 3],
}

impl Memory {
    fn new() -> Box<Self> {
        // SAFETY: every field is an atomic or an integer, for which zero is a value.
        let memory: Box<Self> = unsafe { Box::<Self>::new_zeroed().assume_init() };
        memory.header.init(3);
        memory
    }

    fn copy(&self) -> Vec<u8> {
        let at = core::ptr::from_ref(self).cast::<u8>();
        // SAFETY: `self` is that long, has no padding (all sizes are asserted), and no other thread writes it.
        unsafe { core::slice::from_raw_parts(at, size_of::<Self>()) }.to_vec()
    }
}

fn identity() -> LineIdentity {
    LineIdentity {
        state: LineState::Tcp,
        reason: Reason::Shared,
        role: Role::Accepting,
        pid: 77,
        fd: 9,
        local: "10.0.0.1:80".parse().unwrap(),
        remote: "10.0.0.2:50000".parse().unwrap(),
        channel: 5,
    }
}

#[test]
fn used_line_is_read_back_and_free_line_is_not() {
    let memory = Memory::new();
    memory.header.use_line(1);
    memory.lines[1].begin(&identity());
    crate::counters::add(&memory.lines[1].tx.tcp, 100);
    crate::counters::add(&memory.lines[1].rx.ring_before, 7);
    let copy = memory.copy();
    assert_eq!(used_bytes(&copy), Ok(3 * LINE));
    let seen = read_all(&copy, &copy);
    assert_eq!(seen.len(), 1, "line 0 is free");
    assert_eq!((seen[0].index, seen[0].identity), (1, identity()));
    assert_eq!((seen[0].tx.tcp, seen[0].rx.ring_before), (100, 7));
    memory.lines[1].set(None);
    assert!(read_all(&memory.copy(), &memory.copy()).is_empty());
}

#[test]
fn last_moves_are_kept_in_order_with_time_and_reason() {
    let memory = Memory::new();
    memory.lines[0].begin(&identity());
    for n in 0..MOVES as u64 + 3 {
        let reason = if n % 2 == 0 { Reason::None } else { Reason::Told };
        memory.lines[0].tx.note_move(n % 2 == 0, reason, 1_700_000_000_000 + n);
    }
    let seen = read_all(&memory.copy(), &memory.copy())[0];
    let moves: Vec<PathMove> = seen.tx.moves().collect();
    assert_eq!((moves.len(), seen.tx.moved), (MOVES, MOVES as u64 + 3));
    let first = PathMove { number: 3, at_ms: 1_700_000_000_003, to_ring: false, reason: Reason::Told };
    assert_eq!(moves[0], first, "the oldest three are gone");
    assert!(moves.is_sorted_by_key(|one| one.at_ms) && seen.rx.moves().next().is_none());
    memory.lines[0].begin(&identity());
    assert_eq!(read_all(&memory.copy(), &memory.copy())[0].tx.moves().count(), 0, "another connection");
    // A writer that lies.
    memory.lines[0].tx.moved.store(u64::MAX, Ordering::Relaxed);
    memory.lines[0].tx.moves[0].store(u64::MAX, Ordering::Relaxed);
    assert!(read_all(&memory.copy(), &memory.copy())[0].tx.moves().count() < MOVES);
}

#[test]
fn ipv6_stays_ipv6() {
    let memory = Memory::new();
    let six = LineIdentity {
        local: "[::1]:1".parse().unwrap(),
        remote: "[::ffff:1.2.3.4]:65535".parse().unwrap(),
        ..identity()
    };
    memory.lines[0].begin(&six);
    assert_eq!(read_all(&memory.copy(), &memory.copy())[0].identity, six);
}

#[test]
fn line_that_changes_between_reads_is_skipped() {
    let memory = Memory::new();
    memory.lines[0].begin(&identity());
    let first = memory.copy();
    memory.lines[0].set(Some(&LineIdentity { fd: 10, ..identity() }));
    assert!(read_all(&first, &memory.copy()).is_empty());
    // A writer that stopped half way.
    memory.lines[0].sequence.fetch_add(1, Ordering::Relaxed);
    assert!(read_all(&memory.copy(), &memory.copy()).is_empty());
}

#[test]
fn malformed_status_is_refused() {
    assert_eq!(used_bytes(&[]), Err(NotStatus));
    assert_eq!(used_bytes(&[0; LINE]), Err(NotStatus));
    let memory = Memory::new();
    memory.header.lines.store(MAX_LINES + 1, Ordering::Relaxed);
    assert_eq!(used_bytes(&memory.copy()), Err(NotStatus));
    memory.lines[0].begin(&identity());
    memory.lines[0].kind.store(200, Ordering::Relaxed);
    assert!(read_all(&memory.copy(), &memory.copy()).is_empty());
    // Cut short.
    assert!(read_all(&[1; LINE + 5], &[1; LINE + 5]).is_empty());
}

#[test]
fn status_numbers_match_their_variants() {
    for (number, state) in LineState::ALL.iter().enumerate() {
        assert_eq!(*state as usize, number);
    }
    for (number, reason) in Reason::ALL.iter().enumerate() {
        assert_eq!(*reason as usize, number);
    }
    assert_eq!((LineState::from_number(6), Reason::from_number(20), Role::from_number(3)), (None, None, None));
}
