//! The heartbeat of a host's relay (protocol P7): when to ping the guest, and when its silence ends its links.

use super::super::Heartbeat;
use std::time::{Duration, Instant};

/// The longest pause between two questions to a guest that has fallen silent.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// The step that is due by the clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HeartbeatStep {
    /// Nothing is due.
    Quiet,
    /// Send a ping.
    Ping,
    /// The guest has been silent for too long.
    Silent,
}

/// When the guest is asked next, and when it was heard last.
#[derive(Debug)]
pub(super) struct Pulse {
    beat: Heartbeat,
    heard: Instant,
    next: Instant,
    /// When the time was last looked at.
    looked: Instant,
    /// The silence has been reported, or no guest has greeted yet: a further silence is not news.
    reported: bool,
    /// The guest has not greeted since it fell silent, or since this relay began. It may not know that its links are gone.
    is_to_greet: bool,
    /// It was heard since the last question, and was told to greet.
    heard_again: bool,
    /// The pause before such a guest is asked again.
    pause: Duration,
}

impl Pulse {
    /// The guest is asked as one that fell silent: it may not have noticed that another broker had the port before.
    pub(super) fn new(beat: Heartbeat, now: Instant) -> Self {
        let (next, pause) = (now + beat.limit, beat.limit);
        Self { beat, heard: now, next, looked: now, reported: true, is_to_greet: true, heard_again: false, pause }
    }

    /// Bytes have come. Returns whether the guest is to be told to greet: once, and again after each further question, because it may take a
    /// greeting for one that crosses its own.
    pub(super) fn heard(&mut self, now: Instant) -> bool {
        self.heard = now;
        self.is_to_greet && !std::mem::replace(&mut self.heard_again, true)
    }

    /// A guest has greeted: from now on its silence counts.
    pub(super) fn greeted(&mut self, now: Instant) {
        // It is asked at once. Otherwise a guest that had been silent for long, and has nothing to say, would be taken for silent again before
        // the next question.
        (self.reported, self.looked, self.next) = (false, now, now);
        self.is_to_greet = false;
    }

    /// Whether the guest has to greet before anything that it says counts.
    pub(super) fn is_to_greet(&self) -> bool {
        self.is_to_greet
    }

    pub(super) fn beat(&mut self, now: Instant) -> HeartbeatStep {
        if self.reported {
            // An interrupt of its port can get lost when the machine is paused. Then only another one makes it go on.
            if !self.is_to_greet || now < self.next {
                return HeartbeatStep::Quiet;
            }
            self.heard_again = false;
            self.pause = (self.pause * 2).min(LONGEST_PAUSE.max(self.beat.limit));
            self.next = now + self.pause;
            return HeartbeatStep::Ping;
        }
        // While this side did not run, it neither asked nor heard: that time is not the guest's silence.
        let since = now - std::mem::replace(&mut self.looked, now);
        if since > self.beat.every * 2 {
            self.heard = (self.heard + since).min(now);
        }
        if now >= self.heard + self.beat.limit {
            (self.reported, self.is_to_greet, self.heard_again) = (true, true, false);
            (self.pause, self.next) = (self.beat.limit, now + self.beat.limit);
            HeartbeatStep::Silent
        } else if now >= self.next {
            self.next = now + self.beat.every;
            HeartbeatStep::Ping
        } else {
            HeartbeatStep::Quiet
        }
    }

    /// How long nothing need happen; `None` if only the guest can make something happen.
    pub(super) fn patience(&self, now: Instant) -> Option<Duration> {
        let next = if self.reported { self.next } else { self.next.min(self.heard + self.beat.limit) };
        (!self.reported || self.is_to_greet).then(|| next.saturating_duration_since(now))
    }
}
