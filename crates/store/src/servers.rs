//! Servers that work as one service on one database: who they are, where the others reach them, and which of them serves a
//! node.
//!
//! A server has the id of its data directory, and with it a lease in the table of nodes. The leases of the nodes that it serves
//! have the same owner, so no row says twice which server that is, and a server whose own lease has run out serves none.

use model::id::{NodeId, OwnerId, SandboxId, TeamId};
use model::lifecycle::{Kept, State};

use crate::Store;
use crate::dialect::Engine;
use crate::error::{StoreError, classify};
use crate::nodes::{Lease, NodeRows};
use crate::row::{Columns, FromColumns, storable};
use crate::statement::InTransaction as _;

/// A server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerRow {
    /// Id of the server, which its data directory has.
    pub id: NodeId,
    /// The name of its host.
    pub name: String,
    /// Where other servers reach it; none if it works alone.
    pub address: Option<String>,
    /// What its nodes have left, in a format of the caller; none if it has not said.
    pub room_json: Option<String>,
    /// When it last said so, in microseconds since the Unix epoch.
    pub seen_us: i64,
    /// Its lease; none after a release. It may have expired.
    pub lease: Option<Lease>,
}

/// The server of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SandboxRoute {
    /// The state of the sandbox in its row.
    pub state: State,
    /// Its node; none in a row of a version that did not know nodes.
    pub node: Option<NodeId>,
    /// The server whose lease its node has, and where others reach that; none while no server serves the node.
    pub server: Option<(NodeId, Option<String>)>,
}

/// A node that has joined, and who serves it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServedNodeRow {
    /// Id of the node.
    pub id: NodeId,
    /// Its lease; none if it has none.
    pub lease: Option<Lease>,
    /// Since when it gets no new sandboxes, in microseconds since the Unix epoch; none if it gets some.
    pub draining_us: Option<i64>,
}

/// A node that has joined, for operators: its host, and the server that serves it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodePlace {
    /// Id of the node.
    pub id: NodeId,
    /// The name of its host.
    pub name: String,
    /// The server that serves the node; none while no server does, as far as leases say.
    pub server: Option<ServerPlace>,
}

/// A server, for operators: its host, and where other servers reach it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerPlace {
    /// Id of the server.
    pub id: NodeId,
    /// The name of its host.
    pub name: String,
    /// Where other servers reach it; none if it works alone.
    pub address: Option<String>,
}

/// The sandboxes of a team that are alike, on nodes that other servers serve.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UseElsewhere {
    /// The team.
    pub team: TeamId,
    /// Whether they are paused.
    pub is_paused: bool,
    /// What is kept of paused ones.
    pub kept: Option<Kept>,
    /// How many they are.
    pub count: u64,
    /// Their cores.
    pub cpu_count: u64,
    /// Their memory, in MiB.
    pub memory_mb: u64,
    /// Space that they take on disks while they are paused, in MiB.
    pub paused_disk_mb: u64,
}

/// The id of a sandbox.
struct RunningId(SandboxId);

impl FromColumns for RunningId {
    const TABLE: &'static str = "sandboxes";

    fn from_columns(columns: &Columns<'_>) -> Result<Self, StoreError> {
        Ok(Self(columns.id("id")?))
    }
}

fn lease(columns: &Columns<'_>) -> Result<Option<Lease>, StoreError> {
    let owner: Option<OwnerId> = columns.id_opt("lease_owner")?;
    let until_us = columns.int_opt("lease_until_us")?.unwrap_or(0);
    Ok(owner.map(|owner| Lease { owner, until_us }))
}

/// A server that is gone: its id, and its name as column `value`.
impl FromColumns for (NodeId, String) {
    const TABLE: &'static str = "servers";

    fn from_columns(columns: &Columns<'_>) -> Result<Self, StoreError> {
        Ok((columns.id("id")?, columns.text("value")?))
    }
}

impl FromColumns for ServerRow {
    const TABLE: &'static str = "servers";

    fn from_columns(columns: &Columns<'_>) -> Result<Self, StoreError> {
        Ok(Self {
            id: columns.id("id")?,
            name: columns.text("name")?,
            address: columns.text_opt("address")?,
            room_json: columns.text_opt("room_json")?,
            seen_us: columns.int("seen_us")?,
            lease: lease(columns)?,
        })
    }
}

impl FromColumns for SandboxRoute {
    const TABLE: &'static str = "sandboxes";

    fn from_columns(columns: &Columns<'_>) -> Result<Self, StoreError> {
        let server: Option<NodeId> = columns.id_opt("server_id")?;
        let address = columns.text_opt("address")?;
        Ok(Self {
            state: State::from_column(&columns.text("state")?).ok_or_else(|| columns.corrupt("state"))?,
            node: columns.id_opt("node_id")?,
            server: server.map(|id| (id, address)),
        })
    }
}

impl FromColumns for ServedNodeRow {
    const TABLE: &'static str = "joined_nodes";

