//! `partywall net`: two stock guests with nothing of Partywall inside talk over a switch, and to the host over its uplink; the switch
//! is killed under load, and ports come and go. A guest keeps a file system on a disk of `partywall blk`, which is killed under load
//! and grows. The host stops the QEMU of that guest for a while. One set of guests for all of it.
#![cfg(not(miri))]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, in its helpers too")]

#[path = "world/python.rs"]
mod python;

use partywall_lab::{Guest, GuestOptions, ImageOptions, Lab, Network, beside};
use partywall_region::relay::PORT;
use rustix::process::{Pid, Signal};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Longer is a hang.
const HANG: Duration = Duration::from_secs(90);
/// Ports on the guests' side of the network.
const FILE: u16 = 4000;
const DATAGRAMS: u16 = 4001;
const IPERF: u16 = 5201;

struct SwitchProcess(Child);

impl Drop for SwitchProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A disk with a file system.
struct Disk {
    folder: tempfile::TempDir,
    program: PathBuf,
    back_end: Option<SwitchProcess>,
}

impl Disk {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let image = folder.path().join("image");
        std::fs::File::create(&image).unwrap().set_len(96 << 20).unwrap();
        let made = Command::new("/sbin/mke2fs").args(["-q", "-F", "-t", "ext4"]).arg(&image).status().unwrap();
        assert!(made.success());
        let mut disk = Self { folder, program: beside("partywall-blk").unwrap(), back_end: None };
        disk.start();
        disk
    }

    fn path(&self, name: &str) -> String {
        self.folder.path().join(name).display().to_string()
    }

    fn start(&mut self) {
        // The earlier back end has ended.
        self.back_end = None;
        let mut command = Command::new(&self.program);
        command.args(["serve", &self.path("image"), "--socket", &self.path("disk.sock"), "--serial", "lab-disk"]);
        // Some requests are then in flight when it is killed.
        command.args(["--inject-delay", "30"]);
        let mut child = SwitchProcess(command.env_remove("RUST_LOG").stdout(Stdio::piped()).spawn().unwrap());
        let mut line = String::new();
        BufReader::new(child.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert!(line.starts_with("serving"), "{line}");
        self.back_end = Some(child);
    }

    fn ask(&self, words: &[&str]) -> String {
        let done =
            Command::new(&self.program).args(words).args(["--socket", &self.path("disk.sock")]).output().unwrap();
        assert!(done.status.success(), "{words:?}: {}", String::from_utf8_lossy(&done.stderr));
        String::from_utf8_lossy(&done.stdout).into_owned()
    }

    /// QEMU's options as `partywall blk args` prints them, for a machine whose memory is shared already.
    fn arguments(&self) -> Vec<String> {
        let [memory, device] = printed_options(&self.ask(&["args"]));
        assert!(memory.join(" ").contains("share=on"), "{memory:?}");
        device
    }
}

/// The lines that `partywall net args` and `partywall blk args` print for QEMU, up to the empty one: the words of those that share the
/// machine's memory, and the words of those for the device. A machine with several devices has the former once.
fn printed_options(said: &str) -> [Vec<String>; 2] {
    let (memory, device): (Vec<&str>, Vec<&str>) =
        said.lines().take_while(|line| !line.is_empty()).partition(|line| line.contains("memory-backend"));
    assert!(memory.len() == 2 && device.len() >= 2, "{said}");
    [memory, device].map(|lines| lines.iter().flat_map(|line| line.split_whitespace()).map(str::to_owned).collect())
}

struct Net {
    network: Network,
    folder: tempfile::TempDir,
    program: PathBuf,
    switch: Option<SwitchProcess>,
}

impl Net {
    fn command(&self, words: &[&str]) -> Command {
        let mut command = self.network.command(&self.program);
        command.arg("--folder").arg(self.folder.path()).args(words).env_remove("RUST_LOG");
        command
    }

    fn ask(&self, words: &[&str]) -> Output {
        let done = self.command(words).output().unwrap();
        assert!(done.status.success(), "{words:?}: {}", String::from_utf8_lossy(&done.stderr));
        done
    }

