//! The policy's decision about a request, and the clause of the file that decides.
//!
//! The broker asks these functions for every request, and `partywall policy test` reports their answers. So the command's explanation
//! matches the broker's behaviour.

use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};

use partywall_protocol::wire::{Name, Origin};
use toml::Spanned;

use super::programs::{ProgramGlob, ProgramLists};
use super::{ConnectRule, JoinRule, Policy};
use crate::credentials::{Credentials, Home};

/// The grounds of a decision.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Grounds<'a> {
    /// The asking user is an administrator.
    Administrator { key: &'static str, users: &'a Spanned<Vec<super::HostUser>> },
    /// This `[[join]]` rule, counted from 1, admits the user.
    JoinRule { number: usize, rule: &'a Spanned<JoinRule> },
    /// The name is the virtual machine's own, or begins with it.
    NameOfMachine,
    /// No rule admits the user under this name.
    NoJoinRule,
    /// A domain may always connect to itself.
    SameDomain,
    /// There is no policy file, so programs in virtual machines may connect to everything.
    MachinesWithoutFile,
    /// This `[[connect]]` rule, counted from 1, allows it.
    ConnectRule { number: usize, rule: &'a Spanned<ConnectRule> },
    /// No rule allows it.
    NoConnectRule,
    /// The policy has no table `[cluster]`, so nothing connects to or from other hosts.
    NoCluster,
    /// Both programs are of one user.
    SameUser { stated: &'a Spanned<bool> },
    /// No list says anything against the program.
    AnyProgram,
    /// A list of `[programs]` has the program.
    ListedProgram { key: &'static str, glob: &'a Spanned<ProgramGlob>, allowed: bool },
    /// The program is not on the list of those that are accelerated.
    UnlistedProgram { allow: &'a Spanned<Vec<Spanned<ProgramGlob>>> },
}

impl Grounds<'_> {
    /// Whether they allow the request.
    pub(crate) fn allow(&self) -> bool {
        match self {
            Self::NoJoinRule | Self::NoConnectRule | Self::NoCluster | Self::UnlistedProgram { .. } => false,
            Self::ListedProgram { allowed, .. } => *allowed,
            _ => true,
        }
    }

    /// The clause as a code for programs.
    pub(crate) fn rule(&self) -> RuleCode {
        let (word, number) = match self {
            Self::Administrator { key, .. } => (*key, None),
            Self::JoinRule { number, .. } => ("join", Some(*number)),
            Self::NameOfMachine => ("machine-name", None),
            Self::NoJoinRule => ("no-join-rule", None),
            Self::SameDomain => ("same-domain", None),
            Self::MachinesWithoutFile => ("no-file", None),
            Self::ConnectRule { number, .. } => ("connect", Some(*number)),
            Self::NoConnectRule => ("no-connect-rule", None),
            Self::NoCluster => ("no-cluster", None),
            Self::SameUser { .. } => ("same-user", None),
            Self::AnyProgram | Self::ListedProgram { .. } | Self::UnlistedProgram { .. } => ("programs", None),
        };
        RuleCode { word, number }
    }

    /// The place of the rule in the file; `None` for a default.
    fn span(&self) -> Option<Range<usize>> {
        let span = match self {
            Self::Administrator { users, .. } => users.span(),
            Self::JoinRule { rule, .. } => rule.span(),
            Self::ConnectRule { rule, .. } => rule.span(),
            Self::SameUser { stated } => stated.span(),
            Self::ListedProgram { glob, .. } => glob.span(),
            Self::UnlistedProgram { allow } => allow.span(),
            Self::AnyProgram
            | Self::NameOfMachine
            | Self::NoJoinRule
            | Self::SameDomain
            | Self::MachinesWithoutFile
            | Self::NoConnectRule
            | Self::NoCluster => return None,
        };
        // Values that the file does not have were made without a place.
        (!span.is_empty()).then_some(span)
    }
}

impl fmt::Display for Grounds<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Administrator { key, .. } if self.span().is_some() => write!(f, "`{key}` lists the user"),
            Self::Administrator { .. } => f.write_str("default: the user is an administrator"),
            Self::JoinRule { number, rule } => {
                write!(f, "[[join]] rule {number} (domain = \"{}\")", rule.get_ref().domain)
            }
            Self::NameOfMachine => {
                f.write_str("default: programs in a virtual machine may have its name, and names that begin with it")
            }
            Self::NoJoinRule => f.write_str("default: no [[join]] rule admits the user under this name"),
            Self::SameDomain => f.write_str("default: a domain may connect to itself"),
            Self::MachinesWithoutFile => {
                f.write_str("default: without a policy file, programs in virtual machines may connect to everything")
            }
            Self::ConnectRule { number, rule } => {
                let ConnectRule { from, from_host, to, to_host, service } = rule.get_ref();
                write!(f, "[[connect]] rule {number} (from = \"{from}\", ")?;
                from_host.iter().try_for_each(|host| write!(f, "from_host = \"{host}\", "))?;
                write!(f, "to = \"{to}\", ")?;
                to_host.iter().try_for_each(|host| write!(f, "to_host = \"{host}\", "))?;
                write!(f, "service = \"{service}\")")
            }
            Self::NoConnectRule => f.write_str("default: no [[connect]] rule allows it"),
            Self::NoCluster => f.write_str("default: without a table [cluster], this host is in no cluster"),
            Self::SameUser { .. } if self.span().is_some() => {
                f.write_str("`same_user` of [sockets]: both are of one user")
            }
            Self::SameUser { .. } => f.write_str("default: `same_user` of [sockets], and both are of one user"),
            Self::AnyProgram => f.write_str("default: no list of [programs] excludes the program"),
            Self::ListedProgram { key, glob, .. } => write!(f, "`{key}` of [programs] lists \"{}\"", glob.get_ref()),
            Self::UnlistedProgram { .. } => f.write_str("`allow` of [programs] does not list the program"),
        }
    }
}

