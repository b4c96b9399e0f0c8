//! Web servers: nginx, and the ones that come with Python and Node.js.

use std::{fs, time::Duration};

use super::{
    App, Case, after, seconds,
    site::{Site, find},
};
use crate::{
    args::Scale,
    error::{BenchError, During, Result},
    process::GuardedChild,
    report::metric::Metric,
    task::Figures,
};

const PATIENCE: Duration = Duration::from_secs(60);
const FILES: [(&str, usize); 4] = [("612", 612), ("64K", 64 << 10), ("1M", 1 << 20), ("256M", 256 << 20)];

pub(crate) const NGINX: App = App {
    name: "nginx",
    needs: &[("nginx", "nginx-light"), ("wrk", "wrk"), ("curl", "curl")],
    cases: nginx_cases,
    serve: nginx_serve,
    drive: nginx_drive,
};

fn nginx_cases(scale: Scale) -> Vec<Case> {
    let mut cases = Vec::new();
    for (file, name, connections) in [
        ("612", "612 B", "1"),
        ("612", "612 B", "50"),
        ("64K", "64 KiB", "1"),
        ("64K", "64 KiB", "50"),
        ("1M", "1 MiB", "1"),
        ("1M", "1 MiB", "50"),
    ] {
        cases.push(Case::new(format!("{name}, kept, {connections}"), &["wrk", file, connections, "keep"]));
    }
    cases.push(Case::new("612 B, not kept, 10", &["wrk", "612", "10", "close"]));
    cases.push(Case::new("curl of 256 MiB", &["curl", "256M"]));
    if scale == Scale::Smoke {
        cases.truncate(1);
    }
    cases
}

fn nginx_serve(site: &Site<'_>) -> Result<GuardedChild> {
    let root = site.folder.join("root");
    fs::create_dir(&root).during("making a folder for files")?;
    for (name, size) in FILES {
        fs::write(root.join(name), vec![b'x'; size]).during("writing a file to serve")?;
    }
    let user = if rustix::process::geteuid().is_root() { "user root;" } else { "" };
    let configuration = format!(
        "worker_processes 1; daemon off; {user} pid {folder}/pid; error_log stderr;
         events {{ worker_connections 200; }}
         http {{ access_log off; sendfile on; tcp_nopush on; keepalive_requests 1000000000;
            client_body_temp_path {folder}/b; proxy_temp_path {folder}/p; fastcgi_temp_path {folder}/f;
            uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
            server {{ listen {address}:{port}; root {folder}/root; }} }}",
        folder = site.folder.display(),
        address = site.address(),
        port = site.port,
    );
    let file = site.folder.join("nginx.conf");
    fs::write(&file, configuration).during("configuring nginx")?;
    site.serve("nginx", &["-c", &file.to_string_lossy()])
}

fn nginx_drive(site: &Site<'_>, case: &Case, scale: Scale) -> Result<Figures> {
    let url = format!("http://{}:{}/{}", site.address(), site.port, case.word(1));
    match case.word(0) {
        "wrk" => wrk(site, &url, case.word(2), case.word(3) == "keep", scale),
        _ => {
            let report = site.ask(
                "curl",
                &["-sS", "--fail", "-o", "/dev/null", "-w", "speed = %{speed_download}", &url],
                PATIENCE,
            )?;
            let rate = after(&report, "speed =")
                .ok_or_else(|| BenchError::Transport(format!("curl says no speed: {report}")))?;
            Ok(Figures::from([(Metric::BytesPerSecond, rate)]))
        }
    }
}

/// wrk's report of one page.
fn wrk(site: &Site<'_>, url: &str, connections: &str, keep: bool, scale: Scale) -> Result<Figures> {
    let mut words = vec!["-t", "1", "-c", connections, "-d", seconds(scale), "--latency"];
    if !keep {
        words.extend(["-H", "Connection: close"]);
    }
    words.push(url);
    let report = site.ask("wrk", &words, PATIENCE)?;
    let bad = ["Non-2xx", "Socket errors"].iter().any(|word| report.contains(word));
    let rate = after(&report, "Requests/sec:").filter(|_| !bad);
    let rate = rate.ok_or_else(|| BenchError::Transport(format!("wrk says: {}", report.trim())))?;
    let mut figures = Figures::from([(Metric::PerSecond, rate)]);
    for (word, metric) in [("50%", Metric::P50Ns), ("99%", Metric::P99Ns)] {
        figures.extend(duration(&report, word).map(|ns| (metric, ns)));
    }
    Ok(figures)
}

/// `   99%  123.00us`, in nanoseconds.
fn duration(report: &str, word: &str) -> Option<f64> {
    let line = report.lines().find(|line| line.trim_start().starts_with(word))?;
    let text = line.split_whitespace().nth(1)?;
    let unit = text.trim_start_matches(|c: char| c.is_ascii_digit() || c == '.');
    let number: f64 = text[..text.len() - unit.len()].parse().ok()?;
    let scale = match unit {
        "us" => 1e3,
        "ms" => 1e6,
        "s" => 1e9,
        _ => return None,
    };
    Some(number * scale)
}

pub(crate) const PYTHON: App = App {
    name: "python",
    needs: &[("/usr/bin/python3", "python3"), ("wrk", "wrk")],
    cases: python_cases,
    serve: python_serve,
    drive: page_drive,
};

fn python_cases(_: Scale) -> Vec<Case> {
    vec![Case::new("http.server, 612 B", &["612", "4", "close"])]
}

fn python_serve(site: &Site<'_>) -> Result<GuardedChild> {
    fs::write(site.folder.join("612"), vec![b'x'; 612]).during("writing a file to serve")?;
    site.serve("/usr/bin/python3", &["-m", "http.server", "--bind", &site.address(), &site.port()])
}

fn page_drive(site: &Site<'_>, case: &Case, scale: Scale) -> Result<Figures> {
    let url = format!("http://{}:{}/{}", site.address(), site.port, case.word(0));
    wrk(site, &url, case.word(1), case.word(2) == "keep", scale)
}

pub(crate) const NODE: App = App {
    name: "node",
    needs: &[("node", "nodejs"), ("wrk", "wrk")],
    cases: node_cases,
    serve: node_serve,
    drive: page_drive,
};

fn node_cases(scale: Scale) -> Vec<Case> {
    let mut cases = vec![
        Case::new("http, 612 B, kept, 1", &["612", "1", "keep"]),
        Case::new("http, 612 B, kept, 10", &["612", "10", "keep"]),
        Case::new("http, 64 KiB, kept, 10", &["65536", "10", "keep"]),
    ];
    if scale == Scale::Smoke {
        cases.truncate(1);
    }
    cases
}

fn node_serve(site: &Site<'_>) -> Result<GuardedChild> {
    find("node", "nodejs")?;
    let script = "const [address, port] = process.argv.slice(1); const pages = {}; require('http').createServer((q, a) => { \
                  const n = Number(q.url.slice(1)); a.end(pages[n] ??= Buffer.alloc(n, 'x')); }).listen(Number(port), address)";
    site.serve("node", &["-e", script, &site.address(), &site.port()])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_wrk_s_times() {
        let report = "  Latency Distribution\n     50%   12.50us\n     75%    1.00ms\n     99%    2.10s\n";
        assert_eq!(duration(report, "50%"), Some(12_500.0));
        assert_eq!(duration(report, "75%"), Some(1e6));
        assert_eq!(duration(report, "99%"), Some(2.1e9));
        assert_eq!(duration(report, "90%"), None);
    }
}
