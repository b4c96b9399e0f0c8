//! `partywall moves`: shows and sets, while programs run, when connections under `partywall run` move to shared memory.

use std::time::{Duration, Instant};

use partywall::{Domain, MoveRules, MoveRulesChange, PolicyRequest, PolicyUser};
use partywall_protocol::directory::{Clause, Subject, Terms};
use partywall_protocol::upgrade::{Of, Upgrade};
use partywall_terminal::table;
use serde::Serialize;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::args::{Global, RingOption, exit_table, parse_ring};
use crate::exit::{CommandFailure, Context};
use crate::output;
use crate::{human, session, words};

const AFTER: &str = "\
Without options, shows the present move rules. A change takes effect at once, for open connections too: connections that may \
no longer use a ring return to TCP, in mid-stream. It lasts until the broker reads its policy file again (SIGHUP, restart). \
Only administrators may change the rules. The policy file decides which programs may join and connect (`partywall policy test`).

A rule is MODE@WHICH. MODE: now, never, after=CALLS, bytes=BYTES, after=CALLS,bytes=BYTES. WHICH: port=PORT (of the \
listener), address=ADDRESS[/PREFIX] (of the peer), program=PATTERN. The last rule that matches decides.

Examples:
  partywall moves                                     the present rules
  partywall moves --mode now                          every connection, at once
  partywall moves --after-calls 16 --after-bytes 64K
  partywall moves --rule never@port=22 --rule now@program=redis-*
  partywall moves --mode never --for 5s               as if the peers moved to another host and back
  partywall moves --remove port=22
  partywall moves --reset                             back to the rules of the policy file";

/// Show or set when connections of programs under `run` move to shared memory
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER, after_long_help = exit_table(AFTER))]
pub(crate) struct Args {
    /// Mode of connections that no rule matches
    #[arg(long, value_enum, conflicts_with_all = ["after_calls", "after_bytes"])]
    mode: Option<Mode>,

    /// Move connections that no rule matches after this many calls that carry bytes, both directions together
    #[arg(long, value_name = "N", value_parser = partywall_terminal::whole::<u64>(1..))]
    after_calls: Option<u64>,

    /// Move connections that no rule matches after this many bytes, both directions together; with --after-calls, whichever is first
    #[arg(long, value_name = "SIZE", value_parser = parse_least)]
    after_bytes: Option<u64>,

    /// Size of the rings of connections that move from now on: a power of two from 4K to 1G
    #[arg(long, value_name = "SIZE", value_parser = parse_fixed_ring)]
    ring: Option<u64>,

    /// Longest time to spin before sleeping, with a unit, as in 50us or 2ms, at most 1h; 0 sleeps at once
    #[arg(long, value_name = "DURATION", value_parser = human::parse_spin)]
    spin: Option<Duration>,

    /// Add a rule after all others; it replaces a rule for the same WHICH
    #[arg(long, value_name = "MODE@WHICH", value_parser = parse_rule)]
    rule: Vec<Clause>,

    /// Remove the rule for WHICH
    #[arg(long, value_name = "WHICH", value_parser = words::parse_subject)]
    remove: Vec<Subject>,

    /// Return to the broker's policy file
    #[arg(long, conflicts_with_all = ["mode", "after_calls", "after_bytes", "ring", "spin", "rule", "remove"])]
    reset: bool,

    /// Limit the change to this time; then, or on interruption, the previous rules apply again
    #[arg(long = "for", value_name = "DURATION", value_parser = human::parse_duration)]
    so_long: Option<Duration>,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Mode {
    /// Move as soon as both sides can; makes programs with many short connections several times slower
    Now,
    /// Stay on TCP
    Never,
}

fn parse_least(text: &str) -> Result<u64, String> {
    match partywall_terminal::size(text)? {
        0 => Err("at least 1; --mode now moves them at once".into()),
        size => Ok(size),
    }
}

fn parse_fixed_ring(text: &str) -> Result<u64, String> {
    match parse_ring(text)? {
        RingOption::Fixed(size) => Ok(size),
        RingOption::Auto => Err("write a power of two from 4K to 1G".into()),
    }
}

fn parse_rule(text: &str) -> Result<Clause, String> {
    let clause = words::parse_clause(text)?;
    match clause.subject {
        Subject::Of(Of::All) => Err("a rule says for which connections, as in never@port=22; --mode is for all".into()),
        _ => Ok(clause),
    }
}

impl Args {
    /// The mode that is asked for all connections.
    fn upgrade(&self) -> Option<Upgrade> {
        match (self.mode, self.after_calls, self.after_bytes) {
            (Some(Mode::Now), ..) => Some(Upgrade::Now),
            (Some(Mode::Never), ..) => Some(Upgrade::Never),
            (None, None, None) => None,
            (None, calls, bytes) => Some(Upgrade::After { calls: calls.unwrap_or(0), bytes: bytes.unwrap_or(0) }),
        }
    }

