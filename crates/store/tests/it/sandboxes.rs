//! The row of one sandbox.

use model::lifecycle::row::RowChange;
use model::lifecycle::{Kept, State};
use store::Change;
use store::error::StoreError;
use store::keys::SealedSecret;
use store::sandboxes::{NewSandbox, Pause, Resumption, SandboxRow};

use crate::database::Database;
use crate::samples::{FIRST_EPOCH, node_id, running, sandbox, sandbox_id, team, team_id};

pub(crate) async fn every_field_round_trips(db: Database) {
    let store = db.open().await;
    team(&store, 1).await;
    let plain = store
        .of_node(node_id(1), FIRST_EPOCH)
        .sandbox_insert(sandbox(1, 1))
        .await
        .unwrap();
    let new = NewSandbox {
        alias: None,
        metadata: [("schlüssel \"'\\", "wert\n\u{1f980}"), ("nul", "a\0b"), ("", "")]
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .into(),
        secure: false,
        allow_public_traffic: false,
        allow_internet_access: Some(false),
        network_json: Some("{\"allowOut\":[\"*\"]}".to_owned()),
        lifecycle_json: Some("{\"autoPause\":false}".to_owned()),
        end_us: i64::MAX,
        cpu_count: u32::MAX,
        ..sandbox(2, 1)
    };
    let odd = store
        .of_node(node_id(1), FIRST_EPOCH)
        .sandbox_insert(new.clone())
        .await
        .unwrap();
    assert_eq!(
        (odd.state, odd.version, odd.started_us),
        (State::Creating, 1, new.created_us)
    );
    assert_eq!(odd.metadata, new.metadata);
    for row in [plain, odd] {
        assert_eq!(store.sandbox_by_id(&row.id).await.unwrap().as_ref(), Some(&row));
    }
    assert_eq!(store.sandbox_by_id(&sandbox_id(3)).await.unwrap(), None);
    let error = store
        .of_node(node_id(1), FIRST_EPOCH)
        .sandbox_insert(new)
        .await
        .unwrap_err();
    assert!(matches!(error, StoreError::Conflict { what: "sandbox" }), "{error:?}");
    let unowned = NewSandbox {
        team_id: team_id(9),
        ..sandbox(4, 1)
    };
    let error = store
        .of_node(node_id(1), FIRST_EPOCH)
        .sandbox_insert(unowned)
        .await
        .unwrap_err();
    assert!(matches!(error, StoreError::Dangling { what: "sandbox" }), "{error:?}");
    store.close().await;
}

pub(crate) async fn insert_start_stop_and_delete(db: Database) {
    let store = db.open().await;
    team(&store, 1).await;
    let created = store
        .of_node(node_id(1), FIRST_EPOCH)
        .sandbox_insert(sandbox(1, 1))
        .await
        .unwrap();
    let id = created.id.clone();
    let started = SandboxRow {
        state: State::Running,
        version: 2,
        started_us: 10,
        end_us: 500,
        agent_version: "0.7.0".to_owned(),
        ..created
    };
    let change = store
        .of_node(node_id(1), FIRST_EPOCH)
        .sandbox_started(&id, 1, 10, 500, "0.7.0")
        .await
        .unwrap();
    assert_eq!(change, Change::Applied(started.clone()));
    let stopping = SandboxRow {
        state: State::Stopping,
        version: 3,
        ..started
    };
    let change = store
        .of_node(node_id(1), FIRST_EPOCH)
        .sandbox_change_state(&id, 2, RowChange::Stopping)
        .await
        .unwrap();
    assert_eq!(change, Change::Applied(stopping.clone()));
    assert_eq!(
        store
            .of_node(node_id(1), FIRST_EPOCH)
            .sandbox_delete(&id)
            .await
            .unwrap(),
        Some(stopping)
    );
    assert_eq!(
        store
            .of_node(node_id(1), FIRST_EPOCH)
            .sandbox_delete(&id)
            .await
            .unwrap(),
        None
    );
    assert_eq!(store.sandbox_by_id(&id).await.unwrap(), None);
    store.close().await;
}

