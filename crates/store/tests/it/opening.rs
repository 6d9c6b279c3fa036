//! Opening, migrating and reopening a database.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use sqlx::{AnyConnection, Connection, Row};
use store::Store;
use store::error::StoreError;
use store::keys::KeyMask;
use store::nodes::LeaseOutcome;
use store::sandboxes::SandboxRow;
use store::teams::TeamRow;
use tokio::task::JoinSet;

use crate::database::Database;
use crate::nodes::lease_request;
use crate::postgres::Server;
use crate::samples::{FIRST_EPOCH, node_id, running, sandbox, sandbox_id, team, team_id};

pub(crate) async fn many_open_a_new_database_at_the_same_time(db: Database) {
    let mut openings = JoinSet::new();
    for _ in 0..8 {
        let url = db.url.clone();
        openings.spawn(async move { Store::open(&url).await.unwrap() });
    }
    let stores = openings.join_all().await;
    team(&stores[0], 1).await;
    for store in &stores {
        assert_eq!(store.team_list().await.unwrap().len(), 1);
        store.close().await;
    }
}

pub(crate) async fn a_second_migration_changes_nothing(db: Database) {
    let store = db.open().await;
    team(&store, 1).await;
    let row = running(&store, sandbox(1, 1), 5).await;
    store.close().await;
    let again = db.open().await;
    assert_eq!(again.sandbox_by_id(&row.id).await.unwrap(), Some(row));
    assert_eq!(again.team_list().await.unwrap().len(), 1);
    let versions = sqlx::query("SELECT version FROM schema_versions")
        .fetch_all(&mut db.raw().await)
        .await
        .unwrap();
    let versions: Vec<i64> = versions.iter().map(|row| row.get("version")).collect();
    assert_eq!(
        versions,
        [
            1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23
        ]
    );
    again.close().await;
}

pub(crate) async fn a_newer_schema_is_refused(db: Database) {
    db.open().await.close().await;
    sqlx::raw_sql("INSERT INTO schema_versions (version) VALUES (1000)")
        .execute(&mut db.raw().await)
        .await
        .unwrap();
    let error = Store::open(&db.url).await.unwrap_err();
    assert!(
        matches!(error, StoreError::SchemaTooNew { found: 1000, .. }),
        "{error:?}"
    );
}

/// A database with the schema of the first release.
pub(crate) async fn an_older_schema_is_migrated(db: Database) {
    if let Some(file) = &db.file {
        fs::File::create(file).unwrap();
    }
    let mut raw = db.raw().await;
    for sql in [
        include_str!("../../src/migrations/0001_first.sql"),
        "CREATE TABLE schema_versions (version BIGINT PRIMARY KEY); INSERT INTO schema_versions (version) VALUES (1)",
        "INSERT INTO teams (id, name, created_us) VALUES ('00000000-0000-4000-8000-000000000001', 'team', 1)",
        "INSERT INTO users (id, team_id, name, created_us) VALUES ('00000000-0000-4000-8000-000000000001', \
         '00000000-0000-4000-8000-000000000001', 'user', 1)",
        "INSERT INTO api_keys (id, team_id, user_id, name, hash, mask, created_us) VALUES ('k', \
         '00000000-0000-4000-8000-000000000001', '00000000-0000-4000-8000-000000000001', 'key', 'hash', \
         'e2b_53...dd90', 1)",
    ] {
        sqlx::raw_sql(sql).execute(&mut raw).await.unwrap();
    }
    raw.close().await.unwrap();
    let store = db.open().await;
    let keys = store.api_key_list(&team_id(1)).await.unwrap();
    let mask = KeyMask::of("e2b_", "53ae1fed82754c17ad8077fbc8bcdd9053aedd90");
    assert_eq!((keys.len(), &keys[0].mask, keys[0].last_used_us), (1, &mask, None));
    store.close().await;
}

