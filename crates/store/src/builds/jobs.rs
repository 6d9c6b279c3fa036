//! Builds as work of a node: started by a client, begun in their turn, ended once.
//!
//! Every change names the status that it expects, so that a build which was cancelled meanwhile stays so.

use std::collections::BTreeSet;

use model::id::{BuildId, NodeId, TeamId, TemplateId};

use super::reason::BuildReason;
use crate::error::{StoreError, classify};
use crate::keys::SealedSecret;
use crate::nodes::{NodeRows, held};
use crate::row::{Columns, FromColumns, storable};
use crate::statement::InTransaction as _;
use crate::{Change, Store};

/// The reason of builds that a newer one replaced.
const REPLACED: &str = "cancelled, because a newer build of the same template and tag was started";

/// What a client starts a build with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BuildStart {
    /// The recipe, in a format of the caller, without secrets.
    pub recipe_json: String,
    /// The credentials of a registry, sealed by the caller.
    pub registry_sealed: Option<SealedSecret>,
    /// The current time, in microseconds since the Unix epoch.
    pub now_us: i64,
}

/// A build that was started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Started {
    /// The waiting builds that were cancelled because this one replaces them.
    pub cancelled: Vec<BuildId>,
}

/// A build that a worker of the server has begun.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BuildJob {
    /// The build.
    pub id: BuildId,
    /// Its template.
    pub template_id: TemplateId,
    /// The owner of the template.
    pub team_id: TeamId,
    /// Cores of its sandboxes.
    pub cpu_count: u32,
    /// Memory of its sandboxes, in MiB.
    pub memory_mb: u32,
    /// Disk of its sandboxes, in MiB.
    pub disk_mb: u32,
    /// How often the build was begun, from 1.
    pub attempts: u32,
    /// When it was begun for the first time, in microseconds since the Unix epoch.
    pub started_us: i64,
    /// The recipe.
    pub recipe_json: String,
    /// The credentials of a registry.
    pub registry_sealed: Option<SealedSecret>,
}

/// A build that was started and has not ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StartedBuild {
    /// The build.
    pub id: BuildId,
    /// Its template.
    pub template_id: TemplateId,
}

impl FromColumns for StartedBuild {
    const TABLE: &'static str = "builds";

    fn from_columns(columns: &Columns<'_>) -> Result<Self, StoreError> {
        Ok(Self {
            id: columns.id("id")?,
            template_id: columns.id("template_id")?,
        })
    }
}

/// How a build ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BuildEnd {
    /// Sandboxes can be started from the build.
    Ready {
        /// What they are started with, in a format of the caller.
        spec_json: String,
        /// Disk of its sandboxes, in MiB.
        disk_mb: u32,
        /// The version of its agent.
        agent_version: String,
    },
    /// The build failed.
    Failed(BuildReason),
}

/// A build with the tags that were assigned to it.
struct Tagged {
    id: BuildId,
    tags: BTreeSet<String>,
}

impl FromColumns for Tagged {
    const TABLE: &'static str = "builds";

    fn from_columns(columns: &Columns<'_>) -> Result<Self, StoreError> {
        let tags = columns.text_opt("tags")?.unwrap_or_default();
        Ok(Self {
            id: columns.id("id")?,
            tags: tags.split('\n').map(str::to_owned).collect(),
        })
    }
}

impl FromColumns for BuildJob {
    const TABLE: &'static str = "builds";

    fn from_columns(columns: &Columns<'_>) -> Result<Self, StoreError> {
        Ok(Self {
            id: columns.id("id")?,
            template_id: columns.id("template_id")?,
            team_id: columns.id("team_id")?,
            cpu_count: columns.count("cpu_count")?,
            memory_mb: columns.count("memory_mb")?,
            disk_mb: columns.count("disk_mb")?,
            attempts: columns.count("attempts")?,
            started_us: columns.int("started_us")?,
            recipe_json: columns.text("recipe_json")?,
            registry_sealed: columns.text_opt("registry_sealed")?.map(SealedSecret::new),
        })
    }
}

impl Store {
    /// What a client sent when it requested the build, besides what has a column; none if nothing.
    pub async fn build_request_json(&self, id: &BuildId) -> Result<Option<String>, StoreError> {
        let query = sqlx::query("SELECT request_json AS value FROM builds WHERE id = $1 AND request_json IS NOT NULL")
            .bind(id.as_str());
        self.db.read_optional("find a build", query).await
    }

