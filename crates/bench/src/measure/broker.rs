//! The broker's answers to an honest client, alone and beside others: the active side asks, the passive side floods, or only keeps the
//! processors busy.

use std::{
    io::{Read, Write},
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    thread,
    time::{Duration, Instant},
};

use partywall::{Domain, Options};
use rustix::process::setpriority_process;

use super::turns::TurnTimes;
use crate::{
    control::Beat,
    error::{BenchError, During, Result},
    flood::{Flood, THREADS},
    report::metric::Metric,
    task::{Beside, BrokerQuestion, Figures, MeasuringSide, MeasuringTask, MeasuringWork},
    transport::partywall::fault,
};

/// The user of hostile sessions, if the bench may choose: Linux calls it `nobody`.
pub(crate) const NOBODY: u32 = 65_534;
/// The nice value of an urgent client: what it waits for is the broker, and hardly a processor.
const URGENT: i32 = -20;
/// The service of the domain that honest connections go to.
const SERVICE: &str = "honest";
/// An honest client asks a hundred times a second. One that asks all the time is to the broker what a flood is: its reader uses more than its
/// share, and gets no priority for what it takes beyond that (C16.1).
pub(crate) const PAUSE: Duration = Duration::from_millis(10);
/// Answers that do not count.
const WARM_UP: usize = 5;
/// How many times as long as planned a measurement may take to get as many answers as planned.
const LONGEST: u32 = 8;
/// Hostile sessions that send nothing for longer are not what is to be measured.
const LONGEST_SILENCE: Duration = Duration::from_secs(10);

/// The user that hostile sessions are of, if it is not the bench's own.
pub(crate) fn other_user() -> Option<u32> {
    rustix::process::geteuid().is_root().then_some(NOBODY)
}

/// Runs one side.
pub(crate) fn run(task: &MeasuringTask, beat: &Beat) -> Result<Figures> {
    let MeasuringWork::Ask { question, beside, urgent, least, measured } = task.work else {
        return Err(BenchError::Transport("this is not about the broker's answers".into()));
    };
    match task.side {
        MeasuringSide::Active => {
            if urgent && other_user().is_some() {
                // Before there are other threads, which inherit it.
                setpriority_process(None, URGENT).during("raising the honest client's priority")?;
            }
            let mut ask = honest(task, question)?;
            // From here on all hostile sessions are open.
            beat.meet()?;
            let figures = time(&mut ask, beat, least, measured)?;
            beat.meet()?;
            Ok(figures)
        }
        MeasuringSide::Passive => match beside {
            Beside::Nothing => wait(beat),
            Beside::BusyThreads => keep_busy(beat),
            Beside::HostileSessions(count) => flood(task, beat, count),
        },
    }
}

/// Does nothing until the other side has measured.
fn wait(beat: &Beat) -> Result<Figures> {
    beat.meet()?;
    beat.meet()?;
    Ok(Figures::new())
}

/// Keeps processors busy until the other side has measured.
fn keep_busy(beat: &Beat) -> Result<Figures> {
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                while !over.load(Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        let figures = wait(beat);
        over.store(true, Relaxed);
        figures
    })
}

/// Asks over and over with a pause between, for this time and at least this often, unless that takes far too long: then there are fewer answers, and the
/// percentiles of what there are say enough. It goes on until the passive side says that its load was there meanwhile.
fn time(ask: &mut dyn FnMut() -> Result<()>, beat: &Beat, least: u64, measured: Duration) -> Result<Figures> {
    for _ in 0..WARM_UP {
        ask()?;
    }
    let mut turns = TurnTimes::start()?;
    while turns.elapsed() < measured
        || (turns.count() < least && turns.elapsed() < measured * LONGEST)
        || !beat.has_spoken()?
    {
        thread::sleep(PAUSE);
        turns.skip();
        ask()?;
        turns.note();
    }
    Ok(turns.figures())
}

/// The question of an honest client, which uses the library as any program would.
fn honest(task: &MeasuringTask, question: BrokerQuestion) -> Result<Box<dyn FnMut() -> Result<()>>> {
    let broker = task.broker.clone().ok_or_else(|| BenchError::Transport("the order names no broker".into()))?;
    let join =
        move |name: &str| Domain::builder().name(name).broker(&broker).join().map_err(fault("joining the broker"));
    let name = format!("{}-honest", task.session);
    Ok(match question {
        BrokerQuestion::Join => Box::new(move || join(&name).map(drop)),
        BrokerQuestion::List => {
            let domain = join(&name)?;
            Box::new(move || {
                let rows = domain.domains().map_err(fault("listing domains"))?;
                match rows.iter().any(|row| row.name == name) {
                    true => Ok(()),
                    false => Err(BenchError::Damaged("the list of domains lacks the one that asks".into())),
                }
            })
        }
        BrokerQuestion::Connect => {
            let (domain, server) = (join(&name)?, join(&format!("{}-server", task.session))?);
            let target = format!("{}:{SERVICE}", server.name());
            let mut listener = server.bind_with(SERVICE, &Options::default()).map_err(fault("binding a service"))?;
            // The thread ends with this process. If it ends early, the next connection fails with an error.
            thread::spawn(move || {
                let _server = server;
                while let Ok((mut stream, _)) = listener.accept() {
                    if stream.write_all(&[1]).is_err() {
                        return;
                    }
                }
            });
            Box::new(move || {
                let mut stream = domain.connect(&target).map_err(fault("connecting a stream"))?;
                stream.read_exact(&mut [0]).map_err(fault("reading the first byte"))
            })
        }
    })
}

/// Floods the broker until the other side has measured.
fn flood(task: &MeasuringTask, beat: &Beat, hostile: u64) -> Result<Figures> {
    let broker = task.broker.as_ref().ok_or_else(|| BenchError::Transport("the order names no broker".into()))?;
    let flood = Flood::default();
    thread::scope(|scope| {
        let end = flood.end();
        let flooding = scope.spawn(|| flood.run(broker, hostile as usize, other_user()));
        while flood.opened() < hostile && !flooding.is_finished() {
            thread::sleep(Duration::from_millis(1));
        }
        let mut rate = 0.0;
        if !flooding.is_finished() {
            beat.meet()?;
            let (begin, before) = (Instant::now(), flood.sent());
            // The broker may let the hostile user wait for a share that the flood has used before: a short measurement could end meanwhile.
            while flood.sent() == before && !flooding.is_finished() && begin.elapsed() < LONGEST_SILENCE {
                thread::sleep(Duration::from_millis(1));
            }
            beat.meet()?;
            rate = (flood.sent() - before) as f64 / begin.elapsed().as_secs_f64();
        }
        drop(end);
        let ended = flooding.join().unwrap_or_else(|_| Err(std::io::Error::other("a thread panicked")));
        ended.during("flooding the broker")?;
        if rate <= 0.0 {
            return Err(BenchError::Transport("the hostile sessions sent nothing, so nothing was measured".into()));
        }
        Ok(Figures::from([(Metric::HostilePerSecond, rate)]))
    })
}
