//! Gateways, and strangers who talk to them, for this crate's tests.

#[path = "../tests/common/ports.rs"]
mod ports;

use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use partywall::cluster::Name;
use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use quinn::{Endpoint, RecvStream, SendStream};
use rustls::RootCertStore;
use rustls::client::ResolvesClientCert;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::config::GatewayConfig;
use crate::peers::{Answer, PeerHost, PeerHosts, StreamCount};
use crate::tls::{HostCredentials, PROTOCOL};

/// How long anything may take before the test fails.
pub(crate) const HANG: Duration = Duration::from_secs(60);

pub(crate) fn name(text: &str) -> Name {
    Name::new(text).unwrap()
}

/// A folder with the certificates of hosts.
pub(crate) fn certificates(hosts: &[&str]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let hosts: Vec<_> = hosts.iter().map(|host| (*host).to_owned()).collect();
    crate::certificates::make(folder.path(), &hosts, 30).unwrap();
    folder
}

/// The configuration of a host whose certificate is in a folder.
pub(crate) fn config(folder: &Path, host: &str) -> GatewayConfig {
    let text = format!(
        "listen = '127.0.0.1:0'\naddress = 'x:1'\nca = 'ca.pem'\ncertificate = '{host}.pem'\nkey = '{host}.key'\n\
         [etcd]\nendpoints = ['http://x:1']\n"
    );
    let path = folder.join(format!("{host}.toml"));
    std::fs::write(&path, text).unwrap();
    GatewayConfig::read(&path).unwrap()
}

/// A gateway's connections, whose streams are answered by `answer`. It takes no connections until the test says so.
pub(crate) fn listening(folder: &Path, host: &str, answer: Box<Answer>) -> Arc<PeerHosts> {
    let config = config(folder, host);
    let credentials = HostCredentials::read(&config).unwrap();
    Arc::new(PeerHosts::listen(&config, credentials, answer).unwrap())
}

/// A gateway's connections, whose streams echo five bytes again and again.
pub(crate) fn echoing(folder: &Path, host: &str) -> Arc<PeerHosts> {
    let answer = |peer: Arc<PeerHost>, mut send: SendStream, mut receive: RecvStream| {
        tokio::spawn(async move {
            let _count = StreamCount::of(&peer);
            let mut bytes = [0; 5];
            while receive.read_exact(&mut bytes).await.is_ok() && send.write_all(&bytes).await.is_ok() {}
        });
    };
    listening(folder, host, Box::new(answer))
}

/// Has five bytes echoed; `false` if the stream has ended.
pub(crate) async fn is_echoed((send, receive): &mut (SendStream, RecvStream)) -> bool {
    let mut bytes = [0; 5];
    send.write_all(b"hello").await.is_ok() && receive.read_exact(&mut bytes).await.is_ok()
}

pub(crate) async fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < HANG, "it does not happen that {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Fails if something takes too long.
pub(crate) async fn in_time<T>(what: &str, happens: impl Future<Output = T>) -> T {
    match tokio::time::timeout(HANG, happens).await {
        Ok(done) => done,
        Err(_) => panic!("it does not happen that {what}"),
    }
}

/// A member of an etcd with no data at first. It ends when this is dropped.
pub(crate) struct TestEtcd {
    process: Child,
    pub(crate) url: String,
    _folder: tempfile::TempDir,
}

impl TestEtcd {
    /// An etcd with one member. `None`, with a note, if this machine has no etcd.
    pub(crate) async fn start() -> Option<Self> {
        Self::start_members(1).await?.pop()
    }

