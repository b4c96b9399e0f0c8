//! Hosts of a cluster on one machine: a broker each, a gateway each, and an etcd for all.

use std::io::Read;
use std::net::{TcpListener, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use partywall::{Domain, Error, Refusal, Stream};
use partywall_daemon::{Broker, Config};
use tempfile::TempDir;

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

    /// Waits until it has ended, and returns whether it has succeeded.
    pub(crate) fn wait(&mut self) -> bool {
        let mut status = None;
        eventually("a process ends", || {
            status = self.0.try_wait().unwrap();
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

pub(crate) fn free_tcp_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn free_udp_port() -> u16 {
    UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// An etcd with its own folder.
pub(crate) struct Etcd {
    pub(crate) process: Process,
    pub(crate) url: String,
    /// What the configuration of a gateway needs besides.
    more: String,
    port: u16,
}

impl Etcd {
    /// `None`, with a note, if this machine has no etcd.
    pub(crate) fn start(folder: &Path) -> Option<Self> {
        Self::start_as(folder, "http://127.0.0.1", &[], String::new())
    }

    /// The same with TLS: the folder has the certificates of `localhost` and `client`.
    pub(crate) fn start_with_certificates(folder: &Path) -> Option<Self> {
        let file = |name: &str| folder.join(name).display().to_string();
        let [ca, certificate, key] = ["ca.pem", "localhost.pem", "localhost.key"].map(file);
        let options = ["--client-cert-auth", "--trusted-ca-file", &ca, "--cert-file", &certificate, "--key-file", &key];
        let [certificate, key] = ["client.pem", "client.key"].map(file);
        let more = format!("ca = '{ca}'\ncertificate = '{certificate}'\nkey = '{key}'\n");
        Self::start_as(folder, "https://localhost", &options, more)
    }

    fn start_as(folder: &Path, host: &str, options: &[&str], more: String) -> Option<Self> {
        if Command::new("etcd").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_err() {
            eprintln!("LEFT OUT: there is no etcd here (Debian: apt-get install etcd-server)");
            return None;
        }
        let (port, peers) = (free_tcp_port(), free_tcp_port());
        let (url, peers) = (format!("{host}:{port}"), format!("http://127.0.0.1:{peers}"));
        let mut command = Command::new("etcd");
        command
            .arg("--data-dir")
            .arg(folder.join("etcd"))
            .args(["--listen-client-urls", &url.replace("localhost", "127.0.0.1"), "--advertise-client-urls", &url])
            .args(options)
            .args(["--listen-peer-urls", &peers, "--initial-advertise-peer-urls", &peers])
            .args(["--initial-cluster", &format!("default={peers}"), "--unsafe-no-fsync"])
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let etcd = Self { process: Process::start(&mut command), url, more, port };
        eventually("etcd answers", || std::net::TcpStream::connect(("127.0.0.1", etcd.port)).is_ok());
        Some(etcd)
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
}

impl Host {
    pub(crate) fn join(&self, domain: &str) -> Domain {
        self.try_join(domain).unwrap()
    }

    pub(crate) fn try_join(&self, domain: &str) -> partywall::Result<Domain> {
        Domain::builder().name(domain).broker(self.broker_path()).join()
    }

    /// Starts the gateway again, with further settings.
    pub(crate) fn reconfigure(&mut self, settings: &str) {
        let text = std::fs::read_to_string(&self.config).unwrap();
        std::fs::write(&self.config, format!("{settings}{text}")).unwrap();
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
        let mut command = Command::new(env!("CARGO_BIN_EXE_partywall-gateway"));
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

    fn start_in(folder: TempDir, etcd: Etcd, hosts: &[(&'static str, &str)]) -> Self {
        let names: Vec<String> = hosts.iter().map(|(name, _)| (*name).to_owned()).collect();
        partywall_gateway::certificates::make(folder.path(), &names, 30).unwrap();
        let mut cluster = Self { hosts: Vec::new(), etcd, folder };
        for (name, rules) in hosts {
            let host = cluster.host(name, rules);
            cluster.hosts.push(host);
        }
        for host in &mut cluster.hosts {
            host.start_gateway();
        }
        let all = format!("\"hosts\":{}", cluster.hosts.len());
        for host in &cluster.hosts {
            eventually("all hosts are known", || host.knows(&all) && host.knows("\"fresh\":true"));
        }
        cluster
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
        let (port, config) = (free_udp_port(), folder.join(format!("{name}.toml")));
        let text = format!(
            "broker = '{}'\nlisten = '127.0.0.1:{port}'\naddress = '127.0.0.1:{port}'\nca = 'ca.pem'\ncertificate = '{name}.pem'\n\
             key = '{name}.key'\n[etcd]\nendpoints = ['{}']\nttl = 3\n{}",
            broker_config.socket.display(),
            self.etcd.url,
            self.etcd.more,
        );
        std::fs::write(&config, text).unwrap();
        Host { name, broker, broker_config, gateway: None, config, port }
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
