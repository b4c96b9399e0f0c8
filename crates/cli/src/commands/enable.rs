//! `partywall enable` and `disable`: a systemd service that loads the library from its next start on, by a drop-in beside its unit.

mod drop_in;
mod system_root;
mod unit;

use std::io::Read as _;
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};

use partywall_protocol::directory::Clause;
use partywall_protocol::environment;
use partywall_vm::inside;

use crate::args::Global;
use crate::commands::run::prepend;
use crate::exit::{Code, CommandFailure};
use crate::program::Program;
use crate::program::obstacle::RingObstacle;
use crate::program::worker;
use crate::{output, siblings, words};
use drop_in::DropIn;
use system_root::SystemRoot;
use unit::ServiceUnit;

const AFTER: &str = "\
A drop-in, /etc/systemd/system/UNIT.d/50-partywall.conf, sets LD_PRELOAD, and a variable for each of --broker, --domain and --move that \
is given. PARTYWALL_BROKER and PARTYWALL_DOMAIN of the environment count as given. The unit's own files do not change. A running \
service is not affected until it is restarted. `partywall disable` removes the drop-in.

Examples:
  partywall enable nginx.service && systemctl daemon-reload && systemctl restart nginx.service
  partywall --domain web enable nginx                 its programs join as web
  partywall enable --move never@port=22 app@blue      connections to port 22 stay on TCP
  partywall disable nginx.service

Exit codes:
  0   the drop-in is written, or removed
  1   a local failure, or the drop-in was changed after `enable` wrote it
  2   wrong usage
  3   there is no such service, or it is not enabled";

/// Make a systemd service run with the library, as under `partywall run`
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER)]
pub(crate) struct EnableArgs {
    /// When its connections move to shared memory, as for `run`; repeatable [default: the broker's move rules]
    #[arg(long = "move", alias = "policy", value_name = "MODE[@WHICH]", value_parser = words::parse_own_clause)]
    moves: Vec<Clause>,

    /// Root folder of the system to change, such as that of an image
    #[arg(long, value_name = "DIR", default_value = "/")]
    root: PathBuf,

    /// The service, such as nginx.service
    #[arg(value_name = "UNIT", value_parser = unit::parse_name)]
    unit: String,
}

/// Remove the files that `enable` wrote for a service
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER)]
pub(crate) struct DisableArgs {
    /// Root folder of the system to change
    #[arg(long, value_name = "DIR", default_value = "/")]
    root: PathBuf,

    /// The service, such as nginx.service
    #[arg(value_name = "UNIT", value_parser = unit::parse_name)]
    unit: String,
}

pub(crate) fn enable(global: &Global, args: &EnableArgs) -> Result<(), CommandFailure> {
    let name = &args.unit;
    let root = SystemRoot::open(&args.root)?;
    let unit = ServiceUnit::find(&root, name)?.ok_or_else(|| {
        CommandFailure::new(Code::Refused, format!("there is no service {name}"))
            .hint("`systemctl list-units --type=service` lists those that are there")
    })?;
    let drop_in = DropIn::of(&root, name);
    drop_in.check_unchanged()?;
    let obstacles = obstacles(&root, &unit);
    if let Some(obstacle) = obstacles.iter().find(|obstacle| !obstacle.keeps_preload()) {
        // Its loader would complain at each start, or fail.
        return Err(
            CommandFailure::general(format!("{name} would not gain: {}", obstacle.words())).hint(obstacle.remedy())
        );
    }
    let library = library(&root)?;
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
        if let Some(user) = workers_user(&root, &unit) {
            variables.push((environment::DOMAIN_USER, user.to_string()));
        }
    }
    if !args.moves.is_empty() {
        variables.push((environment::MOVES, words::join(&args.moves)));
    }
    drop_in.write(name, &variables)?;
    output::print(format_args!("{name} loads Partywall from its next start on: {}", drop_in.path().display()))?;
    let in_machine = root.is_running() && inside::port().is_ok();
    for line in remarks(&unit, &obstacles, global.domain.as_deref(), in_machine) {
        output::print(format_args!("  note: {line}"))?;
    }
    tell_to_reload(&root, name)
}

