//! A peer of calls that owns its records and its heap, and does with them what bytes say. `random_calls.rs` takes the bytes from a generator, and
//! the fuzz target `call_records` from the fuzzer.

use partywall::rpc::{
    CallAnswer, CallClient, CallError, CallServer, CallServerBuilder, Carried, Declared, HeapOptions, IncomingCall,
    Method, MethodResult, PeerSlice, ValueReader,
};
use partywall::{ChannelRegion, Domain, Error, MessageListener, MessageSocket, Options, RingSize};
use std::time::Duration;

const HEAP: u32 = u32::from_le_bytes(*b"heap");
/// Where the liar says that its heap is.
const BASE: u64 = 0x3000_4000_0000;
const SIZE: u64 = 8192;
/// Operations of one input.
const MOST: usize = 256;
const METHODS: [&str; 7] = ["null", "echo", "zeros", "walk", "nothing", "ask", "typed"];

/// The bytes that decide, one after the other; zeros at the end.
struct Input<'a>(std::slice::Iter<'a, u8>);

impl Input<'_> {
    fn byte(&mut self) -> u8 {
        self.0.next().copied().unwrap_or(0)
    }

    fn is_over(&self) -> bool {
        self.0.as_slice().is_empty()
    }

    /// A number that is near a boundary more often than not.
    fn number(&mut self) -> u64 {
        let near = u64::from(self.byte()) % 16;
        match self.byte() % 12 {
            0 => near,
            1 => BASE + near * 8,
            2 => BASE + SIZE - near,
            3 => BASE - near,
            4 => u64::MAX - near,
            5 => SIZE - near,
            6 => SIZE + near,
            7 => 0x5000_0000_0000 - near,
            8 => 1 << (near * 4),
            9 => BASE + near * SIZE,
            _ => u64::from_le_bytes(std::array::from_fn(|_| self.byte())),
        }
    }

    /// The words of a record behind its stamp. Most are sound in most of their fields, so that they come past the first checks.
    fn record(&mut self) -> Vec<u8> {
        let shape = self.byte();
        let kind = match shape & 7 {
            7 => u64::from(self.byte()),
            kind => u64::from(kind),
        };
        let id = match shape >> 3 & 3 {
            0 => 0,
            1 => u64::from(self.byte() % 4),
            2 => u64::from(self.byte()) << 20 | u64::from(self.byte() % 4),
            _ => self.number() & u64::from(u32::MAX),
        };
        let method = match shape >> 5 & 3 {
            3 => self.number() & u64::from(u32::MAX),
            _ => u64::from(Method::named(METHODS[usize::from(self.byte()) % METHODS.len()]).number()),
        };
        let flags = if shape & 128 == 0 { u64::from(self.byte() % 2) } else { u64::from(self.byte()) };
        let status = if flags == 0 { u64::from(self.byte() % 8) } else { 0 };
        let len = if flags == 1 { 0 } else { u64::from(self.byte() % 48) };
        let mut words =
            vec![id | method << 32, kind | flags << 8 | status << 16 | len << 32, self.number(), self.number()];
        words.extend(std::iter::repeat_with(|| u64::from(self.byte())).take(3));
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }
}

