//! The ways to communicate that the bench compares, and how each is tuned.

use std::fmt;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// A way to move bytes between two processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Mechanism {
    /// A kernel pipe each way.
    Pipe,
    /// A UNIX stream socket pair.
    Unix,
    /// TCP over the loopback interface.
    Tcp,
    /// TCP between two network namespaces joined by a veth pair.
    TcpVeth,
    /// TCP between two virtual machines: virtio-net, tap devices, a bridge.
    TcpVirtio,
    /// AF_VSOCK between virtual machines.
    Vsock,
    /// Bytes over a serial port of each of two virtual machines, passed on by a process of the host.
    SerialRelay,
    /// An unmodified TCP or UDP program, loaded with Partywall's library.
    Transparent,
    /// A minimal spinning ring without wake-ups, counters or checks: what the memory itself allows.
    PlainRing,
    /// One cache line that both sides write in turn.
    OneLine,
    /// Each way one line of data and one of cursor: the least that carries a payload.
    TwoLine,
    /// A pair of eventfds: the least that wakes a sleeper.
    Eventfd,
    /// Partywall's stream, `write` and `read`, with the ring that adapts.
    Partywall,
    /// Partywall's stream with a ring of given size.
    PartywallFixed,
    /// Partywall in place: `reserve`/`commit` and `peek`/`release`.
    PartywallZeroCopy,
    /// Partywall's message sockets.
    PartywallMessage,
    /// Partywall's calls.
    PartywallCall,
    /// Partywall's stream to another host, through the gateways of both.
    PartywallGateway,
    /// iperf3 over the loopback interface: one stream of TCP.
    Iperf3,
    /// A window between two virtual machines: cached memory that one writes and the other reads.
    PmemWindow,
    /// QEMU's shared memory device, for machines that take no windows.
    Ivshmem,
    /// iceoryx2 publish/subscribe, copied in and out.
    Iceoryx2,
    /// iceoryx2 publish/subscribe, produced and consumed in place.
    Iceoryx2ZeroCopy,
    /// iceoryx2 request/response.
    Iceoryx2Call,
    /// ZeroC Ice, C++, over TCP.
    Ice,
    /// XML-RPC, xmlrpc-c, over HTTP.
    XmlRpc,
    /// gRPC, C++, over a UNIX socket.
    Grpc,
    /// Cap'n Proto's RPC, C++, over a UNIX socket.
    Capnp,
    /// Partywall's calls from Python.
    PartywallPython,
    /// Shared memory of the kernel, without a library.
    Memfd,
    /// The exported file system itself, without FUSE.
    Local,
    /// bindfs: the same directory through FUSE, by a program of this host.
    Bindfs,
    /// Partywall's file system, by shared memory.
    PartywallFs,
    /// Partywall's file system, by TCP.
    PartywallFsTcp,
    /// sshfs, without encryption.
    Sshfs,
    /// The kernel's NFS 4.2 between two virtual machines.
    Nfs,
    /// 9p of a virtual machine with a directory of the host, by QEMU.
    #[serde(rename = "9p")]
    #[value(name = "9p")]
    NineP,
    /// virtiofs of a virtual machine with a directory of the host.
    Virtiofs,
    /// The switch for virtual machines' network cards.
    PartywallNet,
    /// DPDK's testpmd between two vhost-user ports.
    Testpmd,
    /// A disk of a virtual machine by Partywall's back end.
    PartywallBlk,
    /// A disk of a virtual machine by QEMU's own back end outside of QEMU.
    QemuStorageDaemon,
    /// A disk of a virtual machine by its QEMU.
    VirtioBlk,
}

