//! Waking and being woken: links, doorbells, and the fence that makes a wake-up cheap.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};
use rustix::thread::{MembarrierCommand, membarrier, membarrier_query};

use super::check::Check;

const AREA: &str = "waking";

pub(super) fn checks() -> Vec<Check> {
    vec![links(), doorbell(), asymmetric_fence()]
}

fn links() -> Check {
    let check = |found: String| {
        Check::ok(AREA, "links", "channels cannot be set up: no descriptors can be passed between domains", found)
    };
    let remedy =
        "use a kernel with UNIX sockets (CONFIG_UNIX); let seccomp profiles permit socketpair, sendmsg and recvmsg";
    match try_link() {
        Ok(true) => {
            check("SOCK_SEQPACKET sockets keep message boundaries, carry descriptors and tell of a hang-up".into())
        }
        Ok(false) => check("SOCK_SEQPACKET sockets lose something on the way".into()).fail(remedy),
        Err(error) => check(format!("SOCK_SEQPACKET: {error}")).fail(remedy),
    }
}

fn try_link() -> Result<bool, Errno> {
    let (a, b) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    let passed = eventfd(7, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
    let fds = [passed.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(&fds));
    sendmsg(&a, &[IoSlice::new(b"one")], &mut control, SendFlags::NOSIGNAL)?;
    rustix::net::send(&a, b"two", SendFlags::NOSIGNAL)?;
    drop(a);

    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut buffer = [0u8; 16];
    let first = recvmsg(&b, &mut [IoSliceMut::new(&mut buffer)], &mut control, RecvFlags::CMSG_CLOEXEC)?.bytes;
    let received: Vec<OwnedFd> = control
        .drain()
        .filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(fds) => Some(fds),
            _ => None,
        })
        .flatten()
        .collect();
    let second = rustix::net::recv(&b, &mut buffer[..], RecvFlags::empty())?.0;
    let end = rustix::net::recv(&b, &mut buffer[..], RecvFlags::empty())?.0;
    let mut count = [0u8; 8];
    let same = match received.first() {
        Some(fd) => rustix::io::read(fd, &mut count)? == 8 && u64::from_ne_bytes(count) == 7,
        None => false,
    };
    Ok((first, second, end) == (3, 3, 0) && same)
}

fn doorbell() -> Check {
    let tried = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).and_then(|bell| {
        let before = is_readable(&bell)?;
        rustix::io::write(&bell, &1u64.to_ne_bytes())?;
        Ok(!before && is_readable(&bell)?)
    });
    let check = |found: &str| Check::ok(AREA, "eventfd", "a process cannot be woken from within", found);
    let remedy = "use a kernel with CONFIG_EVENTFD; let seccomp profiles permit eventfd2";
    match tried {
        Ok(true) => check("rings, and is heard"),
        Ok(false) => check("rings, but is not heard").fail(remedy),
        Err(error) => check(&error.to_string()).fail(remedy),
    }
}

fn is_readable(fd: &OwnedFd) -> Result<bool, Errno> {
    poll(&mut [PollFd::new(fd, PollFlags::IN)], Some(&Timespec::default())).map(|n| n > 0)
}

fn asymmetric_fence() -> Check {
    let needed = [MembarrierCommand::GlobalExpedited, MembarrierCommand::RegisterGlobalExpedited];
    let offered = needed.iter().all(|&command| membarrier_query().contains_command(command));
    let tried = membarrier(MembarrierCommand::RegisterGlobalExpedited)
        .and_then(|()| membarrier(MembarrierCommand::GlobalExpedited));
    let check = |found: &str| {
        Check::ok(
            AREA,
            "membarrier",
            "each commit then costs a full fence: small messages run at about half the rate",
            found,
        )
    };
    match tried {
        Ok(()) if offered => check("global expedited: the fence is paid by who goes to sleep, not by who writes"),
        Ok(()) => check("works, although the kernel does not list it"),
        Err(error) => check(&format!("no global expedited membarrier: {error}"))
            .warn("use Linux 4.16 or later with CONFIG_MEMBARRIER; let seccomp profiles permit membarrier"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::check::FindingStatus;
    use super::*;

    #[test]
    fn wakeup_checks_pass_on_this_kernel() {
        assert_eq!(links().status, FindingStatus::Ok);
        assert_eq!(doorbell().status, FindingStatus::Ok);
    }
}
