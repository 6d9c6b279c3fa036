//! Builds as work: requested, started, begun, ended; their tags, logs, cached layers and files.

use model::id::{BuildId, LayerId};
use model::log::Level;
use store::builds::{
    BuildEnd, BuildLogQuery, BuildLogRow, BuildReason, BuildRequested, BuildStart, BuildStatus, BuildTarget,
    CachedLayerRow, FileRow, NewBuild, StartedBuild,
};
use store::keys::SealedSecret;
use store::nodes::NodeRows;
use store::tags::TagAssignmentRow;
use store::templates::Deleted;
use store::{Change, Store};

use crate::database::Database;
use crate::samples::{FIRST_EPOCH, build, build_id, node_id, sandbox, team, team_id, template, template_id};

pub(crate) fn new(n: u32, alias: Option<&str>, tags: &[&str]) -> NewBuild {
    NewBuild {
        team: team_id(1),
        target: BuildTarget::Alias(template_id(n)),
        alias: alias.map(str::to_owned),
        tags: tags.iter().map(|tag| (*tag).to_owned()).collect(),
        build: build_id(n),
        cpu_count: 2,
        memory_mb: 512,
        disk_mb: 1024,
        request_json: None,
        limit: 3,
        now_us: i64::from(n),
    }
}

fn start(now_us: i64) -> BuildStart {
    BuildStart {
        recipe_json: "{}".to_owned(),
        registry_sealed: Some(SealedSecret::new("sealed".to_owned())),
        now_us,
    }
}

async fn status(store: &Store, template: u32, build: u32) -> (BuildStatus, Option<String>) {
    let row = store
        .build_by_id(&template_id(template), &build_id(build))
        .await
        .unwrap();
    let row = row.unwrap();
    (row.status, row.reason.map(|reason| reason.message))
}

async fn request(store: &Store, new: &NewBuild) -> (String, Vec<BuildId>) {
    match store.build_request(new).await.unwrap() {
        BuildRequested::Accepted { template, superseded } => (template.to_string(), superseded),
        refused => panic!("{refused:?}"),
    }
}

async fn begin(rows: &NodeRows, now_us: i64) -> Option<BuildId> {
    rows.build_begin_next(now_us).await.unwrap().map(|job| job.id)
}

fn ready(spec: &str) -> BuildEnd {
    BuildEnd::Ready {
        spec_json: spec.to_owned(),
        disk_mb: 2048,
        agent_version: "0.6.13".to_owned(),
    }
}

pub(crate) async fn requests_name_tag_and_supersede(db: Database) {
    let store = db.open().await;
    team(&store, 1).await;
    let (first, superseded) = request(&store, &new(1, Some("a"), &["default", "v1"])).await;
    assert_eq!((first.as_str(), superseded.len()), (template_id(1).as_str(), 0));
    // The same name is the same template, and a shared tag supersedes what still waits.
    let (again, superseded) = request(&store, &new(2, Some("a"), &["v1"])).await;
    assert_eq!(
        (again.as_str(), superseded),
        (template_id(1).as_str(), vec![build_id(1)])
    );
    assert_eq!(status(&store, 1, 1).await.0, BuildStatus::Failed);
    let (_, superseded) = request(&store, &new(3, Some("a"), &["v2"])).await;
    assert_eq!(superseded, []);
    // Another name is another template, and so is none.
    assert_eq!(
        request(&store, &new(4, None, &["default"])).await.0,
        template_id(4).as_str()
    );
    assert_eq!(
        store.build_request(&new(5, Some("b"), &["x"])).await.unwrap(),
        BuildRequested::TooMany
    );
    // A build that supersedes another takes its place.
    assert_eq!(request(&store, &new(6, Some("a"), &["v2"])).await.1, [build_id(3)]);

    let free = |n, alias| NewBuild {
        limit: 100,
        ..new(n, alias, &["default"])
    };
    let id = template_id(1);
    assert_eq!(
        store.build_request(&free(7, Some(id.as_str()))).await.unwrap(),
        BuildRequested::AliasIsId
    );
    assert_eq!(store.template_by_id(&template_id(7)).await.unwrap(), None);
    request(&store, &free(8, Some("b"))).await;
    let existing = |n, template, alias| NewBuild {
        target: BuildTarget::Template(template_id(template)),
        ..free(n, alias)
    };
    assert_eq!(
        store.build_request(&existing(9, 8, Some("a"))).await.unwrap(),
        BuildRequested::AliasTaken
    );
    assert_eq!(
        store.build_request(&existing(9, 99, None)).await.unwrap(),
        BuildRequested::NoTemplate
    );
    request(&store, &existing(9, 8, Some("c"))).await;
    request(&store, &existing(10, 8, None)).await;
    let row = store.template_by_id(&template_id(8)).await.unwrap().unwrap();
    assert_eq!(row.aliases, ["c"]);
    store.close().await;
}

