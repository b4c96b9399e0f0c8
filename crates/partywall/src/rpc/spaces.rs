//! The records of a heap's segment: which of its granules are free.
//!
//! Free spaces are in 240 lists by their size (the allocator *TLSF*), so that taking and freeing a space takes the same time however many
//! there are. The records grow with the number of spaces: a segment of 100 MB with one block has two of them.

/// No space.
const NONE: u32 = u32::MAX;
/// Lists of free spaces: 8 for each power of two.
const LISTS: usize = 240;
/// The most spaces of one list that are compared with a size, where only that list could have room.
const MOST_COMPARED: usize = 16;

/// A space that was taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TakenSpace {
    /// Its first granule.
    pub(super) offset: u32,
    node: u32,
}

/// A space, taken or free, between its neighbours.
#[derive(Debug, Clone, Copy)]
struct Node {
    offset: u32,
    size: u32,
    /// The spaces directly before and behind this one.
    before: u32,
    behind: u32,
    /// A free space's neighbours in its list.
    previous: u32,
    next: u32,
    is_free: bool,
}

/// The spaces of a segment.
#[derive(Debug)]
pub(super) struct Spaces {
    nodes: Vec<Node>,
    /// Numbers of nodes that are in use for no space.
    unused: Vec<u32>,
    heads: [u32; LISTS],
    /// A bit for each list that is not empty.
    filled: [u64; LISTS.div_ceil(64)],
}

/// The list of a free space of this size: each list has the sizes from its smallest one to that of the next.
fn list_of(size: u32) -> usize {
    if size < 8 {
        return size as usize;
    }
    let shift = size.ilog2() - 3;
    (8 * shift + (size >> shift)) as usize
}

/// The smallest size of a list.
fn smallest_of(list: usize) -> u64 {
    match list {
        0..8 => list as u64,
        _ => (8 + list as u64 % 8) << (list / 8 - 1),
    }
}

impl Spaces {
    /// One free space of this many granules, at least 1.
    pub(super) fn new(size: u32) -> Self {
        let mut this =
            Self { nodes: Vec::new(), unused: Vec::new(), heads: [NONE; LISTS], filled: [0; LISTS.div_ceil(64)] };
        let all = Node { offset: 0, size, before: NONE, behind: NONE, previous: NONE, next: NONE, is_free: true };
        let first = this.new_node(all);
        this.put_in_list(first);
        this
    }

    /// Takes a space of this many granules, at least 1.
    pub(super) fn take(&mut self, size: u32) -> Option<TakenSpace> {
        let size = size.max(1);
        let number = self.find(size)?;
        self.take_from_list(number);
        let Node { offset, size: found, behind, .. } = self.nodes[number as usize];
        if found > size {
            let rest =
                Node { offset: offset + size, size: found - size, before: number, ..self.nodes[number as usize] };
            let rest = self.new_node(rest);
            self.nodes[number as usize].size = size;
            self.nodes[number as usize].behind = rest;
            if behind != NONE {
                self.nodes[behind as usize].before = rest;
            }
            self.put_in_list(rest);
        }
        Some(TakenSpace { offset, node: number })
    }

    /// Frees a space, which was taken once and is freed once.
    pub(super) fn free(&mut self, space: TakenSpace) {
        let mut number = space.node;
        let Node { before, behind, is_free, .. } = self.nodes[number as usize];
        debug_assert!(!is_free, "{space:?} is freed twice");
        if behind != NONE && self.nodes[behind as usize].is_free {
            self.take_from_list(behind);
            self.join(number, behind);
        }
        if before != NONE && self.nodes[before as usize].is_free {
            self.take_from_list(before);
            self.join(before, number);
            number = before;
        }
        self.put_in_list(number);
    }

    /// A free space with at least this many granules.
    fn find(&self, size: u32) -> Option<u32> {
        let list = list_of(size);
        let sure = if smallest_of(list) < u64::from(size) { list + 1 } else { list };
        if let Some(found) = self.first_filled(sure) {
            return Some(self.heads[found]);
        }
        // Some of this list may have room as well.
        let mut number = self.heads[list];
        for _ in 0..MOST_COMPARED {
            match self.nodes.get(number as usize) {
                Some(node) if node.size >= size => return Some(number),
                Some(node) => number = node.next,
                None => return None,
            }
        }
        None
    }

    /// The first list from this one on that is not empty.
    fn first_filled(&self, from: usize) -> Option<usize> {
        let rest = |word: usize| match word == from / 64 {
            true => self.filled[word] & (u64::MAX << (from % 64)),
            false => self.filled[word],
        };
        let word = (from / 64..self.filled.len()).find(|word| rest(*word) != 0)?;
        Some(64 * word + rest(word).trailing_zeros() as usize)
    }

    fn new_node(&mut self, node: Node) -> u32 {
        if let Some(number) = self.unused.pop() {
            self.nodes[number as usize] = node;
            return number;
        }
        self.nodes.push(node);
        // A segment has at most 2^24 granules.
        (self.nodes.len() - 1) as u32
    }

