//! What the kernel has of a node, as far as this mount knows: data in its page cache, attributes, and the size.

use crate::wire::{FileAttributes, FileTime};
use std::time::{Duration, Instant};

/// The values of a file that change with its data (protocol N7).
type DataVersion = (u64, FileTime, FileTime);

fn version_of(found: &FileAttributes) -> DataVersion {
    (found.size, found.modified, found.changed)
}

/// How much longer than the reply allows the kernel may use a name: the time begins when the thread that asked for the name goes on. Requests of
/// two threads that are less than this apart may reach the kernel's records in any order.
pub(super) const SLACK: Duration = Duration::from_secs(5);

/// A request of the kernel whose reply has attributes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KernelRequest {
    /// The thread that made it, or 0 if the kernel does not report it.
    pub(crate) thread: u32,
    /// The clock when it began here.
    pub(crate) begun: u64,
}

/// Nanoseconds since `started`, and more where opens, mentions, and changes of what the kernel has would have the same value.
#[derive(Debug)]
pub(super) struct KernelClock {
    latest: u64,
    started: Instant,
}

impl KernelClock {
    pub(super) fn new() -> Self {
        Self { latest: 0, started: Instant::now() }
    }

    /// A request of the kernel begins, by this thread.
    pub(super) fn begin(&mut self, thread: u32) -> KernelRequest {
        self.latest = self.latest.max(u64::try_from(self.started.elapsed().as_nanos()).unwrap_or(u64::MAX));
        KernelRequest { thread, begun: self.latest }
    }

    /// The clock, which is later than each request that has begun.
    pub(super) fn tick(&mut self) -> u64 {
        self.latest = self.begin(0).begun.saturating_add(1);
        self.latest
    }

    /// The clock when the latest request began or the latest tick was.
    pub(super) fn latest(&self) -> u64 {
        self.latest
    }

    /// Lets some time pass.
    #[cfg(test)]
    pub(super) fn pass(&mut self, time: Duration) {
        self.started -= time;
    }
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

    /// The kernel may have another value from now on, whatever thread asks.
    fn doubt(&mut self, now: u64) {
        (self.other, self.sent, self.thread) = (Some(now), Some(now), 0);
    }

    fn is_certain(&self) -> bool {
        self.other.is_none()
    }
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

/// What the kernel may go on using of a node without asking the server.
#[derive(Debug, Default)]
pub(super) struct KernelCache {
    /// The data that its page cache has.
    data: Option<DataVersion>,
    /// The attributes that it was sent; `None` if it has to ask for them.
    attributes: KernelValue<Option<DataVersion>>,
    /// The size that it has of the file.
    size: KernelValue<u64>,
    /// The clock at the end of the latest open. Replies to requests that began before it are older than what the open returned.
    opened: u64,
    /// Where the write that is in progress ends.
    writing_to: u64,
    /// The clock of the latest write of this mount that made the file longer.
    extended: u64,
}

impl KernelCache {
    /// Whether the reply to a request is older than what an open has returned meanwhile.
    pub(super) fn is_older(&self, request: KernelRequest) -> bool {
        request.begun < self.opened
    }

    /// The kernel gets attributes, which it keeps if `is_kept`.
    pub(super) fn attributes_sent(&mut self, found: &FileAttributes, is_kept: bool, request: KernelRequest, now: u64) {
        let is_writing = self.writing_to != 0;
        self.size.send(found.size, request, now, is_writing);
        self.attributes.send(is_kept.then(|| version_of(found)), request, now, is_writing);
    }

    /// The kernel is about to drop the attributes, for this request.
    pub(super) fn dropped(&mut self, request: KernelRequest, now: u64) {
        self.attributes.set(None, request, now);
        self.attributes.settle(request, now);
        self.size.settle(request, now);
    }

    /// This mount has truncated the file by opening it.
    pub(super) fn truncated(&mut self, request: KernelRequest, now: u64) {
        self.size.set(0, request, now);
        self.attributes.touch(request, now);
    }

