//! `cargo xtask protocol`: the clauses of docs/protocol.md that code names exist, and each number has one rule.
//!
//! A number names one clause, and a clause has at most one MUST or MUST NOT: a definition, a fact or a permission has none. Every MUST stands in a
//! clause, except in the text before the first section.
//!
//! Code names a clause as `protocol R4`, several as `protocol R4, W3` or `protocol R1-R3`. Clauses that no code names
//! are listed: either nothing implements them yet, or the code that does has not said so.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::LazyLock;

use regex::Regex;

use crate::error::Error;
use crate::report::{Finding, Report};
use crate::source::line_of;
use crate::tree::Tree;

const DOCUMENT: &str = "docs/protocol.md";

/// `- **C4** text` or `- **C4.1** text`: the clause, or a part of it.
static CLAUSE: LazyLock<Regex> = LazyLock::new(|| pattern(r"(?m)^\s*- \*\*([A-Z][0-9]+(?:\.[0-9]+)?)\*\*"));
/// `protocol C3.2, W1-W4 and S2`: the list after the word.
static MENTION: LazyLock<Regex> = LazyLock::new(|| {
    pattern(
        r"\b[Pp]rotocol ([A-Z][0-9]+(?:\.[0-9]+)?\b(?:(?:, |-|\u{2013}|/| and |, and )[A-Z][0-9]+(?:\.[0-9]+)?\b)*)",
    )
});
static MUST: LazyLock<Regex> = LazyLock::new(|| pattern(r"\bMUST\b"));
static ONE: LazyLock<Regex> = LazyLock::new(|| pattern(r"([-\u{2013}])?([A-Z][0-9]+)"));

fn pattern(text: &str) -> Regex {
    Regex::new(text).expect("the patterns of this file are constant and tested")
}

/// The name of a clause, in the order of the document.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Clause {
    letter: char,
    number: u32,
}

impl fmt::Display for Clause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.letter, self.number)
    }
}

impl Clause {
    /// The clause that `name` names or, if it has a point in it, belongs to.
    fn parse(name: &str) -> Option<Clause> {
        let letter = name.chars().next()?;
        let number = name.get(1..)?.split('.').next()?.parse().ok()?;
        Some(Clause { letter, number })
    }
}

pub(crate) fn check(tree: &Tree) -> Result<Report, Error> {
    let document = tree.read(DOCUMENT)?.text;
    let clauses = clauses(&document);
    let mut findings = rules(&document);
    let mut named = BTreeSet::new();
    for file in tree.files("rs")? {
        // The fixtures of this check name clauses that do not exist.
        if file.path.starts_with("xtask/") {
            continue;
        }
        for (line, clause) in mentions(&file.text) {
            if !clauses.contains(&clause) {
                findings.push(Finding::new(
                    format!("{}:{line}", file.path),
                    format!("names protocol {clause}, which {DOCUMENT} does not have"),
                ));
            }
            named.insert(clause);
        }
    }
    let unnamed: Vec<String> = clauses.difference(&named).map(Clause::to_string).collect();
    let mut notes = Vec::new();
    if !unnamed.is_empty() {
        notes.push(format!("no code names: {}", unnamed.join(" ")));
    }
    Ok(Report {
        check: "protocol",
        looked_at: format!("{} clauses, {} of them named in code", clauses.len(), clauses.len() - unnamed.len()),
        notes,
        findings,
    })
}

fn clauses(document: &str) -> BTreeSet<Clause> {
    CLAUSE.captures_iter(document).filter_map(|found| Clause::parse(found.get(1)?.as_str())).collect()
}

/// Where a number has more than one rule: it stands twice, or its clause has several MUSTs. And where a MUST has no number.
fn rules(document: &str) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut places: BTreeMap<&str, usize> = BTreeMap::new();
    // The number of the present clause, and the MUSTs in it so far. `None` between a heading and the first clause below it.
    let mut clause: Option<(&str, usize)> = None;
    let mut is_begun = false;
    for (at, line) in (1..).zip(document.lines()) {
        let mut finding = |what| findings.push(Finding::new(format!("{DOCUMENT}:{at}"), what));
        if line.starts_with("## ") {
            (is_begun, clause) = (true, None);
        } else if let Some(name) = CLAUSE.captures(line).and_then(|found| found.get(1)) {
            clause = Some((name.as_str(), 0));
            if let Some(earlier) = places.insert(name.as_str(), at) {
                finding(format!(
                    "{} stands at line {earlier} already: give the rule a number that no other has",
                    name.as_str()
                ));
            }
        }
        let musts = MUST.find_iter(line).count();
        match &mut clause {
            Some((name, count)) => {
                if *count <= 1 && *count + musts > 1 {
                    finding(format!("{name} has more than one MUST: split it into clauses with numbers below {name}"));
                }
                *count += musts;
            }
            None if is_begun && musts > 0 => {
                finding("a MUST outside of a numbered clause: give it a number".to_owned())
            }
            None => {}
        }
    }
    findings
}

