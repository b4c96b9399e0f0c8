//! The file of a switch: its ports with their limits, and how it forwards.

use crate::VhostError;
use crate::folder::{self, SWITCHES};
use crate::port::{PortSpec, check_name};
use crate::switch::MacAddress;
use crate::user::user_number;
use rustix::fs::{FileType, Mode, OFlags};
use serde::{Deserialize, Deserializer};
use std::collections::HashMap;
use std::fmt::Display;
use std::fs::File;
use std::hash::Hash;
use std::io::Read;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use toml::Spanned;

pub use crate::host_address::parse_host_address;

/// Every key of a file, explained.
///
/// ```
/// use partywall_vhost::config::{SAMPLE_CONFIG, SwitchConfig};
///
/// assert_eq!(SwitchConfig::parse(SAMPLE_CONFIG)?.ports.len(), 1);
/// # Ok::<(), String>(())
/// ```
pub const SAMPLE_CONFIG: &str = include_str!("../net.toml");
/// The folder of the files of the host's switches.
const FOLDER: &str = "/etc/partywall/net";
/// The longest time that a frame waits for a receiver, in milliseconds.
pub const LONGEST_HOLD: u64 = 60_000;
/// The longest time until a silent address is forgotten, in seconds.
pub const LONGEST_AGE: u64 = 1_000_000;
/// The longest file, in bytes.
const LONGEST_FILE: u64 = 1 << 20;
/// The most ports of a file.
const MOST_PORTS: usize = 1024;
/// The kernel's limit of a device's name.
const LONGEST_DEVICE: usize = libc::IFNAMSIZ - 1;

/// How a switch forwards, as far as a file or a command line says.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SwitchSettings {
    /// Frames a second that each port may flood.
    pub floods: Option<u64>,
    /// Seconds until the address of a silent machine is forgotten.
    pub age: Option<u64>,
    /// Milliseconds that a frame waits for a machine without receive buffers.
    pub hold: Option<u64>,
}

/// A port of the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedPort {
    /// The port.
    pub spec: PortSpec,
    /// The line of the file at which its table begins.
    pub line: usize,
}

/// The file of a switch.
///
/// ```
/// use partywall_vhost::config::SwitchConfig;
///
/// let config = SwitchConfig::parse("
/// [[port]]
/// name = 'a'
/// mac = ['52:54:00:00:00:0a']
/// rate = '100M'
/// ")?;
/// assert!(!config.other_ports);
/// assert_eq!((config.ports[0].spec.rate, config.ports[0].line), (Some(100_000_000), 2));
/// # Ok::<(), String>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SwitchConfig {
    /// Where it was read from.
    pub path: PathBuf,
    /// How the switch forwards.
    pub settings: SwitchSettings,
    /// Commands may add ports that it does not list.
    pub other_ports: bool,
    /// Its ports.
    pub ports: Vec<ListedPort>,
}

/// Where a switch finds its file, and the settings of its command line.
#[derive(Debug, Clone, Default)]
pub struct ConfigSource {
    /// The file; `None` if the switch has no place for one.
    pub path: Option<PathBuf>,
    /// The command line names the file, so it must be there.
    pub required: bool,
    /// The settings of the command line, which the file must not contradict.
    pub settings: SwitchSettings,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ConfigText {
    #[serde(default)]
    floods: Option<u64>,
    #[serde(default)]
    age: Option<AgeSeconds>,
    #[serde(default)]
    hold: Option<HoldMilliseconds>,
    #[serde(default)]
    other_ports: bool,
    #[serde(default)]
    port: Vec<Spanned<PortText>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PortText {
    #[serde(deserialize_with = "port_name")]
    name: String,
    #[serde(default)]
    tap: bool,
    #[serde(default, deserialize_with = "filled_list")]
    mac: Vec<Spanned<MacAddress>>,
    #[serde(default, deserialize_with = "filled_list")]
    ip: Vec<Spanned<HostAddress>>,
    #[serde(default)]
    rate: Option<ByteRate>,
    #[serde(default)]
    owner: Option<PortOwner>,
}

fn port_name<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    let name = String::deserialize(from)?;
    check_name(&name).map_err(serde::de::Error::custom)?;
    Ok(name)
}

/// Addresses. An empty list could be meant to allow none, and a port without addresses may send from all.
fn filled_list<'de, D: Deserializer<'de>, T: Deserialize<'de>>(from: D) -> Result<Vec<T>, D::Error> {
    let list = Vec::deserialize(from)?;
    if list.is_empty() {
        return Err(serde::de::Error::custom("the list is empty: leave the key out to allow all addresses"));
    }
    Ok(list)
}

