//! A call whose argument is a tree of a million nodes, which the server reads where the client has built it; and the same tree, serialised,
//! sent over TCP and rebuilt.

use std::process::Command;

use partywall_terminal::{Show, table, typed};
use serde_json::Value;

use super::children::DemoChild;
use super::measure::{LONGEST, compare, cpus, listening};
use super::world::{DemoSide, World};
use crate::exit::{CommandFailure, Context};
use crate::human;

/// The name of the service.
const SERVICE: &str = "tree";

/// Nanoseconds of each part.
#[derive(Debug)]
pub(super) struct TreeTimes {
    nodes: u64,
    built: u64,
    call: u64,
    find: u64,
    null_call: u64,
    tcp: u64,
    tcp_route: &'static str,
}

impl TreeTimes {
    /// Takes about a second.
    pub(super) fn run(world: &World, quick: bool, show: &Show) -> Result<Self, CommandFailure> {
        show.step("A call that reads a tree in place");
        show.show_commands(true);
        let nodes = if quick { "100000" } else { "1000000" };
        let ours = over_partywall(world, nodes, show)?;
        let tcp = over_tcp(world, nodes, show)?;
        let number = |answer: &Value, name: &str| {
            let number = answer[name].as_u64();
            number.ok_or_else(|| CommandFailure::general(format!("the answer of tree-call lacks {name}: {answer}")))
        };
        Ok(Self {
            nodes: number(&ours, "nodes")?,
            built: number(&ours, "built_ns")?,
            call: number(&ours, "call_ns")?,
            find: number(&ours, "find_ns")?,
            null_call: number(&ours, "null_call_ns")?,
            tcp: number(&tcp, "call_ns")?,
            tcp_route: world.tcp_route(),
        })
    }

    pub(super) fn to_text(&self) -> String {
        let mut rows = table(&[&format!("a tree of {} nodes", self.nodes), ">time"]);
        let tcp = format!("{}: serialised, sent, rebuilt and read", self.tcp_route);
        let parts = [
            ("built by the client, in its heap", self.built),
            ("Partywall: a call that reads all nodes in place", self.call),
            (&tcp, self.tcp),
            ("Partywall: a call that looks up one key in place (p50)", self.find),
            ("Partywall: a call without arguments (p50)", self.null_call),
        ];
        for (name, time) in parts {
            rows.add_row([name.to_owned(), human::nanos(time)]);
        }
        format!("{rows}\n{}", compare(self.tcp as f64, self.call as f64, "as quick as", self.tcp_route))
    }
}

fn over_partywall(world: &World, nodes: &str, show: &Show) -> Result<Value, CommandFailure> {
    let (here, there) = cpus();
    let mut serve = world.partywall(DemoSide::B, "receiver", &["tree-call", "-l", SERVICE, "--cpu", &there])?;
    show.command("", &typed(&serve));
    // Ends with its guard: a server never ends by itself.
    let _server = DemoChild::start(&mut serve)?;
    let target = format!("b:{SERVICE}");
    answer(world, world.partywall(DemoSide::A, "sender", &["tree-call", &target, "-n", nodes, "--cpu", &here])?, show)
}

fn over_tcp(world: &World, nodes: &str, show: &Show) -> Result<Value, CommandFailure> {
    let (here, there) = cpus();
    let any = format!("{}:0", world.address(DemoSide::B));
    let serve = ["tree-call", "--tcp", "-l", &any, "--cpu", &there];
    let (_server, address) = listening(world.partywall(DemoSide::B, "receiver", &serve)?, show)?;
    let call = ["tree-call", "--tcp", &address, "-n", nodes, "--cpu", &here];
    answer(world, world.partywall(DemoSide::A, "sender", &call)?, show)
}

/// Runs a client to its end, and returns its answer.
fn answer(world: &World, mut call: Command, show: &Show) -> Result<Value, CommandFailure> {
    let path = world.dir().join("tree");
    let file = std::fs::File::create(&path).context(format_args!("cannot write {}", path.display()))?;
    show.command("", &typed(&call));
    call.stdout(file);
    let explain = |failure: CommandFailure| {
        let logs = ["sender", "receiver"].map(|name| world.read_log(name));
        failure.hint(logs.map(|log| log.trim().to_owned()).join("\n  "))
    };
    DemoChild::start(&mut call)?.finish(LONGEST).map_err(explain)?;
    let text = std::fs::read_to_string(&path).context("cannot read the answer of tree-call")?;
    serde_json::from_str(&text).map_err(|e| CommandFailure::general(format!("the answer of tree-call: {e}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tree_table_contains_node_count_times_and_ratio() {
        let times = TreeTimes {
            nodes: 1_000_000,
            built: 2_000_000,
            call: 30_000_000,
            find: 3_000,
            null_call: 700,
            tcp: 90_000_000,
            tcp_route: "TCP over veth",
        };
        let text = times.to_text();
        for part in [
            "1000000 nodes",
            "2.00 ms",
            "30.0 ms",
            "90.0 ms",
            "3.00 us",
            "3.0 times as quick as TCP over veth",
            "700 ns",
        ] {
            assert!(text.contains(part), "{part} in\n{text}");
        }
    }
}