pub(crate) async fn builds_are_begun_once_and_ended_once(db: Database) {
    let store = db.open().await;
    team(&store, 1).await;
    let (rows, other) = (
        store.of_node(node_id(1), FIRST_EPOCH),
        store.of_node(node_id(2), FIRST_EPOCH),
    );
    request(&store, &new(1, Some("a"), &["default"])).await;
    assert_eq!(begin(&rows, 10).await, None);
    let id = template_id(1);
    assert!(matches!(
        rows.build_start(&id, &build_id(9), &start(11)).await.unwrap(),
        Change::Missing
    ));
    let Change::Applied(started) = rows.build_start(&id, &build_id(1), &start(11)).await.unwrap() else {
        panic!("not started");
    };
    assert_eq!(started.cancelled, []);
    assert!(matches!(
        rows.build_start(&id, &build_id(1), &start(12)).await.unwrap(),
        Change::Stale
    ));
    assert_eq!(begin(&other, 12).await, None);
    let job = rows.build_begin_next(13).await.unwrap().unwrap();
    assert_eq!(
        (job.id, job.team_id, job.attempts, job.started_us),
        (build_id(1), team_id(1), 1, 13)
    );
    assert_eq!(job.registry_sealed, Some(SealedSecret::new("sealed".to_owned())));
    assert_eq!(begin(&rows, 14).await, None);
    assert_eq!(rows.build_list_building().await.unwrap(), [build_id(1)]);

    // A restart begins it again, but not for ever.
    for attempt in 2..=4 {
        assert_eq!(rows.build_requeue(3, 20, "restarts").await.unwrap(), 1);
        let job = rows.build_begin_next(21).await.unwrap().unwrap();
        assert_eq!((job.attempts, job.started_us), (attempt, 13));
    }
    assert_eq!(other.build_requeue(3, 22, "restarts").await.unwrap(), 0);
    assert_eq!(rows.build_requeue(3, 22, "restarts").await.unwrap(), 0);
    assert_eq!(
        status(&store, 1, 1).await,
        (BuildStatus::Failed, Some("restarts".to_owned()))
    );
    assert!(!rows.build_end(&build_id(1), &ready("{}"), 23).await.unwrap());

    // A newer build with a shared tag cancels one in progress, which cannot become ready any more.
    request(&store, &new(2, Some("a"), &["default"])).await;
    rows.build_start(&id, &build_id(2), &start(31))
        .await
        .unwrap()
        .applied()
        .unwrap();
    assert_eq!(begin(&rows, 32).await, Some(build_id(2)));
    request(&store, &new(3, Some("a"), &["default"])).await;
    request(&store, &new(4, Some("a"), &["other"])).await;
    let started = rows
        .build_start(&id, &build_id(4), &start(33))
        .await
        .unwrap()
        .applied()
        .unwrap();
    assert_eq!(started.cancelled, []);
    let started = rows
        .build_start(&id, &build_id(3), &start(34))
        .await
        .unwrap()
        .applied()
        .unwrap();
    assert_eq!(started.cancelled, [build_id(2)]);
    assert!(!rows.build_end(&build_id(2), &ready("{}"), 35).await.unwrap());
    assert_eq!(begin(&rows, 36).await, Some(build_id(4)));
    assert_eq!(begin(&rows, 36).await, Some(build_id(3)));
    assert!(!other.build_end(&build_id(3), &ready("{}"), 37).await.unwrap());
    assert!(rows.build_end(&build_id(3), &ready("{\"a\":1}"), 37).await.unwrap());
    let failed = BuildEnd::Failed(BuildReason {
        message: "it \0 failed".to_owned(),
        step: Some("2".to_owned()),
    });
    assert!(rows.build_end(&build_id(4), &failed, 38).await.unwrap());
    let row = store.build_latest_ready(&id).await.unwrap().unwrap();
    assert_eq!(
        (row.id, row.disk_mb, row.node_id),
        (build_id(3), 2048, Some(node_id(1)))
    );
    let row = store.build_by_id(&id, &build_id(4)).await.unwrap().unwrap();
    assert_eq!(row.reason.unwrap().step.as_deref(), Some("2"));

    // What waits for too long fails.
    request(&store, &new(50, Some("late"), &["default"])).await;
    assert_eq!(store.build_expire_waiting(50, 60, "late").await.unwrap(), 0);
    assert_eq!(store.build_expire_waiting(51, 60, "late").await.unwrap(), 1);
    let reason = BuildReason {
        message: "unknown".to_owned(),
        step: Some("base".to_owned()),
    };
    assert!(
        !store
            .build_refuse(&template_id(50), &build_id(50), &reason, 61)
            .await
            .unwrap()
    );
    request(&store, &new(51, Some("late"), &["default"])).await;
    assert!(
        store
            .build_refuse(&template_id(50), &build_id(51), &reason, 61)
            .await
            .unwrap()
    );
    assert_eq!(
        status(&store, 50, 51).await,
        (BuildStatus::Failed, Some("unknown".to_owned()))
    );
    store.close().await;
}

