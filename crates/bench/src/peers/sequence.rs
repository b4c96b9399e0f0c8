//! Sequences of the three kinds: in private memory, and in a block of a heap.
//!
//! A block contains the number of elements, the elements, and then the texts of variable ones, to which their elements have pointers:
//!
//! ```text
//! byte:     count u64 | u8 ...
//! fixed:    count u64 | { i32, i32, f64 } ...
//! variable: count u64 | { address u64, f64 } ... | 15 bytes ...
//! ```

use partywall::rpc::{CallError, PeerView};

use super::order::OrderKind;

/// Bytes of the number of elements.
const HEAD: usize = 8;
/// Bytes of an element with a number of 8 bytes at its end.
const ELEMENT: usize = 16;
/// Characters of a text.
const TEXT: usize = 15;

/// A sequence in private memory, as a program has it before and after a call.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Sequence {
    Bytes(Vec<u8>),
    /// Structures as they lie in memory.
    Fixed(Vec<u8>),
    Variable(Vec<(String, f64)>),
}

fn text(at: u64) -> String {
    format!("element {:07}", at % 10_000_000)
}

fn weight(at: u64) -> f64 {
    at as f64 * 0.5
}

/// The answer to a sequence: its length and its last element, as `peer.hpp` has them.
pub(super) fn expected(kind: OrderKind, count: u64) -> f64 {
    let last = count.saturating_sub(1);
    count as f64 + if kind == OrderKind::Byte { f64::from(last as u8) } else { weight(last) }
}

/// Bytes of a block for this number of elements.
pub(super) fn block_len(kind: OrderKind, count: u64) -> usize {
    let count = count as usize;
    HEAD + match kind {
        OrderKind::Byte => count,
        OrderKind::Variable => count * (ELEMENT + TEXT),
        _ => count * ELEMENT,
    }
}

impl Sequence {
    /// The sequence of this length.
    pub(super) fn new(kind: OrderKind, count: u64) -> Self {
        match kind {
            OrderKind::Byte => Self::Bytes((0..count).map(|at| at as u8).collect()),
            OrderKind::Variable => Self::Variable((0..count).map(|at| (text(at), weight(at))).collect()),
            _ => {
                let mut all = Vec::with_capacity(count as usize * ELEMENT);
                for at in 0..count {
                    let number = at as i32;
                    all.extend_from_slice(&number.to_ne_bytes());
                    all.extend_from_slice(&number.wrapping_neg().to_ne_bytes());
                    all.extend_from_slice(&weight(at).to_ne_bytes());
                }
                Self::Fixed(all)
            }
        }
    }

    /// The number of elements.
    pub(super) fn count(&self) -> usize {
        match self {
            Self::Bytes(all) => all.len(),
            Self::Fixed(all) => all.len() / ELEMENT,
            Self::Variable(all) => all.len(),
        }
    }

    /// Copies it into a block of [`block_len`] bytes that has this address.
    pub(super) fn copy_to(&self, block: &mut [u8], address: u64) {
        let (head, rest) = block.split_at_mut(HEAD);
        head.copy_from_slice(&(self.count() as u64).to_ne_bytes());
        match self {
            Self::Bytes(all) | Self::Fixed(all) => rest.copy_from_slice(all),
            Self::Variable(all) => {
                let (elements, texts) = rest.split_at_mut(all.len() * ELEMENT);
                let mut at = address + (HEAD + elements.len()) as u64;
                let places = elements.chunks_exact_mut(ELEMENT).zip(texts.chunks_exact_mut(TEXT));
                for ((element, to), (text, weight)) in places.zip(all) {
                    to.copy_from_slice(text.as_bytes());
                    element[..8].copy_from_slice(&at.to_ne_bytes());
                    element[8..].copy_from_slice(&weight.to_ne_bytes());
                    at += TEXT as u64;
                }
            }
        }
    }

