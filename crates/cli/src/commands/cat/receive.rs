//! From the peer's ring to the output, without a copy in between: the kernel reads the ring itself.

use partywall::{Error, ReadHalf};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;

use super::exchange::{CatExchange, Ended};
use crate::exit::CommandFailure;
use crate::human;

/// Largest piece written at once: the peer gets its space back this often.
const PIECE: usize = 256 << 10;

/// Runs until the peer ends its direction.
pub(super) fn run(mut half: ReadHalf, shared: &CatExchange) -> Result<(), Ended> {
    loop {
        half.set_timeout(shared.patience());
        let peeked = match half.peek() {
            Ok(peeked) => peeked,
            Err(Error::TimedOut) if shared.patience().is_some_and(|left| left.is_zero()) => {
                return Err(shared.idle_failure());
            }
            Err(Error::TimedOut) => continue,
            Err(error) => return Err(peer_failed(error, shared)),
        };
        if peeked.is_empty() {
            return Ok(());
        }
        let output = shared.endpoints.output.fd();
        match peeked.write_to(output, PIECE) {
            Ok(n) => {
                peeked.release(n);
                shared.meter.add(&shared.meter.received, n);
            }
            Err(error) => match Errno::from_io_error(&error) {
                Some(Errno::INTR) => {}
                // Another process on the same terminal or pipe has made it nonblocking.
                Some(Errno::AGAIN) => {
                    let _ = poll(&mut [PollFd::new(&output, PollFlags::OUT)], None);
                }
                _ => return Err(Ended::Local(output_failed(&error, shared))),
            },
        }
    }
}

fn peer_failed(error: Error, shared: &CatExchange) -> Ended {
    let got = human::bytes(shared.meter.received.bytes());
    Ended::Peer(CommandFailure::from(error).context(format_args!("after {got} received")))
}

fn output_failed(error: &std::io::Error, shared: &CatExchange) -> CommandFailure {
    let name = shared.endpoints.output.name();
    let got = human::bytes(shared.meter.received.bytes());
    match Errno::from_io_error(error) {
        Some(Errno::PIPE) => CommandFailure::general(format!("{name} was closed by its reader after {got}")),
        _ => CommandFailure::general(format!("cannot write to {name} after {got}: {error}")),
    }
}
