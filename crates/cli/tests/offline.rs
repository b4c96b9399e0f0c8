//! The commands that work without a broker: help, doctor, completions, manual pages, and the way to the bench.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

mod common;

use std::process::{Command, Stdio};

use common::{Guard, partywall, said};

fn run(arguments: &[&str]) -> std::process::Output {
    Guard::spawn(&mut partywall(arguments)).output()
}

#[test]
fn doctor_reports_in_json_and_in_words() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("none.sock");
    let output = run(&["--broker", socket.to_str().unwrap(), "doctor", "--json"]);
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let checks = report["checks"].as_array().unwrap();
    assert!(checks.len() > 15, "{report}");
    for check in checks {
        let status = check["status"].as_str().unwrap();
        assert!(["ok", "warn", "fail"].contains(&status));
        assert!(!check["means"].as_str().unwrap().is_empty() && !check["found"].as_str().unwrap().is_empty());
        assert_eq!(
            status == "ok",
            check["remedy"].is_null(),
            "a remedy exactly where there is something to do: {check}"
        );
    }
    let failed = checks.iter().any(|c| c["status"] == "fail");
    assert_eq!(output.status.code(), Some(i32::from(failed)));
    let reachable = checks.iter().find(|c| c["name"] == "reachable").unwrap();
    assert_eq!(reachable["status"], "warn", "an absent broker is no fault of the machine");
    let text = String::from_utf8(run(&["doctor"]).stdout).unwrap();
    assert!(text.contains("memfd seals") && text.contains("to consider"), "{text}");
}

#[test]
fn doctor_compares_limits_with_requested_load() {
    let output = run(&["doctor", "--json", "--channels", "10000000"]);
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let maps = report["checks"].as_array().unwrap().iter().find(|c| c["name"] == "mappings").unwrap().clone();
    assert_eq!(maps["status"], "warn");
    assert!(maps["remedy"].as_str().unwrap().contains("sysctl -w vm.max_map_count="), "{maps}");
}

#[test]
fn version_has_commit_protocols_and_every_kind_of_use() {
    let text = String::from_utf8(run(&["--version"]).stdout).unwrap();
    let line = |name: &str| {
        let found = text.lines().find_map(|line| line.strip_prefix(&format!("{name}: ")));
        found.unwrap_or_else(|| panic!("no line `{name}`: {text}")).to_owned()
    };
    // `make build` tells a release its commit; the build of the tests does not.
    let commit = option_env!("PARTYWALL_COMMIT").unwrap_or("unknown");
    assert!(line("commit").starts_with(commit), "{text}");
    let protocols = line("protocol");
    for protocol in ["control", "memory", "directory", "status"] {
        assert!(protocols.contains(&format!("{protocol} ")), "{text}");
    }
    let features = line("features");
    for feature in [
        "streams",
        "messages",
        "broadcast",
        "groups",
        "calls",
        "unmodified programs",
        "virtual machines",
        "switch",
        "disks",
        "file systems",
        "containers",
        "services",
    ] {
        assert!(features.contains(feature), "{feature} is missing: {text}");
    }
    let short = String::from_utf8(run(&["-V"]).stdout).unwrap();
    assert_eq!(short, format!("partywall {}\n", env!("CARGO_PKG_VERSION")));
}

#[test]
fn every_command_has_help_with_examples() {
    let text = String::from_utf8(run(&["--help"]).stdout).unwrap();
    for word in ["Examples:", "PARTYWALL_BROKER", "/run/partywall/broker.sock", "Exit codes:", "69"] {
        assert!(text.contains(word), "{word} is missing:\n{text}");
    }
    assert!(!text.contains("tcp-cat"), "helpers of the demo are not shown");
    for command in [
        "cat",
        "ping",
        "list",
        "stat",
        "why",
        "events",
        "doctor",
        "demo",
        "completions",
        "man",
        "enable",
        "disable",
        "container",
        "sysdump",
    ] {
        let output = run(&[command, "--help"]);
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success() && text.contains("Examples:"), "{command}:\n{text}");
    }
}

#[test]
fn completions_and_manual_pages_are_made() {
    for shell in ["bash", "zsh", "fish"] {
        let script = String::from_utf8(run(&["completions", shell]).stdout).unwrap();
        assert!(script.contains("partywall") && script.contains("PARTYWALL_COMPLETE"), "{shell}");
    }
    assert_eq!(run(&["completions", "cmd.exe"]).status.code(), Some(2));
    let page = String::from_utf8(run(&["man"]).stdout).unwrap();
    assert!(page.contains(".TH partywall 1") && page.contains("PARTYWALL_BROKER"));
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("man1");
    assert!(run(&["man", target.to_str().unwrap()]).status.success());
    for name in ["partywall.1", "partywall-cat.1", "partywall-doctor.1"] {
        assert!(target.join(name).metadata().unwrap().len() > 500, "{name}");
    }
    let blocked = dir.path().join("file");
    std::fs::write(&blocked, "").unwrap();
    assert_eq!(run(&["man", blocked.to_str().unwrap()]).status.code(), Some(1));
}

