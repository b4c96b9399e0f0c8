//! The copy of a frame: out of a sender's buffers, into those of a receiver.

use crate::VhostError;
use crate::chain::{BufferPiece, ChainBuffers, LARGEST, slice_at};
use crate::offload::LONG;
use crate::ring::VirtioRing;
use vm_memory::{GuestMemoryMmap, VolatileSlice};

/// The location of a frame's bytes. The part that the switch has checked is in `head`, a private copy: the sender can change its buffers
/// at any time.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FrameBytes<'a> {
    pub(crate) head: &'a [u8],
    /// The rest, in a guest's memory: the pieces of the whole chain, and the bytes of them to skip.
    pub(crate) rest: Option<(&'a GuestMemoryMmap, &'a [BufferPiece], usize)>,
    /// The length of the frame, both parts together.
    pub(crate) length: usize,
}

impl<'a> FrameBytes<'a> {
    pub(crate) fn flat(frame: &'a [u8]) -> Self {
        Self { head: frame, rest: None, length: frame.len() }
    }

    /// Copies all of it to the end of `into`.
    pub(crate) fn append_to(&self, into: &mut Vec<u8>) -> Result<(), VhostError> {
        into.extend_from_slice(self.head);
        let Some((memory, all, skip)) = self.rest else { return Ok(()) };
        let start = into.len();
        into.resize(start + self.length - self.head.len(), 0);
        read(memory, all, skip, &mut into[start..]).map(drop)
    }
}

/// Reads the bytes behind the first `skip` of these pieces, as many as `into` takes; returns how many there were.
pub(crate) fn read(
    memory: &GuestMemoryMmap,
    all: &[BufferPiece],
    mut skip: usize,
    into: &mut [u8],
) -> Result<usize, VhostError> {
    let mut done = 0;
    for piece in all {
        if skip >= piece.length {
            skip -= piece.length;
            continue;
        }
        if done == into.len() {
            break;
        }
        let slice = slice_at(memory, piece.address, piece.length).ok_or_else(gone)?;
        let slice = slice.offset(skip).map_err(|_| gone())?;
        skip = 0;
        let part = slice.len().min(into.len() - done);
        slice.copy_to(&mut into[done..done + part]);
        done += part;
    }
    Ok(done)
}

fn gone() -> VhostError {
    VhostError::Queue("a buffer is outside of the memory table")
}

/// The fate of a frame at its receiver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Delivery {
    /// It is in the receiver's buffers.
    Done,
    /// The receiver's driver offers too few buffers.
    Full,
    /// The receiver's buffers are too small for it, however many there are.
    TooLarge,
}

/// Pieces of a receiver's buffers that one frame fills at most. Each chain has one or more.
const MOST_PIECES: usize = LARGEST as usize;

/// Buffers of a receiver, used again for each frame.
#[derive(Debug, Default)]
pub(crate) struct ReceiveScratch {
    buffers: ChainBuffers,
    /// The head of each chain, and the bytes of all chains to its end.
    chains: Vec<(u16, usize)>,
}

impl ReceiveScratch {
    /// Puts a frame, behind the header that `header` makes for a number of chains, into a receive queue.
    ///
    /// An error is the receiver's fault.
    pub(crate) fn deliver(
        &mut self,
        ring: &mut VirtioRing,
        memory: &GuestMemoryMmap,
        mergeable: bool,
        header: impl Fn(u16) -> ([u8; LONG], usize),
        frame: &FrameBytes<'_>,
    ) -> Result<Delivery, VhostError> {
        let (_, header_length) = header(1);
        let total = header_length + frame.length;
        let before = ring.position();
        self.buffers.clear();
        self.chains.clear();
        let (mut room, mut counted) = (0, 0);
        while room < total {
            let Some(head) = ring.next_head(memory)? else {
                ring.rewind(before);
                return Ok(Delivery::Full);
            };
            ring.append_buffers(memory, head, &mut self.buffers)?;
            let ChainBuffers { readable, writable, .. } = &self.buffers;
            if !readable.is_empty() {
                return Err(VhostError::Queue("a buffer is of the wrong direction"));
            }
            room += writable.iter().skip(counted).map(|piece| piece.length).sum::<usize>();
            counted = writable.len();
            self.chains.push((head, room));
            if counted > MOST_PIECES || (room < total && !mergeable) {
                ring.rewind(before);
                return Ok(Delivery::TooLarge);
            }
        }
        let count = u16::try_from(self.chains.len()).unwrap_or(u16::MAX);
        let (bytes, _) = header(count);
        let header = &bytes[..header_length];
        match self.buffers.writable.first() {
            // Mostly a frame and its header are in one buffer.
            Some(piece) if piece.length >= total => {
                write_whole(slice_at(memory, piece.address, total).ok_or_else(gone)?, header, frame)?;
            }
            _ => {
                let mut target = WritePlace { memory, pieces: &self.buffers.writable, index: 0, offset: 0 };
                target.write(header)?;
                target.write(frame.head)?;
                if let Some((from, all, skip)) = frame.rest {
                    target.copy(from, all, skip, frame.length - frame.head.len())?;
                }
            }
        }
        let mut start = 0;
        for (head, end) in &self.chains {
            ring.complete(memory, *head, total.min(*end) - start)?;
            start = *end;
        }
        Ok(Delivery::Done)
    }
}

