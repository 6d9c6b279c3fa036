//! Every change of the row of a sandbox in every state.

use model::id::SandboxId;
use model::lifecycle::row::RowChange;
use model::lifecycle::{Kept, State};
use store::error::StoreError;
use store::nodes::NodeRows;
use store::sandboxes::{Pause, Resumption, SandboxRow};
use store::{Change, Store};

use crate::database::Database;
use crate::left::leave_in;
use crate::samples::{FIRST_EPOCH, node_id, sandbox, team};

/// The row of a new sandbox, in that state.
async fn row_in(db: &Database, store: &Store, n: u32, state: State) -> SandboxRow {
    let row = store
        .of_node(node_id(1), FIRST_EPOCH)
        .sandbox_insert(sandbox(n, 1))
        .await
        .unwrap();
    leave_in(&mut db.raw().await, &row.id, state, None).await;
    SandboxRow { state, ..row }
}

/// Makes a change by the call that the server uses for it.
async fn make(rows: &NodeRows, change: RowChange, row: &SandboxRow) -> Result<Change<SandboxRow>, StoreError> {
    let (id, version) = (&row.id, row.version);
    match change {
        RowChange::Started => rows.sandbox_started(id, version, 8, 9, "0.7.0").await,
        RowChange::Pausing => rows.sandbox_pausing(id, version, Kept::Memory, None).await,
        RowChange::Paused => {
            let pause = Pause {
                kept: Kept::Checkpoint,
                kept_bytes: 4096,
                paused_us: 7,
                resume_error: None,
            };
            rows.sandbox_paused(id, version, pause).await
        }
        RowChange::Resuming => {
            let resumption = Resumption {
                end_us: 700,
                max_end_us: 900,
                execution_id: "another".to_owned(),
                lifecycle_json: None,
            };
            rows.sandbox_resuming(id, version, &resumption).await
        }
        RowChange::Running => rows.sandbox_resumed(id, version, 8, 9, None).await,
        RowChange::Stopping | RowChange::Gone => rows.sandbox_change_state(id, version, change).await,
    }
}

pub(crate) async fn states_change_as_the_model_says(db: Database) {
    let store = db.open().await;
    team(&store, 1).await;
    let rows = store.of_node(node_id(1), FIRST_EPOCH);
    let mut n = 0;
    for change in RowChange::ALL {
        for state in State::ALL {
            n += 1;
            let row = row_in(&db, &store, n, state).await;
            let made = make(&rows, change, &row).await.unwrap();
            let after = store.sandbox_by_id(&row.id).await.unwrap().unwrap();
            if change.allows(state) {
                assert_eq!(made, Change::Applied(after.clone()), "{change:?} of {state:?}");
                assert_eq!((after.state, after.version), (change.state(), row.version + 1));
                // Its version was used up.
                assert_eq!(make(&rows, change, &row).await.unwrap(), Change::Stale);
            } else {
                assert_eq!(made, Change::Stale, "{change:?} of {state:?}");
                assert_eq!(after, row);
            }
        }
    }
    store.close().await;
}

pub(crate) async fn settings_change_as_the_model_says(db: Database) {
    let store = db.open().await;
    team(&store, 1).await;
    let rows = store.of_node(node_id(1), FIRST_EPOCH);
    for (n, state) in (1..).zip(State::ALL) {
        let row = row_in(&db, &store, n, state).await;
        let mut version = row.version;
        let id: &SandboxId = &row.id;
        for setting in 0..4 {
            let made = match setting {
                0 => rows.sandbox_set_end(id, Some(version), 1).await,
                1 => rows.sandbox_extend_end(id, row.end_us + 1).await,
                2 => rows.sandbox_set_network(id, version, Some("{}"), None).await,
                _ => rows.sandbox_set_injections(id, version, None).await,
            };
            let after = store.sandbox_by_id(id).await.unwrap().unwrap();
            if state.takes_settings() {
                version += 1;
                assert_eq!(made.unwrap(), Change::Applied(after.clone()), "{setting} of {state:?}");
                assert_eq!((after.state, after.version), (state, version));
            } else {
                assert_eq!(made.unwrap(), Change::Stale, "{setting} of {state:?}");
                assert_eq!(after, row);
            }
        }
    }
    store.close().await;
}

/// What is left of a sandbox that is gone is removed whatever its row says.
pub(crate) async fn rows_are_deleted_in_every_state(db: Database) {
    let store = db.open().await;
    team(&store, 1).await;
    let rows = store.of_node(node_id(1), FIRST_EPOCH);
    for (n, state) in (1..).zip(State::ALL) {
        let row = row_in(&db, &store, n, state).await;
        assert_eq!(rows.sandbox_delete(&row.id).await.unwrap(), Some(row.clone()));
        assert_eq!(store.sandbox_by_id(&row.id).await.unwrap(), None);
    }
    store.close().await;
}
