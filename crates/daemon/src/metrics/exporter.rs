//! The thread that answers scrapers.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};
use rustix::net::SocketFlags;

use super::address::MetricsSocket;
use super::connection::{HttpRequest, Scraper, body_of};
use super::text;
use crate::control::ServerControl;
use crate::policy::MetricsAddress;

/// The most scrapers at once. One more takes the place of the oldest, so silent ones keep no other out.
const SCRAPERS: usize = 32;
/// How old an answer may be.
const FRESH: Duration = Duration::from_secs(1);
/// How long the event loop may take for a report.
const PATIENCE: Duration = Duration::from_secs(2);

/// How long to wait when no connection can be accepted.
const PAUSE: Duration = Duration::from_millis(100);

const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
const PLAIN: &str = "text/plain; charset=utf-8";

/// Serves metrics until it is dropped.
#[derive(Debug)]
pub(crate) struct Exporter {
    stop: Arc<OwnedFd>,
    port: Option<SocketAddr>,
    thread: Option<JoinHandle<()>>,
}

impl Exporter {
    pub(crate) fn start(address: &MetricsAddress, control: ServerControl) -> io::Result<Self> {
        let socket = MetricsSocket::listen(address)?;
        let port = socket.port;
        let stop = Arc::new(rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let stopped = Arc::clone(&stop);
        let mut desk = MetricsServer { socket, control, scrapers: Vec::new(), latest: None };
        let serve = move || {
            if let Err(error) = desk.serve(&stopped) {
                tracing::error!(%error, "metrics are no longer served");
            }
        };
        let thread = std::thread::Builder::new().name("metrics".to_owned()).spawn(serve)?;
        Ok(Self { stop, port, thread: Some(thread) })
    }

    /// The port that it serves, if it serves one.
    pub(crate) fn port(&self) -> Option<SocketAddr> {
        self.port
    }
}

impl Drop for Exporter {
    fn drop(&mut self) {
        // Fails only if 2^64 - 2 stops wait, which are as good.
        let _ = rustix::io::write(&*self.stop, &1u64.to_ne_bytes());
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the thread that serves metrics panicked");
        }
    }
}

struct MetricsServer {
    socket: MetricsSocket,
    control: ServerControl,
    /// The oldest first.
    scrapers: Vec<Scraper>,
    /// The latest answer, and when it was made.
    latest: Option<(Instant, Option<String>)>,
}

impl MetricsServer {
    fn serve(&mut self, stop: &OwnedFd) -> io::Result<()> {
        loop {
            let mut fds = vec![PollFd::new(stop, PollFlags::IN), PollFd::new(&self.socket, PollFlags::IN)];
            fds.extend(self.scrapers.iter().map(|scraper| PollFd::from_borrowed_fd(scraper.as_fd(), scraper.wants())));
            let until = self.scrapers.iter().map(|scraper| scraper.until).min();
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            let timeout: Option<Timespec> = left.map(|t| t.try_into()).transpose().map_err(io::Error::other)?;
            match rustix::event::poll(&mut fds, timeout.as_ref()) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
            let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
            if ready[0] {
                return Ok(());
            }
            self.attend(&ready[2..]);
            if ready[1] {
                self.accept();
            }
        }
    }

    /// Does what can be done for each scraper, and ends those that are done or late.
    fn attend(&mut self, ready: &[bool]) {
        let now = Instant::now();
        for (mut scraper, ready) in std::mem::take(&mut self.scrapers).into_iter().zip(ready) {
            let goes_on = if *ready { self.turn(&mut scraper).unwrap_or(false) } else { true };
            if goes_on && scraper.until > now {
                self.scrapers.push(scraper);
            }
        }
    }

    /// Whether the connection goes on.
    fn turn(&mut self, scraper: &mut Scraper) -> io::Result<bool> {
        if scraper.is_answered() {
            return Ok(!scraper.ignore_rest()?);
        }
        if scraper.wants() == PollFlags::IN {
            match scraper.read()? {
                None => return Ok(true),
                Some(HttpRequest::Other(status)) => scraper.answer(status, PLAIN, body_of(status)),
                Some(HttpRequest::Metrics) => match self.text() {
                    Some(text) => scraper.answer("200 OK", OPENMETRICS, text),
                    None => scraper.answer("503 Service Unavailable", PLAIN, "the broker does not answer now\n"),
                },
            }
        }
        // A scraper that has its answer ends the connection. If it has sent more than was read, that is taken off the socket first.
        Ok(!(scraper.send()? && scraper.ignore_rest()?))
    }

    /// The metrics, at most [`FRESH`] old.
    fn text(&mut self) -> Option<&str> {
        if self.latest.as_ref().is_none_or(|(made, _)| made.elapsed() >= FRESH) {
            let report = self.control.report(PATIENCE);
            self.latest =
                Some((Instant::now(), report.and_then(|report| text::of(&report, self.control.relay_latency()).ok())));
        }
        self.latest.as_ref()?.1.as_deref()
    }

    fn accept(&mut self) {
        // As many as wait, but no more than there is room for: the others are polled for as well.
        for _ in 0..SCRAPERS {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            match rustix::net::accept_with(&self.socket, flags) {
                Ok(socket) => {
                    if self.scrapers.len() >= SCRAPERS {
                        self.scrapers.remove(0);
                    }
                    // Most have sent their request by now: these are answered before another connection is taken.
                    let mut scraper = Scraper::new(socket);
                    if self.turn(&mut scraper).unwrap_or(false) {
                        self.scrapers.push(scraper);
                    }
                }
                Err(rustix::io::Errno::AGAIN) => return,
                // No descriptors are left: there is room again when one has ended, or after a while.
                Err(_) if self.scrapers.is_empty() => return std::thread::sleep(PAUSE),
                Err(_) => {
                    self.scrapers.remove(0);
                    return;
                }
            }
        }
    }
}
