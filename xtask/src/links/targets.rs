//! Links lead somewhere.

use std::path::{Component, Path, PathBuf};

use super::document::Document;
use crate::report::Finding;
use crate::tree::{File, Tree};

pub(super) fn judge(tree: &Tree, file: &File, document: &Document) -> Vec<Finding> {
    document
        .links
        .iter()
        .filter_map(|(line, link)| {
            let what = wrong(tree, file, document, link)?;
            Some(Finding::new(format!("{}:{line}", file.path), format!("the link `{link}` {what}")))
        })
        .collect()
}

fn wrong(tree: &Tree, file: &File, document: &Document, link: &str) -> Option<String> {
    if link.contains("://") || link.starts_with("mailto:") {
        return None;
    }
    let (path, anchor) = link.split_once('#').map_or((link, None), |(path, anchor)| (path, Some(anchor)));
    if path.is_empty() {
        return anchor.filter(|name| !document.anchors.contains(*name)).map(|_| "names no heading here".to_owned());
    }
    let Some(target) = resolve(&file.path, path) else {
        return Some("leads out of the project".to_owned());
    };
    let full = tree.root().join(&target);
    if !full.exists() {
        return Some("leads to a file that does not exist".to_owned());
    }
    let anchor = anchor?;
    let text = std::fs::read_to_string(full).ok()?;
    (!Document::parse(&text).anchors.contains(anchor)).then(|| "names a heading that the file does not have".to_owned())
}

/// The target of `link` in the document `from`, relative to the root; `None` if it is outside.
pub(super) fn resolve(from: &str, link: &str) -> Option<PathBuf> {
    let mut resolved = Path::new(from).parent()?.to_owned();
    for part in Path::new(link).components() {
        match part {
            Component::Normal(name) => resolved.push(name),
            Component::CurDir => {}
            Component::ParentDir => {
                if !resolved.pop() {
                    return None;
                }
            }
            Component::RootDir | Component::Prefix(_) => return None,
        }
    }
    Some(resolved)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_resolve_from_the_document_and_stay_inside() {
        assert_eq!(resolve("docs/a.md", "../b.md"), Some(PathBuf::from("b.md")));
        assert_eq!(resolve("docs/a.md", "./b.md"), Some(PathBuf::from("docs/b.md")));
        assert_eq!(resolve("docs/a.md", "../../b.md"), None);
        assert_eq!(resolve("docs/a.md", "/etc/passwd"), None);
    }

    #[test]
    fn broken_links_are_found() {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::write(folder.path().join("b.md"), "# Here\n").expect("a file");
        let tree = Tree::new(folder.path());
        let text = "# Me\n[ok](b.md#here) [ok](#me) [ok](https://example.org/x) [ok](b.md)\n\n\
                    [no](c.md) [no](b.md#there) [no](#you) [no](../b.md)\n";
        let file = File { path: "a.md".to_owned(), text: text.to_owned() };
        let findings = judge(&tree, &file, &Document::parse(text));
        assert_eq!(findings.len(), 4, "{findings:?}");
        assert!(findings.iter().all(|finding| finding.place == "a.md:4"), "{findings:?}");
    }
}
