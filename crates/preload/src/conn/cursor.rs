//! The caller's buffers, and how far they have been used.
#![expect(unsafe_code, reason = "copies between the caller's buffers and rings")]

use libc::iovec;
use partywall_shm::bytes::{OwnBytes, PeerBytes};

/// A list of buffers and a place in it.
#[derive(Debug)]
pub(crate) struct Cursor<'a> {
    list: &'a [iovec],
    /// Bytes of the first that are used.
    used: usize,
    left: usize,
}

impl<'a> Cursor<'a> {
    /// The beginning of a list. `None` if its lengths do not add up to what a call may carry.
    ///
    /// # Safety
    /// The buffers are valid for what is done with them, as the C library demands of its callers.
    pub(crate) unsafe fn new(list: &'a [iovec]) -> Option<Self> {
        let left = list.iter().try_fold(0usize, |sum, one| sum.checked_add(one.iov_len))?;
        isize::try_from(left).ok()?;
        Some(Self { list, used: 0, left })
    }

    /// The beginning of a list of buffers of our own.
    pub(crate) fn of(list: &'a mut [iovec]) -> Option<Self> {
        // SAFETY: exclusively borrowed; who made the list from a buffer keeps that alive as long.
        unsafe { Self::new(list) }
    }

    /// Bytes still to go.
    #[inline]
    pub(crate) const fn left(&self) -> usize {
        self.left
    }

    /// A second cursor at the same place.
    pub(crate) fn here(&self) -> Self {
        Self { list: self.list, used: self.used, left: self.left }
    }

    /// The next piece: where, and how long; never empty while anything is left.
    #[inline]
    fn piece(&mut self) -> Option<(*mut u8, usize)> {
        while let Some(first) = self.list.first() {
            if self.used < first.iov_len {
                return Some((first.iov_base.cast::<u8>().wrapping_add(self.used), first.iov_len - self.used));
            }
            self.list = &self.list[1..];
            self.used = 0;
        }
        None
    }

    #[inline]
    fn advance(&mut self, n: usize) {
        self.used += n;
        self.left -= n;
    }

    /// Skips bytes that were carried by other means.
    pub(crate) fn skip(&mut self, mut n: usize) {
        while n > 0 {
            let Some((_, len)) = self.piece() else { return };
            let part = len.min(n);
            self.advance(part);
            n -= part;
        }
    }

    /// Copies from the buffers until `to` is full or they are used up; returns how much.
    #[inline]
    pub(crate) fn copy_into(&mut self, mut to: OwnBytes<'_>) -> usize {
        let mut done = 0;
        while done < to.len() {
            let Some((from, len)) = self.piece() else { break };
            let n = len.min(to.len() - done);
            // SAFETY: a part of the caller's buffer, readable by its word. It is read once, into our ring.
            let bytes = unsafe { PeerBytes::new(from, n) };
            copy(bytes, &mut to, done);
            self.advance(n);
            done += n;
        }
        done
    }

    /// Copies to the buffers until they are full or `from` is used up; returns how much.
    #[inline]
    pub(crate) fn copy_from(&mut self, from: PeerBytes<'_>) -> usize {
        let mut done = 0;
        while done < from.len() {
            let Some((to, len)) = self.piece() else { break };
            // SAFETY: a part of the caller's buffer, writable by the caller's contract, and not used by another thread during the call.
            let to = unsafe { std::slice::from_raw_parts_mut(to, len.min(from.len() - done)) };
            let n = from.slice(done, to.len()).copy_to(to);
            self.advance(n);
            done += n;
        }
        done
    }

    /// The rest as a list for the kernel, of at most `limit` bytes. Returns the used entries of `space`.
    pub(crate) fn rest<'s>(&self, space: &'s mut [iovec], limit: u64) -> &'s mut [iovec] {
        let mut room = usize::try_from(limit).unwrap_or(usize::MAX);
        let mut used = self.used;
        let mut count = 0;
        for (slot, one) in space.iter_mut().zip(self.list) {
            if room == 0 {
                break;
            }
            let len = (one.iov_len - used).min(room);
            *slot = iovec { iov_base: one.iov_base.cast::<u8>().wrapping_add(used).cast(), iov_len: len };
            room -= len;
            used = 0;
            count += 1;
        }
        &mut space[..count]
    }
}

/// Copies from the caller's memory, which its other threads may be changing: as from a peer's, then, and straight into the ring.
#[inline]
fn copy(from: PeerBytes<'_>, to: &mut OwnBytes<'_>, at: usize) {
    // SAFETY: `at + from.len() <= to.len()` by the loop above, and the span is ours alone to write.
    let to = unsafe { std::slice::from_raw_parts_mut(to.as_mut_ptr().add(at), from.len()) };
    from.copy_to(to);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(parts: &mut [Vec<u8>]) -> Vec<iovec> {
        parts.iter_mut().map(|p| iovec { iov_base: p.as_mut_ptr().cast(), iov_len: p.len() }).collect()
    }

    #[test]
    fn pieces_are_taken_in_order_and_empty_ones_passed_by() {
        let mut parts = [b"ab".to_vec(), vec![], b"cdef".to_vec(), b"g".to_vec()];
        let list = list(&mut parts);
        // SAFETY: buffers of this test.
        let mut cursor = unsafe { Cursor::new(&list) }.unwrap();
        let mut ring = [0u8; 8];
        let mut take = |n: usize, cursor: &mut Cursor<'_>| {
            // SAFETY: an array of eight bytes.
            let got = cursor.copy_into(unsafe { OwnBytes::new(ring.as_mut_ptr(), n) });
            ring[..got].to_vec()
        };
        assert_eq!(take(3, &mut cursor), b"abc");
        assert_eq!(cursor.left(), 4);
        cursor.skip(1);
        assert_eq!(take(8, &mut cursor), b"efg");
        assert_eq!((cursor.left(), take(8, &mut cursor).len()), (0, 0));
    }

    #[test]
    fn rest_for_kernel_is_limited_in_length() {
        let mut parts = [b"abc".to_vec(), b"defg".to_vec()];
        let list = list(&mut parts);
        // SAFETY: buffers of this test.
        let mut cursor = unsafe { Cursor::new(&list) }.unwrap();
        cursor.skip(1);
        let mut space = [iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; 4];
        let lens = |rest: &mut [iovec]| rest.iter().map(|i| i.iov_len).collect::<Vec<_>>();
        assert_eq!(lens(cursor.rest(&mut space, 100)), [2, 4]);
        assert_eq!(lens(cursor.rest(&mut space, 3)), [2, 1]);
        assert_eq!(lens(cursor.rest(&mut space, 2)), [2]);
        assert_eq!(lens(cursor.rest(&mut space, 0)), [0usize; 0]);
    }
}
