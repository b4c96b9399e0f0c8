//! Patterns for names: `*` stands for any characters, `?` for one.

use partywall_protocol::wire::Name;
use serde::Deserialize;
use wildmatch::WildMatch;

/// A pattern such as `web-*`; the default matches every name.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(try_from = "String")]
pub struct Pattern(WildMatch);

impl Pattern {
    /// Whether the whole of `name` fits.
    pub fn matches(&self, name: &Name) -> bool {
        self.0.matches(name.as_str())
    }
}

impl Default for Pattern {
    fn default() -> Self {
        Self(WildMatch::new("*"))
    }
}

impl TryFrom<String> for Pattern {
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
