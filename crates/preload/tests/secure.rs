//! A program with more rights than its caller, and with the library linked into it: the environment is the caller's, and is not trusted.

mod support;

use std::{
    os::unix::fs::{PermissionsExt, chown},
    process::{Command, Stdio},
};

use partywall_protocol::environment;
use support::{c, skipped, world::library};

/// The user id of `nobody`, on all usual systems.
const NOBODY: u32 = 65534;

#[test]
fn set_user_id_program_writes_no_log_that_its_caller_names() {
    if !rustix::process::geteuid().is_root() {
        skipped("only root can make a program set-user-ID");
        return;
    }
    let folder = library().parent().unwrap().to_str().unwrap();
    let link = format!("-Wl,--no-as-needed,-rpath,{folder},{}", library().to_str().unwrap());
    let built = c::program("secure", &["secure.c"], &[&link]);
    let home = tempfile::Builder::new().prefix("partywall-preload-test-").tempdir().unwrap();
    std::fs::set_permissions(home.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
    let program = home.path().join("program");
    std::fs::copy(built, &program).unwrap();
    let run = |log: &str| {
        let log = home.path().join(log);
        let mut command = Command::new(&program);
        let output = command.env(environment::LOG, &log).stdin(Stdio::null()).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        (String::from_utf8(output.stdout).unwrap(), log.exists())
    };
    assert_eq!(run("log"), ("0\n".to_owned(), true), "without added rights it writes the log");
    chown(&program, Some(NOBODY), None).unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o4755)).unwrap();
    let (secure, has_log) = run("log-with-rights");
    if secure == "0\n" {
        skipped("the folder of temporary files is mounted `nosuid`");
        return;
    }
    assert!(!has_log, "the program of another user has made a file that its caller has named");
}
