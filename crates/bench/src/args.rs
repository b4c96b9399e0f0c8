//! The command line.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::mechanism::Mechanism;

/// Compares Partywall with pipes, sockets, TCP, a bare ring and iceoryx2, all in one run on this machine.
#[derive(Debug, Parser)]
#[command(name = "partywall-bench", version, max_term_width = 100)]
pub(crate) struct Cli {
    /// The measurement.
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// The measurements.
#[derive(Debug, Clone, PartialEq, Subcommand)]
pub(crate) enum Command {
    /// Time and rate of whole transfers, from 16 KB to 4 GB, by mechanism.
    Ipc(Common),
    /// Throughput by message size, from 64 B to 64 MB.
    Stream(Common),
    /// Round trips of 1 B to 64 KB: blocking, spinning, adaptive, lightly loaded, and by reference.
    Latency(Common),
    /// Calls, compared with raw sockets, Ice, XML-RPC, gRPC, Cap'n Proto and iceoryx2: null calls, sequences of 100 to 10,000,000 elements.
    ///
    /// The programs of other libraries are compiled first, by the packages that are installed; missing ones are named.
    /// With NumPy and the module `partywall` (`make wheel`) it measures calls from Python as well.
    Rpc(Common),
    /// The set-up of a heap for calls, 1 KB to 100 MB, compared with memory of the kernel.
    Heap(Common),
    /// File systems: mail, web and file servers and large reads, by `partywall fs`, its TCP transport, sshfs and bindfs.
    Fs {
        /// The options of all measurements.
        #[command(flatten)]
        common: Common,
        /// Divide filebench's numbers of files by this; sizes and threads stay.
        #[arg(long, value_name = "N", default_value_t = 10, value_parser = partywall_terminal::whole::<u32>(1..=1000))]
        divide: u32,
        /// Folder of the exported files during the measurement [default: /dev/shm].
        #[arg(long, value_name = "FOLDER")]
        folder: Option<PathBuf>,
    },
    /// Processor time of both sides at fixed rates, and of an idle connection.
    Cpu(Common),
    /// Many open channels: their cost in throughput, memory, descriptors and idle time; connections per second.
    Channels(Common),
    /// The broker's answers to an honest client, alone, on busy processors, and while 40 hostile sessions flood it.
    ///
    /// As root the hostile sessions are another user's, and the target for p99 is 10 ms. About 4 minutes; with --quick --runs 1 fifteen seconds.
    Broker(Common),
    /// The best mechanism for each message size on this machine: a table and one sentence.
    Advise(Common),
    /// Real programs, unmodified, without and with the library: redis, nginx, PostgreSQL, iperf3 and more.
    Apps(Common),
    /// Remote and local peers mixed; the cost of the library where it cannot help; message sizes; shared and separate processors.
    Residency {
        /// The options of all measurements.
        #[command(flatten)]
        common: Common,
        /// Measure between two virtual machines, with the host as the remote peer. Boots both (QEMU). With --quick --runs 1 about 7 minutes; with --runs 1 one to two hours.
        #[arg(long)]
        machines: bool,
        /// Draw the time lines and pauses of live migrations from this file of `partywall-lab migrate --json`, and measure nothing.
        #[arg(long, value_name = "FILE", conflicts_with_all = ["machines", "quick", "runs", "only", "cpus", "same_cpu"])]
        migration: Option<PathBuf>,
    },
    /// Two virtual machines: streams, calls, file systems and unmodified programs, compared with TCP over virtio-net; the time to plug memory in.
    ///
    /// Calls are compared with raw sockets and Ice; file systems with NFS and sshfs, and with 9p and virtiofs in a third machine.
    /// Boots the machines (QEMU; as root TCP goes over tap and bridge), and fetches Debian's full kernel for 9p once. The parts `cards` and
    /// `disks` are about other machines, which have nothing of Partywall inside: two with cards of `partywall net` beside cards of tap and
    /// bridge, and one with disks of `partywall blk` and `qemu-storage-daemon` beside its QEMU's own, under fio. With --quick --runs 1 about
    /// 12 minutes; --part measures parts alone.
    Vm {
        /// The options of all measurements.
        #[command(flatten)]
        common: Common,
        /// Measure only these parts.
        #[arg(long, value_name = "PART,...", value_delimiter = ',', num_args = 1)]
        part: Vec<VmPart>,
    },
    /// Disks for virtual machines, without a machine: `partywall blk` compared with `qemu-storage-daemon`.
    ///
    /// Reads and writes of 4 KiB and 1 MiB, alone and with several in flight; the driver is this program's own. About 5 minutes; with
    /// --quick --runs 1 fifteen seconds. `qemu-storage-daemon` is in Debian's package `qemu-system-common`.
    Blk {
        /// The options of all measurements.
        #[command(flatten)]
        common: Common,
        /// Bypass the host's page cache on both sides (O_DIRECT).
        #[arg(long)]
        direct: bool,
        /// Queues of the disk, each with as many requests in flight.
        #[arg(long, value_name = "N", default_value_t = 1, value_parser = partywall_terminal::whole::<u16>(1..=16))]
        queues: u16,
        /// Folder of the disk's file during the measurement [default: the folder for temporary files].
        #[arg(long, value_name = "FOLDER")]
        folder: Option<PathBuf>,
    },
    /// The switch for virtual machines, without a machine: `partywall net` compared with DPDK's `testpmd`.
    ///
    /// Frames of 64 to 65,000 bytes from one port to another, round trips, and an idle switch; the drivers are this program's own.
    /// `testpmd` is in Debian's package `dpdk-dev`. About 3 minutes; with --quick --runs 1 twenty seconds.
    Net(Common),
    /// The gateway between hosts: one stream and round trips through two gateways with TLS, compared with iperf3 and plain TCP over loopback.
    ///
    /// Two hosts on this machine, each with a broker and a gateway, and one etcd (Debian's packages `etcd-server` and `iperf3`).
    /// About 2 minutes; with --quick --runs 1 ten seconds.
    Gateway(Common),
    /// Every ratio that Partywall promises, with its target and whether it is met.
    Ratios(Common),
    /// All of the above except `heap`, `fs`, `vm`, `blk`, `net` and `gateway`.
    All(Common),
    /// Two result files side by side, with a verdict that takes the range of the runs into account.
    Compare {
        /// The result file to compare with.
        before: PathBuf,
        /// The result file to judge.
        after: PathBuf,
    },
    /// A plain network program; started by the others.
    #[command(hide = true)]
    Flow {
        /// Its task.
        words: Vec<String>,
    },
    /// A program that calls or serves calls; started by `rpc` and `heap`.
    #[command(hide = true)]
    Peer {
        /// Its role and its name.
        words: Vec<String>,
    },
    /// A measuring process; started by the others.
    #[command(hide = true)]
    Role,
    /// A measuring process in a virtual machine; started by `vm`.
    #[command(hide = true)]
    Inside {
        /// Its task.
        words: Vec<String>,
    },
}

/// A part of what is measured between virtual machines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum VmPart {
    /// Streams, round trips and hand-overs.
    Streams,
    /// Calls.
    Calls,
    /// File systems.
    Files,
    /// Unmodified programs, by TCP.
    Programs,
    /// Unmodified programs, by UDP.
    Datagrams,
    /// Memory that is plugged in.
    Memory,
    /// Unmodified programs, by cards of `partywall net` and by tap and bridge.
    Cards,
    /// Disks of `partywall blk`, `qemu-storage-daemon` and QEMU.
    Disks,
}