    /// Fails a build that was not started, because it cannot begin. `false` when it was started or has ended.
    pub async fn build_refuse(
        &self,
        template: &TemplateId,
        id: &BuildId,
        reason: &BuildReason,
        now_us: i64,
    ) -> Result<bool, StoreError> {
        let query = sqlx::query(
            "UPDATE builds SET status = 'failed', reason = $3, reason_step = $4, requested_us = $5, finished_us = $5 \
             WHERE id = $1 AND template_id = $2 AND status = 'waiting' AND requested_us IS NULL",
        )
        .bind(id.as_str())
        .bind(template.as_str())
        .bind(reason.message.replace('\0', "\u{fffd}"))
        .bind(reason.step.clone())
        .bind(now_us);
        let changed = self.db.write_durably("build", "refuse a build", query).await?;
        Ok(changed > 0)
    }

    /// Fails a build that has not ended, at the request of its owner. `false` when there is none, or it has ended.
    pub async fn build_cancel(
        &self,
        template: &TemplateId,
        id: &BuildId,
        reason: &str,
        now_us: i64,
    ) -> Result<bool, StoreError> {
        let query = sqlx::query(
            "UPDATE builds SET status = 'failed', reason = $3, finished_us = $4, registry_sealed = NULL \
             WHERE id = $1 AND template_id = $2 AND status IN ('waiting', 'building')",
        )
        .bind(id.as_str())
        .bind(template.as_str())
        .bind(reason.to_owned())
        .bind(now_us);
        let changed = self.db.write_durably("build", "cancel a build", query).await?;
        Ok(changed > 0)
    }

    /// Fails the builds that have waited since before `since_us`, for their client or for their turn.
    pub async fn build_expire_waiting(&self, since_us: i64, now_us: i64, reason: &str) -> Result<u64, StoreError> {
        let query = sqlx::query(
            "UPDATE builds SET status = 'failed', reason = $3, finished_us = $2, registry_sealed = NULL \
             WHERE status = 'waiting' AND COALESCE(requested_us, created_us) < $1",
        )
        .bind(since_us)
        .bind(now_us)
        .bind(reason.to_owned());
        self.db.write_durably("build", "fail builds that wait", query).await
    }
}

impl NodeRows {
    /// Starts a build of a template on this node, and cancels those of the template that are started and share a tag.
    /// [`Change::Stale`] when it was started already or has ended.
    pub async fn build_start(
        &self,
        template: &TemplateId,
        id: &BuildId,
        start: &BuildStart,
    ) -> Result<Change<Started>, StoreError> {
        const WHAT: &str = "start a build";
        storable("recipe", &start.recipe_json)?;
        let failed = |error: sqlx::Error| classify(&error, "build", WHAT);
        let mut tx = self.store.db.begin(WHAT).await?;
        let changed = sqlx::query(concat!(
            "UPDATE builds SET requested_us = $3, node_id = ",
            held!("$4"),
            ", recipe_json = $5, registry_sealed = $6 \
             WHERE id = $1 AND template_id = $2 AND status = 'waiting' AND requested_us IS NULL AND ",
            held!("$4"),
            " IS NOT NULL"
        ))
        .bind(id.as_str())
        .bind(template.as_str())
        .bind(start.now_us)
        .bind(self.lease_key.clone())
        .bind(start.recipe_json.as_str())
        .bind(start.registry_sealed.as_ref().map(|sealed| sealed.as_str().to_owned()))
        .execute_in(&mut tx)
        .await
        .map_err(failed)?;
        if changed.rows_affected() == 0 {
            tx.commit().await.map_err(failed)?;
            self.check_lease(WHAT).await?;
            let known = self.store.build_by_id(template, id).await?;
            return Ok(known.map_or(Change::Missing, |_| Change::Stale));
        }
        let rows = sqlx::query(
            "SELECT b.id, (SELECT string_agg(g.tag, '\n') FROM template_tags g WHERE g.build_id = b.id) AS tags \
             FROM builds b WHERE b.template_id = $1 AND (b.id = $2 OR b.status = 'building' \
             OR (b.status = 'waiting' AND b.requested_us IS NOT NULL))",
        )
        .bind(template.as_str())
        .bind(id.as_str())
        .all_in(&mut tx)
        .await
        .map_err(failed)?;
        let builds: Vec<Tagged> = rows.iter().map(Columns::decode).collect::<Result<_, _>>()?;
        let own = builds.iter().find(|build| build.id == *id);
        let own = own.map(|build| build.tags.clone()).unwrap_or_default();
        let cancelled: Vec<BuildId> = builds
            .into_iter()
            .filter(|build| build.id != *id && !build.tags.is_disjoint(&own))
            .map(|build| build.id)
            .collect();
        for sibling in &cancelled {
            sqlx::query(
                "UPDATE builds SET status = 'failed', reason = $2, finished_us = $3, registry_sealed = NULL \
                 WHERE id = $1 AND status IN ('waiting', 'building')",
            )
            .bind(sibling.as_str())
            .bind(REPLACED)
            .bind(start.now_us)
            .execute_in(&mut tx)
            .await
            .map_err(failed)?;
        }
        tx.commit().await.map_err(failed)?;
        self.store.db.sync(WHAT).await?;
        Ok(Change::Applied(Started { cancelled }))
    }

