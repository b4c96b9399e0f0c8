//! iceoryx2, the one peer that installs from a registry: publish/subscribe of byte slices, one service each way, and request/response.
//!
//! It waits by polling, here without a pause, which is its quickest way; a full subscriber holds the publisher. Its files live under
//! the bench's own folder under a separate prefix, and are removed in the end.
#![expect(unsafe_code, reason = "iceoryx2 lends memory whose initialisation the borrower has to vouch for")]

use std::{fs, hint::spin_loop, os::unix::ffi::OsStrExt};

use iceoryx2::{
    active_request::ActiveRequest,
    pending_response::PendingResponse,
    port::{client::Client, publisher::Publisher, server::Server, subscriber::Subscriber},
    prelude::*,
    sample_mut::SampleMut,
};

use super::{CopyLink, InPlace};
use crate::{
    control::Beat,
    error::{BenchError, Result},
    measure::sum::{self, WordSum},
    task::{MeasuringSide, MeasuringTask},
};

/// Bytes that may be under way, as far as messages allow.
const FOOTPRINT: u64 = 4 << 20;
/// The folder of iceoryx2's shared memory.
const SHARED_MEMORY: &str = "/dev/shm";

/// A publisher out and a subscriber in.
#[derive(Debug)]
pub(super) struct Iceoryx2 {
    publisher: Publisher<ipc::Service, [u8], ()>,
    subscriber: Subscriber<ipc::Service, [u8], ()>,
    // The node outlives its ports.
    _node: Node<ipc::Service>,
}

/// How every file of the bench's own begins; its process id follows.
const PREFIX: &str = "partywall_bench_";

/// Removes what killed measuring processes, of this bench or of one that was killed itself, left of iceoryx2.
pub(crate) fn remove_leftovers() {
    for entry in fs::read_dir(SHARED_MEMORY).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let pid =
            name.strip_prefix(PREFIX).and_then(|rest| rest.split('_').next()).and_then(|pid| pid.parse::<u32>().ok());
        let gone = |pid: u32| pid == std::process::id() || !fs::exists(format!("/proc/{pid}")).unwrap_or(true);
        if pid.is_some_and(gone)
            && let Err(e) = fs::remove_file(entry.path())
        {
            eprintln!("partywall-bench: {} stays behind: {e}", entry.path().display());
        }
    }
}

fn fault(e: &dyn std::fmt::Debug) -> BenchError {
    BenchError::Transport(format!("setting iceoryx2 up: {e:?}"))
}

/// A node whose files are the bench's own.
fn node(task: &MeasuringTask) -> Result<Node<ipc::Service>> {
    set_log_level(LogLevel::Error);
    let mut config = Config::default();
    config
        .global
        .set_root_path(&Path::new(task.scratch.join("iceoryx2").as_os_str().as_bytes()).map_err(|e| fault(&e))?);
    config.global.prefix = FileName::new(format!("{PREFIX}{}_", task.parent).as_bytes()).map_err(|e| fault(&e))?;
    NodeBuilder::new().config(&config).create::<ipc::Service>().map_err(|e| fault(&e))
}

impl Iceoryx2 {
    /// Makes both ports, and waits until the other side has too.
    pub(super) fn open(task: &MeasuringTask, beat: &Beat) -> Result<Self> {
        let node = node(task)?;
        let buffer = (FOOTPRINT / task.tuning.message.max(1)).clamp(2, 256) as usize;
        let service = |direction: &str| {
            let name = ServiceName::new(&format!("{}/{direction}", task.session)).map_err(|e| fault(&e))?;
            node.service_builder(&name)
                .publish_subscribe::<[u8]>()
                .enable_safe_overflow(false)
                .subscriber_max_buffer_size(buffer)
                .max_publishers(1)
                .max_subscribers(1)
                .open_or_create()
                .map_err(|e| fault(&e))
        };
        let (forward, reverse) = (service("forward")?, service("reverse")?);
        let (out, inward) = match task.side {
            MeasuringSide::Active => (forward, reverse),
            MeasuringSide::Passive => (reverse, forward),
        };
        let publisher = out
            .publisher_builder()
            .initial_max_slice_len(task.tuning.message as usize)
            .backpressure_strategy(BackpressureStrategy::RetryUntilDelivered)
            .create()
            .map_err(|e| fault(&e))?;
        let subscriber = inward.subscriber_builder().buffer_size(buffer).create().map_err(|e| fault(&e))?;
        beat.meet()?;
        Ok(Self { publisher, subscriber, _node: node })
    }

    /// A message of the given length, with whatever its memory contains.
    fn lend(&self, len: usize) -> Result<SampleMut<ipc::Service, [u8], ()>> {
        let sample =
            self.publisher.loan_slice_uninit(len).map_err(|e| BenchError::transport("borrowing from iceoryx2", e))?;
        // SAFETY: the bytes lie in shared memory, which the kernel filled with zeros before anyone wrote to it, and every value is a
        // valid `u8`.
        Ok(unsafe { sample.assume_init() })
    }

    fn publish(sample: SampleMut<ipc::Service, [u8], ()>) -> Result<()> {
        match sample.send().map_err(|e| BenchError::transport("sending through iceoryx2", e))? {
            1 => Ok(()),
            _ => Err(BenchError::Transport("iceoryx2 found no receiver".into())),
        }
    }

    /// The next message, for as long as `look` looks at it.
    fn take<T>(&self, look: impl FnOnce(&[u8]) -> T) -> Result<T> {
        loop {
            match self.subscriber.receive().map_err(|e| BenchError::transport("receiving through iceoryx2", e))? {
                Some(sample) => return Ok(look(&sample)),
                None => spin_loop(),
            }
        }
    }
}