pub(crate) async fn builds_of_a_server_that_is_gone_are_begun_elsewhere(db: Database) {
    let store = db.open().await;
    team(&store, 1).await;
    let (rows, other) = (
        store.of_node(node_id(1), FIRST_EPOCH),
        store.of_node(node_id(2), FIRST_EPOCH),
    );
    request(&store, &new(1, Some("a"), &["default"])).await;
    let _ = rows
        .build_start(&template_id(1), &build_id(1), &start(11))
        .await
        .unwrap();
    assert_eq!(begin(&rows, 12).await, Some(build_id(1)));
    // Nobody knows of a server that has never said that it is there.
    assert_eq!(other.build_adopt(1_000, 3, 20, "restarts").await.unwrap(), 0);
    rows.server_beat("one", None, None, 15).await.unwrap();
    assert_eq!(other.build_adopt(15, 3, 20, "restarts").await.unwrap(), 0);
    assert_eq!(other.build_adopt(16, 3, 20, "restarts").await.unwrap(), 1);
    assert_eq!(begin(&other, 21).await, Some(build_id(1)));
    // The one that had it, and goes on, changes nothing.
    assert!(!rows.build_end(&build_id(1), &ready("{}"), 22).await.unwrap());
    assert!(other.build_end(&build_id(1), &ready("{}"), 23).await.unwrap());
    assert_eq!(other.build_adopt(16, 3, 24, "restarts").await.unwrap(), 0);

    // Not for ever.
    request(&store, &new(2, Some("a"), &["default"])).await;
    let _ = rows
        .build_start(&template_id(1), &build_id(2), &start(31))
        .await
        .unwrap();
    assert_eq!(begin(&rows, 32).await, Some(build_id(2)));
    assert_eq!(other.build_adopt(16, 0, 33, "restarts").await.unwrap(), 0);
    assert_eq!(
        status(&store, 1, 2).await,
        (BuildStatus::Failed, Some("restarts".to_owned()))
    );
    store.close().await;
}