/// A database of a release that did not know nodes: the first node to start gets all of its rows.
pub(crate) async fn rows_without_a_node_are_adopted_by_the_first_node(db: Database) {
    if let Some(file) = &db.file {
        fs::File::create(file).unwrap();
    }
    let mut raw = db.raw().await;
    for sql in [
        include_str!("../../src/migrations/0001_first.sql"),
        include_str!("../../src/migrations/0002_rest.sql"),
        include_str!("../../src/migrations/0003_records.sql"),
        include_str!("../../src/migrations/0004_lists.sql"),
        "CREATE TABLE schema_versions (version BIGINT PRIMARY KEY); \
         INSERT INTO schema_versions (version) VALUES (1), (2), (3), (4)",
        "INSERT INTO teams (id, name, created_us) VALUES ('00000000-0000-4000-8000-000000000001', 'team', 1)",
        "INSERT INTO users (id, team_id, name, created_us) VALUES ('00000000-0000-4000-8000-000000000001', \
         '00000000-0000-4000-8000-000000000001', 'user', 1)",
        "INSERT INTO sandboxes (id, team_id, user_id, template_id, build_id, state, version, execution_id, started_us, \
         end_us, max_end_us, cpu_count, memory_mb, disk_mb, agent_version, metadata_json, secure, \
         allow_public_traffic, created_us) VALUES ('i00000000000000000001', '00000000-0000-4000-8000-000000000001', \
         '00000000-0000-4000-8000-000000000001', 't0000000000000000001', '00000000-0000-4000-8000-000000000001', \
         'running', 2, 'x', 5, 9, 9, 2, 1024, 10240, '0.6.13', '{}', 1, 1, 1)",
        "INSERT INTO idempotency_keys (team_id, key, body_hash, state, sandbox_id, created_us, expires_us) VALUES \
         ('00000000-0000-4000-8000-000000000001', 'k', 'h', 'in_progress', 'i00000000000000000001', 1, 9)",
    ] {
        sqlx::raw_sql(sql).execute(&mut raw).await.unwrap();
    }
    raw.close().await.unwrap();
    let store = db.open().await;
    let id = sandbox_id(1);
    let before = store.sandbox_by_id(&id).await.unwrap().unwrap();
    assert_eq!((before.node_id.as_ref(), before.version), (None, 2));
    // Without a node: no node may change it before acquiring its lease.
    let (first, second) = (
        store.of_node(node_id(1), FIRST_EPOCH),
        store.of_node(node_id(2), FIRST_EPOCH),
    );
    let refused = first.sandbox_delete(&id).await;
    assert!(matches!(refused, Err(StoreError::LeaseLost { .. })), "{refused:?}");
    for n in [1, 2] {
        let outcome = store.node_lease_acquire(&lease_request(n, n, 0)).await.unwrap();
        assert_eq!(outcome, LeaseOutcome::Acquired { epoch: FIRST_EPOCH });
    }
    let after = SandboxRow {
        node_id: Some(node_id(1)),
        ..before
    };
    assert_eq!(first.sandbox_list_live().await.unwrap(), [after]);
    assert_eq!(second.sandbox_list_live().await.unwrap(), []);
    assert_eq!(first.idempotency_list_in_progress().await.unwrap().len(), 1);
    assert_eq!(second.idempotency_list_in_progress().await.unwrap(), []);
    store.close().await;
}

pub(crate) async fn rows_survive_a_drop_without_close(db: Database) {
    let store = db.open().await;
    team(&store, 1).await;
    let row = running(&store, sandbox(1, 1), 5).await;
    if let Some(file) = &db.file {
        // The files on disk now are what a kill of the process would leave.
        let dir = tempfile::tempdir().unwrap();
        let copy = dir.path().join("copy.db");
        fs::copy(file, &copy).unwrap();
        fs::copy(file.with_extension("db-wal"), copy.with_extension("db-wal")).unwrap();
        let found = Store::open(&format!("sqlite:{}", copy.display())).await.unwrap();
        assert_eq!(found.sandbox_by_id(&row.id).await.unwrap().as_ref(), Some(&row));
        found.close().await;
    }
    drop(store);
    let again = db.open().await;
    assert_eq!(again.sandbox_by_id(&row.id).await.unwrap(), Some(row));
    again.close().await;
}

/// Checks the portable subset against the catalogue of each engine.
pub(crate) async fn columns_are_text_or_bigint(db: Database) {
    let store = db.open().await;
    let sql = if db.file.is_some() {
        "SELECT lower(c.type) AS kind, m.name || '.' || c.name AS name \
         FROM sqlite_master m, pragma_table_info(m.name) c WHERE m.type = 'table'"
    } else {
        "SELECT CAST(data_type AS TEXT) AS kind, CAST(table_name || '.' || column_name AS TEXT) AS name \
         FROM information_schema.columns WHERE table_schema = 'public'"
    };
    let columns = sqlx::query(sql).fetch_all(&mut db.raw().await).await.unwrap();
    assert!(columns.len() > 60, "{}", columns.len());
    for column in columns {
        let (kind, name): (String, String) = (column.get("kind"), column.get("name"));
        assert!(kind == "text" || kind == "bigint", "{name} is {kind}");
    }
    store.close().await;
}

