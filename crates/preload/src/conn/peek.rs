//! `MSG_PEEK`: bytes are copied and stay where they are.

use super::cursor::Cursor;
use super::flags;
use super::rx::{BytesFound, MOST_SEGMENTS, NO_BUFFERS, ReceiveTurn, SegmentLook, kernel_receive};
use libc::{c_int, iovec};
use partywall_shm::path::Way;
use rustix::io::Errno;

impl ReceiveTurn<'_> {
    /// Copies what is there now, and leaves it there. With no room for any, says whether there is something.
    pub(super) fn peek(&mut self, fd: c_int, cursor: &Cursor<'_>) -> Result<BytesFound, Errno> {
        let mut byte = 0u8;
        let mut one = [iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 }];
        let counts = cursor.left() > 0;
        let mut place = if counts {
            cursor.here()
        } else {
            let Some(place) = Cursor::of(&mut one) else { return Ok(BytesFound::Nothing) };
            place
        };
        for _ in 0..MOST_SEGMENTS {
            let (mut from_ring, mut from_tcp) = (0, 0);
            // The first segment, and the one after it if that has begun; no more than one switch is ahead of us.
            let first = self.rx.path.way();
            if first == Way::Ring {
                from_ring = self.peek_at_ring(&mut place)?;
            }
            self.rx.path.refresh(&self.pages.peer.tx_path).map_err(|e| self.conn.corrupt(e))?;
            let limit = self.rx.path.limit();
            let mut has_ended = false;
            if place.left() > 0
                && (first == Way::Tcp && limit != Some(0) || first == Way::Ring && limit == Some(from_ring as u64))
            {
                let most = if first == Way::Tcp { limit } else { None };
                let mut space = NO_BUFFERS;
                match kernel_receive(fd, place.rest(&mut space, most.unwrap_or(u64::MAX)), libc::MSG_PEEK) {
                    Ok(0) => has_ended = true,
                    Ok(n) => {
                        place.skip(n);
                        from_tcp = n;
                    }
                    Err(Errno::AGAIN) => {}
                    Err(error) => self.conn.errors().keep(Err(error)),
                }
            }
            if first == Way::Tcp && limit == Some(from_tcp as u64) {
                from_ring = self.peek_at_ring(&mut place)?;
            }
            if from_ring + from_tcp > 0 {
                return Ok(BytesFound::Bytes(if counts { from_ring + from_tcp } else { 0 }));
            }
            // There are no bytes. Whether that is the end is decided as in receiving.
            let nothing = match self.rx.path.way() {
                Way::Ring => self.nothing_in_ring(fd, false)?,
                Way::Tcp if limit == Some(0) => {
                    self.pass();
                    SegmentLook::Used
                }
                Way::Tcp if has_ended => self.end()?,
                Way::Tcp => match self.conn.errors().take() {
                    Some(error) => return Err(error),
                    None if self.conn.has(flags::READ_SHUT) => SegmentLook::End,
                    None => SegmentLook::Nothing,
                },
            };
            match nothing {
                SegmentLook::End => return Ok(BytesFound::End),
                SegmentLook::Used => {}
                SegmentLook::Nothing | SegmentLook::Bytes(_) | SegmentLook::Last(_) => return Ok(BytesFound::Nothing),
            }
        }
        Ok(BytesFound::Nothing)
    }

    fn peek_at_ring(&mut self, place: &mut Cursor<'_>) -> Result<usize, Errno> {
        self.rx.half.refresh(&self.pages.peer.control.tx).map_err(|e| self.conn.corrupt(e))?;
        let n = self.pages.takeable_of(self.rx).min(place.left() as u64);
        if n == 0 {
            return Ok(0);
        }
        // SAFETY: attached, and kept until both directions are held.
        #[expect(unsafe_code, reason = "reads from the peer's ring")]
        let span = unsafe { self.pages.local.peer.peer_span(self.rx.half.head(), n) };
        Ok(place.copy_from(span))
    }
}
