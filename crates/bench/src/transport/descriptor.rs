//! Everything that is read(2) and written(2): pipes and sockets.

use std::{
    fs::File,
    io::{ErrorKind, Read, Write},
    os::fd::OwnedFd,
};

use rustix::pipe::{PipeFlags, pipe_with};

use super::{CopyLink, SideDescriptors};
use crate::{
    error::{During, Result},
    mechanism::Mechanism,
    task::MeasuringTask,
};

/// A blocking descriptor each way; of a socket, the same one twice.
#[derive(Debug)]
pub(super) struct DescriptorLink {
    reader: File,
    writer: File,
    /// Whether the kernel gathers small writes.
    gathers: bool,
}

impl DescriptorLink {
    /// From the descriptor to read, and then the one to write.
    pub(super) fn open(mut wires: SideDescriptors, task: &MeasuringTask) -> Result<Self> {
        let gathers =
            matches!(task.mechanism, Mechanism::Tcp | Mechanism::TcpVeth | Mechanism::TcpVirtio) && !task.tuning.prompt;
        Ok(Self { reader: wires.take()?.into(), writer: wires.take()?.into(), gathers })
    }
}

impl CopyLink for DescriptorLink {
    fn send(&mut self, message: &[u8]) -> Result<()> {
        self.writer.write_all(message).during("writing")
    }

    fn flush(&mut self) -> Result<()> {
        if self.gathers {
            // Setting TCP_NODELAY sends what is held back. Otherwise the last bytes of a stretch would wait for a delayed
            // acknowledgement, of 40 ms, and the stretch would seem slow.
            for prompt in [true, false] {
                rustix::net::sockopt::set_tcp_nodelay(&self.writer, prompt).during("setting TCP_NODELAY")?;
            }
        }
        Ok(())
    }

    fn receive(&mut self, buffer: &mut [u8]) -> Result<usize> {
        loop {
            match self.reader.read(buffer) {
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                other => return other.during("reading"),
            }
        }
    }
}

/// A pipe each way, with the kernel's default buffer.
pub(super) fn pipes() -> Result<[Vec<OwnedFd>; 2]> {
    let make = || pipe_with(PipeFlags::CLOEXEC).during("making a pipe");
    let (forward_out, forward_in) = make()?;
    let (reverse_out, reverse_in) = make()?;
    Ok([vec![reverse_out, forward_in], vec![forward_out, reverse_in]])
}

/// Both directions of a socket are one descriptor.
pub(super) fn twice(socket: OwnedFd) -> Result<Vec<OwnedFd>> {
    let again = socket.try_clone().during("duplicating a socket")?;
    Ok(vec![socket, again])
}
