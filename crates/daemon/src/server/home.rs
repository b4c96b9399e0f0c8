//! Whether a client runs where the broker does: in its user namespace and its pid namespace (protocol C3).
//!
//! A user id identifies a user only within one user namespace, and a container's root has the id of the host's root where the container
//! has no user namespace. So the rights of a user apply to clients in the broker's own namespaces alone.

use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::OnceLock;

use nix::sys::socket::{getsockopt, sockopt::PeerPidfd};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::credentials::Home;

/// Where the process at the other end of a session ran when it connected, and the path of its executable, where the broker may read that.
/// `pid` is its process by the kernel's word; 0 if it has none here.
pub(super) fn peer(socket: BorrowedFd<'_>, pid: libc::pid_t) -> (Home, Option<String>) {
    if pid <= 0 {
        return (Home::Unknown, None);
    }
    let process = pid.to_string();
    let found = (process_home(&process), process_program(&process));
    // The number may be another process' by now. Kernels before 6.5 cannot tell.
    match getsockopt(&socket, PeerPidfd) {
        Ok(process) if has_ended(process.as_fd()) => (Home::Unknown, None),
        Ok(_) | Err(nix::errno::Errno::ENOPROTOOPT) => found,
        Err(_) => (Home::Unknown, None),
    }
}

/// The path of a process's executable. If the file was replaced, as by an upgrade, the path is the earlier one.
fn process_program(pid: &str) -> Option<String> {
    let path = fs::read_link(format!("/proc/{pid}/exe")).ok()?.into_os_string().into_string().ok()?;
    Some(path.strip_suffix(" (deleted)").map(str::to_owned).unwrap_or(path))
}

fn has_ended(process: BorrowedFd<'_>) -> bool {
    let mut one = [PollFd::new(&process, PollFlags::IN)];
    !matches!(poll(&mut one, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })), Ok(0))
}

fn process_home(pid: &str) -> Home {
    // This process never changes them.
    static OWN: OnceLock<Option<(u64, u64)>> = OnceLock::new();
    let Some(own) = *OWN.get_or_init(|| namespaces("self").ok()) else { return Home::Unknown };
    match namespaces(pid) {
        Ok(theirs) if theirs == own => Home::Broker,
        Ok((user, pid)) => Home::Container { user, pid },
        // A broker without CAP_SYS_PTRACE may not read the namespaces of other users' processes. Public facts distinguish processes in
        // the broker's namespaces from all others, but not the others from each other.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => match (words(pid), words("self")) {
            (Ok(theirs), Ok(own)) if theirs == own => Home::Broker,
            _ => Home::Unknown,
        },
        Err(_) => Home::Unknown,
    }
}

/// The numbers of a process' user namespace and pid namespace.
fn namespaces(pid: &str) -> io::Result<(u64, u64)> {
    Ok((namespace(pid, "user")?, namespace(pid, "pid")?))
}

/// The number in `user:[4026531837]`. The file behind the link has the same number, but
/// the kernel makes an inode for each `stat` of that file.
fn namespace(pid: &str, kind: &str) -> io::Result<u64> {
    let link = fs::read_link(format!("/proc/{pid}/ns/{kind}"))?;
    let number =
        link.to_str().and_then(|text| text.strip_prefix(kind)?.strip_prefix(":[")?.strip_suffix(']')?.parse().ok());
    number.ok_or_else(|| io::Error::other("a namespace without a number"))
}

/// The mapping of a process's users, and the number of its pid namespaces below the broker's. Every process may read both.
fn words(pid: &str) -> io::Result<(String, usize)> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:")).unwrap_or_default();
    Ok((fs::read_to_string(format!("/proc/{pid}/uid_map"))?, numbers.split_whitespace().count()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::tests::forks_alone;
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::path::Path;
    use std::process::{Child, Command};

    /// A process that is ended with this value.
    struct Running(Child);

    impl Drop for Running {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    /// Runs a command that waits for its input to end; gives its number.
    fn run(words: &[&str]) -> Running {
        let mut command = Command::new(words[0]);
        let _alone = forks_alone();
        Running(command.args(&words[1..]).stdin(std::process::Stdio::piped()).spawn().unwrap())
    }

    #[test]
    fn process_of_the_same_namespaces_is_at_home() {
        let (one, _other) = UnixStream::pair().unwrap();
        let own = rustix::process::getpid().as_raw_nonzero().get();
        assert_eq!(peer(one.as_fd(), own), (Home::Broker, process_program("self")));
        assert_eq!(peer(one.as_fd(), 0), (Home::Unknown, None));
        assert_eq!(process_home("4194305"), Home::Unknown, "there is no such process");
        assert_eq!(words("self").unwrap(), words(&own.to_string()).unwrap());
    }

    #[test]
    fn program_of_a_process_is_its_executable_even_when_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let copy = folder.path().join("copy");
        // By a separate process: a process that another test makes could inherit this one's writable descriptor of the copy, which then could
        // not be executed.
        let copied = {
            let _alone = forks_alone();
            Command::new("cp").args([Path::new("/bin/cat"), &copy]).status().unwrap()
        };
        assert!(copied.success());
        let child = run(&[copy.to_str().unwrap()]);
        let program = || process_program(&child.0.id().to_string());
        let start = std::time::Instant::now();
        while program().as_deref() != copy.to_str() {
            assert!(start.elapsed().as_secs() < 60, "{:?}", program());
        }
        fs::remove_file(&copy).unwrap();
        assert_eq!(program().as_deref(), copy.to_str());
        assert_eq!(process_program("4194305"), None);
    }

    #[test]
    fn process_of_another_user_namespace_is_in_a_container() {
        let child = run(&["unshare", "--user", "--map-root-user", "cat"]);
        let pid = child.0.id().to_string();
        let start = std::time::Instant::now();
        // `unshare` becomes `cat` when it has made the namespace.
        while fs::read_to_string(format!("/proc/{pid}/comm")).unwrap().trim() != "cat" {
            assert!(start.elapsed().as_secs() < 60, "no user namespace can be made here");
        }
        assert!(matches!(process_home(&pid), Home::Container { .. }));
        assert_ne!(words(&pid).unwrap(), words("self").unwrap());
    }

    #[test]
    fn peer_that_has_ended_is_not_judged_by_its_number() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let mut client = run(&["python3", "-c", CONNECT, path.to_str().unwrap()]);
        let (session, _) = listener.accept().unwrap();
        let pid = client.0.id().cast_signed();
        assert_eq!(peer(session.as_fd(), pid).0, Home::Broker);
        if matches!(getsockopt(&session, PeerPidfd), Err(nix::errno::Errno::ENOPROTOOPT)) {
            return eprintln!("skipped: `SO_PEERPIDFD` needs Linux 6.5");
        }
        client.0.kill().unwrap();
        client.0.wait().unwrap();
        // Our own number, as if it had been given again.
        let own = rustix::process::getpid().as_raw_nonzero().get();
        assert_eq!(peer(session.as_fd(), own), (Home::Unknown, None));
    }

    /// Connects, and keeps the connection until its input ends.
    const CONNECT: &str =
        "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); sys.stdin.read()";
}
