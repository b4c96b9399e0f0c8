//! `cargo xtask layers`: crates of the workspace, and the modules of its libraries, depend on one another only along the
//! arrows of the design.
//!
//! Normal and build dependencies are held to the arrows strictly; tests may also use the crates that
//! [`rules::TESTS_MAY_USE`] lists. A crate's README that states its rule must state the one that is checked.

mod modules;
mod pure;
mod readme;
mod rules;

use std::collections::BTreeSet;

use cargo_metadata::{DependencyKind, Metadata};

use crate::error::Error;
use crate::report::{Finding, Report};
use crate::tree::Tree;

/// As much of a crate as the rules speak of.
#[derive(Debug, Default)]
struct Crate {
    name: String,
    has_binary: bool,
    /// Names and kinds of all its dependencies.
    dependencies: Vec<(String, DependencyKind)>,
    readme: Option<String>,
}

pub(crate) fn check(tree: &Tree) -> Result<Report, Error> {
    let metadata = tree.metadata()?;
    let crates: Vec<Crate> = metadata.iter().flat_map(crates_of).collect();
    let mut findings = judge(&crates);
    for workspace in &metadata {
        findings.extend(pure::judge(workspace));
    }
    let silent: Vec<&str> = crates
        .iter()
        .filter(|c| c.readme.as_deref().and_then(readme::rule).is_none())
        .map(|c| c.name.as_str())
        .collect();
    let mut notes = Vec::new();
    if !silent.is_empty() {
        notes.push(format!("no dependency rule in the README of: {}", silent.join(", ")));
    }
    let (of_modules, counts) = modules::check(tree)?;
    findings.extend(of_modules);
    notes.extend(counts);
    Ok(Report { check: "layers", looked_at: format!("{} crates", crates.len()), notes, findings })
}

fn crates_of(metadata: &Metadata) -> Vec<Crate> {
    let packages = metadata.workspace_packages();
    packages
        .into_iter()
        .map(|package| Crate {
            name: package.name.to_string(),
            has_binary: package.targets.iter().any(|target| target.is_bin()),
            dependencies: package
                .dependencies
                .iter()
                .map(|dependency| (dependency.name.clone(), dependency.kind))
                .collect(),
            readme: package
                .manifest_path
                .parent()
                .and_then(|folder| std::fs::read_to_string(folder.join("README.md")).ok()),
        })
        .collect()
}

fn judge(crates: &[Crate]) -> Vec<Finding> {
    let ours: BTreeSet<&str> = crates.iter().map(|c| c.name.as_str()).collect();
    let is_program = |c: &&Crate| c.has_binary && !rules::LIBRARIES_WITH_PROGRAMS.contains(&c.name.as_str());
    let programs: BTreeSet<&str> = crates.iter().filter(is_program).map(|c| c.name.as_str()).collect();
    let mut findings = Vec::new();
    for one in crates {
        let Some(allowed) = rules::may_use(&one.name) else {
            findings.push(Finding::new(
                &one.name,
                "has no place in the layers: give it a row in xtask/src/layers/rules.rs and say why in ARCHITECTURE.md",
            ));
            continue;
        };
        for (dependency, kind) in &one.dependencies {
            // A crate's tests may name the crate itself, to switch on a feature.
            if !ours.contains(dependency.as_str()) || *dependency == one.name {
                continue;
            }
            if *kind == DependencyKind::Development {
                if !allowed.contains(&dependency.as_str()) && !rules::TESTS_MAY_USE.contains(&dependency.as_str()) {
                    findings.push(Finding::new(
                        &one.name,
                        format!("its tests use {dependency}, which is neither below it nor one of the crates every test may use ({})", rules::TESTS_MAY_USE.join(", ")),
                    ));
                }
            } else if !allowed.contains(&dependency.as_str()) {
                let below =
                    if allowed.is_empty() { "no crate of this workspace".to_owned() } else { allowed.join(", ") };
                findings
                    .push(Finding::new(&one.name, format!("depends on {dependency}, but may depend only on {below}")));
            } else if programs.contains(dependency.as_str()) && !rules::ARE_TESTS.contains(&one.name.as_str()) {
                findings.push(Finding::new(
                    &one.name,
                    format!(
                        "links {dependency}, which is a program: programs meet through the protocol, never by linking"
                    ),
                ));
            }
        }
        findings.extend(readme::judge(one, allowed));
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(name: &str, dependencies: &[(&str, DependencyKind)]) -> Crate {
        Crate {
            name: name.to_owned(),
            dependencies: dependencies.iter().map(|(name, kind)| ((*name).to_owned(), *kind)).collect(),
            ..Crate::default()
        }
    }

    fn layers() -> Vec<Crate> {
        use DependencyKind::{Development, Normal};
        vec![
            named("partywall-shm", &[("thiserror", Normal)]),
            named("partywall-region", &[("partywall-shm", Normal)]),
            named("partywall", &[("partywall-region", Normal), ("partywall-daemon", Development)]),
            Crate { has_binary: true, ..named("partywall-daemon", &[("partywall-region", Normal)]) },
            Crate { has_binary: true, ..named("partywall-cli", &[("partywall", Normal)]) },
        ]
    }

    #[test]
    fn drawn_arrows_are_accepted() {
        assert_eq!(judge(&layers()), vec![]);
    }

    #[test]
    fn upward_arrow_is_found() {
        let mut crates = layers();
        crates[0].dependencies.push(("partywall".to_owned(), DependencyKind::Normal));
        let findings = judge(&crates);
        assert_eq!(findings.len(), 1, "{findings:?}");
        assert!(findings[0].what.contains("no crate of this workspace"), "{findings:?}");
    }

    #[test]
    fn build_dependency_is_held_to_arrows() {
        let mut crates = layers();
        crates[1].dependencies.push(("partywall-daemon".to_owned(), DependencyKind::Build));
        assert_eq!(judge(&crates).len(), 1);
    }

    #[test]
    fn link_to_program_is_found() {
        let mut crates = layers();
        crates[4].dependencies.push(("partywall-daemon".to_owned(), DependencyKind::Normal));
        assert_eq!(judge(&crates).len(), 1);
        // Also along an arrow that is drawn: a library that grows a program stops being linkable.
        let mut crates = layers();
        crates[2].has_binary = true;
        let findings = judge(&crates);
        assert!(findings.iter().any(|f| f.what.contains("is a program")), "{findings:?}");
    }

    #[test]
    fn tests_may_start_a_broker_but_not_reach_up() {
        let mut crates = layers();
        crates[1].dependencies.push(("partywall-cli".to_owned(), DependencyKind::Development));
        let findings = judge(&crates);
        assert_eq!(findings.len(), 1, "{findings:?}");
    }

    #[test]
    fn tests_may_name_their_own_crate() {
        let mut crates = layers();
        crates[0].dependencies.push(("partywall-shm".to_owned(), DependencyKind::Development));
        assert_eq!(judge(&crates), vec![]);
    }

    #[test]
    fn crate_without_place_is_found() {
        let crates = [named("partywall-extra", &[])];
        assert!(judge(&crates)[0].what.contains("no place"));
    }
}
