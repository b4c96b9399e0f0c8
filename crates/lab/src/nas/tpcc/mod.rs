//! A TPC-C-like load: nine tables, five transactions and four consistency conditions on a scaled database.
//!
//! `pgbench` draws transactions by their weights; functions of the database carry them out. A database is made on the host, and a client
//! gets it as an archive together with PostgreSQL's programs.

mod database;

pub use database::{TpccDatabase, TpccScale};

use super::{MOUNT, NasFigure, NasUnit};
use crate::{Guest, LabError};
use database::{DATABASE, PostgresPrograms, USER_ID};
use std::collections::BTreeMap;
use std::time::Duration;

/// The longest that a step takes beside the load itself.
const STEP: Duration = Duration::from_secs(240);

/// The folder of the server's socket in a client.
const SOCKET: &str = "/run/tpcc";

/// The scale and the length of the load.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TpccOptions {
    /// The first content of the tables.
    pub scale: TpccScale,
    /// Connections, each of which has one transaction after the other.
    pub terminals: u32,
    /// Seconds of the load.
    pub seconds: u32,
}

/// The names of the five transactions, which are those of their functions, and their parts of all in percent (clause 5.2.3).
const TRANSACTIONS: [(&str, u32); 5] =
    [("new_order", 45), ("payment", 43), ("order_status", 4), ("delivery", 4), ("stock_level", 4)];

pub(super) fn check() -> Result<(), LabError> {
    PostgresPrograms::find().map(drop)
}

/// Runs it on a client, with the database's folder on the appliance and everything else in the client's memory.
pub(super) fn run(client: &Guest, options: TpccOptions) -> Result<Vec<NasFigure>, LabError> {
    let programs = PostgresPrograms::find()?;
    let archive = database::archive(options.scale)?;
    let packed = format!("/tmp/{}", archive.file_name().unwrap_or_default().display());
    let mut only = "mnt/tpcc";
    if client.run(&["test", "-e", &packed])?.status != 0 {
        let content = std::fs::read(&archive).map_err(LabError::file("read", &archive))?;
        client.put(&content, &packed, 0o644)?;
        only = "";
    }
    client.shell_within(&format!("tar -xzf {packed} -C / {only}"), STEP)?;
    let shell = |line: &str| client.shell_within(line, STEP + Duration::from_secs(options.seconds.into()));
    let environment = programs.environment(SOCKET);
    let start = start(&programs, &environment);
    shell(&start)?;
    let figures = load(&shell, &environment, "/tpcc", options)?;
    // What is checked is what the appliance has kept, not what the server or the client still has in memory.
    shell(&format!("{STOP}{start}"))?;
    consistent(&shell, &environment)?;
    shell(&format!("{STOP}rm -rf {MOUNT}/tpcc"))?;
    Ok(figures)
}

/// Starts the server of a client that has no file in its cache, and waits until it answers.
fn start(programs: &PostgresPrograms, environment: &str) -> String {
    let user = format!("/usr/bin/setpriv --reuid {USER_ID} --regid {USER_ID} --clear-groups");
    let server = format!("{user} {}/postgres -D {MOUNT}/tpcc -k {SOCKET}", programs.folder().display());
    format!(
        "{environment}sync; echo 3 > /proc/sys/vm/drop_caches; mkdir -p {SOCKET}; chown {USER_ID}:{USER_ID} {SOCKET}
{server} > /tmp/postgres.log 2>&1 & echo $! > /tmp/postgres.pid
until psql -Xqc '' 2> /tmp/psql.log; do sleep 0.5; kill -0 $(cat /tmp/postgres.pid) || {{ cat /tmp/psql.log /tmp/postgres.log; exit 1; }}; done
"
    )
}

/// Ends the server in order.
const STOP: &str = "kill -INT $(cat /tmp/postgres.pid)
n=0; while kill -0 $(cat /tmp/postgres.pid) 2> /dev/null; do sleep 0.2; n=$((n+1)); [ $n -lt 600 ] || exit 1; done
";

/// Runs a line of shell, on a client or on the host.
type Shell<'a> = &'a dyn Fn(&str) -> Result<String, LabError>;

fn query(shell: Shell<'_>, environment: &str, sql: &str) -> Result<String, LabError> {
    shell(&format!("{environment}psql -XAtqc '{sql}'"))
}

