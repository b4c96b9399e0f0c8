//! The client's record of the server's nodes: the numbers that this mount gives them, and the names by which they can be found again.

use crate::wire::{FileAttributes, FileEntry, FileTime, ROOT};
use rustix::io::Errno;
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// The identity of a file, which stays the same after a restart of the server.
pub(crate) type FileIdentity = (u64, u64, FileTime);

pub(crate) fn identity_of(found: &FileAttributes) -> FileIdentity {
    (found.device, found.inode, found.born)
}

/// The values of a file that change with its data (protocol N7).
pub(crate) type DataVersion = (u64, FileTime, FileTime);

/// How much longer than it was told the kernel may use a name: its time begins when the thread that asked for the name goes on. Requests of
/// two threads that are less than this apart may reach the kernel's records in any order.
const SLACK: Duration = Duration::from_secs(5);
/// The longest that the kernel keeps names and attributes.
const LONGEST_TTL: Duration = Duration::from_secs(365 * 24 * 3600);

/// Refused opens that are recorded before old ones are dropped.
const MOST_REFUSED: usize = 1024;

/// A request of the kernel whose reply has attributes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KernelRequest {
    /// The thread that made it, or 0 if the kernel does not tell.
    pub(crate) thread: u32,
    /// The clock when it began here.
    pub(crate) begun: u64,
}

/// A value that the kernel has of a node, as far as it is known.
///
/// The kernel drops the attributes in a reply if it has changed those of the node since it made the request. It does so when the thread that made
/// the request goes on, so the order of the replies is not that of the changes. Only the requests of one thread, and requests far apart in time,
/// are certain to be in order. If others differ, the kernel has the value of either.
#[derive(Debug, Default)]
struct KernelValue<T> {
    latest: T,
    /// The clock when `latest` was sent last, or when the kernel may have dropped a reply for another reason; `None` before the first time.
    sent: Option<u64>,
    /// The thread that all changes since then are of, which are not far apart; 0 if there are several threads.
    thread: u32,
    /// The kernel may have another value, which was sent last at this clock.
    other: Option<u64>,
}

fn are_far_apart(before: u64, after: u64) -> bool {
    u128::from(before) + SLACK.as_nanos() <= u128::from(after)
}

impl<T: PartialEq> KernelValue<T> {
    /// The kernel gets a value at the clock `now`. While a write is in progress, the kernel drops sizes (`is_dropped`).
    fn send(&mut self, value: T, request: KernelRequest, now: u64, is_dropped: bool) {
        let is_after = |sent| are_far_apart(sent, request.begun);
        let is_ordered = self.meet(request) && !is_dropped;
        if is_ordered {
            self.other = None;
        } else if self.latest != value {
            self.other = self.sent.max(self.other).or(Some(now));
        } else if !is_dropped && self.other.is_some_and(is_after) {
            self.other = None;
        }
        (self.latest, self.sent) = (value, Some(now));
    }

    /// Records the thread of a change. Returns whether the kernel has made all earlier changes before it made this request.
    fn meet(&mut self, request: KernelRequest) -> bool {
        let is_alone = self.sent.is_none_or(|sent| are_far_apart(sent, request.begun));
        let is_ordered = is_alone || (request.thread != 0 && self.thread == request.thread);
        self.thread = if is_ordered { request.thread } else { 0 };
        is_ordered
    }

    /// The kernel sets this value itself, whatever it had before.
    fn set(&mut self, value: T, request: KernelRequest, now: u64) {
        self.meet(request);
        (self.latest, self.other, self.sent) = (value, None, Some(now));
    }

    /// The kernel keeps the value, and drops the replies to requests that it made before.
    fn touch(&mut self, request: KernelRequest, now: u64) {
        self.meet(request);
        self.sent = Some(now);
    }

    /// The kernel drops the replies to all requests that it has made before, and then gets the reply to this one.
    fn settle(&mut self, request: KernelRequest, now: u64) {
        (self.thread, self.sent) = (request.thread, Some(now));
    }

    fn is_certain(&self) -> bool {
        self.other.is_none()
    }
}

/// What the kernel may go on using of a node without asking the server.
#[derive(Debug, Default)]
struct KernelCache {
    /// The data that its page cache has.
    data: Option<DataVersion>,
    /// The attributes that it was told; `None` if it has to ask for them.
    attributes: KernelValue<Option<DataVersion>>,
    /// The size that it has of the file.
    size: KernelValue<u64>,
    /// The clock at the end of the latest open. Replies to requests that began before it are older than what the open returned.
    opened: u64,
    /// Until when it uses the name that is recorded for the node.
    name_until: Option<Instant>,
    /// Until when it may use another name of the node, which is not recorded.
    other_name_until: Option<Instant>,
    /// Where the write that is in progress ends.
    writing_to: u64,
    /// The clock when a reply mentioned the node last.
    mentioned: u64,
    /// The clock of the latest write of this mount that made the file longer.
    extended: u64,
}

