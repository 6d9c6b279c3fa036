//! Lifecycle events, webhooks, deliveries and the usage of teams.

use model::event::{EventType, EventTypes};
use model::id::TeamId;
use store::Store;
use store::keys::SealedSecret;
use store::records::{DeliveryLimits, EventQuery, NewEvent, NewTeamUsage, RecordBatch, TeamUsage};
use store::webhooks::{AttemptRow, DeliveryRow, WebhookChange, WebhookRow};

use crate::database::Database;
use crate::samples::{node_id, sandbox_id, team, team_id, uuid};

/// Event `n` of a sandbox with the same number as its team, at `n` microseconds.
fn event(team: u32, n: u32, kind: EventType) -> NewEvent {
    NewEvent {
        id: uuid(n),
        team_id: team_id(team),
        sandbox_id: sandbox_id(team),
        at_us: i64::from(n),
        seq: i64::from(n),
        kind,
        body_json: format!("{{\"n\":{n}}}"),
    }
}

fn webhook(n: u32, team: &TeamId, types: EventTypes) -> WebhookRow {
    WebhookRow {
        id: uuid(1000 + n),
        team_id: team.clone(),
        name: "ä hook".to_owned(),
        url: "https://example.com/".to_owned(),
        enabled: true,
        types,
        secret_sealed: SealedSecret::new("sealed".to_owned()),
        dropped: 0,
        created_us: i64::from(n),
    }
}

async fn write(store: &Store, events: Vec<NewEvent>, delivery_limits: DeliveryLimits) {
    let batch = RecordBatch {
        events,
        delivery_limits,
        ..RecordBatch::default()
    };
    store.records_write(&batch).await.unwrap();
    // Again, as if the result of the commit had been lost.
    store.records_write(&batch).await.unwrap();
}

fn all() -> EventQuery {
    EventQuery {
        sandbox_id: None,
        types: EventTypes::ALL,
        is_ascending: true,
        offset: 0,
        limit: 100,
    }
}

async fn numbers(store: &Store, team: u32, query: EventQuery) -> Vec<u32> {
    let found = store.event_list(&team_id(team), &query).await.unwrap();
    let number = |body: &String| body.trim_matches(|c: char| !c.is_ascii_digit()).parse().unwrap();
    found.iter().map(number).collect()
}

pub(crate) async fn event_queries_apply_every_filter(db: Database) {
    let store = db.open().await;
    let kinds = EventType::ALL.into_iter().cycle();
    let of_one = (0..12).zip(kinds).map(|(n, kind)| event(1, n, kind)).collect();
    write(&store, of_one, DeliveryLimits::default()).await;
    write(&store, vec![event(2, 50, EventType::Killed)], DeliveryLimits::default()).await;
    assert_eq!(numbers(&store, 1, all()).await, (0..12).collect::<Vec<_>>());
    assert_eq!(numbers(&store, 2, all()).await, [50]);
    let newest = EventQuery {
        is_ascending: false,
        offset: 1,
        limit: 2,
        ..all()
    };
    assert_eq!(numbers(&store, 1, newest).await, [10, 9]);
    let some = EventQuery {
        types: [EventType::Created, EventType::Killed].into_iter().collect(),
        sandbox_id: Some(sandbox_id(1)),
        ..all()
    };
    assert_eq!(numbers(&store, 1, some.clone()).await, [0, 5, 6, 11]);
    let descending = EventQuery {
        is_ascending: false,
        ..some
    };
    assert_eq!(numbers(&store, 1, descending).await, [11, 6, 5, 0]);
    let other = EventQuery {
        sandbox_id: Some(sandbox_id(2)),
        ..all()
    };
    assert!(numbers(&store, 1, other).await.is_empty());

    let sizes = store.event_sizes().await.unwrap();
    assert_eq!(sizes[0].team_id, team_id(1));
    assert!(sizes.len() == 2 && sizes[0].bytes > 11 * sizes[1].bytes);
    assert_eq!(store.event_purge(4, 3).await.unwrap(), 3);
    assert_eq!(store.event_purge(4, 100).await.unwrap(), 2);
    assert_eq!(store.event_evict(&team_id(1), 2).await.unwrap(), 2);
    assert_eq!(numbers(&store, 1, all()).await, (7..12).collect::<Vec<_>>());
}

