//! Calls: the active side calls a function of the passive side, with the message as its arguments.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};

use partywall::Domain;
use partywall::rpc::{Block, CallClient, CallServer, HeapOptions, Method, Ongoing};

use super::CopyLink;
use super::partywall::{SERVICE, fault, join, options, target};
use crate::{
    control::Beat,
    error::{BenchError, Result},
    task::{MeasuringSide, MeasuringTask, MeasuringWork},
};

const TOUCH: Method = Method::named("touch");

/// One side of a connection of calls.
#[derive(Debug)]
pub(super) enum CallLink {
    /// Calls, one at a time. A message that does not fit into a record lies in the heap from the beginning, and its first 8 bytes are
    /// written for each call.
    Client { client: CallClient, block: Option<Block>, ongoing: Option<Ongoing>, _domain: Domain },
    /// Serves on a thread of the library, and says when all round trips are done.
    Server { _server: CallServer, done: Receiver<()>, _domain: Domain },
}

impl CallLink {
    pub(super) fn open(task: &MeasuringTask, beat: &Beat) -> Result<Self> {
        let (domain, options) = (join(task)?, options(task));
        match task.side {
            MeasuringSide::Passive => {
                let MeasuringWork::RoundTrip { warm_up, count, .. } = task.work else {
                    return Err(BenchError::Unavailable("calls are measured by round trips".into()));
                };
                let (sender, done) = channel();
                let (sender, executed) = (Mutex::new(sender), Arc::new(AtomicU64::new(0)));
                let server = CallServer::builder().options(options).numbered(TOUCH, move |call| {
                    let head: [u8; 8] = call.args().array(0)?;
                    if executed.fetch_add(1, Ordering::Relaxed) + 1 == warm_up + count
                        && let Ok(sender) = sender.lock()
                    {
                        let _ = sender.send(());
                    }
                    Ok(head.into())
                });
                let server = server.bind(&domain, SERVICE).map_err(fault("binding a service"))?;
                beat.tell(0)?;
                Ok(Self::Server { _server: server, done, _domain: domain })
            }
            MeasuringSide::Active => {
                beat.hear()?;
                let heap = HeapOptions::default().first(task.tuning.message * 2);
                let client = CallClient::builder().options(options).heap(heap).connect(&domain, &target(task));
                let client = client.map_err(fault("connecting a client of calls"))?;
                let block = match task.tuning.message {
                    ..=40 => None,
                    len => Some(client.heap().allocate(len as usize).map_err(fault("allocating from the heap"))?),
                };
                Ok(Self::Client { client, block, ongoing: None, _domain: domain })
            }
        }
    }
}

impl CopyLink for CallLink {
    #[inline]
    fn send(&mut self, message: &[u8]) -> Result<()> {
        let Self::Client { client, block, ongoing, .. } = self else { return Err(one_sided()) };
        let call = match block {
            Some(block) => {
                block[..8].copy_from_slice(&message[..8]);
                client.start(TOUCH, block)
            }
            None => client.start(TOUCH, message),
        };
        *ongoing = Some(call.map_err(fault("calling"))?);
        Ok(())
    }

    #[inline]
    fn receive(&mut self, buffer: &mut [u8]) -> Result<usize> {
        let Self::Client { ongoing, .. } = self else { return Err(one_sided()) };
        let reply = ongoing.take().ok_or_else(one_sided)?.wait().map_err(fault("waiting for a reply"))?;
        let head: [u8; 8] = reply.array(0).map_err(fault("reading a reply"))?;
        buffer[..8].copy_from_slice(&head);
        Ok(buffer.len())
    }

    fn answers_by_itself(&mut self) -> Result<bool> {
        let Self::Server { done, .. } = self else { return Ok(false) };
        done.recv().map_err(fault("serving calls"))?;
        Ok(true)
    }
}

fn one_sided() -> BenchError {
    BenchError::Transport("one side calls and the other one serves".into())
}