pub(crate) fn disable(args: &DisableArgs) -> Result<(), CommandFailure> {
    let name = &args.unit;
    let root = SystemRoot::open(&args.root)?;
    let drop_in = DropIn::of(&root, name);
    drop_in.remove(name)?;
    output::print(format_args!("{name} does without Partywall from its next start on"))?;
    tell_to_reload(&root, name)
}

/// A system that does not run has nothing to reload.
fn tell_to_reload(root: &SystemRoot, name: &str) -> Result<(), CommandFailure> {
    match root.is_running() {
        true => output::print(format_args!("  now: systemctl daemon-reload && systemctl restart {name}")),
        false => Ok(()),
    }
}

/// The library, by the path that it has in the system that is meant.
fn library(root: &SystemRoot) -> Result<PathBuf, CommandFailure> {
    if root.is_running() {
        return siblings::find_library();
    }
    let places = ["usr/lib/partywall", "usr/local/lib/partywall"].map(|dir| Path::new(dir).join(environment::LIBRARY));
    let found = places.iter().find(|place| root.file(place).is_ok()).map(|place| Path::new("/").join(place));
    found.ok_or_else(|| {
        let places = places.map(|place| root.shown(&place).display().to_string()).join(" nor ");
        CommandFailure::general(format!("the library is missing there: it is neither {places}"))
            .hint("install the package libpartywall-preload in that system")
    })
}

/// The obstacles that keep the library out of the program that a service starts, as far as they are known.
fn obstacles(root: &SystemRoot, unit: &ServiceUnit) -> Vec<RingObstacle> {
    let Some(path) = unit.program() else { return Vec::new() };
    if root.is_running() {
        return Program::find(Path::new("/").join(path).as_ref()).map(|found| found.obstacles()).unwrap_or_default();
    }
    let Ok(mut file) = root.file(Path::new(&path)) else { return Vec::new() };
    let mut head = [0; 2];
    // The interpreter of a script is one of that system, and not looked for.
    if file.read_exact(&mut head).is_err() || head == *b"#!" {
        return Vec::new();
    }
    let held = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
    Program::find(held.as_os_str()).map(|found| found.obstacles()).unwrap_or_default()
}

/// The number of the user of the workers, of a server that root starts. For another system the number is not known here.
fn workers_user(root: &SystemRoot, unit: &ServiceUnit) -> Option<u32> {
    let starts_as_root = unit.last("User").is_none_or(|user| user.is_empty() || user == "root" || user == "0");
    let program = unit.program().filter(|_| starts_as_root && root.is_running())?;
    worker::user_of(Path::new(&program))
}

