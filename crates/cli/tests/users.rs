//! Several users and one broker, with the real programs: the socket can be reached, and the policy decides.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod common;

use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use common::random::noise;
use common::{Guard, PARTYWALL, World, copy_program, make_executable, said};

/// A user with a rule, and one without. Neither has to exist.
const GUEST: u32 = 65_001;
const STRANGER: u32 = 65_002;
/// A user with a rule and a number beyond those that are given out, as a user namespace can have one.
const HIGH: u32 = 0xfff0_0001;

const POLICY: &str = r#"
administrators = [0]
[[join]]
domain = "guest-*"
users = [65001]
[[join]]
domain = "high"
users = [4293918721]
[[connect]]
from = "guest-*"
to = "b"
service = "in"
"#;

/// A broker of root's that others can reach, and the program where they can run it. `None` if that cannot be had.
fn world(test: &str) -> Option<World> {
    let skip = |why: &str| {
        // Past the harness, which keeps what tests print to itself.
        let _ = writeln!(std::io::stderr(), "NOT TESTED: {test}: {why}");
        None
    };
    if !rustix::process::geteuid().is_root() {
        return skip("only root can become another user");
    }
    let world = World::with_policy(Some(POLICY));
    make_executable(world.socket().parent().unwrap());
    let program = world.path("partywall");
    copy_program(PARTYWALL, &program);
    match Command::new(&program).arg("--version").uid(GUEST).gid(GUEST).stdout(Stdio::null()).status() {
        Ok(status) => assert!(status.success()),
        Err(e) if e.kind() == ErrorKind::PermissionDenied => {
            return skip("other users cannot reach the directory for temporary files, or cannot be become");
        }
        Err(e) => panic!("{e}"),
    }
    Some(world)
}

/// `partywall ARGUMENTS` as another user.
fn by(world: &World, uid: u32, domain: &str, arguments: &[&str]) -> Command {
    let as_root = world.partywall(domain, arguments);
    let mut command = Command::new(world.path("partywall"));
    command.args(as_root.get_args()).uid(uid).gid(uid).current_dir("/");
    for (key, value) in as_root.get_envs() {
        match value {
            Some(value) => command.env(key, value),
            None => command.env_remove(key),
        };
    }
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn run_by(world: &World, uid: u32, domain: &str, arguments: &[&str]) -> Output {
    Guard::spawn(&mut by(world, uid, domain, arguments)).output()
}

fn set_mode(path: &Path, mode: u32) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}

#[test]
fn policy_lets_two_users_exchange_bytes() {
    let Some(world) = world("policy_lets_two_users_exchange_bytes") else { return };
    let data = noise(9, 300_000);
    let mut listener = world.partywall("b", &["cat", "-l", "in"]);
    let mut listener = Guard::spawn(listener.stdin(Stdio::piped()));
    let mut guest = by(&world, GUEST, "guest-1", &["cat", "b:in", "--wait", "60"]);
    let mut guest = Guard::spawn(guest.stdin(Stdio::piped()));
    let (mut to_guest, mut from_guest) = (listener.0.stdin.take().unwrap(), listener.0.stdout.take().unwrap());
    let (mut to_root, mut from_root) = (guest.0.stdin.take().unwrap(), guest.0.stdout.take().unwrap());
    // Memory of either user is read by the other.
    for (to, from) in [(&mut to_root, &mut from_guest), (&mut to_guest, &mut from_root)] {
        let mut received = vec![0; data.len()];
        std::thread::scope(|s| {
            s.spawn(|| to.write_all(&data).unwrap());
            from.read_exact(&mut received).unwrap();
        });
        assert!(received == data);
    }

    // The broker knows who it is from the kernel; and a party may look at its own channel.
    let listing: serde_json::Value = serde_json::from_slice(&world.run("watcher", &["list", "--json"]).stdout).unwrap();
    let domains = listing["domains"].as_array().unwrap();
    assert!(domains.iter().any(|d| d["name"] == "guest-1" && d["uid"] == GUEST), "{listing}");
    // Bytes are counted after they have been handed on.
    world.await_that("a party sees what it has written", || {
        let stat = run_by(&world, GUEST, "guest-1", &["stat", "--json"]);
        assert!(stat.status.success(), "{}", said(&stat));
        let stat: serde_json::Value = serde_json::from_slice(&stat.stdout).unwrap();
        stat["channels"][0]["sides"][0]["written"]["bytes"] == data.len()
    });

    drop((to_root, to_guest));
    assert_eq!((guest.code(), listener.code()), (Some(0), Some(0)));
}

