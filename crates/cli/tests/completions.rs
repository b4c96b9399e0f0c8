//! Shell completion of the names that the broker knows, through bash's own script too.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use std::io::Write as _;
use std::process::{Command, Stdio};

use common::{Guard, PARTYWALL, World, partywall};

/// The completions that are offered for the last of these words.
fn offered(world: &World, words: &[&str]) -> Vec<String> {
    let mut command = partywall(&["--", "partywall"]);
    command.args(words).env("PARTYWALL_BROKER", world.socket()).env("PARTYWALL_DOMAIN", "watcher");
    command
        .env("PARTYWALL_COMPLETE", "bash")
        .env("_CLAP_COMPLETE_INDEX", words.len().to_string())
        .env("_CLAP_IFS", "\n");
    command.env("_CLAP_COMPLETE_COMP_TYPE", "9").env("_CLAP_COMPLETE_SPACE", "false");
    let output = Guard::spawn(&mut command).output();
    assert!(output.status.success(), "{}", common::said(&output));
    String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect()
}

/// A broker with a service and a client that is connected to it.
fn world() -> (World, [Guard; 2]) {
    let world = World::new();
    let db = Guard::spawn(&mut world.partywall("db", &["cat", "-l", "in", "--recv-only"]));
    world.await_service("db", "in");
    let web = Guard::spawn(world.partywall("web", &["cat", "db:in"]).stdin(Stdio::piped()));
    world.await_that("a channel is open", || !offered(&world, &["stat", ""]).is_empty_of_digits());
    (world, [db, web])
}

trait Digits {
    /// Whether nothing in it is a number.
    fn is_empty_of_digits(&self) -> bool;
}

impl Digits for Vec<String> {
    fn is_empty_of_digits(&self) -> bool {
        !self.iter().any(|candidate| candidate.parse::<u64>().is_ok())
    }
}

#[test]
fn services_domains_and_channels_are_offered() {
    let (world, _running) = world();
    assert_eq!(offered(&world, &["cat", "d"]), ["db:in"]);
    assert_eq!(offered(&world, &["ping", "db:"]), ["db:in"]);
    assert_eq!(offered(&world, &["policy", "test", "--from", "w"]), ["web"]);
    assert_eq!(offered(&world, &["policy", "test", "--from", "web", "--to", "db"]), ["db:in"]);
    assert_eq!(offered(&world, &["why", "--j"]), ["--json"]);
    assert!(offered(&world, &["cat", "nobody"]).is_empty());
}

#[test]
fn bash_completes_a_service_behind_its_colon() {
    let (world, _running) = world();
    let script = partywall(&["completions", "bash"]).output().unwrap().stdout;
    std::fs::write(world.path("completion"), script).unwrap();
    let folder = std::path::Path::new(PARTYWALL).parent().unwrap();
    for (words, cword, expected) in [
        ("partywall cat d", 2, "[db:in ]"),
        ("partywall cat db :", 3, "[in ]"),
        ("partywall cat db : i", 4, "[in ]"),
        ("partywall ev", 1, "[events ]"),
    ] {
        let test =
            "source \"$1\"; COMP_WORDS=($2); COMP_CWORD=$3; COMP_TYPE=9; _partywall; printf '[%s]' \"${COMPREPLY[@]}\"";
        let mut bash = Command::new("bash");
        bash.args(["--norc", "-c", test, "bash"]).arg(world.path("completion")).args([words, &cword.to_string()]);
        bash.env("PATH", format!("{}:{}", folder.display(), std::env::var("PATH").unwrap()));
        bash.env("PARTYWALL_BROKER", world.socket()).env("PARTYWALL_DOMAIN", "watcher");
        let output = bash.output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), expected, "{words}: {}", common::said(&output));
    }
}

#[test]
fn shell_without_a_broker_gets_options_at_once() {
    let mut command = partywall(&["--", "partywall", "cat", "x"]);
    command.env("PARTYWALL_BROKER", "/nonexistent/broker").env("PARTYWALL_COMPLETE", "fish");
    let output = Guard::spawn(&mut command).output();
    assert!(output.status.success() && output.stdout.is_empty() && output.stderr.is_empty(), "{output:?}");
}

