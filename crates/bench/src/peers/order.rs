//! The orders to the programs of a peer, one line each, and the lines that they answer with. `peers/peer.hpp` reads and writes the same.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::{
    error::{BenchError, Result},
    report::metric::Metric,
    task::Figures,
};

/// What a call carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum OrderKind {
    /// Nothing.
    Null,
    /// A sequence of bytes.
    Byte,
    /// A sequence of `{int, int, double}`.
    Fixed,
    /// A sequence of `{char *, double}`, with texts of 15 characters.
    Variable,
    /// A NumPy array of this number of bytes.
    Array,
    /// Nothing; the next calls begin before the first one returns.
    Pipelined,
    /// Nothing, with this number of other clients connected.
    Crowd,
    /// The set-up of a heap of this number of bytes.
    Heap,
}

impl OrderKind {
    const ALL: [Self; 8] =
        [Self::Null, Self::Byte, Self::Fixed, Self::Variable, Self::Array, Self::Pipelined, Self::Crowd, Self::Heap];

    /// The name in orders, tables and results.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Null => "null",
            Self::Byte => "byte",
            Self::Fixed => "fixed",
            Self::Variable => "variable",
            Self::Array => "array",
            Self::Pipelined => "pipelined",
            Self::Crowd => "crowd",
            Self::Heap => "heap",
        }
    }
}

/// Where a sequence lies before the call, and afterwards. Only Partywall gives the choice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum PayloadPlace {
    /// In private memory on both sides, as all peers have it.
    Copied,
    /// The sender copies it from private memory into its heap, and the receiver reads it there.
    Built,
    /// It lies in the sender's heap already.
    InHeap,
    /// A heap whose memory is allocated and mapped.
    Allocated,
    /// A heap whose memory is allocated, mapped and locked as well.
    Locked,
    /// Memory that the kernel allocates when it is touched.
    Mapped,
    /// Memory that the kernel allocates and maps at once.
    Populated,
}

impl PayloadPlace {
    const ALL: [Self; 7] =
        [Self::Copied, Self::Built, Self::InHeap, Self::Allocated, Self::Locked, Self::Mapped, Self::Populated];

    /// The name in orders, tables and results.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Copied => "copied",
            Self::Built => "built",
            Self::InHeap => "in-heap",
            Self::Allocated => "allocated",
            Self::Locked => "locked",
            Self::Mapped => "mapped",
            Self::Populated => "populated",
        }
    }
}

/// One measurement by the programs of a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PeerOrder {
    pub(crate) kind: OrderKind,
    /// The client sends the sequence; otherwise it receives it.
    pub(crate) sends: bool,
    pub(crate) elements: u64,
    /// The most calls.
    pub(crate) most: u64,
    /// The longest time, if one call takes less.
    pub(crate) time: Duration,
    pub(crate) place: PayloadPlace,
}

impl fmt::Display for PeerOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, sends, elements, most, time, place } = self;
        let direction = if *sends { "send" } else { "receive" };
        write!(f, "{} {direction} {elements} {most} {} {}", kind.name(), time.as_millis(), place.name())
    }
}

impl FromStr for PeerOrder {
    type Err = String;

    fn from_str(line: &str) -> Result<Self, String> {
        let bad = || format!("\"{line}\" is not KIND DIRECTION ELEMENTS MOST MILLISECONDS PLACE");
        let words: Vec<&str> = line.split_whitespace().collect();
        let [kind, direction, elements, most, time, place] = words[..] else { return Err(bad()) };
        let number = |word: &str| word.parse::<u64>().map_err(|_| bad());
        Ok(Self {
            kind: OrderKind::ALL.into_iter().find(|one| one.name() == kind).ok_or_else(bad)?,
            sends: match direction {
                "send" => true,
                "receive" => false,
                _ => return Err(bad()),
            },
            elements: number(elements)?,
            most: number(most)?,
            time: Duration::from_millis(number(time)?),
            place: PayloadPlace::ALL.into_iter().find(|one| one.name() == place).ok_or_else(bad)?,
        })
    }
}

