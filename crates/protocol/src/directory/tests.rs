//! The table against a map, readers beside the writer, and what the fingerprints tell apart.
#![expect(unsafe_code, reason = "a directory of zeros, as the kernel gives them, and its read-only view")]

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::string::ToString;
use alloc::vec::Vec;
use core::net::SocketAddr;
use std::thread;

use partywall_shm::address::{narrow, wide};
use proptest::prelude::*;

use super::fingerprint::{EMPTY, TOMBSTONE};
use super::*;
use crate::upgrade::{Fault, Upgrade};
use partywall_shm::sync::Peer;

pub(super) fn directory() -> Box<Directory> {
    // SAFETY: every field is an integer or an atomic, for which zero is a value.
    unsafe { Box::<Directory>::new_zeroed().assume_init() }
}

/// As clients see it.
fn view(directory: &Directory) -> &Directory<Peer> {
    // SAFETY: the same layout (asserted), of words that can only be loaded.
    unsafe { &*core::ptr::from_ref(directory).cast() }
}

fn at(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

fn ip(text: &str) -> core::net::IpAddr {
    text.parse().unwrap()
}

fn table(buckets: usize) -> Vec<Bucket> {
    (0..buckets).map(|_| Bucket::new()).collect()
}

fn some(word: u64) -> Fingerprint {
    Fingerprint::from_word(word).unwrap()
}

/// Few enough homes that buckets run over all the time.
fn crowded() -> impl Strategy<Value = Fingerprint> {
    (0u64..4, 1u64..24).prop_map(|(home, high)| some(high << 32 | home))
}

fn check(buckets: &[Bucket], writer: &TableWriter, model: &BTreeMap<Fingerprint, u32>) {
    let in_table = buckets.iter().flat_map(Bucket::words).filter(|word| *word > TOMBSTONE).count();
    assert_eq!(in_table, writer.len());
    assert!(writer.len() <= writer.capacity());
    let found = model.keys().filter(|fingerprint| contains(buckets, **fingerprint)).count();
    assert_eq!(found, writer.len(), "what is in the table is found, and is in the model");
    if model.is_empty() {
        assert!(writer.is_empty());
        assert!(buckets.iter().flat_map(Bucket::words).all(|word| word == EMPTY), "no tombstone outlives its use");
    }
}

proptest! {
    #[test]
    fn directory_table_is_a_multiset_that_may_drop_overflow(
        steps in proptest::collection::vec((any::<bool>(), crowded()), 0..400),
    ) {
        let buckets = table(16);
        let mut writer = TableWriter::new(16);
        let mut model = BTreeMap::<Fingerprint, u32>::new();
        for (insert, fingerprint) in steps {
            if insert {
                let seen = writer.insert(&buckets, fingerprint);
                prop_assert_eq!(seen, contains(&buckets, fingerprint));
                *model.entry(fingerprint).or_default() += 1;
            } else {
                writer.remove(&buckets, fingerprint);
                if let Some(count) = model.get_mut(&fingerprint) {
                    *count -= 1;
                    if *count == 0 {
                        model.remove(&fingerprint);
                        prop_assert!(!contains(&buckets, fingerprint));
                    }
                }
            }
            check(&buckets, &writer, &model);
        }
        for (fingerprint, count) in core::mem::take(&mut model) {
            (0..count).for_each(|_| writer.remove(&buckets, fingerprint));
        }
        check(&buckets, &writer, &model);
    }

    #[test]
    fn no_fingerprint_is_a_free_slot(words in any::<[u64; 2]>(), port: u16) {
        let ip = core::net::IpAddr::from(core::net::Ipv6Addr::from_bits(u128::from(words[0]) << 64 | u128::from(words[1])));
        let at = SocketAddr::new(ip, port);
        for fingerprint in [
            Fingerprint::listener(Transport::Tcp, at, words[0]),
            Fingerprint::address(ip, words[1]),
            Fingerprint::offer(Transport::Udp, at, at, 1),
        ] {
            prop_assert!(fingerprint.word() > TOMBSTONE);
        }
        prop_assert_eq!(wide(narrow(wide(ip))), wide(ip));
    }
}

#[test]
fn lookup_among_100000_listeners_takes_mostly_one_line() {
    let memory = directory();
    let mut keeper = DirectoryKeeper::begin(&memory, 7);
    let listener = |i: u32| {
        let [_, a, b, c] = (i / 50).to_be_bytes();
        Fingerprint::listener(Transport::Tcp, SocketAddr::from(([10, a, b, c], 1000 + (i % 50) as u16)), 0)
    };
    for i in 0..100_000 {
        keeper.apply(&memory, &DirectoryChange::Listener(listener(i)));
    }
    let reader = view(&memory);
    assert!((0..100_000).all(|i| reader.has_listener(listener(i))));
    assert!((100_000..300_000).all(|i| !reader.has_listener(listener(i))));
    let open = memory.listeners.iter().filter(|bucket| bucket.words().contains(&EMPTY)).count();
    assert!(open * 20 > LISTENERS * 19, "{open} of {LISTENERS} buckets end a search");
    for i in 0..100_000 {
        keeper.apply(&memory, &DirectoryChange::NoListener(listener(i)));
    }
    assert!(memory.listeners.iter().flat_map(Bucket::words).all(|word| word == EMPTY));
    assert_eq!(reader.listener_generation(), 200_000);
}

#[test]
fn entry_that_stays_is_found_beside_a_writer() {
    let buckets = table(16);
    let mut writer = TableWriter::new(16);
    // Everything belongs to bucket 0, so that what stays lies beyond what comes and goes.
    let (stays, goes): (Vec<_>, Vec<_>) = (1..40u64).map(|n| some(n << 32)).partition(|f| f.word() >> 32 > 20);
    for fingerprint in &goes {
        writer.insert(&buckets, *fingerprint);
    }
    for fingerprint in &stays {
        assert!(writer.insert(&buckets, *fingerprint));
    }
    thread::scope(|scope| {
        let change = scope.spawn(|| {
            for round in 0..20_000 {
                let fingerprint = goes[round % goes.len()];
                writer.remove(&buckets, fingerprint);
                writer.insert(&buckets, fingerprint);
            }
        });
        let mut looks = 0u64;
        while !change.is_finished() || looks == 0 {
            assert!(stays.iter().all(|fingerprint| contains(&buckets, *fingerprint)));
            looks += 1;
        }
    });
}

#[test]
fn fingerprints_differ_exactly_if_addresses_differ() {
    let tcp = |text, netns| Fingerprint::listener(Transport::Tcp, at(text), netns);
    let base = tcp("10.0.0.1:80", 1);
    assert_ne!(base, tcp("10.0.0.1:81", 1));
    assert_ne!(base, tcp("10.0.0.2:80", 1));
    assert_ne!(base, Fingerprint::listener(Transport::Udp, at("10.0.0.1:80"), 1));
    assert_eq!(base, tcp("10.0.0.1:80", 2), "an address of the network means the same everywhere");
    assert_eq!(base, tcp("[::ffff:10.0.0.1]:80", 1), "two spellings of one address");
    assert_ne!(tcp("127.0.0.1:80", 1), tcp("127.0.0.1:80", 2), "every namespace has its own loopback");
    assert_eq!(tcp("127.0.0.1:80", 1), tcp("127.9.9.9:80", 1));
    assert_eq!(tcp("0.0.0.0:80", 1), tcp("127.0.0.1:80", 1));
    assert_eq!(tcp("[::]:80", 1), tcp("[::1]:80", 1));
    assert_ne!(tcp("[fe80::1]:80", 1), tcp("[fe80::1]:80", 2));
    let offer = |to, from| Fingerprint::connection(at(to), at(from), OfferKey([3, 4]));
    assert_eq!(offer("10.0.0.1:1", "10.0.0.1:2"), offer("[::ffff:10.0.0.1]:1", "10.0.0.1:2"));
    for other in [[3, 5], [4, 4], [0, 0]] {
        let other = Fingerprint::connection(at("10.0.0.1:1"), at("10.0.0.1:2"), OfferKey(other));
        assert_ne!(offer("10.0.0.1:1", "10.0.0.1:2"), other, "who has another key cannot find it");
    }
    assert_ne!(offer("10.0.0.1:80", "10.0.0.2:80"), offer("10.0.0.2:80", "10.0.0.1:80"));
    assert_ne!(offer("10.0.0.1:1", "10.0.0.1:2"), offer("10.0.0.1:2", "10.0.0.1:1"));
    assert_ne!(offer("127.0.0.1:1", "127.0.0.1:2"), offer("127.0.0.2:1", "127.0.0.1:2"), "ends are exact");
    let translated = |to, key| Fingerprint::translated(at(to), OfferKey(key));
    let base = translated("10.0.0.1:1", [3, 4]);
    assert_eq!(base, translated("[::ffff:10.0.0.1]:1", [3, 4]));
    for other in [
        translated("10.0.0.1:2", [3, 4]),
        translated("10.0.0.2:1", [3, 4]),
        translated("10.0.0.1:1", [3, 5]),
        offer("10.0.0.1:1", "10.0.0.1:1"),
        tcp("10.0.0.1:1", 0),
    ] {
        assert_ne!(base, other);
    }
    assert_ne!(Fingerprint::translators(), Fingerprint::address(ip("::1"), 0));
}

#[test]
fn scoped_addresses() {
    for (text, expected) in [
        ("127.0.0.1", true),
        ("127.1.2.3", true),
        ("::ffff:127.1.2.3", true),
        ("0.0.0.0", true),
        ("::", true),
        ("::1", true),
        ("169.254.1.1", true),
        ("fe80::1", true),
        ("febf::1", true),
        ("fec0::1", false),
        ("169.255.1.1", false),
        ("128.0.0.1", false),
        ("10.0.0.1", false),
        ("fd00::1", false),
        ("::2", false),
    ] {
        assert_eq!(is_scoped(ip(text)), expected, "{text}");
    }
}

#[test]
fn directory_with_wrong_header_is_refused() {
    let memory = directory();
    assert_eq!(view(&memory).check(), Err(NotDirectory), "not ready");
    let keeper = DirectoryKeeper::begin(&memory, 7);
    assert_eq!((view(&memory).check(), view(&memory).instance()), (Ok(()), 7));
    for (word, value) in [(&memory.header.magic, 1), (&memory.header.capacities[2], 8)] {
        let good = word.load(Ordering::Relaxed);
        word.store(value, Ordering::Relaxed);
        assert_eq!(view(&memory).check(), Err(NotDirectory));
        word.store(good, Ordering::Relaxed);
    }
    assert!(!view(&memory).is_closed());
    keeper.close(&memory);
    assert!(view(&memory).is_closed());
}

#[test]
fn offers_are_counted_and_found_until_withdrawn() {
    let memory = directory();
    let mut keeper = DirectoryKeeper::begin(&memory, 7);
    let offer = Fingerprint::connection(at("10.0.0.1:80"), at("10.0.0.2:5000"), OfferKey([1, 2]));
    let reader = view(&memory);
    let before = reader.offer_generation();
    keeper.apply(&memory, &DirectoryChange::Offer(offer));
    assert!(reader.has_offer(offer) && reader.offer_generation() != before);
    keeper.apply(&memory, &DirectoryChange::NoOffer(offer));
    assert!(!reader.has_offer(offer));
    let here = Fingerprint::address(ip("10.0.0.1"), 0);
    keeper.apply(&memory, &DirectoryChange::Address(here));
    assert!(reader.has_address(here));
    keeper.apply(&memory, &DirectoryChange::NoAddress(here));
    assert!(!reader.has_address(here));
}

fn question<'a>(port: u16, peer: &str, program: &'a str) -> PolicyCase<'a> {
    PolicyCase { port, peer: ip(peer), program: program.as_bytes() }
}

