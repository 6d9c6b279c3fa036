//! Snapshots: names, builds, lists.

use store::builds::{BuildRequested, BuildStatus};
use store::error::StoreError;
use store::keys::SealedSecret;
use store::snapshots::{MemoryOrigin, MemoryRow, NameUse, NewSnapshot, SnapshotFilter, SnapshotRow, SnapshotStored};

use crate::builds::new;
use crate::database::Database;
use crate::samples::{FIRST_EPOCH, build_id, node_id, sandbox, team, team_id, template_id};

fn snapshot(n: u32, alias: Option<&str>, of: u32) -> NewSnapshot {
    NewSnapshot {
        team: team_id(1),
        template: template_id(n),
        alias: alias.map(str::to_owned),
        tag: "default".to_owned(),
        build: build_id(n),
        sandbox: sandbox(of, 1).id,
        cpu_count: 2,
        memory_mb: 512,
        disk_mb: 1024,
        spec_json: "{}".to_owned(),
        agent_version: "0.6.13".to_owned(),
        memory: None,
        started_us: i64::from(n),
        now_us: i64::from(n) + 1,
    }
}

pub(crate) async fn names_builds_and_lists(db: Database) {
    let store = db.open().await;
    for n in [1, 2] {
        team(&store, n).await;
    }
    let rows = store.of_node(node_id(1), FIRST_EPOCH);
    let stored = async |new: &NewSnapshot| rows.snapshot_insert(new).await.unwrap();
    assert_eq!(
        stored(&snapshot(1, None, 1)).await,
        SnapshotStored::Stored(template_id(1))
    );
    assert_eq!(store.snapshot_name_use(&team_id(1), "b").await.unwrap(), NameUse::Free);
    assert_eq!(
        stored(&snapshot(2, Some("b"), 2)).await,
        SnapshotStored::Stored(template_id(2))
    );
    assert_eq!(
        store.snapshot_name_use(&team_id(1), "b").await.unwrap(),
        NameUse::Snapshot
    );
    assert_eq!(store.snapshot_name_use(&team_id(2), "b").await.unwrap(), NameUse::Free);
    // Another build of the same template, made of another sandbox.
    let tagged = NewSnapshot {
        tag: "v2".to_owned(),
        ..snapshot(3, Some("b"), 1)
    };
    assert_eq!(stored(&tagged).await, SnapshotStored::Stored(template_id(2)));
    let build = store.build_by_tag(&template_id(2), "v2").await.unwrap().unwrap();
    assert_eq!(
        (build.id, build.status, build.memory_mb),
        (build_id(3), BuildStatus::Ready, 512)
    );
    assert_eq!((build.created_us, build.finished_us), (3, Some(4)));
    assert_eq!(build.node_id, Some(node_id(1)));

    // What was built is no snapshot, and neither takes the name of the other.
    let request = store.build_request(&new(4, Some("built"), &["default"])).await.unwrap();
    assert!(matches!(request, BuildRequested::Accepted { .. }));
    for (name, taken) in [("built", NameUse::Template), (template_id(4).as_str(), NameUse::Id)] {
        assert_eq!(store.snapshot_name_use(&team_id(1), name).await.unwrap(), taken);
        assert_eq!(
            stored(&snapshot(5, Some(name), 1)).await,
            SnapshotStored::NameTaken(taken)
        );
    }
    let request = store.build_request(&new(5, Some("b"), &["default"])).await.unwrap();
    assert_eq!(request, BuildRequested::AliasTaken);
    assert!(matches!(
        rows.snapshot_insert(&snapshot(1, None, 1)).await,
        Err(StoreError::Conflict { .. })
    ));
    let invalid = NewSnapshot {
        tag: "a\0".to_owned(),
        ..snapshot(6, None, 1)
    };
    assert!(rows.snapshot_insert(&invalid).await.is_err());

    let row = |n: u32, created_us, alias: Option<&str>, tag: &str| SnapshotRow {
        template_id: template_id(n),
        created_us,
        alias: alias.map(str::to_owned),
        tag: tag.to_owned(),
    };
    let (one, two) = (row(1, 2, None, "default"), row(2, 3, Some("b"), "v2"));
    let default_of_two = row(2, 3, Some("b"), "default");
    let list = async |filter: SnapshotFilter| store.snapshot_list(&team_id(1), &filter, 10).await.unwrap();
    let all = SnapshotFilter::default;
    assert_eq!(list(all()).await, [two.clone(), one.clone()]);
    for (filter, found) in [
        (
            SnapshotFilter {
                sandbox: Some(sandbox(1, 1).id),
                ..all()
            },
            vec![two.clone(), one.clone()],
        ),
        (
            SnapshotFilter {
                sandbox: Some(sandbox(2, 1).id),
                ..all()
            },
            vec![default_of_two.clone()],
        ),
        (
            SnapshotFilter {
                name: Some("b".to_owned()),
                ..all()
            },
            vec![two.clone()],
        ),
        (
            SnapshotFilter {
                name: Some("b".to_owned()),
                tag: Some("default".to_owned()),
                ..all()
            },
            vec![default_of_two],
        ),
        (
            SnapshotFilter {
                name: Some(template_id(1).to_string()),
                ..all()
            },
            vec![one.clone()],
        ),
        (
            SnapshotFilter {
                name: Some("built".to_owned()),
                ..all()
            },
            Vec::new(),
        ),
        (
            SnapshotFilter {
                after: Some((3, template_id(2))),
                ..all()
            },
            vec![one.clone()],
        ),
        (
            SnapshotFilter {
                after: Some((2, template_id(1))),
                ..all()
            },
            Vec::new(),
        ),
    ] {
        assert_eq!(list(filter.clone()).await, found, "{filter:?}");
    }
    assert_eq!(store.snapshot_list(&team_id(1), &all(), 1).await.unwrap(), [two]);
    assert_eq!(store.snapshot_list(&team_id(2), &all(), 10).await.unwrap(), []);
    // Lists of templates have what was built; the details of a template are there for every one.
    let listed = store.template_overviews(&team_id(1), None).await.unwrap();
    let listed: Vec<_> = listed.into_iter().map(|overview| overview.template.id).collect();
    assert_eq!(listed, [template_id(4)]);
    let overview = store
        .template_overviews(&team_id(1), Some(&template_id(2)))
        .await
        .unwrap();
    assert_eq!(overview.len(), 1);
    // Deleted ones are gone, and their names are free.
    store.template_delete(&template_id(2), 9).await.unwrap();
    assert_eq!(list(all()).await, [one]);
    assert_eq!(store.snapshot_name_use(&team_id(1), "b").await.unwrap(), NameUse::Free);
    store.close().await;
}