/// Every clause that `text` names, and on which line. `R1-R3` names three.
fn mentions(text: &str) -> Vec<(usize, Clause)> {
    let mut all = Vec::new();
    for list in MENTION.captures_iter(text).filter_map(|found| found.get(1)) {
        let line = line_of(text, list.start());
        let mut last: Option<Clause> = None;
        for one in ONE.captures_iter(list.as_str()) {
            let Some(clause) = one.get(2).and_then(|name| Clause::parse(name.as_str())) else {
                continue;
            };
            if let (Some(from), Some(_)) = (last, one.get(1))
                && from.letter == clause.letter
            {
                let between = from.number + 1..clause.number;
                all.extend(between.map(|number| (line, Clause { number, ..from })));
            }
            all.push((line, clause));
            last = Some(clause);
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(text: &str) -> Vec<String> {
        mentions(text).iter().map(|(_, clause)| clause.to_string()).collect()
    }

    #[test]
    fn clauses_are_read_from_the_document() {
        let found = clauses("- **M1** A region.\n  - **M1.1** A part.\n- **M10.2** Text, see M3.\n\nC7 is not one.\n");
        let found: Vec<String> = found.iter().map(Clause::to_string).collect();
        assert_eq!(found, ["M1", "M10"]);
    }

    #[test]
    fn clause_with_two_rules_or_rule_without_clause_is_found() {
        let lines = |text: &str| rules(text).into_iter().map(|finding| finding.place).collect::<Vec<_>>();
        let sound = "MUST binds a party.\n## M. Memory\n- **M1** It MUST do,\n  so.\n  - **M1.1** It MUST NOT do.\n- **M2** A fact.\n";
        assert_eq!(lines(sound), Vec::<String>::new());
        let twice =
            lines("## M. Memory\n- **M1** It MUST do one thing.\n\n  | a | MUST do another |\n  | b | MUST too |\n");
        assert_eq!(twice, ["docs/protocol.md:4"], "once for each clause");
        assert_eq!(lines("## M. Memory\n- **M1** It MUST, and MUST NOT.\n"), ["docs/protocol.md:2"]);
        assert_eq!(lines("## M. Memory\nAll MUST do it.\n- **M1** A fact.\n"), ["docs/protocol.md:2"]);
        assert_eq!(lines("## M. Memory\n- **M1** A fact.\n- **M1** Another.\n"), ["docs/protocol.md:3"]);
    }

    #[test]
    fn mention_names_one_clause_list_or_range() {
        assert_eq!(names("// (protocol M2)"), ["M2"]);
        assert_eq!(names("/// Protocol C3.2: the first"), ["C3"]);
        assert_eq!(names("// protocol R4, W3 and S2."), ["R4", "W3", "S2"]);
        assert_eq!(names("// protocol W1-W4"), ["W1", "W2", "W3", "W4"]);
        assert_eq!(names("// the protocol and M2; protocols R1"), Vec::<String>::new());
    }

    #[test]
    fn mention_has_its_line() {
        assert_eq!(mentions("\n\n// protocol B1\n")[0].0, 3);
    }

    #[test]
    fn unknown_clause_is_found_and_unnamed_clause_is_noted() {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::create_dir_all(folder.path().join("docs")).expect("a folder");
        std::fs::write(folder.path().join(DOCUMENT), "- **M1** a\n- **M2** b\n").expect("a file");
        std::fs::write(folder.path().join("a.rs"), "// protocol M1\n// protocol M9\n").expect("a file");
        let report = check(&Tree::new(folder.path())).expect("a report");
        assert_eq!(report.findings.len(), 1, "{report}");
        assert_eq!(report.findings[0].place, "a.rs:2");
        assert_eq!(report.notes, ["no code names: M2"]);
    }
}
