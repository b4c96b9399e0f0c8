//! The decisions of a policy, and the errors of a wrong file.

use super::*;
use crate::credentials::Home;

const SAMPLE: &str = r#"
administrators = ["root", 500]
sessions_per_user = 7

[quota]
channels = 1000

[[join]]
domain = "web-*"
users = [1001]
quota = { channels = 100, max_ring = 65536 }

[[join]]
domain = "db"
users = [1002]
groups = [3000]

[[join]]
domain = "guest.?"
users = ["*"]

[[connect]]
from = "web-*"
to = "db"
service = "sql"

[[connect]]
from = "db"
to = "*"
"#;

fn name(text: &str) -> Name {
    Name::new(text).unwrap()
}

fn peer(uid: u32, gid: u32) -> Credentials {
    Credentials::on_host(uid, gid, Home::Broker, 1)
}

#[test]
fn join_rules_match_users_groups_and_patterns() {
    let policy = Policy::parse(SAMPLE).unwrap();
    for (uid, gid, domain, expected) in [
        (1001, 1001, "web-1", true),
        (1001, 1001, "web-", true),
        (1001, 1001, "web", false),
        (1001, 1001, "db", false),
        (1002, 1002, "db", true),
        (1002, 1002, "web-1", false),
        (1003, 3000, "db", true),
        (1003, 1003, "db", false),
        (1003, 1003, "guest.1", true),
        (1003, 1003, "guest.11", false),
        (0, 0, "anything", true),
        (500, 500, "db", true),
    ] {
        assert_eq!(policy.may_join(peer(uid, gid), &name(domain)).is_some(), expected, "{uid}:{gid} as {domain}");
    }
}

#[test]
fn connect_rules_match_pairs_of_domains_and_service() {
    let policy = Policy::parse(SAMPLE).unwrap();
    for (uid, from, to, service, expected) in [
        (1001, "web-1", "db", "sql", true),
        (1001, "web-1", "db", "admin", false),
        (1001, "web-1", "web-2", "sql", false),
        (1001, "web-1", "web-1", "anything", true),
        (1002, "db", "web-1", "anything", true),
        (1002, "guest.1", "db", "sql", false),
        (0, "guest.1", "db", "sql", true),
    ] {
        let allowed = policy.may_connect(peer(uid, uid), &name(from), &name(to), &name(service));
        assert_eq!(allowed, expected, "{from} of {uid} to {to}:{service}");
    }
    assert!(policy.may_reach(&name("web-1"), &name("db")));
    assert!(!policy.may_reach(&name("web-1"), &name("web-2")));
}

#[test]
fn first_matching_rule_sets_quota() {
    let policy = Policy::parse(SAMPLE).unwrap();
    let web = policy.may_join(peer(1001, 1), &name("web-1")).unwrap();
    assert_eq!((web.channels, web.max_ring, web.sessions), (100, 65536, Quota::default().sessions));
    assert_eq!(policy.may_join(peer(1002, 1), &name("db")).unwrap().channels, 1000);
    assert_eq!(policy.may_join(peer(0, 0), &name("web-1")).unwrap().channels, 1000);
    assert_eq!(policy.sessions_per_user(), 7);
}

#[test]
fn policy_without_file_admits_root_and_same_user_only() {
    let policy = Policy::for_user(1000);
    for (uid, expected) in [(1000, true), (0, true), (1001, false), (u32::MAX, false)] {
        assert_eq!(policy.may_join(peer(uid, 1000), &name("a")).is_some(), expected);
        assert_eq!(policy.may_join_something(peer(uid, 1000)), expected);
        assert_eq!(policy.may_connect(peer(uid, uid), &name("a"), &name("b"), &name("s")), expected);
        assert_eq!(policy.is_administrator(peer(uid, 1)), expected);
    }
}

#[test]
fn file_without_administrators_leaves_root_as_one() {
    for (text, root) in [("", true), ("administrators = []", false), ("administrators = [7]", false)] {
        let policy = Policy::parse(text).unwrap();
        assert_eq!(policy.is_administrator(peer(0, 0)), root, "{text}");
        assert!(!policy.may_join_something(peer(1, 1)), "{text}");
    }
}

