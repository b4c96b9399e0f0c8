//! Partywall's own programs for orders: this program, as `peer serve NAME` and `peer call NAME [SERVER]`. The name of each domain is NAME with
//! its side behind it, and SERVER is the NAME of the server if that differs.

use std::io::{BufRead, Write};
use std::sync::Arc;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use partywall::Domain;
use partywall::rpc::{Block, CallAnswer, CallClient, CallError, CallServer, HeapOptions, IncomingCall, Method};
use rustix::process::{Signal, set_parent_process_death_signal};
use rustix::time::{ClockId, clock_gettime};

use super::order::{OrderAnswer, OrderKind, PayloadPlace, PeerOrder, answer_line};
use super::programs::CPU;
use super::sequence::{Sequence, answer_in_place, block_len, expected};
use crate::affinity;
use crate::error::{BenchError, During, Result};
use crate::measure::set_up::{samples, touch};
use crate::measure::turns::TurnTimes;
use crate::report::metric::Metric;
use crate::task::Figures;
use crate::transport::memory::KernelMemory;
use crate::transport::partywall::fault;

/// The service for sequences up to [`SMALL`] bytes, and that for larger ones: the server's heap begins with another size.
const SERVICES: [(&str, u64); 2] = [("small", 4 << 20), ("large", 1 << 30)];
/// Bytes of the largest block of the first service.
const SMALL: usize = 1 << 20;
/// The most bytes of a heap.
const MOST_HEAP: u64 = 2 << 30;
/// The most clients of the server.
const CLIENTS: usize = 4096;
/// Calls that are under way at the same time.
const WINDOW: usize = 256;
/// Calls between two looks at the clock.
const BATCH: usize = 1024;

const NULL: Method = Method::named("null");
const TAKE: Method = Method::named("take");
const COPY: Method = Method::named("copy");
const PREPARE: Method = Method::named("prepare");
const POINT: Method = Method::named("point");
const GIVE: Method = Method::named("give");
const PAGES: Method = Method::named("pages");
const CPU_TIME: Method = Method::named("cpu");

/// Runs one of the two programs.
pub(crate) fn run(words: &[String]) -> Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL)).during("tying this process to the bench")?;
    if let Some(cpu) = std::env::var(CPU).ok().and_then(|cpu| cpu.parse().ok()) {
        affinity::pin(cpu)?;
    }
    match words {
        [role, name] if role == "serve" => serve(name),
        [role, name] if role == "call" => call(name, name),
        [role, name, server] if role == "call" => call(name, server),
        _ => Err(BenchError::Usage("`peer` is how the bench starts its own programs, and is of no use by hand".into())),
    }
}

fn join(name: &str, side: &str) -> Result<Domain> {
    Domain::builder().name(format!("{name}-{side}")).join().map_err(fault("joining the broker"))
}

/// Writes a line to the bench.
fn say(line: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}").and_then(|()| out.flush()).during("answering the bench")
}

/// Processor time of this process.
fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32)
}

// ---- The server

/// A sequence that a client has ordered, in private memory and in the heap of its connection.
struct Prepared {
    kind: OrderKind,
    private: Sequence,
    block: Block,
}

type Shelf = Arc<Mutex<Option<Prepared>>>;

/// The first byte of a request to prepare, and what sequences of a block's content are.
fn kind_of(number: u8) -> std::result::Result<OrderKind, CallError> {
    [OrderKind::Byte, OrderKind::Fixed, OrderKind::Variable]
        .get(usize::from(number))
        .copied()
        .ok_or_else(|| CallError::application(1, "no such kind"))
}

fn number_of(kind: OrderKind) -> u8 {
    match kind {
        OrderKind::Byte => 0,
        OrderKind::Fixed => 1,
        _ => 2,
    }
}

fn fill(heap: &partywall::rpc::Heap, kind: OrderKind, count: u64, from: &Sequence) -> partywall::Result<Block> {
    let mut block = heap.allocate(block_len(kind, count))?;
    let address = block.address();
    from.copy_to(&mut block, address);
    Ok(block)
}

/// Methods for sequences are per kind, so that a call carries nothing but the sequence.
fn per_kind(method: Method, kind: OrderKind) -> Method {
    Method::numbered(method.number().wrapping_add(u32::from(number_of(kind))))
}

type Methods = partywall::rpc::CallServerBuilder;

