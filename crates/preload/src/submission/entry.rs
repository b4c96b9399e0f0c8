//! The work of one entry of a submission queue, in the layout of `linux/io_uring.h`.
#![expect(unsafe_code, reason = "reads and replaces entries that the program has written, and lists that it names")]

use libc::{c_int, c_uint, c_ulong, epoll_event};

const NOP: u8 = 0;
const POLL_REMOVE: u8 = 7;
const TIMEOUT: u8 = 11;
const TIMEOUT_REMOVE: u8 = 12;
const ASYNC_CANCEL: u8 = 14;
const LINK_TIMEOUT: u8 = 15;
const CLOSE: u8 = 19;
const FILES_UPDATE: u8 = 20;
const EPOLL_CTL: u8 = 29;
const SPLICE: u8 = 30;
const PROVIDE_BUFFERS: u8 = 31;
const REMOVE_BUFFERS: u8 = 32;
const TEE: u8 = 33;
const MSG_RING: u8 = 40;
const SOCKET: u8 = 45;
const WAITID: u8 = 50;
const FUTEX_WAITV: u8 = 53;
const EPOLL_WAIT: u8 = 59;

/// The descriptor is the place of a registered file.
const FIXED_FILE: u8 = 1;
/// The next entry waits for this one.
const LINKED: u8 = 1 << 2 | 1 << 3;
/// `SPLICE_F_FD_IN_FIXED`
const IN_IS_FIXED: u32 = 1 << 31;

/// The part of an entry that we look at.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct RawEntry {
    operation: u8,
    flags: u8,
    priority: u16,
    fd: i32,
    offset: u64,
    address: u64,
    len: u32,
    operation_flags: u32,
    user_data: u64,
    buffer: u16,
    personality: u16,
    file: i32,
    rest: [u64; 2],
}
const _: () = assert!(size_of::<RawEntry>() == 64);

/// An entry that the program submits.
pub(crate) struct Submitted {
    at: *mut RawEntry,
    raw: RawEntry,
    is_chained: bool,
}

/// Descriptors that an entry names.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum EntryDescriptor {
    None,
    One(c_int),
    /// An array of 32-bit numbers.
    List(u64, u32),
}

/// The work that an entry asks for.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum EntryWork {
    /// An entry that concerns no descriptor.
    Nothing,
    EpollControl {
        set: c_int,
        operation: c_int,
        fd: c_int,
        event: *mut epoll_event,
    },
    Close {
        fd: c_int,
    },
    /// Anything else. `takes_events`: the events of a set go to the program past us.
    Uses {
        descriptors: [EntryDescriptor; 2],
        takes_events: bool,
    },
}

impl Submitted {
    /// Reads an entry. `after_link`: the one before is linked to it.
    ///
    /// # Safety
    /// `at` is an entry of a mapped queue, whose next user is the kernel by the caller's system call.
    pub(super) unsafe fn new(at: *mut RawEntry, after_link: bool) -> Self {
        // SAFETY: by the caller's word; volatile, since the program could write it still.
        let raw = unsafe { at.read_volatile() };
        Self { at, raw, is_chained: after_link || raw.flags & LINKED != 0 }
    }

    /// Whether the next entry waits for this one.
    pub(super) fn is_linked(&self) -> bool {
        self.raw.flags & LINKED != 0
    }

    pub(crate) fn work(&self) -> EntryWork {
        let raw = &self.raw;
        let uses = |one, two| EntryWork::Uses { descriptors: [one, two], takes_events: raw.operation == EPOLL_WAIT };
        let own = if raw.flags & FIXED_FILE == 0 { EntryDescriptor::One(raw.fd) } else { EntryDescriptor::None };
        match raw.operation {
            NOP
            | POLL_REMOVE
            | TIMEOUT
            | TIMEOUT_REMOVE
            | ASYNC_CANCEL
            | LINK_TIMEOUT
            | PROVIDE_BUFFERS
            | REMOVE_BUFFERS
            | MSG_RING
            | SOCKET
            | WAITID..=FUTEX_WAITV => EntryWork::Nothing,
            // Invalid entries are left to the kernel, which refuses them.
            EPOLL_CTL if raw.flags & FIXED_FILE == 0 && raw.priority == 0 && raw.buffer == 0 && raw.file == 0 => {
                EntryWork::EpollControl {
                    set: raw.fd,
                    operation: raw.len.cast_signed(),
                    fd: raw.offset as c_int,
                    event: raw.address as *mut epoll_event,
                }
            }
            EPOLL_CTL => EntryWork::Nothing,
            CLOSE if raw.file != 0 || raw.flags & FIXED_FILE != 0 => EntryWork::Nothing,
            // Earlier entries of its chain must be executed first.
            CLOSE if !self.is_chained => EntryWork::Close { fd: raw.fd },
            FILES_UPDATE => uses(EntryDescriptor::List(raw.address, raw.len), EntryDescriptor::None),
            SPLICE | TEE => {
                let from = if raw.operation_flags & IN_IS_FIXED == 0 {
                    EntryDescriptor::One(raw.file)
                } else {
                    EntryDescriptor::None
                };
                uses(own, from)
            }
            _ => uses(own, EntryDescriptor::None),
        }
    }