    /// `partywall vm attach` or `detach` of a machine that no broker attends to: what it says, or why it fails.
    fn vm(&self, what: &str, guest: &Guest, port: &str, words: &[&str]) -> Result<String, String> {
        let mut command = self.network.command(beside("partywall").unwrap());
        command.args(["vm", what, guest.name(), "--net", &format!("lan:{port}")]).arg("--qmp").arg(guest.monitor());
        let done = command.arg("--folder").arg(self.folder.path()).args(words).env_remove("RUST_LOG").output().unwrap();
        let said = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        if done.status.success() { Ok(said(&done.stdout)) } else { Err(said(&done.stderr)) }
    }

    fn start(&mut self, words: &[&str]) {
        let log = std::fs::File::options().create(true).append(true).open(self.folder.path().join("log")).unwrap();
        let mut command = self.command(&[&["run", "lan"], words].concat());
        let mut child = SwitchProcess(command.stdout(Stdio::piped()).stderr(log).spawn().unwrap());
        let mut line = String::new();
        BufReader::new(child.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert!(line.starts_with("serving"), "{line} {}", self.log());
        self.switch = Some(child);
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    /// For each port, the frames that found no buffer of its machine.
    fn frames_without_buffer(&self) -> Vec<(String, u64)> {
        let report: serde_json::Value = serde_json::from_slice(&self.ask(&["show", "lan", "--json"]).stdout).unwrap();
        let one = |row: &serde_json::Value| {
            (row["port"]["name"].as_str().unwrap().to_owned(), row["counters"]["no_buffers"].as_u64().unwrap())
        };
        report["ports"].as_array().unwrap().iter().map(one).collect()
    }

    /// Waits until no machine uses this port.
    fn await_free(&self, port: &str) {
        let deadline = Instant::now() + HANG;
        let is_free = || {
            let report: serde_json::Value =
                serde_json::from_slice(&self.ask(&["show", "lan", "--json"]).stdout).unwrap();
            report["ports"]
                .as_array()
                .unwrap()
                .iter()
                .any(|row| row["port"]["name"] == port && row["occupied"] == false)
        };
        while !is_free() {
            assert!(Instant::now() < deadline, "port {port} is still used");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// The host's end of a machine's serial port, by which a broker would speak to an agent in it.
    fn port_to_broker(&self, name: &str) -> PathBuf {
        self.folder.path().join(format!("{name}.serial"))
    }

    /// A machine started with what `partywall net args` prints. Behind its device come an Ethernet address and, for emulated machines,
    /// `vectors=0`.
    fn printed_options(&self, name: &str, mac: u8) -> GuestOptions {
        let said = String::from_utf8(self.ask(&["args", "lan", name]).stdout).unwrap();
        let [memory, mut device] = printed_options(&said);
        device.last_mut().unwrap().push_str(&format!(",mac={},vectors=0", address(mac)));
        GuestOptions::new(name).network(&self.network).unwrap().arguments(memory).arguments(device)
    }

    /// A machine started with options of an operator, whose device has no name.
    fn options(&self, name: &str, mac: u8) -> GuestOptions {
        let socket = self.folder.path().join(format!("lan/{name}.port"));
        GuestOptions::new(name).same_addresses().shared_memory().network(&self.network).unwrap().arguments([
            "-chardev".to_owned(),
            format!("socket,id=port,path={},reconnect=1", socket.display()),
            "-netdev".to_owned(),
            "vhost-user,id=port,chardev=port".to_owned(),
            "-device".to_owned(),
            format!("virtio-net-pci,netdev=port,mac={},rx_queue_size=1024,tx_queue_size=1024,vectors=0", address(mac)),
        ])
    }
}

/// The Ethernet address of a machine's first card on the switch.
fn address(last: u8) -> String {
    format!("52:54:00:99:00:{last:02x}")
}

#[test]
fn stock_guests_talk_over_a_switch_that_may_die() {
    let needed = ["/dev/net/tun", "/usr/bin/iperf3", python::PYTHON, "/sbin/mke2fs"];
    let missing: Vec<&str> = needed.into_iter().filter(|path| !Path::new(path).exists()).collect();
    if !rustix::process::geteuid().is_root() || !missing.is_empty() {
        println!(
            "skipped: the network needs root and a tap device, and its loads need programs (missing: {missing:?})"
        );
        return;
    }
    let network = Network::bridge().unwrap();
    let program = beside("partywall-net").unwrap();
    let mut net = Net { network, folder: tempfile::tempdir().unwrap(), program, switch: None };
    net.start(&["--port", "a", "--port", "b", "--tap", "up0"]);
    let mut disk = Disk::new();
    let image = ImageOptions::default().program("/usr/bin/iperf3", "iperf3").module("virtio_blk").module("ext4");
    let lab = Lab::new("net", &python::with(image)).unwrap();
    let boot = |name: &str, mac: u8| {
        let options = match name {
            "a" => net.printed_options(name, mac).arguments(disk.arguments()),
            _ => net.options(name, mac),
        };
        let options = options.serves_port(PORT, &net.port_to_broker(name));
        let guest = lab.boot(options).unwrap();
        let line = format!("ip address add 10.99.0.{mac}/24 dev eth1 && ip link set eth1 up");
        guest.shell(&line).unwrap();
        python::bring(&guest);
        guest
    };
    let [a, b] = std::thread::scope(|s| {
        [("a", 1), ("b", 2)].map(|(name, mac)| s.spawn(move || boot(name, mac))).map(|t| t.join().unwrap())
    });

    wait_ping(&net, &a, "10.99.0.2");
    assert!(
        a.shell("ls /dev/dax* /bin/partywall* 2>/dev/null; true").unwrap().lines().all(|l| l.ends_with("lab-guest"))
    );
    a.shell("dd if=/dev/urandom of=/tmp/file bs=1M count=24 2>/dev/null").unwrap();
    file_arrives(&a, &b, "10.99.0.2", || {});
    host_is_on_the_same_network(&net, &a);
    windows_come_while_bytes_are_carried(&net, [&a, &b]);
    throughput(&a, &b);
    datagrams_return_unchanged(&a, &b);
    file_arrives(&a, &b, "10.99.0.2", || {
        net.switch = None;
        net.start(&[]);
    });
    wait_ping(&net, &b, "10.99.0.1");
    disk_outlives_its_back_ends(&mut disk, &net, [&a, &b]);
    ports_come_and_go(&net, &a, &b);
    print!("{}", String::from_utf8_lossy(&net.ask(&["show", "lan"]).stdout));
}

/// A file system under load, whose back end is killed three times. Then the host stops the machine's QEMU for a while.
fn disk_outlives_its_back_ends(disk: &mut Disk, net: &Net, [guest, neighbour]: [&Guest; 2]) {
    assert_eq!(guest.shell("cat /sys/block/vda/serial").unwrap().trim(), "lab-disk");
    guest.shell("mkdir -p /mnt && mount -t ext4 /dev/vda /mnt").unwrap();
    let load = "\
        : > /tmp/sums
        for n in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16; do
            dd if=/dev/urandom of=/tmp/part bs=64k count=64 2>/dev/null
            dd if=/tmp/part of=/mnt/$n bs=64k conv=fsync 2>/dev/null || exit 1
            (cd /tmp && sha256sum < part) >> /tmp/sums
            echo $n > /tmp/progress
        done";
    let running = guest.start(&["sh", "-c", load]).unwrap();
    let number = |disk: &Disk, name: &str| {
        let report: serde_json::Value = serde_json::from_str(&disk.ask(&["show", "--json"])).unwrap();
        report[name].as_u64().or(report["counters"][name].as_u64()).unwrap()
    };
    let mut recovered = 0;
    for n in [1, 3, 5, 6] {
        let line = format!("while [ ! -s /tmp/progress ] || [ $(cat /tmp/progress) -lt {n} ]; do sleep 0.02; done");
        guest.shell(&line).unwrap();
        recovered += number(disk, "recovered");
        if n == 6 {
            let deadline = Instant::now() + HANG;
            while number(disk, "under_way") == 0 {
                assert!(Instant::now() < deadline);
            }
            stopped_machine_loses_its_own_frames_only(net, guest, neighbour);
        } else {
            stop_with_requests_in_flight(disk.back_end.as_ref().unwrap().0.id(), guest);
            disk.start();
        }
    }
    assert_eq!(running.wait(HANG).unwrap().status, 0, "the guest has seen an error of its disk");
    guest.shell("echo 3 > /proc/sys/vm/drop_caches").unwrap();
    let read = "for n in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16; do sha256sum < /mnt/$n; done";
    assert_eq!(guest.shell(read).unwrap(), guest.shell("cat /tmp/sums").unwrap());
    recovered += number(disk, "recovered");
    assert!(recovered > 0, "no request was in flight when a back end was killed");
    assert_eq!(guest.shell("dmesg | grep -ciE 'i/o error|ext4-fs error' || true").unwrap().trim(), "0");
    // It grows while it is in use.
    disk.ask(&["resize", "128M"]);
    guest
        .shell("n=0; while [ $(cat /sys/block/vda/size) != 262144 ]; do sleep 0.1; n=$((n+1)); [ $n -lt 200 ]; done")
        .unwrap();
    guest.shell("umount /mnt").unwrap();
    print!("{}", disk.ask(&["show"]));
    // It goes and returns while the machine runs. It is found by its back end, whatever its name is.
    for (what, said, is_there) in [("detach", "unplugged", ""), ("attach", "plugged in", "!")] {
        let mut command = Command::new(beside("partywall").unwrap());
        command.args(["vm", what, "a", "--disk", &disk.path("disk.sock")]).arg("--qmp").arg(guest.monitor());
        let done = command.env_remove("RUST_LOG").output().unwrap();
        assert!(String::from_utf8_lossy(&done.stdout).contains(said), "{}", String::from_utf8_lossy(&done.stderr));
        guest
            .shell(&format!(
                "n=0; while [ {is_there} -e /sys/block/vda ]; do sleep 0.1; n=$((n+1)); [ $n -lt 200 ]; done"
            ))
            .unwrap();
    }
    assert_eq!(guest.shell("cat /sys/block/vda/size").unwrap().trim(), "262144");
    // QEMU asks each back end before it plugs another device in, so none may be gone.
    let mut command = Command::new(beside("partywall").unwrap());
    command.args(["vm", "detach", "a", "--disk", &disk.path("disk.sock")]).arg("--qmp").arg(guest.monitor());
    assert!(command.env_remove("RUST_LOG").status().unwrap().success());
    disk.back_end = None;
    let checked = Command::new("/sbin/e2fsck").args(["-f", "-n", &disk.path("image")]).output().unwrap();
    assert!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stdout));
}

/// Stops a back end when it has taken requests of the guest that it has not completed.
fn stop_with_requests_in_flight(back_end: u32, guest: &Guest) {
    let deadline = Instant::now() + HANG;
    loop {
        stop(back_end);
        if requests_in_flight(guest) > 0 {
            return;
        }
        assert!(Instant::now() < deadline, "the back end has no request in flight");
        signal(back_end, Signal::CONT);
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The requests that a back end of the guest's disk has taken and not completed, in the memory of the vhost-user specification that its QEMU keeps.
fn requests_in_flight(guest: &Guest) -> usize {
    const HEAD: usize = 16;
    const ENTRY: usize = 16;
    let mut open = std::fs::read_dir(format!("/proc/{}/fd", guest.pid())).unwrap().map(|entry| entry.unwrap().path());
    let is_kept = |path: &PathBuf| {
        std::fs::read_link(path).is_ok_and(|target| target.to_string_lossy().starts_with("/memfd:partywall-inflight"))
    };
    let bytes = std::fs::read(open.find(is_kept).expect("QEMU keeps the requests in flight")).unwrap();
    bytes[HEAD..].chunks(ENTRY).filter(|entry| entry[0] == 1).count()
}

fn signal(process: u32, signal: Signal) {
    rustix::process::kill_process(Pid::from_raw(process.cast_signed()).unwrap(), signal).unwrap();
}

/// Stops a process, and waits until it has stopped.
fn stop(process: u32) {
    signal(process, Signal::STOP);
    let deadline = Instant::now() + HANG;
    let state = || std::fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    while !state().contains("State:\tT") {
        assert!(Instant::now() < deadline, "{}", state());
    }
}

/// The host stops a QEMU: its machine takes no frames, and its neighbour reaches the host as before.
fn stopped_machine_loses_its_own_frames_only(net: &Net, stopped: &Guest, neighbour: &Guest) {
    // The switch was killed since the uplink got its address.
    wait_ping(net, neighbour, "10.99.0.254");
    let file = net.folder.path().join("got");
    let got = std::fs::File::create(&file).unwrap();
    let mut receiver = net.network.command("busybox");
    // The receiver's own input is open: at its end, the sender would end as well.
    receiver.args(["nc", "-l", "-p", &FILE.to_string()]).stdin(Stdio::piped()).stdout(got);
    let mut receiver = SwitchProcess(receiver.spawn().unwrap());
    let before = net.frames_without_buffer();
    stop(stopped.pid());
    let deadline = Instant::now() + HANG;
    // Each has 41 frames. Together they are more than the card has buffers, and the file goes while there are none.
    let flood = "ping -q -c 40 -i 0.05 -s 60000 -W 1 10.99.0.1; [ $? = 1 ]";
    let flood = neighbour.start(&["sh", "-c", flood]).unwrap();
    while net.frames_without_buffer() == before {
        assert!(Instant::now() < deadline, "the card has buffers: {before:?}");
    }
    let sent = format!("until nc 10.99.0.254 {FILE} < /tmp/got; do sleep 0.1; done");
    assert_eq!(neighbour.start(&["sh", "-c", &sent]).unwrap().wait(HANG).unwrap().status, 0);
    let said = flood.wait(HANG).unwrap();
    assert!(said.status == 0 && said.text().contains("100% packet loss"), "{}", said.text());
    assert!(receiver.0.wait().unwrap().success());
    let sum = Command::new("sha256sum").stdin(std::fs::File::open(&file).unwrap()).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&sum.stdout).trim(), neighbour.shell("sha256sum < /tmp/got").unwrap());
    let lost: Vec<_> = net.frames_without_buffer().into_iter().filter(|frames| !before.contains(frames)).collect();
    assert!(lost.len() == 1 && lost[0].0 == "a", "{before:?} {lost:?}");
    println!("{} frames of the stopped machine are lost", lost[0].1);
    signal(stopped.pid(), Signal::CONT);
    wait_ping(net, neighbour, "10.99.0.1");
}

fn wait_ping(net: &Net, from: &Guest, to: &str) {
    let deadline = Instant::now() + HANG;
    while from.run(&["ping", "-c", "1", "-W", "1", to]).unwrap().status != 0 {
        let shown = String::from_utf8_lossy(&net.ask(&["show", "lan"]).stdout).into_owned();
        assert!(Instant::now() < deadline, "{}\n{shown}", net.log());
    }
}

/// The line that waits until a program listens at a TCP port of its machine. In the kernel's table, a listening socket has the state 0A.
fn listens(port: u16) -> String {
    format!("while ! grep -qE ':{port:04X} [0-9A-F]+:0000 0A' /proc/net/tcp /proc/net/tcp6; do sleep 0.05; done")
}

/// A file goes by TCP, and `meanwhile` runs once some of it has come.
fn file_arrives(from: &Guest, to: &Guest, address: &str, meanwhile: impl FnOnce()) {
    let receiver = to.start(&["sh", "-c", &format!("rm -f /tmp/got; nc -l -p {FILE} > /tmp/got")]).unwrap();
    to.shell(&listens(FILE)).unwrap();
    let sender = from.start(&["sh", "-c", &format!("nc {address} {FILE} < /tmp/file")]).unwrap();
    to.shell("while [ ! -s /tmp/got ]; do sleep 0.02; done").unwrap();
    meanwhile();
    assert_eq!(sender.wait(HANG).unwrap().status, 0);
    assert_eq!(receiver.wait(HANG).unwrap().status, 0);
    assert_eq!(to.shell("sha256sum < /tmp/got").unwrap(), from.shell("sha256sum < /tmp/file").unwrap());
}

/// Windows are plugged into both machines while one sends to the other and reads its disk, so the switch and the disk's back end get other
/// tables of memory under load.
fn windows_come_while_bytes_are_carried(net: &Net, [a, b]: [&Guest; 2]) {
    let broker = Broker::start();
    let receiver = b.start(&["sh", "-c", &format!("nc -l -p {FILE} | md5sum")]).unwrap();
    b.shell(&listens(FILE)).unwrap();
    a.shell("head -c 1048576 /tmp/file > /tmp/piece").unwrap();
    let send = format!(
        "n=0; until [ -e /tmp/enough ]; do cat /tmp/piece; n=$((n+1)); echo $n > /tmp/sent; done | nc 10.99.0.2 {FILE}"
    );
    let read = "\
        once() { dd if=/dev/vda bs=256k count=2 iflag=direct 2>/tmp/dd || cat /tmp/dd; }
        once > /tmp/first; n=0
        until [ -e /tmp/enough ]; do once | cmp - /tmp/first || exit 1; n=$((n+1)); echo $n > /tmp/read; done";
    let [sender, reader] = [&send, read].map(|line| a.start(&["sh", "-c", line]).unwrap());
    let more = "for each in sent read; do before=$(cat /tmp/$each 2>/dev/null); while [ \"$(cat /tmp/$each 2>/dev/null)\" = \"$before\" ]; do sleep 0.02; done; done";
    a.shell(more).unwrap();
    for guest in [a, b] {
        let regions = memory_devices(guest);
        println!("{}", broker.attach(guest, &net.port_to_broker(guest.name())).trim_end());
        assert!(memory_devices(guest) > regions, "no window was plugged in");
        a.shell(more).unwrap();
    }
    a.shell(": > /tmp/enough").unwrap();
    for running in [sender, reader] {
        let ended = running.wait(HANG).unwrap();
        assert_eq!(ended.status, 0, "{}", ended.text());
    }
    let expected = a.shell("n=$(cat /tmp/sent); while [ $n -gt 0 ]; do cat /tmp/piece; n=$((n-1)); done | md5sum");
    assert_eq!(receiver.wait(HANG).unwrap().text(), expected.unwrap().trim());
}

/// The number of devices of memory that were plugged in.
fn memory_devices(guest: &Guest) -> usize {
    guest.monitor_command("query-memory-devices", serde_json::json!({})).unwrap().as_array().unwrap().len()
}

/// A broker for machines without an agent: it plugs in windows that nothing in them uses.
struct Broker {
    folder: tempfile::TempDir,
    _process: SwitchProcess,
}

impl Broker {
    fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("broker.sock");
        let mut command = Command::new(beside("partywalld").unwrap());
        command.args(["--log", "warn", "--socket"]).arg(&socket).env_remove("RUST_LOG");
        let process = SwitchProcess(command.spawn().unwrap());
        let deadline = Instant::now() + HANG;
        while !socket.exists() {
            assert!(Instant::now() < deadline, "the broker does not start");
            std::thread::sleep(Duration::from_millis(5));
        }
        Self { folder, _process: process }
    }

    fn attach(&self, guest: &Guest, port: &Path) -> String {
        let mut command = Command::new(beside("partywall").unwrap());
        command.arg("--broker").arg(self.folder.path().join("broker.sock"));
        command.args(["vm", "attach", guest.name(), "--window", "8M"]).arg("--qmp").arg(guest.monitor());
        command.arg("--port").arg(port);
        let done = command.env_remove("RUST_LOG").env_remove("PARTYWALL_DOMAIN").output().unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        String::from_utf8_lossy(&done.stdout).into_owned()
    }
}

/// Sends each datagram back, until an empty one comes.
const ECHO: &str = "
import socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind((sys.argv[1], int(sys.argv[2])))
while True:
    data, sender = s.recvfrom(65536)
    if not data:
        break
    s.sendto(data, sender)
";

/// Sends datagrams to the echo, from a few bytes to many fragments, each with a content that follows from its size, and compares what returns. A
/// datagram that is lost is sent again, a few times in all. The empty one at the end has no answer, so it is sent three times in any case.
const ASK_ECHO: &str = "
import socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.settimeout(5)
echo, again = (sys.argv[1], int(sys.argv[2])), 0
for size in [1, 100, 1472, 1473, 4000, 9000, 16385, 32768, 50001, 61440]:
    sent = b''.join((size << 14 | n).to_bytes(4, 'little') for n in range(size // 4 + 1))[:size]
    s.sendto(sent, echo)
    while True:
        try:
            got, sender = s.recvfrom(65536)
        except socket.timeout:
            again += 1
            assert again < 12, f'{size} bytes are lost'
            s.sendto(sent, echo)
            continue
        assert sender == echo, f'{size} bytes are of {sender}'
        if len(got) == size:
            break
    assert got == sent, f'{size} bytes have changed'
for n in range(3):
    s.sendto(b'', echo)
print(f'datagrams return unchanged, {again} were sent again')
";

/// Datagrams of both directions. Those that are longer than the network's packets go in fragments.
fn datagrams_return_unchanged(a: &Guest, b: &Guest) {
    for (guest, program) in [(a, ASK_ECHO), (b, ECHO)] {
        guest.put(program.as_bytes(), "/tmp/datagrams.py", 0o644).unwrap();
    }
    let line = format!("{} /tmp/datagrams.py 10.99.0.2 {DATAGRAMS} 2>&1", python::command(""));
    let echo = b.start(&["sh", "-c", &format!("{line}; status=$?; touch /tmp/echo-ended; exit $status")]).unwrap();
    let listens = format!(
        "until grep -q ':{DATAGRAMS:04X} ' /proc/net/udp; do [ ! -e /tmp/echo-ended ] || exit 1; sleep 0.05; done"
    );
    let listens = b.run(&["sh", "-c", &listens]).unwrap().status == 0;
    assert!(listens, "the echo has ended: {}", echo.wait(HANG).unwrap().text());
    let before = [a, b].map(reassembled);
    let asked = a.start(&["sh", "-c", &line]).unwrap().wait(HANG).unwrap();
    assert_eq!(asked.status, 0, "{}", asked.text());
    println!("{}", asked.text().trim_end());
    let echo = echo.wait(HANG).unwrap();
    assert_eq!(echo.status, 0, "{}", echo.text());
    // Datagrams that came in fragments.
    let after = [a, b].map(reassembled);
    assert!(after[0] >= before[0] + 7 && after[1] >= before[1] + 7, "{before:?} {after:?}");
}

/// The number of packets that have come to a machine in fragments.
fn reassembled(guest: &Guest) -> u64 {
    let line = "grep ^Ip: /proc/net/snmp | tail -n 1 | cut -d ' ' -f 16";
    guest.shell(line).unwrap().trim().parse().unwrap()
}

fn host_is_on_the_same_network(net: &Net, a: &Guest) {
    for line in ["address add 10.99.0.254/24 dev up0", "link set up0 up"] {
        assert!(net.network.command("ip").args(line.split(' ')).status().unwrap().success());
    }
    wait_ping(net, a, "10.99.0.254");
    // Large frames in both directions: the kernel's segments become the guest's, and the other way round.
    let mut server =
        SwitchProcess(net.network.command("iperf3").args(["-s", "-1"]).stdout(Stdio::null()).spawn().unwrap());
    let line = |more: &str| {
        format!(
            "for n in 1 2 3 4 5 6 7 8 9; do iperf3 -c 10.99.0.254 -n 30M {more} > /tmp/iperf && break; sleep 0.3; done; tail -n 4 /tmp/iperf"
        )
    };
    println!("to the host: {}", a.shell(&line("")).unwrap());
    server.0.wait().unwrap();
    let mut server =
        SwitchProcess(net.network.command("iperf3").args(["-s", "-1"]).stdout(Stdio::null()).spawn().unwrap());
    println!("from the host: {}", a.shell(&line("-R")).unwrap());
    server.0.wait().unwrap();
}

/// Over the switch and over tap and bridge, in turns.
fn throughput(a: &Guest, b: &Guest) {
    // Guests that boot at the same time get their addresses on the bridge in either order.
    let on_the_bridge = b.address().unwrap().to_string();
    for (name, address) in [("switch", "10.99.0.2"), ("bridge", &on_the_bridge)] {
        let server = b.start(&["iperf3", "-s", "-1"]).unwrap();
        b.shell(&listens(IPERF)).unwrap();
        let said = a.shell(&format!("iperf3 -f m -c {address} -t 2")).unwrap();
        let line = said.lines().rev().find(|line| line.contains("receiver")).unwrap_or_default();
        println!("{name}: {line}");
        assert_eq!(server.wait(HANG).unwrap().status, 0);
        println!("{name}: {}", a.shell(&format!("ping -q -i 0.01 -c 50 {address} | tail -n 1")).unwrap());
    }
}

/// Has a card use that number of pairs of queues, as `ethtool -L` does.
const SET_QUEUES: &str = "
import array, fcntl, socket, struct, sys
CHANNELS = array.array('I', [0x3d, 0, 0, 0, 0, 0, 0, 0, int(sys.argv[2])])
request = struct.pack('16sQ16x', sys.argv[1].encode(), CHANNELS.buffer_info()[0])
fcntl.ioctl(socket.socket(), 0x8946, request)
";

/// The card `eth2` on port `c` is taken out and plugged in again; a card that has no place is refused.
fn cards_go_and_return(net: &Net, a: &Guest, b: &Guest) {
    let waits = |is_there: &str| {
        a.shell(&format!(
            "n=0; while [ {is_there} -e /sys/class/net/eth2 ]; do sleep 0.1; n=$((n+1)); [ $n -lt 200 ]; done"
        ))
        .unwrap();
    };
    assert!(net.vm("attach", a, "c", &[]).unwrap().contains("in place"));
    assert!(net.vm("attach", a, "b", &[]).unwrap_err().contains("another machine uses"));
    assert!(net.vm("detach", a, "c", &[]).unwrap().contains("unplugged"));
    waits("");
    assert!(net.vm("detach", a, "c", &[]).unwrap_err().contains("no card on port c"));
    // QEMU has hung up. A busy switch may see that later than an attachment waits for it.
    net.await_free("c");
    net.vm("attach", a, "c", &["--queues", "2", "--mtu", "1400"]).unwrap();
    waits("!");
    assert_eq!(a.shell("cat /sys/class/net/eth2/mtu").unwrap().trim(), "1400");
    a.shell("ip address add 10.98.0.1/24 dev eth2 && ip link set eth2 up").unwrap();
    // The guest has one processor, and uses a second queue only if it is wanted.
    a.put(SET_QUEUES.as_bytes(), "/tmp/queues.py", 0o644).unwrap();
    let set = a.start(&["sh", "-c", &format!("{} /tmp/queues.py eth2 2 2>&1", python::command(""))]).unwrap();
    let set = set.wait(HANG).unwrap();
    assert_eq!(set.status, 0, "{}", set.text());
    assert_eq!(a.shell("cd /sys/class/net/eth2/queues && echo rx-*").unwrap().trim(), "rx-0 rx-1");
    wait_ping(net, a, "10.98.0.2");
    file_arrives(a, b, "10.98.0.2", || {});
    while a.monitor_command("device_add", serde_json::json!({ "driver": "pci-testdev" })).is_ok() {}
    let refused = net.vm("attach", a, "e", &[]).unwrap_err();
    assert!(refused.contains("no free place for a PCI device"), "{refused}");
    assert!(!String::from_utf8_lossy(&net.ask(&["show", "lan"]).stdout).lines().any(|line| line.starts_with("e ")));
}

/// The cards of both machines have the largest MTU. 65507 bytes of an echo are a packet of 65535 bytes.
fn largest_packets_pass_whole(net: &Net, a: &Guest, b: &Guest) {
    for guest in [a, b] {
        assert_eq!(guest.shell("cat /sys/class/net/eth2/mtu").unwrap().trim(), "65535");
    }
    let before = [a, b].map(reassembled);
    for size in ["60000", "65507"] {
        let pinged = a.run(&["ping", "-q", "-c", "5", "-i", "0.1", "-s", size, "-W", "5", "10.98.0.2"]).unwrap();
        let shown = || String::from_utf8_lossy(&net.ask(&["show", "lan"]).stdout).into_owned();
        assert_eq!(pinged.status, 0, "{size}: {}\n{}", pinged.text(), shown());
    }
    assert_eq!([a, b].map(reassembled), before, "the packets came in fragments");
}

fn ports_come_and_go(net: &Net, a: &Guest, b: &Guest) {
    let lost = |from: &Guest| from.run(&["ping", "-c", "1", "-W", "1", "10.99.0.2"]).unwrap().status != 0;
    net.ask(&["remove", "lan", "b"]);
    assert!(lost(a));
    net.ask(&["add", "lan", "b", "--mac", "52:54:00:99:00:02"]);
    wait_ping(net, a, "10.99.0.2");
    // A card is plugged into each running machine, on ports that are new.
    for (guest, port, address) in [(a, "c", "10.98.0.1"), (b, "d", "10.98.0.2")] {
        let mac = format!("52:54:00:98:00:0{}", &address[8..]);
        net.vm("attach", guest, port, &["--mac", &mac, "--mtu", "65535"]).unwrap();
        guest.shell("n=0; while [ ! -e /sys/class/net/eth2 ]; do sleep 0.1; n=$((n+1)); [ $n -lt 200 ]; done").unwrap();
        guest.shell(&format!("ip address add {address}/24 dev eth2 && ip link set eth2 up")).unwrap();
    }
    wait_ping(net, a, "10.98.0.2");
    largest_packets_pass_whole(net, a, b);
    file_arrives(a, b, "10.98.0.2", || {});
    cards_go_and_return(net, a, b);
    // The device of this card has no name: it is found by its socket.
    assert!(net.vm("attach", b, "b", &[]).unwrap().contains("in place"));
    let table = String::from_utf8_lossy(&net.ask(&["table", "lan"]).stdout).into_owned();
    assert!(table.contains("52:54:00:99:00:02") && table.contains("fixed"), "{table}");
}