pub(crate) async fn webhooks_are_of_their_team(db: Database) {
    let store = db.open().await;
    let (own, other) = (team(&store, 1).await, team(&store, 2).await);
    let hook = webhook(1, &own, EventTypes::ALL);
    store.webhook_insert(&hook).await.unwrap();
    store
        .webhook_insert(&webhook(2, &other, EventTypes::ALL))
        .await
        .unwrap();
    assert!(
        store
            .webhook_insert(&webhook(3, &team_id(9), EventTypes::ALL))
            .await
            .is_err()
    );
    assert_eq!(store.webhook_list(&own).await.unwrap(), std::slice::from_ref(&hook));
    assert_eq!(store.webhook_count(&own).await.unwrap(), 1);
    assert_eq!(store.webhook_find(&other, &hook.id).await.unwrap(), None);
    let nothing = WebhookChange::default();
    assert_eq!(store.webhook_update(&other, &hook.id, &nothing).await.unwrap(), None);
    assert_eq!(
        store.webhook_update(&own, &hook.id, &nothing).await.unwrap(),
        Some(hook.clone())
    );
    let change = WebhookChange {
        name: Some("another".to_owned()),
        url: Some("https://example.com/2".to_owned()),
        enabled: Some(false),
        types: Some([EventType::Killed].into_iter().collect()),
        secret_sealed: Some(SealedSecret::new("sealed again".to_owned())),
    };
    let changed = store.webhook_update(&own, &hook.id, &change).await.unwrap().unwrap();
    assert_eq!((changed.name.as_str(), changed.enabled), ("another", false));
    assert_eq!(changed.secret_sealed.as_str(), "sealed again");
    assert_eq!(store.webhook_find(&own, &hook.id).await.unwrap(), Some(changed));
    assert!(!store.webhook_delete(&other, &hook.id).await.unwrap());
    assert!(store.webhook_delete(&own, &hook.id).await.unwrap());
    assert!(!store.webhook_delete(&own, &hook.id).await.unwrap());
}

fn attempt(webhook: &str, event: u32, id: u32, next_us: Option<i64>) -> AttemptRow {
    AttemptRow {
        id: uuid(id),
        webhook_id: webhook.to_owned(),
        event_id: uuid(event),
        kind: EventType::Created,
        attempt: 1,
        at_us: i64::from(id),
        duration_us: 5,
        status: next_us.map(|_| 500),
        error: next_us.map(|_| "status".to_owned()),
        next_us,
    }
}

