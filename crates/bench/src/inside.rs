//! The part of the bench in a virtual machine: one side of a measurement, or a wait for memory that is plugged in.
//!
//! ```text
//!   bench on the host: order --> standard input        answer <-- standard output
//!                                  |                      ^
//!   the other machine <== beat, over a serial port ==> this process
//! ```

use std::io::{BufRead, Write};
use std::os::fd::OwnedFd;
use std::time::Duration;

use partywall_region::{bar, pmem::dax, relay};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

use crate::{
    affinity,
    control::Beat,
    error::{BenchError, During, Result},
    files::workload::FilesOrder,
    interrupt::Interrupt,
    measure::{self, clock},
    task::{Figures, MeasuringSide, MeasuringTask, TaskAnswer},
    transport,
};

/// The serial port that keeps two measuring processes in step.
pub(crate) const BEAT: &str = "org.partywall.bench.beat";
/// The serial port whose bytes a process of the host passes on.
pub(crate) const BYTES: &str = "org.partywall.bench.bytes";
/// Said when the order has been read and the port is empty.
pub(crate) const READY: &str = "READY";
/// Begins the answer.
pub(crate) const ANSWER: &str = "ANSWER ";
/// Said of memory that has been found and mapped.
pub(crate) const SEEN: &str = "SEEN";
/// Between two looks.
const LOOK: Duration = Duration::from_millis(1);

/// Does what its word says: measure, look out, or make and use files.
pub(crate) fn run(words: &[String]) -> Result<()> {
    match words {
        [word] if word == "measure" => measure(),
        [word] if word == "watch" => watch(),
        [word] if word == "files" => files(),
        _ => Err(BenchError::Usage(
            "`inside` is how the bench starts what it needs in virtual machines, and is of no use by hand".into(),
        )),
    }
}

/// One side, from order to answer.
fn measure() -> Result<()> {
    let line = line()?.ok_or_else(|| BenchError::Transport("no order came".into()))?;
    let task: MeasuringTask = serde_json::from_str(&line).map_err(|e| BenchError::transport("reading the order", e))?;
    let port = open_port(BEAT)?;
    // An earlier process may have ended in the middle.
    drain(&port)?;
    let mut beat = Beat::from(port);
    say(READY)?;
    line_or_end()?;
    say_answer(side(&task, &mut beat))
}

/// One step of a workload of files.
fn files() -> Result<()> {
    let line = line()?.ok_or_else(|| BenchError::Transport("no order came".into()))?;
    let order: FilesOrder = serde_json::from_str(&line).map_err(|e| BenchError::transport("reading the order", e))?;
    let interrupt = Interrupt::catch()?;
    say_answer(affinity::allowed().and_then(|all| order.execute(all.len(), &interrupt)))
}

fn say_answer(done: Result<Figures>) -> Result<()> {
    let answer = done.map_or_else(
        |e| match e {
            BenchError::Unavailable(why) => TaskAnswer::Unavailable(why),
            e => TaskAnswer::Failed(e.to_string()),
        },
        TaskAnswer::Figures,
    );
    let answer = serde_json::to_string(&answer).map_err(|e| BenchError::transport("writing the answer", e))?;
    say(&format!("{ANSWER}{answer}"))
}

fn side(task: &MeasuringTask, beat: &mut Beat) -> Result<Figures> {
    let place = task.inside.as_ref().ok_or_else(|| BenchError::Transport("the order names no machines".into()))?;
    beat.compare_clocks(task.side == MeasuringSide::Active, clock::now)?;
    let wires = transport::prepare_inside(task, place, beat)?;
    transport::open(task, wires, beat, measure::Measurement { task, beat })
}

/// Looks out for what each line names, until it is there: `window ID own|peer`, or `device BYTES`.
fn watch() -> Result<()> {
    say(READY)?;
    while let Some(line) = line()? {
        let words: Vec<&str> = line.split_whitespace().collect();
        let wrong = || BenchError::Transport(format!("not something to look out for: {line:?}"));
        let found: Box<dyn Fn() -> bool> = match words[..] {
            ["window", id, role] => {
                let (id, own) = (id.parse().map_err(|_| wrong())?, role == "own");
                Box::new(move || dax::find(id, own).is_ok())
            }
            ["device", size] => {
                let size: u64 = size.parse().map_err(|_| wrong())?;
                Box::new(move || bar::devices().into_iter().any(|d| d.size == size && bar::open(&d, true).is_ok()))
            }
            ["no", "device", size] => {
                let size: u64 = size.parse().map_err(|_| wrong())?;
                Box::new(move || bar::devices().into_iter().all(|d| d.size != size))
            }
            _ => return Err(wrong()),
        };
        while !found() {
            std::thread::sleep(LOOK);
        }
        say(SEEN)?;
    }
    Ok(())
}

/// A serial port of this machine, by its name.
pub(crate) fn open_port(name: &str) -> Result<OwnedFd> {
    relay::open_port(name).map_err(|e| BenchError::transport("opening a serial port", e))
}

/// Throws away what is waiting to be read.
pub(crate) fn drain(port: &OwnedFd) -> Result<()> {
    let flags = fcntl_getfl(port).during("looking at a serial port")?;
    fcntl_setfl(port, flags | OFlags::NONBLOCK).during("setting up a serial port")?;
    let mut bytes = [0; 4096];
    // Reading an empty nonblocking port is an error, and reading a port without a client returns its end.
    while rustix::io::read(port, &mut bytes).is_ok_and(|n| n > 0) {}
    fcntl_setfl(port, flags).during("setting up a serial port")
}

fn line() -> Result<Option<String>> {
    let mut line = String::new();
    let n = std::io::stdin().lock().read_line(&mut line).during("reading an order")?;
    Ok((n > 0).then_some(line))
}

fn line_or_end() -> Result<()> {
    line()?.map(drop).ok_or(BenchError::Interrupted)
}

fn say(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{text}").and_then(|()| out.flush()).during("writing to standard output")
}
