//! The requests of one stream, executed by several threads, so that a request that waits for a disk delays no other (protocol N3.1).
//!
//! ```text
//!   thread 1   reads 7 | executes 7, which waits for the disk ............... | replies to 7 | waits for its turn
//!   thread 2           | reads 8 | executes 8 | replies to 8 | waits for its turn . | reads 10
//!   thread 3                     | reads 9 | executes 9 and replies, without a wait | ...
//! ```
//! One thread reads. Before it executes something that can wait, it hands the reader over to a thread that is free. If there is none, and no further
//! thread may start, the thread that is free first takes the reader. Until then the stream waits, and so does a client that sends more.
//!
//! Each thread has the body and the reply of one request, so the number of threads bounds the memory. Long requests, which have small bodies, use
//! half of the threads at most. Further ones are kept, up to a limit, and so leave threads to the short ones.
//!
//! A client that needs an order waits for the reply to the first request before it sends the second one, and so does the kernel: it has a page
//! written before it writes it again, truncates the file or syncs it, and closes a file after its last request. So two requests that are both
//! without a reply may be executed in any order. *Forget* has no reply, but counts, so its order does not matter either. What does matter is a
//! request that the client has given up and that is executed late (`may_be_late` in `remote::link`). Those either change nothing, or give locks up.
//! So the requests about locks keep their order: `execute` gets the requests in the order of the stream, and ends its ordered part before it hands the
//! reader over.

use crate::frame::{REPLY_HEADER, ReplyHeader, RequestHeader};
use crate::mutex::lock;
use crate::places::{CountedUser, UserPlace, UserPlaces};
use crate::wire::FileRequest;
use rustix::io::Errno;
use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, Scope};
use std::time::{Duration, Instant};

/// Threads that execute the requests of one stream.
const MOST_THREADS: usize = 8;
/// Long requests of one stream that are executed at the same time.
pub(crate) const MOST_LONG: usize = MOST_THREADS / 2;
/// Long requests of one stream that wait until others have ended.
const MOST_KEPT: usize = 256;
/// The longest body of a long request that is kept.
const LONGEST_KEPT: usize = 64;
/// The longest that a further thread stays without being needed.
const LONGEST_IDLE: Duration = Duration::from_secs(10);

/// How a request has ended.
pub(crate) enum RequestEnd {
    /// The reply has been appended, or this error is the reply.
    Reply(Result<(), Errno>),
    /// It has no reply.
    NoReply,
    /// It was not executed, because the session has ended.
    SessionEnded,
}

/// Where the further threads of a stream are counted.
pub(crate) struct FurtherThreads<'a> {
    places: &'a Arc<UserPlaces>,
    user: CountedUser,
    longest_idle: Duration,
}

impl<'a> FurtherThreads<'a> {
    pub(crate) fn new(places: &'a Arc<UserPlaces>, user: CountedUser) -> Self {
        Self { places, user, longest_idle: LONGEST_IDLE }
    }
}

/// Executes a request and appends what it returns. It calls the last argument before it waits for anything.
pub(crate) trait Executes:
    Fn(&RequestHeader, &[u8], &mut Vec<u8>, &mut dyn FnMut()) -> RequestEnd + Sync
{
}
impl<F: Fn(&RequestHeader, &[u8], &mut Vec<u8>, &mut dyn FnMut()) -> RequestEnd + Sync> Executes for F {}

/// Executes the requests of a stream until it ends. Returns after the last request has ended. `ended` is called when
/// the stream has ended, with `true` if no more replies can be sent: it then ends the stream for a thread that reads.
///
/// # Errors
/// The stream's.
pub(crate) fn serve_stream<R: Read + Send, W: Write + Send>(
    reader: &mut R,
    writer: &mut W,
    further: FurtherThreads<'_>,
    ended: &(dyn Fn(bool) + Sync),
    execute: &impl Executes,
) -> io::Result<()> {
    let state = StreamState {
        reader: Some(reader),
        threads: 1,
        // This thread.
        idle: 1,
        needed: Instant::now(),
        long: 0,
        kept: VecDeque::new(),
        end: None,
    };
    let stream =
        RequestStream { state: Mutex::new(state), turn: Condvar::new(), writer: Mutex::new(writer), further, ended };
    std::thread::scope(|scope| stream.work_or_end(scope, execute, None));
    let end = lock(&stream.state).end.take();
    end.unwrap_or(Ok(()))
}

