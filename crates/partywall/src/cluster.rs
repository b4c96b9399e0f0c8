//! The gateway's requests: names of this host for the cluster, and streams from and to other hosts (protocol H).
//!
//! Only the process that the broker's policy names as the gateway may use this; the program `partywall-gateway` does. Other programs connect
//! and bind as always.
//!
//! ```
//! use partywall::{Domain, Options, Refusal};
//! use partywall_daemon::{Broker, Config};
//!
//! # let folder = tempfile::tempdir()?;
//! # let policy = folder.path().join("policy.toml");
//! # let uid = rustix::process::getuid().as_raw();
//! # std::fs::write(&policy, format!("administrators = [{uid}]\n[cluster]\nhost = 'alpha'\n"))?;
//! # let broker = Broker::start(&Config::new(folder.path().join("broker.sock")).policy_file(&policy))?;
//! let gateway = Domain::builder().name("gateway").broker(broker.path()).join()?;
//! let mut listener = gateway.bind_routes(&Options::default())?;
//! let web = Domain::builder().name("web").broker(broker.path()).join()?;
//! let client = std::thread::spawn(move || web.connect("db:sql"));
//! let route = listener.next()?;
//! println!("{} looks for {:?}", route.client(), route.target()?);
//! route.refuse(Refusal::NoSuchDomain, "no host has a domain of this name")?;
//! assert!(client.join().expect("no panic").is_err());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use crate::listener::{Acceptor, Reception};
use crate::session::{BrokerSession, unexpected};
use crate::{Domain, Error, Options, Result, Stream, connect};
use partywall_protocol::wire::{Directions, Kind, Message, Refusal};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use std::time::{Duration, Instant};

/// A name of this host that has changed.
///
/// ```
/// use partywall::cluster::{NameNews, NameRow};
///
/// fn line(row: &NameRow) -> String {
///     match row.news {
///         NameNews::Claim => format!("may {} be used?", row.domain),
///         news => format!("{}:{} {news}", row.domain, row.service),
///     }
/// }
/// # let _ = line;
/// ```
pub use partywall_protocol::wire::{NameNews, NameRow};

/// The name of a domain or service, checked.
///
/// ```
/// use partywall::cluster::Name;
///
/// assert!(Name::new("web-1").is_ok());
/// assert!(Name::new("web 1").is_err());
/// ```
pub use partywall_protocol::wire::Name;

/// The service by which the gateway takes connections to other hosts.
const SERVICE: &str = "cluster";

/// The names of this host, from one moment on.
///
/// ```
/// use partywall::cluster::NameNews;
/// use partywall::{Domain, Options};
/// use partywall_daemon::{Broker, Config};
/// use std::time::Duration;
///
/// # let folder = tempfile::tempdir()?;
/// # let policy = folder.path().join("policy.toml");
/// # let uid = rustix::process::getuid().as_raw();
/// # std::fs::write(&policy, format!("administrators = [{uid}]\n[cluster]\nhost = 'alpha'\n"))?;
/// # let broker = Broker::start(&Config::new(folder.path().join("broker.sock")).policy_file(&policy))?;
/// // The policy has a table [cluster] that names this host.
/// let gateway = Domain::builder().name("gateway").broker(broker.path()).join()?;
/// let mut names = gateway.follow_names()?;
/// assert_eq!(names.host(), "alpha");
///
/// let path = broker.path().to_owned();
/// let db = std::thread::spawn(move || Domain::builder().name("db").broker(path).join());
/// let row = names.wait(Duration::from_secs(5))?.remove(0);
/// assert_eq!((row.news, row.domain.as_str()), (NameNews::Claim, "db"));
/// gateway.name_claimed("db", row.claim, None)?; // No other host has it.
/// let db = db.join().expect("no panic")?;
///
/// let _listener = db.bind("sql")?;
/// // A client of another host, whose gateway has proved that it is that host's.
/// let refused = gateway.connect_for(("web", "beta"), ("db", "sql"), partywall::Directions::BOTH, &Options::default());
/// assert!(refused.is_err(), "no rule of the policy is for the host beta");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct NameFeed {
    session: BrokerSession,
    host: String,
    last: u64,
    /// Rows that came with the first answer.
    first: Vec<NameRow>,
    asked: Option<u32>,
}

