//! The input is what a front end sends to a disk: messages of vhost-user whose bodies, lengths, flags and descriptors need not belong
//! together, and bytes in the memory that it shares. After each input the disk serves the next front end.

use super::bytes::Input;
use partywall_vhost::VhostError;
use partywall_vhost::disk::control::{DiskControl, DiskHandle, DiskReport};
use partywall_vhost::disk::driver::{DiskDriver, DiskDriverOptions};
use partywall_vhost::disk::engine::DiskEngine;
use partywall_vhost::disk::{DiskCounters, DiskOptions};
use rustix::event::EventfdFlags;
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use std::fs::File;
use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Longer is a hang.
const HANG: Duration = Duration::from_secs(60);
/// Bytes of the disk. The first sectors are those of honest front ends.
const DISK: u64 = 1 << 20;
/// Bytes of the memory that the front end shares.
const MEMORY: u64 = 0x1_0000;
/// Descriptors that one message carries at most, one more than the disk takes.
const MOST: usize = 9;
/// Messages that one input sends at most. The socket's buffer holds their answers.
const MESSAGES: u32 = 64;

// Requests of a front end, by their numbers in the specification of vhost-user.
const GET_FEATURES: u32 = 1;
const SET_FEATURES: u32 = 2;
const SET_OWNER: u32 = 3;
const RESET_OWNER: u32 = 4;
const SET_MEM_TABLE: u32 = 5;
const SET_VRING_NUM: u32 = 8;
const SET_VRING_ADDR: u32 = 9;
const SET_VRING_BASE: u32 = 10;
const GET_VRING_BASE: u32 = 11;
const SET_VRING_KICK: u32 = 12;
const SET_VRING_CALL: u32 = 13;
const SET_VRING_ERR: u32 = 14;
const SET_PROTOCOL_FEATURES: u32 = 16;
const SET_VRING_ENABLE: u32 = 18;
const SET_BACKEND_REQ_FD: u32 = 21;
const GET_CONFIG: u32 = 24;
const GET_INFLIGHT_FD: u32 = 31;
const SET_INFLIGHT_FD: u32 = 32;
const ADD_MEM_REG: u32 = 37;
const REM_MEM_REG: u32 = 38;
/// The number behind the last request.
const END: u32 = 44;
/// Requests that a disk serves.
const SERVED: [u32; 19] = [
    GET_FEATURES,
    SET_FEATURES,
    SET_OWNER,
    RESET_OWNER,
    SET_MEM_TABLE,
    SET_VRING_NUM,
    SET_VRING_ADDR,
    SET_VRING_BASE,
    GET_VRING_BASE,
    SET_VRING_KICK,
    SET_VRING_CALL,
    SET_VRING_ENABLE,
    SET_PROTOCOL_FEATURES,
    SET_BACKEND_REQ_FD,
    GET_CONFIG,
    GET_INFLIGHT_FD,
    SET_INFLIGHT_FD,
    ADD_MEM_REG,
    REM_MEM_REG,
];
/// The flag of a message that wants an answer.
const NEED_REPLY: u8 = 8;

/// Places in the memory of the front end that starts its queue as the rules say.
const TABLE: u64 = 0x1000;
const AVAILABLE: u64 = 0x2000;
const USED: u64 = 0x3000;
const HEADERS: u64 = 0x4000;
const DATA: u64 = 0x6000;
const PROTOCOL: u64 = 1 << 30;
// Flags of a descriptor.
const NEXT: u16 = 1;
const WRITE: u16 = 2;

/// A disk in this process.
pub(crate) struct Scene {
    handle: DiskHandle,
    folder: tempfile::TempDir,
    engine: Option<JoinHandle<Result<(), VhostError>>>,
    /// Bytes of answers to inputs.
    pub(crate) answers: usize,
}

/// What a message has that no honest one has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lie {
    Nothing,
    Numbers,
    Descriptors,
    Flags,
    CutBody,
    Length,
}

/// The front end of an input.
struct HostileFrontEnd {
    socket: UnixStream,
    memory: File,
    doorbell: OwnedFd,
    /// Requests that were offered as the rules say.
    offered: u16,
}

