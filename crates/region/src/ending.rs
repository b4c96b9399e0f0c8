//! A test whether a process has ended, for the holder of the other end of its socket.
//!
//! A process that ends closes its descriptors before it becomes a zombie. So right after the hang-up the process still exists, with the
//! flag of an ending process.

use rustix::io::Errno;
use std::fs;
use std::io::ErrorKind;
use std::path::Path;

/// `PF_EXITING` of the kernel's `task_struct.flags`.
const EXITING: u64 = 0x4;
/// The index of the flags in `/proc/PID/stat`, counted from the field after the name.
const FLAGS: usize = 6;

/// Whether no thread of the process with this number runs, or will run any more. A number that another process has by now says no, and so does
/// 0, which stands for a process of another pid namespace.
pub fn has_ended(pid: u32) -> bool {
    if pid == 0 {
        return false;
    }
    match fs::read_dir(format!("/proc/{pid}/task")) {
        Ok(threads) => threads.flatten().all(|thread| is_exiting(&thread.path())),
        Err(error) => error.kind() == ErrorKind::NotFound && Path::new("/proc/self/task").exists(),
    }
}

fn is_exiting(thread: &Path) -> bool {
    match fs::read(thread.join("stat")) {
        Ok(stat) => flags_of(&stat).is_some_and(|flags| flags & EXITING != 0),
        // It has ended since it was listed.
        Err(e) => e.kind() == ErrorKind::NotFound || e.raw_os_error() == Some(Errno::SRCH.raw_os_error()),
    }
}

/// The name of a thread, in parentheses, can have any bytes.
fn flags_of(stat: &[u8]) -> Option<u64> {
    String::from_utf8_lossy(stat).rsplit_once(')')?.1.split_whitespace().nth(FLAGS)?.parse().ok()
}

#[cfg(test)]
#[cfg(not(miri))]
mod tests {
    use super::*;
    use std::io::Read as _;
    use std::os::fd::OwnedFd;
    use std::process::{Command, Stdio};

    #[test]
    fn process_has_ended_once_its_descriptors_hang_up() {
        assert!(!has_ended(std::process::id()) && !has_ended(0));
        let (mut near, far) = std::os::unix::net::UnixStream::pair().unwrap();
        let mut child = Command::new("cat").stdin(Stdio::piped()).stdout(OwnedFd::from(far)).spawn().unwrap();
        let pid = child.id();
        assert!(!has_ended(pid));
        child.kill().unwrap();
        // The child has hung up, but has not been waited for.
        assert_eq!(near.read(&mut [0; 1]).unwrap(), 0);
        assert!(has_ended(pid));
        child.wait().unwrap();
        assert!(has_ended(pid), "there is none of that number any more, as far as numbers are not given again at once");
    }

    #[test]
    fn flags_are_found_behind_any_name() {
        assert_eq!(flags_of(b"7 (a) b) c) S 1 2 3 4 5 4194308 9"), Some(4_194_308));
        assert_eq!(flags_of(b"nonsense"), None);
        let (folder, stat) = (tempfile::tempdir().unwrap(), b"7 (name\xff) S 1 2 3 4 5 4194304 9");
        fs::write(folder.path().join("stat"), stat).unwrap();
        assert!(!is_exiting(folder.path()), "a name that is no text is that of a live thread");
        fs::remove_file(folder.path().join("stat")).unwrap();
        assert!(is_exiting(folder.path()));
        fs::create_dir(folder.path().join("stat")).unwrap();
        assert!(!is_exiting(folder.path()), "it cannot be read");
    }
}
