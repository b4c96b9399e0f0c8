//! redis, PostgreSQL and memcached.

use std::{fs, path::Path, process::Command, time::Duration};

use super::{
    App, AppAddress, Case, PATIENCE, after, seconds,
    site::{Site, find},
    words,
};
use crate::{
    args::Scale,
    error::{BenchError, During, Result},
    process::GuardedChild,
    report::metric::Metric,
    task::Figures,
};

pub(crate) const REDIS: App = App {
    name: "redis",
    needs: &[("redis-server", "redis-server"), ("redis-benchmark", "redis-tools")],
    cases: redis_cases,
    serve: redis_serve,
    client: redis_client,
    figures: redis_figures,
};

fn redis_cases(scale: Scale) -> Vec<Case> {
    let mut cases = Vec::new();
    for (clients, pipeline, size) in [(1, 1, 3), (50, 1, 3), (50, 16, 3), (1, 16, 3), (1, 1, 4096), (50, 1, 4096)] {
        for command in ["GET", "SET"] {
            let label = format!("{command} {size} B -c {clients} -P {pipeline}");
            let [size, clients, pipeline] = [size, clients, pipeline].map(|n: i32| n.to_string());
            cases.push(Case::new(label, &[command, &clients, &pipeline, &size]));
        }
    }
    if scale == Scale::Smoke {
        cases.truncate(1);
    }
    cases
}

fn redis_serve(site: &Site<'_>) -> Result<GuardedChild> {
    let (address, port) = (site.address(), site.port());
    site.serve(
        "redis-server",
        &["--bind", &address, "--port", &port, "--save", "", "--appendonly", "no", "--protected-mode", "no"],
    )
}

fn redis_client(at: &AppAddress, case: &Case, scale: Scale) -> Vec<String> {
    let (clients, pipeline) = (case.word(1), case.word(2));
    // About a second over plain TCP.
    let per_second = match (clients, pipeline) {
        ("1", "1") => 40_000,
        (_, "1") => 90_000,
        ("1", _) => 400_000,
        _ => 1_000_000,
    } / at.slowness;
    let requests = match scale {
        Scale::Smoke => 1000,
        Scale::Quick => per_second,
        Scale::Full => per_second * seconds(scale) * at.times_longer(clients),
    };
    let (command, port, requests) = (case.word(0).to_lowercase(), at.port(), requests.to_string());
    let mut line = words(&["redis-benchmark", "-h", &at.address, "-p", &port, "-t", &command, "-c", clients]);
    line.extend(words(&["-P", pipeline, "-d", case.word(3), "-n", &requests, "--csv"]));
    line
}

fn redis_figures(case: &Case, report: &str) -> Result<Figures> {
    // "test","rps","avg_latency_ms","min_latency_ms","p50_latency_ms","p95_latency_ms","p99_latency_ms","max_latency_ms"
    let line = report.lines().find(|line| line.starts_with(&format!("\"{}\"", case.word(0))));
    let fields: Vec<f64> = line
        .into_iter()
        .flat_map(|line| line.split(',').skip(1))
        .filter_map(|f| f.trim_matches('"').parse().ok())
        .collect();
    let [rate, _, _, p50, _, p99, _] = fields[..] else {
        return Err(BenchError::Transport(format!("redis-benchmark printed something else than figures: {report}")));
    };
    Ok(Figures::from([(Metric::PerSecond, rate), (Metric::P50Ns, p50 * 1e6), (Metric::P99Ns, p99 * 1e6)]))
}

pub(crate) const POSTGRESQL: App = App {
    name: "postgresql",
    needs: &[
        ("postgres", "postgresql"),
        ("initdb", "postgresql"),
        ("pgbench", "postgresql-contrib"),
        ("setpriv", "util-linux"),
    ],
    cases: postgresql_cases,
    serve: postgresql_serve,
    client: postgresql_client,
    figures: postgresql_figures,
};

