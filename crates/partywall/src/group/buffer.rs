//! Buffers of this member: written first, then lent, and back when nobody reads them any more.

use super::GroupInner;
use crate::domain::lock;
use crate::{Error, Result};
use partywall_region::pmem::OwnSpan;
use partywall_shm::group::Handle;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Between two looks at what others say, at most.
const LOOK: Duration = Duration::from_millis(2);

/// Memory that this process writes and nobody reads yet. Its content at first is unspecified.
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

    /// Where it is, in every member.
    pub fn address(&self) -> u64 {
        self.span.address()
    }

    /// Writes no more, so that others may read.
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

/// A buffer that others may read. Dropping it does not take it from them: its memory is used again when the last token of it has
/// come to its end.
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
    /// Where it is, in every member.
    pub fn address(&self) -> u64 {
        self.span.address()
    }

    /// A handle with a new token, for one receiver; make another for each further one.
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

    /// Whether nobody reads it any more, and nobody has a handle that he has not opened.
    pub fn is_free(&self) -> bool {
        self.group.collect();
        !lock(&self.group.state).tokens.any_of(&self.span)
    }

    /// Waits until it is free; at most so long.
    ///
    /// # Errors
    /// [`Error::TimedOut`]. A handle that got lost before it was opened is out for ever: see [`Lent::recall`].
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

    /// Makes void the handles that nobody has opened, as when the connection that they went by has broken. Who has opened one reads on.
    pub fn recall(&self) {
        lock(&self.group.state).tokens.recall(self.group.own.pages(), &self.span);
        self.group.collect();
    }

    /// To be written again, if it is free.
    ///
    /// # Errors
    /// Itself if it is not.
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