pub(crate) async fn changes_of_an_old_version_are_stale(db: Database) {
    let store = db.open().await;
    team(&store, 1).await;
    let row = running(&store, sandbox(1, 1), 5).await;
    let (id, old) = (&row.id, row.version - 1);
    assert_eq!(
        store
            .of_node(node_id(1), FIRST_EPOCH)
            .sandbox_started(id, row.version, 1, 1, "x")
            .await
            .unwrap(),
        Change::Stale
    );
    assert_eq!(
        store
            .of_node(node_id(1), FIRST_EPOCH)
            .sandbox_change_state(id, old, RowChange::Gone)
            .await
            .unwrap(),
        Change::Stale
    );
    assert_eq!(
        store
            .of_node(node_id(1), FIRST_EPOCH)
            .sandbox_set_end(id, Some(old), 1)
            .await
            .unwrap(),
        Change::Stale
    );
    assert_eq!(store.sandbox_by_id(id).await.unwrap().as_ref(), Some(&row));

    // A client extends the deadline after the reaper has read it: the change of the reaper is stale.
    let extended = store
        .of_node(node_id(1), FIRST_EPOCH)
        .sandbox_extend_end(id, row.end_us + 1)
        .await
        .unwrap()
        .applied()
        .unwrap();
    assert_eq!(
        store
            .of_node(node_id(1), FIRST_EPOCH)
            .sandbox_change_state(id, row.version, RowChange::Stopping)
            .await
            .unwrap(),
        Change::Stale
    );
    // An extension that changes nothing does not raise the version.
    let same = store
        .of_node(node_id(1), FIRST_EPOCH)
        .sandbox_extend_end(id, row.end_us)
        .await
        .unwrap();
    assert_eq!(same, Change::Applied(extended));

    let none = sandbox_id(2);
    assert_eq!(
        store
            .of_node(node_id(1), FIRST_EPOCH)
            .sandbox_started(&none, 1, 1, 1, "x")
            .await
            .unwrap(),
        Change::Missing
    );
    assert_eq!(
        store
            .of_node(node_id(1), FIRST_EPOCH)
            .sandbox_change_state(&none, 1, RowChange::Gone)
            .await
            .unwrap(),
        Change::Missing
    );
    assert_eq!(
        store
            .of_node(node_id(1), FIRST_EPOCH)
            .sandbox_set_end(&none, None, 1)
            .await
            .unwrap(),
        Change::Missing
    );
    assert_eq!(
        store
            .of_node(node_id(1), FIRST_EPOCH)
            .sandbox_extend_end(&none, 1)
            .await
            .unwrap(),
        Change::Missing
    );
    store.close().await;
}

pub(crate) async fn deadlines_change_only_while_running(db: Database) {
    let store = db.open().await;
    team(&store, 1).await;
    let created = store
        .of_node(node_id(1), FIRST_EPOCH)
        .sandbox_insert(sandbox(1, 1))
        .await
        .unwrap();
    let id = &created.id;
    assert_eq!(
        store
            .of_node(node_id(1), FIRST_EPOCH)
            .sandbox_extend_end(id, i64::MAX)
            .await
            .unwrap(),
        Change::Stale
    );
    assert_eq!(
        store
            .of_node(node_id(1), FIRST_EPOCH)
            .sandbox_set_end(id, None, 1)
            .await
            .unwrap(),
        Change::Stale
    );
    let row = running(&store, sandbox(2, 1), 5).await;
    let shorter = store
        .of_node(node_id(1), FIRST_EPOCH)
        .sandbox_set_end(&row.id, None, 6)
        .await
        .unwrap()
        .applied()
        .unwrap();
    assert_eq!((shorter.end_us, shorter.version), (6, row.version + 1));
    let longer = store
        .of_node(node_id(1), FIRST_EPOCH)
        .sandbox_set_end(&row.id, Some(shorter.version), 9)
        .await
        .unwrap()
        .applied()
        .unwrap();
    assert_eq!((longer.end_us, longer.version), (9, row.version + 2));
    let stopping = store
        .of_node(node_id(1), FIRST_EPOCH)
        .sandbox_change_state(&row.id, longer.version, RowChange::Stopping)
        .await
        .unwrap()
        .applied()
        .unwrap();
    assert_eq!(
        store
            .of_node(node_id(1), FIRST_EPOCH)
            .sandbox_extend_end(&row.id, 100)
            .await
            .unwrap(),
        Change::Stale
    );
    assert_eq!(store.sandbox_by_id(&row.id).await.unwrap(), Some(stopping));
    store.close().await;
}

