//! Two hosts of a cluster on this machine: each has a broker and a gateway, and both have one etcd. All of them end with this value.

use std::{
    fs::{self, File},
    net::TcpStream,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use crate::{
    apps::site,
    broker::{self, BrokerProcess},
    error::{BenchError, During, Result},
    interrupt::Interrupt,
    process::GuardedChild,
};

/// The names of the hosts: of the side that connects, and of the side that accepts.
const NAMES: [&str; 2] = ["alpha", "beta"];
/// How long a program may take to be ready.
const PATIENCE: Duration = Duration::from_secs(30);

/// Any domain may connect to any domain of the other host. The gateway's user is the bench's own.
fn policy(host: &str) -> String {
    let user = rustix::process::getuid().as_raw();
    format!(
        "administrators = [{user}]\n[cluster]\nhost = \"{host}\"\nusers = [{user}]\n\
         [[join]]\ndomain = \"*\"\nusers = [\"*\"]\n\
         [[connect]]\nfrom = \"*\"\nto = \"*\"\nto_host = \"*\"\n\
         [[connect]]\nfrom = \"*\"\nfrom_host = \"*\"\nto = \"*\"\n"
    )
}

/// Two hosts that reach each other.
#[derive(Debug)]
pub(crate) struct TwoHosts {
    // Brokers end first, so that they do not log the ends of their gateways.
    brokers: [BrokerProcess; 2],
    gateways: [GuardedChild; 2],
    _etcd: GuardedChild,
}

impl TwoHosts {
    /// Starts them, with all files in `folder`.
    pub(crate) fn start(folder: &Path, interrupt: &Interrupt) -> Result<Self> {
        let gateway = broker::find("partywall-gateway")?;
        let made = Command::new(&gateway).arg("certificates").arg(folder).args(NAMES).stdout(Stdio::null()).status();
        if !made.during("making certificates")?.success() {
            return Err(BenchError::Transport(format!("{} makes no certificates", gateway.display())));
        }
        let (etcd, url) = start_etcd(folder, interrupt)?;
        let host = |name: &str| -> Result<(BrokerProcess, GuardedChild)> {
            let own = folder.join(name);
            fs::create_dir_all(&own).during("making the folder of a host")?;
            let broker = BrokerProcess::start_with(&own, &policy(name), interrupt)?;
            let gateway = start_gateway(&gateway, folder, name, &broker, &url)?;
            Ok((broker, gateway))
        };
        let [(first, from), (second, to)] = [host(NAMES[0])?, host(NAMES[1])?];
        Ok(Self { brokers: [first, second], gateways: [from, to], _etcd: etcd })
    }

    /// The brokers' sockets: of the side that connects, and of the side that accepts.
    pub(crate) fn brokers(&self) -> [PathBuf; 2] {
        [0, 1].map(|at| self.brokers[at].socket().to_owned())
    }

    /// Fails if a gateway has ended.
    pub(crate) fn check(&mut self) -> Result<()> {
        match self.gateways.iter_mut().find_map(GuardedChild::ended) {
            Some(end) => Err(BenchError::Transport(format!("a gateway has ended: {end}"))),
            None => Ok(()),
        }
    }
}

/// A program that ends with the bench, however that ends.
pub(crate) fn bound(program: &Path) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "TERM"]).arg(program).stdin(Stdio::null()).stdout(Stdio::null());
    command
}

/// An etcd, and its URL.
fn start_etcd(folder: &Path, interrupt: &Interrupt) -> Result<(GuardedChild, String)> {
    let program = site::find("etcd", "etcd-server")?;
    let (port, peers) = (site::free_ports()?, format!("http://127.0.0.1:{}", site::free_ports()?));
    let url = format!("http://127.0.0.1:{port}");
    let mut command = bound(&program);
    command.arg("--data-dir").arg(folder.join("etcd")).args(["--unsafe-no-fsync", "--listen-client-urls", &url]);
    command.args(["--advertise-client-urls", &url, "--listen-peer-urls", &peers]);
    command.args(["--initial-advertise-peer-urls", &peers, "--initial-cluster", &format!("default={peers}")]);
    let mut etcd = GuardedChild::spawn(command.stderr(Stdio::null()))?;
    let begin = Instant::now();
    while TcpStream::connect(("127.0.0.1", port)).is_err() {
        interrupt.check()?;
        let late = || (begin.elapsed() > PATIENCE).then(|| "it does not listen".to_owned());
        if let Some(end) = etcd.ended().or_else(late) {
            return Err(BenchError::Transport(format!("etcd: {end}")));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok((etcd, url))
}

/// The gateway of a host, with its defaults. What it logs is in the host's folder.
fn start_gateway(
    program: &Path,
    folder: &Path,
    host: &str,
    broker: &BrokerProcess,
    etcd: &str,
) -> Result<GuardedChild> {
    let port = site::free_ports()?;
    let config = folder.join(format!("{host}.toml"));
    let text = format!(
        "broker = '{}'\nlisten = '127.0.0.1:{port}'\naddress = '127.0.0.1:{port}'\nca = 'ca.pem'\ncertificate = '{host}.pem'\n\
         key = '{host}.key'\n[etcd]\nendpoints = ['{etcd}']\n",
        broker.socket().display()
    );
    fs::write(&config, text).during("writing the configuration of a gateway")?;
    let log = File::create(folder.join(host).join("gateway.log")).during("making the log of a gateway")?;
    let mut command = bound(program);
    GuardedChild::spawn(command.arg("--config").arg(config).stderr(log))
}
