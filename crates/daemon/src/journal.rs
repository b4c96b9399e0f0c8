//! The log as entries of systemd's journal, with a separate field for each value: `journalctl PARTYWALL_DOMAIN=web`.
//!
//! ```text
//!   MESSAGE=domain joined domain=web pid=7      the line that `journalctl` shows
//!   PRIORITY=6                                  by the level
//!   PARTYWALL_DOMAIN=web                        one field for each value
//!   PARTYWALL_PID=7
//! ```
//!
//! Every local user may send to the journal's socket, and so keep it full. An entry that finds no room is dropped, and the next one that
//! finds room has their number: the event loop must not wait for the journal. The crate `tracing-journald` is not used because its `send` blocks on a
//! full socket.

use std::fmt::{self, Write as _};
use std::io::{self, Write as _};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::io::Errno;
use rustix::net::SendFlags;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::layer::{Context, Layer};

/// Where the journal takes entries.
const SOCKET: &str = "/run/systemd/journal/socket";
/// Most bytes of a value. An entry has few of them, so that it fits into a datagram.
const LONGEST_VALUE: usize = 4096;
/// Most bytes of a field's name that the journal takes.
const LONGEST_NAME: usize = 64;

/// Whether the journal reads this program's stderr. A program that inherits the variable and writes elsewhere has another file there.
pub(crate) fn reads_stderr() -> bool {
    let Ok(stderr) = rustix::fs::fstat(rustix::stdio::stderr()) else { return false };
    std::env::var("JOURNAL_STREAM").is_ok_and(|stream| stream == format!("{}:{}", stderr.st_dev, stderr.st_ino))
}

/// Sends events to the journal.
#[derive(Debug)]
pub(crate) struct Journal {
    path: PathBuf,
    socket: UnixDatagram,
    /// Entries that found no room since the last one that did.
    dropped: AtomicU64,
}

impl Journal {
    pub(crate) fn open() -> io::Result<Self> {
        Self::at(Path::new(SOCKET))
    }

    fn at(path: &Path) -> io::Result<Self> {
        let socket = UnixDatagram::unbound()?;
        socket.connect(path)?;
        Ok(Self { path: path.to_owned(), socket, dropped: AtomicU64::new(0) })
    }

    /// Sends an entry, or drops and counts it where there is no room.
    ///
    /// # Errors
    ///
    /// The journal does not take it for another reason. Gives the entry's line.
    fn log(&self, mut entry: JournalEntry, level: Level) -> Result<(), (io::Error, String)> {
        let dropped = self.dropped.swap(0, Ordering::Relaxed);
        if dropped > 0 {
            entry.add_dropped(dropped);
        }
        let line = entry.line();
        let entry = entry.finish(level);
        let sent = match self.send(&entry) {
            // The next instance of a journal that has ended has another socket under the same name. After one such error the kernel
            // reports that there is no connection.
            Err(Errno::CONNREFUSED | Errno::NOTCONN) => match self.socket.connect(&self.path) {
                Ok(()) => self.send(&entry),
                Err(error) => {
                    self.dropped.fetch_add(dropped, Ordering::Relaxed);
                    return Err((error, line));
                }
            },
            sent => sent,
        };
        match sent {
            Ok(()) => Ok(()),
            Err(Errno::AGAIN) => {
                self.dropped.fetch_add(dropped + 1, Ordering::Relaxed);
                Ok(())
            }
            Err(error) => {
                self.dropped.fetch_add(dropped, Ordering::Relaxed);
                Err((error.into(), line))
            }
        }
    }

    fn send(&self, entry: &[u8]) -> rustix::io::Result<()> {
        loop {
            match rustix::net::send(&self.socket, entry, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Err(Errno::INTR) => {}
                sent => return sent.map(drop),
            }
        }
    }
}

impl<S: Subscriber> Layer<S> for Journal {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut entry = JournalEntry::default();
        event.record(&mut entry);
        if let Err((error, line)) = self.log(entry, *event.metadata().level()) {
            // A broker without a journal and without stderr goes on.
            let _ = writeln!(io::stderr(), "{line} (not in the journal: {error})");
        }
    }
}

/// The fields of one event.
#[derive(Debug, Default)]
struct JournalEntry {
    message: String,
    values: String,
    fields: Vec<u8>,
}

impl JournalEntry {
    /// `shown` is the value as the line has it, `value` as the field has it.
    fn add(&mut self, field: &Field, shown: fmt::Arguments<'_>, value: &str) {
        if field.name() == "message" {
            self.message.push_str(value);
            return;
        }
        let _ = write!(self.values, " {}={shown}", field.name());
        // Names are identifiers of the source: letters, digits and underscores. Dots are the only other characters that tracing allows.
        let mut name = format!(
            "PARTYWALL_{}",
            field.name().to_ascii_uppercase().replace(|c: char| !c.is_ascii_alphanumeric(), "_")
        );
        name.truncate(LONGEST_NAME);
        append(&mut self.fields, &name, value);
    }

