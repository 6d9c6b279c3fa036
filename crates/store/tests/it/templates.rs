//! Templates, their names and builds.

use store::error::StoreError;
use store::templates::{BuildRow, BuildStatus, TemplateRow};

use crate::database::Database;
use crate::samples::{build, team, template, template_id};

pub(crate) async fn names_are_resolved_in_scope_order(db: Database) {
    let store = db.open().await;
    let (a, b) = (team(&store, 1).await, team(&store, 2).await);
    let base = template(1, None, &["base", "zero"]);
    let own = template(2, Some(&a), &["base", "mine"]);
    let public = TemplateRow {
        public: true,
        ..template(3, Some(&b), &["theirs"])
    };
    for row in [&base, &own, &public] {
        store.template_insert(row).await.unwrap();
    }
    for (team, name, want) in [
        (&a, "base", Some(&own)),
        (&b, "base", Some(&base)),
        (&a, "zero", Some(&base)),
        (&a, "mine", Some(&own)),
        (&b, "mine", None),
        (&a, "theirs", None),
        (&a, public.id.as_str(), Some(&public)),
        (&a, own.id.as_str(), Some(&own)),
        (&b, own.id.as_str(), None),
        (&b, base.id.as_str(), Some(&base)),
        (&a, "nothing", None),
        (&a, "", None),
        (&a, "nul\0", None),
    ] {
        let found = store.template_resolve(team, name).await.unwrap();
        assert_eq!(found.as_ref(), want, "{name}");
    }
    assert_eq!(store.template_by_id(&base.id).await.unwrap(), Some(base.clone()));
    assert_eq!(store.template_by_id(&template_id(9)).await.unwrap(), None);
    assert_eq!(store.template_list(&a).await.unwrap(), [own]);
    assert_eq!(store.template_list(&b).await.unwrap(), [public]);
    store.close().await;
}

pub(crate) async fn a_taken_alias_leaves_no_template(db: Database) {
    let store = db.open().await;
    let team = team(&store, 1).await;
    store.template_insert(&template(1, None, &["base"])).await.unwrap();
    let error = store
        .template_insert(&template(2, None, &["new", "base"]))
        .await
        .unwrap_err();
    assert!(
        matches!(error, StoreError::Conflict { what: "template alias" }),
        "{error:?}"
    );
    assert_eq!(store.template_by_id(&template_id(2)).await.unwrap(), None);
    assert_eq!(store.template_resolve(&team, "new").await.unwrap(), None);
    let error = store.template_insert(&template(1, None, &[])).await.unwrap_err();
    assert!(matches!(error, StoreError::Conflict { what: "template" }), "{error:?}");
    let error = store.template_insert(&template(3, None, &["a\nb"])).await.unwrap_err();
    assert!(matches!(error, StoreError::Unstorable { .. }), "{error:?}");
    store.template_insert(&template(4, None, &[])).await.unwrap();
    store.close().await;
}

pub(crate) async fn spawns_are_counted(db: Database) {
    let store = db.open().await;
    store.template_insert(&template(1, None, &["base"])).await.unwrap();
    store.template_add_spawns(&template_id(1), 3, 50).await.unwrap();
    store.template_add_spawns(&template_id(1), 1, 40).await.unwrap();
    store.template_add_spawns(&template_id(2), 1, 40).await.unwrap();
    let row = store.template_by_id(&template_id(1)).await.unwrap().unwrap();
    assert_eq!((row.spawn_count, row.last_spawned_us), (4, Some(50)));
    store.close().await;
}

pub(crate) async fn the_newest_ready_build_counts(db: Database) {
    let store = db.open().await;
    store.template_insert(&template(1, None, &[])).await.unwrap();
    assert_eq!(store.build_latest_ready(&template_id(1)).await.unwrap(), None);
    let old = build(1, 1, BuildStatus::Ready, 10);
    let new = BuildRow {
        agent_version: None,
        spec_json: Some("{\"layers\":[]}".to_owned()),
        finished_us: Some(21),
        ..build(2, 1, BuildStatus::Ready, 20)
    };
    for row in [
        &new,
        &old,
        &build(3, 1, BuildStatus::Building, 30),
        &build(4, 1, BuildStatus::Failed, 40),
    ] {
        store.build_insert(row).await.unwrap();
    }
    assert_eq!(store.build_latest_ready(&template_id(1)).await.unwrap(), Some(new));
    let error = store.build_insert(&old).await.unwrap_err();
    assert!(matches!(error, StoreError::Conflict { what: "build" }), "{error:?}");
    let error = store
        .build_insert(&build(5, 9, BuildStatus::Ready, 1))
        .await
        .unwrap_err();
    assert!(matches!(error, StoreError::Dangling { what: "build" }), "{error:?}");
    store.close().await;
}
