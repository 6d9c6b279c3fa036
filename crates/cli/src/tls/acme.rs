//! A certificate from an ACME server: asked for when there is none, renewed in time, and never waited for.
//!
//! The platform serves what it has: the certificate of an earlier start, or until there is one, that of the local CA.
//! One task asks for certificates, and after a failure tries again after one minute, then two, up to six hours. Each
//! directory has files of its own below `tls/acme`, so that a try with a staging server leaves the account and the
//! certificate of the other one alone. Chain and key are one file, because two could not be replaced at once.

mod account;
mod http;
mod order;
mod settings;
mod stored;
#[cfg(test)]
mod tests;

mod hook;

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use jiff::{SignedDuration, Timestamp};
use secrecy::zeroize::Zeroizing;
use server::tls::{Tls, Validity};
use tokio::signal::unix::Signal;

pub(crate) use self::hook::Hook;
pub(crate) use self::settings::Acme;
use self::stored::{CERTIFICATE, Stored, life};
use super::blocking::blocking;
use super::checks::uncovered;
use super::local;
use crate::data_dir::DataDir;

/// Longest sleep: a clock that was set, or a host that was suspended, is noticed after it.
const LOOK: Duration = Duration::from_secs(60 * 60);
/// Time until the second try.
const RETRY_MIN: Duration = Duration::from_secs(60);
/// Most time between two tries.
const RETRY_MAX: Duration = Duration::from_secs(6 * 60 * 60);
/// Least time until the next try after the server said that there were too many: the limits count per hour or week.
const RETRY_LIMITED: Duration = Duration::from_secs(60 * 60);

/// When to renew: after two thirds of its life, and up to a fiftieth of it earlier, so that platforms that were started
/// together do not ask together.
fn due(validity: Validity, jitter: f64) -> Timestamp {
    let life = life(validity).as_secs_f64();
    let after = SignedDuration::try_from_secs_f64(life * (2.0 / 3.0 - jitter / 50.0)).unwrap_or_default();
    validity.not_before.checked_add(after).unwrap_or(validity.not_after)
}

/// Time until the next try after `failures` in a row, with a certificate that is valid for another `left`.
fn pause(failures: u32, limited: bool, left: Option<SignedDuration>, jitter: f64) -> Duration {
    let doubled = RETRY_MIN.saturating_mul(1 << (failures.clamp(1, 16) - 1));
    // Certificates that live for hours are retried in time, too.
    let cap = left.map_or(RETRY_MAX, |left| Duration::try_from(left).unwrap_or_default() / 8);
    let base = doubled.min(cap.clamp(RETRY_MIN, RETRY_MAX));
    let base = if limited { base.max(RETRY_LIMITED) } else { base };
    base.mul_f64(0.8 + 0.4 * jitter)
}

/// A random number from 0 to 1.
fn jitter() -> f64 {
    getrandom::u32().map_or(0.5, |random| f64::from(random) / f64::from(u32::MAX))
}

/// Keeps the certificate of a platform current.
pub(super) struct Keeper {
    acme: Acme,
    dir: DataDir,
    place: String,
    /// When to ask for the next certificate; at once if there is none.
    due: Option<Timestamp>,
    valid: Option<Validity>,
}

impl std::fmt::Debug for Keeper {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Keeper")
            .field("place", &self.place)
            .finish_non_exhaustive()
    }
}

impl Keeper {
    pub(super) fn new(acme: Acme, dir: &DataDir) -> Result<Self> {
        let place = acme.place();
        dir.make_directory(local::DIRECTORY)?;
        dir.make_directory(&format!("{}/acme", local::DIRECTORY))?;
        dir.make_directory(&place)?;
        let mut keeper = Self {
            acme,
            dir: dir.clone(),
            place,
            due: None,
            valid: None,
        };
        let now = crate::clock::now();
        if let Some(stored) = keeper.read()?
            && stored.validity.not_after > now
            && uncovered(
                &stored.pair.leaf().context("read the certificate")?,
                &keeper.acme.domains,
            )
            .is_empty()
        {
            keeper.valid = Some(stored.validity);
            keeper.due = Some(due(stored.validity, jitter()));
        }
        Ok(keeper)
    }