fn sequences(mut server: Methods, shelf: &Shelf) -> Methods {
    for kind in [OrderKind::Byte, OrderKind::Fixed, OrderKind::Variable] {
        server = server
            .numbered(per_kind(TAKE, kind), move |call| {
                let answer = answer_in_place(kind, call.args(), |address, len| call.follow(address, len))?;
                Ok(answer.to_ne_bytes().into())
            })
            .numbered(per_kind(COPY, kind), move |call| {
                Ok(Sequence::copied(kind, call.args())?.answer().to_ne_bytes().into())
            });
    }
    let prepared = Arc::clone(shelf);
    server = server.numbered(PREPARE, move |call| prepare(call, &prepared));
    let prepared = Arc::clone(shelf);
    server = server.numbered(POINT, move |_| {
        with(&prepared, |it| {
            let mut pointer = [0; 16];
            pointer[..8].copy_from_slice(&it.block.address().to_ne_bytes());
            pointer[8..].copy_from_slice(&(it.block.len() as u64).to_ne_bytes());
            Ok(pointer.into())
        })
    });
    let prepared = Arc::clone(shelf);
    server.numbered(GIVE, move |call| {
        with(&prepared, |it| Ok(fill(call.heap(), it.kind, it.private.count() as u64, &it.private)?.into()))
    })
}

fn with(
    shelf: &Shelf,
    then: impl FnOnce(&Prepared) -> std::result::Result<CallAnswer, CallError>,
) -> std::result::Result<CallAnswer, CallError> {
    let shelf = shelf.lock().map_err(|_| CallError::application(2, "a method panicked"))?;
    then(shelf.as_ref().ok_or_else(|| CallError::application(3, "nothing was prepared"))?)
}

/// Keeps a sequence for POINT and GIVE; of length 0, forgets it.
fn prepare(call: &IncomingCall<'_>, shelf: &Shelf) -> std::result::Result<CallAnswer, CallError> {
    let [number] = call.args().array(0)?;
    let (kind, count) = (kind_of(number)?, u64::from_ne_bytes(call.args().array(1)?));
    let mut shelf = shelf.lock().map_err(|_| CallError::application(2, "a method panicked"))?;
    *shelf = None;
    if count > 0 {
        let private = Sequence::new(kind, count);
        let block = fill(call.heap(), kind, count, &private)?;
        *shelf = Some(Prepared { kind, private, block });
    }
    Ok(().into())
}

fn serve(name: &str) -> Result<()> {
    let domain = join(name, "server")?;
    let mut servers = Vec::new();
    for (service, first) in SERVICES {
        let server = CallServer::builder()
            .heap(HeapOptions::default().first(first).max(MOST_HEAP))
            .max_peer_heap(MOST_HEAP)
            .max_clients(CLIENTS)
            .max_clients_of_domain(CLIENTS)
            .numbered(NULL, |_| Ok(().into()))
            .numbered(CPU_TIME, |_| Ok((cpu_time().as_nanos() as u64).to_ne_bytes().into()))
            .numbered(PAGES, |call| {
                let args = call.args();
                let mut sum = 0u64;
                for at in (0..args.len()).step_by(4096) {
                    sum += u64::from(u8::from_ne_bytes(args.array(at)?));
                }
                Ok(sum.to_ne_bytes().into())
            });
        let server = sequences(server, &Shelf::default());
        servers.push(server.bind(&domain, service).map_err(fault("binding a service"))?);
    }
    say("ready")?;
    // The bench ends this program.
    loop {
        std::thread::park();
    }
}

// ---- The client

fn call(name: &str, server: &str) -> Result<()> {
    let client = PeerClient { domain: join(name, "client")?, server: format!("{server}-server") };
    say("ready")?;
    for line in std::io::stdin().lock().lines() {
        let line = line.during("reading an order")?;
        let answer = match line.parse::<PeerOrder>() {
            Err(why) => OrderAnswer::Failed(why),
            Ok(order) => match client.execute(&order) {
                Ok(figures) => OrderAnswer::Figures(figures),
                Err(BenchError::Unavailable(why)) => OrderAnswer::Unavailable(why),
                Err(e) => OrderAnswer::Failed(e.to_string()),
            },
        };
        say(&answer_line(&answer))?;
    }
    Ok(())
}

/// Whether a sequence is measured by the first service.
pub(crate) fn fits_small(kind: OrderKind, elements: u64) -> bool {
    block_len(kind, elements) <= SMALL
}

