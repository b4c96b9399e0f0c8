//! `partywall tree-call`, hidden: a call whose argument is a tree of many nodes that the server reads where the client has built it, for the demo.
//! With `--tcp`, the same tree is serialised, sent and rebuilt, to compare with.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use partywall::rpc::{CallClient, CallError, CallServer, HeapOptions, IncomingCall, PeerView};
use partywall::{Error, Refusal};
use serde_json::json;

use crate::args::{Global, pin};
use crate::exit::{CommandFailure, Context};
use crate::{output, session};

/// The longest that a client waits until the server offers its service.
const PATIENCE: Duration = Duration::from_secs(10);
/// The longest that one call may take, also in a machine that is emulated.
const LONGEST: Duration = Duration::from_secs(60);
/// Calls of each short function that are timed.
const CALLS: usize = 200;
/// A node: its key, and the addresses of the nodes with smaller and with larger keys, or 0.
const NODE: usize = 24;
/// A serialised node: its key, and a byte that says which nodes follow below it.
const SERIALISED: usize = 9;
const HAS_SMALLER: u8 = 1;
const HAS_LARGER: u8 = 2;
/// The most nodes. A server reads no more in one call.
const MOST: u64 = 1 << 24;

/// Call a function that reads a tree in place
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Whom to call, DOMAIN:SERVICE; with -l, the service to offer; with --tcp, an address and a port
    endpoint: String,

    /// Offer the function until a signal comes; with --tcp, to one client, and the address is printed
    #[arg(short, long)]
    listen: bool,

    /// Serialise the tree and send it over TCP
    #[arg(long)]
    tcp: bool,

    /// Nodes of the tree
    #[arg(short, long, default_value_t = 1_000_000, value_parser = clap::value_parser!(u64).range(1..=MOST))]
    nodes: u64,

    /// Run on this processor only
    #[arg(long, value_name = "N", value_parser = partywall_terminal::whole::<usize>(..))]
    cpu: Option<usize>,
}

pub(crate) fn run(global: &Global, args: &Args) -> Result<(), CommandFailure> {
    pin(args.cpu)?;
    match (args.tcp, args.listen) {
        (false, true) => serve(global, &args.endpoint),
        (false, false) => call(global, args),
        (true, true) => serve_tcp(&args.endpoint),
        (true, false) => call_tcp(args),
    }
}

fn serve(global: &Global, service: &str) -> Result<(), CommandFailure> {
    let domain = session::join(global)?;
    let server = CallServer::builder()
        .method("null", |_| Ok(().into()))
        .method("read", |call| {
            let (nodes, sum) = PeerTree::of(call)?.read()?;
            Ok([nodes.to_le_bytes(), sum.to_le_bytes()].concat().into())
        })
        .method("find", |call| {
            let key = u64::from_le_bytes(call.args().array(24)?);
            Ok(PeerTree::of(call)?.find(key)?.to_le_bytes().into())
        });
    let _server = server.bind(&domain, service).context(format_args!("cannot offer {service}"))?;
    session::announce(global, &domain, service);
    loop {
        std::thread::park();
    }
}

/// The tree of a client, where the client has built it.
struct PeerTree {
    root: u64,
    /// The address of its first node.
    base: u64,
    nodes: PeerView,
}

impl PeerTree {
    /// The arguments are the address of the root, and the address and size of the memory that all nodes are in.
    fn of(call: &IncomingCall<'_>) -> Result<Self, CallError> {
        let word = |at| call.args().array(at).map(u64::from_le_bytes);
        let (root, base, size) = (word(0)?, word(8)?, word(16)?);
        Ok(Self { root, base, nodes: call.follow(base, size)? })
    }

    /// A copy of a node. Its address, which the client may have written at any moment, is checked.
    fn node(&self, address: u64) -> Result<[u64; 3], CallError> {
        let at = address.checked_sub(self.base).and_then(|at| usize::try_from(at).ok()).ok_or(CallError::BadPointer)?;
        let node: [u8; NODE] = self.nodes.array(at)?;
        Ok(words(&node))
    }

    /// How many nodes it has, and the sum of their keys.
    fn read(&self) -> Result<(u64, u64), CallError> {
        let (mut open, mut nodes, mut sum) = (vec![self.root], 0, 0u64);
        while let Some(address) = open.pop() {
            let [key, smaller, larger] = self.node(address)?;
            sum = sum.wrapping_add(key);
            nodes += 1;
            // A client can make a circle.
            if nodes > MOST {
                return Err(CallError::BadPointer);
            }
            open.extend([smaller, larger].into_iter().filter(|next| *next != 0));
        }
        Ok((nodes, sum))
    }

