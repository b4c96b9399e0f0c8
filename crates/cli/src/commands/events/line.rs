//! One event, for people and for programs.

use std::fmt::Write as _;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use partywall::{EventKind, EventRow, MachineId, Refusal};
use serde::Serialize;

use crate::connections::{Cause, ObservedMove};

/// The kind of an event. The words are stable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum EventName {
    /// A program has joined a domain
    Joined,
    /// A program that had joined has left
    Left,
    /// A program was refused to join
    JoinRefused,
    /// A program has connected to a service
    Connected,
    /// A connection was refused
    ConnectRefused,
    /// A connection or flow of unmodified programs has got its rings
    RingMade,
    /// The policy refuses a ring
    RingRefused,
    /// Both ends of a channel are gone
    Ended,
    /// A virtual machine was attached
    MachineAttached,
    /// A virtual machine was detached
    MachineDetached,
    /// The agent of a virtual machine has greeted
    MachineUp,
    /// The agent of a virtual machine has gone, or hangs
    MachineDown,
    /// Another policy is in force
    PolicyChanged,
    /// Other move rules are in force
    MovesChanged,
    /// A direction of an unmodified program's connection has moved between TCP and the ring
    Moved,
    /// Events were dropped because this command did not read them in time
    Lost,
    /// The broker has ended
    BrokerGone,
    /// A broker runs again
    BrokerBack,
}

impl EventName {
    fn of(kind: EventKind) -> Self {
        match kind {
            EventKind::Joined => Self::Joined,
            EventKind::Left => Self::Left,
            EventKind::JoinRefused => Self::JoinRefused,
            EventKind::Connected => Self::Connected,
            EventKind::ConnectRefused => Self::ConnectRefused,
            EventKind::RingMade => Self::RingMade,
            EventKind::RingRefused => Self::RingRefused,
            EventKind::Ended => Self::Ended,
            EventKind::MachineAttached => Self::MachineAttached,
            EventKind::MachineDetached => Self::MachineDetached,
            EventKind::MachineUp => Self::MachineUp,
            EventKind::MachineDown => Self::MachineDown,
            EventKind::PolicyChanged => Self::PolicyChanged,
            EventKind::MovesChanged => Self::MovesChanged,
        }
    }

    fn word(self) -> String {
        use clap::ValueEnum as _;
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }
}

/// An event. Fields that do not apply are absent.
#[derive(Debug, Serialize)]
pub(super) struct EventLine {
    /// When, in UTC.
    at: String,
    event: EventName,
    #[serde(skip_serializing_if = "Option::is_none")]
    uid: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    machine: Option<MachineId>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pid: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    from: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    to: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    service: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    channel: Option<u64>,
    /// Why it was refused.
    #[serde(skip_serializing_if = "Option::is_none")]
    refusal: Option<&'static str>,
    /// The clause that decided, or the reason of a refusal that is not the policy's.
    #[serde(skip_serializing_if = "Option::is_none")]
    rule: Option<String>,
    /// The line of the clause in the policy file.
    #[serde(skip_serializing_if = "Option::is_none")]
    line: Option<u32>,
    /// The direction that has moved: `sends` or `receives`.
    #[serde(skip_serializing_if = "Option::is_none")]
    direction: Option<&'static str>,
    /// Where to: `ring` or `tcp`.
    #[serde(skip_serializing_if = "Option::is_none")]
    way: Option<&'static str>,
    /// Why it is not on the ring, as in `top` and `why`.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<Cause>,
    /// How many were lost.
    #[serde(skip_serializing_if = "Option::is_none")]
    lost: Option<u64>,
}

impl EventLine {
    pub(super) fn of(event: &EventRow) -> Self {
        let known = |text: &String| (!text.is_empty()).then(|| text.clone());
        let is_own = event.kind != EventKind::PolicyChanged;
        Self {
            at: time(UNIX_EPOCH + Duration::from_secs(event.at_s)),
            event: EventName::of(event.kind),
            uid: event.user.uid().filter(|_| is_own),
            machine: event.user.origin().machine(),
            pid: Some(event.pid).filter(|pid| *pid != 0),
            from: known(&event.from),
            to: known(&event.to),
            service: known(&event.service),
            channel: Some(event.channel).filter(|channel| *channel != 0),
            refusal: Refusal::from_number(event.code).map(Refusal::words),
            rule: known(&event.grounds),
            line: Some(event.line).filter(|line| *line != 0),
            ..Self::seen(EventName::of(event.kind))
        }
    }

    pub(super) fn moved(one: &ObservedMove) -> Self {
        let moved = &one.moved;
        Self {
            at: moved.at.clone(),
            pid: Some(one.pid),
            from: Some(format!("{} {}", one.program, one.local)),
            to: Some(one.remote.to_string()),
            channel: Some(one.channel).filter(|channel| *channel != 0),
            direction: Some(moved.direction),
            way: Some(moved.way),
            reason: moved.reason,
            ..Self::seen(EventName::Moved)
        }
    }

