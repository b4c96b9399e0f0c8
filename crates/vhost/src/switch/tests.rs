use super::*;
use std::net::IpAddr;

const A: PortNumber = PortNumber(1);
const B: PortNumber = PortNumber(2);
const C: PortNumber = PortNumber(3);
const SECOND: u64 = 1_000_000_000;

fn mac(n: u8) -> MacAddress {
    MacAddress([2, 0, 0, 0, 0, n])
}

fn frame(to: MacAddress, from: MacAddress) -> Vec<u8> {
    with_body(to, from, 0x88b5, &[])
}

fn with_body(to: MacAddress, from: MacAddress, kind: u16, body: &[u8]) -> Vec<u8> {
    [&to.0[..], &from.0, &kind.to_be_bytes(), body].concat()
}

fn switch(options: SwitchOptions) -> Switch {
    let mut switch = Switch::new(options);
    for port in [A, B, C] {
        switch.add(port, SourceGuard::default(), 0);
    }
    switch
}

const EVERYBODY: MacAddress = MacAddress([0xff; 6]);

#[test]
fn learned_address_gets_its_frames_alone() {
    let mut switch = switch(SwitchOptions::default());
    assert_eq!(switch.admit(0, A, &frame(mac(2), mac(1))), FrameDecision::Flood);
    assert_eq!(switch.admit(0, B, &frame(mac(1), mac(2))), FrameDecision::Forward(A));
    assert_eq!(switch.admit(0, A, &frame(mac(2), mac(1))), FrameDecision::Forward(B));
    assert_eq!(switch.admit(0, A, &frame(EVERYBODY, mac(1))), FrameDecision::Flood);
    assert_eq!(switch.admit(0, C, &frame(mac(9), mac(3))), FrameDecision::Flood);
}

#[test]
fn remembered_decision_ends_when_the_table_changes() {
    let mut switch = switch(SwitchOptions::default());
    switch.admit(0, B, &frame(EVERYBODY, mac(2)));
    let sent = frame(mac(2), mac(1));
    assert_eq!([0; 3].map(|now| switch.admit(now, A, &sent)), [FrameDecision::Forward(B); 3]);
    let d = PortNumber(4);
    switch.add(d, SourceGuard::new(vec![mac(2)], vec![]), 0);
    assert_eq!(switch.admit(0, A, &sent), FrameDecision::Forward(d));
    assert_eq!(switch.admit(0, A, &sent), FrameDecision::Forward(d));
    switch.remove(d);
    assert_eq!(switch.admit(0, A, &sent), FrameDecision::Flood);
    // A frame of another port comes between two frames, and moves the address.
    switch.admit(0, B, &frame(EVERYBODY, mac(2)));
    assert_eq!(switch.admit(0, A, &sent), FrameDecision::Forward(B));
    switch.admit(0, C, &frame(EVERYBODY, mac(2)));
    assert_eq!(switch.admit(0, A, &sent), FrameDecision::Forward(C));
}

#[test]
fn guard_judges_each_frame_of_a_run() {
    let mut switch = switch(SwitchOptions::default());
    let own: IpAddr = "10.0.0.1".parse().unwrap();
    let d = PortNumber(4);
    switch.add(d, SourceGuard::new(vec![mac(4)], vec![own]), 0);
    switch.admit(0, B, &frame(EVERYBODY, mac(2)));
    let sent = |source| with_body(mac(2), mac(4), 0x800, &ipv4(source, 6, [0; 4]));
    assert_eq!(switch.admit(0, d, &sent([10, 0, 0, 1])), FrameDecision::Forward(B));
    assert_eq!(switch.admit(0, d, &sent([10, 0, 0, 2])), SPOOFED);
}

#[test]
fn address_that_moves_is_found_at_its_new_port() {
    let mut switch = switch(SwitchOptions::default());
    switch.admit(0, A, &frame(EVERYBODY, mac(1)));
    switch.admit(1, C, &frame(EVERYBODY, mac(1)));
    assert_eq!(switch.admit(2, B, &frame(mac(1), mac(2))), FrameDecision::Forward(C));
    assert_eq!(switch.admit(2, C, &frame(mac(1), mac(4))), FrameDecision::Discard(DiscardReason::SamePort));
}

