//! Several servers on one database: nodes 1 and 2 of the samples are the servers, with an owner each, and others are their nodes.

use std::future::{Future as _, poll_fn};
use std::task::Poll;

use model::lifecycle::{Kept, State};
use store::builds::{BuildStatus, FileRow};
use store::error::StoreError;
use store::nodes::{LeaseOutcome, NodeRows};
use store::sandboxes::{Pause, PausedMost, Resumption, TeamMost, TeamShare};
use store::{Change, Store};
use tokio::task::JoinSet;

use crate::database::Database;
use crate::nodes::lease_request;
use crate::samples::{
    FIRST_EPOCH, build, build_id, node_id, sandbox, sandbox_id, team, team_id, template, template_id, uuid,
};

/// The rows of a node of which a server takes the lease, from whoever has it.
pub(crate) async fn taken(store: &Store, node: u32, server: u32) -> NodeRows {
    let mut request = lease_request(node, server, 100);
    request.expired_us = i64::MAX;
    let LeaseOutcome::Acquired { epoch } = store.node_lease_acquire(&request).await.unwrap() else {
        panic!("the lease of node {node} is held");
    };
    store.of_node(node_id(node), epoch)
}

pub(crate) async fn join(store: &Store, node: u32) {
    let token = format!("token {node}");
    store.node_token_insert(&token, 0, i64::MAX).await.unwrap();
    let _ = store.node_join(&token, &node_id(node), "a host", 1).await.unwrap();
}

async fn start(rows: &NodeRows, number: u32) {
    let new = sandbox(number, 1);
    let end_us = new.end_us;
    rows.sandbox_insert_running(new, 5, end_us, "0.6.13").await.unwrap();
}

