//! Any order of sends that hold bytes back, sends that do not, releases, reads, sleeps and time, against a model of what may be read.
#![cfg(not(loom))]

use partywall_shm::half::{ReaderView, ReadingHalf, WritingHalf};
use partywall_shm::held::{HeldBack, visible};
use partywall_shm::layout::{RxHalf, TxHalf, TxPath};
use partywall_shm::wake::Fencing;
use proptest::prelude::*;
use std::sync::atomic::Ordering;

const CAPACITY: u64 = 64;

#[derive(Debug, Clone, Copy)]
enum Step {
    /// Sends this many bytes. `more`: others follow.
    Send { n: u64, more: bool },
    /// Releases held bytes, as clearing `TCP_CORK` does.
    Release,
    /// Reads this many bytes, if they may be read.
    Read { n: u64 },
    /// A reader stores its wish, and sleeps if it finds nothing.
    Sleep,
    /// The reader has waited for as long as bytes are held back.
    Pass,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        4 => (0..20u64, any::<bool>()).prop_map(|(n, more)| Step::Send { n, more }),
        1 => Just(Step::Release),
        3 => (1..40u64).prop_map(|n| Step::Read { n }),
        3 => Just(Step::Sleep),
        1 => Just(Step::Pass),
    ];
    proptest::collection::vec(step, 1..60)
}

/// How a reader sleeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sleeper {
    Awake,
    /// Until it is rung. The bytes that it could read when it fell asleep.
    Rung(u64),
    /// For a moment, because bytes are held back. It must be rung when they are released.
    Napping(u64),
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn held_bytes_match_the_model_and_no_sleeper_is_forgotten(steps in steps()) {
        let (tx, rx, path) = (TxHalf::new(), RxHalf::new(), TxPath::new());
        let (mut writer, mut reader) = (WritingHalf::new(CAPACITY), ReadingHalf::new(CAPACITY, 0));
        let mut holder = HeldBack::new();
        // The model: bytes that were sent, the first of them that is held back, and up to where the reader has waited.
        let (mut sent, mut held_from, mut passed) = (0, None, 0);
        let mut sleeper = Sleeper::Awake;
        for step in steps {
            let mut rung = false;
            let mut released = false;
            match step {
                Step::Send { n, more } => {
                    let free = writer.refresh(&rx).expect("an honest reader");
                    let n = n.min(free);
                    if more {
                        holder.hold(&path, writer.tail());
                        held_from = held_from.or(Some(sent));
                    }
                    rung = writer.commit(&tx, Some(&rx), n, Fencing::Symmetric);
                    sent += n;
                    if !more {
                        released = held_from.take().is_some();
                        rung |= holder.release(&path, &rx, writer.tail(), Fencing::Symmetric);
                    }
                }
                Step::Release => {
                    released = held_from.take().is_some();
                    rung = holder.release(&path, &rx, writer.tail(), Fencing::Symmetric);
                }
                Step::Read { .. } | Step::Sleep | Step::Pass => {}
            }
            let view = ReaderView { own: &rx, peer: &tx };
            let now = visible(view.tail(), path.held.load(Ordering::Relaxed), passed);
            let expected = held_from.map_or(sent, |from: u64| from.max(passed).min(sent));
            prop_assert_eq!(now, expected, "after {:?}", step);
            match sleeper {
                Sleeper::Rung(saw) => prop_assert!(rung || now == saw, "nobody rang for {} bytes: {:?}", now - saw, step),
                Sleeper::Napping(saw) => prop_assert!(rung || !released || now == saw, "not rung for the release: {:?}", step),
                Sleeper::Awake => {}
            }
            if rung {
                sleeper = Sleeper::Awake;
            }
            match step {
                Step::Read { n } => {
                    prop_assert_eq!(reader.refresh(&tx), Ok(sent - reader.head()));
                    let n = n.min(now - reader.head());
                    reader.release(&rx, &tx, n, Fencing::Symmetric);
                    sleeper = Sleeper::Awake;
                }
                Step::Sleep => {
                    let wish = view.arm_from(now);
                    sleeper = if view.is_armed(wish) { Sleeper::Rung(now) } else { Sleeper::Napping(now) };
                    prop_assert_eq!(sleeper == Sleeper::Rung(now), now == sent, "a sleep beside held bytes has a limit");
                }
                Step::Pass => {
                    passed = sent;
                    sleeper = Sleeper::Awake;
                }
                Step::Send { .. } | Step::Release => {}
            }
        }
    }
}
