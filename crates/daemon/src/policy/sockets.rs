//! The move rules: when connections of unmodified programs move to a ring, and how the ring is made (protocol T6).

use std::fmt;

use partywall_protocol::directory::{Clause, MAX_RULES, Terms};
use partywall_protocol::upgrade::Upgrade;
use partywall_protocol::wire::Text;
use partywall_shm::layout::{Geometry, PAGE};
use serde::Deserialize;
use toml::Spanned;

use super::size;

/// When connections go to a ring.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(try_from = "Section")]
pub struct SocketRules {
    /// The terms of connections that no clause fits.
    pub(crate) terms: Terms,
    /// The clauses. The last one that fits decides.
    pub(crate) clauses: Vec<Clause>,
    /// Between the domains of one user no `connect` rule is needed.
    pub(crate) same_user: Spanned<bool>,
}

impl Default for SocketRules {
    fn default() -> Self {
        Self { terms: Terms::default(), clauses: Vec::new(), same_user: Spanned::new(0..0, true) }
    }
}

/// As it is written in the file.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Section {
    // The alias is the key of files from before `policy` meant one thing.
    #[serde(rename = "move", alias = "upgrade")]
    default: Option<String>,
    #[serde(deserialize_with = "size::some_bytes")]
    ring_size: Option<u64>,
    spin_us: Option<u32>,
    rules: Vec<String>,
    same_user: Option<Spanned<bool>>,
}

impl TryFrom<Section> for SocketRules {
    type Error = String;

    fn try_from(section: Section) -> Result<Self, String> {
        let mut policy = Self::default();
        if let Some(text) = section.default {
            policy.terms.upgrade = Upgrade::parse(&text).map_err(|e| format!("move = {text:?}: {e}"))?;
        }
        if let Some(size) = section.ring_size {
            policy.set_ring_size(size)?;
        }
        if let Some(spin) = section.spin_us {
            policy.terms.spin_us = spin;
        }
        policy.same_user = section.same_user.unwrap_or(policy.same_user);
        let rules: Result<_, _> = section.rules.iter().map(|text| parse(text)).collect();
        policy.clauses = rules?;
        policy.check()
    }
}

impl SocketRules {
    /// Replaces the rules for the move to a ring by clauses separated by spaces. Terms that no clause sets stay as they are.
    pub(crate) fn set_clauses(&mut self, text: &str) -> Result<(), String> {
        let clauses: Result<_, _> = text.split_ascii_whitespace().map(parse).collect();
        *self = Self { terms: self.terms, clauses: clauses?, same_user: self.same_user.clone() }.check()?;
        Ok(())
    }

    pub(crate) fn set_ring_size(&mut self, size: u64) -> Result<(), String> {
        match Geometry::new(PAGE, size) {
            Ok(_) if size > 0 => {
                self.terms.ring_size = size;
                Ok(())
            }
            _ => Err(format!("ring_size = {size}: write a power of two from 4096 to 2^30")),
        }
    }

    fn check(self) -> Result<Self, String> {
        let text = self.to_string();
        if self.clauses.len() > MAX_RULES || text.len() > Text::MAX {
            let (most, bytes) = (MAX_RULES, Text::MAX);
            return Err(format!("[sockets] has at most {most} rules, and {bytes} bytes of them"));
        }
        Ok(self)
    }
}

/// All clauses as one line, the first of them for every connection.
impl fmt::Display for SocketRules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.terms.upgrade)?;
        self.clauses.iter().try_for_each(|clause| write!(f, " {clause}"))
    }
}

fn parse(text: &str) -> Result<Clause, String> {
    Clause::parse(text).map_err(|e| format!("rule {text:?}: {e}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::Policy;

    #[test]
    fn move_rule_has_its_former_key_too() {
        let of = |text: &str| Policy::parse(&format!("[sockets]\n{text}")).map(|policy| policy.sockets().terms.upgrade);
        for key in ["move", "upgrade"] {
            assert_eq!(of(&format!("{key} = 'after=3'")).unwrap(), Upgrade::After { calls: 3, bytes: 0 });
            let wrong = of(&format!("{key} = 'soon'")).unwrap_err().to_string();
            assert!(wrong.contains("move = \"soon\""), "{wrong}");
        }
        assert!(of("move = 'now'\nupgrade = 'never'").is_err());
    }
}
