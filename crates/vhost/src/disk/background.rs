//! A back end that `partywall blk attach --from` starts for an exported disk, and that `detach` ends. It lives on without the command.

use super::control::{self, DiskControl, DiskReport};
use crate::VhostError;
use crate::attach::hash;
use crate::user::check_access;
use rustix::fs::{Mode, OFlags};
use std::fs::File;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The longest that a back end takes to serve: an exporter may be away for as long.
const START: Duration = Duration::from_secs(60);

/// The socket of the back end of the disk `DOMAIN:NAME`, in the folder of such back ends.
///
/// # Errors
/// The folder is unknown, or cannot be made.
pub fn socket(target: &str) -> Result<PathBuf, VhostError> {
    let all = crate::control::folder_of("blk");
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
/// It ends at once: the error has what it said. Or another user's machine has the disk.
pub fn start(program: &Path, words: &[&str], socket: &Path, user: u32) -> Result<(), VhostError> {
    if let Ok(report) = control::ask(socket, &DiskControl::Show) {
        if check_access(socket, user, "").is_ok() {
            return Ok(());
        }
        let is_used = serde_json::from_value::<DiskReport>(report).is_ok_and(|report| report.occupied);
        if is_used {
            let why = "a machine of another user has this disk; detach it there first, or serve it for this one by `partywall blk serve`";
            return Err(VhostError::Refused(why.to_owned()));
        }
        stop(socket);
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

/// Ends the back end at the socket, if there is one.
pub fn stop(socket: &Path) {
    if control::ask(socket, &DiskControl::Stop).is_ok() {
        // It removes its sockets when it ends, the control socket last. They must not be those of a successor.
        let (last, deadline) = (control::path(socket), Instant::now() + START);
        while last.exists() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    let _ = std::fs::remove_file(socket.with_extension("log"));
}
