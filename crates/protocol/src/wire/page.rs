//! The answers to `List`: pages of rows, each as many as fit one packet.

use alloc::string::String;
use alloc::vec::Vec;
use core::marker::PhantomData;

use super::codec::{Field, PacketReader, PacketWriter, Put, Take};
use super::{Directions, EventKind, Kind, MAX_PACKET, Mobility, NameNews, PluggedAs, RungBy, User, WireError};

/// Some rows, in order of their keys, and whether others follow them.
///
/// To get the next page, ask with `after` = the key of the last row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Page<T> {
    /// Whether there are rows after these.
    pub more: bool,
    /// The rows of this page.
    pub rows: Vec<T>,
}

/// A [`Page`] in a packet: its rows were checked, and are read when the page is copied out of the packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BorrowedPage<'a, T> {
    more: bool,
    count: u16,
    rows: &'a [u8],
    of: PhantomData<T>,
}

/// A row: what a page has some of.
pub trait PageRow: Put + Sized {
    /// The fewest bytes that a row takes.
    const MIN: usize;
    /// Reads a row.
    fn take(reader: &mut PacketReader<'_>) -> Result<Self, WireError>;
    /// Reads a row and checks it, without allocating.
    fn check(reader: &mut PacketReader<'_>) -> Result<(), WireError>;
    /// As [`Field::spell`].
    #[cfg(test)]
    fn spell(out: &mut String);
}

impl<T: PageRow> Put for Page<T> {
    fn put(&self, out: &mut PacketWriter<'_>) {
        let start = out.len();
        self.more.put(out);
        let mut count: u16 = 0;
        count.put(out);
        for row in &self.rows {
            let before = out.len();
            row.put(out);
            if out.is_overfull() {
                out.rewind(before);
                break;
            }
            // Every row has bytes, so there are fewer than MAX_PACKET of them.
            count += 1;
        }
        out.patch(start, &[u8::from(self.more || usize::from(count) < self.rows.len())]);
        out.patch(start + 1, &count.to_le_bytes());
    }
}

impl<T: PageRow> Put for BorrowedPage<'_, T> {
    fn put(&self, out: &mut PacketWriter<'_>) {
        self.more.put(out);
        self.count.put(out);
        out.bytes(self.rows);
    }
}

impl<'a, T: PageRow> Take<'a> for BorrowedPage<'a, T> {
    const MIN: usize = 3;

    fn take(reader: &mut PacketReader<'a>) -> Result<Self, WireError> {
        let more = bool::take(reader)?;
        let count = u16::take(reader)?;
        // Before anything is reserved: a count that the packet cannot hold is a lie.
        if usize::from(count) * T::MIN > reader.remaining() {
            return Err(WireError::Truncated("a list"));
        }
        let all = reader.rest();
        for _ in 0..count {
            T::check(reader)?;
        }
        let rows = &all[..all.len() - reader.remaining()];
        Ok(Self { more, count, rows, of: PhantomData })
    }
}

impl<T: PageRow> Field for Page<T> {
    type Borrowed<'a> = BorrowedPage<'a, T>;
    /// As many rows as a packet holds.
    const MAX: usize = MAX_PACKET;

    fn own(page: BorrowedPage<'_, T>) -> Self {
        let mut reader = PacketReader::new(page.rows);
        let mut rows = Vec::with_capacity(page.count.into());
        // `take` has checked each row, so they are all there.
        rows.extend((0..page.count).map_while(|_| T::take(&mut reader).ok()));
        Self { more: page.more, rows }
    }

    #[cfg(test)]
    fn spell(_name: &str, out: &mut String) {
        out.push_str("more bool, count u16, {");
        T::spell(out);
        out.push_str("}*");
    }
}

