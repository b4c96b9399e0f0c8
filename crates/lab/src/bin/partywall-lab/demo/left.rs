//! Whether anything can still be seen of the machines.

use partywall_lab::Playground;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// The kernel takes a moment to end what has been killed.
const MOMENT: Duration = Duration::from_secs(10);

/// The files that existed before.
#[derive(Debug)]
pub(super) struct Left(Vec<PathBuf>);

impl Left {
    /// Notes processes and folders. Bridge, taps and namespace are held by them.
    pub(super) fn of(playground: &Playground) -> Self {
        let pids = playground.guests().iter().map(|guest| guest.pid()).chain([playground.broker_pid()]);
        let folders = playground.guests().iter().map(|guest| guest.monitor());
        let folders = folders.chain([playground.socket()]).filter_map(|socket| Some(socket.parent()?.to_owned()));
        Self(pids.map(|pid| format!("/proc/{pid}").into()).chain(folders).collect())
    }

    /// Fails if some of it is there.
    pub(super) fn check(&self) -> Result<(), String> {
        let deadline = Instant::now() + MOMENT;
        loop {
            let there: Vec<_> = self.0.iter().filter(|path| path.exists()).collect();
            if there.is_empty() {
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(format!("left behind: {there:?}"));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}
