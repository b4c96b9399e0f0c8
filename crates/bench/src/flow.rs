//! A plain client and a plain server of TCP and UDP, by the standard library alone: what `apps` and `residency` load with the
//! library, or not, to measure what no program of Debian's measures. It knows nothing of Partywall.
//!
//! ```text
//! flow serve ADDRESS PORT                        TCP and UDP; until it is ended
//! flow stream TARGETS BYTES MILLIS               one connection to each, messages as fast as they go;
//!                                                TARGETS: ADDRESS:PORT,... of local peers, and of remote ones behind a slash
//! flow rounds ADDRESS:PORT BYTES MILLIS          question and answer
//! flow meet ADDRESS:PORT 0 MILLIS                connect, have one byte sent back, close
//! flow errand ADDRESS:PORT BYTES MILLIS          connect, one question, one answer, close
//! flow udp-stream, udp-rounds                    likewise
//! flow KIND TARGETS BYTES MILLIS accounts        the same, with the kernel's accounts of this machine and the first peer's
//! flow listen ADDRESS FIRST COUNT                COUNT listeners, from this port on, on addresses after this one
//! ```

use std::{
    collections::BTreeSet,
    io::{ErrorKind, Read, Write},
    net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket},
    sync::{Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};

use crate::{
    apps::accounts::{self, BusyStretch, FlowCounters, ThreadCounters},
    error::{BenchError, During, Result},
    measure::turns::TurnTimes,
    report::metric::Metric,
    task::Figures,
};

/// Leads each connection: what the client wants of the server, and the size of its messages.
const HELLO: usize = 9;
const SINK: u8 = b's';
const ECHO: u8 = b'e';
const ACCOUNTS: u8 = b'a';
/// The port after the server's: it answers one question, and takes the next connection only when this one has ended: a thread for each
/// would cost more than what is to be measured.
const SHORT: u16 = 1;
/// A datagram of one byte asks how many bytes have arrived, and resets the count.
const ASK: usize = 1;

/// Runs one of the above.
pub(crate) fn run(words: &[String]) -> Result<()> {
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let figures = match words[..] {
        ["serve", address, port] => return serve(SocketAddr::new(parse(address)?, parse(port)?)),
        ["listen", address, first, count] => return listen(parse(address)?, parse(first)?, parse(count)?),
        [kind, targets, bytes, millis, ref more @ ..] if more.is_empty() || *more == ["accounts"] => {
            let (local, remote) = targets.split_once('/').unwrap_or((targets, ""));
            let of = |list: &str| -> Result<Vec<SocketAddr>> {
                list.split(',').filter(|word| !word.is_empty()).map(parse).collect()
            };
            let (mut targets, remote) = (of(local)?, of(remote)?);
            let local = targets.len();
            targets.extend(remote);
            let (bytes, time) = (parse(bytes)?, Duration::from_millis(parse(millis)?));
            let first = *targets.first().ok_or_else(|| BenchError::Usage("flow: to whom?".into()))?;
            let accounts = (!more.is_empty()).then(|| accounts_with(first)).transpose()?;
            let begin = Instant::now();
            let mut figures = match kind {
                "stream" => streams(&targets, local, bytes, time)?,
                "rounds" => rounds(first, bytes, time)?,
                "meet" => over_and_over(time, || errand(first, 1))?,
                "errand" => over_and_over(time, || errand(first, bytes))?,
                "udp-stream" => udp_stream(first, bytes, time)?,
                "udp-rounds" => udp_rounds(first, bytes, time)?,
                _ => return Err(usage()),
            };
            if let Some([own, peer]) = accounts {
                let wall = begin.elapsed();
                let [own_now, peer_now] = accounts_with(first)?;
                let (mut before, mut after) = (peer, peer_now);
                before.switches += own.switches;
                after.switches += own_now.switches;
                figures.extend(before.until(&after, wall));
            } else {
                figures.retain(|metric, _| !matches!(metric, Metric::MachineCpuPercent | Metric::CpuNsPerOperation));
            }
            figures
        }
        _ => return Err(usage()),
    };
    let text = serde_json::to_string(&figures).map_err(|e| BenchError::transport("writing figures", e))?;
    println!("{text}");
    Ok(())
}

fn usage() -> BenchError {
    BenchError::Usage("`flow` is how the bench starts its own plain programs, and is of no use by hand".into())
}

fn parse<T: std::str::FromStr>(word: &str) -> Result<T> {
    word.parse().map_err(|_| BenchError::Usage(format!("flow: {word} makes no sense there")))
}

