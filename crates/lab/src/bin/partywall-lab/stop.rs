//! Ctrl-C and the like: guests end, what waits for them gets an error, and everything is taken down as after any other one.

use std::io;
use std::sync::mpsc::{Receiver, channel};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

/// Hears of the first signal.
pub(crate) struct StopSignal(Receiver<()>);

/// From now on, such signals end guests rather than this program.
pub(crate) fn on_signals() -> io::Result<StopSignal> {
    let mut signals = signal_hook::iterator::Signals::new([SIGINT, SIGTERM, SIGHUP])?;
    let (say, heard) = channel();
    std::thread::Builder::new().name("signals".into()).spawn(move || {
        for _ in signals.forever() {
            partywall_lab::interrupt();
            let _ = say.send(());
        }
    })?;
    Ok(StopSignal(heard))
}

impl StopSignal {
    /// Until there is one.
    pub(crate) fn wait(&self) {
        let _ = self.0.recv();
    }
}
