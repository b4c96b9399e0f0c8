//! This terminal as the terminal of a machine.

use super::playground::folder;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcsetattr};
use std::error::Error;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;

/// Ctrl-], as telnet has it.
const LEAVE: u8 = 0x1d;

/// The terminal as it was, restored in any case.
struct RawTerminal(Option<Termios>);

impl RawTerminal {
    fn new() -> Self {
        let before = tcgetattr(io::stdin()).ok();
        if let Some(before) = &before {
            let mut raw = before.clone();
            raw.make_raw();
            let _ = tcsetattr(io::stdin(), OptionalActions::Now, &raw);
        }
        Self(before)
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        if let Some(before) = &self.0 {
            let _ = tcsetattr(io::stdin(), OptionalActions::Now, before);
        }
    }
}

/// Until either side ends, or Ctrl-].
pub(crate) fn run(name: &str) -> Result<(), Box<dyn Error>> {
    let path = folder().join(name);
    let mut machine = UnixStream::connect(&path).map_err(|e| {
        format!("no machine {name} is up ({e}); start it with: partywall-lab up, or partywall-lab nas up")
    })?;
    eprintln!("in {name}; Ctrl-] leaves\r");
    let _raw = RawTerminal::new();
    // Asks for a new prompt: the first was printed before this connection.
    machine.write_all(b"\n")?;
    let mut piece = [0; 4096];
    let mut open = true;
    loop {
        let mut fds = vec![PollFd::new(&machine, PollFlags::IN)];
        let stdin = io::stdin();
        if open {
            fds.push(PollFd::new(&stdin, PollFlags::IN));
        }
        poll(&mut fds, None)?;
        let (from_machine, from_user) =
            (!fds[0].revents().is_empty(), fds.get(1).is_some_and(|fd| !fd.revents().is_empty()));
        if from_machine {
            match machine.read(&mut piece)? {
                0 => return Ok(()),
                n => {
                    io::stdout().write_all(&piece[..n])?;
                    io::stdout().flush()?;
                }
            }
        }
        if from_user {
            match rustix::io::read(&stdin, &mut piece)? {
                0 => open = false,
                n if piece[..n].contains(&LEAVE) => return Ok(()),
                n => machine.write_all(&piece[..n])?,
            }
        }
    }
}
