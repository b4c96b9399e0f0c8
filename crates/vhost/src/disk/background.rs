//! A back end that `partywall blk attach --from` starts for an exported disk, and that `detach` ends. It lives on without the command.

use super::control::{self, DiskControl, DiskUse};
use crate::attach::hash;
use crate::{VhostError, line};
use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use std::fs::{File, Metadata};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The longest that a back end takes to serve: an exporter may be away for as long.
const START: Duration = Duration::from_secs(60);
/// How long a machine that has ended may seem to use its disk.
const GOODBYE: Duration = Duration::from_millis(400);

/// The socket of the back end of the disk `DOMAIN:NAME`, in the folder of such back ends.
///
/// # Errors
/// The folder is unknown, or cannot be made.
pub fn socket(target: &str) -> Result<PathBuf, VhostError> {
    let all = crate::folder::of_user(crate::folder::DISKS);
    let all = all.ok_or_else(|| VhostError::Refused("XDG_RUNTIME_DIR is not set; use --socket".into()))?;
    let made = std::fs::DirBuilder::new().recursive(true).create(&all);
    made.map_err(VhostError::file_error("make", &all))?;
    let fits = |c: char| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '_' };
    let shown: String = target.chars().take(48).map(fits).collect();
    Ok(all.join(format!("{shown}-{:08x}.sock", hash([target.as_bytes()]))))
}

/// Starts a back end with these words, unless one serves `user` at the socket. Returns once it does. A back end for another user, whose
/// machine has ended without `detach`, is ended first.
///
/// # Errors
/// It ends at once: the error has what it said. Or another user's machine has the disk, or what serves at the socket gives no clear answer.
pub fn start(program: &Path, words: &[&str], socket: &Path, user: u32) -> Result<(), VhostError> {
    let _alone = lock(socket)?;
    match control::ask(socket, &DiskControl::Show) {
        Ok(_) if is_of(socket, owner_for(user)) => {
            // A machine is about to connect. One that does not know this request ends by `Stop` alone.
            let _ = control::ask(socket, &DiskControl::Expect);
            return Ok(());
        }
        Ok(_) => end_unused(socket)?,
        // It had been asked to end, and ends now.
        Err(VhostError::Refused(why)) if why == VhostError::Closed.to_string() => wait_for_end(socket)?,
        Err(e) if line::is_served(&control::path(socket)) => return Err(e),
        Err(_) => {}
    }
    let log = socket.with_extension("log");
    // The folder may be one that others can write to: no link of theirs is followed.
    let flags = OFlags::CREATE | OFlags::TRUNC | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = rustix::fs::open(&log, flags, Mode::RUSR | Mode::WUSR);
    let file = File::from(file.map_err(|e| VhostError::file("create", &log)(e.into()))?);
    let mut command = Command::new(program);
    command.args(words).arg("--socket").arg(socket);
    // A signal to the terminal's programs is not for it.
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(file).process_group(0);
    let mut child = command.spawn().map_err(VhostError::file_error("run", program))?;
    let deadline = Instant::now() + START;
    while control::ask(socket, &DiskControl::Show).is_err() {
        let ended = child.try_wait().map_err(VhostError::file_error("wait for", program))?;
        if ended.is_some() || Instant::now() > deadline {
            let _ = child.kill();
            let _ = child.wait();
            let said = std::fs::read_to_string(&log).unwrap_or_default();
            return Err(VhostError::Refused(format!("the back end does not serve: {}", said.trim())));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// The user to whom the socket of a back end for this QEMU belongs. The rights of root need no owner.
fn owner_for(user: u32) -> u32 {
    if user == 0 { rustix::process::geteuid().as_raw() } else { user }
}

/// Whether it is a socket that was made for this user, and for no other. Whether the user can reach it proves neither: root reaches all sockets, and
/// a user may open his to others.
fn is_of(socket: &Path, user: u32) -> bool {
    let is_own = |file: Metadata| file.file_type().is_socket() && file.uid() == user && file.mode() & 0o777 == 0o600;
    std::fs::symlink_metadata(socket).is_ok_and(is_own)
}

/// One command at a time looks at a back end, ends it and starts it. The lock is held until the file is closed.
fn lock(socket: &Path) -> Result<File, VhostError> {
    let path = socket.with_extension("lock");
    let flags = OFlags::CREATE | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = rustix::fs::open(&path, flags, Mode::RUSR | Mode::WUSR);
    let file = file.map_err(|e| VhostError::file("open", &path)(e.into()))?;
    let deadline = Instant::now() + 2 * START;
    loop {
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(file.into()),
            Err(Errno::WOULDBLOCK | Errno::INTR) if Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(20));
            }
            Err(e) => return Err(VhostError::file("lock", &path)(e.into())),
        }
    }
}