#[tokio::test]
async fn invalid_addresses_are_refused() {
    for url in [
        "",
        "mysql://x",
        "sqlite:",
        "sqlite::memory:",
        "sqlite://",
        "/tmp/x",
        "postgres://[",
    ] {
        let error = Store::open(url).await.unwrap_err();
        assert!(matches!(error, StoreError::Address { .. }), "{url}: {error:?}");
    }
}

#[tokio::test]
async fn an_unreachable_database_is_unavailable() {
    let dir = tempfile::tempdir().unwrap();
    let url = format!("sqlite:{}/no/such/dir/x.db", dir.path().display());
    let error = Store::open(&url).await.unwrap_err();
    assert!(matches!(error, StoreError::Unavailable { .. }), "{error:?}");
}

#[tokio::test]
async fn a_copy_is_a_database_of_one_moment() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(&format!("sqlite:{}/one.db", dir.path().display()))
        .await
        .unwrap();
    team(&store, 1).await;
    let path = dir.path().join("copy.db");
    assert!(store.copy_to(&path).await.unwrap());
    team(&store, 2).await;
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    // Never over another file.
    assert!(store.copy_to(&path).await.is_err());
    let copy = Store::open(&format!("sqlite:{}", path.display())).await.unwrap();
    assert_eq!(copy.team_list().await.unwrap().len(), 1);
    copy.close().await;
    assert_eq!(store.team_list().await.unwrap().len(), 2);
    store.close().await;
}

#[tokio::test]
async fn sqlite_files_are_private_and_may_have_any_path() {
    let dir = tempfile::tempdir().unwrap();
    let odd = dir.path().join("a b%20?c#d &é");
    fs::create_dir(&odd).unwrap();
    let file = odd.join("x?mode=ro.db");
    let store = Store::open(&format!("sqlite:{}", file.display())).await.unwrap();
    team(&store, 1).await;
    let mut names = Vec::new();
    for entry in fs::read_dir(&odd).unwrap() {
        let entry = entry.unwrap();
        assert_eq!(
            entry.metadata().unwrap().permissions().mode() & 0o777,
            0o600,
            "{entry:?}"
        );
        names.push(entry.file_name().into_string().unwrap());
    }
    names.sort();
    assert_eq!(names, ["x?mode=ro.db", "x?mode=ro.db-shm", "x?mode=ro.db-wal"]);
    store.close().await;
    // Closing moves the log into the database file.
    assert_eq!(fs::read_dir(&odd).unwrap().count(), 1);
}

#[tokio::test]
async fn a_server_that_is_not_there_is_named_without_the_password() {
    let closed = std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    let error = Store::open(&format!("postgres://user:hunter2@{closed}/db"))
        .await
        .unwrap_err();
    let StoreError::Unavailable { source, .. } = &error else {
        panic!("{error:?}");
    };
    let why = source.to_string();
    assert!(
        why.contains(&closed.to_string()) && why.contains("refused") && !why.contains("hunter2"),
        "{why}"
    );
}

#[tokio::test]
async fn a_ping_says_where_the_server_was() {
    let mut server = Server::start();
    let store = Store::open(&server.url("postgres")).await.unwrap();
    store.ping().await.unwrap();
    server.stop();
    let error = store.ping().await.unwrap_err();
    assert!(
        matches!(&error, StoreError::Unavailable { source, .. } if source.to_string().contains(".s.PGSQL.")),
        "{error:?}"
    );
    server.start_again();
    store.ping().await.unwrap();
    store.close().await;
}

/// A server whose processes are stopped where they are: connections stay open, and nothing answers. They go on when this is dropped.
struct Frozen {
    processes: Vec<Pid>,
}

impl Frozen {
    fn new(server: &Server) -> Self {
        let url = server.url("postgres");
        let (_, directory) = url.split_once("host=").unwrap();
        let file = fs::read_to_string(format!("{directory}/data/postmaster.pid")).unwrap();
        let server: i32 = file.lines().next().unwrap().trim().parse().unwrap();
        // It makes no others once it is stopped.
        let mut frozen = Self {
            processes: vec![Pid::from_raw(server).unwrap()],
        };
        frozen.send(Signal::STOP);
        let children = fs::read_to_string(format!("/proc/{server}/task/{server}/children")).unwrap();
        let children = children.split_whitespace().map(|child| child.parse().unwrap());
        frozen.processes = children
            .filter_map(Pid::from_raw)
            .chain(frozen.processes.iter().copied())
            .collect();
        frozen.send(Signal::STOP);
        frozen
    }