/// Writes a header and its frame to a place that has the length of both.
fn write_whole(target: VolatileSlice<'_>, header: &[u8], frame: &FrameBytes<'_>) -> Result<(), VhostError> {
    target.copy_from(header);
    let target = target.offset(header.len()).map_err(|_| gone())?;
    target.copy_from(frame.head);
    let Some((from, all, mut skip)) = frame.rest else { return Ok(()) };
    let mut target = target.offset(frame.head.len()).map_err(|_| gone())?;
    for piece in all {
        if target.is_empty() {
            break;
        }
        if skip >= piece.length {
            skip -= piece.length;
            continue;
        }
        let source = slice_at(from, piece.address, piece.length).ok_or_else(gone)?;
        let source = source.offset(std::mem::take(&mut skip)).map_err(|_| gone())?;
        let part = source.len().min(target.len());
        let source = source.subslice(0, part).map_err(|_| gone())?;
        source.copy_to_volatile_slice(target);
        target = target.offset(part).map_err(|_| gone())?;
    }
    Ok(())
}

/// A place in a receiver's buffers.
struct WritePlace<'a> {
    memory: &'a GuestMemoryMmap,
    pieces: &'a [BufferPiece],
    index: usize,
    offset: usize,
}

impl WritePlace<'_> {
    /// The rest of the present piece, its address first.
    fn place(&mut self) -> Result<BufferPiece, VhostError> {
        while let Some(piece) = self.pieces.get(self.index) {
            if self.offset < piece.length {
                use vm_memory::Address;
                let address = piece.address.checked_add(self.offset as u64).ok_or_else(gone)?;
                return Ok(BufferPiece { address, length: piece.length - self.offset });
            }
            (self.index, self.offset) = (self.index + 1, 0);
        }
        Err(gone())
    }

    fn write(&mut self, mut bytes: &[u8]) -> Result<(), VhostError> {
        while !bytes.is_empty() {
            let place = self.place()?;
            let (now, later) = bytes.split_at(place.length.min(bytes.len()));
            slice_at(self.memory, place.address, now.len()).ok_or_else(gone)?.copy_from(now);
            self.offset += now.len();
            bytes = later;
        }
        Ok(())
    }

    fn copy(
        &mut self,
        from: &GuestMemoryMmap,
        all: &[BufferPiece],
        mut skip: usize,
        length: usize,
    ) -> Result<(), VhostError> {
        let mut left = length;
        for piece in all {
            if skip >= piece.length {
                skip -= piece.length;
                continue;
            }
            let source = slice_at(from, piece.address, piece.length).ok_or_else(gone)?;
            let mut at = std::mem::take(&mut skip);
            while at < source.len() && left > 0 {
                let place = self.place()?;
                let part = place.length.min(source.len() - at).min(left);
                let target = slice_at(self.memory, place.address, part).ok_or_else(gone)?;
                source.subslice(at, part).map_err(|_| gone())?.copy_to_volatile_slice(target);
                at += part;
                left -= part;
                self.offset += part;
            }
        }
        Ok(())
    }
}