/// The settings of a unit that keep connections on TCP, and the rule that its user needs to join as `domain`.
///
/// The broker admits all programs of a virtual machine, whose agent's socket has to admit the user.
fn remarks(unit: &ServiceUnit, obstacles: &[RingObstacle], domain: Option<&str>, in_machine: bool) -> Vec<String> {
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
            "PrivateUsers= makes it a container to the broker, which needs CAP_NET_ADMIN or `partywall numbers on` then (docs/containers.md)"
                .to_owned(),
        );
    }
    if value("EnvironmentFile").is_some() {
        all.push("an LD_PRELOAD in its EnvironmentFile= would replace this one".to_owned());
    }
    all.extend(obstacles.iter().take(1).map(|obstacle| format!("it stays on TCP: {}", obstacle.words())));
    let program = unit.program();
    let worker = || worker::of(Path::new(program.as_ref()?)).map(|worker| worker.user);
    let own = value("User").map(str::to_owned);
    let runs = if own.is_some() { "it runs as" } else { "its workers run as" };
    let user = own.or_else(worker).filter(|user| user != "root");
    if in_machine && let Some(user) = user {
        all.push(format!(
            "{runs} {user}, whom the agent's socket must let connect; by default only root may (docs/vm.md, names and rights)"
        ));
    } else if let Some(user) = user {
        let stem = || Path::new(program.as_ref()?).file_name()?.to_str().map(|name| format!("{name}-*"));
        let name = domain.filter(|name| !name.is_empty()).map(str::to_owned).or_else(stem).unwrap_or("NAME".into());
        all.push(format!(
            "{runs} {user}, whom the broker's policy must admit (partywalld.toml(5)):\n    [[join]]\n    domain = \"{name}\"\n    users = [\"{user}\"]"
        ));
    }
    all
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    const UNIT: &str = "x.service";
    const UNITS: &str = "etc/systemd/system";

    /// A folder with an image, and one beside it that no link in the image may reach.
    struct Image {
        dir: tempfile::TempDir,
    }

    impl Image {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            std::fs::create_dir_all(dir.path().join("image/etc/systemd")).unwrap();
            std::fs::create_dir_all(dir.path().join("image/usr/lib/systemd/system")).unwrap();
            std::fs::create_dir(dir.path().join("outside")).unwrap();
            let image = Self { dir };
            std::fs::write(image.inside("usr/lib/systemd/system").join(UNIT), "[Service]\nUser=inside\n").unwrap();
            image
        }

        fn inside(&self, path: &str) -> PathBuf {
            self.dir.path().join("image").join(path)
        }

        fn outside(&self, path: &str) -> PathBuf {
            self.dir.path().join("outside").join(path)
        }

        fn root(&self) -> SystemRoot {
            SystemRoot::open(&self.inside("")).unwrap()
        }

        fn write(&self) -> Result<(), CommandFailure> {
            let root = self.root();
            let drop_in = DropIn::of(&root, UNIT);
            drop_in.check_unchanged()?;
            drop_in.write(UNIT, &[(environment::PRELOAD, "/lib.so".to_owned())])
        }

        fn remove(&self) -> Result<(), CommandFailure> {
            DropIn::of(&self.root(), UNIT).remove(UNIT)
        }
    }

    fn entries(folder: &Path) -> usize {
        std::fs::read_dir(folder).unwrap().count()
    }

    #[test]
    fn drop_in_is_written_and_removed_with_its_folder() {
        let image = Image::new();
        for _ in 0..2 {
            image.write().unwrap();
        }
        let folder = image.inside(UNITS).join("x.service.d");
        assert_eq!(entries(&folder), 1, "nothing temporary is left");
        let mode = std::os::unix::fs::MetadataExt::mode(&folder.join(drop_in::FILE).metadata().unwrap());
        assert_eq!(mode & 0o777, 0o644);
        image.remove().unwrap();
        assert!(!folder.exists());
        assert_eq!(image.remove().unwrap_err().code, Code::Refused);
    }

    #[test]
    fn no_link_of_an_image_has_anything_written_outside() {
        let climbing = "../../../../../../../../../../../..";
        for part in ["etc", "etc/systemd", UNITS, "etc/systemd/system/x.service.d"] {
            for relative in [false, true] {
                let image = Image::new();
                let _ = std::fs::remove_dir_all(image.inside(part));
                std::fs::create_dir_all(image.inside(part).parent().unwrap()).unwrap();
                let outside = image.outside("");
                std::fs::create_dir_all(outside.join("systemd/system/x.service.d")).unwrap();
                let target = match relative {
                    true => Path::new(climbing).join(outside.strip_prefix("/").unwrap()),
                    false => outside.clone(),
                };
                symlink(target, image.inside(part)).unwrap();
                image.write().unwrap_err();
                let found = walk(&outside);
                assert_eq!(found, 0, "{part}, relative: {relative}");
            }
        }
    }

    /// How many files there are below a folder.
    fn walk(folder: &Path) -> usize {
        let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        entries.map(|path| if path.is_dir() { walk(&path) } else { 1 }).sum()
    }

    #[test]
    fn link_within_an_image_is_followed_as_that_system_would() {
        let image = Image::new();
        std::fs::create_dir_all(image.inside("data/units")).unwrap();
        symlink("/data/units", image.inside(UNITS)).unwrap();
        image.write().unwrap();
        assert!(image.inside("data/units/x.service.d").join(drop_in::FILE).is_file());
        image.remove().unwrap();
        assert_eq!(entries(&image.inside("data/units")), 0);
    }

    #[test]
    fn no_link_of_an_image_has_anything_removed_outside() {
        for part in [UNITS, "etc/systemd/system/x.service.d", "etc/systemd/system/x.service.d/50-partywall.conf"] {
            let image = Image::new();
            image.write().unwrap();
            let (inside, outside) = (image.inside(part), image.outside("moved"));
            std::fs::rename(&inside, &outside).unwrap();
            symlink(&outside, &inside).unwrap();
            image.remove().unwrap_err();
            let moved = if outside.is_dir() { walk(&outside) } else { 1 };
            assert_eq!(moved, 1, "{part}");
        }
    }

    #[test]
    fn no_link_of_an_image_has_anything_read_outside() {
        let find = |image: &Image| ServiceUnit::find(&image.root(), UNIT);
        let user = |image: &Image| find(image).unwrap().unwrap().last("User").map(str::to_owned);
        let image = Image::new();
        assert_eq!(user(&image).as_deref(), Some("inside"));
        std::fs::write(image.outside("unit"), "[Service]\nUser=outside\n").unwrap();
        let folder = image.inside("usr/lib/systemd/system/x.service.d");
        symlink(image.outside(""), &folder).unwrap();
        std::fs::copy(image.outside("unit"), image.outside("a.conf")).unwrap();
        assert_eq!(user(&image).as_deref(), Some("inside"), "a folder of drop-ins");
        std::fs::remove_file(&folder).unwrap();
        std::fs::create_dir(&folder).unwrap();
        let drop_in = folder.join("a.conf");
        symlink("/dev/null", &drop_in).unwrap();
        assert_eq!(user(&image).as_deref(), Some("inside"), "a masked drop-in");
        std::fs::remove_file(&drop_in).unwrap();
        symlink(image.outside("a.conf"), &drop_in).unwrap();
        find(&image).unwrap_err();
        std::fs::remove_file(&drop_in).unwrap();
        symlink("/usr/lib/b", &drop_in).unwrap();
        std::fs::write(image.inside("usr/lib/b"), "[Service]\nUser=linked\n").unwrap();
        assert_eq!(user(&image).as_deref(), Some("linked"), "within the image");
        std::fs::remove_file(&drop_in).unwrap();
        rustix::fs::mknodat(rustix::fs::CWD, &drop_in, rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU, 0).unwrap();
        find(&image).unwrap_err();
        std::fs::remove_file(&drop_in).unwrap();
        let unit = image.inside("usr/lib/systemd/system").join(UNIT);
        std::fs::remove_file(&unit).unwrap();
        symlink(image.outside("unit"), &unit).unwrap();
        find(&image).unwrap_err();
    }

    #[test]
    fn library_of_an_image_is_not_looked_for_outside() {
        let image = Image::new();
        std::fs::write(image.outside(environment::LIBRARY), "").unwrap();
        symlink(image.outside(""), image.inside("usr/lib/partywall")).unwrap();
        library(&image.root()).unwrap_err();
        std::fs::remove_file(image.inside("usr/lib/partywall")).unwrap();
        std::fs::create_dir(image.inside("usr/lib/partywall")).unwrap();
        std::fs::write(image.inside("usr/lib/partywall").join(environment::LIBRARY), "").unwrap();
        assert_eq!(library(&image.root()).unwrap(), Path::new("/usr/lib/partywall").join(environment::LIBRARY));
    }
}
