//! API keys and access keys, and the types that they share with access tokens.
//!
//! Of an API key only the SHA-256 is stored, computed by the caller: it cannot be used to act for the owner. The secret
//! of an access key signs requests and must be recoverable, so the caller seals it first. Neither appears in an error
//! or in debug output.

use std::fmt;

use model::id::{TeamId, UserId};

use crate::Store;
use crate::error::StoreError;
use crate::row::{Columns, FromColumns, storable};

/// The SHA-256 of an API key or access token, as text (hexadecimal by convention of the caller).
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct KeyHash(String);

impl KeyHash {
    /// Wraps the text of a hash.
    #[must_use]
    pub fn new(text: String) -> Self {
        Self(text)
    }

    /// The text of the hash.
    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for KeyHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("KeyHash(hidden)")
    }
}

/// The part of a key or token that people recognise it by, too short to guess the rest. Displayed as `e2b_53...dd90`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyMask {
    /// The common prefix of all keys of its kind, e.g. `e2b_`.
    pub prefix: String,
    /// The number of characters after the prefix.
    pub value_length: u32,
    /// The first two characters; empty when the key is too short to show any.
    pub first: String,
    /// The last four characters; empty when the key is too short to show any.
    pub last: String,
}

/// Replaces the hidden middle of a key.
const HIDDEN: &str = "...";
/// Length of the shortest value of which a part is shown.
const SHOWN_FROM: usize = 8;

impl KeyMask {
    /// The mask of a key that consists of `prefix` and `value`.
    ///
    /// # Panics
    /// When `value` is longer than 4 GiB.
    #[must_use]
    pub fn of(prefix: &str, value: &str) -> Self {
        let shown = value.len() >= SHOWN_FROM && value.is_ascii();
        Self {
            prefix: prefix.to_owned(),
            value_length: u32::try_from(value.len()).expect("keys are shorter than 4 GiB"),
            first: if shown { value[..2].to_owned() } else { String::new() },
            last: if shown {
                value[value.len() - 4..].to_owned()
            } else {
                String::new()
            },
        }
    }

    /// Decodes the columns `mask` and `value_length`.
    pub(crate) fn from_columns(columns: &Columns<'_>) -> Result<Self, StoreError> {
        let text = columns.text("mask")?;
        let (shown, last) = text.split_once(HIDDEN).ok_or_else(|| columns.corrupt("mask"))?;
        let at = shown.rfind('_').map_or(0, |at| at + 1);
        Ok(Self {
            prefix: shown[..at].to_owned(),
            value_length: columns.count("value_length")?,
            first: shown[at..].to_owned(),
            last: last.to_owned(),
        })
    }
}

impl fmt::Display for KeyMask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}{HIDDEN}{}", self.prefix, self.first, self.last)
    }
}

/// A secret encrypted by the caller, opaque to the store.
#[derive(Clone, PartialEq, Eq)]
pub struct SealedSecret(String);

impl SealedSecret {
    /// Wraps ciphertext in text form.
    #[must_use]
    pub fn new(text: String) -> Self {
        Self(text)
    }

    /// The ciphertext, for the caller who can open it.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for SealedSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SealedSecret(hidden)")
    }
}

/// An API key, without the key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApiKeyRow {
    /// A UUID.
    pub id: String,
    /// The team that the key acts for.
    pub team_id: TeamId,
    /// The user that the key belongs to.
    pub user_id: UserId,
    /// The name that its owner gave the key.
    pub name: String,
    /// The recognisable part of the key.
    pub mask: KeyMask,
    /// When it was created, in microseconds since the Unix epoch.
    pub created_us: i64,
    /// When it was revoked, in microseconds since the Unix epoch; none while it is valid.
    pub revoked_us: Option<i64>,
    /// The last recorded use, in microseconds since the Unix epoch; none when no use was recorded.
    pub last_used_us: Option<i64>,
}

/// The owner of an API key that a request presented.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApiKeyOwner {
    /// The id of the key.
    pub key_id: String,
    /// The team that the key acts for.
    pub team_id: TeamId,
    /// The user that the key belongs to.
    pub user_id: UserId,
}

/// A pair of access key and secret key, which signs requests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AccessKeyRow {
    /// The access key, which a request names.
    pub id: String,
    /// The team that the key acts for.
    pub team_id: TeamId,
    /// The user that the key belongs to.
    pub user_id: UserId,
    /// The name that its owner gave the key.
    pub name: String,
    /// The secret key, sealed by the caller.
    pub secret_sealed: SealedSecret,
    /// When it was created, in microseconds since the Unix epoch.
    pub created_us: i64,
    /// When it was revoked, in microseconds since the Unix epoch; none while it is valid.
    pub revoked_us: Option<i64>,
}

