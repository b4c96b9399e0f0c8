//! Every message there and back, and every way to be wrong.

use alloc::string::{String, ToString};
use alloc::vec::Vec;
use alloc::{format, vec};

use proptest::prelude::*;

use super::strategies::message;
use super::*;

fn packet(request: u32, message: &Message) -> Vec<u8> {
    let mut out = vec![0xff; 3];
    encode(request, message, &mut out);
    out
}

/// The packet that the encoder without allocation makes of a message.
fn borrowed_packet(request: u32, message: &BorrowedMessage<'_>) -> Option<Vec<u8>> {
    encode_into(request, message, &mut [0xee; MAX_PACKET]).map(<[u8]>::to_vec)
}

/// Decodes by both decoders, which must agree.
fn decode_by_both(packet: &[u8]) -> Result<(u32, Message), WireError> {
    let owned = decode(packet);
    let borrowed = decode_borrowed(packet).map(|(request, message)| (request, Message::own(message)));
    assert_eq!(owned, borrowed);
    owned
}

proptest! {
    #[test]
    fn every_message_round_trips_through_both_codecs(request: u32, message in message()) {
        let bytes = packet(request, &message);
        prop_assert!(bytes.len() <= MessageKind::of(&message).longest());
        let (number, borrowed) = decode_borrowed(&bytes).unwrap();
        prop_assert_eq!((number, borrowed.kind(), borrowed.name()), (request, message.kind(), message.name()));
        prop_assert_eq!(borrowed_packet(request, &borrowed), Some(bytes.clone()), "the same bytes from both encoders");
        prop_assert_eq!(decode_by_both(&bytes), Ok((request, message)));
        prop_assert_eq!(request_of(&bytes), Some(request));
    }

    #[test]
    fn message_that_does_not_fit_its_memory_is_not_written(message in message()) {
        let bytes = packet(1, &message);
        let (_, borrowed) = decode_borrowed(&bytes).unwrap();
        let mut memory = vec![0; bytes.len()];
        for len in 0..bytes.len() {
            prop_assert_eq!(encode_into(1, &borrowed, &mut memory[..len]), None);
        }
        prop_assert_eq!(encode_into(1, &borrowed, &mut memory), Some(&bytes[..]));
    }

    #[test]
    fn message_cut_at_any_byte_is_refused_by_both(request: u32, message in message()) {
        let bytes = packet(request, &message);
        for end in 0..bytes.len() {
            let cut = decode_by_both(&bytes[..end]);
            prop_assert!(matches!(cut, Err(WireError::Truncated(_))), "cut at {end} of {}: {cut:?}", bytes.len());
        }
    }

    #[test]
    fn message_with_a_byte_more_is_refused_by_both(message in message(), byte: u8) {
        let mut bytes = packet(7, &message);
        bytes.push(byte);
        prop_assert!(decode_by_both(&bytes).is_err());
    }

    /// Any bytes that decode are the only encoding of their message: two packets never mean the same.
    #[test]
    fn any_bytes_are_an_error_or_a_canonical_message(
        kind in 0u16..64,
        request: u32,
        tail in proptest::collection::vec(any::<u8>(), 0..200),
        small in proptest::collection::vec(0u8..4, 0..60),
    ) {
        for fields in [tail, small] {
            let mut bytes = Vec::new();
            bytes.extend_from_slice(&MAGIC.to_le_bytes());
            bytes.extend_from_slice(&kind.to_le_bytes());
            bytes.extend_from_slice(&request.to_le_bytes());
            bytes.extend_from_slice(&fields);
            if let Ok((request, message)) = decode_by_both(&bytes) {
                prop_assert_eq!(packet(request, &message), bytes.clone());
                let (request, borrowed) = decode_borrowed(&bytes).unwrap();
                prop_assert_eq!(borrowed_packet(request, &borrowed), Some(bytes));
            }
        }
    }

    #[test]
    fn flipped_bit_is_judged_alike_by_both(message in message(), at: proptest::sample::Index, bit in 0u8..8) {
        let mut bytes = packet(1, &message);
        let at = at.index(bytes.len());
        bytes[at] ^= 1 << bit;
        // Encoding cuts strings that are longer than it would ever write.
        if let Ok((request, message)) = decode_by_both(&bytes) && bytes.len() <= MAX_STRING {
            prop_assert_eq!(packet(request, &message), bytes);
        }
    }
}

