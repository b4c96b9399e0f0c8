//! The lowest crates make no system call, neither themselves nor through what they use.

use std::collections::{BTreeMap, BTreeSet};

use cargo_metadata::{DependencyKind, Metadata, PackageId};

use super::rules::{PURE, SYSTEM};
use crate::report::Finding;

/// Names of crates, and of those each one links.
type Graph = BTreeMap<String, Vec<String>>;

pub(super) fn judge(metadata: &Metadata) -> Vec<Finding> {
    let graph = graph(metadata);
    let packages = metadata.workspace_packages();
    let pure = packages.into_iter().filter_map(|package| {
        let name = PURE.iter().find(|name| package.name.as_str() == **name)?;
        Some((*name, package))
    });
    let mut findings = Vec::new();
    for (name, package) in pure {
        if let Some(path) = path_to_system(&graph, name) {
            findings.push(Finding::new(name, format!("must make no system call, but links {}", path.join(" -> "))));
        }
        let library = package.targets.iter().find(|target| target.is_lib());
        if let Some(text) = library.and_then(|target| std::fs::read_to_string(&target.src_path).ok())
            && !crate::source::Source::scan(&text).code().contains("no_std")
        {
            findings.push(Finding::new(name, "must be `#![no_std]`: the standard library is a way to the system"));
        }
    }
    findings
}

/// The links between crates: normal dependencies, without macros, which run at build time only.
fn graph(metadata: &Metadata) -> Graph {
    let macros: BTreeSet<&PackageId> = metadata
        .packages
        .iter()
        .filter(|package| package.targets.iter().any(|target| target.is_proc_macro()))
        .map(|package| &package.id)
        .collect();
    let name = |id: &PackageId| metadata[id].name.to_string();
    let nodes = metadata.resolve.iter().flat_map(|resolve| &resolve.nodes);
    nodes
        .map(|node| {
            let linked = node
                .deps
                .iter()
                .filter(|dependency| {
                    !macros.contains(&dependency.pkg)
                        && dependency.dep_kinds.iter().any(|kind| kind.kind == DependencyKind::Normal)
                })
                .map(|dependency| name(&dependency.pkg))
                .collect();
            (name(&node.id), linked)
        })
        .collect()
}

/// The way by which `from` comes to link a crate of [`SYSTEM`], if there is one.
fn path_to_system(graph: &Graph, from: &str) -> Option<Vec<String>> {
    let mut seen = BTreeSet::new();
    let mut waiting = vec![vec![from.to_owned()]];
    while let Some(path) = waiting.pop() {
        for next in path.last().and_then(|last| graph.get(last)).into_iter().flatten() {
            let mut longer = path.clone();
            longer.push(next.clone());
            if SYSTEM.contains(&next.as_str()) {
                return Some(longer);
            }
            if seen.insert(next.clone()) {
                waiting.push(longer);
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn graph_of(edges: &[(&str, &[&str])]) -> Graph {
        edges
            .iter()
            .map(|(from, to)| ((*from).to_owned(), to.iter().map(|name| (*name).to_owned()).collect()))
            .collect()
    }

    #[test]
    fn system_crate_is_found_at_any_depth() {
        let graph = graph_of(&[("shm", &["a", "b"]), ("a", &["b"]), ("b", &["a", "libc"])]);
        let path = path_to_system(&graph, "shm").expect("libc is linked");
        assert_eq!(path.first().map(String::as_str), Some("shm"));
        assert_eq!(path.last().map(String::as_str), Some("libc"));
    }

    #[test]
    fn crates_that_link_no_system_crate_pass_even_in_a_circle() {
        let graph = graph_of(&[("shm", &["a"]), ("a", &["b"]), ("b", &["a"]), ("other", &["libc"])]);
        assert_eq!(path_to_system(&graph, "shm"), None);
    }
}
