//! Signal handlers that interrupt a call which has moved bytes: as in the kernel, it returns their number whatever `SA_RESTART` says.

use super::*;
use crate::broker::tests::alone::alone;

extern "C" fn nothing(_: c_int) {}

/// Handlers that are installed for two signals.
fn install(flags: [Option<c_int>; 2]) {
    for (signal, flags) in [libc::SIGUSR1, libc::SIGUSR2].into_iter().zip(flags) {
        // SAFETY: all zeros is a valid value; the handler does nothing, and no other test runs in this process.
        #[expect(unsafe_code, reason = "installs a signal handler")]
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = flags.map_or(libc::SIG_DFL, |_| nothing as *const () as usize);
            action.sa_flags = flags.unwrap_or(0);
            assert_eq!(crate::calls::testing::sigaction(signal, &action), 0);
        }
    }
}

/// The result of a call that gets `SIGUSR1` until it ends.
fn interrupted<T: Send>(call: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let (tell, hear) = std::sync::mpsc::channel();
        let thread = scope.spawn(move || {
            // SAFETY: asks for this thread.
            #[expect(unsafe_code, reason = "calls a C function")]
            let this = unsafe { libc::pthread_self() };
            tell.send(this).unwrap();
            call()
        });
        let id = hear.recv().unwrap();
        let deadline = std::time::Instant::now() + HUNG;
        while !thread.is_finished() {
            assert!(std::time::Instant::now() < deadline, "the call goes on after the handler");
            std::thread::sleep(Duration::from_millis(20));
            // SAFETY: the thread has not been joined.
            #[expect(unsafe_code, reason = "calls a C function")]
            unsafe {
                libc::pthread_kill(id, libc::SIGUSR1);
            }
        }
        thread.join().unwrap()
    })
}

/// With handlers of one kind, and of both kinds.
fn with_restarting_handlers(test: impl Fn(&Pair)) {
    for other in [None, Some(0)] {
        install([Some(libc::SA_RESTART), other]);
        test(&Pair::up(4096));
    }
}

#[test]
fn send_that_has_sent_ends_after_restarting_handler() {
    let Some(_alone) = alone!() else { return };
    with_restarting_handlers(|p| assert_eq!(interrupted(|| send(p.a, &[7; 8192], 0)), Ok(4096)));
}

#[test]
fn recv_that_has_received_ends_after_restarting_handler() {
    let Some(_alone) = alone!() else { return };
    with_restarting_handlers(|p| {
        send(p.a, b"four", 0).unwrap();
        assert_eq!(interrupted(|| recv(p.b, 8, libc::MSG_WAITALL)).unwrap(), b"four");
    });
}

#[test]
fn sendfile_that_has_sent_ends_after_restarting_handler() {
    let Some(_alone) = alone!() else { return };
    let file = tempfile::tempfile().unwrap();
    file.set_len(8192).unwrap();
    with_restarting_handlers(|p| {
        let mut offset = 0;
        assert_eq!(interrupted(|| sendfile(p.a, file.as_raw_fd(), &mut offset, 8192)), Ok(4096));
    });
}