    fn changes(&self) -> bool {
        self.upgrade().is_some()
            || self.ring.is_some()
            || self.spin.is_some()
            || !self.rule.is_empty()
            || !self.remove.is_empty()
    }
}

pub(crate) fn run(global: &Global, args: &Args) -> Result<(), CommandFailure> {
    if args.so_long.is_some() && !args.changes() && !args.reset {
        return Err(CommandFailure::usage("--for says how long something is to hold")
            .hint("add --mode, --rule or another change"));
    }
    let domain = session::join(global)?;
    // Before the change: an interruption must undo it.
    let signals =
        args.so_long.map(|_| Signals::new([SIGINT, SIGTERM, SIGHUP])).transpose().context("cannot catch signals")?;
    let held = domain.move_rules().context("cannot ask for the move rules")?;
    let now = if args.reset {
        domain.reset_move_rules().context("cannot reset the move rules")?
    } else if args.changes() {
        change(&domain, args, &held)?
    } else {
        held.clone()
    };
    let shown = ShownMoves::of(&now);
    if args.json { output::print_json(&shown) } else { output::print(shown.to_text(has_policy_file(&domain))) }?;
    let (Some(time), Some(mut signals)) = (args.so_long, signals) else { return Ok(()) };
    let end = Instant::now() + time;
    while Instant::now() < end && signals.pending().next().is_none() {
        std::thread::sleep(end.saturating_duration_since(Instant::now()).min(Duration::from_millis(20)));
    }
    restore(&domain, &held)
}

/// Whether the broker names a policy file. It does so in each of its decisions, but not to containers and virtual machines.
fn has_policy_file(domain: &Domain) -> bool {
    let decision = domain.test_policy(PolicyUser::Own, domain.name(), PolicyRequest::Join);
    decision.is_ok_and(|decision| decision.file.is_some())
}

fn restore(domain: &Domain, held: &MoveRules) -> Result<(), CommandFailure> {
    let restored = if held.live {
        let MoveRules { clauses, ring_size, spin, .. } = held.clone();
        domain.set_move_rules(&MoveRulesChange { clauses, ring_size: Some(ring_size), spin: Some(spin) })
    } else {
        domain.reset_move_rules()
    };
    restored.map(drop).context("cannot put back the move rules that held before")
}

fn change(domain: &Domain, args: &Args, held: &MoveRules) -> Result<MoveRules, CommandFailure> {
    let clauses = changed(args, words::effective(&held.clauses))?;
    let change = MoveRulesChange { clauses: words::join(&clauses), ring_size: args.ring, spin: args.spin };
    domain.set_move_rules(&change).context("cannot set the move rules")
}

/// The clauses that hold, with what is asked for put in and taken out.
fn changed(args: &Args, mut clauses: Vec<Clause>) -> Result<Vec<Clause>, CommandFailure> {
    if let Some(upgrade) = args.upgrade() {
        clauses.retain(|clause| clause.subject != Subject::Of(Of::All));
        clauses.insert(0, Clause { subject: Subject::Of(Of::All), upgrade });
    }
    for subject in &args.remove {
        let before = clauses.len();
        clauses.retain(|clause| clause.subject != *subject);
        if clauses.len() == before {
            let which = Clause { subject: *subject, upgrade: Upgrade::Never }.to_string();
            let which = which.trim_start_matches("never@");
            return Err(CommandFailure::usage(format!("there is no rule for {which}"))
                .hint("`partywall moves` shows which there are"));
        }
    }
    for rule in &args.rule {
        clauses.retain(|clause| clause.subject != rule.subject);
        clauses.push(*rule);
    }
    Ok(clauses)
}

/// Move rules, for people and for programs.
#[derive(Debug, Serialize)]
struct ShownMoves {
    /// An administrator has set it.
    live: bool,
    /// Mode of connections that no rule matches.
    #[serde(rename = "move")]
    upgrade: String,
    rules: Vec<RuleShown>,
    ring_size: u64,
    spin_us: u64,
}

#[derive(Debug, Serialize)]
struct RuleShown {
    #[serde(rename = "for")]
    subject: String,
    #[serde(rename = "move")]
    upgrade: String,
}

impl ShownMoves {
    fn of(held: &MoveRules) -> Self {
        let clauses = words::effective(&held.clauses);
        let (all, rules): (Vec<&Clause>, Vec<&Clause>) =
            clauses.iter().partition(|clause| clause.subject == Subject::Of(Of::All));
        let rule = |clause: &Clause| {
            let text = clause.to_string();
            let (upgrade, subject) = text.split_once('@').unwrap_or((&text, ""));
            RuleShown { subject: subject.to_owned(), upgrade: upgrade.to_owned() }
        };
        Self {
            live: held.live,
            upgrade: all.first().map_or_else(|| "never".into(), |clause| clause.upgrade.to_string()),
            rules: rules.into_iter().map(rule).collect(),
            ring_size: held.ring_size,
            // An hour in microseconds fits by far.
            spin_us: held.spin.as_micros() as u64,
        }
    }