/// An open that was refused because the kernel must look the name up again first.
#[derive(Debug, Clone)]
struct RefusedOpen {
    node: u64,
    at: Instant,
    clock: u64,
    /// The name that was recorded for the node.
    place: Option<(u64, Vec<u8>)>,
    /// How many such opens there are: the kernel gives the threads of other PID namespaces the number 0.
    count: u32,
}

fn version_of(found: &FileAttributes) -> DataVersion {
    (found.size, found.modified, found.changed)
}

/// A node that the kernel knows.
#[derive(Debug)]
struct RemoteNode {
    /// Its number at the server, in the connection `epoch`.
    server: u64,
    epoch: u64,
    /// How often replies of that connection have mentioned it.
    mentions: u64,
    /// How often the kernel was told of it.
    lookups: u64,
    identity: FileIdentity,
    /// A name by which it can be found; `None` if this mount has removed it.
    place: Option<(u64, Vec<u8>)>,
    cache: KernelCache,
}

/// All nodes of a mount, by the number that the kernel knows them by: their inode number, where that is free.
#[derive(Debug)]
pub(crate) struct RemoteTree {
    /// How long the kernel may use names and attributes without asking.
    ttl: Duration,
    /// How long after a refused open the same thread may open the node without a check of its name.
    retry: Duration,
    /// Nanoseconds since `started`, and more where opens, mentions, and changes of what the kernel has would have the same value.
    clock: u64,
    started: Instant,
    /// By thread, and for the thread 0 by node as well.
    refused: HashMap<(u32, u64), RefusedOpen>,
    nodes: HashMap<u64, RemoteNode>,
    by_identity: HashMap<FileIdentity, u64>,
    by_place: HashMap<(u64, Vec<u8>), u64>,
    next: u64,
}

/// What is checked before a node is opened.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum NameCheck {
    /// Nothing.
    Nothing,
    /// That the node has this name.
    Name { parent: u64, name: Vec<u8> },
    /// The kernel must look the name up first.
    Lookup,
}

/// Which parts of a file that is opened the kernel's caches have as the server has them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct KernelKnows {
    /// The data.
    pub(crate) data: bool,
    /// The attributes, or none.
    pub(crate) attributes: bool,
    /// The size, which a mapping of the file and an appending write depend on.
    pub(crate) size: bool,
}

impl NameCheck {
    /// Whether an open with this check failed because the name is not the node's any more, or cannot be found.
    pub(crate) fn is_refuted_by(&self, error: Errno) -> bool {
        match self {
            Self::Nothing => false,
            Self::Lookup => error == Errno::REMCHG,
            Self::Name { .. } => error == Errno::REMCHG || error == Errno::STALE,
        }
    }
}

/// How a node is found at the server.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum NodePlace {
    /// By this number.
    Known(u64),
    /// By this name in this directory, where it must have this identity.
    Named { parent: u64, name: Vec<u8>, identity: FileIdentity },
    /// It cannot be found again.
    Lost,
}

impl RemoteTree {
    pub(crate) fn new(root: &FileAttributes, ttl: Duration, retry: Duration) -> Self {
        let identity = identity_of(root);
        let cache = KernelCache::default();
        let node = RemoteNode { server: ROOT, epoch: 0, mentions: 1, lookups: 1, identity, place: None, cache };
        Self {
            ttl: ttl.min(LONGEST_TTL),
            retry,
            clock: 0,
            started: Instant::now(),
            refused: HashMap::new(),
            nodes: HashMap::from([(ROOT, node)]),
            by_identity: HashMap::from([(identity, ROOT)]),
            by_place: HashMap::new(),
            next: 1 << 63,
        }
    }

    /// A reply of the connection `epoch` has mentioned an entry. Returns the node's number, and counts it as looked up by the kernel.
    pub(crate) fn mention(&mut self, epoch: u64, parent: u64, name: &[u8], entry: &FileEntry) -> u64 {
        let identity = identity_of(&entry.attributes);
        let number = match self.by_identity.get(&identity) {
            Some(number) => *number,
            None => {
                let mut number = entry.attributes.inode;
                if number <= ROOT || self.nodes.contains_key(&number) {
                    number = self.next;
                    self.next += 1;
                }
                let cache = KernelCache::default();
                let node = RemoteNode { server: 0, epoch: 0, mentions: 0, lookups: 0, identity, place: None, cache };
                self.nodes.insert(number, node);
                self.by_identity.insert(identity, number);
                number
            }
        };
        self.found(number, epoch, entry.node);
        let now = self.tick();
        if let Some(node) = self.nodes.get_mut(&number) {
            node.lookups += 1;
            node.cache.mentioned = now;
        }
        self.place(number, parent, name);
        number
    }

