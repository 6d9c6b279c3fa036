//! Injection rules, injections of sandboxes, and sealed texts.

use std::convert::Infallible;

use store::error::StoreError;
use store::injection_rules::{InjectionRuleChange, InjectionRuleRow};
use store::keys::{AccessKeyRow, SealedSecret};
use store::sandboxes::NewSandbox;
use store::sealed::{ResealError, Resealed};
use store::{Change, Store};

use crate::database::Database;
use crate::nodes::lease_request;
use crate::samples::{FIRST_EPOCH, node_id, running, sandbox, team, user_id};

fn sealed(text: &str) -> SealedSecret {
    SealedSecret::new(text.to_owned())
}

fn rule(id: &str, user: u32, name: &str) -> InjectionRuleRow {
    InjectionRuleRow {
        id: id.to_owned(),
        user_id: user_id(user),
        name: name.to_owned(),
        injection_sealed: sealed("sealed"),
        created_us: 1,
        updated_us: 1,
    }
}

fn change(name: Option<&str>, injection: Option<&str>) -> InjectionRuleChange {
    InjectionRuleChange {
        name: name.map(str::to_owned),
        injection_sealed: injection.map(sealed),
        updated_us: 9,
    }
}

pub(crate) async fn names_are_unique_for_each_user(db: Database) {
    let store = db.open().await;
    team(&store, 1).await;
    team(&store, 2).await;
    store.injection_rule_insert(&rule("r1", 1, "one")).await.unwrap();
    let taken = store.injection_rule_insert(&rule("r2", 1, "one")).await;
    assert!(
        matches!(taken, Err(StoreError::Conflict { what: "injection rule" })),
        "{taken:?}"
    );
    let taken = store.injection_rule_insert(&rule("r1", 2, "one")).await;
    assert!(matches!(taken, Err(StoreError::Conflict { .. })), "{taken:?}");
    store.injection_rule_insert(&rule("r2", 2, "one")).await.unwrap();
    store.injection_rule_insert(&rule("r3", 1, "two")).await.unwrap();
    let nobody = store.injection_rule_insert(&rule("r4", 3, "one")).await;
    assert!(matches!(nobody, Err(StoreError::Dangling { .. })), "{nobody:?}");

    let renamed = store
        .injection_rule_update(&user_id(1), "r3", &change(Some("one"), None))
        .await;
    assert!(matches!(renamed, Err(StoreError::Conflict { .. })), "{renamed:?}");
    // A rule keeps its own name.
    let same = store
        .injection_rule_update(&user_id(1), "r1", &change(Some("one"), None))
        .await;
    assert_eq!(same.unwrap().unwrap().name, "one");
    let ids = |rules: Vec<InjectionRuleRow>| rules.into_iter().map(|rule| rule.id).collect::<Vec<_>>();
    assert_eq!(ids(store.injection_rule_list(&user_id(1)).await.unwrap()), ["r1", "r3"]);
    assert_eq!(ids(store.injection_rule_list(&user_id(2)).await.unwrap()), ["r2"]);
    assert_eq!(store.injection_rule_count(&user_id(1)).await.unwrap(), 2);
    assert_eq!(store.injection_rule_count(&user_id(3)).await.unwrap(), 0);
    store.close().await;
}

pub(crate) async fn changes_keep_what_they_do_not_mention(db: Database) {
    let store = db.open().await;
    team(&store, 1).await;
    team(&store, 2).await;
    let row = rule("r1", 1, "one");
    store.injection_rule_insert(&row).await.unwrap();
    let update = |user, change| {
        let store = store.clone();
        async move {
            store
                .injection_rule_update(&user_id(user), "r1", &change)
                .await
                .unwrap()
        }
    };
    let mut want = InjectionRuleRow {
        name: "two".to_owned(),
        updated_us: 9,
        ..row
    };
    assert_eq!(update(1, change(Some("two"), None)).await, Some(want.clone()));
    want.injection_sealed = sealed("other");
    assert_eq!(update(1, change(None, Some("other"))).await, Some(want.clone()));
    // Of another user, there is no such rule.
    assert_eq!(update(2, change(Some("three"), None)).await, None);
    assert_eq!(store.injection_rule_of(&user_id(2), "r1").await.unwrap(), None);
    assert_eq!(store.injection_rule_of(&user_id(1), "r1").await.unwrap(), Some(want));
    assert!(!store.injection_rule_delete(&user_id(2), "r1").await.unwrap());
    assert!(store.injection_rule_delete(&user_id(1), "r1").await.unwrap());
    assert!(!store.injection_rule_delete(&user_id(1), "r1").await.unwrap());
    store.close().await;
}

