//! The local CA of a data directory, and the certificate that it issues for the platform.
//!
//! Clients are told once to trust `tls/ca.pem`, so it outlives everything: the server's certificate is made again when
//! it runs out or the domain changes, always by the same authority. All that is in `ca.pem` follows from `ca.key`, its
//! times too, so a lost `ca.pem` comes back as what clients trust already, and a wrong clock does no harm to it. The
//! key is read only to sign: it may be kept elsewhere in between.
//!
//! Whether a certificate will do is decided by verifying it as a client would, not by what was once written down.
//! Python's strict checks want an authority key identifier, Go wants names in the extension and not in the subject,
//! and Apple's clients refuse certificates that are valid for longer than 397 days.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
    PublicKeyData as _, date_time_ymd,
};
use rustls::RootCertStore;
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::ServerCertVerifier as _;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use secrecy::zeroize::Zeroizing;
use server::tls::provider;
use sha2::{Digest as _, Sha256};

use super::checks::{exposure, host_of};
use super::pair::Pair;
use crate::data_dir::DataDir;

/// The directory of the files below, relative to the data directory.
pub(super) const DIRECTORY: &str = "tls";
/// The authority's certificate, below the data directory: for everybody.
pub(super) const AUTHORITY: &str = "tls/ca.pem";
/// The private key of the CA. With it, any host can be impersonated towards clients that trust the CA.
const AUTHORITY_KEY: &str = "tls/ca.key";
/// The platform's certificate.
const CERTIFICATE: &str = "tls/server.pem";
/// The platform's private key.
const KEY: &str = "tls/server.key";

/// Mode of public files.
const PUBLIC: u32 = 0o644;
/// Mode of private files.
const PRIVATE: u32 = 0o600;

const DAY: Duration = Duration::from_secs(24 * 60 * 60);
/// Validity of a certificate, beginning a day before it is issued for clients whose clocks are behind.
const VALID: Duration = DAY.saturating_mul(396);
/// Time before expiry at which a certificate is renewed.
const RENEW: Duration = DAY.saturating_mul(30);

/// The platform's certificate for a domain; creates or renews what is missing, does not match or expires soon.
///
/// # Errors
/// When files cannot be read or written, or the CA key is invalid.
pub(super) fn certificate(dir: &DataDir, domain: &str, now: SystemTime) -> Result<Pair> {
    dir.make_directory(DIRECTORY)?;
    for key in [AUTHORITY_KEY, KEY] {
        if let Some(exposure) = exposure(&dir.path().join(key)) {
            tracing::warn!("{exposure}");
        }
    }
    let host = host_of(domain);
    let authority = dir.read(AUTHORITY)?;
    if let Some(pair) = present(dir, authority.as_ref().map(|pem| pem.as_slice()), host, now)? {
        return Ok(pair);
    }

    let authority_key = authority_key(dir, authority.is_some())?;
    let params = authority_params(&authority_key);
    let issuer = Issuer::from_params(&params, &authority_key);
    let key = KeyPair::generate().context("generate a private key")?;
    let made = server_params(host, now)?
        .signed_by(&key, &issuer)
        .context("create the certificate")?
        .pem();
    if !authority.is_some_and(|authority| accepted(&authority, made.as_bytes(), host, now)) {
        let authority = params
            .self_signed(&authority_key)
            .context("create the certificate authority")?;
        dir.write(AUTHORITY, PUBLIC, authority.pem().as_bytes())?;
        tracing::info!(
            "created a local CA: clients must trust {}",
            dir.path().join(AUTHORITY).display()
        );
    }
    let key = Zeroizing::new(key.serialize_pem());
    // A crash between the two leaves a pair that does not fit, which is then made again.
    dir.write(KEY, PRIVATE, key.as_bytes())?;
    dir.write(CERTIFICATE, PUBLIC, made.as_bytes())?;
    tracing::info!("created a certificate for {host} and *.{host}");
    if !host.contains('.') {
        tracing::warn!(
            "most clients reject a wildcard below a top-level domain such as *.{host}: choose a domain with a dot"
        );
    }
    Ok(Pair {
        certificates: made.into_bytes(),
        key: Zeroizing::new(key.as_bytes().to_vec()),
    })
}