impl Scene {
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let image = folder.path().join("image");
        File::create(&image).and_then(|file| file.set_len(DISK)).expect("an image");
        let (engine, handle) =
            DiskEngine::new(DiskOptions::new(image), &folder.path().join("socket"), None).expect("a disk");
        let engine = Some(std::thread::spawn(|| engine.run()));
        Self { handle, folder, engine, answers: 0 }
    }

    /// The counters of the disk.
    pub(crate) fn counters(&self) -> DiskCounters {
        let report = self.handle.ask(DiskControl::Show).expect("a report");
        serde_json::from_value::<DiskReport>(report).expect("a report").counters
    }

    pub(crate) fn run(&mut self, input: &[u8]) {
        let mut input = Input(input);
        let mut front_end = HostileFrontEnd::new(UnixStream::connect(self.socket()).expect("a connection"));
        if input.byte() % 4 != 0 {
            front_end.start();
        }
        for _ in 0..MESSAGES {
            if input.is_empty() || !front_end.act(&mut input) {
                break;
            }
            // The disk answers this when it has looked at what came before.
            self.counters();
        }
        self.answers += front_end.end();
        self.serves_next();
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("socket")
    }

    /// An honest front end writes and reads. It is refused until the disk has noticed that the one before has gone.
    fn serves_next(&self) {
        let deadline = Instant::now() + HANG;
        let mut driver = loop {
            match DiskDriver::connect(&self.socket(), DiskDriverOptions::default()) {
                Ok(driver) => break driver,
                Err(e) => assert!(Instant::now() < deadline, "{e}"),
            }
            std::thread::sleep(Duration::from_millis(1));
        };
        let data = [7; 4096];
        assert_eq!(driver.run(1, 0, &data, 0).expect("a write").0, 0);
        assert_eq!(driver.run(0, 0, &[], 4096).expect("a read"), (0, data.to_vec()));
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        let _ = self.handle.ask(DiskControl::Stop);
        let end = self.engine.take().map(JoinHandle::join);
        if !std::thread::panicking() {
            assert!(matches!(end, Some(Ok(Ok(())))), "the disk ended with {end:?}");
        }
    }
}

impl HostileFrontEnd {
    fn new(socket: UnixStream) -> Self {
        socket.set_read_timeout(Some(HANG)).expect("a time limit");
        Self { socket, memory: memory(MEMORY, true).into(), doorbell: doorbell(), offered: 0 }
    }

    /// Starts a queue as the rules say.
    fn start(&mut self) {
        let memory = [words(&[1, 0]), region(0, MEMORY, 0)].concat();
        let file = self.memory.try_clone().expect("a descriptor");
        let doorbell = || self.doorbell.try_clone().expect("a descriptor");
        let messages: [(u32, Vec<u8>, Vec<OwnedFd>); 9] = [
            (SET_OWNER, vec![], vec![]),
            (SET_FEATURES, longs(&[PROTOCOL]), vec![]),
            (SET_MEM_TABLE, memory, vec![file.into()]),
            (SET_VRING_NUM, words(&[0, 16]), vec![]),
            (SET_VRING_BASE, words(&[0, 0]), vec![]),
            (SET_VRING_ADDR, [words(&[0, 0]), longs(&[TABLE, USED, AVAILABLE, 0])].concat(), vec![]),
            (SET_VRING_CALL, longs(&[0]), vec![doorbell()]),
            (SET_VRING_KICK, longs(&[0]), vec![doorbell()]),
            (SET_VRING_ENABLE, words(&[0, 1]), vec![]),
        ];
        for (code, body, fds) in messages {
            self.send(code, 1, body.len() as u32, &body, &fds);
        }
    }

    /// One act of the input. `false` once the disk has ended the connection.
    fn act(&mut self, input: &mut Input<'_>) -> bool {
        match input.byte() % 8 {
            0 => self.offer(input),
            1 => {
                let (at, value) = (AVAILABLE + u64::from(input.byte() % 40), input.word());
                self.memory.write_all_at(&value.to_le_bytes(), at).expect("a write");
                let _ = rustix::io::write(&self.doorbell, &1_u64.to_ne_bytes());
            }
            2 => {
                let (place, flags, next) = (u64::from(input.byte() % 16), input.byte(), input.byte() % 20);
                let (address, length) = (address(input), u32::from(input.word()));
                let row = [&address.to_le_bytes()[..], &length.to_le_bytes(), &[flags % 8, 0, next, 0]].concat();
                self.memory.write_all_at(&row, TABLE + 16 * place).expect("a write");
            }
            3 => {
                // Also in the memory for requests in flight.
                let (at, value) = (u64::from(input.word()) % (MEMORY - 8), u64::from(input.word()));
                self.memory.write_all_at(&value.to_le_bytes(), at).expect("a write");
            }
            _ => return self.request(input),
        }
        true
    }

