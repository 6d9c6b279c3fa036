//! Secrets of teams, which header rules of sandboxes refer to by name.
//!
//! The value is sealed by the caller. Each change of it raises the version and replaces the value before.

use std::collections::BTreeMap;

use model::id::TeamId;

use crate::Store;
use crate::error::StoreError;
use crate::injection_rules::Stamp;
use crate::keys::SealedSecret;
use crate::row::{Columns, FromColumns, storable};

/// A secret of a team, with its sealed value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SecretRow {
    /// Id of the secret.
    pub id: String,
    /// The owning team.
    pub team_id: TeamId,
    /// Its name, unique in the team.
    pub name: String,
    /// How often its value was set.
    pub version: i64,
    /// The value, sealed by the caller.
    pub value_sealed: SealedSecret,
    /// Texts of the client.
    pub metadata: BTreeMap<String, String>,
    /// When it was created, in microseconds since the Unix epoch.
    pub created_us: i64,
    /// When its value was last set, in microseconds since the Unix epoch.
    pub updated_us: i64,
}

/// Selects a secret of a team.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SecretKey<'a> {
    /// The secret with this id.
    Id(&'a str),
    /// The secret with this name.
    Name(&'a str),
}

impl<'a> SecretKey<'a> {
    /// The id and the name to look for, of which one is none.
    fn columns(self) -> (Option<&'a str>, Option<&'a str>) {
        match self {
            Self::Id(id) => (Some(id), None),
            Self::Name(name) => (None, Some(name)),
        }
    }

    fn check(self) -> Result<(), StoreError> {
        let (Self::Id(text) | Self::Name(text)) = self;
        storable("secret name", text)
    }
}

/// A change of a secret.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SecretChange {
    /// The new value, sealed by the caller.
    pub value_sealed: SealedSecret,
    /// New metadata of the client, which replaces what the secret had; none to keep it.
    pub metadata: Option<BTreeMap<String, String>>,
    /// The time of the change, in microseconds since the Unix epoch.
    pub updated_us: i64,
}

impl FromColumns for SecretRow {
    const TABLE: &'static str = "secrets";

    fn from_columns(columns: &Columns<'_>) -> Result<Self, StoreError> {
        let metadata = columns.text("metadata_json")?;
        Ok(Self {
            id: columns.text("id")?,
            team_id: columns.id("team_id")?,
            name: columns.text("name")?,
            version: columns.int("version")?,
            value_sealed: SealedSecret::new(columns.text("value_sealed")?),
            metadata: serde_json::from_str(&metadata).map_err(|_| columns.corrupt("metadata_json"))?,
            created_us: columns.int("created_us")?,
            updated_us: columns.int("updated_us")?,
        })
    }
}

macro_rules! columns {
    () => {
        "id, team_id, name, version, value_sealed, metadata_json, created_us, updated_us"
    };
}

fn metadata_json(metadata: &BTreeMap<String, String>) -> Result<String, StoreError> {
    for (key, value) in metadata {
        storable("metadata", key)?;
        storable("metadata", value)?;
    }
    Ok(serde_json::to_string(metadata).expect("a map of texts is always JSON"))
}

impl Store {
    /// Stores a new secret.
    ///
    /// # Errors
    /// [`StoreError::Conflict`] when the team has one of that name; [`StoreError::Dangling`] when there is no such team.
    pub async fn secret_insert(&self, secret: &SecretRow) -> Result<(), StoreError> {
        storable("secret name", &secret.name)?;
        let query = sqlx::query(concat!(
            "INSERT INTO secrets (",
            columns!(),
            ") VALUES ($1, $2, $3, $4, $5, $6, $7, $8)"
        ))
        .bind(secret.id.as_str())
        .bind(secret.team_id.as_str())
        .bind(secret.name.as_str())
        .bind(secret.version)
        .bind(secret.value_sealed.as_str().to_owned())
        .bind(metadata_json(&secret.metadata)?)
        .bind(secret.created_us)
        .bind(secret.updated_us);
        self.db.write_durably("secret", "insert a secret", query).await?;
        Ok(())
    }