    /// This mount writes up to this byte.
    pub(super) fn writing(&mut self, end: u64, request: KernelRequest, now: u64) {
        self.writing_to = end;
        self.size.touch(request, now);
        self.attributes.touch(request, now);
    }

    /// This mount has made the file reach to this byte at least, or has tried to write it if that is 0.
    pub(super) fn extended(&mut self, end: u64, request: KernelRequest, now: u64) {
        self.writing_to = 0;
        self.size.touch(request, now);
        self.attributes.touch(request, now);
        // If the kernel had another size, it has that one or the end now.
        self.size.other = self.size.other.map(|_| now);
        if end > self.size.latest {
            // The kernel takes the end for the size if it has a smaller one.
            (self.size.latest, self.extended) = (end, now);
        }
    }

    /// A read has found the end of the file at this byte.
    pub(super) fn ended(&mut self, end: u64, now: u64) {
        if end < self.size.latest {
            self.size.doubt(now);
        }
    }

    /// The file was made and opened by a request, or was there and was opened. Returns the request as one that began just now if its attributes are
    /// the newest.
    pub(super) fn created(
        &mut self,
        found: &FileAttributes,
        is_settled: bool,
        caches: bool,
        request: KernelRequest,
        now: u64,
    ) -> KernelRequest {
        let is_latest = !self.is_older(request);
        self.opened(found, is_settled, caches, request, now);
        // The kernel drops no attributes of a reply to this request.
        self.size.set(found.size, request, now);
        if is_latest { KernelRequest { begun: now, ..request } } else { request }
    }

    /// The file is opened by a request, and the server had these attributes of it. Returns what the kernel has, which is about to drop the attributes
    /// if it has others. The kernel asks for the size each time unless it `caches`.
    pub(super) fn opened(
        &mut self,
        found: &FileAttributes,
        is_settled: bool,
        caches: bool,
        request: KernelRequest,
        now: u64,
    ) -> KernelKnows {
        let version = version_of(found);
        self.opened = now;
        // Data that may change without a change of its times is not kept.
        let data = std::mem::replace(&mut self.data, is_settled.then_some(version));
        let size = self.has_size(found.size, request) || !caches;
        if !size {
            // This open is refused, so the kernel does not hear that it must drop the data.
            self.data = None;
        }
        let sent = &self.attributes;
        // Older replies must not come between when the kernel asks for the size again.
        let attributes = size && sent.is_certain() && sent.latest.is_none_or(|latest| latest == version);
        if !attributes {
            self.dropped(request, now);
        }
        KernelKnows { data: data == Some(version), attributes, size }
    }

