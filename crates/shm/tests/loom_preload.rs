//! The locks, the arena and the table of `partywall-preload` under every interleaving.
//!
//! `RUSTFLAGS="--cfg loom" cargo test --profile loom -p partywall-shm --test loom_preload`
//!
//! The modules are those of `crates/preload/src`, which use the atomics of this crate. The library itself does not build for loom, since it lays
//! its atomics over mappings and keeps them in static memory. What a lock, a block or an entry guards is a loom cell: an access that is not
//! ordered is reported as a race. The kernel is [`Kernel`]: a thread that is never woken shows as a deadlock.
#![cfg(loom)]
#![expect(unsafe_code, reason = "loom's cells hand out raw pointers")]
#![allow(dead_code, reason = "the modules have functions that no model needs")]

#[path = "../../preload/src/arena/blocks.rs"]
mod blocks;
#[path = "../../preload/src/lock/word.rs"]
mod lock_word;
#[path = "../../preload/src/local/succession.rs"]
mod succession;
#[path = "../../preload/src/table/words.rs"]
mod words;

/// Where the modules expect each other.
mod lock {
    pub(crate) use super::lock_word as word;
}

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use blocks::Blocks;
use lock_word::{LockHost, LockWord, Taken};
use loom::cell::UnsafeCell;
use loom::sync::atomic::AtomicBool;
use loom::sync::{Condvar, Mutex};
use loom::thread;
use partywall_shm::sync::{AtomicU32, Ordering};
use succession::{SuccessorWord, hand_over};
use words::DescriptorWords;

/// Runs a scenario in every interleaving with at most `preemptions`, and says how many there were.
fn check(preemptions: Option<usize>, scenario: impl Fn() + Send + Sync + 'static) {
    let runs = Arc::new(AtomicUsize::new(0));
    let counted = runs.clone();
    let mut model = loom::model::Builder::new();
    model.preemption_bound = preemptions;
    model.max_branches = 10_000;
    let began = std::time::Instant::now();
    model.check(move || {
        counted.fetch_add(1, Ordering::Relaxed);
        scenario();
    });
    eprintln!("{} interleavings in {:.1?}", runs.load(Ordering::Relaxed), began.elapsed());
}

/// The value that a lock, a block or an entry guards.
struct Guarded(UnsafeCell<u32>);

// SAFETY: that no two threads touch the cell at a time is what the models check; loom reports it if they do.
unsafe impl Send for Guarded {}
// SAFETY: as above.
unsafe impl Sync for Guarded {}

impl Guarded {
    fn new() -> Self {
        Self(UnsafeCell::new(0))
    }

    /// Writes it, and returns how often it was written.
    fn write(&self) -> u32 {
        self.0.with_mut(|cell| {
            // SAFETY: the pointer is valid within this call, and loom has just checked that no other access is under way.
            unsafe {
                *cell += 1;
                *cell
            }
        })
    }
}

/// The kernel: which threads live, and the queue of those that sleep on a word.
struct Kernel {
    dead: AtomicBool,
    queue: Mutex<()>,
    woken: Condvar,
    /// Sleeps end by themselves, as they do after a while.
    times_out: bool,
}

/// The thread that dies in a model.
const MORTAL: u32 = 9;

impl Kernel {
    fn new(times_out: bool) -> Arc<Self> {
        Arc::new(Self { dead: AtomicBool::new(false), queue: Mutex::new(()), woken: Condvar::new(), times_out })
    }
}

/// A thread and its kernel.
#[derive(Clone)]
struct ModelThread {
    number: u32,
    kernel: Arc<Kernel>,
}

impl std::fmt::Debug for ModelThread {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "thread {}", self.number)
    }
}

impl LockHost for ModelThread {
    const SPINS: u32 = 1;

    fn thread(&self) -> u32 {
        self.number
    }

    fn was_thread(&self, _: u32) -> bool {
        false
    }

