//! The directory of the cluster: a table in memory, which follows etcd, and this host's entries there, which live as long as its lease.
//!
//! Without etcd the table stays as it was, and the directory says that it is stale. Names of this host are entered when etcd is back. If etcd has
//! lost its data, names of other hosts stay known, and taken, until these hosts have had time to enter them again: as long as names come back, and
//! some time beyond.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

use etcd_client::{
    Certificate, Client, Compare, CompareOp, ConnectOptions, EventType, GetOptions, Identity, KeyValue, KvClient,
    LeaseKeepAliveStream, LeaseKeeper, PutOptions, TlsOptions, Txn, TxnOp, TxnOpResponse, TxnResponse, WatchOptions,
    WatchStream,
};
use partywall::Refusal;
use partywall::cluster::{Name, NameNews, NameRow};
use tokio::sync::{Notify, oneshot};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::GatewayError;
use crate::config::{self, GatewayConfig};
use crate::entry::{DirectoryKey, DomainEntry, HostEntry, Keys};
use crate::frame::RemoteRefusal;
use crate::names::{Decision, OwnNames};
use crate::table::NameTable;

/// How long etcd may take to answer.
const ANSWER: Duration = Duration::from_secs(2);
/// How long a claim waits for etcd before this host goes on with what it knows. The broker waits longer.
const CLAIM: Duration = Duration::from_secs(3);
/// How often the lease is kept alive.
const KEEP_ALIVE: Duration = Duration::from_millis(700);
/// How often the directory looks whether lost names are to be forgotten.
const FORGETTING: Duration = Duration::from_secs(1);
/// The first pause before the next attempt to reach etcd. Each further one is twice as long.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// The longest pause between two attempts to reach etcd.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// If etcd has lost its data, how long the hosts have to enter the next one of their names again.
const RETURN: Duration = Duration::from_secs(10);
/// Entries of one page of the first look.
const PAGE: i64 = 500;
/// The largest answer of etcd.
const MAX_ANSWER: usize = 512 << 20;
/// Names that are written in one turn. A name that changes all the time takes one place in each turn, and leaves the others to other names.
const ENTRIES_PER_TURN: usize = 32;

/// Whether the table is what etcd has.
#[derive(Debug, Clone, Copy)]
struct Freshness {
    is_fresh: bool,
    since: Instant,
}

/// The data of etcd that the table was last read from.
#[derive(Debug, Clone, PartialEq, Eq)]
struct DataState {
    identity: Vec<u8>,
    /// The number that etcd gives to its members together. A restored copy may have another one.
    cluster: u64,
    /// The highest revision that this host has seen. It only grows, except in a copy that is older.
    revision: i64,
}

impl DataState {
    /// Whether data that were known are missing from these. An older copy in which others have written since, up to a higher revision, is not
    /// noticed.
    fn lacks(&self, known: &Self) -> bool {
        self.identity != known.identity || self.cluster != known.cluster || self.revision < known.revision
    }
}

/// The time that hosts have to enter their names again after etcd has lost its data. It begins again with each name that comes back. Their
/// number is limited, so this time ends.
#[derive(Debug, Clone, Copy)]
struct ReturnPeriod {
    end: Instant,
    /// How many names had come back when it began.
    returned: usize,
}

/// What the directory should have for a name of this host.
#[derive(Debug, PartialEq, Eq)]
enum WantedEntry {
    Entry(DomainEntry),
    Nothing,
    /// This other host had the name when etcd lost its data, and may enter it again.
    OtherHosts(String),
}

/// The directory of the cluster.
#[derive(Debug)]
pub(crate) struct ClusterDirectory {
    host: Name,
    address: String,
    keys: Keys,
    config: GatewayConfig,
    table: RwLock<NameTable>,
    own: Mutex<OwnNames>,
    freshness: Mutex<Freshness>,
    data: Mutex<Option<DataState>>,
    /// At its end, names that were lost with the data of etcd are forgotten.
    return_period: Mutex<Option<ReturnPeriod>>,
    /// There is something to write.
    work: Notify,
    /// The lease of this session, to be given back at the end.
    lease: Mutex<Option<i64>>,
    /// The place in `endpoints` of the member that this session uses.
    member: AtomicUsize,
}

/// A directory that follows etcd in a task.
#[derive(Debug)]
pub(crate) struct FollowingDirectory {
    directory: Arc<ClusterDirectory>,
    task: JoinHandle<()>,
}