pub(crate) async fn builds_move_to_another_server(db: Database) {
    let store = db.open().await;
    team(&store, 1).await;
    let (rows, other) = (
        store.of_node(node_id(1), FIRST_EPOCH),
        store.of_node(node_id(2), FIRST_EPOCH),
    );
    for (number, alias) in [(1, "a"), (2, "b"), (3, "c")] {
        request(&store, &new(number, Some(alias), &["default"])).await;
    }
    for number in [1, 2] {
        let _ = rows
            .build_start(&template_id(number), &build_id(number), &start(11))
            .await
            .unwrap();
    }
    assert_eq!(begin(&rows, 12).await, Some(build_id(1)));
    // One that runs and one that waits, and none that its client has not started.
    let listed = |builds: Vec<StartedBuild>| builds.into_iter().map(|build| build.id).collect::<Vec<_>>();
    let started = listed(rows.build_list_started().await.unwrap());
    assert_eq!(started, [build_id(1), build_id(2)]);
    assert_eq!(listed(other.build_list_started().await.unwrap()), []);
    for (number, is_left) in [(1, true), (2, true), (3, false)] {
        let left = rows.build_move(&build_id(number), &node_id(2), 20).await.unwrap();
        assert_eq!(left, is_left, "{number}");
    }
    // The one that had it changes nothing any more.
    assert!(!rows.build_end(&build_id(1), &ready("{}"), 22).await.unwrap());
    assert!(!rows.build_move(&build_id(1), &node_id(2), 22).await.unwrap());
    assert_eq!(listed(rows.build_list_started().await.unwrap()), []);
    assert_eq!(begin(&other, 23).await, Some(build_id(1)));
    // It may also wait where it is, behind the others.
    assert!(other.build_move(&build_id(1), &node_id(2), 24).await.unwrap());
    assert_eq!(begin(&other, 25).await, Some(build_id(2)));
    assert_eq!(begin(&other, 26).await, Some(build_id(1)));
    assert!(other.build_end(&build_id(1), &ready("{}"), 27).await.unwrap());
    assert_eq!(listed(other.build_list_started().await.unwrap()), [build_id(2)]);
    store.close().await;
}

pub(crate) async fn tags_can_be_set_back(db: Database) {
    let store = db.open().await;
    team(&store, 1).await;
    let team = team_id(1);
    store.template_insert(&template(1, Some(&team), &["a"])).await.unwrap();
    for (n, status) in [
        (1, BuildStatus::Ready),
        (2, BuildStatus::Ready),
        (3, BuildStatus::Building),
    ] {
        store.build_insert(&build(n, 1, status, i64::from(n))).await.unwrap();
    }
    let id = template_id(1);
    let by_tag = async |tag: &str| store.build_by_tag(&id, tag).await.unwrap().map(|row| row.id);
    // One that is not ready never counts.
    assert_eq!(by_tag("default").await, Some(build_id(2)));
    assert_eq!(by_tag(build_id(1).as_str()).await, Some(build_id(1)));
    assert_eq!(by_tag(build_id(3).as_str()).await, None);
    let tags = ["default".to_owned(), "stable".to_owned()];
    store.tags_assign(&id, &build_id(1), &tags, 10).await.unwrap();
    assert_eq!(by_tag("default").await, Some(build_id(1)));
    assert_eq!(by_tag("stable").await, Some(build_id(1)));
    store.tags_assign(&id, &build_id(2), &tags[1..], 10).await.unwrap();
    let listed = store.tag_list(&id).await.unwrap();
    let listed: Vec<_> = listed.iter().map(|tag| (tag.tag.as_str(), &tag.build_id)).collect();
    assert_eq!(listed, [("default", &build_id(1)), ("stable", &build_id(2))]);
    store.tag_remove(&id, "stable").await.unwrap();
    assert_eq!(by_tag("stable").await, None);
    store.close().await;
}