#[test]
fn last_matching_clause_decides_with_its_terms() {
    let memory = directory();
    let mut keeper = DirectoryKeeper::begin(&memory, 7);
    let reader = view(&memory);
    assert_eq!(reader.decide(&question(80, "10.0.0.1", "a")), Terms::NEVER, "before there is a policy");
    let default =
        Terms { upgrade: Upgrade::After { calls: 3, bytes: 9 }, ring_size: 8192, spin_us: 11, lists_programs: true };
    let clauses = ["now@address=10.0.0.0/8", "after=1@address=fd00::/8", "never@port=22", "never@program=backup*"];
    let clauses = clauses.map(|text| Clause::parse(text).unwrap());
    let before = reader.policy_generation();
    keeper.apply(&memory, &DirectoryChange::Policy { terms: default, clauses: clauses.to_vec() });
    assert!(reader.policy_generation() != before && reader.policy_generation().is_multiple_of(2));
    for (port, peer, program, upgrade) in [
        (80, "192.168.0.1", "a", default.upgrade),
        (80, "10.1.1.1", "a", Upgrade::Now),
        (80, "::ffff:10.1.1.1", "a", Upgrade::Now),
        (80, "fd12::1", "a", Upgrade::After { calls: 1, bytes: 0 }),
        (22, "10.1.1.1", "a", Upgrade::Never),
        (80, "10.1.1.1", "backup-all", Upgrade::Never),
    ] {
        let terms = reader.decide(&question(port, peer, program));
        assert_eq!(terms, Terms { upgrade, ..default }, "{port} {peer} {program}");
    }
    let many = alloc::vec![Clause::parse("now").unwrap(); MAX_RULES + 5];
    keeper.apply(&memory, &DirectoryChange::Policy { terms: default, clauses: many });
    assert_eq!(reader.decide(&question(1, "::1", "a")).upgrade, Upgrade::Now);
}