#[test]
fn output_whose_reader_left_ends_without_an_error() {
    for arguments in [
        &["completions", "bash"][..],
        &["man"],
        &["doctor", "--json"],
        &["--broker", "/nonexistent/socket", "top", "--interval", "50ms"],
    ] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = Guard::spawn(partywall(arguments).stdout(writer)).output();
        assert_eq!((output.status.code(), said(&output).as_str()), (Some(0), ""), "{arguments:?}");
    }
}

#[test]
fn invalid_number_error_shows_expected_form() {
    for (arguments, words) in [
        (&["stat", "abc"][..], "whole number"),
        (&["top", "--count", "x"], "whole number, 1 or more"),
        (&["doctor", "--channels", "0"], "from 1 to 10000000"),
        (&["cat", "--cpu", "x", "a:b"], "whole number"),
        (&["run", "--ring", "x", "true"], "as in 64K"),
        (&["run", "--spin", "x", "true"], "as in 50us"),
    ] {
        let output = run(arguments);
        let said = said(&output);
        assert!(output.status.code() == Some(2) && said.contains(words), "{arguments:?}: {said}");
        assert!(!said.contains("invalid digit"), "{arguments:?}: {said}");
    }
}

#[test]
fn help_of_run_lists_only_its_own_exit_codes() {
    let text = String::from_utf8(run(&["run", "--help"]).stdout).unwrap();
    let (_, codes) = text.split_once("Exit codes:\n").unwrap();
    assert!(codes.trim_start().starts_with("the program's own") && codes.contains("127"), "{codes}");
    assert!(!codes.contains("the peer died") && !codes.contains("timed out"), "{codes}");
}

#[test]
fn full_output_device_is_error_and_not_panic() {
    for arguments in [&["completions", "bash"][..], &["man"], &["doctor"]] {
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let output = Guard::spawn(partywall(arguments).stdout(full)).output();
        assert_eq!(output.status.code(), Some(1), "{arguments:?}: {}", said(&output));
        assert!(said(&output).contains("cannot write to standard output"), "{arguments:?}: {}", said(&output));
    }
}

#[test]
fn bench_passes_all_arguments_on() {
    // A partywall of our own, with a bench beside it that tells how it was called.
    let dir = tempfile::tempdir().unwrap();
    let copy = dir.path().join("partywall");
    common::copy_program(common::PARTYWALL, &copy);
    let alone =
        Command::new(&copy).args(["bench", "ipc"]).env("PATH", dir.path()).stdin(Stdio::null()).output().unwrap();
    assert_eq!(alone.status.code(), Some(1));
    assert!(said(&alone).contains("partywall-bench") && said(&alone).contains("cargo build"), "{}", said(&alone));
    let bench = dir.path().join("partywall-bench");
    common::make_script(&bench, "echo \"$@\"\nexit 7");
    let output =
        Command::new(&copy).args(["bench", "stream", "--help", "-c", "--", "x"]).stdin(Stdio::null()).output().unwrap();
    assert_eq!(output.status.code(), Some(7), "{}", said(&output));
    assert_eq!(String::from_utf8(output.stdout).unwrap().trim(), "stream --help -c -- x");
}

#[test]
fn options_before_agent_blk_and_fs_reach_their_programs() {
    let dir = tempfile::tempdir().unwrap();
    let copy = dir.path().join("partywall");
    common::copy_program(common::PARTYWALL, &copy);
    for name in ["agent", "blk", "fs"] {
        let program = dir.path().join(format!("partywall-{name}"));
        common::make_script(&program, "echo \"$PARTYWALL_BROKER $PARTYWALL_DOMAIN $@\"");
        let shown = |options: &[&str]| {
            let mut command = Command::new(&copy);
            command.args(options).args([name, "x"]).stdin(Stdio::null());
            for variable in partywall_protocol::environment::ALL {
                command.env_remove(variable);
            }
            String::from_utf8(command.output().unwrap().stdout).unwrap()
        };
        assert_eq!(shown(&["--broker", "/run/b.sock", "--domain", "store"]), "/run/b.sock store x\n", "{name}");
        assert_eq!(shown(&[]), "  x\n", "{name}");
    }
}
