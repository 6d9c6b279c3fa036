//! Secrets of teams, which header rules of sandboxes refer to by name. Values go in and never come out: they are sealed
//! for the database, and opened only for the policies of sandboxes.

use std::collections::{BTreeMap, BTreeSet};

use model::header::is_header_value;
use model::id::TeamId;
use model::secret::Secret;
use store::Store;
use store::error::StoreError;
use store::keys::SealedSecret;
use store::secrets::{SecretChange, SecretKey, SecretRow};
use uuid::Uuid;

use crate::clock::Clock;
use crate::seal::{SealError, Sealer};

/// Maximum length of a name, in characters.
pub(crate) const SECRET_NAME_MAX: usize = 128;
/// Maximum length of a value, in bytes: common servers accept no longer headers.
pub(crate) const SECRET_VALUE_MAX: usize = 8 * 1024;
/// Maximum number of entries in the metadata of a secret (API contract, like the following ones).
const METADATA_ENTRIES_MAX: usize = 32;
/// Maximum length of a key of the metadata, in bytes.
const METADATA_KEY_MAX: usize = 128;
/// Maximum length of a value of the metadata, in bytes.
const METADATA_VALUE_MAX: usize = 1024;
/// Maximum length of all keys and values of the metadata together, in bytes.
const METADATA_MAX: usize = 8192;
/// Maximum number of secrets of a team.
pub(crate) const SECRETS_OF_TEAM_MAX: u32 = 1000;
/// What ids begin with. No name does.
const ID_PREFIX: &str = "sec_";

/// Why a secret was not stored.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SecretError {
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The request is not acceptable; for the client.
    #[error("{0}")]
    Invalid(String),
    #[error("the team has a secret with this name")]
    Taken,
    #[error("the team has {SECRETS_OF_TEAM_MAX} secrets, and cannot have more")]
    TooMany,
    #[error("the team has no such secret")]
    Unknown,
    #[error(transparent)]
    Seal(#[from] SealError),
}

/// The secrets of all teams.
#[derive(Debug)]
pub(crate) struct Secrets {
    store: Store,
    sealer: Sealer,
    clock: Clock,
}

impl Secrets {
    pub(crate) fn new(store: Store, sealer: Sealer, clock: Clock) -> Self {
        Self { store, sealer, clock }
    }

    /// Stores a new secret.
    pub(crate) async fn create(
        &self,
        team: &TeamId,
        name: &str,
        value: &str,
        metadata: BTreeMap<String, String>,
    ) -> Result<SecretRow, SecretError> {
        let name = check_name(name).map_err(|why| SecretError::Invalid(why.to_owned()))?;
        check_value(value)?;
        check_metadata(&metadata)?;
        // Two concurrent requests may exceed the limit by one each, which is harmless.
        if self.store.secret_count(team).await? >= SECRETS_OF_TEAM_MAX {
            return Err(SecretError::TooMany);
        }
        let id = new_id();
        let now_us = self.clock.now_us();
        let row = SecretRow {
            value_sealed: SealedSecret::new(self.sealer.seal(&owner(&id), value)?),
            id,
            team_id: team.clone(),
            name,
            version: 1,
            metadata,
            created_us: now_us,
            updated_us: now_us,
        };
        match self.store.secret_insert(&row).await {
            Ok(()) => Ok(row),
            Err(StoreError::Conflict { .. }) => Err(SecretError::Taken),
            Err(error) => Err(error.into()),
        }
    }

    /// Sets the value of a secret, named by its id or name.
    pub(crate) async fn update(
        &self,
        team: &TeamId,
        secret: &str,
        value: &str,
        metadata: Option<BTreeMap<String, String>>,
    ) -> Result<SecretRow, SecretError> {
        check_value(value)?;
        metadata.as_ref().map(check_metadata).transpose()?;
        // The value is sealed for the id, which must be known first. An id is never used again.
        let row = self.find(team, secret).await?;
        let change = SecretChange {
            value_sealed: SealedSecret::new(self.sealer.seal(&owner(&row.id), value)?),
            metadata,
            updated_us: self.clock.now_us(),
        };
        let changed = self.store.secret_update(team, SecretKey::Id(&row.id), &change).await?;
        changed.ok_or(SecretError::Unknown)
    }

