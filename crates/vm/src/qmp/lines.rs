//! Lines of a monitor, whose QEMU may be hostile: each has a deadline and a bound on its length.

use rustix::fd::{AsFd, BorrowedFd};
use std::io::{self, BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// Longer than any line of QEMU's. A line becomes values of several times its length in memory.
const LONGEST: usize = 4 << 20;

/// A connection to a monitor.
#[derive(Debug)]
pub(super) struct MonitorLines {
    stream: BufReader<UnixStream>,
    /// The beginning of a line that has not come whole yet.
    partial: Vec<u8>,
}

impl MonitorLines {
    /// `patience` is the longest wait of a write.
    pub(super) fn new(stream: UnixStream, patience: Duration) -> io::Result<Self> {
        stream.set_write_timeout(Some(patience))?;
        Ok(Self { stream: BufReader::new(stream), partial: Vec::new() })
    }

    pub(super) fn write(&mut self, text: &str) -> io::Result<()> {
        self.stream.get_mut().write_all(text.as_bytes())
    }

    /// The next line, with its end. After an error, [`Self::partial`] is what has come so far.
    ///
    /// Fails with `TimedOut` if the line is not whole by the deadline, however often parts of it come.
    pub(super) fn next(&mut self, deadline: Instant) -> io::Result<Vec<u8>> {
        while self.partial.last() != Some(&b'\n') {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            self.stream.get_ref().set_read_timeout(Some(left))?;
            let came = match self.stream.fill_buf() {
                Ok(came) => came,
                Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => continue,
                Err(e) => return Err(e),
            };
            if came.is_empty() {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            let length = came.iter().position(|&byte| byte == b'\n').map_or(came.len(), |end| end + 1);
            self.partial.extend_from_slice(&came[..length]);
            self.stream.consume(length);
            if self.partial.len() > LONGEST {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "a line of the monitor is too long"));
            }
        }
        Ok(std::mem::take(&mut self.partial))
    }

    pub(super) fn partial(&self) -> &[u8] {
        &self.partial
    }
}

impl AsFd for MonitorLines {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.get_ref().as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HANG: Duration = Duration::from_secs(60);

    fn pair() -> (UnixStream, MonitorLines) {
        let (monitor, ours) = UnixStream::pair().unwrap();
        (monitor, MonitorLines::new(ours, HANG).unwrap())
    }

    #[test]
    fn line_that_comes_in_parts_is_read_on_after_a_deadline() {
        let (mut monitor, mut lines) = pair();
        monitor.write_all(b"one\ntw").unwrap();
        assert_eq!(lines.next(Instant::now() + HANG).unwrap(), b"one\n");
        let silent = lines.next(Instant::now() + Duration::from_millis(10)).unwrap_err();
        assert_eq!((silent.kind(), lines.partial()), (io::ErrorKind::TimedOut, b"tw".as_slice()));
        monitor.write_all(b"o\n").unwrap();
        assert_eq!(lines.next(Instant::now() + HANG).unwrap(), b"two\n");
        drop(monitor);
        assert_eq!(lines.next(Instant::now() + HANG).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn endless_line_ends_at_its_bound_or_its_deadline() {
        let (mut monitor, mut lines) = pair();
        let writer = std::thread::spawn(move || while monitor.write_all(&[b' '; 65536]).is_ok() {});
        assert_eq!(lines.next(Instant::now() + HANG).unwrap_err().kind(), io::ErrorKind::InvalidData);
        drop(lines);
        writer.join().unwrap();

        let (mut monitor, mut lines) = pair();
        let trickle = std::thread::spawn(move || {
            while monitor.write_all(b" ").is_ok() {
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        let end = lines.next(Instant::now() + Duration::from_millis(50)).unwrap_err();
        assert_eq!(end.kind(), io::ErrorKind::TimedOut);
        drop(lines);
        trickle.join().unwrap();
    }
}
