//! Web servers: nginx, and the ones that come with Python and Node.js.

use std::fs;

use super::{
    App, AppAddress, Case, after, seconds,
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

pub(crate) const FILES: [(&str, usize); 4] = [("612", 612), ("64K", 64 << 10), ("1M", 1 << 20), ("256M", 256 << 20)];

pub(crate) const NGINX: App = App {
    name: "nginx",
    needs: &[("nginx", "nginx-light"), ("wrk", "wrk"), ("curl", "curl")],
    cases: nginx_cases,
    serve: nginx_serve,
    client: nginx_client,
    figures: nginx_figures,
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
    let configuration = nginx_configuration(&site.folder.to_string_lossy(), &site.address(), site.port, user);
    let file = site.folder.join("nginx.conf");
    fs::write(&file, configuration).during("configuring nginx")?;
    site.serve("nginx", &["-c", &file.to_string_lossy()])
}

/// The configuration of an nginx that serves the folder `root` in its own folder.
pub(crate) fn nginx_configuration(folder: &str, address: &str, port: u16, user: &str) -> String {
    format!(
        "worker_processes 1; daemon off; {user} pid {folder}/pid; error_log stderr;
         events {{ worker_connections 200; }}
         http {{ access_log off; sendfile on; tcp_nopush on; keepalive_requests 1000000000;
            client_body_temp_path {folder}/b; proxy_temp_path {folder}/p; fastcgi_temp_path {folder}/f;
            uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
            server {{ listen {address}:{port}; root {folder}/root; }} }}"
    )
}

fn nginx_client(at: &AppAddress, case: &Case, scale: Scale) -> Vec<String> {
    let url = at.url(case.word(1));
    match case.word(0) {
        "wrk" => wrk(at, &url, case.word(2), case.word(3) == "keep", scale),
        _ => words(&["curl", "-sS", "--fail", "-o", "/dev/null", "-w", "speed = %{speed_download}", &url]),
    }
}

fn nginx_figures(case: &Case, report: &str) -> Result<Figures> {
    if case.word(0) == "wrk" {
        return page_figures(case, report);
    }
    let rate = after(report, "speed =");
    let rate = rate.ok_or_else(|| BenchError::Transport(format!("curl says no speed: {report}")))?;
    Ok(Figures::from([(Metric::BytesPerSecond, rate)]))
}

/// wrk with one page.
fn wrk(at: &AppAddress, url: &str, connections: &str, keep: bool, scale: Scale) -> Vec<String> {
    let length = (seconds(scale) * at.times_longer(connections)).to_string();
    // wrk counts an answer after its time-out as an error of the socket. By default that is 2 s, for which a loaded machine may stop a server.
    let mut line = words(&["wrk", "-t", "1", "-c", connections, "-d", &length, "--latency", "--timeout", "60s"]);
    if !keep {
        line.extend(words(&["-H", "Connection: close"]));
    }
    line.push(url.to_owned());
    line
}

/// wrk's report of one page.
fn page_figures(_: &Case, report: &str) -> Result<Figures> {
    let bad = ["Non-2xx", "Socket errors"].iter().any(|word| report.contains(word));
    let rate = after(report, "Requests/sec:").filter(|_| !bad);
    let rate = rate.ok_or_else(|| BenchError::Transport(format!("wrk says: {}", report.trim())))?;
    let mut figures = Figures::from([(Metric::PerSecond, rate)]);
    for (word, metric) in [("50%", Metric::P50Ns), ("99%", Metric::P99Ns)] {
        figures.extend(duration(report, word).map(|ns| (metric, ns)));
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
    client: page_client,
    figures: page_figures,
};

fn python_cases(_: Scale) -> Vec<Case> {
    vec![Case::new("http.server, 612 B", &["612", "4", "close"])]
}

fn python_serve(site: &Site<'_>) -> Result<GuardedChild> {
    fs::write(site.folder.join("612"), vec![b'x'; 612]).during("writing a file to serve")?;
    site.serve("/usr/bin/python3", &["-m", "http.server", "--bind", &site.address(), &site.port()])
}

fn page_client(at: &AppAddress, case: &Case, scale: Scale) -> Vec<String> {
    wrk(at, &at.url(case.word(0)), case.word(1), case.word(2) == "keep", scale)
}

pub(crate) const NODE: App = App {
    name: "node",
    needs: &[("node", "nodejs"), ("wrk", "wrk")],
    cases: node_cases,
    serve: node_serve,
    client: page_client,
    figures: page_figures,
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