    /// Copies a block of the peer's into private memory.
    pub(super) fn copied(kind: OrderKind, block: &PeerView) -> Result<Self, CallError> {
        let count = count_of(block)?;
        let part = |at: usize, len: usize| {
            let mut bytes = vec![0; len];
            block.read_at(at, &mut bytes).map(|()| bytes)
        };
        Ok(match kind {
            OrderKind::Byte => Self::Bytes(part(HEAD, count)?),
            OrderKind::Variable => {
                let (elements, texts) = (part(HEAD, count * ELEMENT)?, part(HEAD + count * ELEMENT, count * TEXT)?);
                let element = |(element, text): (&[u8], &[u8])| {
                    let text = std::str::from_utf8(text).map_err(|_| CallError::BadPointer)?.to_owned();
                    let weight = element.last_chunk().map_or(f64::NAN, |bytes| f64::from_ne_bytes(*bytes));
                    Ok((text, weight))
                };
                let parts = elements.chunks_exact(ELEMENT).zip(texts.chunks_exact(TEXT));
                Self::Variable(parts.map(element).collect::<Result<_, CallError>>()?)
            }
            _ => Self::Fixed(part(HEAD, count * ELEMENT)?),
        })
    }

    /// The answer to it.
    pub(super) fn answer(&self) -> f64 {
        let last = match self {
            Self::Bytes(all) => all.last().map(|byte| f64::from(*byte)),
            Self::Fixed(all) => all.last_chunk().map(|bytes| f64::from_ne_bytes(*bytes)),
            Self::Variable(all) => all.last().map(|(_, weight)| *weight),
        };
        self.count() as f64 + last.unwrap_or(f64::NAN)
    }
}

fn count_of(block: &PeerView) -> Result<usize, CallError> {
    let count = u64::from_ne_bytes(block.array(0)?) as usize;
    // A count that the block cannot have would overflow below.
    if count > block.len() { Err(CallError::BadPointer) } else { Ok(count) }
}

/// The answer to a sequence where the peer has it: reads the number of elements and the last one, and follows its pointer.
pub(super) fn answer_in_place(
    kind: OrderKind,
    block: &PeerView,
    follow: impl FnOnce(u64, u64) -> Result<PeerView, CallError>,
) -> Result<f64, CallError> {
    let count = count_of(block)?;
    let last = count.checked_sub(1).ok_or(CallError::BadPointer)?;
    if kind == OrderKind::Byte {
        return Ok(count as f64 + f64::from(u8::from_ne_bytes(block.array(HEAD + last)?)));
    }
    let element: [u8; ELEMENT] = block.array(HEAD + last * ELEMENT)?;
    let [first, second] = [0, 8].map(|at| element[at..].first_chunk::<8>().copied().unwrap_or_default());
    if kind == OrderKind::Variable {
        let text: [u8; TEXT] = follow(u64::from_ne_bytes(first), TEXT as u64)?.array(0)?;
        if !text.starts_with(b"element ") {
            return Err(CallError::BadPointer);
        }
    }
    Ok(count as f64 + f64::from_ne_bytes(second))
}

#[cfg(test)]
mod tests {
    use super::*;

    const KINDS: [OrderKind; 3] = [OrderKind::Byte, OrderKind::Fixed, OrderKind::Variable];

    #[test]
    fn sequence_answers_as_expected() {
        for kind in KINDS {
            for count in [1, 2, 300] {
                assert_eq!(Sequence::new(kind, count).answer(), expected(kind, count), "{kind:?} {count}");
            }
        }
    }

    #[test]
    fn block_has_elements_and_pointers_to_texts() {
        for kind in KINDS {
            let sequence = Sequence::new(kind, 100);
            let mut block = vec![0; block_len(kind, 100)];
            sequence.copy_to(&mut block, 0x1000);
            assert_eq!(block[..8], 100u64.to_ne_bytes());
            if kind == OrderKind::Byte {
                assert_eq!(block[HEAD + 99], 99);
                continue;
            }
            let element = &block[HEAD + 99 * ELEMENT..][..ELEMENT];
            match kind {
                OrderKind::Fixed => assert_eq!(element[8..], 49.5f64.to_ne_bytes()),
                _ => {
                    let at = u64::from_ne_bytes(*element.first_chunk().unwrap()) - 0x1000;
                    assert_eq!(&block[at as usize..][..TEXT], b"element 0000099");
                }
            }
        }
    }
}