pub(crate) async fn tags_have_a_history(db: Database) {
    let store = db.open().await;
    team(&store, 1).await;
    let team = team_id(1);
    let id = template_id(1);
    for n in [1, 2] {
        store.template_insert(&template(n, Some(&team), &[])).await.unwrap();
    }
    for (n, of, status) in [
        (1, 1, BuildStatus::Ready),
        (2, 1, BuildStatus::Ready),
        (3, 1, BuildStatus::Building),
        (4, 2, BuildStatus::Ready),
    ] {
        store.build_insert(&build(n, of, status, i64::from(n))).await.unwrap();
    }
    let tags = |text: &[&str]| text.iter().map(|tag| (*tag).to_owned()).collect::<Vec<_>>();
    // Two at the same time, and one that is part of the name of another.
    store
        .tags_assign(&id, &build_id(1), &tags(&["v", "v1"]), 10)
        .await
        .unwrap();
    store.tags_assign(&id, &build_id(2), &tags(&["v"]), 10).await.unwrap();
    store.tags_assign(&id, &build_id(1), &tags(&["v"]), 9).await.unwrap();
    store
        .tags_assign(&id, &build_id(3), &tags(&["new", "v"]), 20)
        .await
        .unwrap();
    store
        .tags_assign(&template_id(2), &build_id(4), &tags(&["v", "other"]), 30)
        .await
        .unwrap();

    let mut summaries = store.tag_summaries(&id).await.unwrap();
    summaries.sort_by(|a, b| a.tag.cmp(&b.tag));
    let summaries: Vec<_> = summaries.iter().map(|tag| (tag.tag.as_str(), tag.latest_us)).collect();
    assert_eq!(summaries, [("default", 2), ("v", 10), ("v1", 10)]);

    let short = |rows: &[TagAssignmentRow]| {
        let short = rows
            .iter()
            .map(|row| (row.tag.clone(), row.build_id.clone(), row.created_us));
        short.collect::<Vec<_>>()
    };
    let of = |tag: &str, n, at_us| (tag.to_owned(), build_id(n), at_us);
    let history = async |after, limit| store.tag_history(&id, "v", after, limit).await.unwrap();
    let all = history(None, 10).await;
    assert_eq!(short(&all), [of("v", 2, 10), of("v", 1, 10), of("v", 1, 9)]);
    assert_eq!((all[0].build_created_us, all[0].build_finished_us), (2, None));
    for n in 0..all.len() {
        let rest = history(Some((all[n].created_us, all[n].seq)), 1).await;
        assert_eq!(rest.first(), all.get(n + 1));
    }
    assert_eq!(store.tag_history(&id, "new", None, 10).await.unwrap(), []);
    assert_eq!(
        store.tag_history(&id, build_id(1).as_str(), None, 10).await.unwrap(),
        []
    );

    let some = store.tag_histories(&id, &["v", "new", "default"], 1).await.unwrap();
    assert_eq!(short(&some), [of("v", 2, 10), of("default", 2, 2)]);
    let most = store.tag_histories(&id, &["v", "v1"], 3).await.unwrap();
    assert_eq!(short(&most).len(), 4);
    assert_eq!(store.tag_histories(&id, &[], 3).await.unwrap(), []);
    assert!(store.tag_history(&id, "v\0", None, 1).await.is_err());
    store.close().await;
}

pub(crate) async fn deleted_templates_keep_their_id(db: Database) {
    let store = db.open().await;
    team(&store, 1).await;
    request(&store, &new(1, Some("a"), &["default"])).await;
    let id = template_id(1);
    let rows = store.of_node(node_id(1), FIRST_EPOCH);
    rows.sandbox_insert(sandbox(1, 1)).await.unwrap();
    assert_eq!(store.template_delete(&id, 5).await.unwrap(), Deleted::InUse);
    rows.sandbox_delete(&sandbox(1, 1).id).await.unwrap();
    assert!(store.template_set_public(&id, true).await.unwrap());
    assert_eq!(
        store.template_delete(&id, 5).await.unwrap(),
        Deleted::Deleted(vec![build_id(1)])
    );
    assert_eq!(store.template_delete(&id, 6).await.unwrap(), Deleted::Missing);
    assert!(!store.template_set_public(&id, true).await.unwrap());
    assert_eq!(store.template_by_id(&id).await.unwrap(), None);
    assert_eq!(store.template_resolve(&team_id(1), id.as_str()).await.unwrap(), None);
    assert_eq!(store.template_by_alias(&team_id(1), "a").await.unwrap(), None);
    assert_eq!(store.template_overviews(&team_id(1), None).await.unwrap(), []);
    let taken = store
        .build_request(&new(2, Some(id.as_str()), &["default"]))
        .await
        .unwrap();
    assert_eq!(taken, BuildRequested::AliasIsId);
    assert_eq!(
        request(&store, &new(3, Some("a"), &["default"])).await.0,
        template_id(3).as_str()
    );
    store.close().await;
}

