//! Random sequences of socket calls, once over plain TCP and once with the library and its switches up and down: what each call
//! returns, the bytes, and errno must be the same.
//!
//! The sequence comes from `driver/`, a program in C that calls what programs call. A sequence that differs is made short before it
//! is reported.
#![expect(clippy::panic, reason = "a test fails by panicking")]

mod support;

use std::{
    fmt::Write as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::OnceLock,
};

use support::{c, switch::Switch, world::World};

/// Sequences that found a fault which no other did: an error behind bytes that was not told after them.
const ONCE_DIFFERENT: [u64; 1] = [9064];
/// Steps of a sequence.
const STEPS: u32 = 300;

fn driver() -> &'static Path {
    static DRIVER: OnceLock<PathBuf> = OnceLock::new();
    DRIVER.get_or_init(|| {
        c::program("differential", &["main.c", "plan.c", "act.c", "wait.c", "both.c"], &["-D_FORTIFY_SOURCE=2"])
    })
}

/// A sequence, or the rest of it.
#[derive(Clone)]
struct Sequence {
    seed: u64,
    steps: u32,
    /// Left out.
    skip: Vec<(u32, u32)>,
    /// Seconds after which a step hangs.
    patience: u32,
    /// While the way changes at random.
    switched: bool,
}

impl Sequence {
    fn new(seed: u64) -> Self {
        Self { seed, steps: STEPS, skip: Vec::new(), patience: 60, switched: false }
    }

    fn arguments(&self) -> [String; 3] {
        let skip: Vec<String> = self.skip.iter().map(|(from, to)| format!("{from}-{to}")).collect();
        [self.seed.to_string(), self.steps.to_string(), skip.join(",")]
    }

    /// Runs it, and gives what it printed.
    fn run(&self, with: Option<&dyn Fn(&mut Command)>, stdin: Stdio) -> Vec<String> {
        let mut command = Command::new(driver());
        command
            .args(self.arguments())
            .env("PATIENCE", self.patience.to_string())
            // Bytes by the ring and by TCP are held against `SO_RCVLOWAT` apart while a connection moves, as each does that gets a ring (see the
            // README). The tests of `poll` and `epoll` cover its other effects.
            .env("A_BYTE_IS_ENOUGH", "1")
            .env_remove("LD_PRELOAD")
            .stdin(stdin)
            .stderr(Stdio::piped());
        if let Some(with) = with {
            with(&mut command);
        }
        let output = support::guard::Guard::spawn(command.stdout(Stdio::piped())).output();
        let mut lines: Vec<String> = String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect();
        if !output.status.success() || !output.stderr.is_empty() {
            lines.push(format!("ended with {}, {:?}", output.status, String::from_utf8_lossy(&output.stderr)));
        }
        lines
    }

    fn plain(&self) -> Vec<String> {
        self.run(None, Stdio::null())
    }
}

/// The first line in which two traces differ.
fn difference(plain: &[String], other: &[String], switched: bool) -> Option<usize> {
    let longest = plain.len().max(other.len());
    (0..longest).find(|&at| match (plain.get(at), other.get(at)) {
        (Some(a), Some(b)) => a != b && !more_edges(a, b) && !(switched && vain_wake(a, b)),
        _ => true,
    })
}

/// Whether all that differs is that `poll` found an epoll set ready in which there was nothing, once: a switch rings its bell, and
/// may do so between the look at the set and the kernel's answer.
fn vain_wake(plain: &str, other: &str) -> bool {
    plain.strip_suffix(" nested=0").is_some_and(|head| other.strip_suffix(" nested=1") == Some(head))
}

/// Whether a line on an edge-triggered set has every edge of the plain one, and beyond it only what is true now: `0:[IN]~[IN,OUT]`
/// is what was reported and what is so.
fn more_edges(plain: &str, other: &str) -> bool {
    let (Some((head, plain)), Some((other_head, other))) =
        (plain.split_once(" edge odd=0"), other.split_once(" edge odd=0"))
    else {
        return false;
    };
    let events = |list: &str| {
        list.trim_matches(['[', ']']).split(',').filter(|e| !e.is_empty()).map(str::to_owned).collect::<Vec<_>>()
    };
    head == other_head
        && plain.split(' ').count() == other.split(' ').count()
        && plain.split(' ').zip(other.split(' ')).all(|(plain, other)| {
            let parts = |word: &str| {
                let (slot, rest) = word.split_once(':')?;
                let (reported, so) = rest.split_once('~')?;
                Some((slot.to_owned(), events(reported), events(so)))
            };
            match (parts(plain), parts(other)) {
                (Some((slot, must, so)), Some((other_slot, has, other_so))) => {
                    slot == other_slot
                        && so == other_so
                        && must.iter().all(|e| has.contains(e))
                        && has.iter().all(|e| so.contains(e))
                }
                (None, None) => plain == other,
                _ => false,
            }
        })
}