macro_rules! row {
    ($(#[$meta:meta])* $name:ident { $($(#[$fmeta:meta])* $field:ident: $type:ty,)* }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, PartialEq, Eq)]
        pub struct $name { $($(#[$fmeta])* pub $field: $type,)* }

        impl Put for $name {
            fn put(&self, out: &mut PacketWriter<'_>) {
                $(self.$field.put(out);)*
            }
        }

        #[cfg(test)]
        impl crate::wire::strategies::Any for $name {
            fn any() -> proptest::strategy::BoxedStrategy<Self> {
                use proptest::strategy::Strategy;
                ($(<$type as crate::wire::strategies::Any>::any(),)*)
                    .prop_map(|($($field,)*)| Self { $($field,)* })
                    .boxed()
            }
        }

        impl PageRow for $name {
            const MIN: usize = 0 $(+ <<$type as Field>::Borrowed<'static> as Take<'static>>::MIN)*;
            fn take(reader: &mut PacketReader<'_>) -> Result<Self, WireError> {
                Ok(Self { $($field: <$type as Field>::own(Take::take(reader)?),)* })
            }
            fn check(reader: &mut PacketReader<'_>) -> Result<(), WireError> {
                $(<<$type as Field>::Borrowed<'_> as Take<'_>>::take(reader)?;)*
                Ok(())
            }
            #[cfg(test)]
            fn spell(out: &mut String) {
                $crate::wire::declare::spell_fields(&[$((stringify!($field), <$type as Field>::spell),)*], out);
            }
        }
    };
}

row! {
    /// A domain, as `List` shows it. Its key is `id`.
    DomainRow {
        /// Number of the domain, while it exists.
        id: u32,
        /// The epoch of the domain: it distinguishes earlier domains of the same name.
        epoch: u64,
        /// Sessions joined as it.
        sessions: u32,
        /// Ends of channels that it holds.
        channels: u32,
        /// The user it belongs to.
        user: User,
        /// The process of its first session.
        pid: u32,
        /// The name of the domain.
        name: String,
    }
}

row! {
    /// A service, as `List` shows it. Its key is `key`.
    ServiceRow {
        /// Number of the service, while it is bound.
        key: u64,
        /// Id of the domain that bound it.
        domain: u32,
        /// The kind of its channels.
        kind: Kind,
        /// Connections accepted so far.
        accepted: u64,
        /// Connections that wait for the listener.
        waiting: u16,
        /// The name of the service.
        name: String,
        /// Name of the domain that bound it.
        domain_name: String,
    }
}

row! {
    /// A channel, as `List` shows it. Its key is `channel`.
    ChannelRow {
        /// Number of the channel, never used twice.
        channel: u64,
        /// Id of the connecting domain; 0 while it has not reclaimed the channel.
        from: u32,
        /// Id of the accepting domain; 0 while it has not reclaimed the channel.
        to: u32,
        /// The kind of the channel.
        kind: Kind,
        /// The directions that the channel has.
        directions: Directions,
        /// Whether the accepting side has taken it.
        accepted: bool,
        /// When the broker first heard of it, in seconds since 1970.
        since_s: u64,
        /// Name of the connecting domain.
        from_name: String,
        /// Name of the accepting domain.
        to_name: String,
        /// Name of the service.
        service: String,
    }
}

row! {
    /// A virtual machine, as `List` shows it. Its key is `machine`.
    MachineRow {
        /// Its number, never used twice by one broker.
        machine: u32,
        /// Whether its agent has greeted.
        up: bool,
        /// Sessions of its programs.
        sessions: u32,
        /// Windows that it shares with other machines and the host, and those of its groups.
        windows: u32,
        /// How many of its windows both machines see. Of a group's windows, how many this machine sees.
        ready: u32,
        /// The way in which the windows are plugged into the machine. Windows of its groups are always memory devices.
        plugged_as: PluggedAs,
        /// How its programs are rung.
        rung_by: RungBy,
        /// Whether it can be migrated live.
        mobility: Mobility,
        /// The reason why the machine cannot be migrated; empty if it can.
        fixed_by: String,
        /// The name of the machine.
        name: String,
        /// The path of the machine's monitor socket.
        monitor: String,
        /// The host's end of its serial port.
        port: String,
    }
}

row! {
    /// A member of a group, as `List` shows it. Its key is `key`.
    GroupRow {
        /// Its place among all members of all groups, from 1 on.
        key: u32,
        /// Where its window is seen by all.
        address: u64,
        /// Bytes of the window; 0 while there is none.
        size: u64,
        /// How many of these bytes are free.
        free: u64,
        /// Processes that take part as it.
        seats: u32,
        /// It is a virtual machine, and not a domain of the host.
        machine: bool,
        /// Name of the group.
        group: String,
        /// Name of the member.
        member: String,
    }
}

row! {
    /// An event of the broker (protocol C18). Its key is `number`. Fields that do not apply are 0 or empty.
    EventRow {
        /// Number of the event: they count up for as long as the broker runs.
        number: u64,
        /// When it happened, in seconds since 1970.
        at_s: u64,
        /// The kind of the event.
        kind: EventKind,
        /// The user whose program did it, or the machine.
        user: User,
        /// The process that did it.
        pid: u32,
        /// Number of the channel.
        channel: u64,
        /// Number of the refusal ([`Refusal`](super::Refusal)).
        code: u16,
        /// Line of the clause in the policy file.
        line: u32,
        /// The domain that joined or connected, or the name of the machine.
        from: String,
        /// The domain that was connected to.
        to: String,
        /// The service there.
        service: String,
        /// The clause of the policy that decided it, or why it was refused otherwise.
        grounds: String,
    }
}

row! {
    /// A name of this host that has changed (protocol H2). Its key is `key`.
    NameRow {
        /// Number of the change: they count up for each session that follows.
        key: u64,
        /// What has become of it.
        news: NameNews,
        /// The kind of the service's channels; of no meaning for a domain.
        kind: Kind,
        /// The number of the claim (protocol H3.3); 0 if the news are not a claim.
        claim: u64,
        /// The name of the domain.
        domain: String,
        /// The name of the service; empty if the row is about the domain itself.
        service: String,
    }
}
