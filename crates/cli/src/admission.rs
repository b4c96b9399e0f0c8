//! Who may connect to the socket of the broker, or of a machine's agent, by the mode of its file.

use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use partywall_vm::inside;

/// Owner, group and mode of a socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SocketAdmission {
    mode: u32,
    owner: u32,
    group: u32,
}

impl SocketAdmission {
    /// `None` if there is no socket, or if this process may not see it.
    pub(crate) fn of(socket: &Path) -> Option<Self> {
        let file = std::fs::metadata(socket).ok()?;
        Some(Self { mode: file.mode() & 0o777, owner: file.uid(), group: file.gid() })
    }

    /// Whether a process of this user, with these groups, may connect. The kernel asks for the right to write, and root has it always.
    pub(crate) fn admits(self, user: u32, groups: &[u32]) -> bool {
        let bit = match () {
            () if user == 0 => return true,
            () if user == self.owner => 0o200,
            () if groups.contains(&self.group) => 0o020,
            () => 0o002,
        };
        self.mode & bit != 0
    }

    /// Whether every user may connect.
    pub(crate) fn admits_all(self) -> bool {
        self.mode & 0o222 == 0o222
    }
}

impl std::fmt::Display for SocketAdmission {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "mode {:o} of user {} and group {}", self.mode, self.owner, self.group)
    }
}

/// What the kernel's refusal to let this process connect means.
pub(crate) fn refusal(socket: &Path) -> String {
    let mode = SocketAdmission::of(socket).map_or_else(String::new, |socket| format!(" ({socket})"));
    format!("this user may not connect to {}{mode}", socket.display())
}

/// How the operator admits further users.
pub(crate) fn remedy() -> &'static str {
    if inside::port().is_ok() {
        "restart the agent with `--socket-mode 660` and a group of that user, or with `--socket-mode 666` (docs/vm.md, names and rights)"
    } else {
        "restart the broker with `--socket-mode 666` if its policy names other users; or run a broker for this user, and name its socket with --broker"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_class_of_mode_bits_counts_for_each_user() {
        let admission = |mode| SocketAdmission { mode, owner: 10, group: 20 };
        let who = [(0, 0), (10, 20), (11, 20), (11, 21)];
        let admitted = |mode| who.map(|(user, group)| admission(mode).admits(user, &[group, 7]));
        assert_eq!(admitted(0o600), [true, true, false, false]);
        assert_eq!(admitted(0o660), [true, true, true, false]);
        assert_eq!(admitted(0o666), [true; 4]);
        assert_eq!(admitted(0o606), [true, true, false, true], "the group's bits count alone");
        assert_eq!([0o666, 0o660].map(|mode| admission(mode).admits_all()), [true, false]);
    }

    #[test]
    fn socket_of_a_file_is_described_by_mode_and_owner() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        assert_eq!(SocketAdmission::of(&path), None);
        let _socket = std::os::unix::net::UnixListener::bind(&path).unwrap();
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o640)).unwrap();
        let (user, group) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        let said = SocketAdmission::of(&path).unwrap().to_string();
        assert_eq!(said, format!("mode 640 of user {user} and group {group}"));
    }
}
