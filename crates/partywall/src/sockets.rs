//! What the broker knows of transparent sockets (protocol T): the policy for them.

use crate::session::unexpected;
use crate::{Domain, Result};
use partywall_protocol::wire::{Message, Text};
use std::time::Duration;

/// When the connections of unmodified programs go to a ring, and how that is made.
///
/// ```
/// use partywall::Domain;
///
/// # let broker = partywall_daemon::Broker::embedded()?;
/// # let web = Domain::builder().name("web").broker(broker.path()).join()?;
/// let policy = web.socket_policy()?;
/// assert!(!policy.live); // Nobody has changed what the broker's policy file says.
/// println!("rings of {} bytes for: {}", policy.ring_size, policy.clauses);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SocketPolicy {
    /// An administrator has set it; otherwise it is the broker's policy file that says so.
    pub live: bool,
    /// Its clauses, separated by spaces, the first of them for all connections; of those that fit one, the last decides.
    pub clauses: String,
    /// Bytes of the ring that each side brings.
    pub ring_size: u64,
    /// Longest time to spin.
    pub spin: Duration,
}

/// What [`Domain::set_socket_policy`] changes.
///
/// ```
/// use partywall::{Domain, SocketPolicyChange};
/// use std::time::Duration;
///
/// # let broker = partywall_daemon::Broker::embedded()?;
/// # let web = Domain::builder().name("web").broker(broker.path()).join()?;
/// let before = web.socket_policy()?;
/// let change = SocketPolicyChange {
///     clauses: "after=1000".into(),
///     ring_size: Some(1 << 20),
///     spin: Some(Duration::from_micros(50)),
/// };
/// let now = web.set_socket_policy(&change)?;
/// assert!(now.live);
/// assert_eq!((now.ring_size, now.spin), (1 << 20, Duration::from_micros(50)));
///
/// assert_eq!(web.reset_socket_policy()?, before);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SocketPolicyChange {
    /// The clauses, which replace all that there are.
    pub clauses: String,
    /// Bytes of the ring, if they are to change.
    pub ring_size: Option<u64>,
    /// Longest time to spin, if it is to change. More than an hour is taken for an hour.
    pub spin: Option<Duration>,
}

/// So long spins nobody, and it is not the number that means "as it is".
const LONGEST_SPIN_US: u32 = 3_600_000_000;

impl Domain {
    /// The policy for sockets that holds now.
    ///
    /// # Errors
    /// [`Error::System`](crate::Error::System) if the broker is gone; [`Error::Refused`](crate::Error::Refused).
    pub fn socket_policy(&self) -> Result<SocketPolicy> {
        self.ask_policy(&Message::GetPolicy {})
    }

    /// Sets another policy for sockets, until the broker reads its policy file again. Returns what holds now.
    ///
    /// # Errors
    /// [`Error::Refused`](crate::Error::Refused) if this is no administrator, or the policy makes no sense.
    pub fn set_socket_policy(&self, change: &SocketPolicyChange) -> Result<SocketPolicy> {
        let spin_us = change
            .spin
            .map_or(u32::MAX, |spin| u32::try_from(spin.as_micros()).unwrap_or(u32::MAX).min(LONGEST_SPIN_US));
        self.ask_policy(&Message::SetPolicy {
            reset: false,
            clauses: Text(change.clauses.clone()),
            ring_size: change.ring_size.unwrap_or(0),
            spin_us,
        })
    }

    /// Goes back to the policy for sockets of the broker's policy file. Returns what holds now.
    ///
    /// # Errors
    /// [`Error::Refused`](crate::Error::Refused) if this is no administrator.
    pub fn reset_socket_policy(&self) -> Result<SocketPolicy> {
        self.ask_policy(&Message::SetPolicy { reset: true, clauses: Text::default(), ring_size: 0, spin_us: u32::MAX })
    }

    fn ask_policy(&self, message: &Message) -> Result<SocketPolicy> {
        match self.request(message, &[])? {
            (Message::PolicyIs { live, clauses, ring_size, spin_us }, _) => {
                Ok(SocketPolicy { live, clauses: clauses.0, ring_size, spin: Duration::from_micros(spin_us.into()) })
            }
            (other, _) => Err(unexpected(&other)),
        }
    }
}
