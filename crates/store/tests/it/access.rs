//! Teams, users and keys.

use std::error::Error;

use store::Store;
use store::error::StoreError;
use store::keys::{AccessKeyRow, ApiKeyOwner, ApiKeyRow, KeyHash, KeyMask, SealedSecret};
use store::teams::{TeamRow, UserRow};

use crate::database::Database;
use crate::samples::{team, team_id, user_id, uuid};

/// The error with its whole chain, as `Display` and as `Debug`.
fn all_of(error: &StoreError) -> String {
    let mut text = format!("{error} {error:?}");
    let mut cause = error.source();
    while let Some(source) = cause {
        text.push_str(&format!(" {source} {source:?}"));
        cause = source.source();
    }
    text
}

pub(crate) async fn teams_and_users(db: Database) {
    let store = db.open().await;
    let row = TeamRow {
        id: team_id(1),
        name: "default".to_owned(),
        created_us: 7,
    };
    store.team_insert(&row).await.unwrap();
    let taken = TeamRow {
        id: team_id(2),
        ..row.clone()
    };
    let error = store.team_insert(&taken).await.unwrap_err();
    assert!(matches!(error, StoreError::Conflict { what: "team" }), "{error:?}");
    let second = TeamRow {
        name: "another".to_owned(),
        created_us: 8,
        ..taken
    };
    store.team_insert(&second).await.unwrap();
    assert_eq!(store.team_by_name("default").await.unwrap(), Some(row.clone()));
    assert_eq!(store.team_by_name("Default").await.unwrap(), None);
    assert_eq!(store.team_list().await.unwrap(), [row.clone(), second.clone()]);
    assert_eq!(store.team_by_id(&second.id).await.unwrap().as_ref(), Some(&second));
    assert_eq!(store.team_by_id(&team_id(3)).await.unwrap(), None);

    let user = UserRow {
        id: user_id(1),
        team_id: row.id.clone(),
        name: "default".to_owned(),
        created_us: 9,
    };
    store.user_insert(&user).await.unwrap();
    let error = store
        .user_insert(&UserRow {
            id: user_id(2),
            ..user.clone()
        })
        .await
        .unwrap_err();
    assert!(matches!(error, StoreError::Conflict { what: "user" }), "{error:?}");
    let elsewhere = UserRow {
        id: user_id(2),
        team_id: second.id.clone(),
        ..user.clone()
    };
    store.user_insert(&elsewhere).await.unwrap();
    assert_eq!(
        store.user_by_name(&row.id, "default").await.unwrap(),
        Some(user.clone())
    );
    assert_eq!(
        store.user_by_name(&second.id, "default").await.unwrap(),
        Some(elsewhere)
    );
    let nowhere = UserRow {
        id: user_id(3),
        team_id: team_id(3),
        ..user
    };
    let error = store.user_insert(&nowhere).await.unwrap_err();
    assert!(matches!(error, StoreError::Dangling { what: "user" }), "{error:?}");
    store.ping().await.unwrap();
    store.close().await;
}

pub(crate) async fn api_keys(db: Database) {
    let store = db.open().await;
    let team = team(&store, 1).await;
    let hash = "5e884898da28047151d0e56f8dc6292773603d0d6aabbdd62a11ef721d1542d8";
    let key = ApiKeyRow {
        id: uuid(1),
        team_id: team.clone(),
        user_id: user_id(1),
        name: "first".to_owned(),
        mask: KeyMask::of("e2b_", "53ae1fed82754c17ad8077fbc8bcdd90"),
        created_us: 5,
        revoked_us: None,
        last_used_us: None,
    };
    let stored = KeyHash::new(hash.to_owned());
    store.api_key_insert(&key, &stored).await.unwrap();
    let owner = ApiKeyOwner {
        key_id: key.id.clone(),
        team_id: team.clone(),
        user_id: user_id(1),
    };
    assert_eq!(store.api_key_by_hash(&stored).await.unwrap(), Some(owner));
    assert_eq!(
        store.api_key_by_hash(&KeyHash::new("other".to_owned())).await.unwrap(),
        None
    );

    let twice = ApiKeyRow {
        id: uuid(2),
        ..key.clone()
    };
    let error = store.api_key_insert(&twice, &stored).await.unwrap_err();
    assert!(matches!(error, StoreError::Conflict { what: "API key" }), "{error:?}");
    assert!(!all_of(&error).contains(hash));
    assert!(!format!("{stored:?}").contains(hash));

    assert_eq!(
        store.api_key_list(&team).await.unwrap().as_slice(),
        std::slice::from_ref(&key)
    );
    assert_eq!(store.api_key_list(&team_id(2)).await.unwrap(), []);
    assert_eq!(store.api_key_revoke(&uuid(9), 6).await.unwrap(), None);
    let revoked = ApiKeyRow {
        revoked_us: Some(6),
        ..key
    };
    assert_eq!(store.api_key_revoke(&uuid(1), 6).await.unwrap(), Some(revoked.clone()));
    assert_eq!(store.api_key_revoke(&uuid(1), 7).await.unwrap(), Some(revoked.clone()));
    assert_eq!(store.api_key_by_hash(&stored).await.unwrap(), None);
    assert_eq!(store.api_key_list(&team).await.unwrap(), [revoked]);
    store.close().await;
}

