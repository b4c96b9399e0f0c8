//! The words of move rules as people write them: those of [`partywall_protocol::upgrade`], where counts may be sizes.

use partywall_protocol::directory::{Clause, Subject};
use partywall_protocol::upgrade::{Of, Upgrade};

/// Reads a clause: `MODE`, `MODE@port=PORT`, `MODE@address=NET` or `MODE@program=PATTERN`; counts may have K, M or G.
pub(crate) fn parse_clause(text: &str) -> Result<Clause, String> {
    let (upgrade, subject) = text.split_once('@').map_or((text, None), |(upgrade, subject)| (upgrade, Some(subject)));
    let exact =
        |part: &str| match part.split_once('=').and_then(|(key, n)| Some((key, partywall_terminal::size(n).ok()?))) {
            Some((key, number)) => format!("{key}={number}"),
            None => part.to_owned(),
        };
    let upgrade = upgrade.split(',').map(exact).collect::<Vec<_>>().join(",");
    let text = subject.map_or_else(|| upgrade.clone(), |subject| format!("{upgrade}@{subject}"));
    Clause::parse(&text).map_err(|bad| bad.to_string())
}

/// Reads a clause that a process can be given for itself: not one about programs.
pub(crate) fn parse_own_clause(text: &str) -> Result<Clause, String> {
    let clause = parse_clause(text)?;
    match clause.subject {
        Subject::Of(_) => Ok(clause),
        Subject::Program(_) => {
            Err("here it is about the program that is run; `partywall moves` has rules by program".into())
        }
    }
}

/// Reads what a clause is for, without when: `port=PORT`, `address=NET` or `program=PATTERN`.
pub(crate) fn parse_subject(text: &str) -> Result<Subject, String> {
    parse_clause(&format!("never@{text}")).map(|clause| clause.subject)
}

/// The caution for move rules by which all connections move at once.
pub(crate) const NOW_IS_SLOW: &str =
    "all connections move at once, and programs that make many short connections become several times slower";

/// Whether connections move at once that no rule is about: each is then set up for a ring, however short it is.
pub(crate) fn moves_all_at_once(clauses: &[Clause]) -> bool {
    let for_all = clauses.iter().rfind(|clause| clause.subject == Subject::Of(Of::All));
    for_all.is_some_and(|clause| clause.upgrade == Upgrade::Now)
}

/// Move rules as one line.
pub(crate) fn join(clauses: &[Clause]) -> String {
    clauses.iter().map(Clause::to_string).collect::<Vec<_>>().join(" ")
}

/// The clauses that can decide anything: one for every connection overrides all before it.
pub(crate) fn effective(text: &str) -> Vec<Clause> {
    let clauses: Vec<Clause> = text.split_ascii_whitespace().filter_map(|word| Clause::parse(word).ok()).collect();
    let from = clauses.iter().rposition(|clause| clause.subject == Subject::Of(Of::All)).unwrap_or(0);
    clauses[from..].to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_that_move_all_at_once_are_known() {
        for (text, expected) in [
            ("", false),
            ("now", true),
            ("after=16", false),
            ("now@port=22", false),
            ("now never@port=22", true),
            ("now after=16", false),
        ] {
            let clauses: Vec<Clause> = text.split_whitespace().map(|word| parse_clause(word).unwrap()).collect();
            assert_eq!(moves_all_at_once(&clauses), expected, "{text}");
        }
    }

    #[test]
    fn clauses_are_read_with_sizes_and_written_exactly() {
        for (text, exact) in [
            ("now", "now"),
            ("never@port=22", "never@port=22"),
            ("after=16,bytes=64K", "after=16,bytes=65536"),
            ("bytes=1M@address=10.0.0.0/8", "bytes=1048576@address=10.0.0.0/8"),
            ("now@program=redis-*", "now@program=redis-*"),
        ] {
            let clause = parse_clause(text).unwrap();
            assert_eq!(clause.to_string(), exact);
            assert_eq!(parse_clause(exact).unwrap(), clause);
        }
        assert_eq!(join(&[parse_clause("now").unwrap(), parse_clause("never@port=1").unwrap()]), "now never@port=1");
    }

    #[test]
    fn malformed_clause_error_shows_expected_form() {
        for (text, words) in [
            ("soon", "now, never"),
            ("after=x", "whole number"),
            ("now@22", "port=PORT"),
            ("now@port=0", "1 to 65535"),
            ("now@program=", "1 to 64"),
            ("now@program=a b", "without spaces"),
        ] {
            let error = parse_clause(text).unwrap_err();
            assert!(error.contains(words), "{text}: {error}");
        }
        assert!(parse_own_clause("now@program=x").unwrap_err().contains("partywall moves"));
        assert!(parse_subject("nothing").is_err() && parse_subject("port=22").is_ok());
    }

    #[test]
    fn overridden_clause_is_left_out() {
        assert_eq!(join(&effective("after=8 now@port=1 never now@port=2")), "never now@port=2");
        assert_eq!(join(&effective("after=8 never@port=22")), "after=8 never@port=22");
        assert!(effective("").is_empty());
    }
}
