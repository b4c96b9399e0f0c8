//! Buffers of this process: it writes them, lends them, and gets them back when the last reader has released them.

use super::GroupInner;
use crate::domain::lock;
use crate::{Error, Result};
use partywall_region::pmem::OwnSpan;
use partywall_shm::group::Handle;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A range of bytes in the buffers of a process. Any member can make one for any bytes, so it does not prove that the owner offers them. It does not
/// keep the buffer: the owner may reuse the memory at any time.
///
/// ```
/// use partywall::BufferPart;
///
/// let part = BufferPart { owner: 1 << 32, address: 0x2000_0002_2000, len: 4096 };
/// assert_eq!(BufferPart { len: 512, ..part }.address, part.address);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BufferPart {
    /// The number of the seat that the buffer is of.
    pub owner: u64,
    /// Where the bytes begin, in every member.
    pub address: u64,
    /// How many there are.
    pub len: u64,
}

/// Between two looks at what others say, at most.
const LOOK: Duration = Duration::from_millis(2);

/// Memory that this process writes and no other process reads yet. Its first content is unspecified.
///
/// ```
/// use partywall::{Domain, Group};
///
/// # let folder = tempfile::tempdir()?;
/// # let policy = folder.path().join("policy.toml");
/// # std::fs::write(&policy, "[[group]]\nname = 'pool'\ndomains = ['web']\nroom = '4M'\n")?;
/// # let config = partywall_daemon::Config::new(folder.path().join("broker.sock")).policy_file(policy);
/// # let broker = partywall_daemon::Broker::start(&config)?;
/// # let web = Domain::builder().name("web").broker(broker.path()).join()?;
/// let pool = Group::join(&web, "pool")?;
/// let mut buffer = pool.alloc(6)?;
/// buffer.copy_from_slice(b"abcdef");
/// assert_eq!(buffer.address(), buffer.as_ptr() as u64); // The same in every member.
/// assert_eq!(buffer.part().address, buffer.address());
///
/// let lent = buffer.lend(); // From here on it can only be read.
/// assert_eq!(&*lent, b"abcdef");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Buffer {
    span: OwnSpan,
    group: Arc<GroupInner>,
}

impl Buffer {
    pub(super) fn new(span: OwnSpan, group: &Arc<GroupInner>) -> Self {
        Self { span, group: Arc::clone(group) }
    }

    /// Its address, which is the same in every process of the group.
    pub fn address(&self) -> u64 {
        self.span.address()
    }

    /// Its bytes as other members name them, for those that read it without a token ([`super::Group::borrow`]). They may read it while this
    /// process writes.
    pub fn part(&self) -> BufferPart {
        BufferPart { owner: self.group.me, address: self.address(), len: self.span.len() as u64 }
    }

    /// Ends writing, so that others may read.
    pub fn lend(self) -> Lent {
        Lent { span: Arc::new(self.span), group: self.group }
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.span
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.span
    }
}

/// A buffer that others may read. Dropping it does not revoke it: its memory is reused when its last token has
/// ended.
///
/// ```
/// use partywall::{Domain, Error, Group};
/// use std::time::Duration;
///
/// # let folder = tempfile::tempdir()?;
/// # let policy = folder.path().join("policy.toml");
/// # std::fs::write(&policy, "[[group]]\nname = 'pool'\ndomains = ['web']\nroom = '4M'\n")?;
/// # let config = partywall_daemon::Config::new(folder.path().join("broker.sock")).policy_file(policy);
/// # let broker = partywall_daemon::Broker::start(&config)?;
/// # let web = Domain::builder().name("web").broker(broker.path()).join()?;
/// let pool = Group::join(&web, "pool")?;
/// let lent = pool.alloc(4096)?.lend();
/// let handle = lent.handle()?;
/// assert_eq!((handle.address, handle.len), (lent.address(), 4096));
///
/// // Nobody opens the handle: the connection that it went by has broken.
/// assert!(matches!(lent.wait(Some(Duration::from_millis(1))), Err(Error::TimedOut)));
/// lent.recall();
/// assert!(lent.is_free());
/// let mut buffer = lent.into_buffer().expect("nobody reads it");
/// buffer.fill(0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Lent {
    span: Arc<OwnSpan>,
    group: Arc<GroupInner>,
}

impl Lent {
    /// Its address, which is the same in every process of the group.
    pub fn address(&self) -> u64 {
        self.span.address()
    }

    /// A handle with a new token, for one receiver. Each further receiver needs another handle.
    ///
    /// # Errors
    /// [`Error::Full`] if 512 tokens of this process are out.
    pub fn handle(&self) -> Result<Handle> {
        let give = || lock(&self.group.state).tokens.give(self.group.own.pages(), &self.span);
        let (place, serial) = match give() {
            Err(Error::Full(_)) => {
                self.group.collect();
                give()
            }
            given => given,
        }?;
        let (address, len) = (self.address(), self.span.len() as u64);
        Ok(Handle { owner: self.group.me, address, len, serial, place, hop: 0 })
    }

    /// Whether no process reads it, and no handle of it is unopened.
    pub fn is_free(&self) -> bool {
        self.group.collect();
        !lock(&self.group.state).tokens.any_of(&self.span)
    }

    /// Waits until it is free, at most `limit`.
    ///
    /// # Errors
    /// [`Error::TimedOut`]. The token of a handle that was lost before it was opened does not end: see [`Lent::recall`].
    pub fn wait(&self, limit: Option<Duration>) -> Result<()> {
        let deadline = limit.and_then(|limit| Instant::now().checked_add(limit));
        let mut pause = Duration::from_micros(20);
        while !self.is_free() {
            let left = deadline.map_or(LOOK, |at| at.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return Err(Error::TimedOut);
            }
            std::thread::sleep(pause.min(left));
            pause = (pause * 2).min(LOOK);
        }
        Ok(())
    }

    /// Revokes all unopened handles, for instance after the connection that carried them has broken. Readers of opened handles continue.
    pub fn recall(&self) {
        lock(&self.group.state).tokens.recall(self.group.own.pages(), &self.span);
        self.group.collect();
    }

    /// Turns it into a buffer that can be written again, if it is free.
    ///
    /// # Errors
    /// Itself if it is not free.
    pub fn into_buffer(self) -> std::result::Result<Buffer, Self> {
        if !self.is_free() {
            return Err(self);
        }
        let Self { span, group } = self;
        match Arc::try_unwrap(span) {
            Ok(span) => Ok(Buffer { span, group }),
            Err(span) => Err(Self { span, group }),
        }
    }
}

impl Deref for Lent {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.span
    }
}
