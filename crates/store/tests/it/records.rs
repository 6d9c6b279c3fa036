//! Logs and metrics.

use std::collections::BTreeMap;

use model::log::Level;
use store::Store;
use store::records::{LogOrder, LogQuery, LogRow, LogSize, MetricChunk, NewLogEntry, RecordBatch};

use crate::database::Database;
use crate::samples::{FIRST_EPOCH, node_id, running, sandbox, sandbox_id, team, team_id};

/// Entry `n` of sandbox `sandbox` of team `team`, at `n` microseconds.
pub(crate) fn entry(team: u32, sandbox: u32, n: i64) -> NewLogEntry {
    NewLogEntry {
        team_id: team_id(team),
        sandbox_id: sandbox_id(sandbox),
        row: LogRow {
            at_us: n,
            seq: n,
            level: Level::ALL[usize::try_from(n % 4).unwrap()],
            logger: "test".to_owned(),
            message: format!("Entry {n} 100% ü"),
            fields: BTreeMap::from([("n".to_owned(), n.to_string())]),
        },
    }
}

fn everything() -> LogQuery {
    LogQuery {
        from_us: 0,
        to_us: i64::MAX,
        level: Level::Debug,
        search: String::new(),
        order: LogOrder::Forward,
        limit: 100_000,
    }
}

async fn write_log(store: &Store, entries: Vec<NewLogEntry>) -> Vec<LogSize> {
    let batch = RecordBatch {
        entries,
        ..RecordBatch::default()
    };
    store.records_write(&batch).await.unwrap()
}

/// The sequence numbers of the entries that a query returns.
async fn found(store: &Store, team: u32, sandbox: u32, query: LogQuery) -> Vec<i64> {
    let rows = store
        .log_list(&team_id(team), &sandbox_id(sandbox), &query)
        .await
        .unwrap();
    rows.iter().map(|row| row.seq).collect()
}

pub(crate) async fn log_queries_apply_every_filter(db: Database) {
    let store = db.open().await;
    // More entries than one statement inserts, and not a multiple of that.
    write_log(&store, (0..100).map(|n| entry(1, 1, n)).collect()).await;
    let rows = store
        .log_list(&team_id(1), &sandbox_id(1), &everything())
        .await
        .unwrap();
    let want: Vec<LogRow> = (0..100).map(|n| entry(1, 1, n).row).collect();
    assert_eq!(rows, want);

    let check = async |query: LogQuery, want: Vec<i64>| {
        assert_eq!(found(&store, 1, 1, query.clone()).await, want, "{query:?}");
    };
    let ends = LogQuery {
        from_us: 10,
        to_us: 12,
        ..everything()
    };
    check(ends, vec![10, 11, 12]).await;
    let newest = LogQuery {
        order: LogOrder::Backward,
        limit: 3,
        ..everything()
    };
    check(newest, vec![99, 98, 97]).await;
    let none = LogQuery {
        limit: 0,
        ..everything()
    };
    check(none, vec![]).await;
    let serious = LogQuery {
        level: Level::Warn,
        limit: 5,
        ..everything()
    };
    check(serious, vec![2, 3, 6, 7, 10]).await;
    for (search, want) in [
        ("Entry 7", vec![7, 70, 71, 72, 73, 74, 75, 76, 77, 78, 79]),
        ("Entry 7 ", vec![7]),
        // Neither of these is a pattern, and the search is case-sensitive.
        ("Entry 7_", vec![]),
        ("%", (0..100).collect()),
        ("entry 7", vec![]),
        ("ü", (0..100).collect()),
        ("a\0b", vec![]),
    ] {
        let query = LogQuery {
            search: search.to_owned(),
            ..everything()
        };
        check(query, want).await;
    }
    store.close().await;
}