    /// It is done: the kernel is to say no more than that.
    pub(crate) fn make_nothing(&self) {
        let nothing = RawEntry {
            operation: NOP,
            flags: self.raw.flags,
            priority: 0,
            fd: -1,
            offset: 0,
            address: 0,
            len: 0,
            operation_flags: 0,
            user_data: self.raw.user_data,
            buffer: 0,
            personality: self.raw.personality,
            file: 0,
            rest: [0; 2],
        };
        // SAFETY: as in `new`.
        unsafe { self.at.write_volatile(nothing) };
    }
}

/// Calls `each` with the descriptors of an array.
///
/// # Safety
/// There is such an array at `at`, unless that is null.
pub(crate) unsafe fn each_of(at: u64, count: u32, each: impl Fn(c_int)) {
    let list = at as *const c_int;
    if list.is_null() {
        return;
    }
    for i in 0..count as usize {
        // SAFETY: by the caller's word.
        let fd = unsafe { list.add(i).read_unaligned() };
        if fd >= 0 {
            each(fd);
        }
    }
}

/// Calls `each` with the descriptors that `io_uring_register` is to register.
///
/// # Safety
/// `argument` is what the operation asks for.
pub(crate) unsafe fn registered(operation: c_uint, argument: c_ulong, count: c_uint, each: impl Fn(c_int)) {
    const FILES: c_uint = 2;
    const FILES_UPDATE: c_uint = 6;
    const FILES2: c_uint = 13;
    const FILES_UPDATE2: c_uint = 14;
    if argument == 0 {
        return;
    }
    // SAFETY: by the caller's word, words of the structure that the operation has.
    let word = |at: c_ulong| unsafe { ((argument + at) as *const u64).read_unaligned() };
    let (list, count) = match operation {
        FILES => (argument, count),
        FILES_UPDATE => (word(8), count),
        // { u32 nr, flags; u64 resv2, data, tags }
        FILES2 => (word(16), word(0) as u32),
        // { u32 offset, resv; u64 data, tags; u32 nr, resv2 }
        FILES_UPDATE2 => (word(8), word(24) as u32),
        _ => return,
    };
    // SAFETY: by the caller's word.
    unsafe { each_of(list, count.min(1 << 20), each) };
}

#[cfg(test)]
mod tests {
    use super::*;

    fn work(operation: u8, change: impl Fn(&mut RawEntry)) -> EntryWork {
        let mut raw = RawEntry {
            operation,
            flags: 0,
            priority: 0,
            fd: 7,
            offset: 8,
            address: 0x1000,
            len: 3,
            operation_flags: 0,
            user_data: 99,
            buffer: 0,
            personality: 0,
            file: 0,
            rest: [0; 2],
        };
        change(&mut raw);
        // SAFETY: a local entry.
        unsafe { Submitted::new(&raw mut raw, false) }.work()
    }

    const POLL_ADD: u8 = 6;

    #[test]
    fn entry_names_the_descriptors_that_it_uses() {
        let uses = |one, two, takes_events| EntryWork::Uses { descriptors: [one, two], takes_events };
        assert_eq!(work(POLL_ADD, |_| {}), uses(EntryDescriptor::One(7), EntryDescriptor::None, false));
        assert_eq!(work(EPOLL_WAIT, |_| {}), uses(EntryDescriptor::One(7), EntryDescriptor::None, true));
        assert_eq!(
            work(POLL_ADD, |raw| raw.flags = FIXED_FILE),
            uses(EntryDescriptor::None, EntryDescriptor::None, false)
        );
        assert_eq!(work(SPLICE, |raw| raw.file = 9), uses(EntryDescriptor::One(7), EntryDescriptor::One(9), false));
        assert_eq!(work(FILES_UPDATE, |_| {}), uses(EntryDescriptor::List(0x1000, 3), EntryDescriptor::None, false));
        assert_eq!(work(TIMEOUT, |_| {}), EntryWork::Nothing);
        assert_eq!(work(CLOSE, |_| {}), EntryWork::Close { fd: 7 });
        assert_eq!(work(CLOSE, |raw| raw.flags = 1 << 2), uses(EntryDescriptor::One(7), EntryDescriptor::None, false));
        let event = 0x1000 as *mut epoll_event;
        assert_eq!(work(EPOLL_CTL, |_| {}), EntryWork::EpollControl { set: 7, operation: 3, fd: 8, event });
        assert_eq!(work(EPOLL_CTL, |raw| raw.priority = 1), EntryWork::Nothing, "the kernel refuses it");
    }
}