/// Runs a sequence both ways; what differs, if the plain way does not differ from itself.
fn fails(sequence: &Sequence, other: &dyn Fn(&Sequence) -> Vec<String>) -> Option<(usize, Vec<String>, Vec<String>)> {
    let (plain, changed) = (sequence.plain(), other(sequence));
    let at = difference(&plain, &changed, sequence.switched)?;
    // The machine may have been so busy that a sleep was too short: then the plain way differs from itself as well.
    let again = sequence.plain();
    difference(&plain, &again, sequence.switched).is_none().then_some((at, plain, changed))
}

/// Runs a sequence a few times: a failure in any run counts.
fn fails_sometimes(
    sequence: &Sequence,
    other: &dyn Fn(&Sequence) -> Vec<String>,
    tries: u32,
) -> Option<(usize, Vec<String>, Vec<String>)> {
    (0..tries).find_map(|_| fails(sequence, other))
}

/// The step that a line is about.
fn step_of(line: Option<&String>) -> Option<u32> {
    line?.split(' ').next()?.parse().ok()
}

/// Leaves out what the failure does not need, half by half, then quarter by quarter.
fn shorten(mut sequence: Sequence, other: &dyn Fn(&Sequence) -> Vec<String>) -> Sequence {
    sequence.patience = 2;
    let Some((at, plain, changed)) = fails_sometimes(&sequence, other, 5) else { return sequence };
    let last = step_of(plain.get(at)).into_iter().chain(step_of(changed.get(at))).max();
    let cut = Sequence { steps: last.map_or(sequence.steps, |last| last + 1), ..sequence.clone() };
    if fails_sometimes(&cut, other, 5).is_some() {
        sequence = cut;
    }
    let mut size = sequence.steps / 2;
    while size > 0 {
        let mut from = 0;
        while from + 1 < sequence.steps {
            let to = (from + size - 1).min(sequence.steps - 2);
            let covered = sequence.skip.iter().any(|(a, b)| *a <= from && to <= *b);
            if !covered {
                let mut shorter = sequence.clone();
                shorter.skip.retain(|(a, b)| !(from <= *a && *b <= to));
                shorter.skip.push((from, to));
                if fails_sometimes(&shorter, other, 3).is_some() {
                    sequence = shorter;
                }
            }
            from = to + 1;
        }
        size /= 2;
    }
    sequence
}

/// A report that can be worked from.
fn report(
    sequence: &Sequence,
    other: &dyn Fn(&Sequence) -> Vec<String>,
    found: (usize, Vec<String>, Vec<String>),
    how: &str,
) -> String {
    let mut out = format!("seed {} differs {how}\n", sequence.seed);
    let (at, plain, changed) = found;
    let line = |lines: &[String]| lines.get(at).cloned().unwrap_or_else(|| "(it ended)".into());
    let _ = writeln!(out, "first: plain   {}\n       library {}", line(&plain), line(&changed));
    let short = shorten(sequence.clone(), other);
    let _ = writeln!(out, "driver {}", short.arguments().map(|a| format!("'{a}'")).join(" "));
    if let Some((at, plain, changed)) = fails_sometimes(&short, other, 10) {
        for line in &plain[..at.min(plain.len())] {
            let _ = writeln!(out, "        {line}");
        }
        let line = |lines: &[String]| lines.get(at).cloned().unwrap_or_else(|| "(it ended)".into());
        let _ = writeln!(out, "plain   {}\nlibrary {}", line(&plain), line(&changed));
    } else {
        out.push_str("the short one does not fail every time\n");
    }
    out
}

/// Runs many sequences, and reports every one that differs, up to a handful.
fn compare(
    seeds: impl Iterator<Item = u64>,
    other: &dyn Fn(&Sequence) -> Vec<String>,
    how: &str,
    switched: bool,
) -> Result<u32, String> {
    let (mut reports, mut count) = (Vec::new(), 0);
    for seed in seeds {
        let sequence = Sequence { switched, ..Sequence::new(seed) };
        if let Some(found) = fails(&sequence, other) {
            reports.push(report(&sequence, other, found, how));
        }
        count += 1;
        if reports.len() >= 3 {
            break;
        }
    }
    if reports.is_empty() { Ok(count) } else { Err(reports.join("\n")) }
}

