//! Events during the attaching of a ring.

use super::*;
use crate::conn::bring_up;
use rustix::fd::{BorrowedFd, OwnedFd};
use std::fs;
use std::sync::Barrier;

/// The files that a connection has for its ring, by device and inode: other tests of this process make and close descriptors and
/// mappings meanwhile, and a socket may have the inode number that a region has.
struct Files(Vec<(u64, u64)>);

impl Files {
    fn note(&mut self, file: BorrowedFd<'_>) {
        self.0.push(Self::identity(file).unwrap());
    }

    fn identity(file: BorrowedFd<'_>) -> Option<(u64, u64)> {
        rustix::fs::fstat(file).ok().map(|stat| (stat.st_dev, stat.st_ino))
    }

    /// The file of a line of `/proc/self/maps`.
    fn mapped(line: &str) -> Option<(u64, u64)> {
        let mut columns = line.split_whitespace().skip(3);
        let (device, inode) = (columns.next()?, columns.next()?);
        let (major, minor) = device.split_once(':')?;
        let number = |hex| u32::from_str_radix(hex, 16).ok();
        Some((rustix::fs::makedev(number(major)?, number(minor)?), inode.parse().ok()?))
    }

    /// How many descriptors and mappings of them this process has.
    fn in_use(&self) -> (usize, usize) {
        let number = |fd: &fs::DirEntry| fd.file_name().to_str()?.parse::<c_int>().ok();
        let open = fs::read_dir("/proc/self/fd").unwrap().filter_map(|fd| number(&fd.ok()?));
        let descriptors = open.filter_map(|fd| Self::identity(crate::sys::borrow(fd)));
        let maps = fs::read_to_string("/proc/self/maps").unwrap();
        let ours = |file: &(u64, u64)| self.0.contains(file);
        (descriptors.filter(ours).count(), maps.lines().filter_map(Self::mapped).filter(ours).count())
    }
}

/// `a` has all that it needs to attach its ring. Its files, and the peer's region with its shape.
fn ready_to_attach(p: &Pair) -> (Files, OwnedFd, partywall_shm::layout::Geometry) {
    let (a, b) = (p.conn_a(), p.conn_b());
    let (own, _) = bring_up::make_region(a).unwrap();
    let (peer, geometry) = bring_up::make_region(b).unwrap();
    let (bell, other) = partywall_region::bell::pair().unwrap();
    let mut files = Files(Vec::new());
    for file in [own.as_fd(), bell.as_fd()] {
        files.note(file);
    }
    // The connection is not kept as usual: the session of a broker test in this process would be sent it.
    drop(own);
    assert!(a.bell().keep(bell, None) && b.bell().keep(other, None));
    (files, peer, geometry)
}

#[test]
fn descriptor_closed_while_ring_is_attached_leaves_nothing() {
    let mut p = Pair::candidates(4096);
    let (a, fd) = (p.conn_a(), p.a);
    let (files, peer, geometry) = ready_to_attach(&p);
    let (descriptors, mappings) = files.in_use();
    assert!(descriptors == 1 && mappings > 0, "{descriptors} descriptors, {mappings} mappings");
    let (mut tx, mut rx) = (a.tx.hold().unwrap(), a.rx.hold().unwrap());
    assert!(bring_up::is_quiet(a));
    std::thread::scope(|s| {
        // The kernel's part of `close` comes later.
        let closes = s.spawn(|| a.drop_descriptor(fd));
        // Time for a thread that does not wait.
        std::thread::sleep(Duration::from_millis(100));
        bring_up::attach(a, fd, &mut tx, &mut rx, peer.as_fd(), (Located::OwnMemory, geometry)).unwrap();
        drop((tx, rx));
        closes.join().unwrap();
    });
    close(fd);
    p.a = -1;
    assert_eq!(files.in_use(), (0, 0), "descriptors and mappings");
}

