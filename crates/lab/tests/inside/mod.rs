//! The part of these tests that runs in guests: this very program, told by its environment what to do.

use partywall_lab::{Guest, GuestOptions, ImageOptions, Lab, Running};
use partywall_region::bar;
use partywall_region::conformance::{self, Backend, ConformanceRegion};
use partywall_region::pmem::{self, Space, WindowHeader, WindowId, dax};
use partywall_region::relay::{self, Heartbeat, Notice, Notices, PORT, PortSide, Relay};
use partywall_region::window::Window;
use partywall_region::{Link, LinkEvent, RegionOptions};
use partywall_shm::layout::{Geometry, PAGE, RegionKind};
use rustix::fd::AsFd;
use rustix::mm::{MapFlags, ProtFlags};
use std::os::unix::net::UnixListener;
use std::time::{Duration, Instant};

/// The variable with the task in a guest.
const TASK: &str = "PARTYWALL_TEST_TASK";
/// Longer is a hang.
pub(crate) const HANG: Duration = Duration::from_secs(180);
/// The size of the ring that is written to a window.
const RING: u64 = 64 << 10;
/// Pairs of links that the host makes for a guest.
pub(crate) const LINKS: u32 = 64;

/// Guests that share an image with this program in it, and the host's ends of their ports.
pub(crate) struct Guests {
    guests: Vec<Guest>,
    ports: Vec<UnixListener>,
    _sockets: tempfile::TempDir,
}

impl Guests {
    pub(crate) fn boot(name: &str, names: &[&str]) -> Self {
        let program = std::env::current_exe().unwrap();
        let lab = Lab::new(name, &ImageOptions::default().program(program, "inside")).unwrap();
        let sockets = tempfile::tempdir().unwrap();
        let ports = names.iter().map(|n| UnixListener::bind(sockets.path().join(n)).unwrap()).collect();
        let options = |name| GuestOptions::new(name).same_addresses().port(PORT, &sockets.path().join(name));
        let guests: Vec<Guest> = std::thread::scope(|s| {
            let booting: Vec<_> = names.iter().map(|n| s.spawn(|| lab.boot(options(n)).unwrap())).collect();
            booting.into_iter().map(|b| b.join().unwrap()).collect()
        });
        guests.iter().for_each(|g| println!("{} guest {} up in {:?}", lab.accel(), g.name(), g.booted_in()));
        Self { guests, ports, _sockets: sockets }
    }

    /// The host's end of a guest's port.
    pub(crate) fn relay(&self, guest: usize) -> (Relay, Notices) {
        let (port, _) = self.ports[guest].accept().unwrap();
        let beat = Heartbeat { every: Duration::from_millis(200), limit: Duration::from_secs(8) };
        Relay::start_with(port.into(), PortSide::Host, Some(beat)).unwrap()
    }

    pub(crate) fn all<const N: usize>(&self) -> [&Guest; N] {
        std::array::from_fn(|i| &self.guests[i])
    }
}

/// Tasks of [`main`], from outside.
pub(crate) trait Inside {
    /// Does a task, which must succeed, and returns what it says.
    fn inside(&self, task: &str, words: &[&str]) -> String;
    /// Begins a task.
    fn begin_inside(&self, task: &str) -> Running<'_>;
    /// Does it again and again until it succeeds.
    fn wait_inside(&self, task: &str, words: &[&str]);
}

fn command(task: &str, words: &[&str]) -> String {
    format!("{TASK}='{task} {}' inside --exact in_a_guest --nocapture --test-threads 1", words.join(" "))
}

impl Inside for Guest {
    fn inside(&self, task: &str, words: &[&str]) -> String {
        let said = self.shell(&command(task, words)).unwrap();
        said.lines().find_map(|line| line.strip_prefix("SAYS ")).unwrap_or_default().to_owned()
    }

    fn begin_inside(&self, task: &str) -> Running<'_> {
        self.start(&["sh", "-c", &format!("exec env {}", command(task, &[]))]).unwrap()
    }

    fn wait_inside(&self, task: &str, words: &[&str]) {
        let deadline = Instant::now() + HANG;
        while let Err(e) = self.shell(&command(task, words)) {
            assert!(Instant::now() < deadline, "{e}");
        }
    }
}

