//! `partywall enable` and `disable`: a systemd service that loads the library from its next start on, by a drop-in beside its unit.

mod drop_in;
mod unit;

use std::path::{Path, PathBuf};

use partywall_protocol::directory::Clause;
use partywall_protocol::environment;

use crate::args::Global;
use crate::commands::run::prepend;
use crate::exit::{Code, CommandFailure};
use crate::program::Program;
use crate::program::worker;
use crate::{output, siblings, words};
use drop_in::DropIn;
use unit::ServiceUnit;

const AFTER: &str = "\
The service gets LD_PRELOAD by a drop-in, /etc/systemd/system/UNIT.d/50-partywall.conf, and nothing else changes. A service that runs \
goes on as it is until it is restarted. `partywall disable` removes the drop-in.

Examples:
  partywall enable nginx.service && systemctl daemon-reload && systemctl restart nginx.service
  partywall --domain web enable nginx                 its programs join as web
  partywall enable --policy never@port=22 app@blue    connections to port 22 stay on TCP
  partywall disable nginx.service

Exit codes:
  0   the drop-in is written, or removed
  1   a local failure, or the drop-in has been changed by somebody else
  2   wrong usage
  3   there is no such service, or it is not enabled";

/// Have a systemd service run with the library, as `partywall run` would
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER)]
pub(crate) struct EnableArgs {
    /// When its connections move to shared memory, as for `run`; repeatable [default: the broker's policy]
    #[arg(long, value_name = "MODE[@WHICH]", value_parser = words::parse_own_clause)]
    policy: Vec<Clause>,

    /// Folder of another system whose files are meant, such as that of an image
    #[arg(long, value_name = "DIR", default_value = "/")]
    root: PathBuf,

    /// The service, such as nginx.service
    #[arg(value_name = "UNIT", value_parser = unit::parse_name)]
    unit: String,
}

/// Take back what `enable` wrote for a service
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER)]
pub(crate) struct DisableArgs {
    /// Folder of another system whose files are meant
    #[arg(long, value_name = "DIR", default_value = "/")]
    root: PathBuf,

    /// The service, such as nginx.service
    #[arg(value_name = "UNIT", value_parser = unit::parse_name)]
    unit: String,
}

pub(crate) fn enable(global: &Global, args: &EnableArgs) -> Result<(), CommandFailure> {
    let name = &args.unit;
    let unit = ServiceUnit::find(&args.root, name)?.ok_or_else(|| {
        CommandFailure::new(Code::Refused, format!("there is no service {name}"))
            .hint("`systemctl list-units --type=service` lists those that are there")
    })?;
    let drop_in = DropIn::of(&args.root, name);
    drop_in.check_unchanged()?;
    let program = program(&args.root, &unit);
    if let Some(obstacle) =
        program.as_ref().map(Program::obstacles).into_iter().flatten().find(|obstacle| !obstacle.keeps_preload())
    {
        // Its loader would complain at each start, or fail.
        return Err(
            CommandFailure::general(format!("{name} would not gain: {}", obstacle.words())).hint(obstacle.remedy())
        );
    }
    let library = library(&args.root)?;
    let before = unit.environment(environment::PRELOAD);
    let preload = prepend(library.as_os_str(), before.as_deref().map(AsRef::as_ref))?;
    let preload = preload
        .into_string()
        .map_err(|_| CommandFailure::general("the path of the library is not UTF-8, which systemd demands"))?;
    let mut variables = vec![(environment::PRELOAD, preload)];
    // Only what was asked for: a drop-in outlives the shell in which it was written.
    if let Some(broker) = &global.broker {
        variables.push((environment::BROKER, broker.display().to_string()));
    }
    if let Some(domain) = global.domain.as_ref().filter(|domain| !domain.is_empty()) {
        variables.push((environment::DOMAIN, domain.clone()));
    }
    if !args.policy.is_empty() {
        variables.push((environment::POLICY, words::join(&args.policy)));
    }
    drop_in.write(name, &variables)?;
    output::print(format_args!("{name} loads Partywall from its next start on: {}", drop_in.path().display()))?;
    for line in remarks(&unit, program.as_ref()) {
        output::print(format_args!("  note: {line}"))?;
    }
    tell_to_reload(&args.root, name)
}

pub(crate) fn disable(args: &DisableArgs) -> Result<(), CommandFailure> {
    let name = &args.unit;
    let drop_in = DropIn::of(&args.root, name);
    drop_in.remove(name)?;
    output::print(format_args!("{name} does without Partywall from its next start on"))?;
    tell_to_reload(&args.root, name)
}

/// A system that does not run has nothing to reload.
fn tell_to_reload(root: &Path, name: &str) -> Result<(), CommandFailure> {
    match root == Path::new("/") {
        true => output::print(format_args!("  now: systemctl daemon-reload && systemctl restart {name}")),
        false => Ok(()),
    }
}

/// The library, by the path that it has in the system that is meant.
fn library(root: &Path) -> Result<PathBuf, CommandFailure> {
    if root == Path::new("/") {
        return siblings::find_library();
    }
    let places = ["usr/lib/partywall", "usr/local/lib/partywall"].map(|dir| Path::new(dir).join(environment::LIBRARY));
    let found = places.iter().find(|place| root.join(place).exists()).map(|place| Path::new("/").join(place));
    found.ok_or_else(|| {
        let places = places.map(|place| root.join(place).display().to_string()).join(" nor ");
        CommandFailure::general(format!("the library is missing there: it is neither {places}"))
            .hint("install the package libpartywall-preload in that system")
    })
}

/// The program that a service starts; `None` if that cannot be told.
fn program(root: &Path, unit: &ServiceUnit) -> Option<Program> {
    let path = unit.program()?;
    Program::find(root.join(path.trim_start_matches('/')).as_ref()).ok()
}

/// What in a unit keeps connections on TCP, and the rule that its user needs.
fn remarks(unit: &ServiceUnit, program: Option<&Program>) -> Vec<String> {
    let mut all = Vec::new();
    let value = |key| unit.last(key).filter(|value| !value.is_empty());
    let families = unit.values("RestrictAddressFamilies").join(" ");
    if !families.is_empty() && !families.starts_with('~') && !families.contains("AF_UNIX") {
        all.push(
            "RestrictAddressFamilies= leaves AF_UNIX out, so it cannot reach the broker and stays on TCP; add AF_UNIX"
                .to_owned(),
        );
    }
    for key in ["RootDirectory", "RootImage"] {
        if value(key).is_some() {
            all.push(format!(
                "it runs in another file system ({key}=), where the library and the broker's socket must be too"
            ));
        }
    }
    if value("PrivateUsers").is_some_and(|value| value == "yes" || value == "true") {
        all.push(
            "PrivateUsers= makes it a container to the broker, which needs CAP_NET_ADMIN then (docs/containers.md)"
                .to_owned(),
        );
    }
    if value("EnvironmentFile").is_some() {
        all.push("an LD_PRELOAD in its EnvironmentFile= would replace this one".to_owned());
    }
    all.extend(
        program
            .map(Program::obstacles)
            .into_iter()
            .flatten()
            .take(1)
            .map(|obstacle| format!("it stays on TCP: {}", obstacle.words())),
    );
    let user = value("User").map(str::to_owned).or_else(|| worker::of(&program?.path).map(|worker| worker.user));
    if let Some(user) = user.filter(|user| user != "root") {
        all.push(format!(
            "it runs as {user}, whom the broker's policy must admit (`partywall policy test --from NAME --user {user}`)"
        ));
    }
    all
}
