//! The quantities that are measured, with their units.

use serde::{Deserialize, Serialize};

/// A measured quantity. The unit is part of the name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Metric {
    /// Payload moved per second.
    BytesPerSecond,
    /// Time that one transfer took.
    Seconds,
    /// The part of `Seconds` that the host took.
    HostSeconds,
    /// The part of `Seconds` that the virtual machines took.
    GuestSeconds,
    /// Time until all memory of the transfer was there.
    MemorySeconds,
    /// Time until the other side has read it as well, from the moment that it was told.
    PeerSeconds,
    /// Median round trip.
    P50Ns,
    /// 99th percentile.
    P99Ns,
    /// 99.9th percentile.
    P999Ns,
    /// The longest round trip.
    MaxNs,
    /// The average of all round trips.
    MeanNs,
    /// Processor time of sender and receiver together, of one processor.
    BothCpuPercent,
    /// Processor time of the sender, of one processor.
    SenderCpuPercent,
    /// Processor time of the receiver, of one processor.
    ReceiverCpuPercent,
    /// The part of the sender's processor time in the kernel.
    SenderKernelPercent,
    /// The part of the receiver's processor time in the kernel.
    ReceiverKernelPercent,
    /// Time that all processors were busy, for any process, in percent of one processor.
    MachineCpuPercent,
    /// Processor time of the broker, of one processor.
    BrokerCpuPercent,
    /// Processor time of both sides and the broker, of one processor.
    AllCpuPercent,
    /// The ring that was in use at the end.
    RingBytes,
    /// Payload moved per second while nothing else was open.
    AloneBytesPerSecond,
    /// The rate beside others, as a part of the rates alone just before and after.
    BesideToAlone,
    /// Payload moved per second to remote peers, beside local ones.
    RemoteBytesPerSecond,
    /// Things done per second.
    PerSecond,
    /// Packets that hostile sessions sent per second at the same time.
    HostilePerSecond,
    /// Channels open.
    Channels,
    /// Pairs of processes that had them.
    Pairs,
    /// Datagrams that did not arrive.
    LostPercent,
    /// Context switches of the whole machine.
    SwitchesPerSecond,
    /// Processor time for each thing done: of the whole machine, or of a virtual machine with the back end of its disk.
    CpuNsPerOperation,
    /// The part of it outside of the virtual processors.
    OutsideCpuNsPerOperation,
    /// Processor time of the process in the middle, of one processor.
    MiddleCpuPercent,
    /// Seconds of processor time for a gigabyte: of the process in the middle, of the host for two virtual machines and their network, or of the
    /// whole machine for a stream through gateways.
    CpuSecondsPerGigabyte,
    /// The part of it outside of the virtual processors.
    OutsideCpuSecondsPerGigabyte,
    /// Seconds of processor time of the process in the middle for a million frames.
    CpuSecondsPerMillion,
    /// Nanoseconds of processor time of the process in the middle during a second without work.
    IdleNs,
    /// Time that the server was ready to run and did not, of one processor.
    WaitPercent,
    /// Times per second that the server gave its processor up, to wait for something.
    BlocksPerSecond,
    /// Descriptors of one side, per channel.
    FdsPerChannel,
    /// Mappings of one side, per channel.
    MappingsPerChannel,
    /// Memory mapped by both sides, shared memory counted once, per channel.
    BytesPerChannel,
    /// Memory that the whole machine has less of, the kernel's own included, per channel.
    MachineBytesPerChannel,
    /// Descriptors of the broker, per channel.
    BrokerFdsPerChannel,
}

/// The direction in which a figure improves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Better {
    /// More is better.
    Higher,
    /// Less is better.
    Lower,
    /// It describes, and is not judged.
    Neither,
}

