//! A measuring process: takes its order from the control socket, does it, and answers.

use std::os::fd::AsFd;

use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal};

use crate::{
    affinity,
    control::{Beat, TaskSocket},
    error::{BenchError, During, Result},
    measure,
    task::{MeasuringTask, MeasuringWork, TaskAnswer},
    transport::{self, SideDescriptors},
};

/// Runs to the answer. The control socket is standard input.
pub(crate) fn run() -> Result<()> {
    let stdin = std::io::stdin().as_fd().try_clone_to_owned().during("taking the control socket")?;
    let control = TaskSocket::from(stdin);
    let received = control.recv::<MeasuringTask>().map_err(|e| {
        BenchError::Usage(format!(
            "`role` is how the bench starts its own measuring processes, and is of no use by hand ({e})"
        ))
    })?;
    let Some((task, mut fds)) = received else { return Ok(()) };
    if fds.is_empty() {
        return Err(BenchError::Usage("the order came without its descriptors".into()));
    }
    die_with(task.parent)?;
    let beat = Beat::from(fds.remove(0));
    let placed = match (&task.work, task.cpu) {
        // The broker's processes, the client and the hostile threads share the machine as they would anywhere.
        (MeasuringWork::Ask { .. }, _) | (_, None) => Ok(()),
        (_, Some(cpu)) => affinity::pin(cpu),
    };
    let answer = placed
        .and_then(|()| match task.work {
            MeasuringWork::Ask { .. } => measure::broker::run(&task, &beat),
            MeasuringWork::ManyChannels { .. }
            | MeasuringWork::OpenChannels { .. }
            | MeasuringWork::ConnectClose { .. } => measure::channels::run(&task, &beat, SideDescriptors::from(fds)),
            _ => transport::open(
                &task,
                SideDescriptors::from(fds),
                &beat,
                measure::Measurement { task: &task, beat: &beat },
            ),
        })
        .map_or_else(
            |e| match e {
                BenchError::Unavailable(why) => TaskAnswer::Unavailable(why),
                e => TaskAnswer::Failed(e.to_string()),
            },
            TaskAnswer::Figures,
        );
    control.send(&answer, &[])
}

/// Ends this process when the bench ends, however that ends.
fn die_with(parent: u32) -> Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL)).during("tying this process to the bench")?;
    if getppid().map(Pid::as_raw_nonzero).is_none_or(|pid| pid.get().cast_unsigned() != parent) {
        return Err(BenchError::Interrupted);
    }
    Ok(())
}