    /// Sets the value of a secret, and returns its row; none when the team has no such secret.
    pub async fn secret_update(
        &self,
        team: &TeamId,
        key: SecretKey<'_>,
        change: &SecretChange,
    ) -> Result<Option<SecretRow>, StoreError> {
        key.check()?;
        let metadata = change.metadata.as_ref().map(metadata_json).transpose()?;
        let (id, name) = key.columns();
        let query = sqlx::query(concat!(
            "UPDATE secrets SET version = version + 1, value_sealed = $4, metadata_json = COALESCE($5, metadata_json), \
             updated_us = $6 WHERE team_id = $1 AND (id = $2 OR name = $3) RETURNING ",
            columns!()
        ))
        .bind(team.as_str())
        .bind(id)
        .bind(name)
        .bind(change.value_sealed.as_str().to_owned())
        .bind(metadata)
        .bind(change.updated_us);
        self.db.write_returning_durably("change a secret", query).await
    }

    /// A secret of a team; none when the team has no such secret.
    pub async fn secret_find(&self, team: &TeamId, key: SecretKey<'_>) -> Result<Option<SecretRow>, StoreError> {
        key.check()?;
        let (id, name) = key.columns();
        let query = sqlx::query(concat!(
            "SELECT ",
            columns!(),
            " FROM secrets WHERE team_id = $1 AND (id = $2 OR name = $3)"
        ))
        .bind(team.as_str())
        .bind(id)
        .bind(name);
        self.db.read_optional("find a secret", query).await
    }

    /// Deletes a secret with all that is stored of it, and returns its row; none when the team has no such secret.
    pub async fn secret_delete(&self, team: &TeamId, key: SecretKey<'_>) -> Result<Option<SecretRow>, StoreError> {
        key.check()?;
        let (id, name) = key.columns();
        let query = sqlx::query(concat!(
            "DELETE FROM secrets WHERE team_id = $1 AND (id = $2 OR name = $3) RETURNING ",
            columns!()
        ))
        .bind(team.as_str())
        .bind(id)
        .bind(name);
        self.db.write_returning_durably("delete a secret", query).await
    }

    /// Secrets of a team, newest first, after that with this time and id.
    pub async fn secret_list(
        &self,
        team: &TeamId,
        after: Option<(i64, &str)>,
        limit: u32,
    ) -> Result<Vec<SecretRow>, StoreError> {
        let (created_us, id) = after.unwrap_or((i64::MAX, ""));
        storable("page token", id)?;
        let query = sqlx::query(concat!(
            "SELECT ",
            columns!(),
            " FROM secrets WHERE team_id = $1 AND (created_us < $2 OR (created_us = $2 AND id < $3)) \
             ORDER BY created_us DESC, id DESC LIMIT $4"
        ))
        .bind(team.as_str())
        .bind(created_us)
        .bind(id)
        .bind(i64::from(limit));
        self.db.read_all("list secrets", query).await
    }

    /// What differs after a change of any secret.
    pub async fn secret_stamp(&self) -> Result<Stamp, StoreError> {
        let query = sqlx::query(
            "SELECT COUNT(*) AS total, CAST(COALESCE(SUM(updated_us % 1000000007 + version), 0) AS BIGINT) AS times \
             FROM secrets",
        );
        let stamp = self.db.read_optional("read the times of secrets", query).await?;
        Ok(stamp.unwrap_or_default())
    }

    /// Counts the secrets of a team.
    pub async fn secret_count(&self, team: &TeamId) -> Result<u32, StoreError> {
        let query = sqlx::query("SELECT COUNT(*) AS value FROM secrets WHERE team_id = $1").bind(team.as_str());
        self.db.read_number("count secrets", query).await
    }
}
