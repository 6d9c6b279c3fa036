//! Snapshots of sandboxes: templates of a team, each of whose builds was made of a sandbox and is ready from the start.

use model::id::{BuildId, NodeId, SandboxId, TeamId, TemplateId};
use sqlx::AssertSqlSafe;

use crate::error::{StoreError, classify};
use crate::keys::SealedSecret;
use crate::nodes::NodeRows;
use crate::row::{Columns, FromColumns, storable};
use crate::statement::{InTransaction as _, Query, Transaction};
use crate::{Store, tags};

const WHAT: &str = "insert a snapshot";

/// A snapshot to store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewSnapshot {
    /// The team.
    pub team: TeamId,
    /// Id of the template to create, unless the snapshot of the team with this name has one.
    pub template: TemplateId,
    /// Its name in the team.
    pub alias: Option<String>,
    /// The tag that is assigned to the build.
    pub tag: String,
    /// The id of the build.
    pub build: BuildId,
    /// The sandbox that the snapshot was made of.
    pub sandbox: SandboxId,
    /// Cores of its sandboxes.
    pub cpu_count: u32,
    /// Memory of its sandboxes, in MiB.
    pub memory_mb: u32,
    /// Disk of its sandboxes, in MiB.
    pub disk_mb: u32,
    /// What its sandboxes are started with, in a format of the caller.
    pub spec_json: String,
    /// The version of its agent.
    pub agent_version: String,
    /// What a copy of its memory needs, if there is to be one.
    pub memory: Option<MemoryOrigin>,
    /// When it was requested, in microseconds since the Unix epoch.
    pub started_us: i64,
    /// The current time, in microseconds since the Unix epoch.
    pub now_us: i64,
}

/// Where the memory of a snapshot comes from, and the key of its copy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryOrigin {
    /// The node that has made it.
    pub node: NodeId,
    /// The key, sealed by the caller.
    pub key: SealedSecret,
}

/// A memory that has, or gets, a copy: that of a snapshot, or of a sandbox that is being forked to other nodes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryRow {
    /// The build of the snapshot; for a fork an id that no build has.
    pub build: BuildId,
    /// The team that it belongs to.
    pub team: TeamId,
    /// Memory of its sandboxes, in MiB.
    pub memory_mb: u32,
    /// Disk of its sandboxes, in MiB.
    pub disk_mb: u32,
    /// Where its memory comes from.
    pub origin: MemoryOrigin,
}

/// The memory of a snapshot.
const OF_SNAPSHOT: &str = "SELECT b.id, t.team_id, b.memory_mb, b.disk_mb, b.memory_node_id, b.memory_key_sealed \
     FROM builds b JOIN templates t ON t.id = b.template_id \
     WHERE b.id = $1 AND b.memory_key_sealed IS NOT NULL AND t.deleted_us IS NULL AND t.team_id IS NOT NULL";
/// The memory of a fork, with the same columns.
const OF_FORK: &str = "SELECT f.build_id AS id, f.team_id, f.memory_mb, f.disk_mb, f.memory_node_id, f.memory_key_sealed \
     FROM fork_memories f WHERE f.build_id = $1";

impl FromColumns for MemoryRow {
    const TABLE: &'static str = "builds";

    fn from_columns(columns: &Columns<'_>) -> Result<Self, StoreError> {
        Ok(Self {
            build: columns.id("id")?,
            team: columns.id("team_id")?,
            memory_mb: columns.count("memory_mb")?,
            disk_mb: columns.count("disk_mb")?,
            origin: MemoryOrigin {
                node: columns.id("memory_node_id")?,
                key: SealedSecret::new(columns.text("memory_key_sealed")?),
            },
        })
    }
}

