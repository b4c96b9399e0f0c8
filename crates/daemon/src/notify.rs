//! Word to systemd (`Type=notify`): ready, how it goes, stopping. Without a service manager all of this does nothing.

use std::io;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::Duration;

use partywall_daemon::ServerControl;
use sd_notify::NotifyState;

/// Status lines at most so often, however fast sessions come and go.
const PERIOD: Duration = Duration::from_secs(1);

/// A thread that keeps the status line current, and sleeps while nothing changes.
#[derive(Debug)]
pub(crate) struct Reporter(Option<SyncSender<()>>);

impl Reporter {
    /// Notifies the service manager that the broker is ready, and reports on it from now on.
    pub(crate) fn start(control: ServerControl) -> io::Result<Self> {
        if std::env::var_os("NOTIFY_SOCKET").is_none() {
            return Ok(Self(None));
        }
        tell(&[NotifyState::Ready]);
        let (changed, changes) = sync_channel(1);
        std::thread::Builder::new().name("status".to_owned()).spawn(move || {
            while changes.recv().is_ok() {
                let now = control.status();
                let (d, s, c, n) = (now.domains, now.services, now.channels, now.sessions);
                let line = format!("{d} domains, {s} services, {c} channels, {n} sessions");
                tell(&[NotifyState::Status(&line)]);
                std::thread::sleep(PERIOD);
            }
        })?;
        Ok(Self(Some(changed)))
    }

    /// Something changed. If a report is due already, it will tell of this too.
    pub(crate) fn changed(&self) {
        if let Some(changed) = &self.0 {
            let _ = changed.try_send(());
        }
    }
}

/// Notifies the service manager that the broker stops.
pub(crate) fn stopping() {
    tell(&[NotifyState::Stopping]);
}

fn tell(state: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(state) {
        tracing::debug!(%error, "cannot tell the service manager");
    }
}
