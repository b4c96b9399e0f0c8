//! A measuring process: takes its order from the control socket, does it, and answers.

use std::os::fd::AsFd;

use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal};

use crate::{
    affinity,
    control::{Beat, Control},
    error::{During, Error, Result},
    measure,
    task::{Answer, Task, Work},
    transport::{self, Wires},
};

/// Runs to the answer. The control socket is standard input.
pub(crate) fn run() -> Result<()> {
    let stdin = std::io::stdin().as_fd().try_clone_to_owned().during("taking the control socket")?;
    let control = Control::from(stdin);
    let received = control.recv::<Task>().map_err(|e| {
        Error::Usage(format!(
            "`role` is how the bench starts its own measuring processes, and is of no use by hand ({e})"
        ))
    })?;
    let Some((task, mut fds)) = received else { return Ok(()) };
    if fds.is_empty() {
        return Err(Error::Usage("the order came without its descriptors".into()));
    }
    die_with(task.parent)?;
    let beat = Beat::from(fds.remove(0));
    let placed = match task.work {
        // The broker's processes, the client and the hostile threads share the machine as they would anywhere.
        Work::Ask { .. } => Ok(()),
        _ => affinity::pin(task.cpu),
    };
    let answer = placed
        .and_then(|()| match task.work {
            Work::Ask { .. } => measure::broker::run(&task, &beat),
            Work::ManyChannels { .. } | Work::OpenChannels { .. } | Work::ConnectClose { .. } => {
                measure::channels::run(&task, &beat, Wires::from(fds))
            }
            _ => transport::open(&task, Wires::from(fds), &beat, measure::Measurement { task: &task, beat: &beat }),
        })
        .map_or_else(
            |e| match e {
                Error::Unavailable(why) => Answer::Unavailable(why),
                e => Answer::Failed(e.to_string()),
            },
            Answer::Figures,
        );
    control.send(&answer, &[])
}

/// Ends this process when the bench ends, however that ends.
fn die_with(parent: u32) -> Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL)).during("tying this process to the bench")?;
    if getppid().map(Pid::as_raw_nonzero).is_none_or(|pid| pid.get().cast_unsigned() != parent) {
        return Err(Error::Interrupted);
    }
    Ok(())
}
