//! A program, the agent and a host that is played by the test.

use super::*;
use partywall_protocol::wire::RegionReference;
use partywall_region::relay::PortSide;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;

/// Longer is a hang.
const HANG: Duration = Duration::from_secs(60);

fn receive(from: &OwnedFd) -> (u32, Message) {
    let mut buf = [0; wire::MAX_PACKET];
    let mut fds = [PollFd::new(from, PollFlags::IN)];
    let limit = Timespec::try_from(HANG).unwrap();
    assert_eq!(poll(&mut fds, Some(&limit)).unwrap(), 1, "no message comes");
    let received = packet::try_recv(from.as_fd(), &mut buf).unwrap();
    wire::decode(&buf[..received.len]).unwrap()
}

fn next(notices: &Notices) -> Notice {
    notices.recv_timeout(HANG).unwrap()
}

#[test]
fn step_is_answered_once_its_socket_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let (guest, port) = UnixStream::pair().unwrap();
    let (relay, guest) = Relay::start(guest.into(), PortSide::Guest).unwrap();
    let (host, notices) = Relay::start(port.into(), PortSide::Host).unwrap();
    let serving = Serving::new(relay, Listening::new(&path, 0o600), &folder.path().join("numbers")).unwrap();
    let served = std::thread::spawn(move || serving.serve(&guest));
    while next(&notices) != Notice::Up {}

    let program = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
    let address = SocketAddrUnix::new(&path).unwrap();
    let deadline = Instant::now() + HANG;
    while let Err(error) = rustix::net::connect(&program, &address) {
        assert!(Instant::now() < deadline, "the agent does not listen: {error}");
        std::thread::sleep(Duration::from_millis(1));
    }
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let memory: OwnedFd = tempfile::tempfile().unwrap().into();
    let steps = [
        Message::Offer { region: RegionReference::with_ring(4096) },
        Message::Take { region: RegionReference::with_ring(4096) },
        Message::Confirm { offer: 7 },
        Message::Finish { offer: 7 },
    ];
    for (number, step) in (1..).zip(&steps) {
        let mut bytes = Vec::new();
        wire::encode(number, step, &mut bytes);
        let brings = [socket.as_fd(), memory.as_fd()];
        packet::send(program.as_fd(), &bytes, &brings[..step.fd_count()]).unwrap();
        // The host has said nothing.
        assert_eq!(receive(&program), (number, Message::SocketRead {}), "{step:?}");
    }
    // Nothing else is answered so: a publication is used meanwhile.
    let mut bytes = Vec::new();
    wire::encode(9, &Message::Publish { addresses: Default::default() }, &mut bytes);
    packet::send(program.as_fd(), &bytes, &[listener.as_fd()]).unwrap();
    let mut shown = 0;
    while shown < steps.len() + 1 {
        if let Notice::Control(bytes) = next(&notices)
            && matches!(Say::decode(&bytes).unwrap(), Say::Packet { socket: Some(_), .. })
        {
            shown += 1;
        }
    }
    let mut buf = [0; wire::MAX_PACKET];
    let nothing = packet::try_recv(program.as_fd(), &mut buf).unwrap_err();
    assert_eq!(nothing.kind(), io::ErrorKind::WouldBlock);
    // No message is this short: the agent ends.
    host.control(&[0]).unwrap();
    served.join().unwrap().unwrap();
}

#[test]
fn program_that_takes_no_answer_leaves_nothing_in_the_agent() {
    let folder = tempfile::tempdir().unwrap();
    let (guest, port) = UnixStream::pair().unwrap();
    let (relay, _notices) = Relay::start(guest.into(), PortSide::Guest).unwrap();
    let _host = Relay::start(port.into(), PortSide::Host).unwrap();
    let listening = Listening::new(&folder.path().join("socket"), 0o600);
    let mut serving = Serving::new(relay, listening, &folder.path().join("numbers")).unwrap();
    let (agents, programs) = packet::pair().unwrap();
    rustix::net::shutdown(&programs, rustix::net::Shutdown::Read).unwrap();
    serving.sessions.insert(1, ProgramSession { socket: agents, pid: 1, user: None });
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (kept, memory) = UnixStream::pair().unwrap();
    let mut bytes = Vec::new();
    wire::encode(1, &Message::Offer { region: RegionReference::with_ring(4096) }, &mut bytes);
    packet::send(programs.as_fd(), &bytes, &[socket.as_fd(), memory.as_fd()]).unwrap();
    drop(memory);
    serving.read(1);
    assert!(serving.sessions.is_empty());
    assert!(packet::has_hung_up(kept.as_fd()), "the memory of its region is open");
}