#[test]
fn silent_address_is_forgotten_and_a_removed_port_at_once() {
    let mut switch = switch(SwitchOptions::default());
    switch.admit(0, A, &frame(EVERYBODY, mac(1)));
    assert_eq!(switch.admit(299 * SECOND, B, &frame(mac(1), mac(2))), FrameDecision::Forward(A));
    assert_eq!(switch.admit(300 * SECOND, B, &frame(mac(1), mac(2))), FrameDecision::Flood);
    switch.expire(300 * SECOND);
    assert_eq!(switch.addresses(300 * SECOND).len(), 1);
    switch.remove(B);
    assert_eq!(switch.addresses(300 * SECOND).len(), 0);
    assert_eq!(switch.admit(0, B, &frame(mac(1), mac(2))), FrameDecision::Discard(DiscardReason::NoPort));
}

#[test]
fn flood_of_addresses_costs_its_own_port_only() {
    let table = TableOptions { most_of_port: 10, ..TableOptions::default() };
    let mut switch = switch(SwitchOptions { table, floods: 0 });
    switch.admit(0, B, &frame(EVERYBODY, mac(2)));
    for n in 0..10_000_u32 {
        let [a, b, c, d] = n.to_be_bytes();
        switch.admit(0, A, &frame(EVERYBODY, MacAddress([6, 1, a, b, c, d])));
    }
    assert_eq!(switch.addresses(0).len(), 11);
    assert_eq!(switch.admit(0, C, &frame(mac(2), mac(3))), FrameDecision::Forward(B));
    assert_eq!(switch.admit(0, B, &frame(mac(3), mac(2))), FrameDecision::Forward(C), "another port still learns");
    // Addresses that are expired make room again.
    switch.expire(400 * SECOND);
    switch.admit(400 * SECOND, A, &frame(EVERYBODY, mac(7)));
    assert_eq!(switch.admit(400 * SECOND, B, &frame(mac(7), mac(2))), FrameDecision::Forward(A));
}

#[test]
fn ports_that_fill_their_shares_leave_room_for_the_others() {
    let mut switch = Switch::new(SwitchOptions { floods: 0, ..SwitchOptions::default() });
    (1..=12).for_each(|port| switch.add(PortNumber(port), SourceGuard::default(), 0));
    for (port, n) in (1..=10).flat_map(|port| (0..2000_u32).map(move |n| (port, n))) {
        let [_, _, c, d] = n.to_be_bytes();
        switch.admit(0, PortNumber(port), &frame(EVERYBODY, MacAddress([6, 1, 0, port as u8, c, d])));
    }
    switch.admit(0, PortNumber(11), &frame(EVERYBODY, mac(2)));
    assert_eq!(switch.admit(0, PortNumber(12), &frame(mac(2), mac(3))), FrameDecision::Forward(PortNumber(11)));
    assert_eq!(switch.addresses(0).len(), 10 * 1024 + 2);
}

#[test]
fn floods_are_limited_per_port_and_forwarding_is_not() {
    let mut switch = switch(SwitchOptions { floods: 5, ..SwitchOptions::default() });
    let sent = |switch: &mut Switch, now, port, n| {
        (0..100).filter(|_| switch.admit(now, port, &frame(EVERYBODY, mac(n))) == FrameDecision::Flood).count()
    };
    assert_eq!(sent(&mut switch, 0, A, 1), 5);
    assert_eq!(sent(&mut switch, 0, B, 2), 5);
    assert_eq!(sent(&mut switch, SECOND / 5, A, 1), 1);
    assert_eq!(switch.admit(0, A, &frame(mac(2), mac(1))), FrameDecision::Forward(B));
    let verdict = switch.admit(SECOND / 5, A, &frame(EVERYBODY, mac(1)));
    assert_eq!(verdict, FrameDecision::Discard(DiscardReason::FloodLimit));
}