    /// Whether the kernel has the size that the server had during this request, or takes a newer one for it.
    fn has_size(&self, found: u64, request: KernelRequest) -> bool {
        let size = self.size.latest;
        let is_extended_since = size > found && self.extended > request.begun;
        // When a write has its reply, the kernel takes its end for the end of the file.
        self.size.is_certain() && (size == found || self.writing_to == found || is_extended_since)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tree::RemoteTree;
    use super::super::tree::tests::{FIRST, NEVER, SECOND, pass, send, tree_with_file};
    use super::*;

    #[test]
    fn reply_older_than_an_open_is_not_kept() {
        let (mut tree, number, before) = tree_with_file();
        let request = tree.begin(1);
        let after = FileAttributes { size: 200, ..before };
        let knows = KernelKnows { data: false, attributes: false, size: false };
        assert_eq!(tree.opened(number, &after, true, FIRST), knows);
        assert_eq!(send(&mut tree, number, None, &before, request), Duration::ZERO);
        let request = tree.begin(1);
        assert_eq!(send(&mut tree, number, None, &after, request), SECOND);
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
        let (mut tree, number, before) = tree_with_file();
        tree.opened(number, &before, true, FIRST);
        let after = FileAttributes { size: 200, ..before };
        assert!(!tree.opened(number, &after, true, FIRST).size, "this open is refused");
        let request = tree.begin(1);
        send(&mut tree, number, Some(b"a"), &after, request);
        let knows = KernelKnows { data: false, attributes: true, size: true };
        assert_eq!(tree.opened(number, &after, true, FIRST), knows);
    }

    #[test]
    fn replies_that_kernel_may_drop_leave_its_caches_unknown() {
        let unknown = |knows: KernelKnows| !knows.attributes && !knows.size;
        for thread in [0, 2] {
            let (mut tree, number, before) = tree_with_file();
            let after = FileAttributes { size: 200, ..before };
            // Another thread has asked before or after the kernel got the first reply, and gets another size.
            let request = tree.begin(thread);
            send(&mut tree, number, None, &after, request);
            assert!(unknown(tree.opened(number, &after, true, request)), "thread {thread}");
            assert!(!tree.opened(number, &after, true, request).size);
            // The kernel has dropped its attributes for this thread, so the next reply to the same one is in order.
            let request = tree.begin(thread);
            send(&mut tree, number, None, &after, request);
            assert_eq!(tree.opened(number, &after, true, request).size, thread != 0);
            // Any reply is that comes long after the others.
            pass(&mut tree, SLACK);
            let request = tree.begin(3);
            send(&mut tree, number, None, &after, request);
            let knows = tree.opened(number, &after, true, request);
            assert!(knows.attributes && knows.size, "thread {thread}");
        }
        // A request that began before an earlier reply returns long afterwards.
        let (mut tree, number, before) = tree_with_file();
        let (request, after) = (tree.begin(2), FileAttributes { size: 200, ..before });
        pass(&mut tree, SLACK * 2);
        send(&mut tree, number, None, &after, request);
        assert!(unknown(tree.opened(number, &after, true, request)));
    }

    #[test]
    fn ordered_and_equal_replies_leave_caches_known() {
        let (mut tree, number, before) = tree_with_file();
        let after = FileAttributes { size: 200, ..before };
        let is_known = |tree: &mut RemoteTree, found: &FileAttributes| {
            let request = tree.begin(9);
            let knows = tree.opened(number, found, true, request);
            knows.attributes && knows.size
        };
        // One thread, then another one with an equal reply, then a third one long afterwards.
        let request = tree.begin(1);
        send(&mut tree, number, None, &after, request);
        assert!(is_known(&mut tree, &after));
        let request = tree.begin(2);
        send(&mut tree, number, None, &after, request);
        assert!(is_known(&mut tree, &after));
        pass(&mut tree, SLACK);
        let request = tree.begin(3);
        send(&mut tree, number, None, &before, request);
        assert!(is_known(&mut tree, &before));
        // A thread goes on with a write. The kernel drops what another one asked for meanwhile.
        let request = tree.begin(3);
        tree.writing(number, 300, request);
        pass(&mut tree, SLACK);
        let other = tree.begin(2);
        send(&mut tree, number, None, &after, other);
        tree.extended(number, 300, request);
        let written = FileAttributes { size: 300, ..before };
        assert!(!tree.opened(number, &written, true, request).size);
    }

    #[test]
    fn reply_older_than_a_lock_leaves_the_size_unknown() {
        let (mut tree, number, before) = tree_with_file();
        let request = tree.begin(1);
        let lock = tree.begin(2);
        tree.dropped(number, lock);
        let after = FileAttributes { size: 200, ..before };
        send(&mut tree, number, None, &after, request);
        assert!(!tree.opened(number, &after, true, NEVER).size, "the kernel has dropped the reply");
    }

    #[test]
    fn short_read_before_the_recorded_end_makes_the_size_unknown() {
        let (mut tree, number, before) = tree_with_file();
        tree.ended(number, 100);
        assert!(tree.opened(number, &before, true, NEVER).size);
        tree.ended(number, 99);
        assert!(!tree.opened(number, &before, true, NEVER).size, "the kernel may have 99");
    }

    #[test]
    fn size_that_this_mount_has_given_is_known() {
        let (mut tree, number, before) = tree_with_file();
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
}
