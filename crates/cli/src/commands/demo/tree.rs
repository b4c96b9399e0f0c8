//! A call whose argument is a tree of a million nodes, which the server reads where the client has built it.

use partywall_terminal::{Show, typed};
use serde_json::Value;

use super::children::DemoChild;
use super::measure::{LONGEST, cpus};
use super::world::{DemoSide, World};
use crate::exit::{CommandFailure, Context};
use crate::human;

/// The name of the service.
const SERVICE: &str = "tree";

/// Shows the call. Takes about a second.
pub(super) fn run(world: &World, quick: bool, show: &Show) -> Result<(), CommandFailure> {
    show.step("A call that reads a tree in place");
    show.show_commands(true);
    let (here, there) = cpus();
    let mut serve = world.partywall(DemoSide::B, "receiver", &["tree-call", "-l", SERVICE, "--cpu", &there])?;
    show.command("", &typed(&serve));
    // Ends with its guard: a server never ends by itself.
    let _server = DemoChild::start(&mut serve)?;
    let nodes = if quick { "100000" } else { "1000000" };
    let target = format!("b:{SERVICE}");
    let mut call = world.partywall(DemoSide::A, "sender", &["tree-call", &target, "-n", nodes, "--cpu", &here])?;
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
    let answer: Value =
        serde_json::from_str(&text).map_err(|e| CommandFailure::general(format!("the answer of tree-call: {e}")))?;
    show.say(&told(&answer));
    Ok(())
}

fn told(answer: &Value) -> String {
    let number = |name: &str| answer[name].as_u64().unwrap_or(0);
    let time = |name: &str| human::nanos(number(name));
    format!(
        "   {} nodes, built in the client's heap in {}. One call: the server has followed every pointer in {}, without a copy of the \
         tree.\n   A call without arguments takes {} (p50).",
        number("nodes"),
        time("built_ns"),
        time("call_ns"),
        time("null_call_ns"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tree_report_contains_node_count_and_times() {
        let answer =
            serde_json::json!({"nodes": 1_000_000, "built_ns": 2_000_000, "call_ns": 3_000_000, "null_call_ns": 700});
        let text = told(&answer);
        assert!(text.contains("1000000 nodes") && text.contains("700 ns"), "{text}");
    }
}
