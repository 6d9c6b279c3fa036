//! Teams and their users. Everything with an owner belongs to one team and was created by one of its users.

use model::id::{TeamId, UserId};

use crate::Store;
use crate::error::{StoreError, classify};
use crate::row::{Columns, FromColumns, storable};
use crate::slug::free_slug;
use crate::statement::InTransaction as _;

/// An owner of sandboxes, templates and keys.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TeamRow {
    /// Id of the team.
    pub id: TeamId,
    /// Name of the team, unique on this platform.
    pub name: String,
    /// When it was created, in microseconds since the Unix epoch.
    pub created_us: i64,
}

/// A member of a team.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UserRow {
    /// The id that clients see as `uid`.
    pub id: UserId,
    /// The one team this user belongs to.
    pub team_id: TeamId,
    /// The name, unique within the team.
    pub name: String,
    /// When it was created, in microseconds since the Unix epoch.
    pub created_us: i64,
}

impl FromColumns for TeamRow {
    const TABLE: &'static str = "teams";

    fn from_columns(columns: &Columns<'_>) -> Result<Self, StoreError> {
        Ok(Self {
            id: columns.id("id")?,
            name: columns.text("name")?,
            created_us: columns.int("created_us")?,
        })
    }
}

impl FromColumns for UserRow {
    const TABLE: &'static str = "users";

    fn from_columns(columns: &Columns<'_>) -> Result<Self, StoreError> {
        Ok(Self {
            id: columns.id("id")?,
            team_id: columns.id("team_id")?,
            name: columns.text("name")?,
            created_us: columns.int("created_us")?,
        })
    }
}

impl Store {
    /// Stores a new team.
    ///
    /// # Errors
    /// [`StoreError::Conflict`] when the id or the name is taken.
    pub async fn team_insert(&self, team: &TeamRow) -> Result<(), StoreError> {
        const WHAT: &str = "insert a team";
        storable("team name", &team.name)?;
        let mut tx = self.db.begin(WHAT).await?;
        let slug = free_slug(&mut tx, team.id.as_str(), &team.name).await?;
        sqlx::query("INSERT INTO teams (id, name, created_us, slug) VALUES ($1, $2, $3, $4)")
            .bind(team.id.as_str())
            .bind(team.name.as_str())
            .bind(team.created_us)
            .bind(slug)
            .execute_in(&mut tx)
            .await
            .map_err(|error| classify(&error, "team", WHAT))?;
        tx.commit().await.map_err(|error| classify(&error, "team", WHAT))?;
        self.db.sync(WHAT).await
    }

    /// The namespace of a team's templates; none when there is no such team.
    pub async fn team_slug(&self, id: &TeamId) -> Result<Option<String>, StoreError> {
        let query = sqlx::query("SELECT slug AS value FROM teams WHERE id = $1").bind(id.as_str());
        self.db.read_optional("find a team", query).await
    }

    /// The team whose templates have that namespace.
    pub async fn team_by_slug(&self, slug: &str) -> Result<Option<TeamRow>, StoreError> {
        storable("namespace", slug)?;
        let query = sqlx::query("SELECT id, name, created_us FROM teams WHERE slug = $1").bind(slug);
        self.db.read_optional("find a team", query).await
    }

    /// Returns the team with this name.
    pub async fn team_by_name(&self, name: &str) -> Result<Option<TeamRow>, StoreError> {
        storable("team name", name)?;
        let query = sqlx::query("SELECT id, name, created_us FROM teams WHERE name = $1").bind(name);
        self.db.read_optional("find a team", query).await
    }

    /// Returns the team with this id.
    pub async fn team_by_id(&self, id: &TeamId) -> Result<Option<TeamRow>, StoreError> {
        let query = sqlx::query("SELECT id, name, created_us FROM teams WHERE id = $1").bind(id.as_str());
        self.db.read_optional("find a team", query).await
    }

    /// Every team, oldest first.
    pub async fn team_list(&self) -> Result<Vec<TeamRow>, StoreError> {
        let query = sqlx::query("SELECT id, name, created_us FROM teams ORDER BY created_us, id");
        self.db.read_all("list teams", query).await
    }

    /// Stores a new user.
    ///
    /// # Errors
    /// [`StoreError::Conflict`] when the id, or the name in that team, is taken; [`StoreError::Dangling`] when there is
    /// no such team.
    pub async fn user_insert(&self, user: &UserRow) -> Result<(), StoreError> {
        storable("user name", &user.name)?;
        let query = sqlx::query("INSERT INTO users (id, team_id, name, created_us) VALUES ($1, $2, $3, $4)")
            .bind(user.id.as_str())
            .bind(user.team_id.as_str())
            .bind(user.name.as_str())
            .bind(user.created_us);
        self.db.write_durably("user", "insert a user", query).await?;
        Ok(())
    }

    /// The users of a team, oldest first.
    pub async fn user_list(&self, team: &TeamId) -> Result<Vec<UserRow>, StoreError> {
        let query =
            sqlx::query("SELECT id, team_id, name, created_us FROM users WHERE team_id = $1 ORDER BY created_us, id")
                .bind(team.as_str());
        self.db.read_all("list users", query).await
    }

    /// Returns the user of a team with this name.
    pub async fn user_by_name(&self, team: &TeamId, name: &str) -> Result<Option<UserRow>, StoreError> {
        storable("user name", name)?;
        let query = sqlx::query("SELECT id, team_id, name, created_us FROM users WHERE team_id = $1 AND name = $2")
            .bind(team.as_str())
            .bind(name);
        self.db.read_optional("find a user", query).await
    }
}
