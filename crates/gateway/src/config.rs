//! The configuration file of the gateway.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::num::{NonZeroU16, NonZeroUsize};
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::GatewayError;

/// Every key of a configuration file, explained.
///
/// ```
/// use partywall_gateway::config::{GatewayConfig, SAMPLE_CONFIG};
///
/// assert_eq!(GatewayConfig::parse(SAMPLE_CONFIG)?.stream_window, 1 << 20);
/// # Ok::<(), toml::de::Error>(())
/// ```
pub const SAMPLE_CONFIG: &str = include_str!("../gateway.toml");

/// Where the gateway listens, which certificate it has, and where the directory is.
///
/// ```
/// use partywall_gateway::config::GatewayConfig;
///
/// let config = GatewayConfig::parse("
/// listen = '0.0.0.0:7411'
/// address = 'alpha.example:7411'
/// ca = '/etc/partywall/cluster/ca.pem'
/// certificate = '/etc/partywall/cluster/alpha.pem'
/// key = '/etc/partywall/cluster/alpha.key'
/// [etcd]
/// endpoints = ['http://127.0.0.1:2379']
/// ")?;
/// assert_eq!((config.domain.as_str(), config.etcd.ttl), ("gateway", 5));
/// # Ok::<(), toml::de::Error>(())
/// ```
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GatewayConfig {
    /// The socket of this host's broker; by default that of the library.
    #[serde(default)]
    pub broker: Option<PathBuf>,
    /// The domain of the gateway, as in `[cluster]` of the broker's policy.
    #[serde(default = "default_domain")]
    pub domain: String,
    /// The UDP address to listen on for other gateways.
    pub listen: SocketAddr,
    /// The address by which other hosts reach this one.
    pub address: String,
    /// The certificates of the authority whose hosts are trusted, as PEM.
    pub ca: PathBuf,
    /// The certificate of this host, whose only DNS name is the host's name in the cluster, as PEM.
    pub certificate: PathBuf,
    /// Its key, as PEM.
    pub key: PathBuf,
    /// Addresses of hosts that differ from those in the directory.
    #[serde(default)]
    pub peers: BTreeMap<String, String>,
    /// Streams that one other host may have open to this one.
    #[serde(default = "default_streams")]
    pub streams_per_host: u32,
    /// Bytes that another host may send on a stream before its reader has read them.
    #[serde(default = "default_window")]
    pub stream_window: u32,
    /// Threads that carry streams; by default as many as half of the processors.
    #[serde(default)]
    pub threads: Option<NonZeroU16>,
    /// Where metrics are served, if they are.
    #[serde(default)]
    pub metrics: Option<MetricsConfig>,
    /// The directory of the cluster.
    pub etcd: EtcdConfig,
}

/// Where metrics are served.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MetricsConfig {
    /// A loopback port, such as `127.0.0.1:9465`.
    pub listen: SocketAddr,
}

/// Where the directory is.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EtcdConfig {
    /// The members of etcd, such as `https://10.0.0.1:2379`. One is used until it fails, and then the next.
    pub endpoints: Vec<String>,
    /// The authority of etcd's certificates, as PEM.
    #[serde(default)]
    pub ca: Option<PathBuf>,
    /// The certificate of this client, as PEM.
    #[serde(default)]
    pub certificate: Option<PathBuf>,
    /// Its key, as PEM.
    #[serde(default)]
    pub key: Option<PathBuf>,
    /// The user of etcd.
    #[serde(default)]
    pub user: Option<String>,
    /// A file with the user's password.
    #[serde(default)]
    pub password_file: Option<PathBuf>,
    /// What all keys begin with.
    #[serde(default = "default_prefix")]
    pub prefix: String,
    /// Seconds after which the names of a host that has died vanish.
    #[serde(default = "default_ttl")]
    pub ttl: u16,
}

fn default_domain() -> String {
    "gateway".to_owned()
}

fn default_streams() -> u32 {
    1024
}

fn default_window() -> u32 {
    1 << 20
}

fn default_prefix() -> String {
    "/partywall/".to_owned()
}

fn default_ttl() -> u16 {
    5
}

impl GatewayConfig {
    /// Reads the text of a configuration.
    ///
    /// # Errors
    /// The error shows the line and the fault.
    pub fn parse(text: &str) -> Result<Self, toml::de::Error> {
        let config: Self = toml::from_str(text)?;
        let wrong = |reason: &str| Err(serde::de::Error::custom(reason));
        if config.etcd.endpoints.is_empty() {
            return wrong("`endpoints` of [etcd] names no member of etcd");
        }
        if !(2..=300).contains(&config.etcd.ttl) {
            return wrong("`ttl` of [etcd] is 2 to 300 seconds");
        }
        if !(1 << 14..=1 << 28).contains(&config.stream_window) {
            return wrong("`stream_window` is 16384 to 268435456 bytes");
        }
        if config.metrics.as_ref().is_some_and(|metrics| !metrics.listen.ip().is_loopback()) {
            return wrong("`listen` of [metrics] is a loopback address: metrics are neither encrypted nor protected");
        }
        if config.etcd.certificate.is_some() != config.etcd.key.is_some() {
            return wrong("[etcd] has a certificate or a key alone");
        }
        Ok(config)
    }

