//! Access tokens: a user's own credential for managing keys and teams.
//!
//! Stored like API keys, as a hash and a mask. Deleting a token deletes its row.

use model::id::{TeamId, UserId};

use crate::Store;
use crate::error::StoreError;
use crate::keys::{KeyHash, KeyMask};
use crate::row::{Columns, FromColumns, storable};

/// An access token, without the token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AccessTokenRow {
    /// A UUID.
    pub id: String,
    /// The user that the token acts for.
    pub user_id: UserId,
    /// The name that its owner gave the token.
    pub name: String,
    /// The recognisable part of the token.
    pub mask: KeyMask,
    /// When it was created, in microseconds since the Unix epoch.
    pub created_us: i64,
    /// The last recorded use, in microseconds since the Unix epoch; none when no use was recorded.
    pub last_used_us: Option<i64>,
}

/// The owner of an access token that a request presented.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AccessTokenOwner {
    /// The id of the token.
    pub token_id: String,
    /// The user that the token belongs to.
    pub user_id: UserId,
    /// The team of the user.
    pub team_id: TeamId,
}

impl FromColumns for AccessTokenRow {
    const TABLE: &'static str = "access_tokens";

    fn from_columns(columns: &Columns<'_>) -> Result<Self, StoreError> {
        Ok(Self {
            id: columns.text("id")?,
            user_id: columns.id("user_id")?,
            name: columns.text("name")?,
            mask: KeyMask::from_columns(columns)?,
            created_us: columns.int("created_us")?,
            last_used_us: columns.int_opt("last_used_us")?,
        })
    }
}

impl FromColumns for AccessTokenOwner {
    const TABLE: &'static str = "access_tokens";

    fn from_columns(columns: &Columns<'_>) -> Result<Self, StoreError> {
        Ok(Self {
            token_id: columns.text("id")?,
            user_id: columns.id("user_id")?,
            team_id: columns.id("team_id")?,
        })
    }
}

impl Store {
    /// Stores a new access token under its hash.
    ///
    /// # Errors
    /// [`StoreError::Conflict`] when the id or the hash is taken; [`StoreError::Dangling`] when there is no such user.
    pub async fn access_token_insert(&self, token: &AccessTokenRow, hash: &KeyHash) -> Result<(), StoreError> {
        storable("token name", &token.name)?;
        let query = sqlx::query(
            "INSERT INTO access_tokens (id, user_id, name, hash, mask, value_length, created_us, last_used_us) \
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8)",
        )
        .bind(token.id.as_str())
        .bind(token.user_id.as_str())
        .bind(token.name.as_str())
        .bind(hash.as_str())
        .bind(token.mask.to_string())
        .bind(i64::from(token.mask.value_length))
        .bind(token.created_us)
        .bind(token.last_used_us);
        self.db
            .write_durably("access token", "insert an access token", query)
            .await?;
        Ok(())
    }

    /// The access tokens of a user, oldest first.
    pub async fn access_token_list(&self, user: &UserId) -> Result<Vec<AccessTokenRow>, StoreError> {
        let query = sqlx::query(
            "SELECT id, user_id, name, mask, value_length, created_us, last_used_us FROM access_tokens \
             WHERE user_id = $1 ORDER BY created_us, id",
        )
        .bind(user.as_str());
        self.db.read_all("list access tokens", query).await
    }

    /// Returns the owner of the token with this hash; none if there is no such token.
    pub async fn access_token_by_hash(&self, hash: &KeyHash) -> Result<Option<AccessTokenOwner>, StoreError> {
        let query = sqlx::query(
            "SELECT t.id AS id, t.user_id AS user_id, u.team_id AS team_id FROM access_tokens t \
             JOIN users u ON u.id = t.user_id WHERE t.hash = $1",
        )
        .bind(hash.as_str());
        self.db.read_optional("find an access token", query).await
    }

    /// Deletes an access token of a user. `false` when the user has no such token.
    pub async fn access_token_delete(&self, user: &UserId, id: &str) -> Result<bool, StoreError> {
        storable("token ID", id)?;
        let query = sqlx::query("DELETE FROM access_tokens WHERE id = $1 AND user_id = $2")
            .bind(id)
            .bind(user.as_str());
        let deleted = self
            .db
            .write_durably("access token", "delete an access token", query)
            .await?;
        Ok(deleted > 0)
    }

    /// Records a use of an access token, unless a later one is recorded.
    pub async fn access_token_used(&self, id: &str, at_us: i64) -> Result<(), StoreError> {
        let query = sqlx::query(
            "UPDATE access_tokens SET last_used_us = $2 WHERE id = $1 AND COALESCE(last_used_us, $2 - 1) < $2",
        )
        .bind(id)
        .bind(at_us);
        self.db
            .write("access token", "record the use of a token", query)
            .await?;
        Ok(())
    }
}