    /// A node has this number at the server, in this connection.
    pub(crate) fn found(&mut self, number: u64, epoch: u64, server: u64) {
        let Some(node) = self.nodes.get_mut(&number) else { return };
        if (node.epoch, node.server) == (epoch, server) {
            node.mentions += 1;
        } else {
            (node.epoch, node.server, node.mentions) = (epoch, server, 1);
        }
    }

    fn place(&mut self, number: u64, parent: u64, name: &[u8]) {
        if number == ROOT {
            return;
        }
        self.by_place.insert((parent, name.to_vec()), number);
        let Some(node) = self.nodes.get_mut(&number) else { return };
        let is_same = node.place.as_ref().is_some_and(|(of, known)| (*of, &known[..]) == (parent, name));
        if !is_same && let Some(before) = node.place.replace((parent, name.to_vec())) {
            // Another name of the file, or an older one, which the kernel may go on using for some time.
            self.by_place.remove(&before);
            node.cache.other_name_until = node.cache.other_name_until.max(node.cache.name_until.take());
        }
    }

    /// This mount has removed a name.
    pub(crate) fn removed(&mut self, parent: u64, name: &[u8]) {
        let place = (parent, name.to_vec());
        let Some(number) = self.by_place.remove(&place) else { return };
        if let Some(node) = self.nodes.get_mut(&number)
            && node.place.as_ref() == Some(&place)
        {
            node.place = None;
        }
    }

    /// This mount has renamed an entry.
    pub(crate) fn renamed(&mut self, from: (u64, &[u8]), to: (u64, &[u8]), is_exchange: bool) {
        let moved = self.by_place.get(&(from.0, from.1.to_vec())).copied();
        let replaced = self.by_place.get(&(to.0, to.1.to_vec())).copied();
        self.removed(from.0, from.1);
        self.removed(to.0, to.1);
        if let Some(number) = moved {
            self.place(number, to.0, to.1);
        }
        if is_exchange && let Some(number) = replaced {
            self.place(number, from.0, from.1);
        }
    }

    /// How to find a node in the connection `epoch`.
    pub(crate) fn find(&self, number: u64, epoch: u64) -> NodePlace {
        if number == ROOT {
            return NodePlace::Known(ROOT);
        }
        let Some(node) = self.nodes.get(&number) else { return NodePlace::Lost };
        match &node.place {
            _ if node.epoch == epoch => NodePlace::Known(node.server),
            Some((parent, name)) => NodePlace::Named { parent: *parent, name: name.clone(), identity: node.identity },
            None => NodePlace::Lost,
        }
    }

    /// The server does not know the node any more by its number.
    pub(crate) fn lose(&mut self, number: u64, server: u64) {
        if let Some(node) = self.nodes.get_mut(&number)
            && node.server == server
        {
            node.epoch = 0;
        }
    }

    /// The kernel has forgotten a node. Returns what the server of the connection `epoch` can forget.
    pub(crate) fn forget(&mut self, number: u64, lookups: u64, epoch: u64) -> Option<(u64, u64)> {
        let node = self.nodes.get_mut(&number)?;
        node.lookups = node.lookups.saturating_sub(lookups);
        if node.lookups > 0 || number == ROOT {
            return None;
        }
        let node = self.nodes.remove(&number)?;
        self.by_identity.remove(&node.identity);
        if let Some(place) = node.place {
            self.by_place.remove(&place);
        }
        (node.epoch == epoch).then_some((node.server, node.mentions))
    }

    /// A request of the kernel begins, by this thread.
    pub(crate) fn begin(&mut self, thread: u32) -> KernelRequest {
        self.clock = self.clock.max(u64::try_from(self.started.elapsed().as_nanos()).unwrap_or(u64::MAX));
        KernelRequest { thread, begun: self.clock }
    }

    /// The clock, which is later than each request that has begun.
    fn tick(&mut self) -> u64 {
        self.clock = self.begin(0).begun.saturating_add(1);
        self.clock
    }

    /// How long the kernel may use attributes of a node that a request returns, and the name that the node has if it is new to the kernel,
    /// without asking.
    pub(crate) fn ttl(
        &self,
        number: u64,
        name: Option<(u64, &[u8])>,
        found: &FileAttributes,
        request: KernelRequest,
    ) -> Duration {
        let Some(node) = self.nodes.get(&number) else { return Duration::ZERO };
        // An open meanwhile has returned newer attributes.
        let is_old = request.begun < node.cache.opened;
        // The kernel does not tell by which name it opens a file. So only the recorded name is used without asking, and none of a file that
        // has several.
        let has_other_names = found.links > 1 && found.mode & 0o170_000 != 0o040_000;
        let is_recorded = |(parent, name): (u64, &[u8])| {
            node.place.as_ref().is_some_and(|(of, known)| (*of, &known[..]) == (parent, name))
        };
        let is_kept = !is_old && name.is_none_or(|name| !has_other_names && is_recorded(name));
        if is_kept { self.ttl } else { Duration::ZERO }
    }