pub(crate) async fn teams_read_only_their_own_records(db: Database) {
    let store = db.open().await;
    let chunk = |team, from_us| MetricChunk {
        team_id: team_id(team),
        sandbox_id: sandbox_id(1),
        from_us,
        to_us: from_us + 10,
        samples: format!("of {team}"),
    };
    // Ids of sandboxes do not repeat in practice; here they do, to show that the team is part of the key.
    let batch = RecordBatch {
        entries: vec![entry(1, 1, 1), entry(2, 1, 2)],
        chunks: vec![chunk(1, 0), chunk(2, 0)],
        ..RecordBatch::default()
    };
    store.records_write(&batch).await.unwrap();
    for (team, entries) in [(1, vec![1]), (2, vec![2]), (3, vec![])] {
        assert_eq!(found(&store, team, 1, everything()).await, entries);
        let chunks = store.metric_list(&team_id(team), &sandbox_id(1), 0, 100).await.unwrap();
        let latest = store.metric_latest(&team_id(team), &sandbox_id(1)).await.unwrap();
        assert_eq!(chunks.first(), latest.as_ref());
        let want: Vec<MetricChunk> = (team < 3).then(|| chunk(team, 0)).into_iter().collect();
        assert_eq!(chunks, want);
    }
    store.close().await;
}

pub(crate) async fn a_batch_written_twice_is_stored_once(db: Database) {
    let store = db.open().await;
    let batch = RecordBatch {
        entries: (0..40).map(|n| entry(1, 1, n)).collect(),
        chunks: vec![MetricChunk {
            team_id: team_id(1),
            sandbox_id: sandbox_id(1),
            from_us: 5,
            to_us: 9,
            samples: "s".to_owned(),
        }],
        ended: vec![(team_id(1), sandbox_id(1), 50)],
        ..RecordBatch::default()
    };
    store.records_write(&batch).await.unwrap();
    store.records_write(&batch).await.unwrap();
    store.close().await;
    // The same after a restart.
    let store = db.open().await;
    assert_eq!(found(&store, 1, 1, everything()).await.len(), 40);
    let chunks = store.metric_list(&team_id(1), &sandbox_id(1), 0, 9).await.unwrap();
    assert_eq!(chunks, batch.chunks);
    store.close().await;
}

pub(crate) async fn the_oldest_entries_of_a_log_are_trimmed(db: Database) {
    let store = db.open().await;
    let size = |entries: u64, bytes| {
        vec![LogSize {
            team_id: team_id(1),
            sandbox_id: sandbox_id(1),
            entries,
            bytes,
        }]
    };
    let bytes: Vec<u64> = (10..30).map(|n| entry(1, 1, n).row.bytes()).collect();
    let each = bytes[0];
    assert!(bytes.iter().all(|bytes| *bytes == each));
    let grown = write_log(&store, (10..20).map(|n| entry(1, 1, n)).collect()).await;
    assert_eq!(grown, size(10, 10 * each));
    write_log(&store, vec![entry(2, 2, 1)]).await;

    // Within both limits.
    store
        .log_trim(&team_id(1), &sandbox_id(1), 10, 10 * each)
        .await
        .unwrap();
    assert_eq!(found(&store, 1, 1, everything()).await.len(), 10);
    // By the number of entries.
    store.log_trim(&team_id(1), &sandbox_id(1), 8, u64::MAX).await.unwrap();
    assert_eq!(found(&store, 1, 1, everything()).await, (12..20).collect::<Vec<_>>());
    // By size: a byte short of six entries keeps five.
    store
        .log_trim(&team_id(1), &sandbox_id(1), 8, 6 * each - 1)
        .await
        .unwrap();
    assert_eq!(found(&store, 1, 1, everything()).await, (15..20).collect::<Vec<_>>());
    let grown = write_log(&store, vec![entry(1, 1, 20)]).await;
    assert_eq!(grown, size(6, 6 * each));
    // An entry that was written twice is counted once, after the next trim at the latest.
    assert_eq!(write_log(&store, vec![entry(1, 1, 20)]).await, size(7, 7 * each));
    store.log_trim(&team_id(1), &sandbox_id(1), 6, u64::MAX).await.unwrap();
    assert_eq!(write_log(&store, vec![entry(1, 1, 21)]).await, size(7, 7 * each));
    assert_eq!(found(&store, 1, 1, everything()).await, (15..22).collect::<Vec<_>>());
    // In more than one slice.
    write_log(&store, (22..1100).map(|n| entry(1, 1, n)).collect()).await;
    store.log_trim(&team_id(1), &sandbox_id(1), 1, u64::MAX).await.unwrap();
    assert_eq!(found(&store, 1, 1, everything()).await, [1099]);
    assert_eq!(found(&store, 2, 2, everything()).await, [1]);
    store.close().await;
}