#[test]
fn policy_is_read_whole_while_it_changes() {
    let memory = directory();
    let mut keeper = DirectoryKeeper::begin(&memory, 7);
    let policies: Vec<_> = [1u64, 2]
        .map(|n| Terms {
            upgrade: Upgrade::After { calls: n, bytes: n },
            ring_size: n << 12,
            spin_us: n as u32,
            lists_programs: n % 2 == 0,
        })
        .into();
    thread::scope(|scope| {
        let change = scope.spawn(|| {
            for round in 0..100_000 {
                keeper.apply(&memory, &DirectoryChange::Policy { terms: policies[round % 2], clauses: Vec::new() });
            }
        });
        let reader = view(&memory);
        let mut known = 0;
        while !change.is_finished() || known == 0 {
            let terms = reader.decide(&question(1, "::1", "a"));
            known += u32::from(policies.contains(&terms));
            assert!(policies.contains(&terms) || terms == Terms::NEVER, "{terms:?}");
        }
    });
}

#[test]
fn clauses_are_written_as_they_are_read() {
    for text in
        ["now", "never@port=22", "after=16,bytes=65536@address=10.0.0.0/8", "now@program=redis-*", "now@program=é"]
    {
        assert_eq!(Clause::parse(text).unwrap().to_string(), text);
    }
    let long = alloc::format!("now@program={}", "x".repeat(65));
    for (text, fault) in [
        ("soon", BadClause::Word(Fault::Mode)),
        ("now@programs=x", BadClause::Word(Fault::Of)),
        ("now@22", BadClause::Word(Fault::Of)),
        ("now@program=", BadClause::Program),
        ("now@program=a/b", BadClause::Program),
        (&long, BadClause::Program),
    ] {
        assert_eq!(Clause::parse(text), Err(fault), "{text}");
    }
    assert!(BadClause::Word(Fault::Of).to_string().contains("program=PATTERN"));
}

#[test]
fn patterns_fit_whole_names() {
    for (pattern, name, fits) in [
        ("redis", "redis", true),
        ("redis", "redis-server", false),
        ("redis*", "redis-server", true),
        ("*server", "redis-server", true),
        ("*server", "redis-servers", false),
        ("r?dis*er", "redis-server", true),
        ("*s*r*", "redis-server", true),
        ("*", "", true),
        ("?", "", false),
        ("a*b*c", "aXbXbYc", true),
        ("a*b*c", "aXbXbYcd", false),
        ("**x", "x", true),
    ] {
        assert_eq!(ProgramPattern::new(pattern).unwrap().matches(name.as_bytes()), fits, "{pattern} {name}");
    }
}