    /// Makes two neighbours one space, which has the number of the first.
    fn join(&mut self, first: u32, second: u32) {
        let Node { size, behind, .. } = self.nodes[second as usize];
        self.nodes[first as usize].size += size;
        self.nodes[first as usize].behind = behind;
        if behind != NONE {
            self.nodes[behind as usize].before = first;
        }
        self.unused.push(second);
    }

    fn put_in_list(&mut self, number: u32) {
        let list = list_of(self.nodes[number as usize].size);
        let next = std::mem::replace(&mut self.heads[list], number);
        let node = &mut self.nodes[number as usize];
        (node.is_free, node.previous, node.next) = (true, NONE, next);
        if next != NONE {
            self.nodes[next as usize].previous = number;
        }
        self.filled[list / 64] |= 1 << (list % 64);
    }

    fn take_from_list(&mut self, number: u32) {
        let Node { size, previous, next, .. } = self.nodes[number as usize];
        let list = list_of(size);
        self.nodes[number as usize].is_free = false;
        match self.nodes.get_mut(previous as usize) {
            Some(previous) => previous.next = next,
            None => self.heads[list] = next,
        }
        if let Some(next) = self.nodes.get_mut(next as usize) {
            next.previous = previous;
        }
        if self.heads[list] == NONE {
            self.filled[list / 64] &= !(1 << (list % 64));
        }
    }
}

#[cfg(test)]
#[path = "../../../shm/tests/random/mod.rs"]
mod random;

#[cfg(test)]
mod tests {
    use super::random::Random;
    use super::*;

    #[test]
    fn lists_cover_all_sizes_in_order() {
        let sizes =
            (1..10_000).chain((0..32).flat_map(|bit| [(1 << bit) - 1, 1 << bit, (1 << bit) + 1])).chain([u32::MAX]);
        for size in sizes.filter(|size| *size > 0) {
            let list = list_of(size);
            let range = smallest_of(list)..smallest_of(list + 1);
            assert!(list < LISTS && range.contains(&size.into()), "{size} in list {list}, which has {range:?}");
        }
    }

    #[test]
    fn whole_segment_of_any_size_can_be_taken() {
        for size in [1, 7, 8, 17, 15_626, 1_562_500, 1 << 24] {
            let mut spaces = Spaces::new(size);
            assert_eq!(spaces.take(size + 1), None);
            let all = spaces.take(size).unwrap();
            assert_eq!((all.offset, spaces.take(1)), (0, None));
            spaces.free(all);
            assert!(spaces.take(size).is_some(), "{size}");
        }
    }

    #[test]
    fn rest_of_one_granule_can_be_taken() {
        let mut spaces = Spaces::new(10);
        assert_eq!(spaces.take(9).map(|space| space.offset), Some(0));
        assert_eq!(spaces.take(1).map(|space| space.offset), Some(9));
    }

    #[test]
    fn records_grow_with_blocks_and_not_with_size() {
        let mut spaces = Spaces::new(1 << 24);
        let block = spaces.take(100).unwrap();
        assert_eq!(spaces.nodes.len(), 2);
        for _ in 0..1000 {
            let other = spaces.take(5).unwrap();
            spaces.free(other);
        }
        spaces.free(block);
        assert!(spaces.nodes.len() <= 3, "{}", spaces.nodes.len());
    }

    /// A map of granules, which says what any allocator must do.
    #[test]
    fn random_spaces_do_not_overlap_and_join_again() {
        let size = 3001;
        let (mut spaces, mut taken) = (Spaces::new(size), Vec::<(TakenSpace, u32)>::new());
        let mut owners = vec![false; size as usize];
        let mut random = Random(99);
        for _ in 0..20_000 {
            if taken.is_empty() || random.below(2) == 0 {
                let most = [2, 30, 400][random.below(3) as usize];
                let wanted = 1 + random.below(most) as u32;
                let Some(space) = spaces.take(wanted) else {
                    let longest = owners.split(|is_taken| *is_taken).map(<[bool]>::len).max().unwrap_or(0);
                    // An eighth is what the lists do not distinguish, and no more than that is refused.
                    assert!(
                        (longest as u32) < wanted + wanted.div_ceil(8),
                        "{longest} granules are free, not {wanted}"
                    );
                    continue;
                };
                for owner in &mut owners[space.offset as usize..(space.offset + wanted) as usize] {
                    assert!(!std::mem::replace(owner, true), "{space:?} overlaps another");
                }
                taken.push((space, wanted));
            } else {
                let (space, len) = taken.swap_remove(random.below(taken.len() as u64) as usize);
                owners[space.offset as usize..(space.offset + len) as usize].fill(false);
                spaces.free(space);
            }
        }
        taken.into_iter().for_each(|(space, _)| spaces.free(space));
        assert_eq!(spaces.take(size).map(|all| all.offset), Some(0), "all of it is one space again");
    }
}