    /// Begins the build of this node that was started first and waits for its turn; none if there is none.
    pub async fn build_begin_next(&self, now_us: i64) -> Result<Option<BuildJob>, StoreError> {
        const WHAT: &str = "begin a build";
        let query = sqlx::query(concat!(
            "UPDATE builds SET status = 'building', started_us = COALESCE(started_us, $2), attempts = attempts + 1 \
             WHERE status = 'waiting' AND id = (SELECT id FROM builds WHERE node_id = ",
            held!("$1"),
            " AND status = 'waiting' AND requested_us IS NOT NULL AND recipe_json IS NOT NULL \
             ORDER BY requested_us, id LIMIT 1) RETURNING id AS value"
        ))
        .bind(self.lease_key.clone())
        .bind(now_us);
        let begun: Option<BuildId> = self.store.db.write_returning_durably(WHAT, query).await?;
        let Some(id) = begun else { return Ok(None) };
        let query = sqlx::query(
            "SELECT b.id, b.template_id, t.team_id, b.cpu_count, b.memory_mb, b.disk_mb, b.attempts, b.started_us, \
             b.recipe_json, b.registry_sealed FROM builds b JOIN templates t ON t.id = b.template_id WHERE b.id = $1",
        )
        .bind(id.as_str().to_owned());
        self.store.db.read_optional(WHAT, query).await
    }

    /// Ends a build in progress. `false` when it has ended before.
    pub async fn build_end(&self, id: &BuildId, end: &BuildEnd, now_us: i64) -> Result<bool, StoreError> {
        let query = match end {
            BuildEnd::Ready {
                spec_json,
                disk_mb,
                agent_version,
            } => {
                storable("spec of a build", spec_json)?;
                sqlx::query(concat!(
                    "UPDATE builds SET status = 'ready', spec_json = $3, disk_mb = $4, agent_version = $5, \
                     finished_us = $6, registry_sealed = NULL WHERE id = $1 AND status = 'building' AND node_id = ",
                    held!("$2")
                ))
                .bind(id.as_str())
                .bind(self.lease_key.clone())
                .bind(spec_json.as_str())
                .bind(i64::from(*disk_mb))
                .bind(agent_version.as_str())
                .bind(now_us)
            }
            BuildEnd::Failed(BuildReason { message, step }) => sqlx::query(concat!(
                "UPDATE builds SET status = 'failed', reason = $3, reason_step = $4, finished_us = $5, \
                 registry_sealed = NULL WHERE id = $1 AND status = 'building' AND node_id = ",
                held!("$2")
            ))
            .bind(id.as_str())
            .bind(self.lease_key.clone())
            .bind(message.replace('\0', "\u{fffd}"))
            .bind(step.as_deref().map(|step| step.replace('\0', "\u{fffd}")))
            .bind(now_us),
        };
        const WHAT: &str = "end a build";
        let changed = self.store.db.write_durably("build", WHAT, query).await?;
        if changed == 0 {
            self.check_lease(WHAT).await?;
        }
        Ok(changed > 0)
    }

    /// Makes a requested build ready without running it, because its result was imported. `false` when it was started
    /// or has ended.
    pub async fn build_import(
        &self,
        id: &BuildId,
        spec_json: &str,
        agent_version: &str,
        now_us: i64,
    ) -> Result<bool, StoreError> {
        storable("spec of a build", spec_json)?;
        let query = sqlx::query(concat!(
            "UPDATE builds SET status = 'ready', node_id = ",
            held!("$2"),
            ", spec_json = $3, agent_version = $4, started_us = $5, finished_us = $5 \
             WHERE id = $1 AND status = 'waiting' AND requested_us IS NULL AND ",
            held!("$2"),
            " IS NOT NULL"
        ))
        .bind(id.as_str())
        .bind(self.lease_key.clone())
        .bind(spec_json.to_owned())
        .bind(agent_version.to_owned())
        .bind(now_us);
        let changed = self.store.db.write_durably("build", "import a build", query).await?;
        Ok(changed > 0)
    }

