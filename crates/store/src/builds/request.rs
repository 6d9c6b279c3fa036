//! Requesting a build: a new one of a new template or of one that exists, in one transaction.

use std::collections::BTreeSet;

use model::id::{BuildId, TeamId, TemplateId};

use crate::Store;
use crate::error::{StoreError, classify};
use crate::row::{Columns, FromColumns, storable};
use crate::statement::{InTransaction as _, Query, Transaction};
use crate::tags;

const WHAT: &str = "request a build";
/// How long a build counts against the limit of its team.
const ACTIVE_US: i64 = 24 * 3600 * 1_000_000;
/// The reason of builds that a newer one replaced before they were started.
const SUPERSEDED: &str = "superseded by a newer build of the same template and tag, before it was started";

/// The template of a requested build.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BuildTarget {
    /// The template that has the alias, or else a new one with this id.
    Alias(TemplateId),
    /// A template that exists. If there is an alias, it replaces the others of the template.
    Template(TemplateId),
}

/// A build to request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewBuild {
    /// The team.
    pub team: TeamId,
    /// The template.
    pub target: BuildTarget,
    /// The name of the template in the team.
    pub alias: Option<String>,
    /// The tags that are assigned to the build, without duplicates.
    pub tags: Vec<String>,
    /// The id of the build.
    pub build: BuildId,
    /// Cores of its sandboxes.
    pub cpu_count: u32,
    /// Memory of its sandboxes, in MiB.
    pub memory_mb: u32,
    /// Disk of its sandboxes, in MiB.
    pub disk_mb: u32,
    /// What the client sent besides, in a format of the caller.
    pub request_json: Option<String>,
    /// The maximum number of builds of the team that have not ended.
    pub limit: u32,
    /// The current time, in microseconds since the Unix epoch.
    pub now_us: i64,
}

/// The outcome of a request. Nothing was changed unless it was accepted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BuildRequested {
    /// The build was accepted.
    Accepted {
        /// The template.
        template: TemplateId,
        /// The builds that the new one supersedes: they waited for their turn and share a tag.
        superseded: Vec<BuildId>,
    },
    /// The team has reached its limit of builds.
    TooMany,
    /// The alias is the id of a template.
    AliasIsId,
    /// Another template of the team has the alias, or a snapshot has it.
    AliasTaken,
    /// The template would exceed its limit of tags.
    TooManyTags,
    /// The template does not exist or was deleted.
    NoTemplate,
}

/// A build of the team that has not ended.
struct Active {
    id: BuildId,
    template: TemplateId,
    is_waiting: bool,
    is_counted: bool,
    tags: BTreeSet<String>,
}

async fn execute(tx: &mut Transaction, row: &'static str, query: Query) -> Result<(), StoreError> {
    let done = query.execute_in(tx).await;
    done.map_err(|error| classify(&error, row, WHAT))?;
    Ok(())
}

/// The first column of the first row, `value`.
async fn value(tx: &mut Transaction, query: Query) -> Result<Option<String>, StoreError> {
    use sqlx::Row as _;
    let row = query.optional_in(tx).await;
    let row = row.map_err(|error| classify(&error, "template", WHAT))?;
    row.map(|row| {
        row.try_get("value").map_err(|_| StoreError::Corrupt {
            table: "templates",
            column: "id",
        })
    })
    .transpose()
}

impl FromColumns for Active {
    const TABLE: &'static str = "builds";

    fn from_columns(columns: &Columns<'_>) -> Result<Self, StoreError> {
        let tags = columns.text_opt("tags")?.unwrap_or_default();
        Ok(Self {
            id: columns.id("id")?,
            template: columns.id("template_id")?,
            is_waiting: columns.text("status")? == "waiting",
            is_counted: columns.flag("is_counted")?,
            tags: tags.split('\n').map(str::to_owned).collect(),
        })
    }
}

/// The builds of the templates of a team that have not ended.
async fn active(tx: &mut Transaction, team: &TeamId, now_us: i64) -> Result<Vec<Active>, StoreError> {
    let rows = sqlx::query(
        "SELECT b.id, b.template_id, b.status, CASE WHEN b.created_us > $2 AND t.deleted_us IS NULL THEN 1 ELSE 0 END \
         AS is_counted, (SELECT string_agg(g.tag, '\n') FROM template_tags g WHERE g.build_id = b.id) AS tags \
         FROM builds b JOIN templates t ON t.id = b.template_id \
         WHERE t.team_id = $1 AND b.status IN ('waiting', 'building')",
    )
    .bind(team.as_str())
    .bind(now_us.saturating_sub(ACTIVE_US))
    .all_in(tx)
    .await
    .map_err(|error| classify(&error, "build", WHAT))?;
    rows.iter().map(Columns::decode).collect()
}

