//! A PostgreSQL server in a machine that has nothing of Debian but the kernel: its database is made on the host.

use std::{os::unix::fs::MetadataExt, path::Path, process::Command, time::Duration};

use partywall_lab::Guest;

use super::machines::fault;
use crate::{
    apps::{
        AppAddress, databases,
        site::{find, run},
    },
    error::{During, Result},
    interrupt::Interrupt,
};

/// Longer than the host needs to make an empty database, and to pack it.
const PATIENCE: Duration = Duration::from_secs(60);
/// The files without which the server does not start: abbreviations of time zones.
const SHARED: &str = "timezonesets";

/// Brings a new database and what its server needs into a machine. Returns the line that becomes the server.
pub(super) fn install(guest: &Guest, port: u16, interrupt: &Interrupt) -> Result<String> {
    let folder = tempfile::tempdir().during("making a folder for a database")?;
    let run = |command: &mut Command, name| run(command, name, PATIENCE, folder.path(), interrupt);
    let user = databases::create_database(folder.path(), |init| run(init, "initdb"))?;
    // Everything in the machine runs as root, and PostgreSQL must not. Where this process is not root, the database belongs to its user.
    let owner = std::fs::metadata(folder.path().join("data")).during("looking at a database")?.uid();
    let user = user.unwrap_or(owner);
    let shared = run(Command::new(find("pg_config", "postgresql")?).arg("--sharedir"), "pg_config")?;
    let shared = Path::new(shared.trim());
    let packed = folder.path().join("packed.tar.gz");
    let mut pack = Command::new("tar");
    pack.arg("-czf").arg(&packed).arg("-C").arg(folder.path()).arg("data").arg("-C").arg(shared).arg(SHARED);
    run(&mut pack, "tar")?;
    let packed = std::fs::read(&packed).during("reading a packed database")?;

    let there = format!("/tmp/postgresql-{port}");
    guest.shell(&format!("mkdir -p {there} {} /usr/share/zoneinfo", shared.display())).map_err(fault)?;
    guest.put(&packed, &format!("{there}/packed.tar.gz"), 0o600).map_err(fault)?;
    let unpack = format!("cd {there} && tar -xzf packed.tar.gz && rm -rf packed.tar.gz {0}/{SHARED}", shared.display());
    let place = format!("mv {SHARED} {}/ && chown {user} . && chmod 1777 /dev/shm", shared.display());
    guest.shell(&format!("{unpack} && {place}")).map_err(fault)?;
    let at = AppAddress { address: "0.0.0.0".into(), port, slowness: 1 };
    let server = databases::database_server(Some(user), Path::new("/bin/postgres"), &there, &at);
    // The `setpriv` of the shell itself knows no users.
    Ok(format!("/bin/setpriv {}", server.join(" ")))
}