    /// The kernel gets attributes of a node, which it may use so long, and a name of the node with them if `is_named`.
    pub(crate) fn told(
        &mut self,
        number: u64,
        is_named: bool,
        found: &FileAttributes,
        request: KernelRequest,
        ttl: Duration,
    ) {
        let now = self.tick();
        let Some(node) = self.nodes.get_mut(&number).filter(|_| !self.ttl.is_zero()) else { return };
        let is_writing = node.cache.writing_to != 0;
        node.cache.size.send(found.size, request, now, is_writing);
        let kept = (!ttl.is_zero()).then(|| version_of(found));
        node.cache.attributes.send(kept, request, now, is_writing);
        if is_named && !ttl.is_zero() {
            node.cache.name_until = Some(Instant::now() + ttl + SLACK);
        }
    }

    /// The kernel is about to drop the attributes that it has of a node, for this request.
    pub(crate) fn dropped(&mut self, number: u64, request: KernelRequest) {
        let now = self.tick();
        if let Some(node) = self.nodes.get_mut(&number) {
            node.cache.attributes.set(None, request, now);
            node.cache.attributes.settle(request, now);
            node.cache.size.settle(request, now);
        }
    }

    /// This mount has truncated a file by opening it.
    pub(crate) fn truncated(&mut self, number: u64, request: KernelRequest) {
        let now = self.tick();
        if let Some(node) = self.nodes.get_mut(&number) {
            node.cache.size.set(0, request, now);
            node.cache.attributes.touch(request, now);
        }
    }

    /// This mount writes to a file up to this byte.
    pub(crate) fn writing(&mut self, number: u64, end: u64, request: KernelRequest) {
        let now = self.tick();
        if let Some(node) = self.nodes.get_mut(&number) {
            node.cache.writing_to = end;
            node.cache.size.touch(request, now);
            node.cache.attributes.touch(request, now);
        }
    }

    /// This mount has made a file reach to this byte at least, or has tried to write it if that is 0.
    pub(crate) fn extended(&mut self, number: u64, end: u64, request: KernelRequest) {
        let now = self.tick();
        if let Some(node) = self.nodes.get_mut(&number) {
            node.cache.writing_to = 0;
            node.cache.size.touch(request, now);
            node.cache.attributes.touch(request, now);
            // If the kernel had another size, it has that one or the end now.
            node.cache.size.other = node.cache.size.other.map(|_| now);
            if end > node.cache.size.latest {
                // The kernel takes the end for the size if it has a smaller one.
                (node.cache.size.latest, node.cache.extended) = (end, now);
            }
        }
    }

    /// A read has found the end of a file at this byte. If it was read ahead, the kernel takes this for the size.
    pub(crate) fn ended(&mut self, number: u64, end: u64) {
        let now = self.tick();
        if let Some(node) = self.nodes.get_mut(&number)
            && end < node.cache.size.latest
        {
            let size = &mut node.cache.size;
            (size.other, size.sent, size.thread) = (Some(now), Some(now), 0);
        }
    }

    /// What is checked when this thread opens a node, and whether the kernel tries the second time.
    pub(crate) fn check(&mut self, number: u64, thread: u32) -> (NameCheck, bool) {
        let now = Instant::now();
        let refused = self.take_refused(number, thread).filter(|open| now.duration_since(open.at) < self.retry);
        let caches = number != ROOT && !self.ttl.is_zero();
        let Some(node) = self.nodes.get(&number).filter(|_| caches) else { return (NameCheck::Nothing, true) };
        let is_ambiguous = node.cache.other_name_until.is_some_and(|until| now <= until);
        // After a refusal, the kernel has looked the name up again and may have found another node, or has no name (as in `/proc/self/fd`).
        let is_same = |open: &RefusedOpen| open.node == number && (is_ambiguous || open.place == node.place);
        let is_other = |open: &RefusedOpen| open.node != number && node.cache.mentioned > open.clock;
        let is_second = refused.as_ref().is_some_and(|open| is_same(open) || is_other(open));
        let is_found_again = refused.as_ref().is_some_and(is_same) || (is_second && is_ambiguous);
        let check = match &node.place {
            _ if is_found_again => NameCheck::Nothing,
            Some((parent, name)) if !is_ambiguous => NameCheck::Name { parent: *parent, name: name.clone() },
            _ => NameCheck::Lookup,
        };
        (check, is_second)
    }

