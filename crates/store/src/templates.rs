//! Templates and their aliases.
//!
//! A template belongs to a team or is global, as `base` is. A name is resolved in the caller's own scope first, so a
//! team can override a global name for itself, and no team can change what a name means to others.

use model::id::{BuildId, TeamId, TemplateId};

use crate::Store;
use crate::builds::{BuildRow, BuildStatus};
use crate::error::{StoreError, classify};
use crate::row::{Columns, FromColumns, storable};
use crate::statement::InTransaction as _;

/// A template, from which sandboxes are created.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TemplateRow {
    /// Id of the template.
    pub id: TemplateId,
    /// The owning team; none for a global template.
    pub team_id: Option<TeamId>,
    /// Whether other teams may use the template by its id.
    pub public: bool,
    /// The number of sandboxes that were started from it and have ended.
    pub spawn_count: i64,
    /// The latest start among them, in microseconds since the Unix epoch.
    pub last_spawned_us: Option<i64>,
    /// When it was created, in microseconds since the Unix epoch.
    pub created_us: i64,
    /// Its aliases, sorted.
    pub aliases: Vec<String>,
}

/// A template with a summary of its builds and sandboxes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TemplateOverview {
    /// The template. Its `spawn_count` includes the started sandboxes that have not ended.
    pub template: TemplateRow,
    /// The last change, in microseconds since the Unix epoch: it was created, or a build was accepted or ended.
    pub updated_us: i64,
    /// The number of its builds, whatever their status.
    pub build_count: i64,
    /// The status of the newest build with the tag `default`.
    pub build_status: Option<BuildStatus>,
    /// The newest build with the tag `default` and the status ready.
    pub ready: Option<BuildRow>,
}

/// The outcome of deleting a template.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Deleted {
    /// The template was deleted, and these of its builds failed because of that.
    Deleted(Vec<BuildId>),
    /// A sandbox uses the template. Nothing was changed.
    InUse,
    /// There is no such template.
    Missing,
}

/// The overviews that the team `$1` may see, those of snapshots excepted, or only that of the template `$2`. A sandbox in the state `creating` is
/// not known to any client and does not count; one that has ended was counted at its template when its row was deleted.
const OVERVIEWS: &str = "SELECT t.id, t.team_id, t.is_public, t.created_us, \
     t.spawn_count + COALESCE(l.spawns, 0) AS spawn_count, \
     CASE WHEN l.last_us > COALESCE(t.last_spawned_us, 0) THEN l.last_us ELSE t.last_spawned_us END \
     AS last_spawned_us, \
     (SELECT string_agg(a.alias, '\n') FROM template_aliases a WHERE a.template_id = t.id) AS aliases, \
     (SELECT COUNT(*) FROM builds b WHERE b.template_id = t.id) AS build_count, \
     (SELECT MAX(COALESCE(b.finished_us, b.created_us)) FROM builds b WHERE b.template_id = t.id) AS built_us, \
     (SELECT b.status FROM template_tags g JOIN builds b ON b.id = g.build_id \
      WHERE g.template_id = t.id AND g.tag = 'default' ORDER BY g.created_us DESC, g.seq DESC LIMIT 1) AS build_status, \
     r.id AS r_id, r.cpu_count AS r_cpu_count, r.memory_mb AS r_memory_mb, r.disk_mb AS r_disk_mb, \
     r.agent_version AS r_agent_version, r.created_us AS r_created_us, r.started_us AS r_started_us, \
     r.finished_us AS r_finished_us, r.node_id AS r_node_id, r.spec_json AS r_spec_json \
     FROM templates t \
     LEFT JOIN builds r ON r.id = (SELECT b.id FROM template_tags g JOIN builds b ON b.id = g.build_id \
                                   WHERE g.template_id = t.id AND g.tag = 'default' AND b.status = 'ready' \
                                   ORDER BY g.created_us DESC, g.seq DESC LIMIT 1) \
     LEFT JOIN (SELECT s.template_id, COUNT(*) AS spawns, MAX(s.started_us) AS last_us FROM sandboxes s \
                WHERE s.state <> 'creating' GROUP BY s.template_id) l ON l.template_id = t.id \
     WHERE (t.team_id = $1 OR t.team_id IS NULL) AND t.deleted_us IS NULL AND t.id = COALESCE($2, t.id) \
     AND (t.is_snapshot = 0 OR CAST($2 AS TEXT) IS NOT NULL) \
     ORDER BY t.created_us, t.id";