/// The answer of a program: figures, or the reason why there are none.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum OrderAnswer {
    Figures(Figures),
    /// The peer cannot do it.
    Unavailable(String),
    Failed(String),
}

impl OrderAnswer {
    /// The figures, or why there are none as an error.
    pub(crate) fn into_figures(self) -> Result<Figures> {
        match self {
            Self::Figures(figures) => Ok(figures),
            Self::Unavailable(why) => Err(BenchError::Unavailable(why)),
            Self::Failed(why) => Err(BenchError::Transport(why)),
        }
    }
}

/// The names of figures in answers.
const FIGURES: [(&str, Metric); 11] = [
    ("p50", Metric::P50Ns),
    ("p99", Metric::P99Ns),
    ("p999", Metric::P999Ns),
    ("max", Metric::MaxNs),
    ("mean", Metric::MeanNs),
    ("per_second", Metric::PerSecond),
    ("beside", Metric::BesideToAlone),
    ("cpu", Metric::BothCpuPercent),
    ("seconds", Metric::Seconds),
    ("touched", Metric::MemorySeconds),
    ("peer", Metric::PeerSeconds),
];

/// Reads the line of a program.
pub(crate) fn parse_answer(line: &str) -> OrderAnswer {
    if let Some(reason) = line.strip_prefix("failed ") {
        return match reason.strip_prefix("unavailable: ") {
            Some(why) => OrderAnswer::Unavailable(why.to_owned()),
            None => OrderAnswer::Failed(reason.to_owned()),
        };
    }
    let figure = |word: &str| {
        let (name, value) = word.split_once('=')?;
        let metric = FIGURES.iter().find(|(known, _)| *known == name)?.1;
        Some((metric, value.parse::<f64>().ok().filter(|value| value.is_finite())?))
    };
    match line.split_whitespace().map(figure).collect::<Option<Figures>>() {
        Some(figures) if !figures.is_empty() => OrderAnswer::Figures(figures),
        _ => OrderAnswer::Failed(format!("the program answered \"{}\"", line.trim())),
    }
}

/// Writes the line of a program.
pub(crate) fn answer_line(answer: &OrderAnswer) -> String {
    match answer {
        OrderAnswer::Figures(figures) => FIGURES
            .iter()
            .filter_map(|(name, metric)| figures.get(metric).map(|value| format!("{name}={value}")))
            .collect::<Vec<_>>()
            .join(" "),
        OrderAnswer::Unavailable(why) => format!("failed unavailable: {}", why.replace('\n', " ")),
        OrderAnswer::Failed(why) => format!("failed {}", why.replace('\n', " ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_survives_its_line() {
        for kind in OrderKind::ALL {
            for place in PayloadPlace::ALL {
                let time = Duration::from_millis(150);
                let order =
                    PeerOrder { kind, sends: kind == OrderKind::Byte, elements: 10_000_000, most: 3, time, place };
                assert_eq!(order.to_string().parse(), Ok(order));
            }
        }
    }

    #[test]
    fn malformed_order_is_refused() {
        for line in
            ["", "null", "null send 1 2 3", "null give 1 2 3 copied", "null send -1 2 3 copied", "nul send 1 2 3 built"]
        {
            assert!(line.parse::<PeerOrder>().is_err(), "{line}");
        }
    }

    #[test]
    fn answer_survives_its_line() {
        let answers = [
            OrderAnswer::Figures(Figures::from([(Metric::P50Ns, 250.0), (Metric::BesideToAlone, 0.95)])),
            OrderAnswer::Unavailable("too large".into()),
            OrderAnswer::Failed("no server".into()),
        ];
        for answer in answers {
            assert_eq!(parse_answer(&answer_line(&answer)), answer);
        }
    }

    #[test]
    fn line_without_known_figures_is_a_failure() {
        for line in ["", "p50", "p50=x", "p50=inf", "p51=1", "p50=1 other", "Segmentation fault"] {
            assert!(matches!(parse_answer(line), OrderAnswer::Failed(_)), "{line}");
        }
    }
}