    /// The open of this thread that was refused last.
    fn take_refused(&mut self, number: u64, thread: u32) -> Option<RefusedOpen> {
        let key = (thread, if thread == 0 { number } else { 0 });
        let mut open = self.refused.remove(&key)?;
        if open.count > 1 {
            open.count -= 1;
            self.refused.insert(key, open.clone());
        }
        Some(open)
    }

    /// An open was refused because of the name.
    pub(crate) fn refuse(&mut self, number: u64, thread: u32) {
        let at = Instant::now();
        if self.refused.len() >= MOST_REFUSED {
            let retry = self.retry;
            self.refused.retain(|_, open| at.duration_since(open.at) < retry);
            let oldest = self.refused.iter().min_by_key(|(_, open)| open.at).map(|(key, _)| *key);
            if let Some(oldest) = oldest.filter(|_| self.refused.len() >= MOST_REFUSED) {
                self.refused.remove(&oldest);
            }
        }
        if let Some(node) = self.nodes.get(&number) {
            let (clock, place) = (self.clock, node.place.clone());
            let key = (thread, if thread == 0 { number } else { 0 });
            // Only the thread 0 may be several.
            let before = self.refused.get(&key).filter(|open| thread == 0 && at.duration_since(open.at) < self.retry);
            let count = before.map_or(1, |open| open.count.saturating_add(1));
            self.refused.insert(key, RefusedOpen { node: number, at, clock, place, count });
        }
    }

    /// A file is made and opened by a request, or a present one is opened. Returns the request as one that began just now if its attributes are
    /// the newest.
    pub(crate) fn created(
        &mut self,
        number: u64,
        found: &FileAttributes,
        is_settled: bool,
        request: KernelRequest,
    ) -> KernelRequest {
        let is_latest = self.nodes.get(&number).is_some_and(|node| node.cache.opened <= request.begun);
        self.opened(number, found, is_settled, request);
        let now = self.tick();
        if let Some(node) = self.nodes.get_mut(&number) {
            // The kernel drops no attributes of a reply to this request.
            node.cache.size.set(found.size, request, now);
        }
        if is_latest { KernelRequest { begun: now, ..request } } else { request }
    }

    /// A file is opened by a request, and the server had these attributes of it. Returns what the kernel's caches have. The kernel is about to drop
    /// the attributes if it has others.
    pub(crate) fn opened(
        &mut self,
        number: u64,
        found: &FileAttributes,
        is_settled: bool,
        request: KernelRequest,
    ) -> KernelKnows {
        let (version, caches) = (version_of(found), !self.ttl.is_zero());
        let now = self.tick();
        let Some(node) = self.nodes.get_mut(&number) else { return KernelKnows::default() };
        node.cache.opened = now;
        // Data that may change without a change of its times is not kept.
        let data = std::mem::replace(&mut node.cache.data, is_settled.then_some(version));
        let told = &node.cache.attributes;
        let attributes = told.is_certain() && told.latest.is_none_or(|told| told == version);
        // When a write has its reply, the kernel takes its end for the end of the file.
        let KernelCache { size: sent, writing_to, extended, .. } = &node.cache;
        let size = sent.latest;
        let is_size =
            size == found.size || *writing_to == found.size || (size > found.size && *extended > request.begun);
        let size = (is_size && sent.is_certain()) || !caches;
        if !size {
            // This open is refused, so the kernel does not hear that it must drop the data.
            node.cache.data = None;
        }
        // Older replies must not come between when the kernel asks for the size again.
        let attributes = attributes && size;
        if !attributes {
            self.dropped(number, request);
        }
        KernelKnows { data: data == Some(version), attributes, size }
    }

