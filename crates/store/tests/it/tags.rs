//! How many assignments of tags are kept, and announced removals of objects.

use store::builds::{BuildRequested, BuildStatus, BuildTarget, NewBuild};
use store::removals::Removal;
use store::tags::{HISTORY_MAX, TAGS_MAX};

use crate::database::Database;
use crate::samples::{build, build_id, team, team_id, template, template_id};

pub(crate) async fn tags_are_bounded(db: Database) {
    let store = db.open().await;
    team(&store, 1).await;
    let (team, id) = (team_id(1), template_id(1));
    store.template_insert(&template(1, Some(&team), &["a"])).await.unwrap();
    for (n, status) in [
        (1, BuildStatus::Ready),
        (2, BuildStatus::Ready),
        (3, BuildStatus::Failed),
        (4, BuildStatus::Building),
    ] {
        store.build_insert(&build(n, 1, status, i64::from(n))).await.unwrap();
    }
    let assign = async |n: u32, tag: &str, at_us: i64| {
        let tags = [tag.to_owned()];
        store.tags_assign(&id, &build_id(n), &tags, at_us).await.unwrap()
    };
    let history = async |tag: &str| store.tag_history(&id, tag, None, 1000).await.unwrap();
    let most = i64::from(HISTORY_MAX);
    assert!(assign(4, "v", 9).await);
    for at_us in 10..10 + most + 5 {
        assert!(assign(1, "v", at_us).await);
    }
    let kept = history("v").await;
    assert_eq!(kept.len(), usize::try_from(most).unwrap());
    assert_eq!((kept[0].created_us, kept[99].created_us), (most + 14, 15));
    // The newest one of a finished build stays, whatever comes after it, and so does one of a build that may become
    // ready.
    assert!(assign(2, "v", 1000).await);
    for at_us in 2000..2000 + most + 5 {
        assert!(assign(3, "v", at_us).await);
    }
    let kept = history("v").await;
    let kept: Vec<_> = kept.iter().map(|row| (row.build_id.clone(), row.created_us)).collect();
    assert_eq!(kept, [(build_id(2), 1000)]);
    let found = store.build_by_tag(&id, "v").await.unwrap().map(|row| row.id);
    assert_eq!(found, Some(build_id(2)));
    assert!(store.build_cancel(&id, &build_id(4), "no", 1).await.unwrap());

    let many: Vec<String> = (0..TAGS_MAX).map(|n| format!("t{n}")).collect();
    let used = store.tag_count(&id).await.unwrap();
    assert_eq!(used, 2, "default and v");
    // None of them is assigned.
    assert!(!store.tags_assign(&id, &build_id(1), &many, 5000).await.unwrap());
    assert_eq!(store.tag_count(&id).await.unwrap(), 2);
    let fit = usize::try_from(u64::from(TAGS_MAX) - used).unwrap();
    assert!(store.tags_assign(&id, &build_id(1), &many[..fit], 5000).await.unwrap());
    assert_eq!(store.tag_count(&id).await.unwrap(), u64::from(TAGS_MAX));
    let listed = store.tag_list(&id).await.unwrap();
    assert_eq!(listed.len(), usize::try_from(TAGS_MAX).unwrap());
    assert_eq!((listed[0].tag.as_str(), listed[1].tag.as_str()), ("default", "t0"));
    assert!(!assign(1, "one-more", 5001).await);
    assert!(assign(1, "v", 5002).await);
    let mut new = NewBuild {
        team: team.clone(),
        target: BuildTarget::Template(id.clone()),
        alias: None,
        tags: vec!["another".to_owned()],
        build: build_id(9),
        cpu_count: 2,
        memory_mb: 512,
        disk_mb: 1024,
        request_json: None,
        limit: 3,
        now_us: 6000,
    };
    assert_eq!(store.build_request(&new).await.unwrap(), BuildRequested::TooManyTags);
    assert_eq!(store.build_by_id(&id, &build_id(9)).await.unwrap(), None);
    new.tags = vec!["v".to_owned()];
    assert!(matches!(
        store.build_request(&new).await.unwrap(),
        BuildRequested::Accepted { .. }
    ));
    store.close().await;
}

pub(crate) async fn a_build_is_cancelled_once(db: Database) {
    let store = db.open().await;
    team(&store, 1).await;
    let (team, id) = (team_id(1), template_id(1));
    for n in [1, 2] {
        store.template_insert(&template(n, Some(&team), &[])).await.unwrap();
    }
    for (n, status, want) in [
        (1, BuildStatus::Ready, false),
        (2, BuildStatus::Failed, false),
        (3, BuildStatus::Building, true),
        (4, BuildStatus::Waiting, true),
    ] {
        store.build_insert(&build(n, 1, status, i64::from(n))).await.unwrap();
        let cancel = async |of| {
            store
                .build_cancel(&template_id(of), &build_id(n), "why", 7)
                .await
                .unwrap()
        };
        assert!(!cancel(2).await);
        assert_eq!(cancel(1).await, want);
        assert!(!cancel(1).await);
        let row = store.build_by_id(&id, &build_id(n)).await.unwrap().unwrap();
        let reason = row.reason.map(|reason| reason.message);
        if want {
            assert_eq!((row.status, reason.as_deref()), (BuildStatus::Failed, Some("why")));
        } else {
            assert_ne!(reason.as_deref(), Some("why"));
        }
    }
    store.close().await;
}

pub(crate) async fn removals_are_announced_once(db: Database) {
    let store = db.open().await;
    assert_eq!(store.removal_find("layers/a").await.unwrap(), None);
    assert!(store.removal_begin("layers/a", 1, 100, 0).await.unwrap());
    assert!(!store.removal_begin("layers/a", 2, 101, 100).await.unwrap());
    assert!(store.removal_begin("layers/b", 2, 101, 0).await.unwrap());
    let removal = |id, begun_us, ended_us| Some(Removal { id, begun_us, ended_us });
    assert_eq!(store.removal_find("layers/a").await.unwrap(), removal(1, 100, None));
    // The node that announced it was killed.
    assert!(store.removal_begin("layers/a", 3, 200, 101).await.unwrap());
    // Its end comes too late.
    store.removal_end("layers/a", 1, 201).await.unwrap();
    assert_eq!(store.removal_find("layers/a").await.unwrap(), removal(3, 200, None));
    store.removal_end("layers/a", 3, 202).await.unwrap();
    assert_eq!(
        store.removal_find("layers/a").await.unwrap(),
        removal(3, 200, Some(202))
    );
    assert!(store.removal_begin("layers/a", 4, 203, 0).await.unwrap());
    assert_eq!(store.removal_find("layers/a").await.unwrap(), removal(4, 203, None));
    store.removal_purge(150).await.unwrap();
    assert_eq!(store.removal_find("layers/b").await.unwrap(), None);
    assert_eq!(store.removal_find("layers/a").await.unwrap(), removal(4, 203, None));
    assert!(store.removal_begin("a\0", 1, 1, 0).await.is_err());
    store.close().await;
}
