//! Whether anything can still be seen of the machines.

use partywall_lab::{Guest, Playground};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// The kernel takes a moment to end what has been killed.
const MOMENT: Duration = Duration::from_secs(10);

/// The files that existed before.
#[derive(Debug)]
pub(crate) struct Left(Vec<PathBuf>);

impl Left {
    /// Notes the processes and folders of machines and their broker.
    pub(crate) fn of(playground: &Playground) -> Self {
        Self::new(playground.guests(), playground.broker_pid(), playground.socket())
    }

    /// Notes the processes and folders of machines, and of a process of the host with a socket. Bridge, taps and namespace are held by them.
    pub(crate) fn new(guests: &[Guest], pid: u32, socket: PathBuf) -> Self {
        let pids = guests.iter().map(|guest| guest.pid()).chain([pid]);
        let folders = guests.iter().map(|guest| guest.monitor());
        let folders = folders.chain([socket]).filter_map(|socket| Some(socket.parent()?.to_owned()));
        Self(pids.map(|pid| format!("/proc/{pid}").into()).chain(folders).collect())
    }

    /// Fails if some of it is there.
    pub(crate) fn check(&self) -> Result<(), String> {
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
