//! The readiness of a connection, as `poll` would report it, and the bits that it is asked for and reported in.

use super::word::AtomicWord;
use crate::conn::{Conn, Interest, RingReadiness};
use crate::sys;
use rustix::event::epoll::EventFlags;
use std::sync::atomic::AtomicU32;

/// Ready to read; the numbers are the same for `poll` and `epoll`.
pub(super) const IN: u32 = EventFlags::IN.bits() | EventFlags::RDNORM.bits();
/// Ready to write.
pub(super) const OUT: u32 = EventFlags::OUT.bits() | EventFlags::WRNORM.bits();
pub(super) const PRI: u32 = EventFlags::PRI.bits();
pub(super) const RDHUP: u32 = EventFlags::RDHUP.bits();
/// Events that are reported without being asked for.
pub(super) const ENDS: u32 = EventFlags::HUP.bits() | EventFlags::ERR.bits();
/// All that a socket can be ready for.
pub(super) const ALL: u32 = IN | OUT | PRI | RDHUP | ENDS;

/// Flags that a program sets beside the events that it asks an epoll set for.
pub(super) const ET: u32 = EventFlags::ET.bits();
pub(super) const ONESHOT: u32 = EventFlags::ONESHOT.bits();
pub(super) const EXCLUSIVE: u32 = EventFlags::EXCLUSIVE.bits();

/// The events of `wanted` (and always of [`ENDS`]) that the connection is ready for.
///
/// `kernel` has the events that its socket may be ready for in the kernel, as far as is known: where the ring does not decide, the kernel
/// is asked, and only for that. A level-triggered registration that the kernel is asked for anyway also asks for input that `kernel` does not
/// have yet: until its edge is read from the epoll set, it would be missing beside the events that are reported.
#[inline]
pub(super) fn of(conn: &Conn, wanted: u32, kernel: &AtomicU32) -> u32 {
    let mut ready = 0;
    let mut open = 0;
    let mut input = 0;
    let hung_up = conn.kernel.has_hung_up();
    if conn.death().is_reset() || (hung_up != 0 || conn.look().is_ending()) && conn.death().look_for_reset() {
        return conn.death().reset_events() & (wanted | ENDS);
    }
    if wanted & IN != 0 {
        match conn.look().readable() {
            RingReadiness::Yes => ready |= IN,
            RingReadiness::AskKernel => {
                open |= IN;
                // A FIN is input and `RDHUP` at once.
                input = IN | wanted & (PRI | RDHUP);
            }
            RingReadiness::No => {}
        }
    }
    if wanted & OUT != 0 {
        match conn.look().writable() {
            RingReadiness::Yes => ready |= OUT,
            RingReadiness::AskKernel => open |= OUT,
            RingReadiness::No => {}
        }
    }
    if hung_up != 0 || conn.look().is_ending() {
        // Over, or nearly: an error goes away by being read, our own end makes theirs the end of all.
        open |= (wanted | ENDS) & !ready;
        ready |= hung_up & RDHUP;
        if conn.errors().has_kept() {
            // It was taken out of the socket, where it would be found otherwise.
            ready |= EventFlags::ERR.bits();
        }
    } else {
        open |= wanted & (PRI | RDHUP);
        if wanted & (IN | OUT) == 0 && conn.look().readable() == RingReadiness::AskKernel {
            // A caller that asks for the end alone: where bytes come by TCP, the end does too.
            open |= ENDS;
        }
        open &= kernel.get();
        // An edge-triggered registration reports each edge once, and this one comes from the epoll set.
        if open != 0 && wanted & ET == 0 {
            open |= input;
        }
    }
    if open != 0 {
        let said = sys::poll_now(conn.fd(), open);
        // Events that the kernel does not report now will come as an edge. Events that were not asked for stay as they were.
        kernel.put((kernel.get() & !open) | said);
        conn.kernel.note(said & (RDHUP | ENDS));
        if said & (RDHUP | ENDS) != 0 && hung_up == 0 && conn.death().look_for_reset() {
            return conn.death().reset_events() & (wanted | ENDS);
        }
        ready |= said;
    }
    ready & (wanted | ENDS)
}

/// The conditions to be rung for.
pub(super) fn interest(events: u32) -> Interest {
    let one = |asked: u32, kind: Interest| if events & asked != 0 { kind.0 } else { 0 };
    Interest(one(IN | RDHUP, Interest::IN) | one(OUT, Interest::OUT))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::calls::testing::{recv, send};
    use crate::conn::Pair;
    use partywall_shm::status::Reason;
    use std::time::{Duration, Instant};

    /// The kernel's socket may be ready for room alone, as far as is known.
    fn room() -> AtomicU32 {
        AtomicU32::new(OUT)
    }

    /// A pair whose second side sends and receives by TCP.
    fn on_tcp() -> Pair {
        let p = Pair::up(4096);
        p.conn_b().stay_on_tcp(Reason::Told);
        let ways = || (p.conn_b().look().readable(), p.conn_b().look().writable());
        while ways() != (RingReadiness::AskKernel, RingReadiness::AskKernel) {
            for (from, to) in [(p.a, p.b), (p.b, p.a)] {
                send(from, b"x", 0).unwrap();
                recv(to, 1, 0).unwrap();
            }
        }
        p
    }

    fn wait_for(p: &Pair, events: u32) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while sys::poll_now(p.b, events) & events != events {
            assert!(Instant::now() < deadline, "the kernel never reports {events:#x}");
            std::thread::yield_now();
        }
    }

    #[test]
    fn level_triggered_input_by_tcp_is_reported_beside_room() {
        let (p, kernel) = (on_tcp(), room());
        assert_eq!(of(p.conn_b(), IN | OUT, &kernel), OUT);
        send(p.a, b"y", 0).unwrap();
        wait_for(&p, IN);
        for wanted in [IN | OUT, IN | OUT | ONESHOT, IN | OUT | EXCLUSIVE] {
            let kernel = room();
            assert_eq!(of(p.conn_b(), wanted, &kernel), IN | OUT);
            assert_eq!(kernel.get(), IN | OUT, "the next look asks again");
        }
        recv(p.b, 1, 0).unwrap();
        assert_eq!(of(p.conn_b(), IN | OUT, &AtomicU32::new(IN | OUT)), OUT);
    }

    #[test]
    fn edge_triggered_input_by_tcp_waits_for_its_edge() {
        let (p, kernel) = (on_tcp(), room());
        send(p.a, b"y", 0).unwrap();
        wait_for(&p, IN);
        assert_eq!(of(p.conn_b(), IN | OUT | ET, &kernel), OUT);
        assert_eq!(kernel.get(), OUT);
    }

    #[test]
    fn kernel_without_known_events_is_not_asked_for_input() {
        let (p, kernel) = (on_tcp(), AtomicU32::new(0));
        send(p.a, b"y", 0).unwrap();
        wait_for(&p, IN);
        assert_eq!(of(p.conn_b(), IN | OUT, &kernel), 0, "its edge is in the epoll set");
    }

    #[test]
    fn end_by_tcp_is_reported_as_input_and_end_at_once() {
        let (p, kernel) = (on_tcp(), room());
        // Past the library, so that no notice comes with it.
        rustix::net::shutdown(sys::borrow(p.a), rustix::net::Shutdown::Write).unwrap();
        wait_for(&p, RDHUP);
        assert_eq!(of(p.conn_b(), IN | OUT | RDHUP, &kernel), IN | OUT | RDHUP);
    }
}
