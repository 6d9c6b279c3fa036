//! Limits of teams.

use std::collections::BTreeMap;

use store::error::StoreError;

use crate::database::Database;
use crate::samples::{team, team_id};

pub(crate) async fn of_teams(db: Database) {
    let store = db.open().await;
    let (one, two) = (team(&store, 1).await, team(&store, 2).await);
    assert!(store.team_limit_list().await.unwrap().is_empty());
    store.team_limit_set(&one, "sandboxes", Some(5)).await.unwrap();
    store.team_limit_set(&one, "sandboxes", Some(7)).await.unwrap();
    store.team_limit_set(&one, "cpu", Some(0)).await.unwrap();
    store.team_limit_set(&two, "sandboxes", Some(9)).await.unwrap();
    store.team_limit_set(&two, "sandboxes", None).await.unwrap();
    store.team_limit_set(&two, "never set", None).await.unwrap();
    let limits = [("cpu".to_owned(), 0), ("sandboxes".to_owned(), 7)];
    assert_eq!(
        store.team_limit_list().await.unwrap(),
        BTreeMap::from([(one, BTreeMap::from(limits))])
    );
    let error = store.team_limit_set(&team_id(3), "cpu", Some(1)).await.unwrap_err();
    assert!(matches!(error, StoreError::Dangling { what: "limit" }), "{error:?}");
    store.close().await;
}
