//! Limits of a team that differ from the platform's.
//!
//! A limit is a name and a number; which names there are and what they mean is the caller's affair. One that is not
//! here is as the configuration says.

use std::collections::BTreeMap;

use model::id::TeamId;

use crate::Store;
use crate::error::StoreError;
use crate::row::{Columns, FromColumns, storable};

struct Limit {
    team_id: TeamId,
    key: String,
    value: i64,
}

impl FromColumns for Limit {
    const TABLE: &'static str = "team_limits";

    fn from_columns(columns: &Columns<'_>) -> Result<Self, StoreError> {
        Ok(Self {
            team_id: columns.id("team_id")?,
            key: columns.text("key")?,
            value: columns.int("value")?,
        })
    }
}

impl Store {
    /// Sets a limit of a team, or with `None` removes it.
    ///
    /// # Errors
    /// [`StoreError::Dangling`] when there is no such team.
    pub async fn team_limit_set(&self, team: &TeamId, key: &str, value: Option<i64>) -> Result<(), StoreError> {
        storable("limit", key)?;
        let query = match value {
            Some(value) => sqlx::query(
                "INSERT INTO team_limits (team_id, key, value) VALUES ($1, $2, $3) \
                 ON CONFLICT (team_id, key) DO UPDATE SET value = excluded.value",
            )
            .bind(team.as_str())
            .bind(key)
            .bind(value),
            None => sqlx::query("DELETE FROM team_limits WHERE team_id = $1 AND key = $2")
                .bind(team.as_str())
                .bind(key),
        };
        self.db.write("limit", "set a limit of a team", query).await?;
        Ok(())
    }

    /// The limits of every team that has any, by name.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn team_limit_list(&self) -> Result<BTreeMap<TeamId, BTreeMap<String, i64>>, StoreError> {
        let query = sqlx::query("SELECT team_id, key, value FROM team_limits");
        let rows: Vec<Limit> = self.db.read_all("list limits of teams", query).await?;
        let mut limits: BTreeMap<TeamId, BTreeMap<String, i64>> = BTreeMap::new();
        for row in rows {
            limits.entry(row.team_id).or_default().insert(row.key, row.value);
        }
        Ok(limits)
    }
}