#[derive(Deserialize)]
#[serde(try_from = "u64")]
struct AgeSeconds(u64);

impl TryFrom<u64> for AgeSeconds {
    type Error = String;

    fn try_from(seconds: u64) -> Result<Self, String> {
        let fits = (1..=LONGEST_AGE).contains(&seconds);
        if fits { Ok(Self(seconds)) } else { Err(format!("`age` is 1 to {LONGEST_AGE} seconds")) }
    }
}

#[derive(Deserialize)]
#[serde(try_from = "u64")]
struct HoldMilliseconds(u64);

impl TryFrom<u64> for HoldMilliseconds {
    type Error = String;

    fn try_from(milliseconds: u64) -> Result<Self, String> {
        let fits = milliseconds <= LONGEST_HOLD;
        if fits { Ok(Self(milliseconds)) } else { Err(format!("`hold` is 0 to {LONGEST_HOLD} milliseconds")) }
    }
}

/// The address of one host.
#[derive(Deserialize)]
#[serde(try_from = "String")]
struct HostAddress(IpAddr);

impl TryFrom<String> for HostAddress {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        parse_host_address(&text).map(Self)
    }
}

/// A name or a number.
#[derive(Deserialize)]
#[serde(untagged, expecting = "expected text in quotes or a number that is not negative")]
enum NumberOrWord<N> {
    Number(N),
    Text(String),
}

#[derive(Deserialize)]
#[serde(try_from = "NumberOrWord<u64>")]
struct ByteRate(u64);

impl TryFrom<NumberOrWord<u64>> for ByteRate {
    type Error = String;

    fn try_from(rate: NumberOrWord<u64>) -> Result<Self, String> {
        match rate {
            NumberOrWord::Number(rate) => parse_rate(&rate.to_string()),
            NumberOrWord::Text(text) => parse_rate(&text),
        }
        .map(Self)
        .map_err(|e| format!("`rate`: {e}"))
    }
}

#[derive(Deserialize)]
#[serde(try_from = "NumberOrWord<u32>")]
struct PortOwner(u32);

impl TryFrom<NumberOrWord<u32>> for PortOwner {
    type Error = String;

    fn try_from(owner: NumberOrWord<u32>) -> Result<Self, String> {
        match owner {
            NumberOrWord::Number(uid) => user_number(&uid.to_string()).map(Self),
            NumberOrWord::Text(name) => user_number(&name).map(Self),
        }
    }
}

/// A rate in bytes a second: a number, or one with K, M or G (powers of 1000).
///
/// # Errors
/// How to write it.
pub fn parse_rate(text: &str) -> Result<u64, String> {
    let (digits, unit) = match text.strip_suffix(['K', 'M', 'G']) {
        Some(digits) => (
            digits,
            match text.as_bytes().last() {
                Some(b'K') => 1_000,
                Some(b'M') => 1_000_000,
                _ => 1_000_000_000,
            },
        ),
        None => (text, 1),
    };
    let rate = digits.parse::<u64>().ok().and_then(|n| n.checked_mul(unit)).filter(|rate| *rate > 0);
    rate.ok_or_else(|| "write bytes a second, as in 100M".to_owned())
}

impl SwitchSettings {
    /// Whether the settings of a file agree with those of the command line.
    ///
    /// # Errors
    /// Both have a setting, with different values.
    fn agrees(self, command_line: Self) -> Result<(), String> {
        let pairs = [
            ("floods", self.floods, command_line.floods),
            ("age", self.age, command_line.age),
            ("hold", self.hold, command_line.hold),
        ];
        match pairs.into_iter().find(|(_, file, given)| file.is_some() && given.is_some() && file != given) {
            Some((name, Some(file), Some(given))) => Err(format!(
                "`{name} = {file}` contradicts `--{name} {given}` of the command line: leave the option out"
            )),
            _ => Ok(()),
        }
    }
}

