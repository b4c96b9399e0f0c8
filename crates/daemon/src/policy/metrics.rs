//! Where metrics are served: `[metrics]` of the file, and `partywalld --metrics`.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

use serde::Deserialize;

/// A loopback port, or the path of a UNIX socket. No other address: every client that reaches it reads the metrics.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MetricsAddress {
    /// A port of this host alone.
    Loopback(SocketAddr),
    /// A socket that the broker's user and group may connect to.
    Unix(PathBuf),
}

impl FromStr for MetricsAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.starts_with('/') {
            return Ok(Self::Unix(text.into()));
        }
        match text.parse::<SocketAddr>() {
            Ok(address) if address.ip().is_loopback() => Ok(Self::Loopback(address)),
            Ok(_) => Err("metrics are served to this host only, as they are neither encrypted nor protected: write a loopback address \
                          such as 127.0.0.1:9464, and put a proxy before it for others"
                .into()),
            Err(_) => Err("write a loopback address such as 127.0.0.1:9464, or the absolute path of a UNIX socket".into()),
        }
    }
}

impl fmt::Display for MetricsAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Loopback(address) => write!(f, "http://{address}/metrics"),
            Self::Unix(path) => write!(f, "{}", path.display()),
        }
    }
}

/// The table `[metrics]`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct MetricsTable {
    #[serde(deserialize_with = "from_text")]
    pub(super) listen: MetricsAddress,
}

fn from_text<'de, D: serde::Deserializer<'de>>(from: D) -> Result<MetricsAddress, D::Error> {
    String::deserialize(from)?.parse().map_err(serde::de::Error::custom)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::Policy;

    #[test]
    fn metrics_are_served_on_loopback_and_unix_sockets_only() {
        for right in ["127.0.0.1:9464", "[::1]:0", "/run/partywall/metrics.sock"] {
            assert!(right.parse::<MetricsAddress>().is_ok(), "{right}");
        }
        for bad in ["0.0.0.0:9464", "[::]:9464", "192.0.2.1:80"] {
            assert!(bad.parse::<MetricsAddress>().unwrap_err().contains("this host only"), "{bad}");
        }
        for bad in ["", "9464", "localhost:9464", "run/metrics.sock"] {
            assert!(bad.parse::<MetricsAddress>().unwrap_err().contains("127.0.0.1:9464"), "{bad}");
        }
        let policy = Policy::parse("[metrics]\nlisten = \"127.0.0.1:9464\"\n").unwrap();
        assert_eq!(policy.metrics(), Some(&MetricsAddress::Loopback("127.0.0.1:9464".parse().unwrap())));
        let error = Policy::parse("[metrics]\nlisten = \"0.0.0.0:1\"\n").unwrap_err().to_string();
        assert!(error.contains("this host only") && error.contains("line 2"), "{error}");
        assert_eq!(Policy::parse("").unwrap().metrics(), None, "off by default");
    }
}
