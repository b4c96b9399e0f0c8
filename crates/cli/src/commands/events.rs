//! `partywall events`: follows live what the broker decides.

mod line;

use std::io::Write as _;
use std::time::{Duration, Instant};

use partywall::{Domain, Error, EventFeed};

use crate::args::{Global, exit_table};
use crate::connections::MoveWatch;
use crate::exit::{CommandFailure, Context};
use crate::{human, output, session};
use line::{EventLine, EventName};

const AFTER: &str = "\
Each line is one event: a join, a connection, a refusal with the clause of the policy that decided, or an end. Administrators of the broker see \
the events of all users, and those of machines and of the policy. Other users see events of the programs that they run, and of programs that connect to these.

Moves of connections between TCP and the ring (`moved`) are read from the memory of the programs themselves, once a second: of your own \
programs, and as root of all. The move of a connection that ends within that second may be missed. With `--event` and without `moved`, the command does not read this memory.

The broker keeps 1024 events for each reader. A reader that is slower loses the oldest, and a line shows their number. If the broker ends, the \
command waits for the next one. Earlier events are in the broker's log (`journalctl -u partywalld`).

Examples:
  partywall events
  partywall events --event connect-refused --event ring-refused
  partywall events --event moved --filter told
  partywall events --filter web --for 1m
  partywall events --json | jq -r 'select(.refusal) | [.from, .to, .service, .rule] | @tsv'";

/// Follow joins, connections and refusals as they happen
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER, after_long_help = exit_table(AFTER))]
pub(crate) struct Args {
    /// Show only this event; may be given several times
    #[arg(short, long = "event", value_enum, value_name = "EVENT")]
    events: Vec<EventName>,

    /// Show only events with this text in a name, the service, the clause or the refusal, or with this process number
    #[arg(long, value_name = "TEXT")]
    filter: Option<String>,

    /// End after this many events
    #[arg(short, long, value_name = "N", value_parser = partywall_terminal::whole::<u64>(1..))]
    count: Option<u64>,

    /// End after this time in seconds (or with a unit, as in 500ms)
    #[arg(long = "for", value_name = "SECONDS", value_parser = human::parse_duration)]
    limit: Option<Duration>,

    /// Print JSON, one line for each event
    #[arg(long)]
    json: bool,
}

/// How often programs are looked at for moves.
const LOOK: Duration = Duration::from_secs(1);
/// The longest wait for one batch, and between attempts to find a broker.
const STEP: Duration = Duration::from_millis(500);

pub(crate) fn run(global: &Global, args: &Args) -> Result<(), CommandFailure> {
    let domain = session::join(global)?;
    let feed = domain.follow_events().context("cannot follow events")?;
    let mut reader = EventReader {
        args,
        shown: 0,
        moves: None,
        until: args.limit.and_then(|limit| Instant::now().checked_add(limit)),
    };
    // On standard error, so that what reads the lines need not skip it.
    if args.events.is_empty() || args.events.contains(&EventName::Moved) {
        reader.moves = Some((MoveWatch::new(), Instant::now()));
    }
    let _ = writeln!(std::io::stderr(), "partywall: following events");
    let mut source = Some((domain, feed));
    while !reader.is_done() {
        source = match source {
            Some((domain, feed)) => reader.follow(domain, feed)?,
            None => {
                std::thread::sleep(reader.step());
                reader.find(global)?
            }
        };
        reader.look()?;
    }
    Ok(())
}

struct EventReader<'a> {
    args: &'a Args,
    shown: u64,
    /// The watch on programs, and the time of its last look.
    moves: Option<(MoveWatch, Instant)>,
    until: Option<Instant>,
}

impl EventReader<'_> {
    fn is_done(&self) -> bool {
        self.args.count.is_some_and(|count| self.shown >= count)
            || self.until.is_some_and(|until| until <= Instant::now())
    }

    fn step(&self) -> Duration {
        let left = self.until.map(|until| until.saturating_duration_since(Instant::now()));
        left.map_or(STEP, |left| left.min(STEP))
    }

    /// Shows what comes next. Returns nothing if the broker has gone.
    fn follow(&mut self, domain: Domain, mut feed: EventFeed) -> Result<Option<(Domain, EventFeed)>, CommandFailure> {
        match feed.wait(self.step()) {
            Ok(batch) => {
                if batch.lost > 0 {
                    self.show(&EventLine::lost(batch.lost))?;
                }
                for event in &batch.events {
                    if !self.is_done() {
                        self.show(&EventLine::of(event))?;
                    }
                }
                Ok(Some((domain, feed)))
            }
            Err(Error::System { .. }) => {
                self.show(&EventLine::seen(EventName::BrokerGone))?;
                Ok(None)
            }
            Err(error) => Err(error).context("cannot follow events any more"),
        }
    }

    /// Shows which connections have moved, if it is time.
    fn look(&mut self) -> Result<(), CommandFailure> {
        let Some((watch, at)) = self.moves.as_mut().filter(|(_, at)| at.elapsed() >= LOOK) else { return Ok(()) };
        *at = Instant::now();
        let (moves, lost) = watch.look();
        if lost > 0 {
            self.show(&EventLine::lost(lost))?;
        }
        for one in moves {
            if !self.is_done() {
                self.show(&EventLine::moved(&one))?;
            }
        }
        Ok(())
    }

    fn find(&mut self, global: &Global) -> Result<Option<(Domain, EventFeed)>, CommandFailure> {
        let Ok(domain) = session::join(global) else { return Ok(None) };
        let Ok(feed) = domain.follow_events() else { return Ok(None) };
        self.show(&EventLine::seen(EventName::BrokerBack))?;
        Ok(Some((domain, feed)))
    }

    fn show(&mut self, line: &EventLine) -> Result<(), CommandFailure> {
        if !line.is_wanted(&self.args.events, self.args.filter.as_deref()) {
            return Ok(());
        }
        self.shown += 1;
        if self.args.json { output::print_json_line(line) } else { output::print(line.to_text()) }
    }
}