/// How to measure.
#[derive(Debug, Clone, PartialEq, Args)]
pub(crate) struct Common {
    /// Fewer sizes and shorter runs.
    #[arg(long)]
    pub(crate) quick: bool,
    /// Runs of each measurement; tables give the median and the range.
    #[arg(long, default_value_t = 5, value_parser = partywall_terminal::whole::<u32>(1..=1000))]
    pub(crate) runs: u32,
    /// Write everything measured, run by run, to this file.
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    /// Write all tables and pictures into this HTML file, which needs no other.
    #[arg(long, value_name = "FILE")]
    pub(crate) html: Option<PathBuf>,
    /// Draw the results, as SVG and PNG, into this folder.
    #[arg(long, value_name = "DIR")]
    pub(crate) plots: Option<PathBuf>,
    /// The processors of the sending and of the receiving process [default: the first two].
    #[arg(long, value_name = "A,B", value_delimiter = ',', num_args = 1)]
    pub(crate) cpus: Option<Vec<usize>>,
    /// Both processes on one processor.
    #[arg(long)]
    pub(crate) same_cpu: bool,
    /// Measure only these mechanisms.
    #[arg(long, value_name = "NAME,...", value_delimiter = ',', num_args = 1)]
    pub(crate) only: Option<Vec<Mechanism>>,
    /// The smallest of everything, once: shows that it works and measures nothing.
    #[arg(long, hide = true)]
    pub(crate) smoke: bool,
}