impl Store {
    /// Requests a build: finds or makes its template, checks the limit of the team, supersedes builds that still wait,
    /// stores the build, claims the alias and assigns the tags.
    ///
    /// # Errors
    /// [`StoreError::Conflict`] when an id is taken, and when the database fails.
    pub async fn build_request(&self, new: &NewBuild) -> Result<BuildRequested, StoreError> {
        for text in new.tags.iter().chain(&new.alias) {
            storable("template name", text)?;
            if text.contains('\n') {
                return Err(StoreError::UnsupportedCharacter { what: "template name" });
            }
        }
        if let Some(request) = &new.request_json {
            storable("build request", request)?;
        }
        let mut tx = self.db.begin(WHAT).await?;
        let team = new.team.as_str();
        // Requests of a team are made one after another.
        execute(
            &mut tx,
            "team",
            sqlx::query("UPDATE teams SET slug = slug WHERE id = $1").bind(team.to_owned()),
        )
        .await?;
        let owner = match &new.alias {
            None => None,
            Some(alias) => {
                let query =
                    sqlx::query("SELECT template_id AS value FROM template_aliases WHERE scope = $1 AND alias = $2")
                        .bind(team.to_owned())
                        .bind(alias.as_str());
                value(&mut tx, query).await?
            }
        };
        let (template, is_new) = match (&new.target, &owner) {
            (BuildTarget::Alias(_), Some(owner)) => (owner.clone(), false),
            (BuildTarget::Alias(fresh), None) => (fresh.as_str().to_owned(), true),
            (BuildTarget::Template(id), _) => (id.as_str().to_owned(), false),
        };

        if matches!(new.target, BuildTarget::Alias(_)) && !is_new {
            let query = sqlx::query("SELECT id AS value FROM templates WHERE id = $1 AND is_snapshot = 1");
            if value(&mut tx, query.bind(template.clone())).await?.is_some() {
                return Ok(BuildRequested::AliasTaken);
            }
        }

        let tags: BTreeSet<String> = new.tags.iter().cloned().collect();
        let active = active(&mut tx, &new.team, new.now_us).await?;
        let shares = |build: &Active| build.template.as_str() == template && !build.tags.is_disjoint(&tags);
        let used = active.iter().filter(|build| build.is_counted && !shares(build)).count();
        if used >= usize::try_from(new.limit).unwrap_or(usize::MAX) {
            return Ok(BuildRequested::TooMany);
        }

        if is_new {
            let query = sqlx::query(
                "INSERT INTO templates (id, team_id, is_public, spawn_count, created_us) VALUES ($1, $2, 0, 0, $3)",
            );
            execute(
                &mut tx,
                "template",
                query.bind(template.clone()).bind(team.to_owned()).bind(new.now_us),
            )
            .await?;
        } else {
            let query =
                sqlx::query("SELECT id AS value FROM templates WHERE id = $1 AND team_id = $2 AND deleted_us IS NULL");
            if value(&mut tx, query.bind(template.clone()).bind(team.to_owned()))
                .await?
                .is_none()
            {
                return Ok(BuildRequested::NoTemplate);
            }
        }
        let superseded: Vec<BuildId> = active
            .iter()
            .filter(|build| build.is_waiting && shares(build))
            .map(|build| build.id.clone())
            .collect();
        for build in &superseded {
            let query = sqlx::query(
                "UPDATE builds SET status = 'failed', reason = $2, finished_us = $3, registry_sealed = NULL \
                 WHERE id = $1 AND status = 'waiting'",
            );
            execute(
                &mut tx,
                "build",
                query.bind(build.as_str()).bind(SUPERSEDED).bind(new.now_us),
            )
            .await?;
        }
        let query = sqlx::query(
            "INSERT INTO builds (id, template_id, status, cpu_count, memory_mb, disk_mb, request_json, created_us) \
             VALUES ($1, $2, 'waiting', $3, $4, $5, $6, $7)",
        )
        .bind(new.build.as_str())
        .bind(template.clone())
        .bind(i64::from(new.cpu_count))
        .bind(i64::from(new.memory_mb))
        .bind(i64::from(new.disk_mb))
        .bind(new.request_json.as_deref())
        .bind(new.now_us);
        execute(&mut tx, "build", query).await?;

        let template_id: TemplateId = template.parse().map_err(|_| StoreError::Corrupt {
            table: "templates",
            column: "id",
        })?;
        if let Some(alias) = &new.alias {
            let query = sqlx::query("SELECT id AS value FROM templates WHERE id = $1").bind(alias.as_str());
            if value(&mut tx, query).await?.is_some() {
                return Ok(BuildRequested::AliasIsId);
            }
            match &owner {
                Some(owner) if *owner == template => {}
                Some(_) => return Ok(BuildRequested::AliasTaken),
                None => {
                    let query = sqlx::query("DELETE FROM template_aliases WHERE template_id = $1 AND scope = $2");
                    execute(
                        &mut tx,
                        "template alias",
                        query.bind(template.clone()).bind(team.to_owned()),
                    )
                    .await?;
                    let query =
                        sqlx::query("INSERT INTO template_aliases (scope, alias, template_id) VALUES ($1, $2, $3)");
                    let query = query.bind(team.to_owned()).bind(alias.as_str()).bind(template.clone());
                    execute(&mut tx, "template alias", query).await?;
                }
            }
        }
        for tag in &new.tags {
            if !tags::assign(&mut tx, &template_id, &new.build, tag, new.now_us).await? {
                return Ok(BuildRequested::TooManyTags);
            }
        }
        tx.commit().await.map_err(|error| classify(&error, "build", WHAT))?;
        self.db.sync(WHAT).await?;
        Ok(BuildRequested::Accepted {
            template: template_id,
            superseded,
        })
    }
}