    pub(super) fn lost(lost: u64) -> Self {
        Self { lost: Some(lost), ..Self::seen(EventName::Lost) }
    }

    /// An event that this command sees by itself.
    pub(super) fn seen(event: EventName) -> Self {
        Self {
            at: time(SystemTime::now()),
            event,
            uid: None,
            machine: None,
            pid: None,
            from: None,
            to: None,
            service: None,
            channel: None,
            refusal: None,
            rule: None,
            line: None,
            direction: None,
            way: None,
            reason: None,
            lost: None,
        }
    }

    /// Whether it is one of the wanted events, and contains the text. The loss of events, and that of the broker, are always wanted.
    pub(super) fn is_wanted(&self, events: &[EventName], filter: Option<&str>) -> bool {
        if matches!(self.event, EventName::Lost | EventName::BrokerGone | EventName::BrokerBack) {
            return true;
        }
        let filter = filter.unwrap_or_default().to_lowercase();
        let has = |text: &str| text.to_lowercase().contains(&filter);
        let texts = [self.from.as_deref(), self.to.as_deref(), self.service.as_deref(), self.rule.as_deref()];
        let codes = [self.refusal, self.direction, self.way, self.reason.map(Cause::code)];
        (events.is_empty() || events.contains(&self.event))
            && (filter.is_empty()
                || texts.into_iter().chain(codes).flatten().any(has)
                || self.pid.is_some_and(|pid| pid.to_string() == filter))
    }

    pub(super) fn to_text(&self) -> String {
        let mut text = format!("{}  {:<16}", self.at, self.event.word());
        let mut add = |part: std::fmt::Arguments<'_>| {
            let _ = write!(text, " {part}");
        };
        if let Some(from) = &self.from {
            add(format_args!("{from}"));
        }
        if let Some(to) = &self.to {
            match &self.service {
                Some(service) => add(format_args!("-> {to}:{service}")),
                None => add(format_args!("-> {to}")),
            }
        }
        let who = [
            self.uid.map(|uid| format!("user {uid}")),
            self.machine.map(|machine| format!("machine {machine}")),
            self.pid.map(|pid| format!("process {pid}")),
            self.channel.map(|channel| format!("channel {channel}")),
        ];
        let who: Vec<String> = who.into_iter().flatten().collect();
        if !who.is_empty() {
            add(format_args!("({})", who.join(", ")));
        }
        if let (Some(direction), Some(way)) = (self.direction, self.way) {
            add(format_args!("{direction} by {}", if way == "ring" { "the ring" } else { "TCP" }));
        }
        if let Some(reason) = self.reason {
            add(format_args!("({}: {})", reason.code(), reason.words()));
        }
        if let Some(refusal) = self.refusal {
            add(format_args!("{refusal}:"));
        }
        if let Some(rule) = &self.rule {
            add(format_args!("{rule}"));
        }
        if let Some(line) = self.line {
            add(format_args!("(line {line})"));
        }
        if let Some(lost) = self.lost {
            add(format_args!("{lost} events, because they were not read in time"));
        }
        text
    }
}

fn time(at: SystemTime) -> String {
    humantime::format_rfc3339_seconds(at).to_string()
}

#[cfg(test)]
mod tests {
    use partywall::User;

    use super::*;

    fn denied() -> EventRow {
        EventRow {
            number: 1,
            at_s: 0,
            kind: EventKind::ConnectRefused,
            user: User::Host(33),
            pid: 42,
            channel: 0,
            code: Refusal::Denied.number(),
            line: 0,
            from: "web".into(),
            to: "db".into(),
            service: "out".into(),
            grounds: "default: no [[connect]] rule allows it".into(),
        }
    }

    #[test]
    fn refusal_names_both_sides_user_and_clause() {
        let line = EventLine::of(&denied());
        assert_eq!(
            line.to_text(),
            "1970-01-01T00:00:00Z  connect-refused  web -> db:out (user 33, process 42) denied by policy: default: no [[connect]] rule allows it"
        );
        let json = serde_json::to_value(&line).unwrap();
        assert_eq!((&json["event"], &json["uid"], &json["to"]), (&"connect-refused".into(), &33.into(), &"db".into()));
        assert!(json.get("channel").is_none() && json.get("line").is_none(), "{json}");
    }

    #[test]
    fn words_are_those_of_the_protocol() {
        for kind in EventKind::ALL {
            assert_eq!(EventName::of(*kind).word(), kind.words());
        }
    }

    #[test]
    fn filters_take_by_kind_text_and_process_and_never_hide_losses() {
        let line = EventLine::of(&denied());
        assert!(line.is_wanted(&[], None) && line.is_wanted(&[EventName::ConnectRefused], Some("DB")));
        assert!(line.is_wanted(&[], Some("42")) && !line.is_wanted(&[], Some("4")));
        assert!(!line.is_wanted(&[EventName::Joined], None) && !line.is_wanted(&[], Some("postgres")));
        let lost = EventLine::lost(7);
        assert!(lost.is_wanted(&[EventName::Joined], Some("x")) && lost.to_text().contains("7 events"));
    }
}
