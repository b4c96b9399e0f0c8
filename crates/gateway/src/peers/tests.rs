//! Connections between gateways, honest and hostile.

use std::net::{SocketAddr, UdpSocket};
use std::sync::atomic::AtomicBool;

use quinn::ConnectionError;

use super::*;
use crate::handshakes::HANDSHAKES_PER_ADDRESS;
use crate::testing::{ShownCertificate, certificates, echoing, eventually, in_time, is_echoed, listening, stranger};

async fn echo(stream: &mut (SendStream, RecvStream)) {
    assert!(in_time("bytes come back", is_echoed(stream)).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn hosts_that_connect_at_once_lose_no_stream() {
    let folder = certificates(&["alpha", "beta"]);
    let (alpha, beta) = (echoing(folder.path(), "alpha"), echoing(folder.path(), "beta"));
    let [to_alpha, to_beta] = ["alpha", "beta"].map(|host| Name::new(host).unwrap());
    let [at_alpha, at_beta] = [&alpha, &beta].map(|peers| peers.endpoint.local_addr().unwrap().to_string());
    // Beta has connected and opened a stream. Alpha does not know that connection yet when it begins to connect.
    tokio::spawn(Arc::clone(&alpha).accept());
    let first = beta.get(&to_alpha, &at_alpha).await.unwrap();
    let count = StreamCount::of(&first);
    let mut stream = first.open().await.unwrap();
    echo(&mut stream).await;
    tokio::spawn(Arc::clone(&beta).accept());
    let connection = alpha.dial(&to_beta, &at_beta).await.unwrap();
    let counted = alpha.count(&mut lock(&alpha.counts), &to_beta);
    let second = alpha.adopt(connection, to_alpha.clone(), counted);
    let mut other = second.open().await.unwrap();
    echo(&mut other).await;
    let dialer = |peers: &PeerHosts, to| peers.live(to).map(|peer| peer.dialer.clone());
    eventually("both use the connection of the host whose name comes first", || {
        dialer(&alpha, &to_beta).as_ref() == Some(&to_alpha) && dialer(&beta, &to_alpha).as_ref() == Some(&to_alpha)
    })
    .await;
    // The first connection stays as long as it has a stream: longer than one without streams is kept.
    for _ in 0..10 {
        echo(&mut stream).await;
        echo(&mut other).await;
        tokio::time::sleep(Duration::from_millis(400)).await;
    }
    drop((stream, count));
    eventually("the first connection is closed", || !first.is_alive()).await;
    echo(&mut other).await;
}

/// A way to a gateway that passes on everything in both directions until `is_cut`. Returns its address for the client.
fn way(to: SocketAddr, is_cut: Arc<AtomicBool>) -> SocketAddr {
    let (near, far) = (UdpSocket::bind("127.0.0.1:0").unwrap(), UdpSocket::bind("127.0.0.1:0").unwrap());
    let address = near.local_addr().unwrap();
    far.connect(to).unwrap();
    let (near_too, far_too) = (near.try_clone().unwrap(), far.try_clone().unwrap());
    let client: Arc<Mutex<Option<SocketAddr>>> = Arc::default();
    let (known, is_cut_too) = (Arc::clone(&client), Arc::clone(&is_cut));
    // Both end with the test's process.
    std::thread::spawn(move || {
        let mut buffer = vec![0; 1 << 16];
        while let Ok((length, from)) = near.recv_from(&mut buffer) {
            *lock(&client) = Some(from);
            if !is_cut.load(Ordering::Relaxed) {
                let _ = far.send(&buffer[..length]);
            }
        }
    });
    std::thread::spawn(move || {
        let mut buffer = vec![0; 1 << 16];
        loop {
            let Ok(length) = far_too.recv(&mut buffer) else { continue };
            if let Some(client) = lock(&known).filter(|_| !is_cut_too.load(Ordering::Relaxed)) {
                let _ = near_too.send_to(&buffer[..length], client);
            }
        }
    });
    address
}

#[tokio::test(flavor = "multi_thread")]
async fn connection_after_crash_replaces_the_silent_one() {
    let folder = certificates(&["alpha", "beta"]);
    let (alpha, crashed) = (echoing(folder.path(), "alpha"), echoing(folder.path(), "beta"));
    let [to_alpha, to_beta] = ["alpha", "beta"].map(|host| Name::new(host).unwrap());
    for peers in [&alpha, &crashed] {
        tokio::spawn(Arc::clone(peers).accept());
    }
    let is_cut = Arc::new(AtomicBool::new(false));
    let by = way(crashed.local_address(), Arc::clone(&is_cut));
    let first = alpha.get(&to_beta, &by.to_string()).await.unwrap();
    echo(&mut first.open().await.unwrap()).await;
    // Beta's gateway is killed, and the next one connects before alpha can know that.
    is_cut.store(true, Ordering::Relaxed);
    let beta = echoing(folder.path(), "beta");
    let second = beta.get(&to_alpha, &alpha.local_address().to_string()).await.unwrap();
    eventually("alpha uses the connection of the next gateway", || {
        assert!(second.is_alive(), "it is closed in favour of a dead one: {:?}", second.end());
        alpha.live(&to_beta).is_some_and(|peer| peer.dialer == to_beta)
    })
    .await;
    echo(&mut alpha.live(&to_beta).unwrap().open().await.unwrap()).await;
    echo(&mut second.open().await.unwrap()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn host_has_four_connections_and_other_hosts_have_theirs() {
    let folder = certificates(&["alpha", "beta", "gamma"]);
    let beta = echoing(folder.path(), "beta");
    tokio::spawn(Arc::clone(&beta).accept());
    let client = |host| stranger(folder.path(), &ShownCertificate::of(folder.path(), host), "127.0.0.1");
    let (alpha, gamma) = (client("alpha"), client("gamma"));
    let address = beta.local_address();
    let connect = move |client: Endpoint| async move {
        let connection = client.connect(address, "beta").unwrap().await?;
        let mut stream = connection.open_bi().await?;
        match is_echoed(&mut stream).await {
            true => Ok((connection, stream)),
            false => Err(connection.closed().await),
        }
    };
    // All at once, so that none of them is counted when the others are judged.
    let (mut all, mut tasks) = (Vec::new(), tokio::task::JoinSet::new());
    for _ in 0..8 {
        tasks.spawn(connect(alpha.clone()));
    }
    let mut refused = 0;
    while let Some(done) = in_time("the gateway decides", tasks.join_next()).await {
        match done.unwrap() {
            Ok(served) => all.push(served),
            Err(ConnectionError::ApplicationClosed(close)) => {
                let reason = String::from_utf8_lossy(&close.reason).into_owned();
                assert!(reason.contains("alpha has 4 connections"), "{reason}");
                refused += 1;
            }
            Err(other) => panic!("{other}"),
        }
    }
    assert_eq!((all.len(), refused), (CONNECTIONS_PER_HOST, 4));
    let _other = in_time("gamma is served", connect(gamma)).await.unwrap();
    for (_, stream) in &mut all {
        echo(stream).await;
    }
    drop(all);
    eventually("connections that have ended count no more", || {
        !lock(&beta.counts).contains_key(&Name::new("alpha").unwrap())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn control_characters_of_close_reason_are_removed() {
    let folder = certificates(&["alpha", "beta"]);
    let alpha = echoing(folder.path(), "alpha");
    let reason = format!("\u{1b}[2Jgone\n{}", "x".repeat(500));
    let answer = move |peer: Arc<PeerHost>, _, _| peer.connection.close(VarInt::from_u32(0), reason.as_bytes());
    let beta = listening(folder.path(), "beta", Box::new(answer));
    tokio::spawn(Arc::clone(&beta).accept());
    let peer = alpha.get(&Name::new("beta").unwrap(), &beta.local_address().to_string()).await.unwrap();
    let mut stream = peer.open().await.unwrap();
    assert!(!in_time("beta closes the connection", is_echoed(&mut stream)).await);
    // What the client here gets, at whichever moment it notices.
    for reason in [peer.end().unwrap(), peer.open().await.unwrap_err()] {
        assert!(reason.contains("[2Jgonexxx") && !reason.contains(char::is_control), "{reason:?}");
        assert_eq!(reason.chars().count(), 300);
    }
}

/// The first byte of a packet of QUIC tells its kind.
fn is_retry(packet: &[u8]) -> bool {
    packet[0] & 0xf0 == 0xf0
}

/// A way to a gateway that passes on what a client sends, and of the gateway's packets the retries. Returns its address for the client.
fn half_open_way(to: SocketAddr, from: &str) -> SocketAddr {
    let (near, far) = (UdpSocket::bind("127.0.0.1:0").unwrap(), UdpSocket::bind((from, 0)).unwrap());
    let address = near.local_addr().unwrap();
    far.connect(to).unwrap();
    let (near_too, far_too) = (near.try_clone().unwrap(), far.try_clone().unwrap());
    let client: Arc<Mutex<Option<SocketAddr>>> = Arc::default();
    let known = Arc::clone(&client);
    // Both end with the test's process.
    std::thread::spawn(move || {
        let mut buffer = [0; 2000];
        while let Ok((length, from)) = near.recv_from(&mut buffer) {
            *lock(&client) = Some(from);
            let _ = far.send(&buffer[..length]);
        }
    });
    std::thread::spawn(move || {
        let mut buffer = [0; 2000];
        loop {
            let Ok(length) = far_too.recv(&mut buffer) else { continue };
            if let Some(client) = lock(&known).filter(|_| is_retry(&buffer[..length])) {
                let _ = near_too.send_to(&buffer[..length], client);
            }
        }
    });
    address
}

#[tokio::test(flavor = "multi_thread")]
async fn strangers_that_never_finish_do_not_keep_hosts_away() {
    let folder = certificates(&["alpha", "beta"]);
    let (alpha, beta) = (echoing(folder.path(), "alpha"), echoing(folder.path(), "beta"));
    tokio::spawn(Arc::clone(&beta).accept());
    let client = stranger(folder.path(), &ShownCertificate::Nothing, "127.0.0.1");
    let way = half_open_way(beta.local_address(), "127.0.0.2");
    let attempts: Vec<_> = (0..128).map(|_| client.connect(way, "beta").unwrap()).collect();
    eventually("the stranger has as many as it may", || beta.handshakes.count() >= HANDSHAKES_PER_ADDRESS).await;
    // While they wait, and while further ones are refused.
    for _ in 0..3 {
        tokio::time::sleep(Duration::from_millis(200)).await;
        assert!(beta.handshakes.count() <= HANDSHAKES_PER_ADDRESS + 1);
    }
    let to_beta = Name::new("beta").unwrap();
    let peer = alpha.get(&to_beta, &beta.local_address().to_string()).await.unwrap();
    echo(&mut peer.open().await.unwrap()).await;
    drop(attempts);
}

#[tokio::test(flavor = "multi_thread")]
async fn packet_from_unproved_address_gets_small_retry_and_no_state() {
    let folder = certificates(&["beta"]);
    let beta = echoing(folder.path(), "beta");
    tokio::spawn(Arc::clone(&beta).accept());
    // What a client sends first, caught in transit.
    let client = stranger(folder.path(), &ShownCertificate::Nothing, "127.0.0.1");
    let trap = tokio::net::UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let attempt = client.connect(trap.local_addr().unwrap(), "beta").unwrap();
    let mut first = [0; 2000];
    let (length, _) = in_time("the client sends", trap.recv_from(&mut first)).await.unwrap();
    drop(attempt);
    // Sent from another address, as by an attacker who has invented it, and again and again.
    let victim = tokio::net::UdpSocket::bind("127.0.0.1:0").await.unwrap();
    victim.connect(beta.local_address()).await.unwrap();
    for _ in 0..100 {
        victim.send(&first[..length]).await.unwrap();
        let mut answer = [0; 2000];
        let got = in_time("the gateway answers", victim.recv(&mut answer)).await.unwrap();
        assert!(is_retry(&answer[..got]), "the gateway begins to shake hands with an address that is not proved");
        assert!(got * 3 < length, "{got} bytes for {length}");
        assert_eq!((beta.handshakes.count(), beta.endpoint.open_connections()), (0, 0));
    }
}
