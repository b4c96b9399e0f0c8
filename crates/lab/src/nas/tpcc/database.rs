//! The database as it is before a load: made by a server of the host, and packed for a client.

use super::{NasFigure, TRANSACTIONS, TpccOptions, consistent, load};
use crate::cache::ContentHash;
use crate::process::LabProcess;
use crate::{Cache, LabError, image, scratch, tool};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// Where PostgreSQL's versions are on Debian.
const VERSIONS: &str = "/usr/lib/postgresql";
/// The first version whose `pgbench` repeats transactions that were in conflict.
const OLDEST: u32 = 15;
/// The tables are in the database that every cluster has, and a packed cluster has no other, because a client creates each of its files over NFS.
pub(super) const DATABASE: &str = "template1";
/// The owner of its files in a client.
pub(super) const USER_ID: u32 = 70;
/// Longer is a hang.
const START: Duration = Duration::from_secs(60);

/// What the database itself consists of, in the order in which it is carried out.
const SQL: [(&str, &str); 4] = [
    ("schema.sql", include_str!("schema.sql")),
    ("load.sql", include_str!("load.sql")),
    ("transactions.sql", include_str!("transactions.sql")),
    ("consistency.sql", include_str!("consistency.sql")),
];

/// The configuration on the host and in a client. It is small enough for one whose files do not all fit into the server's memory.
const CONFIGURATION: &str = "listen_addresses = ''
unix_socket_permissions = 0777
timezone = 'GMT'
log_timezone = 'GMT'
fsync = on
synchronous_commit = on
shared_buffers = 16MB
min_wal_size = 8MB
max_wal_size = 64MB
checkpoint_timeout = 30s
max_connections = 100
autovacuum_naptime = 10s
jit = off
";

/// The first content of the tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TpccScale {
    /// Warehouses, each with ten districts.
    pub warehouses: u32,
    /// Items, and rows of stock for each warehouse (100,000 in TPC-C).
    pub items: u32,
    /// Customers, and first orders, of each district (3,000 in TPC-C).
    pub customers: u32,
}

/// The programs of PostgreSQL's newest version on the host.
#[derive(Debug, Clone)]
pub(super) struct PostgresPrograms {
    folder: PathBuf,
    version: u32,
}

impl PostgresPrograms {
    pub(super) fn find() -> Result<Self, LabError> {
        let versions = fs::read_dir(VERSIONS).into_iter().flatten().flatten();
        let number = |name: std::ffi::OsString| name.to_str()?.parse::<u32>().ok();
        let has_all = |version: &u32| {
            let folder = Self::folder_of(*version);
            ["initdb", "postgres", "psql", "pgbench"].iter().all(|program| folder.join(program).exists())
        };
        let new_enough = versions.filter_map(|entry| number(entry.file_name())).filter(|version| *version >= OLDEST);
        let newest = new_enough.filter(has_all).max();
        let missing =
            || LabError::tool("postgres", format!("it is missing in version {OLDEST} or later (Debian: postgresql)"));
        newest.map(|version| Self { folder: Self::folder_of(version), version }).ok_or_else(missing)
    }

    fn folder_of(version: u32) -> PathBuf {
        Path::new(VERSIONS).join(format!("{version}/bin"))
    }

    /// Their folder, on the host and in a client.
    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    /// What a shell sets before it calls `psql` or `pgbench`, for the server with its socket in a folder.
    pub(super) fn environment(&self, socket: &str) -> String {
        let folder = self.folder.display();
        format!("export PATH={folder}:$PATH PGHOST={socket} PGUSER=postgres PGDATABASE={DATABASE}; ")
    }

    /// Files that a client needs beside the programs.
    fn others(&self) -> [PathBuf; 2] {
        let version = self.version;
        [
            Path::new(VERSIONS).join(format!("{version}/lib/plpgsql.so")),
            PathBuf::from(format!("/usr/share/postgresql/{version}/timezonesets")),
        ]
    }
}

