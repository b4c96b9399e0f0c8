//! The hand on the switch: turns connections up and down, when a program asks for it or at random, and watches that it happens.

use std::{
    collections::{HashMap, HashSet},
    io::{Read, Write},
    os::{fd::OwnedFd, unix::net::UnixStream},
    path::PathBuf,
    process::Stdio,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use super::{
    client::{Client, look_at},
    random::Random,
    world::World,
};

/// The connections on rings that were seen. Very short ones may come and go between two looks.
#[derive(Debug, Default, Clone)]
pub(crate) struct Seen {
    /// Connections that were on a ring.
    pub(crate) channels: u64,
    /// Bytes that went over rings.
    pub(crate) ring_bytes: u64,
    /// Changes of way.
    pub(crate) switches: u64,
}

/// Ends a thread with this value.
struct Thread {
    stop: Arc<AtomicBool>,
    handle: Option<JoinHandle<()>>,
}

impl Thread {
    /// Does `turn` again and again.
    fn repeat(mut turn: impl FnMut() + Send + 'static) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&stop);
        let handle = thread::spawn(move || {
            while !told.load(Ordering::Relaxed) {
                turn();
            }
        });
        Self { stop, handle: Some(handle) }
    }
}

impl Drop for Thread {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(handle) = self.handle.take()
            && handle.join().is_err()
            && !thread::panicking()
        {
            panic!("a helper thread failed");
        }
    }
}

/// Sets the policy, joining the broker again if it is another one now.
pub(crate) struct Policy {
    socket: PathBuf,
    client: Option<Client>,
}

impl Policy {
    pub(crate) fn new(socket: PathBuf) -> Self {
        Self { socket, client: None }
    }

    pub(crate) fn set(&mut self, clauses: &str) {
        // Once more, if the broker was killed since.
        for _ in 0..2 {
            if self.client.is_none() {
                self.client = Client::join(&self.socket, "hand");
            }
            if self.client.as_mut().is_some_and(|client| client.set_policy(clauses)) {
                return;
            }
            self.client = None;
        }
    }

    fn turn(&mut self, up: bool) {
        self.set(if up { "now" } else { "never" });
    }
}

/// A channel that was seen once. Its memory is held as long as it is listed, so that nothing depends on how often one comes to look.
#[derive(Default)]
struct Held {
    sides: Vec<OwnedFd>,
    bytes: u64,
    switches: u64,
}

impl Held {
    fn look(&mut self) {
        let sides: Vec<_> = self.sides.iter().filter_map(look_at).collect();
        self.bytes = self.bytes.max(sides.iter().map(|side| side.0).sum());
        self.switches = self.switches.max(sides.iter().map(|side| u64::from(side.1)).sum());
    }
}

pub(crate) struct Switch {
    socket: PathBuf,
    seen: Arc<Mutex<HashMap<u64, Held>>>,
    _watcher: Thread,
}

/// A program's way to the switch.
pub(crate) struct Hand {
    theirs: Option<UnixStream>,
    _thread: JoinHandle<()>,
}

impl Hand {
    /// Its standard input.
    pub(crate) fn stdin(mut self) -> Stdio {
        self.theirs.take().map_or_else(Stdio::null, |stream| Stdio::from(OwnedFd::from(stream)))
    }
}

impl Switch {
    /// Everything is up from here on.
    pub(crate) fn new(world: &World) -> Self {
        Policy::new(world.socket()).turn(true);
        Self::watch(world)
    }

    /// Leaves the move rules as they are.
    pub(crate) fn watch(world: &World) -> Self {
        let seen: Arc<Mutex<HashMap<u64, Held>>> = Arc::default();
        let (socket, noted) = (world.socket(), Arc::clone(&seen));
        let path = socket.clone();
        let mut client = None;
        let mut goes_first = false;
        let watcher = Thread::repeat(move || {
            if !goes_first {
                // Before the programs that it watches: on a busy machine a connection comes and goes within one turn of theirs. This sets the
                // thread's priority, not the process's, and not without the right to.
                let _ = rustix::process::setpriority_process(None, -20);
                goes_first = true;
            }
            if client.is_none() {
                client = Client::join(&path, "watcher");
            }
            let rows = client.as_mut().map(Client::channels).unwrap_or_default();
            if rows.is_empty() {
                client = Client::join(&path, "watcher");
            }
            for row in &rows {
                let Some(sides) = client.as_mut().and_then(|client| client.inspect(row.channel)) else { continue };
                let mut noted = noted.lock().unwrap();
                let held = noted.entry(row.channel).or_default();
                held.look();
                held.sides = sides;
                held.look();
            }
            let listed: HashSet<u64> = rows.iter().map(|row| row.channel).collect();
            for (channel, held) in noted.lock().unwrap().iter_mut().filter(|(_, held)| !held.sides.is_empty()) {
                held.look();
                // Both ends have closed it: that was all.
                if client.is_some() && !listed.contains(channel) {
                    held.sides.clear();
                }
            }
            thread::sleep(Duration::from_millis(3));
        });
        Self { socket, seen, _watcher: watcher }
    }

    /// Turns everything up or down.
    pub(crate) fn turn(&self, up: bool) {
        Policy::new(self.socket.clone()).turn(up);
    }

    /// For a program that says itself when: `u` and `d` on its standard input, answered when done.
    pub(crate) fn hand(&self) -> Hand {
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        let mut policy = Policy::new(self.socket.clone());
        policy.turn(true);
        let thread = thread::spawn(move || {
            let mut byte = [0];
            while ours.read_exact(&mut byte).is_ok() {
                policy.turn(byte[0] == b'u');
                if ours.write_all(&byte).is_err() {
                    break;
                }
            }
        });
        Hand { theirs: Some(theirs), _thread: thread }
    }

    /// Up and down, as long as the value lives; the counter says how often.
    pub(crate) fn flip_at_random(&self, seed: u64) -> Flipping {
        let flips = Arc::new(AtomicU64::new(0));
        let (mut policy, count) = (Policy::new(self.socket.clone()), Arc::clone(&flips));
        let mut random = Random(seed | 1);
        let thread = Thread::repeat(move || {
            let state = random.next();
            let turn = count.fetch_add(1, Ordering::Relaxed);
            policy.turn(turn % 2 == 1);
            // Mostly in quick succession, now and then at leisure.
            let pause = if state & 7 == 0 { state >> 8 & 0x3fff } else { state >> 8 & 0x3ff };
            thread::sleep(Duration::from_micros(pause));
        });
        Flipping { flips, _thread: thread }
    }

    /// Connections with at least this number of bytes on their rings.
    pub(crate) fn channels_with(&self, bytes: u64) -> u64 {
        let mut noted = self.seen.lock().unwrap();
        noted.values_mut().for_each(Held::look);
        noted.values().filter(|held| held.bytes >= bytes).count() as u64
    }

    pub(crate) fn seen(&self) -> Seen {
        let mut noted = self.seen.lock().unwrap();
        noted.values_mut().for_each(Held::look);
        Seen {
            channels: noted.len() as u64,
            ring_bytes: noted.values().map(|held| held.bytes).sum(),
            switches: noted.values().map(|held| held.switches).sum(),
        }
    }
}

/// See [`Switch::flip_at_random`].
pub(crate) struct Flipping {
    pub(crate) flips: Arc<AtomicU64>,
    _thread: Thread,
}
