//! `partywall group`: buffers that all members of a group read in place.

use std::io::{Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::path::PathBuf;
use std::time::Duration;

use clap::Subcommand;
use partywall::{Group, Handle};
use partywall_terminal::table;
use serde::Serialize;

use crate::args::{Global, exit_table, parse_name};
use crate::exit::{Code, CommandFailure, Context};
use crate::output;
use crate::{human, session};

const AFTER: &str = "\
A group is declared in the broker's policy (`[[group]]`, partywalld.toml(5)): virtual machines, and domains of the host. A member's \
memory can be written by that member alone; all others read it at the same address. A buffer is passed on as a handle, a line of \
text. Its recipient opens it with `get`, once, and reads the memory in place.

Examples:
  partywall group list                                      in a member, or as administrator
  partywall --domain a group put pool < picture             prints pool:5057..., and waits until it has been read
  partywall --domain c group get pool:5057... > picture     in another member, which received the handle by any connection";

/// Publish buffers to the members of a group, and read them in place
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER, after_long_help = exit_table(AFTER))]
pub(crate) struct Args {
    #[command(subcommand)]
    command: GroupCommand,
}

#[derive(Debug, Subcommand)]
enum GroupCommand {
    /// Fill a buffer from standard input, print a handle for each reader, and wait until all readers are done
    Put {
        /// Name of the group
        #[arg(value_parser = parse_name)]
        group: String,
        /// Read this file in place of standard input
        file: Option<PathBuf>,
        /// Number of handles, 1 to 512; each can be opened once
        #[arg(short = 'n', long, value_name = "N", default_value_t = 1, value_parser = partywall_terminal::whole::<u16>(1..=512))]
        handles: u16,
        /// End with exit code 6 after this time; unopened handles become invalid [default: no limit]
        #[arg(long, value_name = "DURATION", value_parser = human::parse_duration)]
        timeout: Option<Duration>,
    },
    /// Open a handle, write its buffer to standard output, and release it
    Get {
        /// The handle as printed by `put`: GROUP:HEX
        #[arg(value_parser = parse_handle)]
        handle: Named,
        /// Do not release the buffer before standard input ends
        #[arg(long)]
        hold: bool,
    },
    /// Show the members of groups, and the addresses of their memory
    List {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
}

/// A handle with the group that it is of.
#[derive(Debug, Clone)]
struct Named {
    group: String,
    handle: Handle,
}

fn parse_handle(text: &str) -> Result<Named, String> {
    let (group, handle) = text.split_once(':').ok_or("must be GROUP:HEX, as `group put` prints it")?;
    let group = parse_name(group)?;
    Ok(Named { group, handle: handle.parse().map_err(|e: partywall::BadHandle| e.to_string())? })
}

#[derive(Debug, Serialize)]
struct SeatLine {
    group: String,
    member: String,
    machine: bool,
    address: String,
    size: u64,
    free: u64,
    processes: u32,
}

pub(crate) fn run(global: &Global, args: &Args) -> Result<(), CommandFailure> {
    match &args.command {
        GroupCommand::Put { group, file, handles, timeout } => put(global, group, file.as_ref(), *handles, *timeout),
        GroupCommand::Get { handle, hold } => get(global, handle, *hold),
        GroupCommand::List { json } => list(global, *json),
    }
}

fn put(
    global: &Global,
    name: &str,
    file: Option<&PathBuf>,
    handles: u16,
    timeout: Option<Duration>,
) -> Result<(), CommandFailure> {
    let mut content = Vec::new();
    match file {
        Some(path) => content = std::fs::read(path).context(path.display())?,
        None => drop(std::io::stdin().lock().read_to_end(&mut content).context("cannot read standard input")?),
    }
    let domain = session::join(global)?;
    let joined = Group::builder(name).room(content.len() as u64).join(&domain);
    let group = joined.context(format_args!("cannot take part in {name}"))?;
    let mut buffer = group.alloc(content.len()).context("cannot make the buffer")?;
    buffer.copy_from_slice(&content);
    drop(content);
    let lent = buffer.lend();
    tracing::info!("{} bytes at {:#x}", lent.len(), lent.address());
    for _ in 0..handles {
        output::print(format_args!("{name}:{}", lent.handle()?))?;
    }
    lent.wait(timeout).context("not read by all")
}

fn get(global: &Global, named: &Named, hold: bool) -> Result<(), CommandFailure> {
    let Named { group: name, handle } = named;
    let domain = session::join(global)?;
    let group = Group::builder(name).room(0).join(&domain).context(format_args!("cannot take part in {name}"))?;
    let shared = group.open(handle).context("cannot open the handle")?;
    tracing::info!("{} bytes at {:#x}", shared.len(), shared.address());
    let out = std::io::stdout();
    let mut done = 0;
    while done < shared.len() {
        match shared.write_to(out.as_fd(), done, shared.len() - done) {
            Ok(0) => return Err(CommandFailure::general("standard output takes no more")),
            Ok(n) => done += n,
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
            Err(e) => return Err(CommandFailure::from(e).context("cannot write to standard output")),
        }
    }
    // After the release the owner may reuse the memory, so everything is read before.
    if group.is_alone() {
        return Err(CommandFailure::new(
            Code::NoBroker,
            "the broker has gone while this read, so what came may not be what was lent: have it lent again",
        ));
    }
    if hold {
        let _ = writeln!(std::io::stderr(), "partywall: holding {} bytes at {:#x}", shared.len(), shared.address());
        std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink()).context("cannot read standard input")?;
    }
    Ok(())
}

fn list(global: &Global, json: bool) -> Result<(), CommandFailure> {
    let rows = session::join(global)?.groups().context("cannot list groups")?;
    let lines: Vec<SeatLine> = rows
        .into_iter()
        .map(|row| SeatLine {
            group: row.group,
            member: row.member,
            machine: row.machine,
            address: format!("{:#x}", row.address),
            size: row.size,
            free: row.free,
            processes: row.seats,
        })
        .collect();
    if json {
        return output::print_json(&lines);
    }
    if lines.is_empty() {
        return output::print("no visible groups; the broker's file declares groups with [[group]]");
    }
    let mut shown = table(&["GROUP", "MEMBER", "KIND", ">ADDRESS", ">SIZE", ">FREE", ">PROCESSES"]);
    for line in lines {
        let kind = if line.machine { "machine" } else { "domain" };
        let bytes = |n| if line.size == 0 { "not there".to_owned() } else { human::bytes(n) };
        let (size, free) = (bytes(line.size), bytes(line.free));
        shown.add_row([line.group, line.member, kind.into(), line.address, size, free, line.processes.to_string()]);
    }
    output::print(shown)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handle_text_starts_with_group_name() {
        let handle = Handle { owner: 1, address: 2, len: 3, serial: 4, place: 5, hop: 6 };
        let named = parse_handle(&format!("pool:{handle}")).unwrap();
        assert_eq!((named.group.as_str(), named.handle), ("pool", handle));
        for bad in ["", "pool", "pool:", "pool:00", &format!("-:{handle}"), &format!("{handle}")] {
            assert!(parse_handle(bad).is_err(), "{bad}");
        }
    }
}
