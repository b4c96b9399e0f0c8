//! Decisions of the broker: the move rules (protocol T6), and the policy's decision on a request (C17).

use crate::session::unexpected;
use crate::{Domain, Result};
use partywall_protocol::wire::{Message, PolicyQuestion, Text, User};
use std::path::PathBuf;
use std::time::Duration;

/// The rules by which connections of unmodified programs move to a ring, and the properties of the ring.
///
/// ```
/// use partywall::Domain;
///
/// # let broker = partywall_daemon::Broker::embedded()?;
/// # let web = Domain::builder().name("web").broker(broker.path()).join()?;
/// let rules = web.move_rules()?;
/// assert!(!rules.live); // Nobody has changed what the broker's policy file says.
/// println!("rings of {} bytes for: {}", rules.ring_size, rules.clauses);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MoveRules {
    /// Whether an administrator has set them; otherwise they are those of the broker's policy file.
    pub live: bool,
    /// The clauses, separated by spaces. The first is for all connections. The last clause that matches a connection decides.
    pub clauses: String,
    /// Size of each side's ring in bytes.
    pub ring_size: u64,
    /// Longest time to spin.
    pub spin: Duration,
}

/// A change by [`Domain::set_move_rules`].
///
/// ```
/// use partywall::{Domain, MoveRulesChange};
/// use std::time::Duration;
///
/// # let broker = partywall_daemon::Broker::embedded()?;
/// # let web = Domain::builder().name("web").broker(broker.path()).join()?;
/// let before = web.move_rules()?;
/// let change = MoveRulesChange {
///     clauses: "after=1000".into(),
///     ring_size: Some(1 << 20),
///     spin: Some(Duration::from_micros(50)),
/// };
/// let now = web.set_move_rules(&change)?;
/// assert!(now.live);
/// assert_eq!((now.ring_size, now.spin), (1 << 20, Duration::from_micros(50)));
///
/// assert_eq!(web.reset_move_rules()?, before);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MoveRulesChange {
    /// The clauses, which replace all present ones.
    pub clauses: String,
    /// New size of the ring in bytes; `None` keeps the present size.
    pub ring_size: Option<u64>,
    /// New longest time to spin; `None` keeps the present one. The maximum is an hour.
    pub spin: Option<Duration>,
}

/// The user that [`Domain::test_policy`] asks about.
///
/// ```
/// use partywall::{Domain, PolicyRequest, PolicyUser};
///
/// # let broker = partywall_daemon::Broker::embedded()?;
/// # let web = Domain::builder().name("web").broker(broker.path()).join()?;
/// for user in [PolicyUser::Own, PolicyUser::Host { uid: 33, gid: Some(33) }] {
///     println!("{user:?}: {}", web.test_policy(user, "web", PolicyRequest::Join)?.grounds);
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PolicyUser {
    /// The user of the asking process.
    Own,
    /// A user of the host. Only administrators may ask about another user.
    Host {
        /// The number of the user.
        uid: u32,
        /// Its primary group, if it is known.
        gid: Option<u32>,
    },
}

impl PolicyUser {
    /// As `own`, `user` and `gid` in a message.
    fn fields(self) -> (bool, User, u32) {
        match self {
            Self::Own => (true, User::Host(0), u32::MAX),
            Self::Host { uid, gid } => (false, User::Host(uid), gid.unwrap_or(u32::MAX)),
        }
    }
}

/// A request whose decision is asked for.
///
/// ```
/// use partywall::{Domain, PolicyRequest, PolicyUser};
///
/// # let broker = partywall_daemon::Broker::embedded()?;
/// # let web = Domain::builder().name("web").broker(broker.path()).join()?;
/// let user = PolicyUser::Own;
/// let sockets = PolicyRequest::Sockets { to: "app", service: "tcp-8000", user };
/// // Both programs would be of one user, for whose connections no rule is needed.
/// assert!(web.test_policy(user, "web", sockets)?.grounds.contains("same_user"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PolicyRequest<'a> {
    /// To join.
    Join,
    /// To join, and then to connect.
    Connect {
        /// The domain to connect to.
        to: &'a str,
        /// The service there.
        service: &'a str,
    },
    /// To join, and then to connect to a domain of another host.
    ConnectTo {
        /// The domain to connect to.
        to: &'a str,
        /// Its host.
        host: &'a str,
        /// The service there.
        service: &'a str,
    },
    /// To connect to a service here as a domain of another host. Only administrators may ask this, and the user does not count.
    ConnectFrom {
        /// The host of the domain that connects.
        host: &'a str,
        /// The domain to connect to.
        to: &'a str,
        /// The service there.
        service: &'a str,
    },
    /// To join, and then to have a connection of an unmodified program on a ring.
    Sockets {
        /// The domain that accepts the connection.
        to: &'a str,
        /// Its service: `tcp-PORT`.
        service: &'a str,
        /// The user of the accepting program.
        user: PolicyUser,
    },
    /// The move of an unmodified program's connections to a ring. This is no question about a domain.
    Program {
        /// Its executable: an absolute path, or a name.
        path: &'a str,
    },
}