pub(crate) async fn log_retention_begins_at_the_end_of_the_sandbox(db: Database) {
    let store = db.open().await;
    for (sandbox, ended_us) in [(1, Some(100)), (2, Some(200)), (3, None)] {
        let batch = RecordBatch {
            entries: (0..5).map(|n| entry(1, sandbox, n)).collect(),
            ended: ended_us
                .map(|at_us| (team_id(1), sandbox_id(sandbox), at_us))
                .into_iter()
                .collect(),
            ..RecordBatch::default()
        };
        store.records_write(&batch).await.unwrap();
    }
    let left = async || {
        let mut counts = Vec::new();
        for sandbox in 1..=3 {
            counts.push(found(&store, 1, sandbox, everything()).await.len());
        }
        counts
    };
    assert_eq!(store.log_purge(99, 100).await.unwrap(), 0);
    assert_eq!(left().await, [5, 5, 5]);
    // In slices; the record of the log is removed last.
    assert_eq!(store.log_purge(100, 3).await.unwrap(), 3);
    assert_eq!(left().await, [2, 5, 5]);
    assert_eq!(store.log_purge(100, 3).await.unwrap(), 2);
    assert_eq!(store.log_purge(100, 3).await.unwrap(), 1);
    assert_eq!(store.log_purge(100, 3).await.unwrap(), 0);
    assert_eq!(left().await, [0, 5, 5]);

    // A sandbox whose end was not recorded ends once, when that is noticed; a running one does not.
    team(&store, 1).await;
    running(&store, sandbox(3, 1), 5).await;
    assert_eq!(store.records_end_orphans(300, i64::MAX).await.unwrap(), 0);
    store
        .of_node(node_id(1), FIRST_EPOCH)
        .sandbox_delete(&sandbox_id(3))
        .await
        .unwrap();
    // Not while its log is that of one which may be about to get a row.
    assert_eq!(store.records_end_orphans(300, 3).await.unwrap(), 0);
    assert_eq!(store.records_end_orphans(300, 4).await.unwrap(), 1);
    assert_eq!(store.records_end_orphans(400, i64::MAX).await.unwrap(), 0);
    while store.log_purge(299, 100).await.unwrap() > 0 {}
    assert_eq!(left().await, [0, 0, 5]);
    while store.log_purge(300, 100).await.unwrap() > 0 {}
    assert_eq!(left().await, [0, 0, 0]);
    store.close().await;
}

pub(crate) async fn metrics_are_found_by_overlap_and_purged_by_age(db: Database) {
    let store = db.open().await;
    let chunks: Vec<MetricChunk> = (0..3)
        .map(|n| MetricChunk {
            team_id: team_id(1),
            sandbox_id: sandbox_id(1),
            from_us: n * 100,
            to_us: n * 100 + 50,
            samples: n.to_string(),
        })
        .collect();
    let batch = RecordBatch {
        chunks: chunks.clone(),
        ..RecordBatch::default()
    };
    store.records_write(&batch).await.unwrap();
    for (from_us, to_us, want) in [
        (0, 1000, &chunks[..]),
        (50, 50, &chunks[..1]),
        (51, 99, &[]),
        (50, 100, &chunks[..2]),
        (251, 1000, &[]),
        (250, 1000, &chunks[2..]),
    ] {
        let found = store
            .metric_list(&team_id(1), &sandbox_id(1), from_us, to_us)
            .await
            .unwrap();
        assert_eq!(found, want, "{from_us} to {to_us}");
    }
    let latest = store.metric_latest(&team_id(1), &sandbox_id(1)).await.unwrap();
    assert_eq!(latest.as_ref(), chunks.last());
    assert_eq!(store.metric_purge(49, 10).await.unwrap(), 0);
    assert_eq!(store.metric_purge(150, 1).await.unwrap(), 1);
    let left = store.metric_list(&team_id(1), &sandbox_id(1), 0, 1000).await.unwrap();
    assert_eq!(left, chunks[1..]);
    assert_eq!(store.metric_purge(150, 10).await.unwrap(), 1);
    assert_eq!(store.metric_purge(150, 10).await.unwrap(), 0);
    store.close().await;
}

