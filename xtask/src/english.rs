//! `cargo xtask english`: phrases that make a reader stop do not come back.
//!
//! Documents and sources (comments, messages and names alike) are searched for the phrases of [`PHRASES`], each of which has a
//! plainer replacement. `xtask/english.txt` lists how many are left in each file. A file may have no more than that; one that
//! has fewer asks for the list to be renewed with `cargo xtask english --record`, which refuses a greater total.

use std::collections::BTreeMap;
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

/// Today's counts, a line for each file that has any.
const RECORD: &str = "xtask/english.txt";

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

type Counts = BTreeMap<String, usize>;

pub(crate) fn check(tree: &Tree, record: bool) -> Result<Report, Error> {
    let mut hits: BTreeMap<String, Vec<Hit>> = BTreeMap::new();
    let mut files = tree.files("md")?;
    files.extend(tree.files("rs")?);
    for file in &files {
        if !SKIPPED.iter().any(|skipped| file.path.starts_with(skipped)) {
            let found = find(&file.text);
            if !found.is_empty() {
                hits.insert(file.path.clone(), found);
            }
        }
    }
    let total: usize = hits.values().map(Vec::len).sum();
    let mut recorded = tree.read(RECORD).map(|file| parse(&file.text)).unwrap_or_default();
    let mut findings = Vec::new();
    if record {
        let before: usize = recorded.values().sum();
        if total > before && !recorded.is_empty() {
            let what = format!("not renewed: {total} phrases are more than the {before} that it lists");
            findings.push(Finding::new(RECORD, what));
        } else {
            recorded = hits.iter().map(|(path, hits)| (path.clone(), hits.len())).collect();
            let path = tree.root().join(RECORD);
            std::fs::write(&path, print(&recorded)).map_err(|source| Error::Write { path, source })?;
        }
    }
    findings.extend(judge(&hits, &recorded));
    let looked_at = format!("{} files, {total} phrases still to be replaced in {} of them", files.len(), hits.len());
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

fn judge(hits: &BTreeMap<String, Vec<Hit>>, recorded: &Counts) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (path, hits) in hits {
        let allowed = recorded.get(path).copied().unwrap_or(0);
        if hits.len() > allowed {
            // Which of them are new nobody can tell, so all are shown.
            findings.extend(hits.iter().map(|hit| {
                let what =
                    format!("`{}`: write {} ({} in this file, {allowed} allowed)", hit.phrase, hit.instead, hits.len());
                Finding::new(format!("{path}:{}", hit.line), what)
            }));
        }
    }
    for (path, allowed) in recorded {
        let left = hits.get(path).map_or(0, Vec::len);
        if left < *allowed {
            let what = format!("has {left} phrases where {allowed} are listed; run `cargo xtask english --record`");
            findings.push(Finding::new(path, what));
        }
    }
    findings
}

fn parse(text: &str) -> Counts {
    let line = |line: &str| {
        let (count, path) = line.split_once(' ')?;
        Some((path.to_owned(), count.parse().ok()?))
    };
    text.lines().filter_map(line).collect()
}

fn print(counts: &Counts) -> String {
    counts.iter().map(|(path, count)| format!("{count} {path}\n")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(text: &str, record: Option<&str>) -> (tempfile::TempDir, Tree) {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::create_dir(folder.path().join("xtask")).expect("a folder");
        std::fs::write(folder.path().join("a.md"), text).expect("a file");
        if let Some(record) = record {
            std::fs::write(folder.path().join(RECORD), record).expect("a file");
        }
        let tree = Tree::new(folder.path());
        (folder, tree)
    }

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
    fn new_phrase_fails_and_recorded_one_passes() {
        let (_folder, of_one) = tree("as ever\n", None);
        assert_eq!(check(&of_one, false).expect("a report").findings.len(), 1);
        let (_folder, of_one) = tree("as ever\n", Some("1 a.md\n"));
        assert!(check(&of_one, false).expect("a report").is_clean());
        let (_folder, of_two) = tree("as ever, but for\n", Some("1 a.md\n"));
        assert_eq!(check(&of_two, false).expect("a report").findings.len(), 2);
    }

    #[test]
    fn removed_phrase_asks_for_record_and_record_only_shrinks() {
        let (_folder, better) = tree("plain\n", Some("1 a.md\n"));
        assert_eq!(check(&better, false).expect("a report").findings.len(), 1);
        assert!(check(&better, true).expect("a report").is_clean());
        assert_eq!(better.read(RECORD).expect("a file").text, "");
        let (_folder, worse) = tree("as ever, but for\n", Some("1 a.md\n"));
        assert!(!check(&worse, true).expect("a report").is_clean());
        assert_eq!(worse.read(RECORD).expect("a file").text, "1 a.md\n");
    }
}
