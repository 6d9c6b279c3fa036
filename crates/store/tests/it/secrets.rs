//! Secrets.

use std::collections::BTreeMap;

use model::id::TeamId;
use store::error::StoreError;
use store::keys::SealedSecret;
use store::secrets::{SecretChange, SecretKey, SecretRow};

use crate::database::Database;
use crate::samples::{team, team_id};

pub(crate) fn secret(n: u32, team: &TeamId, name: &str) -> SecretRow {
    SecretRow {
        id: format!("sec_{n:026}"),
        team_id: team.clone(),
        name: name.to_owned(),
        version: 1,
        value_sealed: SealedSecret::new(format!("sealed {n}")),
        metadata: BTreeMap::from([("env".to_owned(), "prod ${é}".to_owned())]),
        created_us: i64::from(n),
        updated_us: i64::from(n),
    }
}

pub(crate) async fn insert_find_change_and_delete(db: Database) {
    let store = db.open().await;
    let (own, other) = (team(&store, 1).await, team(&store, 2).await);
    let (first, foreign) = (secret(1, &own, "key"), secret(2, &other, "key"));
    store.secret_insert(&first).await.unwrap();
    store.secret_insert(&foreign).await.unwrap();
    let error = store.secret_insert(&secret(3, &own, "key")).await.unwrap_err();
    assert!(matches!(error, StoreError::Conflict { what: "secret" }), "{error:?}");
    let error = store.secret_insert(&secret(3, &team_id(9), "key")).await.unwrap_err();
    assert!(matches!(error, StoreError::Dangling { what: "secret" }), "{error:?}");
    let error = store.secret_insert(&secret(3, &own, "a\0")).await.unwrap_err();
    assert!(matches!(error, StoreError::UnsupportedCharacter { .. }), "{error:?}");

    for key in [SecretKey::Id(&first.id), SecretKey::Name("key")] {
        assert_eq!(store.secret_find(&own, key).await.unwrap(), Some(first.clone()));
    }
    // An id is no name, a name is no id, and those of other teams are not found.
    for key in [
        SecretKey::Id("key"),
        SecretKey::Name(&first.id),
        SecretKey::Id(&foreign.id),
        SecretKey::Name("KEY"),
    ] {
        assert_eq!(store.secret_find(&own, key).await.unwrap(), None, "{key:?}");
        assert_eq!(store.secret_delete(&own, key).await.unwrap(), None, "{key:?}");
    }

    let mut change = SecretChange {
        value_sealed: SealedSecret::new("sealed again".to_owned()),
        metadata: None,
        updated_us: 7,
    };
    let want = SecretRow {
        version: 2,
        value_sealed: change.value_sealed.clone(),
        updated_us: 7,
        ..first.clone()
    };
    let changed = store
        .secret_update(&own, SecretKey::Name("key"), &change)
        .await
        .unwrap();
    assert_eq!(changed, Some(want.clone()));
    change.metadata = Some(BTreeMap::new());
    let changed = store
        .secret_update(&own, SecretKey::Id(&first.id), &change)
        .await
        .unwrap();
    let want = SecretRow {
        version: 3,
        metadata: BTreeMap::new(),
        ..want
    };
    assert_eq!(changed, Some(want.clone()));
    let changed = store
        .secret_update(&own, SecretKey::Id(&foreign.id), &change)
        .await
        .unwrap();
    assert_eq!(changed, None);
    assert_eq!(
        store.secret_find(&other, SecretKey::Name("key")).await.unwrap(),
        Some(foreign)
    );

    assert_eq!(store.secret_count(&own).await.unwrap(), 1);
    // The time of the change did not differ, but there was one.
    let stamp = store.secret_stamp().await.unwrap();
    let changed = store
        .secret_update(&other, SecretKey::Name("key"), &change)
        .await
        .unwrap();
    assert!(changed.is_some());
    assert_ne!(store.secret_stamp().await.unwrap(), stamp);
    let deleted = store.secret_delete(&own, SecretKey::Name("key")).await.unwrap();
    assert_eq!(deleted, Some(want));
    assert_eq!(store.secret_count(&own).await.unwrap(), 0);
    assert_eq!(store.secret_count(&other).await.unwrap(), 1);
    store.close().await;
}

pub(crate) async fn pages_cover_the_list(db: Database) {
    let store = db.open().await;
    let (own, other) = (team(&store, 1).await, team(&store, 2).await);
    store.secret_insert(&secret(100, &other, "foreign")).await.unwrap();
    for n in 1..=7 {
        // Some were created at the same time.
        let row = SecretRow {
            created_us: i64::from(n / 3),
            ..secret(n, &own, &format!("s{n}"))
        };
        store.secret_insert(&row).await.unwrap();
    }
    let mut names = Vec::new();
    let mut after: Option<(i64, String)> = None;
    loop {
        let cursor = after.as_ref().map(|(created_us, id)| (*created_us, id.as_str()));
        let page = store.secret_list(&own, cursor, 2).await.unwrap();
        let Some(last) = page.last() else { break };
        after = Some((last.created_us, last.id.clone()));
        names.extend(page.into_iter().map(|row| row.name));
    }
    assert_eq!(names, ["s7", "s6", "s5", "s4", "s3", "s2", "s1"]);
    store.close().await;
}