    /// Whether these are the rules of a broker without a policy file.
    fn are_defaults(&self) -> bool {
        let Terms { upgrade, ring_size, spin_us, .. } = Terms::DEFAULT;
        let held = (self.upgrade.as_str(), self.ring_size, self.spin_us);
        self.rules.is_empty() && held == (upgrade.to_string().as_str(), ring_size, spin_us.into())
    }

    fn to_text(&self, has_policy_file: bool) -> String {
        let mut rows = table(&["CONNECTIONS", "TO SHARED MEMORY"]);
        for rule in &self.rules {
            rows.add_row([rule.subject.clone(), in_words(&rule.upgrade)]);
        }
        rows.add_row([if self.rules.is_empty() { "all" } else { "all others" }.into(), in_words(&self.upgrade)]);
        let source = match self.live {
            true if has_policy_file => "set by an administrator; --reset goes back to the policy file",
            true => "set by an administrator; --reset goes back to the policy file or the defaults",
            false if has_policy_file || !self.are_defaults() => "the policy file",
            false => "the defaults",
        };
        let spin = humantime::format_duration(Duration::from_micros(self.spin_us));
        let ring = human::bytes(self.ring_size);
        let caution = match Upgrade::parse(&self.upgrade) {
            Ok(Upgrade::Now) => format!("\nnote: {}", words::NOW_IS_SLOW),
            _ => String::new(),
        };
        format!("{rows}\n\nrings of {ring}, spinning for at most {spin} (from: {source}){caution}")
    }
}

/// `after 16 calls or 64.00 KiB`.
fn in_words(upgrade: &str) -> String {
    match Upgrade::parse(upgrade) {
        Ok(Upgrade::Now) => "at once".into(),
        Ok(Upgrade::After { calls, bytes: 0 }) => format!("after {calls} calls"),
        Ok(Upgrade::After { calls: 0, bytes }) => format!("after {}", human::bytes(bytes)),
        Ok(Upgrade::After { calls, bytes }) => format!("after {calls} calls or {}", human::bytes(bytes)),
        Ok(Upgrade::Never) | Err(_) => "never".into(),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    fn args(line: &str) -> Result<Args, String> {
        let words = std::iter::once("moves").chain(line.split_whitespace());
        Line::try_parse_from(words).map(|line| line.args).map_err(|e| e.to_string())
    }

    fn after(line: &str, held: &str) -> String {
        words::join(&changed(&args(line).unwrap(), words::effective(held)).unwrap())
    }

    #[test]
    fn clause_is_added_and_removed() {
        assert_eq!(after("--mode never", "after=8"), "never");
        assert_eq!(
            after("--after-calls 16 --after-bytes 64K", "now never@port=22"),
            "after=16,bytes=65536 never@port=22"
        );
        assert_eq!(after("--rule never@port=22", "now"), "now never@port=22");
        assert_eq!(after("--rule now@port=22", "now never@port=22 now@port=80"), "now now@port=80 now@port=22");
        assert_eq!(after("--remove port=22", "now never@port=22"), "now");
        assert_eq!(after("--ring 1M", "now never@port=22"), "now never@port=22");
        let absent = changed(&args("--remove port=1").unwrap(), words::effective("now")).unwrap_err();
        assert!(absent.to_string().contains("no rule for port=1"), "{absent}");
    }

    #[test]
    fn options_that_contradict_or_name_nothing_are_refused() {
        for wrong in [
            "--mode soon",
            "--mode now --after-calls 3",
            "--after-calls 0",
            "--after-bytes 0",
            "--rule never",
            "--rule never@22",
            "--ring auto",
            "--reset --mode now",
            "--remove never@port=1",
        ] {
            assert!(args(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn move_rules_are_shown_in_words() {
        let held = MoveRules {
            live: true,
            clauses: "after=8,bytes=32768 never@port=22 now@program=redis-*".into(),
            ring_size: 256 << 10,
            spin: Duration::from_micros(50),
        };
        let text = ShownMoves::of(&held).to_text(true);
        for words in [
            "port=22",
            "never",
            "program=redis-*",
            "at once",
            "all others",
            "after 8 calls or 32.00 KiB",
            "256.00 KiB",
            "50us",
            "--reset",
        ] {
            assert!(text.contains(words), "{words} is missing:\n{text}");
        }
        assert!(!text.contains("slower"), "{text}");
        let at_once = ShownMoves::of(&MoveRules { clauses: "now".into(), ..held }).to_text(true);
        assert!(at_once.contains("several times slower"), "{at_once}");
    }

    #[test]
    fn source_of_move_rules_is_the_file_or_the_defaults() {
        let from = |clauses: &str, has_file| {
            let (ring_size, spin) = (Terms::DEFAULT.ring_size, Duration::from_micros(Terms::DEFAULT.spin_us.into()));
            let held = MoveRules { live: false, clauses: clauses.into(), ring_size, spin };
            ShownMoves::of(&held).to_text(has_file).contains("(from: the policy file)")
        };
        let defaults = Terms::DEFAULT.upgrade.to_string();
        assert!(from(&defaults, true) && !from(&defaults, false));
        assert!(from("now", false), "a broker does not name its file to a container");
    }
}