fn serve(at: SocketAddr) -> Result<()> {
    let datagrams = UdpSocket::bind(at).during(format!("binding {at}"))?;
    thread::spawn(move || serve_datagrams(&datagrams));
    let next = short(at)?;
    let visitors = TcpListener::bind(next).during(format!("listening on {next}"))?;
    thread::spawn(move || serve_visitors(&visitors));
    // Stored last: a reader that sees it sees the others too.
    let listener = TcpListener::bind(at).during(format!("listening on {at}"))?;
    for stream in listener.incoming() {
        let stream = stream.during("accepting")?;
        // A client that goes away early is no fault of the server's.
        thread::spawn(move || {
            let thread = ServerThread::begin();
            drop(serve_one(stream));
            drop(thread);
        });
    }
    Ok(())
}

/// What a server's threads have counted that have ended. The kernel shows the counters of a thread no longer than the thread itself.
#[derive(Debug)]
struct EndedThreads {
    counters: ThreadCounters,
    /// Those among them that the kernel may still show.
    numbers: BTreeSet<u32>,
}

static ENDED: Mutex<EndedThreads> =
    Mutex::new(EndedThreads { counters: ThreadCounters { waited: 0, blocked: 0 }, numbers: BTreeSet::new() });

/// A thread of the server that ends with its connection.
struct ServerThread(u32);

impl ServerThread {
    fn begin() -> Self {
        let number = rustix::thread::gettid().as_raw_nonzero().get().unsigned_abs();
        ENDED.lock().unwrap_or_else(PoisonError::into_inner).numbers.remove(&number);
        Self(number)
    }
}

impl Drop for ServerThread {
    fn drop(&mut self) {
        let mut ended = ENDED.lock().unwrap_or_else(PoisonError::into_inner);
        ended.counters += ThreadCounters::from_thread(std::process::id(), self.0);
        ended.numbers.insert(self.0);
    }
}

/// The counters of this process, those of its ended threads included.
fn own_counters() -> FlowCounters {
    let mut ended = ENDED.lock().unwrap_or_else(PoisonError::into_inner);
    let process = std::process::id();
    let threads: BTreeSet<u32> = accounts::threads(process).into_iter().collect();
    ended.numbers.retain(|number| threads.contains(number));
    let mut counters = ended.counters;
    threads.difference(&ended.numbers).for_each(|thread| counters += ThreadCounters::from_thread(process, *thread));
    FlowCounters::of(counters)
}

/// Where connections that come and go are served.
fn short(at: SocketAddr) -> Result<SocketAddr> {
    let port =
        at.port().checked_add(SHORT).ok_or_else(|| BenchError::Usage("flow: there is no port after that".into()))?;
    Ok(SocketAddr::new(at.ip(), port))
}

fn serve_visitors(listener: &TcpListener) {
    let mut question = vec![0; 1 << 16];
    for stream in listener.incoming() {
        // A client that goes away early is no fault of the server's.
        let _ = stream.and_then(|mut stream| {
            let n = stream.read(&mut question)?;
            stream.write_all(&question[..n])?;
            // Until the client has closed it.
            stream.read(&mut question)
        });
    }
}

fn serve_one(mut stream: TcpStream) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let mut hello = [0; HELLO];
    stream.read_exact(&mut hello)?;
    if hello[0] == ACCOUNTS {
        return Ok(serde_json::to_writer(stream, &own_counters())?);
    }
    let size = hello[1..].first_chunk::<8>().map_or(0, |bytes| u64::from_ne_bytes(*bytes)) as usize;
    let mut buffer = vec![0; size.clamp(1, 1 << 20).max(if hello[0] == SINK { 64 << 10 } else { 1 })];
    if hello[0] == ECHO {
        buffer.truncate(size);
        while stream.read_exact(&mut buffer).is_ok() {
            stream.write_all(&buffer)?;
        }
        return Ok(());
    }
    let mut total = 0u64;
    loop {
        match stream.read(&mut buffer)? {
            0 => break,
            n => total += n as u64,
        }
    }
    stream.write_all(&total.to_ne_bytes())
}

fn serve_datagrams(socket: &UdpSocket) {
    let mut buffer = vec![0; 1 << 16];
    let mut total = 0u64;
    while let Ok((n, from)) = socket.recv_from(&mut buffer) {
        let answer: &[u8] = match (n, buffer.first()) {
            (ASK, _) => &std::mem::take(&mut total).to_ne_bytes(),
            (_, Some(&ECHO)) => &buffer[..n],
            _ => {
                total += n as u64;
                continue;
            }
        };
        // An answer that is not sent is one that is lost.
        let _ = socket.send_to(answer, from);
    }
}

