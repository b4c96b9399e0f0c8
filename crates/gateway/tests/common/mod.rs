//! Hosts of a cluster on one machine: a broker each, a gateway each, and an etcd for all.

mod ports;
pub(crate) mod traffic;
pub(crate) mod wires;

use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use partywall::{Domain, Error, Refusal, Stream};
use partywall_daemon::{Broker, Config};
use tempfile::TempDir;
use wires::{Node, Wires};

pub(crate) use ports::free_port;

/// How long anything may take before the test fails.
pub(crate) const HANG: Duration = Duration::from_secs(60);

/// A process that is killed when the test is done with it.
pub(crate) struct Process(Child);

impl Process {
    pub(crate) fn start(command: &mut Command) -> Self {
        Self(command.spawn().unwrap_or_else(|e| panic!("cannot start {command:?}: {e}")))
    }

    pub(crate) fn id(&self) -> u32 {
        self.0.id()
    }

    pub(crate) fn signal(&self, name: &str) {
        let sent = Command::new("kill").args([&format!("-{name}"), &self.id().to_string()]).status().unwrap();
        assert!(sent.success());
    }

    pub(crate) fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }

    /// How it has ended, if it has.
    fn ended(&mut self) -> Option<ExitStatus> {
        self.0.try_wait().unwrap()
    }

    /// Waits until it has ended, and returns whether it has succeeded.
    pub(crate) fn wait(&mut self) -> bool {
        let mut status = None;
        eventually("a process ends", || {
            status = self.ended();
            status.is_some()
        });
        status.unwrap().success()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Waits until something holds.
pub(crate) fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < HANG, "it does not happen that {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// An etcd with its own folder.
pub(crate) struct Etcd {
    pub(crate) process: Process,
    pub(crate) url: String,
    /// What the configuration of a gateway needs besides.
    more: String,
    /// The command that has started it.
    command: Vec<String>,
    data: PathBuf,
    /// Where this process can connect to it; `None` if it is in another network.
    port: Option<u16>,
}

impl Etcd {
    /// `None`, with a note, if this machine has no etcd.
    pub(crate) fn start(folder: &Path) -> Option<Self> {
        Self::start_as(folder, "http://127.0.0.1", &[], String::new(), &[])
    }

    /// The same with TLS: the folder has the certificates of `localhost` and `client`.
    pub(crate) fn start_with_certificates(folder: &Path) -> Option<Self> {
        let file = |name: &str| folder.join(name).display().to_string();
        let [ca, certificate, key] = ["ca.pem", "localhost.pem", "localhost.key"].map(file);
        let options = ["--client-cert-auth", "--trusted-ca-file", &ca, "--cert-file", &certificate, "--key-file", &key];
        let [certificate, key] = ["client.pem", "client.key"].map(file);
        let more = format!("ca = '{ca}'\ncertificate = '{certificate}'\nkey = '{key}'\n");
        Self::start_as(folder, "https://localhost", &options, more, &[])
    }

    /// The same in its place of a network.
    pub(crate) fn start_on(wires: &Wires, folder: &Path) -> Option<Self> {
        let host = format!("http://{}", Node::Etcd.address());
        Self::start_as(folder, &host, &[], String::new(), &wires.enter(Node::Etcd))
    }

    fn start_as(folder: &Path, host: &str, options: &[&str], more: String, enter: &[String]) -> Option<Self> {
        if Command::new("etcd").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_err() {
            eprintln!("LEFT OUT: there is no etcd here (Debian: apt-get install etcd-server)");
            return None;
        }
        let (port, peers, data) = (free_port(), free_port(), folder.join("etcd"));
        let (url, peers) = (format!("{host}:{port}"), format!("http://127.0.0.1:{peers}"));
        let mut command = enter.to_vec();
        command.extend(["etcd", "--data-dir", &data.display().to_string()].map(str::to_owned));
        let (listen, alone) = (url.replace("localhost", "127.0.0.1"), format!("default={peers}"));
        command.extend(["--listen-client-urls", &listen, "--advertise-client-urls", &url].map(str::to_owned));
        command.extend(["--listen-peer-urls", &peers, "--initial-advertise-peer-urls", &peers].map(str::to_owned));
        command.extend(["--initial-cluster", &alone, "--unsafe-no-fsync"].map(str::to_owned));
        command.extend(options.iter().map(|option| (*option).to_owned()));
        let port = enter.is_empty().then_some(port);
        let mut etcd = Self { process: Self::run(&command), url, more, command, data, port };
        etcd.wait();
        Some(etcd)
    }

    fn run(command: &[String]) -> Process {
        let mut process = Command::new(&command[0]);
        Process::start(process.args(&command[1..]).stdout(Stdio::null()).stderr(Stdio::null()))
    }

    fn wait(&mut self) {
        let Some(port) = self.port else { return };
        eventually("etcd answers", || {
            if let Some(status) = self.process.ended() {
                panic!("etcd at port {port} has ended: {status}");
            }
            std::net::TcpStream::connect(("127.0.0.1", port)).is_ok()
        });
    }

    /// Starts it after it was killed, with the data that it has.
    pub(crate) fn start_again(&mut self) {
        self.process = Self::run(&self.command);
        self.wait();
    }

    /// How many leases the keys of the directory belong to, except those that no host owns.
    pub(crate) fn leases(&self) -> usize {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let found = runtime.block_on(async {
            let mut client = etcd_client::Client::connect([&self.url], None).await.unwrap();
            let options = etcd_client::GetOptions::new().with_prefix();
            client.get("/partywall/", Some(options)).await.unwrap()
        });
        let leases: std::collections::BTreeSet<i64> = found.kvs().iter().map(etcd_client::KeyValue::lease).collect();
        leases.into_iter().filter(|lease| *lease != 0).count()
    }

    /// Loses its data, while it does not run.
    pub(crate) fn lose_data(&self) {
        std::fs::remove_dir_all(&self.data).unwrap();
    }

    /// Writes a key, as any other client of etcd could.
    pub(crate) fn put(&self, key: &str, value: &str) {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        runtime.block_on(async {
            let mut client = etcd_client::Client::connect([&self.url], None).await.unwrap();
            client.put(key, value, None).await.unwrap();
        });
    }
}

/// A host: a broker and a gateway.
pub(crate) struct Host {
    pub(crate) name: &'static str,
    broker: Option<Broker>,
    broker_config: Config,
    pub(crate) gateway: Option<Process>,
    pub(crate) config: PathBuf,
    pub(crate) port: u16,
    /// The words before the gateway's command.
    pub(crate) enter: Vec<String>,
}

impl Host {
    pub(crate) fn join(&self, domain: &str) -> Domain {
        self.try_join(domain).unwrap()
    }

    pub(crate) fn try_join(&self, domain: &str) -> partywall::Result<Domain> {
        Domain::builder().name(domain).broker(self.broker_path()).join()
    }

    /// Changes the configuration of the gateway, which does not run.
    pub(crate) fn configure(&self, from: &str, to: &str) {
        let text = std::fs::read_to_string(&self.config).unwrap();
        assert!(text.contains(from), "{text}");
        std::fs::write(&self.config, text.replace(from, to)).unwrap();
    }

    /// Starts the gateway again, with further settings.
    pub(crate) fn reconfigure(&mut self, settings: &str) {
        let text = std::fs::read_to_string(&self.config).unwrap();
        std::fs::write(&self.config, format!("{settings}{text}")).unwrap();
        self.restart_gateway();
    }

    /// Has the gateway end, and starts the next one.
    pub(crate) fn restart_gateway(&mut self) {
        let gateway = self.gateway.as_mut().unwrap();
        gateway.signal("TERM");
        assert!(gateway.wait());
        self.start_gateway();
    }

    /// Ends the broker, and starts the next one at the same place.
    pub(crate) fn restart_broker(&mut self) {
        // Its socket is free when it has ended.
        self.broker = None;
        self.broker = Some(Broker::start(&self.broker_config).unwrap());
    }

    pub(crate) fn broker_path(&self) -> &Path {
        &self.broker_config.socket
    }

    pub(crate) fn start_gateway(&mut self) {
        let mut command = wires::command(&self.enter, env!("CARGO_BIN_EXE_partywall-gateway"));
        command.arg("--config").arg(&self.config).stdout(Stdio::null());
        if std::env::var_os("PARTYWALL_TEST_LOG").is_none() {
            command.stderr(Stdio::null());
        }
        self.gateway = Some(Process::start(&mut command));
    }

    /// The list of the cluster, as the gateway shows it; empty while there is no gateway.
    pub(crate) fn list(&self) -> String {
        let viewer = self.try_join(&format!("viewer-{}", std::process::id()));
        let list = viewer.and_then(|viewer| viewer.connect("gateway:directory"));
        let mut text = String::new();
        let read = list.map(|mut stream: Stream| {
            stream.set_read_timeout(Some(Duration::from_secs(5)));
            stream.read_to_string(&mut text)
        });
        if matches!(read, Ok(Ok(_))) { text } else { String::new() }
    }

    /// The list of the cluster, as soon as the gateway shows it.
    pub(crate) fn shown(&self) -> String {
        let mut text = String::new();
        eventually(&format!("the gateway of {} shows its list", self.name), || {
            text = self.list();
            !text.is_empty()
        });
        text
    }

    pub(crate) fn knows(&self, text: &str) -> bool {
        self.list().contains(text)
    }
}

/// Hosts with an etcd.
pub(crate) struct Cluster {
    pub(crate) hosts: Vec<Host>,
    pub(crate) etcd: Etcd,
    pub(crate) folder: TempDir,
}

/// Clients may connect everywhere, unless a test says otherwise.
pub(crate) const OPEN: &str = "
[[connect]]
from = '*'
to = '*'
[[connect]]
from = '*'
to = '*'
to_host = '*'
[[connect]]
from = '*'
from_host = '*'
to = '*'
";

impl Cluster {
    /// Hosts with these names and rules, which know each other. `None`, with a note, if this machine has no etcd.
    pub(crate) fn start(hosts: &[(&'static str, &str)]) -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let etcd = Etcd::start(folder.path())?;
        Some(Self::start_in(folder, etcd, hosts))
    }

    /// The same with an etcd that runs already.
    pub(crate) fn start_with(etcd: Etcd, hosts: &[(&'static str, &str)]) -> Self {
        Self::start_in(tempfile::tempdir().unwrap(), etcd, hosts)
    }

    /// The hosts `alpha` and `beta` of a network, in which etcd is a third. Their leases are this long.
    pub(crate) fn start_on(wires: &Wires, seconds: u32) -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let etcd = Etcd::start_on(wires, folder.path())?;
        let mut cluster = Self::prepare(folder, etcd, &[("alpha", OPEN), ("beta", OPEN)]);
        for (host, node) in cluster.hosts.iter_mut().zip([Node::Alpha, Node::Beta]) {
            host.enter = wires.enter(node);
            host.configure("127.0.0.1", node.address());
            host.configure("ttl = 3\n", &format!("ttl = {seconds}\n"));
        }
        cluster.start_gateways();
        Some(cluster)
    }

    /// The hosts `alpha` and `beta`, whose leases are this long.
    pub(crate) fn start_with_leases(seconds: u32) -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let etcd = Etcd::start(folder.path())?;
        let mut cluster = Self::prepare(folder, etcd, &[("alpha", OPEN), ("beta", OPEN)]);
        cluster.hosts.iter().for_each(|host| host.configure("ttl = 3\n", &format!("ttl = {seconds}\n")));
        cluster.start_gateways();
        Some(cluster)
    }

    fn start_in(folder: TempDir, etcd: Etcd, hosts: &[(&'static str, &str)]) -> Self {
        let mut cluster = Self::prepare(folder, etcd, hosts);
        cluster.start_gateways();
        cluster
    }

    /// Hosts whose gateways do not run yet.
    fn prepare(folder: TempDir, etcd: Etcd, hosts: &[(&'static str, &str)]) -> Self {
        let names: Vec<String> = hosts.iter().map(|(name, _)| (*name).to_owned()).collect();
        partywall_gateway::certificates::make(folder.path(), &names, 30).unwrap();
        let mut cluster = Self { hosts: Vec::new(), etcd, folder };
        for (name, rules) in hosts {
            let host = cluster.host(name, rules);
            cluster.hosts.push(host);
        }
        cluster
    }

    /// Starts the gateways, and waits until they know each other.
    fn start_gateways(&mut self) {
        for host in &mut self.hosts {
            host.start_gateway();
        }
        let all = format!("\"hosts\":{}", self.hosts.len());
        for host in &self.hosts {
            eventually("all hosts are known", || host.knows(&all) && host.knows("\"fresh\":true"));
        }
    }

    /// Prepares a host, whose gateway does not run yet.
    pub(crate) fn host(&self, name: &'static str, rules: &str) -> Host {
        let folder = self.folder.path();
        let uid = std::process::Command::new("id").arg("-u").output().unwrap();
        let uid = String::from_utf8(uid.stdout).unwrap();
        let uid = uid.trim();
        let policy = folder.join(format!("{name}.policy"));
        // This user is no administrator, since rules do not bind those.
        let text = format!(
            "administrators = [4242]\n[cluster]\nhost = '{name}'\nusers = [{uid}]\n[[join]]\ndomain = '*'\nusers = '*'\n{rules}"
        );
        std::fs::write(&policy, text.replace("users = '*'", "users = ['*']")).unwrap();
        let broker_config = Config::new(folder.join(format!("{name}.sock"))).policy_file(&policy);
        let broker = Some(Broker::start(&broker_config).unwrap());
        let (port, config) = (free_port(), folder.join(format!("{name}.toml")));
        let text = format!(
            "broker = '{}'\nlisten = '127.0.0.1:{port}'\naddress = '127.0.0.1:{port}'\nca = 'ca.pem'\ncertificate = '{name}.pem'\n\
             key = '{name}.key'\n[etcd]\nendpoints = ['{}']\nttl = 3\n{}",
            broker_config.socket.display(),
            self.etcd.url,
            self.etcd.more,
        );
        std::fs::write(&config, text).unwrap();
        Host { name, broker, broker_config, gateway: None, config, port, enter: Vec::new() }
    }

    /// The first two hosts.
    pub(crate) fn two(&self) -> (&Host, &Host) {
        (&self.hosts[0], &self.hosts[1])
    }
}

/// Connects as soon as the directory has the domain.
pub(crate) fn connect(domain: &Domain, target: &str) -> Stream {
    connect_unless(domain, target, |error| {
        matches!(
            error,
            Error::Refused { code: Refusal::NoSuchDomain | Refusal::NoSuchService | Refusal::OutOfResources, .. }
        )
    })
}

/// Connects to a domain that the directory has all the time. Only a gateway that does not answer in time, as on a loaded machine, is asked again.
pub(crate) fn connect_known(domain: &Domain, target: &str) -> Stream {
    connect_unless(domain, target, |error| matches!(error, Error::Refused { code: Refusal::OutOfResources, .. }))
}

/// Connects as soon as the broker, the gateway and the domain are there again after a restart.
pub(crate) fn connect_again(domain: &Domain, target: &str) -> Stream {
    connect_unless(domain, target, |_| true)
}

fn connect_unless(domain: &Domain, target: &str, may_change: impl Fn(&Error) -> bool) -> Stream {
    let mut connected = None;
    eventually(&format!("{target} is reached"), || match domain.connect(target) {
        Ok(stream) => {
            connected = Some(stream);
            true
        }
        Err(error) => {
            assert!(may_change(&error), "{error}");
            false
        }
    });
    connected.unwrap()
}

/// Serves the service `echo` of a domain.
pub(crate) fn echo(host: &Host, name: &str) -> Domain {
    let domain = host.join(name);
    let mut listener = domain.bind("echo").unwrap();
    std::thread::spawn(move || {
        while let Ok((mut stream, _)) = listener.accept() {
            std::thread::spawn(move || {
                let (read, write) = stream.halves().unwrap();
                if std::io::copy(read, write).is_ok() {
                    write.finish();
                }
            });
        }
    });
    domain
}

pub(crate) fn assert_echoes(mut stream: Stream) {
    stream.write_all(b"hello").unwrap();
    let mut hello = [0; 5];
    stream.read_exact(&mut hello).unwrap();
    assert_eq!(&hello, b"hello");
}