fn postgresql_cases(scale: Scale) -> Vec<Case> {
    let mut cases = Vec::new();
    for (mode, clients) in [("prepared", "8"), ("simple", "8"), ("prepared", "1")] {
        cases.push(Case::new(format!("select {mode} -c {clients}"), &[mode, clients]));
    }
    if scale == Scale::Smoke {
        cases.truncate(1);
    }
    cases
}

/// The user that PostgreSQL, which refuses to run as root, runs as.
fn postgres_user() -> Result<Option<u32>> {
    if !rustix::process::geteuid().is_root() {
        return Ok(None);
    }
    let users = fs::read_to_string("/etc/passwd").during("looking for the user postgres")?;
    let id = users.lines().find_map(|line| line.strip_prefix("postgres:x:")?.split(':').next()?.parse().ok());
    id.map(Some).ok_or_else(|| {
        BenchError::Unavailable("there is no user postgres; it comes with Debian's package postgresql".into())
    })
}

fn as_user(user: Option<u32>, program: &Path) -> Vec<String> {
    let mut words: Vec<String> = Vec::new();
    if let Some(user) = user {
        words.extend(["--reuid".into(), user.to_string(), "--clear-groups".into()]);
    }
    words.push(program.to_string_lossy().into_owned());
    words
}

/// Makes an empty database in a new folder `data` of this one, which any user may connect to and which needs no locale. `run` runs initdb to
/// its end. Returns the user that the database belongs to, if it is not this process's.
pub(crate) fn create_database(folder: &Path, run: impl FnOnce(&mut Command) -> Result<String>) -> Result<Option<u32>> {
    let user = postgres_user()?;
    let data = folder.join("data");
    fs::create_dir(&data).during("making a folder for a database")?;
    if let Some(user) = user {
        for folder in [&data, folder] {
            std::os::unix::fs::chown(folder, Some(user), None).during("giving a folder to postgres")?;
        }
    }
    let mut init = Command::new("setpriv");
    init.args(as_user(user, &find("initdb", "postgresql")?)).arg("-D").arg(&data);
    init.args(["-A", "trust", "--no-sync", "--no-locale", "-U", "postgres"]).current_dir(folder);
    run(&mut init)?;
    // The settings are the server's own, without the time zone of this host.
    for (file, content) in [("pg_hba.conf", "host all all all trust\n"), ("postgresql.conf", "")] {
        fs::write(data.join(file), content).during("configuring PostgreSQL")?;
    }
    Ok(user)
}

/// The arguments of `setpriv` that become a server of the database in a folder.
pub(crate) fn database_server(user: Option<u32>, program: &Path, folder: &str, at: &AppAddress) -> Vec<String> {
    let mut line = as_user(user, program);
    let data = format!("{folder}/data");
    line.extend(words(&["-D", &data, "-h", &at.address, "-p", &at.port(), "-k", folder, "-c", "fsync=off"]));
    line
}

/// Fills a database for pgbench. `run` runs a program to its end.
pub(crate) fn fill_database(at: &AppAddress, mut run: impl FnMut(&[&str]) -> Result<String>) -> Result<()> {
    let port = at.port();
    let line = ["pgbench", "-h", &at.address, "-p", &port, "-U", "postgres", "-i", "-q", "-s", "1", "postgres"];
    for turn in 0.. {
        // The server listens a little before it answers.
        match run(&line) {
            Err(_) if turn < 20 => std::thread::sleep(Duration::from_millis(200)),
            result => return result.map(drop),
        }
    }
    Ok(())
}

fn postgresql_serve(site: &Site<'_>) -> Result<GuardedChild> {
    let user = create_database(&site.folder, |init| site.run(init, "initdb", PATIENCE))?;
    let (folder, at) = (site.folder.to_string_lossy(), site.endpoint());
    let words = database_server(user, &find("postgres", "postgresql")?, &folder, &at);
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let mut server = site.serve("setpriv", &words)?;
    site.await_listener(&mut server)?;
    fill_database(&at, |line| site.ask(line[0], &line[1..], PATIENCE))?;
    Ok(server)
}