#[test]
fn frame_of_no_station_is_malformed() {
    let mut switch = switch(SwitchOptions::default());
    for bad in [frame(mac(2), EVERYBODY), frame(mac(2), MacAddress([0; 6])), vec![2; 13], vec![]] {
        assert_eq!(switch.admit(0, A, &bad), FrameDecision::Discard(DiscardReason::Malformed), "{bad:?}");
    }
    assert!(switch.addresses(0).is_empty());
}

const SPOOFED: FrameDecision = FrameDecision::Discard(DiscardReason::Spoofed);

#[test]
fn fixed_address_belongs_to_its_port() {
    let mut switch = switch(SwitchOptions::default());
    switch.admit(0, B, &frame(EVERYBODY, mac(9)));
    let d = PortNumber(4);
    switch.add(d, SourceGuard::new(vec![mac(9)], vec![]), 0);
    assert_eq!(switch.admit(0, d, &frame(EVERYBODY, mac(8))), SPOOFED);
    assert_eq!(switch.admit(0, B, &frame(EVERYBODY, mac(9))), SPOOFED);
    assert_eq!(switch.admit(1000 * SECOND, A, &frame(mac(9), mac(1))), FrameDecision::Forward(d), "it does not age");
}

#[test]
fn frame_for_the_next_bridge_goes_nowhere() {
    let mut switch = switch(SwitchOptions::default());
    for (last, expected) in [(0, FrameDecision::Discard(DiscardReason::Reserved)), (0x10, FrameDecision::Flood)] {
        let to = MacAddress([1, 0x80, 0xc2, 0, 0, last]);
        assert_eq!(switch.admit(0, A, &frame(to, mac(1))), expected);
    }
}

#[test]
fn flood_of_a_large_frame_counts_as_its_segments() {
    let mut switch = switch(SwitchOptions { floods: 5, ..SwitchOptions::default() });
    let sent = frame(EVERYBODY, mac(1));
    assert_eq!(switch.admit_segments(0, A, &sent, 45), FrameDecision::Flood);
    assert_eq!(switch.admit(8 * SECOND, A, &sent), FrameDecision::Discard(DiscardReason::FloodLimit));
    assert_eq!(switch.admit(9 * SECOND, A, &sent), FrameDecision::Flood);
}

fn arp(sender: MacAddress, address: [u8; 4]) -> Vec<u8> {
    [&[0, 1, 8, 0, 6, 4, 0, 2][..], &sender.0, &address, &[0; 10]].concat()
}

fn probe(sender: MacAddress, target: [u8; 4]) -> Vec<u8> {
    [&[0, 1, 8, 0, 6, 4, 0, 1][..], &sender.0, &[0; 10], &target].concat()
}

fn ipv4(source: [u8; 4], protocol: u8, ports: [u8; 4]) -> Vec<u8> {
    [&[0x45, 0, 0, 24, 0, 0, 0, 0, 64, protocol, 0, 0][..], &source, &[10, 0, 0, 9], &ports].concat()
}

fn ipv6(source: [u8; 16], next: u8, body: &[u8]) -> Vec<u8> {
    [&[0x60, 0, 0, 0, 0, 0, next, 64][..], &source, &[0; 16], body].concat()
}

fn advertisement(target: [u8; 16]) -> Vec<u8> {
    [&[136, 0, 0, 0, 0, 0, 0, 0][..], &target].concat()
}

fn solicitation(target: [u8; 16]) -> Vec<u8> {
    [&[135, 0, 0, 0, 0, 0, 0, 0][..], &target].concat()
}