impl FollowingDirectory {
    /// Takes this host out of the directory. The task ends first: it would see that the entries have gone, and enter them again with another lease.
    pub(crate) async fn leave(self) {
        self.task.abort();
        // It was cancelled, or it has panicked. It writes nothing more either way.
        let _ = self.task.await;
        // If no member answers, the lease ends by itself.
        let _ = timeout(2 * ANSWER, self.directory.give_back()).await;
    }
}

/// A claim of this host to a name.
#[derive(Debug)]
pub(crate) enum PendingClaim {
    /// What is known decides.
    Decided(Decision),
    /// The directory is asked.
    Asked(oneshot::Receiver<Decision>),
}

impl PendingClaim {
    /// The decision; `None` if the broker has withdrawn the claim before there was one.
    pub(crate) async fn decision(self) -> Option<Decision> {
        match self {
            Self::Decided(decision) => Some(decision),
            Self::Asked(decision) => match timeout(CLAIM, decision).await {
                Ok(decided) => decided.ok(),
                // Etcd is slow. This host goes on with what it knows.
                Err(_) => Some(None),
            },
        }
    }
}

/// What the requests of one session with etcd need.
struct Session {
    kv: KvClient,
    lease: i64,
}

/// The names of one turn. Those that are not yet written when it ends, or is cancelled, become dirty again, and the next session writes them.
struct WriteTurn<'a> {
    directory: &'a ClusterDirectory,
    names: VecDeque<String>,
}

impl Drop for WriteTurn<'_> {
    fn drop(&mut self) {
        self.directory.with_own(|own| self.names.iter().for_each(|name| own.mark_dirty(name)));
    }
}

type Result<T> = std::result::Result<T, GatewayError>;

async fn answer<T>(call: impl Future<Output = std::result::Result<T, etcd_client::Error>>) -> Result<T> {
    match timeout(ANSWER, call).await {
        Ok(answer) => Ok(answer?),
        Err(_) => Err(GatewayError::Directory("it does not answer".to_owned())),
    }
}

/// The entry that a transaction has read.
fn found_by(result: &TxnResponse) -> Option<KeyValue> {
    result.op_responses().into_iter().find_map(|response| match response {
        TxnOpResponse::Get(found) => found.kvs().first().cloned(),
        _ => None,
    })
}

