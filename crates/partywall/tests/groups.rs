//! Groups between processes of a host: one process for each member, the same addresses in all, and the state after the death of a member.
#![cfg(not(miri))]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]
#![expect(unsafe_code, reason = "a member punches holes into its memory")]

mod common;

use common::pool::PoolBroker;
use common::process::{Process, alone, child, role};
use common::*;
use partywall::{Domain, Error, Group, Handle, Lent, Listener, Shared, Stream};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;

const MIB: usize = 1 << 20;

/// A broker with a group `pool` of the domains `a`, `b` and `c`, and another without this process's.
struct Pool {
    world: PoolBroker,
    domain: Domain,
    group: Group,
    listener: Listener,
}

impl Pool {
    /// This process is member `a`.
    fn new() -> Self {
        let world = PoolBroker::start(&[("others", &["x"], 4096), ("pool", &["a", "b", "c"], 16 * MIB)]);
        let domain = join("a", world.broker.path());
        let group = Group::join(&domain, "pool").unwrap();
        let listener = domain.bind("control").unwrap();
        Self { world, domain, group, listener }
    }

    /// A process that is another member, and obeys the test's requests.
    fn member(&mut self, name: &str) -> Member {
        let process = child(name, self.world.broker.path());
        let (stream, peer) = self.listener.accept().unwrap();
        assert_eq!(peer.name, name);
        let mut member = Member { process, lines: BufReader::new(stream) };
        assert_eq!(member.tell("hello"), "hello");
        member
    }

    fn lend(&self, len: usize, seed: u8) -> Lent {
        let mut buffer = self.group.alloc(len).unwrap();
        fill(&mut buffer, seed);
        buffer.lend()
    }

    /// Bytes that the members have free, as the broker sees it.
    fn free(&self) -> Vec<u64> {
        self.domain.groups().unwrap().into_iter().filter(|row| row.group == "pool").map(|row| row.free).collect()
    }

    fn seats(&self) -> u32 {
        self.domain.groups().unwrap().iter().map(|row| row.seats).sum()
    }
}

fn join(name: &str, broker: &Path) -> Domain {
    Domain::builder().name(name).broker(broker).join().unwrap()
}

fn fill(bytes: &mut [u8], seed: u8) {
    bytes.iter_mut().enumerate().for_each(|(n, byte)| *byte = (n as u8).wrapping_mul(31).wrapping_add(seed));
}

/// FNV-1a: one changed byte changes it.
fn sum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |sum, byte| (sum ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3))
}

fn sum_of(shared: &Shared) -> u64 {
    let mut bytes = vec![0; shared.len()];
    assert_eq!(shared.copy_to(0, &mut bytes), bytes.len());
    sum(&bytes)
}

struct Member {
    process: Process,
    lines: BufReader<Stream>,
}

