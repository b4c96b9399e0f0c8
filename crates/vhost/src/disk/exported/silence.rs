//! How long the exporter of a disk has answered no request, and how long its user goes on waiting.
//!
//! The time begins with the first request that has no answer, and ends with an answer. A session that begins does not end it: an exporter could begin
//! sessions and answer nothing, and each request of the machine would wait for its own time.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long requests wait for an exporter that has gone, while the machine waits for the end of all requests.
pub(super) const HURRY: Duration = Duration::from_secs(2);
/// The time of a call, at least. A session that begins when the time of all requests is nearly over has one attempt.
const LAST_ATTEMPT: Duration = Duration::from_secs(1);

/// What the threads of a disk know of an exporter that does not answer.
#[derive(Debug)]
pub(super) struct ExporterSilence {
    grace: Duration,
    /// The machine waits for the end of all requests.
    hurries: AtomicBool,
    /// The number of the first session that has not ended.
    first_open: AtomicU64,
    waiting: Mutex<UnansweredRequests>,
}

#[derive(Debug, Default)]
struct UnansweredRequests {
    /// Requests that have begun to wait for an answer.
    count: usize,
    /// When the first of them began to wait, or when the last answer came if that is later. It stays after requests that have failed.
    silent_since: Option<Instant>,
    /// When the end of a session was noticed for the first time since then.
    gone_since: Option<Instant>,
}

/// The time that a request waits.
#[derive(Debug, Clone, Copy)]
pub(super) struct WaitSpan {
    pub(super) since: Instant,
    longest: Duration,
}

impl WaitSpan {
    /// Whether the request fails.
    pub(super) fn is_over(self) -> bool {
        self.since.elapsed() >= self.longest
    }
}

/// A request that waits for an answer, until this is dropped.
#[derive(Debug)]
pub(super) struct UnansweredRequest<'s>(&'s ExporterSilence);

impl ExporterSilence {
    pub(super) fn new(grace: Duration) -> Self {
        let (hurries, first_open, waiting) = (AtomicBool::new(false), AtomicU64::new(0), Mutex::default());
        Self { grace, hurries, first_open, waiting }
    }

    fn waiting(&self) -> MutexGuard<'_, UnansweredRequests> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn grace(&self) -> Duration {
        self.grace
    }

    /// Whether the machine waits for the end of all requests.
    pub(super) fn hurry(&self, hurries: bool) {
        self.hurries.store(hurries, Ordering::Relaxed);
    }

    #[cfg(test)]
    pub(super) fn hurries(&self) -> bool {
        self.hurries.load(Ordering::Relaxed)
    }

    /// All sessions up to the one with this number have ended.
    pub(super) fn end_session(&self, number: u64, noticed: Instant) {
        self.first_open.store(number + 1, Ordering::Relaxed);
        self.waiting().gone_since.get_or_insert(noticed);
    }

    /// Whether the session with this number has ended.
    pub(super) fn has_ended(&self, number: u64) -> bool {
        number < self.first_open.load(Ordering::Relaxed)
    }

    /// A request begins to wait for an answer.
    pub(super) fn wait(&self) -> UnansweredRequest<'_> {
        let mut waiting = self.waiting();
        waiting.count += 1;
        waiting.silent_since.get_or_insert_with(Instant::now);
        UnansweredRequest(self)
    }

    /// The exporter has answered a call. Requests that wait, wait from now on (protocol E1.6).
    fn heard(&self) {
        let mut waiting = self.waiting();
        waiting.silent_since = (waiting.count > 0).then(Instant::now);
        waiting.gone_since = None;
    }

    /// The time of a request that was queued at `offered`. It could not be executed at `own` for the first time.
    ///
    /// Requests that wait for a thread have the same time as those that wait for the exporter. While the machine waits for the end of all requests,
    /// it is short, and counts from the end of the session: an exporter may take longer for a request that it executes.
    pub(super) fn span(&self, own: Instant, offered: Instant) -> WaitSpan {
        let hurries = self.hurries.load(Ordering::Relaxed);
        let waiting = self.waiting();
        let (from, longest) = if hurries { (waiting.gone_since, HURRY) } else { (waiting.silent_since, self.grace) };
        WaitSpan { since: from.map_or(own, |from| own.min(from.max(offered))), longest }
    }

    /// Whether a call of a request that waits since `since`, which began at `began`, gets no answer any more.
    fn gives_up(&self, since: Instant, began: Instant) -> bool {
        let silent = self.waiting().silent_since;
        let since = silent.map_or(since, |silent| silent.max(since));
        began.elapsed() >= LAST_ATTEMPT.min(self.grace) && since.elapsed() >= self.grace
    }
}

impl UnansweredRequest<'_> {
    /// The exporter has answered it. All others wait from now on.
    pub(super) fn answered(self) {
        let mut waiting = self.0.waiting();
        waiting.silent_since = (waiting.count > 1).then(Instant::now);
        waiting.gone_since = None;
    }
}

impl Drop for UnansweredRequest<'_> {
    fn drop(&mut self) {
        self.0.waiting().count -= 1;
    }
}

