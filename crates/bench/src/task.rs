//! The order of the bench to a measuring process, and the answer.

use std::{collections::BTreeMap, net::Ipv4Addr, path::PathBuf, time::Duration};

use serde::{Deserialize, Serialize};

use crate::{
    files::workload::FileWork,
    mechanism::{Mechanism, Tuning},
    peers::order::PeerOrder,
    report::metric::Metric,
};

/// The role of a process in a pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum MeasuringSide {
    /// Sends, or asks; times what happens.
    Active,
    /// Receives, or answers.
    Passive,
}

impl MeasuringSide {
    /// The name in errors.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Active => "sender",
            Self::Passive => "receiver",
        }
    }
}

/// The load that runs beside an honest client of the broker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Beside {
    /// No load.
    Nothing,
    /// Threads keep the processors busy and send nothing to the broker, as many threads as a flood has: what the scheduler adds.
    BusyThreads,
    /// This number of hostile sessions flood the broker.
    HostileSessions(u64),
}

/// The question of an honest client to the broker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum BrokerQuestion {
    /// The list of domains: one request, one answer.
    List,
    /// A connection, until the first byte from the accepting side: both sides ask the broker.
    Connect,
    /// A session, from connecting to the broker's socket to its end.
    Join,
}

impl BrokerQuestion {
    /// All of them, in the order of tables.
    pub(crate) const ALL: [Self; 3] = [Self::List, Self::Connect, Self::Join];

    /// The name in tables and results.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::List => "list",
            Self::Connect => "connect",
            Self::Join => "join",
        }
    }
}

/// The work to measure.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) enum MeasuringWork {
    /// One-way bulk transfers of `total` bytes each, in messages.
    Transfer {
        /// Bytes of one message.
        message: u64,
        /// Bytes of one transfer.
        total: u64,
        /// Transfers that count; the median of them is the run's figure.
        repeats: u32,
        /// Unmeasured transferring beforehand.
        warm_up: Duration,
    },
    /// One-way streaming for about a given time.
    Stream {
        /// Bytes of one message.
        message: u64,
        /// About how long the measured stretch lasts.
        measured: Duration,
        /// Unmeasured streaming beforehand.
        warm_up: Duration,
    },
    /// One-way streaming at a fixed rate, for the processor time that it takes.
    Paced {
        /// Bytes of one message.
        message: u64,
        /// Bytes per second; 0 keeps the connection open and idle.
        rate: u64,
        /// About how long the measured stretch lasts.
        measured: Duration,
    },
    /// There and back.
    RoundTrip {
        /// Bytes each way.
        message: u64,
        /// Round trips that do not count.
        warm_up: u64,
        /// Round trips that do.
        count: u64,
        /// Pause before each round trip.
        think: Duration,
    },
    /// There and back, by reference: the payload is named, not touched.
    HandOver {
        /// Bytes each way.
        message: u64,
        /// Hand-overs that do not count.
        warm_up: u64,
        /// Hand-overs that do.
        count: u64,
    },
    /// Streaming over one channel, by turns alone and beside many that are open.
    ManyChannels {
        /// Channels open at the most, of which one is used.
        channels: u64,
        /// How often beside others; alone once more.
        turns: u32,
        /// Bytes of one message.
        message: u64,
        /// About how long each measured stretch lasts.
        measured: Duration,
        /// Unmeasured streaming before each.
        warm_up: Duration,
    },
    /// Opens many small channels and looks at what they take, open and idle.
    OpenChannels {
        /// Channels to open, by all pairs of processes together.
        channels: u64,
        /// How many of them this pair opens.
        share: u64,
        /// How long to watch them idle.
        idle: Duration,
    },
    /// Connects, accepts and closes, over and over.
    ConnectClose {
        /// For how long.
        measured: Duration,
    },
    /// Asks the broker, over and over, while the passive side does something else.
    Ask {
        /// The question of the client.
        question: BrokerQuestion,
        /// The load that the passive side makes.
        beside: Beside,
        /// Whether the client goes before all other programs, if the bench may choose.
        urgent: bool,
        /// Answers that are measured at least.
        least: u64,
        /// For how long.
        measured: Duration,
    },
    /// An order to the separate programs of a library for calls.
    Peer(PeerOrder),
    /// A workload on a file system.
    Files(FileWork),
}

/// The whole order for one measuring process.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct MeasuringTask {
    /// The side that this process is.
    pub(crate) side: MeasuringSide,
    /// The process that asks; without it there is nothing to do.
    pub(crate) parent: u32,
    /// Whether this pair is the first of several pairs of processes, which the others follow.
    pub(crate) leads: bool,
    /// The processor to run on, if the scheduler does not choose.
    pub(crate) cpu: Option<usize>,
    /// By which mechanism.
    pub(crate) mechanism: Mechanism,
    /// Set up how.
    pub(crate) tuning: Tuning,
    /// Doing what.
    pub(crate) work: MeasuringWork,
    /// The broker's socket, for Partywall.
    pub(crate) broker: Option<PathBuf>,
    /// The broker's process, to look at what it takes.
    pub(crate) broker_pid: Option<u32>,
    /// A name that only this pair of processes has.
    pub(crate) session: String,
    /// A directory of the bench's own that is removed in the end.
    pub(crate) scratch: PathBuf,
    /// The machines of the two sides, if it is measured between virtual machines.
    pub(crate) inside: Option<Inside>,
}

/// The two virtual machines of a measurement.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Inside {
    /// The machine of the active side, with which the names of its domains begin.
    pub(crate) active: String,
    /// The machine of the passive side.
    pub(crate) passive: String,
    /// Where the passive side is reached by IP, if there is a network.
    pub(crate) passive_address: Option<Ipv4Addr>,
}

/// The figures of one run, by what they are.
pub(crate) type Figures = BTreeMap<Metric, f64>;

/// The answer of a measuring process: its figures, or the reason why there are none.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) enum TaskAnswer {
    /// Measured.
    Figures(Figures),
    /// This machine, or this build, cannot do it.
    Unavailable(String),
    /// It went wrong.
    Failed(String),
}