/// Runs transactions by `pgbench`, whose scripts are in a folder, on a database whose server runs.
fn load(shell: Shell<'_>, environment: &str, scripts: &str, options: TpccOptions) -> Result<Vec<NasFigure>, LabError> {
    let orders = || {
        let said = query(shell, environment, "SELECT sum(d_next_o_id) FROM district")?;
        said.trim().parse::<f64>().map_err(|_| LabError::tool("psql", format!("no number: {said}")))
    };
    let before = orders()?;
    let files: String = TRANSACTIONS.map(|(name, part)| format!(" -f {name}.sql@{part}")).concat();
    let TpccOptions { scale: TpccScale { warehouses, .. }, terminals, seconds } = options;
    let log = shell(&format!(
        "{environment}cd {scripts} && rm -f log.*; pgbench -n -M prepared -c {terminals} -T {seconds} -D warehouses={warehouses} --max-tries 10 -l --log-prefix log{files} {DATABASE} > pgbench.txt 2>&1 || {{ cat pgbench.txt >&2; exit 1; }}; cat log.*; rm log.*"
    ))?;
    let value = (orders()? - before) * 60.0 / f64::from(seconds);
    let mut figures = vec![NasFigure { name: "TPC-C new orders".to_owned(), unit: NasUnit::PerMinute, value }];
    figures.extend(latencies(&log));
    Ok(figures)
}

/// Fails with the conditions that do not hold.
fn consistent(shell: Shell<'_>, environment: &str) -> Result<(), LabError> {
    let rows = query(shell, environment, "SELECT clause, warehouse, district FROM inconsistency")?;
    if rows.trim().is_empty() { Ok(()) } else { Err(LabError::Inconsistent { broken: broken(&rows) }) }
}

/// The conditions of rows of the view, in words.
fn broken(rows: &str) -> String {
    let row = |row: &str| {
        let words: Vec<&str> = row.split('|').collect();
        let district = words.get(2).filter(|district| !district.is_empty());
        let district = district.map(|district| format!(", district {district}")).unwrap_or_default();
        format!("clause {}, warehouse {}{district}", words.first().unwrap_or(&"?"), words.get(1).unwrap_or(&"?"))
    };
    rows.trim().lines().map(row).collect::<Vec<_>>().join("; ")
}

/// p50 and p90 of each transaction, from lines of `pgbench`: client, number, microseconds, script, second, microsecond, retries.
fn latencies(log: &str) -> Vec<NasFigure> {
    let mut times: BTreeMap<usize, Vec<f64>> = BTreeMap::new();
    for line in log.lines() {
        let words: Vec<&str> = line.split(' ').collect();
        // A transaction that failed has a word in place of its time.
        if let [_, _, time, script, ..] = words[..]
            && let (Ok(time), Ok(script)) = (time.parse::<f64>(), script.parse())
        {
            times.entry(script).or_default().push(time / 1000.0);
        }
    }
    let mut figures = Vec::new();
    for ((name, _), number) in TRANSACTIONS.into_iter().zip(0..) {
        let Some(times) = times.get_mut(&number) else { continue };
        times.sort_by(f64::total_cmp);
        for part in [50, 90] {
            let at = (times.len() * part).div_ceil(100).max(1) - 1;
            let name = format!("TPC-C {} p{part}", name.replace('_', "-"));
            figures.push(NasFigure { name, unit: NasUnit::Milliseconds, value: times[at] });
        }
    }
    figures
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latencies_are_percentiles_of_each_script() {
        let mut log: String = (1..=10).map(|n| format!("0 {n} {}000 1 1795684224 892567 0\n", 11 - n)).collect();
        log.push_str("3 1 failed 1 1795684224 892567 0\n2 1 500 0 1795684224 892567 0\n");
        let figures: Vec<(String, f64)> =
            latencies(&log).into_iter().map(|figure| (figure.name, figure.value)).collect();
        let expected = [("new-order p50", 0.5), ("new-order p90", 0.5), ("payment p50", 5.0), ("payment p90", 9.0)];
        assert_eq!(figures, expected.map(|(name, value)| (format!("TPC-C {name}"), value)));
    }

    #[test]
    fn broken_condition_is_named_by_its_clause() {
        let said = broken("3.3.2.1|1|\n3.3.2.4|2|7");
        assert_eq!(said, "clause 3.3.2.1, warehouse 1; clause 3.3.2.4, warehouse 2, district 7");
    }
}