    fn from_columns(columns: &Columns<'_>) -> Result<Self, StoreError> {
        Ok(Self {
            id: columns.id("id")?,
            lease: lease(columns)?,
            draining_us: columns.int_opt("draining_us")?,
        })
    }
}

impl FromColumns for NodePlace {
    const TABLE: &'static str = "joined_nodes";

    fn from_columns(columns: &Columns<'_>) -> Result<Self, StoreError> {
        let server = match columns.id_opt("server_id")? {
            None => None,
            Some(id) => Some(ServerPlace {
                id,
                name: columns.text("server_name")?,
                address: columns.text_opt("address")?,
            }),
        };
        Ok(Self {
            id: columns.id("id")?,
            name: columns.text("name")?,
            server,
        })
    }
}

impl FromColumns for UseElsewhere {
    const TABLE: &'static str = "sandboxes";

    fn from_columns(columns: &Columns<'_>) -> Result<Self, StoreError> {
        let number = |column| u64::try_from(columns.int(column)?).map_err(|_| columns.corrupt(column));
        Ok(Self {
            team: columns.id("team_id")?,
            is_paused: State::from_column(&columns.text("state")?).ok_or_else(|| columns.corrupt("state"))?
                == State::Paused,
            kept: match columns.text_opt("kept")? {
                None => None,
                Some(word) => Some(Kept::from_column(&word).ok_or_else(|| columns.corrupt("kept"))?),
            },
            count: number("sandboxes")?,
            cpu_count: number("cpu_count")?,
            memory_mb: number("memory_mb")?,
            paused_disk_mb: number("paused_disk_mb")?,
        })
    }
}

impl NodeRows {
    /// Says that the server with this lease is there, where others reach it, and what its nodes have left.
    ///
    /// # Errors
    /// [`StoreError::LeaseLost`] when another server has its lease.
    pub async fn server_beat(
        &self,
        name: &str,
        address: Option<&str>,
        room_json: Option<&str>,
        now_us: i64,
    ) -> Result<(), StoreError> {
        const WHAT: &str = "note that a server is there";
        storable("host name", name)?;
        storable("address of a server", address.unwrap_or_default())?;
        storable("room of a server", room_json.unwrap_or_default())?;
        let query = sqlx::query(
            "INSERT INTO servers (id, name, address, room_json, seen_us) \
             SELECT id, $2, $3, $4, $5 FROM nodes WHERE lease_key = $1 ON CONFLICT (id) DO UPDATE SET \
             name = excluded.name, address = excluded.address, room_json = excluded.room_json, seen_us = excluded.seen_us",
        )
        .bind(self.lease_key.clone())
        .bind(name.to_owned())
        .bind(address.map(str::to_owned))
        .bind(room_json.map(str::to_owned))
        .bind(now_us);
        let stored = self.store().db.write("server", WHAT, query).await?;
        self.expect_lease(stored, WHAT)
    }

    /// Forgets the servers that were not there since `gone_us`, for the server with this lease, and returns their names. What
    /// their builds have made is that server's from now on, also builds that wait for their clients; what they have kept of
    /// uploads and of steps is forgotten. Nodes that they have served are away until they connect.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn servers_remove(&self, gone_us: i64) -> Result<Vec<String>, StoreError> {
        const WHAT: &str = "forget servers that are gone";
        const GONE: &str = "SELECT s.id, s.name AS value FROM servers s WHERE s.seen_us < $1 AND s.id <> $2 \
             AND NOT EXISTS (SELECT 1 FROM nodes n WHERE n.id = s.id AND n.lease_until_us >= $1) ORDER BY s.id";
        let db = &self.store().db;
        let gone = || sqlx::query(GONE).bind(gone_us).bind(self.node.as_str().to_owned());
        let found: Vec<(NodeId, String)> = db.read_all(WHAT, gone()).await?;
        if found.is_empty() {
            return Ok(Vec::new());
        }
        let failed = |error: sqlx::Error| classify(&error, "server", WHAT);
        let mut tx = db.begin(WHAT).await?;
        let own = sqlx::query("SELECT id FROM nodes WHERE lease_key = $1").bind(self.lease_key.clone());
        if own.optional_in(&mut tx).await.map_err(failed)?.is_none() {
            return Err(StoreError::LeaseLost { what: WHAT });
        }
        let mut names = Vec::new();
        for (id, name) in found {
            // The row first: a server that comes back meanwhile writes it, and one of two that forget it is the first.
            let removed = sqlx::query(
                "DELETE FROM servers WHERE id = $1 AND seen_us < $2 \
                 AND NOT EXISTS (SELECT 1 FROM nodes n WHERE n.id = $1 AND n.lease_until_us >= $2)",
            );
            let removed = removed.bind(id.as_str().to_owned()).bind(gone_us);
            if removed.execute_in(&mut tx).await.map_err(failed)?.rows_affected() == 0 {
                continue;
            }
            for sql in [
                "UPDATE builds SET node_id = $2 WHERE node_id = $1",
                "DELETE FROM layer_cache WHERE node_id = $1 AND node_id <> $2",
                "DELETE FROM template_files WHERE node_id = $1 AND node_id <> $2",
            ] {
                let query = sqlx::query(sql).bind(id.as_str().to_owned());
                let query = query.bind(self.node.as_str().to_owned());
                query.execute_in(&mut tx).await.map_err(failed)?;
            }
            let lease = sqlx::query(
                "DELETE FROM nodes WHERE id = $1 AND lease_until_us < $2 \
                 AND NOT EXISTS (SELECT 1 FROM sandboxes WHERE sandboxes.node_id = nodes.id)",
            );
            let lease = lease.bind(id.as_str().to_owned()).bind(gone_us);
            lease.execute_in(&mut tx).await.map_err(failed)?;
            names.push(name);
        }
        tx.commit().await.map_err(failed)?;
        Ok(names)
    }
}

