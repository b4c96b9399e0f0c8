//! The addresses at which the heaps of a channel are mapped (protocol K6.1), so that both sides can have a segment at the same one.

use partywall_region::segment::HEAP_ADDRESSES;

/// Places that are tried for a segment.
pub(super) const ATTEMPTS: u64 = 16;
/// Addresses for one side of a channel: all segments of its heap, and the control pages before them.
const SIDE_ADDRESSES: u64 = 4 << 30;

/// The start of the addresses that a side of a channel tries (protocol K6.1). Channels of one broker share the addresses of the first
/// attempt only after 4096 numbers. Later attempts are far from those of neighbouring channels.
fn addresses_for(channel: u64, side: u8, attempt: u64) -> u64 {
    let sides = (HEAP_ADDRESSES.end - HEAP_ADDRESSES.start) / SIDE_ADDRESSES;
    let place = channel.wrapping_mul(2).wrapping_add(u64::from(side) + attempt * 1021) % sides;
    HEAP_ADDRESSES.start + place * SIDE_ADDRESSES
}

/// Where a heap's next segment is mapped, if it has `before` bytes of segments already (protocol K6.1).
pub(super) fn address_for(channel: u64, side: u8, attempt: u64, before: u64, align: u64) -> u64 {
    // Segments double in size, so none overlaps the one before; each begins behind its own control page.
    (addresses_for(channel, side, attempt) + 2 * before).next_multiple_of(align) + align
}

/// Whether a side of a channel may have a segment's content from `address` to `end`, behind a control page of `page` bytes (protocol K6.3).
pub(super) fn may_have(channel: u64, side: u8, address: u64, end: u64, page: u64) -> bool {
    (0..ATTEMPTS).any(|attempt| {
        let begin = addresses_for(channel, side, attempt);
        address >= begin + page && end <= begin + SIDE_ADDRESSES
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn side_may_have_its_own_addresses_alone() {
        const MIB: u64 = 1 << 20;
        for (channel, side) in [(1, 0), (1, 1), (7, 0), (u64::MAX, 1)] {
            for attempt in 0..ATTEMPTS {
                let at = address_for(channel, side, attempt, MIB, 4096);
                assert!(may_have(channel, side, at, at + MIB, 4096));
                let begin = addresses_for(channel, side, attempt);
                assert!(
                    !may_have(channel, side, begin, begin + MIB, 4096),
                    "its control page would be its neighbour's"
                );
                let last = begin + SIDE_ADDRESSES;
                assert!(may_have(channel, side, last - MIB, last, 4096));
                assert!(!may_have(channel, side, last - MIB, last + 4096, 4096), "across the end");
            }
            let first = address_for(channel, side, 0, 0, 4096);
            assert!(!may_have(channel, 1 - side, first, first + MIB, 4096), "the other side's");
            assert!(!may_have(channel.wrapping_add(1), side, first, first + MIB, 4096), "another channel's");
        }
    }
}