impl Domain {
    /// Follows the names of this host, by another session of this domain. Blocks until the broker has answered.
    ///
    /// # Errors
    /// [`Error::Refused`] if this process is not the gateway, or another session follows.
    pub fn follow_names(&self) -> Result<NameFeed> {
        let mut session = self.session()?;
        match session.request(&Message::FollowNames { after: 0 }, &[])? {
            (Message::Names { host, page }, _) => {
                let last = page.rows.last().map_or(0, |row| row.key);
                Ok(NameFeed { session, host, last, first: page.rows, asked: None })
            }
            (other, _) => Err(unexpected(&other)),
        }
    }

    /// Answers the claim of a domain that has this number, [`NameRow::claim`]: the host that has the name, or `None` if this host may use it. If the
    /// broker has withdrawn the claim, the answer changes nothing, also if the name is claimed again.
    ///
    /// # Errors
    /// [`Error::Refused`] if this process is not the gateway.
    pub fn name_claimed(&self, domain: &str, claim: u64, holder: Option<&str>) -> Result<()> {
        let message = Message::NameClaimed { domain: domain.into(), claim, holder: holder.unwrap_or_default().into() };
        self.request(&message, &[]).map(drop)
    }

    /// Connects to a service of this host, `(domain, service)`, for a domain of another host, `(domain, host)`.
    ///
    /// # Errors
    /// As [`Domain::connect`]. The policy's rules for that host decide.
    pub fn connect_for(
        &self,
        client: (&str, &str),
        target: (&str, &str),
        directions: Directions,
        options: &Options,
    ) -> Result<Stream> {
        connect::open_for(self, client, target, directions, options).map(Stream::of)
    }

    /// Takes connections to domains of other hosts.
    ///
    /// # Errors
    /// As [`Domain::bind`].
    pub fn bind_routes(&self, options: &Options) -> Result<RouteListener> {
        Ok(RouteListener { acceptor: Acceptor::bind(self, SERVICE, Kind::Stream, options)? })
    }
}

impl NameFeed {
    /// The name of this host in the cluster.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// Waits for changes, at most `timeout`. If there are none, the list is empty.
    ///
    /// # Errors
    /// [`Error::System`] if the broker is gone; [`Error::Refused`] if it has ended the session.
    pub fn wait(&mut self, timeout: Duration) -> Result<Vec<NameRow>> {
        if !self.first.is_empty() {
            return Ok(std::mem::take(&mut self.first));
        }
        let deadline = Instant::now().checked_add(timeout);
        let request = match self.asked {
            Some(request) => request,
            None => *self.asked.insert(self.session.ask(&Message::FollowNames { after: self.last })?),
        };
        loop {
            match self.session.try_receive_any() {
                Ok((answered, Message::Names { page, .. }, _)) if answered == request => {
                    self.asked = None;
                    self.last = page.rows.last().map_or(self.last, |row| row.key);
                    return Ok(page.rows);
                }
                Ok((_, Message::Refused { code, reason }, _)) => return Err(Error::Refused { code, reason }),
                Ok(_) => {}
                Err(Error::WouldBlock) => {
                    let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
                    if left == Some(Duration::ZERO) {
                        return Ok(Vec::new());
                    }
                    let left = left.and_then(|left| Timespec::try_from(left).ok());
                    match poll(&mut [PollFd::new(&self.session, PollFlags::IN)], left.as_ref()) {
                        Ok(_) | Err(rustix::io::Errno::INTR) => {}
                        Err(e) => return Err(Error::system("wait for names", e)),
                    }
                }
                Err(error) => return Err(error),
            }
        }
    }
}

/// The service of the gateway: connections of this host's programs to domains of other hosts.
///
/// ```
/// use partywall::{Domain, Options, Refusal};
/// use partywall_daemon::{Broker, Config};
/// use std::io::Write;
/// use std::time::Duration;
///
/// # let folder = tempfile::tempdir()?;
/// # let policy = folder.path().join("policy.toml");
/// # let uid = rustix::process::getuid().as_raw();
/// # std::fs::write(&policy, format!("administrators = [{uid}]\n[cluster]\nhost = 'alpha'\n"))?;
/// # let broker = Broker::start(&Config::new(folder.path().join("broker.sock")).policy_file(&policy))?;
/// let gateway = Domain::builder().name("gateway").broker(broker.path()).join()?;
/// let mut listener = gateway.bind_routes(&Options::default())?;
/// listener.set_timeout(Some(Duration::from_secs(5)));
///
/// let web = Domain::builder().name("web").broker(broker.path()).join()?;
/// let client = std::thread::spawn(move || web.connect("db:sql"));
///
/// let route = listener.next()?;
/// assert_eq!((route.client(), route.directions()), ("web", partywall::Directions::BOTH));
/// assert_eq!(route.target()?, ("db".to_owned(), "sql".to_owned()));
/// route.set_host("beta")?; // The policy allows it.
/// let _stream = route.accept()?; // To be carried to the host beta.
/// assert!(client.join().expect("no panic").is_ok());
///
/// let web = Domain::builder().name("web").broker(broker.path()).join()?;
/// let client = std::thread::spawn(move || web.connect("no:where"));
/// listener.next()?.refuse(Refusal::NoSuchDomain, "no host has a domain of this name")?;
/// assert!(client.join().expect("no panic").is_err());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct RouteListener {
    acceptor: Acceptor,
}

