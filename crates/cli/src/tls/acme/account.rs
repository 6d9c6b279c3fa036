//! The account at an ACME server: made once, and kept with its key in the data directory.

use anyhow::{Context, Result};
use instant_acme::{Account, AccountBuilder, AccountCredentials, NewAccount};
use secrecy::zeroize::Zeroizing;
use serde::{Deserialize, Serialize};

use super::settings::Acme;
use crate::data_dir::DataDir;
use crate::tls::blocking::blocking;

/// What the file holds.
#[derive(Serialize, Deserialize)]
struct Record {
    contact: Vec<String>,
    credentials: AccountCredentials,
}

/// The accounts of a data directory at one server.
pub(super) struct Accounts {
    dir: DataDir,
    /// The file, relative to the data directory.
    name: String,
}

impl Accounts {
    pub(super) fn new(dir: DataDir, name: String) -> Self {
        Self { dir, name }
    }

    /// The account, made if there is none.
    ///
    /// # Errors
    /// When the server does not answer or refuses, or the file cannot be read or written.
    pub(super) async fn open(&self, acme: &Acme, builder: AccountBuilder) -> Result<Account> {
        let contact: Vec<String> = acme.contact.iter().map(|mail| format!("mailto:{mail}")).collect();
        let contact: Vec<&str> = contact.iter().map(String::as_str).collect();
        let Some(record) = self.read().await? else {
            let new = NewAccount {
                contact: &contact,
                terms_of_service_agreed: true,
                only_return_existing: false,
            };
            let (account, credentials) = builder
                .create(&new, acme.directory.clone(), None)
                .await
                .context("create an account")?;
            self.write(&acme.contact, credentials).await?;
            return Ok(account);
        };
        let known = record.contact == acme.contact;
        let kept = (!known).then(|| serde_json::to_vec(&record.credentials)).transpose()?;
        let account = builder
            .from_credentials(record.credentials)
            .await
            .context("use the account")?;
        if let Some(kept) = kept.map(Zeroizing::new) {
            account.update_contacts(&contact).await.context("change the contact")?;
            self.write(&acme.contact, serde_json::from_slice(&kept)?).await?;
        }
        Ok(account)
    }

    /// Forgets the account: the server does not know it.
    ///
    /// # Errors
    /// When the file cannot be removed.
    pub(super) fn forget(&self) -> Result<()> {
        tracing::warn!("the ACME server does not know the account: creating another one");
        self.dir.remove(&self.name)
    }

    async fn read(&self) -> Result<Option<Record>> {
        let (dir, name) = (self.dir.clone(), self.name.clone());
        blocking(move || {
            let Some(content) = dir.read(&name)? else {
                return Ok(None);
            };
            // Without the parser's reason, which could quote what it read.
            let record = serde_json::from_slice(&content).ok();
            let record = record.with_context(|| {
                let path = dir.path().join(&name);
                format!("{} contains no account; remove it to create a new one", path.display())
            })?;
            Ok(Some(record))
        })
        .await
    }

    async fn write(&self, contact: &[String], credentials: AccountCredentials) -> Result<()> {
        let record = Record {
            contact: contact.to_vec(),
            credentials,
        };
        let content = Zeroizing::new(serde_json::to_vec(&record).context("write the account")?);
        let (dir, name) = (self.dir.clone(), self.name.clone());
        blocking(move || dir.write_private(&name, &content)).await
    }
}
