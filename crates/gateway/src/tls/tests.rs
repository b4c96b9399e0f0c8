//! Certificates that do not prove which host the other side is.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use quinn::{ConnectionError, Endpoint};
use time::{Duration, OffsetDateTime};

use crate::certificates::make_until;
use crate::peers::PeerHosts;
use crate::testing::{ShownCertificate, certificates, echoing, false_server, in_time, is_echoed, name, stranger};

/// The error of QUIC for an alert of TLS.
const fn alert(number: u64) -> u64 {
    0x100 + number
}
const CERTIFICATE_EXPIRED: u64 = alert(45);
const UNKNOWN_AUTHORITY: u64 = alert(48);
const DECRYPT_ERROR: u64 = alert(51);
const CERTIFICATE_REQUIRED: u64 = alert(116);

/// A gateway that takes connections, and its address.
fn accepting(folder: &Path, host: &str) -> (Arc<PeerHosts>, SocketAddr) {
    let peers = echoing(folder, host);
    tokio::spawn(Arc::clone(&peers).accept());
    let address = peers.local_address();
    (peers, address)
}

/// Connects and opens a stream. Returns why the gateway has closed the connection, or `None` if it serves the stream.
async fn refusal(client: &Endpoint, to: SocketAddr) -> Option<u64> {
    let attempt = async {
        let connection = client.connect(to, "beta").unwrap().await?;
        let mut stream = connection.open_bi().await?;
        match is_echoed(&mut stream).await {
            true => Ok(()),
            false => Err(connection.closed().await),
        }
    };
    match in_time("the gateway decides", attempt).await {
        Ok(()) => None,
        Err(ConnectionError::ConnectionClosed(close)) => Some(close.error_code.into()),
        Err(other) => panic!("{other}"),
    }
}

/// Has a gateway connect to a server that is called `host` and shows a certificate. Returns the reason why it does not.
async fn dial(gateway: &Arc<PeerHosts>, host: &str, server: SocketAddr) -> String {
    match in_time("the gateway decides", gateway.get(&name(host), &server.to_string())).await {
        Ok(_) => panic!("the gateway takes the server for {host}"),
        Err(reason) => reason,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn client_with_certificate_of_its_host_is_served() {
    let folder = certificates(&["alpha", "beta"]);
    let (_beta, address) = accepting(folder.path(), "beta");
    let client = stranger(folder.path(), &ShownCertificate::of(folder.path(), "alpha"), "127.0.0.1");
    assert_eq!(refusal(&client, address).await, None);
}

#[tokio::test(flavor = "multi_thread")]
async fn client_without_certificate_is_refused() {
    let folder = certificates(&["beta"]);
    let (_beta, address) = accepting(folder.path(), "beta");
    let client = stranger(folder.path(), &ShownCertificate::Nothing, "127.0.0.1");
    assert_eq!(refusal(&client, address).await, Some(CERTIFICATE_REQUIRED));
}

#[tokio::test(flavor = "multi_thread")]
async fn client_with_certificate_of_other_authority_is_refused() {
    let (folder, other) = (certificates(&["beta"]), certificates(&["alpha"]));
    let (_beta, address) = accepting(folder.path(), "beta");
    let client = stranger(folder.path(), &ShownCertificate::of(other.path(), "alpha"), "127.0.0.1");
    // The false authority has the name of the right one, so its signature is what is wrong.
    let refused = refusal(&client, address).await;
    assert!(matches!(refused, Some(UNKNOWN_AUTHORITY | DECRYPT_ERROR)), "{refused:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn client_with_expired_certificate_is_refused() {
    let folder = certificates(&["beta"]);
    make_until(folder.path(), &["alpha".into()], OffsetDateTime::now_utc() - Duration::minutes(1)).unwrap();
    let (_beta, address) = accepting(folder.path(), "beta");
    let client = stranger(folder.path(), &ShownCertificate::of(folder.path(), "alpha"), "127.0.0.1");
    assert_eq!(refusal(&client, address).await, Some(CERTIFICATE_EXPIRED));
}

#[tokio::test(flavor = "multi_thread")]
async fn client_with_certificate_but_not_its_key_is_refused() {
    let folder = certificates(&["alpha", "beta", "gamma"]);
    let (_beta, address) = accepting(folder.path(), "beta");
    // Certificates are no secret: gamma shows that of alpha.
    let shown = ShownCertificate::Certificate { folder: folder.path(), of: "alpha", key_of: "gamma" };
    let client = stranger(folder.path(), &shown, "127.0.0.1");
    assert_eq!(refusal(&client, address).await, Some(DECRYPT_ERROR));
}

#[tokio::test(flavor = "multi_thread")]
async fn server_with_certificate_of_other_host_is_not_used() {
    let folder = certificates(&["alpha", "beta", "gamma"]);
    let alpha = echoing(folder.path(), "alpha");
    let server = false_server(folder.path(), "gamma");
    assert!(dial(&alpha, "beta", server).await.contains("not valid for name"));
}

#[tokio::test(flavor = "multi_thread")]
async fn server_with_certificate_of_other_authority_is_not_used() {
    let (folder, other) = (certificates(&["alpha"]), certificates(&["beta"]));
    let alpha = echoing(folder.path(), "alpha");
    let reason = dial(&alpha, "beta", false_server(other.path(), "beta")).await;
    assert!(reason.contains("UnknownIssuer") || reason.contains("BadSignature"), "{reason}");
}

#[tokio::test(flavor = "multi_thread")]
async fn server_with_expired_certificate_is_not_used() {
    let folder = certificates(&["alpha"]);
    make_until(folder.path(), &["beta".into()], OffsetDateTime::now_utc() - Duration::minutes(1)).unwrap();
    let alpha = echoing(folder.path(), "alpha");
    let reason = dial(&alpha, "beta", false_server(folder.path(), "beta")).await;
    assert!(reason.contains("expired"), "{reason}");
}
