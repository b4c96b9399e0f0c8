//! `cargo xtask edges`: every release and every acquire on shared memory says which edge it is an end of, and every edge has both ends.
//!
//! In the crates of [`CHECKED`], a use of `Ordering::Acquire`, `Release` or `AcqRel`, and a call of `load_acquire`, has a comment
//! `EDGE name` close above in the same function. One comment may name several edges (`EDGE one, two: ...`) and stand for several uses below it.
//! Where the other end is no ordering in these crates, the comment says what it is instead: `EDGE name (with the kernel): ...`.
//!
//! Code that loom runs takes its atomics from the facade, `shm::sync`, and not from the standard library. (Clippy's `disallowed-types` cannot say
//! this: the facade passes the standard library's types on, and clippy knows a type by its definition.)

use std::collections::BTreeMap;
use std::sync::LazyLock;

use regex::Regex;

use crate::error::Error;
use crate::report::{Finding, Report};
use crate::source::{Source, line_of};
use crate::tree::Tree;

/// Where orderings must be named.
const CHECKED: &[&str] = &["crates/shm/src/", "crates/preload/src/"];
/// Where they need not be. Edges that are named there count all the same.
const EXEMPT: &[&str] = &[
    // The facade, which passes orderings on.
    "crates/shm/src/sync.rs",
];
/// The files whose code loom runs.
const MODELLED: &[&str] = &[
    "crates/shm/src/",
    "crates/preload/src/lock/word.rs",
    "crates/preload/src/arena/blocks.rs",
    "crates/preload/src/table/words.rs",
];
/// The files that use atomics of the standard library all the same.
const UNMODELLED: &[&str] = &[
    // The facade.
    "crates/shm/src/sync.rs",
    // Copies of bytes that a peer may be changing, which models have cells for.
    "crates/shm/src/copying.rs",
];
/// How many lines above a use its comment may stand.
const NEAR: usize = 10;

static USE: LazyLock<Regex> =
    LazyLock::new(|| pattern(r"\bOrdering::(Acquire|Release|AcqRel|SeqCst)\b|\b(load_acquire(?:_u32)?)[()]"));
static COMMENT: LazyLock<Regex> =
    LazyLock::new(|| pattern(r"\bEDGE ([a-z][a-z0-9-]*(?:, [a-z][a-z0-9-]*)*)( \((with|protocol) [^)]*\))?:"));
static STANDARD: LazyLock<Regex> = LazyLock::new(|| pattern(r"\b(?:core|std)::sync::atomic\b"));
static FUNCTION: LazyLock<Regex> = LazyLock::new(|| pattern(r"\bfn\s+\w+"));
static TESTS: LazyLock<Regex> = LazyLock::new(|| {
    pattern(r"(?m)^#\[cfg\((?:all\()?test\b[^\n]*\)\]\s*(?:#!?\[[^\n]*\]\s*)*(?:pub(?:\([a-z]+\))? )?mod \w+ \{")
});

fn pattern(text: &str) -> Regex {
    Regex::new(text).expect("the patterns of this file are constant and tested")
}

/// The ends of an edge that have been found.
#[derive(Debug, Default)]
struct Ends {
    /// Where it is named first.
    place: String,
    releases: bool,
    acquires: bool,
    /// Its other end is something else.
    is_outside: bool,
}

pub(crate) fn check(tree: &Tree) -> Result<Report, Error> {
    let mut edges = BTreeMap::new();
    let (mut findings, mut uses) = (Vec::new(), 0);
    for file in tree.files("rs")? {
        let starts = |paths: &[&str]| paths.iter().any(|start| file.path.starts_with(start));
        if starts(CHECKED) && !is_for_tests(&file.path) {
            let is_exempt = starts(EXEMPT);
            let (count, found) = judge(&file.path, &file.text, &mut edges);
            if starts(MODELLED) && !starts(UNMODELLED) {
                findings.extend(past_facade(&file.path, &file.text));
            }
            if !is_exempt {
                uses += count;
                findings.extend(found);
            }
        }
    }
    findings.extend(one_ended(&edges));
    Ok(Report {
        check: "edges",
        looked_at: format!("{uses} orderings, {} edges", edges.len()),
        notes: vec![format!("not looked at: {}", EXEMPT.join(", "))],
        findings,
    })
}

