//! The commands, one file each; what a command needs beyond its own file lives in the folder of its name.

pub(crate) mod agent;
pub(crate) mod bench;
pub(crate) mod blk;
pub(crate) mod cat;
pub(crate) mod completions;
pub(crate) mod container;
pub(crate) mod demo;
pub(crate) mod doctor;
pub(crate) mod enable;
pub(crate) mod events;
pub(crate) mod fs;
pub(crate) mod group;
pub(crate) mod ivshmem_server;
pub(crate) mod list;
pub(crate) mod man;
pub(crate) mod moves;
pub(crate) mod net;
pub(crate) mod numbers;
pub(crate) mod ping;
pub(crate) mod policy;
pub(crate) mod run;
pub(crate) mod stat;
pub(crate) mod sysdump;
pub(crate) mod tcp_cat;
pub(crate) mod tcp_ping;
pub(crate) mod top;
pub(crate) mod tree_call;
pub(crate) mod vm;
pub(crate) mod why;

use crate::args::{Cli, Command};
use crate::exit::CommandFailure;

/// Runs the command that was asked for.
pub(crate) fn run(cli: &Cli) -> Result<(), CommandFailure> {
    match &cli.command {
        Command::Run(args) => run::run(&cli.global, args),
        Command::Moves(args) => moves::run(&cli.global, args),
        Command::Policy(args) => policy::run(&cli.global, args),
        Command::Cat(args) => cat::run(&cli.global, args),
        Command::Ping(args) => ping::run(&cli.global, args),
        Command::List(args) => list::run(&cli.global, args),
        Command::Stat(args) => stat::run(&cli.global, args),
        Command::Top(args) => top::run(&cli.global, args),
        Command::Why(args) => why::run(&cli.global, args),
        Command::Events(args) => events::run(&cli.global, args),
        Command::Doctor(args) => doctor::run(&cli.global, args),
        Command::Demo(args) => demo::run(args),
        Command::Vm(args) => vm::run(&cli.global, args),
        Command::Container(args) => container::run(args),
        Command::Enable(args) => enable::enable(&cli.global, args),
        Command::Disable(args) => enable::disable(args),
        Command::Sysdump(args) => sysdump::run(&cli.global, args),
        Command::Group(args) => group::run(&cli.global, args),
        Command::Agent(args) => agent::run(&cli.global, args),
        Command::Net(args) => net::run(args),
        Command::Numbers(args) => numbers::run(args),
        Command::Blk(args) => blk::run(&cli.global, args),
        Command::Fs(args) => fs::run(&cli.global, args),
        Command::IvshmemServer(args) => ivshmem_server::run(args),
        Command::Bench(args) => bench::run(args),
        Command::Completions(args) => completions::run(args),
        Command::Man(args) => man::run(args),
        Command::TcpCat(args) => tcp_cat::run(args),
        Command::TcpPing(args) => tcp_ping::run(args),
        Command::TreeCall(args) => tree_call::run(&cli.global, args),
    }
}
