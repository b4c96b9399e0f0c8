//! Impossible requests are refused with the right exit code, and with a message that helps.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod common;

use common::{Guard, World, partywall, said};

#[test]
fn commands_without_broker_say_how_to_start_one() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("none.sock");
    let socket = socket.to_str().unwrap();
    let commands: [&[&str]; 6] =
        [&["cat", "a:b"], &["cat", "-l", "b"], &["ping", "a"], &["ping", "-l"], &["list"], &["stat"]];
    for command in commands {
        let output = Guard::spawn(&mut partywall(&[&["--broker", socket], command].concat())).output();
        assert_eq!(output.status.code(), Some(69), "{command:?}");
        let text = said(&output);
        assert!(text.contains("partywalld --socket") && text.contains(socket), "{command:?}: {text}");
    }
    let waited = Guard::spawn(&mut partywall(&["--broker", socket, "cat", "a:b", "--wait", "50ms"])).output();
    assert_eq!(waited.status.code(), Some(69), "still nobody after waiting");
}

#[test]
fn empty_broker_variable_counts_as_unset() {
    let dir = tempfile::tempdir().unwrap();
    let mut command = partywall(&["list"]);
    // No broker of this host is asked.
    command.env("PARTYWALL_BROKER", "").env("XDG_RUNTIME_DIR", dir.path());
    let output = Guard::spawn(&mut command).output();
    assert_ne!(output.status.code(), Some(2), "{}", said(&output));
}

#[test]
fn wrong_usage_exits_with_code_2_and_names_the_mistake() {
    let cases: [(&[&str], &str); 17] = [
        (&["cat"], "DOMAIN:SERVICE"),
        (&["cat", "nocolon"], "DOMAIN:SERVICE"),
        (&["cat", "-l", "a:b"], "only the service"),
        (&["cat", "a:b", "--ring", "3000"], "power of two"),
        (&["cat", "a:b", "--ring", "2G"], "power of two"),
        (&["cat", "a:b", "--wait", "soon"], "seconds"),
        (&["cat", "a:b", "--wait=-1"], "negative"),
        (&["cat", "a:b", "--idle-timeout", "0"], "more than 0"),
        (&["cat", "a:b", "-k"], "--listen"),
        (&["cat", "a:b", "--send-only", "--recv-only"], "cannot be used with"),
        (&["cat", "a:b", "--nonsense"], "--nonsense"),
        (&["ping", "a", "-s", "8", "--one-way"], "at least 24"),
        (&["ping", "a", "-c", "0"], "from 1 to 1000000000"),
        (&["ping", "a", "-s", "1G"], "16M"),
        (&["stat", "seven"], "invalid"),
        (&["--domain", "no spaces", "list"], "--domain"),
        (&["frobnicate"], "frobnicate"),
    ];
    for (arguments, word) in cases {
        let output = Guard::spawn(&mut partywall(&[&["--broker", "/nonexistent"], arguments].concat())).output();
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {}", said(&output));
        assert!(said(&output).contains(word), "{arguments:?} should say {word}: {}", said(&output));
        assert!(output.stdout.is_empty());
    }
}

#[test]
fn unknown_name_exits_with_code_3() {
    let world = World::new();
    let _listener = Guard::spawn(&mut world.partywall("b", &["cat", "-l", "there"]));
    world.await_service("b", "there");
    let cases: [(&[&str], &str); 4] = [
        (&["cat", "nobody:there"], "nobody"),
        (&["cat", "b:elsewhere"], "elsewhere"),
        (&["ping", "b"], "ping"),
        (&["stat", "123456"], "123456"),
    ];
    for (arguments, word) in cases {
        let output = world.run("a", arguments);
        assert_eq!(output.status.code(), Some(3), "{arguments:?}: {}", said(&output));
        assert!(said(&output).contains(word), "{arguments:?}: {}", said(&output));
    }
    let waited = world.run("a", &["cat", "b:elsewhere", "--wait", "50ms"]);
    assert_eq!(waited.status.code(), Some(6), "{}", said(&waited));
    let taken = world.run("b", &["cat", "-l", "there"]);
    assert_eq!(taken.status.code(), Some(3), "{}", said(&taken));
}

#[test]
fn cluster_list_without_gateway_names_its_program() {
    let world = World::new();
    let output = world.run("a", &["list", "--cluster"]);
    assert_eq!(output.status.code(), Some(3), "{}", said(&output));
    assert!(said(&output).contains("no gateway is connected"), "{}", said(&output));
    assert!(said(&output).contains("start `partywall-gateway`"), "{}", said(&output));
    let absent = world.run("a", &["cat", "db:queries"]);
    assert!(said(&absent).contains("`partywall list --cluster`"), "{}", said(&absent));
}

#[test]
fn forbidden_request_exits_with_code_3() {
    let uid = rustix::process::geteuid().as_raw();
    let policy = format!("administrators = []\n[[join]]\ndomain = \"ok-*\"\nusers = [{uid}]\n");
    let world = World::with_policy(Some(&policy));
    let join = world.run("other", &["list"]);
    assert_eq!(join.status.code(), Some(3), "{}", said(&join));
    assert!(said(&join).contains("policy"), "{}", said(&join));
    let mut listener = Guard::spawn(&mut world.partywall("ok-b", &["cat", "-l", "x"]));
    // No rule lets ok-a connect to ok-b. Until ok-b is there it is unknown, which is waited for.
    let connect = world.run("ok-a", &["cat", "ok-b:x", "--wait", "60"]);
    assert_eq!(connect.status.code(), Some(3), "{}", said(&connect));
    assert!(listener.0.try_wait().unwrap().is_none(), "and the listener is not disturbed");
}
