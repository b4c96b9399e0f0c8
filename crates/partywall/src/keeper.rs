//! The keeper: one thread per process that notices hang-ups, of links (a peer died) and of broker sessions.
//!
//! A half that waits sees its own link hang up. A half that writes into a ring with room does not look at its link for a long time. It
//! checks a flag instead, which the keeper sets. The keeper sleeps in `epoll_wait` and is woken by hang-ups, by the broker's notices to members
//! of groups, and by room in the socket of a session while a message waits for it. Doorbells do not wake it. It is started by the first channel
//! or domain, and never ends. After `fork` the child has no keeper, and shares the epoll set of its parent. So the child gets an error for each
//! request and each new channel ([`check_process`]).

use crate::{Error, Result};
use rustix::event::epoll;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// The action when a watched descriptor hangs up.
enum OnHangUp {
    /// Raise this flag.
    Flag(Arc<AtomicBool>),
    /// Run this whenever something has come, or there may be room, and a last time, with `true`, on hang-up. It must not block.
    Notify(Arc<dyn Fn(bool) + Send + Sync>),
    /// Run `ended` on hang-up, and `room` when there may be room, while that is asked for ([`HangUpWatch::await_room`]). Neither may block.
    Session { ended: Box<dyn FnOnce() + Send>, room: Arc<dyn Fn() + Send + Sync> },
}

impl OnHangUp {
    /// The events to ask for. Hang-ups are always reported, and edge-triggered only once.
    fn input(&self) -> epoll::EventFlags {
        match self {
            Self::Notify(_) => epoll::EventFlags::IN,
            Self::Flag(_) | Self::Session { .. } => epoll::EventFlags::empty(),
        }
    }
}

struct HangUpKeeper {
    epoll: OwnedFd,
    next: AtomicU64,
    watched: Mutex<HashMap<u64, OnHangUp>>,
}

/// Watches one descriptor as long as it lives.
pub(crate) struct HangUpWatch {
    id: u64,
    /// The events that the keeper's set reports of the descriptor besides hang-ups, while no room is awaited.
    input: epoll::EventFlags,
    flag: Option<Arc<AtomicBool>>,
}

impl HangUpWatch {
    fn new(fd: BorrowedFd<'_>, what: OnHangUp) -> Result<Self> {
        let flag = match &what {
            OnHangUp::Flag(flag) => Some(Arc::clone(flag)),
            _ => None,
        };
        let input = what.input();
        Ok(Self { id: keeper()?.add(fd, what)?, input, flag })
    }

    /// Raises a flag, to be read by [`HangUpWatch::has_hung_up`].
    pub(crate) fn link(fd: BorrowedFd<'_>) -> Result<Self> {
        Self::new(fd, OnHangUp::Flag(Arc::default()))
    }

    /// Runs `ended` once when a session hangs up, and `room` when its socket may have room again ([`HangUpWatch::await_room`]).
    pub(crate) fn session(
        fd: BorrowedFd<'_>,
        ended: impl FnOnce() + Send + 'static,
        room: impl Fn() + Send + Sync + 'static,
    ) -> Result<Self> {
        Self::new(fd, OnHangUp::Session { ended: Box::new(ended), room: Arc::new(room) })
    }

    /// Runs `call` whenever something has come or, after [`HangUpWatch::await_room`], there may be room. Runs it a last time, with `true`, on
    /// hang-up.
    pub(crate) fn notify(fd: BorrowedFd<'_>, call: impl Fn(bool) + Send + Sync + 'static) -> Result<Self> {
        Self::new(fd, OnHangUp::Notify(Arc::new(call)))
    }

