//! The proofs in a column *Proved by* exist, or the row says `pending`.
//!
//! A proof, in `code`, is one of: a test function (`name`, or `module::name`), a file (`path`, or `path::name`),
//! `make target`, `cargo xtask check`, or a `partywall` command.

use std::collections::HashMap;
use std::path::Path;
use std::sync::LazyLock;

use clap::Subcommand;
use regex::Regex;

use super::document::{Cell, Document};
use super::paths::path_in;
use crate::error::Error;
use crate::report::Finding;
use crate::tree::{File, Tree};

const COLUMN: &str = "proved by";

static DEFINITION: LazyLock<Regex> =
    LazyLock::new(|| Regex::new(r"\bfn (\w+)").expect("a constant pattern, tested below"));

/// The names that can be cited as proofs.
#[derive(Debug, Default)]
pub(super) struct Known {
    sources: Vec<File>,
    /// For each name of a function, the indices in `sources` of the files that define one. A search of all files for each
    /// citation would take minutes.
    functions: HashMap<String, Vec<usize>>,
    makefile: String,
}

/// The findings and counts of one document.
#[derive(Debug, Default)]
pub(super) struct Outcome {
    pub(super) promises: usize,
    pub(super) pending: usize,
    pub(super) findings: Vec<Finding>,
}

impl Known {
    pub(super) fn gather(tree: &Tree) -> Result<Self, Error> {
        let mut sources = tree.files("rs")?;
        sources.extend(tree.files("sh")?);
        Ok(Known::new(sources, tree.read("Makefile").map(|file| file.text).unwrap_or_default()))
    }

    fn new(sources: Vec<File>, makefile: String) -> Self {
        let mut functions: HashMap<String, Vec<usize>> = HashMap::new();
        for (index, file) in sources.iter().enumerate() {
            for name in DEFINITION.captures_iter(&file.text).filter_map(|found| found.get(1)) {
                functions.entry(name.as_str().to_owned()).or_default().push(index);
            }
        }
        Known { sources, functions, makefile }
    }

    /// The files that define the function `name`, inside the modules that `name` gives.
    fn defining(&self, name: &str) -> impl Iterator<Item = &File> {
        let (modules, function) = name.rsplit_once("::").unwrap_or(("", name));
        let files = self.functions.get(function).into_iter().flatten().filter_map(|index| self.sources.get(*index));
        let modules: Vec<String> = modules.split("::").filter(|module| !module.is_empty()).map(str::to_owned).collect();
        files.filter(move |file| modules.iter().all(|module| is_inside(file, module)))
    }

    /// Why `proof` does not count, if it does not.
    fn wrong(&self, proof: &str) -> Option<&'static str> {
        let exists = if let Some(target) = proof.strip_prefix("make ") {
            return (!self.has_target(target)).then_some("is no target of the Makefile");
        } else if let Some(check) = proof.strip_prefix("cargo xtask ") {
            return (!crate::Check::has_subcommand(check)).then_some("is no check of xtask");
        } else if proof.starts_with("partywall ") || proof.starts_with("partywalld ") {
            true
        } else if let Some(path) = path_in(proof) {
            match proof.split_once("::") {
                Some((_, name)) => self.defining(name).any(|file| file.path == path),
                // Whether a bare path exists has been looked at already, with all others.
                None => true,
            }
        } else {
            self.defining(proof).next().is_some()
        };
        (!exists).then_some("is neither a function nor a file of this project")
    }

    fn has_target(&self, target: &str) -> bool {
        let name = target.split(' ').next().unwrap_or_default();
        self.makefile.lines().any(|line| line.strip_prefix(name).is_some_and(|rest| rest.starts_with(':')))
    }
}

/// Whether `module` is a module in `file`, or one that the file is part of.
fn is_inside(file: &File, module: &str) -> bool {
    file.text.contains(&format!("mod {module}"))
        || Path::new(&file.path).with_extension("").components().any(|part| part.as_os_str() == module)
}

pub(super) fn judge(known: &Known, file: &File, document: &Document) -> Outcome {
    let mut outcome = Outcome::default();
    for table in &document.tables {
        let Some(column) = table.head.iter().position(|cell| cell.text.trim().to_lowercase() == COLUMN) else {
            continue;
        };
        for (line, row) in &table.rows {
            let place = format!("{}:{line}", file.path);
            let cell = row.get(column).cloned().unwrap_or_default();
            outcome.promises += 1;
            let pending = is_pending(&cell);
            outcome.pending += usize::from(pending);
            if cell.codes.is_empty() && !pending {
                outcome.findings.push(Finding::new(&place, "names no proof, and does not say `pending` either"));
            }
            for proof in &cell.codes {
                if let Some(what) = known.wrong(proof) {
                    outcome.findings.push(Finding::new(&place, format!("`{proof}` {what}")));
                }
            }
        }
    }
    outcome
}

fn is_pending(cell: &Cell) -> bool {
    cell.text.to_lowercase().contains("pending")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn known() -> Known {
        let file = |path: &str, text: &str| File { path: path.to_owned(), text: text.to_owned() };
        let sources = vec![
            file("crates/one/src/ring.rs", "mod tests { #[test] fn keeps_order() {} }"),
            file("crates/one/tests/death.rs", "#[test]\nfn is_noticed() {}"),
        ];
        Known::new(sources, "test: build\nsoak:\n".to_owned())
    }

    #[test]
    fn existing_proof_is_accepted() {
        for proof in [
            "keeps_order",
            "ring::tests::keeps_order",
            "death::is_noticed",
            "crates/one/tests/death.rs::is_noticed",
            "make soak",
            "make soak SOAK_SECONDS=5",
            "cargo xtask layers",
            "partywall bench latency",
        ] {
            assert_eq!(known().wrong(proof), None, "{proof}");
        }
    }

    #[test]
    fn missing_proof_is_found() {
        for proof in [
            "keeps_orde",
            "death::keeps_order",
            "crates/one/tests/death.rs::keeps_order",
            "make soa",
            "cargo xtask layer",
            "something else",
        ] {
            assert!(known().wrong(proof).is_some(), "{proof}");
        }
    }

    #[test]
    fn row_without_proof_or_pending_is_found() {
        let text = "| Promise | Proved by |\n| --- | --- |\n| a | `keeps_order` |\n| b | pending |\n| c | |\n| d | `gone` |\n\n| x |\n| --- |\n| y |\n";
        let file = File { path: "S.md".to_owned(), text: text.to_owned() };
        let outcome = judge(&known(), &file, &Document::parse(text));
        assert_eq!((outcome.promises, outcome.pending), (4, 1));
        let places: Vec<&str> = outcome.findings.iter().map(|finding| finding.place.as_str()).collect();
        assert_eq!(places, ["S.md:5", "S.md:6"]);
    }
}
