//! Access tokens.

use store::error::StoreError;
use store::keys::{KeyHash, KeyMask};
use store::tokens::{AccessTokenOwner, AccessTokenRow};

use crate::database::Database;
use crate::samples::{team, user_id, uuid};

fn token(n: u32, user: u32) -> AccessTokenRow {
    AccessTokenRow {
        id: uuid(n),
        user_id: user_id(user),
        name: format!("token {n}"),
        mask: KeyMask::of("sk_e2b_", "53ae1fed82754c17ad8077fbc8bcdd9053aedd90"),
        created_us: i64::from(n),
        last_used_us: None,
    }
}

pub(crate) async fn insert_find_list_and_delete(db: Database) {
    let store = db.open().await;
    let own = team(&store, 1).await;
    team(&store, 2).await;
    let (first, second, foreign) = (token(1, 1), token(2, 1), token(3, 2));
    let hash = KeyHash::new("hash 1".to_owned());
    store.access_token_insert(&first, &hash).await.unwrap();
    for (token, hash) in [(&second, "hash 2"), (&foreign, "hash 3")] {
        store
            .access_token_insert(token, &KeyHash::new(hash.to_owned()))
            .await
            .unwrap();
    }
    let error = store.access_token_insert(&token(4, 1), &hash).await.unwrap_err();
    assert!(
        matches!(error, StoreError::Conflict { what: "access token" }),
        "{error:?}"
    );
    let error = store
        .access_token_insert(&token(4, 9), &KeyHash::new("hash 4".to_owned()))
        .await
        .unwrap_err();
    assert!(
        matches!(error, StoreError::Dangling { what: "access token" }),
        "{error:?}"
    );

    let rows = store.access_token_list(&user_id(1)).await.unwrap();
    assert_eq!(rows, [first.clone(), second.clone()]);
    assert_eq!(
        (rows[0].mask.to_string().as_str(), rows[0].mask.value_length),
        ("sk_e2b_53...dd90", 40)
    );
    let owner = AccessTokenOwner {
        token_id: first.id.clone(),
        user_id: user_id(1),
        team_id: own,
    };
    assert_eq!(store.access_token_by_hash(&hash).await.unwrap(), Some(owner));

    assert!(!store.access_token_delete(&user_id(2), &first.id).await.unwrap());
    assert!(store.access_token_delete(&user_id(1), &first.id).await.unwrap());
    assert!(!store.access_token_delete(&user_id(1), &first.id).await.unwrap());
    assert_eq!(store.access_token_by_hash(&hash).await.unwrap(), None);
    assert_eq!(store.access_token_list(&user_id(1)).await.unwrap(), [second]);
    store.close().await;
}

pub(crate) async fn the_latest_use_is_recorded(db: Database) {
    let store = db.open().await;
    team(&store, 1).await;
    let token = token(1, 1);
    store
        .access_token_insert(&token, &KeyHash::new("hash".to_owned()))
        .await
        .unwrap();
    for (at_us, noted) in [(7, 7), (5, 7), (9, 9)] {
        store.access_token_used(&token.id, at_us).await.unwrap();
        let rows = store.access_token_list(&user_id(1)).await.unwrap();
        assert_eq!(rows[0].last_used_us, Some(noted));
    }
    store.close().await;
}