fn guard<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ClusterDirectory {
    pub(crate) fn new(config: &GatewayConfig, host: Name) -> Self {
        Self {
            host,
            address: config.address.clone(),
            keys: Keys::new(&config.etcd.prefix),
            config: config.clone(),
            table: RwLock::default(),
            own: Mutex::default(),
            freshness: Mutex::new(Freshness { is_fresh: false, since: Instant::now() }),
            data: Mutex::default(),
            return_period: Mutex::default(),
            work: Notify::new(),
            lease: Mutex::default(),
            member: AtomicUsize::default(),
        }
    }

    /// Changes the names of this host.
    pub(crate) fn with_own<T>(&self, change: impl FnOnce(&mut OwnNames) -> T) -> T {
        let mut own = guard(&self.own);
        let done = change(&mut own);
        if own.is_dirty() {
            self.work.notify_one();
        }
        done
    }

    pub(crate) fn with_table<T>(&self, look: impl FnOnce(&NameTable) -> T) -> T {
        look(&self.table.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn change_table<T>(&self, change: impl FnOnce(&mut NameTable) -> T) -> T {
        change(&mut self.table.write().unwrap_or_else(PoisonError::into_inner))
    }

    /// The name of this host.
    pub(crate) fn host(&self) -> &Name {
        &self.host
    }

    /// Whether the table is what etcd has, and since when it is or is not.
    pub(crate) fn freshness(&self) -> (bool, Duration) {
        let Freshness { is_fresh, since } = *guard(&self.freshness);
        (is_fresh, since.elapsed())
    }

    fn set_fresh(&self, is_fresh: bool) {
        let mut freshness = guard(&self.freshness);
        if freshness.is_fresh != is_fresh {
            *freshness = Freshness { is_fresh, since: Instant::now() };
        }
    }

    /// The host of a domain, and where its gateway listens.
    pub(crate) fn find(&self, domain: &str) -> std::result::Result<(Name, String), RemoteRefusal> {
        let nothing = |reason: String| RemoteRefusal::new(Refusal::NoSuchDomain, reason);
        let stale = match self.freshness() {
            (true, _) => String::new(),
            (false, age) => format!(" that was known {} s ago, before the directory was lost", age.as_secs()),
        };
        self.with_table(|table| {
            let host = table.host_of(domain).filter(|host| *host != self.host.as_str());
            let host = host.and_then(|host| Name::new(host).ok());
            let host = host.ok_or_else(|| nothing(format!("no host has a domain called {domain}{stale}")))?;
            let listed = self.config.peers.get(host.as_str()).map(String::as_str);
            match listed.or_else(|| table.address_of(host.as_str())) {
                Some(address) => Ok((host, address.to_owned())),
                None => Err(nothing(format!("the host {host} of {domain} has no gateway now"))),
            }
        })
    }

    /// Takes in what the broker reports, in its order, and returns the rows that claim a name. A claim that a later row withdraws is withdrawn here too.
    pub(crate) fn hear(&self, rows: Vec<NameRow>) -> Vec<(NameRow, PendingClaim)> {
        let mut claims = Vec::new();
        for row in rows {
            match row.news {
                NameNews::Claim => {
                    let claim = self.claim(&row.domain);
                    claims.push((row, claim));
                }
                NameNews::Present | NameNews::Gone => self.with_own(|own| own.apply(&row)),
            }
        }
        claims
    }

    /// Asks for a name for this host. Without etcd, what is known decides.
    fn claim(&self, name: &str) -> PendingClaim {
        let known = self.with_table(|table| table.host_of(name).map(str::to_owned));
        let known = known.filter(|host| host != self.host.as_str());
        if known.is_some() || !self.freshness().0 {
            return PendingClaim::Decided(known);
        }
        PendingClaim::Asked(self.with_own(|own| own.claim(name)))
    }

    /// Follows etcd in a task, until the gateway leaves.
    pub(crate) fn start(directory: &Arc<Self>) -> FollowingDirectory {
        let task = tokio::spawn(Arc::clone(directory).run());
        FollowingDirectory { directory: Arc::clone(directory), task }
    }

    /// Follows etcd, and keeps this host's entries there, without end.
    async fn run(self: Arc<Self>) {
        let mut pause = FIRST_PAUSE;
        for (place, member) in self.config.etcd.endpoints.iter().enumerate().cycle() {
            self.member.store(place, Ordering::Relaxed);
            let Err(error) = self.session(member).await;
            if self.freshness().0 {
                pause = FIRST_PAUSE;
                tracing::warn!(%error, "the directory is lost: this host goes on with what it knows");
            } else {
                tracing::debug!(%error, "the directory is not there");
            }
            self.set_fresh(false);
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// Follows one member of etcd until that fails, and returns the reason. The lease is kept alive at the same time, however long a look or
    /// writes take.
    async fn session(&self, member: &str) -> Result<Infallible> {
        let mut client = self.connect(member).await?;
        let lease = answer(client.lease_grant(self.config.etcd.ttl.into(), None)).await?.id();
        // Before anything that can be interrupted, so that it is given back.
        *guard(&self.lease) = Some(lease);
        let (keeper, kept) = answer(client.lease_keep_alive(lease)).await?;
        let follow = async {
            let (session, watch) = self.begin(client, lease).await?;
            self.set_fresh(true);
            let (domains, services) = self.with_table(|table| (table.domains(), table.services()));
            tracing::info!(domains, services, "the directory is up to date");
            tokio::select! {
                ended = self.follow(watch) => ended,
                ended = self.write(session) => ended,
            }
        };
        tokio::select! {
            ended = self.keep_alive(keeper, kept) => ended,
            ended = follow => ended,
        }
    }

    /// Keeps the lease alive until that fails.
    async fn keep_alive(&self, mut keeper: LeaseKeeper, mut kept: LeaseKeepAliveStream) -> Result<Infallible> {
        let mut turns = tokio::time::interval(KEEP_ALIVE);
        turns.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let patience = Duration::from_secs(self.config.etcd.ttl.into()).min(Duration::from_secs(3));
        let mut last = Instant::now();
        loop {
            tokio::select! {
                // An answer that has come counts before the time since the last one.
                biased;
                kept = kept.message() => match kept? {
                    Some(kept) if kept.ttl() > 0 => last = Instant::now(),
                    _ => return Err(GatewayError::Directory("the lease has ended".to_owned())),
                },
                _ = turns.tick() => {
                    if last.elapsed() > patience {
                        return Err(GatewayError::Directory("the lease is not kept alive".to_owned()));
                    }
                    answer(keeper.keep_alive()).await?;
                }
            }
        }
    }

    /// A client of one member of etcd. A client of several members sends each request to any of them, also to dead ones. Its connections with a
    /// watch alone end after some seconds: etcd closes a connection that gets pings and carries nothing.
    async fn connect(&self, member: &str) -> Result<Client> {
        let etcd = &self.config.etcd;
        let mut options = ConnectOptions::new()
            .with_connect_timeout(ANSWER)
            .with_keep_alive(Duration::from_secs(1), Duration::from_secs(2))
            .with_keep_alive_while_idle(true)
            // A member that is cut off from the others refuses requests and ends watches, instead of being silent.
            .with_require_leader(true);
        if etcd.ca.is_some() || member.starts_with("https:") {
            let mut tls = TlsOptions::new();
            if let Some(ca) = &etcd.ca {
                tls = tls.ca_certificate(Certificate::from_pem(config::read(ca)?));
            }
            if let (Some(certificate), Some(key)) = (&etcd.certificate, &etcd.key) {
                tls = tls.identity(Identity::from_pem(config::read(certificate)?, config::read(key)?));
            }
            options = options.with_tls(tls);
        }
        if let Some(user) = &etcd.user {
            let password = etcd.password_file.as_deref().map(config::read).transpose()?.unwrap_or_default();
            options = options.with_user(user.clone(), password.trim_end());
        }
        answer(Client::connect([member], Some(options))).await
    }

    /// Begins a session: a look at everything, a watch from there on, and this host's address.
    async fn begin(&self, client: Client, lease: i64) -> Result<(Session, WatchStream)> {
        let kv = client.kv_client().max_decoding_message_size(MAX_ANSWER);
        let identity = self.identity(&mut kv.clone(), lease).await?;
        let revision = self.look(&mut kv.clone(), identity).await?;
        let watch = self.watch(&client, revision + 1).await?;
        let mut session = Session { kv, lease };
        self.enter_host(&mut session).await?;
        // A new lease: all entries of this host are to belong to it.
        self.with_own(OwnNames::mark_all_dirty);
        Ok((session, watch))
    }

    /// Watches the directory from a revision on.
    async fn watch(&self, client: &Client, revision: i64) -> Result<WatchStream> {
        let options = WatchOptions::new().with_prefix().with_start_revision(revision).with_fragment();
        let mut watches = client.watch_client().max_decoding_message_size(MAX_ANSWER);
        answer(watches.watch(self.keys.prefix(), Some(options))).await
    }

    /// The identity of the data of etcd, which is written if it has none.
    async fn identity(&self, kv: &mut KvClient, lease: i64) -> Result<Vec<u8>> {
        let key = self.keys.identity();
        // Numbers of leases contain the time, so another etcd gives another one.
        let identity = format!("{lease:x}");
        let is_new = vec![Compare::create_revision(key.clone(), CompareOp::Equal, 0)];
        let (put, get) = (TxnOp::put(key.clone(), identity.clone(), None), TxnOp::get(key, None));
        let found = answer(kv.txn(Txn::new().when(is_new).and_then(vec![put]).or_else(vec![get]))).await?;
        Ok(found_by(&found).map_or_else(|| identity.into_bytes(), |entry| entry.value().to_vec()))
    }

    /// Reads the whole directory. Returns the revision that it was read at.
    async fn look(&self, kv: &mut KvClient, identity: Vec<u8>) -> Result<i64> {
        let mut table = NameTable::default();
        let mut from = self.keys.prefix().as_bytes().to_vec();
        let mut end = from.clone();
        // The prefix is text, so its last byte is not the greatest.
        if let Some(last) = end.last_mut() {
            *last += 1;
        }
        let (mut revision, mut cluster) = (0, 0);
        loop {
            let options = GetOptions::new().with_range(end.clone()).with_limit(PAGE).with_revision(revision);
            let page = answer(kv.get(from, Some(options))).await?;
            if let Some(header) = page.header().filter(|_| revision == 0) {
                (revision, cluster) = (header.revision(), header.cluster_id());
            }
            for entry in page.kvs() {
                self.enter(&mut table, entry.key(), Some(entry.value()));
            }
            let Some(last) = page.kvs().last().filter(|_| page.more()) else { break };
            from = last.key().to_vec();
            from.push(0);
        }
        if table.ignored() > 0 {
            tracing::warn!(ignored = table.ignored(), "the directory has more entries than a gateway keeps");
        }
        let data = DataState { identity, cluster, revision };
        let known = guard(&self.data).replace(data.clone());
        let is_lost = known.is_some_and(|known| data.lacks(&known));
        if is_lost {
            tracing::warn!("etcd has lost data: names of other hosts stay known while these hosts enter them again");
        }
        self.take_over(table, is_lost, Instant::now());
        Ok(revision)
    }

    /// Replaces the table by what was read at time `now`.
    fn take_over(&self, table: NameTable, is_lost: bool, now: Instant) {
        let returned = self.change_table(|known| {
            let old = std::mem::replace(known, table);
            known.replace(old, is_lost, self.host.as_str());
            known.returned()
        });
        let mut period = guard(&self.return_period);
        // While etcd was away, no host could enter a name.
        if is_lost || period.is_some() {
            *period = Some(ReturnPeriod { end: now + RETURN, returned });
        }
    }

    /// Enters a key into a table; `value` is `None` if the key is gone. Wrong entries are as none.
    fn enter(&self, table: &mut NameTable, key: &[u8], value: Option<&[u8]>) {
        match self.keys.parse(key) {
            Some(DirectoryKey::Domain(name)) => match value.and_then(DomainEntry::decode) {
                Some(entry) => table.put_domain(&name, entry),
                None => table.remove_domain(&name),
            },
            Some(DirectoryKey::Host(name)) => match value.and_then(HostEntry::decode) {
                Some(entry) => table.put_host(&name, entry),
                None => table.remove_host(&name),
            },
            None => {}
        }
    }

    /// Publishes where this host's gateway listens.
    async fn enter_host(&self, session: &mut Session) -> Result<()> {
        let key = self.keys.host(self.host.as_str());
        let value = HostEntry { address: self.address.clone() }.encode();
        let is_free = vec![Compare::create_revision(key.clone(), CompareOp::Equal, 0)];
        let put = || TxnOp::put(key.clone(), value.clone(), Some(PutOptions::new().with_lease(session.lease)));
        let txn = Txn::new().when(is_free).and_then(vec![put()]);
        if answer(session.kv.txn(txn)).await?.succeeded() {
            return Ok(());
        }
        // The entry of an earlier session of this gateway, or of one that calls itself the same.
        let same = vec![Compare::value(key.clone(), CompareOp::Equal, value.clone())];
        if answer(session.kv.txn(Txn::new().when(same).and_then(vec![put()]))).await?.succeeded() {
            return Ok(());
        }
        let host = &self.host;
        Err(GatewayError::Directory(format!(
            "another gateway is the host {host}: wait until its lease ends, or rename one"
        )))
    }

    /// Takes in changes until the watch ends.
    async fn follow(&self, mut watch: WatchStream) -> Result<Infallible> {
        let mut turns = tokio::time::interval(FORGETTING);
        turns.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = turns.tick() => self.forget_lost_names(Instant::now()),
                changes = watch.message() => match changes? {
                    Some(changes) if !changes.canceled() => self.take_in(&changes),
                    _ => return Err(GatewayError::Directory("the watch has ended".to_owned())),
                },
            }
        }
    }

    /// Forgets names that were lost with the data of etcd, if the time for that has come.
    fn forget_lost_names(&self, now: Instant) {
        let mut period = guard(&self.return_period);
        let Some(current) = *period else { return };
        let returned = self.with_table(NameTable::returned);
        if returned != current.returned {
            *period = Some(ReturnPeriod { end: now + RETURN, returned });
        } else if now >= current.end {
            *period = None;
            self.change_table(NameTable::forget_lost);
            // Names of this host may be free now.
            self.with_own(OwnNames::mark_conflicts_dirty);
        }
    }

    /// What the directory should have for a name of this host.
    fn wanted(&self, name: &str) -> WantedEntry {
        let wanted = guard(&self.own).wanted(name, self.host.as_str());
        match wanted {
            Some(entry) => match self.with_table(|table| table.lost_host_of(name).map(str::to_owned)) {
                Some(host) => WantedEntry::OtherHosts(host),
                None => WantedEntry::Entry(entry),
            },
            None => WantedEntry::Nothing,
        }
    }

    /// Enters what has changed.
    fn take_in(&self, changes: &etcd_client::WatchResponse) {
        if let (Some(data), Some(header)) = (&mut *guard(&self.data), changes.header()) {
            data.revision = data.revision.max(header.revision());
        }
        self.change_table(|table| {
            for event in changes.events() {
                let Some(entry) = event.kv() else { continue };
                let value = (event.event_type() == EventType::Put).then(|| entry.value());
                self.enter(table, entry.key(), value);
                // A name of this host whose entry has gone, or is another host's, is to be claimed again.
                if let Some(DirectoryKey::Domain(name)) = self.keys.parse(entry.key())
                    && table.host_of(&name) != Some(self.host.as_str())
                {
                    let mut own = guard(&self.own);
                    if own.has(&name) && value.is_none() {
                        own.mark_dirty(&name);
                        self.work.notify_one();
                    }
                }
            }
        });
    }

    /// Brings entries of this host up to date, until a request fails.
    async fn write(&self, mut session: Session) -> Result<Infallible> {
        loop {
            self.work.notified().await;
            let names = self.with_own(|own| own.take_dirty(ENTRIES_PER_TURN));
            let mut turn = WriteTurn { directory: self, names: names.into() };
            while let Some(name) = turn.names.front() {
                let decided = |holder| guard(&self.own).decided(name, holder);
                match self.wanted(name) {
                    WantedEntry::Entry(entry) => decided(self.put(&mut session, name, &entry).await?),
                    WantedEntry::OtherHosts(host) => decided(Some(host)),
                    WantedEntry::Nothing => self.delete(&mut session, name).await?,
                }
                turn.names.pop_front();
            }
        }
    }

    /// Enters a domain of this host. Returns the other host that has the name, if one has it.
    async fn put(&self, session: &mut Session, name: &str, entry: &DomainEntry) -> Result<Decision> {
        let key = self.keys.domain(name);
        let put = || TxnOp::put(key.clone(), entry.encode(), Some(PutOptions::new().with_lease(session.lease)));
        let mut condition = Compare::create_revision(key.clone(), CompareOp::Equal, 0);
        // Between two attempts another host can change the entry, though not without end.
        for _ in 0..5 {
            let txn =
                Txn::new().when(vec![condition]).and_then(vec![put()]).or_else(vec![TxnOp::get(key.clone(), None)]);
            let result = answer(session.kv.txn(txn)).await?;
            if result.succeeded() {
                return Ok(None);
            }
            condition = match found_by(&result) {
                None => Compare::create_revision(key.clone(), CompareOp::Equal, 0),
                Some(found) => match DomainEntry::decode(found.value()) {
                    Some(other) if other.host != self.host.as_str() => return Ok(Some(other.host)),
                    // It is this host's, of an earlier session perhaps, or nothing that a gateway writes.
                    _ => Compare::mod_revision(key.clone(), CompareOp::Equal, found.mod_revision()),
                },
            };
        }
        Err(GatewayError::Directory(format!("the entry of {name} changes all the time")))
    }

    /// Removes the entry of a domain that has gone, if it is this host's.
    async fn delete(&self, session: &mut Session, name: &str) -> Result<()> {
        let key = self.keys.domain(name);
        let mut condition = Compare::lease(key.clone(), CompareOp::Equal, session.lease);
        for _ in 0..5 {
            let (delete, get) = (TxnOp::delete(key.clone(), None), TxnOp::get(key.clone(), None));
            let txn = Txn::new().when(vec![condition]).and_then(vec![delete]).or_else(vec![get]);
            let result = answer(session.kv.txn(txn)).await?;
            // An entry of an earlier session belongs to a lease that may last for minutes.
            let is_own = |found: &KeyValue| {
                DomainEntry::decode(found.value()).is_some_and(|entry| entry.host == self.host.as_str())
            };
            let Some(own) = found_by(&result).filter(is_own) else { return Ok(()) };
            condition = Compare::mod_revision(key.clone(), CompareOp::Equal, own.mod_revision());
        }
        Err(GatewayError::Directory(format!("the entry of {name} changes all the time")))
    }

    /// Takes this host out of the directory at once, instead of when its lease ends.
    async fn give_back(&self) {
        let Some(lease) = guard(&self.lease).take() else { return };
        // The member of the last session first: each one that is dead takes most of the time that there is.
        let (before, from) = self.config.etcd.endpoints.split_at(self.member.load(Ordering::Relaxed));
        for member in from.iter().chain(before) {
            if let Ok(mut client) = self.connect(member).await
                && answer(client.lease_revoke(lease)).await.is_ok()
            {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests;
