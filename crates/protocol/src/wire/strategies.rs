//! What proptest may write into each field.

use alloc::string::String;
use alloc::vec;

use proptest::prelude::*;

use super::*;

fn text() -> impl Strategy<Value = String> {
    prop_oneof![
        "[A-Za-z0-9][A-Za-z0-9._-]{0,63}",
        proptest::collection::vec(any::<char>().prop_filter("no NUL", |c| *c != '\0'), 0..40)
            .prop_map(String::from_iter)
    ]
}

fn kind() -> impl Strategy<Value = Kind> {
    proptest::sample::select(Kind::ALL)
}

fn directions() -> impl Strategy<Value = Directions> {
    proptest::sample::select(vec![Directions::FORWARD, Directions::REVERSE, Directions::BOTH])
}

fn user() -> impl Strategy<Value = User> {
    prop_oneof![any::<u32>().prop_map(User::Host), any::<MachineId>().prop_map(User::Machine)]
}

fn domain_row() -> impl Strategy<Value = DomainRow> {
    (any::<(u32, u64, u32, u32, u32)>(), user(), text()).prop_map(
        |((id, epoch, sessions, channels, pid), user, name)| DomainRow {
            id,
            epoch,
            sessions,
            channels,
            user,
            pid,
            name,
        },
    )
}

fn service_row() -> impl Strategy<Value = ServiceRow> {
    (any::<(u64, u32, u64, u16)>(), kind(), text(), text()).prop_map(
        |((key, domain, accepted, waiting), kind, name, domain_name)| ServiceRow {
            key,
            domain,
            kind,
            accepted,
            waiting,
            name,
            domain_name,
        },
    )
}

fn channel_row() -> impl Strategy<Value = ChannelRow> {
    (any::<(u64, u32, u32, u64)>(), kind(), directions(), text(), text(), text()).prop_map(
        |((channel, from, to, since_s), kind, directions, from_name, to_name, service)| ChannelRow {
            channel,
            from,
            to,
            kind,
            directions,
            since_s,
            from_name,
            to_name,
            service,
        },
    )
}

fn page<T: core::fmt::Debug>(row: impl Strategy<Value = T>) -> impl Strategy<Value = Page<T>> {
    (any::<bool>(), proptest::collection::vec(row, 0..4)).prop_map(|(more, rows)| Page { more, rows })
}

fn clauses() -> impl Strategy<Value = Text> {
    text().prop_map(Text)
}

fn addresses() -> impl Strategy<Value = Addresses> {
    let four = any::<u32>().prop_map(|bits| core::net::Ipv4Addr::from_bits(bits).into());
    // Those that stand for IPv4 addresses are written as such.
    let six = any::<u128>().prop_map(|bits| core::net::Ipv6Addr::from_bits(bits | 1 << 127).into());
    proptest::collection::vec(prop_oneof![four, six], 0..=Addresses::MAX).prop_map(Addresses)
}

