//! One scraper: a request of bounded size, one answer, and the end.

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, Shutdown};

/// Longest request that is read.
const LONGEST: usize = 8 << 10;
/// Headers that a request may have.
const HEADERS: usize = 64;
/// How long a scraper may take for all of it.
const PATIENCE: Duration = Duration::from_secs(5);
/// How much of a request's body, or of a request that is too long, is read and thrown away. A socket that is closed with bytes unread resets
/// the connection, and the scraper may then lose the answer.
const MOST_IGNORED: usize = 1 << 20;

/// The request of a scraper.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HttpRequest {
    /// The page of all metrics.
    Metrics,
    /// Something that is answered with this status.
    Other(&'static str),
}

/// One connection.
#[derive(Debug)]
pub(super) struct Scraper {
    socket: OwnedFd,
    request: Vec<u8>,
    answer: Vec<u8>,
    sent: usize,
    /// Bytes that were thrown away after the answer.
    ignored: usize,
    pub(super) until: Instant,
}

impl Scraper {
    pub(super) fn new(socket: OwnedFd) -> Self {
        Self { socket, request: Vec::new(), answer: Vec::new(), sent: 0, ignored: 0, until: Instant::now() + PATIENCE }
    }

    /// The event that it waits for.
    pub(super) fn wants(&self) -> PollFlags {
        if self.answer.is_empty() || self.is_answered() { PollFlags::IN } else { PollFlags::OUT }
    }

    /// Whether the answer has been sent, and only what the scraper still sends is read.
    pub(super) fn is_answered(&self) -> bool {
        !self.answer.is_empty() && self.sent == self.answer.len()
    }

    /// Throws away what has come after the answer; `true` once the scraper has ended too, or has sent too much.
    pub(super) fn ignore_rest(&mut self) -> io::Result<bool> {
        let mut room = [0; 16 << 10];
        loop {
            match rustix::net::recv(&self.socket, &mut room[..], RecvFlags::DONTWAIT) {
                Ok((0, _)) => return Ok(true),
                Ok((read, _)) => self.ignored += read,
                Err(Errno::AGAIN | Errno::INTR) => return Ok(false),
                Err(error) => return Err(error.into()),
            }
            if self.ignored > MOST_IGNORED {
                return Ok(true);
            }
        }
    }

    /// Reads what there is. `Some` once the request is whole, or can never be one; an error ends the connection.
    pub(super) fn read(&mut self) -> io::Result<Option<HttpRequest>> {
        let mut room = [0; 1024];
        match rustix::net::recv(&self.socket, &mut room[..], RecvFlags::DONTWAIT) {
            Ok((0, _)) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok((read, _)) => self.request.extend_from_slice(&room[..read]),
            Err(Errno::AGAIN | Errno::INTR) => return Ok(None),
            Err(error) => return Err(error.into()),
        }
        let asked = asked(&self.request);
        if asked.is_none() && self.request.len() > LONGEST {
            return Ok(Some(HttpRequest::Other("431 Request Header Fields Too Large")));
        }
        Ok(asked)
    }

    /// Begins to answer.
    pub(super) fn answer(&mut self, status: &str, kind: &str, body: &str) {
        let length = body.len();
        let head = format!(
            "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
        );
        self.answer = [head.as_bytes(), body.as_bytes()].concat();
    }

    /// Sends what the kernel takes; `true` when all is sent.
    pub(super) fn send(&mut self) -> io::Result<bool> {
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        match rustix::net::send(&self.socket, &self.answer[self.sent..], flags) {
            Ok(sent) => self.sent += sent,
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let all = self.sent == self.answer.len();
        if all {
            // A scraper that has gone already needs no end.
            let _ = rustix::net::shutdown(&self.socket, Shutdown::Write);
        }
        Ok(all)
    }
}

impl AsFd for Scraper {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// The status of a request with the name of another host.
const MISDIRECTED: &str = "421 Misdirected Request";

/// The text of an answer that has no metrics.
pub(super) fn body_of(status: &str) -> &'static str {
    match status {
        MISDIRECTED => "the Host header must be localhost or a loopback address\n",
        _ => "metrics are at /metrics\n",
    }
}

/// The request in these bytes; `None` while it is incomplete.
fn asked(bytes: &[u8]) -> Option<HttpRequest> {
    let mut headers = [httparse::EMPTY_HEADER; HEADERS];
    let mut request = httparse::Request::new(&mut headers);
    match request.parse(bytes) {
        Ok(httparse::Status::Partial) => None,
        // A page in a browser of this host can reach a loopback port by another name, but cannot hide that name.
        Ok(httparse::Status::Complete(_)) if !request.headers.iter().all(is_not_strange) => {
            Some(HttpRequest::Other(MISDIRECTED))
        }
        Ok(httparse::Status::Complete(_)) => Some(match (request.method, request.path) {
            (Some("GET"), Some(path)) if path.split('?').next() == Some("/metrics") => HttpRequest::Metrics,
            (Some("GET"), _) => HttpRequest::Other("404 Not Found"),
            _ => HttpRequest::Other("405 Method Not Allowed"),
        }),
        Err(_) => Some(HttpRequest::Other("400 Bad Request")),
    }
}

/// Whether a header is no `Host`, or names this host.
fn is_not_strange(header: &httparse::Header<'_>) -> bool {
    if !header.name.eq_ignore_ascii_case("host") {
        return true;
    }
    let Ok(host) = std::str::from_utf8(header.value) else { return false };
    let is_loopback = |host: &str| host.parse().is_ok_and(|ip: IpAddr| ip.is_loopback());
    let name = match host.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((six, _)) => return is_loopback(six),
        None => host.split(':').next().unwrap_or_default(),
    };
    name.is_empty() || name.eq_ignore_ascii_case("localhost") || is_loopback(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_is_understood_once_it_is_whole() {
        for (text, expected) in [
            ("", None),
            ("GET /metrics HTTP/1.1\r\nHost: localhost\r\n", None),
            ("GET /metrics HTTP/1.1\r\nHost: localhost:9464\r\n\r\n", Some(HttpRequest::Metrics)),
            ("GET /metrics HTTP/1.1\r\nHost: 127.0.0.1:9464\r\n\r\n", Some(HttpRequest::Metrics)),
            ("GET /metrics HTTP/1.1\r\nhost: [::1]:9464\r\n\r\n", Some(HttpRequest::Metrics)),
            (
                "GET /metrics HTTP/1.1\r\nHost: evil.example:9464\r\n\r\n",
                Some(HttpRequest::Other("421 Misdirected Request")),
            ),
            (
                "GET /metrics HTTP/1.1\r\nHost: 127.0.0.1.evil.example\r\n\r\n",
                Some(HttpRequest::Other("421 Misdirected Request")),
            ),
            ("GET /metrics?name=x HTTP/1.0\r\n\r\n", Some(HttpRequest::Metrics)),
            ("GET / HTTP/1.1\r\n\r\n", Some(HttpRequest::Other("404 Not Found"))),
            ("POST /metrics HTTP/1.1\r\n\r\n", Some(HttpRequest::Other("405 Method Not Allowed"))),
            ("\u{1}\u{2}\u{3}\r\n\r\n", Some(HttpRequest::Other("400 Bad Request"))),
        ] {
            assert_eq!(asked(text.as_bytes()), expected, "{text:?}");
        }
    }
}
