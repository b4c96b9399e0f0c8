//! One exported directory, and the sessions that use it.
//!
//! The server cannot leave the directory. A session begins with a descriptor of the directory itself, and every other descriptor comes from one
//! that it has, by a single name that is neither `.` nor `..` (`EntryName`), with `openat2` and `RESOLVE_BENEATH`,
//! `RESOLVE_NO_MAGICLINKS`, `RESOLVE_NO_XDEV` and `O_NOFOLLOW`. No path of a client's reaches the kernel, and the server follows no link.

mod actor;
mod data;
mod directory;
mod gate;
mod locks;
mod node;
mod session;
mod tables;

pub use actor::Squash;
pub use gate::RunningRequest;
pub use session::ExportSession;
pub use tables::SessionLimits;

use crate::mutex::lock;
use crate::places::{UserPlaces, share_of_user};
use crate::wire::{FileAttributes, FileTime};
use partywall::{PeerInfo, User};
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{AtFlags, Mode, OFlags, StatxFlags, statx};
use rustix::io::Errno;
use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// `S_IFMT`.
pub(crate) const KIND: u32 = 0o170_000;
/// `S_IFDIR`.
pub(crate) const DIRECTORY: u32 = 0o040_000;
/// `S_IFREG`.
pub(crate) const REGULAR: u32 = 0o100_000;
/// `S_IFLNK`.
pub(crate) const SYMLINK: u32 = 0o120_000;

/// The rights and limits of an export.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct ExportOptions {
    /// No client may change anything.
    pub read_only: bool,
    /// The users that clients may act as, if the server runs as root.
    pub squash: Squash,
    /// The limits of one session.
    pub limits: SessionLimits,
    /// The most sessions at a time; 0 is 256. All peers of one user may have a quarter of them.
    pub sessions: usize,
    /// Whether sessions can be used by calls, which the welcome announces.
    pub has_calls: bool,
}

/// A directory that clients can use.
///
/// ```
/// use partywall_fs::export::{Export, ExportOptions};
/// use partywall_fs::wire::{EntryName, FileEntry, FileRequest, ROOT, value_of};
///
/// # let folder = tempfile::tempdir()?;
/// std::fs::write(folder.path().join("greeting"), "hello")?;
/// let export = Export::open(folder.path(), ExportOptions::default())?;
/// let session = export.begin(None)?;
/// let request = FileRequest::Lookup { parent: ROOT, name: EntryName::new(b"greeting")? };
/// let reply = session.execute(1000, 1000, request)?;
/// assert_eq!(value_of::<FileEntry>(&reply)?.attributes.size, 5);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Export {
    root: OwnedFd,
    options: ExportOptions,
    sessions: Mutex<HashMap<u64, Arc<ExportSession>>>,
    /// Threads of streams beyond the first of each.
    threads: Arc<UserPlaces>,
}

/// The most threads of all streams beyond the first of each. A user may have a quarter of them. Each has memory for one request and one reply.
const MOST_FURTHER_THREADS: usize = 256;
/// Those of all unverified clients, which so leave threads to the users.
const MOST_UNVERIFIED_THREADS: usize = MOST_FURTHER_THREADS / 2;