fn connect(to: SocketAddr, what: u8, size: usize) -> Result<TcpStream> {
    let mut stream = TcpStream::connect(to).during(format!("connecting to {to}"))?;
    stream.set_nodelay(true).during("setting TCP_NODELAY")?;
    let mut hello = [what; HELLO];
    hello[1..].copy_from_slice(&(size as u64).to_ne_bytes());
    stream.write_all(&hello).during("sending")?;
    Ok(stream)
}

/// The kernel's accounts of this machine, and of a peer's machine with its server.
fn accounts_with(peer: SocketAddr) -> Result<[FlowCounters; 2]> {
    let mut answer = String::new();
    connect(peer, ACCOUNTS, 0)?.read_to_string(&mut answer).during("asking for accounts")?;
    let theirs = serde_json::from_str(&answer).map_err(|e| BenchError::transport("reading accounts", e))?;
    Ok([own_counters(), theirs])
}

/// Sends to all at once; the rate is that of all together, from the first byte to the last that has arrived. The first `local` ones are local
/// peers. If there are others, their rate together is a figure as well.
fn streams(targets: &[SocketAddr], local: usize, size: usize, time: Duration) -> Result<Figures> {
    // The time to connect, and to find the broker before that, does not count for the stream.
    let streams = targets.iter().map(|to| connect(*to, SINK, size)).collect::<Result<Vec<_>>>()?;
    let busy = BusyStretch::begin();
    let begin = Instant::now();
    let flows: Vec<(u64, f64)> = thread::scope(|scope| {
        let senders: Vec<_> = streams
            .into_iter()
            .map(|mut stream| {
                scope.spawn(move || {
                    let message = vec![7; size];
                    let mut sent = 0u64;
                    while begin.elapsed() < time {
                        // Several between two looks at the clock.
                        for _ in 0..16 {
                            stream.write_all(&message).during("sending")?;
                            sent += size as u64;
                        }
                    }
                    stream.shutdown(Shutdown::Write).during("shutting down")?;
                    let mut answer = [0; 8];
                    stream.read_exact(&mut answer).during("waiting for the count")?;
                    let arrived = u64::from_ne_bytes(answer);
                    if arrived != sent {
                        return Err(BenchError::Damaged(format!("{sent} bytes were sent and {arrived} arrived")));
                    }
                    Ok((arrived, begin.elapsed().as_secs_f64()))
                })
            })
            .collect();
        let fault = || BenchError::Transport("a sender ended".into());
        senders.into_iter().map(|sender| sender.join().unwrap_or_else(|_| Err(fault()))).collect::<Result<_>>()
    })?;
    let bytes: u64 = flows.iter().map(|(bytes, _)| bytes).sum();
    let busy = busy.end(bytes as f64 / size.max(1) as f64);
    let rate_of = |flows: &[(u64, f64)]| {
        let bytes: u64 = flows.iter().map(|(bytes, _)| bytes).sum();
        bytes as f64 / flows.iter().map(|(_, seconds)| *seconds).fold(1e-9, f64::max)
    };
    let rate = rate_of(&flows);
    let mut figures = Figures::from([(Metric::BytesPerSecond, rate), (Metric::PerSecond, rate / size.max(1) as f64)]);
    if let Some(remote @ [_, ..]) = flows.get(local..) {
        figures.insert(Metric::RemoteBytesPerSecond, rate_of(remote));
    }
    figures.extend(busy);
    Ok(figures)
}

/// Times each turn of something until the time is over.
fn over_and_over(time: Duration, mut turn: impl FnMut() -> Result<()>) -> Result<Figures> {
    // Not counted: by then connections are where they will be.
    let warm = Instant::now();
    while warm.elapsed() < time / 5 {
        turn()?;
    }
    let busy = BusyStretch::begin();
    let mut turns = TurnTimes::start()?;
    while turns.elapsed() < time {
        turn()?;
        turns.note();
    }
    let rate = turns.count() as f64 / turns.elapsed().as_secs_f64();
    let busy = busy.end(turns.count() as f64);
    let mut figures = turns.figures();
    figures.retain(|metric, _| !matches!(metric, Metric::MaxNs | Metric::MeanNs));
    figures.insert(Metric::PerSecond, rate);
    figures.extend(busy);
    Ok(figures)
}