impl CopyLink for Iceoryx2 {
    fn send(&mut self, message: &[u8]) -> Result<()> {
        let sample = self
            .publisher
            .loan_slice_uninit(message.len())
            .map_err(|e| BenchError::transport("borrowing from iceoryx2", e))?;
        Self::publish(sample.write_from_slice(message))
    }

    fn receive(&mut self, buffer: &mut [u8]) -> Result<usize> {
        self.take(|message| {
            let to = buffer.get_mut(..message.len());
            to.map(|to| to.copy_from_slice(message)).map(|()| message.len())
        })?
        .ok_or_else(|| BenchError::Damaged("a message is longer than any that was sent".into()))
    }

    fn whole_messages(&self) -> bool {
        true
    }
}

impl InPlace for Iceoryx2 {
    fn produce(&mut self, len: usize, word: u64) -> Result<()> {
        let mut sample = self.lend(len)?;
        sum::fill(sample.payload_mut(), word);
        Self::publish(sample)
    }

    fn consume(&mut self, _most: usize, sum: &mut WordSum) -> Result<usize> {
        self.take(|message| {
            sum.add(message);
            message.len()
        })
    }

    fn hand_over(&mut self, len: usize, word: u64) -> Result<()> {
        let mut sample = self.lend(len)?;
        sum::fill(&mut sample.payload_mut()[..8], word);
        Self::publish(sample)
    }

    fn take_over(&mut self, len: usize) -> Result<u64> {
        self.take(|message| {
            message.first_chunk::<8>().filter(|_| message.len() == len).map(|head| u64::from_ne_bytes(*head))
        })?
        .ok_or_else(|| BenchError::Damaged("a message has not the length that was sent".into()))
    }
}

/// One side of iceoryx2's request/response. The client polls for its response, and the server for requests.
#[derive(Debug)]
pub(super) struct Iceoryx2Call {
    side: CallSide,
    // The node outlives its ports.
    _node: Node<ipc::Service>,
}

type Pending = PendingResponse<ipc::Service, [u8], (), [u8], ()>;
type Active = ActiveRequest<ipc::Service, [u8], (), [u8], ()>;

#[derive(Debug)]
enum CallSide {
    Client { client: Client<ipc::Service, [u8], (), [u8], ()>, pending: Option<Pending> },
    Server { server: Server<ipc::Service, [u8], (), [u8], ()>, active: Option<Active> },
}

impl Iceoryx2Call {
    /// Makes the port of this side, and waits until the other side has too.
    pub(super) fn open(task: &MeasuringTask, beat: &Beat) -> Result<Self> {
        let node = node(task)?;
        let name = ServiceName::new(&format!("{}/call", task.session)).map_err(|e| fault(&e))?;
        let service =
            node.service_builder(&name).request_response::<[u8], [u8]>().open_or_create().map_err(|e| fault(&e))?;
        let most = task.tuning.message as usize;
        let side = match task.side {
            MeasuringSide::Active => {
                let client = service.client_builder().initial_max_slice_len(most).create().map_err(|e| fault(&e))?;
                CallSide::Client { client, pending: None }
            }
            MeasuringSide::Passive => {
                let server = service.server_builder().initial_max_slice_len(most).create().map_err(|e| fault(&e))?;
                CallSide::Server { server, active: None }
            }
        };
        beat.meet()?;
        Ok(Self { side, _node: node })
    }
}

fn copy(message: &[u8], buffer: &mut [u8]) -> Result<usize> {
    let to = buffer.get_mut(..message.len());
    let to = to.ok_or_else(|| BenchError::Damaged("a message is longer than any that was sent".into()))?;
    to.copy_from_slice(message);
    Ok(message.len())
}

impl CopyLink for Iceoryx2Call {
    fn send(&mut self, message: &[u8]) -> Result<()> {
        let fault = |e: &dyn std::fmt::Debug| BenchError::Transport(format!("calling through iceoryx2: {e:?}"));
        match &mut self.side {
            CallSide::Client { client, pending } => {
                let request = client.loan_slice_uninit(message.len()).map_err(|e| fault(&e))?;
                *pending = Some(request.write_from_slice(message).send().map_err(|e| fault(&e))?);
            }
            CallSide::Server { active, .. } => {
                let request = active.take().ok_or_else(|| fault(&"no request to answer"))?;
                let response = request.loan_slice_uninit(message.len()).map_err(|e| fault(&e))?;
                response.write_from_slice(message).send().map_err(|e| fault(&e))?;
            }
        }
        Ok(())
    }

    fn receive(&mut self, buffer: &mut [u8]) -> Result<usize> {
        let fault = |e: &dyn std::fmt::Debug| BenchError::Transport(format!("receiving through iceoryx2: {e:?}"));
        match &mut self.side {
            CallSide::Client { pending, .. } => {
                let request = pending.take().ok_or_else(|| fault(&"no call is under way"))?;
                loop {
                    match request.receive().map_err(|e| fault(&e))? {
                        Some(response) => return copy(response.payload(), buffer),
                        None => spin_loop(),
                    }
                }
            }
            CallSide::Server { server, active } => loop {
                match server.receive().map_err(|e| fault(&e))? {
                    Some(request) => {
                        let len = copy(request.payload(), buffer)?;
                        *active = Some(request);
                        return Ok(len);
                    }
                    None => spin_loop(),
                }
            },
        }
    }

    fn whole_messages(&self) -> bool {
        true
    }
}