#[test]
fn close_beside_attach_by_another_thread_leaks_nothing() {
    for round in 0..200 {
        let mut p = Pair::candidates(4096);
        let (a, fd) = (p.conn_a(), p.a);
        let (files, peer, geometry) = ready_to_attach(&p);
        bring_up::be_confirmed(a, peer.as_fd(), geometry);
        // The peer watches its ring, though it has not mapped ours.
        #[expect(unsafe_code, reason = "reaches the page of a region that stays mapped")]
        // SAFETY: `ready_to_attach` has made the region in this berth.
        let own = unsafe { p.conn_b().local().own.own_page() }.unwrap();
        own.rx_path.flags.fetch_or(path_flags::WATCHING, Ordering::Release);
        let start = Barrier::new(2);
        std::thread::scope(|s| {
            s.spawn(|| {
                start.wait();
                // The step from the offer to the ring is taken by a call like this.
                let _ = send(fd, b"x", libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL);
            });
            start.wait();
            let until = crate::sys::now() + Duration::from_micros(round * 10);
            while crate::sys::now() < until {
                std::hint::spin_loop();
            }
            // The kernel's part of `close` comes when both are done: else another test could get the number, and the byte.
            a.drop_descriptor(fd);
        });
        close(fd);
        p.a = -1;
        assert_eq!(files.in_use(), (0, 0), "descriptors and mappings of round {round}");
    }
}

#[test]
fn connection_that_cannot_have_a_ring_after_all_stays_usable() {
    let p = Pair::candidates(4096);
    // A waiter of this connection cannot be notified of a ring.
    crate::ready::make_unknown(p.conn_a());
    p.bring_up();
    assert_eq!(send(p.a, b"by tcp", 0), Ok(6));
    assert_eq!(recv(p.b, 9, 0).unwrap(), b"by tcp");
    assert_eq!(send(p.b, b"and back", 0), Ok(8));
    assert_eq!(recv(p.a, 9, 0).unwrap(), b"and back");
    assert_eq!((ways(p.conn_a()).0, ways(p.conn_b()).0), (Way::Tcp, Way::Tcp));
    assert_eq!(p.conn_a().ring_path.reason(), Reason::Shared);
}

#[test]
fn offered_connection_closed_by_last_descriptor_leaks_nothing() {
    let mut p = Pair::candidates(4096);
    let (files, peer, geometry) = ready_to_attach(&p);
    bring_up::be_confirmed(p.conn_a(), peer.as_fd(), geometry);
    let copy = dup(p.a);
    close(p.a);
    assert_eq!(files.in_use().0, 1, "it is open still");
    close(copy);
    p.a = -1;
    assert_eq!(files.in_use(), (0, 0), "descriptors and mappings");
}

#[test]
fn peer_that_never_watches_holds_no_memory() {
    let p = Pair::candidates(4096);
    let (a, b) = (p.conn_a(), p.conn_b());
    let (files, peer, geometry) = ready_to_attach(&p);
    bring_up::be_confirmed(a, peer.as_fd(), geometry);
    // It lives, and answers by something else.
    assert!(b.bell().ring());
    send(p.a, b"x", 0).unwrap();
    assert!(a.ring_path.stage() == ConnStage::Offered && files.in_use() != (0, 0));
    a.moves.end_wait();
    send(p.a, b"y", 0).unwrap();
    assert_eq!((a.ring_path.stage(), a.ring_path.reason()), (ConnStage::Candidate, Reason::NotTaken));
    assert_eq!(files.in_use(), (0, 0), "descriptors and mappings");
    assert_eq!(recv(p.b, 9, 0).unwrap(), b"xy");
}

#[test]
fn abandoned_attach_leaves_connection_on_tcp() {
    let p = Pair::candidates(4096);
    let (files, ..) = ready_to_attach(&p);
    let a = p.conn_a();
    // A thread that has died with the lock, as one that leaves a handler by `longjmp`.
    std::thread::scope(|s| {
        s.spawn(|| {
            std::mem::forget(a.tx.hold().unwrap());
            assert!(bring_up::is_quiet(a));
        });
    });
    assert_eq!(
        (a.ring_path.stage(), a.ring_path.is_candidate(), a.is_tcp_permanently()),
        (ConnStage::Attaching, true, false)
    );
    // An earlier version waited here forever for the dead thread.
    assert_eq!(send(p.a, b"by tcp", 0), Ok(6));
    assert_eq!(recv(p.b, 9, 0).unwrap(), b"by tcp");
    assert_eq!((a.ring_path.stage(), files.in_use()), (ConnStage::Tcp, (0, 0)));
}

