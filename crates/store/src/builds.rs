//! Builds of templates: what sandboxes are started from.

mod cache;
mod files;
mod jobs;
mod logs;
mod reason;
mod request;

use model::id::{BuildId, NodeId, TemplateId};

pub use self::cache::CachedLayerRow;
pub use self::files::FileRow;
pub use self::jobs::{BuildEnd, BuildJob, BuildStart, Started, StartedBuild};
pub use self::logs::{BuildLogQuery, BuildLogRow, BuildLogSize};
pub use self::reason::BuildReason;
pub use self::request::{BuildRequested, BuildTarget, NewBuild};
use crate::Store;
use crate::error::{StoreError, classify};
use crate::row::{Columns, FromColumns, storable};
use crate::statement::InTransaction as _;

/// The tag of references without one.
pub const DEFAULT_TAG: &str = "default";

/// The status of a build.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BuildStatus {
    /// Accepted; it waits for its client to start it, or for its turn.
    Waiting,
    /// In progress.
    Building,
    /// Sandboxes can be started from the build.
    Ready,
    /// The build failed.
    Failed,
}

impl BuildStatus {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Building => "building",
            Self::Ready => "ready",
            Self::Failed => "failed",
        }
    }

    pub(crate) fn from_column(word: &str) -> Option<Self> {
        [Self::Waiting, Self::Building, Self::Ready, Self::Failed]
            .into_iter()
            .find(|status| status.as_str() == word)
    }
}

/// One build of a template.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BuildRow {
    /// Id of the build.
    pub id: BuildId,
    /// The template of the build.
    pub template_id: TemplateId,
    /// Status of the build.
    pub status: BuildStatus,
    /// Cores of its sandboxes.
    pub cpu_count: u32,
    /// Memory of its sandboxes, in MiB.
    pub memory_mb: u32,
    /// Disk of its sandboxes, in MiB.
    pub disk_mb: u32,
    /// The version of its agent, once known.
    pub agent_version: Option<String>,
    /// What the node needs to start sandboxes from it (layers, configuration), in a format of the caller.
    pub spec_json: Option<String>,
    /// When it was accepted, in microseconds since the Unix epoch.
    pub created_us: i64,
    /// When it was begun, in microseconds since the Unix epoch.
    pub started_us: Option<i64>,
    /// When the build ended, in microseconds since the Unix epoch.
    pub finished_us: Option<i64>,
    /// The node that makes the build and has its layers; none for a build that every node has.
    pub node_id: Option<NodeId>,
    /// Why the build failed, if it did.
    pub reason: Option<BuildReason>,
}

/// A position in the list of builds of a template.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BuildCursor {
    /// `created_us` of the last build before this position.
    pub created_us: i64,
    /// The id of the last build before this position.
    pub id: BuildId,
}

/// Columns of a [`BuildRow`] of `builds b`.
macro_rules! build_columns {
    () => {
        "b.id, b.template_id, b.status, b.cpu_count, b.memory_mb, b.disk_mb, b.agent_version, b.spec_json, \
         b.created_us, b.started_us, b.finished_us, b.node_id, b.reason, b.reason_step"
    };
}

impl FromColumns for BuildRow {
    const TABLE: &'static str = "builds";

    fn from_columns(columns: &Columns<'_>) -> Result<Self, StoreError> {
        let message = columns.text_opt("reason")?;
        let step = columns.text_opt("reason_step")?;
        Ok(Self {
            id: columns.id("id")?,
            template_id: columns.id("template_id")?,
            status: BuildStatus::from_column(&columns.text("status")?).ok_or_else(|| columns.corrupt("status"))?,
            cpu_count: columns.count("cpu_count")?,
            memory_mb: columns.count("memory_mb")?,
            disk_mb: columns.count("disk_mb")?,
            agent_version: columns.text_opt("agent_version")?,
            spec_json: columns.text_opt("spec_json")?,
            created_us: columns.int("created_us")?,
            started_us: columns.int_opt("started_us")?,
            finished_us: columns.int_opt("finished_us")?,
            node_id: columns.id_opt("node_id")?,
            reason: message.map(|message| BuildReason { message, step }),
        })
    }
}

