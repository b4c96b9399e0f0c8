//! From the input into our own ring, without a copy in between: the kernel writes into the ring itself.

use std::time::Duration;

use partywall::{Error, WriteHalf};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::exchange::{CatExchange, Ended};
use super::room;
use crate::exit::{Code, CommandFailure};
use crate::human;

/// How often a send that waits for space looks whether it is still wanted.
const LOOK: Duration = Duration::from_millis(250);

/// Runs until the input ends, the peer closes, or another thread rings `stop`.
pub(super) fn run(mut half: WriteHalf, shared: &CatExchange) -> Result<(), Ended> {
    let result = carry(&mut half, shared);
    let is_cut = match &result {
        Ok(()) => shared.is_receiving_broken() && !shared.endpoints.input.is_at_end(),
        Err(Ended::Peer(failure)) if failure.code == Code::TimedOut => has_more(shared),
        Err(_) => true,
    };
    if is_cut {
        // Without a good-bye the peer sees that this is not the end of the input.
        half.abort();
    }
    result
}

/// The next thing to do.
#[derive(Debug, PartialEq, Eq)]
enum SendEvent {
    Input,
    HangUp,
    Stop,
}

fn carry(half: &mut WriteHalf, shared: &CatExchange) -> Result<(), Ended> {
    loop {
        let at_end = shared.endpoints.input.is_at_end();
        if at_end && shared.plan.half_close {
            half.finish();
            return Ok(());
        }
        let carried = match wait(half, shared, !at_end)? {
            SendEvent::Stop => return stopped(shared),
            SendEvent::HangUp => hung_up(half),
            SendEvent::Input => piece(half, shared)?,
        };
        match carried {
            Ok(()) => {}
            Err(Error::Closed(_)) => return closed(shared),
            Err(Error::TimedOut) if shared.patience().is_some_and(|left| left.is_zero()) => {
                return Err(shared.idle_failure());
            }
            // Only a look around: whether we are still wanted is asked at the top.
            Err(Error::TimedOut) if shared.stop.is_rung() => return stopped(shared),
            Err(Error::TimedOut) => {}
            Err(error) => return Err(peer_failed(error, shared)),
        }
    }
}

/// Sleeps until there is input, or news from the peer, or no more need.
fn wait(half: &WriteHalf, shared: &CatExchange, input_wanted: bool) -> Result<SendEvent, Ended> {
    let input = shared.endpoints.input.fd();
    let peer = half.hang_up_fd();
    loop {
        let patience = shared.patience();
        if patience.is_some_and(|left| left.is_zero()) {
            return Err(shared.idle_failure());
        }
        let mut fds = [
            PollFd::new(&shared.stop, PollFlags::IN),
            // A hang-up is reported without being asked for.
            PollFd::new(&peer, PollFlags::empty()),
            PollFd::new(&input, PollFlags::IN),
        ];
        let watched = if input_wanted { &mut fds[..] } else { &mut fds[..2] };
        let timeout = patience.and_then(|left| Timespec::try_from(left).ok());
        match poll(watched, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(Ended::Local(error.into())),
        }
        match fds.each_ref().map(|fd| !fd.revents().is_empty()) {
            [true, ..] => return Ok(SendEvent::Stop),
            [_, true, _] => return Ok(SendEvent::HangUp),
            [.., true] => return Ok(SendEvent::Input),
            _ => {}
        }
    }
}

/// Moves what the input has into the ring. The outer error is ours, the inner one the channel's.
fn piece(half: &mut WriteHalf, shared: &CatExchange) -> Result<partywall::Result<()>, Ended> {
    let look_up = shared.plan.ways.receive || shared.plan.idle.is_some();
    let size = room::piece(half);
    if let Err(error) = room::make(half, size, look_up.then_some(LOOK)) {
        return Ok(Err(error));
    }
    let mut reserved = match half.reserve(size) {
        Ok(reserved) => reserved,
        Err(error) => return Ok(Err(error)),
    };
    match rustix::io::read(shared.endpoints.input.fd(), &mut *reserved) {
        Ok(0) => {
            shared.endpoints.input.set_at_end();
            Ok(Ok(()))
        }
        Ok(n) => {
            reserved.commit(n);
            shared.meter.add(&shared.meter.sent, n);
            Ok(Ok(()))
        }
        // Another process on the same terminal or pipe has made it nonblocking; `wait` comes next.
        Err(Errno::INTR | Errno::AGAIN) => Ok(Ok(())),
        Err(error) => {
            let name = &shared.endpoints.input.name;
            let sent = human::bytes(shared.meter.sent.bytes());
            Err(Ended::Local(CommandFailure::from(error).context(format_args!("cannot read {name} after {sent}"))))
        }
    }
}

/// The peer reads no more. That is an orderly end if this side has nothing more to send.
fn closed(shared: &CatExchange) -> Result<(), Ended> {
    all_sent(shared, "the peer stopped reading")
}

/// The receiving direction has ended, and this one with it. That direction reports its own failure.
fn stopped(shared: &CatExchange) -> Result<(), Ended> {
    if shared.is_receiving_broken() { Ok(()) } else { all_sent(shared, "the peer ended the connection") }
}

fn all_sent(shared: &CatExchange, why: &str) -> Result<(), Ended> {
    if !has_more(shared) {
        return Ok(());
    }
    let sent = human::bytes(shared.meter.sent.bytes());
    Err(Ended::Peer(CommandFailure::general(format!("{why} after {sent}; more input was waiting"))))
}

/// Whether more input waits at this moment. It stays there: the next visitor of a listener may get it.
fn has_more(shared: &CatExchange) -> bool {
    if shared.endpoints.input.is_at_end() {
        return false;
    }
    let input = shared.endpoints.input.fd();
    // A file or a device with a position. Sizes are not asked for: that of a file of the kernel's says nothing.
    if let Ok(at) = rustix::fs::tell(input) {
        return rustix::io::pread(input, &mut [0; 1], at).is_ok_and(|n| n > 0);
    }
    match rustix::io::ioctl_fionread(input) {
        Ok(waiting) => waiting > 0,
        Err(_) => poll(&mut [PollFd::new(&input, PollFlags::IN)], Some(&Timespec::default())).is_ok_and(|n| n > 0),
    }
}

fn peer_failed(error: Error, shared: &CatExchange) -> Ended {
    let sent = human::bytes(shared.meter.sent.bytes());
    Ended::Peer(CommandFailure::from(error).context(format_args!("after {sent} sent")))
}

/// The link has hung up: what does the library say of it?
fn hung_up(half: &mut WriteHalf) -> partywall::Result<()> {
    half.set_timeout(Some(LOOK));
    half.reserve(1).map(drop)?;
    // It has not noticed yet; the thread that tells it is about to run.
    std::thread::sleep(Duration::from_millis(1));
    Ok(())
}
