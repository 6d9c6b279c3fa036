//! The operator's certificate files, read again when they change.
//!
//! Programs that renew certificates replace files in different ways: in place, by a rename, by a symlink to a
//! directory. So what is compared is who the two paths lead to, every second, and not events of a directory. A change
//! is read once it has been the same for two looks, so that two files that are written one after the other are seldom
//! met halfway; what cannot be used is reported once, and the present certificate stays.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use jiff::{SignedDuration, Timestamp};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use secrecy::zeroize::Zeroizing;
use server::tls::{Tls, Validity};
use tokio::signal::unix::Signal;

use super::blocking::blocking;
use super::checks::{expiry_problem, exposure, names_of, uncovered};
use super::pair::Pair;

/// How often the files are looked at.
const LOOK: Duration = Duration::from_secs(1);
/// How long before its end a certificate is reported: what renews it has had its chance.
const SOON: SignedDuration = SignedDuration::from_hours(7 * 24);

/// The operator's certificate, both files in PEM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Files {
    /// The certificate chain, server certificate first.
    pub(crate) certificates: PathBuf,
    /// The private key.
    pub(crate) key: PathBuf,
}

/// What the two paths lead to; none for one that leads nowhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stamp([Option<FileStamp>; 2]);

/// Device, inode, size, and the nanoseconds of modification and of change.
type FileStamp = (u64, u64, u64, i128, i128);

impl Files {
    /// What the files are now.
    pub(super) fn stamp(&self) -> Stamp {
        Stamp([&self.certificates, &self.key].map(|path| {
            let file = std::fs::metadata(path).ok()?;
            let time = |seconds: i64, nanoseconds: i64| i128::from(seconds) * 1_000_000_000 + i128::from(nanoseconds);
            Some((
                file.dev(),
                file.ino(),
                file.size(),
                time(file.mtime(), file.mtime_nsec()),
                time(file.ctime(), file.ctime_nsec()),
            ))
        }))
    }

    fn read(&self) -> Result<Pair> {
        let read = |path: &Path| std::fs::read(path).with_context(|| format!("read {}", path.display()));
        Ok(Pair {
            certificates: read(&self.certificates)?,
            key: Zeroizing::new(read(&self.key)?),
        })
    }

    /// Reads both files.
    ///
    /// # Errors
    /// When one cannot be read, or they cannot be used together.
    pub(crate) fn load(&self) -> Result<Tls> {
        self.read()?.load().with_context(|| self.to_string())
    }

    pub(super) fn reload(&self, tls: &Tls) -> Result<()> {
        self.read()?.replace(tls).with_context(|| self.to_string())
    }

    /// The problem with the key file if other users can access it.
    pub(crate) fn exposure(&self) -> Option<String> {
        exposure(&self.key)
    }

    fn leaf(&self) -> Option<CertificateDer<'static>> {
        CertificateDer::from_pem_slice(&std::fs::read(&self.certificates).ok()?).ok()
    }

    /// Host names of the platform that the certificate does not cover; empty if it cannot be parsed.
    pub(crate) fn uncovered(&self, host: &str) -> Vec<String> {
        let names = names_of(host);
        let leaf = self.leaf();
        let missing = leaf.map_or_else(Vec::new, |leaf| uncovered(&leaf, &names));
        missing.into_iter().map(str::to_owned).collect()
    }

    /// What is wrong with the time for which the certificate is valid.
    pub(crate) fn expiry_problem(&self, now: Timestamp) -> Option<String> {
        expiry_problem(Validity::of(&self.leaf()?)?, now, SOON)
    }

    pub(super) fn warn(&self, host: &str, now: Timestamp) {
        if let Some(exposure) = self.exposure() {
            tracing::warn!("{exposure}");
        }
        // The bare domain is not used: clients prepend `api.` or the label of a sandbox.
        for name in self.uncovered(host).iter().filter(|name| name.starts_with('*')) {
            tracing::warn!("{self} are not valid for {name}: clients will refuse to connect to sandboxes");
        }
        if let Some(problem) = self.expiry_problem(now) {
            tracing::warn!("the certificate in {} {problem}", self.certificates.display());
        }
    }
}

impl std::fmt::Display for Files {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} and {}", self.certificates.display(), self.key.display())
    }
}

/// Loads the files whenever they have changed since `loaded`, and at every SIGHUP.
pub(super) async fn watch(files: Files, loaded: Stamp, tls: Tls, mut hangup: Signal) {
    let mut known = loaded;
    let mut before = loaded;
    loop {
        let forced = tokio::select! {
            () = tokio::time::sleep(LOOK) => false,
            _ = hangup.recv() => true,
        };
        let looking = files.clone();
        let Ok(stamp) = blocking(move || Ok(looking.stamp())).await else {
            continue;
        };
        let settled = stamp == before;
        before = stamp;
        if !forced && (stamp == known || !settled) {
            continue;
        }
        known = stamp;
        let (reading, target) = (files.clone(), tls.clone());
        let reloaded = blocking(move || reading.reload(&target)).await;
        let why = if forced { "SIGHUP" } else { "the files have changed" };
        match reloaded {
            Ok(()) => {
                tracing::info!("{why}: reloaded {files}");
                if let Some(problem) = files.expiry_problem(crate::clock::now()) {
                    tracing::warn!("the certificate in {} {problem}", files.certificates.display());
                }
            }
            Err(error) => tracing::error!("{why}: reload failed, keeping the current certificate: {error:#}"),
        }
    }
}
