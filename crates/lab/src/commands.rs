//! Commands in a guest: numbered, several at a time, their answers told apart by one thread.

use crate::wire::{self, CommandFrame, FrameKind, FrameReader, WireItem};
use std::collections::HashMap;
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

#[derive(Debug, Default)]
struct CommandState {
    waiting: HashMap<u32, Sender<CommandFrame>>,
    /// How often the guest has started.
    greetings: u32,
    /// The port is closed: the machine has ended.
    ended: bool,
}

#[derive(Debug, Default)]
struct CommandsShared {
    state: Mutex<CommandState>,
    changed: Condvar,
}

/// The lab's end of the port.
#[derive(Debug)]
pub(crate) struct Commands {
    port: Mutex<UnixStream>,
    next: AtomicU32,
    shared: Arc<CommandsShared>,
}

impl Commands {
    pub(crate) fn new(port: UnixStream) -> io::Result<Self> {
        let mut stream = port.try_clone()?;
        let shared = Arc::new(CommandsShared::default());
        let reading = Arc::clone(&shared);
        // It ends with the machine, whose end of the port is then closed.
        std::thread::spawn(move || {
            let mut reader = FrameReader::default();
            while let Ok(Some(item)) = reader.next(&mut stream) {
                let mut state = reading.state();
                match item {
                    WireItem::Greeting => {
                        state.greetings += 1;
                        // Commands of before the reset get no answer any more.
                        state.waiting.clear();
                    }
                    WireItem::Frame(frame) => {
                        let last = matches!(frame.kind, FrameKind::Exited | FrameKind::Done | FrameKind::Failed);
                        let id = frame.id;
                        if let Some(sender) = state.waiting.get(&id) {
                            let _ = sender.send(frame);
                        }
                        if last {
                            state.waiting.remove(&id);
                        }
                    }
                }
                drop(state);
                reading.changed.notify_all();
            }
            let mut state = reading.state();
            state.ended = true;
            state.waiting.clear();
            drop(state);
            reading.changed.notify_all();
        });
        // A guest that was migrated here may still send the end of a command of its former lab.
        static LABS: AtomicU32 = AtomicU32::new(0);
        let first = LABS.fetch_add(1, Ordering::Relaxed).wrapping_mul(1 << 20) | 1;
        Ok(Self { port: Mutex::new(port), next: AtomicU32::new(first), shared })
    }

    /// How often the guest has started so far.
    pub(crate) fn greetings(&self) -> u32 {
        self.shared.state().greetings
    }

    /// Waits until it has started more often than `before`; `false` if the machine ended or time was up first.
    pub(crate) fn wait_greeting(&self, before: u32, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        let mut state = self.shared.state();
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if state.greetings > before || state.ended || left.is_zero() {
                return state.greetings > before;
            }
            state = self.shared.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Begins a command. The receiver is closed by its last answer, a reset, or the end of the machine.
    pub(crate) fn begin(&self, kind: FrameKind, payload: &[u8]) -> io::Result<(u32, Receiver<CommandFrame>)> {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let (sender, receiver) = channel();
        let mut state = self.shared.state();
        if state.ended {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        state.waiting.insert(id, sender);
        drop(state);
        self.send(id, kind, payload)?;
        Ok((id, receiver))
    }

    /// Sends a further frame of a command that has begun.
    pub(crate) fn send(&self, id: u32, kind: FrameKind, payload: &[u8]) -> io::Result<()> {
        let mut port = self.port.lock().unwrap_or_else(PoisonError::into_inner);
        wire::write(&mut *port, id, kind, payload)
    }
}

impl CommandsShared {
    fn state(&self) -> MutexGuard<'_, CommandState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