impl RouteListener {
    /// Waits for a connection. After a restart of the broker the service is bound again automatically.
    ///
    /// # Errors
    /// As [`Listener::accept`](crate::Listener::accept).
    #[expect(clippy::should_implement_trait, reason = "an iterator has no errors that end nothing")]
    pub fn next(&mut self) -> Result<Route> {
        loop {
            let (reception, message, fds) = self.acceptor.next_incoming()?;
            if let Message::Incoming { channel, ref name, directions, .. } = message {
                let client = name.clone();
                return Ok(Route { channel, client, directions, arrived: Some((reception, message, fds)) });
            }
        }
    }

    /// The longest that [`RouteListener::next`] may wait; `None`: no limit.
    pub fn set_timeout(&mut self, longest: Option<Duration>) {
        self.acceptor.timeout = longest;
    }
}

/// A connection to a domain of another host, which waits for an answer. Dropping it refuses it.
///
/// ```
/// use partywall::cluster::Route;
///
/// use partywall::{Refusal, Result, Stream};
///
/// fn answer(route: Route) -> Result<Option<Stream>> {
///     match route.target()? {
///         (domain, _) if domain == "db" => {
///             println!("{} connects, {}", route.client(), route.directions());
///             route.set_host("beta")?;
///             route.accept().map(Some)
///         }
///         _ => route.refuse(Refusal::NoSuchDomain, "there is only db").map(|()| None),
///     }
/// }
/// # let _ = answer;
/// ```
#[derive(Debug)]
pub struct Route {
    channel: u64,
    client: String,
    directions: Directions,
    arrived: Option<(Reception, Message, Vec<OwnedFd>)>,
}

impl Route {
    /// The domain that connects.
    pub fn client(&self) -> &str {
        &self.client
    }

    /// The directions of the connection.
    pub fn directions(&self) -> Directions {
        self.directions
    }

    fn domain(&self) -> Result<&Domain> {
        let arrived = self.arrived.as_ref();
        arrived.map(|(reception, ..)| reception.domain()).ok_or(Error::Closed("the connection was answered"))
    }

    /// The domain and the service that it connects to.
    ///
    /// # Errors
    /// [`Error::Refused`] if the client has gone.
    pub fn target(&self) -> Result<(String, String)> {
        match self.domain()?.request(&Message::Route { channel: self.channel }, &[])? {
            (Message::RouteIs { domain, service }, _) => Ok((domain, service)),
            (other, _) => Err(unexpected(&other)),
        }
    }

    /// Names the host of that domain.
    ///
    /// # Errors
    /// [`Error::Refused`] if the policy does not let the client connect to it there: the client was refused then.
    pub fn set_host(&self, host: &str) -> Result<()> {
        let message = Message::RouteTo { channel: self.channel, host: host.to_owned() };
        self.domain()?.request(&message, &[]).map(drop)
    }

    /// Refuses the client.
    ///
    /// # Errors
    /// [`Error::Refused`] if the client has gone.
    pub fn refuse(mut self, code: Refusal, reason: &str) -> Result<()> {
        let message = Message::RefuseRoute { channel: self.channel, code, reason: reason.to_owned() };
        let answer = self.domain()?.request(&message, &[]).map(drop);
        // Dropped otherwise, it gives up its end of a channel whose client has gone.
        if answer.is_ok() {
            self.arrived = None;
        }
        answer
    }

    /// Accepts the client, whose `connect` returns now.
    ///
    /// # Errors
    /// As [`Listener::accept`](crate::Listener::accept).
    pub fn accept(mut self) -> Result<Stream> {
        let (reception, message, fds) = self.arrived.take().ok_or(Error::Closed("the connection was answered"))?;
        match reception.take(message, fds)? {
            Some((tx, rx, _)) => Ok(Stream::of((tx, rx))),
            None => Err(Error::BrokerConfused("no connection".into())),
        }
    }
}

impl Drop for Route {
    fn drop(&mut self) {
        if let Some((reception, ..)) = &self.arrived {
            reception.domain().close(self.channel);
        }
    }
}
