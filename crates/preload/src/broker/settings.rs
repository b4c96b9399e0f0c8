//! The settings in the environment and the command line, read once before `main`, when allocating is still safe.

use crate::sys;
use partywall_protocol::environment;
use partywall_protocol::wire::MAX_STRING;
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::OnceLock;

/// Where the broker of the machine serves.
const SYSTEM_SOCKET: &[u8] = b"/run/partywall/broker.sock";

/// All of it. Nothing here is ever freed or changed.
#[derive(Debug, Default)]
pub(super) struct Settings {
    /// Paths to try, in this order.
    pub(super) sockets: Vec<Vec<u8>>,
    /// The domain to join as, if it is set.
    domain: Option<String>,
    /// The only user whose processes join as that domain, if it is set.
    domain_user: Option<u32>,
    /// When connections go to a ring, in the words of `protocol::upgrade`; empty if it is not set.
    pub(super) upgrade: String,
    /// Size of our rings, if it is set.
    pub(super) ring_size: Option<u64>,
    /// Longest time to spin, if it is set.
    pub(super) spin_us: Option<u32>,
    /// Name of the program: the last part of its path.
    pub(super) program: Vec<u8>,
    /// Path of its executable; of one that is too long for a message, the last part.
    pub(super) executable: String,
}

impl Settings {
    /// The domain that a process of this user joins as, if it is set.
    pub(super) fn domain_of(&self, user: u32) -> Option<&str> {
        let is_meant = self.domain_user.is_none_or(|only| only == user);
        self.domain.as_deref().filter(|_| is_meant)
    }
}

static SETTINGS: OnceLock<Settings> = OnceLock::new();

/// Reads everything. Called before `main`; a call that comes earlier, from another library's constructor, does it itself.
pub(super) fn get() -> &'static Settings {
    SETTINGS.get_or_init(read)
}

fn read() -> Settings {
    let text = |name: &str| sys::environment(name).and_then(|value| value.into_string().ok());
    #[cfg(test)]
    let broker = Some(std::ffi::OsString::from(super::tests::path()));
    #[cfg(not(test))]
    let broker = sys::environment(environment::BROKER);
    let sockets = match broker {
        Some(path) => vec![path.as_bytes().to_vec()],
        None => {
            let own =
                sys::environment("XDG_RUNTIME_DIR").map(|dir| [dir.as_bytes(), b"/partywall/broker.sock"].concat());
            [Some(SYSTEM_SOCKET.to_vec()), own].into_iter().flatten().collect()
        }
    };
    let ring_size = text(environment::RING).and_then(|value| value.parse().ok());
    Settings {
        sockets,
        domain: text(environment::DOMAIN),
        domain_user: text(environment::DOMAIN_USER).and_then(|value| value.parse().ok()),
        upgrade: text(environment::MOVES).unwrap_or_default(),
        ring_size: ring_size.filter(|size: &u64| size.is_power_of_two() && (4096..=1 << 30).contains(size)),
        spin_us: text(environment::SPIN_US).and_then(|value| value.parse().ok()),
        program: program(&std::fs::read("/proc/self/cmdline").unwrap_or_default()),
        executable: executable(std::fs::read_link("/proc/self/exe").unwrap_or_default()),
    }
}

fn program(command_line: &[u8]) -> Vec<u8> {
    let first = command_line.split(|byte| *byte == 0).next().unwrap_or_default();
    let name = first.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
    if name.is_empty() { b"program".to_vec() } else { name.to_vec() }
}

fn executable(path: PathBuf) -> String {
    let path = path.into_os_string().into_string().unwrap_or_else(|odd| odd.to_string_lossy().into_owned());
    let path = path.strip_suffix(" (deleted)").unwrap_or(&path);
    if path.len() <= MAX_STRING { path.to_owned() } else { path.rsplit('/').next().unwrap_or_default().to_owned() }
}

/// The default name of a domain: the program, and the process.
#[derive(Debug)]
pub(super) struct DefaultName {
    bytes: [u8; 64],
    len: usize,
}

impl DefaultName {
    pub(super) fn new(program: &[u8], process: u32) -> Self {
        let mut this = Self::stem(program);
        this.push(b'-');
        let mut power = 1_000_000_000;
        let mut begun = false;
        while power > 0 {
            let digit = process / power % 10;
            begun |= digit != 0 || power == 1;
            if begun {
                // A decimal digit.
                this.push(b'0' + digit as u8);
            }
            power /= 10;
        }
        this
    }

    /// The common prefix of the names of a program's processes.
    pub(super) fn stem(program: &[u8]) -> Self {
        let mut this = Self { bytes: [0; 64], len: 0 };
        for byte in program.iter().take(48) {
            let fits = byte.is_ascii_alphanumeric() || (this.len > 0 && matches!(byte, b'.' | b'_' | b'-'));
            if fits {
                this.push(*byte);
            }
        }
        if this.len == 0 {
            b"program".iter().for_each(|byte| this.push(*byte));
        }
        this
    }

    fn push(&mut self, byte: u8) {
        if let Some(place) = self.bytes.get_mut(self.len) {
            *place = byte;
            self.len += 1;
        }
    }

    pub(super) fn as_bytes(&self) -> &[u8] {
        self.bytes.get(..self.len).unwrap_or_default()
    }
}

impl fmt::Display for DefaultName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Made of letters, digits and three signs.
        f.write_str(str::from_utf8(self.as_bytes()).unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use partywall_protocol::wire::Name;

    #[test]
    fn program_name_is_last_part_of_its_path() {
        assert_eq!(program(b"/usr/bin/redis-server\0*:6379\0"), b"redis-server");
        assert_eq!(program(b"python3\0x.py\0"), b"python3");
        assert_eq!(program(b""), b"program");
        assert_eq!(program(b"/\0"), b"program");
    }

    #[test]
    fn domain_of_one_user_is_not_for_others() {
        let domain = Some("web".to_owned());
        let settings = Settings { domain: domain.clone(), domain_user: Some(33), ..Settings::default() };
        assert_eq!((settings.domain_of(33), settings.domain_of(0)), (Some("web"), None));
        let settings = Settings { domain, ..Settings::default() };
        assert_eq!((settings.domain_of(33), settings.domain_of(0)), (Some("web"), Some("web")));
    }

    #[test]
    fn every_default_name_is_a_name() {
        for (name, process, expected) in [
            (&b"redis-server"[..], 42, "redis-server-42"),
            (b"-bash", 7, "bash-7"),
            (b"nginx: worker process", 10, "nginxworkerprocess-10"),
            (b"\xff\xfe", 4_194_304, "program-4194304"),
            (&[b'x'; 300], u32::MAX, ""),
        ] {
            let name = DefaultName::new(name, process);
            let text = std::str::from_utf8(name.as_bytes()).unwrap();
            assert!(Name::new(text).is_ok(), "{text}");
            assert!(expected.is_empty() || text == expected, "{text}");
        }
    }
}