impl Store {
    /// Stores a build that is not made by a job, such as that of the built-in template, and assigns the tag `default`
    /// to it.
    ///
    /// # Errors
    /// [`StoreError::Conflict`] when the id is taken; [`StoreError::Dangling`] when there is no such template.
    pub async fn build_insert(&self, build: &BuildRow) -> Result<(), StoreError> {
        const WHAT: &str = "insert a build";
        let mut tx = self.db.begin(WHAT).await?;
        sqlx::query(
            "INSERT INTO builds (id, template_id, status, cpu_count, memory_mb, disk_mb, agent_version, spec_json, \
             created_us, started_us, finished_us, node_id, reason, reason_step) \
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14)",
        )
        .bind(build.id.as_str())
        .bind(build.template_id.as_str())
        .bind(build.status.as_str())
        .bind(i64::from(build.cpu_count))
        .bind(i64::from(build.memory_mb))
        .bind(i64::from(build.disk_mb))
        .bind(build.agent_version.as_deref())
        .bind(build.spec_json.as_deref())
        .bind(build.created_us)
        .bind(build.started_us)
        .bind(build.finished_us)
        .bind(build.node_id.as_ref().map(NodeId::as_str))
        .bind(build.reason.as_ref().map(|reason| reason.message.clone()))
        .bind(build.reason.as_ref().and_then(|reason| reason.step.clone()))
        .execute_in(&mut tx)
        .await
        .map_err(|error| classify(&error, "build", WHAT))?;
        crate::tags::assign(&mut tx, &build.template_id, &build.id, DEFAULT_TAG, build.created_us).await?;
        tx.commit().await.map_err(|error| classify(&error, "build", WHAT))?;
        self.db.sync(WHAT).await
    }

    /// The build of a template that sandboxes are started from: of the builds that are ready and have the tag
    /// `default`, that to which it was assigned last.
    pub async fn build_latest_ready(&self, template: &TemplateId) -> Result<Option<BuildRow>, StoreError> {
        self.build_by_tag(template, DEFAULT_TAG).await
    }

    /// Of the builds of a template that are ready and have that tag, or that id, the one to which a tag was assigned
    /// last.
    pub async fn build_by_tag(&self, template: &TemplateId, tag: &str) -> Result<Option<BuildRow>, StoreError> {
        if storable("tag", tag).is_err() {
            return Ok(None);
        }
        let query = sqlx::query(concat!(
            "SELECT ",
            build_columns!(),
            " FROM builds b JOIN template_tags g ON g.build_id = b.id WHERE g.template_id = $1 \
             AND (g.tag = $2 OR g.build_id = $2) AND b.status = 'ready' ORDER BY g.created_us DESC, g.seq DESC LIMIT 1"
        ))
        .bind(template.as_str())
        .bind(tag);
        self.db.read_optional("find a build", query).await
    }

    /// A build of a template.
    pub async fn build_by_id(&self, template: &TemplateId, id: &BuildId) -> Result<Option<BuildRow>, StoreError> {
        let query = sqlx::query(concat!(
            "SELECT ",
            build_columns!(),
            " FROM builds b WHERE b.template_id = $1 AND b.id = $2"
        ))
        .bind(template.as_str())
        .bind(id.as_str());
        self.db.read_optional("find a build", query).await
    }

    /// The builds of a template, newest first: at most `limit`, those after `after`.
    pub async fn build_list(
        &self,
        template: &TemplateId,
        after: Option<&BuildCursor>,
        limit: u32,
    ) -> Result<Vec<BuildRow>, StoreError> {
        let query = sqlx::query(concat!(
            "SELECT ",
            build_columns!(),
            " FROM builds b WHERE b.template_id = $1 AND b.created_us <= COALESCE($2, 9223372036854775807) \
             AND (CAST($2 AS BIGINT) IS NULL OR b.created_us <> $2 OR b.id < $3) \
             ORDER BY b.created_us DESC, b.id DESC LIMIT $4"
        ))
        .bind(template.as_str())
        .bind(after.map(|cursor| cursor.created_us))
        .bind(after.map(|cursor| cursor.id.as_str().to_owned()))
        .bind(i64::from(limit));
        self.db.read_all("list the builds of a template", query).await
    }
}
