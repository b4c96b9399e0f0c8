//! The codec that runs in signal handlers of other programs, which may have interrupted the allocator, does not allocate.
#![expect(unsafe_code, reason = "counts what is allocated, in place of the allocator")]

use partywall_protocol::wire::{
    self, AddressList, BorrowedAddresses, BorrowedMessage, ChannelRow, Directions, Kind, MAX_PACKET, Message, Page,
    Refusal, RegionReference, Text, User,
};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: every call goes to the system's allocator with the caller's own arguments, and counting neither allocates nor unwinds: the
// counter is a constant-initialised integer without a destructor.
unsafe impl GlobalAlloc for Counting {
    // SAFETY: what the caller owes is what `System` wants, who gets the same layout.
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
        // SAFETY: the caller of `alloc` gives a layout that is not empty, as `System` wants it.
        unsafe { System.alloc(layout) }
    }

    // SAFETY: as for `alloc`.
    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: all memory that this allocator gave out is `System`'s, of the layout that the caller repeats.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// How often this thread allocates while `work` runs.
fn allocations(work: impl FnOnce()) -> usize {
    let before = ALLOCATIONS.get();
    work();
    ALLOCATIONS.get() - before
}

#[test]
fn borrowed_codec_does_not_allocate() {
    let row = ChannelRow {
        channel: 1,
        from: 2,
        to: 3,
        kind: Kind::Stream,
        directions: Directions::BOTH,
        accepted: true,
        since_s: 4,
        from_name: "a".into(),
        to_name: "b".into(),
        service: "c".into(),
    };
    let messages = [
        Message::Join { version: wire::VERSION, name: "web-1".into() },
        Message::Refused { code: Refusal::Quota, reason: "x".repeat(500) },
        Message::PeerIs { region: RegionReference::with_ring(2), program: 3, user: User::Host(4), name: "n".into() },
        Message::Publish { addresses: AddressList(vec![[127, 0, 0, 1].into(); 64]) },
        Message::SetMoveRules { reset: false, clauses: Text("never".into()), ring_size: 0, spin_us: 0 },
        Message::Channels { page: Page { more: true, rows: vec![row; 3] } },
    ];
    for message in messages {
        let mut packet = Vec::new();
        assert!(allocations(|| wire::encode(7, &message, &mut packet)) > 0, "the count counts");
        let mut memory = [0; MAX_PACKET];
        let count = allocations(|| {
            let (request, borrowed) = wire::decode_borrowed(&packet).expect("a message");
            assert_eq!(wire::encode_into(request, &borrowed, &mut memory), Some(&packet[..]));
            assert!(wire::decode_borrowed(&packet[..packet.len() - 1]).is_err());
        });
        assert_eq!(count, 0, "{}", message.name());
    }
    let list = [BorrowedAddresses::bytes([10, 0, 0, 1].into()); 64];
    let publish = BorrowedMessage::Publish { addresses: BorrowedAddresses::new(&list) };
    assert_eq!(allocations(|| assert!(wire::encode_into(7, &publish, &mut [0; 2048]).is_some())), 0);
}