/// Does what the environment says.
pub(crate) fn main() {
    let Ok(task) = std::env::var(TASK) else { return };
    let words: Vec<&str> = task.split_whitespace().collect();
    let id = || words[1].parse::<WindowId>().unwrap();
    let said = match words[0] {
        "window" => {
            dax::find(id(), words[2] == "true").unwrap();
            String::new()
        }
        "find" => dax::find(id(), false).map_or_else(|e| e.to_string(), |_| "found".into()),
        "devices" => {
            let names: Vec<String> = dax::devices().into_iter().map(|d| d.name).collect();
            names.join(" ")
        }
        "conformance" => conform(id()),
        "relay-conformance" => conform_over_the_port(id()),
        "offer" => offer(id(), words[2].parse().unwrap()),
        "take" => take(id()),
        "idle" => idle(),
        "bar-write" => {
            first_bytes().copy_from_slice(words[1].as_bytes());
            String::new()
        }
        "bar-read" => String::from_utf8_lossy(first_bytes()).into_owned(),
        "bar-conformance" => conform_in_a_device(),
        "write" => write(id()),
        "read" => read(&dax::find(id(), false).unwrap(), words[2].parse().unwrap()),
        "sum" => sum(&dax::find(id(), true).unwrap()),
        "scribble" => scribble(id()),
        "forge" => forge(id(), words[2].parse().unwrap()),
        other => panic!("no task {other}"),
    };
    println!("\nSAYS {said}");
}

fn conform(id: WindowId) -> String {
    let space = Space::new(dax::find(id, true).unwrap());
    let theirs = dax::find(id, false).unwrap();
    conform_within(&space, &theirs);
    "conforms".into()
}

/// Regions in this machine's window, seen through the other one, with links that stay in the machine.
fn conform_within(space: &Space, theirs: &Window) {
    let link = || {
        let (here, there) = Link::pair().unwrap();
        (Link::Socket(here), Link::Socket(there))
    };
    let region = |options: &RegionOptions| ConformanceRegion::in_window(space, theirs, options);
    conformance::all(&Backend { region: &region, link: &link, at_once: true });
}

/// This machine's end of its port, up.
fn port() -> (Relay, Notices) {
    let (relay, notices) = Relay::start(relay::open_port(PORT).unwrap(), PortSide::Guest).unwrap();
    while notices.recv_timeout(HANG).unwrap() != Notice::Up {}
    (relay, notices)
}

/// The same with a window.
fn port_with(id: WindowId, window: &Window) -> (Relay, Notices) {
    let (relay, notices) = port();
    relay.window(id, window.as_fd().try_clone_to_owned().unwrap());
    (relay, notices)
}

/// Makes the link 0, and waits until its other end is there.
fn link((relay, notices): &(Relay, Notices)) -> Link {
    let (link, near) = Link::pair().unwrap();
    relay.link(0, near, None);
    relay.control(b"linked").unwrap();
    said(notices);
    Link::Socket(link)
}

/// Waits until the other side of the port has made its ends of the links.
pub(crate) fn said(notices: &Notices) {
    while !matches!(notices.recv_timeout(HANG).unwrap(), Notice::Control(_)) {}
}

/// The conformance tests, with each link going out to the host and back.
fn conform_over_the_port(id: WindowId) -> String {
    let space = Space::new(dax::find(id, true).unwrap());
    let theirs = dax::find(id, false).unwrap();
    let (relay, notices) = port_with(id, &theirs);
    said(&notices);
    let ids = std::cell::Cell::new(0);
    let region = |options: &RegionOptions| ConformanceRegion::in_window(&space, &theirs, options);
    let link = || {
        let ((here, near), (there, far)) = (Link::pair().unwrap(), Link::pair().unwrap());
        relay.link(ids.get(), near, None);
        relay.link(ids.get() + 1, far, None);
        ids.set(ids.get() + 2);
        // Before this machine's relay has been told, it would drop what is said to the far end.
        std::thread::sleep(Duration::from_millis(20));
        (Link::Socket(here), Link::Socket(there))
    };
    conformance::all(&Backend { region: &region, link: &link, at_once: false });
    assert!(ids.get() <= 2 * LINKS);
    "conforms".into()
}

/// Sends memory to the other machine, and rings until it has been rung back so often.
fn offer(id: WindowId, rounds: u32) -> String {
    let space = Space::new(dax::find(id, true).unwrap());
    let (mut own, base) = space.create(&RegionOptions::endpoint(RING)).unwrap();
    own.span(RING / 2, RING).copy_from(0, &pattern());
    let port = port_with(id, space.window());
    let link = link(&port);
    link.attach_at(base, 0, 0, own.geometry(), space.window().as_fd()).unwrap();
    let wait = || link.wait(Some(Instant::now() + HANG)).unwrap();
    assert!(matches!(wait(), LinkEvent::Bell), "the other machine has taken it");
    let start = Instant::now();
    for _ in 0..rounds {
        link.ring();
        assert!(matches!(wait(), LinkEvent::Bell));
    }
    format!("{:?}", start.elapsed() / rounds)
}