pub(crate) async fn a_memory_is_that_of_the_node_that_made_it(db: Database) {
    let store = db.open().await;
    team(&store, 1).await;
    let origin = MemoryOrigin {
        node: node_id(2),
        key: SealedSecret::new("sealed".to_owned()),
    };
    let with_memory = NewSnapshot {
        memory: Some(origin.clone()),
        ..snapshot(1, None, 1)
    };
    let rows = store.of_node(node_id(1), FIRST_EPOCH);
    for new in [&with_memory, &snapshot(2, None, 1)] {
        rows.snapshot_insert(new).await.unwrap();
    }
    let memory = async |n| store.snapshot_memory(&build_id(n)).await.unwrap();
    let found = memory(1).await.unwrap();
    assert_eq!(store.memory(&build_id(1)).await.unwrap(), Some(found.clone()));
    assert_eq!(
        (found.build, found.team, found.origin),
        (build_id(1), team_id(1), origin.clone())
    );
    assert_eq!((found.memory_mb, found.disk_mb), (512, 1024));
    assert_eq!((memory(2).await, memory(9).await), (None, None));
    store.template_delete(&template_id(1), 9).await.unwrap();
    assert_eq!(memory(1).await, None);
    // That of a fork, for as long as its row is there.
    let of_fork = MemoryRow {
        build: build_id(3),
        team: team_id(1),
        memory_mb: 256,
        disk_mb: 2048,
        origin,
    };
    store.fork_memory_insert(&of_fork, 100).await.unwrap();
    assert_eq!(store.memory(&build_id(3)).await.unwrap(), Some(of_fork.clone()));
    assert_eq!(memory(3).await, None);
    assert_eq!(store.fork_memory_purge(100).await.unwrap(), 0);
    assert_eq!(store.fork_memory_purge(101).await.unwrap(), 1);
    assert_eq!(store.memory(&build_id(3)).await.unwrap(), None);
    store.fork_memory_insert(&of_fork, 100).await.unwrap();
    store.fork_memory_delete(&build_id(3)).await.unwrap();
    store.fork_memory_delete(&build_id(3)).await.unwrap();
    assert_eq!(store.memory(&build_id(3)).await.unwrap(), None);
    store.close().await;
}
