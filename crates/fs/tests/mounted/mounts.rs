//! The rights and the settings of a mount.

use super::code;
use crate::common::{Way, world};
use rustix::io::Errno;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::process::Command;

#[test]
fn kernel_reads_ahead_as_much_as_one_request_carries() {
    let Some(world) = world(Way::Calls, &[]) else { return };
    let mounted = world.mount(&[]);
    let device = fs::metadata(mounted.path()).unwrap().dev();
    let path = format!("/sys/class/bdi/{}:{}/read_ahead_kb", rustix::fs::major(device), rustix::fs::minor(device));
    if rustix::fs::access(&path, rustix::fs::Access::WRITE_OK).is_err() {
        eprintln!("SKIPPED: {path} cannot be written here");
        return;
    }
    let expected = (partywall_fs::wire::LARGEST_DATA >> 10).to_string();
    assert_eq!(fs::read_to_string(&path).unwrap().trim(), expected);
}

#[test]
fn read_only_export_refuses_every_change() {
    let Some(world) = world(Way::Calls, &["--read-only"]) else { return };
    fs::write(world.export().join("file"), "text").unwrap();
    let mounted = world.mount(&[]);
    assert_eq!(fs::read_to_string(mounted.join("file")).unwrap(), "text");
    let read_only = Errno::ROFS.raw_os_error();
    assert_eq!(code(fs::write(mounted.join("file"), "other")), read_only);
    assert_eq!(code(fs::remove_file(mounted.join("file"))), read_only);
}

#[test]
fn request_keeps_its_user_and_root_is_squashed() {
    let Some(world) = world(Way::Calls, &["--squash", "root"]) else { return };
    fs::set_permissions(world.export(), fs::Permissions::from_mode(0o1777)).unwrap();
    fs::write(world.export().join("secret"), "of root").unwrap();
    fs::set_permissions(world.export().join("secret"), fs::Permissions::from_mode(0o600)).unwrap();
    let mounted = world.mount(&["--allow-other"]);
    fs::set_permissions(mounted.path().parent().unwrap(), fs::metadata("/tmp").unwrap().permissions()).unwrap();
    assert_eq!(code(fs::read(mounted.join("secret"))), Errno::ACCESS.raw_os_error());
    fs::write(mounted.join("of-nobody"), "text").unwrap();
    assert_eq!(fs::metadata(world.export().join("of-nobody")).unwrap().uid(), 65534);
    let touch = |name: &str| {
        use std::os::unix::process::CommandExt;
        Command::new("touch").arg(mounted.join(name)).uid(1234).gid(4321).status().unwrap().success()
    };
    assert!(touch("of-a-user"));
    let found = fs::metadata(world.export().join("of-a-user")).unwrap();
    assert_eq!((found.uid(), found.gid()), (1234, 4321));
}

#[test]
fn directory_with_files_is_refused_as_mount_point() {
    let Some(world) = world(Way::Calls, &[]) else { return };
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("file"), "hidden").unwrap();
    let refused = world.refused_mount(folder.path());
    assert!(refused.contains("is not empty"), "{refused}");
    assert_eq!(fs::read_to_string(folder.path().join("file")).unwrap(), "hidden");
}

#[test]
fn mount_of_ordinary_user_ends_at_first_signal() {
    // A user that exists: `fusermount3` looks for the name.
    const NOBODY: u32 = 65534;
    let Some(world) = world(Way::Tcp, &[]) else { return };
    let mounted = world.mount_as(NOBODY);
    let path = mounted.path().to_owned();
    assert!(mounted.end());
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
    assert!(!mounts.contains(path.to_str().unwrap()), "{mounts}");
}