impl Store {
    /// The memory of a snapshot of any owner that has, or gets, a copy; none if there is none, or its template was deleted.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn snapshot_memory(&self, build: &BuildId) -> Result<Option<MemoryRow>, StoreError> {
        let query = sqlx::query(OF_SNAPSHOT).bind(build.as_str());
        self.db.read_optional("find a snapshot", query).await
    }

    /// A memory that has, or gets, a copy: that of a snapshot, or of a fork that is under way.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn memory(&self, build: &BuildId) -> Result<Option<MemoryRow>, StoreError> {
        let query = sqlx::query(AssertSqlSafe(format!("{OF_SNAPSHOT} UNION ALL {OF_FORK}"))).bind(build.as_str());
        self.db.read_optional("find a memory", query).await
    }

    /// Stores the memory of a sandbox that is being forked to other nodes.
    ///
    /// # Errors
    /// [`StoreError::Conflict`] when the id is taken, and when the database fails.
    pub async fn fork_memory_insert(&self, row: &MemoryRow, now_us: i64) -> Result<(), StoreError> {
        let query = sqlx::query(
            "INSERT INTO fork_memories (build_id, team_id, memory_mb, disk_mb, memory_node_id, memory_key_sealed, created_us) \
             VALUES ($1, $2, $3, $4, $5, $6, $7)",
        )
        .bind(row.build.as_str())
        .bind(row.team.as_str())
        .bind(i64::from(row.memory_mb))
        .bind(i64::from(row.disk_mb))
        .bind(row.origin.node.as_str())
        .bind(row.origin.key.as_str().to_owned())
        .bind(now_us);
        self.db.write("memory", "insert the memory of a fork", query).await?;
        Ok(())
    }

    /// Deletes the memory of a fork that is over. There may be none.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn fork_memory_delete(&self, build: &BuildId) -> Result<(), StoreError> {
        let query = sqlx::query("DELETE FROM fork_memories WHERE build_id = $1").bind(build.as_str());
        self.db.write("memory", "delete the memory of a fork", query).await?;
        Ok(())
    }

    /// Deletes what forks have left whose server was lost: the memories that were stored before a time. Returns how many.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn fork_memory_purge(&self, before_us: i64) -> Result<u64, StoreError> {
        let query = sqlx::query("DELETE FROM fork_memories WHERE created_us < $1").bind(before_us);
        self.db.write("memory", "delete memories of forks", query).await
    }
}

/// What a name stands for in a team.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NameUse {
    /// No template has the name.
    Free,
    /// A snapshot, which gets another build.
    Snapshot,
    /// A template that is no snapshot.
    Template,
    /// The name is the id of a template.
    Id,
}

/// The outcome of storing a snapshot. Nothing was changed unless it was stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SnapshotStored {
    /// The snapshot was stored, as a build of this template.
    Stored(TemplateId),
    /// Its name stands for something else.
    NameTaken(NameUse),
    /// The template would exceed its limit of tags.
    TooManyTags,
}

/// A snapshot in a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotRow {
    /// Template of the snapshot.
    pub template_id: TemplateId,
    /// When the template was created, in microseconds since the Unix epoch.
    pub created_us: i64,
    /// Its name in the team.
    pub alias: Option<String>,
    /// The tag that was assigned last, to one of the builds that were looked for.
    pub tag: String,
}

/// Selects snapshots of a team.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SnapshotFilter {
    /// Only snapshots that were made of this sandbox.
    pub sandbox: Option<SandboxId>,
    /// Only snapshots with this name or id.
    pub name: Option<String>,
    /// Only snapshots with this tag.
    pub tag: Option<String>,
    /// Only snapshots after the one with this time and id.
    pub after: Option<(i64, TemplateId)>,
}

impl FromColumns for SnapshotRow {
    const TABLE: &'static str = "templates";

    fn from_columns(columns: &Columns<'_>) -> Result<Self, StoreError> {
        Ok(Self {
            template_id: columns.id("id")?,
            created_us: columns.int("created_us")?,
            alias: columns.text_opt("alias")?,
            tag: columns.text("tag")?,
        })
    }
}