impl FromColumns for ApiKeyRow {
    const TABLE: &'static str = "api_keys";

    fn from_columns(columns: &Columns<'_>) -> Result<Self, StoreError> {
        Ok(Self {
            id: columns.text("id")?,
            team_id: columns.id("team_id")?,
            user_id: columns.id("user_id")?,
            name: columns.text("name")?,
            mask: KeyMask::from_columns(columns)?,
            created_us: columns.int("created_us")?,
            revoked_us: columns.int_opt("revoked_us")?,
            last_used_us: columns.int_opt("last_used_us")?,
        })
    }
}

impl FromColumns for ApiKeyOwner {
    const TABLE: &'static str = "api_keys";

    fn from_columns(columns: &Columns<'_>) -> Result<Self, StoreError> {
        Ok(Self {
            key_id: columns.text("id")?,
            team_id: columns.id("team_id")?,
            user_id: columns.id("user_id")?,
        })
    }
}

impl FromColumns for AccessKeyRow {
    const TABLE: &'static str = "access_keys";

    fn from_columns(columns: &Columns<'_>) -> Result<Self, StoreError> {
        Ok(Self {
            id: columns.text("id")?,
            team_id: columns.id("team_id")?,
            user_id: columns.id("user_id")?,
            name: columns.text("name")?,
            secret_sealed: SealedSecret(columns.text("secret_sealed")?),
            created_us: columns.int("created_us")?,
            revoked_us: columns.int_opt("revoked_us")?,
        })
    }
}

/// The columns of an [`ApiKeyRow`].
macro_rules! api_key_columns {
    () => {
        "id, team_id, user_id, name, mask, value_length, created_us, revoked_us, last_used_us"
    };
}

impl Store {
    /// Stores a new API key under its hash.
    ///
    /// # Errors
    /// [`StoreError::Conflict`] when the id or the hash is taken; [`StoreError::Dangling`] when there is no such team
    /// or user.
    pub async fn api_key_insert(&self, key: &ApiKeyRow, hash: &KeyHash) -> Result<(), StoreError> {
        storable("key name", &key.name)?;
        let query = sqlx::query(
            "INSERT INTO api_keys \
             (id, team_id, user_id, name, hash, mask, value_length, created_us, revoked_us, last_used_us) \
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)",
        )
        .bind(key.id.as_str())
        .bind(key.team_id.as_str())
        .bind(key.user_id.as_str())
        .bind(key.name.as_str())
        .bind(hash.as_str())
        .bind(key.mask.to_string())
        .bind(i64::from(key.mask.value_length))
        .bind(key.created_us)
        .bind(key.revoked_us)
        .bind(key.last_used_us);
        self.db.write_durably("API key", "insert an API key", query).await?;
        Ok(())
    }

    /// The API keys of a team, revoked ones included, oldest first.
    pub async fn api_key_list(&self, team: &TeamId) -> Result<Vec<ApiKeyRow>, StoreError> {
        let query = sqlx::query(concat!(
            "SELECT ",
            api_key_columns!(),
            " FROM api_keys WHERE team_id = $1 ORDER BY created_us, id"
        ))
        .bind(team.as_str());
        self.db.read_all("list API keys", query).await
    }

    /// Revokes an API key and returns it; none if there is no such key. A key that was revoked before keeps its time.
    pub async fn api_key_revoke(&self, id: &str, revoked_us: i64) -> Result<Option<ApiKeyRow>, StoreError> {
        storable("key ID", id)?;
        let query = sqlx::query(concat!(
            "UPDATE api_keys SET revoked_us = COALESCE(revoked_us, $2) WHERE id = $1 RETURNING ",
            api_key_columns!()
        ))
        .bind(id)
        .bind(revoked_us);
        self.db.write_returning_durably("revoke an API key", query).await
    }

    /// Revokes an API key of a team. `false` when the team has no such key, or it was revoked before. The row stays, so
    /// that the same key cannot be created again.
    pub async fn api_key_revoke_of(&self, team: &TeamId, id: &str, revoked_us: i64) -> Result<bool, StoreError> {
        storable("key ID", id)?;
        let query =
            sqlx::query("UPDATE api_keys SET revoked_us = $3 WHERE id = $1 AND team_id = $2 AND revoked_us IS NULL")
                .bind(id)
                .bind(team.as_str())
                .bind(revoked_us);
        let changed = self.db.write_durably("API key", "revoke an API key", query).await?;
        Ok(changed > 0)
    }