fn is_for_tests(path: &str) -> bool {
    path.ends_with("/tests.rs") || path.contains("/tests/")
}

/// Where a file that loom runs uses atomics that loom does not see.
fn past_facade(path: &str, text: &str) -> Vec<Finding> {
    let source = Source::scan(text);
    let finding = |place: regex::Match<'_>| {
        Finding::new(
            format!("{path}:{}", line_of(text, place.start())),
            format!("`{}` in code that loom runs: take the atomics from `shm::sync`", place.as_str()),
        )
    };
    STANDARD.find_iter(outside_tests(&source)).map(finding).collect()
}

/// The code of a file up to its module of tests.
fn outside_tests(source: &Source) -> &str {
    let code = source.code();
    &code[..TESTS.find(code).map_or(code.len(), |tests| tests.start())]
}

/// How many orderings a file has outside tests, and what is wrong with their comments. Enters the ends of edges.
fn judge(path: &str, text: &str, edges: &mut BTreeMap<String, Ends>) -> (usize, Vec<Finding>) {
    let whole = Source::scan(text);
    let code = outside_tests(&whole);
    let comments = &whole.comments()[..code.len()];
    let lines: Vec<&str> = code.lines().collect();
    let named: BTreeMap<usize, regex::Captures<'_>> = COMMENT
        .captures_iter(comments)
        .map(|found| (line_of(text, found.get(0).map_or(0, |m| m.start())), found))
        .collect();
    let mut is_used: BTreeMap<usize, bool> = named.keys().map(|line| (*line, false)).collect();
    let (mut count, mut findings) = (0, Vec::new());
    for found in USE.captures_iter(code) {
        let Some(word) = found.get(1).or_else(|| found.get(2)) else { continue };
        let line = line_of(text, word.start());
        let on = lines.get(line - 1).copied().unwrap_or_default();
        if on.contains(&format!("fn {}", word.as_str())) {
            continue;
        }
        // Sequential consistency is about all accesses at once. Where it is an end of an edge, it may say so.
        let (releases, acquires, must) = match word.as_str() {
            "Release" => (true, false, true),
            "AcqRel" => (true, true, true),
            "SeqCst" => (true, true, false),
            _ => (false, true, true),
        };
        count += usize::from(must);
        let in_function =
            |comment: usize| !(comment..line).any(|n| lines.get(n - 1).is_some_and(|l| FUNCTION.is_match(l)));
        let near = named.range(line.saturating_sub(NEAR)..=line).next_back().filter(|(at, _)| in_function(**at));
        let Some((at, comment)) = near else {
            if must {
                findings.push(Finding::new(
                    format!("{path}:{line}"),
                    format!("`{}` without a comment `EDGE name: ...` close above", word.as_str()),
                ));
            }
            continue;
        };
        is_used.insert(*at, true);
        for name in comment.get(1).map_or("", |names| names.as_str()).split(", ") {
            let ends = edges
                .entry(name.to_owned())
                .or_insert_with(|| Ends { place: format!("{path}:{at}"), ..Ends::default() });
            ends.releases |= releases;
            ends.acquires |= acquires;
            ends.is_outside |= comment.get(3).is_some_and(|kind| kind.as_str() == "with");
        }
    }
    findings.extend(is_used.iter().filter(|(_, used)| !**used).map(|(line, _)| {
        Finding::new(format!("{path}:{line}"), "a comment `EDGE name` with no ordering close below it")
    }));
    (count, findings)
}