/// The template of a name.
struct Named {
    id: TemplateId,
    is_snapshot: bool,
    is_named: bool,
}

impl FromColumns for Named {
    const TABLE: &'static str = "templates";

    fn from_columns(columns: &Columns<'_>) -> Result<Self, StoreError> {
        Ok(Self {
            id: columns.id("id")?,
            is_snapshot: columns.flag("is_snapshot")?,
            is_named: columns.flag("is_named")?,
        })
    }
}

/// The template that has the alias `$2` in the team `$1`, before one that has it as its id.
const NAMED: &str = "SELECT t.id, t.is_snapshot, 1 AS is_named FROM template_aliases a \
     JOIN templates t ON t.id = a.template_id WHERE a.scope = $1 AND a.alias = $2 \
     UNION ALL SELECT t.id, t.is_snapshot, 0 AS is_named FROM templates t WHERE t.id = $2 ORDER BY 3 DESC LIMIT 1";

fn use_of(named: Option<&Named>) -> NameUse {
    match named {
        None => NameUse::Free,
        Some(Named { is_named: false, .. }) => NameUse::Id,
        Some(Named { is_snapshot: true, .. }) => NameUse::Snapshot,
        Some(_) => NameUse::Template,
    }
}

async fn execute(tx: &mut Transaction, row: &'static str, query: Query) -> Result<u64, StoreError> {
    let done = query.execute_in(tx).await;
    Ok(done.map_err(|error| classify(&error, row, WHAT))?.rows_affected())
}

impl Store {
    /// What a name of a snapshot stands for in a team.
    pub async fn snapshot_name_use(&self, team: &TeamId, alias: &str) -> Result<NameUse, StoreError> {
        storable("template name", alias)?;
        let query = sqlx::query(NAMED).bind(team.as_str()).bind(alias);
        let named: Option<Named> = self.db.read_optional("find a snapshot", query).await?;
        Ok(use_of(named.as_ref()))
    }

    /// The snapshots of a team that can be used, newest first: at most `limit`.
    pub async fn snapshot_list(
        &self,
        team: &TeamId,
        filter: &SnapshotFilter,
        limit: u32,
    ) -> Result<Vec<SnapshotRow>, StoreError> {
        let SnapshotFilter {
            sandbox,
            name,
            tag,
            after,
        } = filter;
        let query = sqlx::query(
            "SELECT s.id, s.created_us, s.alias, s.tag FROM (SELECT t.id, t.created_us, \
             (SELECT MIN(a.alias) FROM template_aliases a WHERE a.template_id = t.id) AS alias, \
             (SELECT g.tag FROM template_tags g JOIN builds b ON b.id = g.build_id \
              WHERE g.template_id = t.id AND b.status = 'ready' \
              AND (CAST($2 AS TEXT) IS NULL OR b.sandbox_id = $2) AND (CAST($3 AS TEXT) IS NULL OR g.tag = $3) \
              ORDER BY g.created_us DESC, g.seq DESC LIMIT 1) AS tag \
             FROM templates t WHERE t.team_id = $1 AND t.is_snapshot = 1 AND t.deleted_us IS NULL \
             AND t.created_us <= COALESCE($5, 9223372036854775807) \
             AND (CAST($5 AS BIGINT) IS NULL OR t.created_us <> $5 OR t.id < $6)) s \
             WHERE s.tag IS NOT NULL AND (CAST($4 AS TEXT) IS NULL OR s.alias = $4 OR s.id = $4) \
             ORDER BY s.created_us DESC, s.id DESC LIMIT $7",
        )
        .bind(team.as_str())
        .bind(sandbox.as_ref().map(|id| id.as_str().to_owned()))
        .bind(tag.clone())
        .bind(name.clone())
        .bind(after.as_ref().map(|(created_us, _)| *created_us))
        .bind(after.as_ref().map(|(_, id)| id.as_str().to_owned()))
        .bind(i64::from(limit));
        self.db.read_all("list snapshots", query).await
    }
}