/// Columns of a [`TemplateRow`] from `templates t`. The aliases are one text with a line for each: that needs no
/// second query, and no alias contains a line break.
macro_rules! template_columns {
    () => {
        "SELECT t.id, t.team_id, t.is_public, t.spawn_count, t.last_spawned_us, t.created_us, \
         (SELECT string_agg(a.alias, '\n') FROM template_aliases a WHERE a.template_id = t.id) AS aliases \
         FROM templates t "
    };
}

impl FromColumns for TemplateRow {
    const TABLE: &'static str = "templates";

    fn from_columns(columns: &Columns<'_>) -> Result<Self, StoreError> {
        let mut aliases: Vec<String> = columns
            .text_opt("aliases")?
            .map(|lines| lines.split('\n').map(str::to_owned).collect())
            .unwrap_or_default();
        aliases.sort_unstable();
        Ok(Self {
            id: columns.id("id")?,
            team_id: columns.id_opt("team_id")?,
            public: columns.flag("is_public")?,
            spawn_count: columns.int("spawn_count")?,
            last_spawned_us: columns.int_opt("last_spawned_us")?,
            created_us: columns.int("created_us")?,
            aliases,
        })
    }
}

impl FromColumns for TemplateOverview {
    const TABLE: &'static str = "templates";

    fn from_columns(columns: &Columns<'_>) -> Result<Self, StoreError> {
        let template = TemplateRow::from_columns(columns)?;
        let status = columns.text_opt("build_status")?;
        let build_status = status
            .map(|word| BuildStatus::from_column(&word).ok_or_else(|| columns.corrupt("build_status")))
            .transpose()?;
        let ready = match columns.id_opt("r_id")? {
            None => None,
            Some(id) => Some(BuildRow {
                id,
                template_id: template.id.clone(),
                status: BuildStatus::Ready,
                cpu_count: columns.count("r_cpu_count")?,
                memory_mb: columns.count("r_memory_mb")?,
                disk_mb: columns.count("r_disk_mb")?,
                agent_version: columns.text_opt("r_agent_version")?,
                spec_json: columns.text_opt("r_spec_json")?,
                created_us: columns.int("r_created_us")?,
                started_us: columns.int_opt("r_started_us")?,
                finished_us: columns.int_opt("r_finished_us")?,
                node_id: columns.id_opt("r_node_id")?,
                reason: None,
            }),
        };
        Ok(Self {
            updated_us: columns.int_opt("built_us")?.unwrap_or(0).max(template.created_us),
            build_count: columns.int("build_count")?,
            build_status,
            ready,
            template,
        })
    }
}

impl Store {
    /// Stores a new template with its aliases, atomically.
    ///
    /// # Errors
    /// [`StoreError::Conflict`] when the id is taken (`template`) or an alias is, in that team or globally (`template
    /// alias`); [`StoreError::Dangling`] when there is no such team.
    pub async fn template_insert(&self, template: &TemplateRow) -> Result<(), StoreError> {
        const WHAT: &str = "insert a template";
        for alias in &template.aliases {
            if alias.contains(['\n', '\0']) {
                return Err(StoreError::UnsupportedCharacter { what: "template alias" });
            }
        }
        let scope = template.team_id.as_ref().map_or("", TeamId::as_str);
        let mut tx = self.db.begin(WHAT).await?;
        sqlx::query(
            "INSERT INTO templates (id, team_id, is_public, spawn_count, last_spawned_us, created_us) \
             VALUES ($1, $2, $3, $4, $5, $6)",
        )
        .bind(template.id.as_str())
        .bind(template.team_id.as_ref().map(TeamId::as_str))
        .bind(i64::from(template.public))
        .bind(template.spawn_count)
        .bind(template.last_spawned_us)
        .bind(template.created_us)
        .execute_in(&mut tx)
        .await
        .map_err(|error| classify(&error, "template", WHAT))?;
        for alias in &template.aliases {
            sqlx::query("INSERT INTO template_aliases (scope, alias, template_id) VALUES ($1, $2, $3)")
                .bind(scope)
                .bind(alias.as_str())
                .bind(template.id.as_str())
                .execute_in(&mut tx)
                .await
                .map_err(|error| classify(&error, "template alias", WHAT))?;
        }
        tx.commit().await.map_err(|error| classify(&error, "template", WHAT))?;
        self.db.sync(WHAT).await
    }

    /// Returns the template with this id, of any owner.
    pub async fn template_by_id(&self, id: &TemplateId) -> Result<Option<TemplateRow>, StoreError> {
        let query =
            sqlx::query(concat!(template_columns!(), "WHERE t.id = $1 AND t.deleted_us IS NULL")).bind(id.as_str());
        self.db.read_optional("find a template", query).await
    }