pub(crate) async fn a_sandbox_leads_to_the_server_of_its_node(db: Database) {
    let store = db.open().await;
    team(&store, 1).await;
    let own = |server: u32| store.of_node(node_id(server), FIRST_EPOCH);
    own(1).server_beat("one", Some("https://one:1"), None, 7).await.unwrap();
    own(2).server_beat("two", None, Some("{}"), 8).await.unwrap();
    let listed = store.server_list().await.unwrap();
    let names: Vec<&str> = listed.iter().map(|server| server.name.as_str()).collect();
    assert_eq!(names, ["one", "two"]);
    assert_eq!((listed[1].room_json.as_deref(), listed[1].seen_us), (Some("{}"), 8));
    assert_eq!(listed[0].lease.as_ref().unwrap().owner, uuid(1).parse().unwrap());

    join(&store, 7).await;
    join(&store, 8).await;
    let rows = taken(&store, 7, 1).await;
    for number in [1, 2] {
        start(&rows, number).await;
    }
    // Operators see where nodes are, and every sandbox of theirs.
    let places = store.node_place_list(50).await.unwrap();
    let [served, alone] = places.as_slice() else {
        panic!("{places:?}");
    };
    let server = served.server.as_ref().unwrap();
    assert_eq!((&served.id, served.name.as_str()), (&node_id(7), "a host"));
    assert_eq!(
        (&server.id, server.name.as_str(), server.address.as_deref()),
        (&node_id(1), "one", Some("https://one:1"))
    );
    assert_eq!((&alone.id, &alone.server), (&node_id(8), &None));
    let late = store.node_place_list(i64::MAX).await.unwrap();
    assert!(late.iter().all(|place| place.server.is_none()), "{late:?}");
    let listed = store.sandbox_list_joined().await.unwrap();
    let ids: Vec<_> = listed.into_iter().map(|row| row.id).collect();
    assert_eq!(ids, [sandbox_id(1), sandbox_id(2)]);
    let route = async || store.sandbox_route(&sandbox_id(1)).await.unwrap().unwrap();
    assert_eq!(
        route().await.server,
        Some((node_id(1), Some("https://one:1".to_owned())))
    );
    assert_eq!(store.sandbox_route(&sandbox_id(9)).await.unwrap(), None);
    // What is on nodes of the first server counts for the second one alone.
    let owner = |server: u32| uuid(server).parse().unwrap();
    assert_eq!(store.use_elsewhere(&owner(1)).await.unwrap(), []);
    let elsewhere = store.use_elsewhere(&owner(2)).await.unwrap();
    assert_eq!(elsewhere.len(), 1);
    assert_eq!((&elsewhere[0].team, elsewhere[0].count), (&team_id(1), 2));
    assert_eq!((elsewhere[0].cpu_count, elsewhere[0].memory_mb), (4, 2048));
    let row = store.sandbox_by_id(&sandbox_id(2)).await.unwrap().unwrap();
    let pausing = rows.sandbox_pausing(&row.id, row.version, Kept::Filesystem, None).await;
    let pausing = pausing.unwrap().applied().unwrap();
    let pause = Pause {
        kept: Kept::Filesystem,
        kept_bytes: 1_048_577,
        paused_us: 9,
        resume_error: None,
    };
    let paused = rows.sandbox_paused(&row.id, pausing.version, pause).await.unwrap();
    assert_eq!(paused.applied().unwrap().state, State::Paused);
    let elsewhere = store.use_elsewhere(&owner(2)).await.unwrap();
    let paused: Vec<_> = elsewhere.iter().filter(|part| part.is_paused).collect();
    assert_eq!(paused.len(), 1);
    assert_eq!(
        (paused[0].count, paused[0].kept, paused[0].paused_disk_mb),
        (1, Some(Kept::Filesystem), 2)
    );

    // Earlier versions have stored whatever a node said.
    let most = Pause {
        kept_bytes: i64::MAX,
        ..pause
    };
    let version = pausing.version + 1;
    let paused = rows.sandbox_paused(&row.id, version, most).await.unwrap();
    assert!(paused.applied().is_some());
    let elsewhere = store.use_elsewhere(&owner(2)).await.unwrap();
    let paused: Vec<_> = elsewhere.iter().filter(|part| part.is_paused).collect();
    assert_eq!(paused[0].paused_disk_mb, 1 << 43);

    // The node goes to the other server, and the first one changes nothing any more.
    let later = taken(&store, 7, 2).await;
    assert_eq!(route().await.server, Some((node_id(2), None)));
    let row = store.sandbox_by_id(&sandbox_id(1)).await.unwrap().unwrap();
    let late = rows.sandbox_pausing(&row.id, row.version, Kept::Filesystem, None).await;
    assert!(!matches!(late, Ok(store::Change::Applied(_))), "{late:?}");
    assert!(
        !store
            .node_lease_renew(&node_id(7), &lease_request(7, 1, 200).lease)
            .await
            .unwrap()
    );
    assert!(
        later
            .sandbox_pausing(&row.id, row.version, Kept::Filesystem, None)
            .await
            .unwrap()
            .applied()
            .is_some()
    );
    // Nobody serves a node whose lease was released.
    assert!(store.node_lease_release(&node_id(7), &owner(2)).await.unwrap());
    assert_eq!(route().await.server, None);
    let nodes = store.served_node_list().await.unwrap();
    assert_eq!(
        nodes.iter().map(|node| node.id.clone()).collect::<Vec<_>>(),
        [node_id(7), node_id(8)]
    );
    assert!(nodes.iter().all(|node| node.lease.is_none()));
    assert!(store.joined_node_forget(&node_id(8), 3).await.unwrap());
    assert_eq!(store.served_node_list().await.unwrap().len(), 1);
}

/// On PostgreSQL servers agree about the time, whatever their clocks say. A file has one, of its process.
pub(crate) async fn the_time_of_leases_is_that_of_the_database(db: Database) {
    let store = db.open().await;
    let time_us = store.lease_time_us(5).await.unwrap();
    if db.file.is_some() {
        assert_eq!(time_us, 5);
        return;
    }
    let own = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap();
    let own_us = i64::try_from(own.as_micros()).unwrap();
    assert!(time_us.abs_diff(own_us) < 60_000_000, "{time_us}");
    store.close().await;
}