/// A decision, apart from the policy that it was made by.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Ruling {
    pub(crate) allowed: bool,
    /// The clause, for people.
    pub(crate) words: String,
    /// The clause, for programs.
    pub(crate) rule: RuleCode,
    /// The line of the clause in the file; 0 for a default.
    pub(crate) line: u32,
}

/// The clause of a decision: a word that keeps its meaning, and the number of the rule among its like.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct RuleCode {
    word: &'static str,
    number: Option<usize>,
}

impl fmt::Display for RuleCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word)?;
        self.number.map_or(Ok(()), |number| write!(f, "-{number}"))
    }
}

/// The file that a policy comes from, so that a clause of it can be found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct PolicySource {
    path: Option<PathBuf>,
    /// Where each line but the first begins.
    lines: Vec<usize>,
}

impl PolicySource {
    pub(super) fn of(text: &str) -> Self {
        Self { path: None, lines: text.match_indices('\n').map(|(at, _)| at + 1).collect() }
    }

    pub(super) fn read_from(&mut self, path: &Path) {
        // The client may have another working directory.
        self.path = Some(std::path::absolute(path).unwrap_or_else(|_| path.to_owned()));
    }

    /// The line, counted from 1, of a byte.
    fn line(&self, byte: usize) -> usize {
        1 + self.lines.partition_point(|begin| *begin <= byte)
    }
}

impl Policy {
    /// The line of the file where the grounds stand; `None` for a default.
    pub(crate) fn line_of(&self, grounds: &Grounds<'_>) -> Option<usize> {
        grounds.span().map(|span| self.source.line(span.start))
    }

    /// The decision, to be kept.
    pub(crate) fn ruling(&self, grounds: &Grounds<'_>) -> Ruling {
        let line = self.line_of(grounds).and_then(|line| u32::try_from(line).ok()).unwrap_or(0);
        Ruling { allowed: grounds.allow(), words: grounds.to_string(), rule: grounds.rule(), line }
    }

    /// The file that the policy was read from.
    pub(crate) fn file(&self) -> Option<&Path> {
        self.source.path.as_deref()
    }