/// The rows of the table of messages in docs/protocol.md (C6), without its remarks in parentheses.
fn documented() -> Vec<(u16, String, String)> {
    let plain = |cell: &str| {
        let mut depth = 0;
        let kept = cell.chars().filter(|c| {
            depth += i32::from(*c == '(') - i32::from(*c == ')');
            depth == 0 && *c != ')'
        });
        kept.collect::<String>().replace(" ,", ",").replace(" }", "}").trim().to_string()
    };
    let rows = include_str!("../../../../docs/protocol.md").lines().filter_map(|line| {
        let mut cells = line.strip_prefix("  | ")?.split(" | ");
        let number = cells.next()?.parse().ok()?;
        let name = cells.next()?.strip_prefix('`')?.strip_suffix('`')?.to_string();
        let fields = cells.nth(1)?;
        let fields = fields.split('`').nth(1).filter(|_| fields.starts_with('`')).unwrap_or_default();
        Some((number, name, plain(fields)))
    });
    let mut rows: Vec<_> = rows.collect();
    rows.sort();
    rows
}

#[test]
fn document_and_code_have_the_same_table_of_messages() {
    let code: Vec<_> =
        message::spelled().into_iter().map(|(kind, name, fields)| (kind, name.to_string(), fields)).collect();
    let document = documented();
    for (ours, theirs) in code.iter().zip(&document) {
        assert_eq!(ours, theirs, "docs/protocol.md, C6");
    }
    assert_eq!(code.len(), document.len());
}