impl Member {
    /// One order, one answer.
    fn tell(&mut self, order: &str) -> String {
        writeln!(self.lines.get_mut(), "{order}").unwrap();
        let mut line = String::new();
        self.lines.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    /// Opens a handle, and says where it finds which bytes.
    fn opens(&mut self, handle: &Handle, lent: &Lent) {
        assert_eq!(self.tell(&format!("open {handle}")), format!("{} {}", lent.address(), sum(lent)));
    }

    fn lends(&mut self, len: usize, seed: u8) -> Handle {
        self.tell(&format!("lend {len} {seed}")).parse().unwrap()
    }
}

/// The actions of this program as a member.
#[test]
#[ignore = "for processes that the tests start"]
fn child_main() {
    let Some((name, broker)) = role() else { return };
    let domain = join(&name, &broker);
    let group = Group::builder("pool").room(2 * MIB as u64).join(&domain).unwrap();
    let mut lines = BufReader::new(domain.connect("a:control").unwrap());
    let (mut open, mut lent): (Vec<Shared>, Vec<Lent>) = (Vec::new(), Vec::new());
    loop {
        let mut line = String::new();
        if !lines.read_line(&mut line).is_ok_and(|n| n > 0) {
            return;
        }
        let words: Vec<&str> = line.split_whitespace().collect();
        let handle = || words[1].parse::<Handle>().unwrap();
        let said = match words[0] {
            "open" => match group.open(&handle()) {
                Ok(shared) => {
                    let said = format!("{} {}", shared.address(), sum_of(&shared));
                    open.push(shared);
                    said
                }
                Err(error) => error.to_string(),
            },
            "pass" => open.pop().unwrap().pass().unwrap().to_string(),
            "drop" => {
                open.pop().unwrap();
                "dropped".to_owned()
            }
            "lend" => {
                let mut buffer = group.alloc(words[1].parse().unwrap()).unwrap();
                fill(&mut buffer, words[2].parse().unwrap());
                lent.push(buffer.lend());
                lent.last().unwrap().handle().unwrap().to_string()
            }
            "punch" => {
                let lent = lent.last().unwrap();
                let first = lent.as_ptr().cast_mut().cast();
                // SAFETY: whole pages of a buffer that nobody writes. If it succeeds, they read as zeros.
                let punched = unsafe { rustix::mm::madvise(first, lent.len(), rustix::mm::Advice::LinuxRemove) };
                punched.map_or_else(|error| error.to_string(), |()| "punched".to_owned())
            }
            "again" => lent.last().unwrap().handle().unwrap().to_string(),
            "recall" => {
                lent.last().unwrap().recall();
                lent.last().unwrap().is_free().to_string()
            }
            "free" => lent.last().unwrap().is_free().to_string(),
            "sum" => sum(lent.last().unwrap()).to_string(),
            other => other.to_owned(),
        };
        writeln!(lines.get_mut(), "{said}").unwrap();
    }
}

#[test]
fn buffer_is_read_in_c_after_passing_through_b() {
    alone("buffer_is_read_in_c_after_passing_through_b", || {
        let _guard = hang_guard();
        let mut pool = Pool::new();
        let [mut b, mut c] = ["b", "c"].map(|name| pool.member(name));
        let before = pool.group.free();
        for round in 0..20 {
            let lent = pool.lend(MIB + round, round as u8);
            let handle = lent.handle().unwrap();
            assert_eq!(handle.address, lent.address());
            b.opens(&handle, &lent);
            let passed: Handle = b.tell("pass").parse().unwrap();
            assert!(!lent.is_free(), "in transit");
            c.opens(&passed, &lent);
            assert!(!lent.is_free(), "read in c");
            let lent = lent.into_buffer().unwrap_err();
            assert_eq!(c.tell("drop"), "dropped");
            lent.wait(Some(HANG)).unwrap();
            let mut buffer = lent.into_buffer().unwrap();
            fill(&mut buffer, 99);
        }
        // It comes back to b, and to a.
        let lent = pool.lend(5000, 1);
        b.opens(&lent.handle().unwrap(), &lent);
        let at_c: Handle = b.tell("pass").parse().unwrap();
        c.opens(&at_c, &lent);
        let at_b: Handle = c.tell("pass").parse().unwrap();
        b.opens(&at_b, &lent);
        let at_a: Handle = b.tell("pass").parse().unwrap();
        assert!(!lent.is_free());
        assert_fails!(pool.group.open(&at_a), Error::Invalid(_));
        pool.group.release(&at_a).unwrap();
        assert!(lent.is_free());
        drop(lent);
        // Two receivers, a token for each; the memory is free after both, though it was dropped here before.
        let lent = pool.lend(MIB, 2);
        let (one, two) = (lent.handle().unwrap(), lent.handle().unwrap());
        b.opens(&one, &lent);
        c.opens(&two, &lent);
        drop(lent);
        assert!(pool.group.free() < before);
        b.tell("drop");
        assert!(pool.group.free() < before);
        c.tell("drop");
        assert_eq!(pool.group.free(), before);
    });
}

#[test]
fn killed_members_free_their_memory_and_references() {
    alone("killed_members_free_their_memory_and_references", || {
        let _guard = hang_guard();
        let mut pool = Pool::new();
        let (free, seats) = (pool.free(), pool.seats());
        let wait = |lent: Lent| {
            lent.wait(Some(HANG)).unwrap();
            lent.into_buffer().unwrap();
        };
        // A reader.
        let mut b = pool.member("b");
        let lent = pool.lend(MIB, 1);
        b.opens(&lent.handle().unwrap(), &lent);
        b.process.kill();
        wait(lent);

        // A member that has passed a handle on dies, before the next member has opened it, and after.
        let [mut b, mut c] = ["b", "c"].map(|name| pool.member(name));
        let (lost, kept) = (pool.lend(MIB, 2), pool.lend(MIB, 3));
        b.opens(&lost.handle().unwrap(), &lost);
        let unsuccessful: Handle = b.tell("pass").parse().unwrap();
        b.opens(&kept.handle().unwrap(), &kept);
        let passed: Handle = b.tell("pass").parse().unwrap();
        c.opens(&passed, &kept);
        b.process.kill();
        wait(lost);
        assert!(c.tell(&format!("open {unsuccessful}")).contains("gone"));
        assert!(!kept.is_free(), "c has it");
        c.process.kill();
        wait(kept);

        // An owner: what is open stays as it is.
        let mut b = pool.member("b");
        let handle = b.lends(MIB, 3);
        let shared = pool.group.open(&handle).unwrap();
        let was = sum_of(&shared);
        assert_eq!(b.tell("sum"), was.to_string());
        let unopened: Handle = b.tell("again").parse().unwrap();
        b.process.kill();
        eventually("the broker knows", || pool.seats() == seats);
        // The next process of that member does not get its place.
        let mut next = pool.member("b");
        next.lends(MIB, 4);
        assert_eq!(sum_of(&shared), was);
        assert_fails!(pool.group.open(&unopened), Error::Gone(_));
        drop(shared);
        drop(next);
        eventually("all places are free", || pool.free() == free && pool.seats() == seats);
    });
}

#[test]
fn handles_are_not_believed() {
    alone("handles_are_not_believed", || {
        let _guard = hang_guard();
        let mut pool = Pool::new();
        let mut b = pool.member("b");
        let handle = b.lends(10_000, 1);
        let open = |handle: Handle| pool.group.open(&handle);
        for bad in [
            Handle { address: handle.address - 4096 * 40, ..handle },
            Handle { address: pool.lend(1, 1).address(), ..handle },
            Handle { address: 4096, ..handle },
            Handle { len: 3 * MIB as u64, ..handle },
            Handle { len: u64::MAX, ..handle },
        ] {
            assert_fails!(open(bad), Error::Invalid(_));
        }
        for bad in [
            Handle { owner: handle.owner + 77, ..handle },
            Handle { serial: handle.serial + 1, ..handle },
            Handle { place: handle.place + 1, ..handle },
        ] {
            assert_fails!(open(bad), Error::Gone(_));
        }
        let shared = open(handle).unwrap();
        assert_fails!(open(handle), Error::Invalid(_));
        assert_eq!(b.tell("free"), "false");
        drop(shared);
        assert_fails!(open(handle), Error::Gone(_));
        assert_eq!(b.tell("free"), "true");
        // A used-up token does not affect the token that now has its place among the owner's.
        let next: Handle = b.tell("again").parse().unwrap();
        assert!(next.place == handle.place && next.serial != handle.serial);
        let shared = open(next).unwrap();
        assert_fails!(open(handle), Error::Gone(_));
        assert_eq!(b.tell("recall"), "false", "it is open still");
        drop(shared);
        assert_eq!(b.tell("free"), "true");
        // Taken back before it was opened, and after.
        let late: Handle = b.tell("again").parse().unwrap();
        let early: Handle = b.tell("again").parse().unwrap();
        let shared = open(early).unwrap();
        assert_eq!(b.tell("recall"), "false");
        assert_fails!(open(late), Error::Gone(_));
        drop(shared);
        assert_eq!(b.tell("free"), "true");
        let unread: Handle = b.tell("again").parse().unwrap();
        pool.group.release(&unread).unwrap();
        assert_eq!(b.tell("free"), "true");

        // Limits, and rights.
        let group = &pool.group;
        assert_fails!(group.alloc(0), Error::Invalid(_));
        assert_fails!(group.alloc(17 * MIB), Error::TooLarge { .. });
        let all: Vec<_> = std::iter::from_fn(|| group.alloc(MIB).ok()).collect();
        assert!(all.len() >= 3, "{}", all.len());
        assert_fails!(group.alloc(MIB), Error::Full(_));
        drop(all);
        let lent = pool.lend(1, 0);
        let handles: Vec<Handle> = (0..512).map(|_| lent.handle().unwrap()).collect();
        assert_fails!(lent.handle(), Error::Full(_));
        lent.recall();
        assert!(lent.is_free() && group.release(&handles[0]).is_err());
        assert_fails!(Group::join(&pool.domain, "others"), Error::Refused { .. });
        assert_fails!(Group::join(&pool.domain, "none"), Error::Refused { .. });
        let twice = failure("a second time", Group::join(&pool.domain, "pool"));
        assert!(twice.to_string().contains("in use in this process"), "{twice}");
        let stranger = join("stranger", pool.world.broker.path());
        assert_fails!(Group::join(&stranger, "pool"), Error::Refused { .. });
        // Another user cannot even see the memory.
        assert!(b.tell("hello") == "hello");
        drop((b, stranger));
        eventually("only this process takes part", || pool.seats() == 1);
    });
}

/// A reader of a page that was taken out allocates another, which counts against the reader's own memory limit.
#[test]
fn member_cannot_take_pages_out_of_a_buffer_that_others_read() {
    alone("member_cannot_take_pages_out_of_a_buffer_that_others_read", || {
        let _guard = hang_guard();
        let mut pool = Pool::new();
        let mut b = pool.member("b");
        let handle = b.lends(MIB, 3);
        let shared = pool.group.open(&handle).unwrap();
        let was = sum_of(&shared);
        assert_eq!(b.tell("punch"), rustix::io::Errno::PERM.to_string());
        assert_eq!(sum_of(&shared), was);
    });
}

#[test]
fn more_processes_than_seats_can_join_beside_idle_member() {
    alone("more_processes_than_seats_can_join_beside_idle_member", || {
        let _guard = hang_guard();
        let mut pool = Pool::new();
        let mut idle = pool.member("b");
        let free = pool.free();
        for n in 0..40 {
            let mut c = pool.member("c");
            let lent = pool.lend(5000, n);
            c.opens(&lent.handle().unwrap(), &lent);
            if n % 2 == 0 {
                c.process.kill();
            } else {
                drop(c);
            }
            lent.wait(Some(HANG)).unwrap();
        }
        eventually("all places are free", || pool.free() == free);
        assert_eq!(idle.tell("hello"), "hello");
    });
}

#[test]
fn without_its_broker_a_group_is_read_to_the_end() {
    alone("without_its_broker_a_group_is_read_to_the_end", || {
        let _guard = hang_guard();
        let mut pool = Pool::new();
        let mut b = pool.member("b");
        let lent = pool.lend(MIB, 5);
        b.opens(&lent.handle().unwrap(), &lent);
        let (first, second) = (b.lends(5000, 1), b.lends(5000, 2));
        let shared = pool.group.open(&first).unwrap();
        let Pool { world, group, .. } = pool;
        world.stop();
        eventually("it is noticed", || group.is_alone());
        // Tokens need no broker.
        assert_eq!(b.tell("drop"), "dropped");
        lent.wait(Some(HANG)).unwrap();
        drop((lent, shared));
        drop(group.open(&second).unwrap());
        assert_eq!(b.tell("free"), "true");
    });
}
