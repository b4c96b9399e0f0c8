//! The pieces of a machine's memory that a task is about.
#![expect(unsafe_code, reason = "copies from memory that the exporter can change, by its address")]

use crate::chain::BufferPiece;
use partywall::rpc::Reply;
use std::borrow::Cow;
use vm_memory::{GuestMemoryBackend, GuestMemoryMmap, VolatileSlice};

/// The pieces behind the first `skip` bytes, of `most` bytes at most.
pub(super) fn front(pieces: &[BufferPiece], mut skip: usize, mut most: usize) -> Vec<BufferPiece> {
    let mut front = Vec::new();
    for piece in pieces {
        let passed = skip.min(piece.length);
        skip -= passed;
        let length = (piece.length - passed).min(most);
        most -= length;
        if length > 0 {
            let address = vm_memory::GuestAddress(piece.address.0.wrapping_add(passed as u64));
            front.push(BufferPiece { address, length });
        }
    }
    front
}

/// The pieces of the first `most` bytes. They are copied only if there are more.
pub(super) fn first(pieces: &[BufferPiece], most: usize) -> Cow<'_, [BufferPiece]> {
    if pieces.iter().map(|piece| piece.length).sum::<usize>() <= most {
        Cow::Borrowed(pieces)
    } else {
        Cow::Owned(front(pieces, 0, most))
    }
}

/// Copies the bytes of a reply to pieces of a machine's memory, which have as many.
pub(super) fn copy_reply(reply: &Reply, pieces: &[BufferPiece], memory: &GuestMemoryMmap) -> bool {
    // SAFETY: no code here reads the slice; only its address and length are taken. Its mapping lives as long as `reply`.
    let bytes = unsafe { reply.view().trusting() };
    let (address, len) = (bytes.as_ptr().cast_mut(), bytes.len());
    // SAFETY: `len` bytes are mapped at `address` as long as `reply`, which outlives the slice. The slice is only read, and volatile access copes with
    // an exporter that changes the bytes meanwhile.
    let from: VolatileSlice<'_> = unsafe { VolatileSlice::new(address, len) };
    let mut at = 0;
    pieces.iter().all(|piece| {
        let part = from.subslice(at, piece.length);
        let to = memory.get_slice(piece.address, piece.length);
        at += piece.length;
        match (part, to) {
            (Ok(part), Ok(to)) => {
                part.copy_to_volatile_slice(to);
                true
            }
            _ => false,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use vm_memory::GuestAddress;

    fn piece(address: u64, length: usize) -> BufferPiece {
        BufferPiece { address: GuestAddress(address), length }
    }

    #[test]
    fn front_of_pieces_skips_and_ends_where_it_should() {
        let pieces = [piece(0, 10), piece(100, 20), piece(200, 30)];
        assert_eq!(front(&pieces, 0, 100), pieces);
        assert_eq!(front(&pieces, 10, 25), [piece(100, 20), piece(200, 5)]);
        assert_eq!(front(&pieces, 15, 5), [piece(105, 5)]);
        assert_eq!(front(&pieces, 60, 5), []);
        assert!(matches!(first(&pieces, 60), Cow::Borrowed(all) if all == pieces));
        assert_eq!(*first(&pieces, 59), [piece(0, 10), piece(100, 20), piece(200, 29)]);
    }
}
