//! `cargo xtask unsafe`: every use of `unsafe` is opted into with a reason, and says why it is sound.
//!
//! The compiler denies `unsafe` that is not opted into, and clippy wants a comment on blocks and impls. This check adds
//! that the opt-in stands in the same file, that it carries a reason, that functions, traits and extern blocks speak
//! too, and that no comment serves for two uses.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::LazyLock;

use regex::Regex;

use crate::error::Error;
use crate::report::{Finding, Report};
use crate::source::{Source, line_of};
use crate::tree::Tree;

/// How many lines above a use its comment may stand.
const NEAR: usize = 12;

/// A use of the word, except the type `unsafe fn(...)`, which promises nothing.
static USE: LazyLock<Regex> = LazyLock::new(|| pattern(r#"\bunsafe\b(\s*(?:extern\s*(?:" *"\s*)?)?fn\s*\()?"#));
static OPT_IN: LazyLock<Regex> = LazyLock::new(|| pattern(r"\b(?:expect|allow)\s*\(([^)]*)\)"));
static REASON: LazyLock<Regex> = LazyLock::new(|| pattern(r#"reason\s*=\s*"[^"]"#));
static COMMENT: LazyLock<Regex> = LazyLock::new(|| pattern(r"SAFETY:|# Safety"));

fn pattern(text: &str) -> Regex {
    Regex::new(text).expect("the patterns of this file are constant and tested")
}

pub(crate) fn check(tree: &Tree) -> Result<Report, Error> {
    let mut findings = Vec::new();
    let mut per_crate: BTreeMap<String, (usize, usize)> = BTreeMap::new();
    for file in tree.files("rs")? {
        let (uses, found) = judge(&file.path, &file.text);
        if uses > 0 {
            let count = per_crate.entry(crate_of(&file.path)).or_default();
            count.0 += 1;
            count.1 += uses;
        }
        findings.extend(found);
    }
    let total: usize = per_crate.values().map(|(_, uses)| uses).sum();
    Ok(Report {
        check: "unsafe",
        looked_at: format!("{total} uses"),
        notes: per_crate.iter().map(|(name, (files, uses))| format!("{name}: {uses} uses in {files} files")).collect(),
        findings,
    })
}

/// `crates/shm/src/lib.rs` -> `crates/shm`; `fuzz/fuzz_targets/ring.rs` -> `fuzz`.
fn crate_of(path: &str) -> String {
    let depth = if path.starts_with("crates/") { 2 } else { 1 };
    path.split('/').take(depth).collect::<Vec<_>>().join("/")
}

/// How often the file uses `unsafe`, and what is wrong with that.
fn judge(path: &str, text: &str) -> (usize, Vec<Finding>) {
    let source = Source::scan(text);
    // A line is one use, however often the word stands on it.
    let uses: BTreeSet<usize> = USE
        .captures_iter(source.code())
        .filter(|found| found.get(1).is_none())
        .filter_map(|found| found.get(0))
        .map(|word| line_of(text, word.start()))
        .collect();
    let mut findings = Vec::new();
    if let Some(first) = uses.first()
        && !opts_in(&source, text)
    {
        findings.push(Finding::new(
            format!("{path}:{first}"),
            "the file uses `unsafe` without `#![expect(unsafe_code, reason = \"...\")]`",
        ));
    }
    let mut comments: BTreeSet<usize> =
        COMMENT.find_iter(source.comments()).map(|word| line_of(text, word.start())).collect();
    for line in &uses {
        let near = line.saturating_sub(NEAR)..=*line;
        match comments.range(near).next_back().copied() {
            Some(comment) => {
                comments.remove(&comment);
            }
            None => findings.push(Finding::new(
                format!("{path}:{line}"),
                "`unsafe` without a `SAFETY:` comment (or a `# Safety` section) for itself close above",
            )),
        }
    }
    (uses.len(), findings)
}

fn opts_in(source: &Source, text: &str) -> bool {
    OPT_IN
        .captures_iter(source.code())
        .filter_map(|found| found.get(1))
        .any(|inside| inside.as_str().contains("unsafe_code") && REASON.is_match(&text[inside.range()]))
}

#[cfg(test)]
mod tests {
    use super::*;

    const OPT: &str = "#![expect(unsafe_code, reason = \"maps memory\")]\n";

    fn findings(body: &str) -> Vec<Finding> {
        judge("a.rs", &format!("{OPT}{body}")).1
    }

    #[test]
    fn commented_block_function_and_impl_pass() {
        let body = "// SAFETY: one.\nlet x = unsafe { f() };\n\
                    /// # Safety\n/// two\npub unsafe fn f() {}\n\
                    // SAFETY: three.\nunsafe impl Send for X {}\n";
        assert_eq!(judge("a.rs", &format!("{OPT}{body}")), (3, vec![]));
    }

    #[test]
    fn each_kind_of_use_needs_a_comment() {
        for body in [
            "let x = unsafe { f() };\n",
            "pub unsafe fn f() {}\n",
            "unsafe impl Send for X {}\n",
            "unsafe trait T {}\n",
            "unsafe extern \"C\" { fn f(); }\n",
            "#[unsafe(no_mangle)]\n",
        ] {
            assert_eq!(findings(body).len(), 1, "{body}");
        }
    }

    #[test]
    fn one_comment_does_not_serve_for_two_uses() {
        let body = "// SAFETY: one.\nunsafe { f() };\nunsafe { g() };\n";
        assert_eq!(findings(body).len(), 1);
    }

    #[test]
    fn comment_far_above_or_below_does_not_count() {
        let far = format!("// SAFETY: one.\n{}unsafe {{ f() }};\n", "\n".repeat(NEAR));
        assert_eq!(findings(&far).len(), 1);
        assert_eq!(findings("unsafe { f() };\n// SAFETY: late.\n").len(), 1);
    }

    #[test]
    fn opt_in_needs_reason_and_must_be_code() {
        let use_ = "// SAFETY: one.\nunsafe { f() };\n";
        for opt in [
            "",
            "#![expect(unsafe_code)]\n",
            "#![expect(unsafe_code, reason = \"\")]\n",
            "// #![expect(unsafe_code, reason = \"no\")]\n",
        ] {
            assert_eq!(judge("a.rs", &format!("{opt}{use_}")).1.len(), 1, "{opt}");
        }
    }

    #[test]
    fn words_that_only_look_unsafe_are_no_use() {
        let body = "// unsafe\nlet s = \"unsafe\"; #[deny(unsafe_op_in_unsafe_fn)] let f: unsafe fn(u8) = g;\n\
                    let h: unsafe extern \"C\" fn(u8) = g;\n";
        assert_eq!(judge("a.rs", body), (0, vec![]));
    }
}
