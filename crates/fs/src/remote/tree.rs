//! The client's record of the server's nodes: the numbers that this mount gives them, and the names by which they can be found again.

use super::EntryPlace;
use super::LONGEST_CACHE;
use super::kernel::{KernelCache, KernelClock, KernelKnows, KernelRequest, SLACK};
use super::refused::{RefusedOpen, RefusedOpens};
use crate::wire::{FileAttributes, FileEntry, FileTime, ROOT};
use rustix::io::Errno;
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// The identity of a file, which stays the same after a restart of the server.
pub(crate) type FileIdentity = (u64, u64, FileTime);

pub(crate) fn identity_of(found: &FileAttributes) -> FileIdentity {
    (found.device, found.inode, found.born)
}

/// A node that the kernel knows.
#[derive(Debug)]
struct RemoteNode {
    /// Its number at the server, in the connection `epoch`.
    server: u64,
    epoch: u64,
    /// How often replies of that connection have mentioned it.
    mentions: u64,
    /// How often replies to the kernel named it.
    lookups: u64,
    identity: FileIdentity,
    /// A name by which it can be found; `None` if this mount has removed it.
    place: Option<EntryPlace>,
    /// Until when the kernel uses that name.
    name_until: Option<Instant>,
    /// Until when the kernel may use another name of the node, which is not recorded.
    other_name_until: Option<Instant>,
    /// The clock when a reply mentioned the node last.
    mentioned: u64,
    cache: KernelCache,
}

impl RemoteNode {
    fn new(identity: FileIdentity) -> Self {
        Self {
            server: 0,
            epoch: 0,
            mentions: 0,
            lookups: 0,
            identity,
            place: None,
            name_until: None,
            other_name_until: None,
            mentioned: 0,
            cache: KernelCache::default(),
        }
    }

    /// Whether this name is the one that is recorded.
    fn has_place(&self, parent: u64, name: &[u8]) -> bool {
        self.place.as_ref().is_some_and(|(of, known)| (*of, &known[..]) == (parent, name))
    }
}