pub(crate) async fn the_network_changes_only_while_running(db: Database) {
    let store = db.open().await;
    team(&store, 1).await;
    let rows = store.of_node(node_id(1), FIRST_EPOCH);
    let created = rows.sandbox_insert(sandbox(1, 1)).await.unwrap();
    let change = rows.sandbox_set_network(&created.id, created.version, None, None).await;
    assert_eq!(change.unwrap(), Change::Stale);
    let mut row = running(&store, sandbox(2, 1), 5).await;
    for (json, access) in [
        (Some("{}"), Some(false)),
        (None, Some(true)),
        (Some("x"), None),
        (None, None),
    ] {
        let change = rows.sandbox_set_network(&row.id, row.version, json, access).await;
        let want = SandboxRow {
            network_json: json.map(str::to_owned),
            allow_internet_access: access,
            version: row.version + 1,
            ..row.clone()
        };
        assert_eq!(change.unwrap(), Change::Applied(want.clone()));
        let old = rows.sandbox_set_network(&row.id, row.version, None, None).await;
        assert_eq!(old.unwrap(), Change::Stale);
        assert_eq!(store.sandbox_by_id(&row.id).await.unwrap(), Some(want.clone()));
        row = want;
    }
    let elsewhere = store
        .of_node(node_id(2), FIRST_EPOCH)
        .sandbox_set_network(&row.id, row.version, None, None)
        .await;
    assert_eq!(elsewhere.unwrap(), Change::Missing);
    store.close().await;
}

pub(crate) async fn errors_name_the_corrupt_column(db: Database) {
    let store = db.open().await;
    team(&store, 1).await;
    let row = store
        .of_node(node_id(1), FIRST_EPOCH)
        .sandbox_insert(sandbox(1, 1))
        .await
        .unwrap();
    let mut raw = db.raw().await;
    for (damage, column) in [
        ("UPDATE sandboxes SET secure = 2", "secure"),
        ("UPDATE sandboxes SET secure = 1, state = 'odd'", "state"),
        (
            "UPDATE sandboxes SET state = 'gone', metadata_json = '[1]'",
            "metadata_json",
        ),
        ("UPDATE sandboxes SET metadata_json = '{}', cpu_count = -1", "cpu_count"),
        ("UPDATE sandboxes SET cpu_count = 1, build_id = 'x'", "build_id"),
    ] {
        sqlx::raw_sql(damage).execute(&mut raw).await.unwrap();
        let error = store.sandbox_by_id(&row.id).await.unwrap_err();
        assert!(
            matches!(error, StoreError::Corrupt { table: "sandboxes", column: found } if found == column),
            "{damage}: {error:?}"
        );
    }
    store.close().await;
}

fn pause(kept: Kept) -> Pause<'static> {
    Pause {
        kept,
        kept_bytes: 4096,
        paused_us: 7,
        resume_error: None,
    }
}

pub(crate) async fn environments_are_stored_apart(db: Database) {
    let store = db.open().await;
    team(&store, 1).await;
    let sealed = SealedSecret::new("sealed".to_owned());
    let new = NewSandbox {
        environment_sealed: Some(sealed.clone()),
        ..sandbox(1, 1)
    };
    let row = running(&store, new, 5).await;
    assert_eq!(store.sandbox_environment(&row.id).await.unwrap(), Some(sealed));
    let other = running(&store, sandbox(2, 1), 5).await;
    assert_eq!(store.sandbox_environment(&other.id).await.unwrap(), None);
    store.close().await;
}

