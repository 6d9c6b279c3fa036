//! HTTPS: selects and loads the certificate of the platform.
//!
//! Either the operator's files, read again at SIGHUP, or a certificate of the data directory's own authority. Keys are
//! wiped from memory once they are loaded, and nothing here prints any.

mod local;
#[cfg(test)]
mod tests;

use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use anyhow::{Context, Result};
use rustls::client::verify_server_name;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::server::ParsedCertificate;
use secrecy::zeroize::Zeroizing;
use server::tls::Tls;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::data_dir::DataDir;

/// Whether HTTPS is enabled, and with which certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Https {
    /// Plain HTTP only.
    Off,
    /// With a certificate of the data directory's own authority.
    Local,
    /// With the operator's certificate.
    Files(Files),
}

/// The operator's certificate, both files in PEM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Files {
    /// The certificate chain, server certificate first.
    pub(crate) certificates: PathBuf,
    /// The private key.
    pub(crate) key: PathBuf,
}

/// A loaded certificate.
#[derive(Debug)]
pub(crate) struct Shown {
    /// For the server.
    pub(crate) tls: Tls,
    /// The CA certificate that clients must trust, if it is the local CA.
    pub(crate) authority: Option<PathBuf>,
}

/// Reads the operator's certificate, or makes what is missing of the data directory's own; none when HTTPS is off.
///
/// # Errors
/// When files cannot be read, written or used.
pub(crate) fn prepare(https: &Https, dir: &DataDir, domain: &str) -> Result<Option<Shown>> {
    match https {
        Https::Off => Ok(None),
        Https::Local => Ok(Some(Shown {
            tls: local::certificate(dir, domain, SystemTime::from(crate::clock::now()))?,
            authority: Some(dir.path().join(local::AUTHORITY)),
        })),
        Https::Files(files) => {
            let tls = files.load()?;
            files.warn(domain);
            Ok(Some(Shown { tls, authority: None }))
        }
    }
}

impl Files {
    fn read(&self) -> Result<(Vec<u8>, Zeroizing<Vec<u8>>)> {
        let read = |path: &Path| std::fs::read(path).with_context(|| format!("read {}", path.display()));
        Ok((read(&self.certificates)?, Zeroizing::new(read(&self.key)?)))
    }

    /// Reads both files.
    ///
    /// # Errors
    /// When one cannot be read, or they cannot be used together.
    pub(crate) fn load(&self) -> Result<Tls> {
        let (certificates, key) = self.read()?;
        Tls::from_pem(&certificates, &key).with_context(|| self.to_string())
    }

    fn reload(&self, tls: &Tls) -> Result<()> {
        let (certificates, key) = self.read()?;
        tls.replace(&certificates, &key).with_context(|| self.to_string())
    }

    /// The problem with the key file if other users can access it.
    pub(crate) fn exposure(&self) -> Option<String> {
        exposure(&self.key)
    }

    /// Host names of the platform that the certificate does not cover; empty if it cannot be parsed.
    pub(crate) fn uncovered(&self, domain: &str) -> Vec<String> {
        let Ok((certificates, _)) = self.read() else {
            return Vec::new();
        };
        let Ok(certificate) = CertificateDer::from_pem_slice(&certificates) else {
            return Vec::new();
        };
        let Ok(parsed) = ParsedCertificate::try_from(&certificate) else {
            return Vec::new();
        };
        let host = host_of(domain);
        [host.to_owned(), format!("*.{host}")]
            .into_iter()
            .filter(|name| {
                // A wildcard matches exactly one label.
                ServerName::try_from(name.replace('*', "api"))
                    .is_ok_and(|name| verify_server_name(&parsed, &name).is_err())
            })
            .collect()
    }

    fn warn(&self, domain: &str) {
        if let Some(exposure) = self.exposure() {
            tracing::warn!("{exposure}");
        }
        // The bare domain is not used: clients prepend `api.` or the label of a sandbox.
        for name in self.uncovered(domain).iter().filter(|name| name.starts_with('*')) {
            tracing::warn!("{self} are not valid for {name}: clients will refuse to connect to sandboxes");
        }
    }
}

impl std::fmt::Display for Files {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} and {}", self.certificates.display(), self.key.display())
    }
}

/// Reads the operator's files again at every SIGHUP, until `stop`. What cannot be used is reported, and the present
/// certificate stays.
///
/// # Errors
/// When the signal handler cannot be installed.
pub(crate) fn reload_on_hangup(files: Files, tls: Tls, stop: CancellationToken) -> Result<()> {
    let mut hangup = signal(SignalKind::hangup()).context("listen for SIGHUP")?;
    #[expect(
        clippy::disallowed_methods,
        reason = "it ends with `stop`, and holds nothing that anyone waits for"
    )]
    tokio::spawn(async move {
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                signal = hangup.recv() => if signal.is_none() { return },
            }
            match files.reload(&tls) {
                Ok(()) => tracing::info!("SIGHUP: reloaded {files}"),
                Err(error) => tracing::error!("SIGHUP: reload failed, keeping the current certificate: {error:#}"),
            }
        }
    });
    Ok(())
}

/// A domain without its port.
fn host_of(domain: &str) -> &str {
    domain.split_once(':').map_or(domain, |(host, _)| host)
}

/// What is wrong with a file that holds a private key: others may read it, or more than its owner may write it. A
/// group that may read is how distributions hand keys to services.
fn exposure(path: &Path) -> Option<String> {
    let mode = std::fs::metadata(path).ok()?.mode() & 0o777;
    (mode & 0o027 != 0).then(|| {
        format!(
            "{} contains a private key and has mode {mode:04o}; set it to 0600",
            path.display()
        )
    })
}

/// The path of the CA certificate of the local CA, if it exists.
pub(crate) fn authority_of(data_dir: &Path) -> io::Result<Option<PathBuf>> {
    let path = data_dir.join(local::AUTHORITY);
    Ok(path.try_exists()?.then_some(path))
}
