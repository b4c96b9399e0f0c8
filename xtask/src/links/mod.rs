//! `cargo xtask links`: what the documents link to and name exists.
//!
//! Three things are looked at in every Markdown file: links (and their `#anchors`), paths of files in `code`, and the
//! proofs in tables that have a column *Proved by*. Links to other sites are not followed.

mod document;
mod paths;
mod proofs;
mod targets;

use crate::error::Error;
use crate::report::Report;
use crate::tree::Tree;

pub(crate) fn check(tree: &Tree) -> Result<Report, Error> {
    let files = tree.files("md")?;
    let tests = proofs::Known::gather(tree)?;
    let mut findings = Vec::new();
    let mut notes = Vec::new();
    for file in &files {
        let document = document::Document::parse(&file.text);
        findings.extend(targets::judge(tree, file, &document));
        findings.extend(paths::judge(tree, file, &document));
        let proofs = proofs::judge(&tests, file, &document);
        if proofs.promises > 0 {
            notes.push(format!("{}: {} rows to prove, {} of them pending", file.path, proofs.promises, proofs.pending));
        }
        findings.extend(proofs.findings);
    }
    Ok(Report { check: "links", looked_at: format!("{} documents", files.len()), notes, findings })
}