struct PeerClient {
    domain: Domain,
    server: String,
}

impl PeerClient {
    /// A new connection, with a heap that begins with this many bytes.
    pub(crate) fn connect(&self, service: &str, heap: HeapOptions) -> Result<CallClient> {
        let builder = CallClient::builder().heap(heap.max(MOST_HEAP)).max_peer_heap(MOST_HEAP);
        builder.connect(&self.domain, &format!("{}:{service}", self.server)).map_err(fault("connecting"))
    }

    fn execute(&self, order: &PeerOrder) -> Result<Figures> {
        match order.kind {
            OrderKind::Null => {
                let client = self.connect("small", HeapOptions::default())?;
                turns(order, || client.call(NULL, &[]).map(drop))
            }
            OrderKind::Pipelined => self.pipelined(order),
            OrderKind::Crowd => self.crowd(order),
            OrderKind::Heap => self.heap(order),
            OrderKind::Array => Err(BenchError::Unavailable("NumPy is measured from Python".into())),
            OrderKind::Byte | OrderKind::Fixed | OrderKind::Variable => self.sequence(order),
        }
    }

    fn sequence(&self, order: &PeerOrder) -> Result<Figures> {
        let PeerOrder { kind, elements, place, .. } = *order;
        let bytes = block_len(kind, elements);
        let service = if fits_small(kind, elements) { "small" } else { "large" };
        // Room for two blocks: the one that lies there, and the one that is built.
        let heap = HeapOptions::default().first((2 * bytes as u64).clamp(1 << 20, 1 << 30));
        let client = self.connect(service, heap)?;
        let wanted = expected(kind, elements);
        let check = |found: f64| match found == wanted {
            true => Ok(()),
            false => Err(CallError::application(4, format!("a call returned {found} instead of {wanted}"))),
        };
        let number = |reply: &partywall::rpc::PeerView| Ok::<f64, CallError>(f64::from_ne_bytes(reply.array(0)?));
        let (take, copy) = (per_kind(TAKE, kind), per_kind(COPY, kind));
        if order.sends {
            let private = Sequence::new(kind, elements);
            let mut block = fill(client.heap(), kind, elements, &private).map_err(fault("filling a block"))?;
            return match place {
                PayloadPlace::Built | PayloadPlace::Copied => {
                    drop(block);
                    let method = if place == PayloadPlace::Built { take } else { copy };
                    turns(order, || {
                        let block = fill(client.heap(), kind, elements, &private)?;
                        check(number(&*client.call(method, &block)?)?)
                    })
                }
                _ => turns(order, || {
                    // The sender has just written to it, as a program would have.
                    block[..8].copy_from_slice(&elements.to_ne_bytes());
                    check(number(&*client.call(take, &block)?)?)
                }),
            };
        }
        let mut request = [0; 9];
        request[0] = number_of(kind);
        request[1..].copy_from_slice(&elements.to_ne_bytes());
        client.call(PREPARE, &request).map_err(fault("preparing a sequence"))?;
        let figures = match place {
            PayloadPlace::Built | PayloadPlace::Copied => turns(order, || {
                let reply = client.call(GIVE, &[])?;
                match place {
                    PayloadPlace::Copied => check(Sequence::copied(kind, &reply)?.answer()),
                    _ => check(answer_in_place(kind, &reply, |address, len| client.follow(address, len))?),
                }
            }),
            _ => turns(order, || {
                let reply = client.call(POINT, &[])?;
                let [address, len] = [0, 8].map(|at| reply.array(at).map(u64::from_ne_bytes));
                let view = client.follow(address?, len?)?;
                check(answer_in_place(kind, &view, |address, len| client.follow(address, len))?)
            }),
        };
        request[1..].fill(0);
        client.call(PREPARE, &request).map_err(fault("forgetting a sequence"))?;
        figures
    }