    /// Switches the reports of room in a session's socket on or off. Room that is there already is reported too. While they are on, the keeper
    /// wakes up for packets that the broker reads, so they are on only while a message waits.
    pub(crate) fn await_room(&self, fd: BorrowedFd<'_>, is_wanted: bool) {
        if let Ok(keeper) = keeper() {
            let output = if is_wanted { epoll::EventFlags::OUT } else { epoll::EventFlags::empty() };
            let events = epoll::EventFlags::ET | self.input | output;
            // It fails only for lack of kernel memory. Then the next request sends what waits.
            let _ = epoll::modify(&keeper.epoll, fd, epoll::EventData::new_u64(self.id), events);
        }
    }

    /// Takes the watched descriptor out of the keeper's set. Needed where the descriptor is a duplicate: the kernel takes a descriptor out by
    /// itself only when all its duplicates are closed.
    pub(crate) fn leave(&self, fd: BorrowedFd<'_>) {
        if let Ok(keeper) = keeper() {
            // It fails only if the descriptor is not in the set, which is as good.
            let _ = epoll::delete(&keeper.epoll, fd);
        }
    }

    /// Whether the link has hung up.
    #[inline]
    pub(crate) fn has_hung_up(&self) -> bool {
        self.flag.as_ref().is_some_and(|flag| flag.load(Ordering::Relaxed))
    }
}

impl Drop for HangUpWatch {
    fn drop(&mut self) {
        // The descriptor leaves the epoll set by being closed, which its owner does next, or has left it (`HangUpWatch::leave`).
        if let Ok(keeper) = keeper() {
            // Dropped after the lock is released: a call may own what is watched, too.
            let removed = keeper.watched().remove(&self.id);
            drop(removed);
        }
    }
}

impl fmt::Debug for HangUpWatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Watch({})", self.id)
    }
}

impl HangUpKeeper {
    fn start() -> std::io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        std::thread::Builder::new().name("partywall-keeper".into()).spawn(run)?;
        Ok(Self { epoll, next: AtomicU64::new(1), watched: Mutex::default() })
    }

    fn watched(&self) -> MutexGuard<'_, HashMap<u64, OnHangUp>> {
        // A thread that panicked while holding it left a consistent map: entries are inserted and removed whole.
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, fd: BorrowedFd<'_>, what: OnHangUp) -> Result<u64> {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let input = what.input();
        self.watched().insert(id, what);
        let added = epoll::add(&self.epoll, fd, epoll::EventData::new_u64(id), epoll::EventFlags::ET | input);
        if let Err(e) = added {
            self.watched().remove(&id);
            return Err(Error::system("watch a link", e));
        }
        Ok(id)
    }
}

/// The process that has started the keeper or is about to; 0 if there is none.
static STARTED_IN: AtomicU32 = AtomicU32::new(0);

/// Fails in the child of a process that had used the library before it forked: the child would talk by its parent's sessions, and enter its links
/// into the set of its parent's keeper.
pub(crate) fn check_process() -> Result<()> {
    let started_in = STARTED_IN.load(Ordering::Relaxed);
    if started_in == 0 || started_in == std::process::id() {
        return Ok(());
    }
    let why = "its parent had joined before the fork; fork before the first join, or call exec in the child";
    Err(Error::system(
        "use Partywall in the child of a fork",
        std::io::Error::new(std::io::ErrorKind::Unsupported, why),
    ))
}

/// The keeper, which is started if it has not been. A process that has no descriptor or thread left for it may have one later, so the next call
/// tries again.
fn keeper() -> Result<&'static HangUpKeeper> {
    static KEEPER: OnceLock<HangUpKeeper> = OnceLock::new();
    static STARTING: Mutex<()> = Mutex::new(());
    check_process()?;
    if let Some(keeper) = KEEPER.get() {
        return Ok(keeper);
    }
    // Before the lock is taken and anything is made: a child that another thread forks meanwhile must not wait for that lock.
    STARTED_IN.store(std::process::id(), Ordering::Relaxed);
    let _starting = STARTING.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(keeper) = KEEPER.get() {
        return Ok(keeper);
    }
    // A thread that held the lock before may have failed.
    STARTED_IN.store(std::process::id(), Ordering::Relaxed);
    // The keeper's thread asks for the keeper, and waits for the lock until the keeper is there.
    match HangUpKeeper::start() {
        Ok(started) => Ok(KEEPER.get_or_init(|| started)),
        Err(error) => {
            STARTED_IN.store(0, Ordering::Relaxed);
            Err(Error::system("start the keeper thread", error))
        }
    }
}

