//! The operator's configuration of ACME, and its problems.

use std::path::{Path, PathBuf};
use std::time::Duration;

use jiff::Timestamp;
use server::tls::Validity;
use sha2::{Digest as _, Sha256};

use super::hook::Hook;
use super::http;
use super::stored::{CERTIFICATE, Stored, life};
use crate::tls::checks::{expiry_problem, uncovered};
use crate::tls::local;

/// What to ask which server for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Acme {
    /// The address of the server's directory.
    pub(crate) directory: String,
    /// Mail addresses of the operator.
    pub(crate) contact: Vec<String>,
    /// The names of the certificate.
    pub(crate) domains: Vec<String>,
    /// What changes DNS records.
    pub(crate) hook: Hook,
    /// How long records take to appear.
    pub(crate) dns_wait: Duration,
    /// The CA certificates of the server, if it has no public certificate.
    pub(crate) ca: Option<PathBuf>,
}

impl Acme {
    /// The directory of the files, relative to the data directory: a name for people, and a hash that tells directories
    /// of one server apart.
    pub(super) fn place(&self) -> String {
        let url = self.directory.strip_prefix("https://").unwrap_or(&self.directory);
        let host: String = url
            .chars()
            .take_while(|c| c.is_ascii_alphanumeric() || ['.', '-'].contains(c))
            .collect();
        let hash = Sha256::digest(self.directory.as_bytes());
        let hash = u32::from_be_bytes([hash[0], hash[1], hash[2], hash[3]]);
        format!("{}/acme/{host}-{hash:08x}", local::DIRECTORY)
    }

    /// What `doctor` finds wrong: what makes every request for a certificate fail.
    pub(crate) fn problem(&self) -> Option<String> {
        if let Err(error) = http::trusted(self.ca.as_deref()) {
            return Some(format!("{error:#}"));
        }
        self.hook.problem()
    }

    /// Whether others could change what the platform runs as root.
    pub(crate) fn exposure(&self) -> Option<String> {
        self.hook.exposure()
    }

    /// The validity of the stored certificate, if there is one for all names, and the problem with it.
    pub(crate) fn state(&self, data_dir: &Path, now: Timestamp) -> Option<(Validity, Option<String>)> {
        let content = std::fs::read(data_dir.join(self.place()).join(CERTIFICATE)).ok()?;
        let stored = Stored::parse(&content)?;
        if !uncovered(&stored.pair.leaf()?, &self.domains).is_empty() {
            return None;
        }
        // A half of what is left after the renewal is due: it has failed for as long.
        let soon = life(stored.validity) / 6;
        Some((stored.validity, expiry_problem(stored.validity, now, soon)))
    }
}