    /// How many entries before this one are missing.
    fn add_dropped(&mut self, entries: u64) {
        let _ = write!(self.values, " entries_dropped={entries}");
        append(&mut self.fields, "PARTYWALL_ENTRIES_DROPPED", &entries.to_string());
    }

    /// The line that `journalctl` shows.
    fn line(&self) -> String {
        format!("{}{}", self.message, self.values)
    }

    fn finish(mut self, level: Level) -> Vec<u8> {
        let priority = match level {
            Level::ERROR => "3",
            Level::WARN => "4",
            Level::INFO => "6",
            Level::DEBUG | Level::TRACE => "7",
        };
        let mut entry = Vec::new();
        append(&mut entry, "MESSAGE", &self.line());
        append(&mut entry, "PRIORITY", priority);
        append(&mut entry, "SYSLOG_IDENTIFIER", "partywalld");
        entry.append(&mut self.fields);
        entry
    }
}

impl Visit for JournalEntry {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.add(field, format_args!("{value:?}"), value);
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.add(field, format_args!("{value:?}"), &format!("{value:?}"));
    }
}

/// One field. A value may have line ends: its length comes before it then.
fn append(entry: &mut Vec<u8>, name: &str, value: &str) {
    let value = &value[..value.floor_char_boundary(LONGEST_VALUE)];
    entry.extend_from_slice(name.as_bytes());
    if value.contains('\n') {
        entry.push(b'\n');
        entry.extend_from_slice(&(value.len() as u64).to_le_bytes());
    } else {
        entry.push(b'=');
    }
    entry.extend_from_slice(value.as_bytes());
    entry.push(b'\n');
}

#[cfg(test)]
mod tests {
    use super::*;
    use tracing_subscriber::layer::SubscriberExt as _;

    #[test]
    fn event_becomes_one_entry_with_a_field_for_each_value() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal");
        let journal = UnixDatagram::bind(&path).unwrap();
        let subscriber = tracing_subscriber::registry().with(Journal::at(&path).unwrap());
        tracing::subscriber::with_default(subscriber, || {
            tracing::warn!(user = %7, reason = "no\nPRIORITY=0", "session refused");
        });
        let mut packet = [0; 65536];
        let n = journal.recv(&mut packet).unwrap();
        let expected =
            b"MESSAGE=session refused user=7 reason=\"no\\nPRIORITY=0\"\nPRIORITY=4\nSYSLOG_IDENTIFIER=partywalld\n\
            PARTYWALL_USER=7\nPARTYWALL_REASON\n\x0d\0\0\0\0\0\0\0no\nPRIORITY=0\n";
        assert_eq!(String::from_utf8_lossy(&packet[..n]), String::from_utf8_lossy(expected));
    }

    #[test]
    fn entry_that_finds_no_room_is_dropped_and_counted() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal");
        let socket = UnixDatagram::bind(&path).unwrap();
        let journal = Journal::at(&path).unwrap();
        let log = || journal.log(JournalEntry { message: "full".to_owned(), ..JournalEntry::default() }, Level::INFO);
        let mut sent = 0;
        while journal.dropped.load(Ordering::Relaxed) < 3 {
            log().unwrap();
            sent += 1;
            assert!(sent < 100_000, "the socket never fills");
        }
        socket.set_nonblocking(true).unwrap();
        let mut packet = [0; 65536];
        for _ in 0..sent - 3 {
            let n = socket.recv(&mut packet).unwrap();
            assert!(!String::from_utf8_lossy(&packet[..n]).contains("DROPPED"));
        }
        assert_eq!(socket.recv(&mut packet).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        log().unwrap();
        let n = socket.recv(&mut packet).unwrap();
        let entry = String::from_utf8_lossy(&packet[..n]).into_owned();
        assert!(entry.starts_with("MESSAGE=full entries_dropped=3\n"), "{entry}");
        assert!(entry.contains("\nPARTYWALL_ENTRIES_DROPPED=3\n"), "{entry}");
        log().unwrap();
        let n = socket.recv(&mut packet).unwrap();
        assert!(!String::from_utf8_lossy(&packet[..n]).contains("DROPPED"), "they are reported once");
    }

    #[test]
    fn journal_that_has_ended_gives_line_back_and_next_one_is_used() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal");
        let old = UnixDatagram::bind(&path).unwrap();
        let journal = Journal::at(&path).unwrap();
        let log = || journal.log(JournalEntry { message: "said".to_owned(), ..JournalEntry::default() }, Level::INFO);
        drop(old);
        std::fs::remove_file(&path).unwrap();
        for _ in 0..2 {
            let (_, line) = log().unwrap_err();
            assert_eq!(line, "said");
        }
        let new = UnixDatagram::bind(&path).unwrap();
        log().unwrap();
        assert!(new.recv(&mut [0; 4096]).unwrap() > 0);
    }

    #[test]
    fn value_that_is_too_long_for_a_datagram_is_cut() {
        let mut entry = Vec::new();
        append(&mut entry, "A", &"ä".repeat(1 << 20));
        assert!(entry.len() <= LONGEST_VALUE + 3 && String::from_utf8(entry).is_ok());
    }
}
