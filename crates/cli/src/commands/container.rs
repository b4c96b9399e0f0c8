//! `partywall container`: one flag for programs in containers, by a specification that container engines read (CDI).
//!
//! The specification mounts two folders: the library's, and one that has the broker's socket alone. `/run/partywall` itself is not for containers:
//! monitors of virtual machines are there, and a process that reaches a monitor commands the machine.

mod specification;

use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use clap::Subcommand;
use partywall_protocol::environment;

use crate::exit::{Code, CommandFailure, Context};
use crate::program::elf::Elf;
use crate::{output, siblings};
use specification::SOCKET_FOLDER;

const AFTER: &str = "\
Examples:
  partywall container setup                           once, as root
  podman run --device partywall.dev/host=all redis    a container whose programs use Partywall; docker run likewise
  partywall container setup --print                   show the specification
  partywall container remove                          take it back

The broker's policy must admit the users in the containers, and the broker needs CAP_NET_ADMIN or `partywall numbers on` for connections between containers \
(docs/containers.md).";

/// Make containers use Partywall by one flag: --device partywall.dev/host=all
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER)]
pub(crate) struct Args {
    #[command(subcommand)]
    action: ContainerAction,
}

#[derive(Debug, Subcommand)]
enum ContainerAction {
    /// Write the specification (CDI) for podman, docker and Kubernetes
    Setup {
        /// Folder of specifications
        #[arg(long, value_name = "DIR", default_value = FOLDER)]
        dir: PathBuf,
        /// Print the specification, and write nothing
        #[arg(long)]
        print: bool,
    },
    /// Remove the specification
    Remove {
        /// Folder of specifications
        #[arg(long, value_name = "DIR", default_value = FOLDER)]
        dir: PathBuf,
    },
}

const FOLDER: &str = "/etc/cdi";
const FILE: &str = "partywall.json";

pub(crate) fn run(args: &Args) -> Result<(), CommandFailure> {
    match &args.action {
        ContainerAction::Setup { print, dir } => {
            let library = library()?;
            let specification = specification::of(&library);
            if *print {
                return output::print_json(&specification);
            }
            let path = dir.join(FILE);
            if !matches!(read_ours(&path)?, None | Some(true)) {
                return Err(foreign(&path));
            }
            let text =
                serde_json::to_string_pretty(&specification).map_err(|e| CommandFailure::general(e.to_string()))?;
            write(dir, &path, &format!("{text}\n"))?;
            output::print(format_args!("wrote {}: podman run --device {} ...", path.display(), specification::DEVICE))?;
            report_library(&library)?;
            report_socket()
        }
        ContainerAction::Remove { dir } => {
            let path = dir.join(FILE);
            match read_ours(&path)? {
                None => Err(CommandFailure::new(Code::Refused, format!("there is no {}", path.display()))),
                Some(false) => Err(foreign(&path)),
                Some(true) => {
                    std::fs::remove_file(&path).context(format_args!("cannot remove {}", path.display()))?;
                    // With the files of others it stays.
                    let _ = std::fs::remove_dir(dir);
                    output::print(format_args!("removed {}; containers that run keep what they have", path.display()))
                }
            }
        }
    }
}

fn foreign(path: &Path) -> CommandFailure {
    CommandFailure::general(format!("{} is not by `partywall container setup`", path.display()))
        .hint("move it away if it is not needed, and try again")
}

/// Whether a specification is ours; `None` if there is none.
fn read_ours(path: &Path) -> Result<Option<bool>, CommandFailure> {
    match std::fs::read(path) {
        Ok(bytes) => {
            let value: Option<serde_json::Value> = serde_json::from_slice(&bytes).ok();
            Ok(Some(value.is_some_and(|value| value["kind"] == specification::KIND)))
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).context(format_args!("cannot read {}", path.display())),
    }
}

