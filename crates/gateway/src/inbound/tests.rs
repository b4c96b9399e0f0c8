//! Hosts that ask for more than their share, and hosts that ask for nothing.

use std::path::Path;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use partywall::{Directions, Error, Options, Refusal, Stream};
use quinn::{RecvStream, SendStream};

use super::InboundServer;
use crate::frame::{self, RemoteRefusal, RouteRequest, StreamPiece};
use crate::peers::{PeerHost, PeerHosts};
use crate::shares::{HostShares, WAITING_OF_SERVICE};
use crate::testing::{certificates, echoing, eventually, in_time, listening, name};

/// Holds connects to slow services until it is opened, at the latest when the test ends.
#[derive(Default)]
struct ServiceGate {
    is_open: Mutex<bool>,
    opened: Condvar,
}

struct OpenAtEnd(Arc<ServiceGate>);

impl Drop for OpenAtEnd {
    fn drop(&mut self) {
        *self.0.is_open.lock().unwrap() = true;
        self.0.opened.notify_all();
    }
}

/// The gateway of beta. Connects to services with `slow` in their names wait for the gate, those to `echo` succeed, and others are refused.
fn beta(folder: &Path) -> (Arc<PeerHosts>, OpenAtEnd) {
    let gate = Arc::new(ServiceGate::default());
    let held = Arc::clone(&gate);
    let server = InboundServer::with(HostShares::new(name("beta"), 1024), Arc::default(), move |_, request| {
        if request.service == "echo" {
            let (near, mut far) = Stream::pair(&Options::default())?;
            std::thread::spawn(move || {
                let (read, write) = far.halves().unwrap();
                std::io::copy(read, write)
            });
            return Ok(near);
        }
        if request.service.contains("slow") {
            let open = held.is_open.lock().unwrap();
            drop(held.opened.wait_while(open, |open| !*open).unwrap());
        }
        Err(Error::Refused { code: Refusal::NoSuchService, reason: "there is none".into() })
    });
    let server = Arc::new(server);
    let answer = move |peer: Arc<PeerHost>, send, receive| {
        let server = Arc::clone(&server);
        tokio::spawn(async move { server.answer(&peer, send, receive).await });
    };
    let peers = listening(folder, "beta", Box::new(answer));
    tokio::spawn(Arc::clone(&peers).accept());
    (peers, OpenAtEnd(gate))
}

/// The connection of a host to beta.
async fn connect(folder: &Path, host: &str, beta: &PeerHosts) -> Arc<PeerHost> {
    let peers = echoing(folder, host);
    in_time("beta accepts", peers.get(&name("beta"), &beta.local_address().to_string())).await.unwrap()
}

type Opened = (SendStream, RecvStream);

/// Sends a request, whose answer is not awaited.
async fn ask(peer: &PeerHost, service: &str) -> Opened {
    let (mut send, receive) = in_time("a stream is opened", peer.open()).await.unwrap();
    let (from, target, service) = ("web".into(), "db".into(), service.into());
    let request = RouteRequest { from, target, service, directions: Directions::BOTH };
    request.send(&mut send).await.unwrap();
    (send, receive)
}

async fn answer((_, receive): &mut Opened) -> Result<(), RemoteRefusal> {
    in_time("a request is answered", frame::receive_answer(receive)).await.unwrap()
}

async fn refusal(peer: &PeerHost, service: &str) -> RemoteRefusal {
    answer(&mut ask(peer, service).await).await.unwrap_err()
}

/// Has five bytes echoed by the service.
async fn echo((send, receive): &mut Opened) {
    let header = StreamPiece::Bytes(5).header();
    send.write_all(&[&header[..], b"hello"].concat()).await.unwrap();
    let mut bytes = [0; 9];
    in_time("bytes come back", receive.read_exact(&mut bytes)).await.unwrap();
    assert_eq!(&bytes[4..], b"hello");
}

