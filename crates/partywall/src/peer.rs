//! The other side of a channel.

use partywall_protocol::wire::{Origin, User};

/// The other side of a channel, as the broker reports it.
///
/// ```
/// use partywall::{Domain, Origin};
///
/// # let broker = partywall_daemon::Broker::embedded()?;
/// # let web = Domain::builder().name("web").broker(broker.path()).join()?;
/// let mut listener = web.bind("echo")?;
/// let _client = web.connect("web:echo")?;
/// let (_server, peer) = listener.accept()?;
/// assert_eq!((peer.name.as_str(), peer.domain_id, peer.epoch), ("web", web.id(), web.epoch()));
/// // The kernel has told the broker who this is; the peer cannot make it up.
/// assert_eq!(peer.origin(), Some(Origin::Host));
/// assert!(peer.uid().is_some());
/// assert!(peer.certain_user().is_some());
/// assert_eq!(peer.host(), None);
/// assert_eq!(peer.pid, Some(std::process::id()));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct PeerInfo {
    /// Name of its domain; `domain@host` if it is on another host of the cluster.
    pub name: String,
    /// Id of its domain.
    pub domain_id: u32,
    /// Its domain's epoch: a domain that has ended and joined again has a greater one.
    pub epoch: u64,
    /// The user that its process counts as: its user on the host, as the kernel reported it to the broker, or its virtual machine, which the
    /// port identifies. `None` on the connecting side.
    pub user: Option<User>,
    /// Its process at the time of connecting, by the number that it has on the host or in its machine. `None` on the connecting side.
    pub pid: Option<u32>,
    /// Whether its user is known without doubt. It is `false` for a process in a container, where a uid may mean another user, and root is
    /// not the host's root. `false` on the connecting side.
    pub at_home: bool,
    /// The service that the channel was made for.
    pub service: String,
}

impl PeerInfo {
    /// Where its process runs: on the host, or in a virtual machine. `None` on the connecting side.
    pub fn origin(&self) -> Option<Origin> {
        self.user.map(User::origin)
    }

    /// The host that it is on, if that is another host of the cluster. Its user and process are then those of this host's gateway.
    pub fn host(&self) -> Option<&str> {
        self.name.split_once('@').map(|(_, host)| host)
    }

    /// Its user, if it is known without doubt ([`Self::at_home`]). A server that grants rights to users must use this, and not [`PeerInfo::uid`].
    pub fn certain_user(&self) -> Option<User> {
        self.user.filter(|_| self.at_home)
    }

    /// The name that this side has connected to; `None` on the side that has accepted.
    pub(crate) fn target(&self) -> Option<String> {
        self.user.is_none().then(|| format!("{}:{}", self.name, self.service))
    }

    /// The number of its user on the host, or in its container; `None` on the connecting side, and for a process in a virtual machine.
    pub fn uid(&self) -> Option<u32> {
        self.user.and_then(User::uid)
    }
}