impl SwitchConfig {
    /// Reads the text of a file.
    ///
    /// # Errors
    /// The error names the line and the fault.
    pub fn parse(text: &str) -> Result<Self, String> {
        let file: ConfigText = toml::from_str(text).map_err(|e| e.to_string())?;
        let line = |byte: usize| 1 + text.bytes().take(byte).filter(|byte| *byte == b'\n').count();
        if let Some(port) = file.port.get(MOST_PORTS) {
            return Err(format!("line {}: a file lists at most {MOST_PORTS} ports", line(port.span().start)));
        }
        let mut ports: Vec<ListedPort> = Vec::with_capacity(file.port.len());
        let (mut names, mut macs, mut ips) = (FirstUses::default(), FirstUses::default(), FirstUses::default());
        for port in file.port {
            let at = line(port.span().start);
            let PortText { name, tap, mac, ip, rate, owner } = port.into_inner();
            let wrong = |what: String| Err(format!("line {at}: the port `{name}`: {what}"));
            let there = |(_, first): FirstUse| format!("line {at}: there is a port `{name}` already, in line {first}");
            names.note(name.clone(), &name, at).map_err(there)?;
            if tap && name.len() > LONGEST_DEVICE {
                return wrong(format!("the name of a network device has at most {LONGEST_DEVICE} characters"));
            }
            if tap && owner.is_some() {
                return wrong("`owner` is for a machine's card, and not for an uplink".to_owned());
            }
            let taken = |address: &dyn Display, byte: usize, first: FirstUse| {
                let (port, there) = first;
                format!("line {}: {address} is fixed to the port `{port}` already, in line {there}", line(byte))
            };
            for address in &mac {
                let (mac, byte) = (*address.get_ref(), address.span().start);
                macs.note(mac, &name, line(byte)).map_err(|first| taken(&mac, byte, first))?;
            }
            for address in &ip {
                let (ip, byte) = (address.get_ref().0, address.span().start);
                ips.note(ip, &name, line(byte)).map_err(|first| taken(&ip, byte, first))?;
            }
            let spec = PortSpec {
                mac: mac.into_iter().map(Spanned::into_inner).collect(),
                ip: ip.into_iter().map(|ip| ip.into_inner().0).collect(),
                rate: rate.map(|rate| rate.0),
                owner: owner.map(|owner| owner.0),
                name,
                tap,
            };
            spec.check().map_err(|e| format!("line {at}: the port `{}`: {e}", spec.name))?;
            ports.push(ListedPort { spec, line: at });
        }
        let settings =
            SwitchSettings { floods: file.floods, age: file.age.map(|age| age.0), hold: file.hold.map(|hold| hold.0) };
        Ok(Self { path: PathBuf::new(), settings, other_ports: file.other_ports, ports })
    }

    /// Reads a file, which only root or this user may be able to change.
    ///
    /// # Errors
    /// The error names the file, and the line if its text is wrong.
    pub fn read(path: &Path) -> Result<Self, VhostError> {
        // A pipe must not hold this process up.
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file =
            rustix::fs::open(path, flags, Mode::empty()).map_err(|e| VhostError::file("read", path)(e.into()))?;
        // What is read is the file that was judged, also if another one has its name meanwhile.
        let there = rustix::fs::fstat(&file).map_err(|e| VhostError::file("look at", path)(e.into()))?;
        let refused = |why: String| Err(VhostError::Refused(format!("{}: {why}", path.display())));
        if FileType::from_raw_mode(there.st_mode) != FileType::RegularFile {
            return refused("this is no regular file".to_owned());
        }
        let user = rustix::process::geteuid().as_raw();
        if there.st_uid != 0 && there.st_uid != user {
            let owner = there.st_uid;
            return refused(format!(
                "it belongs to user {owner}: only root or the user of the switch may own this file"
            ));
        }
        if there.st_mode & 0o022 != 0 {
            return refused("users other than its owner may write to it: chmod go-w".to_owned());
        }
        let mut text = String::new();
        // It may grow while it is read.
        let mut file = File::from(file).take(LONGEST_FILE + 1);
        file.read_to_string(&mut text).map_err(VhostError::file("read", path))?;
        if file.limit() == 0 {
            return refused(format!("it has more than {LONGEST_FILE} bytes"));
        }
        let config = Self::parse(&text);
        let config = config.map_err(|e| VhostError::Refused(format!("the file {} is wrong: {e}", path.display())))?;
        Ok(Self { path: path.to_owned(), ..config })
    }