    /// Why this process may do everything, if it may.
    pub(super) fn administrator(&self, peer: Credentials) -> Option<Grounds<'_>> {
        let (key, users) = match peer.home {
            Home::Broker => ("administrators", &self.administrators),
            _ => ("administrators_in_containers", &self.administrators_in_containers),
        };
        let is_one = users.get_ref().iter().any(|user| user.is(peer.user));
        is_one.then_some(Grounds::Administrator { key, users })
    }

    /// Whether this user of the host may join as `name`, and why.
    pub(crate) fn judge_join(&self, peer: Credentials, name: &Name) -> Grounds<'_> {
        let admits = |rule: &JoinRule| rule.domain.matches(name) && rule.admits(peer);
        self.join_rule(admits).or_else(|| self.administrator(peer)).unwrap_or(Grounds::NoJoinRule)
    }

    /// Whether programs in the virtual machine `machine` may join as `name`, and why: as the machine's own name, as what begins with that
    /// and a dot, and as what a rule lets this machine be.
    pub(crate) fn judge_join_machine(&self, machine: &Name, name: &Name) -> Grounds<'_> {
        let admits =
            |rule: &JoinRule| rule.domain.matches(name) && rule.machines.iter().any(|pattern| pattern.matches(machine));
        let rest = name.as_str().strip_prefix(machine.as_str());
        let is_its_name = rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'));
        let otherwise = if is_its_name { Grounds::NameOfMachine } else { Grounds::NoJoinRule };
        self.join_rule(admits).unwrap_or(otherwise)
    }

    fn join_rule(&self, admits: impl Fn(&JoinRule) -> bool) -> Option<Grounds<'_>> {
        let mut numbered = (1..).zip(&self.join);
        let (number, rule) = numbered.find(|(_, rule)| admits(rule.get_ref()))?;
        Some(Grounds::JoinRule { number, rule })
    }

    /// Whether domain `from`, run by `peer`, may connect to `service` of domain `to`, and why.
    pub(crate) fn judge_connect(&self, peer: Credentials, from: &Name, to: &Name, service: &Name) -> Grounds<'_> {
        if from == to {
            return Grounds::SameDomain;
        }
        if let Some(administrator) = self.administrator(peer) {
            return administrator;
        }
        if self.machines_meet && peer.origin() != Origin::Host {
            return Grounds::MachinesWithoutFile;
        }
        let allows = |rule: &ConnectRule| {
            rule.is_local() && rule.from.matches(from) && rule.to.matches(to) && rule.service.matches(service)
        };
        match (1..).zip(&self.connect).find(|(_, rule)| allows(rule.get_ref())) {
            Some((number, rule)) => Grounds::ConnectRule { number, rule },
            None => Grounds::NoConnectRule,
        }
    }

    /// Whether a connection of unmodified programs, of domain `from` run by `peer` to `service` of domain `to`, may go to a ring, and why.
    /// `one_user`: both are run by the same user.
    pub(crate) fn judge_share(
        &self,
        peer: Credentials,
        one_user: bool,
        (from, to): (&Name, &Name),
        service: &Name,
    ) -> Grounds<'_> {
        let stated = &self.sockets.same_user;
        if one_user && *stated.get_ref() {
            return Grounds::SameUser { stated };
        }
        self.judge_connect(peer, from, to, service)
    }

    /// Whether connections of the program with this executable may move to a ring, and why.
    pub(crate) fn judge_program(&self, path: &str) -> Grounds<'_> {
        let listed = |key, list: &'_ [Spanned<ProgramGlob>]| {
            list.iter().position(|glob| glob.get_ref().matches(path)).map(|at| (key, at))
        };
        let Some(ProgramLists { allow, deny }) = &self.programs else { return Grounds::AnyProgram };
        if let Some((key, at)) = listed("deny", deny) {
            return Grounds::ListedProgram { key, glob: &deny[at], allowed: false };
        }
        let Some(allow) = allow else { return Grounds::AnyProgram };
        match listed("allow", allow.get_ref()) {
            Some((key, at)) => Grounds::ListedProgram { key, glob: &allow.get_ref()[at], allowed: true },
            None => Grounds::UnlistedProgram { allow },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = "\
# a comment
administrators = [7]

[[join]]
domain = 'web-*'
users = [33]

[[join]]
domain = 'db'
machines = ['vm']
[[connect]]
from = 'web-*'
to = 'db'

[sockets]
move = 'now'
same_user = true
";

    fn name(text: &str) -> Name {
        Name::new(text).unwrap()
    }

    fn user(uid: u32) -> Credentials {
        Credentials::on_host(uid, uid, Home::Broker, 1)
    }

    /// The decision, the line of its rule, and the words.
    fn told(policy: &Policy, grounds: Grounds<'_>) -> (bool, Option<usize>, String) {
        (grounds.allow(), policy.line_of(&grounds), grounds.to_string())
    }

    #[test]
    fn decision_names_its_clause_and_line() {
        let policy = Policy::parse(FILE).unwrap();
        let [web, db, x] = ["web-1", "db", "x"].map(name);
        for (grounds, allowed, line, words) in [
            (policy.judge_join(user(33), &web), true, Some(4), "[[join]] rule 1 (domain = \"web-*\")"),
            (policy.judge_join(user(33), &db), false, None, "default: no [[join]] rule"),
            (policy.judge_join(user(7), &db), true, Some(2), "`administrators`"),
            (policy.judge_join_machine(&name("vm"), &db), true, Some(8), "[[join]] rule 2"),
            (
                policy.judge_join_machine(&name("vm"), &name("vm.a")),
                true,
                None,
                "default: programs in a virtual machine",
            ),
            (policy.judge_join_machine(&name("vm"), &x), false, None, "no [[join]] rule"),
            (
                policy.judge_connect(user(33), &web, &db, &x),
                true,
                Some(11),
                "[[connect]] rule 1 (from = \"web-*\", to = \"db\"",
            ),
            (policy.judge_connect(user(33), &db, &web, &x), false, None, "default: no [[connect]] rule"),
            (policy.judge_connect(user(33), &x, &x, &x), true, None, "default: a domain may connect to itself"),
            (policy.judge_share(user(33), true, (&db, &web), &x), true, Some(17), "`same_user` of [sockets]"),
            (policy.judge_share(user(33), false, (&db, &web), &x), false, None, "no [[connect]] rule"),
        ] {
            let (really, place, said) = told(&policy, grounds);
            assert_eq!((really, place), (allowed, line), "{said}");
            assert!(said.contains(words), "{said}");
        }
    }

    #[test]
    fn decision_without_file_has_no_line_and_names_the_default() {
        let [a, b] = ["a", "b"].map(name);
        for policy in [Policy::for_user(0), Policy::parse("").unwrap()] {
            for grounds in [
                policy.judge_join(user(0), &a),
                policy.judge_join(user(1), &a),
                policy.judge_connect(user(0), &a, &b, &b),
                policy.judge_share(user(1), true, (&a, &b), &b),
            ] {
                let (_, place, said) = told(&policy, grounds);
                assert_eq!(place, None, "{said}");
                assert!(said.starts_with("default: "), "{said}");
            }
            assert_eq!(policy.file(), None);
        }
    }
}