/// All nodes of a mount, by the number that the kernel knows them by: their inode number, where that is free.
#[derive(Debug)]
pub(crate) struct RemoteTree {
    /// How long the kernel may use names and attributes without asking.
    ttl: Duration,
    clock: KernelClock,
    refused: RefusedOpens,
    nodes: HashMap<u64, RemoteNode>,
    by_identity: HashMap<FileIdentity, u64>,
    by_place: HashMap<EntryPlace, u64>,
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
        let node = RemoteNode { server: ROOT, mentions: 1, lookups: 1, ..RemoteNode::new(identity) };
        Self {
            ttl: ttl.min(LONGEST_CACHE),
            clock: KernelClock::new(),
            refused: RefusedOpens::new(retry),
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
                self.nodes.insert(number, RemoteNode::new(identity));
                self.by_identity.insert(identity, number);
                number
            }
        };
        self.found(number, epoch, entry.node);
        let now = self.clock.tick();
        if let Some(node) = self.nodes.get_mut(&number) {
            node.lookups += 1;
            node.mentioned = now;
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
        if !node.has_place(parent, name)
            && let Some(before) = node.place.replace((parent, name.to_vec()))
        {
            // Another name of the file, or an older one, which the kernel may go on using for some time.
            self.by_place.remove(&before);
            node.other_name_until = node.other_name_until.max(node.name_until.take());
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
        self.clock.begin(thread)
    }

    /// What the kernel has of a node, and the clock of a change of that.
    fn cache(&mut self, number: u64) -> Option<(&mut KernelCache, u64)> {
        let now = self.clock.tick();
        Some((&mut self.nodes.get_mut(&number)?.cache, now))
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
        // The kernel does not report by which name it opens a file. So only the recorded name is used without asking, and none of a file that
        // has several.
        let has_other_names = found.links > 1 && found.mode & 0o170_000 != 0o040_000;
        let is_name_kept = |(parent, name): (u64, &[u8])| !has_other_names && node.has_place(parent, name);
        let is_kept = !node.cache.is_older(request) && name.is_none_or(is_name_kept);
        if is_kept { self.ttl } else { Duration::ZERO }
    }

    /// The kernel gets attributes of a node, which it may use for this time, and a name of the node with them if `is_named`.
    pub(crate) fn attributes_sent(
        &mut self,
        number: u64,
        is_named: bool,
        found: &FileAttributes,
        request: KernelRequest,
        ttl: Duration,
    ) {
        let now = self.clock.tick();
        let Some(node) = self.nodes.get_mut(&number).filter(|_| !self.ttl.is_zero()) else { return };
        node.cache.attributes_sent(found, !ttl.is_zero(), request, now);
        if is_named && !ttl.is_zero() {
            node.name_until = Some(Instant::now() + ttl + SLACK);
        }
    }

    /// The kernel is about to drop the attributes that it has of a node, for this request.
    pub(crate) fn dropped(&mut self, number: u64, request: KernelRequest) {
        if let Some((cache, now)) = self.cache(number) {
            cache.dropped(request, now);
        }
    }

    /// This mount has truncated a file by opening it.
    pub(crate) fn truncated(&mut self, number: u64, request: KernelRequest) {
        if let Some((cache, now)) = self.cache(number) {
            cache.truncated(request, now);
        }
    }

    /// This mount writes to a file up to this byte.
    pub(crate) fn writing(&mut self, number: u64, end: u64, request: KernelRequest) {
        if let Some((cache, now)) = self.cache(number) {
            cache.writing(end, request, now);
        }
    }

    /// This mount has made a file reach to this byte at least, or has tried to write it if that is 0.
    pub(crate) fn extended(&mut self, number: u64, end: u64, request: KernelRequest) {
        if let Some((cache, now)) = self.cache(number) {
            cache.extended(end, request, now);
        }
    }

    /// A read has found the end of a file at this byte. If it was read ahead, the kernel takes this for the size.
    pub(crate) fn ended(&mut self, number: u64, end: u64) {
        if let Some((cache, now)) = self.cache(number) {
            cache.ended(end, now);
        }
    }

    /// What is checked when this thread opens a node, and whether the kernel tries the second time.
    pub(crate) fn check(&mut self, number: u64, thread: u32) -> (NameCheck, bool) {
        let refused = self.refused.take(number, thread);
        let caches = number != ROOT && !self.ttl.is_zero();
        let Some(node) = self.nodes.get(&number).filter(|_| caches) else { return (NameCheck::Nothing, true) };
        let is_ambiguous = node.other_name_until.is_some_and(|until| Instant::now() <= until);
        // After a refusal, the kernel has looked the name up again and may have found another node, or has no name (as in `/proc/self/fd`).
        let is_same = |open: &RefusedOpen| open.node == number && (is_ambiguous || open.place == node.place);
        let is_other = |open: &RefusedOpen| open.node != number && node.mentioned > open.clock;
        let is_second = refused.as_ref().is_some_and(|open| is_same(open) || is_other(open));
        let is_found_again = refused.as_ref().is_some_and(is_same) || (is_second && is_ambiguous);
        let check = match &node.place {
            _ if is_found_again => NameCheck::Nothing,
            Some((parent, name)) if !is_ambiguous => NameCheck::Name { parent: *parent, name: name.clone() },
            _ => NameCheck::Lookup,
        };
        (check, is_second)
    }

    /// An open was refused because of the name.
    pub(crate) fn refuse(&mut self, number: u64, thread: u32) {
        if let Some(node) = self.nodes.get(&number) {
            self.refused.add(number, thread, self.clock.latest(), node.place.clone());
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
        let caches = !self.ttl.is_zero();
        let Some((cache, now)) = self.cache(number) else { return request };
        cache.created(found, is_settled, caches, request, now)
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
        let caches = !self.ttl.is_zero();
        let Some((cache, now)) = self.cache(number) else { return KernelKnows::default() };
        cache.opened(found, is_settled, caches, request, now)
    }

    /// How many nodes there are.
    pub(crate) fn len(&self) -> usize {
        self.nodes.len()
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in crate::remote) fn entry(node: u64, inode: u64) -> FileEntry {
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

    pub(in crate::remote) const NEVER: KernelRequest = KernelRequest { thread: 0, begun: 0 };
    pub(in crate::remote) const FIRST: KernelRequest = KernelRequest { thread: 1, begun: 0 };
    pub(in crate::remote) const SECOND: Duration = Duration::from_secs(1);

    /// Sends the kernel attributes as [`super::Remote::send_attributes`] does.
    pub(in crate::remote) fn send(
        tree: &mut RemoteTree,
        number: u64,
        name: Option<&[u8]>,
        found: &FileAttributes,
        request: KernelRequest,
    ) -> Duration {
        let ttl = tree.ttl(number, name.map(|name| (ROOT, name)), found, request);
        tree.attributes_sent(number, name.is_some(), found, request, ttl);
        ttl
    }

    /// A tree whose kernel was sent one file by the name `a`, and the file.
    pub(in crate::remote) fn tree_with_file() -> (RemoteTree, u64, FileAttributes) {
        let (mut tree, mut file) = (tree(), entry(7, 40));
        (file.attributes.links, file.attributes.size) = (1, 100);
        let number = tree.mention(1, ROOT, b"a", &file);
        let request = tree.begin(1);
        assert_eq!(send(&mut tree, number, Some(b"a"), &file.attributes, request), SECOND);
        (tree, number, file.attributes)
    }

    /// Lets some time pass for a tree.
    pub(in crate::remote) fn pass(tree: &mut RemoteTree, time: Duration) {
        tree.clock.pass(time);
    }

    /// The check of a name, at the first attempt to open the node.
    pub(in crate::remote) fn named(name: &[u8]) -> (NameCheck, bool) {
        (NameCheck::Name { parent: ROOT, name: name.to_vec() }, false)
    }

    #[test]
    fn names_of_file_with_several_are_not_kept() {
        let (mut tree, number, found) = tree_with_file();
        let two = FileAttributes { links: 2, ..found };
        let mut send = |name: Option<&[u8]>, found: &FileAttributes| send(&mut tree, number, name, found, NEVER);
        assert_eq!(send(Some(b"a"), &two), Duration::ZERO);
        assert_eq!(send(None, &two), SECOND, "attributes without a name");
        let directory = FileAttributes { links: 5, mode: 0o040_755, ..found };
        assert_eq!(send(Some(b"a"), &directory), SECOND);
        // A reply about another name has come after the one about this name, and the kernel gets it before.
        assert_eq!(send(Some(b"old"), &found), Duration::ZERO);
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
        let (mut tree, number, _) = tree_with_file();
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
        let (mut tree, number, found) = tree_with_file();
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
        assert_eq!(send(&mut without, number, Some(b"a"), &found, NEVER), Duration::ZERO);
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

    #[test]
    fn cache_time_is_a_year_at_most() {
        let endless = RemoteTree::new(&entry(ROOT, 2).attributes, Duration::MAX, SECOND);
        assert!(Instant::now().checked_add(endless.ttl + SLACK).is_some());
    }
}
