//! A table of messages: each number once, with its name and its fields in the order of the wire. It yields the type, its numbers, the
//! encoder and the decoder, so these cannot differ.
//!
//! ```text
//!   frames! {                                   on the wire, after whatever framing the number comes in:
//!       Fruit: u8 {
//!           1 Apple { [0u32] weight: u64, }     | 0 0 0 0 | weight, 8 bytes |
//!           2 Pear { ripe: bool, bytes: Vec<u8>, }   | 0 or 1 | the rest |
//!       }
//!   }
//! ```
//!
//! A value in brackets is a constant: always written, and refused if it is not there. [`messages`](super::declare) uses the two halves
//! separately, since its messages can also lie in their packet.

/// The type, its numbers and its encoder.
macro_rules! table {
    ($(#[$tmeta:meta])* $table:ident $(<$life:lifetime>)?: $repr:ty {
        $($(#[$meta:meta])* $number:literal $name:ident {
            $([$first:expr])* $($(#[$fmeta:meta])* $field:ident: $type:ty, $([$next:expr])*)*
        })*
    }) => {
        $(#[$tmeta])*
        #[derive(Debug, Clone, PartialEq, Eq)]
        pub enum $table $(<$life>)? { $($(#[$meta])* $name { $($(#[$fmeta])* $field: $type,)* },)* }

        impl $(<$life>)? $table $(<$life>)? {
            /// Every number on the wire.
            pub const KINDS: &'static [$repr] = &[$($number,)*];

            /// Its number on the wire.
            pub fn kind(&self) -> $repr {
                match self { $(Self::$name { .. } => $number,)* }
            }

            /// Its name, for people.
            pub fn name(&self) -> &'static str {
                match self { $(Self::$name { .. } => stringify!($name),)* }
            }
        }

        impl $(<$life>)? $crate::wire::codec::Put for $table $(<$life>)? {
            fn put(&self, out: &mut $crate::wire::codec::PacketWriter<'_>) {
                // A message without fields leaves `out` alone.
                let _ = &out;
                match self {
                    $(Self::$name { $($field,)* } => {
                        $($crate::wire::codec::Put::put(&$first, out);)*
                        $(
                            $crate::wire::codec::Put::put($field, out);
                            $($crate::wire::codec::Put::put(&$next, out);)*
                        )*
                    })*
                }
            }
        }
    };
}
pub(crate) use table;

/// The decoder. The lifetime is that of the packet that is read.
macro_rules! decoder {
    ($table:ident $(<$life:lifetime>)? reads $packet:lifetime, $repr:ty {
        $($(#[$meta:meta])* $number:literal $name:ident {
            $([$first:expr])* $($(#[$fmeta:meta])* $field:ident: $type:ty, $([$next:expr])*)*
        })*
    }) => {
        impl $(<$life>)? $table $(<$life>)? {
            /// Reads the fields of this kind.
            pub(crate) fn take_fields(
                kind: $repr,
                reader: &mut $crate::wire::codec::PacketReader<$packet>,
            ) -> Result<Self, $crate::wire::WireError> {
                // A message without fields leaves `reader` alone.
                let _ = &reader;
                match kind {
                    $($number => {
                        $($crate::wire::codec::take_constant(reader, $first)?;)*
                        $(
                            let $field: $type = $crate::wire::codec::Take::take(reader)?;
                            $($crate::wire::codec::take_constant(reader, $next)?;)*
                        )*
                        Ok(Self::$name { $($field,)* })
                    })*
                    other => Err($crate::wire::WireError::Kind(other.into())),
                }
            }
        }
    };
}
pub(crate) use decoder;

/// All of it, for messages that own what they say.
macro_rules! frames {
    ($(#[$tmeta:meta])* $table:ident: $repr:ty { $($rows:tt)* }) => {
        $crate::wire::table::table! { $(#[$tmeta])* $table: $repr { $($rows)* } }
        $crate::wire::table::decoder! { $table reads '_, $repr { $($rows)* } }
    };
}
pub(crate) use frames;
