//! Patterns for names: `*` stands for any characters, `?` for one.

use std::fmt;

use partywall_protocol::wire::Name;
use serde::Deserialize;
use wildmatch::WildMatch;

/// A pattern such as `web-*`; the default matches every name.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(try_from = "String")]
pub struct NamePattern(WildMatch);

impl NamePattern {
    /// Whether the whole of `name` fits.
    pub fn matches(&self, name: &Name) -> bool {
        self.matches_text(name.as_str())
    }

    /// Like [`Self::matches`], for text that need not be a name.
    pub(super) fn matches_text(&self, text: &str) -> bool {
        self.0.matches(text)
    }

    /// Whether there is any text that both fit.
    pub(super) fn may_meet(&self, other: &Self) -> bool {
        meet(self.0.to_string().as_bytes(), other.0.to_string().as_bytes())
    }

    /// Whether it fits `name`, or text that begins with that and a dot, as the domains of a virtual machine do.
    pub(super) fn may_fit_what_begins_with(&self, name: &str) -> bool {
        self.matches_text(name) || meet(self.0.to_string().as_bytes(), format!("{name}.*").as_bytes())
    }
}

/// Whether two patterns have text in common. They are as long as names, so trying both ends of a star is quick enough: `reached` keeps each
/// pair of places from being tried twice.
fn meet(one: &[u8], other: &[u8]) -> bool {
    let mut reached = vec![false; (one.len() + 1) * (other.len() + 1)];
    let mut left = vec![(0, 0)];
    while let Some((i, j)) = left.pop() {
        if std::mem::replace(&mut reached[i * (other.len() + 1) + j], true) {
            continue;
        }
        match (one.get(i), other.get(j)) {
            (None, None) => return true,
            (Some(b'*'), _) | (_, Some(b'*')) => {
                if one.get(i) == Some(&b'*') {
                    // The star ends here, or takes what the other has.
                    left.push((i + 1, j));
                    left.extend((j < other.len()).then_some((i, j + 1)));
                }
                if other.get(j) == Some(&b'*') {
                    left.push((i, j + 1));
                    left.extend((i < one.len()).then_some((i + 1, j)));
                }
            }
            (Some(a), Some(b)) if a == b || *a == b'?' || *b == b'?' => left.push((i + 1, j + 1)),
            _ => {}
        }
    }
    false
}

impl fmt::Display for NamePattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Default for NamePattern {
    fn default() -> Self {
        Self(WildMatch::new("*"))
    }
}

impl TryFrom<String> for NamePattern {
    type Error = String;

    /// Refuses what could match no name: it is a slip of the pen, and would silently allow less than was meant.
    fn try_from(text: String) -> Result<Self, String> {
        let plain = text.replace(['*', '?'], "");
        let valid = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
        if text.is_empty() || plain.len() > Name::MAX || !plain.chars().all(valid) || text.starts_with(['.', '_', '-'])
        {
            return Err(format!(
                "{text:?} can match no name; names are letters, digits, '.', '_' and '-', begin with a letter or digit, \
                 and in a pattern '*' stands for any characters and '?' for one"
            ));
        }
        Ok(Self(WildMatch::new(&text)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_meet_if_some_text_fits_both() {
        for (one, other, expected) in [
            ("web-*", "web-1", true),
            ("web-*", "*-1", true),
            ("web-?", "web-", false),
            ("web", "db", false),
            ("a*c", "*b*", true),
            ("a*c", "*d", false),
            ("*", "x", true),
            ("a?", "?b", true),
            ("a**", "a", true),
        ] {
            let [one, other] = [one, other].map(|text| NamePattern::try_from(text.to_owned()).unwrap());
            assert_eq!((one.may_meet(&other), other.may_meet(&one)), (expected, expected), "{one} and {other}");
        }
        let of = |text: &str| NamePattern::try_from(text.to_owned()).unwrap();
        assert!(of("vm").may_fit_what_begins_with("vm") && of("vm.web*").may_fit_what_begins_with("vm"));
        assert!(!of("vm2").may_fit_what_begins_with("vm"));
    }
}
