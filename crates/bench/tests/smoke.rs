//! Runs every subcommand at the smallest scale, as a user would, and looks at what it leaves behind.
#![expect(clippy::unwrap_used, clippy::panic, reason = "a failed test is to stop")]

use std::{
    fs,
    path::Path,
    process::{Child, Command, Output, Stdio},
    thread,
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process};

/// Longer is a hang.
const HANG: Duration = Duration::from_secs(120);

fn bench() -> Command {
    Command::new(env!("CARGO_BIN_EXE_partywall-bench"))
}

fn run(arguments: &[&str]) -> Output {
    bench().args(arguments).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Runs a subcommand into a result file and pictures in `folder`.
fn measure(command: &str, folder: &Path) -> Output {
    let json = folder.join(format!("{command}.json"));
    let html = folder.join(format!("{command}.html"));
    let mut bench = bench();
    bench.args([command, "--smoke", "--json"]).arg(json).arg("--plots").arg(folder).arg("--html").arg(html);
    let output = bench.output().unwrap();
    assert!(output.status.success(), "{command} failed: {}\n{}", text(&output.stdout), text(&output.stderr));
    output
}

/// The names of network namespaces and shared memory of the bench with this process id.
fn leftovers(pid: u32) -> Vec<String> {
    let mark = [format!("partywall-bench-{pid}-"), format!("partywall_bench_{pid}_")];
    ["/run/netns", "/dev/shm"]
        .iter()
        .flat_map(|folder| fs::read_dir(folder).into_iter().flatten().flatten())
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .filter(|name| mark.iter().any(|mark| name.starts_with(mark.as_str())))
        .collect()
}

#[test]
fn every_subcommand_measures_and_writes_its_results() {
    let folder = tempfile::tempdir().unwrap();
    for command in ["ipc", "stream", "latency", "cpu", "channels", "broker", "advise", "ratios"] {
        let output = measure(command, folder.path());
        let json = fs::read_to_string(folder.path().join(format!("{command}.json"))).unwrap();
        let report: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert_eq!(report["schema"], 1);
        let cells = report["cells"].as_array().unwrap();
        let without = |cell: &&serde_json::Value| cell["runs"].as_array().unwrap().is_empty();
        let empty: Vec<_> = cells.iter().filter(without).collect();
        for cell in &empty {
            assert!(cell["problem"]["unavailable"].is_string(), "{command}: neither measured nor explained: {cell}");
        }
        // Everything of a mechanism may be missing on a small machine, but not everything of all.
        assert!(
            empty.len() < cells.len() || command == "channels",
            "{command} measured nothing: {}",
            text(&output.stderr)
        );
    }
    for picture in ["ipc-time", "ipc-rate", "stream-small", "stream-large", "latency-size", "latency-tails", "cpu"] {
        let svg = fs::read_to_string(folder.path().join(format!("{picture}.svg"))).unwrap();
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"), "{picture}.svg is not a picture");
        let png = fs::read(folder.path().join(format!("{picture}.png"))).unwrap();
        assert!(png.starts_with(b"\x89PNG"), "{picture}.png is not a picture");
    }
    for (command, pictures) in [("ipc", 2), ("latency", 2), ("ratios", 0)] {
        let page = fs::read_to_string(folder.path().join(format!("{command}.html"))).unwrap();
        assert_eq!(page.matches("<figure").count(), pictures, "{command}.html");
        assert!(page.contains("<h2>") && page.contains("<pre>"), "{command}.html has no tables");
        // It needs no other file: the only address is the name of SVG's elements.
        let addresses = page.replace("http://www.w3.org/2000/svg", "");
        assert!(!["http", "src=", "href=", "url("].iter().any(|part| addresses.contains(part)), "{command}.html");
    }
    opens_in_a_browser(&folder.path().join("latency.html"));
    let [a, b] = ["ipc", "stream"].map(|name| folder.path().join(format!("{name}.json")));
    let output = bench().arg("compare").args([&a, &a]).output().unwrap();
    assert!(
        output.status.success() && text(&output.stdout).contains("no clear difference"),
        "{}",
        text(&output.stderr)
    );
    let output = bench().arg("compare").args([&a, &b]).output().unwrap();
    assert!(text(&output.stdout).contains("only in the first file"), "{}", text(&output.stdout));
}

/// A browser shows the page: its headings, and each picture as drawn, not as text.
fn opens_in_a_browser(page: &Path) {
    let is_there =
        |name: &&str| Command::new(name).arg("--version").output().is_ok_and(|output| output.status.success());
    let Some(browser) = ["chromium", "chromium-headless-shell", "google-chrome"].into_iter().find(is_there) else {
        // Past the test's own capture, so that it is seen.
        let said: &[u8] = b"NOT TESTED: no browser opens the HTML report of the bench: install chromium\n";
        std::io::Write::write_all(&mut std::io::stderr(), said).unwrap();
        return;
    };
    // Chromium's own check of the page, in its own words: a frame around it counts what the parser has made of the page.
    let folder = page.parent().unwrap();
    let frame = folder.join("frame.html");
    let name = page.file_name().unwrap().to_str().unwrap();
    let script = "onload = () => { const page = document.querySelector('iframe').contentDocument; \
                  const drawn = [...page.querySelectorAll('figure > svg')].filter(svg => svg.getBBox().width > 500); \
                  document.title = [page.title, page.querySelectorAll('h2').length > 0, drawn.length, \
                  page.querySelectorAll('pre').length > 0].join('|'); }";
    fs::write(&frame, format!("<iframe src=\"{name}\" width=1200 height=4000></iframe><script>{script}</script>"))
        .unwrap();
    let output = Command::new(browser)
        .args([
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--allow-file-access-from-files",
            "--virtual-time-budget=20000",
        ])
        .arg(format!("--user-data-dir={}", folder.join("browser").display()))
        .arg("--dump-dom")
        .arg(&frame)
        .output()
        .unwrap();
    let shown = text(&output.stdout);
    assert!(shown.contains("Partywall bench|true|2|true"), "{browser} shows {shown}\n{}", text(&output.stderr));
}

/// Programs and libraries that are installed are measured, and the missing ones are named.
#[test]
fn missing_programs_are_named_and_others_measured() {
    let folder = tempfile::tempdir().unwrap();
    for command in ["apps", "residency"] {
        let json = folder.path().join(format!("{command}.json"));
        let output = bench().args([command, "--smoke", "--json"]).arg(&json).output().unwrap();
        if !output.status.success() {
            let said = text(&output.stderr);
            assert!(said.contains("the library that programs are loaded with is not there"), "{command}: {said}");
            continue;
        }
        let report: serde_json::Value = serde_json::from_str(&fs::read_to_string(&json).unwrap()).unwrap();
        for cell in report["cells"].as_array().unwrap() {
            let measured = !cell["runs"].as_array().unwrap().is_empty();
            assert!(measured || cell["problem"]["unavailable"].is_string(), "{command}: {cell}");
            if command == "residency" && measured {
                let run = &cell["runs"][0];
                for metric in ["machine_cpu_percent", "switches_per_second", "wait_percent", "blocks_per_second"] {
                    assert!(run[metric].is_number(), "{metric} is missing: {cell}");
                }
                let is_mixed = cell["settings"]["part"] == "mixed";
                assert_eq!(run["remote_bytes_per_second"].is_number(), is_mixed || is_remote_stream(cell), "{cell}");
            }
        }
    }
}

fn is_remote_stream(cell: &serde_json::Value) -> bool {
    cell["settings"]["part"] == "remote" && cell["settings"]["flow"] == "stream"
}

/// The figures of a migration are drawn without a measurement.
#[test]
fn migration_is_drawn_from_its_file() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("migrate.json");
    let stream = r#"{ "name": "plain", "partywall": false, "bytes_by_column": [1, 0, 2], "transports": [] }"#;
    let pauses = r#"{ "stream": "plain", "transport_before": "tcp", "longest_pause_beyond_qemu_ms": 3.0 }"#;
    let migration = format!(
        r#"{{ "round": 1, "direction": "away", "marks": [{{ "at_ms": 100.0, "name": "x" }}], "streams": [{pauses}] }}"#
    );
    fs::write(&file, format!(r#"{{ "column_ms": 100, "migrations": [{migration}], "streams": [{stream}] }}"#)).unwrap();
    let draw = || bench().args(["residency", "--migration"]).arg(&file).arg("--plots").arg(folder.path()).output();
    let output = draw().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    for picture in ["migration-1.svg", "migration-pauses.svg"] {
        assert!(fs::read_to_string(folder.path().join(picture)).unwrap().starts_with("<svg"), "{picture}");
    }
    fs::write(&file, "{}").unwrap();
    let output = draw().unwrap();
    assert!(text(&output.stderr).contains("is no file of `partywall-lab migrate --json`"), "{}", text(&output.stderr));
}

/// Libraries for calls, heaps and file systems: what is installed is measured, and missing packages are named.
#[test]
fn peers_and_file_systems_are_measured_or_packages_named() {
    let folder = tempfile::tempdir().unwrap();
    for (command, own) in [("rpc", "partywall-call"), ("heap", "memfd"), ("fs", "local")] {
        let output = measure(command, folder.path());
        let json = fs::read_to_string(folder.path().join(format!("{command}.json"))).unwrap();
        let report: serde_json::Value = serde_json::from_str(&json).unwrap();
        let cells = report["cells"].as_array().unwrap();
        for cell in cells {
            let measured = !cell["runs"].as_array().unwrap().is_empty();
            assert!(measured || cell["problem"]["unavailable"].is_string(), "{command}: {cell}");
            let needed = cell["mechanism"] == own;
            assert!(measured || !needed, "{command}: {cell}");
        }
        let shown = text(&output.stdout);
        assert!(shown.contains("## What is promised"), "{command}: {shown}");
        assert!(!report["verdicts"].as_array().unwrap().is_empty(), "{command} judges nothing");
    }
    for picture in ["rpc-byte-send", "rpc-variable-receive", "heap", "fs"] {
        let svg = fs::read_to_string(folder.path().join(format!("{picture}.svg"))).unwrap();
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"), "{picture}.svg is not a picture");
    }
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
    let ours = folder.path().to_str().unwrap();
    assert!(!mounts.contains(ours) && !mounts.contains("/partywall-bench-fs-"), "a mount stays behind: {mounts}");
}

/// Two hosts are measured where etcd is installed and the gateway is built. What is missing is named otherwise.
#[test]
fn two_hosts_are_measured_or_missing_program_named() {
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("gateway.json");
    let output = bench().args(["gateway", "--smoke", "--json"]).arg(&json).output().unwrap();
    if !output.status.success() {
        let said = text(&output.stderr);
        let is_named =
            ["no etcd on this machine", "no partywall-gateway beside"].iter().any(|what| said.contains(what));
        return assert!(is_named, "{said}");
    }
    let report: serde_json::Value = serde_json::from_str(&fs::read_to_string(&json).unwrap()).unwrap();
    let cells = report["cells"].as_array().unwrap();
    assert_eq!((cells.len(), report["verdicts"].as_array().unwrap().len()), (6, 4));
    for cell in cells {
        let measured = !cell["runs"].as_array().unwrap().is_empty();
        let may_miss = cell["mechanism"] == "iperf3" && cell["problem"]["unavailable"].is_string();
        assert!(measured || may_miss, "{cell}");
    }
    assert!(text(&output.stdout).contains("us beyond plain TCP"), "{}", text(&output.stdout));
}

/// The switch is measured where its program is built, and `testpmd` where it is installed; the package is named otherwise.
#[test]
fn switch_is_measured_and_testpmd_or_its_package_named() {
    let folder = tempfile::tempdir().unwrap();
    let output = measure("net", folder.path());
    let json = fs::read_to_string(folder.path().join("net.json")).unwrap();
    let report: serde_json::Value = serde_json::from_str(&json).unwrap();
    let cells = report["cells"].as_array().unwrap();
    assert!(!cells.is_empty());
    for cell in cells {
        let measured = !cell["runs"].as_array().unwrap().is_empty();
        assert!(measured || cell["problem"]["unavailable"].is_string(), "{cell}");
        // The driver of `net-user` is DPDK's.
        let needed = cell["mechanism"] == "partywall-net" && cell["experiment"] != "net-user" && switch_is_built();
        assert!(measured || !needed, "{cell}");
    }
    let shown = text(&output.stdout);
    let is_there = !shown.contains("testpmd: not measured");
    assert!(is_there || shown.contains("dpdk-dev") || shown.contains("a processor each"), "{shown}");
    assert_eq!(report["verdicts"].as_array().unwrap().len(), 12);
    if switch_is_built() {
        for picture in ["net-frames", "net-rate", "net-cpu"] {
            let svg = fs::read_to_string(folder.path().join(format!("{picture}.svg"))).unwrap();
            assert!(svg.starts_with("<svg") && svg.contains("partywall-net, spinning"), "{picture}: {svg}");
        }
    }
}

/// Disks are measured where their back end is built, and `qemu-storage-daemon` where it is installed; the package is named otherwise.
#[test]
fn disks_are_measured_and_peer_or_its_package_named() {
    for (options, ways) in [(&[][..], 2), (&["--direct", "--queues", "2"][..], 3)] {
        let (folder, scratch) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let [json, page] = ["blk.json", "blk.html"].map(|name| folder.path().join(name));
        let mut command = bench();
        command.args(["blk", "--smoke", "--json"]).arg(&json).arg("--plots").arg(folder.path());
        command.arg("--html").arg(&page).arg("--folder").arg(scratch.path()).args(options);
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}\n{}", text(&output.stdout), text(&output.stderr));
        let report: serde_json::Value = serde_json::from_str(&fs::read_to_string(&json).unwrap()).unwrap();
        let cells = report["cells"].as_array().unwrap();
        assert_eq!(cells.len(), 2 * (1 + ways), "{options:?}");
        for cell in cells {
            let run = &cell["runs"][0];
            let measured =
                ["per_second", "bytes_per_second", "cpu_ns_per_operation"].iter().all(|m| run[m].is_number());
            let needed = cell["mechanism"] == "partywall-blk" && is_built("partywall-blk");
            assert!(measured || (!needed && cell["problem"]["unavailable"].is_string()), "{cell}");
            assert_eq!(cell["settings"]["queues"], if options.is_empty() { 1 } else { 2 }, "{cell}");
        }
        let has_peer = !text(&output.stdout).contains("qemu-storage-daemon: not measured");
        assert!(has_peer || text(&output.stdout).contains("qemu-system-common"), "{}", text(&output.stdout));
        let verdicts = report["verdicts"].as_array().unwrap();
        let judged = verdicts.iter().filter(|verdict| verdict["measured"].is_number()).count();
        // Rate and processor time of two cases.
        let expected = if has_peer && is_built("partywall-blk") { 4 } else { 0 };
        assert_eq!((verdicts.len(), judged), (16, expected), "{}", text(&output.stdout));
        if is_built("partywall-blk") {
            let svg = fs::read_to_string(folder.path().join("blk-requests.svg")).unwrap();
            assert!(svg.contains("read 4 KiB, depth 32") && svg.contains("write 1 MiB, depth 8"), "{svg}");
            assert_eq!(fs::read_to_string(&page).unwrap().matches("<figure").count(), 2);
        }
        assert_eq!(fs::read_dir(scratch.path()).unwrap().count(), 0, "the disk's file stays behind");
    }
}

/// Whether the switch is beside the bench, and there are two processors.
fn switch_is_built() -> bool {
    is_built("partywall-net") && thread::available_parallelism().is_ok_and(|count| count.get() > 1)
}

/// Whether a program is beside the bench.
fn is_built(program: &str) -> bool {
    Path::new(env!("CARGO_BIN_EXE_partywall-bench")).with_file_name(program).exists()
}

/// Two machines boot, and all that goes between them is measured; where they cannot be booted, it is said what is missing.
#[test]
fn machines_are_measured_or_missing_tools_named() {
    let (folder, scratch) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let json = folder.path().join("vm.json");
    let mut command = bench();
    command.args(["vm", "--smoke", "--plots"]).arg(folder.path()).arg("--json").arg(&json);
    command.env("TMPDIR", scratch.path()).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = command.spawn().unwrap();
    let pid = child.id();
    let output = child.wait_with_output().unwrap();
    let (shown, said) = (text(&output.stdout), text(&output.stderr));
    if !output.status.success() && (said.contains("`make setup`") || said.contains("`make build`")) {
        eprintln!("no virtual machines here: {said}");
        return;
    }
    assert!(output.status.success(), "{shown}\n{said}");
    assert!(shown.contains("# two machines"), "{shown}");
    let report: serde_json::Value = serde_json::from_str(&fs::read_to_string(&json).unwrap()).unwrap();
    let cells = report["cells"].as_array().unwrap();
    for cell in cells {
        let measured = !cell["runs"].as_array().unwrap().is_empty();
        let mechanism = cell["mechanism"].as_str().unwrap();
        let may_be_missing = ["vsock", "ice", "nfs", "sshfs", "9p", "virtiofs"].contains(&mechanism)
            || (mechanism.starts_with("partywall-fs") && !is_built("partywall-fs"))
            || lacks_stock_machine_tool(cell);
        assert!(measured || (may_be_missing && cell["problem"]["unavailable"].is_string()), "{cell}");
    }
    let measured = |name: &str| cells.iter().any(|cell| cell["mechanism"] == name);
    for mechanism in
        ["partywall", "partywall-zero-copy", "tcp-virtio", "transparent", "serial-relay", "pmem-window", "ivshmem"]
            .into_iter()
            .chain(["partywall-call", "partywall-fs", "partywall-fs-tcp", "local"])
    {
        assert!(measured(mechanism), "{mechanism} is not among what was measured");
    }
    stock_machines_are_measured(cells, "cards", &["tcp-virtio", "partywall-net"], "cpu_seconds_per_gigabyte");
    let disks = ["partywall-blk", "qemu-storage-daemon", "virtio-blk"];
    stock_machines_are_measured(cells, "disks", &disks, "cpu_ns_per_operation");
    for picture in ["vm-stream.svg", "vm-setup.svg", "vm-fs.svg"] {
        assert!(fs::read_to_string(folder.path().join(picture)).unwrap().starts_with("<svg"), "{picture}");
    }
    nothing_is_left(pid, scratch.path());
}

/// Whether a part with stock machines lacks its program of ours or one of Debian's.
fn lacks_stock_machine_tool(cell: &serde_json::Value) -> bool {
    match cell["settings"]["part"].as_str() {
        Some("cards") => {
            let program = cell["settings"]["program"].as_str().unwrap();
            !is_built("partywall-net") || (program == "iperf3" && !Path::new("/usr/bin/iperf3").exists())
        }
        Some("disks") => {
            let is_there = |name: &str| Path::new("/usr/bin").join(name).exists();
            let mechanism = cell["mechanism"].as_str().unwrap();
            !is_there("fio")
                || (mechanism == "partywall-blk" && !is_built("partywall-blk"))
                || (mechanism == "qemu-storage-daemon" && !is_there("qemu-storage-daemon"))
        }
        _ => false,
    }
}

/// A part with stock machines has cells of each way, and processor time where they were measured.
fn stock_machines_are_measured(cells: &[serde_json::Value], part: &str, mechanisms: &[&str], time: &str) {
    let of_part: Vec<_> = cells.iter().filter(|cell| cell["settings"]["part"] == part).collect();
    for mechanism in mechanisms {
        assert!(of_part.iter().any(|cell| cell["mechanism"] == *mechanism), "{mechanism} is not among the {part}");
    }
    for run in of_part.iter().flat_map(|cell| cell["runs"].as_array().unwrap()) {
        assert!(run[time].is_number() && run[format!("outside_{time}")].is_number(), "{part}: {run}");
    }
}

/// Neither temporary files, nor folders of exported files, nor processes that use either.
fn nothing_is_left(pid: u32, scratch: &Path) {
    let files = fs::read_dir(scratch).unwrap().map(|entry| entry.unwrap().file_name()).collect::<Vec<_>>();
    assert!(files.is_empty(), "temporary files stay behind: {files:?}");
    let exported = format!("partywall-bench-fs-{pid}-");
    let names = fs::read_dir("/dev/shm").unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let folders: Vec<String> = names.filter(|name| name.starts_with(&exported)).collect();
    assert!(folders.is_empty(), "exported folders stay behind: {folders:?}");
    let scratch = scratch.to_str().unwrap();
    let locks = fs::read_dir("/run/virtiofsd").into_iter().flatten().flatten().map(|entry| entry.file_name());
    let of_bench = scratch.replace('/', ".");
    let locks: Vec<_> = locks.filter(|name| name.to_string_lossy().starts_with(&of_bench)).collect();
    assert!(locks.is_empty(), "lock files of virtiofsd stay behind: {locks:?}");
    for entry in fs::read_dir("/proc").unwrap().flatten() {
        let line = fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let line = String::from_utf8_lossy(&line).replace('\0', " ");
        assert!(!line.contains(scratch), "a process stays behind: {line}");
    }
}

#[test]
fn spinning_mechanism_is_skipped_on_one_processor() {
    let output = run(&["latency", "--smoke", "--same-cpu", "--only", "unix,two-line"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let shown = text(&output.stdout);
    assert!(shown.contains("two-line: not measured: it spins, and both sides share a processor"), "{shown}");
    assert!(shown.lines().any(|line| line.contains("unix")), "{shown}");
}

#[test]
fn bad_requests_are_refused_clearly() {
    for (arguments, said) in [
        (&["stream", "--cpus", "0,100000"][..], "processor 100000 is not available"),
        (&["stream", "--runs", "0"][..], "write a whole number from 1 to 1000"),
        (&["compare", "/nonexistent/a.json", "/nonexistent/b.json"][..], "reading /nonexistent/a.json"),
        (&["role"][..], "of no use by hand"),
    ] {
        let output = bench().args(arguments).stdin(Stdio::null()).output().unwrap();
        assert!(!output.status.success(), "{arguments:?} was accepted");
        assert!(text(&output.stderr).contains(said), "{arguments:?}: {}", text(&output.stderr));
    }
}

/// A bench of these mechanisms that does not end by itself while a test looks.
fn long_run(only: &str, scratch: &Path) -> Child {
    bench()
        .args(["stream", "--runs", "100", "--only", only])
        .env("TMPDIR", scratch)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

#[test]
fn interrupted_bench_kills_children_and_cleans_up() {
    let scratch = tempfile::tempdir().unwrap();
    let mut child = long_run("tcp-veth,iceoryx2", scratch.path());
    let pid = child.id();
    // Two measuring processes are running, and everything exists that this machine and this build can make.
    let patience = Instant::now() + Duration::from_secs(5);
    let mut measuring_then = Vec::new();
    wait_until(&mut child, || {
        let made = leftovers(pid);
        let all = made.iter().any(|name| name.contains('_')) && made.iter().any(|name| name.ends_with("-b"));
        measuring_then = measuring(pid);
        measuring_then.len() >= 2 && (all || Instant::now() > patience)
    });
    // They must be ended, not waited for.
    tell(measuring_then[0], Signal::STOP);
    tell(pid, Signal::INT);
    let deadline = Instant::now() + HANG;
    while child.try_wait().unwrap().is_none() && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(5));
    }
    measuring_then.iter().filter(|pid| alive(**pid)).for_each(|pid| tell(*pid, Signal::KILL));
    assert!(Instant::now() < deadline, "it waits for its measuring processes instead of ending them");
    let status = child.wait().unwrap();
    assert_eq!(status.code(), Some(130));
    assert_eq!(leftovers(pid), Vec::<String>::new());
    assert_eq!(fs::read_dir(scratch.path()).unwrap().count(), 0, "a temporary folder stays behind");
    for pid in measuring_then {
        assert!(!fs::exists(format!("/proc/{pid}")).unwrap(), "measuring process {pid} is still there");
    }
}

#[test]
fn measuring_processes_end_with_a_killed_bench() {
    let scratch = tempfile::tempdir().unwrap();
    let mut child = long_run("pipe,plain-ring", scratch.path());
    let pid = child.id();
    let mut orphans = Vec::new();
    wait_until(&mut child, || {
        orphans = measuring(pid);
        orphans.len() >= 2
    });
    // A stopped process keeps the other waiting, so that neither ends because it has finished.
    tell(orphans[0], Signal::STOP);
    child.kill().unwrap();
    child.wait().unwrap();
    let deadline = Instant::now() + HANG;
    while orphans.iter().any(|pid| alive(*pid)) && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(10));
    }
    let left: Vec<u32> = orphans.into_iter().filter(|pid| alive(*pid)).collect();
    left.iter().for_each(|pid| tell(*pid, Signal::KILL));
    assert_eq!(left, Vec::<u32>::new(), "measuring processes outlive the bench");
}

/// Signals a process, if it is still there.
fn tell(pid: u32, signal: Signal) {
    let _ = kill_process(Pid::from_raw(pid.cast_signed()).unwrap(), signal);
}

/// Whether a process runs; one that only waits to be collected does not.
fn alive(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
}

/// The measuring processes of a bench that are at work: they have been pinned, which comes after all else that sets them up.
fn measuring(parent: u32) -> Vec<u32> {
    let children = fs::read_to_string(format!("/proc/{parent}/task/{parent}/children")).unwrap_or_default();
    let is_role = |pid: &u32| fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| line.ends_with(b"\0role\0"));
    let is_pinned = |pid: &u32| {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let cpus = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
        cpus.is_some_and(|cpus| !cpus.contains([',', '-']))
    };
    let pids = children.split_whitespace().filter_map(|pid| pid.parse().ok());
    pids.filter(is_role).filter(is_pinned).collect()
}

fn wait_until(child: &mut Child, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + HANG;
    while !condition() {
        assert!(child.try_wait().unwrap().is_none(), "the bench ended early");
        if Instant::now() > deadline {
            let _ = child.kill();
            let _ = child.wait();
            panic!("the bench does not measure");
        }
        thread::sleep(Duration::from_millis(2));
    }
}