#[test]
fn user_with_high_number_joins_by_its_rule_alone() {
    let Some(world) = world("user_with_high_number_joins_by_its_rule_alone") else { return };
    let listen = Guard::spawn(&mut by(&world, HIGH, "high", &["cat", "-l", "in"]));
    world.await_service("high", "in");
    let listing: serde_json::Value = serde_json::from_slice(&world.run("watcher", &["list", "--json"]).stdout).unwrap();
    let domains = listing["domains"].as_array().unwrap();
    let is_plain = |d: &serde_json::Value| d["name"] == "high" && d["uid"] == HIGH && d["machine"].is_null();
    assert!(domains.iter().any(is_plain), "{listing}");
    drop(listen);
    let refused = run_by(&world, HIGH, "guest-1", &["list"]);
    assert_eq!(refused.status.code(), Some(3), "{}", said(&refused));
}

#[test]
fn doctor_reports_whether_workers_of_a_server_may_join() {
    let Some(world) = world("doctor_reports_whether_workers_of_a_server_may_join") else { return };
    // The content of the program does not matter: its name says that it is nginx, whose workers run as www-data or nobody.
    let nginx = world.path("nginx");
    copy_program("/bin/true", &nginx);
    let doctor = |world: &World| {
        let mut command = world.partywall("", &["doctor", "--json", "--", nginx.to_str().unwrap()]);
        let output = command.env_remove("PARTYWALL_DOMAIN").stdin(Stdio::null()).output().unwrap();
        let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        report["checks"].as_array().unwrap().iter().find(|check| check["name"] == "user").unwrap().clone()
    };
    let check = doctor(&world);
    assert_eq!(check["status"], "warn", "{check}");
    let (found, remedy) = (check["found"].as_str().unwrap(), check["remedy"].as_str().unwrap());
    assert!(found.contains("workers run as") && found.contains("policy"), "{check}");
    assert!(remedy.contains("[[join]]") && remedy.contains("domain = \"nginx-*\""), "{check}");
    // `run` says the same before it starts the program.
    let started = Guard::spawn(&mut world.partywall("", &["run", nginx.to_str().unwrap()])).output();
    let warned = said(&started);
    assert!(warned.contains("its workers run as") && warned.contains("domain = \"nginx-*\""), "{warned}");
    // With the rule that it names.
    let rule: Vec<&str> = remedy.lines().skip(1).map(str::trim).collect();
    world.set_policy(&format!("{POLICY}{}\n", rule.join("\n")));
    let mut check = serde_json::Value::Null;
    world.await_that("the new policy is in force", || {
        check = doctor(&world);
        check["status"] == "ok"
    });
    let found = check["found"].as_str().unwrap();
    assert!(found.contains("lets join as nginx-") && found.contains("[[join]] rule 3"), "{check}");
    let started = Guard::spawn(&mut world.partywall("", &["run", nginx.to_str().unwrap()])).output();
    assert_eq!(said(&started), "");
}

#[test]
fn domain_of_a_known_server_is_for_the_user_of_its_workers() {
    let Some(world) = world("domain_of_a_known_server_is_for_the_user_of_its_workers") else { return };
    let nginx = world.path("nginx");
    copy_program("/usr/bin/env", &nginx);
    let variables = |program: &str| {
        let output = Guard::spawn(&mut world.partywall("shop", &["run", program])).output();
        String::from_utf8(output.stdout).unwrap()
    };
    let user =
        |variables: &str| variables.lines().find(|line| line.starts_with("PARTYWALL_DOMAIN_USER=")).map(str::to_owned);
    let server = variables(nginx.to_str().unwrap());
    assert!(server.contains("PARTYWALL_DOMAIN=shop\n"), "{server}");
    let workers = user(&server).unwrap();
    assert!(workers != "PARTYWALL_DOMAIN_USER=0", "{server}");
    assert_eq!(user(&variables("env")), None, "a program that keeps its user");
}