#[test]
fn source_guard_passes_only_addresses_of_its_port() {
    let own: IpAddr = "10.0.0.1".parse().unwrap();
    let own6: IpAddr = "fd00::1".parse().unwrap();
    let guard = SourceGuard::new(vec![mac(1)], vec![own, own6]);
    let passes = |kind, body: &[u8]| guard.permits(&with_body(mac(2), mac(1), kind, body));
    let v6 = |text: &str| text.parse::<std::net::Ipv6Addr>().unwrap().octets();

    assert!(passes(0x806, &arp(mac(1), [10, 0, 0, 1])) && passes(0x806, &probe(mac(1), [10, 0, 0, 1])));
    assert!(!passes(0x806, &probe(mac(1), [10, 0, 0, 2])), "its station would give the address up");
    assert!(!passes(0x806, &arp(mac(2), [10, 0, 0, 1])), "another station's Ethernet address in ARP");
    assert!(!passes(0x806, &arp(mac(1), [10, 0, 0, 2])) && !passes(0x806, &[0; 5]));
    assert!(passes(0x800, &ipv4([10, 0, 0, 1], 6, [0; 4])) && !passes(0x800, &ipv4([10, 0, 0, 2], 6, [0; 4])));
    assert!(passes(0x800, &ipv4([0; 4], 17, [0, 68, 0, 67])) && !passes(0x800, &ipv4([0; 4], 17, [0, 67, 0, 68])));
    assert!(passes(0x86dd, &ipv6(v6("fd00::1"), 6, &[])) && !passes(0x86dd, &ipv6(v6("fd00::2"), 6, &[])));
    assert!(passes(0x86dd, &ipv6(v6("fe80::ff:fe00:1"), 17, &[0; 8])), "the link-local address of 02:00:00:00:00:01");
    assert!(!passes(0x86dd, &ipv6(v6("fe80::1"), 17, &[])));
    for (target, expected) in [("fd00::1", true), ("fe80::ff:fe00:1", true), ("fd00::2", false)] {
        assert_eq!(passes(0x86dd, &ipv6(v6("::"), 58, &solicitation(v6(target)))), expected, "{target}");
    }
    assert!(!passes(0x86dd, &ipv6(v6("::"), 58, &[135, 0, 0, 0])), "without its target");
    assert!(passes(0x86dd, &ipv6(v6("fd00::1"), 58, &solicitation(v6("fd00::2")))), "a question");
    assert!(passes(0x86dd, &ipv6(v6("fd00::1"), 58, &advertisement(v6("fd00::1")))));
    assert!(!passes(0x86dd, &ipv6(v6("fd00::1"), 58, &advertisement(v6("fd00::2")))));
    let hidden = [&[58, 0, 0, 0, 0, 0, 0, 0][..], &advertisement(v6("fd00::2"))].concat();
    assert!(!passes(0x86dd, &ipv6(v6("fd00::1"), 60, &hidden)), "behind destination options");
    for kind in [134, 137] {
        assert!(!passes(0x86dd, &ipv6(v6("fe80::ff:fe00:1"), 58, &[kind, 0, 0, 0])), "what only a router sends");
    }
    let server = [0x02, 0x23, 0x02, 0x22];
    assert!(!passes(0x86dd, &ipv6(v6("fd00::1"), 17, &server)), "the answer of a DHCPv6 server");
    let fragment = |offset: u8| [&[17, 0, 0, offset, 0, 0, 0, 0][..], &server].concat();
    assert!(!passes(0x86dd, &ipv6(v6("fd00::1"), 44, &fragment(1))), "its first fragment");
    assert!(passes(0x86dd, &ipv6(v6("fd00::1"), 44, &fragment(8))), "another fragment");
    assert!(!passes(0x800, &ipv4([10, 0, 0, 1], 17, [0, 67, 0, 68])), "the answer of a DHCP server");
    assert!(passes(0x800, &ipv4([10, 0, 0, 1], 17, [0, 68, 0, 67])) && passes(0x800, &ipv4([10, 0, 0, 1], 17, [9; 4])));
    assert!(!passes(0x88b5, &[]), "what is neither ARP nor IP carries no address that could be checked");
    // Behind VLAN tags the same holds, and no tags are too many to look behind.
    let tagged = |tags: &[u8]| with_body(mac(2), mac(1), 0x8100, &[tags, &ipv4([10, 0, 0, 2], 6, [0; 4])].concat());
    assert!(
        !guard.permits(&tagged(&[0, 5, 8, 0])) && !guard.permits(&tagged(&[0, 5, 0x81, 0, 0, 5, 0x81, 0, 0, 5, 8, 0]))
    );
}

