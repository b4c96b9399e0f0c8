//! `partywall tree-call`, hidden: a call whose argument is a tree of many nodes that the server reads where the client has built it, for the demo.

use std::time::{Duration, Instant};

use partywall::rpc::{CallClient, CallError, CallServer, HeapOptions, IncomingCall};
use partywall::{Error, Refusal};
use serde_json::json;

use crate::args::{Global, pin};
use crate::exit::{CommandFailure, Context};
use crate::{output, session};

/// The longest that a client waits for the server.
const PATIENCE: Duration = Duration::from_secs(10);
/// Null calls that are timed.
const NULL_CALLS: usize = 1000;
/// A node: its key, and the addresses of the nodes with smaller and with larger keys, or 0.
const NODE: usize = 24;
/// The most nodes. A server follows no more pointers in one call.
const MOST: u64 = 1 << 24;

/// Call a function that reads a tree in place
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Whom to call, DOMAIN:SERVICE; with -l, the service to offer
    endpoint: String,

    /// Offer the function until a signal comes
    #[arg(short, long)]
    listen: bool,

    /// Nodes of the tree
    #[arg(short, long, default_value_t = 1_000_000, value_parser = clap::value_parser!(u64).range(1..=MOST))]
    nodes: u64,

    /// Run on this processor only
    #[arg(long, value_name = "N", value_parser = partywall_terminal::whole::<usize>(..))]
    cpu: Option<usize>,
}

pub(crate) fn run(global: &Global, args: &Args) -> Result<(), CommandFailure> {
    pin(args.cpu)?;
    if args.listen { serve(global, &args.endpoint) } else { call(global, args) }
}

fn serve(global: &Global, service: &str) -> Result<(), CommandFailure> {
    let domain = session::join(global)?;
    let server = CallServer::builder().max_follows(MOST).method("null", |_| Ok(().into())).method("read", |call| {
        let (nodes, sum) = read(call, u64::from_le_bytes(call.args().array(0)?))?;
        Ok([nodes.to_le_bytes(), sum.to_le_bytes()].concat().into())
    });
    let _server = server.bind(&domain, service).context(format_args!("cannot offer {service}"))?;
    session::announce(global, &domain, service);
    loop {
        std::thread::park();
    }
}

/// How many nodes the tree has, and the sum of their keys. Each node is copied from where the client has it, and its pointers are checked.
fn read(call: &IncomingCall<'_>, root: u64) -> Result<(u64, u64), CallError> {
    let (mut open, mut nodes, mut sum) = (vec![root], 0, 0u64);
    while let Some(address) = open.pop() {
        let node: [u8; NODE] = call.follow(address, NODE as u64)?.array(0)?;
        let word = |i: usize| node.as_chunks::<8>().0.get(i).map_or(0, |word| u64::from_le_bytes(*word));
        sum = sum.wrapping_add(word(0));
        nodes += 1;
        open.extend([word(1), word(2)].into_iter().filter(|next| *next != 0));
    }
    Ok((nodes, sum))
}

fn call(global: &Global, args: &Args) -> Result<(), CommandFailure> {
    let domain = session::join(global)?;
    let size = args.nodes as usize * NODE;
    let first = (size as u64 + size as u64 / 4).max(1 << 16);
    let builder = CallClient::builder().heap(HeapOptions::default().first(first).max(2 << 30)).timeout(PATIENCE);
    let limit = Instant::now() + PATIENCE;
    let client = loop {
        match builder.connect(&domain, &args.endpoint) {
            Err(Error::Refused { code: Refusal::NoSuchDomain | Refusal::NoSuchService, .. })
                if Instant::now() < limit =>
            {
                std::thread::sleep(Duration::from_millis(10));
            }
            connected => break connected.context(&args.endpoint)?,
        }
    };
    let begun = Instant::now();
    let mut memory = client.heap().allocate(size)?;
    let base = memory.address();
    // A search tree: the node in the middle of a range of keys has both halves below it, and lies where its key says.
    let mut ranges = vec![(0, args.nodes)];
    let middle = |(from, to): (u64, u64)| from + (to - from) / 2;
    let address = |range: (u64, u64)| if range.0 == range.1 { 0 } else { base + middle(range) * NODE as u64 };
    let root = address((0, args.nodes));
    while let Some(range) = ranges.pop() {
        let key = middle(range);
        let below = [(range.0, key), (key + 1, range.1)];
        let node = &mut memory[key as usize * NODE..][..NODE];
        for (to, word) in node.as_chunks_mut::<8>().0.iter_mut().zip([key, address(below[0]), address(below[1])]) {
            *to = word.to_le_bytes();
        }
        ranges.extend(below.into_iter().filter(|(from, to)| from != to));
    }
    let built = begun.elapsed();
    let failed = |e: CallError| CommandFailure::general(format!("{}: {e}", args.endpoint));
    let begun = Instant::now();
    let reply = client.call("read", &root.to_le_bytes()).map_err(failed)?;
    let read = begun.elapsed();
    let word = |at| reply.array(at).map(u64::from_le_bytes).map_err(failed);
    let (nodes, sum) = (word(0)?, word(8)?);
    if (nodes, sum) != (args.nodes, args.nodes * (args.nodes - 1) / 2) {
        return Err(CommandFailure::general(format!("the server has read {nodes} nodes, whose keys add up to {sum}")));
    }
    let mut times = Vec::with_capacity(NULL_CALLS);
    for _ in 0..NULL_CALLS {
        let begun = Instant::now();
        client.call("null", &[]).map_err(failed)?;
        times.push(begun.elapsed().as_nanos() as u64);
    }
    times.sort_unstable();
    let nanos = |time: Duration| time.as_nanos() as u64;
    output::print_json_line(&json!({
        "nodes": nodes,
        "built_ns": nanos(built),
        "call_ns": nanos(read),
        "null_call_ns": times[NULL_CALLS / 2],
    }))
}
