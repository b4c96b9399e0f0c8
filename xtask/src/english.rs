//! `cargo xtask english`: phrases that make a reader stop do not come back.
//!
//! Documents and sources (comments, messages and names alike) are searched for the phrases of [`PHRASES`], each of which has a
//! plainer replacement.

use std::sync::LazyLock;

use regex::Regex;

use crate::error::Error;
use crate::report::{Finding, Report};
use crate::source::line_of;
use crate::tree::Tree;

/// Phrases, as regular expressions without their word boundaries, and what to write instead.
const PHRASES: &[(&str, &str)] = &[
    ("but for", "except"),
    ("as ever", "as before"),
    ("in vain", "without success"),
    ("anew", "again"),
    ("none is", "there is no"),
    ("for good", "permanently"),
    ("of (?:its|their|his|one's) own", "own, or separate"),
    ("on (?:its|their) way", "in transit"),
    ("lets? go of", "closes, releases or drops"),
    ("(?:is|are) told", "gets, sees, or name who reports it"),
    ("who(?:so)?ever", "name the subject: the reader, the caller, any client"),
    ("all the while", "throughout"),
    ("makes? up for", "repeats, completes"),
    ("may know of", "visible"),
    ("mourn(?:s|ed|ing)?|penance", "the technical term"),
    ("that of which", "name it"),
    ("for who", "name the subject"),
];

/// Where the phrases are quoted, or where others' words are kept.
const SKIPPED: &[&str] = &["xtask/src/english.rs", "bench/results/"];

static PATTERN: LazyLock<Regex> = LazyLock::new(|| {
    let all: Vec<&str> = PHRASES.iter().map(|(phrase, _)| *phrase).collect();
    Regex::new(&format!(r"(?i-u)\b(?:{})\b", all.join("|"))).expect("the phrases of this file are constant and tested")
});

/// One phrase that was found.
#[derive(Debug, PartialEq, Eq)]
struct Hit {
    line: usize,
    phrase: String,
    instead: &'static str,
}

pub(crate) fn check(tree: &Tree) -> Result<Report, Error> {
    let mut files = tree.files("md")?;
    files.extend(tree.files("rs")?);
    let mut findings = Vec::new();
    for file in files.iter().filter(|file| !SKIPPED.iter().any(|skipped| file.path.starts_with(skipped))) {
        findings.extend(find(&file.text).into_iter().map(|hit| {
            let what = format!("`{}`: write {}", hit.phrase, hit.instead);
            Finding::new(format!("{}:{}", file.path, hit.line), what)
        }));
    }
    let looked_at = format!("{} files", files.len());
    Ok(Report { check: "english", looked_at, findings, ..Report::default() })
}

fn find(text: &str) -> Vec<Hit> {
    let instead = |phrase: &str| {
        let fits =
            |pattern: &str| Regex::new(&format!("(?i-u)^(?:{pattern})$")).is_ok_and(|regex| regex.is_match(phrase));
        PHRASES.iter().find(|(pattern, _)| fits(pattern)).map_or("", |(_, instead)| *instead)
    };
    let hit = |found: regex::Match<'_>| Hit {
        line: line_of(text, found.start()),
        phrase: found.as_str().to_owned(),
        instead: instead(found.as_str()),
    };
    PATTERN.find_iter(text).map(hit).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phrase_is_found_with_line_and_replacement() {
        let hits = find("plain\nAs ever, but for that. Everyone asks for a good thing.\n");
        let found: Vec<_> = hits.iter().map(|hit| (hit.line, hit.phrase.as_str(), hit.instead)).collect();
        assert_eq!(found, [(2, "As ever", "as before"), (2, "but for", "except")]);
    }

    #[test]
    fn every_phrase_has_a_replacement() {
        assert!(PHRASES.iter().all(|(phrase, instead)| !phrase.is_empty() && !instead.is_empty()));
        assert_eq!(find("those of their own are told").len(), 2);
    }

    #[test]
    fn phrase_in_document_is_finding_with_its_line() {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::write(folder.path().join("a.md"), "plain\nas ever\n").expect("a file");
        let report = check(&Tree::new(folder.path())).expect("a report");
        assert_eq!(report.findings.len(), 1);
        assert!(!report.is_clean());
    }
}
