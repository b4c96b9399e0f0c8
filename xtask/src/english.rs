//! `cargo xtask english`: phrases that make a reader stop do not come back.
//!
//! Documents and sources (comments, messages and names alike) are searched for the phrases of [`PHRASES`], each of which has a
//! plainer replacement. An underscore counts as a space there, so that `spins_in_vain` is found as well. The names of tests are
//! `subject_condition_result`: they have at most [`LONGEST_NAME`] characters, begin with no article, and have none of the words of
//! [`NAME_WORDS`].

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

/// The most characters that a test's name may have.
const LONGEST_NAME: usize = 60;

/// Words that leave the subject of a test's name open, or that are no technical terms. Each is matched between underscores.
const NAME_WORDS: &[&str] = &[
    "who",
    "whom",
    "what",
    "whoever",
    "nobody",
    "everybody",
    "somebody",
    "let_go",
    "lets_go",
    "for_ever",
    "so_many",
    "so_much",
    "so_long",
    "of_its_own",
    "is_told",
    "are_told",
];

/// Where the phrases are quoted, or where others' words are kept.
const SKIPPED: &[&str] = &["xtask/src/english.rs", "bench/results/"];

static PATTERN: LazyLock<Regex> = LazyLock::new(|| {
    let all: Vec<&str> = PHRASES.iter().map(|(phrase, _)| *phrase).collect();
    Regex::new(&format!(r"(?i-u)\b(?:{})\b", all.join("|"))).expect("the phrases of this file are constant and tested")
});

/// A test function: its attribute, further attributes and comments, and its name.
static TEST: LazyLock<Regex> = LazyLock::new(|| {
    let pattern = r"(?m)^[ \t]*#\[(?:tokio::)?test\b[^\n]*\n(?:[ \t]*(?:#\[|//)[^\n]*\n)*[ \t]*(?:async )?fn (\w+)";
    Regex::new(pattern).expect("the pattern of this file is constant and tested")
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
        if file.path.ends_with(".rs") {
            findings
                .extend(test_names(&file.text).map(|(line, what)| Finding::new(format!("{}:{line}", file.path), what)));
        }
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
    // As many bytes as before, so that the places are the same.
    let text = &text.replace('_', " ");
    let hit = |found: regex::Match<'_>| Hit {
        line: line_of(text, found.start()),
        phrase: found.as_str().to_owned(),
        instead: instead(found.as_str()),
    };
    PATTERN.find_iter(text).map(hit).collect()
}

/// The lines and faults of the names of tests in a source file.
fn test_names(text: &str) -> impl Iterator<Item = (usize, String)> + '_ {
    TEST.captures_iter(text).filter_map(move |found| {
        let name = found.get(1)?;
        fault_of(name.as_str()).map(|fault| (line_of(text, name.start()), format!("`{}`: {fault}", name.as_str())))
    })
}

/// What is wrong with the name of a test.
fn fault_of(name: &str) -> Option<String> {
    if name.len() > LONGEST_NAME {
        return Some(format!("a test's name has at most {LONGEST_NAME} characters, and this one has {}", name.len()));
    }
    if ["a_", "an_", "the_"].iter().any(|article| name.starts_with(article)) {
        return Some("begin a test's name with its subject, not with an article".to_owned());
    }
    let between = format!("_{name}_");
    let word = NAME_WORDS.iter().find(|word| between.contains(&format!("_{word}_")))?;
    Some(format!("name the subject instead of `{word}`"))
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
    fn phrase_in_identifier_is_found() {
        let hits = find("let spins_in_vain = 1;\nfn is_interval() {}\n");
        let found: Vec<_> = hits.iter().map(|hit| (hit.line, hit.phrase.as_str())).collect();
        assert_eq!(found, [(1, "in vain")]);
    }

    #[test]
    fn test_name_with_article_length_or_open_subject_is_found() {
        let long = "x".repeat(LONGEST_NAME + 1);
        for (name, words) in [
            ("the_end_is_reported", "article"),
            (long.as_str(), "at most 60"),
            ("sleeper_is_told_once", "`is_told`"),
            ("who_waits_is_woken", "`who`"),
        ] {
            let text = format!("mod tests {{\n    #[test]\n    #[ignore]\n    fn {name}() {{}}\n}}\n");
            let found: Vec<_> = test_names(&text).collect();
            assert_eq!(found.len(), 1, "{name}");
            assert!(found[0].0 == 4 && found[0].1.contains(words), "{found:?}");
        }
        let fine = "#[tokio::test(flavor = \"multi_thread\")]\nasync fn whole_theory_holds() {}\nfn the_helper() {}\n";
        assert_eq!(test_names(fine).count(), 0);
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