    /// A secret, named by its id or name.
    pub(crate) async fn find(&self, team: &TeamId, secret: &str) -> Result<SecretRow, SecretError> {
        let name = secret.to_lowercase();
        let found = self.store.secret_find(team, key(secret, &name)?).await?;
        found.ok_or(SecretError::Unknown)
    }

    /// Deletes a secret, named by its id or name.
    pub(crate) async fn delete(&self, team: &TeamId, secret: &str) -> Result<SecretRow, SecretError> {
        let name = secret.to_lowercase();
        let deleted = self.store.secret_delete(team, key(secret, &name)?).await?;
        deleted.ok_or(SecretError::Unknown)
    }

    /// The values of secrets, by name. Those that do not exist are left out.
    pub(crate) async fn values(
        &self,
        team: &TeamId,
        names: &BTreeSet<&str>,
    ) -> Result<BTreeMap<String, Secret>, StoreError> {
        let mut values = BTreeMap::new();
        for name in names {
            let Ok(key) = key(name, name) else { continue };
            let Some(row) = self.store.secret_find(team, key).await? else {
                continue;
            };
            match self.sealer.open(&owner(&row.id), row.value_sealed.as_str()) {
                Ok(value) => values.insert((*name).to_owned(), Secret::new(value)),
                Err(error) => {
                    tracing::error!(secret.id = row.id, "cannot open a secret: {error}");
                    continue;
                }
            };
        }
        Ok(values)
    }

    /// The names that no secret of the team has.
    pub(crate) async fn missing<'a>(
        &self,
        team: &TeamId,
        names: &BTreeSet<&'a str>,
    ) -> Result<Vec<&'a str>, StoreError> {
        let mut missing = Vec::new();
        for name in names {
            let found = match key(name, name) {
                Ok(key @ SecretKey::Name(_)) => self.store.secret_find(team, key).await?.is_some(),
                Ok(SecretKey::Id(_)) | Err(_) => false,
            };
            if !found {
                missing.push(*name);
            }
        }
        Ok(missing)
    }
}

/// The owner of a sealed value.
fn owner(id: &str) -> String {
    format!("secret/{id}")
}

/// Whether a text is an id or a name; `name` is the text in lower case.
fn key<'a>(text: &'a str, name: &'a str) -> Result<SecretKey<'a>, SecretError> {
    if text.contains('\0') {
        return Err(SecretError::Unknown);
    }
    Ok(if text.starts_with(ID_PREFIX) {
        SecretKey::Id(text)
    } else {
        SecretKey::Name(name)
    })
}

/// The name in its canonical form, if it is valid.
fn check_name(name: &str) -> Result<String, &'static str> {
    let canonical = name.to_lowercase();
    if canonical.is_empty() || canonical.chars().count() > SECRET_NAME_MAX {
        return Err("name must have 1 to 128 characters");
    }
    let is_invalid = |c: char| c.is_control() || matches!(c, '{' | '}' | '/');
    if canonical.chars().any(is_invalid) || canonical.trim() != canonical {
        return Err("name must not contain '{', '}', '/' or control characters, or begin or end with a space");
    }
    if canonical.starts_with(ID_PREFIX) {
        return Err("name must not begin with sec_, which is reserved for ids");
    }
    Ok(canonical)
}

fn check_value(value: &str) -> Result<(), SecretError> {
    if value.is_empty() || value.len() > SECRET_VALUE_MAX {
        let why = format!("value must have 1 to {SECRET_VALUE_MAX} bytes");
        return Err(SecretError::Invalid(why));
    }
    if !is_header_value(value) {
        let why = "value must consist of printable ASCII characters, because it is sent in headers of requests";
        return Err(SecretError::Invalid(why.to_owned()));
    }
    Ok(())
}

