//! Pages, filters and counts.

use std::collections::BTreeMap;

use model::lifecycle::State;
use model::lifecycle::row::RowChange;
use store::Store;
use store::sandboxes::{NewSandbox, Order, SandboxFilter, SandboxQuery};

use crate::database::Database;
use crate::samples::{FIRST_EPOCH, node_id, running, sandbox, sandbox_id, team, team_id, template_id};

fn query(filter: SandboxFilter, order: Order, limit: u32) -> SandboxQuery {
    SandboxQuery {
        filter,
        order,
        after: None,
        limit,
    }
}

/// The numbers of the sandboxes on each page, from the first page to the last.
async fn pages(store: &Store, mut query: SandboxQuery) -> Vec<Vec<u32>> {
    let mut pages = Vec::new();
    loop {
        let page = store.sandbox_page(&team_id(1), &query).await.unwrap();
        let numbers = page.rows.iter().map(|row| row.id.as_str()[1..].parse().unwrap());
        pages.push(numbers.collect());
        assert!(pages.len() < 100, "an endless list");
        match page.next {
            None => return pages,
            next => query.after = next,
        }
    }
}

fn labels(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs
        .iter()
        .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
        .collect()
}

pub(crate) async fn pages_cover_the_list_in_both_orders(db: Database) {
    let store = db.open().await;
    team(&store, 1).await;
    team(&store, 2).await;
    // Starts are 1, 1, 1, 2, 2, 2, …: ties are ordered by id.
    for n in 3..12 {
        running(&store, sandbox(n, 1), i64::from(n / 3)).await;
    }
    running(&store, sandbox(50, 2), 2).await;
    let all = [9, 10, 11, 6, 7, 8, 3, 4, 5];
    let reverse: Vec<u32> = all.iter().rev().copied().collect();
    for limit in [1, 2, 3, 4, 8, 9, 10, 100] {
        let chunk = usize::try_from(limit).unwrap();
        let desc = pages(&store, query(SandboxFilter::default(), Order::Desc, limit)).await;
        assert_eq!(
            desc,
            all.chunks(chunk).map(<[u32]>::to_vec).collect::<Vec<_>>(),
            "{limit}"
        );
        let asc = pages(&store, query(SandboxFilter::default(), Order::Asc, limit)).await;
        assert_eq!(
            asc,
            reverse.chunks(chunk).map(<[u32]>::to_vec).collect::<Vec<_>>(),
            "{limit}"
        );
    }
    store.close().await;
}

pub(crate) async fn all_filters_are_applied(db: Database) {
    let store = db.open().await;
    team(&store, 1).await;
    store
        .of_node(node_id(1), FIRST_EPOCH)
        .sandbox_insert(sandbox(1, 1))
        .await
        .unwrap();
    let other = NewSandbox {
        template_id: template_id(2),
        metadata: labels(&[("user", "a&b"), ("env", "prod")]),
        ..sandbox(2, 1)
    };
    running(&store, other, 20).await;
    let labelled = NewSandbox {
        metadata: labels(&[("user", "a&b")]),
        ..sandbox(3, 1)
    };
    running(&store, labelled, 30).await;
    let stopping = running(&store, sandbox(4, 1), 40).await;
    let change = store
        .of_node(node_id(1), FIRST_EPOCH)
        .sandbox_change_state(&stopping.id, stopping.version, RowChange::Stopping)
        .await;
    change.unwrap().applied().unwrap();

    let none = SandboxFilter::default;
    let states = |states: &[State]| SandboxFilter {
        states: states.to_vec(),
        ..none()
    };
    let metadata = |pairs| SandboxFilter {
        metadata: labels(pairs),
        ..none()
    };
    let template = |n| SandboxFilter {
        template: Some(template_id(n)),
        ..none()
    };
    let from = |us| SandboxFilter {
        started_from_us: Some(us),
        ..none()
    };
    let cases: [(SandboxFilter, &[u32], u64); 12] = [
        (none(), &[4, 3, 2, 1], 2),
        (states(&[State::Running]), &[3, 2], 2),
        (states(&[State::Running, State::Stopping]), &[4, 3, 2], 2),
        (states(&[State::Creating]), &[1], 2),
        (states(&[State::Gone]), &[], 2),
        (metadata(&[("user", "a&b")]), &[3, 2], 2),
        (metadata(&[("user", "a&b"), ("env", "prod")]), &[2], 1),
        (metadata(&[("user", "")]), &[], 0),
        (template(2), &[2], 1),
        (template(3), &[], 0),
        (from(30), &[4, 3], 1),
        (
            SandboxFilter {
                states: vec![State::Running],
                metadata: labels(&[("user", "a&b")]),
                template: Some(template_id(1)),
                started_from_us: Some(30),
            },
            &[3],
            1,
        ),
    ];
    for (filter, want, running) in cases {
        let found = pages(&store, query(filter.clone(), Order::Desc, 100)).await;
        assert_eq!(found, [want.to_vec()], "{filter:?}");
        let count = store.sandbox_count_running(&team_id(1), &filter).await.unwrap();
        assert_eq!(count, running, "{filter:?}");
        assert_eq!(store.sandbox_count_running(&team_id(2), &filter).await.unwrap(), 0);
    }
    store.close().await;
}