/// The policy's decision, and the clause that decides.
///
/// ```
/// use partywall::{Domain, PolicyRequest, PolicyUser};
///
/// # let broker = partywall_daemon::Broker::embedded()?;
/// # let web = Domain::builder().name("web").broker(broker.path()).join()?;
/// let connect = PolicyRequest::Connect { to: "db", service: "sql" };
/// let decision = web.test_policy(PolicyUser::Own, "web", connect)?;
/// assert!(decision.allowed);
/// assert_eq!(decision.grounds, "default: the user is an administrator");
/// assert_eq!((decision.file, decision.line), (None, None)); // This broker has no policy file.
///
/// let stranger = PolicyUser::Host { uid: 65_534, gid: None };
/// assert!(!web.test_policy(stranger, "web", PolicyRequest::Join)?.allowed);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PolicyDecision {
    /// Whether the policy allows the request.
    pub allowed: bool,
    /// The clause that decides, or the default.
    pub grounds: String,
    /// The policy file. `None` without one, and in containers and virtual machines.
    pub file: Option<PathBuf>,
    /// The line of the clause in the file; `None` for a default.
    pub line: Option<u32>,
}

/// The longest spin that can be set. It differs from the number that means "unchanged".
const LONGEST_SPIN_US: u32 = 3_600_000_000;

impl Domain {
    /// The present move rules.
    ///
    /// # Errors
    /// [`Error::System`](crate::Error::System) if the broker is gone; [`Error::Refused`](crate::Error::Refused).
    pub fn move_rules(&self) -> Result<MoveRules> {
        self.ask_move_rules(&Message::GetMoveRules {})
    }

    /// Sets other move rules, until the broker reads its policy file again. Returns the present rules.
    ///
    /// # Errors
    /// [`Error::Refused`](crate::Error::Refused) if the caller is no administrator, or the rules are invalid.
    pub fn set_move_rules(&self, change: &MoveRulesChange) -> Result<MoveRules> {
        let spin_us = change
            .spin
            .map_or(u32::MAX, |spin| u32::try_from(spin.as_micros()).unwrap_or(u32::MAX).min(LONGEST_SPIN_US));
        self.ask_move_rules(&Message::SetMoveRules {
            reset: false,
            clauses: Text(change.clauses.clone()),
            ring_size: change.ring_size.unwrap_or(0),
            spin_us,
        })
    }

    /// Returns to the move rules of the broker's policy file. Returns the present rules.
    ///
    /// # Errors
    /// [`Error::Refused`](crate::Error::Refused) if the caller is no administrator.
    pub fn reset_move_rules(&self) -> Result<MoveRules> {
        self.ask_move_rules(&Message::SetMoveRules {
            reset: true,
            clauses: Text::default(),
            ring_size: 0,
            spin_us: u32::MAX,
        })
    }

    /// The policy's decision if `user` joins as `domain` and then makes a request. Changes no state.
    ///
    /// # Errors
    /// [`Error::Refused`](crate::Error::Refused) if the question is about another user and the caller is no administrator.
    pub fn test_policy(&self, user: PolicyUser, domain: &str, request: PolicyRequest<'_>) -> Result<PolicyDecision> {
        let (question, to, service, to_user) = match request {
            PolicyRequest::Join => (PolicyQuestion::Join, "", "", PolicyUser::Own),
            PolicyRequest::Connect { to, service } => (PolicyQuestion::Connect, to, service, PolicyUser::Own),
            PolicyRequest::ConnectTo { to, service, .. } => (PolicyQuestion::ConnectTo, to, service, PolicyUser::Own),
            PolicyRequest::ConnectFrom { to, service, .. } => {
                (PolicyQuestion::ConnectFrom, to, service, PolicyUser::Own)
            }
            PolicyRequest::Sockets { to, service, user } => (PolicyQuestion::Sockets, to, service, user),
            PolicyRequest::Program { .. } => (PolicyQuestion::Program, "", "", PolicyUser::Own),
        };
        let (from, to) = match request {
            PolicyRequest::Program { path } => (path.to_owned(), to.to_owned()),
            PolicyRequest::ConnectTo { host, .. } => (domain.to_owned(), format!("{to}@{host}")),
            PolicyRequest::ConnectFrom { host, .. } => (format!("{domain}@{host}"), to.to_owned()),
            _ => (domain.to_owned(), to.to_owned()),
        };
        let (own, user, gid) = user.fields();
        let (to_own, to_user, _) = to_user.fields();
        let service = service.into();
        let message = Message::TestPolicy { question, own, user, gid, to_own, to_user, from, to, service };
        match self.request(&message, &[])? {
            (Message::PolicyDecides { allowed, line, grounds, file }, _) => Ok(PolicyDecision {
                allowed,
                grounds,
                file: (!file.is_empty()).then(|| file.into()),
                line: (line > 0).then_some(line),
            }),
            (other, _) => Err(unexpected(&other)),
        }
    }

    fn ask_move_rules(&self, message: &Message) -> Result<MoveRules> {
        match self.request(message, &[])? {
            (Message::MoveRulesAre { live, clauses, ring_size, spin_us }, _) => {
                Ok(MoveRules { live, clauses: clauses.0, ring_size, spin: Duration::from_micros(spin_us.into()) })
            }
            (other, _) => Err(unexpected(&other)),
        }
    }
}
