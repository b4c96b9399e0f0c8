//! Plain data: types whose values are their bytes, and the check that a peer's bytes are such a value.

use crate::rpc::error::CallError;
use zerocopy::{Immutable, IntoBytes, TryFromBytes};

type CallResult<T> = Result<T, CallError>;

/// The largest value that is judged in memory of the stack.
const SMALL: usize = 128;

/// Plain data: a type whose values are their bytes, without pointers and without padding. Its bytes travel as they are in memory.
///
/// The three traits of the crate `zerocopy` are derived, and check the type when it is compiled. Bytes of a peer's become a value only if
/// they are one: a `bool` that is 2, or an `enum` without that variant, is [`CallError::BadValue`]. Numbers, `bool`, `char` and arrays of
/// them are plain.
///
/// ```
/// use partywall::rpc::PlainData;
/// use zerocopy::{Immutable, IntoBytes, TryFromBytes};
///
/// #[derive(Debug, Clone, Copy, PartialEq, TryFromBytes, IntoBytes, Immutable)]
/// #[repr(u8)]
/// enum Colour {
///     Red = 1,
///     Green = 2,
/// }
///
/// #[derive(Debug, Clone, Copy, PartialEq, TryFromBytes, IntoBytes, Immutable)]
/// #[repr(C)]
/// struct Pixel {
///     at: [u16; 2],
///     colour: Colour,
///     is_lit: bool,
/// }
///
/// impl PlainData for Colour {}
/// impl PlainData for Pixel {}
/// ```
pub trait PlainData: TryFromBytes + IntoBytes + Immutable + Copy + Send + Sync + 'static {}

macro_rules! plain {
    ($($type:ty)*) => {
        $(impl PlainData for $type {})*
    };
}
plain!(u8 u16 u32 u64 u128 i8 i16 i32 i64 i128 f32 f64 bool char);
impl<T: PlainData, const N: usize> PlainData for [T; N] {}

/// A value of which `copy` copies the bytes, which are judged.
#[inline]
pub(super) fn copied<T: PlainData>(copy: impl FnOnce(&mut [u8]) -> CallResult<()>) -> CallResult<T> {
    let mut small = [0; SMALL];
    let mut large = Vec::new();
    let bytes = match small.get_mut(..size_of::<T>()) {
        Some(bytes) => bytes,
        None => {
            large.resize(size_of::<T>(), 0);
            &mut large[..]
        }
    };
    copy(bytes)?;
    judge(bytes)
}

/// The value that these bytes are, of which this process has the only copy.
#[inline]
pub(super) fn judge<T: PlainData>(bytes: &[u8]) -> CallResult<T> {
    T::try_read_from_bytes(bytes)
        .map_err(|_| CallError::BadValue(format!("no value of type `{}`", std::any::type_name::<T>())))
}
