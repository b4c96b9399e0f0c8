//! Warnings about a valid policy: operations that it permits to nobody, and rules without effect. Its author seldom meant these.

use toml::Spanned;

use super::{JoinRule, Policy};
use crate::policy::NamePattern;

impl Policy {
    /// One sentence for each operation that no user may perform, and for each rule without effect.
    pub fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        if self.machines_meet {
            // Without a file there is nothing to warn about.
            return warnings;
        }
        let nobody_rules =
            self.administrators.get_ref().is_empty() && self.administrators_in_containers.get_ref().is_empty();
        if nobody_rules {
            let what = "nobody is an administrator, not even root: nobody may attach virtual machines, change the policy while the \
                        broker runs, or see other users' domains; leave `administrators` out, and root is one";
            warnings.push(what.to_owned());
        }
        if self.join.is_empty() {
            warnings.push(match nobody_rules {
                true => "there is no [[join]] rule: no process of the host may join".to_owned(),
                false => "there is no [[join]] rule: of the host's processes, only administrators' may join".to_owned(),
            });
        }
        for (rule, number) in self.join.iter().map(Spanned::get_ref).zip(1..) {
            if rule.admits_nobody() {
                let domain = &rule.domain;
                warnings.push(format!(
                    "[[join]] rule {number} (domain = \"{domain}\") names no users, no groups and no machines: it admits nobody"
                ));
            }
        }
        for (rule, number) in self.connect.iter().map(Spanned::get_ref).zip(1..) {
            if !rule.is_local() && self.cluster.is_none() {
                warnings.push(format!(
                    "[[connect]] rule {number} is for a domain of another host, and there is no [cluster]: it allows nothing"
                ));
            }
            for (key, pattern, host) in [("from", &rule.from, &rule.from_host), ("to", &rule.to, &rule.to_host)] {
                if host.is_none() && !self.may_be_somebody(pattern) {
                    let others = if nobody_rules { "" } else { "; only an administrator or a virtual machine may" };
                    warnings.push(format!(
                        "[[connect]] rule {number}: no [[join]] rule lets anybody be a domain that fits {key} = \"{pattern}\"{others}"
                    ));
                }
            }
        }
        let allow = self.programs.as_ref().and_then(|lists| lists.allow.as_ref());
        if allow.is_some_and(|allow| allow.get_ref().is_empty()) {
            warnings.push("`allow` of [programs] is empty: no unmodified program is accelerated".to_owned());
        }
        for machine in self.machine.iter().map(|machine| machine.name.as_str()) {
            let fits = |pattern: &NamePattern| {
                pattern.may_fit_what_begins_with(machine)
                    || self.join.iter().map(Spanned::get_ref).any(|rule| {
                        rule.machines.iter().any(|m| m.matches_text(machine)) && rule.domain.may_meet(pattern)
                    })
            };
            if !self.connect.iter().map(Spanned::get_ref).any(|rule| fits(&rule.from) || fits(&rule.to)) {
                warnings.push(format!(
                    "no [[connect]] rule is for programs in the virtual machine {machine}: with a policy file they may connect to other \
                     domains only by a rule, and others to them"
                ));
            }
        }
        warnings
    }

    /// Writes them to the log.
    pub(crate) fn log_warnings(&self) {
        for warning in self.warnings() {
            tracing::warn!("policy: {warning}");
        }
    }

    /// Whether a rule admits a user as a domain that fits, or a machine of the file has such a name.
    fn may_be_somebody(&self, pattern: &NamePattern) -> bool {
        self.join.iter().map(Spanned::get_ref).any(|rule| !rule.admits_nobody() && rule.domain.may_meet(pattern))
            || self.machine.iter().any(|machine| pattern.may_fit_what_begins_with(&machine.name))
    }
}

impl JoinRule {
    fn admits_nobody(&self) -> bool {
        self.users.is_empty() && self.groups.is_empty() && self.machines.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn warnings(text: &str) -> Vec<String> {
        Policy::parse(text).unwrap().warnings()
    }

    /// The only warning of a file.
    fn warning(text: &str) -> String {
        let mut all = warnings(text);
        assert_eq!(all.len(), 1, "{text}: {all:?}");
        all.remove(0)
    }

    const WEB: &str = "[[join]]\ndomain = 'web-*'\nusers = [33]\n";

    #[test]
    fn usable_policy_has_no_warnings() {
        assert_eq!(warnings(WEB), [""; 0]);
        assert_eq!(warnings(&format!("{WEB}[[connect]]\nfrom = 'web-1'\nto = '*'\n")), [""; 0]);
    }

    #[test]
    fn policy_without_file_has_no_warnings() {
        assert_eq!(Policy::for_user(1000).warnings(), [""; 0]);
    }

    #[test]
    fn policy_without_administrators_or_join_rules_is_warned_of() {
        assert!(warning(&format!("administrators = []\n{WEB}")).contains("nobody is an administrator"));
        assert!(warning("").contains("only administrators' may join"));
        let both = warnings("administrators = []\n");
        assert_eq!(both.len(), 2);
        assert!(both[1].contains("no process of the host may join"), "{both:?}");
    }

    #[test]
    fn rule_without_subjects_is_warned_about_by_number() {
        let said = warning(&format!("{WEB}[[join]]\ndomain = 'db'\n"));
        assert!(said.contains("rule 2") && said.contains("\"db\""), "{said}");
    }

    #[test]
    fn connect_rule_for_unjoinable_domain_is_warned_about() {
        let said = warning(&format!("{WEB}[[connect]]\nfrom = 'web-1'\nto = 'bd'\n"));
        assert!(said.contains("rule 1") && said.contains("to = \"bd\""), "{said}");
        let admits_nobody = format!("{WEB}[[join]]\ndomain = 'db'\n[[connect]]\nfrom = 'web-1'\nto = 'db'\n");
        assert_eq!(warnings(&admits_nobody).len(), 2);
    }

    #[test]
    fn rule_for_other_host_without_cluster_is_warned_about() {
        let rule = "[[connect]]\nfrom = 'web-1'\nto = 'db'\nto_host = 'beta'\n";
        assert!(warning(&format!("{WEB}{rule}")).contains("no [cluster]"));
        assert_eq!(warnings(&format!("{WEB}{rule}[cluster]\nhost = 'alpha'\n")), [""; 0]);
    }

    #[test]
    fn empty_list_of_programs_is_warned_of() {
        assert!(warning(&format!("{WEB}[programs]\nallow = []\n")).contains("no unmodified program"));
        assert_eq!(warnings(&format!("{WEB}[programs]\nallow = ['nginx']\n")), [""; 0]);
    }

    #[test]
    fn machine_without_connect_rule_is_warned_of() {
        let machine = "[[machine]]\nname = 'vm'\nmonitor = '/m'\nport = '/p'\n";
        let said = warning(&format!("{WEB}{machine}"));
        assert!(said.contains("virtual machine vm"), "{said}");
        assert_eq!(warnings(&format!("{WEB}{machine}[[connect]]\nfrom = 'vm.*'\nto = 'web-1'\n")), [""; 0]);
        let under_rule = "[[join]]\ndomain = 'db'\nmachines = ['v*']\n[[connect]]\nfrom = 'web-1'\nto = 'db'\n";
        assert_eq!(warnings(&format!("{WEB}{machine}{under_rule}")), [""; 0]);
    }
}
