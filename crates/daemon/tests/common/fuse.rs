//! A file whose reads are never answered, and whose flushes are answered late or never, as any user with the right to mount FUSE can make
//! one.
//! The kernel flushes a file whenever a descriptor of it is closed.
//!
//! The mount lives in the private mount namespace of one thread. Closing the device ends the connection, and with it every
//! call that waits for an answer.
//!
//! A process that ends while it has the file open and its own thread answers for it would wait for itself, and could not be killed: the
//! kernel closes the file before the device. So a file that is open to the end is answered for by another process ([`Flush::After`]).
#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::ffi::{CStr, CString};
use std::fs::{File, OpenOptions};
use std::io::{Read as _, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::thread::UnshareFlags;

const GETATTR: u32 = 3;
const OPEN: u32 = 14;
const READ: u32 = 15;
const FLUSH: u32 = 25;
const INIT: u32 = 26;
/// Size of the file.
pub(crate) const SIZE: u64 = 1 << 20;

/// When the file's flushes are answered.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Flush {
    /// It is dropped before the process ends.
    Never,
    /// A child process answers. Only a process that has no other threads may make it.
    After(Duration),
}

/// The server of the kernel's requests: a thread of this process, or a child.
enum Server {
    Thread { over: Arc<AtomicBool>, reads: Arc<AtomicU32>, thread: JoinHandle<()> },
    Process(libc::pid_t),
}

impl Server {
    fn start(device: File, flush: Flush) -> Option<Self> {
        if let Flush::After(_) = flush {
            #[expect(unsafe_code, reason = "no safe function forks")]
            // SAFETY: this process has no other threads, says the caller. The child runs `serve` and ends.
            let child = unsafe { libc::fork() };
            if child == 0 {
                #[expect(unsafe_code, reason = "the child ends with its parent, and runs nothing else")]
                // SAFETY: only integers are passed.
                unsafe {
                    libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                    serve(device, flush, &AtomicBool::new(false), &AtomicU32::new(0));
                    libc::_exit(0)
                }
            }
            return (child > 0).then_some(Self::Process(child));
        }
        let (over, reads) = (Arc::<AtomicBool>::default(), Arc::<AtomicU32>::default());
        let (seen, counted) = (Arc::clone(&over), Arc::clone(&reads));
        Some(Self::Thread { over, reads, thread: std::thread::spawn(move || serve(device, flush, &seen, &counted)) })
    }

    /// Closes the device.
    fn end(self) {
        match self {
            Self::Thread { over, thread, .. } => {
                over.store(true, Ordering::Relaxed);
                let _ = thread.join();
            }
            #[expect(unsafe_code, reason = "ends the child that was forked")]
            // SAFETY: only integers and a null pointer are passed.
            Self::Process(child) => unsafe {
                libc::kill(child, libc::SIGKILL);
                libc::waitpid(child, std::ptr::null_mut(), 0);
            },
        }
    }
}

/// The file, and who answers for it.
pub(crate) struct FuseFile {
    file: Option<File>,
    server: Option<Server>,
}

impl FuseFile {
    /// `None` without `/dev/fuse` or the right to mount.
    pub(crate) fn mount(flush: Flush) -> Option<Self> {
        let device = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(rustix::fs::OFlags::NONBLOCK.bits() as i32)
            .open("/dev/fuse")
            .ok()?;
        let server = Server::start(device.try_clone().ok()?, flush)?;
        let number = device.as_raw_fd();
        let mounted = std::thread::spawn(move || {
            #[expect(unsafe_code, reason = "rustix marks every sort of unshare alike")]
            // SAFETY: a new mount namespace for this thread alone; descriptors stay shared.
            unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS) }.ok()?;
            let private = (libc::MS_PRIVATE | libc::MS_REC) as libc::c_ulong;
            mount(c"none", c"/", c"none", private, c"")?;
            let at = tempfile::NamedTempFile::new().ok()?;
            let options = format!("fd={number},rootmode=100666,user_id=0,group_id=0,allow_other");
            let place = CString::new(at.path().as_os_str().as_encoded_bytes()).ok()?;
            mount(c"none", &place, c"fuse", 0, &CString::new(options).ok()?)?;
            let file = OpenOptions::new().read(true).write(true).open(at.path()).ok()?;
            // The kernel asks for its size, without which it has no pages.
            file.metadata().ok()?;
            Some(file)
        });
        let file = mounted.join().unwrap();
        drop(device);
        let this = Self { file, server: Some(server) };
        this.file.is_some().then_some(this)
    }

    pub(crate) fn file(&self) -> &File {
        self.file.as_ref().unwrap()
    }

    /// Whether the kernel has asked for pages of the file. The caller that needs them waits from then on. Only where a thread answers.
    pub(crate) fn is_read(&self) -> bool {
        matches!(&self.server, Some(Server::Thread { reads, .. }) if reads.load(Ordering::Relaxed) > 0)
    }
}

