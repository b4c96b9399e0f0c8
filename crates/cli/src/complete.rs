//! Shell completion of commands and options, and of the names that the broker knows.
//!
//! The scripts of `partywall completions` run this program again, with [`VARIABLE`] set, for each completion.

use std::ffi::OsStr;
use std::path::PathBuf;

use clap::CommandFactory;
use clap_complete::CompleteEnv;
use clap_complete::engine::CompletionCandidate;
use partywall::Domain;
use partywall_protocol::environment;

use crate::args::{Cli, Global};
use crate::session;

/// The variable that asks for a completion, with the name of the shell.
pub(crate) const VARIABLE: &str = "PARTYWALL_COMPLETE";

/// Bash takes a colon for the end of a word. Here the parts are put together again, and what stands before the colon is taken off the answers.
pub(crate) const BASH: &str = r#"_partywall() {
    local IFS=$'\013' word words=() prefix
    for word in "${COMP_WORDS[@]:0:COMP_CWORD+1}"; do
        if [[ ${#words[@]} -gt 0 && ( $word == : || ${words[-1]} == *: ) ]]; then
            words[-1]+=$word
        else
            words+=("$word")
        fi
    done
    COMPREPLY=( $(
        _CLAP_IFS="$IFS" _CLAP_COMPLETE_INDEX=$((${#words[@]} - 1)) _CLAP_COMPLETE_COMP_TYPE=$COMP_TYPE \
            _CLAP_COMPLETE_SPACE=false PARTYWALL_COMPLETE=bash partywall -- "${words[@]}"
    ) ) || unset COMPREPLY
    if [[ ${words[-1]} == *:* && $COMP_WORDBREAKS == *:* ]]; then
        prefix=${words[-1]%"${words[-1]##*:}"}
        COMPREPLY=("${COMPREPLY[@]#"$prefix"}")
    fi
    if [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY-} != *[=/:] ]]; then
        COMPREPLY[0]+=" "
    fi
}
complete -o nospace -o bashdefault -F _partywall partywall
"#;

/// Answers a shell, and ends the program, if a shell has asked.
pub(crate) fn answer() {
    CompleteEnv::with_factory(Cli::command).var(VARIABLE).complete();
}

/// A session with the broker that the environment names. The options before the cursor are not known here.
fn broker() -> Option<Domain> {
    let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    let domain = variable(environment::DOMAIN).map(|name| name.to_string_lossy().into_owned());
    session::join(&Global { broker: variable(environment::BROKER).map(PathBuf::from), domain, verbose: 0 }).ok()
}

fn matching(current: &OsStr, all: impl IntoIterator<Item = String>) -> Vec<CompletionCandidate> {
    let current = current.to_string_lossy();
    all.into_iter().filter(|name| name.starts_with(&*current)).map(CompletionCandidate::new).collect()
}

/// `DOMAIN:SERVICE` of each service that can be seen.
pub(crate) fn services(current: &OsStr) -> Vec<CompletionCandidate> {
    let services = broker().and_then(|domain| domain.services().ok()).unwrap_or_default();
    matching(current, services.into_iter().map(|row| format!("{}:{}", row.domain_name, row.name)))
}

/// Domains that can be seen.
pub(crate) fn domains(current: &OsStr) -> Vec<CompletionCandidate> {
    let Some(broker) = broker() else { return Vec::new() };
    let own = broker.id();
    let rows = broker.domains().unwrap_or_default().into_iter();
    matching(current, rows.filter(|row| row.id != own || row.sessions > 1).map(|row| row.name))
}

/// Virtual machines that are attached.
pub(crate) fn machines(current: &OsStr) -> Vec<CompletionCandidate> {
    let machines = broker().and_then(|domain| domain.machines().ok()).unwrap_or_default();
    matching(current, machines.into_iter().map(|row| row.name))
}

/// Numbers of channels, with their two ends beside them.
pub(crate) fn channels(current: &OsStr) -> Vec<CompletionCandidate> {
    let channels = broker().and_then(|domain| domain.channels().ok()).unwrap_or_default();
    let current = current.to_string_lossy();
    let fits = channels.into_iter().filter(|row| row.channel.to_string().starts_with(&*current));
    fits.map(|row| {
        let ends = format!("{} -> {}:{}", row.from_name, row.to_name, row.service);
        CompletionCandidate::new(row.channel.to_string()).help(Some(ends.into()))
    })
    .collect()
}