pub(crate) async fn servers_that_are_gone_are_forgotten(db: Database) {
    let store = db.open().await;
    team(&store, 1).await;
    let [one, other] = [1, 2].map(|server| store.of_node(node_id(server), FIRST_EPOCH));
    one.server_beat("one", None, None, 10).await.unwrap();
    other.server_beat("two", None, None, 20).await.unwrap();
    for (rows, text) in [(&one, "a"), (&other, "b")] {
        let file = FileRow {
            team_id: team_id(1),
            hash: text.repeat(64),
            bytes: 1,
        };
        rows.template_file_put(&file, 1).await.unwrap();
    }
    store
        .template_insert(&template(1, Some(&team_id(1)), &["a"]))
        .await
        .unwrap();
    let mut built = build(1, 1, BuildStatus::Ready, 1);
    built.node_id = Some(node_id(1));
    store.build_insert(&built).await.unwrap();

    // Neither one that has said something since, nor one whose lease has not ended for as long, nor the one that asks.
    assert_eq!(other.servers_remove(10).await.unwrap(), [""; 0]);
    let mut lease = lease_request(1, 1, 0).lease;
    lease.until_us = 15;
    assert!(store.node_lease_renew(&node_id(1), &lease).await.unwrap());
    assert_eq!(other.servers_remove(15).await.unwrap(), [""; 0]);
    assert_eq!(one.servers_remove(16).await.unwrap(), [""; 0]);
    let late = store.of_node(node_id(2), FIRST_EPOCH + 1);
    let late = late.servers_remove(16).await;
    assert!(matches!(late, Err(StoreError::LeaseLost { .. })), "{late:?}");

    assert_eq!(other.servers_remove(16).await.unwrap(), ["one"]);
    assert_eq!(other.servers_remove(16).await.unwrap(), [""; 0]);
    let listed = store.server_list().await.unwrap();
    assert_eq!(
        listed.iter().map(|server| server.id.clone()).collect::<Vec<_>>(),
        [node_id(2)]
    );
    assert_eq!(store.node_by_id(&node_id(1)).await.unwrap(), None);
    // What it has built can be used, and is another server's.
    let row = store.build_by_id(&template_id(1), &build_id(1)).await.unwrap().unwrap();
    assert_eq!(row.node_id, Some(node_id(2)));
    assert_eq!(one.template_file_total(&team_id(1)).await.unwrap(), 0);
    assert_eq!(other.template_file_total(&team_id(1)).await.unwrap(), 1);
    // It may come back, as another one.
    taken(&store, 1, 1)
        .await
        .server_beat("one", None, None, 30)
        .await
        .unwrap();
    assert_eq!(store.server_list().await.unwrap().len(), 2);
    store.close().await;
}

pub(crate) async fn a_stopped_server_says_nothing(db: Database) {
    let store = db.open().await;
    team(&store, 1).await;
    let own = store.of_node(node_id(1), FIRST_EPOCH);
    own.server_beat("one", None, None, 7).await.unwrap();
    taken(&store, 1, 2).await;
    let late = own.server_beat("one", Some("https://late:1"), None, 9).await;
    assert!(matches!(late, Err(StoreError::LeaseLost { .. })), "{late:?}");
    assert_eq!(store.server_list().await.unwrap()[0].address, None);
}

pub(crate) async fn a_lease_that_was_acquired_meanwhile_is_not_taken(db: Database) {
    let store = db.open().await;
    team(&store, 1).await;
    for (node, before) in [(1, FIRST_EPOCH), (7, 0)] {
        let take = async |server: u32, last_epoch: i64| {
            let mut request = lease_request(node, server, 100);
            request.expired_us = i64::MAX;
            request.last_epoch = Some(last_epoch);
            store.node_lease_acquire(&request).await.unwrap()
        };
        assert_eq!(take(2, before).await, LeaseOutcome::Acquired { epoch: before + 1 });
        // Also not by the one that has it.
        for server in [1, 2] {
            let late = take(server, before).await;
            assert!(
                matches!(&late, LeaseOutcome::Held(row) if row.epoch == before + 1),
                "{late:?}"
            );
        }
        let late = take(1, before + 2).await;
        assert!(matches!(late, LeaseOutcome::Held(_)), "{late:?}");
        assert_eq!(take(1, before + 1).await, LeaseOutcome::Acquired { epoch: before + 2 });
    }
}