/// Writes it whole: engines read the folder at any time.
fn write(dir: &Path, path: &Path, text: &str) -> Result<(), CommandFailure> {
    let failed = || format!("cannot write {}", path.display());
    std::fs::create_dir_all(dir).context(failed())?;
    let mut file = tempfile::NamedTempFile::new_in(dir).context(failed())?;
    file.write_all(text.as_bytes()).context(failed())?;
    file.as_file().set_permissions(std::fs::Permissions::from_mode(0o644)).context(failed())?;
    file.persist(path).map_err(|error| error.error).context(failed())?;
    Ok(())
}

/// The folder with the library at all places where loaders of containers look.
fn library() -> Result<PathBuf, CommandFailure> {
    let installed = siblings::find_library()?;
    let folder = installed.with_file_name("container");
    match folder.join(environment::LIBRARY).is_file() {
        true => Ok(folder),
        false => Err(CommandFailure::general(format!("{} lacks what containers need", folder.display()))
            .hint("install Partywall with `make install` or its packages")),
    }
}

/// How old a C library may be. With an older one, a program of the container does not even start.
fn report_library(folder: &Path) -> Result<(), CommandFailure> {
    let Some(elf) = Elf::read(&folder.join(environment::LIBRARY))? else {
        return Err(CommandFailure::general(format!("{} is no library", folder.join(environment::LIBRARY).display())));
    };
    let Some((major, minor)) = elf.versions_needed.iter().filter_map(|version| glibc(version)).max() else {
        return Ok(());
    };
    output::print(format_args!(
        "  the library works in containers with glibc {major}.{minor} or newer; others stay on TCP or musl"
    ))?;
    if (major, minor) > PORTABLE {
        output::print(format_args!(
            "  warning: programs in containers with an older glibc will not start; `make portable` makes a library for glibc {}.{}",
            PORTABLE.0, PORTABLE.1
        ))?;
    }
    let other = elf.needed.iter().find(|name| !name.starts_with("libc.so") && !name.starts_with("ld-linux"));
    match other {
        Some(name) => output::print(format_args!("  the image must have {name} too; most have")),
        None => Ok(()),
    }
}

/// The glibc version that `make portable` builds for.
const PORTABLE: (u32, u32) = (2, 17);

/// The numbers of `GLIBC_2.34`.
fn glibc(version: &str) -> Option<(u32, u32)> {
    let (major, minor) = version.strip_prefix("GLIBC_")?.split_once('.')?;
    // Some have a third number.
    Some((major.parse().ok()?, minor.split('.').next()?.parse().ok()?))
}

/// Containers are refused by their engine while the folder is missing, and stay on TCP while the socket is.
fn report_socket() -> Result<(), CommandFailure> {
    let folder = Path::new(SOCKET_FOLDER);
    if !folder.is_dir() && std::fs::create_dir_all(folder).is_err() {
        return output::print(format_args!(
            "  warning: {} cannot be made; engines refuse the device without it",
            folder.display()
        ));
    }
    match folder.join("broker.sock").exists() {
        true => Ok(()),
        false => output::print(format_args!(
            "  the broker's socket is not in {} yet; restart partywalld, which puts it there",
            folder.display()
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn glibc_versions_compare_as_numbers() {
        assert_eq!(glibc("GLIBC_2.2.5"), Some((2, 2)));
        assert!(glibc("GLIBC_2.34") > glibc("GLIBC_2.4"));
        assert_eq!(glibc("GCC_3.0"), None);
        assert_eq!(glibc("GLIBC_PRIVATE"), None);
    }

    #[test]
    fn specification_of_others_is_neither_replaced_nor_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(FILE);
        assert_eq!(read_ours(&path).unwrap(), None);
        for (text, ours) in
            [("{\"kind\": \"other.dev/x\"}", false), ("no JSON", false), ("{\"kind\": \"partywall.dev/host\"}", true)]
        {
            std::fs::write(&path, text).unwrap();
            assert_eq!(read_ours(&path).unwrap(), Some(ours), "{text}");
        }
    }

    #[test]
    fn folder_of_the_library_is_mounted_where_the_variable_points() {
        assert!(specification::PRELOAD.starts_with(specification::LIBRARY_FOLDER));
    }
}