/// Ends a back end for another user, if it is unused. Its machine may be ending now, or connect again.
fn end_unused(socket: &Path) -> Result<(), VhostError> {
    let (began, mut used_since) = (Instant::now(), Instant::now());
    loop {
        let answer = control::ask(socket, &DiskControl::StopIfUnused)?;
        match serde_json::from_value(answer).unwrap_or(DiskUse::Used) {
            DiskUse::Ended => return wait_for_end(socket),
            DiskUse::Recent => used_since = Instant::now(),
            DiskUse::Used => {}
        }
        if used_since.elapsed() >= GOODBYE || began.elapsed() >= START {
            let why = "a machine of another user has this disk; detach it there first, or serve it for this one by `partywall blk serve`";
            return Err(VhostError::Refused(why.to_owned()));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Ends the back end at the socket, if there is one.
///
/// # Errors
/// It does not end.
pub fn stop(socket: &Path) -> Result<(), VhostError> {
    let _alone = lock(socket)?;
    match control::ask(socket, &DiskControl::Stop) {
        Ok(_) => wait_for_end(socket)?,
        // While it ends, it answers nothing.
        Err(VhostError::Refused(_)) if line::is_served(&control::path(socket)) => wait_for_end(socket)?,
        Err(_) => {}
    }
    let _ = std::fs::remove_file(socket.with_extension("log"));
    Ok(())
}

/// A back end removes its sockets when it ends, the control socket last. They must not be those of a successor.
fn wait_for_end(socket: &Path) -> Result<(), VhostError> {
    let (last, deadline) = (control::path(socket), Instant::now() + START);
    while last.exists() {
        if Instant::now() >= deadline {
            let (socket, within) = (socket.display(), START.as_secs());
            return Err(VhostError::Refused(format!(
                "the back end at {socket} was asked to end, and has not ended within {within} s; wait for its requests, or end its process"
            )));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::UnixListener;

    #[test]
    #[cfg(not(miri))]
    fn socket_is_of_its_owner_alone_and_no_link_counts() {
        let folder = tempfile::tempdir().unwrap();
        let [path, link] = ["data.sock", "link.sock"].map(|name| folder.path().join(name));
        let _listener = UnixListener::bind(&path).unwrap();
        std::os::unix::fs::symlink(&path, &link).unwrap();
        let set = |mode| std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
        let own = path.metadata().unwrap().uid();
        set(0o600);
        assert!(is_of(&path, own) && !is_of(&path, own + 1) && !is_of(&link, own));
        set(0o666);
        assert!(!is_of(&path, own));
    }

    #[test]
    #[cfg(not(miri))]
    fn answer_that_cannot_be_read_counts_as_used() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("data.sock");
        let listener = line::listen(&control::path(&socket)).unwrap();
        let answers = std::thread::spawn(move || {
            line::serve(&listener, |request| match request {
                DiskControl::StopIfUnused => Ok(serde_json::json!({"answer": "of another version"})),
                _ => Err(VhostError::Closed),
            });
        });
        let refused = end_unused(&socket).unwrap_err().to_string();
        assert!(refused.contains("a machine of another user has this disk"), "{refused}");
        let _ = control::ask(&socket, &DiskControl::Stop);
        answers.join().unwrap();
    }

    /// A back end that ends when it is asked for anything, a moment before it removes its control socket.
    fn ending(socket: &Path) -> std::thread::JoinHandle<()> {
        let path = control::path(socket);
        let listener = line::listen(&path).unwrap();
        std::thread::spawn(move || {
            line::serve(&listener, |_: DiskControl| Err(VhostError::Closed));
            std::thread::sleep(Duration::from_millis(200));
            std::fs::remove_file(path).unwrap();
        })
    }

    #[test]
    #[cfg(not(miri))]
    fn back_end_that_ends_is_awaited_before_the_next() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("data.sock");
        let earlier = ending(&socket);
        // The next one ends at once, and says nothing.
        let failed = start(Path::new("true"), &[], &socket, 0).unwrap_err().to_string();
        assert!(failed.contains("the back end does not serve"), "{failed}");
        earlier.join().unwrap();
    }

    #[test]
    #[cfg(not(miri))]
    fn stop_waits_for_a_back_end_that_ends_already() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("data.sock");
        let earlier = ending(&socket);
        stop(&socket).unwrap();
        assert!(!control::path(&socket).exists());
        earlier.join().unwrap();
    }
}
