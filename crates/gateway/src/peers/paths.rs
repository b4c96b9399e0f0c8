//! Paths that carry large datagrams, small ones only, and no large ones any more.

use std::net::{SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;
use crate::socket::LARGEST_DATAGRAM;
use crate::testing::{HANG, certificates, echoing, in_time, listening, name};

/// The most bytes that UDP carries over Ethernet by IPv4.
const ETHERNET: usize = 1472;
/// Bytes of a long stream, and of a short one.
const LONG: u32 = 4 << 20;
const SHORT: u32 = 64 << 10;

/// Passes a datagram on, which has come from an address.
type PassOn = dyn Fn(&[u8], SocketAddr) + Send;

/// A path that loses datagrams beyond a size, and says nothing of it. Its threads end with the test's process.
struct NarrowPath {
    address: SocketAddr,
    /// The most bytes that pass.
    most: Arc<AtomicUsize>,
    lost: Arc<AtomicUsize>,
}

impl NarrowPath {
    fn to(gateway: SocketAddr, most: usize) -> Self {
        let bind = || UdpSocket::bind("127.0.0.1:0").unwrap();
        let (near, far) = (bind(), bind());
        far.connect(gateway).unwrap();
        let path =
            Self { address: near.local_addr().unwrap(), most: Arc::new(AtomicUsize::new(most)), lost: Arc::default() };
        let client: Arc<Mutex<Option<SocketAddr>>> = Arc::default();
        let pass = |from: &UdpSocket, send: Box<PassOn>| {
            let (from, most, lost) = (from.try_clone().unwrap(), Arc::clone(&path.most), Arc::clone(&path.lost));
            std::thread::spawn(move || {
                let mut buffer = vec![0; 1 << 16];
                loop {
                    let Ok((length, sender)) = from.recv_from(&mut buffer) else { continue };
                    match length <= most.load(Ordering::Relaxed) {
                        true => send(&buffer[..length], sender),
                        false => drop(lost.fetch_add(1, Ordering::Relaxed)),
                    }
                }
            });
        };
        let (out, back, known) = (far.try_clone().unwrap(), near.try_clone().unwrap(), Arc::clone(&client));
        let outward = move |bytes: &[u8], sender| {
            *lock(&client) = Some(sender);
            let _ = out.send(bytes);
        };
        let inward = move |bytes: &[u8], _| {
            if let Some(client) = *lock(&known) {
                let _ = back.send_to(bytes, client);
            }
        };
        pass(&near, Box::new(outward));
        pass(&far, Box::new(inward));
        path
    }
}

/// A gateway whose streams send back all that comes.
fn returning(folder: &std::path::Path, host: &str) -> Arc<PeerHosts> {
    let answer = |_, mut send: SendStream, mut receive: RecvStream| {
        tokio::spawn(async move {
            while let Ok(Some(chunk)) = receive.read_chunk(usize::MAX, true).await {
                if send.write_chunk(chunk.bytes).await.is_err() {
                    return;
                }
            }
            let _ = send.finish();
            let _ = send.stopped().await;
        });
    };
    let peers = listening(folder, host, Box::new(answer));
    tokio::spawn(Arc::clone(&peers).accept());
    peers
}

/// Sends bytes without a short period, and checks that all of them come back.
async fn send_there_and_back(peer: &PeerHost, length: u32) {
    let bytes: Vec<u8> = (0..length / 4).flat_map(|n| n.wrapping_mul(0x9e37_79b9).to_le_bytes()).collect();
    let (mut send, mut receive) = peer.open().await.unwrap();
    let (out, back) = tokio::join!(
        async {
            send.write_all(&bytes).await.unwrap();
            send.finish().unwrap();
            in_time("all has arrived", send.stopped()).await
        },
        tokio::time::timeout(HANG, receive.read_to_end(bytes.len() + 1)),
    );
    out.unwrap();
    assert!(back.expect("the bytes come back in time").unwrap() == bytes, "other bytes come back");
}

/// Sends until datagrams are within 50 bytes of a size.
async fn grow(peer: &PeerHost, to: usize) {
    let begin = Instant::now();
    while datagram(peer) + 50 < to {
        assert!(begin.elapsed() < HANG, "datagrams of {} bytes do not become larger", datagram(peer));
        send_there_and_back(peer, SHORT).await;
    }
}

/// The most bytes of a datagram at present.
fn datagram(peer: &PeerHost) -> usize {
    peer.connection.stats().path.current_mtu.into()
}

#[tokio::test(flavor = "multi_thread")]
async fn wide_path_gets_large_datagrams_and_narrowed_path_goes_on() {
    let folder = certificates(&["alpha", "beta"]);
    let (alpha, beta) = (echoing(folder.path(), "alpha"), returning(folder.path(), "beta"));
    let path = NarrowPath::to(beta.local_address(), usize::MAX);
    let peer = alpha.get(&name("beta"), &path.address.to_string()).await.unwrap();
    grow(&peer, LARGEST_DATAGRAM.into()).await;
    // The route changes to one that carries less.
    path.most.store(ETHERNET, Ordering::Relaxed);
    send_there_and_back(&peer, LONG).await;
    assert!(datagram(&peer) <= ETHERNET, "{}", datagram(&peer));
    assert!(path.lost.load(Ordering::Relaxed) > 0 && peer.is_alive());
}

#[tokio::test(flavor = "multi_thread")]
async fn path_of_ethernet_carries_streams_and_loses_only_probes() {
    let folder = certificates(&["alpha", "beta"]);
    let (alpha, beta) = (echoing(folder.path(), "alpha"), returning(folder.path(), "beta"));
    let path = NarrowPath::to(beta.local_address(), ETHERNET);
    let peer = alpha.get(&name("beta"), &path.address.to_string()).await.unwrap();
    grow(&peer, ETHERNET).await;
    send_there_and_back(&peer, LONG).await;
    assert!(datagram(&peer) <= ETHERNET, "{}", datagram(&peer));
    // Each size is tried three times, and seven or eight sizes are too large, in each direction.
    let lost = path.lost.load(Ordering::Relaxed);
    assert!((1..=60).contains(&lost), "{lost} datagrams were too large");
}