fn check_metadata(metadata: &BTreeMap<String, String>) -> Result<(), SecretError> {
    let invalid = |why: String| Err(SecretError::Invalid(format!("metadata: {why}")));
    if metadata.len() > METADATA_ENTRIES_MAX {
        return invalid(format!("at most {METADATA_ENTRIES_MAX} entries are allowed"));
    }
    let mut total = 0;
    for (key, value) in metadata {
        if key.len() > METADATA_KEY_MAX || value.len() > METADATA_VALUE_MAX {
            return invalid(format!(
                "a key must have at most {METADATA_KEY_MAX} bytes, and a value {METADATA_VALUE_MAX}"
            ));
        }
        if key.contains('\0') || value.contains('\0') {
            return invalid("keys and values must not contain a NUL character".to_owned());
        }
        total += key.len() + value.len();
    }
    if total > METADATA_MAX {
        return invalid(format!(
            "all keys and values together must have at most {METADATA_MAX} bytes"
        ));
    }
    Ok(())
}

/// A new id: the prefix and a UUID of version 7 in 26 characters of base 32, so that ids sort by time.
fn new_id() -> String {
    const DIGITS: &[u8; 32] = b"0123456789abcdefghjkmnpqrstvwxyz";
    let number = Uuid::now_v7().as_u128();
    let digits = (0..26).rev().map(|place| {
        let digit = (number >> (place * 5)) & 31;
        char::from(DIGITS[usize::try_from(digit).unwrap_or_default()])
    });
    ID_PREFIX.chars().chain(digits).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_sort_by_time() {
        let first = new_id();
        std::thread::sleep(std::time::Duration::from_millis(2));
        let second = new_id();
        assert!(first < second, "{first} {second}");
        assert_eq!(first.len(), 30);
        // 128 bits are 25 digits and 3 bits.
        assert!(matches!(first.as_bytes()[4], b'0'..=b'7'));
    }

    #[test]
    fn names_are_lower_case_and_fit_in_placeholders() {
        assert_eq!(check_name("OpenAI-Key").as_deref(), Ok("openai-key"));
        assert_eq!(check_name("a b.c_d").as_deref(), Ok("a b.c_d"));
        let longest = "n".repeat(SECRET_NAME_MAX);
        assert!(check_name(&longest).is_ok());
        for bad in [
            "",
            " a",
            "a ",
            "a{",
            "}",
            "a/b",
            "a\nb",
            "a\0",
            "sec_1",
            "SEC_1",
            &format!("{longest}n"),
        ] {
            assert!(check_name(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn values_fit_in_headers() {
        for good in ["x", "Bearer a b", "~!", &"v".repeat(SECRET_VALUE_MAX)] {
            assert!(check_value(good).is_ok());
        }
        for bad in ["", "a\n", "a\r\nb: c", "é", "\u{7f}", &"v".repeat(SECRET_VALUE_MAX + 1)] {
            assert!(check_value(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn metadata_is_bounded() {
        let texts = |count: usize, key: usize, value: usize| -> BTreeMap<String, String> {
            (0..count).map(|n| (format!("{n:0key$}"), "v".repeat(value))).collect()
        };
        for good in [
            texts(0, 1, 0),
            texts(32, 2, 254),
            texts(1, 128, 1024),
            texts(7, 128, 1024),
        ] {
            assert!(check_metadata(&good).is_ok());
        }
        for bad in [
            texts(33, 2, 1),
            texts(1, 129, 1),
            texts(1, 1, 1025),
            texts(8, 128, 1024),
            BTreeMap::from([("a".to_owned(), "\0".to_owned())]),
        ] {
            assert!(check_metadata(&bad).is_err());
        }
    }
}