    /// Offers a request as the rules say, of any kind and anywhere on the disk.
    fn offer(&mut self, input: &mut Input<'_>) {
        let place = self.offered % 5;
        let (header, data) = (HEADERS + 64 * u64::from(place), DATA + 0x1000 * u64::from(place));
        let (kind, sector) = (u64::from(input.byte() % 14), u64::from(input.word() % 4096));
        let length = 512 * u32::from(input.byte() % 9);
        let write = if kind == 1 { 0 } else { WRITE };
        let rows = [(header, 16, NEXT), (data, length, NEXT | write), (header + 16, 1, WRITE)];
        for (index, (address, length, flags)) in (3 * place..).zip(rows) {
            let row =
                [&address.to_le_bytes()[..], &length.to_le_bytes(), &flags.to_le_bytes(), &(index + 1).to_le_bytes()];
            self.memory.write_all_at(&row.concat(), TABLE + 16 * u64::from(index)).expect("a write");
        }
        self.memory.write_all_at(&longs(&[kind, sector]), header).expect("a write");
        let entry = AVAILABLE + 4 + 2 * u64::from(self.offered % 16);
        self.memory.write_all_at(&(3 * place).to_le_bytes(), entry).expect("a write");
        self.offered = self.offered.wrapping_add(1);
        self.memory.write_all_at(&self.offered.to_le_bytes(), AVAILABLE + 2).expect("a write");
        let _ = rustix::io::write(&self.doorbell, &1_u64.to_ne_bytes());
    }

    /// A message. One of eight has something that no honest one has.
    fn request(&mut self, input: &mut Input<'_>) -> bool {
        let choice = usize::from(input.byte());
        let code = *SERVED.get(choice / 13).unwrap_or(&(choice as u32 % (END + 2)));
        let lie = match input.byte() {
            0..224 => Lie::Nothing,
            lie => [Lie::Numbers, Lie::Descriptors, Lie::Flags, Lie::CutBody, Lie::Length][usize::from(lie % 5)],
        };
        if lie == Lie::Nothing && matches!(code, SET_VRING_NUM | SET_VRING_BASE | SET_INFLIGHT_FD) {
            // The queue must not run.
            self.send(GET_VRING_BASE, 1, 8, &words(&[0, 0]), &[]);
        }
        let mut body = body(code, input, lie == Lie::Numbers);
        let wanted = match code {
            SET_MEM_TABLE => body.len().saturating_sub(8) / 32,
            SET_VRING_KICK | SET_VRING_CALL | SET_VRING_ERR | SET_BACKEND_REQ_FD | SET_INFLIGHT_FD | ADD_MEM_REG => 1,
            _ => 0,
        };
        let others = lie == Lie::Descriptors;
        let count = if others { usize::from(input.byte()) % (MOST + 1) } else { wanted.min(MOST) };
        let fds: Vec<OwnedFd> = (0..count).map(|_| self.descriptor(code, input, others)).collect();
        let flags = if lie == Lie::Flags { input.byte() } else { 1 | input.byte() & NEED_REPLY };
        if lie == Lie::CutBody {
            body.truncate(usize::from(input.byte()));
        }
        let length = if lie == Lie::Length { input.word().into() } else { body.len() as u32 };
        self.send(code, flags.into(), length, &body, &fds)
    }

    /// A descriptor that the request takes, or with `lies` any.
    fn descriptor(&self, code: u32, input: &mut Input<'_>, lies: bool) -> OwnedFd {
        let usual = match code {
            SET_MEM_TABLE | ADD_MEM_REG | SET_INFLIGHT_FD => 0,
            SET_BACKEND_REQ_FD => 5,
            _ => 1,
        };
        match if lies { input.byte() % 8 } else { usual } {
            0 => self.memory.try_clone().expect("a descriptor").into(),
            1 => self.doorbell.try_clone().expect("a descriptor"),
            2 => memory(MEMORY, false),
            3 => memory(100, true),
            4 => rustix::pipe::pipe().expect("a pipe").0,
            5 => UnixStream::pair().expect("sockets").0.into(),
            6 => File::open("/dev/null").expect("a device").into(),
            _ => std::net::UdpSocket::bind("127.0.0.1:0").expect("a socket").into(),
        }
    }

    /// Sends a message. `false` once the disk has ended the connection.
    fn send(&mut self, code: u32, flags: u32, length: u32, body: &[u8], fds: &[OwnedFd]) -> bool {
        let bytes = [words(&[code, flags, length]), body.to_vec()].concat();
        let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(fds.is_empty() || control.push(SendAncillaryMessage::ScmRights(&fds)), "no room for descriptors");
        rustix::net::sendmsg(&self.socket, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL).is_ok()
    }