/// Edges that lack an end.
fn one_ended(edges: &BTreeMap<String, Ends>) -> Vec<Finding> {
    let lacks = |ends: &Ends| !(ends.is_outside || ends.releases && ends.acquires);
    let of = |(name, ends): (&String, &Ends)| {
        let missing = if ends.releases { "acquires" } else { "releases" };
        Finding::new(
            &ends.place,
            format!("no ordering {missing} the edge `{name}`: name the other end, or say what it is with `(with ...)`"),
        )
    };
    edges.iter().filter(|(_, ends)| lacks(ends)).map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(text: &str) -> Vec<String> {
        let mut edges = BTreeMap::new();
        let (_, mut found) = judge("a.rs", text, &mut edges);
        found.extend(one_ended(&edges));
        found.into_iter().map(|finding| finding.what).collect()
    }

    const STORE: &str = "fn a() {\n    // EDGE x: releases it.\n    w.store(1, Ordering::Release);\n}\n";
    const LOAD: &str = "fn b() {\n    // EDGE x (protocol R2): acquires it.\n    load_acquire(&w);\n}\n";

    #[test]
    fn edge_with_both_ends_passes() {
        assert_eq!(findings(&format!("use s::load_acquire;\n{STORE}{LOAD}")), Vec::<String>::new());
        let both = "fn a() {\n    // EDGE x: both.\n    w.swap(1, Ordering::AcqRel);\n}\n";
        assert_eq!(findings(both), Vec::<String>::new());
    }

    #[test]
    fn edge_with_one_end_is_found() {
        assert_eq!(findings(STORE).len(), 1);
        assert_eq!(findings(LOAD).len(), 1);
        assert_eq!(findings(&STORE.replace("EDGE x", "EDGE x (with the kernel)")), Vec::<String>::new());
    }

    #[test]
    fn ordering_without_a_comment_is_found() {
        let bare = "fn c() {\n    w.load(Ordering::Acquire);\n}\n";
        assert_eq!(findings(&format!("{STORE}{LOAD}{bare}")).len(), 1);
        let far = format!("fn c() {{\n    // EDGE x: far.\n{}    w.load(Ordering::Acquire);\n}}\n", "\n".repeat(NEAR));
        assert_eq!(findings(&format!("{STORE}{LOAD}{far}")).len(), 2, "and the comment is about nothing");
    }

    #[test]
    fn comment_of_another_function_does_not_count() {
        let next = "fn c() {\n    w.load(Ordering::Acquire);\n}\n";
        assert_eq!(findings(&format!("{LOAD}{STORE}{next}")).len(), 1);
    }

    #[test]
    fn orderings_of_tests_and_full_fences_need_no_comment() {
        let tests = "#[cfg(all(test, not(loom)))]\nmod tests {\n    fn d() { w.load(Ordering::Acquire); }\n}\n";
        assert_eq!(findings(&format!("fn e() {{ fence(Ordering::SeqCst); }}\n{tests}")), Vec::<String>::new());
    }

    #[test]
    fn atomics_past_the_facade_are_found() {
        assert_eq!(past_facade("a.rs", "use core::sync::atomic::AtomicU32;\n").len(), 1);
        assert_eq!(past_facade("a.rs", "fn f() { std::sync::atomic::fence(order) }\n").len(), 1);
        let fine = "use crate::sync::AtomicU32; // not core::sync::atomic\n#[cfg(test)]\nmod tests {\n    use std::sync::atomic::AtomicU8;\n}\n";
        assert_eq!(past_facade("a.rs", fine), vec![]);
    }

    #[test]
    fn one_comment_may_name_several_edges() {
        let two = "fn f() {\n    // EDGE x, y: acquires both.\n    (a.load(Ordering::Acquire), b.load(Ordering::Acquire));\n}\n";
        assert_eq!(findings(&format!("{STORE}{two}")).len(), 1, "nothing releases y");
    }
}