    fn is_alive(&self, number: u32) -> bool {
        number != MORTAL || !self.kernel.dead.load(Ordering::Acquire)
    }

    fn may_be_in_handler(&self) -> bool {
        false
    }

    fn now(&self) -> Duration {
        Duration::ZERO
    }

    fn pause(&self) {}

    fn sleep(&self, word: &AtomicU32, expected: u32) {
        if self.kernel.times_out {
            return thread::yield_now();
        }
        let queue = self.kernel.queue.lock().expect("no thread panics in here");
        // The kernel looks at the word under the lock of its queue.
        if word.load(Ordering::SeqCst) == expected {
            drop(self.kernel.woken.wait(queue));
        }
    }

    fn wake(&self, _: &AtomicU32) {
        let _queue = self.kernel.queue.lock().expect("no thread panics in here");
        self.kernel.woken.notify_one();
    }
}

/// A lock and what it guards.
struct Place {
    lock: LockWord,
    guarded: Guarded,
    kernel: Arc<Kernel>,
}

impl Place {
    fn new(times_out: bool) -> Arc<Self> {
        Arc::new(Self { lock: LockWord::new(), guarded: Guarded::new(), kernel: Kernel::new(times_out) })
    }

    fn thread(&self, number: u32) -> ModelThread {
        ModelThread { number, kernel: self.kernel.clone() }
    }

    /// Takes the lock, writes, and gives it back.
    fn write_once(&self, number: u32) -> Taken {
        let me = self.thread(number);
        let taken = self.lock.lock(&me);
        self.guarded.write();
        self.lock.unlock(&me);
        taken
    }

    /// A thread that does so.
    fn spawn_writer(self: &Arc<Self>, number: u32) -> thread::JoinHandle<Taken> {
        let this = self.clone();
        thread::spawn(move || this.write_once(number))
    }
}

#[test]
fn loom_lockers_exclude_each_other_and_wake_each_other() {
    for (others, preemptions) in [(1, None), (2, Some(2))] {
        check(preemptions, move || {
            let place = Place::new(false);
            let threads: Vec<_> = (0..others).map(|other| place.spawn_writer(2 + other)).collect();
            assert_eq!(place.write_once(1), Taken::Free);
            for thread in threads {
                assert_eq!(thread.join().unwrap(), Taken::Free);
            }
            assert_eq!(place.guarded.write(), others + 2);
        });
    }
}

#[test]
fn loom_dead_holder_is_inherited_from_once() {
    check(Some(3), || {
        let place = Place::new(true);
        assert_eq!(place.lock.lock(&place.thread(MORTAL)), Taken::Free);
        place.guarded.write();
        place.kernel.dead.store(true, Ordering::Release);
        let other = place.spawn_writer(2);
        let mut taken = [place.write_once(1), other.join().unwrap()];
        taken.sort_by_key(|taken| *taken as u32);
        assert_eq!(taken, [Taken::Free, Taken::Inherited]);
        assert!(place.lock.try_lock(&place.thread(1)), "both have given it back");
    });
}

#[test]
fn loom_holder_is_inherited_from_after_its_death_only() {
    check(Some(3), || {
        let place = Place::new(true);
        let dying = place.clone();
        let dying = thread::spawn(move || {
            let me = dying.thread(MORTAL);
            let taken = dying.lock.lock(&me);
            dying.guarded.write();
            dying.kernel.dead.store(true, Ordering::Release);
            taken
        });
        let taken = place.write_once(1);
        assert_eq!(dying.join().unwrap(), Taken::Free, "the other lives");
        assert!(place.lock.is_free(&place.thread(1)));
        // The other was first, or has found the dead.
        assert_eq!(taken == Taken::Free, place.lock.lock(&place.thread(3)) == Taken::Inherited);
    });
}