/// A server that is stopped in the middle of a transaction, as when its machine is suspended, keeps its connection. On a file of
/// SQLite there is no other server.
pub(crate) async fn a_server_that_is_stopped_in_a_transaction_holds_up_no_other(db: Database) {
    if db.file.is_some() {
        return;
    }
    let (stopped, store) = (db.open().await, db.open().await);
    team(&store, 1).await;
    let (mut raw, mut writes) = (db.raw().await, db.raw().await);
    let insert = async |store: &Store, node: u32| {
        let new = sandbox(node, 1);
        let end_us = new.end_us;
        let rows = store.of_node(node_id(node), FIRST_EPOCH);
        let most = TeamMost::default();
        rows.sandbox_insert_running_within(new, 5, end_us, "0.6.13", most).await
    };
    let mut inserting = Box::pin(insert(&stopped, 1));
    // It goes on until nobody else can acquire its lease, and no further: a single poll may take it through several statements, where
    // the database answers each before it looks, so the one that writes the row has to wait.
    sqlx::query("BEGIN").execute(&mut writes).await.unwrap();
    let hold = sqlx::query("LOCK TABLE sandboxes IN SHARE MODE");
    hold.execute(&mut writes).await.unwrap();
    loop {
        let polled = poll_fn(|cx| Poll::Ready(inserting.as_mut().poll(cx))).await;
        assert!(polled.is_pending(), "{polled:?}");
        let query = sqlx::query("SELECT id FROM nodes WHERE id = $1 FOR UPDATE SKIP LOCKED");
        let free = query.bind(node_id(1).as_str().to_owned()).fetch_all(&mut raw).await;
        if free.unwrap().is_empty() {
            break;
        }
    }
    sqlx::query("COMMIT").execute(&mut writes).await.unwrap();
    // Its lease is renewed meanwhile.
    let lease = lease_request(1, 1, 300).lease;
    assert!(store.node_lease_renew(&node_id(1), &lease).await.unwrap());
    // Others have the team, and its node, once the database has ended the transaction.
    let (other, _) = tokio::join!(insert(&store, 2), taken(&store, 1, 2));
    assert_eq!(other.unwrap().unwrap().id, sandbox_id(2));
    let late = inserting.await;
    assert!(matches!(late, Err(StoreError::Unavailable { .. })), "{late:?}");
    assert_eq!(store.sandbox_by_id(&sandbox_id(1)).await.unwrap(), None);
    stopped.close().await;
    store.close().await;
}

pub(crate) async fn limits_hold_for_all_that_insert_at_the_same_time(db: Database) {
    let store = db.open().await;
    team(&store, 1).await;
    let most = TeamMost {
        sandboxes: Some(5),
        ..TeamMost::default()
    };
    let mut inserting = JoinSet::new();
    for number in 1..=12 {
        let rows = store.of_node(node_id(1 + number % 2), FIRST_EPOCH);
        inserting.spawn(async move {
            let new = sandbox(number, 1);
            let end_us = new.end_us;
            // As a create does it, and as a fork.
            let inserted = if number % 3 == 0 {
                rows.sandbox_insert_within(new, most).await
            } else {
                rows.sandbox_insert_running_within(new, 5, end_us, "0.6.13", most).await
            };
            inserted.unwrap().is_ok()
        });
    }
    let inserted = inserting.join_all().await;
    assert_eq!(inserted.iter().filter(|inserted| **inserted).count(), 5);
    let refuse = async |most: TeamMost| {
        let new = sandbox(50, 1);
        let rows = store.of_node(node_id(1), FIRST_EPOCH);
        let refused = rows.sandbox_insert_running_within(new, 5, 9, "0.6.13", most).await;
        refused.unwrap().unwrap_err()
    };
    let used = refuse(TeamMost {
        cpu_count: Some(11),
        ..TeamMost::default()
    });
    let used = used.await;
    assert_eq!((used.sandboxes, used.cpu_count, used.memory_mb), (5, 10, 5 * 1024));
    refuse(TeamMost {
        memory_mb: Some(6 * 1024 - 1),
        ..TeamMost::default()
    })
    .await;
    // A server that has lost its node is told so, and no limit.
    let late = store.of_node(node_id(1), FIRST_EPOCH + 1);
    let lost = late
        .sandbox_insert_running_within(sandbox(51, 1), 5, 9, "0.6.13", TeamMost::default())
        .await;
    assert!(matches!(lost, Err(StoreError::LeaseLost { .. })), "{lost:?}");
}