    /// The entry of a port.
    pub fn find(&self, name: &str) -> Option<&ListedPort> {
        self.ports.iter().find(|port| port.spec.name == name)
    }

    /// Where an entry stands: the file and the line.
    pub fn place(&self, port: &ListedPort) -> String {
        format!("{}, line {}", self.path.display(), port.line)
    }

    /// Whether a command may add this port.
    ///
    /// # Errors
    /// The file does not list it and allows no other ports, or it lists it with other limits.
    pub fn permits(&self, port: &PortSpec) -> Result<(), VhostError> {
        match self.find(&port.name) {
            Some(listed) if port.fits(&listed.spec) => Ok(()),
            Some(listed) => Err(VhostError::Refused(contradiction(&self.place(listed), &port.name))),
            None if self.other_ports => Ok(()),
            None => Err(VhostError::Refused(format!(
                "{} does not list the port {}, and allows no other ports: add it to the file and reload, or write `other_ports = true` there",
                self.path.display(),
                port.name
            ))),
        }
    }

    /// An address of this port that the file fixes to another one, and that one.
    pub(crate) fn conflict(&self, port: &PortSpec) -> Option<(String, &ListedPort)> {
        self.ports.iter().filter(|listed| listed.spec.name != port.name).find_map(|listed| {
            let mac = port.mac.iter().find(|mac| listed.spec.mac.contains(mac)).map(ToString::to_string);
            let ip = || port.ip.iter().find(|ip| listed.spec.ip.contains(ip)).map(ToString::to_string);
            Some((mac.or_else(ip)?, listed))
        })
    }
}

/// Why limits that a command wants are refused for a port of the file.
pub(crate) fn contradiction(place: &str, port: &str) -> String {
    format!("{place}, fixes the port {port} with other limits: leave the limits out, or change the file and reload")
}

/// The port that has a value, and the line.
type FirstUse = (String, usize);

/// Values that only one port may have, and where each stands first.
struct FirstUses<K>(HashMap<K, FirstUse>);

impl<K> Default for FirstUses<K> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

impl<K: Eq + Hash> FirstUses<K> {
    /// Notes a value, or returns its first use.
    fn note(&mut self, key: K, port: &str, line: usize) -> Result<(), FirstUse> {
        if let Some(first) = self.0.get(&key) {
            return Err(first.clone());
        }
        self.0.insert(key, (port.to_owned(), line));
        Ok(())
    }
}

impl ConfigSource {
    /// The file of a command line, or that of the host's switch with this folder.
    pub fn new(given: Option<&Path>, folder: &Path, settings: SwitchSettings) -> Result<Self, VhostError> {
        let path = match given {
            // A later working directory may be another.
            Some(path) => Some(std::path::absolute(path).map_err(VhostError::file("find", path))?),
            None => default_path(folder),
        };
        Ok(Self { path, required: given.is_some(), settings })
    }

    /// The file as it is now; `None` if there is none and there need be none.
    ///
    /// # Errors
    /// It is wrong, contradicts the command line, or must be there and is not.
    pub fn read(&self) -> Result<Option<SwitchConfig>, VhostError> {
        let Some(path) = &self.path else { return Ok(None) };
        match SwitchConfig::read(path) {
            Err(VhostError::File { source, .. }) if !self.required && source.kind() == std::io::ErrorKind::NotFound => {
                Ok(None)
            }
            Err(e) => Err(e),
            Ok(config) => {
                let agrees = config.settings.agrees(self.settings);
                agrees.map_err(|e| VhostError::Refused(format!("{}: {e}", path.display())))?;
                Ok(Some(config))
            }
        }
    }
}

/// The file of the switch with this folder, if it is one of the host's.
pub fn default_path(folder: &Path) -> Option<PathBuf> {
    let name = folder.file_name().filter(|_| folder.parent() == Some(&*folder::of_root(SWITCHES)))?;
    let mut file = name.to_owned();
    file.push(".toml");
    Some(Path::new(FOLDER).join(file))
}

#[cfg(test)]
mod tests;