pub(crate) async fn deliveries_are_claimed_once_and_bounded(db: Database) {
    let store = db.open().await;
    let own = team(&store, 1).await;
    let hook = webhook(1, &own, [EventType::Created].into_iter().collect());
    store.webhook_insert(&hook).await.unwrap();
    let limits = DeliveryLimits {
        per_webhook: 3,
        total: 100,
    };
    let events = (0..3).map(|n| event(1, n, EventType::Created)).collect();
    write(&store, events, limits).await;
    write(&store, vec![event(1, 9, EventType::Killed)], limits).await;
    let waiting = store.webhooks_waiting().await.unwrap();
    assert_eq!((waiting.len(), waiting[0].due_us), (1, 0));
    let due = store.deliveries_due(&hook.id, 1, 10).await.unwrap();
    assert_eq!(due.iter().map(|one| one.due_us).collect::<Vec<_>>(), [0, 1]);
    // What does not fit is counted.
    write(&store, vec![event(1, 10, EventType::Created)], limits).await;
    let dropped = store.webhook_find(&own, &hook.id).await.unwrap().unwrap().dropped;
    assert_eq!(dropped, 1);
    let none_of_all = DeliveryLimits {
        per_webhook: 100,
        total: 3,
    };
    write(&store, vec![event(1, 11, EventType::Created)], none_of_all).await;
    assert_eq!(store.deliveries_due(&hook.id, 100, 10).await.unwrap().len(), 3);

    // Of several claims of what was read together, one succeeds.
    let first = &due[0];
    let mut won = 0;
    for n in 0..5 {
        won += u32::from(
            store
                .delivery_claim(&hook.id, first, &uuid(100 + n), &node_id(1), 500)
                .await
                .unwrap(),
        );
    }
    assert_eq!(won, 1);
    let shipment = store
        .delivery_shipment(&hook.id, &first.event_id)
        .await
        .unwrap()
        .unwrap();
    assert_eq!(
        (shipment.kind, shipment.body_json.as_str()),
        (EventType::Created, "{\"n\":0}")
    );
    // A claim that is over says nothing any more.
    store.delivery_finish(&attempt(&hook.id, 0, 101, None)).await.unwrap();
    assert_eq!(store.deliveries_due(&hook.id, 500, 10).await.unwrap().len(), 3);
    store
        .delivery_finish(&attempt(&hook.id, 0, 100, Some(700)))
        .await
        .unwrap();
    let again = store.deliveries_due(&hook.id, 700, 10).await.unwrap().pop().unwrap();
    let want = DeliveryRow {
        event_id: uuid(0),
        due_us: 700,
        attempts: 1,
    };
    assert_eq!(again, want);
    assert!(
        store
            .delivery_claim(&hook.id, &again, &uuid(200), &node_id(1), 900)
            .await
            .unwrap()
    );
    store
        .delivery_release(&uuid(201), (&hook.id, &uuid(0)), 1)
        .await
        .unwrap();
    assert_eq!(store.deliveries_due(&hook.id, 800, 10).await.unwrap().len(), 2);
    store
        .delivery_release(&uuid(200), (&hook.id, &uuid(0)), 800)
        .await
        .unwrap();
    let again = store.deliveries_due(&hook.id, 800, 10).await.unwrap().pop().unwrap();
    assert!(
        store
            .delivery_claim(&hook.id, &again, &uuid(202), &node_id(1), 1000)
            .await
            .unwrap()
    );
    // The next process of a node takes over what the one before was sending.
    assert_eq!(store.deliveries_recover(&node_id(2), 5).await.unwrap(), 0);
    assert_eq!(store.deliveries_recover(&node_id(1), 5).await.unwrap(), 1);
    let again = DeliveryRow {
        event_id: uuid(0),
        due_us: 5,
        attempts: 1,
    };
    assert!(store.deliveries_due(&hook.id, 5, 10).await.unwrap().contains(&again));
    assert!(
        store
            .delivery_claim(&hook.id, &again, &uuid(202), &node_id(1), 1000)
            .await
            .unwrap()
    );
    store.delivery_finish(&attempt(&hook.id, 0, 202, None)).await.unwrap();
    assert_eq!(store.deliveries_due(&hook.id, 2000, 10).await.unwrap().len(), 2);
    store.delivery_drop(&hook.id, &uuid(1)).await.unwrap();

    let log = store.attempt_list(&hook.id, 0, 10).await.unwrap();
    assert_eq!(log.iter().map(|one| one.at_us).collect::<Vec<_>>(), [202, 101, 100]);
    assert_eq!((log[2].status, log[2].error.as_deref()), (Some(500), Some("status")));
    assert_eq!(store.attempt_list(&hook.id, 1, 1).await.unwrap(), log[1..2]);
    assert_eq!(store.attempt_purge(100, 10, 10).await.unwrap(), 1);
    assert_eq!(store.attempt_purge(0, 1, 10).await.unwrap(), 1);
    assert_eq!(store.attempt_list(&hook.id, 0, 10).await.unwrap(), log[..1]);

    // Without its event or webhook there is nothing to send.
    store.event_purge(2, 10).await.unwrap();
    assert_eq!(store.delivery_shipment(&hook.id, &uuid(2)).await.unwrap(), None);
    assert!(store.webhook_delete(&own, &hook.id).await.unwrap());
    assert!(store.webhooks_waiting().await.unwrap().is_empty());
}

pub(crate) async fn usage_of_several_nodes_is_added_up(db: Database) {
    let store = db.open().await;
    let usage = |at_us: i64, node: &str, process: &str, sandboxes: u32, starts: u32| NewTeamUsage {
        team_id: team_id(1),
        at_us,
        node_id: node.to_owned(),
        process: process.to_owned(),
        sandboxes,
        starts,
    };
    let batch = RecordBatch {
        usage: vec![
            usage(60, "a", "1", 5, 2),
            // The process after it, in the same minute.
            usage(60, "a", "2", 4, 1),
            usage(60, "b", "3", 7, 0),
            usage(120, "a", "2", 1, 0),
        ],
        ..RecordBatch::default()
    };
    store.records_write(&batch).await.unwrap();
    store.records_write(&batch).await.unwrap();
    let minute = |at_us, sandboxes, starts| TeamUsage {
        at_us,
        sandboxes,
        starts,
    };
    let found = store.team_usage(&team_id(1), 0, 1000).await.unwrap();
    assert_eq!(found, [minute(60, 12, 3), minute(120, 1, 0)]);
    assert_eq!(store.team_usage(&team_id(1), 61, 120).await.unwrap(), found[1..]);
    assert!(store.team_usage(&team_id(2), 0, 1000).await.unwrap().is_empty());
    assert_eq!(store.team_usage_purge(60, 2).await.unwrap(), 2);
    assert_eq!(store.team_usage_purge(60, 2).await.unwrap(), 1);
    assert_eq!(store.team_usage(&team_id(1), 0, 1000).await.unwrap(), found[1..]);
}
