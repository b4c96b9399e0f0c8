//! Users: on a command line, and of a machine's QEMU.

use crate::VhostError;
use partywall_vm::qmp::Qmp;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// The number of a user, from a number or a name.
pub fn user_number(text: &str) -> Result<u32, String> {
    match text.parse() {
        // The kernel takes this number for a change to no user.
        Ok(u32::MAX) => return Err(format!("{text} is the number of no user")),
        Ok(uid) => return Ok(uid),
        Err(_) => {}
    }
    let user = nix::unistd::User::from_name(text).map_err(|e| e.to_string())?;
    user.map(|user| user.uid.as_raw()).ok_or_else(|| format!("there is no user {text}"))
}

/// The user of a machine's QEMU, by its monitor. QEMU connects to sockets of back ends as this user.
pub fn machine_user(monitor: &Path) -> Result<u32, VhostError> {
    let user = Qmp::connect(monitor).and_then(|qmp| qmp.user());
    user.map_err(|e| VhostError::Refused(e.to_string()))
}

/// Checks that the QEMU of `user` may connect to the socket of a back end. A QEMU that may not would wait for the back end in its main
/// loop, and its machine would stand still. `remedy` is a part of the error.
pub fn check_access(socket: &Path, user: u32, remedy: &str) -> Result<(), VhostError> {
    let there = std::fs::metadata(socket).map_err(VhostError::file("look at", socket))?;
    if user == 0 {
        return Ok(());
    }
    // Rights of groups, and the mask of an access control list, are not judged here.
    if there.uid() != user && there.mode() & 0o077 == 0 {
        let (path, owner) = (socket.display(), there.uid());
        let why = "the machine's QEMU runs as another user than the one that may connect";
        return Err(VhostError::Refused(format!(
            "{why}: {path} belongs to user {owner}, and QEMU to user {user}; {remedy}"
        )));
    }
    let path = std::fs::canonicalize(socket).map_err(VhostError::file("look at", socket))?;
    for folder in path.ancestors().skip(1) {
        let there = std::fs::metadata(folder).map_err(VhostError::file("look at", folder))?;
        let needed = if there.uid() == user { 0o100 } else { 0o011 };
        if there.mode() & needed == 0 {
            let (socket, folder) = (socket.display(), folder.display());
            let why = "the machine's QEMU cannot reach the socket";
            return Err(VhostError::Refused(format!(
                "{why}: {socket} is below the folder {folder}, which user {user} may not search; add x to the folder's mode, or move the socket"
            )));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{check_access, user_number};
    use std::os::unix::fs::{MetadataExt, PermissionsExt};
    use std::os::unix::net::UnixListener;

    #[test]
    fn socket_or_folder_closed_to_the_user_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.port");
        let _listener = UnixListener::bind(&path).unwrap();
        let set = |mode| std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
        let set_folder = |mode| std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(mode)).unwrap();
        set_folder(0o711);
        let own = path.metadata().unwrap().uid();
        set(0o600);
        assert!(check_access(&path, own, "").is_ok() && check_access(&path, 0, "").is_ok());
        let refused = check_access(&path, own + 1, "use --owner").unwrap_err().to_string();
        let expected = format!("belongs to user {own}, and QEMU to user {}; use --owner", own + 1);
        assert!(refused.ends_with(&expected), "{refused}");
        set(0o660);
        assert!(check_access(&path, own + 1, "").is_ok());
        set_folder(0o700);
        assert!(check_access(&path, own, "").is_ok() && check_access(&path, 0, "").is_ok());
        let refused = check_access(&path, own + 1, "").unwrap_err().to_string();
        assert!(refused.contains(&format!("which user {} may not search", own + 1)), "{refused}");
    }

    #[test]
    fn user_is_named_by_number_or_name() {
        assert_eq!(user_number("1000"), Ok(1000));
        assert_eq!(user_number("root"), Ok(0));
        assert!(user_number("4294967294").is_ok() && user_number("4294967295").is_err());
        assert_eq!(user_number("no-such-user"), Err("there is no user no-such-user".into()));
    }
}