impl Export {
    /// Opens the directory at `path`, which may be reached by symbolic links.
    ///
    /// # Errors
    /// The system's, if there is no directory.
    pub fn open(path: &Path, options: ExportOptions) -> Result<Arc<Self>, Errno> {
        let root = rustix::fs::open(path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        let threads = UserPlaces::new(MOST_FURTHER_THREADS, MOST_UNVERIFIED_THREADS);
        Ok(Arc::new(Self { root, options, sessions: Mutex::default(), threads }))
    }

    /// Begins a session for a client: `peer` is the identity that the broker reports, `None` for an unverified client. A peer that does
    /// not run
    /// where the broker does has no user: its uid may be that of another user, and root of a container is not the host's.
    ///
    /// # Errors
    /// `EUSERS` if there are as many sessions as there may be, of all or of this user; `EMFILE` if the server has no descriptors left.
    pub fn begin(self: &Arc<Self>, peer: Option<&PeerInfo>) -> Result<Arc<ExportSession>, Errno> {
        let user = peer.and_then(PeerInfo::certain_user);
        let root = self.root.try_clone().map_err(|_| Errno::MFILE)?;
        let most = if self.options.sessions == 0 { 256 } else { self.options.sessions };
        let mut sessions = lock(&self.sessions);
        let peer_key = peer.map(peer_key);
        let of_user = |session: &&Arc<ExportSession>| user_of(session.peer) == user_of(peer_key);
        if sessions.len() >= most
            || (peer.is_some() && sessions.values().filter(of_user).count() >= share_of_user(most))
        {
            return Err(Errno::USERS);
        }
        let key = loop {
            let mut key = [0; 8];
            rustix::rand::getrandom(&mut key, rustix::rand::GetRandomFlags::empty())?;
            let key = u64::from_ne_bytes(key);
            if key != 0 && !sessions.contains_key(&key) {
                break key;
            }
        };
        let session = Arc::new(ExportSession::new(root, key, peer_key, user, &self.options)?);
        sessions.insert(key, Arc::clone(&session));
        Ok(session)
    }

    /// The session that a call names, if the caller is the peer that began it.
    ///
    /// # Errors
    /// `ENOTCONN` if there is none, or if it is another peer's.
    pub fn session(&self, key: u64, peer: &PeerInfo) -> Result<Arc<ExportSession>, Errno> {
        let session = lock(&self.sessions).get(&key).cloned().ok_or(Errno::NOTCONN)?;
        if session.peer == Some(peer_key(peer)) { Ok(session) } else { Err(Errno::NOTCONN) }
    }

    /// Ends the session that a client had before, so that the client can repeat there what has no reply. Returns once nothing of that session is
    /// executed any more, or ever will be. A session that is not there has ended already.
    ///
    /// # Errors
    /// `EBUSY` if a request of that session is still executed after ten seconds; `EACCES` if the session is another user's.
    pub fn end_previous(&self, key: u64, peer: Option<&PeerInfo>) -> Result<(), Errno> {
        let Some(session) = lock(&self.sessions).get(&key).cloned() else { return Ok(()) };
        // The key is a secret of the client. Its domain may have joined again since.
        if user_of(session.peer) != user_of(peer.map(peer_key)) {
            return Err(Errno::ACCESS);
        }
        if !session.gate.close(Some(LONGEST_REQUEST)) {
            return Err(Errno::BUSY);
        }
        self.end(&session);
        Ok(())
    }

    /// Ends a session: lets no further request in, waits for those under way, closes the session's files and gives up its locks.
    pub fn end(&self, session: &ExportSession) {
        // The key stays until then, so that a next session waits as well.
        session.gate.close(None);
        lock(&self.sessions).remove(&session.key);
        session.close();
    }

    /// Where threads of streams beyond the first of each are counted.
    pub(crate) fn threads(&self) -> &Arc<UserPlaces> {
        &self.threads
    }

    /// How many sessions there are.
    pub fn sessions(&self) -> usize {
        lock(&self.sessions).len()
    }
}

/// How long the end of a session waits for the requests that are under way.
const LONGEST_REQUEST: Duration = Duration::from_secs(10);

/// The identity of a peer.
type PeerKey = (u32, u64, Option<User>, bool);

fn peer_key(peer: &PeerInfo) -> PeerKey {
    (peer.domain_id, peer.epoch, peer.user, peer.at_home)
}

/// The user that a peer's sessions are counted for. Root of a container is not counted as the host's.
fn user_of(peer: Option<PeerKey>) -> Option<(Option<User>, bool)> {
    peer.map(|(_, _, user, at_home)| (user, at_home))
}

/// The attributes of an open file, of whatever kind its descriptor is.
pub(crate) fn attributes(file: impl AsFd) -> Result<FileAttributes, Errno> {
    let wanted = StatxFlags::BASIC_STATS | StatxFlags::BTIME;
    let stat = statx(file, c"", AtFlags::EMPTY_PATH | AtFlags::SYMLINK_NOFOLLOW, wanted)?;
    let time = |time: rustix::fs::StatxTimestamp| FileTime { seconds: time.tv_sec, nanos: time.tv_nsec };
    let is_born = StatxFlags::from_bits_retain(stat.stx_mask).contains(StatxFlags::BTIME);
    Ok(FileAttributes {
        inode: stat.stx_ino,
        device: rustix::fs::makedev(stat.stx_dev_major, stat.stx_dev_minor),
        size: stat.stx_size,
        blocks: stat.stx_blocks,
        accessed: time(stat.stx_atime),
        modified: time(stat.stx_mtime),
        changed: time(stat.stx_ctime),
        born: if is_born { time(stat.stx_btime) } else { FileTime::default() },
        mode: u32::from(stat.stx_mode),
        links: stat.stx_nlink,
        uid: stat.stx_uid,
        gid: stat.stx_gid,
        block_size: stat.stx_blksize,
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;
    use partywall::Domain;
    use partywall_daemon::{Broker, Config};

    /// Two peers as a listener sees them: a program of this host, and a program that has joined by the socket for containers and so counts as another
    /// user.
    fn peers_of_two_users() -> [PeerInfo; 2] {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("containers")).unwrap();
        let uid = rustix::process::geteuid().as_raw();
        let policy = format!(
            "administrators = [{uid}]\nadministrators_in_containers = [{uid}]\n[[join]]\ndomain = '*'\nusers = [{uid}]\n[[connect]]\nfrom = '*'\nto = '*'\n"
        );
        let file = folder.path().join("policy.toml");
        std::fs::write(&file, policy).unwrap();
        let broker = Broker::start(&Config::new(folder.path().join("broker.sock")).policy_file(file)).unwrap();
        let files = Domain::builder().name("files").broker(broker.path()).join().unwrap();
        let mut listener = files.bind("data").unwrap();
        ["broker.sock", "containers/broker.sock"].map(|socket| {
            let client = Domain::builder().name(socket.replace(['/', '.'], "-"));
            let client = client.broker(folder.path().join(socket)).join().unwrap();
            let _stream = client.connect("files:data").unwrap();
            listener.accept().unwrap().1
        })
    }

    #[test]
    fn previous_session_of_another_user_is_refused_and_goes_on() {
        let folder = tempfile::tempdir().unwrap();
        let export = Export::open(folder.path(), ExportOptions::default()).unwrap();
        let [host, container] = peers_of_two_users();
        let session = export.begin(Some(&host)).unwrap();
        for other in [Some(&container), None] {
            assert_eq!(export.end_previous(session.key, other), Err(Errno::ACCESS));
        }
        assert!(export.session(session.key, &host).is_ok(), "the session goes on");
        assert_eq!(export.end_previous(session.key, Some(&host)), Ok(()));
        assert_eq!(export.sessions(), 0);
    }
}
