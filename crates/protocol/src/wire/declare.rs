//! The macro of the message table. It declares for each row the types, their encoders, the decoder, and the spelling of docs/protocol.md.

#[cfg(test)]
use alloc::string::String;

/// [`Message`](super::Message) and all that belongs to it, from rows of a number, a name, and fields in the order of the wire. It is the last of the
/// macros by which the files of the table pass rows on, so no macro follows before the semicolon.
macro_rules! messages {
    (; $($(#[$meta:meta])* $number:literal $name:ident { $($(#[$fmeta:meta])* $field:ident: $type:ty,)* })*) => {
        $crate::wire::table::table! {
            /// One control message. Descriptors travel beside it; [`fd_count`](Self::fd_count) says how many.
            Message: u16 { $($(#[$meta])* $number $name { $($(#[$fmeta])* $field: $type,)* })* }
        }

        $crate::wire::table::table! {
            /// A [`Message`] whose texts and lists lie elsewhere: in the packet that it was read from, or wherever its writer has them.
            ///
            /// For code that must not allocate, as in a signal handler.
            BorrowedMessage<'a>: u16 {
                $($(#[$meta])* $number $name { $($(#[$fmeta])* $field: <$type as $crate::wire::codec::Field>::Borrowed<'a>,)* })*
            }
        }

        $crate::wire::table::decoder! {
            BorrowedMessage<'a> reads 'a, u16 {
                $($number $name { $($field: <$type as $crate::wire::codec::Field>::Borrowed<'a>,)* })*
            }
        }

        /// The kind of a message, without its fields.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[repr(u16)]
        pub enum MessageKind { $($(#[$meta])* $name = $number,)* }

        impl MessageKind {
            /// The kind of this message.
            pub const fn of(message: &Message) -> Self {
                match message { $(Message::$name { .. } => Self::$name,)* }
            }

            /// Bytes of the longest packet with a message of this kind.
            pub const fn longest(self) -> usize {
                let bytes = match self { $(Self::$name => $crate::wire::HEADER $(+ <$type as $crate::wire::codec::Field>::MAX)*,)* };
                if bytes < $crate::wire::MAX_PACKET { bytes } else { $crate::wire::MAX_PACKET }
            }
        }

        impl Message {
            /// Copies a message out of its packet.
            pub fn own(borrowed: BorrowedMessage<'_>) -> Self {
                match borrowed {
                    $(BorrowedMessage::$name { $($field,)* } => {
                        Self::$name { $($field: <$type as $crate::wire::codec::Field>::own($field),)* }
                    })*
                }
            }
        }

        /// For each kind, any message of it.
        #[cfg(test)]
        pub(super) fn any_of_each() -> alloc::vec::Vec<proptest::strategy::BoxedStrategy<Message>> {
            use proptest::strategy::Strategy;
            alloc::vec![$(
                // The first is there for messages without fields.
                (proptest::strategy::Just(()), $(<$type as $crate::wire::strategies::Any>::any(),)*)
                    .prop_map(|((), $($field,)*)| Message::$name { $($field,)* })
                    .boxed(),
            )*]
        }

        /// Number, name and fields of each message, as docs/protocol.md spells them, in the order of the numbers.
        #[cfg(test)]
        pub(super) fn spelled() -> alloc::vec::Vec<(u16, &'static str, alloc::string::String)> {
            let mut all = alloc::vec![$(($number, stringify!($name), {
                let mut fields = alloc::string::String::new();
                $crate::wire::declare::spell_fields(&[$((stringify!($field), <$type as $crate::wire::codec::Field>::spell),)*], &mut fields);
                fields
            }),)*];
            all.sort();
            all
        }
    };
}
pub(crate) use messages;

/// Appends a field, given its name, as docs/protocol.md spells it.
#[cfg(test)]
pub(super) type Spell = fn(&str, &mut String);

/// Appends some fields as docs/protocol.md spells them.
#[cfg(test)]
pub(super) fn spell_fields(fields: &[(&str, Spell)], out: &mut String) {
    for (at, (name, spell)) in fields.iter().enumerate() {
        if at > 0 {
            out.push_str(", ");
        }
        spell(name, out);
    }
}