    /// The threads that carry streams.
    pub(crate) fn threads(&self) -> usize {
        let processors = std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
        thread_count(self.threads, processors)
    }

    /// Reads a configuration file. Paths in it are relative to its folder.
    ///
    /// # Errors
    /// [`GatewayError::File`] or [`GatewayError::Config`].
    pub fn read(path: &Path) -> Result<Self, GatewayError> {
        let text = read(path)?;
        let mut config = Self::parse(&text)
            .map_err(|error| GatewayError::Config { path: path.to_owned(), reason: error.to_string() })?;
        let folder = path.parent().unwrap_or(Path::new(""));
        let etcd = &mut config.etcd;
        let optional = [&mut etcd.ca, &mut etcd.certificate, &mut etcd.key, &mut etcd.password_file];
        for file in [&mut config.ca, &mut config.certificate, &mut config.key] {
            *file = folder.join(&*file);
        }
        for file in optional.into_iter().flatten() {
            *file = folder.join(&*file);
        }
        Ok(config)
    }
}

/// The threads that carry streams, as many as the file says. Otherwise every second processor has one, and at least one has: the others are
/// for the programs at the ends of the streams.
fn thread_count(chosen: Option<NonZeroU16>, processors: NonZeroUsize) -> usize {
    chosen.map_or(processors.get().div_ceil(2), |threads| usize::from(threads.get()))
}

/// Reads a text file.
pub(crate) fn read(path: &Path) -> Result<String, GatewayError> {
    std::fs::read_to_string(path).map_err(|source| GatewayError::File { doing: "read", path: path.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = "listen = '0.0.0.0:1'\naddress = 'a:1'\nca = 'ca'\ncertificate = 'c'\nkey = 'k'\n";

    #[test]
    fn sample_shows_every_key_with_its_default() {
        let is_key =
            |line: &str| line.starts_with('[') || line.split_once(" = ").is_some_and(|(key, _)| !key.contains(' '));
        let shown = |line: &str| line.strip_prefix("# ").filter(|rest| is_key(rest)).unwrap_or(line).to_owned();
        let whole: Vec<String> = SAMPLE_CONFIG.lines().map(shown).collect();
        let (sample, full) =
            (GatewayConfig::parse(SAMPLE_CONFIG).unwrap(), GatewayConfig::parse(&whole.join("\n")).unwrap());
        assert_eq!(full.domain, sample.domain);
        assert_eq!((full.streams_per_host, full.stream_window), (sample.streams_per_host, sample.stream_window));
        assert_eq!((&full.etcd.prefix, full.etcd.ttl), (&sample.etcd.prefix, sample.etcd.ttl));
        assert_eq!((full.threads(), sample.threads.is_none()), (1, true));
        assert!(full.broker.is_some() && full.metrics.is_some() && full.peers.len() == 1);
        let etcd = &full.etcd;
        assert!(
            etcd.certificate.is_some() && etcd.key.is_some() && etcd.user.is_some() && etcd.password_file.is_some()
        );
    }

    #[test]
    fn threads_are_half_of_the_processors_unless_the_file_says() {
        let count = |chosen, processors| thread_count(NonZeroU16::new(chosen), NonZeroUsize::new(processors).unwrap());
        assert_eq!([1, 2, 3, 4, 64].map(|processors| count(0, processors)), [1, 1, 2, 2, 32]);
        assert_eq!([1, 64].map(|processors| count(7, processors)), [7, 7]);
    }

    #[test]
    fn invalid_settings_are_refused_with_the_reason() {
        for (more, reason) in [
            ("[etcd]\nendpoints = []", "names no member"),
            ("[etcd]\nendpoints = ['http://x:1']\nttl = 1", "2 to 300"),
            ("stream_window = 1\n[etcd]\nendpoints = ['http://x:1']", "stream_window"),
            ("[etcd]\nendpoints = ['http://x:1']\nkey = 'k'", "alone"),
            ("[metrics]\nlisten = '0.0.0.0:1'\n[etcd]\nendpoints = ['http://x:1']", "loopback"),
            ("colour = 1\n[etcd]\nendpoints = ['http://x:1']", "unknown field"),
        ] {
            let error = GatewayConfig::parse(&format!("{FILE}{more}")).unwrap_err().to_string();
            assert!(error.contains(reason), "{error}");
        }
    }
}