    /// Waits until the disk has read all and ended the connection. Returns how many bytes it has answered.
    fn end(mut self) -> usize {
        let _ = self.socket.shutdown(Shutdown::Write);
        let mut answers = Vec::new();
        // What the disk has not read makes an error of the end.
        if let Err(e) = self.socket.read_to_end(&mut answers) {
            assert_eq!(e.kind(), std::io::ErrorKind::ConnectionReset, "the disk keeps the connection: {e}");
        }
        answers.len()
    }
}

/// A body of the right shape for the request. The input chooses its numbers, which lie if `lies`.
fn body(code: u32, input: &mut Input<'_>, lies: bool) -> Vec<u8> {
    match code {
        SET_FEATURES | SET_PROTOCOL_FEATURES => {
            let word = u64::from(input.word()) << (input.byte() % 48);
            longs(&[match (lies, code) {
                (true, _) => word,
                (false, SET_FEATURES) => PROTOCOL,
                (false, _) => 0,
            }])
        }
        SET_MEM_TABLE => {
            let count = if lies { u32::from(input.byte() % 10) } else { 1 };
            let regions: Vec<u8> = (0..count).flat_map(|_| any_region(input, lies)).collect();
            let told = if lies && input.byte() < 64 { input.word().into() } else { count };
            [words(&[told, 0]), regions].concat()
        }
        ADD_MEM_REG | REM_MEM_REG => [longs(&[0]), any_region(input, lies)].concat(),
        SET_VRING_NUM | SET_VRING_BASE | SET_VRING_ENABLE | GET_VRING_BASE => {
            let number = if lies { u32::from(input.word()) << (input.byte() % 17) } else { 1 << (input.byte() % 5) };
            words(&[queue(input, lies), number])
        }
        SET_VRING_ADDR => {
            let head = words(&[queue(input, lies), 0]);
            let places = if lies { [(); 4].map(|()| address(input)) } else { [TABLE, USED, AVAILABLE, 0] };
            [head, longs(&places)].concat()
        }
        SET_VRING_KICK | SET_VRING_CALL | SET_VRING_ERR => {
            longs(&[u64::from(queue(input, lies)) | u64::from(lies && input.byte() >= 128) << 8])
        }
        GET_CONFIG => {
            let size = u32::from(input.byte() % 61);
            let offset = if lies { u32::from(input.word()) << 16 | u32::from(input.word()) } else { 0 };
            [words(&[offset, size, 0]), vec![0; size as usize]].concat()
        }
        GET_INFLIGHT_FD | SET_INFLIGHT_FD => {
            let [size, offset] = if lies { [(); 2].map(|()| address(input)) } else { [MEMORY, 0] };
            let sizes = if lies { [input.word(), input.word()] } else { [1, 16] }.map(u16::to_le_bytes).concat();
            [longs(&[size, offset]), sizes, vec![0; 4]].concat()
        }
        _ => (0..if lies { input.byte() % 32 } else { 0 }).map(|_| input.byte()).collect(),
    }
}

/// The number of the started queue, one nearby, or any.
fn queue(input: &mut Input<'_>, lies: bool) -> u32 {
    match lies.then(|| input.byte()) {
        None => 0,
        Some(choice) if choice < 128 => u32::from(choice % 8),
        Some(choice) => choice.into(),
    }
}

/// An address in the memory, at an edge of it, or anywhere.
fn address(input: &mut Input<'_>) -> u64 {
    let (choice, word) = (input.byte(), u64::from(input.word()));
    match choice % 16 {
        0..=11 => word,
        12 => MEMORY - word % 32,
        13 => MEMORY + word,
        14 => u64::MAX - word,
        _ => word << 40,
    }
}

fn any_region(input: &mut Input<'_>, lies: bool) -> Vec<u8> {
    match if lies { input.byte() % 3 } else { 0 } {
        0 => region(0, MEMORY, 0),
        1 => {
            let [start, size, offset] = [(); 3].map(|()| u64::from(input.byte() % 18) << 12);
            region(start, size, offset)
        }
        _ => region(address(input), address(input), address(input)),
    }
}

/// The numbers of a memory region: the guest's address and the front end's are the same.
fn region(start: u64, size: u64, offset: u64) -> Vec<u8> {
    longs(&[start, size, start, offset])
}

fn words(all: &[u32]) -> Vec<u8> {
    all.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn longs(all: &[u64]) -> Vec<u8> {
    all.iter().flat_map(|long| long.to_le_bytes()).collect()
}

fn memory(size: u64, sealed: bool) -> OwnedFd {
    let file = rustix::fs::memfd_create("memory", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).expect("memory");
    rustix::fs::ftruncate(&file, size).expect("memory of a size");
    if sealed {
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW).expect("sealed memory");
    }
    file
}

fn doorbell() -> OwnedFd {
    rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("a doorbell")
}