/// More rows than one scan fetches, with few matching ones.
pub(crate) async fn metadata_is_matched_across_scans(db: Database) {
    let store = db.open().await;
    team(&store, 1).await;
    for n in 0..600 {
        let rare = if n % 150 == 0 { "yes" } else { "no" };
        let new = NewSandbox {
            metadata: labels(&[("rare", rare)]),
            ..sandbox(n, 1)
        };
        running(&store, new, i64::from(n)).await;
    }
    let rare = |value| SandboxFilter {
        metadata: labels(&[("rare", value)]),
        ..SandboxFilter::default()
    };
    let found = pages(&store, query(rare("yes"), Order::Desc, 3)).await;
    assert_eq!(found, [vec![450, 300, 150], vec![0]]);
    let found = pages(&store, query(rare("yes"), Order::Asc, 2)).await;
    assert_eq!(found, [[0, 150], [300, 450]]);
    let found = pages(&store, query(rare("no"), Order::Desc, 100)).await;
    assert_eq!(
        found.iter().map(Vec::len).collect::<Vec<_>>(),
        [100, 100, 100, 100, 100, 96]
    );
    assert_eq!(
        store.sandbox_count_running(&team_id(1), &rare("no")).await.unwrap(),
        596
    );
    assert_eq!(store.sandbox_count_running(&team_id(1), &rare("yes")).await.unwrap(), 4);
    store.close().await;
}

/// The database searches for the text of a label: characters that are special in JSON or SQL must not hide it, and a
/// label inside the value of another label must not match.
pub(crate) async fn labels_with_special_characters_are_matched_exactly(db: Database) {
    let store = db.open().await;
    team(&store, 1).await;
    let texts = [
        "",
        "a",
        "a%",
        "_",
        "'",
        "\"",
        "\\",
        "\n\t\u{1}",
        "é😀",
        "}{:,",
        "\"k\":\"a\"",
    ];
    for (n, text) in (1..).zip(texts) {
        let new = NewSandbox {
            metadata: labels(&[("k", text), ("other", "a")]),
            ..sandbox(n, 1)
        };
        running(&store, new, i64::from(n)).await;
    }
    let mut filters: Vec<(BTreeMap<String, String>, Vec<u32>)> = Vec::new();
    for (n, text) in (1..).zip(texts) {
        filters.push((labels(&[("k", text)]), vec![n]));
        filters.push((labels(&[("k", text), ("other", "b")]), Vec::new()));
    }
    filters.push((labels(&[("other", "a")]), (1..).take(texts.len()).collect()));
    filters.push((labels(&[("k\":\"a", "")]), Vec::new()));
    for (metadata, want) in filters {
        let filter = SandboxFilter {
            metadata,
            ..SandboxFilter::default()
        };
        let found = pages(&store, query(filter.clone(), Order::Asc, 100)).await;
        assert_eq!(found, std::slice::from_ref(&want), "{filter:?}");
        let count = store.sandbox_count_running(&team_id(1), &filter).await.unwrap();
        assert_eq!(count, u64::try_from(want.len()).unwrap(), "{filter:?}");
    }
    store.close().await;
}

pub(crate) async fn pages_are_stable_while_sandboxes_are_created_and_deleted(db: Database) {
    let store = db.open().await;
    team(&store, 1).await;
    for n in 1..=6 {
        running(&store, sandbox(n, 1), i64::from(n)).await;
    }
    let mut query = query(SandboxFilter::default(), Order::Desc, 2);
    let first = store.sandbox_page(&team_id(1), &query).await.unwrap();
    // The sandbox of the cursor is deleted, and a newer one is created.
    store
        .of_node(node_id(1), FIRST_EPOCH)
        .sandbox_delete(&sandbox_id(5))
        .await
        .unwrap();
    running(&store, sandbox(7, 1), 7).await;
    query.after = first.next;
    assert_eq!(pages(&store, query).await, [[4, 3], [2, 1]]);
    store.close().await;
}

pub(crate) async fn live_sandboxes_of_every_team(db: Database) {
    let store = db.open().await;
    team(&store, 1).await;
    team(&store, 2).await;
    let creating = store
        .of_node(node_id(1), FIRST_EPOCH)
        .sandbox_insert(sandbox(1, 1))
        .await
        .unwrap();
    let alive = running(&store, sandbox(2, 2), 9).await;
    let ended = running(&store, sandbox(3, 1), 9).await;
    let gone = store
        .of_node(node_id(1), FIRST_EPOCH)
        .sandbox_change_state(&ended.id, ended.version, RowChange::Gone)
        .await;
    gone.unwrap().applied().unwrap();
    assert_eq!(
        store
            .of_node(node_id(1), FIRST_EPOCH)
            .sandbox_list_live()
            .await
            .unwrap(),
        [creating, alive]
    );
    store.close().await;
}