/// A published version stays what it was. So after a change of the table, raise [`VERSION`] and [`port::VERSION`](crate::port::VERSION) (protocol C4.2,
/// P3.6), and write the table's new sum here.
#[test]
fn changed_table_of_messages_has_another_version() {
    const PUBLISHED: (u16, u32, u64) = (4, 4, 6_587_135_892_698_860_472);
    // FNV-1a, 64 bits.
    let sum = |sum: u64, byte: &u8| (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    let spelled: String =
        message::spelled().into_iter().map(|(kind, name, fields)| format!("{kind} {name} {fields}\n")).collect();
    let table = spelled.as_bytes().iter().fold(0xcbf2_9ce4_8422_2325, sum);
    assert_eq!((VERSION, crate::port::VERSION, table), PUBLISHED, "versions of messages and ports, sum of the table");
}

/// The numbers that `docs/protocol.md` gives for the two versions.
#[test]
fn document_has_the_versions_of_messages_and_ports() {
    let document = include_str!("../../../../docs/protocol.md");
    let number_in = |clause: &str, before: &str| {
        let line = document.lines().find(|line| line.trim_start().starts_with(&format!("- **{clause}** "))).unwrap();
        let after = line.split_once(before).unwrap().1;
        after.split(|c: char| !c.is_ascii_digit()).next().unwrap().parse::<u32>().unwrap()
    };
    assert_eq!(number_in("C4.2", "It is "), VERSION.into());
    assert_eq!(number_in("P3", "`version u32` = "), crate::port::VERSION);
}

#[test]
fn packet_header_is_as_documented() {
    let bytes = packet(0x0403_0201, &Message::Ping {});
    assert_eq!(bytes, [0x57, 0x50, 17, 0, 1, 2, 3, 4]);
}

#[test]
fn connect_is_as_documented() {
    let bytes = packet(
        1,
        &Message::Connect {
            target: "a".into(),
            service: "bc".into(),
            kind: Kind::Message,
            directions: Directions::BOTH,
            region: RegionReference { base: 0x30_0000, ..RegionReference::with_ring(8192) },
        },
    );
    let (base, offset, size) = ([0, 0, 0x30, 0, 0, 0, 0, 0], [0, 16, 0, 0, 0, 0, 0, 0], [0, 32, 0, 0, 0, 0, 0, 0]);
    let text = [1, 0, b'a', 2, 0, b'b', b'c', 2, 3, 0];
    assert_eq!(bytes[8..], [&text[..], &base, &offset, &size].concat());
}

#[test]
fn kinds_are_numbered_without_gaps() {
    let last = message::spelled().len() as u16;
    for kind in 0..128 {
        let mut bytes = packet(1, &Message::Ping {});
        bytes[2] = kind;
        let unknown = decode(&bytes) == Err(WireError::Kind(kind.into()));
        assert_eq!(unknown, !(1..=last).contains(&kind.into()), "kind {kind}");
    }
}

#[test]
fn only_a_broken_header_breaks_the_framing() {
    let good = packet(9, &Message::Closed { channel: 1 });
    let mut magic = good.clone();
    magic[0] = 0;
    for bad in [&magic[..], &good[..5], &[], &[0x57; MAX_PACKET + 1]] {
        assert!(decode(bad).unwrap_err().breaks_framing());
    }
    assert_eq!(request_of(&magic), None);
    assert_eq!(request_of(&good[..5]), None);
    assert!(!decode(&good[..12]).unwrap_err().breaks_framing());
    assert_eq!(request_of(&good[..12]), Some(9));
}

#[test]
fn values_out_of_range_are_refused() {
    let bind = packet(1, &Message::Bind { service: "s".into(), kind: Kind::Stream, backlog: 1 });
    for kind in [0, 5, 255] {
        let mut bad = bind.clone();
        bad[11] = kind;
        assert_eq!(decode(&bad), Err(WireError::Value { field: "Kind", value: kind.into() }));
    }
    let mut text = bind;
    for byte in [0, 0xff] {
        text[10] = byte;
        assert_eq!(decode(&text), Err(WireError::Text));
    }
    assert_eq!(Directions::from_bits(0), None);
    assert_eq!(Directions::from_bits(4), None);
}

#[test]
fn further_region_has_whole_pages_outside_windows() {
    use partywall_shm::layout::{Geometry, PAGE};
    let region = RegionReference::with_ring(3 * PAGE);
    assert!(region.check().is_err());
    let geometry = Geometry::of_content(PAGE, 3 * PAGE).unwrap();
    assert_eq!(region.check_further(), Ok((Located::OwnMemory, geometry)));
    for size in [0, PAGE + 1, (1 << 30) + PAGE, u64::MAX] {
        assert!(RegionReference::with_ring(size).check_further().is_err(), "{size}");
    }
    let in_window = RegionReference { within: Within::Window, base: PAGE, ..region };
    assert!(in_window.check_further().is_err());
    let power = RegionReference { ring_size: 4 * PAGE, ..in_window };
    assert!(power.check_further().is_ok() && RegionReference { base: 0, ..power }.check_further().is_err());
}

#[test]
fn region_reference_is_of_one_memory_and_fits_it() {
    use partywall_shm::layout::{Geometry, HUGE_PAGE, PAGE};
    for (offset, size) in [(PAGE, 0), (PAGE, 8192), (HUGE_PAGE, HUGE_PAGE)] {
        let geometry = Geometry::new(offset, size).unwrap();
        let own = RegionReference::own_memory(geometry);
        assert_eq!((own.check(), own.check_own_memory()), (Ok((Located::OwnMemory, geometry)), Ok(geometry)));
        assert!(RegionReference { base: PAGE, ..own }.check().is_err(), "own memory begins with the region");
        assert!(RegionReference { ring_size: size + 1, ..own }.check().is_err());
        assert!(RegionReference { ring_offset: 0, ..own }.check().is_err());
    }
    let geometry = Geometry::new(PAGE, 8192).unwrap();
    for base in [PAGE, HUGE_PAGE - PAGE, HUGE_PAGE, 5 * HUGE_PAGE] {
        let there = RegionReference::in_window(base, geometry);
        assert_eq!(there.check(), Ok((Located::Window { base }, geometry)));
        assert!(there.check_own_memory().is_err());
    }
    for base in [0, 1, PAGE + 1, !(PAGE - 1), u64::MAX] {
        assert!(RegionReference::in_window(base, geometry).check().is_err(), "{base}");
    }
    let huge = Geometry::new(HUGE_PAGE, HUGE_PAGE).unwrap();
    assert!(RegionReference::in_window(PAGE, huge).check().is_err(), "a window has small pages");
}

/// A `Domains` of one row: what the row says after `channels u32`.
fn domain_of(machine: u32, uid: u32) -> Vec<u8> {
    let row =
        DomainRow { id: 1, epoch: 2, sessions: 3, channels: 4, user: User::Host(0), pid: 5, name: "a".to_string() };
    let mut packet = packet(7, &Message::Domains { page: Page { more: false, rows: vec![row] } });
    let at = HEADER + 3 + 4 + 8 + 4 + 4;
    packet[at..at + 4].copy_from_slice(&machine.to_le_bytes());
    packet[at + 4..at + 8].copy_from_slice(&uid.to_le_bytes());
    packet
}

#[test]
fn user_is_of_host_or_machine_but_not_of_both() {
    let user = |machine, uid| match decode(&domain_of(machine, uid)) {
        Ok((_, Message::Domains { page })) => Ok(page.rows[0].user),
        Ok(other) => panic!("{other:?}"),
        Err(e) => Err(e),
    };
    // A user of the host is never decoded as a machine, whatever the number.
    for uid in [0, 1000, 0xfff0_0001, u32::MAX] {
        assert_eq!(user(0, uid), Ok(User::Host(uid)));
        assert_eq!((User::Host(uid).origin(), User::Host(uid).uid()), (Origin::Host, Some(uid)));
    }
    let machine = MachineId::new(7).unwrap();
    assert_eq!(user(7, 0), Ok(User::Machine(machine)));
    assert_eq!((User::Machine(machine).origin(), User::Machine(machine).uid()), (machine.into(), None));
    for uid in [1, 1000, u32::MAX] {
        let error = WireError::Value { field: "uid of a machine", value: uid.into() };
        assert_eq!(user(7, uid), Err(error));
    }
}

#[test]
fn impossible_count_in_packet_reserves_nothing() {
    let mut bytes = packet(1, &Message::Domains { page: Page { more: false, rows: vec![] } });
    bytes[9] = 0xff;
    bytes[10] = 0xff;
    assert_eq!(decode(&bytes), Err(WireError::Truncated("a list")));
}

#[test]
fn page_holds_rows_that_fit_and_sets_more() {
    let row = |key| ServiceRow {
        key,
        domain: 1,
        kind: Kind::Stream,
        accepted: 0,
        waiting: 0,
        name: "n".repeat(64),
        domain_name: "d".repeat(64),
    };
    let all: Vec<_> = (0..100).map(row).collect();
    let bytes = packet(1, &Message::Services { page: Page { more: false, rows: all.clone() } });
    assert!(bytes.len() <= MAX_PACKET);
    let Ok((_, Message::Services { page })) = decode(&bytes) else { panic!("not a page") };
    assert!(page.more && page.rows.len() > 20 && page.rows.len() < 100);
    assert_eq!(page.rows, all[..page.rows.len()]);
}

#[test]
fn long_string_is_cut_between_characters() {
    let bytes = packet(1, &Message::Join { version: VERSION, name: format!("x{}", "é".repeat(4000)) });
    let Ok((_, Message::Join { name, .. })) = decode(&bytes) else { panic!("not a Join") };
    assert_eq!(name.len(), MAX_STRING - 1);
    assert!(Name::new(&name).is_err());
}

#[test]
fn names() {
    for valid in ["a", "Z9", "web-1.prod_x", "0", &"x".repeat(64)] {
        assert_eq!(Name::new(valid).unwrap().as_str(), valid);
    }
    assert_eq!(Name::new(""), Err(NameError::Empty));
    assert_eq!(Name::new(&"x".repeat(65)), Err(NameError::Long(65)));
    for first in ["-a", ".a", "_a"] {
        assert!(matches!(Name::new(first), Err(NameError::First(_))), "{first}");
    }
    for bad in ["a b", "a/b", "a:b", "é", "a\n", "a*", "\u{0}"] {
        assert!(matches!(Name::new(bad), Err(NameError::Character(_))), "{bad:?}");
    }
}

#[test]
fn errors_describe_cause() {
    assert_eq!(WireError::TooLong(5000).to_string(), "the packet has 5000 bytes, and may have at most 4096");
    assert_eq!(WireError::Magic(0x1234).to_string(), "the packet begins with 0x1234, not with 0x5057");
    assert_eq!(
        Name::new("a b").unwrap_err().to_string(),
        "a name cannot contain ' '; it is made of letters, digits, '.', '_' and '-'"
    );
    assert_eq!(format!("{} {} {}", Kind::Stream, Directions::BOTH, Refusal::Denied), "stream both denied by policy");
}

#[test]
fn longest_packet_of_a_kind_is_as_long_as_its_longest_fields() {
    let longest = "x".repeat(MAX_STRING);
    let joined = Message::Joined {
        domain: 1,
        epoch: 1,
        instance: 1,
        max_ring: 1,
        max_channels: 1,
        user: User::Host(1),
        name: longest.clone(),
    };
    let refused = Message::Refused { code: Refusal::Quota, reason: longest };
    let publish = Message::Publish { addresses: AddressList(vec!["::1".parse().unwrap(); AddressList::MAX]) };
    let offer = Message::Offer { region: RegionReference::with_ring(4096) };
    for message in [joined, refused, publish, offer] {
        assert_eq!(packet(1, &message).len(), MessageKind::of(&message).longest(), "{}", message.name());
    }
    assert_eq!(MessageKind::Domains.longest(), MAX_PACKET, "a page is as long as its packet allows");
    let of = MessageKind::longest_of(&[MessageKind::Ping, MessageKind::Publish, MessageKind::Join]);
    assert_eq!(of, MessageKind::Publish.longest());
}

#[test]
fn descriptors_by_message() {
    let region = RegionReference::with_ring(0);
    let connect_with = |region, directions| Message::Connect {
        target: "a".into(),
        service: "b".into(),
        kind: Kind::Stream,
        directions,
        region,
    };
    let connect = |directions| connect_with(region, directions);
    assert_eq!(connect(Directions::BOTH).fd_count(), 1);
    // To another machine as well: its links are the broker's.
    let in_window = RegionReference { within: Within::Window, base: 4096, ..region };
    assert_eq!(connect_with(in_window, Directions::BOTH).fd_count(), 1);
    assert_eq!(Message::Connected { channel: 1, domain: 1, epoch: 1, links: 2 }.fd_count(), 2);
    let (channel, start, side, generation) = (1, 0, Side::Connecting, 1);
    for message in [
        Message::Accepted { channel, start, region },
        Message::Attached { channel, start, region },
        Message::Grow { channel, side, generation, region },
        Message::Ring { channel, side, generation, region },
        Message::AddRegion { channel, side, number: 1, kind: 7, region },
        Message::RegionAdded { channel, side, number: 1, kind: 7, region },
    ] {
        assert_eq!(message.fd_count(), 1);
    }
    assert_eq!(Message::Regions { connecting: true, accepting: true }.fd_count(), 2);
    assert_eq!(Message::Ping {}.fd_count(), 0);
    let offer = Message::Offer { region };
    let take = Message::Take { region };
    let publish = Message::Publish { addresses: AddressList::default() };
    assert_eq!((offer.fd_count(), take.fd_count(), publish.fd_count()), (2, 2, 1));
    let (confirm, finish) = (Message::Confirm { offer: 1 }, Message::Finish { offer: 1 });
    assert_eq!((confirm.fd_count(), finish.fd_count()), (1, 1));
    let bell = |way| [region, in_window].map(|region| Message::Bell { offer: 1, way, region }.fd_count());
    assert_eq!([BellWay::Link, BellWay::Relays, BellWay::Interrupts].map(bell), [[1, 2], [1, 2], [3, 4]]);
    assert!(confirm.brings_socket() && finish.brings_socket());
    assert!(confirm.shows_connection() && take.shows_connection() && !publish.shows_connection());
    assert!(offer.brings_socket() && take.brings_socket() && publish.brings_socket());
    assert!(!connect(Directions::BOTH).brings_socket() && !Message::DirectoryIs { base: 0, size: 0 }.brings_socket());
}

#[test]
fn addresses_are_sixteen_bytes_each_and_one_spelling() {
    let ips: Vec<core::net::IpAddr> = vec!["10.0.0.1".parse().unwrap(), "fe80::2".parse().unwrap()];
    let bytes = packet(1, &Message::Publish { addresses: AddressList(ips.clone()) });
    assert_eq!(bytes[8..10], [2, 0]);
    assert_eq!(bytes[10..26], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, 1]);
    assert_eq!(decode(&bytes), Ok((1, Message::Publish { addresses: AddressList(ips.clone()) })));
    let many = vec![ips[0]; AddressList::MAX + 9];
    let cut = packet(1, &Message::Publish { addresses: AddressList(many.clone()) });
    assert_eq!(decode(&cut), Ok((1, Message::Publish { addresses: AddressList(many[..AddressList::MAX].to_vec()) })));
    let mut more = bytes;
    more[8] = 65;
    assert_eq!(decode(&more), Err(WireError::Value { field: "the number of addresses", value: 65 }));
}

#[test]
fn truncated_policy_text_is_refused() {
    let set =
        |clauses: &str| Message::SetMoveRules { reset: false, clauses: Text(clauses.into()), ring_size: 0, spin_us: 0 };
    let longest = "x".repeat(Text::MAX);
    assert_eq!(decode(&packet(1, &set(&longest))), Ok((1, set(&longest))));
    for long in [format!("{longest}x"), "x".repeat(9000), "é".repeat(4000), format!("{}é", "x".repeat(Text::MAX))] {
        let bytes = packet(1, &set(&long));
        assert!(bytes.len() <= MAX_PACKET);
        assert!(matches!(decode(&bytes), Err(WireError::Value { field: "the length of a text", .. })));
    }
}