    fn send(&self, signal: Signal) {
        for process in &self.processes {
            // One may have ended meanwhile.
            let _ = kill_process(*process, signal);
        }
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        self.send(Signal::CONT);
    }
}

/// Whoever has a table for long keeps a migration from being applied, and the migration must not keep others from the table.
#[tokio::test]
async fn a_migration_waits_for_others_and_lets_them_go_first() {
    let server = Server::start();
    let url = server.url("postgres");
    let store = Store::open(&url).await.unwrap();
    team(&store, 1).await;
    let mut other = AnyConnection::connect(&url).await.unwrap();
    let locked = "BEGIN; LOCK TABLE schema_versions IN ACCESS EXCLUSIVE MODE";
    sqlx::raw_sql(locked).execute(&mut other).await.unwrap();
    let mut watching = AnyConnection::connect(&url).await.unwrap();
    let opening = tokio::spawn(async move { Store::open(&url).await });
    let waits = "SELECT COUNT(*) AS waiting FROM pg_stat_activity WHERE wait_event_type = 'Lock'";
    let (mut tries, mut was_waiting) = (0, false);
    while tries < 2 {
        let row = sqlx::query(waits).fetch_one(&mut watching).await.unwrap();
        let is_waiting = row.get::<i64, _>("waiting") > 0;
        tries += u32::from(is_waiting && !was_waiting);
        was_waiting = is_waiting;
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    sqlx::raw_sql("ROLLBACK").execute(&mut other).await.unwrap();
    opening.await.unwrap().unwrap().close().await;
    store.close().await;
}

/// A machine that is gone answers nothing, and its connections look open for a quarter of an hour.
#[tokio::test]
async fn a_server_that_stops_without_a_word_is_unavailable_in_time() {
    // The time of a statement is 15 s, and that of a caller for a connection 10 s.
    const PATIENCE: Duration = Duration::from_secs(60);
    let server = Server::start();
    let store = Store::open(&server.url("postgres")).await.unwrap();
    team(&store, 1).await;

    // More callers than there are connections, with single statements, and with transactions.
    let callers = |first: u32| {
        let mut calls = JoinSet::new();
        for number in first..first + 12 {
            let (reads, writes) = (store.clone(), store.clone());
            let team = TeamRow {
                id: team_id(number),
                name: format!("team {number}"),
                created_us: 1,
            };
            calls.spawn(async move { reads.team_list().await.map(drop) });
            calls.spawn(async move { writes.team_insert(&team).await });
        }
        tokio::time::timeout(PATIENCE, calls.join_all())
    };
    let warm = callers(100).await.unwrap();
    assert!(warm.iter().all(Result::is_ok), "{warm:?}");
    // Every connection has a statement that waits when the server stops.
    let mut lock = AnyConnection::connect(&server.url("postgres")).await.unwrap();
    let locked = "BEGIN; LOCK TABLE teams IN ACCESS EXCLUSIVE MODE";
    sqlx::raw_sql(locked).execute(&mut lock).await.unwrap();
    let calls = tokio::spawn(callers(200));
    let waiting = "SELECT COUNT(*) AS waiting FROM pg_stat_activity WHERE wait_event_type = 'Lock'";
    while sqlx::query(waiting)
        .fetch_one(&mut lock)
        .await
        .unwrap()
        .get::<i64, _>("waiting")
        < 16
    {}
    let frozen = Frozen::new(&server);
    let answers = calls.await.unwrap().expect("nobody waits for longer");
    drop(frozen);
    sqlx::raw_sql("ROLLBACK").execute(&mut lock).await.unwrap();
    lock.close().await.unwrap();
    let mut late = 0;
    for answer in answers {
        match answer {
            Err(StoreError::Unavailable { source, .. }) => late += usize::from(source.to_string().contains("15 s")),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(late, 16, "each connection was given up");
    let again = callers(300).await.unwrap();
    assert!(again.iter().all(Result::is_ok), "no connection is missing: {again:?}");
    store.close().await;
}
