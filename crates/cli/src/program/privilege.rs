//! Whether a program runs with rights that its caller has not; the loader then trusts nothing in its environment.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// The privilege that a program gains.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Privilege {
    /// It becomes another user.
    User(u32),
    /// It becomes of another group.
    Group(u32),
    /// It has file capabilities.
    Capabilities,
}

impl Privilege {
    pub(crate) fn words(self) -> String {
        match self {
            Self::User(uid) => format!("is set-user-id (to {uid})"),
            Self::Group(gid) => format!("is set-group-id (to {gid})"),
            Self::Capabilities => "has file capabilities".into(),
        }
    }
}

/// The user that runs it.
#[derive(Debug, Clone, Copy)]
struct Caller {
    uid: u32,
    gid: u32,
    /// No program that it starts gains rights (`no_new_privs`).
    limited: bool,
}

/// The privilege that `path` gains when this user runs it.
pub(crate) fn of(path: &Path) -> Option<Privilege> {
    let metadata = path.metadata().ok()?;
    let caller = Caller {
        uid: rustix::process::getuid().as_raw(),
        gid: rustix::process::getgid().as_raw(),
        limited: rustix::thread::no_new_privs().unwrap_or(false),
    };
    // A mount with nosuid grants nothing.
    let nosuid = rustix::fs::statvfs(path).is_ok_and(|fs| fs.f_flag.contains(rustix::fs::StatVfsMountFlags::NOSUID));
    let capable = rustix::fs::getxattr(path, "security.capability", &mut [0u8; 64][..]).is_ok();
    if nosuid { None } else { gained(caller, metadata.mode(), metadata.uid(), metadata.gid(), capable) }
}

fn gained(caller: Caller, mode: u32, owner: u32, group: u32, capable: bool) -> Option<Privilege> {
    const SET_UID: u32 = 0o4000;
    const SET_GID: u32 = 0o2000;
    // Without permission for its group to execute, the bit once meant mandatory locking.
    const GROUP_RUNS: u32 = 0o0010;
    if caller.limited {
        None
    } else if mode & SET_UID != 0 && owner != caller.uid {
        Some(Privilege::User(owner))
    } else if mode & SET_GID != 0 && mode & GROUP_RUNS != 0 && group != caller.gid {
        Some(Privilege::Group(group))
    } else if capable && caller.uid != 0 {
        // Root has them anyway.
        Some(Privilege::Capabilities)
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_gained_privileges_count() {
        let user = Caller { uid: 1000, gid: 1000, limited: false };
        let root = Caller { uid: 0, gid: 0, limited: false };
        assert_eq!(gained(user, 0o4755, 0, 0, false), Some(Privilege::User(0)));
        assert_eq!(gained(root, 0o4755, 0, 0, false), None, "root becomes root");
        assert_eq!(gained(root, 0o4755, 33, 0, false), Some(Privilege::User(33)));
        assert_eq!(gained(user, 0o2755, 0, 42, false), Some(Privilege::Group(42)));
        assert_eq!(gained(user, 0o2745, 0, 42, false), None, "not executable for its group");
        assert_eq!(gained(user, 0o2755, 0, 1000, false), None);
        assert_eq!(gained(user, 0o755, 0, 0, true), Some(Privilege::Capabilities));
        assert_eq!(gained(root, 0o755, 0, 0, true), None);
        assert_eq!(gained(user, 0o755, 0, 0, false), None);
        let limited = Caller { limited: true, ..user };
        assert_eq!(gained(limited, 0o6755, 0, 0, true), None, "no_new_privs");
    }
}
