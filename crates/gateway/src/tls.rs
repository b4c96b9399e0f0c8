//! Certificates: what this gateway shows, and which host the other gateway has proved to be (protocol H6.1).

use std::any::Any;
use std::path::Path;
use std::sync::Arc;

use partywall::cluster::Name;
use rustls::RootCertStore;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use webpki::EndEntityCert;

use crate::GatewayError;
use crate::config::GatewayConfig;

/// What both sides call the protocol on their streams.
pub(crate) const PROTOCOL: &[u8] = b"partywall/1";

/// The configurations of both sides of a connection, and the host that this gateway's certificate is for.
pub(crate) struct HostCredentials {
    pub(crate) client: quinn::crypto::rustls::QuicClientConfig,
    pub(crate) server: quinn::crypto::rustls::QuicServerConfig,
    pub(crate) host: Name,
}

fn wrong(what: &Path, reason: impl ToString) -> GatewayError {
    GatewayError::Tls { what: what.display().to_string(), reason: reason.to_string() }
}

impl HostCredentials {
    pub(crate) fn read(config: &GatewayConfig) -> Result<Self, GatewayError> {
        let certificates = |path: &Path| -> Result<Vec<CertificateDer<'static>>, GatewayError> {
            let all = CertificateDer::pem_file_iter(path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
            match all {
                Ok(all) if !all.is_empty() => Ok(all),
                Ok(_) => Err(wrong(path, "there is no certificate in it")),
                Err(e) => Err(wrong(path, e)),
            }
        };
        let mut roots = RootCertStore::empty();
        for certificate in certificates(&config.ca)? {
            roots.add(certificate).map_err(|e| wrong(&config.ca, e))?;
        }
        let roots = Arc::new(roots);
        let chain = certificates(&config.certificate)?;
        let host = host_of(&chain).map_err(|reason| wrong(&config.certificate, reason))?;
        let key = || PrivateKeyDer::from_pem_file(&config.key).map_err(|e| wrong(&config.key, e));
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let versions = &[&rustls::version::TLS13];
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(&provider))
            .build()
            .map_err(|e| wrong(&config.ca, e))?;
        let mut server = rustls::ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(versions)
            .map_err(|e| wrong(&config.certificate, e))?
            .with_client_cert_verifier(verifier)
            .with_single_cert(chain.clone(), key()?)
            .map_err(|e| wrong(&config.certificate, e))?;
        server.alpn_protocols = vec![PROTOCOL.to_vec()];
        let mut client = rustls::ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(versions)
            .map_err(|e| wrong(&config.certificate, e))?
            .with_root_certificates(roots)
            .with_client_auth_cert(chain, key()?)
            .map_err(|e| wrong(&config.certificate, e))?;
        client.alpn_protocols = vec![PROTOCOL.to_vec()];
        // Each connection proves again who the hosts are.
        client.resumption = rustls::client::Resumption::disabled();
        Ok(Self {
            client: client.try_into().map_err(|e| wrong(&config.certificate, e))?,
            server: server.try_into().map_err(|e| wrong(&config.certificate, e))?,
            host,
        })
    }
}

/// The host that a certificate is for: it has one DNS name, which is the name of the host.
fn host_of(chain: &[CertificateDer<'_>]) -> Result<Name, String> {
    let first = chain.first().ok_or("there is no certificate")?;
    let certificate = EndEntityCert::try_from(first).map_err(|e| e.to_string())?;
    let mut names = certificate.valid_dns_names();
    match (names.next(), names.next()) {
        (Some(name), None) => Name::new(name).map_err(|e| format!("its DNS name is no name of a host: {e}")),
        (None, _) => Err("it has no DNS name, which would be the name of the host".to_owned()),
        _ => Err("it has several DNS names, and so does not say which host it is for".to_owned()),
    }
}

/// The host that the other side of a connection has proved to be.
pub(crate) fn peer_host(identity: Option<Box<dyn Any>>) -> Result<Name, String> {
    let chain = identity.and_then(|identity| identity.downcast::<Vec<CertificateDer<'static>>>().ok());
    host_of(&chain.ok_or("it has shown no certificate")?)
}

#[cfg(test)]
mod tests;
