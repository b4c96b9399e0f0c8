//! Calls that pass pointers: a client builds a tree in its heap, and the server walks it there, also if the two are in different virtual
//! machines.
//!
//! ```console
//! $ cargo run -p partywall --example shared_tree -- serve shop trees                # in one terminal
//! $ cargo run -p partywall --example shared_tree -- sum visitor shop:trees 100000   # in another
//! ```
//!
//! Both use the broker's default socket; `PARTYWALL_BROKER` names another one. docs/rpc.md is the guide.

use partywall::Domain;
use partywall::rpc::{CallAnswer, CallClient, CallError, CallServer, IncomingCall};

/// Bytes of a node: the addresses of its children, or 0, and its value.
const NODE: usize = 24;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    match words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["serve", name, service] => serve(&Domain::join(name)?, service)?,
        ["sum", name, target, nodes] => sum(&Domain::join(name)?, target, nodes.parse()?)?,
        _ => return Err("shared_tree serve NAME SERVICE, or shared_tree sum NAME TARGET NODES".into()),
    }
    Ok(())
}

fn serve(domain: &Domain, service: &str) -> partywall::Result<()> {
    let builder = CallServer::builder().max_follows(1 << 24);
    let _server = builder.method("values", values).bind(domain, service)?;
    loop {
        std::thread::park();
    }
}

/// The difference between this process's addresses of the tree and the client's, and then all values, which the client reads in place.
fn values(call: &IncomingCall<'_>) -> Result<CallAnswer, CallError> {
    let root = u64::from_le_bytes(call.args().array(0)?);
    let offset = call.follow(root, NODE as u64)?.offset().unwrap_or_default();
    let (mut waiting, mut values) = (vec![root], Vec::new());
    while let Some(address) = waiting.pop() {
        // A copy of the node, out of the client's memory and checked to lie there.
        let node: [u8; NODE] = call.follow(address, NODE as u64)?.array(0)?;
        let [left, right, value] = words(node);
        values.push(value);
        waiting.extend([left, right].into_iter().filter(|child| *child != 0));
    }
    let mut result = call.heap().allocate(8 + values.len() * 8)?;
    let (first, rest) = result.split_at_mut(8);
    first.copy_from_slice(&offset.to_le_bytes());
    for (place, value) in rest.chunks_exact_mut(8).zip(values) {
        place.copy_from_slice(&value.to_le_bytes());
    }
    Ok(result.into())
}

fn words(node: [u8; NODE]) -> [u64; 3] {
    let (words, _) = node.as_chunks::<8>();
    std::array::from_fn(|n| u64::from_le_bytes(words[n]))
}

fn sum(domain: &Domain, target: &str, nodes: usize) -> Result<(), Box<dyn std::error::Error>> {
    let client = CallClient::builder().connect(domain, target)?;
    let mut tree = client.heap().allocate(nodes.max(1) * NODE)?;
    let start = tree.address();
    // Node `n` has the children `2n + 1` and `2n + 2`.
    let address = |n: usize| if n < nodes { start + (n * NODE) as u64 } else { 0 };
    for (n, node) in tree.chunks_exact_mut(NODE).enumerate() {
        for (word, value) in node.chunks_exact_mut(8).zip([address(2 * n + 1), address(2 * n + 2), n as u64]) {
            word.copy_from_slice(&value.to_le_bytes());
        }
    }
    let reply = client.call("values", &start.to_le_bytes())?;
    let offset = i64::from_le_bytes(reply.array(0)?);
    // The result is read where the server has it.
    let mut sum = 0;
    for at in (8..reply.len()).step_by(8) {
        sum += u64::from_le_bytes(reply.array(at)?);
    }
    let place = if offset == 0 { "at the client's addresses" } else { "by an offset" };
    println!("{} nodes, sum {sum}, read {place}", (reply.len() - 8) / 8);
    Ok(())
}