pub(crate) async fn limits_hold_for_all_that_are_resumed_at_the_same_time(db: Database) {
    let store = db.open().await;
    team(&store, 1).await;
    let of_node = |store: &Store, number: u32| store.of_node(node_id(1 + number % 2), FIRST_EPOCH);
    let mut paused = Vec::new();
    for number in 1..=6 {
        let rows = of_node(&store, number);
        let row = rows
            .sandbox_insert_running(sandbox(number, 1), 5, 50, "0.6.13")
            .await
            .unwrap();
        let kept = if number == 6 { Kept::Memory } else { Kept::Checkpoint };
        let row = rows.sandbox_pausing(&row.id, row.version, kept, None).await.unwrap();
        let row = row.applied().unwrap();
        let pause = Pause {
            kept,
            kept_bytes: 1,
            paused_us: 9,
            resume_error: None,
        };
        let row = rows.sandbox_paused(&row.id, row.version, pause).await.unwrap();
        paused.push(row.applied().unwrap());
    }
    let resumption = Resumption {
        end_us: 50,
        max_end_us: 60,
        execution_id: uuid(77),
        lifecycle_json: None,
    };
    let whole = TeamShare {
        cpu_count: 2,
        memory_mb: 1024,
    };
    let resume = async |store: &Store, number: usize, share: TeamShare, most: TeamMost| {
        let row = &paused[number - 1];
        let rows = of_node(store, u32::try_from(number).unwrap());
        let one = (&row.id, &row.team_id);
        rows.sandbox_resuming_within(one, row.version, &resumption, share, most)
            .await
    };
    let most = TeamMost {
        sandboxes: Some(2),
        ..TeamMost::default()
    };
    let (one, two, three, four) = tokio::join!(
        resume(&store, 1, whole, most),
        resume(&store, 2, whole, most),
        resume(&store, 3, whole, most),
        resume(&store, 4, whole, most),
    );
    let outcomes = [one, two, three, four].map(Result::unwrap);
    assert_eq!(
        outcomes.iter().filter(|outcome| outcome.is_ok()).count(),
        2,
        "{outcomes:?}"
    );
    for (outcome, before) in outcomes.iter().zip(&paused) {
        let row = store.sandbox_by_id(&before.id).await.unwrap().unwrap();
        match outcome {
            Ok(Change::Applied(applied)) => assert_eq!((&row, row.state), (applied, State::Resuming)),
            Ok(change) => panic!("{change:?}"),
            // Whoever comes once two others are there, and one that is kept in memory.
            Err(used) => {
                assert_eq!(&row, before);
                assert_eq!((used.sandboxes, used.cpu_count, used.memory_mb), (2, 4, 3 * 1024));
            }
        }
    }
    // The memory of the one that is kept in memory counts already, and is not needed again.
    let full = TeamMost {
        memory_mb: Some(3 * 1024),
        ..TeamMost::default()
    };
    resume(&store, 5, whole, full).await.unwrap().unwrap_err();
    let nothing_more = TeamShare { memory_mb: 0, ..whole };
    let has_room = async |share| {
        let rows = of_node(&store, 1);
        rows.team_has_room(&paused[0].team_id, share, full)
            .await
            .unwrap()
            .is_ok()
    };
    assert_eq!((has_room(whole).await, has_room(nothing_more).await), (false, true));
    let resumed = resume(&store, 6, nothing_more, full).await.unwrap().unwrap();
    assert!(matches!(resumed, Change::Applied(_)), "{resumed:?}");
    // Whoever has seen another version is told so, and no limit, and so is a server that has lost its node.
    let late = resume(&store, 6, nothing_more, TeamMost::default())
        .await
        .unwrap()
        .unwrap();
    assert_eq!(late, Change::Stale);
    let lost = store.of_node(node_id(2), FIRST_EPOCH + 1);
    let one = (&paused[4].id, &paused[4].team_id);
    let lost = lost
        .sandbox_resuming_within(one, paused[4].version, &resumption, whole, TeamMost::default())
        .await;
    assert!(matches!(lost, Err(StoreError::LeaseLost { .. })), "{lost:?}");
    store.close().await;
}