#[test]
fn loom_dead_holder_is_released_once() {
    check(Some(3), || {
        let place = Place::new(true);
        assert_eq!(place.lock.lock(&place.thread(MORTAL)), Taken::Free);
        place.guarded.write();
        place.kernel.dead.store(true, Ordering::Release);
        let other = place.spawn_writer(2);
        place.lock.release_dead(&place.thread(1));
        place.write_once(1);
        other.join().unwrap();
        assert!(place.lock.try_lock(&place.thread(1)), "both have given it back");
        place.guarded.write();
    });
}

/// A handler that interrupts the holder forks: the frame that holds the lock goes on in both processes, and both give it back.
#[test]
fn loom_unlock_of_a_copied_frame_leaves_another_holder() {
    check(Some(3), || {
        let place = Place::new(false);
        assert_eq!(place.lock.lock(&place.thread(1)), Taken::Free);
        let copy = place.clone();
        let child = thread::spawn(move || copy.lock.unlock(&copy.thread(2)));
        let other = place.spawn_writer(3);
        place.guarded.write();
        place.lock.unlock(&place.thread(1));
        assert_eq!(place.write_once(1), Taken::Free);
        child.join().unwrap();
        assert_eq!(other.join().unwrap(), Taken::Free);
    });
}

/// An arena of four blocks, two to a page; and where the connections in them are found.
struct Arena {
    blocks: Blocks<4, 2, 1, 1>,
    /// For each block, whether it is a connection in the table.
    made: [AtomicU32; 2],
    kernel: Arc<Kernel>,
}

impl Arena {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            blocks: Blocks::new(),
            made: [AtomicU32::new(0), AtomicU32::new(0)],
            kernel: Kernel::new(false),
        })
    }

    fn thread(&self, number: u32) -> ModelThread {
        ModelThread { number, kernel: self.kernel.clone() }
    }

    /// Makes a connection, which thread `number` does once. Returns its block.
    fn make(&self, number: u32) -> u16 {
        let block = self.blocks.choose(self.thread(number), |_| true).expect("blocks are free");
        self.made[number as usize - 1].store(1 + u32::from(block.index()), Ordering::Relaxed);
        block.index()
    }

    /// Forks, and returns which connections the child has.
    fn fork(&self, number: u32) -> [u32; 2] {
        let me = self.thread(number);
        self.blocks.before_fork(&me);
        let copied = self.made.each_ref().map(|made| made.load(Ordering::Relaxed));
        self.blocks.part();
        self.blocks.after_fork(&me);
        copied
    }

    /// Whether the child may write this block.
    fn is_shared(&self, block: u16) -> bool {
        self.blocks.is_shared(Blocks::<4, 2, 1, 1>::page_of(usize::from(block)))
    }
}

#[test]
fn loom_child_shares_only_pages_of_connections_that_it_has() {
    check(Some(3), || {
        let arena = Arena::new();
        let maker = {
            let arena = arena.clone();
            thread::spawn(move || arena.make(1))
        };
        let copied = arena.fork(2);
        let after = arena.make(2);
        let block = maker.join().unwrap();
        assert_eq!(arena.is_shared(block), copied[0] == 1 + u32::from(block), "block {block}, copied {copied:?}");
        assert!(!arena.is_shared(after) && after != block);
    });
}

#[test]
fn loom_block_is_chosen_again_after_its_last_user() {
    check(Some(2), || {
        let arena = Arena::new();
        let cell = Arc::new(Guarded::new());
        let use_once = |arena: &Arena, cell: &Guarded, number| {
            loop {
                // The other blocks are not vacant, so that both want the same.
                if let Some(block) = arena.blocks.choose(arena.thread(number), |index| index == 0) {
                    drop(block);
                    break;
                }
                thread::yield_now();
            }
            cell.write();
            arena.blocks.free(0);
        };
        let other = {
            let (arena, cell) = (arena.clone(), cell.clone());
            thread::spawn(move || use_once(&arena, &cell, 1))
        };
        use_once(&arena, &cell, 2);
        other.join().unwrap();
    });
}