/// A shell of the machine, with our programs first on its PATH, in a world whose names it is to complete. `None`, with a note on stderr, if it is missing.
fn shell(name: &str, test: &str, world: &World) -> Option<Command> {
    if !Command::new(name).arg("--version").output().is_ok_and(|output| output.status.success()) {
        // Past the harness, which keeps what tests print to itself.
        let _ = std::io::stderr().write_all(format!("NOT TESTED: {test}: {name} is not installed\n").as_bytes());
        return None;
    }
    let folder = std::path::Path::new(PARTYWALL).parent().unwrap();
    let mut shell = Command::new(name);
    shell.env("PATH", format!("{}:{}", folder.display(), std::env::var("PATH").unwrap()));
    // No settings of the user who runs the test, and none left behind.
    shell.env("HOME", world.path("")).env("XDG_CONFIG_HOME", world.path("")).env("XDG_DATA_HOME", world.path(""));
    shell.env("PARTYWALL_BROKER", world.socket()).env("PARTYWALL_DOMAIN", "watcher");
    shell.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    Some(shell)
}

/// The scripts of both programs for a shell.
fn scripts(world: &World, name: &str) -> [String; 2] {
    let ours = partywall(&["completions", name]).output().unwrap().stdout;
    let brokers = Command::new(common::partywalld()).args(["--print-completions", name]).output().unwrap().stdout;
    [("partywall", ours), ("partywalld", brokers)].map(|(program, script)| {
        let path = world.path(&format!("{program}.{name}"));
        std::fs::write(&path, script).unwrap();
        path.to_str().unwrap().to_owned()
    })
}

/// A script that prints the line after Tab, in a terminal.
const ZSH: &str = r#"
zmodload zsh/zpty
zpty shell zsh -f -i
zpty -w shell "PS1=; autoload -Uz compinit; compinit -D -u; source $1; source $2; bindkey '^I' complete-word
show() { zle -I; print -r -- \"<\$BUFFER>\"; BUFFER= }; zle -N show; bindkey '^Xs' show; print 'READ'Y"
zpty -r -m shell shown '*READY*'
for line in "${@:3}"; do
    zpty -n -w shell "$line"$'\t'$'\x18s'
    zpty -r -m shell shown '*<*>*'
    print -r -- "${${shown##*<}%%>*}"
done
zpty -d shell
"#;

#[test]
fn zsh_completes_names_of_the_broker_and_options_of_partywalld() {
    let (world, _running) = world();
    let Some(mut zsh) = shell("zsh", "zsh_completes_names_of_the_broker_and_options_of_partywalld", &world) else {
        return;
    };
    zsh.args(["-f", "-c", ZSH, "zsh"]).args(scripts(&world, "zsh"));
    zsh.args(["partywall cat d", "partywall cat db:", "partywall policy test --from w", "partywalld --check"]);
    let output = Guard::spawn(&mut zsh).output();
    let lines: Vec<_> = std::str::from_utf8(&output.stdout).unwrap().lines().map(str::trim_end).collect();
    let expected =
        ["partywall cat db:in", "partywall cat db:in", "partywall policy test --from web", "partywalld --check-policy"];
    assert_eq!(lines, expected, "{}", common::said(&output));
}

#[test]
fn fish_completes_names_of_the_broker_and_options_of_partywalld() {
    let (world, _running) = world();
    let Some(mut fish) = shell("fish", "fish_completes_names_of_the_broker_and_options_of_partywalld", &world) else {
        return;
    };
    let test = "source $argv[1]; source $argv[2]; for line in $argv[3..]; complete -C $line; end";
    fish.args(["--no-config", "-c", test]).args(scripts(&world, "fish"));
    fish.args(["partywall cat d", "partywall cat db:", "partywall policy test --from w", "partywalld --check"]);
    let output = Guard::spawn(&mut fish).output();
    let text = String::from_utf8(output.stdout.clone()).unwrap();
    // Some have their help behind a tab.
    let names: Vec<&str> = text.lines().map(|line| line.split('\t').next().unwrap_or_default()).collect();
    assert_eq!(names, ["db:in", "db:in", "web", "--check-policy"], "{}", common::said(&output));
}
