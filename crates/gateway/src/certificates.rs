//! Certificates for the hosts of a cluster, by an authority that is made for it.

use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use partywall::cluster::Name;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
};
use time::{Duration, OffsetDateTime};

use crate::GatewayError;

/// How long the authority's certificate is valid.
const YEARS: i64 = 10;

/// Makes certificates for hosts in `folder`: `ca.pem` and `ca.key` unless they are there, and `HOST.pem` and `HOST.key` for each host that does not have
/// both. Returns the hosts that have new ones. Existing files are not replaced.
///
/// # Errors
/// [`GatewayError`] names the file or the host.
///
/// ```
/// # let folder = tempfile::tempdir()?;
/// partywall_gateway::certificates::make(folder.path(), &["alpha".into()], 365)?;
/// let made = partywall_gateway::certificates::make(folder.path(), &["alpha".into(), "beta".into()], 365)?;
/// assert_eq!(made, ["beta"]);
/// assert!(folder.path().join("ca.pem").exists() && folder.path().join("beta.key").exists());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn make(folder: &Path, hosts: &[String], days: u16) -> Result<Vec<String>, GatewayError> {
    make_until(folder, hosts, OffsetDateTime::now_utc() + Duration::days(days.into()))
}

/// The same, with the moment until which the certificates of hosts are valid.
pub(crate) fn make_until(folder: &Path, hosts: &[String], end: OffsetDateTime) -> Result<Vec<String>, GatewayError> {
    for host in hosts {
        Name::new(host).map_err(|e| wrong(host, e))?;
        if host == "ca" {
            return Err(wrong(host, "the files of the authority have this name"));
        }
    }
    let (ca, ca_key) = (folder.join("ca.pem"), folder.join("ca.key"));
    let mut params = named("Partywall cluster", OffsetDateTime::now_utc() + Duration::days(YEARS * 365))?;
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    if !ca.exists() {
        let key = KeyPair::generate().map_err(|e| wrong("ca", e))?;
        let certificate = params.self_signed(&key).map_err(|e| wrong("ca", e))?;
        write(&ca_key, &key.serialize_pem(), 0o600)?;
        write(&ca, &certificate.pem(), 0o644)?;
    }
    let key = KeyPair::from_pem(&crate::config::read(&ca_key)?).map_err(|e| wrong("ca.key", e))?;
    // The authority's name and the use of its key are always the same, so its certificate need not be read.
    let issuer = Issuer::from_params(&params, key);
    let file = |host: &str, kind| folder.join(format!("{host}.{kind}"));
    let lacks_file = |host: &&String| !file(host, "key").exists() || !file(host, "pem").exists();
    let new: Vec<String> = hosts.iter().filter(lacks_file).cloned().collect();
    for host in &new {
        let key = KeyPair::generate().map_err(|e| wrong(host, e))?;
        let mut params = named(host, end)?;
        params.subject_alt_names = vec![rcgen::SanType::DnsName(host.as_str().try_into().map_err(|e| wrong(host, e))?)];
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        params.use_authority_key_identifier_extension = true;
        let certificate = params.signed_by(&key, &issuer).map_err(|e| wrong(host, e))?;
        write(&file(host, "key"), &key.serialize_pem(), 0o600)?;
        write(&file(host, "pem"), &certificate.pem(), 0o644)?;
    }
    Ok(new)
}

fn wrong(what: &str, reason: impl ToString) -> GatewayError {
    GatewayError::Tls { what: what.to_owned(), reason: reason.to_string() }
}

fn named(name: &str, end: OffsetDateTime) -> Result<CertificateParams, GatewayError> {
    let mut params = CertificateParams::new(Vec::new()).map_err(|e| wrong(name, e))?;
    params.distinguished_name.push(DnType::CommonName, name);
    // Clocks of hosts differ.
    params.not_before = OffsetDateTime::now_utc() - Duration::hours(1);
    params.not_after = end;
    Ok(params)
}

/// Writes a new file.
fn write(path: &Path, text: &str, mode: u32) -> Result<(), GatewayError> {
    let file = OpenOptions::new().write(true).create_new(true).mode(mode).open(path);
    let written = file.and_then(|mut file| file.write_all(text.as_bytes()));
    written.map_err(|source| GatewayError::File { doing: "write", path: path.to_owned(), source })
}