/// The messages about sockets.
fn sockets() -> impl Strategy<Value = Message> {
    let ring = || any::<(u64, u64)>();
    prop_oneof![
        Just(Message::Directory {}),
        any::<u64>().prop_map(|size| Message::DirectoryIs { size }),
        addresses().prop_map(|addresses| Message::Publish { addresses }),
        any::<(u64, u64, u64)>().prop_map(|(key, secret_low, secret_high)| Message::Published {
            key,
            secret_low,
            secret_high
        }),
        any::<u64>().prop_map(|offer| Message::Bell { offer }),
        any::<u64>().prop_map(|offer| Message::Confirm { offer }),
        any::<u64>().prop_map(|offer| Message::Finish { offer }),
        (ring(), user(), any::<u32>(), text()).prop_map(|((ring_offset, ring_size), user, pid, name)| {
            Message::PeerIs { ring_offset, ring_size, pid, user, name }
        }),
        any::<u64>().prop_map(|key| Message::Withdraw { key }),
        ring().prop_map(|(ring_offset, ring_size)| Message::Offer { ring_offset, ring_size }),
        any::<u64>().prop_map(|offer| Message::Offered { offer }),
        any::<u64>().prop_map(|offer| Message::Cancel { offer }),
        ring().prop_map(|(ring_offset, ring_size)| Message::Take { ring_offset, ring_size }),
        (any::<bool>(), clauses(), any::<(u64, u32)>()).prop_map(|(reset, clauses, (ring_size, spin_us))| {
            Message::SetPolicy { reset, clauses, ring_size, spin_us }
        }),
        Just(Message::GetPolicy {}),
        (any::<u64>(), ring()).prop_map(|(flow, (ring_offset, ring_size))| Message::DatagramsTaken {
            flow,
            ring_offset,
            ring_size
        }),
        any::<u64>().prop_map(|flow| Message::FetchReceiver { flow }),
        Just(Message::Receiver {}),
        (any::<(u64, u64, u16)>(), ring()).prop_map(|((to_high, to_low, to_port), (ring_offset, ring_size))| {
            Message::OfferDatagrams { to_high, to_low, to_port, ring_offset, ring_size }
        }),
        any::<(u64, u64, u16)>().prop_map(|(from_high, from_low, from_port)| Message::TakeDatagrams {
            from_high,
            from_low,
            from_port
        }),
        (any::<bool>(), clauses(), any::<(u64, u32)>()).prop_map(|(live, clauses, (ring_size, spin_us))| {
            Message::PolicyIs { live, clauses, ring_size, spin_us }
        }),
        (any::<u64>(), proptest::sample::select(Side::ALL), ring()).prop_map(
            |(channel, side, (ring_offset, ring_size))| Message::ReclaimSocket {
                channel,
                side,
                ring_offset,
                ring_size
            }
        ),
    ]
}

/// Any message of any kind.
pub(super) fn message() -> impl Strategy<Value = Message> {
    prop_oneof![21 => channels(), 20 => sockets(), 6 => machines(), 7 => groups()]
}

fn machine_row() -> impl Strategy<Value = MachineRow> {
    let how = (proptest::sample::select(PluggedAs::ALL), proptest::sample::select(RungBy::ALL));
    (any::<(u32, bool, u32, u32, u32)>(), how, text(), text(), text()).prop_map(
        |((machine, up, sessions, windows, ready), (plugged_as, rung_by), name, monitor, port)| MachineRow {
            machine,
            up,
            sessions,
            windows,
            ready,
            plugged_as,
            rung_by,
            name,
            monitor,
            port,
        },
    )
}

fn group_row() -> impl Strategy<Value = GroupRow> {
    (any::<(u32, u64, u64, u64, u32, bool)>(), text(), text()).prop_map(
        |((key, address, size, free, seats, machine), group, member)| GroupRow {
            key,
            address,
            size,
            free,
            seats,
            machine,
            group,
            member,
        },
    )
}

/// The messages about groups.
fn groups() -> impl Strategy<Value = Message> {
    prop_oneof![
        (any::<u64>(), text()).prop_map(|(room, group)| Message::JoinGroup { room, group }),
        any::<(u64, u8, u8, u8, u64, u64)>().prop_map(|(key, seat, member, members, base, size)| {
            Message::GroupJoined { key, seat, member, members, base, size }
        }),
        any::<u8>().prop_map(|member| Message::GroupWindow { member }),
        (any::<(u32, u64, u64, bool)>(), text())
            .prop_map(|((life, address, size, own), name)| Message::GroupWindowIs { life, address, size, own, name }),
        any::<(u64, u8, u8, u32, bool, u64, u64)>().prop_map(|(key, seat, member, life, alive, base, size)| {
            Message::SeatIs { key, seat, member, life, alive, base, size }
        }),
        any::<u64>().prop_map(|key| Message::LetGo { key }),
        page(group_row()).prop_map(|page| Message::Groups { page }),
    ]
}