    /// An etcd with this many members.
    pub(crate) async fn start_members(count: usize) -> Option<Vec<Self>> {
        let url = || format!("http://127.0.0.1:{}", ports::free_port());
        let peers: Vec<String> = (0..count).map(|_| url()).collect();
        let all: Vec<String> = peers.iter().enumerate().map(|(n, peer)| format!("member{n}={peer}")).collect();
        let mut members = Vec::new();
        for (n, peer) in peers.iter().enumerate() {
            let (url, folder) = (url(), tempfile::tempdir().unwrap());
            let mut command = Command::new("etcd");
            command.args(["--name", &format!("member{n}"), "--data-dir"]).arg(folder.path());
            command.args(["--listen-client-urls", &url, "--advertise-client-urls", &url]);
            command.args(["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]);
            command.args(["--initial-cluster", &all.join(","), "--unsafe-no-fsync"]);
            let Ok(process) = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn() else {
                eprintln!("LEFT OUT: there is no etcd here (Debian: apt-get install etcd-server)");
                return None;
            };
            members.push(Self { process, url, _folder: folder });
        }
        for member in &mut members {
            let address = member.url.trim_start_matches("http://").to_owned();
            eventually("etcd answers", || {
                assert!(member.process.try_wait().unwrap().is_none(), "etcd has ended");
                TcpStream::connect(&address).is_ok()
            })
            .await;
        }
        Some(members)
    }

    /// A URL at which all that it answers arrives later. Requests are not delayed.
    pub(crate) async fn answering_late(&self, delay: Duration) -> String {
        let address = self.url.trim_start_matches("http://").to_owned();
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let (mut requests, mut to_client) = client.into_split();
                let etcd = tokio::net::TcpStream::connect(&address).await.unwrap();
                let (mut answers, mut to_etcd) = etcd.into_split();
                let (queue, mut queued) = tokio::sync::mpsc::unbounded_channel();
                tokio::spawn(async move { tokio::io::copy(&mut requests, &mut to_etcd).await });
                tokio::spawn(async move {
                    let mut bytes = vec![0; 64 << 10];
                    while let Ok(count @ 1..) = answers.read(&mut bytes).await {
                        let _ = queue.send((tokio::time::Instant::now() + delay, bytes[..count].to_vec()));
                    }
                });
                tokio::spawn(async move {
                    while let Some((time, bytes)) = queued.recv().await {
                        tokio::time::sleep_until(time).await;
                        let _ = to_client.write_all(&bytes).await;
                    }
                });
            }
        });
        url
    }

    /// A client of this member.
    pub(crate) async fn client(&self) -> etcd_client::Client {
        etcd_client::Client::connect([&self.url], None).await.unwrap()
    }

    /// Whether it has a key.
    pub(crate) async fn has(&self, key: &str) -> bool {
        let mut client = self.client().await;
        !client.get(key, None).await.unwrap().kvs().is_empty()
    }
}

impl Drop for TestEtcd {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

/// The certificate in a file.
fn chain(folder: &Path, host: &str) -> Vec<CertificateDer<'static>> {
    let all = CertificateDer::pem_file_iter(folder.join(format!("{host}.pem"))).unwrap();
    all.map(Result::unwrap).collect()
}

fn key(folder: &Path, host: &str) -> PrivateKeyDer<'static> {
    PrivateKeyDer::from_pem_file(folder.join(format!("{host}.key"))).unwrap()
}

/// What a client shows that is not a gateway: a certificate and a key, which need not belong together.
pub(crate) enum ShownCertificate<'a> {
    Nothing,
    Certificate { folder: &'a Path, of: &'a str, key_of: &'a str },
}

impl<'a> ShownCertificate<'a> {
    pub(crate) fn of(folder: &'a Path, host: &'a str) -> Self {
        Self::Certificate { folder, of: host, key_of: host }
    }
}

/// A client that is not a gateway. It trusts the authority in `trusted`, and sends from `from`.
pub(crate) fn stranger(trusted: &Path, shown: &ShownCertificate<'_>, from: &str) -> Endpoint {
    let mut roots = RootCertStore::empty();
    roots.add(chain(trusted, "ca").remove(0)).unwrap();
    let builder = rustls::ClientConfig::builder_with_provider(provider());
    let builder = builder.with_protocol_versions(&[&rustls::version::TLS13]).unwrap().with_root_certificates(roots);
    let mut tls = match shown {
        ShownCertificate::Nothing => builder.with_no_client_auth(),
        ShownCertificate::Certificate { folder, of, key_of } => {
            let signer = provider().key_provider.load_private_key(key(folder, key_of)).unwrap();
            let shown: Arc<dyn ResolvesClientCert> =
                Arc::new(SingleCertAndKey::from(CertifiedKey::new(chain(folder, of), signer)));
            builder.with_client_cert_resolver(shown)
        }
    };
    tls.alpn_protocols = vec![PROTOCOL.to_vec()];
    let mut endpoint = Endpoint::client(format!("{from}:0").parse().unwrap()).unwrap();
    let config = quinn::ClientConfig::new(Arc::new(QuicClientConfig::try_from(tls).unwrap()));
    endpoint.set_default_client_config(config);
    endpoint
}

/// A server that is not a gateway, with the certificate of a host. It accepts every client.
pub(crate) fn false_server(folder: &Path, host: &str) -> SocketAddr {
    let builder = rustls::ServerConfig::builder_with_provider(provider());
    let builder = builder.with_protocol_versions(&[&rustls::version::TLS13]).unwrap().with_no_client_auth();
    let mut tls = builder.with_single_cert(chain(folder, host), key(folder, host)).unwrap();
    tls.alpn_protocols = vec![PROTOCOL.to_vec()];
    let config = quinn::ServerConfig::with_crypto(Arc::new(QuicServerConfig::try_from(tls).unwrap()));
    let endpoint = Endpoint::server(config, "127.0.0.1:0".parse().unwrap()).unwrap();
    let address = endpoint.local_addr().unwrap();
    tokio::spawn(async move {
        let mut all = Vec::new();
        while let Some(incoming) = endpoint.accept().await {
            all.extend(incoming.await.ok());
        }
    });
    address
}