fn postgresql_client(at: &AppAddress, case: &Case, scale: Scale) -> Vec<String> {
    let (mode, clients) = (case.word(0), case.word(1));
    let threads = if clients == "1" { "1" } else { "2" };
    // A smoke run counts transactions instead of seconds: on a busy machine there may be none in a second.
    let length = (seconds(scale) * at.times_longer(clients)).to_string();
    let (unit, length) = if scale == Scale::Smoke { ("-t", "10") } else { ("-T", &*length) };
    let mut line = words(&["pgbench", "-h", &at.address, "-p", &at.port(), "-U", "postgres", "-S", "-n", "-M", mode]);
    line.extend(words(&["-c", clients, "-j", threads, unit, length, "postgres"]));
    line
}

fn postgresql_figures(_: &Case, report: &str) -> Result<Figures> {
    let [rate, mean] = ["tps =", "latency average ="].map(|word| after(report, word));
    let (Some(rate), Some(mean)) = (rate, mean) else {
        return Err(BenchError::Transport(format!("pgbench printed something else than figures: {report}")));
    };
    Ok(Figures::from([(Metric::PerSecond, rate), (Metric::MeanNs, mean * 1e6)]))
}

pub(crate) const MEMCACHED: App = App {
    name: "memcached",
    needs: &[("memcached", "memcached"), ("/usr/bin/python3", "python3")],
    cases: memcached_cases,
    serve: memcached_serve,
    client: memcached_client,
    figures: memcached_figures,
};

fn memcached_cases(scale: Scale) -> Vec<Case> {
    let mut cases = vec![
        Case::new("get 100 B, one connection", &["100", "1"]),
        Case::new("get 100 B, 16 at a time", &["100", "16"]),
        Case::new("get 64 KiB, one connection", &["65536", "1"]),
    ];
    if scale == Scale::Smoke {
        cases.truncate(1);
    }
    cases
}

fn memcached_serve(site: &Site<'_>) -> Result<GuardedChild> {
    let (address, port) = (site.address(), site.port());
    let mut words = vec!["-l", &address, "-p", &port, "-U", "0", "-t", "2"];
    if rustix::process::geteuid().is_root() {
        words.extend(["-u", "root"]);
    }
    site.serve("memcached", &words)
}

/// Debian has no load generator for it; this one is small, and limited by Python, so its ratio is a lower bound.
const MEMCACHED_CLIENT: &str = "
import socket, sys, time
address, port, size, batch, seconds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5])
s = socket.create_connection((address, port))
s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
def take(n):
    while n:
        n -= len(s.recv(min(n, 1 << 20)))
s.sendall(b'set k 0 0 %d\\r\\n' % size + b'x' * size + b'\\r\\n')
take(8)
question = b'get k\\r\\n' * batch
answer = (len(b'VALUE k 0 %d\\r\\n' % size) + size + 2 + 5) * batch
times, begin = [], time.perf_counter()
last = begin
while last - begin < seconds:
    s.sendall(question)
    take(answer)
    now = time.perf_counter()
    times.append(now - last)
    last = now
rate = len(times) * batch / (last - begin)
times.sort()
print('rate =', rate, 'p50 =', '%.9f' % times[len(times) // 2], 'p99 =', '%.9f' % times[len(times) * 99 // 100])
";

fn memcached_client(at: &AppAddress, case: &Case, scale: Scale) -> Vec<String> {
    let size_and_batch = [case.word(0), case.word(1)];
    let mut line = words(&["/usr/bin/python3", "-c", MEMCACHED_CLIENT, &at.address, &at.port()]);
    line.extend(words(&size_and_batch));
    line.push(seconds(scale).to_string());
    line
}

fn memcached_figures(_: &Case, report: &str) -> Result<Figures> {
    let figure = |word| after(report, word).ok_or_else(|| BenchError::Transport(format!("no {word} in {report}")));
    Ok(Figures::from([
        (Metric::PerSecond, figure("rate =")?),
        (Metric::P50Ns, figure("p50 =")? * 1e9),
        (Metric::P99Ns, figure("p99 =")? * 1e9),
    ]))
}
