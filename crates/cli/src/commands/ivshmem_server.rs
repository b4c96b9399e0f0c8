//! `partywall ivshmem-server`: shared memory and interrupts for virtual machines that use only ivshmem.

use std::path::PathBuf;

use partywall_vm::ivshmem::{IvshmemError, IvshmemOptions, IvshmemServer};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::args::exit_table;
use crate::exit::{CommandFailure, Context};
use crate::{human, output};

const AFTER: &str = "\
Replaces QEMU's ivshmem-server and uses the same protocol: machines started with `-device ivshmem-doorbell` on the \
same socket share a piece of memory, and can interrupt one another. It needs no broker.

Every machine can write all of the memory: the device has no owner. Run a separate server for each pair that trusts one another, or \
use windows (`partywall vm attach`), which QEMU keeps read-only for the peer and which are cached in the guest.

Only this user can connect. The server never waits for a client, and disconnects clients that send data or do not read. \
It never reuses an id, because that makes QEMU corrupt its memory. So after 65,536 connections it accepts no more and must be \
restarted. Connected machines keep working when it ends.

Examples:
  partywall ivshmem-server /run/user/0/pair.sock --size 16M
  qemu-system-x86_64 ... -chardev socket,id=iv,path=/run/user/0/pair.sock -device ivshmem-doorbell,chardev=iv,vectors=1";

/// Serve shared memory to virtual machines with QEMU's ivshmem-doorbell device
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER, after_long_help = exit_table(AFTER))]
pub(crate) struct Args {
    /// Path of the socket; the stale socket of a killed server is replaced
    socket: PathBuf,
    /// Bytes of shared memory: a power of two, at least 4K
    #[arg(long, value_name = "SIZE", default_value = "4M", value_parser = partywall_terminal::size)]
    size: u64,
    /// Interrupt vectors of each machine, 1 to 64; the same number as in the device's `vectors=`
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = partywall_terminal::whole::<u16>(1..=64))]
    vectors: u16,
    /// Machines connected at once, 1 to 1024; further ones are disconnected
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = partywall_terminal::whole::<u16>(1..=1024))]
    machines: u16,
}

pub(crate) fn run(args: &Args) -> Result<(), CommandFailure> {
    let mut signals = signal_hook::iterator::Signals::new([SIGINT, SIGTERM, SIGHUP]).context("cannot catch signals")?;
    let options = IvshmemOptions { size: args.size, vectors: args.vectors, max_clients: args.machines.into() };
    let server = IvshmemServer::start(&args.socket, options).map_err(|e| match e {
        IvshmemError::Size(_) | IvshmemError::Vectors(_) => CommandFailure::usage(e.to_string()),
        e => CommandFailure::general(e.to_string()),
    })?;
    output::print(format_args!(
        "serving {} of shared memory; start each machine with\n  {}",
        human::bytes(args.size),
        server.arguments(args.vectors).join(" ")
    ))?;
    // The server runs until a signal comes.
    signals.forever().next();
    Ok(())
}