#[test]
fn loom_visible_entry_shows_earlier_writes() {
    check(None, || {
        let table = Arc::new((DescriptorWords::<3>::new(), Guarded::new()));
        let maker = {
            let table = table.clone();
            thread::spawn(move || {
                table.1.write();
                assert_eq!(table.0.set(2, 7), 0);
            })
        };
        let other = {
            let table = table.clone();
            thread::spawn(move || table.0.set(1, 5))
        };
        if table.0.get(2) == 7 {
            assert_eq!(table.1.write(), 2);
            assert!(table.0.entries(0, u32::MAX).any(|entry| entry == (2, 7)), "a thread that sees an entry finds it");
        }
        maker.join().unwrap();
        other.join().unwrap();
    });
}

/// Two threads close a descriptor while a third gives its number to another connection: one of the three ends the old one.
#[test]
fn loom_old_entry_is_taken_by_one_thread() {
    const OLD: u32 = 1 << 16;
    const NEW: u32 = 2 << 16;
    check(Some(3), || {
        let table = Arc::new((DescriptorWords::<1>::new(), Guarded::new()));
        table.1.write();
        table.0.set(0, OLD);
        let closer = |table: &(DescriptorWords<1>, Guarded)| {
            let ends = table.0.remove(0, OLD);
            if ends {
                table.1.write();
            }
            ends
        };
        let other = {
            let table = table.clone();
            thread::spawn(move || closer(&table))
        };
        let setter = {
            let table = table.clone();
            thread::spawn(move || {
                let ends = table.0.set(0, NEW) == OLD;
                if ends {
                    table.1.write();
                }
                ends
            })
        };
        let ends = [closer(&table), other.join().unwrap(), setter.join().unwrap()];
        assert_eq!(ends.iter().filter(|ends| **ends).count(), 1, "{ends:?}");
        assert_eq!(table.0.get(0), NEW);
        assert_eq!(table.1.write(), 3);
    });
}

/// A thread copies a descriptor of a connection while another thread replaces the connection. (`Conn::add_descriptor`, `renewal`.)
#[test]
fn loom_copied_descriptor_is_handed_over_once() {
    const OLD: u32 = 1 << 16;
    const NEW: u32 = 2 << 16;
    check(None, || {
        let table = Arc::new((DescriptorWords::<2>::new(), SuccessorWord::new(), AtomicU32::new(1), Guarded::new()));
        table.0.set(0, OLD);
        let copier = {
            let table = table.clone();
            thread::spawn(move || {
                let (words, successor, descriptors, new) = &*table;
                words.set(1, OLD);
                if successor.after_change() != 0 {
                    new.0.with(|_| {});
                    hand_over(descriptors, || words.replace(1, OLD, NEW));
                }
            })
        };
        let (words, successor, descriptors, new) = &*table;
        new.write();
        assert!(words.replace(0, OLD, NEW));
        successor.publish(NEW);
        for (fd, _) in words.entries(0, u32::MAX).filter(|(_, entry)| *entry == OLD) {
            hand_over(descriptors, || words.replace(fd, OLD, NEW));
        }
        copier.join().unwrap();
        assert_eq!((words.get(1), descriptors.load(Ordering::Relaxed)), (NEW, 2));
    });
}

/// A thread does something lasting to a connection while another thread replaces the connection. (`Conn::for_each_successor`, `renewal`.)
#[test]
fn loom_lasting_change_reaches_the_successor() {
    check(None, || {
        let conn = Arc::new((SuccessorWord::new(), AtomicU32::new(0)));
        let changer = {
            let conn = conn.clone();
            thread::spawn(move || {
                conn.1.store(1, Ordering::Relaxed);
                conn.0.after_change() != 0
            })
        };
        conn.0.publish(5);
        let is_seen = conn.1.load(Ordering::Relaxed) != 0;
        assert!(changer.join().unwrap() || is_seen);
    });
}
