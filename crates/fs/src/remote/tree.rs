//! The client's record of the server's nodes: the numbers that this mount gives them, and the names by which they can be found again.

use crate::wire::{FileAttributes, FileEntry, FileTime, ROOT};
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// The identity of a file, which stays the same after a restart of the server.
pub(crate) type FileIdentity = (u64, u64, FileTime);

pub(crate) fn identity_of(found: &FileAttributes) -> FileIdentity {
    (found.device, found.inode, found.born)
}

/// The values of a file that change with its data (protocol N7).
pub(crate) type DataVersion = (u64, FileTime, FileTime);

/// How much longer than it was told the kernel may use a name: its time begins when the thread that asked for the name goes on.
const SLACK: Duration = Duration::from_secs(5);
/// How long after a refused open the same thread may open the node without a check of its name.
const SECOND_ATTEMPT: Duration = Duration::from_secs(5);

/// Refused opens that are recorded before old ones are dropped.
const MOST_REFUSED: usize = 1024;

/// What the kernel may go on using of a node without asking the server.
#[derive(Debug, Default)]
struct KernelCache {
    /// The data that its page cache has.
    data: Option<DataVersion>,
    /// The attributes that it was told last.
    attributes: Option<DataVersion>,
    /// The size that it has of the file.
    size: u64,
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
#[derive(Debug)]
struct RefusedOpen {
    node: u64,
    at: Instant,
    clock: u64,
    /// The name that was recorded for the node.
    place: Option<(u64, Vec<u8>)>,
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
    /// Counts opens, mentions, and writes that make a file longer.
    clock: u64,
    /// By thread.
    refused: HashMap<u32, RefusedOpen>,
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
    pub(crate) fn new(root: &FileAttributes, ttl: Duration) -> Self {
        let identity = identity_of(root);
        let cache = KernelCache::default();
        let node = RemoteNode { server: ROOT, epoch: 0, mentions: 1, lookups: 1, identity, place: None, cache };
        Self {
            ttl,
            clock: 0,
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
        if let Some(node) = self.nodes.get_mut(&number) {
            node.lookups += 1;
            self.clock += 1;
            node.cache.mentioned = self.clock;
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

    /// A number that tells later which requests began before an open.
    pub(crate) fn clock(&self) -> u64 {
        self.clock
    }

    /// The kernel gets attributes of a node, by the reply to a request that began at `begun`, and the name that the node has if it is new
    /// to the kernel. Returns how long the kernel may use both without asking.
    pub(crate) fn told(
        &mut self,
        number: u64,
        name: Option<(u64, &[u8])>,
        found: &FileAttributes,
        begun: u64,
    ) -> Duration {
        let ttl = self.ttl;
        let Some(node) = self.nodes.get_mut(&number).filter(|_| !ttl.is_zero()) else { return Duration::ZERO };
        node.cache.size = found.size;
        // An open meanwhile has returned newer attributes.
        let is_old = begun < node.cache.opened;
        // The kernel does not tell by which name it opens a file. So only the recorded name is used without asking, and none of a file that
        // has several.
        let has_other_names = found.links > 1 && found.mode & 0o170_000 != 0o040_000;
        let is_recorded = |(parent, name): (u64, &[u8])| {
            node.place.as_ref().is_some_and(|(of, known)| (*of, &known[..]) == (parent, name))
        };
        if is_old || name.is_some_and(|name| has_other_names || !is_recorded(name)) {
            node.cache.attributes = None;
            return Duration::ZERO;
        }
        node.cache.attributes = Some(version_of(found));
        if name.is_some() {
            node.cache.name_until = Some(Instant::now() + ttl + SLACK);
        }
        ttl
    }

    /// This mount has truncated a file by opening it.
    pub(crate) fn truncated(&mut self, number: u64) {
        if let Some(node) = self.nodes.get_mut(&number) {
            node.cache.size = 0;
        }
    }

    /// This mount writes to a file up to this byte.
    pub(crate) fn writing(&mut self, number: u64, end: u64) {
        if let Some(node) = self.nodes.get_mut(&number) {
            node.cache.writing_to = end;
        }
    }

    /// This mount has made a file reach to this byte at least.
    pub(crate) fn extended(&mut self, number: u64, end: u64) {
        if let Some(node) = self.nodes.get_mut(&number) {
            node.cache.writing_to = 0;
            if end > node.cache.size {
                self.clock += 1;
                (node.cache.size, node.cache.extended) = (end, self.clock);
            }
        }
    }

    /// What is checked when this thread opens a node, and whether the kernel tries the second time.
    pub(crate) fn check(&mut self, number: u64, thread: u32) -> (NameCheck, bool) {
        let now = Instant::now();
        let refused = self.refused.remove(&thread).filter(|open| now.duration_since(open.at) < SECOND_ATTEMPT);
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

    /// An open was refused because of the name.
    pub(crate) fn refuse(&mut self, number: u64, thread: u32) {
        let at = Instant::now();
        if self.refused.len() >= MOST_REFUSED {
            self.refused.retain(|_, open| at.duration_since(open.at) < SECOND_ATTEMPT);
        }
        if let Some(node) = self.nodes.get(&number) {
            let (clock, place) = (self.clock, node.place.clone());
            self.refused.insert(thread, RefusedOpen { node: number, at, clock, place });
        }
    }

    /// A file is made and opened by a request that began at `begun`, or a present one is opened. Returns the clock that belongs to the attributes
    /// of the reply.
    pub(crate) fn created(&mut self, number: u64, found: &FileAttributes, is_settled: bool, begun: u64) -> u64 {
        let is_latest = self.nodes.get(&number).is_some_and(|node| node.cache.opened <= begun);
        self.opened(number, found, is_settled, begun);
        if is_latest { self.clock } else { begun }
    }

    /// A file is opened by a request that began at `begun`, and the server had these attributes of it. Returns what the kernel's caches have.
    pub(crate) fn opened(&mut self, number: u64, found: &FileAttributes, is_settled: bool, begun: u64) -> KernelKnows {
        let (version, caches) = (version_of(found), !self.ttl.is_zero());
        let Some(node) = self.nodes.get_mut(&number) else { return KernelKnows::default() };
        self.clock += 1;
        node.cache.opened = self.clock;
        // Data that may change without a change of its times is not kept.
        let data = std::mem::replace(&mut node.cache.data, is_settled.then_some(version));
        let attributes = node.cache.attributes.is_none_or(|told| told == version);
        if !attributes {
            node.cache.attributes = None;
        }
        // When a write has its reply, the kernel takes its end for the end of the file.
        let KernelCache { size, writing_to, extended, .. } = node.cache;
        let size = size == found.size || writing_to == found.size || (size > found.size && extended > begun);
        KernelKnows { data: data == Some(version), attributes, size: size || !caches }
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
        RemoteTree::new(&entry(ROOT, 2).attributes, Duration::from_secs(1))
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

    /// A tree whose kernel has been told of one file by the name `a`, and the file.
    fn told() -> (RemoteTree, u64, FileAttributes) {
        let (mut tree, mut file) = (tree(), entry(7, 40));
        (file.attributes.links, file.attributes.size) = (1, 100);
        let number = tree.mention(1, ROOT, b"a", &file);
        assert_eq!(tree.told(number, Some((ROOT, b"a")), &file.attributes, 0), Duration::from_secs(1));
        (tree, number, file.attributes)
    }

    /// The check of a name, at the first attempt to open the node.
    fn named(name: &[u8]) -> (NameCheck, bool) {
        (NameCheck::Name { parent: ROOT, name: name.to_vec() }, false)
    }

    #[test]
    fn reply_older_than_an_open_is_not_kept() {
        let (mut tree, number, before) = told();
        let begun = tree.clock();
        let after = FileAttributes { size: 200, ..before };
        let knows = KernelKnows { data: false, attributes: false, size: false };
        assert_eq!(tree.opened(number, &after, true, 0), knows);
        assert_eq!(tree.told(number, None, &before, begun), Duration::ZERO);
        let begun = tree.clock();
        assert_eq!(tree.told(number, None, &after, begun), Duration::from_secs(1));
        let knows = KernelKnows { data: true, attributes: true, size: true };
        assert_eq!(tree.opened(number, &after, true, 0), knows);
        // Attributes that a file had when it was made count from then on.
        let begun = tree.clock();
        assert_eq!(tree.created(number, &after, true, begun), begun + 1);
        assert_eq!(tree.created(number, &after, true, begun), begun, "another open came between");
    }

    #[test]
    fn size_that_this_mount_has_given_is_known() {
        let (mut tree, number, before) = told();
        tree.extended(number, 300);
        tree.extended(number, 250);
        let clock = tree.clock();
        assert!(tree.opened(number, &FileAttributes { size: 300, ..before }, true, clock).size);
        assert!(!tree.opened(number, &FileAttributes { size: 250, ..before }, true, clock).size);
        // A write was executed after the open, or before it and has no reply yet.
        assert!(tree.opened(number, &FileAttributes { size: 250, ..before }, true, 0).size);
        assert!(!tree.opened(number, &FileAttributes { size: 350, ..before }, true, 0).size);
        tree.writing(number, 350);
        assert!(tree.opened(number, &FileAttributes { size: 350, ..before }, true, 0).size);
        tree.truncated(number);
        assert!(tree.opened(number, &FileAttributes { size: 0, ..before }, true, clock).size);
    }

    #[test]
    fn names_of_file_with_several_are_not_kept() {
        let (mut tree, number, found) = told();
        let two = FileAttributes { links: 2, ..found };
        assert_eq!(tree.told(number, Some((ROOT, b"a")), &two, 0), Duration::ZERO);
        assert_eq!(tree.told(number, None, &two, 0), Duration::from_secs(1), "attributes without a name");
        let directory = FileAttributes { links: 5, mode: 0o040_755, ..found };
        assert_eq!(tree.told(number, Some((ROOT, b"a")), &directory, 0), Duration::from_secs(1));
        // A reply about another name has come after the one about this name, and the kernel gets it before.
        assert_eq!(tree.told(number, Some((ROOT, b"old")), &found, 0), Duration::ZERO);
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
        let mut without = RemoteTree::new(&entry(ROOT, 2).attributes, Duration::ZERO);
        let number = without.mention(1, ROOT, b"a", &same);
        assert_eq!(without.told(number, Some((ROOT, b"a")), &found, 0), Duration::ZERO);
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