    /// Renames an API key of a team and returns it; none when the team has no such key, or it was revoked.
    pub async fn api_key_rename(&self, team: &TeamId, id: &str, name: &str) -> Result<Option<ApiKeyRow>, StoreError> {
        storable("key ID", id)?;
        storable("key name", name)?;
        let query = sqlx::query(concat!(
            "UPDATE api_keys SET name = $3 WHERE id = $1 AND team_id = $2 AND revoked_us IS NULL RETURNING ",
            api_key_columns!()
        ))
        .bind(id)
        .bind(team.as_str())
        .bind(name);
        self.db.write_returning_durably("rename an API key", query).await
    }

    /// Records a use of an API key, unless a later one is recorded. This is a write, so callers should limit how often
    /// they record a use.
    pub async fn api_key_used(&self, id: &str, at_us: i64) -> Result<(), StoreError> {
        let query =
            sqlx::query("UPDATE api_keys SET last_used_us = $2 WHERE id = $1 AND COALESCE(last_used_us, $2 - 1) < $2")
                .bind(id)
                .bind(at_us);
        self.db.write("API key", "record the use of a key", query).await?;
        Ok(())
    }

    /// Returns the owner of the key with this hash; none if there is no such key or it was revoked.
    pub async fn api_key_by_hash(&self, hash: &KeyHash) -> Result<Option<ApiKeyOwner>, StoreError> {
        let query = sqlx::query("SELECT id, team_id, user_id FROM api_keys WHERE hash = $1 AND revoked_us IS NULL")
            .bind(hash.as_str());
        self.db.read_optional("find an API key", query).await
    }

    /// Stores a new access key.
    ///
    /// # Errors
    /// [`StoreError::Conflict`] when the id is taken; [`StoreError::Dangling`] when there is no such team or user.
    pub async fn access_key_insert(&self, key: &AccessKeyRow) -> Result<(), StoreError> {
        storable("key name", &key.name)?;
        let query = sqlx::query(
            "INSERT INTO access_keys (id, team_id, user_id, name, secret_sealed, created_us, revoked_us) \
             VALUES ($1, $2, $3, $4, $5, $6, $7)",
        )
        .bind(key.id.as_str())
        .bind(key.team_id.as_str())
        .bind(key.user_id.as_str())
        .bind(key.name.as_str())
        .bind(key.secret_sealed.0.as_str())
        .bind(key.created_us)
        .bind(key.revoked_us);
        self.db
            .write_durably("access key", "insert an access key", query)
            .await?;
        Ok(())
    }

    /// The access keys of a team, revoked ones included, oldest first.
    pub async fn access_key_list(&self, team: &TeamId) -> Result<Vec<AccessKeyRow>, StoreError> {
        let query = sqlx::query(
            "SELECT id, team_id, user_id, name, secret_sealed, created_us, revoked_us FROM access_keys \
             WHERE team_id = $1 ORDER BY created_us, id",
        )
        .bind(team.as_str());
        self.db.read_all("list access keys", query).await
    }

    /// Returns the access key with this id; none if there is no such key or it was revoked, so that a caller cannot
    /// forget to check.
    pub async fn access_key_by_id(&self, id: &str) -> Result<Option<AccessKeyRow>, StoreError> {
        storable("key ID", id)?;
        let query = sqlx::query(
            "SELECT id, team_id, user_id, name, secret_sealed, created_us, revoked_us FROM access_keys \
             WHERE id = $1 AND revoked_us IS NULL",
        )
        .bind(id);
        self.db.read_optional("find an access key", query).await
    }

    /// Revokes an access key and returns it; none if there is no such key. A key that was revoked before keeps its
    /// time.
    pub async fn access_key_revoke(&self, id: &str, revoked_us: i64) -> Result<Option<AccessKeyRow>, StoreError> {
        storable("key ID", id)?;
        let query = sqlx::query(
            "UPDATE access_keys SET revoked_us = COALESCE(revoked_us, $2) WHERE id = $1 \
             RETURNING id, team_id, user_id, name, secret_sealed, created_us, revoked_us",
        )
        .bind(id)
        .bind(revoked_us);
        self.db.write_returning_durably("revoke an access key", query).await
    }
}