pub(crate) async fn logs_are_read_by_offset_and_time(db: Database) {
    let store = db.open().await;
    team(&store, 1).await;
    request(&store, &new(1, Some("a"), &["default"])).await;
    let id = build_id(1);
    assert_eq!(store.build_log_size(&id).await.unwrap().last_seq, 0);
    let entry = |seq: i64, level, step: Option<&str>| BuildLogRow {
        seq,
        at_us: seq * 10,
        level,
        step: step.map(str::to_owned),
        message: format!("line {seq}"),
    };
    let entries = [
        entry(1, Level::Info, None),
        entry(2, Level::Debug, Some("base")),
        entry(3, Level::Warn, Some("1")),
        entry(4, Level::Error, Some("1")),
    ];
    store.build_log_append(&id, &entries[..3]).await.unwrap();
    assert!(store.build_log_append(&id, &entries[2..]).await.is_err());
    store.build_log_append(&id, &entries[3..]).await.unwrap();
    let size = store.build_log_size(&id).await.unwrap();
    assert_eq!((size.last_seq, size.bytes), (4, 24));
    let all = BuildLogQuery {
        from_us: 0,
        to_us: i64::MAX,
        level: Level::Debug,
        offset: 0,
        limit: 100,
        is_backward: false,
    };
    let read = async |query: BuildLogQuery| -> Vec<i64> {
        let rows = store.build_log_list(&id, &query).await.unwrap();
        rows.iter().map(|row| row.seq).collect()
    };
    assert_eq!(store.build_log_list(&id, &all).await.unwrap(), entries);
    let offset = BuildLogQuery {
        offset: 1,
        level: Level::Info,
        ..all.clone()
    };
    assert_eq!(read(offset).await, [3, 4]);
    let window = BuildLogQuery {
        from_us: 20,
        to_us: 30,
        is_backward: true,
        ..all.clone()
    };
    assert_eq!(read(window).await, [3, 2]);
    assert_eq!(
        read(BuildLogQuery {
            limit: 0,
            ..all.clone()
        })
        .await,
        [0_i64; 0]
    );
    assert_eq!(
        read(BuildLogQuery {
            limit: 1,
            is_backward: true,
            ..all
        })
        .await,
        [4]
    );
    store.close().await;
}