    fn read(&self) -> Result<Option<Stored>> {
        let name = Path::new(&self.place).join(CERTIFICATE);
        let Some(content) = self.dir.read(&name)? else {
            return Ok(None);
        };
        let stored = Stored::parse(&content);
        if stored.is_none() {
            let path = self.dir.path().join(name);
            tracing::warn!("{} is damaged: asking for another certificate", path.display());
        }
        Ok(stored)
    }

    /// The certificate of an earlier start, if it is still valid for all names.
    pub(super) fn stored(&self, now: Timestamp) -> Option<Tls> {
        self.valid.filter(|validity| validity.not_after > now)?;
        self.read().ok().flatten()?.pair.load().ok()
    }

    /// Asks for certificates, and shows them to the clients of `tls`. SIGHUP makes it try at once after a failure.
    pub(super) async fn keep(mut self, tls: Tls, mut hangup: Signal) {
        let mut failures = 0;
        let mut retry_at = None;
        loop {
            let now = crate::clock::now();
            let at = retry_at.max(self.due).unwrap_or(now);
            if at > now {
                let wait = Duration::try_from(at.duration_since(now)).unwrap_or_default();
                tokio::select! {
                    () = tokio::time::sleep(wait.min(LOOK)) => {}
                    _ = hangup.recv() => {
                        retry_at = None;
                        if let (0, Some(valid), Some(due)) = (failures, self.valid, self.due) {
                            let until = valid.not_after;
                            tracing::info!("SIGHUP: the certificate is valid until {until} and due for renewal at {due}");
                        }
                    }
                }
                continue;
            }
            match self.renew(&tls).await {
                Ok(validity) => {
                    failures = 0;
                    retry_at = None;
                    let names = self.acme.domains.join(", ");
                    tracing::info!("issued a certificate for {names}, valid until {}", validity.not_after);
                }
                Err(error) => {
                    failures += 1;
                    let now = crate::clock::now();
                    let left = self.valid.map(|valid| valid.not_after.duration_since(now));
                    let pause = pause(failures, order::is_rate_limit(&error), left, jitter());
                    let next = SignedDuration::try_from(pause).unwrap_or_default();
                    retry_at = now.checked_add(next).ok();
                    let serving = match left {
                        Some(left) if left.is_positive() => "the present certificate stays in use",
                        Some(_) => "the present certificate has expired, and clients refuse it",
                        None => "until there is one, clients get that of the local CA",
                    };
                    tracing::error!(
                        "cannot get a certificate from {}: {error:#}; {serving}; next try in {} s, or at SIGHUP",
                        self.acme.directory,
                        pause.as_secs()
                    );
                }
            }
        }
    }

    async fn renew(&mut self, tls: &Tls) -> Result<Validity> {
        let accounts = account::Accounts::new(self.dir.clone(), format!("{}/account.json", self.place));
        let pair = order::obtain(&self.acme, &accounts).await?;
        // Looked at before anything is replaced: no server may take a good certificate away.
        pair.load().context("use the issued certificate")?;
        let leaf = pair.leaf().context("parse the issued certificate")?;
        let missing = uncovered(&leaf, &self.acme.domains);
        if !missing.is_empty() {
            bail!("the issued certificate is not valid for {}", missing.join(" and "));
        }
        let validity = pair.validity().context("read the validity of the issued certificate")?;
        let due = due(validity, jitter());
        if due <= crate::clock::now() {
            bail!(
                "the issued certificate is valid until {} only: check the clock of this host",
                validity.not_after
            );
        }
        let mut content = Zeroizing::new(pair.key.to_vec());
        content.extend_from_slice(&pair.certificates);
        let (dir, name) = (self.dir.clone(), format!("{}/{CERTIFICATE}", self.place));
        blocking(move || dir.write_private(&name, &content)).await?;
        pair.replace(tls).context("use the issued certificate")?;
        self.valid = Some(validity);
        self.due = Some(due);
        Ok(validity)
    }
}