fn rounds(to: SocketAddr, size: usize, time: Duration) -> Result<Figures> {
    let mut stream = connect(to, ECHO, size)?;
    let mut message = vec![7; size];
    over_and_over(time, || {
        stream.write_all(&message).during("sending")?;
        stream.read_exact(&mut message).during("receiving")
    })
}

fn errand(to: SocketAddr, size: usize) -> Result<()> {
    let to = short(to)?;
    let mut stream = TcpStream::connect(to).during(format!("connecting to {to}"))?;
    let mut message = vec![7; size];
    stream.write_all(&message).during("sending")?;
    stream.read_exact(&mut message).during("receiving")?;
    leave(&stream)
}

/// Closes so that no port stays in TIME_WAIT: tens of thousands of these would use up all there are.
fn leave(stream: &TcpStream) -> Result<()> {
    rustix::net::sockopt::set_socket_linger(stream, Some(Duration::ZERO)).during("setting SO_LINGER")
}

fn datagrams(to: SocketAddr) -> Result<UdpSocket> {
    let any = match to {
        SocketAddr::V4(_) => "0.0.0.0:0",
        SocketAddr::V6(_) => "[::]:0",
    };
    let socket = UdpSocket::bind(any).during("making a UDP socket")?;
    socket.connect(to).during(format!("connecting to {to}"))?;
    socket.set_read_timeout(Some(Duration::from_millis(200))).during("setting a timeout")?;
    Ok(socket)
}

fn udp_stream(to: SocketAddr, size: usize, time: Duration) -> Result<Figures> {
    let socket = datagrams(to)?;
    let message = vec![SINK; size.max(2)];
    let mut sent = 0u64;
    let busy = BusyStretch::begin();
    let begin = Instant::now();
    while begin.elapsed() < time {
        for _ in 0..16 {
            match socket.send(&message) {
                Ok(n) => sent += n as u64,
                // The other side reads more slowly than this writes.
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::OutOfMemory) => {}
                Err(e) => return Err(e).during("sending"),
            }
        }
    }
    let took = begin.elapsed().as_secs_f64();
    let mut answer = [0; 8];
    for _ in 0..50 {
        socket.send(&[0; ASK]).during("asking")?;
        if socket.recv(&mut answer).is_ok() {
            let arrived = u64::from_ne_bytes(answer) as f64;
            // Until here the server was busy with what had been sent.
            let mut figures = busy.end(arrived / message.len() as f64);
            figures.extend([
                (Metric::BytesPerSecond, arrived / took),
                (Metric::PerSecond, arrived / took / message.len() as f64),
                (Metric::LostPercent, 100.0 * (1.0 - arrived / sent.max(1) as f64).max(0.0)),
            ]);
            return Ok(figures);
        }
    }
    Err(BenchError::Transport("the server does not answer".into()))
}

fn udp_rounds(to: SocketAddr, size: usize, time: Duration) -> Result<Figures> {
    let socket = datagrams(to)?;
    let message = vec![ECHO; size.max(2)];
    let mut answer = vec![0; 1 << 16];
    over_and_over(time, || {
        // A lost datagram shows in the percentiles.
        for _ in 0..50 {
            socket.send(&message).during("sending")?;
            if socket.recv(&mut answer).is_ok() {
                return Ok(());
            }
        }
        Err(BenchError::Transport("the server does not answer".into()))
    })
}

/// Listens on many ports and addresses, and stays.
fn listen(first: Ipv4Addr, port: u16, count: u32) -> Result<()> {
    const PER_ADDRESS: u32 = 20_000;
    let mut listeners = Vec::with_capacity(count as usize);
    for at in 0..count {
        let address = Ipv4Addr::from(u32::from(first) + at / PER_ADDRESS);
        let to = SocketAddr::new(IpAddr::V4(address), port + (at % PER_ADDRESS) as u16);
        listeners.push(TcpListener::bind(to).during(format!("listening on {to}"))?);
    }
    println!("listening on {count}");
    loop {
        thread::park();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_of_ended_server_threads_are_kept() {
        let number = thread::spawn(|| {
            let thread = ServerThread::begin();
            (0..3).for_each(|_| thread::sleep(Duration::from_millis(1)));
            thread.0
        });
        let number = number.join().unwrap();
        let ended = ENDED.lock().unwrap();
        assert!(ended.counters.blocked >= 3, "{ended:?}");
        assert!(ended.numbers.contains(&number), "{ended:?}");
    }
}
