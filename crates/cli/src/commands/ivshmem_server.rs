//! `partywall ivshmem-server`: shared memory and interrupts for virtual machines whose monitor knows nothing but ivshmem.

use std::path::PathBuf;

use partywall_vm::ivshmem::{IvshmemError, IvshmemOptions, IvshmemServer};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::args::exit_table;
use crate::exit::{Context, Failure};
use crate::{human, output};

const AFTER: &str = "\
Speaks the protocol of QEMU's ivshmem-server, in its place: machines that are started with `-device ivshmem-doorbell` on the \
same socket share a piece of memory, and can interrupt one another. It needs no broker.

Every machine can write all of the memory: the device has no owner. Give each pair that trusts one another a server of its own, or \
use windows (`partywall vm attach`), which QEMU keeps read-only for the peer and which are cached in the guest.

Only this user can connect. The server waits for no client and reads nothing from one: who talks, or does not read, is hung up on. \
Ids are never used twice, because QEMU corrupts its memory when one comes back; so after 65,536 connections it takes no more and \
has to be started anew. Machines that are connected outlive it.

Examples:
  partywall ivshmem-server /run/user/0/pair.sock --size 16M
  qemu-system-x86_64 ... -chardev socket,id=iv,path=/run/user/0/pair.sock -device ivshmem-doorbell,chardev=iv,vectors=1";

/// Serve shared memory to virtual machines with QEMU's ivshmem-doorbell device
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER, after_long_help = exit_table(AFTER))]
pub(crate) struct Args {
    /// Where to listen; a socket that a killed server has left there is replaced
    socket: PathBuf,
    /// Bytes of shared memory: a power of two, from 4K on
    #[arg(long, value_name = "SIZE", default_value = "4M", value_parser = human::parse_size)]
    size: u64,
    /// Interrupt vectors of each machine, 1 to 64; as many as `vectors=` of its device
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    vectors: u16,
    /// Machines that may be connected at a time, 1 to 1024; one more is hung up on
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=1024))]
    machines: u16,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let mut signals = signal_hook::iterator::Signals::new([SIGINT, SIGTERM, SIGHUP]).context("cannot catch signals")?;
    let options = IvshmemOptions { size: args.size, vectors: args.vectors, max_clients: args.machines.into() };
    let server = IvshmemServer::start(&args.socket, options).map_err(|e| match e {
        IvshmemError::Size(_) | IvshmemError::Vectors(_) => Failure::usage(e.to_string()),
        e => Failure::general(e.to_string()),
    })?;
    output::print(format_args!(
        "serving {} of shared memory; start each machine with\n  {}",
        human::bytes(args.size),
        server.arguments(args.vectors).join(" ")
    ))?;
    // Until somebody wants it to end.
    signals.forever().next();
    Ok(())
}
