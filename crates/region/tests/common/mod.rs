//! Relays at the two ends of a port, and a peer of one that says what it likes.

use partywall_protocol::port::{Decoder, Frame, Item, greeting};
use partywall_region::conformance::HANG;
use partywall_region::pmem::{WindowFile, WindowSpec};
use partywall_region::relay::{Notice, Notices, PortSide, Relay};
use partywall_region::{Link, LinkEvent};
use rustix::fd::{AsFd, OwnedFd};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Instant;

/// The file of a window from `a` to `b`.
pub(crate) fn file() -> WindowFile {
    WindowFile::create(&WindowSpec { room: 4 << 20, owner: "a".into(), peer: "b".into() }).unwrap()
}

/// A descriptor of it.
pub(crate) fn memory(file: &WindowFile) -> OwnedFd {
    file.as_fd().try_clone_to_owned().unwrap()
}

/// Waits until the other side of the port is there.
pub(crate) fn up(notices: &Notices) {
    while notices.recv_timeout(HANG).unwrap() != Notice::Up {}
}

/// Both ends of a port.
pub(crate) fn joined() -> ((Relay, Notices), (Relay, Notices)) {
    let (a, b) = UnixStream::pair().unwrap();
    let guest = Relay::start(a.into(), PortSide::Guest).unwrap();
    let host = Relay::start(b.into(), PortSide::Host).unwrap();
    up(&guest.1);
    up(&host.1);
    (guest, host)
}

/// The next event of a link.
pub(crate) fn next(link: &Link) -> LinkEvent {
    link.wait(Some(Instant::now() + HANG)).unwrap()
}

/// The other side of a port, that says what it likes.
pub(crate) struct Hostile {
    pub(crate) port: UnixStream,
    decoder: Decoder,
}

impl Hostile {
    /// One that has not greeted.
    pub(crate) fn on(port: UnixStream) -> Self {
        Self { port, decoder: Decoder::default() }
    }

    /// One that has greeted a relay which is on this side.
    pub(crate) fn new(side: PortSide) -> (Self, Relay, Notices) {
        let (port, b) = UnixStream::pair().unwrap();
        let (relay, notices) = Relay::start(b.into(), side).unwrap();
        let mut this = Self::on(port);
        this.port.set_read_timeout(Some(HANG)).unwrap();
        match side {
            PortSide::Host => this.port.write_all(&greeting(1)).unwrap(),
            PortSide::Guest => {
                this.port.write_all(&greeting(0)).unwrap();
                this.answer_greeting();
            }
        }
        up(&notices);
        (this, relay, notices)
    }

    /// A guest's greeting must be answered with its own number.
    pub(crate) fn answer_greeting(&mut self) {
        let mut piece = greeting(0);
        self.port.read_exact(&mut piece).unwrap();
        self.decoder.push(&piece);
        self.port.write_all(&piece).unwrap();
    }

    pub(crate) fn say(&mut self, frame: &Frame) {
        let mut bytes = Vec::new();
        frame.encode(&mut bytes);
        self.port.write_all(&bytes).unwrap();
    }

    pub(crate) fn hear(&mut self) -> Frame {
        loop {
            match self.decoder.take().unwrap() {
                Some(Item::Frame(frame)) => return frame,
                Some(Item::Greeting(_)) => {}
                None => {
                    let mut piece = [0; 4096];
                    let n = self.port.read(&mut piece).unwrap();
                    assert!(n > 0, "the relay has gone");
                    self.decoder.push(&piece[..n]);
                }
            }
        }
    }
}