impl NodeRows {
    /// Stores a snapshot whose layers are on this node: a template, unless the snapshot with this name has one, and a build,
    /// to which the tag is assigned.
    ///
    /// # Errors
    /// [`StoreError::Conflict`] when an id is taken, and when the database fails.
    pub async fn snapshot_insert(&self, new: &NewSnapshot) -> Result<SnapshotStored, StoreError> {
        for text in [&new.tag].into_iter().chain(&new.alias) {
            storable("template name", text)?;
            if text.contains('\n') {
                return Err(StoreError::UnsupportedCharacter { what: "template name" });
            }
        }
        storable("spec of a build", &new.spec_json)?;
        let mut tx = self.store.db.begin(WHAT).await?;
        let team = new.team.as_str();
        // Requests of a team are made one after another, as those of builds.
        let lock = sqlx::query("UPDATE teams SET slug = slug WHERE id = $1").bind(team.to_owned());
        execute(&mut tx, "team", lock).await?;
        let named = match &new.alias {
            None => None,
            Some(alias) => {
                let row = sqlx::query(NAMED)
                    .bind(team.to_owned())
                    .bind(alias.clone())
                    .optional_in(&mut tx)
                    .await
                    .map_err(|error| classify(&error, "template", WHAT))?;
                row.as_ref().map(Columns::decode::<Named>).transpose()?
            }
        };
        let template = match (use_of(named.as_ref()), named) {
            (NameUse::Snapshot, Some(named)) => named.id,
            (NameUse::Free, _) => {
                let query = sqlx::query(
                    "INSERT INTO templates (id, team_id, is_public, spawn_count, created_us, is_snapshot) \
                     VALUES ($1, $2, 0, 0, $3, 1)",
                );
                let query = query.bind(new.template.as_str()).bind(team.to_owned()).bind(new.now_us);
                execute(&mut tx, "template", query).await?;
                if let Some(alias) = &new.alias {
                    let query =
                        sqlx::query("INSERT INTO template_aliases (scope, alias, template_id) VALUES ($1, $2, $3)");
                    let query = query
                        .bind(team.to_owned())
                        .bind(alias.clone())
                        .bind(new.template.as_str());
                    execute(&mut tx, "template alias", query).await?;
                }
                new.template.clone()
            }
            (taken, _) => return Ok(SnapshotStored::NameTaken(taken)),
        };
        let query = sqlx::query(
            "INSERT INTO builds (id, template_id, status, cpu_count, memory_mb, disk_mb, agent_version, spec_json, \
             created_us, started_us, finished_us, node_id, sandbox_id, memory_node_id, memory_key_sealed) \
             SELECT $1, $2, 'ready', $3, $4, $5, $6, $7, $8, $8, $9, id, $11, $12, $13 FROM nodes WHERE lease_key = $10",
        )
        .bind(new.build.as_str())
        .bind(template.as_str())
        .bind(i64::from(new.cpu_count))
        .bind(i64::from(new.memory_mb))
        .bind(i64::from(new.disk_mb))
        .bind(new.agent_version.clone())
        .bind(new.spec_json.clone())
        .bind(new.started_us)
        .bind(new.now_us)
        .bind(self.lease_key.clone())
        .bind(new.sandbox.as_str())
        .bind(new.memory.as_ref().map(|origin| origin.node.as_str().to_owned()))
        .bind(new.memory.as_ref().map(|origin| origin.key.as_str().to_owned()));
        let stored = execute(&mut tx, "build", query).await?;
        self.expect_lease(stored, WHAT)?;
        if !tags::assign(&mut tx, &template, &new.build, &new.tag, new.now_us).await? {
            return Ok(SnapshotStored::TooManyTags);
        }
        tx.commit().await.map_err(|error| classify(&error, "build", WHAT))?;
        self.store.db.sync(WHAT).await?;
        Ok(SnapshotStored::Stored(template))
    }
}
