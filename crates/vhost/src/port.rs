//! A port as the operator wants it.

use crate::VhostError;
use crate::host_address::{canonical_list, is_host_address};
use crate::switch::MacAddress;
use serde::{Deserialize, Serialize};
use std::net::IpAddr;
use std::path::{Path, PathBuf};

/// A port as the operator wants it.
#[derive(Debug, Clone, Serialize, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct PortSpec {
    /// Its name: that of its socket, or of the tap device.
    pub name: String,
    /// It is a tap device of the host.
    #[serde(default)]
    pub tap: bool,
    /// The Ethernet addresses that it may send from; all, if there are none here.
    #[serde(default)]
    pub mac: Vec<MacAddress>,
    /// The IP addresses that it may send from. If there are none here, it may send from all that the switch's file gives to no port.
    #[serde(default, deserialize_with = "canonical_list")]
    pub ip: Vec<IpAddr>,
    /// Bytes a second that it may send.
    #[serde(default)]
    pub rate: Option<u64>,
    /// The user whose QEMU may connect.
    #[serde(default)]
    pub owner: Option<u32>,
}

impl PortSpec {
    /// A port for a card, without limits.
    pub fn new(name: &str) -> Self {
        Self { name: name.to_owned(), tap: false, mac: Vec::new(), ip: Vec::new(), rate: None, owner: None }
    }

    /// Its socket in the switch's folder.
    pub fn socket(&self, folder: &Path) -> PathBuf {
        folder.join(format!("{}.port", self.name))
    }

    /// Whether the port `there` is what is wanted here: of the same kind, and with the same limits, or none are wanted here. No owner agrees with any owner.
    pub fn agrees(&self, there: &Self) -> Result<(), VhostError> {
        if self.fits(there) {
            return Ok(());
        }
        let why = "there is a port of this name of another kind or with other limits; remove it first, or leave the limits out";
        Err(VhostError::Refused(format!("{}: {why}", self.name)))
    }

    /// As [`Self::agrees`].
    pub(crate) fn fits(&self, there: &Self) -> bool {
        let wanted = Self { owner: self.owner.or(there.owner), ..self.clone() };
        let without_limits = Self { tap: there.tap, ..Self::new(&there.name) };
        wanted == *there || *self == without_limits
    }

    pub(crate) fn check(&self) -> Result<(), VhostError> {
        check_name(&self.name)?;
        let most = 64;
        if self.mac.len() > most || self.ip.len() > most || self.rate == Some(0) {
            return Err(VhostError::Refused(format!(
                "a port has at most {most} addresses of a kind, and a rate above 0"
            )));
        }
        if let Some(ip) = self.ip.iter().find(|ip| !is_host_address(**ip)) {
            return Err(VhostError::Refused(format!("`{ip}` is not the address of one host")));
        }
        // The kernel takes this number for a change to no user.
        if self.owner == Some(u32::MAX) {
            return Err(VhostError::Refused(format!("{} is the number of no user", u32::MAX)));
        }
        Ok(())
    }
}

/// Checks a name, which becomes a part of paths.
pub fn check_name(name: &str) -> Result<(), VhostError> {
    let fits = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    let good = (1..=32).contains(&name.len()) && name.chars().all(fits) && !name.starts_with(['.', '-']);
    let rule = "1 to 32 of A-Z a-z 0-9 . _ -, first a letter or digit";
    if good { Ok(()) } else { Err(VhostError::Refused(format!("`{name}` is no name: write {rule}"))) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn port_spec_with_other_limits_does_not_agree() {
        let there = PortSpec { rate: Some(1000), ..PortSpec::new("a") };
        assert!(there.agrees(&there).is_ok() && PortSpec::new("a").agrees(&there).is_ok());
        assert!(PortSpec { rate: Some(2000), ..PortSpec::new("a") }.agrees(&there).is_err());
        assert!(there.agrees(&PortSpec::new("a")).is_err(), "limits that are wanted and not there");
        let owned = PortSpec { owner: Some(7), ..there.clone() };
        assert!(there.agrees(&owned).is_ok() && owned.agrees(&there).is_err());
        let tap = PortSpec { tap: true, ..PortSpec::new("a") };
        assert!(tap.agrees(&there).is_err() && PortSpec::new("a").agrees(&tap).is_err());
        assert!(tap.agrees(&PortSpec { tap: true, ..there.clone() }).is_ok());
        assert!(PortSpec { owner: Some(u32::MAX), ..there.clone() }.check().is_err());
        assert!(PortSpec { owner: Some(8), ..there }.agrees(&owned).is_err());
    }

    #[test]
    fn mapped_address_in_json_is_the_ipv4_address() {
        let port: PortSpec = serde_json::from_str(r#"{"name":"a","ip":["::ffff:10.0.0.1","fd00::1"]}"#).unwrap();
        assert_eq!(port.ip, ["10.0.0.1", "fd00::1"].map(|ip| ip.parse::<IpAddr>().unwrap()));
        assert!(port.check().is_ok());
    }

    #[test]
    fn port_with_address_that_is_not_of_one_host_is_refused() {
        for ip in ["::ffff:10.0.0.1", "0.0.0.0", "::", "127.0.0.1", "::1", "224.0.0.1", "ff02::1", "255.255.255.255"] {
            let port = PortSpec { ip: vec![ip.parse().unwrap()], ..PortSpec::new("a") };
            assert!(port.check().unwrap_err().to_string().contains("address of one host"), "{ip}");
        }
    }
}