pub(crate) async fn pauses_and_resumes_are_changes_of_one_version(db: Database) {
    let store = db.open().await;
    team(&store, 1).await;
    let row = running(&store, sandbox(1, 1), 5).await;
    let (id, rows) = (&row.id, store.of_node(node_id(1), FIRST_EPOCH));
    let elsewhere = store.of_node(node_id(2), FIRST_EPOCH);
    let change = elsewhere
        .sandbox_pausing(id, row.version, Kept::Memory, None)
        .await
        .unwrap();
    assert_eq!(change, Change::Missing);
    // Neither is paused or resumed yet.
    let resumption = Resumption {
        end_us: 700,
        max_end_us: 900,
        execution_id: "another".to_owned(),
        lifecycle_json: Some("{}".to_owned()),
    };
    for stale in [
        rows.sandbox_paused(id, row.version, pause(Kept::Memory)).await.unwrap(),
        rows.sandbox_resuming(id, row.version, &resumption).await.unwrap(),
        rows.sandbox_resumed(id, row.version, 8, 9, None).await.unwrap(),
        rows.sandbox_pausing(id, row.version - 1, Kept::Memory, None)
            .await
            .unwrap(),
    ] {
        assert_eq!(stale, Change::Stale);
    }
    let pausing = SandboxRow {
        state: State::Pausing,
        version: row.version + 1,
        kept: Some(Kept::Memory),
        lifecycle_json: Some("{\"a\":1}".to_owned()),
        ..row.clone()
    };
    let settings = pausing.lifecycle_json.as_deref();
    let change = rows
        .sandbox_pausing(id, row.version, Kept::Memory, settings)
        .await
        .unwrap();
    assert_eq!(change, Change::Applied(pausing.clone()));
    // Its deadline cannot be changed.
    assert_eq!(rows.sandbox_set_end(id, None, 1).await.unwrap(), Change::Stale);
    let paused = SandboxRow {
        state: State::Paused,
        version: pausing.version + 1,
        kept: Some(Kept::Checkpoint),
        paused_us: Some(7),
        kept_bytes: Some(4096),
        ..pausing.clone()
    };
    let change = rows
        .sandbox_paused(id, pausing.version, pause(Kept::Checkpoint))
        .await
        .unwrap();
    assert_eq!(change, Change::Applied(paused.clone()));
    assert_eq!(store.sandbox_by_id(id).await.unwrap(), Some(paused.clone()));
    // What is kept may become less, and a resume may fail.
    let failed = Pause {
        resume_error: Some("why"),
        ..pause(Kept::Filesystem)
    };
    let change = rows.sandbox_paused(id, paused.version, failed).await.unwrap();
    let paused = SandboxRow {
        version: paused.version + 1,
        kept: Some(Kept::Filesystem),
        resume_error: Some("why".to_owned()),
        ..paused
    };
    assert_eq!(change, Change::Applied(paused.clone()));
    let resuming = SandboxRow {
        state: State::Resuming,
        version: paused.version + 1,
        end_us: 700,
        max_end_us: 900,
        execution_id: "another".to_owned(),
        lifecycle_json: Some("{}".to_owned()),
        ..paused.clone()
    };
    let change = rows.sandbox_resuming(id, paused.version, &resumption).await.unwrap();
    assert_eq!(change, Change::Applied(resuming.clone()));
    let running = SandboxRow {
        state: State::Running,
        version: resuming.version + 1,
        started_us: 8,
        end_us: 708,
        agent_version: "9.9.9".to_owned(),
        ..resuming.clone()
    };
    let change = rows
        .sandbox_resumed(id, resuming.version, 8, 708, Some("9.9.9"))
        .await
        .unwrap();
    assert_eq!(change, Change::Applied(running));
    store.close().await;
}