    /// The address of the node with a key, or 0.
    fn find(&self, key: u64) -> Result<u64, CallError> {
        let mut address = self.root;
        for _ in 0..MOST {
            if address == 0 {
                break;
            }
            let [here, smaller, larger] = self.node(address)?;
            address = match key.cmp(&here) {
                std::cmp::Ordering::Less => smaller,
                std::cmp::Ordering::Equal => return Ok(address),
                std::cmp::Ordering::Greater => larger,
            };
        }
        Ok(0)
    }
}

/// The key and the two addresses of a node.
fn words(node: &[u8]) -> [u64; 3] {
    let words = node.as_chunks::<8>().0;
    std::array::from_fn(|i| words.get(i).map_or(0, |word| u64::from_le_bytes(*word)))
}

fn call(global: &Global, args: &Args) -> Result<(), CommandFailure> {
    let domain = session::join(global)?;
    let size = args.nodes as usize * NODE;
    let first = (size as u64 + size as u64 / 16).max(1 << 16);
    let builder = CallClient::builder().heap(HeapOptions::default().first(first).max(2 << 30)).timeout(LONGEST);
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
    let root = build(&mut memory, base, args.nodes);
    let built = begun.elapsed();
    let failed = |e: CallError| CommandFailure::general(format!("{}: {e}", args.endpoint));
    let begun = Instant::now();
    let tree = [root.to_le_bytes(), base.to_le_bytes(), (size as u64).to_le_bytes()].concat();
    let reply = client.call("read", &tree).map_err(failed)?;
    let read = begun.elapsed();
    let word = |at| reply.array(at).map(u64::from_le_bytes).map_err(failed);
    check(args.nodes, (word(0)?, word(8)?))?;
    let median = |one: &dyn Fn(u64) -> Result<(), CommandFailure>| {
        let mut times = Vec::with_capacity(CALLS);
        for n in 0..CALLS as u64 {
            let begun = Instant::now();
            one(n)?;
            times.push(nanos(begun.elapsed()));
        }
        times.sort_unstable();
        Ok::<_, CommandFailure>(times[CALLS / 2])
    };
    let null_call = median(&|_| client.call("null", &[]).map(drop).map_err(failed))?;
    let find_call = median(&|n| {
        // Keys from all parts of the tree.
        let key = n * 7919 % args.nodes;
        let found = client.call("find", &[&tree[..], &key.to_le_bytes()].concat()).map_err(failed)?;
        let found = found.array(0).map(u64::from_le_bytes).map_err(failed)?;
        if found == base + key * NODE as u64 {
            Ok(())
        } else {
            Err(CommandFailure::general(format!("the server has found key {key} at {found:#x}")))
        }
    })?;
    output::print_json_line(&json!({
        "nodes": args.nodes,
        "built_ns": nanos(built),
        "call_ns": nanos(read),
        "find_ns": find_call,
        "null_call_ns": null_call,
    }))
}

fn nanos(time: Duration) -> u64 {
    time.as_nanos() as u64
}

/// Fails if the server has not read what was sent: the number of nodes and the sum of their keys.
fn check(wanted: u64, (nodes, sum): (u64, u64)) -> Result<(), CommandFailure> {
    if (nodes, sum) == (wanted, wanted * (wanted - 1) / 2) {
        return Ok(());
    }
    Err(CommandFailure::general(format!("the server has read {nodes} nodes, whose keys add up to {sum}")))
}

/// Builds a search tree in memory whose address is `base`, and returns the address of its root. The node in the middle of a range of keys has
/// both halves below it, and lies where its key says.
fn build(memory: &mut [u8], base: u64, nodes: u64) -> u64 {
    let mut ranges = vec![(0, nodes)];
    let middle = |(from, to): (u64, u64)| from + (to - from) / 2;
    let address = |range: (u64, u64)| if range.0 == range.1 { 0 } else { base + middle(range) * NODE as u64 };
    while let Some(range) = ranges.pop() {
        let key = middle(range);
        let below = [(range.0, key), (key + 1, range.1)];
        let node = &mut memory[key as usize * NODE..][..NODE];
        for (to, word) in node.as_chunks_mut::<8>().0.iter_mut().zip([key, address(below[0]), address(below[1])]) {
            *to = word.to_le_bytes();
        }
        ranges.extend(below.into_iter().filter(|(from, to)| from != to));
    }
    address((0, nodes))
}

/// The tree as bytes: each node, then all nodes with smaller keys, then all with larger ones.
fn serialise(memory: &[u8], base: u64, root: u64) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(memory.len() / NODE * SERIALISED);
    let mut open = vec![root];
    while let Some(address) = open.pop() {
        let [key, smaller, larger] = words(&memory[(address - base) as usize..][..NODE]);
        bytes.extend_from_slice(&key.to_le_bytes());
        bytes.push(if smaller == 0 { 0 } else { HAS_SMALLER } | if larger == 0 { 0 } else { HAS_LARGER });
        open.extend([larger, smaller].into_iter().filter(|next| *next != 0));
    }
    bytes
}

/// A node of a rebuilt tree: its key, and the places of the nodes with smaller and with larger keys plus 1, or 0.
type RebuiltNode = [u64; 3];