impl Mechanism {
    /// The name in tables, options and results.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Pipe => "pipe",
            Self::Unix => "unix",
            Self::Tcp => "tcp",
            Self::TcpVeth => "tcp-veth",
            Self::TcpVirtio => "tcp-virtio",
            Self::Vsock => "vsock",
            Self::SerialRelay => "serial-relay",
            Self::Transparent => "transparent",
            Self::PlainRing => "plain-ring",
            Self::OneLine => "one-line",
            Self::TwoLine => "two-line",
            Self::Eventfd => "eventfd",
            Self::Partywall => "partywall",
            Self::PartywallFixed => "partywall-fixed",
            Self::PartywallZeroCopy => "partywall-zero-copy",
            Self::PartywallMessage => "partywall-message",
            Self::PartywallCall => "partywall-call",
            Self::PartywallGateway => "partywall-gateway",
            Self::Iperf3 => "iperf3",
            Self::PmemWindow => "pmem-window",
            Self::Ivshmem => "ivshmem",
            Self::Iceoryx2 => "iceoryx2",
            Self::Iceoryx2ZeroCopy => "iceoryx2-zero-copy",
            Self::Iceoryx2Call => "iceoryx2-call",
            Self::Ice => "ice",
            Self::XmlRpc => "xml-rpc",
            Self::Grpc => "grpc",
            Self::Capnp => "capnp",
            Self::PartywallPython => "partywall-python",
            Self::Memfd => "memfd",
            Self::Local => "local",
            Self::Bindfs => "bindfs",
            Self::PartywallFs => "partywall-fs",
            Self::PartywallFsTcp => "partywall-fs-tcp",
            Self::Sshfs => "sshfs",
            Self::Nfs => "nfs",
            Self::NineP => "9p",
            Self::Virtiofs => "virtiofs",
            Self::PartywallNet => "partywall-net",
            Self::Testpmd => "testpmd",
            Self::PartywallBlk => "partywall-blk",
            Self::QemuStorageDaemon => "qemu-storage-daemon",
            Self::VirtioBlk => "virtio-blk",
        }
    }

    /// Whether it needs the broker.
    pub(crate) fn is_partywall(self) -> bool {
        matches!(
            self,
            Self::Partywall
                | Self::PartywallFixed
                | Self::PartywallZeroCopy
                | Self::PartywallMessage
                | Self::PartywallCall
                | Self::PartywallPython
                | Self::PartywallFs
        )
    }

    /// Whether it can only wait by spinning, which on one shared processor measures the scheduler.
    pub(crate) fn only_spins(self) -> bool {
        matches!(
            self,
            Self::PlainRing
                | Self::OneLine
                | Self::TwoLine
                | Self::Iceoryx2
                | Self::Iceoryx2ZeroCopy
                | Self::Iceoryx2Call
        )
    }
}

impl fmt::Display for Mechanism {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// How a side waits for the other, where the mechanism gives the choice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum WaitMode {
    /// As the mechanism does by itself.
    Adaptive,
    /// Never spins.
    Blocking,
    /// Spins for longer than any measurement pauses.
    Spinning,
}

impl WaitMode {
    /// The name in tables and results.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Adaptive => "adaptive",
            Self::Blocking => "blocking",
            Self::Spinning => "spinning",
        }
    }
}

/// How a mechanism is set up for one measurement.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Tuning {
    /// Bytes of ring each way, for mechanisms whose ring is given.
    pub(crate) ring: u64,
    /// How to wait.
    pub(crate) waiting: WaitMode,
    /// The largest message that will be sent.
    pub(crate) message: u64,
    /// Small writes leave at once (`TCP_NODELAY`): round trips want it, streams are quicker without.
    pub(crate) prompt: bool,
}

impl Tuning {
    /// For messages of up to `message` bytes, waiting adaptively, with the ring that suits the mechanism: the plain one shows what
    /// the memory allows and has the size at which the adapting one ends.
    pub(crate) fn of(mechanism: Mechanism, message: u64) -> Self {
        let ring = match mechanism {
            Mechanism::PlainRing => 8 << 20,
            Mechanism::PartywallZeroCopy => 4 << 20,
            _ => 1 << 20,
        };
        Self { ring, waiting: WaitMode::Adaptive, message, prompt: false }
    }

    /// With a ring of given size.
    pub(crate) fn ring(self, ring: u64) -> Self {
        Self { ring, ..self }
    }

    /// With a way to wait.
    pub(crate) fn waiting(self, waiting: WaitMode) -> Self {
        Self { waiting, ..self }
    }

    /// For round trips.
    pub(crate) fn prompt(self) -> Self {
        Self { prompt: true, ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mechanism_has_same_name_in_options_and_json() {
        for mechanism in Mechanism::value_variants() {
            let option = mechanism.to_possible_value().unwrap();
            let json = serde_json::to_string(mechanism).unwrap();
            assert_eq!(option.get_name(), mechanism.name());
            assert_eq!(json, format!("\"{}\"", mechanism.name()));
        }
    }
}
