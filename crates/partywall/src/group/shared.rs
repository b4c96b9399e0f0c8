//! Buffers of other processes, read in place.

use super::GroupInner;
use super::members::bytes_at;
use crate::{Error, Result};
use partywall_region::pmem::Joint;
use partywall_shm::bytes::PeerBytes;
use partywall_shm::group::{HOPS, Handle, TokenState};
use rustix::fd::BorrowedFd;
use std::sync::Arc;

/// A buffer of another process. Its owner does not reuse the memory before this is dropped or passed on.
///
/// A hostile owner can change it nevertheless: copy bytes before basing a decision on them, and decide by the copy.
///
/// ```
/// use partywall::{Domain, Group, Handle};
/// use std::error::Error;
/// use std::io::{Read, Write};
/// use std::os::fd::AsFd;
///
/// /// The process that is the member `db` reads the buffer where it is, and passes it on.
/// fn db(domain: &Domain) -> Result<(), Box<dyn Error>> {
///     let pool = Group::join(domain, "pool")?;
///     let mut stream = domain.connect("web:handles")?;
///     let mut handle = [0; Handle::BYTES];
///     stream.read_exact(&mut handle)?;
///
///     let shared = pool.open(&Handle::from_bytes(&handle)?)?;
///     assert_eq!((shared.len(), shared.address()), (4096, shared.as_ptr() as u64));
///     let mut word = [0; 5];
///     shared.copy_to(0, &mut word);
///     assert_eq!(&word, b"hello");
///     shared.write_to(std::io::stderr().as_fd(), 0, word.len())?;
///
///     stream.write_all(&shared.pass()?.to_bytes())?;
///     stream.read(&mut [0])?; // Takes part until the next member has the token.
///     Ok(())
/// }
///
/// /// The process that is the member `web` writes the buffer, and gets it back.
/// fn web(domain: &Domain) -> Result<(), Box<dyn Error>> {
///     let pool = Group::join(domain, "pool")?;
///     let mut listener = domain.bind("handles")?;
///     # let mut db = std::process::Command::new(std::env::current_exe()?)
///     #     .args(std::env::args_os().skip(1))
///     #     .env("PARTYWALL_DOCTEST_BROKER", domain.broker_path())
///     #     .spawn()?;
///     let mut buffer = pool.alloc(4096)?;
///     buffer[..5].copy_from_slice(b"hello");
///     let lent = buffer.lend();
///
///     let (mut stream, _) = listener.accept()?;
///     stream.write_all(&lent.handle()?.to_bytes())?;
///     let mut handle = [0; Handle::BYTES];
///     stream.read_exact(&mut handle)?;
///     pool.release(&Handle::from_bytes(&handle)?)?;
///     assert!(lent.into_buffer().is_ok());
///     drop(stream);
///     # assert!(db.wait()?.success());
///     Ok(())
/// }
/// # fn main() -> Result<(), Box<dyn Error>> {
/// #     if let Some(broker) = std::env::var_os("PARTYWALL_DOCTEST_BROKER") {
/// #         return db(&Domain::builder().name("db").broker(broker).join()?);
/// #     }
/// #     let folder = tempfile::tempdir()?;
/// #     let policy = folder.path().join("policy.toml");
/// #     std::fs::write(&policy, "[[group]]\nname = 'pool'\ndomains = ['web', 'db']\nroom = '4M'\n")?;
/// #     let config = partywall_daemon::Config::new(folder.path().join("broker.sock")).policy_file(policy);
/// #     let broker = partywall_daemon::Broker::start(&config)?;
/// #     web(&Domain::builder().name("web").broker(broker.path()).join()?)
/// # }
/// ```
#[derive(Debug)]
pub struct Shared {
    group: Arc<GroupInner>,
    map: Arc<Joint>,
    handle: Handle,
    passed: bool,
}

impl Shared {
    pub(super) fn new(group: &Arc<GroupInner>, map: Arc<Joint>, handle: Handle) -> Self {
        Self { group: Arc::clone(group), map, handle, passed: false }
    }

    /// The number of bytes; never 0.
    #[expect(clippy::len_without_is_empty, reason = "a buffer has at least one byte")]
    pub fn len(&self) -> usize {
        self.bytes().len()
    }

    /// Its address, which is the same in its owner.
    pub fn address(&self) -> u64 {
        self.handle.address
    }

    /// A pointer to it, for system calls and foreign code that can read memory which its owner may change.
    pub fn as_ptr(&self) -> *const u8 {
        self.bytes().as_ptr()
    }

    /// Copies bytes from byte `from` on, as many as there are and fit, and returns how many.
    pub fn copy_to(&self, from: usize, to: &mut [u8]) -> usize {
        self.bytes().slice(from, to.len()).copy_to(to)
    }

    /// Writes bytes from byte `from` on, at most `max`, to a descriptor, and returns how many. Blocks as the descriptor does.
    ///
    /// # Errors
    /// The error of `write`.
    pub fn write_to(&self, fd: BorrowedFd<'_>, from: usize, max: usize) -> std::io::Result<usize> {
        partywall_region::write_racing(fd, self.bytes().slice(from, max))
    }

    /// Ends reading, and makes a handle for the next reader. This process must take part until the next reader has opened the handle: if it ends
    /// before, the token is lost.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the token was passed on 16383 times already; it is then released.
    pub fn pass(mut self) -> Result<Handle> {
        if self.handle.hop >= HOPS {
            return Err(Error::Invalid(format!("a handle is passed on at most {HOPS} times")));
        }
        self.passed = true;
        Ok(Handle { hop: self.handle.hop + 1, ..self.handle })
    }

    fn bytes(&self) -> PeerBytes<'_> {
        // Looked at when it was opened.
        bytes_at(&self.map, self.handle.address, self.handle.len)
            .expect("a buffer is in its window, and not in this process's seat")
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.group.end(&self.handle, if self.passed { TokenState::Passed } else { TokenState::Released });
    }
}