pub(crate) async fn the_last_metrics_of_all_are_one_read(db: Database) {
    const COUNT: u32 = 200;
    let store = db.open().await;
    for n in [1, 2] {
        team(&store, n).await;
    }
    for n in 1..=COUNT {
        running(&store, sandbox(n, 1 + n % 2), 1).await;
    }
    // One has ended, one is on another node, and one has none.
    let (ended, without) = (COUNT, COUNT - 1);
    store
        .of_node(node_id(1), FIRST_EPOCH)
        .sandbox_delete(&sandbox_id(ended))
        .await
        .unwrap()
        .unwrap();
    let elsewhere = COUNT + 1;
    store
        .of_node(node_id(2), FIRST_EPOCH)
        .sandbox_insert(sandbox(elsewhere, 1 + elsewhere % 2))
        .await
        .unwrap();
    let chunk = |n: u32, team: u32, from_us: i64| MetricChunk {
        team_id: team_id(team),
        sandbox_id: sandbox_id(n),
        from_us,
        to_us: from_us + 50,
        samples: format!("{n} of {team} at {from_us}"),
    };
    let owned = |n: u32, from_us: i64| chunk(n, 1 + n % 2, from_us);
    let with: Vec<u32> = (1..=elsewhere).filter(|n| *n != without).collect();
    let mut chunks: Vec<_> = with
        .iter()
        .flat_map(|n| [100, 300, 200].map(|from_us| owned(*n, from_us)))
        .collect();
    // What another team has of the same id is not the sandbox's.
    chunks.push(chunk(1, 1, 900));
    let batch = RecordBatch {
        chunks,
        ..RecordBatch::default()
    };
    store.records_write(&batch).await.unwrap();
    let read = async |from_us| {
        let mut found = store.metric_latest_of_all(from_us).await.unwrap();
        found.sort_by(|one, other| one.sandbox_id.as_str().cmp(other.sandbox_id.as_str()));
        found
    };
    let want: Vec<_> = (1..without).chain([elsewhere]).map(|n| owned(n, 300)).collect();
    assert_eq!(read(350).await, want);
    assert_eq!(read(351).await, []);
    store.close().await;
}

pub(crate) async fn logs_of_the_sandboxes_that_ended_first_are_evicted(db: Database) {
    let store = db.open().await;
    assert_eq!(store.log_total().await.unwrap(), 0);
    assert_eq!(store.log_evict(500).await.unwrap(), None);
    assert_eq!(store.log_largest().await.unwrap(), None);
    let mut each = 0;
    for (sandbox, ended_us, entries) in [(1, Some(300), 5), (2, Some(100), 700), (3, None, 20), (4, Some(200), 5)] {
        let batch = RecordBatch {
            entries: (0..entries).map(|n| entry(1, sandbox, 1000 + n)).collect(),
            ended: ended_us
                .map(|at_us| (team_id(1), sandbox_id(sandbox), at_us))
                .into_iter()
                .collect(),
            ..RecordBatch::default()
        };
        each = batch.entries[0].row.bytes();
        store.records_write(&batch).await.unwrap();
    }
    assert_eq!(store.log_total().await.unwrap(), 730 * each);
    let largest = store.log_largest().await.unwrap().unwrap();
    assert_eq!((largest.sandbox_id, largest.bytes), (sandbox_id(2), 700 * each));
    // Too long for one transaction: trimmed first, and removed with the next ones that fit.
    assert_eq!(store.log_evict(500).await.unwrap(), Some(700 * each));
    assert!(found(&store, 1, 2, everything()).await.is_empty());
    assert_eq!(found(&store, 1, 4, everything()).await.len(), 5);
    assert_eq!(store.log_evict(5).await.unwrap(), Some(5 * each));
    assert!(found(&store, 1, 4, everything()).await.is_empty());
    assert_eq!(found(&store, 1, 1, everything()).await.len(), 5);
    assert_eq!(store.log_evict(500).await.unwrap(), Some(5 * each));
    // The log of a running sandbox is not evicted.
    assert_eq!(store.log_evict(500).await.unwrap(), None);
    assert_eq!(found(&store, 1, 3, everything()).await.len(), 20);
    assert_eq!(store.log_total().await.unwrap(), 20 * each);
    store.close().await;
}
