//! A connection that begins again while several threads use it.

use super::*;

/// Has the threads of a test end.
struct EndOnDrop<'a>(&'a std::sync::atomic::AtomicBool);

impl Drop for EndOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn threads_that_use_a_connection_meanwhile_lose_no_byte() {
    const IN: u32 = libc::EPOLLIN as u32;
    const PIECE: usize = 1000;
    let p = Pair::up(4096);
    let is_over = std::sync::atomic::AtomicBool::new(false);
    let over = || is_over.load(Ordering::Relaxed);
    let pattern = |from: u64| (0..PIECE as u64).map(move |n| ((from + n) / 7) as u8).collect::<Vec<u8>>();
    fn may_wait<T>(result: Result<T, Errno>) -> Option<T> {
        (result.as_ref().err() != Some(&Errno::AGAIN)).then(|| result.unwrap())
    }
    std::thread::scope(|s| {
        for (from, to) in [(p.a, p.b), (p.b, p.a)] {
            s.spawn(move || {
                let mut sent = 0;
                while !over() {
                    sent += may_wait(send(from, &pattern(sent), libc::MSG_DONTWAIT)).unwrap_or(0) as u64;
                }
                shutdown(from, libc::SHUT_WR);
            });
            s.spawn(move || {
                let mut got = 0u64;
                loop {
                    let Some(bytes) = may_wait(recv(to, PIECE, libc::MSG_DONTWAIT)) else {
                        // Not long: a connection is brought up while no thread is in the kernel with it.
                        let _ = poll(to, libc::POLLIN, 1);
                        continue;
                    };
                    if bytes.is_empty() {
                        break;
                    }
                    assert!(pattern(got)[..bytes.len()] == bytes, "after {got} bytes");
                    got += bytes.len() as u64;
                }
            });
            // Calls that move no byte, on the descriptor and on copies of it.
            s.spawn(move || {
                while !over() {
                    let copy = dup(to);
                    let _ = poll(copy, libc::POLLIN | libc::POLLOUT, 1);
                    let _ = recv(copy, 1, libc::MSG_DONTWAIT | libc::MSG_PEEK);
                    close(copy);
                }
            });
            s.spawn(move || {
                let set = EpollSet::new();
                while !over() {
                    set.add(to, IN, 7);
                    let _ = set.wait_for(4, 1);
                    set.change(to, 0, 8);
                    set.take_out(to).unwrap();
                }
            });
        }
        // Also if this thread fails.
        let _end = EndOnDrop(&is_over);
        for _ in 0..6 {
            let old = [p.conn_a(), p.conn_b()];
            for conn in old {
                conn.ring_path.set_flag(flags::FAR, true);
            }
            let _ = rustix::net::shutdown(sys::borrow(p.conn_a().bell().fd()), rustix::net::Shutdown::Both);
            soon("both begin again", || {
                old.iter().for_each(|conn| skip_pause(conn));
                p.conn_a().entry() != old[0].entry() && p.conn_b().entry() != old[1].entry()
            });
            soon("they meet", || p.try_to_bring_up(|| std::thread::sleep(Duration::from_millis(5))));
            soon("bytes go by ring", || ways(p.conn_a()) == (Way::Ring, Way::Ring));
        }
    });
}
