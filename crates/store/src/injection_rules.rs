//! Saved injection rules, which belong to users.
//!
//! What a rule injects is a secret, so it is sealed by the caller, and the store reads nothing of it.

use model::id::UserId;

use crate::Store;
use crate::error::StoreError;
use crate::keys::SealedSecret;
use crate::row::{Columns, FromColumns, storable};

/// A saved rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InjectionRuleRow {
    /// Id of the rule.
    pub id: String,
    /// Owner of the rule.
    pub user_id: UserId,
    /// Its name, unique for the owner.
    pub name: String,
    /// What the rule injects, sealed by the caller.
    pub injection_sealed: SealedSecret,
    /// When it was created, in microseconds since the Unix epoch.
    pub created_us: i64,
    /// When it was last changed, in microseconds since the Unix epoch.
    pub updated_us: i64,
}

/// The changes of a rule; what is none stays.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InjectionRuleChange {
    /// New name of the rule; none to keep it.
    pub name: Option<String>,
    /// What the rule injects from now on, sealed by the caller.
    pub injection_sealed: Option<SealedSecret>,
    /// The time of the change, in microseconds since the Unix epoch.
    pub updated_us: i64,
}

impl FromColumns for InjectionRuleRow {
    const TABLE: &'static str = "injection_rules";

    fn from_columns(columns: &Columns<'_>) -> Result<Self, StoreError> {
        Ok(Self {
            id: columns.text("id")?,
            user_id: columns.id("user_id")?,
            name: columns.text("name")?,
            injection_sealed: SealedSecret::new(columns.text("injection_sealed")?),
            created_us: columns.int("created_us")?,
            updated_us: columns.int("updated_us")?,
        })
    }
}

/// The columns of an [`InjectionRuleRow`].
macro_rules! columns {
    () => {
        "id, user_id, name, injection_sealed, created_us, updated_us"
    };
}

impl Store {
    /// Stores a new rule.
    ///
    /// # Errors
    /// [`StoreError::Conflict`] when the id, or the name for that user, is taken; [`StoreError::Dangling`] when there is
    /// no such user.
    pub async fn injection_rule_insert(&self, rule: &InjectionRuleRow) -> Result<(), StoreError> {
        storable("rule name", &rule.name)?;
        let query = sqlx::query(concat!(
            "INSERT INTO injection_rules (",
            columns!(),
            ") VALUES ($1, $2, $3, $4, $5, $6)"
        ))
        .bind(rule.id.as_str())
        .bind(rule.user_id.as_str())
        .bind(rule.name.as_str())
        .bind(rule.injection_sealed.as_str())
        .bind(rule.created_us)
        .bind(rule.updated_us);
        self.db
            .write_durably("injection rule", "insert an injection rule", query)
            .await?;
        Ok(())
    }

    /// The rules of a user, oldest first.
    pub async fn injection_rule_list(&self, user: &UserId) -> Result<Vec<InjectionRuleRow>, StoreError> {
        let query = sqlx::query(concat!(
            "SELECT ",
            columns!(),
            " FROM injection_rules WHERE user_id = $1 ORDER BY created_us, id"
        ))
        .bind(user.as_str());
        self.db.read_all("list injection rules", query).await
    }

    /// Counts the rules of a user.
    pub async fn injection_rule_count(&self, user: &UserId) -> Result<u32, StoreError> {
        let query = sqlx::query("SELECT COUNT(*) AS value FROM injection_rules WHERE user_id = $1").bind(user.as_str());
        self.db.read_number("count injection rules", query).await
    }

    /// What differs after a change of any rule.
    pub async fn injection_rule_stamp(&self) -> Result<Stamp, StoreError> {
        let query = sqlx::query(
            "SELECT COUNT(*) AS total, CAST(COALESCE(SUM(updated_us % 1000000007), 0) AS BIGINT) AS times \
             FROM injection_rules",
        );
        let stamp = self
            .db
            .read_optional("read the times of injection rules", query)
            .await?;
        Ok(stamp.unwrap_or_default())
    }

    /// Returns the rule of a user with this id; none if the user has no such rule.
    pub async fn injection_rule_of(&self, user: &UserId, id: &str) -> Result<Option<InjectionRuleRow>, StoreError> {
        storable("rule ID", id)?;
        let query = sqlx::query(concat!(
            "SELECT ",
            columns!(),
            " FROM injection_rules WHERE id = $1 AND user_id = $2"
        ))
        .bind(id)
        .bind(user.as_str());
        self.db.read_optional("find an injection rule", query).await
    }

    /// Changes a rule of a user and returns it; none if the user has no such rule.
    ///
    /// # Errors
    /// [`StoreError::Conflict`] when another rule of the user has the name.
    pub async fn injection_rule_update(
        &self,
        user: &UserId,
        id: &str,
        change: &InjectionRuleChange,
    ) -> Result<Option<InjectionRuleRow>, StoreError> {
        storable("rule ID", id)?;
        if let Some(name) = &change.name {
            storable("rule name", name)?;
        }
        let query = sqlx::query(concat!(
            "UPDATE injection_rules SET name = COALESCE($3, name), \
             injection_sealed = COALESCE($4, injection_sealed), updated_us = $5 \
             WHERE id = $1 AND user_id = $2 RETURNING ",
            columns!()
        ))
        .bind(id)
        .bind(user.as_str())
        .bind(change.name.as_deref())
        .bind(change.injection_sealed.as_ref().map(SealedSecret::as_str))
        .bind(change.updated_us);
        self.db.write_returning_durably("change an injection rule", query).await
    }

    /// Deletes a rule of a user. `false` when the user has no such rule.
    pub async fn injection_rule_delete(&self, user: &UserId, id: &str) -> Result<bool, StoreError> {
        storable("rule ID", id)?;
        let query = sqlx::query("DELETE FROM injection_rules WHERE id = $1 AND user_id = $2")
            .bind(id)
            .bind(user.as_str());
        let deleted = self
            .db
            .write_durably("injection rule", "delete an injection rule", query)
            .await?;
        Ok(deleted > 0)
    }
}

/// What differs after a change of any row of a table. Times are added up, because the clocks of servers differ: a change can
/// have an earlier time than the one before.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stamp {
    /// The number of rows.
    total: i64,
    /// The sum of the times of their changes, in microseconds modulo a prime so that it does not overflow.
    times: i64,
}

impl FromColumns for Stamp {
    const TABLE: &'static str = "injection_rules and secrets";

    fn from_columns(columns: &Columns<'_>) -> Result<Self, StoreError> {
        Ok(Self {
            total: columns.int("total")?,
            times: columns.int("times")?,
        })
    }
}
