//! Rings that are closed and made again.

#![expect(unsafe_code, reason = "calls the exported function as a program does")]

use super::super::syscall::syscall;
use super::super::testing::close;
use crate::broker::tests::alone::alone;
use crate::submission::each;
use crate::table::{self, DescriptorKind};
use libc::c_int;

/// `None` where there is no `io_uring`.
fn make(flags: u32) -> Option<c_int> {
    // `struct io_uring_params`, whose third word is the flags.
    let mut params = [0u32; 30];
    params[2] = flags;
    // SAFETY: a structure of that size.
    let fd = unsafe { syscall(libc::SYS_io_uring_setup, 4, params.as_mut_ptr() as libc::c_ulong, 0, 0, 0, 0) };
    c_int::try_from(fd).ok().filter(|fd| *fd >= 0)
}

#[test]
fn ring_that_is_closed_leaves_nothing_and_makes_room() {
    // A ring that is being closed is out of the table just before it is gone: connections of other tests would stay on TCP for it.
    let Some(_alone) = alone!() else { return };
    // More than are looked after at once.
    for _ in 0..70 {
        let Some(fd) = make(0) else { return };
        assert_eq!(table::get(fd).kind(), DescriptorKind::Ring);
        assert!(each(fd, 4, |_| unreachable!("nothing was submitted")));
        close(fd);
        assert_eq!(table::get(fd).kind(), DescriptorKind::Stranger);
    }
}

#[test]
fn wide_entries_and_queues_without_array_are_read() {
    let Some(_alone) = alone!() else { return };
    for flags in [1 << 10, 1 << 16, 1 << 3 | 1 << 4] {
        // Not every kernel has them; CQSIZE without a size is refused by all.
        if let Some(fd) = make(flags) {
            assert!(each(fd, 4, |_| unreachable!("nothing was submitted")), "{flags:#x}");
            close(fd);
        }
    }
}