/// A stream of requests, and the threads that execute them.
struct RequestStream<'a, R, W> {
    state: Mutex<StreamState<'a, R>>,
    turn: Condvar,
    writer: Mutex<&'a mut W>,
    further: FurtherThreads<'a>,
    ended: &'a (dyn Fn(bool) + Sync),
}

struct StreamState<'a, R> {
    /// `None` while a thread has it.
    reader: Option<&'a mut R>,
    threads: usize,
    /// Threads that wait for the reader, with those that have just been started.
    idle: usize,
    /// When all threads were needed last.
    needed: Instant,
    /// Long requests that are executed.
    long: usize,
    kept: VecDeque<(RequestHeader, Vec<u8>)>,
    end: Option<io::Result<()>>,
}

/// What becomes of a long request.
enum LongRequest {
    Executed,
    Kept,
}

impl<'a, R: Read + Send, W: Write + Send> RequestStream<'a, R, W> {
    /// As [`RequestStream::work`]. A panic ends the stream: its thread may have had the reader, and its request gets no reply.
    fn work_or_end<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        execute: &'scope impl Executes,
        place: Option<UserPlace>,
    ) {
        let is_further = place.is_some();
        if catch_unwind(AssertUnwindSafe(|| self.work(scope, execute, is_further))).is_err() {
            self.end(Err(io::Error::other("a request of the client has panicked")), true);
        }
    }

    /// Reads and executes requests until the stream ends, or until there is nothing to do for a further thread.
    fn work<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>, execute: &'scope impl Executes, is_further: bool) {
        let (mut body, mut reply) = (Vec::new(), Vec::new());
        let mut reader = self.wait_for_turn(lock(&self.state), is_further);
        while let Some(from) = &mut reader {
            let mut header = match RequestHeader::read(from, &mut body) {
                Ok(Some(header)) => header,
                Ok(None) => return self.end(Ok(()), false),
                Err(e) => return self.end(Err(e), false),
            };
            if lock(&self.state).end.is_some() {
                return;
            }
            let is_long = FileRequest::is_long(header.number) && body.len() <= LONGEST_KEPT;
            if is_long && matches!(self.begin_long(header, &body), LongRequest::Kept) {
                continue;
            }
            loop {
                let mut hand_over = || self.hand_over(scope, execute, &mut reader);
                reply.clear();
                reply.resize(REPLY_HEADER, 0);
                let end = execute(&header, &body, &mut reply, &mut hand_over);
                if let Err(e) = self.reply(header.id, end, &mut reply) {
                    self.end(e, true);
                }
                match is_long.then(|| self.next_long()).flatten() {
                    Some(kept) => (header, body) = kept,
                    None => break,
                }
            }
            if reader.is_none() {
                let mut state = lock(&self.state);
                state.idle += 1;
                reader = self.wait_for_turn(state, is_further);
            }
        }
    }

    /// Waits for the reader, as one of the idle threads. Returns `None` if this thread is to end.
    fn wait_for_turn(&self, mut state: MutexGuard<'_, StreamState<'a, R>>, is_further: bool) -> Option<&'a mut R> {
        let longest_idle = self.further.longest_idle;
        let mut has_waited = false;
        loop {
            let reader = if state.end.is_some() { None } else { state.reader.take() };
            // A few requests give each thread its turn before it has waited for long.
            let is_surplus =
                |state: &StreamState<'a, R>| is_further && state.idle > 1 && state.needed.elapsed() >= longest_idle;
            if reader.is_some() || state.end.is_some() || has_waited || is_surplus(&state) {
                state.idle -= 1;
                state.threads -= usize::from(reader.is_none());
                return reader;
            }
            if is_further {
                let waited = self.turn.wait_timeout(state, longest_idle).unwrap_or_else(PoisonError::into_inner);
                (state, has_waited) = (waited.0, waited.1.timed_out());
            } else {
                state = self.turn.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    /// Gives the reader to a thread that is free, if there is one or one more may start, and else to the one that is free first.
    fn hand_over<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        execute: &'scope impl Executes,
        reader: &mut Option<&'a mut R>,
    ) {
        let Some(given) = reader.take() else { return };
        let mut state = lock(&self.state);
        if state.idle == 0 {
            state.needed = Instant::now();
        }
        let is_awaited = state.idle > 0 || self.start_thread(&mut state, scope, execute);
        state.reader = Some(given);
        drop(state);
        if is_awaited {
            self.turn.notify_one();
        }
    }

    fn start_thread<'scope>(
        &'scope self,
        state: &mut StreamState<'a, R>,
        scope: &'scope Scope<'scope, '_>,
        execute: &'scope impl Executes,
    ) -> bool {
        if state.threads >= MOST_THREADS {
            return false;
        }
        let Some(place) = self.further.places.take(self.further.user) else { return false };
        let work = move || self.work_or_end(scope, execute, Some(place));
        if let Err(e) = Builder::new().name("pw-fs-request".into()).spawn_scoped(scope, work) {
            tracing::warn!(error = %e, "no further thread for the requests of a client");
            return false;
        }
        state.threads += 1;
        state.idle += 1;
        true
    }

    /// Begins a long request, or keeps it if there are as many as may be. Waits if as many are kept as may be.
    fn begin_long(&self, header: RequestHeader, body: &[u8]) -> LongRequest {
        let is_full = |state: &mut StreamState<'a, R>| state.kept.len() >= MOST_KEPT && state.end.is_none();
        let state = self.turn.wait_while(lock(&self.state), is_full);
        let mut state = state.unwrap_or_else(PoisonError::into_inner);
        if state.long < MOST_LONG {
            state.long += 1;
            return LongRequest::Executed;
        }
        state.kept.push_back((header, body.to_vec()));
        LongRequest::Kept
    }

    /// A long request has ended. Returns the next one.
    fn next_long(&self) -> Option<(RequestHeader, Vec<u8>)> {
        let mut state = lock(&self.state);
        // The end of the stream ends the session, so the client gets no reply to the others.
        let next = if state.end.is_some() { None } else { state.kept.pop_front() };
        state.long -= usize::from(next.is_none());
        drop(state);
        // A thread may wait for room among the kept ones.
        self.turn.notify_all();
        next
    }

    fn reply(&self, id: u32, end: RequestEnd, reply: &mut Vec<u8>) -> Result<(), io::Result<()>> {
        let outcome = match end {
            RequestEnd::Reply(outcome) => outcome,
            RequestEnd::NoReply => return Ok(()),
            RequestEnd::SessionEnded => return Err(Ok(())),
        };
        let errno = outcome.map_or_else(
            |e| {
                reply.truncate(REPLY_HEADER);
                e.raw_os_error()
            },
            |()| 0,
        );
        let header = ReplyHeader { len: (reply.len() - REPLY_HEADER) as u32, id, errno };
        reply[..REPLY_HEADER].copy_from_slice(&header.bytes());
        let mut writer = lock(&self.writer);
        writer.write_all(reply).and_then(|()| writer.flush()).map_err(Err)
    }

    /// The stream has ended. The threads end when they have replied to what they execute.
    fn end(&self, end: io::Result<()>, is_cut: bool) {
        lock(&self.state).end.get_or_insert(end);
        self.turn.notify_all();
        (self.ended)(is_cut);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;
    use std::os::unix::net::UnixStream;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    /// Only a guard against hanging.
    const GUARD: Duration = Duration::from_secs(30);
    const SYNC: u32 = 20;
    const LOOKUP: u32 = 2;

    /// A door that requests wait at, and a count of those that do.
    #[derive(Default)]
    struct RequestDoor {
        state: Mutex<(usize, bool)>,
        changed: Condvar,
    }

    impl RequestDoor {
        fn wait(&self) {
            let mut state = lock(&self.state);
            state.0 += 1;
            self.changed.notify_all();
            let waited = self.changed.wait_timeout_while(state, GUARD, |(_, is_open)| !*is_open).unwrap();
            assert!(!waited.1.timed_out(), "the door stays shut");
        }

        /// Returns how many wait as soon as these many do.
        fn waiting(&self, least: usize) -> usize {
            let waited =
                self.changed.wait_timeout_while(lock(&self.state), GUARD, |(count, _)| *count < least).unwrap();
            waited.0.0
        }

        fn open(&self) {
            lock(&self.state).1 = true;
            self.changed.notify_all();
        }
    }

    struct Client(UnixStream);

    impl Client {
        fn send(&mut self, id: u32, number: u32) {
            let header = RequestHeader { len: 0, id, number, uid: 0, gid: 0 };
            self.0.write_all(&header.bytes()).unwrap();
        }

        /// The number of the next reply.
        fn reply(&mut self) -> u32 {
            ReplyHeader::read(&mut self.0, &mut Vec::new()).unwrap().unwrap().id
        }

        fn replies(&mut self, count: usize) -> Vec<u32> {
            let mut ids: Vec<u32> = (0..count).map(|_| self.reply()).collect();
            ids.sort_unstable();
            ids
        }
    }

    /// Serves one client with this many further threads at most, and returns how the stream has ended. What `client` returns is dropped after that.
    fn serve<T>(places: usize, execute: &impl Executes, client: impl FnOnce(Client) -> T) -> io::Result<()> {
        let places = UserPlaces::new(places, places);
        serve_with(FurtherThreads::new(&places, None), execute, client)
    }

    fn serve_with<T>(
        further: FurtherThreads<'_>,
        execute: &impl Executes,
        client: impl FnOnce(Client) -> T,
    ) -> io::Result<()> {
        let (here, there) = UnixStream::pair().unwrap();
        here.set_read_timeout(Some(GUARD)).unwrap();
        there.set_read_timeout(Some(GUARD)).unwrap();
        let (mut reader, mut writer) = (there.try_clone().unwrap(), there.try_clone().unwrap());
        let ended = |is_cut| {
            if is_cut {
                there.shutdown(std::net::Shutdown::Both).unwrap();
            }
        };
        std::thread::scope(|scope| {
            let serving = scope.spawn(|| serve_stream(&mut reader, &mut writer, further, &ended, execute));
            let _kept = client(Client(here));
            serving.join().unwrap()
        })
    }

    #[test]
    fn sync_that_waits_delays_no_other_request() {
        let door = RequestDoor::default();
        let execute = |header: &RequestHeader, _: &[u8], _: &mut Vec<u8>, waits: &mut dyn FnMut()| {
            waits();
            if header.number == SYNC {
                door.wait();
            }
            RequestEnd::Reply(Ok(()))
        };
        let end = serve(MOST_THREADS, &execute, |mut client| {
            client.send(1, SYNC);
            for id in 2..100 {
                client.send(id, LOOKUP);
                assert_eq!(client.reply(), id);
            }
            door.open();
            assert_eq!(client.reply(), 1);
        });
        assert!(end.is_ok());
    }

    #[test]
    fn more_long_requests_than_threads_leave_room_for_others() {
        let door = RequestDoor::default();
        let execute = |header: &RequestHeader, _: &[u8], _: &mut Vec<u8>, waits: &mut dyn FnMut()| {
            waits();
            if header.number == SYNC {
                door.wait();
            }
            RequestEnd::Reply(Ok(()))
        };
        let end = serve(MOST_THREADS, &execute, |mut client| {
            let long = 1..=MOST_KEPT as u32;
            long.clone().for_each(|id| client.send(id, SYNC));
            client.send(9999, LOOKUP);
            assert_eq!(client.reply(), 9999);
            assert_eq!(door.waiting(MOST_LONG), MOST_LONG);
            door.open();
            assert_eq!(client.replies(MOST_KEPT), Vec::from_iter(long));
        });
        assert!(end.is_ok());
    }

    /// All requests wait. Returns the most that were executed at the same time.
    fn most_at_once(places: usize, expected: usize) -> usize {
        const REQUESTS: u32 = 64;
        let (door, running, most) = (RequestDoor::default(), AtomicUsize::new(0), AtomicUsize::new(0));
        let execute = |_: &RequestHeader, _: &[u8], _: &mut Vec<u8>, waits: &mut dyn FnMut()| {
            waits();
            most.fetch_max(running.fetch_add(1, Ordering::AcqRel) + 1, Ordering::AcqRel);
            door.wait();
            running.fetch_sub(1, Ordering::AcqRel);
            RequestEnd::Reply(Ok(()))
        };
        let end = serve(places, &execute, |mut client| {
            (1..=REQUESTS).for_each(|id| client.send(id, LOOKUP));
            door.waiting(expected);
            door.open();
            assert_eq!(client.replies(REQUESTS as usize), Vec::from_iter(1..=REQUESTS));
        });
        assert!(end.is_ok());
        most.into_inner()
    }

    #[test]
    fn requests_that_all_wait_use_the_most_threads_and_no_more() {
        assert_eq!(most_at_once(1000, MOST_THREADS), MOST_THREADS);
    }

    #[test]
    fn stream_without_further_threads_executes_in_order() {
        assert_eq!(most_at_once(0, 1), 1);
    }

    #[test]
    fn first_free_thread_reads_after_all_threads_were_busy() {
        const MOST: u32 = MOST_THREADS as u32;
        let (first, others) = (RequestDoor::default(), RequestDoor::default());
        let execute = |header: &RequestHeader, _: &[u8], _: &mut Vec<u8>, waits: &mut dyn FnMut()| {
            waits();
            match header.id {
                1 => first.wait(),
                id if id <= MOST => others.wait(),
                _ => {}
            }
            RequestEnd::Reply(Ok(()))
        };
        let end = serve(MOST_THREADS, &execute, |mut client| {
            (1..=MOST).for_each(|id| client.send(id, LOOKUP));
            assert_eq!((first.waiting(1), others.waiting(MOST_THREADS - 1)), (1, MOST_THREADS - 1));
            first.open();
            assert_eq!(client.reply(), 1);
            client.send(99, LOOKUP);
            assert_eq!(client.reply(), 99);
            others.open();
            assert_eq!(client.replies(MOST_THREADS - 1), Vec::from_iter(2..=MOST));
        });
        assert!(end.is_ok());
    }

    #[test]
    fn threads_that_light_traffic_does_not_need_end() {
        let (door, places) = (RequestDoor::default(), UserPlaces::new(MOST_THREADS, MOST_THREADS));
        let execute = |_: &RequestHeader, _: &[u8], _: &mut Vec<u8>, waits: &mut dyn FnMut()| {
            waits();
            door.wait();
            RequestEnd::Reply(Ok(()))
        };
        let mut further = FurtherThreads::new(&places, None);
        further.longest_idle = Duration::from_millis(200);
        let end = serve_with(further, &execute, |mut client| {
            (1..=MOST_THREADS as u32).for_each(|id| client.send(id, LOOKUP));
            door.waiting(MOST_THREADS);
            door.open();
            client.replies(MOST_THREADS);
            let begun = Instant::now();
            while places.taken() > 1 {
                assert!(begun.elapsed() < GUARD, "{} further threads stay", places.taken());
                client.send(99, LOOKUP);
                client.reply();
                std::thread::sleep(Duration::from_millis(5));
            }
        });
        assert!(end.is_ok());
    }

    #[test]
    fn panic_of_a_request_ends_the_stream() {
        for hands_over in [false, true] {
            let execute = |_: &RequestHeader, _: &[u8], _: &mut Vec<u8>, waits: &mut dyn FnMut()| {
                if hands_over {
                    waits();
                }
                panic!("this test makes a request panic");
            };
            let end = serve(MOST_THREADS, &execute, |mut client| {
                client.send(1, LOOKUP);
                assert_eq!(client.0.read(&mut [0]).unwrap(), 0);
            });
            assert_eq!(end.map_err(|e| e.kind()), Err(io::ErrorKind::Other));
        }
    }

    #[test]
    fn request_that_keeps_the_reader_precedes_the_next() {
        let (is_first_done, was_early) = (AtomicBool::new(false), AtomicBool::new(false));
        let execute = |header: &RequestHeader, _: &[u8], _: &mut Vec<u8>, waits: &mut dyn FnMut()| {
            if header.id % 2 == 1 {
                is_first_done.store(false, Ordering::Release);
                std::thread::yield_now();
                is_first_done.store(true, Ordering::Release);
                waits();
            } else if !is_first_done.load(Ordering::Acquire) {
                was_early.store(true, Ordering::Release);
            }
            RequestEnd::Reply(Ok(()))
        };
        let end = serve(MOST_THREADS, &execute, |mut client| {
            (1..=200).for_each(|id| client.send(id, LOOKUP));
            assert_eq!(client.replies(200), Vec::from_iter(1..=200));
        });
        assert!(end.is_ok() && !was_early.into_inner(), "a request was executed before an earlier one had its turn");
    }

    #[test]
    fn kept_requests_are_dropped_at_the_end_of_the_stream() {
        let (mut writer, places) = (io::sink(), UserPlaces::new(0, 0));
        let stream = RequestStream::<io::Empty, _> {
            state: Mutex::new(StreamState {
                reader: None,
                threads: 1,
                idle: 0,
                needed: Instant::now(),
                long: 0,
                kept: VecDeque::new(),
                end: None,
            }),
            turn: Condvar::new(),
            writer: Mutex::new(&mut writer),
            further: FurtherThreads::new(&places, None),
            ended: &|_| (),
        };
        let sync = |id| RequestHeader { len: 0, id, number: SYNC, uid: 0, gid: 0 };
        for id in 1..=MOST_LONG as u32 {
            assert!(matches!(stream.begin_long(sync(id), &[]), LongRequest::Executed));
        }
        assert!(matches!(stream.begin_long(sync(8), &[]), LongRequest::Kept));
        assert!(matches!(stream.begin_long(sync(9), &[]), LongRequest::Kept));
        assert_eq!(stream.next_long().map(|(header, _)| header.id), Some(8));
        stream.end(Ok(()), false);
        assert!(stream.next_long().is_none());
    }

    #[test]
    fn client_that_takes_no_replies_ends_the_stream() {
        let execute = |_: &RequestHeader, _: &[u8], _: &mut Vec<u8>, waits: &mut dyn FnMut()| {
            waits();
            RequestEnd::Reply(Ok(()))
        };
        let end = serve(MOST_THREADS, &execute, |mut client| {
            client.0.shutdown(std::net::Shutdown::Read).unwrap();
            client.send(1, LOOKUP);
            client
        });
        assert_eq!(end.map_err(|e| e.kind()), Err(io::ErrorKind::BrokenPipe));
    }

    #[test]
    fn request_after_the_end_of_the_session_ends_the_stream() {
        let execute = |_: &RequestHeader, _: &[u8], _: &mut Vec<u8>, _: &mut dyn FnMut()| RequestEnd::SessionEnded;
        let end = serve(MOST_THREADS, &execute, |mut client| {
            client.send(1, LOOKUP);
            assert_eq!(client.0.read(&mut [0]).unwrap(), 0);
        });
        assert!(end.is_ok());
    }
}