#[test]
fn descriptor_closes_while_living_thread_holds_attach() {
    let mut p = Pair::candidates(4096);
    let (a, fd) = (p.conn_a(), p.a);
    std::thread::scope(|s| {
        let (tell, told) = std::sync::mpsc::channel();
        let (end, ended) = std::sync::mpsc::channel::<()>();
        s.spawn(move || {
            // As one that leaves a handler by `longjmp`, and waits for something else then.
            std::mem::forget(a.tx.hold().unwrap());
            assert!(bring_up::is_quiet(a));
            tell.send(()).unwrap();
            let _ = ended.recv();
        });
        told.recv().unwrap();
        // An earlier version waited here forever for the living thread.
        close(fd);
        p.a = -1;
        drop(end);
    });
    assert!(Conn::of(fd).is_none_or(|other| !std::ptr::eq(other, a)));
}

#[test]
fn block_is_not_reused_while_thread_is_in_kernel_with_it() {
    let mut p = Pair::candidates(4096);
    let (a, index) = (p.conn_a(), p.conn_a().index());
    assert!(matches!(a.kernel_block_enter(), KernelSleep::Entered));
    close(p.a);
    p.a = -1;
    let gets_it = || {
        let other = Pair::candidates(4096);
        other.conn_a().index() == index || other.conn_b().index() == index
    };
    // Blocks are used in turn, and 64 are in use from the beginning.
    assert!(!(0..200).any(|_| gets_it()));
    a.kernel_block_leave();
    assert_eq!(a.kernel.in_kernel.load(Ordering::SeqCst), 0);
}

#[test]
fn connection_that_must_stay_on_tcp_while_it_is_attached_does() {
    static CONNECTION: std::sync::atomic::AtomicI32 = std::sync::atomic::AtomicI32::new(-1);
    extern "C" fn handler(_: c_int) {
        if let Some(conn) = Conn::of(CONNECTION.load(Ordering::Relaxed)) {
            conn.stay_on_tcp(Reason::Option);
        }
    }
    let p = Pair::candidates(4096);
    let (a, (_, peer, geometry)) = (p.conn_a(), ready_to_attach(&p));
    CONNECTION.store(p.a, Ordering::Relaxed);
    let (mut tx, mut rx) = (a.tx.hold().unwrap(), a.rx.hold().unwrap());
    assert!(bring_up::is_quiet(a));
    #[expect(unsafe_code, reason = "a signal handler of this test")]
    // SAFETY: nothing else here uses the signal, and what the handler calls is made for handlers.
    unsafe {
        libc::signal(libc::SIGURG, handler as *const () as libc::sighandler_t);
        libc::raise(libc::SIGURG);
    }
    assert_eq!(a.ring_path.stage(), ConnStage::Attaching, "the thread below the handler goes on");
    bring_up::attach(a, p.a, &mut tx, &mut rx, peer.as_fd(), (Located::OwnMemory, geometry)).unwrap();
    drop((tx, rx));
    assert_eq!(
        (a.ring_path.stage(), a.ring_path.reason(), a.has(flags::WANT_TCP)),
        (ConnStage::Attached, Reason::Option, true)
    );
    assert_eq!(send(p.a, b"by tcp", 0), Ok(6));
    assert_eq!((ways(a).0, recv(p.b, 9, 0).unwrap()), (Way::Tcp, b"by tcp".to_vec()));
}

#[test]
fn offer_needs_open_descriptor_of_its_connection() {
    let mut p = Pair::candidates(4096);
    let (a, closed) = (p.conn_a(), p.a);
    p.a = dup(closed);
    let reason = a.ring_path.reason();
    close(closed);
    // A thread that was about to, when another closed the number. It may be another connection's by now.
    bring_up::offer(a, closed);
    assert_eq!((a.ring_path.stage(), a.ring_path.reason()), (ConnStage::Candidate, reason));
}

/// Makes a signal handler of this thread do something.
fn in_a_handler(signal: c_int, handler: extern "C" fn(c_int)) {
    #[expect(unsafe_code, reason = "a signal handler of this test")]
    // SAFETY: nothing else here uses the signal, and what the handlers call is made for handlers.
    unsafe {
        libc::signal(signal, handler as *const () as libc::sighandler_t);
        libc::raise(signal);
    }
}