/// The messages about virtual machines.
fn machines() -> impl Strategy<Value = Message> {
    prop_oneof![
        (any::<(u64, u64)>(), text()).prop_map(|((channel, size), peer)| Message::Room { channel, size, peer }),
        any::<u64>().prop_map(|base| Message::RoomIs { base }),
        (any::<u64>(), text(), text(), text()).prop_map(|(room, name, monitor, port)| Message::AddMachine {
            room,
            name,
            monitor,
            port
        }),
        (any::<(u32, u32, u64)>(), clauses()).prop_map(|((machine, plugged, took_us), remark)| Message::MachineAdded {
            machine,
            plugged,
            took_us,
            remark
        }),
        text().prop_map(|name| Message::RemoveMachine { name }),
        page(machine_row()).prop_map(|page| Message::Machines { page }),
    ]
}

fn channels() -> impl Strategy<Value = Message> {
    let shape = || (text(), kind(), directions(), any::<u64>(), any::<u64>());
    let ring = || {
        let side = proptest::sample::select(Side::ALL);
        (any::<u64>(), side, any::<u32>(), any::<u64>(), any::<u64>())
    };
    prop_oneof![
        (any::<u16>(), text()).prop_map(|(version, name)| Message::Join { version, name }),
        (any::<(u32, u64, u64, u64, u32)>(), text()).prop_map(
            |((domain, epoch, instance, max_ring, max_channels), name)| {
                Message::Joined { domain, epoch, instance, max_ring, max_channels, name }
            }
        ),
        (proptest::sample::select(Refusal::ALL), text()).prop_map(|(code, reason)| Message::Refused { code, reason }),
        (text(), kind(), any::<u16>()).prop_map(|(service, kind, backlog)| Message::Bind { service, kind, backlog }),
        Just(Message::Done {}),
        (text(), shape()).prop_map(|(target, (service, kind, directions, ring_offset, ring_size))| Message::Connect {
            target,
            service,
            kind,
            directions,
            ring_offset,
            ring_size
        }),
        any::<(u64, u32, u64, u8)>().prop_map(|(channel, domain, epoch, links)| Message::Connected {
            channel,
            domain,
            epoch,
            links
        }),
        (any::<(u64, u32, u64, u32)>(), user(), shape()).prop_map(
            |((channel, domain, epoch, pid), user, (name, kind, directions, ring_offset, ring_size))| {
                Message::Incoming { channel, domain, epoch, name, user, pid, kind, directions, ring_offset, ring_size }
            }
        ),
        any::<(u64, u64, u64, u64)>().prop_map(|(channel, start, ring_offset, ring_size)| Message::Accepted {
            channel,
            start,
            ring_offset,
            ring_size
        }),
        any::<(u64, u64, u64, u64)>().prop_map(|(channel, start, ring_offset, ring_size)| Message::Attached {
            channel,
            start,
            ring_offset,
            ring_size
        }),
        ring().prop_map(|(channel, side, generation, ring_offset, ring_size)| Message::Grow {
            channel,
            side,
            generation,
            ring_offset,
            ring_size
        }),
        ring().prop_map(|(channel, side, generation, ring_offset, ring_size)| Message::Ring {
            channel,
            side,
            generation,
            ring_offset,
            ring_size
        }),
        any::<u64>().prop_map(|channel| Message::Closed { channel }),
        (proptest::sample::select(What::ALL), any::<u64>()).prop_map(|(what, after)| Message::List { what, after }),
        page(domain_row()).prop_map(|page| Message::Domains { page }),
        page(service_row()).prop_map(|page| Message::Services { page }),
        page(channel_row()).prop_map(|page| Message::Channels { page }),
        any::<u64>().prop_map(|channel| Message::Inspect { channel }),
        any::<u8>().prop_map(|count| Message::Regions { count }),
        Just(Message::Ping {}),
        (any::<u64>(), proptest::sample::select(Side::ALL), text(), shape()).prop_map(
            |(channel, side, peer, (service, kind, directions, ring_offset, ring_size))| {
                Message::Reclaim { channel, side, peer, service, kind, directions, ring_offset, ring_size }
            }
        ),
    ]
}