/// Takes memory from the other machine, and rings back as often as it is rung.
fn take(id: WindowId) -> String {
    let window = dax::find(id, false).unwrap();
    let port = port_with(id, &window);
    let link = link(&port);
    let wait = || link.wait(Some(Instant::now() + HANG)).unwrap();
    let LinkEvent::Attach { base, geometry, memory, .. } = wait() else { panic!("no memory came") };
    let peer = pmem::attach(memory.as_fd(), base, RegionKind::Endpoint, geometry).unwrap();
    let mut bytes = vec![0; RING as usize];
    peer.span(RING / 2, RING).copy_to(&mut bytes);
    assert!(bytes == pattern());
    link.ring();
    let mut rings = 0;
    loop {
        match wait() {
            LinkEvent::Bell => link.ring(),
            LinkEvent::HungUp => return rings.to_string(),
            other => panic!("{other:?}"),
        }
        rings += 1;
    }
}

/// Has a link until it is hung up.
fn idle() -> String {
    let port = port();
    let link = link(&port);
    println!("READY");
    assert!(matches!(link.wait(None).unwrap(), LinkEvent::HungUp));
    "hung up".into()
}

fn pattern() -> Vec<u8> {
    (0..RING).map(|i| (i * 31 % 253) as u8).collect()
}

fn write(id: WindowId) -> String {
    let space = Space::new(dax::find(id, true).unwrap());
    let (mut own, base) = space.create(&RegionOptions::endpoint(RING)).unwrap();
    // From the middle on, so that it wraps.
    own.span(RING / 2, RING).copy_from(0, &pattern());
    base.to_string()
}

/// Reads as a peer, in a guest or on the host.
pub(crate) fn read(window: &Window, base: u64) -> String {
    let peer = window.attach(base, RegionKind::Endpoint, Geometry::new(PAGE, RING).unwrap()).unwrap();
    let mut bytes = vec![0; RING as usize];
    peer.span(RING / 2, RING).copy_to(&mut bytes);
    if bytes == pattern() { "as written".into() } else { "something else".into() }
}

/// All of a window, as this machine sees it, in a number. Without the word that an owner's store is tried at whenever it looks for its
/// windows (protocol V1.5).
fn sum(window: &Window) -> String {
    const TRIAL_WORD: usize = 4088 / 8;
    let map = raw(window, ProtFlags::READ);
    let words = map.chunks_exact(8).enumerate().filter(|(at, _)| *at != TRIAL_WORD);
    let sum = words.fold(0u64, |sum, (_, word)| {
        sum.rotate_left(5) ^ u64::from_le_bytes(word.try_into().unwrap()).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    });
    sum.to_string()
}

/// Writes all over a window that is not this machine's.
fn scribble(id: WindowId) -> String {
    let device = dax::devices().into_iter().find(|d| d.header.as_ref().is_some_and(|h| h.id == id)).unwrap();
    assert!(device.read_only, "its kernel knows");
    let window = dax::open(&device.name, true).unwrap();
    raw(&window, ProtFlags::READ | ProtFlags::WRITE).fill(0xee);
    "scribbled".into()
}

/// An owner copies the header of another window into its own.
fn forge(own: WindowId, victim: WindowId) -> String {
    let window = dax::find(own, true).unwrap();
    let header = WindowHeader { id: victim, size: window.size(), owner: "a".into(), peer: "b".into() };
    raw(&window, ProtFlags::READ | ProtFlags::WRITE)[..4096].copy_from_slice(&header.encode());
    String::new()
}

/// The memory of the ivshmem device, once it has appeared.
fn device() -> Window {
    let deadline = Instant::now() + HANG;
    loop {
        if let [device] = &bar::devices()[..] {
            return bar::open(device, true).unwrap();
        }
        assert!(Instant::now() < deadline, "no ivshmem device");
    }
}

/// Its first bytes, which only one program at a time uses.
fn first_bytes() -> &'static mut [u8] {
    &mut raw(&device(), ProtFlags::READ | ProtFlags::WRITE)[..7]
}

/// Regions in its memory are as good as any, as long as both sides keep to their own.
fn conform_in_a_device() -> String {
    let space = Space::new(device());
    let theirs = device();
    conform_within(&space, &theirs);
    // Emulated memory is cached whatever the guest says; where it is not, this is a large number.
    assert!(device().slowness().unwrap() > 0.0);
    "conforms".into()
}

/// The whole window, mapped as a hostile guest maps it.
#[expect(unsafe_code, reason = "maps memory as a hostile guest would")]
fn raw(window: &Window, access: ProtFlags) -> &'static mut [u8] {
    let len = window.size() as usize;
    // SAFETY: a fresh mapping, never unmapped, of memory that nobody else uses meanwhile.
    unsafe {
        let start = rustix::mm::mmap(std::ptr::null_mut(), len, access, MapFlags::SHARED, window.as_fd(), 0).unwrap();
        std::slice::from_raw_parts_mut(start.cast(), len)
    }
}