/// How thorough a measurement is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Scale {
    /// Only shows that it works.
    Smoke,
    /// A few minutes.
    Quick,
    /// As for publication.
    Full,
}

impl Common {
    /// How thoroughly the options ask to measure.
    pub(crate) fn scale(&self) -> Scale {
        match (self.smoke, self.quick) {
            (true, _) => Scale::Smoke,
            (false, true) => Scale::Quick,
            (false, false) => Scale::Full,
        }
    }

    /// How many times each measurement runs.
    pub(crate) fn runs(&self) -> u32 {
        if self.smoke { 1 } else { self.runs }
    }

    /// Whether a mechanism was asked for.
    pub(crate) fn wants(&self, mechanism: Mechanism) -> bool {
        self.only.as_ref().is_none_or(|only| only.contains(&mechanism))
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn parse(line: &str) -> Result<Command, clap::Error> {
        Cli::try_parse_from(line.split(' ')).map(|cli| cli.command)
    }

    #[test]
    fn is_well_formed() {
        Cli::command().debug_assert();
    }

    #[test]
    fn understands_the_options() {
        let Command::Stream(common) =
            parse("b stream --quick --runs 7 --cpus 0,1 --only pipe,tcp-veth --json x.json").unwrap()
        else {
            panic!("stream became something else");
        };
        assert_eq!((common.scale(), common.runs()), (Scale::Quick, 7));
        assert_eq!(common.cpus, Some(vec![0, 1]));
        assert!(common.wants(Mechanism::TcpVeth) && !common.wants(Mechanism::Unix));
        let Command::Ipc(common) = parse("b ipc").unwrap() else { panic!("ipc became something else") };
        assert_eq!((common.scale(), common.runs()), (Scale::Full, 5));
        assert!(common.wants(Mechanism::Partywall));
        assert!(matches!(parse("b compare a.json b.json").unwrap(), Command::Compare { .. }));
        let Command::Vm { part, .. } = parse("b vm --part calls,files").unwrap() else {
            panic!("vm became something else")
        };
        assert_eq!(part, [VmPart::Calls, VmPart::Files]);
        assert!(parse("b residency --migration m.json --plots pictures --html page.html").is_ok());
        let Command::Blk { direct, queues, folder, .. } = parse("b blk --direct --queues 4").unwrap() else {
            panic!("blk became something else")
        };
        assert_eq!((direct, queues, folder), (true, 4, None));
    }

    #[test]
    fn refuses_nonsense() {
        for line in [
            "b",
            "b stream --runs 0",
            "b stream --only carrier-pigeon",
            "b stream --cpus a,b",
            "b compare a.json",
            "b ipc 1",
            "b blk --queues 17",
            "b residency --migration m.json --machines",
            "b residency --migration m.json --quick",
            "b residency --migration m.json --runs 3",
            "b residency --migration m.json --only tcp",
            "b residency --migration m.json --cpus 0,1",
            "b residency --migration m.json --same-cpu",
        ] {
            assert!(parse(line).is_err(), "{line} was accepted");
        }
    }
}
