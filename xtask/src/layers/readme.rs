//! The dependency rule that a crate's README states: the sentence that begins `May depend on`.

use super::Crate;
use crate::report::Finding;

/// The crates of this project that the README's rule names, if it states one.
pub(super) fn rule(readme: &str) -> Option<Vec<&str>> {
    let (_, rest) = readme.split_once("May depend on")?;
    let sentence = rest.split(['.', ';']).next()?;
    Some(sentence.split('`').skip(1).step_by(2).filter(|name| name.starts_with("partywall")).collect())
}

pub(super) fn judge(one: &Crate, allowed: &[&str]) -> Option<Finding> {
    let mut stated = rule(one.readme.as_deref()?)?;
    let mut checked = allowed.to_vec();
    stated.sort_unstable();
    checked.sort_unstable();
    (stated != checked).then(|| {
        let list = |names: &[&str]| match names {
            [] => "nothing".to_owned(),
            _ => names.join(", "),
        };
        Finding::new(
            &one.name,
            format!(
                "its README says that it may depend on {}; xtask/src/layers/rules.rs says {}",
                list(&stated),
                list(&checked)
            ),
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(readme: &str) -> Crate {
        Crate { name: "one".to_owned(), readme: Some(readme.to_owned()), ..Crate::default() }
    }

    #[test]
    fn rule_is_read_to_end_of_its_sentence() {
        let text = "# one\n\nMay depend on: `partywall-shm` and\n`rustix`. Never on `partywall-daemon`.\n";
        assert_eq!(rule(text), Some(vec!["partywall-shm"]));
        assert_eq!(rule("May depend on: nothing of this project."), Some(vec![]));
        assert_eq!(rule("# one\n"), None);
    }

    #[test]
    fn rule_that_differs_from_table_is_found() {
        let crate_ = with("May depend on: `partywall-shm`.");
        assert_eq!(judge(&crate_, &["partywall-shm"]), None);
        let finding = judge(&crate_, &[]).expect("the rules differ");
        assert!(finding.what.contains("says nothing"), "{finding:?}");
        assert!(judge(&with("May depend on nothing."), &["partywall-shm"]).is_some());
        assert!(judge(&with("May depend on `partywall`."), &["partywall-shm"]).is_some());
        assert_eq!(judge(&with("No rule here."), &["partywall-shm"]), None);
    }
}