pub(crate) async fn sandboxes_have_injections_while_they_run(db: Database) {
    let store = db.open().await;
    team(&store, 1).await;
    let with = NewSandbox {
        injections_sealed: Some(sealed("one")),
        ..sandbox(1, 1)
    };
    let one = running(&store, with, 5).await;
    let two = running(&store, sandbox(2, 1), 5).await;
    let rows = store.of_node(node_id(1), FIRST_EPOCH);
    assert_eq!(store.sandbox_injections(&one.id).await.unwrap(), Some(sealed("one")));
    assert_eq!(store.sandbox_injections(&two.id).await.unwrap(), None);
    let all = rows.sandbox_injections_list().await.unwrap();
    assert_eq!(all, [(one.id.clone(), sealed("one"))].into());
    assert!(
        store
            .of_node(node_id(2), FIRST_EPOCH)
            .sandbox_injections_list()
            .await
            .unwrap()
            .is_empty()
    );

    let two_sealed = sealed("two");
    let stale = rows.sandbox_set_injections(&two.id, two.version - 1, Some(&two_sealed));
    assert_eq!(stale.await.unwrap(), Change::Stale);
    let changed = rows.sandbox_set_injections(&two.id, two.version, Some(&two_sealed));
    assert_eq!(changed.await.unwrap().applied().unwrap().version, two.version + 1);
    assert_eq!(store.sandbox_injections(&two.id).await.unwrap(), Some(two_sealed));
    let cleared = rows.sandbox_set_injections(&one.id, one.version, None);
    assert!(cleared.await.unwrap().applied().is_some());
    rows.sandbox_delete(&two.id).await.unwrap();
    assert!(rows.sandbox_injections_list().await.unwrap().is_empty());
    assert_eq!(store.sandbox_injections(&two.id).await.unwrap(), None);
    store.close().await;
}

/// One row in every column with sealed texts.
async fn sealed_rows(store: &Store) {
    team(store, 1).await;
    let key = |id: &str, revoked_us| AccessKeyRow {
        id: id.to_owned(),
        team_id: crate::samples::team_id(1),
        user_id: user_id(1),
        name: "default".to_owned(),
        secret_sealed: sealed("key"),
        created_us: 1,
        revoked_us,
    };
    store.access_key_insert(&key("a1", None)).await.unwrap();
    store.access_key_insert(&key("a2", Some(2))).await.unwrap();
    store.platform_secret("seed", "secret").await.unwrap();
    store.injection_rule_insert(&rule("r1", 1, "one")).await.unwrap();
    let secret = crate::secrets::secret(1, &crate::samples::team_id(1), "s");
    store.secret_insert(&secret).await.unwrap();
    let with = NewSandbox {
        injections_sealed: Some(sealed("injections")),
        network_json: Some("{}".to_owned()),
        ..sandbox(1, 1)
    };
    running(store, with, 5).await;
    running(store, sandbox(2, 1), 5).await;
}

/// Every sealed text, with its table.
async fn all_sealed(store: &Store) -> Vec<String> {
    let mut seen = Vec::new();
    let read = store.reseal(1, |column, _, text| {
        seen.push(format!("{} {text}", column.table));
        Ok::<_, Infallible>(Resealed::Keep)
    });
    assert_eq!(read.await.unwrap(), 0);
    seen
}

pub(crate) async fn sealed_texts_are_replaced_all_or_none(db: Database) {
    let store = db.open().await;
    sealed_rows(&store).await;
    let before = [
        "access_keys key",
        "platform_secrets secret",
        "injection_rules sealed",
        "secrets sealed 1",
        "sandboxes.injections injections",
        "sandboxes.network {}",
    ];
    assert_eq!(all_sealed(&store).await, before);
    let refused = store.reseal(1, |column, _, text| {
        if column.is_json {
            Err("refused".parse::<i32>().unwrap_err())
        } else {
            Ok(Resealed::Replace(format!("new {text}")))
        }
    });
    assert!(matches!(refused.await, Err(ResealError::Refused(_))));
    assert_eq!(all_sealed(&store).await, before);
    let replaced = store.reseal(1, |_, _, text| {
        Ok::<_, Infallible>(Resealed::Replace(format!("new {text}")))
    });
    assert_eq!(replaced.await.unwrap(), 6);
    assert_eq!(
        all_sealed(&store).await,
        before.map(|text| text.replacen(' ', " new ", 1))
    );
    assert_eq!(store.platform_secret("seed", "another").await.unwrap(), "new secret");
    store.close().await;
}

pub(crate) async fn sealed_texts_stay_while_a_server_has_a_lease(db: Database) {
    let store = db.open().await;
    sealed_rows(&store).await;
    let mut request = lease_request(1, 1, 100);
    let expired = request.lease.clone();
    request.lease.until_us = store.lease_time_us(100).await.unwrap() + 60_000_000;
    let _ = store.node_lease_acquire(&request).await.unwrap();
    let reseal = |now_us| {
        let store = store.clone();
        async move {
            store
                .reseal(now_us, |_, _, _| Ok::<_, Infallible>(Resealed::Replace("x".to_owned())))
                .await
        }
    };
    let refused = reseal(100).await;
    assert!(
        matches!(&refused, Err(ResealError::InUse { name }) if name == "host 1"),
        "{refused:?}"
    );
    assert!(store.node_lease_renew(&request.node, &expired).await.unwrap());
    assert_eq!(reseal(expired.until_us).await.unwrap(), 6);
    store.close().await;
}

pub(crate) async fn sealed_texts_are_given_up(db: Database) {
    let store = db.open().await;
    sealed_rows(&store).await;
    let dropped = store.reseal(7, |_, _, _| Ok::<_, Infallible>(Resealed::Drop));
    assert_eq!(dropped.await.unwrap(), 5);
    assert_eq!(all_sealed(&store).await, ["sandboxes.network {}"]);
    assert_eq!(store.access_key_by_id("a1").await.unwrap(), None);
    assert!(store.injection_rule_list(&user_id(1)).await.unwrap().is_empty());
    store.close().await;
}
