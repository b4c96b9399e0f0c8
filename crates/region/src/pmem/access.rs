//! The access list of a window's file: the file's owner, and users who are admitted one by one.
//!
//! The QEMU of a machine is often another user's than the broker (libvirt's is), and opens the file again. A mode cannot express "this
//! user, and only to read", so this is an access list (`acl(5)`). The file's owner may set it without further rights.

use rustix::fd::AsFd;
use rustix::fs::XattrFlags;
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::io;

const NAME: &str = "system.posix_acl_access";
/// The version in the kernel's `posix_acl_xattr_header`.
const VERSION: u32 = 2;
/// `posix_acl_xattr_entry`: tag, permissions, id.
const ENTRY: usize = 8;
/// More than a window has parties, by far.
const MOST: usize = 64;
const NOBODY: u32 = u32::MAX;
const READ: u16 = 4;
const WRITE: u16 = 2;

const OWNER: u16 = 0x01;
const USER: u16 = 0x02;
const GROUP: u16 = 0x04;
const MASK: u16 = 0x10;
const OTHER: u16 = 0x20;

/// Admits a user to open this file for reading, or for writing as well. Earlier users stay admitted.
///
/// # Errors
/// The kernel's; above all that the file's file system has no access lists.
pub fn let_in(file: impl AsFd, user: u32, writable: bool) -> io::Result<()> {
    let mut users = users(&file)?;
    *users.entry(user).or_default() |= if writable { READ | WRITE } else { READ };
    // In the order of the tags; without the mask the others would have nothing.
    let mut list = vec![(OWNER, READ | WRITE, NOBODY)];
    list.extend(users.iter().map(|(user, may)| (USER, *may, *user)));
    list.extend([(GROUP, 0, NOBODY), (MASK, READ | WRITE, NOBODY), (OTHER, 0, NOBODY)]);
    let mut value = VERSION.to_le_bytes().to_vec();
    for (tag, may, id) in list {
        value.extend(tag.to_le_bytes());
        value.extend(may.to_le_bytes());
        value.extend(id.to_le_bytes());
    }
    Ok(rustix::fs::fsetxattr(file, NAME, &value, XattrFlags::empty())?)
}

/// The users who are admitted, with their permissions.
fn users(file: impl AsFd) -> io::Result<BTreeMap<u32, u16>> {
    let mut value = [0; 4 + MOST * ENTRY];
    let length = match rustix::fs::fgetxattr(file, NAME, &mut value[..]) {
        Ok(length) => length,
        Err(Errno::NODATA) => return Ok(BTreeMap::new()),
        Err(e) => return Err(e.into()),
    };
    let entries = value[..length].get(4..).unwrap_or_default().as_chunks::<ENTRY>().0;
    let named = entries.iter().map(|&[t0, t1, p0, p1, i0, i1, i2, i3]| {
        let (tag, may) = (u16::from_le_bytes([t0, t1]), u16::from_le_bytes([p0, p1]));
        (tag, u32::from_le_bytes([i0, i1, i2, i3]), may)
    });
    Ok(named.filter(|(tag, ..)| *tag == USER).map(|(_, user, may)| (user, may)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, Mode};
    use std::os::unix::process::CommandExt as _;
    use std::process::{Command, Stdio};

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn admitted_user_opens_file_with_granted_access_only() {
        let file = rustix::fs::memfd_create("partywall-access", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::fchmod(&file, Mode::RUSR | Mode::WUSR).unwrap();
        let [reader, writer, stranger] = [64_055, 64_056, 64_057];
        let_in(&file, reader, false).unwrap();
        let_in(&file, writer, false).unwrap();
        let_in(&file, writer, true).unwrap();
        let_in(&file, writer, false).unwrap();
        assert_eq!(users(&file).unwrap(), BTreeMap::from([(reader, READ), (writer, READ | WRITE)]));

        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: only root can try as other users");
            return;
        }
        // A process opens a file that it was given with its own user's rights.
        let opens = |user: u32, how: &str| {
            let mut shell = Command::new("sh");
            shell.arg("-c").arg(format!("exec 3{how} /proc/self/fd/0")).uid(user).gid(user).stderr(Stdio::null());
            shell.stdin(file.try_clone().unwrap()).status().unwrap().success()
        };
        for (user, reads, writes) in [(reader, true, false), (writer, true, true), (stranger, false, false)] {
            assert_eq!((opens(user, "<"), opens(user, "<>")), (reads, writes), "{user}");
        }
    }
}