impl Metric {
    /// The name in tables.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::BytesPerSecond => "rate",
            Self::Seconds => "time",
            Self::HostSeconds => "of the host's",
            Self::GuestSeconds => "of the guests'",
            Self::MemorySeconds => "all allocated",
            Self::PeerSeconds => "read by the peer",
            Self::P50Ns => "p50",
            Self::P99Ns => "p99",
            Self::P999Ns => "p99.9",
            Self::MaxNs => "max",
            Self::MeanNs => "mean",
            Self::BothCpuPercent => "both cpu",
            Self::SenderCpuPercent => "sender cpu",
            Self::ReceiverCpuPercent => "receiver cpu",
            Self::SenderKernelPercent => "sender in kernel",
            Self::ReceiverKernelPercent => "receiver in kernel",
            Self::MachineCpuPercent => "machine cpu",
            Self::BrokerCpuPercent => "broker cpu",
            Self::AllCpuPercent => "all cpu",
            Self::RingBytes => "ring",
            Self::AloneBytesPerSecond => "rate alone",
            Self::BesideToAlone => "beside : alone",
            Self::RemoteBytesPerSecond => "to remote",
            Self::PerSecond => "per second",
            Self::HostilePerSecond => "hostile packets",
            Self::Channels => "channels",
            Self::Pairs => "process pairs",
            Self::LostPercent => "lost",
            Self::SwitchesPerSecond => "switches",
            Self::CpuNsPerOperation => "cpu/operation",
            Self::OutsideCpuNsPerOperation => "outside/operation",
            Self::MiddleCpuPercent => "cpu",
            Self::CpuSecondsPerGigabyte => "cpu s/GB",
            Self::OutsideCpuSecondsPerGigabyte => "outside s/GB",
            Self::CpuSecondsPerMillion => "cpu s/M frames",
            Self::IdleNs => "cpu in a second",
            Self::WaitPercent => "server waits",
            Self::BlocksPerSecond => "server blocks",
            Self::FdsPerChannel => "fds/channel/side",
            Self::MappingsPerChannel => "mappings/channel/side",
            Self::BytesPerChannel => "mapped/channel",
            Self::MachineBytesPerChannel => "machine memory/channel",
            Self::BrokerFdsPerChannel => "broker fds/channel",
        }
    }

    /// The direction in which this figure improves.
    pub(crate) fn better(self) -> Better {
        match self {
            Self::BytesPerSecond
            | Self::AloneBytesPerSecond
            | Self::BesideToAlone
            | Self::RemoteBytesPerSecond
            | Self::PerSecond => Better::Higher,
            Self::RingBytes | Self::Channels | Self::Pairs | Self::HostilePerSecond => Better::Neither,
            _ => Better::Lower,
        }
    }

    /// A value with its unit, for people.
    pub(crate) fn show(self, value: f64) -> String {
        use crate::report::unit;
        match self {
            Self::BytesPerSecond | Self::AloneBytesPerSecond | Self::RemoteBytesPerSecond => unit::rate(value),
            Self::BesideToAlone => unit::digits(value),
            Self::Seconds | Self::HostSeconds | Self::GuestSeconds | Self::MemorySeconds | Self::PeerSeconds => {
                unit::nanoseconds(value * 1e9)
            }
            Self::P50Ns
            | Self::P99Ns
            | Self::P999Ns
            | Self::MaxNs
            | Self::MeanNs
            | Self::CpuNsPerOperation
            | Self::OutsideCpuNsPerOperation
            | Self::IdleNs => unit::nanoseconds(value),
            Self::BothCpuPercent
            | Self::SenderCpuPercent
            | Self::ReceiverCpuPercent
            | Self::SenderKernelPercent
            | Self::ReceiverKernelPercent
            | Self::MachineCpuPercent
            | Self::BrokerCpuPercent
            | Self::AllCpuPercent
            | Self::MiddleCpuPercent
            | Self::LostPercent
            | Self::WaitPercent => format!("{value:.1} %"),
            Self::RingBytes | Self::BytesPerChannel | Self::MachineBytesPerChannel => {
                unit::bytes(value.max(0.0) as u64)
            }
            Self::PerSecond | Self::HostilePerSecond | Self::SwitchesPerSecond | Self::BlocksPerSecond => {
                format!("{value:.0} /s")
            }
            Self::CpuSecondsPerGigabyte | Self::OutsideCpuSecondsPerGigabyte | Self::CpuSecondsPerMillion => {
                unit::digits(value)
            }
            Self::Channels | Self::Pairs => format!("{value:.0}"),
            Self::FdsPerChannel | Self::MappingsPerChannel | Self::BrokerFdsPerChannel => format!("{value:.1}"),
        }
    }
}