fn mount(from: &CStr, at: &CStr, kind: &CStr, flags: libc::c_ulong, options: &CStr) -> Option<()> {
    let (from, at, kind) = (from.as_ptr(), at.as_ptr(), kind.as_ptr());
    #[expect(unsafe_code, reason = "no safe function mounts")]
    // SAFETY: all are strings that live until the call returns, which is all that the kernel reads.
    let result = unsafe { libc::mount(from, at, kind, flags, options.as_ptr().cast()) };
    (result == 0).then_some(())
}

impl Drop for FuseFile {
    fn drop(&mut self) {
        // The device first: without it no call waits, not even the flush of this descriptor.
        if let Some(server) = self.server.take() {
            server.end();
        }
        self.file = None;
    }
}

/// Answers what is needed to open the file, and flushes as `flush` says, until it is over; then closes the device. Counts the unanswered reads.
fn serve(mut device: File, flush: Flush, over: &AtomicBool, reads: &AtomicU32) {
    let mut request = vec![0; 1 << 20];
    while !over.load(Ordering::Relaxed) {
        let mut fds = [PollFd::new(&device, PollFlags::IN)];
        let _ = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 20_000_000 }));
        let Ok(n) = device.read(&mut request) else { continue };
        let word = |at: usize| u32::from_le_bytes(request[at..at + 4].try_into().unwrap());
        if n < 40 {
            continue;
        }
        let mut body = Vec::new();
        match word(4) {
            INIT => {
                // Version 7.31, and most of it zero.
                for value in [7u32, 31, 0, 0] {
                    body.extend(value.to_le_bytes());
                }
                body.extend(12u16.to_le_bytes());
                body.extend(10u16.to_le_bytes());
                body.extend((128u32 << 10).to_le_bytes());
                body.resize(64, 0);
            }
            GETATTR => {
                body.extend(3600u64.to_le_bytes());
                body.extend([0; 8]);
                // Inode 1, size, blocks; times; then mode and the number of links.
                for value in [1u64, SIZE, SIZE / 512, 0, 0, 0] {
                    body.extend(value.to_le_bytes());
                }
                for value in [0u32, 0, 0, 0o100_666, 1, 0, 0, 0, 4096, 0] {
                    body.extend(value.to_le_bytes());
                }
            }
            OPEN => body.resize(16, 0),
            READ => {
                reads.fetch_add(1, Ordering::Relaxed);
                continue;
            }
            FLUSH => match flush {
                Flush::Never => continue,
                Flush::After(delay) => std::thread::sleep(delay),
            },
            _ => {
                // Not implemented.
                let mut answer = 16u32.to_le_bytes().to_vec();
                answer.extend((-38i32).to_le_bytes());
                answer.extend(&request[8..16]);
                let _ = device.write(&answer);
                continue;
            }
        }
        let mut answer = (16 + body.len() as u32).to_le_bytes().to_vec();
        answer.extend(0u32.to_le_bytes());
        answer.extend(&request[8..16]);
        answer.extend(body);
        let _ = device.write(&answer);
    }
}