pub(crate) async fn layers_are_referred_to_until_nothing_needs_them(db: Database) {
    let store = db.open().await;
    team(&store, 1).await;
    let (rows, other) = (
        store.of_node(node_id(1), FIRST_EPOCH),
        store.of_node(node_id(2), FIRST_EPOCH),
    );
    let (one, two) = (LayerId::from_hash(&[1; 32]), LayerId::from_hash(&[2; 32]));
    let cached = |layer: &LayerId, bytes| CachedLayerRow {
        layer: layer.clone(),
        bytes,
        state_json: "{}".to_owned(),
    };
    let team = team_id(1);
    rows.layer_cache_put(&team, "a", &cached(&one, 10), 1).await.unwrap();
    rows.layer_cache_put(&team, "b", &cached(&two, 20), 2).await.unwrap();
    rows.layer_cache_put(&team, "b", &cached(&one, 30), 3).await.unwrap();
    rows.layer_cache_put(&team, "c", &cached(&two, 40), 4).await.unwrap();
    assert_eq!(
        rows.layer_cache_find(&team, "b", 5).await.unwrap(),
        Some(cached(&one, 30))
    );
    assert_eq!(rows.layer_cache_find(&team, "x", 5).await.unwrap(), None);
    assert_eq!(other.layer_cache_find(&team, "b", 5).await.unwrap(), None);
    // By age: `a`. By size, the newest of 30 and 40 that fit into 60: `b`, which was used last.
    assert_eq!(rows.layer_cache_purge(2, 60).await.unwrap(), 2);
    assert_eq!(rows.layer_cache_layers().await.unwrap(), [one.as_str()]);
    assert_eq!(rows.layer_cache_forget(&one).await.unwrap(), 1);
    assert_eq!(rows.layer_cache_layers().await.unwrap(), Vec::<String>::new());

    request(&store, &new(1, Some("a"), &["default"])).await;
    rows.build_start(&template_id(1), &build_id(1), &start(2))
        .await
        .unwrap()
        .applied()
        .unwrap();
    assert_eq!(rows.layer_references(0).await.unwrap(), ["{}"]);
    assert_eq!(other.layer_references(0).await.unwrap(), Vec::<String>::new());
    assert_eq!(store.layer_references_of_all(0).await.unwrap(), ["{}"]);
    assert_eq!(begin(&rows, 3).await, Some(build_id(1)));
    assert!(rows.build_end(&build_id(1), &ready("spec"), 4).await.unwrap());
    assert_eq!(rows.layer_references(0).await.unwrap(), ["spec"]);
    assert_eq!(
        store.template_delete(&template_id(1), 10).await.unwrap(),
        Deleted::Deleted(Vec::new())
    );
    assert_eq!(rows.layer_references(9).await.unwrap(), ["spec"]);
    assert_eq!(rows.layer_references(10).await.unwrap(), Vec::<String>::new());
    assert_eq!(store.layer_references_of_all(9).await.unwrap(), ["spec"]);
    assert_eq!(store.layer_references_of_all(10).await.unwrap(), Vec::<String>::new());
    // A sandbox that was created meanwhile.
    let mut late = sandbox(1, 1);
    late.build_id = build_id(1);
    rows.sandbox_insert(late).await.unwrap();
    assert_eq!(rows.layer_references(10).await.unwrap(), ["spec"]);
    assert_eq!(store.layer_references_of_all(10).await.unwrap(), ["spec"]);
    store.close().await;
}

pub(crate) async fn uploaded_files_are_counted_and_removed_unused(db: Database) {
    let store = db.open().await;
    team(&store, 1).await;
    let rows = store.of_node(node_id(1), FIRST_EPOCH);
    let file = |hash: &str, bytes| FileRow {
        team_id: team_id(1),
        hash: hash.to_owned(),
        bytes,
    };
    for (row, at_us) in [(file("a", 5), 1), (file("b", 6), 2), (file("a", 7), 3)] {
        rows.template_file_put(&row, at_us).await.unwrap();
    }
    assert_eq!(rows.template_file_total(&team_id(1)).await.unwrap(), 13);
    assert_eq!(
        rows.template_file_find(&team_id(1), "b", 9).await.unwrap(),
        Some(file("b", 6))
    );
    assert_eq!(rows.template_file_find(&team_id(1), "c", 9).await.unwrap(), None);
    let other = store.of_node(node_id(2), FIRST_EPOCH);
    other.template_file_put(&file("b", 6), 1).await.unwrap();
    let mut names = store.template_file_names().await.unwrap();
    names.sort();
    assert_eq!(names, [(team_id(1), "a".to_owned()), (team_id(1), "b".to_owned())]);
    assert_eq!(rows.template_file_take_unused(5).await.unwrap(), Some(file("a", 7)));
    assert_eq!(rows.template_file_take_unused(5).await.unwrap(), None);
    store.close().await;
}

pub(crate) async fn namespaces_are_unique(db: Database) {
    use store::teams::TeamRow;
    let store = db.open().await;
    let row = |n: u32, name: &str| TeamRow {
        id: team_id(n),
        name: name.to_owned(),
        created_us: 0,
    };
    for (n, name) in [(1, "Team A"), (2, "team-a")] {
        store.team_insert(&row(n, name)).await.unwrap();
    }
    assert_eq!(store.team_slug(&team_id(1)).await.unwrap().as_deref(), Some("team-a"));
    assert_eq!(
        store.team_slug(&team_id(2)).await.unwrap().as_deref(),
        Some("team-a-2000")
    );
    assert_eq!(store.team_by_slug("team-a").await.unwrap(), Some(row(1, "Team A")));
    assert_eq!(store.team_by_slug("Team A").await.unwrap(), None);
    assert_eq!(store.team_slug(&team_id(3)).await.unwrap(), None);
    store.close().await;
}
