//! Templates, their aliases and builds.

use model::lifecycle::row::RowChange;
use store::Change;
use store::builds::{BuildCursor, BuildRow, BuildStatus};
use store::error::StoreError;
use store::sandboxes::NewSandbox;
use store::templates::TemplateRow;

use crate::database::Database;
use crate::samples::{FIRST_EPOCH, build, node_id, running, sandbox, sandbox_id, team, template, template_id};

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
    for (team, want) in [(&a, [&base, &own]), (&b, [&base, &public])] {
        let seen = store.template_overviews(team, None).await.unwrap();
        let seen: Vec<_> = seen.iter().map(|overview| &overview.template).collect();
        assert_eq!(seen, want);
    }
    for (id, found) in [(&own.id, 1), (&base.id, 1), (&public.id, 0), (&template_id(9), 0)] {
        let seen = store.template_overviews(&a, Some(id)).await.unwrap();
        assert_eq!(seen.len(), found, "{id}");
        assert!(seen.iter().all(|overview| overview.template.id == *id));
    }
    store.close().await;
}

pub(crate) async fn a_conflicting_alias_rolls_the_template_back(db: Database) {
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
    assert!(matches!(error, StoreError::UnsupportedCharacter { .. }), "{error:?}");
    store.template_insert(&template(4, None, &[])).await.unwrap();
    store.close().await;
}

pub(crate) async fn started_sandboxes_are_counted(db: Database) {
    let store = db.open().await;
    let (team, other) = (team(&store, 1).await, team(&store, 2).await);
    for row in [template(1, None, &["base"]), template(2, Some(&team), &[])] {
        store.template_insert(&row).await.unwrap();
    }
    let spawns = async |of: u32| {
        let seen = store.template_overviews(&team, Some(&template_id(of))).await.unwrap();
        (seen[0].template.spawn_count, seen[0].template.last_spawned_us)
    };
    assert_eq!(spawns(1).await, (0, None));
    // A sandbox that is being created does not count, neither before nor after it fails.
    store
        .of_node(node_id(1), FIRST_EPOCH)
        .sandbox_insert(sandbox(1, 1))
        .await
        .unwrap();
    assert_eq!(spawns(1).await, (0, None));
    store
        .of_node(node_id(1), FIRST_EPOCH)
        .sandbox_delete(&sandbox_id(1))
        .await
        .unwrap()
        .unwrap();
    assert_eq!(spawns(1).await, (0, None));
    // Sandboxes of every team, running or ended, in any order of their ends.
    let late = running(&store, sandbox(2, 1), 70).await;
    running(&store, sandbox(3, 2), 50).await;
    assert_eq!(spawns(1).await, (2, Some(70)));
    let stopping = store
        .of_node(node_id(1), FIRST_EPOCH)
        .sandbox_change_state(&late.id, late.version, RowChange::Stopping)
        .await
        .unwrap();
    assert!(matches!(stopping, Change::Applied(_)));
    assert_eq!(spawns(1).await, (2, Some(70)));
    for id in [late.id, sandbox_id(3)] {
        store
            .of_node(node_id(1), FIRST_EPOCH)
            .sandbox_delete(&id)
            .await
            .unwrap()
            .unwrap();
        assert_eq!(spawns(1).await, (2, Some(70)));
        assert_eq!(
            store
                .of_node(node_id(1), FIRST_EPOCH)
                .sandbox_delete(&id)
                .await
                .unwrap(),
            None
        );
    }
    running(&store, sandbox(4, 1), 90).await;
    assert_eq!(spawns(1).await, (3, Some(90)));
    assert_eq!(spawns(2).await, (0, None));
    let seen = store.template_overviews(&other, None).await.unwrap();
    assert_eq!(seen.len(), 1);
    // A sandbox can be deleted when its template no longer exists.
    let orphan = NewSandbox {
        template_id: template_id(9),
        ..sandbox(5, 1)
    };
    let orphan = running(&store, orphan, 95).await;
    assert_eq!(
        store
            .of_node(node_id(1), FIRST_EPOCH)
            .sandbox_delete(&orphan.id)
            .await
            .unwrap()
            .unwrap()
            .id,
        orphan.id
    );
    store.close().await;
}

pub(crate) async fn builds_are_listed_newest_first(db: Database) {
    let store = db.open().await;
    let team = team(&store, 1).await;
    store.template_insert(&template(1, None, &["b", "a"])).await.unwrap();
    let bare = store.template_overviews(&team, None).await.unwrap().remove(0);
    assert_eq!(
        (bare.updated_us, bare.build_count, bare.build_status, bare.ready),
        (1, 0, None, None)
    );
    let ready = BuildRow {
        finished_us: Some(15),
        ..build(1, 1, BuildStatus::Ready, 10)
    };
    let builds = [
        build(5, 1, BuildStatus::Failed, 30),
        build(4, 1, BuildStatus::Building, 20),
        build(3, 1, BuildStatus::Failed, 20),
        build(2, 1, BuildStatus::Ready, 5),
        ready.clone(),
    ];
    for row in &builds {
        store.build_insert(row).await.unwrap();
    }
    let [five, four, three, two, one] = builds;
    let seen = store.template_overviews(&team, None).await.unwrap().remove(0);
    assert_eq!(seen.template.aliases, ["a", "b"]);
    assert_eq!(
        (seen.updated_us, seen.build_count, seen.build_status),
        (30, 5, Some(BuildStatus::Failed))
    );
    assert_eq!(seen.ready, Some(ready));
    let all = [five, four, three, one, two];
    assert_eq!(store.build_list(&template_id(1), None, 10).await.unwrap(), all);
    for limit in 1..=5 {
        let (mut paged, mut after) = (Vec::new(), None);
        loop {
            let page = store.build_list(&template_id(1), after.as_ref(), limit).await.unwrap();
            let Some(last) = page.last() else { break };
            after = Some(BuildCursor {
                created_us: last.created_us,
                id: last.id.clone(),
            });
            paged.extend(page);
        }
        assert_eq!(paged, all, "{limit}");
    }
    assert_eq!(store.build_list(&template_id(2), None, 10).await.unwrap(), []);
    store.close().await;
}

pub(crate) async fn the_newest_ready_build_is_found(db: Database) {
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