#[test]
fn guard_refuses_dhcp_answers_from_any_port() {
    let [own, own6] = ["10.0.0.1", "fd00::1"].map(|ip| ip.parse::<IpAddr>().unwrap());
    let guard = SourceGuard::new(vec![mac(1)], vec![own, own6]);
    let passes = |kind, body: &[u8]| guard.permits(&with_body(mac(2), mac(1), kind, body));
    for source in [67_u16, 547, 68, 546, 1024, 65_535] {
        let datagram = |to: u16| [source.to_be_bytes(), to.to_be_bytes()].concat();
        let v4 = |to| ipv4(IP4, 17, datagram(to).try_into().unwrap());
        let v6 = |to| ipv6(v6("fd00::1"), 17, &datagram(to));
        assert!(!passes(0x800, &v4(68)), "from port {source} to a DHCP client");
        assert!(!passes(0x86dd, &v6(546)), "from port {source} to a DHCPv6 client");
        assert!(passes(0x800, &v4(67)) && passes(0x86dd, &v6(547)), "from port {source} to a server");
        assert!(passes(0x800, &v4(546)) && passes(0x86dd, &v6(68)), "from port {source} to other ports");
    }
}

#[test]
fn guard_without_ip_judges_arp_behind_snap() {
    let guard = SourceGuard::new(vec![mac(1)], vec![]);
    for organisation in [0, 0xf8] {
        let snap = |body: &[u8]| [&[0xaa, 0xaa, 3, 0, 0, organisation, 8, 6][..], body].concat();
        let passes = |packet: Vec<u8>| {
            let tagged = [&[0, 5][..], &(packet.len() as u16).to_be_bytes(), &packet].concat();
            let plain = guard.permits(&with_body(mac(2), mac(1), packet.len() as u16, &packet));
            assert_eq!(guard.permits(&with_body(mac(2), mac(1), 0x8100, &tagged)), plain, "behind a tag");
            plain
        };
        assert!(passes(snap(&arp(mac(1), IP4))));
        assert!(!passes(snap(&arp(mac(2), IP4))), "another station's Ethernet address");
        assert!(!passes(snap(&[0; 5])), "no sender can be read");
    }
}

#[test]
fn changed_guards_move_addresses_and_forget_the_rest() {
    let mut switch = switch(SwitchOptions::default());
    let guard = |n| SourceGuard::new(vec![mac(n)], vec![]);
    switch.set_guards(vec![(A, guard(1)), (B, guard(2))]);
    for (from, source, decision) in
        [(A, 1, FrameDecision::Flood), (A, 2, SPOOFED), (C, 1, SPOOFED), (C, 7, FrameDecision::Flood)]
    {
        assert_eq!(switch.admit(0, from, &frame(EVERYBODY, mac(source))), decision, "{from:?} {source}");
    }
    // The addresses change places, and the third port may send only from one that it has not used.
    switch.set_guards(vec![(A, guard(2)), (B, guard(1)), (C, guard(3))]);
    for (from, own, other) in [(A, 2, 1), (B, 1, 2), (C, 3, 7)] {
        assert_eq!(switch.admit(0, from, &frame(EVERYBODY, mac(other))), SPOOFED, "{from:?}");
        assert_eq!(switch.admit(0, from, &frame(EVERYBODY, mac(own))), FrameDecision::Flood, "{from:?}");
    }
    assert_eq!(switch.admit(0, A, &frame(mac(1), mac(2))), FrameDecision::Forward(B));
    assert_eq!(switch.admit(0, A, &frame(mac(7), mac(2))), FrameDecision::Flood, "a forgotten address");
    // A port without fixed addresses learns again, and what was fixed to it is free.
    switch.set_guards(vec![(C, SourceGuard::default())]);
    assert_eq!(switch.admit(0, C, &frame(EVERYBODY, mac(7))), FrameDecision::Flood);
    assert_eq!(switch.admit(0, A, &frame(mac(3), mac(2))), FrameDecision::Flood);
    assert_eq!(switch.admit(0, A, &frame(mac(7), mac(2))), FrameDecision::Forward(C));
}

