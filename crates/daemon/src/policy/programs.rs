//! `[programs]`: which unmodified programs are accelerated, where the library is loaded into more than those (protocol T6.1).

use std::fmt;

use serde::Deserialize;
use toml::Spanned;
use wildmatch::WildMatch;

use super::Policy;

/// The lists, as they are written in the file.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ProgramLists {
    /// Only these programs are accelerated; all, if it is left out.
    #[serde(default)]
    pub(super) allow: Option<Spanned<Vec<Spanned<ProgramGlob>>>>,
    /// These are not, whatever `allow` says.
    #[serde(default)]
    pub(super) deny: Vec<Spanned<ProgramGlob>>,
}

/// A pattern for the path of an executable if it has a slash, and for the last part of that path otherwise.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(try_from = "String")]
pub(crate) struct ProgramGlob(WildMatch);

impl ProgramGlob {
    /// Whether the pattern is one for this executable.
    pub(super) fn matches(&self, path: &str) -> bool {
        let name = || path.rsplit('/').next().unwrap_or_default();
        self.0.matches(if self.0.to_string().contains('/') { path } else { name() })
    }
}

impl fmt::Display for ProgramGlob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl TryFrom<String> for ProgramGlob {
    type Error = String;

    /// Refuses what could match no executable.
    fn try_from(text: String) -> Result<Self, String> {
        let is_path = text.starts_with(['/', '*']) && !text.ends_with('/');
        if text.is_empty() || text.contains(char::is_control) || (text.contains('/') && !is_path) {
            return Err(format!(
                "{text:?} can match no executable; write its name (\"nginx\") or its absolute path (\"/usr/sbin/nginx\"), in which '*' \
                 stands for any characters and '?' for one"
            ));
        }
        Ok(Self(WildMatch::new(&text)))
    }
}

impl Policy {
    /// Whether the file lists programs at all.
    pub(crate) fn lists_programs(&self) -> bool {
        self.programs.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = "\
[programs]
allow = ['redis-*', '/usr/sbin/nginx',
  '/opt/*/bin/app']
deny = ['redis-cli']
";

    #[test]
    fn program_is_judged_by_path_or_name_and_deny_comes_first() {
        let policy = Policy::parse(FILE).unwrap();
        for (path, allowed, line, words) in [
            ("/usr/bin/redis-server", true, Some(2), "`allow` of [programs] lists \"redis-*\""),
            ("/usr/bin/redis-cli", false, Some(4), "`deny` of [programs] lists \"redis-cli\""),
            ("/usr/sbin/nginx", true, Some(2), "\"/usr/sbin/nginx\""),
            ("/usr/local/sbin/nginx", false, Some(2), "`allow` of [programs] does not list the program"),
            ("/opt/v1/bin/app", true, Some(3), "\"/opt/*/bin/app\""),
            ("app", false, Some(2), "does not list"),
        ] {
            let grounds = policy.judge_program(path);
            assert_eq!((grounds.allow(), policy.line_of(&grounds)), (allowed, line), "{path}: {grounds}");
            assert!(grounds.to_string().contains(words), "{path}: {grounds}");
        }
    }

    #[test]
    fn policy_without_allow_list_admits_all_but_denied_programs() {
        for text in ["", "[programs]\n", "[programs]\ndeny = ['sshd']\n"] {
            let policy = Policy::parse(text).unwrap();
            assert!(policy.judge_program("/usr/bin/anything").allow(), "{text}");
            assert_eq!(policy.judge_program("/usr/sbin/sshd").allow(), !text.contains("sshd"));
            assert_eq!(policy.lists_programs(), !text.is_empty());
        }
        assert!(!Policy::for_user(0).lists_programs());
    }

    #[test]
    fn pattern_that_can_match_no_executable_is_refused() {
        for wrong in ["", "bin/nginx", "/usr/sbin/", "a\\nb"] {
            let refused = Policy::parse(&format!("[programs]\ndeny = [\"{wrong}\"]")).unwrap_err().to_string();
            assert!(refused.contains("can match no executable"), "{wrong}: {refused}");
        }
        assert!(Policy::parse("[programs]\nalow = []").is_err());
    }
}
