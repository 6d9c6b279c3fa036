//! HTTPS: selects and loads the certificate of the platform, and keeps it current.
//!
//! It is one of three: the operator's files, read again when they change; what an ACME server issues; or a certificate
//! of the data directory's own authority. Keys are wiped from memory once they are loaded, and nothing here prints any.

pub(crate) mod acme;
mod blocking;
mod checks;
mod files;
mod local;
mod pair;
#[cfg(test)]
mod tests;

use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result};
use server::tls::Tls;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio_util::sync::CancellationToken;

use self::acme::Acme;
use self::blocking::blocking;
pub(crate) use self::checks::host_of;
pub(crate) use self::files::Files;
use self::files::Stamp;
use crate::data_dir::DataDir;

/// How often the certificate of the local CA is looked at.
const LOCAL_CHECK: Duration = Duration::from_secs(12 * 60 * 60);

/// Whether HTTPS is enabled, and with which certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Https {
    /// Plain HTTP only.
    Off,
    /// With a certificate of the data directory's own authority.
    Local,
    /// With the operator's certificate.
    Files(Files),
    /// With the certificate of an ACME server.
    Acme(Box<Acme>),
}

/// A loaded certificate, and its source.
#[derive(Debug)]
pub(crate) struct Shown {
    /// For the server.
    pub(crate) tls: Tls,
    /// The CA certificate that clients must trust, if it is the local CA.
    pub(crate) authority: Option<PathBuf>,
    upkeep: Upkeep,
}

#[derive(Debug)]
enum Upkeep {
    Local { dir: DataDir, domain: String },
    Files { files: Files, loaded: Stamp },
    Acme(acme::Keeper),
}

/// Reads the certificate, or makes what is missing of the data directory's own; none when HTTPS is off. Nothing here
/// waits for an ACME server.
///
/// # Errors
/// When files cannot be read, written or used.
pub(crate) fn prepare(https: &Https, dir: &DataDir, domain: &str) -> Result<Option<Shown>> {
    let now = crate::clock::now();
    let local = || -> Result<Tls> {
        let pair = local::certificate(dir, domain, SystemTime::from(now))?;
        pair.load().context("load the certificate of the local CA")
    };
    match https {
        Https::Off => Ok(None),
        Https::Local => Ok(Some(Shown {
            tls: local()?,
            authority: Some(dir.path().join(local::AUTHORITY)),
            upkeep: Upkeep::Local {
                dir: dir.clone(),
                domain: domain.to_owned(),
            },
        })),
        Https::Files(files) => {
            let loaded = files.stamp();
            let tls = files.load()?;
            files.warn(host_of(domain), now);
            let files = files.clone();
            Ok(Some(Shown {
                tls,
                authority: None,
                upkeep: Upkeep::Files { files, loaded },
            }))
        }
        Https::Acme(acme) => {
            let keeper = acme::Keeper::new(acme.as_ref().clone(), dir)?;
            let tls = match keeper.stored(now) {
                Some(tls) => tls,
                None => local()?,
            };
            Ok(Some(Shown {
                tls,
                authority: None,
                upkeep: Upkeep::Acme(keeper),
            }))
        }
    }
}

impl Shown {
    /// Keeps the certificate current until `stop`. SIGHUP makes it look at once.
    ///
    /// # Errors
    /// When the signal handler cannot be installed.
    pub(crate) fn keep(self, stop: CancellationToken) -> Result<Tls> {
        let hangup = signal(SignalKind::hangup()).context("listen for SIGHUP")?;
        let tls = self.tls.clone();
        #[expect(
            clippy::disallowed_methods,
            reason = "it ends with `stop`, and holds nothing that anyone waits for"
        )]
        tokio::spawn(async move {
            let keep = async {
                match self.upkeep {
                    Upkeep::Local { dir, domain } => keep_local(dir, domain, self.tls, hangup).await,
                    Upkeep::Files { files, loaded } => files::watch(files, loaded, self.tls, hangup).await,
                    Upkeep::Acme(keeper) => keeper.keep(self.tls, hangup).await,
                }
            };
            stop.run_until_cancelled(keep).await;
        });
        Ok(tls)
    }
}

/// Renews the certificate of the local CA in a platform that runs for longer than it is valid.
async fn keep_local(dir: DataDir, domain: String, tls: Tls, mut hangup: Signal) {
    loop {
        tokio::select! {
            () = tokio::time::sleep(LOCAL_CHECK) => {}
            _ = hangup.recv() => {}
        }
        let (dir, domain) = (dir.clone(), domain.clone());
        let now = SystemTime::from(crate::clock::now());
        let renewed = blocking(move || local::certificate(&dir, &domain, now)).await;
        if let Err(error) = renewed.and_then(|pair| Ok(pair.replace(&tls)?)) {
            tracing::error!("cannot renew the certificate of the local CA: {error:#}");
        }
    }
}

/// The path of the CA certificate of the local CA, if it exists.
pub(crate) fn authority_of(data_dir: &Path) -> io::Result<Option<PathBuf>> {
    let path = data_dir.join(local::AUTHORITY);
    Ok(path.try_exists()?.then_some(path))
}
