//! What a function answers to a call.

use super::heap::Block;
use partywall_shm::call::CallBytes;

/// The result of a call: bytes, or a [`Block`] that the client reads in place.
///
/// ```
/// use partywall::rpc::CallAnswer;
///
/// let nothing: CallAnswer = ().into();
/// let number: CallAnswer = 7u32.to_le_bytes().into();
/// let bytes: CallAnswer = vec![0; 1000].into();
/// # let _ = (nothing, number, bytes);
/// ```
#[derive(Debug)]
pub struct CallAnswer {
    pub(crate) bytes: AnswerBytes,
}

#[derive(Debug)]
pub(crate) enum AnswerBytes {
    Inline(CallBytes),
    Copied(Vec<u8>),
    Block(Block),
}

impl CallAnswer {
    /// Bytes that a record carries; `None` for more.
    #[inline]
    pub(crate) fn inline(bytes: &[u8]) -> Option<Self> {
        CallBytes::inline(bytes).map(|bytes| Self { bytes: AnswerBytes::Inline(bytes) })
    }
}

impl From<()> for CallAnswer {
    fn from((): ()) -> Self {
        Self { bytes: AnswerBytes::Inline(CallBytes::EMPTY) }
    }
}

impl<const N: usize> From<[u8; N]> for CallAnswer {
    fn from(bytes: [u8; N]) -> Self {
        let inline = CallBytes::inline(&bytes).map(AnswerBytes::Inline);
        Self { bytes: inline.unwrap_or_else(|| AnswerBytes::Copied(bytes.to_vec())) }
    }
}

impl From<Vec<u8>> for CallAnswer {
    fn from(bytes: Vec<u8>) -> Self {
        Self { bytes: AnswerBytes::Copied(bytes) }
    }
}

impl From<Block> for CallAnswer {
    fn from(block: Block) -> Self {
        Self { bytes: AnswerBytes::Block(block) }
    }
}