/// Rebuilds a tree from its bytes. `None` if they are none of [`serialise`].
fn rebuild(bytes: &[u8]) -> Option<Vec<RebuiltNode>> {
    let (chunks, rest) = bytes.as_chunks::<SERIALISED>();
    let mut nodes: Vec<RebuiltNode> = Vec::with_capacity(chunks.len());
    // The nodes, each with its side, below which one is still to come.
    let mut open = Vec::new();
    for [key @ .., below] in chunks {
        let place = nodes.len();
        if place > 0 {
            let (parent, side): (usize, usize) = open.pop()?;
            nodes[parent][side] = place as u64 + 1;
        }
        nodes.push([u64::from_le_bytes(*key), 0, 0]);
        open.extend((below & HAS_LARGER != 0).then_some((place, 2)));
        open.extend((below & HAS_SMALLER != 0).then_some((place, 1)));
    }
    (rest.is_empty() && open.is_empty()).then_some(nodes)
}

/// The number of nodes that the root leads to, and the sum of their keys.
fn walk(tree: &[RebuiltNode]) -> (u64, u64) {
    let (mut open, mut nodes, mut sum) = (vec![1], 0, 0u64);
    while let Some(place) = open.pop() {
        let Some([key, smaller, larger]) = tree.get(place as usize - 1) else { continue };
        sum = sum.wrapping_add(*key);
        nodes += 1;
        open.extend([*smaller, *larger].into_iter().filter(|next| *next != 0));
    }
    (nodes, sum)
}

fn serve_tcp(address: &str) -> Result<(), CommandFailure> {
    let listener = TcpListener::bind(address).context(format_args!("cannot listen on {address}"))?;
    output::print(listener.local_addr()?)?;
    let (mut stream, _) = listener.accept()?;
    stream.set_nodelay(true)?;
    let mut length = [0; 8];
    stream.read_exact(&mut length)?;
    let length = u64::from_le_bytes(length);
    if length > MOST * SERIALISED as u64 {
        return Err(CommandFailure::general(format!(
            "the client announces {length} bytes, more than {MOST} nodes take"
        )));
    }
    let mut bytes = vec![0; length as usize];
    stream.read_exact(&mut bytes)?;
    let tree = rebuild(&bytes).ok_or_else(|| CommandFailure::general("the client has sent no tree"))?;
    let (nodes, sum) = walk(&tree);
    stream.write_all(&[nodes.to_le_bytes(), sum.to_le_bytes()].concat())?;
    Ok(())
}

fn call_tcp(args: &Args) -> Result<(), CommandFailure> {
    let mut stream = TcpStream::connect(&args.endpoint).context(format_args!("cannot connect to {}", args.endpoint))?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(LONGEST))?;
    let begun = Instant::now();
    let mut memory = vec![0; args.nodes as usize * NODE];
    // No address is 0, which stands for no node.
    let base = NODE as u64;
    let root = build(&mut memory, base, args.nodes);
    let built = begun.elapsed();
    let begun = Instant::now();
    let bytes = serialise(&memory, base, root);
    stream.write_all(&(bytes.len() as u64).to_le_bytes())?;
    stream.write_all(&bytes)?;
    let mut reply = [0; 16];
    stream.read_exact(&mut reply)?;
    let called = begun.elapsed();
    let word = |i: usize| reply.as_chunks::<8>().0.get(i).map_or(0, |word| u64::from_le_bytes(*word));
    check(args.nodes, (word(0), word(1)))?;
    output::print_json_line(&json!({ "nodes": args.nodes, "built_ns": nanos(built), "call_ns": nanos(called) }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn serialised(nodes: u64) -> Vec<u8> {
        let mut memory = vec![0; nodes as usize * NODE];
        let root = build(&mut memory, 24, nodes);
        serialise(&memory, 24, root)
    }

    #[test]
    fn rebuilt_tree_has_all_nodes() {
        for nodes in [1, 2, 3, 1000] {
            let tree = rebuild(&serialised(nodes)).unwrap();
            check(nodes, walk(&tree)).unwrap();
            assert_eq!(tree[0][0], nodes / 2, "the root is the middle");
        }
    }

    #[test]
    fn damaged_tree_is_rejected() {
        let bytes = serialised(100);
        assert!(rebuild(&bytes[..bytes.len() - 1]).is_none(), "a part of a node");
        assert!(rebuild(&bytes[..bytes.len() - SERIALISED]).is_none(), "a node is missing");
        assert!(rebuild(&[&bytes[..], &bytes[..SERIALISED]].concat()).is_none(), "a node too many");
    }

    #[test]
    fn wrong_sum_of_the_server_is_an_error() {
        assert!(check(3, (3, 3)).is_ok());
        assert!(check(3, (3, 4)).unwrap_err().to_string().contains("add up to 4"));
    }
}
