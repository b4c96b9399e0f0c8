//! Whether the broker may enter the network namespaces of its policy (`[[network]]`, protocol U13). Without the right, datagrams of their
//! sockets stay on the kernel.

use std::path::Path;

use partywall::{Domain, PolicyRequest, PolicyUser};

use crate::args::Global;
use crate::broker_process::{Capability, ServingBroker};
use crate::session;

/// Other namespaces than the broker's own that its policy lists.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ListedNetworks {
    /// Their paths.
    Known(Vec<String>),
    /// Why the policy file does not tell.
    Unknown(String),
}

/// The broker and the list of its policy. `None` if the broker or its policy file cannot be found from here.
pub(crate) fn broker_and_list(global: &Global) -> Option<(ServingBroker, ListedNetworks)> {
    let broker = ServingBroker::find(&session::broker_path(global))?;
    let domain: Domain = session::join(global).ok()?;
    // Each decision names the file.
    let decision = domain.test_policy(PolicyUser::Own, domain.name(), PolicyRequest::Join).ok()?;
    Some((broker, read(&decision.file?)))
}

/// The note for a list that the broker cannot use; `None` if it can, or it is not known.
pub(crate) fn note(broker: ServingBroker, listed: &ListedNetworks) -> Option<String> {
    match listed {
        ListedNetworks::Known(paths) if !paths.is_empty() && !broker.has(Capability::SysAdmin) => Some(format!(
            "the broker lacks CAP_SYS_ADMIN, so datagrams of {} listed network namespace(s) stay on the kernel: see `partywall doctor`",
            paths.len()
        )),
        _ => None,
    }
}

fn read(file: &Path) -> ListedNetworks {
    let text = match std::fs::read_to_string(file) {
        Ok(text) => text,
        Err(error) => return ListedNetworks::Unknown(format!("cannot read {}: {error}", file.display())),
    };
    listed(&text).map_or_else(
        |error| ListedNetworks::Unknown(format!("{} is no TOML: {}", file.display(), error.message())),
        ListedNetworks::Known,
    )
}

/// The namespaces of a policy's text, without the broker's own.
fn listed(text: &str) -> Result<Vec<String>, toml::de::Error> {
    let policy: toml::Table = text.parse()?;
    let networks = policy.get("network").and_then(toml::Value::as_array).into_iter().flatten();
    let namespaces = networks.filter_map(|network| network.get("namespace")?.as_str());
    Ok(namespaces.filter(|namespace| *namespace != "host").map(str::to_owned).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_other_namespaces_than_the_brokers_are_listed() {
        let text = "[quota]\nlisteners = 4\n[[network]]\nnamespace = 'host'\naddresses = ['10.0.0.1']\n\
                    [[ network ]]\nnamespace = '/run/netns/blue'\naddresses = ['10.0.0.2']\n";
        assert_eq!(listed(text).unwrap(), ["/run/netns/blue"]);
        assert!(listed("# [[network]]\n").unwrap().is_empty());
    }

    #[test]
    fn policy_that_cannot_be_read_is_unknown() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("p.toml");
        let is_unknown = || matches!(read(&file), ListedNetworks::Unknown(why) if why.contains("p.toml"));
        assert!(is_unknown());
        std::fs::write(&file, "network = ").unwrap();
        assert!(is_unknown());
    }
}