/// PostgreSQL's rules let no server run as root, so the user that its package brings does.
fn as_user(program: &Path) -> Command {
    if !rustix::process::geteuid().is_root() {
        return Command::new(program);
    }
    let mut command = Command::new("setpriv");
    command.args(["--reuid", "postgres", "--regid", "postgres", "--clear-groups", "--"]).arg(program);
    command
}

/// A database with a server on the host. It ends when it is dropped.
#[derive(Debug)]
pub struct TpccDatabase {
    server: LabProcess,
    programs: PostgresPrograms,
    folder: tempfile::TempDir,
}

impl TpccDatabase {
    /// Makes it, with its first content.
    ///
    /// # Errors
    /// PostgreSQL is missing, or one of its programs fails.
    pub fn create(scale: TpccScale) -> Result<Self, LabError> {
        let programs = PostgresPrograms::find()?;
        let folder = scratch::folder()?;
        let data = folder.path().join("data");
        if rustix::process::geteuid().is_root() {
            tool::run("chown", [Path::new("postgres:"), folder.path()])?;
        }
        let mut init = as_user(&programs.folder.join("initdb"));
        init.args(["-A", "trust", "-U", "postgres", "-E", "UTF8", "--locale=C", "--wal-segsize=4", "--no-sync", "-D"]);
        tool::run_command("initdb", init.arg(&data).current_dir(folder.path()))?;
        write(&data.join("postgresql.conf"), CONFIGURATION)?;
        let scripts = folder.path().join("tpcc");
        fs::create_dir(&scripts).map_err(LabError::file("create", &scripts))?;
        for (name, _) in TRANSACTIONS {
            write(&scripts.join(format!("{name}.sql")), &script(name))?;
        }
        let mut server = as_user(&programs.folder.join("postgres"));
        server.arg("-D").arg(&data).arg("-k").arg(folder.path()).args(["-c", "fsync=off"]);
        let log = folder.path().join("log");
        let file = File::create(&log).map_err(LabError::file("create", &log))?;
        let server = LabProcess::start(&server, "INT", Some(file))?;
        let database = Self { server, programs, folder };
        database.wait_ready(&log)?;
        for (name, text) in SQL {
            let path = database.folder.path().join(name);
            write(&path, text)?;
            database.psql(&["-1", "-f", &path.to_string_lossy()])?;
        }
        let TpccScale { warehouses, items, customers } = scale;
        let fill = format!("SELECT load({warehouses}, {items}, {customers})");
        database.psql(&["-c", &fill, "-c", "VACUUM ANALYZE"])?;
        Ok(database)
    }

    /// Runs a line of SQL, and returns its rows, whose values are separated by `|`.
    ///
    /// # Errors
    /// The server rejects it.
    pub fn query(&self, sql: &str) -> Result<String, LabError> {
        self.psql(&["-c", sql])
    }

    /// Runs transactions on the host, and checks the conditions of consistency.
    ///
    /// # Errors
    /// `pgbench` fails, or [`LabError::Inconsistent`].
    pub fn run(&self, options: TpccOptions) -> Result<Vec<NasFigure>, LabError> {
        let environment = self.programs.environment(&self.folder.path().to_string_lossy());
        let scripts = self.folder.path().join("tpcc");
        let shell = |line: &str| tool::run("sh", ["-c", line]);
        let figures = load(&shell, &environment, &scripts.to_string_lossy(), options)?;
        consistent(&shell, &environment)?;
        Ok(figures)
    }

    fn wait_ready(&self, log: &Path) -> Result<(), LabError> {
        let deadline = Instant::now() + START;
        while let Err(e) = self.psql(&["-c", "SELECT"]) {
            let ended = self.server.wait(Duration::from_millis(50));
            if ended.is_some() || Instant::now() > deadline {
                let log = fs::read_to_string(log).unwrap_or_default();
                return Err(LabError::tool("postgres", format!("{e}: {log}")));
            }
        }
        Ok(())
    }

