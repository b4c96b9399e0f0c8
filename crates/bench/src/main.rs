//! `partywall-bench`: every claim about speed has a subcommand here that measures it, beside everything it is compared with.
//!
//! ```text
//!            bench: plans, repeats, shows                 broker (only for Partywall)
//!              |  order, descriptors       |
//!       role: active  <--- beat --->  role: passive       two processes, pinned
//!              `====== mechanism under test =====`
//! ```

mod affinity;
mod apps;
mod args;
mod bench;
mod broker;
mod commands;
mod control;
mod error;
mod files;
mod flood;
mod flow;
mod hosts;
mod inside;
mod interrupt;
mod measure;
mod mechanism;
mod netns;
mod peers;
mod process;
mod report;
mod role;
mod task;
mod transport;

use std::process::ExitCode;

use clap::Parser;

use crate::{
    args::{Cli, Command, Common},
    bench::Bench,
    commands::{CommandResults, blk::DiskServing},
    error::{BenchError, Result},
};

fn main() -> ExitCode {
    match run(&Cli::parse().command) {
        Ok(status) => ExitCode::from(status),
        Err(e) => {
            eprintln!("partywall-bench: {e}");
            ExitCode::from(match e {
                BenchError::Interrupted => 130,
                BenchError::Usage(_) => 2,
                _ => 1,
            })
        }
    }
}

fn run(command: &Command) -> Result<u8> {
    let (common, measure): (&Common, fn(&mut Bench) -> Result<CommandResults>) = match command {
        Command::Ipc(common) => (common, commands::ipc::run),
        Command::Stream(common) => (common, commands::stream::run),
        Command::Latency(common) => (common, commands::latency::run),
        Command::Rpc(common) => (common, commands::rpc::run),
        Command::Heap(common) => (common, commands::heap::run),
        Command::Cpu(common) => (common, commands::cpu::run),
        Command::Channels(common) => (common, commands::channels::run),
        Command::Broker(common) => (common, commands::broker::run),
        Command::Advise(common) => (common, commands::advise::run),
        Command::Apps(common) => (common, commands::apps::run),
        Command::Residency { common, migration: Some(file), .. } => {
            let mut bench = Bench::new(common)?;
            let results = commands::residency::timeline::run(&mut bench, file)?;
            return bench.finish(results);
        }
        Command::Residency { common, machines: false, .. } => (common, commands::residency::run),
        Command::Residency { common, machines: true, .. } => (common, commands::residency::machines::run),
        Command::Net(common) => (common, commands::net::run),
        Command::Gateway(common) => (common, commands::gateway::run),
        Command::Ratios(common) => (common, commands::ratios::run),
        Command::All(common) => (common, commands::all::run),
        Command::Compare { before, after } => return commands::compare::run(before, after).map(|()| 0),
        Command::Blk { common, direct, queues, folder } => {
            let mut bench = Bench::new(common)?;
            let disk = DiskServing { direct: *direct, queues: *queues };
            let results = commands::blk::run(&mut bench, disk, folder.as_ref())?;
            return bench.finish(results);
        }
        Command::Vm { common, part } => {
            let mut bench = Bench::new(common)?;
            let results = commands::vm::run(&mut bench, part)?;
            return bench.finish(results);
        }
        Command::Fs { common, divide, folder } => {
            let mut bench = Bench::new(common)?;
            let results = commands::fs::run(&mut bench, *divide, folder.clone())?;
            return bench.finish(results);
        }
        Command::Flow { words } => return flow::run(words).map(|()| 0),
        Command::Peer { words } => return peers::calls::run(words).map(|()| 0),
        Command::Role => return role::run().map(|()| 0),
        Command::Inside { words } => return inside::run(words).map(|()| 0),
    };
    let mut bench = Bench::new(common)?;
    let results = measure(&mut bench)?;
    bench.finish(results)
}
