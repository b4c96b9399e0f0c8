//! Paths in `code` exist, if they begin with a folder that does: `crates/shm/src/layout.rs`, `docs/`.
//!
//! A `*` stands for anything. Files that git ignores are made by the build, so they need not exist.

use std::path::Path;
use std::sync::LazyLock;

use regex::Regex;

use super::document::Document;
use crate::report::Finding;
use crate::tree::{File, Tree};

static PATH: LazyLock<Regex> = LazyLock::new(|| {
    Regex::new(r"^((?:[A-Za-z0-9_.*-]+/)+[A-Za-z0-9_.*-]*)(?:::[a-z0-9_:]+)?$")
        .expect("a constant pattern, tested below")
});

/// The path that this `code` is, if it is one.
pub(super) fn path_in(code: &str) -> Option<&str> {
    Some(PATH.captures(code)?.get(1)?.as_str())
}

pub(super) fn judge(tree: &Tree, file: &File, document: &Document) -> Vec<Finding> {
    let ignored = std::fs::read_to_string(tree.root().join(".gitignore")).unwrap_or_default();
    let here = tree.root().join(Path::new(&file.path).parent().unwrap_or(Path::new("")));
    let mut findings = Vec::new();
    for (line, code) in &document.codes {
        let Some(path) = path_in(code) else { continue };
        if is_ignored(&ignored, path) {
            continue;
        }
        let first = path.split('/').next().unwrap_or_default();
        let bases: Vec<&Path> = [here.as_path(), tree.root()]
            .into_iter()
            .filter(|base| !first.contains('*') && base.join(first).is_dir())
            .collect();
        let fixed = path.split('*').next().unwrap_or_default();
        let fixed = match fixed.len() == path.len() {
            true => path,
            false => fixed.rsplit_once('/').map_or("", |(folder, _)| folder),
        };
        if !bases.is_empty() && !bases.iter().any(|base| base.join(fixed).exists()) {
            findings.push(Finding::new(format!("{}:{line}", file.path), format!("`{path}` does not exist")));
        }
    }
    findings
}

fn is_ignored(gitignore: &str, path: &str) -> bool {
    gitignore
        .lines()
        .map(|line| line.trim_matches('/'))
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .any(|line| path == line || path.starts_with(&format!("{line}/")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_path_like_code_is_path() {
        assert_eq!(path_in("docs/a.md"), Some("docs/a.md"));
        assert_eq!(path_in("crates/x/tests/a.rs::works"), Some("crates/x/tests/a.rs"));
        for code in ["a.md", "web:echo", "a / b", "/run/x", "crates/{a,b}", "reserve/commit()"] {
            assert_eq!(path_in(code), None, "{code}");
        }
    }

    #[test]
    fn path_in_existing_folder_must_exist() {
        let folder = tempfile::tempdir().expect("a folder");
        let made = folder.path().join("crates/one/src");
        std::fs::create_dir_all(&made).expect("a folder");
        std::fs::write(made.join("lib.rs"), "").expect("a file");
        std::fs::write(folder.path().join(".gitignore"), "/crates/out\n").expect("a file");
        let tree = Tree::new(folder.path());
        let text = "`crates/one/src/lib.rs` `src/lib.rs` `crates/*/src/` `crates/out/x` `elsewhere/x`\n\n`crates/two/` `src/main.rs`\n";
        let file = File { path: "crates/one/README.md".to_owned(), text: text.to_owned() };
        let findings = judge(&tree, &file, &Document::parse(text));
        let places: Vec<&str> = findings.iter().map(|finding| finding.place.as_str()).collect();
        assert_eq!(places, ["crates/one/README.md:3"; 2], "{findings:?}");
    }
}