/// Key `n` of team `team`, with a hash of its own.
async fn api_key(store: &Store, n: u32, team: u32) -> (ApiKeyRow, KeyHash) {
    let key = ApiKeyRow {
        id: uuid(n),
        team_id: team_id(team),
        user_id: user_id(team),
        name: format!("key {n}"),
        mask: KeyMask::of("e2b_", "short"),
        created_us: i64::from(n),
        revoked_us: None,
        last_used_us: None,
    };
    let hash = KeyHash::new(format!("hash {n}"));
    store.api_key_insert(&key, &hash).await.unwrap();
    (key, hash)
}

pub(crate) async fn api_keys_can_only_be_changed_by_their_team(db: Database) {
    let store = db.open().await;
    let (own, other) = (team(&store, 1).await, team(&store, 2).await);
    let (key, hash) = api_key(&store, 1, 1).await;
    assert_eq!(key.mask.to_string(), "e2b_...");
    api_key(&store, 2, 1).await;

    assert_eq!(store.api_key_rename(&other, &key.id, "stolen").await.unwrap(), None);
    assert!(!store.api_key_revoke_of(&other, &key.id, 6).await.unwrap());
    assert!(store.api_key_by_hash(&hash).await.unwrap().is_some());
    let renamed = ApiKeyRow {
        name: "new".to_owned(),
        ..key.clone()
    };
    assert_eq!(
        store.api_key_rename(&own, &key.id, "new").await.unwrap(),
        Some(renamed.clone())
    );

    for (at_us, noted) in [(7, 7), (5, 7), (9, 9)] {
        store.api_key_used(&key.id, at_us).await.unwrap();
        let rows = store.api_key_list(&own).await.unwrap();
        let uses: Vec<_> = rows.iter().map(|row| row.last_used_us).collect();
        assert_eq!(uses, [Some(noted), None]);
    }

    assert!(store.api_key_revoke_of(&own, &key.id, 10).await.unwrap());
    assert_eq!(store.api_key_by_hash(&hash).await.unwrap(), None);
    assert!(!store.api_key_revoke_of(&own, &key.id, 11).await.unwrap());
    assert_eq!(store.api_key_rename(&own, &key.id, "back").await.unwrap(), None);
    let first = store.api_key_list(&own).await.unwrap().remove(0);
    assert_eq!((first.name.as_str(), first.revoked_us), ("new", Some(10)));
    store.close().await;
}

pub(crate) async fn access_keys(db: Database) {
    let store = db.open().await;
    let team = team(&store, 1).await;
    let key = AccessKeyRow {
        id: "AK0001".to_owned(),
        team_id: team.clone(),
        user_id: user_id(1),
        name: "first".to_owned(),
        secret_sealed: SealedSecret::new("c2VhbGVk".to_owned()),
        created_us: 5,
        revoked_us: None,
    };
    store.access_key_insert(&key).await.unwrap();
    let error = store.access_key_insert(&key).await.unwrap_err();
    assert!(
        matches!(error, StoreError::Conflict { what: "access key" }),
        "{error:?}"
    );
    assert!(!all_of(&error).contains("c2VhbGVk"));
    assert!(!format!("{key:?}").contains("c2VhbGVk"));
    let found = store.access_key_by_id("AK0001").await.unwrap().unwrap();
    assert_eq!(found, key);
    assert_eq!(found.secret_sealed.as_str(), "c2VhbGVk");
    assert_eq!(
        store.access_key_list(&team).await.unwrap().as_slice(),
        std::slice::from_ref(&key)
    );
    let revoked = store.access_key_revoke("AK0001", 8).await.unwrap().unwrap();
    assert_eq!(revoked.revoked_us, Some(8));
    assert_eq!(store.access_key_by_id("AK0001").await.unwrap(), None);
    assert_eq!(store.access_key_list(&team).await.unwrap(), [revoked]);
    assert_eq!(store.access_key_revoke("AK0002", 8).await.unwrap(), None);
    store.close().await;
}

/// PostgreSQL refuses NUL characters and SQLite stores them, so the store refuses them before any query.
pub(crate) async fn nul_characters_are_refused_on_both_engines(db: Database) {
    let store = db.open().await;
    let row = TeamRow {
        id: team_id(1),
        name: "a\0b".to_owned(),
        created_us: 7,
    };
    let error = store.team_insert(&row).await.unwrap_err();
    assert!(
        matches!(error, StoreError::UnsupportedCharacter { what: "team name" }),
        "{error:?}"
    );
    assert!(store.team_list().await.unwrap().is_empty());
    store.close().await;
}