#[test]
fn policy_test_is_restricted_to_own_user_except_for_root() {
    let Some(world) = world("policy_test_is_restricted_to_own_user_except_for_root") else { return };
    // The asker, the other arguments, the exit code, and texts of the answer.
    let cases: [(u32, &[&str], i32, &[&str]); 6] = [
        (0, &["--user", "65001", "--from", "guest-1", "--to", "b:in"], 0, &["[[connect]] rule 1", "policy.toml:9"]),
        (
            0,
            &["--user", "65001", "--from", "guest-1", "--to", "b:out"],
            3,
            &["no [[connect]] rule", "service = \"out\""],
        ),
        (0, &["--user", "65002", "--from", "guest-1"], 3, &["no [[join]] rule", "users = [65002]"]),
        (GUEST, &["--from", "guest-1", "--to", "b:in"], 0, &["policy.toml:3", "policy.toml:9"]),
        (GUEST, &["--user", "65002", "--from", "guest-1"], 3, &["only administrators"]),
        (STRANGER, &["--from", "guest-1"], 3, &["users = [65002]"]),
    ];
    for (asker, question, code, words) in cases {
        let arguments = [&["policy", "test"], question].concat();
        let mut command = by(&world, asker, "", &arguments);
        let output = Guard::spawn(command.env_remove("PARTYWALL_DOMAIN")).output();
        let all = format!("{}{}", String::from_utf8_lossy(&output.stdout), said(&output));
        assert_eq!(output.status.code(), Some(code), "{asker} {question:?}: {all}");
        for word in words {
            assert!(all.contains(word), "{asker} {question:?} lacks {word}: {all}");
        }
    }
    let json = ["policy", "test", "--json", "--user", "65001", "--from", "guest-1", "--to", "b:in"];
    let output = run_by(&world, 0, "asker", &json);
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&report["allowed"], &report["decisions"][1]["line"]), (&true.into(), &9.into()), "{report}");
}

#[test]
fn users_without_a_rule_are_refused() {
    let Some(world) = world("users_without_a_rule_are_refused") else { return };
    let _in = Guard::spawn(&mut world.partywall("b", &["cat", "-l", "in"]));
    let _secret = Guard::spawn(&mut world.partywall("b", &["cat", "-l", "secret"]));
    world.await_service("b", "in");
    world.await_service("b", "secret");
    let cases: [(u32, &str, &[&str], &str); 5] = [
        (GUEST, "guest-1", &["cat", "b:secret"], "policy"),
        (GUEST, "b", &["cat", "-l", "in"], "policy"),
        (GUEST, "root", &["list", "domains"], "policy"),
        (STRANGER, "guest-1", &["cat", "b:in"], "policy"),
        (STRANGER, "stranger", &["list", "domains"], "policy"),
    ];
    for (uid, domain, arguments, word) in cases {
        let output = run_by(&world, uid, domain, arguments);
        assert_eq!(output.status.code(), Some(3), "{uid} as {domain} {arguments:?}: {}", said(&output));
        assert!(said(&output).contains(word), "{uid} as {domain} {arguments:?}: {}", said(&output));
        // The rule that would allow it, as it is written in the file.
        let rule = if (domain, arguments[1]) == ("guest-1", "b:secret") {
            "[[connect]]\n    from = \"guest-1\"\n    to = \"b\"\n    service = \"secret\"".to_owned()
        } else {
            format!("users = [{uid}]")
        };
        assert!(said(&output).contains(&rule), "{uid} as {domain} {arguments:?}: {}", said(&output));
    }
    let allowed = run_by(&world, GUEST, "guest-1", &["list"]);
    assert!(allowed.status.success(), "{}", said(&allowed));

    // A user who may not open the socket gets an error with the reason.
    set_mode(&world.socket(), 0o600);
    let shut = run_by(&world, GUEST, "guest-1", &["list"]);
    assert_eq!(shut.status.code(), Some(69), "{}", said(&shut));
    assert!(said(&shut).contains("this user may not connect"), "{}", said(&shut));
    set_mode(&world.socket(), 0o666);
    assert!(run_by(&world, GUEST, "guest-1", &["list"]).status.success());
}
