//! The client's record of the server's nodes: the numbers that this mount gives them, and the names by which they can be found again.

use crate::wire::{FileAttributes, FileEntry, FileTime, ROOT};
use std::collections::HashMap;

/// The identity of a file, which stays the same after a restart of the server.
pub(crate) type FileIdentity = (u64, u64, FileTime);

pub(crate) fn identity_of(found: &FileAttributes) -> FileIdentity {
    (found.device, found.inode, found.born)
}

/// The values of a file that change with its data (protocol N7).
pub(crate) type DataVersion = (u64, FileTime, FileTime);

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
    /// The data that the kernel's cache has.
    cached: Option<DataVersion>,
}

/// All nodes of a mount, by the number that the kernel knows them by: their inode number, where that is free.
#[derive(Debug)]
pub(crate) struct RemoteTree {
    nodes: HashMap<u64, RemoteNode>,
    by_identity: HashMap<FileIdentity, u64>,
    by_place: HashMap<(u64, Vec<u8>), u64>,
    next: u64,
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
    pub(crate) fn new(root: &FileAttributes) -> Self {
        let identity = identity_of(root);
        let node = RemoteNode { server: ROOT, epoch: 0, mentions: 1, lookups: 1, identity, place: None, cached: None };
        Self {
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
                let node =
                    RemoteNode { server: 0, epoch: 0, mentions: 0, lookups: 0, identity, place: None, cached: None };
                self.nodes.insert(number, node);
                self.by_identity.insert(identity, number);
                number
            }
        };
        self.found(number, epoch, entry.node);
        if let Some(node) = self.nodes.get_mut(&number) {
            node.lookups += 1;
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
            // Another name of the file, or an older one.
            self.by_place.remove(&before);
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

    /// A file is opened, and its data has this version. Returns whether the kernel's cache has the same.
    pub(crate) fn opened(&mut self, number: u64, found: &FileAttributes, is_settled: bool) -> bool {
        let Some(node) = self.nodes.get_mut(&number) else { return false };
        let version = (found.size, found.modified, found.changed);
        // Data that may change without a change of its times is not kept.
        std::mem::replace(&mut node.cached, is_settled.then_some(version)) == Some(version)
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
        RemoteTree::new(&entry(ROOT, 2).attributes)
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