    /// Null calls, each of which begins before earlier ones have returned.
    fn pipelined(&self, order: &PeerOrder) -> Result<Figures> {
        let client = self.connect("small", HeapOptions::default())?;
        let mut held = client.exclusive().map_err(fault("holding a client"))?;
        let mut rate = |longest: Duration| -> Result<f64> {
            let (begin, mut begun, mut done) = (Instant::now(), 0usize, 0usize);
            while begin.elapsed() < longest {
                for _ in 0..BATCH {
                    if begun - done == WINDOW
                        && let Some(reply) = held.wait_next()
                    {
                        reply.map_err(fault("waiting for a reply"))?;
                        done += 1;
                    }
                    held.start(NULL, &[]).map_err(fault("calling"))?;
                    begun += 1;
                }
            }
            while let Some(reply) = held.wait_next() {
                reply.map_err(fault("waiting for a reply"))?;
                done += 1;
            }
            Ok(done as f64 / begin.elapsed().as_secs_f64())
        };
        rate(order.time / 5)?;
        Ok(Figures::from([(Metric::PerSecond, rate(order.time)?)]))
    }

    /// One client alone, beside many that are connected, and alone again; then how much processor time the idle ones take.
    fn crowd(&self, order: &PeerOrder) -> Result<Figures> {
        let client = self.connect("small", HeapOptions::default())?;
        let rate = || -> Result<f64> {
            let (begin, mut done) = (Instant::now(), 0u64);
            while begin.elapsed() < order.time {
                for _ in 0..BATCH {
                    client.call(NULL, &[]).map_err(fault("calling"))?;
                }
                done += BATCH as u64;
            }
            Ok(done as f64 / begin.elapsed().as_secs_f64())
        };
        rate()?;
        let before = rate()?;
        let others = (1..order.elements).map(|_| self.connect("small", HeapOptions::default()));
        let others: Vec<CallClient> = others.collect::<Result<_>>()?;
        for other in &others {
            other.call(NULL, &[]).map_err(fault("calling"))?;
        }
        let beside = rate()?;
        // Spinning has ended long before.
        std::thread::sleep(Duration::from_millis(200));
        let spent = || -> Result<f64> {
            let theirs = client.call(CPU_TIME, &[]).map_err(fault("calling"))?;
            let theirs = u64::from_ne_bytes(theirs.array(0).map_err(fault("reading a reply"))?);
            Ok(theirs as f64 / 1e9 + cpu_time().as_secs_f64())
        };
        let (begin, first) = (Instant::now(), spent()?);
        std::thread::sleep(order.time * 4);
        let idle = (spent()? - first) / begin.elapsed().as_secs_f64();
        drop(others);
        std::thread::sleep(Duration::from_millis(500));
        let after = rate()?;
        Ok(Figures::from([
            (Metric::PerSecond, beside),
            (Metric::BesideToAlone, beside * 2.0 / (before + after)),
            (Metric::BothCpuPercent, idle * 100.0),
        ]))
    }

    /// The set-up of a heap, until its memory is touched, and until the server has read a byte of each page.
    fn heap(&self, order: &PeerOrder) -> Result<Figures> {
        if matches!(order.place, PayloadPlace::Mapped | PayloadPlace::Populated) {
            return samples(order.most, || {
                let begin = Instant::now();
                let mut memory = KernelMemory::new(order.elements as usize, order.place == PayloadPlace::Populated)?;
                let set_up = begin.elapsed();
                touch(memory.bytes());
                Ok([set_up, begin.elapsed(), Duration::ZERO])
            });
        }
        let options = HeapOptions::default().first(order.elements).locked(order.place == PayloadPlace::Locked);
        let bytes = order.elements as usize;
        samples(order.most, || {
            let client = self.connect("small", options.clone())?;
            let begin = Instant::now();
            let mut block = client.heap().allocate(bytes).map_err(fault("allocating a heap"))?;
            let set_up = begin.elapsed();
            touch(&mut block);
            let touched = begin.elapsed();
            let begin = Instant::now();
            client.call(PAGES, &block).map_err(fault("calling"))?;
            Ok([set_up, touched, begin.elapsed()])
        })
    }
}

/// Repeats a call as an order says, and times each.
fn turns(order: &PeerOrder, mut call: impl FnMut() -> std::result::Result<(), CallError>) -> Result<Figures> {
    let begin = Instant::now();
    for done in 0.. {
        if done > 0 && (done >= order.most / 10 || begin.elapsed() > order.time / 10) {
            break;
        }
        call().map_err(fault("calling"))?;
    }
    let mut turns = TurnTimes::start()?;
    for _ in 0..order.most.max(1) {
        call().map_err(fault("calling"))?;
        turns.note();
        if turns.elapsed() > order.time {
            break;
        }
    }
    Ok(turns.figures())
}
