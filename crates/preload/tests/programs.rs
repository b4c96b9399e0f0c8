//! Real servers and tools, unmodified, with the library and without: the same output, and bytes that really went over rings. On loopback,
//! and between two network namespaces. Language runtimes are in `runtimes.rs`.

mod support;

use std::{
    ffi::OsStr,
    fmt::Write as _,
    fs,
    os::unix::fs::{PermissionsExt, chown},
    path::Path,
    process::{Command, Stdio},
};

use support::{
    eventually, find, free_port,
    guard::Guard,
    random::noise,
    skipped,
    stage::{both, digest, python, script},
};

#[test]
fn redis() {
    let (Some(server), Some(cli), Some(benchmark)) = (
        find("redis-server", "redis-server"),
        find("redis-cli", "redis-tools"),
        find("redis-benchmark", "redis-tools"),
    ) else {
        return;
    };
    both(
        &|stage| {
            let (port, address) = (free_port(), stage.address());
            let p = port.to_string();
            let mut running = stage.server(
                &server,
                &["--port", &p, "--bind", address, "--save", "", "--appendonly", "no", "--protected-mode", "no"],
            );
            stage.await_listener(&mut running, port);
            let at = ["-h", address, "-p", &p];
            let ask = |words: &[&str]| stage.client(&cli, &[&at, words].concat());
            let mut out = String::new();
            let big = noise(5, 20 << 20);
            fs::write(stage.path("big"), &big).unwrap();
            let stdin = || Stdio::from(fs::File::open(stage.path("big")).unwrap());
            out += &stage.client_with(&cli, &[&at[..], &["-x", "set", "big"]].concat(), stdin());
            out += &ask(&["strlen", "big"]);
            out += &ask(&["eval", "return redis.sha1hex(redis.call('get', 'big'))", "0"]);
            out += &digest(ask(&["--raw", "get", "big"]).as_bytes());
            // Mass insertion: 50,000 commands in one breath.
            let commands: String = (0..50_000).fold(String::new(), |mut all, i| {
                let _ = write!(all, "SET key:{i} value:{i}\r\n");
                all
            });
            fs::write(stage.path("commands"), commands).unwrap();
            let stdin = Stdio::from(fs::File::open(stage.path("commands")).unwrap());
            out += &stage.client_with(&cli, &[&at[..], &["--pipe"]].concat(), stdin);
            out += &ask(&["dbsize"]);
            for (clients, pipeline) in [("1", "1"), ("50", "1"), ("20", "16")] {
                let tests =
                    ["-c", clients, "-P", pipeline, "-n", "3000", "-t", "set,get,lpush,lrange_300,mset", "--csv"];
                let table = stage.client(&benchmark, &[&at[..], &tests].concat());
                out += &table.lines().filter_map(|line| line.split(',').next()).collect::<Vec<_>>().join(" ");
            }
            out += &ask(&["llen", "mylist"]);
            out += &digest(ask(&["lrange", "mylist", "0", "-1"]).as_bytes());
            running.stop();
            out
        },
        20 << 20,
    );
}