    fn psql(&self, words: &[&str]) -> Result<String, LabError> {
        let mut command = Command::new(self.programs.folder.join("psql"));
        command.args(["-XAtq", "-v", "ON_ERROR_STOP=1", "-U", "postgres", "-d", DATABASE, "-h"]);
        tool::run_command("psql", command.arg(self.folder.path()).args(words))
    }

    /// Packs programs, scripts and the database, whose server ends.
    fn pack(self, archive: &Path) -> Result<(), LabError> {
        self.query("UPDATE pg_database SET datistemplate = false WHERE datname = 'template0'")?;
        self.psql(&["-c", "DROP DATABASE postgres", "-c", "DROP DATABASE template0", "-c", "CHECKPOINT"])?;
        self.server.stop();
        if self.folder.path().join("data/postmaster.pid").exists() {
            return Err(LabError::tool(
                "postgres",
                "it was ended before it had written everything; the machine is too busy",
            ));
        }
        let tar = self.folder.path().join("tar");
        let owner = [format!("--owner=postgres:{USER_ID}"), format!("--group=postgres:{USER_ID}")];
        let mut command = Command::new("tar");
        command.args(owner).arg("-C").arg(self.folder.path()).arg("-cf").arg(&tar);
        command.args(["--transform", "s,^data,mnt/tpcc,", "data", "tpcc"]);
        tool::run_command("tar", &mut command)?;
        let mut files: Vec<PathBuf> = self.programs.others().into();
        let setpriv = PathBuf::from("/usr/bin/setpriv");
        let programs = ["postgres", "psql", "pgbench"].map(|program| self.programs.folder.join(program));
        for program in programs.into_iter().chain([setpriv]) {
            files.extend(image::libraries(&program)?);
            files.push(program);
        }
        files.sort();
        files.dedup();
        // Libraries by the names that programs know, not the files that these names lead to.
        let mut command = Command::new("tar");
        command.args(["-C", "/", "--dereference", "-rf"]).arg(&tar);
        command.args(files.iter().map(|file| file.strip_prefix("/").unwrap_or(file)));
        tool::run_command("tar", &mut command)?;
        tool::run("gzip", [Path::new("-1"), &tar])?;
        let packed = self.folder.path().join("tar.gz");
        fs::copy(&packed, archive).map(drop).map_err(LabError::file("copy", &packed))
    }
}

impl Drop for TpccDatabase {
    fn drop(&mut self) {
        // In order, so that no shared memory is left.
        self.server.stop();
    }
}

/// The archive of a database, made once.
pub(super) fn archive(scale: TpccScale) -> Result<PathBuf, LabError> {
    let programs = PostgresPrograms::find()?;
    let mut hash = ContentHash::default();
    hash.word(&format!("{scale:?}"));
    hash.word(CONFIGURATION);
    for (_, text) in SQL {
        hash.word(text);
    }
    for (name, _) in TRANSACTIONS {
        hash.word(&script(name));
    }
    hash.file(&programs.folder.join("postgres"))?;
    let name = format!("{}.tar.gz", hash.name());
    Cache::open()?.entry("tpcc", &name, |draft| TpccDatabase::create(scale)?.pack(draft))
}

/// What `pgbench` runs for a transaction. Each terminal has a home warehouse, and a district for the level of its stock.
fn script(name: &str) -> String {
    let home = "\\set home 1 + :client_id % :warehouses\n";
    match name {
        "new_order" => format!(
            "{home}BEGIN;\nSELECT done FROM new_order(:home) \\gset\n\\if :done\nCOMMIT;\n\\else\nROLLBACK;\n\\endif\n"
        ),
        "stock_level" => {
            format!("{home}\\set district 1 + :client_id / :warehouses % 10\nSELECT stock_level(:home, :district);\n")
        }
        name => format!("{home}SELECT {name}(:home);\n"),
    }
}

fn write(path: &Path, text: &str) -> Result<(), LabError> {
    fs::write(path, text).map_err(LabError::file("write", path))
}