/// The certificate of an earlier start, if clients accept it and it does not expire soon.
fn present(dir: &DataDir, authority: Option<&[u8]>, host: &str, now: SystemTime) -> Result<Option<Pair>> {
    let (Some(authority), Some(certificate), Some(key)) = (authority, dir.read(CERTIFICATE)?, dir.read(KEY)?) else {
        return Ok(None);
    };
    // A clock that went back makes it one of the future.
    let will_do = [now, now + RENEW]
        .into_iter()
        .all(|at| accepted(authority, &certificate, host, at));
    let pair = Pair {
        certificates: certificate.to_vec(),
        key,
    };
    Ok((will_do && pair.load().is_ok()).then_some(pair))
}

fn authority_key(dir: &DataDir, was_there: bool) -> Result<KeyPair> {
    if let Some(pem) = dir.read(AUTHORITY_KEY)? {
        let path = dir.path().join(AUTHORITY_KEY);
        let text = std::str::from_utf8(&pem).ok();
        // Without the parser's reason, which could quote what it read.
        return text
            .and_then(|text| KeyPair::from_pem(text).ok())
            .with_context(|| format!("{} contains no private key in PEM", path.display()));
    }
    if was_there {
        tracing::warn!(
            "{} is missing: creating a new local CA, which clients must be configured to trust",
            dir.path().join(AUTHORITY_KEY).display()
        );
    }
    let key = KeyPair::generate().context("generate a private key")?;
    let pem = Zeroizing::new(key.serialize_pem());
    dir.write(AUTHORITY_KEY, PRIVATE, pem.as_bytes())?;
    Ok(key)
}

/// The authority of a key. Its name is the key's as well, since clients that trust two authorities of one name may try
/// the wrong one only.
fn authority_params(key: &KeyPair) -> CertificateParams {
    let digest = Sha256::digest(key.subject_public_key_info());
    let name = format!("Ringfence local authority {}", hex::encode(&digest[..4]));
    let mut params = CertificateParams::default();
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params.not_before = date_time_ymd(2025, 1, 1);
    params.not_after = date_time_ymd(2049, 12, 31);
    params
}

fn server_params(host: &str, now: SystemTime) -> Result<CertificateParams> {
    let mut names = vec![
        host.to_owned(),
        format!("*.{host}"),
        "localhost".to_owned(),
        "127.0.0.1".to_owned(),
        "::1".to_owned(),
    ];
    names.sort();
    names.dedup();
    let mut params = CertificateParams::new(names).with_context(|| format!("create a certificate for {host}"))?;
    params.distinguished_name = rcgen::DistinguishedName::new();
    // The domain may be longer than a subject can be, and clients read the names from the extension.
    params.distinguished_name.push(DnType::CommonName, "Ringfence");
    params.is_ca = IsCa::ExplicitNoCa;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    params.use_authority_key_identifier_extension = true;
    let begin = now.duration_since(UNIX_EPOCH).unwrap_or_default().saturating_sub(DAY);
    params.not_before = date_time_ymd(1970, 1, 1) + begin;
    params.not_after = params.not_before + VALID;
    Ok(params)
}

/// Whether a client that trusts `authority` takes `certificate` at that time for every name of the platform.
fn accepted(authority: &[u8], certificate: &[u8], host: &str, at: SystemTime) -> bool {
    let accept = || -> Result<()> {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(authority)?)?;
        let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider()).build()?;
        let certificate = CertificateDer::from_pem_slice(certificate)?;
        let at = UnixTime::since_unix_epoch(at.duration_since(UNIX_EPOCH).unwrap_or_default());
        let mut names = vec![
            host.to_owned(),
            "localhost".to_owned(),
            "127.0.0.1".to_owned(),
            "::1".to_owned(),
        ];
        if host.contains('.') {
            names.push(format!("api.{host}"));
        }
        // A domain that is not a DNS name cannot be requested by a client either.
        for name in names.into_iter().filter_map(|name| ServerName::try_from(name).ok()) {
            verifier.verify_server_cert(&certificate, &[], &name, &[], at)?;
        }
        Ok(())
    };
    match accept() {
        Ok(()) => true,
        Err(error) => {
            tracing::debug!("replacing the certificate: {error:#}");
            false
        }
    }
}

/// Names of the files, for the tests.
#[cfg(test)]
pub(super) fn files(dir: &std::path::Path) -> [std::path::PathBuf; 4] {
    [AUTHORITY, AUTHORITY_KEY, CERTIFICATE, KEY].map(|name| dir.join(name))
}