fn run() {
    let Ok(keeper) = keeper() else { return };
    let mut events = Vec::with_capacity(64);
    loop {
        events.clear();
        match epoll::wait(keeper.epoll.as_fd(), rustix::buffer::spare_capacity(&mut events), None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            // Nothing else is possible with a valid set and buffer; without the keeper, waits still see hang-ups.
            Err(_) => return,
        }
        for event in &events {
            let flags = event.flags;
            if !flags.intersects(epoll::EventFlags::HUP | epoll::EventFlags::ERR) {
                // No call is made under the lock.
                let (told, room) = match keeper.watched().get(&{ event.data }.u64()) {
                    Some(OnHangUp::Notify(call)) => (Some(Arc::clone(call)), None),
                    Some(OnHangUp::Session { room, .. }) => (None, Some(Arc::clone(room))),
                    _ => (None, None),
                };
                told.into_iter().for_each(|call| call(false));
                room.into_iter().for_each(|call| call());
                continue;
            }
            let what = keeper.watched().remove(&{ event.data }.u64());
            match what {
                Some(OnHangUp::Flag(flag)) => flag.store(true, Ordering::Relaxed),
                Some(OnHangUp::Session { ended, .. }) => ended(),
                Some(OnHangUp::Notify(call)) => call(true),
                // The channel was dropped in the meantime.
                None => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    fn pair() -> (OwnedFd, OwnedFd) {
        let (near, far) = std::os::unix::net::UnixStream::pair().unwrap();
        (near.into(), far.into())
    }

    /// The processor time that the keeper has used so far.
    fn time_of_keeper() -> Duration {
        let mut tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten().map(|task| task.path());
        let is_keeper = |name: &str| name.trim() == "partywall-keepe";
        let keeper = tasks.find(|task| std::fs::read_to_string(task.join("comm")).is_ok_and(|name| is_keeper(&name)));
        let times = std::fs::read_to_string(keeper.unwrap().join("schedstat")).unwrap();
        Duration::from_nanos(times.split_whitespace().next().unwrap().parse().unwrap())
    }

    /// A peer may have a copy of this side's end of a link. The end then stays in the keeper's set after this side has closed it.
    #[test]
    fn hang_up_of_kept_copy_after_drop_leaves_keeper_quiet() {
        let called = Arc::new(AtomicBool::new(false));
        let raise = Arc::clone(&called);
        let (near, far) = pair();
        let copy = near.try_clone().unwrap();
        let watch = HangUpWatch::session(near.as_fd(), move || raise.store(true, Ordering::Relaxed), || {}).unwrap();
        drop((watch, near, far));
        // When the keeper reports a later hang-up, it has seen the earlier one.
        let (near, far) = pair();
        let watch = HangUpWatch::link(near.as_fd()).unwrap();
        drop(far);
        let start = Instant::now();
        while !watch.has_hung_up() {
            assert!(start.elapsed() < Duration::from_secs(60), "the keeper reports nothing");
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(!called.load(Ordering::Relaxed), "the watch was dropped before the hang-up");
        let (start, before) = (Instant::now(), time_of_keeper());
        std::thread::sleep(Duration::from_millis(500));
        let used = time_of_keeper() - before;
        // A keeper that loops would use most of that time, which is longer on a loaded machine. Other tests give it little to do.
        assert!(used < start.elapsed() / 5, "the keeper does not sleep: it has run for {used:?}");
        drop(copy);
    }
}