impl Store {
    /// Whether several servers can work on this database at the same time: the file of SQLite belongs to one.
    #[must_use]
    pub fn can_be_shared(&self) -> bool {
        self.db.engine == Engine::Postgres
    }

    /// The servers of this database, also those that are gone.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn server_list(&self) -> Result<Vec<ServerRow>, StoreError> {
        let query = sqlx::query(
            "SELECT s.id, s.name, s.address, s.room_json, s.seen_us, n.lease_owner, n.lease_until_us \
             FROM servers s LEFT JOIN nodes n ON n.id = s.id ORDER BY s.id",
        );
        self.db.read_all("list servers", query).await
    }

    /// The server of a sandbox; none if there is no such sandbox.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn sandbox_route(&self, id: &SandboxId) -> Result<Option<SandboxRoute>, StoreError> {
        let query = sqlx::query(
            "SELECT b.state, b.node_id, s.id AS server_id, s.address FROM sandboxes b LEFT JOIN nodes n ON n.id = b.node_id \
             LEFT JOIN (SELECT h.lease_owner, v.id, v.address FROM nodes h JOIN servers v ON v.id = h.id) s \
             ON s.lease_owner = n.lease_owner WHERE b.id = $1",
        )
        .bind(id.as_str());
        self.db.read_optional("find the server of a sandbox", query).await
    }

    /// The sandboxes that run on nodes which other servers than that of `owner` serve.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn running_elsewhere(&self, owner: &OwnerId) -> Result<Vec<SandboxId>, StoreError> {
        let query = sqlx::query(
            "SELECT b.id FROM sandboxes b JOIN nodes n ON n.id = b.node_id JOIN joined_nodes j ON j.id = n.id \
             WHERE n.lease_owner <> $1 AND b.state = 'running'",
        )
        .bind(owner.as_str());
        let found: Vec<RunningId> = self.db.read_all("list the sandboxes of other servers", query).await?;
        Ok(found.into_iter().map(|RunningId(id)| id).collect())
    }

    /// The nodes that have joined and were not forgotten, and who serves them.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn served_node_list(&self) -> Result<Vec<ServedNodeRow>, StoreError> {
        let query = sqlx::query(
            "SELECT j.id, j.draining_us, n.lease_owner, n.lease_until_us FROM joined_nodes j LEFT JOIN nodes n ON n.id = j.id \
             WHERE j.forgotten_us IS NULL ORDER BY j.id",
        );
        self.db.read_all("list who serves which node", query).await
    }

    /// All nodes that have joined, also those that were forgotten, with the servers that serve them at `now_us` of the time of
    /// leases.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn node_place_list(&self, now_us: i64) -> Result<Vec<NodePlace>, StoreError> {
        let query = sqlx::query(
            "SELECT j.id, j.name, s.id AS server_id, s.name AS server_name, s.address FROM joined_nodes j \
             LEFT JOIN nodes n ON n.id = j.id AND n.lease_until_us > $1 \
             LEFT JOIN (SELECT h.lease_owner, v.id, v.name, v.address FROM nodes h JOIN servers v ON v.id = h.id) s \
             ON s.lease_owner = n.lease_owner ORDER BY j.id",
        )
        .bind(now_us);
        self.db.read_all("list nodes and their servers", query).await
    }

    /// What each team has on nodes that other servers than that of `owner` serve.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn use_elsewhere(&self, owner: &OwnerId) -> Result<Vec<UseElsewhere>, StoreError> {
        let query = sqlx::query(
            "SELECT b.team_id, b.state, b.kept, COUNT(*) AS sandboxes, CAST(SUM(b.cpu_count) AS BIGINT) AS cpu_count, \
             CAST(SUM(b.memory_mb) AS BIGINT) AS memory_mb, \
             CAST(SUM(COALESCE(b.kept_bytes / 1048576 + CASE WHEN b.kept_bytes % 1048576 > 0 THEN 1 ELSE 0 END, 0)) \
             AS BIGINT) AS paused_disk_mb \
             FROM sandboxes b JOIN nodes n ON n.id = b.node_id JOIN joined_nodes j ON j.id = n.id \
             WHERE n.lease_owner <> $1 AND b.state <> 'gone' GROUP BY b.team_id, b.state, b.kept",
        )
        .bind(owner.as_str());
        self.db.read_all("sum up what teams have on other servers", query).await
    }
}