#[tokio::test(flavor = "multi_thread")]
async fn slow_connects_of_one_host_delay_no_other_host() {
    let folder = certificates(&["alpha", "beta", "gamma"]);
    let (beta, _gate) = beta(folder.path());
    let alpha = connect(folder.path(), "alpha", &beta).await;
    let gamma = connect(folder.path(), "gamma", &beta).await;
    let mut stream = ask(&gamma, "echo").await;
    answer(&mut stream).await.unwrap();
    // More than the runtime has threads for blocking calls.
    let mut waiting = Vec::new();
    for service in ["slow0", "slow1", "slow2", "slow3", "slow4"] {
        for _ in 0..WAITING_OF_SERVICE {
            waiting.push(ask(&alpha, service).await);
        }
    }
    // When as many wait as may, the next ones are refused, and alpha has the fault.
    let mut answers = tokio::task::JoinSet::new();
    for (_send, mut receive) in waiting {
        answers.spawn(async move { frame::receive_answer(&mut receive).await });
    }
    loop {
        let answered = in_time("one is over the share", answers.join_next()).await.unwrap();
        let Ok(Ok(Err(RemoteRefusal { code: Refusal::BacklogFull, reason }))) = answered else { continue };
        assert!(reason.contains("alpha connects faster than the broker of beta"), "{reason}");
        break;
    }
    // Gamma's next connect is answered meanwhile, and its stream goes on.
    assert_eq!(refusal(&gamma, "quick").await.code, Refusal::NoSuchService);
    echo(&mut stream).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn slow_connects_to_one_service_delay_no_other_service() {
    let folder = certificates(&["alpha", "beta"]);
    let (beta, _gate) = beta(folder.path());
    let alpha = connect(folder.path(), "alpha", &beta).await;
    // Three more than may wait. Requests are counted in the order in which they arrive, so any of them may be one of those.
    let mut answers = tokio::task::JoinSet::new();
    for _ in 0..WAITING_OF_SERVICE + 3 {
        let (send, mut receive) = ask(&alpha, "slow").await;
        answers.spawn(async move {
            let answered = frame::receive_answer(&mut receive).await;
            drop(send);
            answered
        });
    }
    loop {
        let answered = in_time("one is over the share", answers.join_next()).await.unwrap();
        let Ok(Ok(Err(RemoteRefusal { code: Refusal::BacklogFull, reason }))) = answered else { continue };
        assert!(reason.contains("alpha wait for db:slow on beta"), "{reason}");
        break;
    }
    assert_eq!(refusal(&alpha, "quick").await.code, Refusal::NoSuchService);
}

/// Whether a stream has ended without an answer.
async fn has_ended(receive: &mut RecvStream) -> bool {
    !matches!(receive.read(&mut [0; 16]).await, Ok(Some(_)))
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_header_ends_its_own_stream_only() {
    let folder = certificates(&["alpha", "beta"]);
    let (beta, _gate) = beta(folder.path());
    let alpha = connect(folder.path(), "alpha", &beta).await;
    let mut stream = ask(&alpha, "echo").await;
    answer(&mut stream).await.unwrap();
    let right = r#"{"from":"web","target":"db","service":"echo","directions":3}"#;
    // It would be right if it were shorter.
    let more = format!("{right}{}", " ".repeat(3000));
    let host = right.replace('}', ",\"host\":\"gamma\"}");
    let (name, way) = (right.replace("web", "web@gamma"), right.replace('3', "0"));
    let deep = "[".repeat(2048);
    for text in ["", "{}", &more, &host, &name, &way, &deep, &right[1..]] {
        let (mut send, mut receive) = alpha.open().await.unwrap();
        let length = u16::try_from(text.len()).unwrap().to_le_bytes();
        send.write_all(&[&length[..], text.as_bytes()].concat()).await.unwrap();
        assert!(in_time("a stream ends", has_ended(&mut receive)).await, "{text}");
    }
    echo(&mut stream).await;
    // The request that they are made of is right.
    let (mut send, mut receive) = alpha.open().await.unwrap();
    let length = u16::try_from(right.len()).unwrap().to_le_bytes();
    send.write_all(&[&length[..], right.as_bytes()].concat()).await.unwrap();
    in_time("a request is answered", frame::receive_answer(&mut receive)).await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn header_that_comes_byte_by_byte_ends_in_time() {
    let folder = certificates(&["alpha", "beta"]);
    let (beta, _gate) = beta(folder.path());
    let alpha = connect(folder.path(), "alpha", &beta).await;
    let (mut send, mut receive) = alpha.open().await.unwrap();
    send.write_all(&2048_u16.to_le_bytes()).await.unwrap();
    let drip = async {
        loop {
            let _ = send.write_all(b"[").await;
            tokio::time::sleep(Duration::from_millis(300)).await;
        }
    };
    tokio::select! {
        () = drip => {}
        ended = in_time("a stream without a request ends", has_ended(&mut receive)) => assert!(ended),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_without_request_end_and_leave_nothing() {
    let folder = certificates(&["alpha", "beta"]);
    let (beta, _gate) = beta(folder.path());
    let alpha = connect(folder.path(), "alpha", &beta).await;
    let mut streams = Vec::new();
    for _ in 0..1024 {
        let (mut send, receive) = alpha.open().await.unwrap();
        send.write_all(b"\x40").await.unwrap();
        streams.push((send, receive));
    }
    for (_, receive) in &mut streams {
        assert!(in_time("a stream without a request ends", has_ended(receive)).await);
    }
    drop(streams);
    eventually("no stream is left", || beta.streams_of(&name("alpha")) == 0).await;
    assert_eq!(refusal(&alpha, "quick").await.code, Refusal::NoSuchService);
}