#[test]
fn port_with_new_guard_has_its_share_of_the_table_again() {
    let table = TableOptions { most_of_port: 2, ..TableOptions::default() };
    let mut switch = switch(SwitchOptions { table, ..SwitchOptions::default() });
    let learn = |switch: &mut Switch, n| switch.admit(0, A, &frame(EVERYBODY, mac(n)));
    (1..=2).for_each(|n| assert_eq!(learn(&mut switch, n), FrameDecision::Flood));
    switch.set_guards(vec![(A, SourceGuard::new(vec![mac(1), mac(3)], vec![]))]);
    switch.set_guards(vec![(A, SourceGuard::default())]);
    (4..=6).for_each(|n| assert_eq!(learn(&mut switch, n), FrameDecision::Flood));
    let known = switch.addresses(0).iter().map(|row| row.mac).collect::<Vec<_>>();
    assert_eq!(known, [mac(4), mac(5)]);
}

#[test]
fn changed_limits_of_floods_and_age_hold_at_once() {
    let mut switch = switch(SwitchOptions::default());
    switch.set_limits(1, 10 * SECOND, 0);
    let flood = |switch: &mut Switch, now| switch.admit(now, A, &frame(EVERYBODY, mac(1)));
    assert_eq!(flood(&mut switch, 0), FrameDecision::Flood);
    assert_eq!(flood(&mut switch, 0), FrameDecision::Discard(DiscardReason::FloodLimit));
    // The same limits again are no new share.
    switch.set_limits(1, 10 * SECOND, 0);
    assert_eq!(flood(&mut switch, 0), FrameDecision::Discard(DiscardReason::FloodLimit));
    assert_eq!(switch.admit(9 * SECOND, B, &frame(mac(1), mac(2))), FrameDecision::Forward(A));
    assert_eq!(switch.admit(10 * SECOND, B, &frame(mac(1), mac(2))), FrameDecision::Flood);
}

const IP4: [u8; 4] = [10, 0, 0, 1];

fn v6(text: &str) -> [u8; 16] {
    text.parse::<std::net::Ipv6Addr>().unwrap().octets()
}

/// A switch whose port A owns 10.0.0.1, fd00::1 and the link-local address of 02:00:00:00:00:01, and whose others have no guard.
fn switch_with_owner() -> Switch {
    let mut switch = switch(SwitchOptions { floods: 0, ..SwitchOptions::default() });
    let owned: Vec<IpAddr> = ["10.0.0.1", "fd00::1", "fe80::ff:fe00:1"].map(|ip| ip.parse().unwrap()).to_vec();
    switch.set_guards(vec![(A, SourceGuard::new(vec![], owned.clone()))]);
    switch.set_address_owners(owned.into_iter().map(|ip| (ip, A)));
    switch
}

/// The decision about a packet from a station that no port is fixed to.
fn send(switch: &mut Switch, from: PortNumber, kind: u16, body: &[u8]) -> FrameDecision {
    switch.admit(0, from, &with_body(EVERYBODY, mac(7), kind, body))
}

#[test]
fn owned_address_is_refused_from_port_without_guard() {
    let mut switch = switch_with_owner();
    let mapped = ipv6(v6("::ffff:10.0.0.1"), 6, &[0; 4]);
    let claim = ipv6(v6("fe80::ff:fe00:7"), 58, &advertisement(v6("fd00::1")));
    let behind = [&[58, 0, 0, 0, 0, 0, 0, 0][..], &advertisement(v6("fd00::1"))].concat();
    let hidden = ipv6(v6("fd00::2"), 60, &[58, 255]);
    for (kind, body) in [
        (0x806, arp(mac(7), IP4)),
        (0x806, probe(mac(7), IP4)),
        (0x86dd, ipv6(v6("::"), 58, &solicitation(v6("fd00::1")))),
        (0x800, ipv4(IP4, 6, [0; 4])),
        (0x86dd, ipv6(v6("fd00::1"), 6, &[0; 4])),
        (0x86dd, mapped),
        (0x86dd, claim),
        (0x86dd, ipv6(v6("fd00::2"), 60, &behind)),
        (0x86dd, hidden),
        (0x86dd, ipv6(v6("fd00::2"), 58, &[])),
        // ARP of another form, and packets too short to read: their addresses cannot be compared.
        (0x806, [&[0, 6, 8, 0, 6, 4, 0, 2][..], &[0; 20]].concat()),
        (0x806, vec![0; 5]),
        (0x800, vec![0x45; 8]),
        (0x86dd, vec![0x60; 8]),
    ] {
        assert_eq!(send(&mut switch, B, kind, &body), SPOOFED, "{kind:x} {body:?}");
        let tagged = [&[0, 5][..], &kind.to_be_bytes(), &body].concat();
        assert_eq!(send(&mut switch, B, 0x8100, &tagged), SPOOFED, "{kind:x} behind a tag");
        let snap = [&[0xaa, 0xaa, 3, 0, 0, 0][..], &kind.to_be_bytes(), &body].concat();
        assert_eq!(send(&mut switch, B, snap.len() as u16, &snap), SPOOFED, "{kind:x} behind SNAP");
    }
    let tags = [0, 5, 0x81, 0, 0, 5, 0x81, 0, 0, 5, 8, 0];
    assert_eq!(send(&mut switch, B, 0x8100, &tags), SPOOFED, "more tags than the switch looks behind");
}