#[test]
fn nginx() {
    let (Some(nginx), Some(curl), Some(wrk), Some(ab)) =
        (find("nginx", "nginx-light"), find("curl", "curl"), find("wrk", "wrk"), find("ab", "apache2-utils"))
    else {
        return;
    };
    both(
        &|stage| {
            let (port, address) = (free_port(), stage.address());
            let root = stage.path("root");
            fs::create_dir(&root).unwrap();
            for (name, size) in [("small", 612), ("medium", 64 << 10), ("large", 1 << 20), ("huge", 50 << 20)] {
                fs::write(root.join(name), noise(size as u64, size)).unwrap();
            }
            let configuration = format!(
                "worker_processes 2; daemon off; user root; pid {folder}/pid; error_log stderr;
                 events {{ worker_connections 200; }}
                 http {{ access_log off; sendfile on; tcp_nopush on; keepalive_requests 1000000;
                    client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/f;
                    uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
                    server {{ listen {address}:{port}; root {folder}/root;
                        location /copied/ {{ sendfile off; alias {folder}/root/; }}
                        location /through/ {{ proxy_pass http://{address}:{port}/; }} }} }}",
                folder = stage.folder.path().display(),
            );
            let file = stage.path("nginx.conf");
            fs::write(&file, configuration).unwrap();
            let file = file.to_str().unwrap();
            let mut running = stage.server(&nginx, &["-c", file]);
            stage.await_listener(&mut running, port);
            let base = format!("http://{address}:{port}");
            let mut out = String::new();
            let fetch = |out: &mut String, more: &[&str], paths: &[&str]| {
                let target = stage.path("fetched");
                let _ = fs::remove_file(&target);
                let urls: Vec<String> = paths.iter().map(|path| format!("{base}{path}")).collect();
                let mut arguments = vec!["-sS", "--fail"];
                arguments.extend(more);
                arguments.extend(urls.iter().map(String::as_str));
                let body =
                    Guard::spawn(stage.command(1, &curl).args(&arguments).stdout(fs::File::create(&target).unwrap()))
                        .output();
                let said = String::from_utf8_lossy(&body.stderr).into_owned();
                assert!(body.status.success(), "curl {arguments:?}: {} {said}", body.status);
                let _ = writeln!(out, "{arguments:?}: {}", digest(&fs::read(&target).unwrap()).replace(&base, ""));
            };
            let mut said = String::new();
            fetch(&mut said, &[], &["/small", "/medium", "/large", "/huge", "/small", "/copied/huge"]);
            fetch(&mut said, &["-r", "1000-200000"], &["/large"]);
            fetch(&mut said, &["--http1.0"], &["/large"]);
            fetch(&mut said, &[], &["/through/huge", "/through/small"]);
            // A slow reader: buffers fill, and the server has to wait for room.
            fetch(&mut said, &["--limit-rate", "20M"], &["/huge"]);
            out += &said.replace(&base, "");
            for (path, count, keep) in [("/small", "1000", true), ("/small", "1000", false), ("/large", "200", true)] {
                let url = format!("{base}{path}");
                let mut arguments = vec!["-q", "-n", count, "-c", "8"];
                arguments.extend(keep.then_some("-k"));
                arguments.push(&url);
                let report = stage.client(&ab, &arguments);
                let wanted = ["Complete requests", "Failed requests", "HTML transferred", "Non-2xx"];
                let lines = report.lines().filter(|line| wanted.iter().any(|word| line.starts_with(word)));
                out += &lines.fold(String::new(), |all, line| all + line + "\n");
            }
            let url = format!("{base}/medium");
            // A reload in the midst of it: the master makes new workers, the old ones finish what they have.
            let load = Guard::spawn(stage.command(1, &wrk).args([
                "-t",
                "1",
                "-c",
                "20",
                "-d",
                "2s",
                "--timeout",
                "60s",
                &url,
            ]));
            std::thread::sleep(std::time::Duration::from_millis(700));
            running.signal(rustix::process::Signal::HUP);
            let report = load.output();
            let report = String::from_utf8_lossy(&report.stdout).into_owned();
            // A worker that ends closes connections that are idle just then, on which the next request is an error of reading.
            let errors = report.lines().find(|line| line.contains("Socket errors"));
            let is_well = errors.is_none_or(|line| line.contains("connect 0,") && line.contains("timeout 0"));
            assert!(is_well && !report.contains("Non-2xx") && report.contains("requests in"), "{report}");
            running.stop();
            out
        },
        150 << 20,
    );
}

#[test]
fn postgresql() {
    let (Some(initdb), Some(postgres), Some(pgbench), Some(psql)) = (
        find("initdb", "postgresql"),
        find("postgres", "postgresql"),
        find("pgbench", "postgresql-contrib"),
        find("psql", "postgresql-client"),
    ) else {
        return;
    };
    let Some(setpriv) = find("setpriv", "util-linux") else { return };
    let is_root = rustix::process::geteuid().is_root();
    // PostgreSQL refuses to run as root.
    let user = fs::read_to_string("/etc/passwd").unwrap();
    let Some(id) =
        user.lines().find_map(|line| line.strip_prefix("postgres:x:")?.split(':').next()?.parse::<u32>().ok())
    else {
        skipped("there is no user postgres; install Debian's package postgresql");
        return;
    };
    let become_user = |program: &Path| -> Vec<String> {
        let mut words = vec![];
        if is_root {
            words.extend(["--reuid".into(), id.to_string(), "--clear-groups".into()]);
        }
        words.push(program.to_str().unwrap().to_owned());
        words
    };
    both(
        &|stage| {
            let (port, address) = (free_port(), stage.address());
            let p = port.to_string();
            let data = stage.path("data");
            fs::create_dir(&data).unwrap();
            if is_root {
                chown(&data, Some(id), None).unwrap();
                chown(stage.folder.path(), Some(id), None).unwrap();
            }
            let data = data.to_str().unwrap();
            let run = |program: &Path, arguments: &[&str]| -> Vec<String> {
                let mut all = become_user(program);
                all.extend(arguments.iter().map(|a| (*a).to_owned()));
                all
            };
            let made = Command::new(&setpriv)
                .args(run(&initdb, &["-D", data, "-A", "trust", "--no-sync", "-U", "postgres"]))
                .current_dir(stage.folder.path())
                .output()
                .unwrap();
            assert!(made.status.success(), "initdb: {}", String::from_utf8_lossy(&made.stderr));
            let folder = stage.folder.path().to_str().unwrap();
            fs::write(Path::new(data).join("pg_hba.conf"), "host all all all trust\nlocal all all trust\n").unwrap();
            let arguments = run(&postgres, &["-D", data, "-h", address, "-p", &p, "-k", folder, "-c", "fsync=off"]);
            let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
            let mut running = stage.server(&setpriv, &arguments);
            stage.await_listener(&mut running, port);
            let at = ["-h", address, "-p", &p, "-U", "postgres"];
            eventually("the database answers", || {
                let command = &mut stage.command(1, &psql);
                Guard::spawn(command.args(at).args(["-c", "select 1", "postgres"])).output().status.success()
            });
            let sql =
                |text: &str| stage.client(&psql, &[&at[..], &["-X", "-A", "-t", "-c", text, "postgres"]].concat());
            let bench = |words: &[&str]| stage.client(&pgbench, &[&at[..], words, &["postgres"]].concat());
            let mut out = String::new();
            bench(&["-i", "-s", "1", "-q"]);
            out += &sql("select count(*), sum(aid) from pgbench_accounts");
            for (mode, clients) in [("simple", "1"), ("extended", "4"), ("prepared", "8")] {
                let report = bench(&["-S", "-n", "-M", mode, "-c", clients, "-j", "2", "-t", "500"]);
                let wanted = ["number of transactions actually", "number of failed"];
                let lines = report.lines().filter(|line| wanted.iter().any(|word| line.starts_with(word)));
                out += &lines.fold(String::new(), |all, line| all + line + "\n");
            }
            bench(&["-n", "-c", "4", "-j", "2", "-t", "100"]);
            out += &sql("select count(*) from pgbench_history");
            // Much in each direction.
            let all =
                sql("copy (select i, md5(i::text), repeat('x', i % 300) from generate_series(1, 100000) i) to stdout");
            out += &digest(all.as_bytes());
            sql("create table t (i int, m text, x text)");
            fs::write(stage.path("rows"), &all).unwrap();
            let stdin = Stdio::from(fs::File::open(stage.path("rows")).unwrap());
            let copy = [&at[..], &["-X", "-q", "-c", "copy t from stdin", "postgres"]].concat();
            stage.client_with(&psql, &copy, stdin);
            out += &sql("select count(*), sum(i), sum(length(x)), md5(string_agg(m, '' order by i)) from t");
            out += &sql("select repeat('y', 10000000)").len().to_string();
            running.stop();
            out
        },
        // The total is 50 MiB. The part of the shorter streams that goes before they have a ring varies.
        10 << 20,
    );
}

#[test]
fn memcached() {
    let Some(memcached) = find("memcached", "memcached") else { return };
    both(
        &|stage| {
            let (port, address) = (free_port(), stage.address());
            let p = port.to_string();
            let mut running =
                stage.server(&memcached, &["-u", "root", "-l", address, "-p", &p, "-U", "0", "-t", "4", "-m", "200"]);
            stage.await_listener(&mut running, port);
            let out = stage.client(&python(), &[&script("memcached_client.py"), address, &p]);
            running.stop();
            out
        },
        10 << 20,
    );
}

#[test]
fn iperf3() {
    let Some(iperf3) = find("iperf3", "iperf3") else { return };
    both(
        &|stage| {
            let (port, address) = (free_port(), stage.address());
            let p = port.to_string();
            let mut running = stage.server(&iperf3, &["-s", "-p", &p]);
            stage.await_listener(&mut running, port);
            let mut out = String::new();
            for more in [&[][..], &["-R"], &["-P", "4"], &["-Z"], &["-l", "1K", "-n", "20M"], &["--bidir"]] {
                let arguments = [&["-c", address, "-p", &p, "-n", "300M", "-J"], more].concat();
                let report = stage.client(&iperf3, &arguments);
                let field = |section: &str, name: &str| {
                    let (_, rest) = report.split_once(&format!("\"{section}\":"))?;
                    let (_, rest) = rest.split_once(&format!("\"{name}\":"))?;
                    rest.split([',', '\n', '}']).next()?.trim().parse::<u64>().ok()
                };
                let way = |sent: &str, received: &str| {
                    let (sent, received) = (field(sent, "bytes").unwrap(), field(received, "bytes").unwrap());
                    // The receiver's last report may miss what is under way.
                    assert!(received > 0 && received <= sent, "{more:?}: sent {sent}, received {received}");
                    sent
                };
                let mut sent = way("sum_sent", "sum_received");
                if more.contains(&"--bidir") {
                    // It ends when one of the two ways has carried what was asked; how far the other is then is chance.
                    sent = sent.max(way("sum_sent_bidir_reverse", "sum_received_bidir_reverse"));
                }
                // How far it goes beyond what was asked is chance.
                let enough = if more.contains(&"1K") { 20 << 20 } else { 100 << 20 };
                assert!(sent >= enough, "{more:?}: sent {sent}");
                let _ = writeln!(out, "{more:?} done");
            }
            running.stop();
            out
        },
        500 << 20,
    );
}

#[test]
fn connections_that_are_handed_to_other_programs() {
    both(
        &|stage| {
            let (port, address) = (free_port(), stage.address());
            let p = port.to_string();
            let mut running = stage.server(&python(), &[&script("handing_server.py"), address, &p]);
            stage.await_listener(&mut running, port);
            let out = stage.client(&python(), &[&script("handing_client.py"), address, &p]);
            running.stop();
            assert_eq!(out.matches("from another program, ").count(), 13, "{out}");
            assert_eq!(out.matches("which has read what was left unread").count(), 5, "{out}");
            out
        },
        50 << 10,
    );
}

#[test]
fn sockperf() {
    let Some(sockperf) = find("sockperf", "sockperf") else { return };
    both(
        &|stage| {
            // Both protocols at a time, as each run takes three seconds.
            let servers: Vec<_> = [&["--tcp"][..], &[]]
                .into_iter()
                .map(|protocol| {
                    let port = free_port();
                    let at = ["-i".to_owned(), stage.address().into(), "-p".into(), port.to_string()];
                    let at: Vec<String> = at.into_iter().chain(protocol.iter().map(ToString::to_string)).collect();
                    let words: Vec<&str> = ["sr"].into_iter().chain(at.iter().map(String::as_str)).collect();
                    let mut server = stage.server(&sockperf, &words);
                    if !protocol.is_empty() {
                        stage.await_listener(&mut server, port);
                    }
                    (server, at)
                })
                .collect();
            eventually("both servers are there", || {
                let said = fs::read_to_string(stage.path("server.log")).unwrap_or_default();
                said.matches("Warmup").count() == servers.len()
            });
            let mut out = String::new();
            for sizes in [&["-m", "14"][..], &["-m", "20010", "-r", "19990"]] {
                let clients = servers.iter().map(|(_, at)| {
                    let mut client = stage.command(1, &sockperf);
                    Guard::spawn(client.args(["pp", "-t", "1", "--mps", "2000"]).args(sizes).args(at))
                });
                for client in clients.collect::<Vec<_>>() {
                    let output = client.output();
                    let report = String::from_utf8_lossy(&output.stdout).into_owned();
                    let number = |name: &str| {
                        let (_, rest) = report.split_once(name).unwrap_or_else(|| panic!("{report}"));
                        rest.split(|c: char| !c.is_ascii_digit()).next().and_then(|n| n.parse::<u64>().ok()).unwrap()
                    };
                    // The count is of the whole run: the program's statistics leave out the first 800 messages, which may be all on a
                    // busy machine.
                    let (sent, received) = (number("SentMessages="), number("ReceivedMessages="));
                    assert!(
                        received > 0 && (received..=received + 1).contains(&sent),
                        "one may be under way: {report}"
                    );
                    if let Some((_, rest)) = report.split_once("# dropped messages") {
                        let wrong = rest.lines().next().unwrap_or_default();
                        assert_eq!(wrong, " = 0; # duplicated messages = 0; # out-of-order messages = 0");
                    }
                    let _ = writeln!(out, "{sizes:?}: {}", output.status);
                }
            }
            servers.into_iter().for_each(|(mut server, _)| server.stop());
            out
        },
        // Its messages are few.
        10 << 10,
    );
}

#[test]
fn ssh_and_rsync() {
    let (Some(sshd), Some(ssh), Some(keygen), Some(rsync)) = (
        find("sshd", "openssh-server"),
        find("ssh", "openssh-client"),
        find("ssh-keygen", "openssh-client"),
        find("rsync", "rsync"),
    ) else {
        return;
    };
    if !rustix::process::geteuid().is_root() {
        skipped("sshd needs root");
        return;
    }
    fs::create_dir_all("/run/sshd").unwrap();
    both(
        &|stage| {
            let (port, address) = (free_port(), stage.address());
            let p = port.to_string();
            for key in ["host", "user"] {
                let made =
                    Command::new(&keygen).args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(stage.path(key)).output();
                assert!(made.unwrap().status.success());
            }
            let path = |name: &str| stage.path(name).to_str().unwrap().to_owned();
            fs::set_permissions(stage.folder.path(), fs::Permissions::from_mode(0o700)).unwrap();
            let configuration = format!(
                "Port {port}\nListenAddress {address}\nHostKey {}\nAuthorizedKeysFile {}\nPidFile none\nUsePAM no\n\
                 PermitRootLogin yes\nStrictModes no\nPasswordAuthentication no\n",
                path("host"),
                path("user.pub"),
            );
            fs::write(stage.path("sshd_config"), configuration).unwrap();
            let mut running = stage.server(&sshd, &["-D", "-e", "-f", &path("sshd_config")]);
            stage.await_listener(&mut running, port);
            fs::write(stage.path("big"), noise(9, 50 << 20)).unwrap();
            let user = path("user");
            let options = [
                "-p",
                &p,
                "-i",
                &user,
                "-F",
                "none",
                "-o",
                "StrictHostKeyChecking=no",
                "-o",
                "UserKnownHostsFile=/dev/null",
                "-o",
                "LogLevel=ERROR",
                "-o",
                "IdentitiesOnly=yes",
            ];
            let host = format!("root@{address}");
            let mut out = stage.client(&ssh, &[&options[..], &[&host, "echo hello; wc -c"]].concat());
            let stdin = Stdio::from(fs::File::open(stage.path("big")).unwrap());
            out += &stage.client_with(&ssh, &[&options[..], &[&host, "sha256sum"]].concat(), stdin);
            let shell = format!("{} {}", ssh.display(), options.join(" "));
            let from = format!("{host}:{}", path("big"));
            stage.client(&rsync, &["-e", &shell, &from, &path("copied")]);
            out += &digest(&fs::read(stage.path("copied")).unwrap());
            running.stop();
            out
        },
        // sshd executes itself again for each connection. Whether its parent has closed it by then, so that it may have rings, is chance.
        0,
    );
}

/// The files and programs that a test needs are listed once.
#[test]
fn scripts_are_there() {
    let names = [
        "echo_server.py",
        "echo_client.py",
        "exec_server.py",
        "handing_server.py",
        "handing_client.py",
        "memcached_client.py",
        "passing_server.py",
        "told_client.py",
    ];
    let others = ["http_server.js", "http_client.js", "http_kept_client.js", "AsynchronousEcho.java"];
    for name in names.into_iter().chain(others) {
        assert!(Path::new(&script(name)).is_file() && Path::new(&script(name)).extension() != Some(OsStr::new("rs")));
    }
}