    /// The templates that a team may see, its own and the global ones, oldest first: all of them that are no snapshots, or only
    /// the one with that id.
    pub async fn template_overviews(
        &self,
        team: &TeamId,
        only: Option<&TemplateId>,
    ) -> Result<Vec<TemplateOverview>, StoreError> {
        let query = sqlx::query(OVERVIEWS)
            .bind(team.as_str())
            .bind(only.map(TemplateId::as_str));
        self.db.read_all("list templates", query).await
    }

    /// The template that `name` stands for in a team: by an alias of the team, else by a global alias, else by its id.
    /// The template must be the team's own, global, or public.
    pub async fn template_resolve(&self, team: &TeamId, name: &str) -> Result<Option<TemplateRow>, StoreError> {
        if storable("template name", name).is_err() {
            return Ok(None);
        }
        // A team's id sorts after the empty scope of global aliases.
        let query = sqlx::query(concat!(
            template_columns!(),
            "WHERE t.id = COALESCE((SELECT a.template_id FROM template_aliases a \
                                    WHERE a.alias = $2 AND a.scope IN ($1, '') ORDER BY a.scope DESC LIMIT 1), $2) \
             AND (t.team_id IS NULL OR t.team_id = $1 OR t.is_public = 1) AND t.deleted_us IS NULL"
        ))
        .bind(team.as_str())
        .bind(name);
        self.db.read_optional("resolve a template", query).await
    }

    /// The template with that alias in a team, public or not.
    pub async fn template_by_alias(&self, team: &TeamId, alias: &str) -> Result<Option<TemplateRow>, StoreError> {
        if storable("template name", alias).is_err() {
            return Ok(None);
        }
        let query = sqlx::query(concat!(
            template_columns!(),
            "JOIN template_aliases n ON n.template_id = t.id WHERE n.scope = $1 AND n.alias = $2 \
             AND t.deleted_us IS NULL"
        ))
        .bind(team.as_str())
        .bind(alias);
        self.db.read_optional("resolve a template", query).await
    }

    /// Sets whether other teams can use a template. `false` when there is no such template.
    pub async fn template_set_public(&self, id: &TemplateId, public: bool) -> Result<bool, StoreError> {
        let query = sqlx::query("UPDATE templates SET is_public = $2 WHERE id = $1 AND deleted_us IS NULL")
            .bind(id.as_str())
            .bind(i64::from(public));
        let changed = self.db.write_durably("template", "change a template", query).await?;
        Ok(changed > 0)
    }

    /// Deletes a template unless a sandbox was created from it and exists: frees its aliases, and fails its builds that
    /// have not ended, which it returns. Its row stays, so that its id is not given to another.
    pub async fn template_delete(&self, id: &TemplateId, now_us: i64) -> Result<Deleted, StoreError> {
        const WHAT: &str = "delete a template";
        let failed = |error: sqlx::Error| classify(&error, "template", WHAT);
        let mut tx = self.db.begin(WHAT).await?;
        let changed = sqlx::query("UPDATE templates SET deleted_us = $2 WHERE id = $1 AND deleted_us IS NULL")
            .bind(id.as_str())
            .bind(now_us)
            .execute_in(&mut tx)
            .await
            .map_err(failed)?;
        if changed.rows_affected() == 0 {
            return Ok(Deleted::Missing);
        }
        let used = sqlx::query("SELECT id FROM sandboxes WHERE template_id = $1 LIMIT 1")
            .bind(id.as_str())
            .optional_in(&mut tx)
            .await
            .map_err(failed)?;
        if used.is_some() {
            return Ok(Deleted::InUse);
        }
        sqlx::query("DELETE FROM template_aliases WHERE template_id = $1")
            .bind(id.as_str())
            .execute_in(&mut tx)
            .await
            .map_err(failed)?;
        let rows = sqlx::query(
            "UPDATE builds SET status = 'failed', reason = 'the template was deleted', finished_us = $2, \
             registry_sealed = NULL WHERE template_id = $1 AND status IN ('waiting', 'building') RETURNING id AS value",
        )
        .bind(id.as_str())
        .bind(now_us)
        .all_in(&mut tx)
        .await
        .map_err(failed)?;
        let builds = rows.iter().map(Columns::decode).collect::<Result<_, _>>()?;
        tx.commit().await.map_err(failed)?;
        self.db.sync(WHAT).await?;
        Ok(Deleted::Deleted(builds))
    }
}