pub(crate) async fn limits_hold_for_all_that_are_paused_at_the_same_time(db: Database) {
    let store = db.open().await;
    team(&store, 1).await;
    let of_node = |store: &Store, number: u32| store.of_node(node_id(1 + number % 2), FIRST_EPOCH);
    let mut running = Vec::new();
    for number in 1..=6 {
        let row = of_node(&store, number)
            .sandbox_insert_running(sandbox(number, 1), 5, 50, "0.6.13")
            .await;
        running.push(row.unwrap());
    }
    let pause = async |store: &Store, number: usize, most: PausedMost| {
        let row = &running[number - 1];
        let rows = of_node(store, u32::try_from(number).unwrap());
        rows.sandbox_pausing_within((&row.id, &row.team_id), row.version, Kept::Checkpoint, None, most)
            .await
    };
    let most = PausedMost {
        sandboxes: 2,
        disk_mb: None,
    };
    let (one, two, three, four) = tokio::join!(
        pause(&store, 1, most),
        pause(&store, 2, most),
        pause(&store, 3, most),
        pause(&store, 4, most),
    );
    let outcomes = [one, two, three, four].map(Result::unwrap);
    let mut pausing = Vec::new();
    for (outcome, before) in outcomes.into_iter().zip(&running) {
        let row = store.sandbox_by_id(&before.id).await.unwrap().unwrap();
        match outcome {
            Ok(Change::Applied(applied)) => {
                assert_eq!((&row, row.state), (&applied, State::Pausing));
                pausing.push(applied);
            }
            Ok(change) => panic!("{change:?}"),
            Err(used) => {
                assert_eq!(&row, before);
                assert_eq!((used.sandboxes, used.disk_mb), (2, 0));
            }
        }
    }
    assert_eq!(pausing.len(), 2);
    // What they take on disks, by whole MiB.
    for row in &pausing {
        let done = Pause {
            kept: Kept::Checkpoint,
            kept_bytes: (1 << 20) + 1,
            paused_us: 9,
            resume_error: None,
        };
        let rows = store.of_node(row.node_id.clone().unwrap(), FIRST_EPOCH);
        rows.sandbox_paused(&row.id, row.version, done)
            .await
            .unwrap()
            .applied()
            .unwrap();
    }
    let most = |disk_mb| PausedMost {
        sandboxes: 3,
        disk_mb: Some(disk_mb),
    };
    let used = pause(&store, 5, most(4)).await.unwrap().unwrap_err();
    assert_eq!((used.sandboxes, used.disk_mb), (2, 4));
    let paused = pause(&store, 5, most(5)).await.unwrap().unwrap();
    assert!(matches!(paused, Change::Applied(_)), "{paused:?}");
    // Whoever has seen another version is told so, and no limit, and so is a server that has lost its node.
    let room = PausedMost {
        sandboxes: 100,
        disk_mb: None,
    };
    assert_eq!(pause(&store, 5, room).await.unwrap().unwrap(), Change::Stale);
    let last = &running[5];
    let lost = store.of_node(last.node_id.clone().unwrap(), FIRST_EPOCH + 1);
    let lost = lost
        .sandbox_pausing_within((&last.id, &last.team_id), last.version, Kept::Memory, None, room)
        .await;
    assert!(matches!(lost, Err(StoreError::LeaseLost { .. })), "{lost:?}");
    store.close().await;
}