#[test]
fn user_and_group_names_resolve_when_policy_is_read() {
    let policy = Policy::parse("administrators = ['root']\n[[join]]\ndomain='a'\ngroups=['root']").unwrap();
    assert!(policy.is_administrator(peer(0, 1)) && !policy.is_administrator(peer(1, 1)));
    assert!(policy.may_join(peer(77, 0), &name("a")).is_some());
}

#[test]
fn policy_error_names_line_and_cause() {
    for (text, line, words) in [
        ("administators = []", 1, "unknown field `administators`"),
        ("\n[quota]\nchanels = 1", 3, "unknown field `chanels`"),
        ("\n\n[[join]]\ndomain = 'web/*'", 4, "can match no name"),
        ("[[join]]\ndomain = '-a'", 2, "can match no name"),
        ("[[join]]\ndomain = ''", 2, "can match no name"),
        ("[[join]]\nusers = [1]", 1, "missing field `domain`"),
        ("administrators = ['nobody-by-this-name']", 1, "no user \"nobody-by-this-name\""),
        ("[[join]]\ndomain = 'a'\ngroups = ['no-such-group']", 3, "no group \"no-such-group\""),
        ("administrators = [-1]", 1, "a name in quotes or a number"),
        ("[quota]\nsessions = -5", 2, "-5"),
        ("[[connect]]\nfrom = 'a'\nto = 'b'\nservices = 'x'", 4, "unknown field `services`"),
        ("[[join]]\ndomain = 'a'\nquota = { ring = 1 }", 3, "unknown field `ring`"),
        ("[quota", 1, "quota"),
    ] {
        let message = Policy::parse(text).unwrap_err().to_string();
        assert!(message.contains(&format!("line {line}")), "{text:?}: {message}");
        assert!(message.contains(words), "{text:?}: {message}");
    }
}

#[test]
fn sample_policy_is_valid() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("partywalld.toml");
    let policy = Policy::read(&path).unwrap();
    assert!(policy.is_administrator(peer(0, 1)));
}

/// A key that no table has, so that the error of the parser names the keys that the table has.
const NO_KEY: &str = "no_such_key";

/// Finds the keys of the table between `before` and `after`, and of the tables in it. Each has the name of its table.
fn known_keys(table: &str, before: &str, after: &str, found: &mut Vec<(String, String)>) {
    let error = Policy::parse(&format!("{before}{NO_KEY} = 1{after}")).unwrap_err();
    let Some(expected) = error.message().strip_prefix(&format!("unknown field `{NO_KEY}`, expected ")) else { return };
    for key in expected.split('`').skip(1).step_by(2) {
        found.push((table.to_owned(), key.to_owned()));
        known_keys(key, &format!("{before}{key} = {{ "), &format!(" }}{after}"), found);
        known_keys(key, &format!("{before}{key} = [{{ "), &format!(" }}]{after}"), found);
    }
}

#[test]
fn sample_policy_has_every_key_of_every_table() {
    let sample = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("partywalld.toml")).unwrap();
    let (mut table, mut keys) = ("", Vec::new());
    // What is commented out counts.
    for line in sample.lines().map(|line| line.strip_prefix("# ").unwrap_or(line)) {
        if line.starts_with('[') && line.ends_with(']') {
            table = line.trim_matches(['[', ']']);
        } else if let Some((key, _)) = line.split_once(" = ") {
            keys.push((table, key));
        }
    }
    let mut known = Vec::new();
    known_keys("", "", "", &mut known);
    assert!(known.iter().any(|(table, key)| table == "machine" && key == "migratable"), "{known:?}");
    // Tables have lines of their names, and this key is the former name of another.
    let tables: Vec<_> = known.iter().map(|(table, _)| table.clone()).collect();
    known.retain(|(table, key)| !(table.is_empty() && tables.contains(key)) && key != "upgrade");
    known.retain(|(table, key)| !keys.contains(&(table.as_str(), key.as_str())));
    assert!(known.is_empty(), "the sample lacks these keys: {known:?}");
}

#[test]
fn missing_policy_file_is_named() {
    let error = Policy::read(Path::new("/nonexistent/policy.toml")).unwrap_err().to_string();
    assert!(error.contains("/nonexistent/policy.toml"), "{error}");
}