    /// After a restart: the builds of this node that were in progress wait for their turn again, and those that were
    /// begun more than `most` times fail. Returns how many wait.
    pub async fn build_requeue(&self, most: u32, now_us: i64, reason: &str) -> Result<u64, StoreError> {
        let fail = sqlx::query(concat!(
            "UPDATE builds SET status = 'failed', reason = $3, finished_us = $4, registry_sealed = NULL \
             WHERE status = 'building' AND attempts > $2 AND node_id = ",
            held!("$1")
        ))
        .bind(self.lease_key.clone())
        .bind(i64::from(most))
        .bind(reason.to_owned())
        .bind(now_us);
        self.store.db.write("build", "fail builds", fail).await?;
        let requeue = sqlx::query(concat!(
            "UPDATE builds SET status = 'waiting', requested_us = $2 WHERE status = 'building' AND node_id = ",
            held!("$1")
        ))
        .bind(self.lease_key.clone())
        .bind(now_us);
        self.store
            .db
            .write_durably("build", "begin builds again", requeue)
            .await
    }

    /// Takes over the builds of servers that were not there since `gone_us`: they wait for their turn here, and those that were
    /// begun more than `most` times fail. Returns how many wait.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn build_adopt(&self, gone_us: i64, most: u32, now_us: i64, reason: &str) -> Result<u64, StoreError> {
        let fail = sqlx::query(
            "UPDATE builds SET status = 'failed', reason = $3, finished_us = $4, registry_sealed = NULL \
             WHERE status = 'building' AND attempts > $2 AND node_id IN (SELECT s.id FROM servers s \
             JOIN nodes n ON n.id = s.id WHERE s.seen_us < $1 AND n.lease_until_us < $1)",
        )
        .bind(gone_us)
        .bind(i64::from(most))
        .bind(reason.to_owned())
        .bind(now_us);
        self.store.db.write("build", "fail builds", fail).await?;
        let adopt = sqlx::query(concat!(
            "UPDATE builds SET status = 'waiting', requested_us = $2, node_id = ",
            held!("$3"),
            " WHERE (status = 'building' OR (status = 'waiting' AND requested_us IS NOT NULL)) AND node_id IN \
             (SELECT s.id FROM servers s JOIN nodes n ON n.id = s.id WHERE s.seen_us < $1 AND n.lease_until_us < $1) AND ",
            held!("$3"),
            " IS NOT NULL"
        ))
        .bind(gone_us)
        .bind(now_us)
        .bind(self.lease_key.clone());
        self.store.db.write_durably("build", "take over builds", adopt).await
    }

    /// Lists the builds of this node that were started and have not ended.
    pub async fn build_list_started(&self) -> Result<Vec<StartedBuild>, StoreError> {
        let query = sqlx::query(concat!(
            "SELECT id, template_id FROM builds WHERE node_id = ",
            held!("$1"),
            " AND (status = 'building' OR (status = 'waiting' AND requested_us IS NOT NULL)) ORDER BY requested_us, id"
        ))
        .bind(self.lease_key.clone());
        self.store.db.read_all("list started builds", query).await
    }

    /// Has a build of this node that was started wait for its turn again, at this node or another one. `false` when it has ended.
    pub async fn build_move(&self, id: &BuildId, to: &NodeId, now_us: i64) -> Result<bool, StoreError> {
        let query = sqlx::query(concat!(
            "UPDATE builds SET status = 'waiting', requested_us = $4, node_id = $3 WHERE id = $1 AND node_id = ",
            held!("$2"),
            " AND (status = 'building' OR (status = 'waiting' AND requested_us IS NOT NULL))"
        ))
        .bind(id.as_str())
        .bind(self.lease_key.clone())
        .bind(to.as_str())
        .bind(now_us);
        let changed = self.store.db.write_durably("build", "move a build", query).await?;
        Ok(changed > 0)
    }

    /// Lists the builds of this node that are in progress.
    pub async fn build_list_building(&self) -> Result<Vec<BuildId>, StoreError> {
        let query = sqlx::query("SELECT id AS value FROM builds WHERE node_id = $1 AND status = 'building'")
            .bind(self.node.as_str());
        self.store.db.read_all("list builds in progress", query).await
    }
}
