//! `cargo xtask licences`: every dependency, of the workspace, of `fuzz/` and of `examples/`, has a licence that deny.toml allows.
//!
//! The list is read from deny.toml, so that there is only one.

use std::collections::BTreeSet;

use serde::Deserialize;
use spdx::{Expression, LicenseReq, ParseMode};

use crate::error::Error;
use crate::report::{Finding, Report};
use crate::tree::Tree;

#[derive(Deserialize)]
struct Deny {
    licenses: Policy,
}

#[derive(Deserialize)]
struct Policy {
    allow: Vec<String>,
    #[serde(default)]
    exceptions: Vec<Exception>,
}

#[derive(Deserialize)]
struct Exception {
    #[serde(rename = "crate")]
    name: String,
    allow: Vec<String>,
}

/// As much of a package as the policy speaks of.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Package {
    name: String,
    version: String,
    licence: Option<String>,
}

pub(crate) fn check(tree: &Tree) -> Result<Report, Error> {
    let file = tree.read("deny.toml")?;
    let deny: Deny = toml::from_str(&file.text)
        .map_err(|source| Error::Toml { path: tree.root().join(&file.path), source: Box::new(source) })?;
    let packages: BTreeSet<Package> = tree
        .metadata()?
        .into_iter()
        .flat_map(|metadata| metadata.packages)
        .map(|package| Package {
            name: package.name.to_string(),
            version: package.version.to_string(),
            licence: package.license,
        })
        .collect();
    Ok(Report {
        check: "licences",
        looked_at: format!("{} packages", packages.len()),
        findings: packages.iter().filter_map(|package| judge(&deny.licenses, package)).collect(),
        ..Report::default()
    })
}

fn judge(policy: &Policy, package: &Package) -> Option<Finding> {
    let finding = |what: String| Some(Finding::new(format!("{} {}", package.name, package.version), what));
    let Some(licence) = &package.licence else {
        return finding("states no licence".to_owned());
    };
    let expression = match Expression::parse_mode(licence, ParseMode::LAX) {
        Ok(expression) => expression,
        Err(error) => {
            return finding(format!("`{licence}` is not a licence expression: {}", error.reason));
        }
    };
    let excepted = policy
        .exceptions
        .iter()
        .filter(|exception| exception.name == package.name)
        .flat_map(|exception| &exception.allow);
    let allowed: Vec<&String> = policy.allow.iter().chain(excepted).collect();
    let is_allowed = |request: &LicenseReq| {
        let wanted = request.to_string();
        allowed.iter().any(|name| **name == wanted)
    };
    if expression.evaluate(is_allowed) { None } else { finding(format!("`{licence}` is not allowed by deny.toml")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdict(licence: Option<&str>) -> Option<Finding> {
        let policy: Deny = toml::from_str(
            "[licenses]\nallow = [\"MIT\", \"Apache-2.0 WITH LLVM-exception\"]\n\
             exceptions = [{ crate = \"fuzzer\", allow = [\"NCSA\"] }]\n",
        )
        .expect("a policy");
        let named = |name: &str| Package {
            name: name.to_owned(),
            version: "1.0.0".to_owned(),
            licence: licence.map(str::to_owned),
        };
        // An exception is for one crate only.
        if licence == Some("MIT AND NCSA") {
            assert_eq!(judge(&policy.licenses, &named("fuzzer")), None);
        }
        judge(&policy.licenses, &named("other"))
    }

    #[test]
    fn choice_passes_if_one_licence_is_allowed() {
        for licence in ["MIT", "MIT OR GPL-3.0-only", "MIT/Apache-2.0", "Apache-2.0 WITH LLVM-exception"] {
            assert_eq!(verdict(Some(licence)), None, "{licence}");
        }
    }

    #[test]
    fn forbidden_missing_or_unknown_licence_is_found() {
        for licence in [
            Some("GPL-3.0-only"),
            Some("MIT AND GPL-3.0-only"),
            Some("MIT AND NCSA"),
            Some("Apache-2.0"),
            Some("as you like"),
            None,
        ] {
            assert!(verdict(licence).is_some(), "{licence:?}");
        }
    }
}