/// A client that `takes_calls` back says so.
fn hello(takes_calls: bool) -> Vec<u8> {
    let kind = 1 | u64::from(takes_calls) << 16;
    [1u64 << 32, kind, 0, 0, 0, 0, 0].iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn options() -> Options {
    Options::default().ring(RingSize::Fixed(1 << 16))
}

/// The functions that the honest server offers.
fn functions() -> CallServerBuilder {
    let small = HeapOptions::default().first(1 << 16).max(1 << 18);
    CallServer::builder()
        .heap(small)
        .max_follows(100)
        .method("null", |_| Ok(().into()))
        .method("echo", |call| Ok(call.args().try_to_vec()?.into()))
        .method("zeros", |call| Ok(call.heap().allocate(1000)?.into()))
        .method("walk", |call| {
            let mut next = u64::from_le_bytes(call.args().array(0)?);
            while next != 0 {
                next = u64::from_le_bytes(call.follow(next, 8)?.array(0)?);
            }
            Ok(().into())
        })
        .method("ask", ask)
        .method("typed", typed)
}

/// Calls the client back twice. A client that does not answer in time is left alone.
fn ask(call: &IncomingCall<'_>) -> Result<CallAnswer, CallError> {
    let short = Duration::from_micros(500);
    let first = call.call_back_within(short, "echo", &[7; 100]);
    let second = call.call_back_within(short, "null", &[]);
    for view in [&first, &second].into_iter().flatten() {
        let bytes = view.try_to_vec()?;
        assert!(bytes.len() as u64 <= SIZE, "{} bytes", bytes.len());
        assert!(view.read_at(bytes.len(), &mut [0]).is_err());
    }
    Ok(first?.try_to_vec()?.into())
}

/// Reads a frame of typed values: a text and numbers that may lie in the caller's heap, and an optional value.
fn typed(call: &IncomingCall<'_>) -> Result<CallAnswer, CallError> {
    let mut frame = ValueReader::of_call(call);
    let numbers: PeerSlice<u32> = <fn(&[u32]) as Declared>::see(&mut frame)?;
    assert!(numbers.len() as u64 * 4 <= SIZE);
    let text = String::take(&mut frame)?;
    let flag = <Option<bool> as Carried>::take(&mut frame)?;
    frame.finish()?;
    let sum = numbers.iter().try_fold(0u64, |sum, number| Ok::<_, CallError>(sum + u64::from(number?)))?;
    Ok((text, flag.map(|flag| sum + u64::from(flag))).give())
}

/// Does what the input says, until it is over or the connection is. Returns whether the connection lives.
fn lie(socket: &mut MessageSocket, input: &mut Input<'_>) -> bool {
    socket.set_nonblocking(true);
    let mut heaps: Vec<ChannelRegion> = Vec::new();
    for _ in 0..MOST {
        if input.is_over() {
            return true;
        }
        let done = match input.byte() % 8 {
            0 => match heaps.len() {
                ..3 => {
                    if let Ok(heap) = socket.regions().add(HEAP, SIZE) {
                        // The address as it is, or another number.
                        let address = if input.byte().is_multiple_of(4) {
                            input.number()
                        } else {
                            BASE + heaps.len() as u64 * SIZE
                        };
                        let words = [u64::from(heap.number()), 6 | 1 << 8, address, SIZE, 0, 0, 0];
                        heaps.push(heap);
                        let record: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
                        socket.send(&record)
                    } else {
                        Ok(())
                    }
                }
                _ => Ok(()),
            },
            1 => {
                let word = input.number().to_le_bytes();
                let at = usize::from(input.byte()) * 8;
                let which = usize::from(input.byte()) % 3;
                if let Some(heap) = heaps.get_mut(which) {
                    heap.bytes_mut()[at..at + 8].copy_from_slice(&word);
                }
                Ok(())
            }
            2 => {
                // Gives back what it was lent, or something else: the first block of the other side's heap has this address.
                let channel = u64::from(input.byte());
                let first = 0x3000_0000_0000 + (2 * channel + u64::from(input.byte() % 2)) % 8192 * (4 << 30) + 4096;
                let address = first + u64::from(input.byte() % 4) * 1024;
                let words = [0, 5 | 1 << 8, address, 0, 0, 0, 0];
                let record: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
                socket.send(&record)
            }
            3 => {
                let nonsense: Vec<u8> = (0..input.byte() % 80).map(|_| input.byte()).collect();
                socket.send(&nonsense)
            }
            _ => socket.send(&input.record()),
        };
        match done {
            Ok(()) | Err(Error::WouldBlock) => {}
            Err(_) => return false,
        }
    }
    true
}

/// A server that clients lie to, and an honest client of it that must not notice.
#[derive(Debug)]
pub(crate) struct LiedToServer {
    domain: Domain,
    server: CallServer,
    honest: CallClient,
}

impl LiedToServer {
    pub(crate) fn new(domain: Domain) -> Self {
        let server = functions().bind(&domain, "calls").unwrap();
        let target = format!("{}:calls", domain.name());
        let honest = CallClient::builder().connect(&domain, &target).unwrap();
        Self { domain, server, honest }
    }

    /// # Panics
    /// If the honest client is not served, or if something is left of the liar.
    pub(crate) fn run(&self, input: &[u8]) {
        let mut input = Input(input.iter());
        let target = format!("{}:calls", self.domain.name());
        let Ok(mut liar) = MessageSocket::connect_with(&self.domain, &target, &options()) else { return };
        // Results by reference need it.
        let _ = liar.regions().take(HEAP, 8, 1 << 20);
        let _ = liar.send(&hello(!input.byte().is_multiple_of(4)));
        lie(&mut liar, &mut input);
        let reply = self.honest.call("echo", &[7; 100]).unwrap();
        assert_eq!(reply.try_to_vec().unwrap(), [7; 100]);
        drop((reply, liar));
        for _ in 0..30_000 {
            if self.server.clients() == 1 {
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        panic!("the liar's connection is left");
    }
}

/// A server that lies to an honest client.
#[derive(Debug)]
pub(crate) struct LyingServer {
    domain: Domain,
    listener: MessageListener,
}

impl LyingServer {
    pub(crate) fn new(domain: Domain) -> Self {
        let listener = MessageListener::bind(&domain, "lies", &options()).unwrap();
        Self { domain, listener }
    }

    /// # Panics
    /// If the client gets a result that no server can have sent it.
    pub(crate) fn run(&mut self, input: &[u8]) {
        let mut input = Input(input.iter());
        let target = format!("{}:lies", self.domain.name());
        let domain = self.domain.clone();
        let client = std::thread::spawn(move || {
            let client = CallClient::builder()
                .max_peer_heap(1 << 20)
                .heap(HeapOptions::default().first(1 << 16).max(1 << 18))
                .method("null", |_| Ok(().into()))
                .method("echo", |call| Ok(call.args().try_to_vec()?.into()))
                .method("zeros", |call| Ok(call.heap().allocate(1000)?.into()))
                .method("typed", typed)
                .connect(&domain, &target)?;
            // Its caller gives it up.
            drop(client.start("null", &[]));
            let short = Duration::from_millis(2);
            for n in 0..8u8 {
                let arguments = vec![n; 30 * usize::from(n)];
                if n % 4 == 3 {
                    let _ = client.call_within(short, "typed", &[]).and_then(Vec::<u16>::receive);
                }
                match client.call_within(short, METHODS[usize::from(n) % METHODS.len()], &arguments) {
                    // Any reply can be read to its end and not beyond.
                    Ok(reply) => {
                        let bytes = reply.try_to_vec()?;
                        assert!(bytes.len() as u64 <= SIZE, "{} bytes", bytes.len());
                        assert!(reply.read_at(bytes.len(), &mut [0]).is_err());
                    }
                    Err(CallError::Application { code, .. }) => assert!(code > 0 && code < i32::MAX as u32 - 999),
                    Err(_) => {}
                }
                let _ = client.notify_within(short, "null", &[]);
            }
            Ok::<(), CallError>(())
        });
        let mut liar = self.listener.accept().unwrap().0;
        let _ = liar.regions().take(HEAP, 8, 1 << 20);
        let _ = liar.send(&hello(input.byte().is_multiple_of(16)));
        lie(&mut liar, &mut input);
        // A client whose server has gone ends by itself.
        drop(liar);
        let _ = client.join().unwrap();
    }
}