/// The broker may have the socket at that moment, and the handler cannot wait for the step that its thread takes.
#[test]
fn calls_in_handler_above_attach_return_eagain() {
    static CONNECTION: std::sync::atomic::AtomicI32 = std::sync::atomic::AtomicI32::new(-1);
    static ANSWERS: std::sync::Mutex<Vec<Result<usize, Errno>>> = std::sync::Mutex::new(Vec::new());
    extern "C" fn handler(_: c_int) {
        let fd = CONNECTION.load(Ordering::Relaxed);
        let poll = |events| crate::calls::testing::poll(fd, events, 20);
        let answers = [
            recv(fd, 9, 0).map(|bytes| bytes.len()),
            recv(fd, 9, libc::MSG_PEEK).map(|bytes| bytes.len()),
            send(fd, b"x", libc::MSG_NOSIGNAL),
            poll(libc::POLLIN),
            poll(libc::POLLIN | libc::POLLOUT),
        ];
        ANSWERS.lock().unwrap().extend(answers);
    }
    let mut p = Pair::candidates(4096);
    let (a, (_, peer, geometry)) = (p.conn_a(), ready_to_attach(&p));
    CONNECTION.store(p.a, Ordering::Relaxed);
    let (mut tx, mut rx) = (a.tx.hold().unwrap(), Some(a.rx.hold().unwrap()));
    assert!(bring_up::is_quiet(a));
    in_a_handler(libc::SIGTTOU, handler);
    // The first steps of both sides hold the sending direction alone.
    drop(rx.take());
    in_a_handler(libc::SIGTTOU, handler);
    let refused = Err(Errno::AGAIN);
    let once = [refused, refused, refused, Ok(0), Ok(libc::POLLOUT as usize)];
    assert_eq!(*ANSWERS.lock().unwrap(), [once, once].concat());
    let mut rx = a.rx.hold().unwrap();
    bring_up::attach(a, p.a, &mut tx, &mut rx, peer.as_fd(), (Located::OwnMemory, geometry)).unwrap();
    drop((tx, rx));
    assert_eq!(send(p.a, b"x", 0), Ok(1));
    assert_eq!(recv(p.b, 9, 0).unwrap(), b"x");
    // Closed by another thread.
    a.drop_descriptor(p.a);
    let (mut byte, fd) = ([0u8], p.a);
    let mut list = [libc::iovec { iov_base: byte.as_mut_ptr().cast(), iov_len: 1 }];
    let mut cursor = super::super::Cursor::of(&mut list).unwrap();
    assert_eq!(a.receive(fd, &mut cursor, libc::MSG_DONTWAIT), Err(Errno::BADF));
    close(fd);
    p.a = -1;
}

#[test]
fn call_left_by_longjmp_is_not_counted_forever() {
    static CONNECTION: std::sync::atomic::AtomicI32 = std::sync::atomic::AtomicI32::new(-1);
    static COUNTED: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
    extern "C" fn handler(_: c_int) {
        let fd = CONNECTION.load(Ordering::Relaxed);
        if let Some(conn) = Conn::of(fd) {
            let call = call_by_kernel(conn, fd);
            COUNTED.store(conn.kernel.in_kernel.load(Ordering::SeqCst), Ordering::Relaxed);
            call.received(-1, false);
        }
    }
    let (p, other) = (Pair::candidates(4096), Pair::candidates(4096));
    let counts = || [p.conn_a(), p.conn_b()].map(|conn| conn.kernel.in_kernel.load(Ordering::SeqCst));
    CONNECTION.store(p.a, Ordering::Relaxed);
    // As a `recv`, and then a `poll`, whose handler leaves by `longjmp`.
    let _abandoned = call_by_kernel(p.conn_a(), p.a);
    in_a_handler(libc::SIGTTIN, handler);
    assert_eq!((COUNTED.load(Ordering::Relaxed), counts()), (2, [1, 0]), "what the handler has interrupted goes on");
    super::super::end_abandoned();
    for conn in [p.conn_a(), p.conn_b(), p.conn_a()] {
        assert!(matches!(conn.kernel_block_enter(), KernelSleep::Entered));
    }
    assert_eq!(counts(), [2, 1]);
    let call = call_by_kernel(other.conn_a(), other.a);
    assert_eq!(counts(), [0, 0], "the next call of this thread ends them, of whatever connection it is");
    assert!(other.conn_a().is_slept_on());
    call.sent(-1);
    assert!(!other.conn_a().is_slept_on());
}