/// How long the calls of a connection wait for their answers.
#[derive(Debug, Clone)]
pub(super) struct CallLimit {
    /// One call, at most.
    longest: Duration,
    /// The exporter's, with the number of the connection's session.
    silence: Option<(Arc<ExporterSilence>, u64)>,
    /// Since when the request waits that the calls are for, or since when a call of the connection was answered.
    since: Cell<Instant>,
}

impl CallLimit {
    /// Each call waits for this time.
    pub(super) fn of(longest: Duration) -> Self {
        Self { longest, silence: None, since: Cell::new(Instant::now()) }
    }

    /// Calls wait as long as the requests of the session with this number do.
    pub(super) fn in_session(silence: &Arc<ExporterSilence>, number: u64, since: Instant) -> Self {
        let longest = silence.grace();
        Self { longest, silence: Some((Arc::clone(silence), number)), since: Cell::new(since) }
    }

    pub(super) fn longest(&self) -> Duration {
        self.longest
    }

    /// The next calls are for a request that waits since then.
    pub(super) fn begin(&self, since: Instant) {
        self.since.set(since);
    }

    /// A call was answered. It need not be for a request of the machine: a session may begin with repeats and a flush.
    pub(super) fn heard(&self) {
        self.since.set(Instant::now());
        if let Some((silence, _)) = &self.silence {
            silence.heard();
        }
    }

    /// Whether a call that began at `began` is given up before its longest time. Its session has ended, or is about to end.
    pub(super) fn gives_up(&self, began: Instant) -> bool {
        let silence = self.silence.as_ref();
        silence.is_some_and(|(silence, number)| silence.has_ended(*number) || silence.gives_up(self.since.get(), began))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRACE: Duration = Duration::from_secs(3600);

    fn later(seconds: u64) -> Instant {
        Instant::now() + Duration::from_secs(seconds)
    }

    #[test]
    fn time_of_waiting_requests_ends_with_an_answer_alone() {
        let silence = ExporterSilence::new(GRACE);
        let offered = Instant::now();
        let first = silence.wait();
        let began = silence.span(later(100), offered).since;
        assert!(began < later(50), "a request behind the first one waits from its own beginning");
        silence.end_session(0, later(10));
        drop(silence.wait());
        assert_eq!(silence.span(later(100), offered).since, began, "the end of a session is another beginning");
        let second = silence.wait();
        first.answered();
        let again = silence.span(later(100), offered).since;
        assert!(again > began && again < later(50), "the other request waits from the answer on");
        second.answered();
        let own = later(100);
        assert_eq!(silence.span(own, offered).since, own, "no request waits");
    }

    #[test]
    fn request_waits_from_its_beginning_at_the_earliest() {
        let silence = ExporterSilence::new(GRACE);
        drop(silence.wait());
        let (offered, own) = (later(10), later(20));
        assert_eq!(silence.span(own, offered).since, offered);
        assert_eq!(silence.span(offered, own).since, offered, "what it has waited itself counts in any case");
    }

    #[test]
    fn hurry_counts_from_the_end_of_the_session() {
        let silence = ExporterSilence::new(GRACE);
        let request = silence.wait();
        let (offered, gone, own) = (Instant::now(), later(10), later(20));
        silence.hurry(true);
        assert_eq!(silence.span(own, offered).since, own, "the exporter may be slow");
        silence.end_session(3, gone);
        silence.end_session(4, own);
        assert_eq!(silence.span(own, offered).since, gone);
        assert!(silence.has_ended(4) && !silence.has_ended(5));
        request.answered();
        assert_eq!(silence.span(own, offered).since, own);
    }

    #[test]
    fn answer_to_any_call_of_a_session_ends_the_silence() {
        let silence = Arc::new(ExporterSilence::new(GRACE));
        let limit = CallLimit::in_session(&silence, 7, Instant::now());
        let (offered, own) = (Instant::now(), later(100));
        let request = silence.wait();
        let began = silence.span(own, offered).since;
        limit.heard();
        let again = silence.span(own, offered).since;
        assert!(again > began && again < later(50), "the request waits from the answer on");
        drop(request);
        assert_eq!(silence.span(own, offered).since, again, "a failure is no answer");
        limit.heard();
        assert_eq!(silence.span(own, offered).since, own, "no request waits");
    }

    #[test]
    fn call_is_given_up_with_its_session_or_its_request() {
        let silence = Arc::new(ExporterSilence::new(Duration::ZERO));
        let now = Instant::now();
        assert!(CallLimit::in_session(&silence, 7, now).gives_up(now), "the time of its request is over");
        let silence = Arc::new(ExporterSilence::new(GRACE));
        let limit = CallLimit::in_session(&silence, 7, now);
        assert!(!limit.gives_up(now));
        silence.end_session(7, now);
        assert!(limit.gives_up(now) && !CallLimit::in_session(&silence, 8, now).gives_up(now));
        assert!(!CallLimit::of(Duration::ZERO).gives_up(now), "it has a separate limit");
    }
}