#[test]
fn free_address_passes_from_port_without_guard() {
    let mut switch = switch_with_owner();
    for (kind, body) in [
        (0x806, arp(mac(7), [10, 0, 0, 2])),
        (0x806, probe(mac(7), [10, 0, 0, 2])),
        (0x800, ipv4([10, 0, 0, 2], 6, [0; 4])),
        (0x800, ipv4([0; 4], 17, [0, 68, 0, 67])),
        (0x800, ipv4([10, 0, 0, 2], 17, [0, 67, 0, 68])),
        (0x86dd, ipv6(v6("fd00::2"), 6, &[0; 4])),
        (0x86dd, ipv6(v6("::"), 58, &solicitation(v6("fd00::2")))),
        (0x86dd, ipv6(v6("fd00::2"), 58, &solicitation(v6("fd00::1")))),
        (0x86dd, ipv6(v6("fe80::ff:fe00:7"), 58, &[134, 0, 0, 0])),
        (0x86dd, ipv6(v6("fd00::2"), 58, &advertisement(v6("fd00::2")))),
        (0x88b5, vec![]),
        (40, vec![0x42, 0x42, 3, 0]),
    ] {
        assert_eq!(send(&mut switch, B, kind, &body), FrameDecision::Flood, "{kind:x} {body:?}");
    }
    assert_eq!(send(&mut switch, A, 0x800, &ipv4(IP4, 6, [0; 4])), FrameDecision::Flood, "the owner");
}

#[test]
fn owned_link_local_address_is_refused_from_guarded_port() {
    let mut switch = switch_with_owner();
    switch.set_guards(vec![(B, SourceGuard::new(vec![], vec!["fd00::2".parse().unwrap()]))]);
    let sent = |n| with_body(EVERYBODY, mac(n), 0x86dd, &ipv6(v6(&format!("fe80::ff:fe00:{n}")), 17, &[0; 8]));
    assert_eq!(switch.admit(0, B, &sent(1)), SPOOFED, "it follows from the Ethernet address that the frame names");
    assert_eq!(switch.admit(0, B, &sent(2)), FrameDecision::Flood);
}

#[test]
fn owner_judges_each_frame_of_a_run() {
    let mut switch = switch_with_owner();
    switch.admit(0, C, &frame(EVERYBODY, mac(3)));
    let sent = |source| with_body(mac(3), mac(7), 0x800, &ipv4(source, 6, [0; 4]));
    for (source, decision) in [([10, 0, 0, 2], FrameDecision::Forward(C)), (IP4, SPOOFED)] {
        assert_eq!([0; 2].map(|_| switch.admit(0, B, &sent(source))), [decision; 2], "{source:?}");
    }
    // An address that is given to another port counts from the next frame on.
    let other = sent([10, 0, 0, 2]);
    assert_eq!([0; 2].map(|_| switch.admit(0, B, &other)), [FrameDecision::Forward(C); 2]);
    switch.set_address_owners([("10.0.0.2".parse().unwrap(), A)]);
    assert_eq!(switch.admit(0, B, &other), SPOOFED);
    assert_eq!(switch.admit(0, B, &sent(IP4)), FrameDecision::Forward(C), "it has no owner now");
}