    /// How many nodes there are.
    pub(crate) fn len(&self) -> usize {
        self.nodes.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(node: u64, inode: u64) -> FileEntry {
        FileEntry { node, attributes: FileAttributes { inode, device: 1, ..FileAttributes::default() } }
    }

    fn tree() -> RemoteTree {
        RemoteTree::new(&entry(ROOT, 2).attributes, Duration::from_secs(1), Duration::from_secs(5))
    }

    #[test]
    fn node_is_found_by_name_in_another_connection() {
        let mut tree = tree();
        let number = tree.mention(1, ROOT, b"a", &entry(7, 40));
        assert_eq!((number, tree.find(number, 1)), (40, NodePlace::Known(7)));
        let identity = identity_of(&entry(7, 40).attributes);
        assert_eq!(tree.find(number, 2), NodePlace::Named { parent: ROOT, name: b"a".to_vec(), identity });
        tree.renamed((ROOT, b"a"), (ROOT, b"b"), false);
        assert_eq!(tree.find(number, 2), NodePlace::Named { parent: ROOT, name: b"b".to_vec(), identity });
        tree.removed(ROOT, b"b");
        assert_eq!(tree.find(number, 2), NodePlace::Lost);
        assert_eq!(tree.find(number, 1), NodePlace::Known(7), "the server still has it");
    }

    #[test]
    fn exchange_swaps_the_names_of_both() {
        let mut tree = tree();
        let (a, b) = (tree.mention(1, ROOT, b"a", &entry(7, 40)), tree.mention(1, ROOT, b"b", &entry(8, 41)));
        tree.renamed((ROOT, b"a"), (ROOT, b"b"), true);
        let name = |place| match place {
            NodePlace::Named { name, .. } => name,
            other => panic!("{other:?}"),
        };
        assert_eq!((name(tree.find(a, 2)), name(tree.find(b, 2))), (b"b".to_vec(), b"a".to_vec()));
    }

    #[test]
    fn inode_number_of_two_files_is_given_once() {
        let mut tree = tree();
        let first = tree.mention(1, ROOT, b"a", &entry(7, 40));
        let mut other = entry(8, 40);
        other.attributes.device = 2;
        let second = tree.mention(1, ROOT, b"b", &other);
        assert_ne!(first, second);
        // Nothing but the root has the root's number.
        assert_ne!(tree.mention(1, ROOT, b"c", &entry(9, ROOT)), ROOT);
    }

    const NEVER: KernelRequest = KernelRequest { thread: 0, begun: 0 };
    const FIRST: KernelRequest = KernelRequest { thread: 1, begun: 0 };
    const SECOND: Duration = Duration::from_secs(1);

    /// Tells the kernel attributes as [`super::Remote::tell`] does.
    fn tell(
        tree: &mut RemoteTree,
        number: u64,
        name: Option<&[u8]>,
        found: &FileAttributes,
        request: KernelRequest,
    ) -> Duration {
        let ttl = tree.ttl(number, name.map(|name| (ROOT, name)), found, request);
        tree.told(number, name.is_some(), found, request, ttl);
        ttl
    }

    /// A tree whose kernel has been told of one file by the name `a`, and the file.
    fn told() -> (RemoteTree, u64, FileAttributes) {
        let (mut tree, mut file) = (tree(), entry(7, 40));
        (file.attributes.links, file.attributes.size) = (1, 100);
        let number = tree.mention(1, ROOT, b"a", &file);
        let request = tree.begin(1);
        assert_eq!(tell(&mut tree, number, Some(b"a"), &file.attributes, request), SECOND);
        (tree, number, file.attributes)
    }

    /// Lets some time pass for a tree.
    fn pass(tree: &mut RemoteTree, time: Duration) {
        tree.started -= time;
    }

    /// The check of a name, at the first attempt to open the node.
    fn named(name: &[u8]) -> (NameCheck, bool) {
        (NameCheck::Name { parent: ROOT, name: name.to_vec() }, false)
    }

    #[test]
    fn reply_older_than_an_open_is_not_kept() {
        let (mut tree, number, before) = told();
        let request = tree.begin(1);
        let after = FileAttributes { size: 200, ..before };
        let knows = KernelKnows { data: false, attributes: false, size: false };
        assert_eq!(tree.opened(number, &after, true, FIRST), knows);
        assert_eq!(tell(&mut tree, number, None, &before, request), Duration::ZERO);
        let request = tree.begin(1);
        assert_eq!(tell(&mut tree, number, None, &after, request), SECOND);
        let knows = KernelKnows { data: false, attributes: true, size: true };
        assert_eq!(tree.opened(number, &after, true, FIRST), knows);
        assert_eq!(tree.opened(number, &after, true, FIRST), KernelKnows { data: true, ..knows });
        // Attributes that a file had when it was made count from then on.
        let request = tree.begin(1);
        assert!(tree.created(number, &after, true, request).begun > request.begun);
        assert_eq!(tree.created(number, &after, true, request), request, "another open came between");
    }

    #[test]
    fn data_of_refused_open_is_dropped_at_the_next() {
        let (mut tree, number, before) = told();
        tree.opened(number, &before, true, FIRST);
        let after = FileAttributes { size: 200, ..before };
        assert!(!tree.opened(number, &after, true, FIRST).size, "this open is refused");
        let request = tree.begin(1);
        tell(&mut tree, number, Some(b"a"), &after, request);
        let knows = KernelKnows { data: false, attributes: true, size: true };
        assert_eq!(tree.opened(number, &after, true, FIRST), knows);
    }

    #[test]
    fn replies_that_kernel_may_drop_leave_its_caches_unknown() {
        let unknown = |knows: KernelKnows| !knows.attributes && !knows.size;
        for thread in [0, 2] {
            let (mut tree, number, before) = told();
            let after = FileAttributes { size: 200, ..before };
            // Another thread has asked before or after the kernel got the first reply, and gets another size.
            let request = tree.begin(thread);
            tell(&mut tree, number, None, &after, request);
            assert!(unknown(tree.opened(number, &after, true, request)), "thread {thread}");
            assert!(!tree.opened(number, &after, true, request).size);
            // The kernel has dropped its attributes for this thread, so the next reply to the same one is in order.
            let request = tree.begin(thread);
            tell(&mut tree, number, None, &after, request);
            assert_eq!(tree.opened(number, &after, true, request).size, thread != 0);
            // Any reply is that comes long after the others.
            pass(&mut tree, SLACK);
            let request = tree.begin(3);
            tell(&mut tree, number, None, &after, request);
            let knows = tree.opened(number, &after, true, request);
            assert!(knows.attributes && knows.size, "thread {thread}");
        }
        // A request that began before an earlier reply returns long afterwards.
        let (mut tree, number, before) = told();
        let (request, after) = (tree.begin(2), FileAttributes { size: 200, ..before });
        pass(&mut tree, SLACK * 2);
        tell(&mut tree, number, None, &after, request);
        assert!(unknown(tree.opened(number, &after, true, request)));
    }

    #[test]
    fn ordered_and_equal_replies_leave_caches_known() {
        let (mut tree, number, before) = told();
        let after = FileAttributes { size: 200, ..before };
        let is_known = |tree: &mut RemoteTree, found: &FileAttributes| {
            let request = tree.begin(9);
            let knows = tree.opened(number, found, true, request);
            knows.attributes && knows.size
        };
        // One thread, then another one with an equal reply, then a third one long afterwards.
        let request = tree.begin(1);
        tell(&mut tree, number, None, &after, request);
        assert!(is_known(&mut tree, &after));
        let request = tree.begin(2);
        tell(&mut tree, number, None, &after, request);
        assert!(is_known(&mut tree, &after));
        pass(&mut tree, SLACK);
        let request = tree.begin(3);
        tell(&mut tree, number, None, &before, request);
        assert!(is_known(&mut tree, &before));
        // A thread goes on with a write. The kernel drops what another one asked for meanwhile.
        let request = tree.begin(3);
        tree.writing(number, 300, request);
        pass(&mut tree, SLACK);
        let other = tree.begin(2);
        tell(&mut tree, number, None, &after, other);
        tree.extended(number, 300, request);
        let written = FileAttributes { size: 300, ..before };
        assert!(!tree.opened(number, &written, true, request).size);
    }

    #[test]
    fn short_read_before_the_recorded_end_makes_the_size_unknown() {
        let (mut tree, number, before) = told();
        tree.ended(number, 100);
        assert!(tree.opened(number, &before, true, NEVER).size);
        tree.ended(number, 99);
        assert!(!tree.opened(number, &before, true, NEVER).size, "the kernel may have 99");
    }

    #[test]
    fn size_that_this_mount_has_given_is_known() {
        let (mut tree, number, before) = told();
        let request = tree.begin(1);
        tree.extended(number, 300, request);
        tree.extended(number, 250, request);
        let now = tree.begin(1);
        assert!(tree.opened(number, &FileAttributes { size: 300, ..before }, true, now).size);
        assert!(!tree.opened(number, &FileAttributes { size: 250, ..before }, true, now).size);
        // A write was executed after the open, or before it and has no reply yet.
        assert!(tree.opened(number, &FileAttributes { size: 250, ..before }, true, NEVER).size);
        assert!(!tree.opened(number, &FileAttributes { size: 350, ..before }, true, NEVER).size);
        tree.writing(number, 350, now);
        assert!(tree.opened(number, &FileAttributes { size: 350, ..before }, true, NEVER).size);
        tree.extended(number, 0, now);
        assert!(!tree.opened(number, &FileAttributes { size: 350, ..before }, true, NEVER).size, "the write failed");
        tree.truncated(number, now);
        let now = tree.begin(1);
        assert!(tree.opened(number, &FileAttributes { size: 0, ..before }, true, now).size);
    }

    #[test]
    fn names_of_file_with_several_are_not_kept() {
        let (mut tree, number, found) = told();
        let two = FileAttributes { links: 2, ..found };
        let mut tell = |name: Option<&[u8]>, found: &FileAttributes| tell(&mut tree, number, name, found, NEVER);
        assert_eq!(tell(Some(b"a"), &two), Duration::ZERO);
        assert_eq!(tell(None, &two), SECOND, "attributes without a name");
        let directory = FileAttributes { links: 5, mode: 0o040_755, ..found };
        assert_eq!(tell(Some(b"a"), &directory), SECOND);
        // A reply about another name has come after the one about this name, and the kernel gets it before.
        assert_eq!(tell(Some(b"old"), &found), Duration::ZERO);
    }

    #[test]
    fn refused_opens_of_unknown_threads_are_counted_by_node() {
        let (mut tree, number, found) = told();
        let other = tree.mention(1, ROOT, b"b", &entry(8, 41));
        for node in [number, number, other] {
            tree.refuse(node, 0);
        }
        assert_eq!(tree.check(number, 0), (NameCheck::Nothing, true));
        assert_eq!(tree.check(number, 0), (NameCheck::Nothing, true), "two have been refused");
        assert_eq!(tree.check(number, 0), named(b"a"));
        assert_eq!(tree.check(other, 0), (NameCheck::Nothing, true));
        // The oldest refusals are dropped for others.
        for thread in 1..=MOST_REFUSED as u32 + 1 {
            tree.refuse(number, thread);
        }
        assert_eq!((tree.refused.len(), tree.check(number, 1)), (MOST_REFUSED, named(b"a")));
        let endless = RemoteTree::new(&found, Duration::MAX, SECOND);
        assert!(Instant::now().checked_add(endless.ttl + SLACK).is_some(), "a year at most");
    }

    #[test]
    fn name_is_refuted_by_two_errors() {
        let name = NameCheck::Name { parent: ROOT, name: b"a".to_vec() };
        let refuted = |check: &NameCheck| [Errno::REMCHG, Errno::STALE, Errno::IO].map(|e| check.is_refuted_by(e));
        assert_eq!(refuted(&name), [true, true, false]);
        assert_eq!(refuted(&NameCheck::Lookup), [true, false, false]);
        assert_eq!(refuted(&NameCheck::Nothing), [false; 3]);
    }

    #[test]
    fn recorded_name_is_checked_unless_its_lookup_was_demanded() {
        let (mut tree, number, _) = told();
        assert_eq!((tree.check(number, 1), tree.check(ROOT, 1).0), (named(b"a"), NameCheck::Nothing));
        tree.refuse(number, 1);
        assert_eq!(tree.check(number, 2), named(b"a"), "another thread");
        tree.refuse(number, 1);
        assert_eq!(tree.check(number, 1), (NameCheck::Nothing, true));
        assert_eq!(tree.check(number, 1), named(b"a"), "once only");
        tree.refuse(number, 1);
        tree.renamed((ROOT, b"a"), (ROOT, b"b"), false);
        assert_eq!(tree.check(number, 1), named(b"b"), "a new name was recorded since");
        tree.removed(ROOT, b"b");
        assert_eq!(tree.check(number, 1), (NameCheck::Lookup, false));
    }

    #[test]
    fn kernel_looks_up_file_of_which_it_may_know_another_name() {
        let (mut tree, number, found) = told();
        // Another client has renamed it, or has made another name.
        let same = FileEntry { node: 7, attributes: found };
        assert_eq!(tree.mention(1, ROOT, b"b", &same), number);
        assert_eq!(tree.check(number, 1), (NameCheck::Lookup, false));
        tree.refuse(number, 1);
        // The kernel has looked the first name up again, which is recorded instead of the second.
        tree.mention(1, ROOT, b"a", &same);
        assert_eq!(tree.check(number, 1), (NameCheck::Nothing, true));
        // Another file was refused, and the kernel has found this one instead.
        let other = tree.mention(1, ROOT, b"c", &entry(9, 50));
        tree.refuse(other, 1);
        assert_eq!(tree.check(number, 1), (NameCheck::Lookup, false), "it was not looked up since");
        tree.refuse(other, 1);
        tree.mention(1, ROOT, b"a", &same);
        assert_eq!(tree.check(number, 1), (NameCheck::Nothing, true));
        let mut without = RemoteTree::new(&entry(ROOT, 2).attributes, Duration::ZERO, SECOND);
        let number = without.mention(1, ROOT, b"a", &same);
        assert_eq!(tell(&mut without, number, Some(b"a"), &found, NEVER), Duration::ZERO);
        assert_eq!(without.check(number, 1).0, NameCheck::Nothing, "the kernel has looked it up");
    }

    #[test]
    fn forgetting_returns_the_mentions_of_the_same_connection_alone() {
        let mut tree = tree();
        let number = tree.mention(1, ROOT, b"a", &entry(7, 40));
        tree.mention(1, ROOT, b"a", &entry(7, 40));
        assert_eq!(tree.forget(number, 1, 1), None);
        assert_eq!(tree.forget(number, 1, 1), Some((7, 2)));
        let number = tree.mention(1, ROOT, b"a", &entry(7, 40));
        assert_eq!(tree.forget(number, 1, 2), None);
        assert_eq!(tree.len(), 1);
    }
}