/// How many sequences a test runs.
fn seeds(usual: u64) -> u64 {
    std::env::var("PARTYWALL_FUZZ_SEEDS").ok().and_then(|text| text.parse().ok()).unwrap_or(usual)
}

/// Where the seeds begin.
fn first_seed() -> u64 {
    std::env::var("PARTYWALL_FUZZ_FIRST").ok().and_then(|text| text.parse().ok()).unwrap_or(0)
}

#[test]
fn plain_tcp_runs_give_equal_results() {
    compare(0..40, &Sequence::plain, "on plain TCP from itself", false).unwrap_or_else(|report| panic!("{report}"));
}

#[test]
fn injected_library_fault_is_detected() {
    // Sequences wait more than they compute: those of some faults run beside those of others.
    std::thread::scope(|scope| {
        for faults in [&[1][..], &[2], &[3, 5, 7, 9], &[4, 6, 8]] {
            scope.spawn(move || faults.iter().for_each(|fault| fault_is_noticed(*fault)));
        }
    });
}

/// A fault of `wrong.c` shows in one of the first sequences.
fn fault_is_noticed(fault: u32) {
    let library = c::library(&format!("wrong-{fault}"), &["wrong.c"], &[&format!("-DFAULT={fault}")]);
    let wrong = |sequence: &Sequence| {
        let with = |command: &mut Command| {
            command.env("LD_PRELOAD", &library);
        };
        sequence.run(Some(&with), Stdio::null())
    };
    // A wrong library makes steps hang, each for as long as its patience lasts.
    let mut sequences = (0..60).map(|seed| Sequence { patience: 2, ..Sequence::new(seed) });
    let noticed = sequences.find(|sequence| fails(sequence, &wrong).is_some());
    let noticed = noticed.unwrap_or_else(|| panic!("fault {fault} of wrong.c was not noticed in 60 sequences"));
    // Shortening takes a while; that it works is seen from a few.
    if fault <= 2 {
        let short = shorten(noticed, &wrong);
        let lines = short.plain().len();
        assert!(lines < 30, "fault {fault} takes {lines} steps to show, with {:?}", short.arguments());
    }
}

#[test]
fn only_true_edges_may_be_added() {
    for (plain, other, allowed) in [
        ("7 A harvest edge odd=0 0:[]~[OUT]", "7 A harvest edge odd=0 0:[OUT]~[OUT]", true),
        ("7 A harvest edge odd=0 0:[]~[OUT]", "7 A harvest edge odd=0 0:[IN]~[OUT]", false),
        ("7 A harvest edge odd=0 0:[IN]~[IN]", "7 A harvest edge odd=0 0:[]~[IN]", false),
        ("7 A harvest edge odd=0 0:[IN]~[IN]", "7 A harvest edge odd=0 0:[IN]~[]", false),
        ("7 A harvest edge odd=0 0:[]~[]", "7 B harvest edge odd=0 0:[]~[]", false),
        ("7 A harvest level -> 0", "7 A harvest level -> 1", false),
    ] {
        assert_eq!(more_edges(plain, other), allowed, "{plain} / {other}");
    }
}

/// Runs sequences with the library, in a separate world.
fn with_the_library(settings: &[(&str, &str)], flips: bool, count: u64) {
    let world = World::new();
    let switch = Switch::new(&world);
    let library = |sequence: &Sequence| {
        let hand = switch.hand();
        let with = |command: &mut Command| {
            world.preload(command);
            command.envs(settings.iter().copied());
        };
        let flipping = flips.then(|| switch.flip_at_random(sequence.seed));
        let lines = sequence.run(Some(&with), hand.stdin());
        drop(flipping);
        lines
    };
    let first = first_seed();
    let all = (first..first + seeds(count)).chain(ONCE_DIFFERENT);
    let how = format!("with {settings:?}{}", if flips { ", switched at random" } else { "" });
    compare(all, &library, &how, flips).unwrap_or_else(|report| panic!("{report}"));
    let seen = switch.seen();
    assert!(seen.ring_bytes > 0, "nothing went over a ring: {seen:?}");
    assert!(seen.switches > count, "hardly anything was switched: {seen:?}");
}

#[test]
fn random_programs_behave_as_without_library() {
    with_the_library(&[], false, 120);
}

#[test]
fn random_switching_is_invisible_to_programs() {
    with_the_library(&[], true, 120);
}

#[test]
fn small_rings_without_spinning_are_invisible_to_programs() {
    with_the_library(
        &[(partywall_protocol::environment::RING, "32768"), (partywall_protocol::environment::SPIN_US, "0")],
        true,
        60,
    );
}
